"""Faults in FlexAttention and its masks."""

from __future__ import annotations

from ..fault import Fault

FLEX, BLOCKS = "src/saccade/operator/_flex_attention.py", "src/saccade/operator/_block_masks.py"
FUNCTIONS, TABLE = "src/saccade/operator/_mask_functions.py", "src/saccade/operator/_masks/_block_table.py"
HOOK = "src/saccade/interception/_hooks/_exchanged.py"
CALLS, MASKS = "tests/programs/test_flex_attention.py", "tests/programs/test_block_masks.py"

FAULTS = (
    Fault(
        "flex-placement",
        FLEX,
        "bias = bias.at(0)",
        "bias = bias",
        (CALLS,),
        "q_idx counts from the bottom right, as in Saccade's own masks.",
    ),
    Fault(
        "flex-max-scores",
        FLEX,
        "rows.lse + torch.log(rows.largest)",
        "rows.lse",
        (CALLS,),
        "The lse is given as the greatest score.",
    ),
    Fault(
        "flex-mask-placement",
        FUNCTIONS,
        "return mask if lengths[0] == lengths[1] else mask.at(0)",
        "return mask",
        (MASKS,),
        "q_idx of a mask function counts from the bottom right.",
    ),
    Fault(
        "flex-full-blocks",
        BLOCKS,
        "return shown | (asked if blocks is None else blocks & asked)",
        "return asked if blocks is None else blocks & asked",
        (MASKS,),
        "Full blocks are hidden.",
    ),
    Fault(
        "flex-blocks-listed",
        BLOCKS,
        "used = np.arange(places.shape[3]) < counts",
        "used = np.arange(places.shape[3]) <= counts",
        (MASKS,),
        "One block too many is read from each list.",
    ),
    Fault(
        "flex-proof-of-empty-blocks",
        BLOCKS,
        "unknown = np.argwhere((wanted >= 0) & (sure < 0))",
        "unknown = np.argwhere((wanted > 0) & (sure < 0))",
        (MASKS,),
        "Blocks that are left out are not compared with the function.",
    ),
    Fault(
        "flex-remembered",
        BLOCKS,
        "        function.value,\n",
        "",
        (MASKS,),
        "A mask is kept though a captured tensor has changed.",
    ),
    Fault(
        "flex-block-sides",
        TABLE,
        "down, across = row // self.size[0], key // self.size[1]",
        "down, across = row // self.size[1], key // self.size[0]",
        (MASKS,),
        "The sides of a block are exchanged.",
    ),
    Fault(
        "flex-code-put-back",
        HOOK,
        "                function.__code__ = before\n",
        "                pass\n",
        ("tests/hooks/test_flex_replaced.py",),
        "PyTorch's function keeps the code of the block.",
    ),
)
