"""The ops on DTensors: batch and heads may be sharded, everything else is replicated.

A rule is registered for each op and ``DTensor`` (``torch.library.register_torch_dispatch``), which
brings the operands to placements that fit each other, runs the op on the local tensors and wraps
the results. A strategy of ``register_sharding`` sees one mesh dimension at a time; a rule can
require that the heads of queries and keys are cut at the same places over all mesh dimensions, and
takes a mask of plain tensors, the same on all ranks, beside operands that are DTensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from ..layout import empty_like_layout
from ..ops import NAMESPACE

BATCH, HEADS = 0, 1
"""Dimensions of operands and block lists that can be sharded."""

_ATTENTION = torch.ops.tree_attn_op.tree_attention.default
_BACKWARD = torch.ops.tree_attn_op.tree_attention_backward.default
_BLOCK_LISTS = torch.ops.tree_attn_op.block_lists.default

_PER_QUERY = ("query", "out", "lse", "grad_out", "grad_lse")
_PER_KEY = ("key", "value")
_VALUES = ("q_vals", "k_vals")


class Sharding:
    """What each dimension of a mesh shards: BATCH, HEADS or nothing (None).

    Taken from the placements of the first operand that has any, as far as all operands can follow:

    - heads are sharded if the shards of key heads are equal, so that each rank holds the query
      heads of its key heads and no others; or if there is one key head, which all ranks then hold;
    - the batch is sharded however it divides;
    - other placements (a sharded sequence or head dim, partial sums) are replicated.
    """

    def __init__(self, mesh: DeviceMesh, operands: Mapping[str, DTensor]) -> None:
        self.mesh = mesh
        query, key = operands["query"], operands["key"]
        self.one_key_head = key.shape[HEADS] == 1
        divided = query.shape[HEADS] if self.one_key_head else key.shape[HEADS]
        parts = 1
        axes: list[int | None] = []
        for dim in range(mesh.ndim):
            axis = _asked_for(operands, dim)
            if axis == HEADS:
                if divided % (parts * mesh.size(dim)):
                    axis = None
                else:
                    parts *= mesh.size(dim)
            axes.append(axis)
        self.axes = tuple(axes)

    def of_query(self) -> list[Placement]:
        """Of the query and all that has its heads."""
        return [Replicate() if axis is None else Shard(axis) for axis in self.axes]

    def of_key(self, gradient: bool = False) -> list[Placement]:
        """Of key and value, or of their gradients."""
        if not self.one_key_head:
            return self.of_query()
        of_heads: Placement = Partial() if gradient else Replicate()
        return [of_heads if axis == HEADS else one for axis, one in self._with_axes()]

    def of_values(self, values: Tensor) -> list[Placement]:
        """Of ``q_vals`` or ``k_vals``: follows the batch, if it has one."""
        return self._of_mask(BATCH if values.shape[0] != 1 else None)

    def of_lists(self, lists: Tensor) -> list[Placement]:
        """Of a block list: follows batch and heads where it has them."""
        return self._of_mask(*(dim for dim in (BATCH, HEADS) if lists.shape[dim] != 1))

    def _of_mask(self, *dims: int | None) -> list[Placement]:
        return [one if axis in dims else Replicate() for axis, one in self._with_axes()]

    def _with_axes(self) -> list[tuple[int | None, Placement]]:
        return list(zip(self.axes, self.of_query(), strict=True))

    def localised(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments with each tensor brought to its placements, as local tensors."""
        local = dict(arguments)
        for name, given in arguments.items():
            if not isinstance(given, Tensor):
                continue
            if name in _PER_QUERY:
                placements = self.of_query()
            elif name in _PER_KEY:
                placements = self.of_key()
            elif name in _VALUES:
                placements = self.of_values(given)
            else:
                placements = self.of_lists(given)
            local[name] = _localised(given, self.mesh, placements)
        return local

    def wrapped(self, local: Tensor, placements: list[Placement], like: Tensor) -> DTensor:
        """A result as a DTensor of the shape and the strides of ``like``."""
        return DTensor.from_local(
            local,
            self.mesh,
            placements,
            run_check=False,
            shape=like.shape,
            stride=like.stride(),
        )


def _attention(cls: Any, func: Any, types: Any, args: Any, kwargs: Any) -> tuple[Tensor, Tensor]:
    arguments = _by_name(_ATTENTION, args, kwargs)
    sharding = _sharding_of(arguments)
    query, value = arguments["query"], arguments["value"]
    out, lse = _ATTENTION(**sharding.localised(arguments))
    shape = (*query.shape[:3], value.shape[3])
    return (
        sharding.wrapped(out, sharding.of_query(), _like(query, shape)),
        sharding.wrapped(lse, sharding.of_query(), _meta(shape[:3])),
    )


def _backward(
    cls: Any, func: Any, types: Any, args: Any, kwargs: Any
) -> tuple[Tensor, Tensor, Tensor]:
    arguments = _by_name(_BACKWARD, args, kwargs)
    sharding = _sharding_of(arguments)
    grads = _BACKWARD(**sharding.localised(arguments))
    operands = (arguments[name] for name in ("query", "key", "value"))
    placements = [sharding.of_query(), *[sharding.of_key(gradient=True)] * 2]
    dq, dk, dv = (
        sharding.wrapped(grad, placement, _like(operand, operand.shape))
        for grad, placement, operand in zip(grads, placements, operands, strict=True)
    )
    return dq, dk, dv


def _block_lists(cls: Any, func: Any, types: Any, args: Any, kwargs: Any) -> tuple[Tensor, ...]:
    """Each rank makes the whole lists: they are small, and what is asked of them is not known."""
    arguments = _by_name(_BLOCK_LISTS, args, kwargs)
    (mesh,) = {one.device_mesh for one in arguments.values() if isinstance(one, DTensor)}
    replicated: list[Placement] = [Replicate()] * mesh.ndim
    local = {
        name: _localised(one, mesh, replicated) if isinstance(one, Tensor) else one
        for name, one in arguments.items()
    }
    return tuple(
        DTensor.from_local(one, mesh, replicated, run_check=False) for one in _BLOCK_LISTS(**local)
    )


def _by_name(op: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    names = [argument.name for argument in op._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **(kwargs or {})}


def _sharding_of(arguments: Mapping[str, Any]) -> Sharding:
    operands = {name: arguments[name] for name in ("query", "key", "value")}
    plain = [name for name, one in operands.items() if not isinstance(one, DTensor)]
    if plain:
        raise TypeError(
            "query, key and value must all be DTensors or all plain tensors, got plain "
            f"{' and '.join(plain)}"
        )
    meshes = {one.device_mesh for one in operands.values()}
    if len(meshes) > 1:
        raise ValueError(f"query, key and value must be on one mesh, got {meshes}")
    return Sharding(meshes.pop(), operands)


def _asked_for(operands: Mapping[str, DTensor], dim: int) -> int | None:
    """What the first sharded operand shards over a mesh dimension, if that can be served."""
    for one in operands.values():
        placement = one.placements[dim]
        # Not a subclass: strided shards are cut in another way.
        if type(placement) is Shard and placement.dim in (BATCH, HEADS):
            return placement.dim
    return None


def _localised(tensor: Tensor, mesh: DeviceMesh, placements: list[Placement]) -> Tensor:
    """What this rank has of a tensor in other placements; a plain one is the same on all ranks."""
    # Rules run below autograd, where torch up to 2.12 cannot redistribute what requires gradients.
    given: Any = tensor.detach()
    if not isinstance(given, DTensor):
        given = DTensor.from_local(given, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return given.redistribute(mesh, placements).to_local()


def _meta(shape: tuple[int, ...]) -> Tensor:
    return torch.empty(shape, device="meta")


def _like(operand: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A tensor without data in the layout that the op gives a result that follows an operand."""
    meta = torch.empty_strided(operand.shape, operand.stride(), device="meta")
    return empty_like_layout(meta, shape, meta.dtype)


for _name, _rule in (
    ("tree_attention", _attention),
    ("tree_attention_backward", _backward),
    ("block_lists", _block_lists),
):
    torch.library.register_torch_dispatch(f"{NAMESPACE}::{_name}", DTensor, _rule)
