"""Storage of queries and keys: in memory up to a budget, and beyond it in files, if a folder is given."""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from ....support._numbers import size as in_bytes


def release_freed() -> None:
    """Return freed memory to the system: after a text was read glibc keeps up to 300 MB of it."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries have none
        if trim is not None:
            trim(0)


class KeptTensors:
    """Copies of tensors, in memory up to ``budget`` bytes (None: no limit), then memory-mapped files in ``folder``.

    The files have no name once they are mapped, so nothing remains when the process is killed; their space is freed
    with the tensors. Systems that do not allow this get a folder of files, deleted by `close`. ``calls``: the number of
    calls, for an error message with the size of all of them.
    """

    def __init__(self, budget: int | None = None, folder: str | Path | None = None, calls: int = 0) -> None:
        if budget is not None and budget < 0:
            raise ValueError(f"budget must be at least 0 bytes, got {budget}")
        self.budget, self.used, self.on_disk = budget, 0, 0
        self._folder = None if folder is None else Path(folder)
        self._named = None
        if self._folder is not None and os.name != "posix":
            self._named = tempfile.TemporaryDirectory(prefix="saccade-", dir=folder, ignore_cleanup_errors=True)
            self._folder = Path(self._named.name)
        self._done, self._calls = 0, calls

    def take(self, *tensors: Tensor) -> list[Tensor]:
        """Contiguous copies of the ``tensors`` of a call, on the CPU, without a graph.

        Raises:
            ValueError: the budget is too small and there is no folder, or its disk is full.
        """
        self._done += 1
        needed = self.used + sum(map(_bytes, tensors))
        if self.budget is not None and self._folder is None and needed > self.budget:
            whole = needed / self._done * max(self._done, self._calls)
            raise ValueError(
                f"budget: this text needs about {in_bytes(whole)} for its queries and keys, and the budget has "
                f"{in_bytes(self.budget)} left; raise the budget, or pass a folder for the rest"
            )
        return [self._kept(tensor) for tensor in tensors]

    def _kept(self, tensor: Tensor) -> Tensor:
        if self.budget is not None and self.used + _bytes(tensor) > self.budget:
            return self._mapped(tensor)
        self.used += _bytes(tensor)
        return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)

    def _mapped(self, tensor: Tensor) -> Tensor:
        assert self._folder is not None
        path = _reserved(self._folder, _bytes(tensor))
        try:
            kept = torch.from_file(str(path), shared=True, size=tensor.numel(), dtype=tensor.dtype).view(tensor.shape)
        finally:
            if self._named is None:
                path.unlink()
        self.on_disk += _bytes(tensor)
        return kept.copy_(tensor.detach())

    def close(self) -> None:
        """Delete the files with names."""
        if self._named is not None:
            self._named.cleanup()


def _reserved(folder: Path, size: int) -> Path:
    """A file with reserved space: writing to mapped memory on a full disk would end the process."""
    path = None
    try:
        number, name = tempfile.mkstemp(prefix="saccade-", suffix=".bin", dir=folder)
        path = Path(name)
        with open(number, "wb") as file:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(number, 0, max(size, 1))
            else:
                file.truncate(size)
        return path
    except OSError as error:
        if path is not None:
            path.unlink()
        raise ValueError(
            f"folder: no room for {in_bytes(size)} more in {folder} ({error.strerror}); choose a folder on a larger "
            "disk, a shorter text or a larger budget"
        ) from error


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
