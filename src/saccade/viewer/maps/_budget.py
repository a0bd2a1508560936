"""Where queries and keys are kept: in memory up to a budget, and in files beyond it where a folder is given."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from ..._numbers import size as in_bytes


class KeptTensors:
    """Copies of tensors, in memory up to ``budget`` bytes (None: no limit), then memory-mapped files in ``folder``.

    The files have no name once they are opened, or are deleted with this object where the system needs one.
    ``calls``: how many there will be, for a message that says what they all need.
    """

    def __init__(self, budget: int | None = None, folder: str | Path | None = None, calls: int = 0) -> None:
        if budget is not None and budget < 0:
            raise ValueError(f"budget must be at least 0 bytes, got {budget}")
        self.budget, self.used, self.on_disk = budget, 0, 0
        self._files = None if folder is None else tempfile.TemporaryDirectory(prefix="saccade-", dir=folder)
        self._mapped_ones = self._done = 0
        self._calls = calls

    def take(self, *tensors: Tensor) -> list[Tensor]:
        """Contiguous copies of the ``tensors`` of a call, on the CPU, without a graph.

        Raises:
            ValueError: the budget does not hold them and there is no folder, or its disk is full.
        """
        self._done += 1
        needed = self.used + sum(map(_bytes, tensors))
        if self.budget is not None and self._files is None and needed > self.budget:
            whole = needed / self._done * max(self._done, self._calls)
            raise ValueError(
                f"budget: about {in_bytes(whole)} are needed for the queries and keys of this text, and the budget has "
                f"{in_bytes(self.budget)} left; raise the budget, or give a folder for the rest"
            )
        return [self._kept(tensor) for tensor in tensors]

    def _kept(self, tensor: Tensor) -> Tensor:
        if self.budget is not None and self.used + _bytes(tensor) > self.budget:
            return self._mapped(tensor)
        self.used += _bytes(tensor)
        return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)

    def _mapped(self, tensor: Tensor) -> Tensor:
        assert self._files is not None
        path = Path(self._files.name) / f"{self._mapped_ones}.bin"
        _reserve(path, _bytes(tensor))
        self._mapped_ones += 1
        self.on_disk += _bytes(tensor)
        kept = torch.from_file(str(path), shared=True, size=tensor.numel(), dtype=tensor.dtype).view(tensor.shape)
        if os.name == "posix":
            path.unlink()  # mapped it stays: even a process that is killed leaves nothing behind
        return kept.copy_(tensor.detach())

    def close(self) -> None:
        """Delete the files."""
        if self._files is not None:
            self._files.cleanup()


def _reserve(path: Path, size: int) -> None:
    """Take the space: a disk that is full when mapped memory is written to ends the process."""
    try:
        with path.open("wb") as file:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, max(size, 1))
            else:
                file.truncate(size)
    except OSError as error:
        raise ValueError(
            f"folder: no room for {in_bytes(size)} more in {path.parent.parent} ({error.strerror}); choose a folder on "
            "a larger disk, a shorter text or a larger budget"
        ) from error


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
