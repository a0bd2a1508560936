"""How `saccade.verify` opens models (`hf:DIR_OR_ID`), and calls the models of `saccade.models`.

`saccade` registers it for `verification`, which imports neither models nor inspection.
"""

from ._checkpoints import load as load, size_of_weights as size_of_weights
from ._inside import first_parting as first_parting, inside as inside
from ._models import inner_of as inner_of, is_text_model as is_text_model, text_subject as text_subject
from ._stacks import (
    StackParts as StackParts,
    stack_parts as stack_parts,
    tokenizer_batch as tokenizer_batch,
    trainer_parts as trainer_parts,
)
