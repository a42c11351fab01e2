"""Cases of the ops on DTensors; each runs on every rank of a group of four."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.nn.attention.flex_attention import AuxRequest

from tests.attention_cases import Case, hand_made_lists, ids_case, operands, tree_case
from tests.distributed.attention_checks import close, mask_of
from tree_attn_op import tree_attention

WHOLE = Replicate()
BATCH, HEADS, SEQUENCE = Shard(0), Shard(1), Shard(2)


def meshes() -> tuple[DeviceMesh, DeviceMesh]:
    """One dimension of all ranks, and two dimensions."""
    size = dist.get_world_size()
    return init_device_mesh("cpu", (size,)), init_device_mesh("cpu", (2, size // 2))


def check(
    case: Case,
    mesh: DeviceMesh,
    given: Sequence[Sequence[Placement]],
    out_placements: Sequence[Placement],
    key_grad_placements: Sequence[Placement] | None = None,
    *,
    batch: int = 1,
    heads: tuple[int, int] = (8, 4),
    transposed: bool = False,
    compiled: bool = False,
) -> None:
    """Compare with one process; results lie as they should, without detours."""
    lengths = (case.lists.q_len, case.lists.kv_len)
    whole = list(operands(batch, heads, lengths, (8, 12)))
    if transposed:
        whole = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in whole]
    mask = mask_of(case)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Any:
        request = AuxRequest(lse=True)
        out, aux = tree_attention(query, key, value, mask, enable_gqa=True, return_aux=request)
        return out, aux.lse

    leaves = [x.requires_grad_() for x in whole]
    expected = attend(*leaves)
    grads_of = [torch.randn_like(x) for x in expected]
    expected_grads = torch.autograd.grad(expected, leaves, grads_of)

    sharded = [
        distribute_tensor(x.detach(), mesh, placements).requires_grad_()
        for x, placements in zip(whole, given, strict=True)
    ]
    if compiled:
        torch._dynamo.reset()
        attend = torch.compile(attend, fullgraph=True, backend="aot_eager")
    actual = attend(*sharded)
    for ours, theirs in zip(actual, expected, strict=True):
        assert isinstance(ours, DTensor)
        assert list(ours.placements) == list(out_placements)
        assert ours.shape == theirs.shape
        assert ours.stride() == theirs.stride()
        close(ours.full_tensor(), theirs)
    # The gradients come as the sums of a replicated loss would: in another placement.
    grads = torch.autograd.grad(
        actual, sharded, [distribute_tensor(x, mesh, [WHOLE] * mesh.ndim) for x in grads_of]
    )
    for ours, theirs in zip(grads, expected_grads, strict=True):
        close(ours.full_tensor(), theirs)
    if key_grad_placements is not None and not compiled:
        assert list(grads[1].placements) == list(key_grad_placements)


def heads_sharded() -> None:
    line, square = meshes()
    given = tree_case(50, (16, 16))
    check(given, line, [[HEADS]] * 3, [HEADS], [HEADS])
    check(given, line, [[HEADS]] * 3, [HEADS], [HEADS], transposed=True)
    check(given, square, [[HEADS, HEADS]] * 3, [HEADS, HEADS])


def batch_sharded() -> None:
    line, square = meshes()
    given = ids_case(40, 70, batch=6, blocks=(16, 16))
    check(given, line, [[BATCH]] * 3, [BATCH], [BATCH], batch=6)
    check(given, square, [[BATCH, HEADS]] * 3, [BATCH, HEADS], [BATCH, HEADS], batch=6)
    check(tree_case(50, (16, 16)), line, [[BATCH]] * 3, [BATCH], batch=3)


def lists_that_differ_by_head() -> None:
    line, square = meshes()
    given = hand_made_lists(ids_case(50, 50, batch=2, blocks=(16, 16)), batch=2, heads=8)
    check(given, line, [[HEADS]] * 3, [HEADS], batch=2)
    check(given, square, [[BATCH, HEADS]] * 3, [BATCH, HEADS], batch=2)


def heads_that_do_not_divide_are_replicated() -> None:
    line, square = meshes()
    given = tree_case(50, (16, 16))
    # Query heads alone would divide, and each rank would hold the wrong key heads for them.
    check(given, line, [[HEADS]] * 3, [WHOLE], heads=(8, 2))
    check(given, line, [[HEADS]] * 3, [WHOLE], heads=(12, 6))
    check(given, square, [[HEADS, HEADS]] * 3, [HEADS, WHOLE], heads=(8, 2))


def one_key_head_is_shared() -> None:
    line, square = meshes()
    given = tree_case(50, (16, 16))
    check(given, line, [[HEADS], [WHOLE], [WHOLE]], [HEADS], [Partial()], heads=(4, 1))
    grads = [BATCH, Partial()]
    check(given, square, [[BATCH, HEADS]] * 3, [BATCH, HEADS], grads, batch=2, heads=(4, 1))
    check(given, line, [[HEADS], [WHOLE], [WHOLE]], [WHOLE], heads=(6, 1))


def other_placements_are_replicated() -> None:
    line, _ = meshes()
    given = tree_case(50, (16, 16))
    check(given, line, [[SEQUENCE]] * 3, [WHOLE])
    check(given, line, [[Shard(3)]] * 3, [WHOLE])
    check(given, line, [[WHOLE], [HEADS], [WHOLE]], [HEADS])
    check(given, line, [[WHOLE]] * 3, [WHOLE])


def compiled_without_a_graph_break() -> None:
    line, square = meshes()
    check(tree_case(50, (16, 16)), line, [[HEADS]] * 3, [HEADS], compiled=True)
    given = ids_case(40, 70, batch=2, blocks=(16, 16))
    check(given, square, [[BATCH, WHOLE]] * 3, [BATCH, WHOLE], batch=2, compiled=True)


def a_mask_of_dtensors() -> None:
    """Values on the mesh as well: the lists are made on it."""
    line, _ = meshes()
    given = ids_case(40, 40, batch=4, blocks=(16, 16))
    on_mesh = [distribute_tensor(x, line, [BATCH]) for x in (given.q_vals, given.k_vals)]
    none = (None,) * 4
    lists = torch.ops.tree_attn_op.block_lists(
        *on_mesh, given.predicate, 40, 40, *none, 16, 16, 16, 16
    )
    for ours, theirs in zip(lists, given.lists.tensors, strict=True):
        assert torch.equal(ours.full_tensor(), theirs)
    query, key, value = operands(4, (2, 2), (40, 40))
    sharded = [distribute_tensor(x, line, [BATCH]) for x in (query, key, value)]
    out, _ = torch.ops.tree_attn_op.tree_attention(
        *sharded, *on_mesh, given.predicate, *lists, 16, 16, 1.0
    )
    close(out.full_tensor(), given.call(query, key, value, 1.0)[0])


def plain_tensors_among_the_operands() -> None:
    line, square = meshes()
    given = tree_case(50, (16, 16))
    query, key, value = operands(1, (4, 4), (50, 50))
    sharded = distribute_tensor(query, line, [HEADS])
    with pytest.raises(TypeError, match="got plain key and value"):
        tree_attention(sharded, key, value, mask_of(given))
    other = distribute_tensor(key, square, [WHOLE, HEADS])
    with pytest.raises(ValueError, match="must be on one mesh"):
        tree_attention(sharded, other, other, mask_of(given))


CASES = tuple(
    given
    for given in list(globals().values())
    if getattr(given, "__module__", None) == __name__ and given not in (meshes, check)
)
