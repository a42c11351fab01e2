"""Per-trajectory values, laid onto the pack: several trajectories meet in a shared token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from ..arguments import check_data, check_iterable, check_tensor
from .indexing import add_at, take

Reduction = Literal["sum", "mean", "first", "equal"]


def flatten_values(
    values: Tensor | Sequence[Tensor | float], lengths: Sequence[int], device: torch.device
) -> Tensor:
    """Values of all trajectories one after another, [T, ...].

    Args:
        values: one tensor [T, ...], or for each trajectory a tensor [its length, ...] or a number
            for all its tokens.
        lengths: of the trajectories.
        device: of the result where no value is a tensor.

    Raises:
        ValueError: these do not fit the lengths.
    """
    total = sum(lengths)
    if isinstance(values, Tensor):
        check_tensor("values", values)
        if values.ndim == 0 or values.shape[0] != total:
            raise ValueError(
                f"values must have one entry for each of the trajectories' {total} tokens, its "
                f"shape is {tuple(values.shape)}; one number a trajectory is values.tolist() or "
                "values.unbind(), a padded batch is values[attention_mask]"
            )
        return values
    check_iterable("values", values, "tensors or numbers")
    if len(values) != len(lengths):
        raise ValueError(f"values are of {len(values)} trajectories, the tree has {len(lengths)}")
    device = next((value.device for value in values if isinstance(value, Tensor)), device)
    parts = []
    for index, (value, length) in enumerate(zip(values, lengths, strict=True)):
        part = torch.as_tensor(value, device=device)
        if part.ndim == 0:
            part = part.expand(length)
        elif part.shape[0] != length:
            raise ValueError(
                f"trajectory {index} has {length} tokens, its values {part.shape[0]} entries"
            )
        parts.append(part)
    return torch.cat(parts) if parts else torch.empty(0, device=device)


def scatter_values(
    values: Tensor,
    positions: Tensor,
    multiplicity: Tensor,
    lengths: Sequence[int],
    reduction: Reduction,
    tolerance: float,
) -> Tensor:
    """Reduce `values` [T, ...] at pack `positions` [T] to [N, ...]; see PrefixTree.scatter."""
    size = multiplicity.numel()
    positions, multiplicity = positions.to(values.device), multiplicity.to(values.device)
    if reduction in ("sum", "mean"):
        if values.dtype == torch.bool:
            values = values.long()
        total = add_at(size, positions, values)
        if reduction == "sum":
            return total
        if not values.is_floating_point():
            raise TypeError(f"the mean of {values.dtype} is not defined: convert values first")
        count = multiplicity.clamp(min=1).view(-1, *(1,) * (values.ndim - 1))
        return total / count.to(values.dtype)
    if reduction not in ("first", "equal"):
        raise ValueError(f"reduction must be 'sum', 'mean', 'first' or 'equal', got {reduction!r}")
    if reduction == "equal":
        check_data("values", values)
    index = torch.arange(positions.numel(), device=values.device)
    first = torch.full((size,), positions.numel(), dtype=torch.int64, device=values.device)
    first.scatter_reduce_(0, positions, index, "amin")
    # Tokens of no trajectory read the zero at the end.
    result = take(torch.cat([values, values.new_zeros(1, *values.shape[1:])]), first)
    if reduction == "equal":
        shared = result.detach()[positions]
        _check_equal(values.detach(), shared, first[positions], lengths, tolerance)
    return result


def _check_equal(
    values: Tensor, shared: Tensor, first: Tensor, lengths: Sequence[int], tolerance: float
) -> None:
    if values.is_floating_point() or values.is_complex():
        same = torch.isclose(values, shared, rtol=0.0, atol=tolerance, equal_nan=True)
    else:
        same = values == shared
    wrong = torch.nonzero(~same.flatten(1).all(1) if same.ndim > 1 else ~same)
    if wrong.numel():
        at = int(wrong[0])
        (row, token), (other, _) = (_place(i, lengths) for i in (at, int(first[at])))
        raise ValueError(
            f"trajectories {other} and {row} share token {token} but not its value: "
            f"{shared[at].tolist()} and {values[at].tolist()}"
        )


def _place(index: int, lengths: Sequence[int]) -> tuple[int, int]:
    """The (trajectory, token) of an entry of [T, ...]."""
    for row, length in enumerate(lengths):
        if index < length:
            return row, index
        index -= length
    raise IndexError(index)
