"""Token ids, masks and indices as users give them: as NumPy arrays, or an error with a name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..arguments import as_device, check_data, check_iterable

Array = np.ndarray
Integers = Sequence[Any] | Tensor | Array
"""Nested lists of integers, a tensor or an array."""

_INT64_MAX = np.iinfo(np.int64).max


@dataclass(frozen=True)
class Ragged:
    """Sequences of any lengths, one after another.

    Attributes:
        ids: int64 [T], the tokens.
        lengths: int64 [M], of each sequence.
    """

    ids: Array
    lengths: Array

    @classmethod
    def of_sequences(cls, sequences: Sequence[Integers]) -> Ragged:
        """From one 1-D integer sequence each."""
        check_iterable("sequences", sequences, "token sequences")
        parts = [integers(f"sequence {index}", part, 1) for index, part in enumerate(sequences)]
        lengths = np.array([part.size for part in parts], dtype=np.int64)
        return cls(np.concatenate(parts) if parts else np.empty(0, np.int64), lengths)

    @classmethod
    def of_padded(cls, input_ids: Integers, attention_mask: Any | None) -> Ragged:
        """From the rows of [B, S], without the tokens that the mask [B, S] leaves out."""
        ids = integers("input_ids", input_ids, 2)
        if attention_mask is None:
            return cls(ids.reshape(-1), np.full(ids.shape[0], ids.shape[1], dtype=np.int64))
        kept = flags("attention_mask", attention_mask, ids.shape)
        return cls(ids[kept], kept.sum(1, dtype=np.int64))

    @classmethod
    def of_offsets(cls, input_ids: Integers, cu_seqlens: Integers) -> Ragged:
        """From tokens [T] and the offsets [M + 1] at which sequences start and the last ends."""
        ids = integers("input_ids", input_ids, 1)
        offsets = integers("cu_seqlens", cu_seqlens, 1)
        lengths = np.diff(offsets)
        ends = (offsets[0], offsets[-1]) if offsets.size else None
        if ends != (0, ids.size) or (lengths < 0).any():
            raise ValueError(
                f"cu_seqlens must ascend from 0 to the {ids.size} tokens of input_ids, got "
                f"{_shortened(offsets)}"
            )
        return cls(ids, lengths)


def integers(name: str, values: Integers, ndim: int | tuple[int, int]) -> Array:
    """`values` as an int64 array of `ndim` dimensions (either of two), or an error with `name`.

    Raises:
        TypeError: they are not integers of at most 64 bits.
        ValueError: another number of dimensions, or an unsigned value above 2^63 - 1.
    """
    if isinstance(values, Tensor):
        check_data(name, values)
        dtype: torch.dtype | np.dtype = values.dtype
        real = not (values.is_floating_point() or values.is_complex())
        array = values.detach().cpu().numpy() if real else np.empty(values.shape)
    else:
        try:
            array = np.asarray(values)
        except ValueError as error:
            raise ValueError(f"{name} must be rectangular: {error}") from None
        dtype = array.dtype
    allowed = (ndim,) if isinstance(ndim, int) else ndim
    if array.ndim not in allowed:
        count = " or ".join({1: "one", 2: "two"}[n] for n in allowed)
        raise ValueError(
            f"{name} must have {count} dimension{'s' if allowed != (1,) else ''}, its shape is "
            f"{array.shape}"
        )
    if array.size == 0:
        return np.empty(array.shape, dtype=np.int64)
    if array.dtype.kind not in "iu":
        # NumPy makes a float or object array of Python integers that are too large for it.
        raise TypeError(f"{name} must be of integers of at most 64 bits, not {dtype}")
    if array.dtype == np.uint64 and array.max() > _INT64_MAX:
        raise ValueError(f"{name} has ids above {_INT64_MAX}")
    return array.astype(np.int64)


def flags(name: str, values: Any, shape: tuple[int, ...]) -> Array:
    """`values` as a bool array of `shape`; accepts booleans and the numbers 0 and 1.

    Raises:
        ValueError: another shape, or other values.
    """
    if isinstance(values, Tensor):
        check_data(name, values)
        array = values.detach().cpu().numpy()
    else:
        array = np.asarray(values)
    if array.shape != shape:
        raise ValueError(f"{name} must have shape {shape}, its shape is {array.shape}")
    kept = array == 1
    if not (kept | (array == 0)).all():
        raise ValueError(f"{name} must be boolean, or of 0 and 1 only")
    return kept


def limits(share_lengths: Integers | None, lengths: Array) -> Array:
    """How many tokens of each sequence may be shared: int64 [M], at most its length.

    Raises:
        ValueError: not one limit a sequence, or a negative one.
    """
    if share_lengths is None:
        return lengths
    given = integers("share_lengths", share_lengths, 1)
    if given.size != lengths.size:
        raise ValueError(
            f"share_lengths must have one number for each of the {lengths.size} sequences, "
            f"got {given.size}"
        )
    if (given < 0).any():
        raise ValueError(f"share_lengths must not be negative, got {_shortened(given)}")
    return np.minimum(given, lengths)


def device_of(device: torch.device | str | None, *values: Any) -> torch.device:
    """`device` if there is one, else that of the first tensor among `values`, else the CPU."""
    if device is not None:
        return as_device(device)
    return next((v.device for v in values if isinstance(v, Tensor)), torch.device("cpu"))


def _shortened(values: Array) -> str:
    shown = ", ".join(map(str, values[:8].tolist()))
    return f"[{shown}, ...]" if values.size > 8 else f"[{shown}]"
