"""Whether tensors still hold what they held: when a result that was made of them may be kept."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor


class Snapshot:
    """The state of some tensors at one time; holds on to the tensors."""

    def __init__(self, tensors: Iterable[Tensor | None]) -> None:
        self._tensors = tuple(tensor for tensor in tensors if tensor is not None)
        self._versions = self._read()

    def is_current(self, tensors: Iterable[Tensor] | None = None) -> bool:
        """Whether no tensor was written to since, and, if given, whether it was of these tensors.

        Tensors made in inference mode do not count what is written to them: never.
        """
        if self._versions is None or self._versions != self._read():
            return False
        if tensors is None:
            return True
        given = tuple(tensors)
        return len(given) == len(self._tensors) and all(
            one is other for one, other in zip(given, self._tensors, strict=True)
        )

    def _read(self) -> tuple[int, ...] | None:
        if any(tensor.is_inference() for tensor in self._tensors):
            return None
        return tuple(tensor._version for tensor in self._tensors)
