"""The base of modes that see every operation of a call."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class EagerOperations(TorchDispatchMode):
    """A dispatch mode of eager calls. PyTorch hides others from its compiler, and imports that for it, which takes
    two seconds."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
