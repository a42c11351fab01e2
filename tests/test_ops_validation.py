"""Bad arguments: each is a clear error that names what was given, before any kernel runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tree_attn_op import cpu, ops
from tree_attn_op.predicate import PredicateError

from .attention_cases import Case, operands, tree_case

OPS = torch.ops.tree_attn_op
LENGTH = 70


@pytest.fixture(autouse=True)
def no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel(*arguments: Any) -> None:
        raise AssertionError("a kernel ran")

    monkeypatch.setattr(cpu, "forward", kernel)
    monkeypatch.setattr(cpu, "backward", kernel)


def inputs(**changes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    named = dict(
        zip(
            ("query", "key", "value"),
            operands(2, (4, 2), (LENGTH, LENGTH), dtype=torch.float32),
            strict=True,
        )
    )
    named.update(changes)
    return named["query"], named["key"], named["value"]


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"query": zeros(4, LENGTH, 16)}, ValueError, r"query must be \[batch.*got shape \(4, 70"),
        ({"key": zeros(2, 2, LENGTH, 16).half()}, TypeError, "one dtype, got float32, float16"),
        ({"query": zeros(3, 4, LENGTH, 16)}, ValueError, "one batch size, got 3, 2 and 2"),
        ({"value": zeros(2, 1, LENGTH, 16)}, ValueError, "agree in heads and length"),
        ({"value": zeros(2, 2, 9, 16)}, ValueError, "agree in heads and length"),
        ({"query": zeros(2, 4, LENGTH, 8)}, ValueError, "one head dim, got 8 and 16"),
        ({"query": zeros(2, 3, LENGTH, 16)}, ValueError, "3 query heads and 2 key heads"),
        ({"query": zeros(2, 0, LENGTH, 16)[:, :0]}, None, ""),
        ({"value": zeros(2, 2, LENGTH, 257)}, ValueError, "head dim of value must be 1 to 256"),
        ({"value": zeros(2, 2, LENGTH, 0)}, ValueError, "head dim of value must be 1 to 256"),
        (
            {"key": zeros(2, 2, 71, 16), "value": zeros(2, 2, 71, 16)},
            ValueError,
            "length is 71, got 70",
        ),
    ],
)
def test_operands(changes: dict[str, Tensor], error: type[Exception] | None, message: str) -> None:
    made = tree_case(LENGTH)
    if error is None:  # no query heads: nothing to compute
        out, _ = made.call(*inputs(**changes), 1.0)
        assert out.numel() == 0
        return
    with pytest.raises(error, match=message):
        made.call(*inputs(**changes), 1.0)


def test_head_dim_of_query() -> None:
    with pytest.raises(ValueError, match="head dim of query and key must be 1 to 256, got 264"):
        tree_case(LENGTH).call(*operands(2, (4, 2), (LENGTH, LENGTH), (264, 16)), 1.0)


@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64])
def test_operand_dtype(dtype: torch.dtype) -> None:
    tensors = tuple(tensor.to(dtype) for tensor in inputs())
    with pytest.raises(TypeError, match="must be bfloat16, float16, float32, float64 on cpu"):
        tree_case(LENGTH).call(*tensors, 1.0)


@pytest.mark.parametrize("scale", [float("nan"), float("inf")])
def test_scale(scale: float) -> None:
    with pytest.raises(ValueError, match="scale must be finite"):
        tree_case(LENGTH).call(*inputs(), scale)


def changed(**fields: Any) -> Case:
    return replace(tree_case(LENGTH), **fields)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"predicate": "q >= "}, PredicateError, "not a predicate"),
        ({"predicate": "q >= k1"}, PredicateError, "reads 2 rows of k_vals, got 1"),
        ({"predicate": "q0 >= k"}, PredicateError, "reads 1 rows of q_vals, got 0"),
        ({"k_vals": zeros(1, 1, LENGTH)}, PredicateError, "k_vals must be int32 or int64"),
        ({"k_vals": zeros(1, 1, LENGTH).long()}, PredicateError, "one dtype"),
        ({"k_vals": zeros(1, LENGTH).int()}, PredicateError, "k_vals must be"),
        ({"k_vals": zeros(1, 1, 69).int()}, ValueError, "k_vals .* length is 70, got 69"),
        ({"k_vals": zeros(3, 1, LENGTH).int()}, ValueError, "k_vals must be 1 or 2"),
        ({"predicate": f"q < {2**40}"}, PredicateError, "beyond int32"),
    ],
)
def test_predicate_and_values(
    fields: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        changed(**fields).call(*inputs(), 1.0)


def test_value_batches() -> None:
    made = changed(q_vals=zeros(2, 0, LENGTH).int(), k_vals=zeros(3, 1, LENGTH).int())
    with pytest.raises(ValueError, match="equal or 1, got 2 and 3"):
        made.call(*inputs(), 1.0)


@pytest.mark.parametrize(
    ("name", "change", "error", "message"),
    [
        ("kv_indices", lambda t: t.long(), TypeError, "kv_indices must be int32, got int64"),
        ("kv_indices", lambda t: t[..., :2], ValueError, r"kv_indices must be .*70 and 70"),
        ("kv_num_blocks", lambda t: t[..., :2], ValueError, "another|other lengths"),
        ("full_kv_indices", lambda t: None, ValueError, "full_kv_indices is missing"),
        ("q_num_blocks", lambda t: None, ValueError, "q_num_blocks is missing"),
        ("q_indices", lambda t: t[0], ValueError, "q_indices must be"),
        ("full_q_num_blocks", lambda t: t.expand(2, 1, 3), ValueError, "agree in batch and heads"),
    ],
)
def test_lists(name: str, change: Any, error: type[Exception], message: str) -> None:
    made = tree_case(LENGTH)
    with pytest.raises(error, match=message):
        made.with_lists(**{name: change(getattr(made.lists, name))}).call(*inputs(), 1.0)


@pytest.mark.parametrize(("batch", "heads"), [(3, 1), (1, 2), (1, 3)])
def test_lists_that_do_not_broadcast(batch: int, heads: int) -> None:
    made = tree_case(LENGTH)
    lists = made.lists.map(lambda t: t.expand(batch, heads, *t.shape[2:]))
    with pytest.raises(ValueError, match=r"must be 1 or 2|1 or 4 heads"):
        replace(made, lists=lists).call(*inputs(), 1.0)


@pytest.mark.parametrize("size", [0, 8, 24, -32])
def test_block_sizes(size: int) -> None:
    made = tree_case(LENGTH)
    for name in ("q_block_size", "kv_block_size"):
        with pytest.raises(ValueError, match=f"{name} must be a positive multiple of 16"):
            replace(made, lists=replace(made.lists, **{name: size})).call(*inputs(), 1.0)


def test_devices() -> None:
    made = tree_case(LENGTH)
    query, key, value = inputs()
    arguments = [query, key, value, *made.mask_arguments, 1.0]
    for at, name in ((3, "q_vals"), (4, "k_vals"), (6, "kv_num_blocks"), (1, "key")):
        mixed = list(arguments)
        mixed[at] = mixed[at].to("meta")
        with pytest.raises((ValueError, RuntimeError), match=f"{name}|one device|meta"):
            ops._forward(*mixed)


def test_backward() -> None:
    made = tree_case(LENGTH)
    query, key, value = inputs()
    out, lse = zeros(2, 4, LENGTH, 16), zeros(2, 4, LENGTH)
    for grad, grad_lse, message in (
        (out[..., :8], None, r"grad_out must have shape \(2, 4, 70, 16\)"),
        (out, lse[..., :3], r"grad_lse must have shape \(2, 4, 70\)"),
    ):
        with pytest.raises(ValueError, match=message):
            OPS.tree_attention_backward(
                grad, grad_lse, query, key, value, out, lse, *made.mask_arguments, 1.0
            )


@pytest.mark.parametrize(
    ("given", "sizes", "message"),
    [
        (True, (32, 32, 64, 32), "new_q_block_size must divide the lists' block size 32, got 64"),
        (True, (32, 32, 32, 8), "new_kv_block_size must be a positive multiple"),
        (False, (32, 32, 40, 32), "new_q_block_size must be a positive multiple"),
        (True, (16, 32, 16, 32), "kv_num_blocks must be"),
    ],
)
def test_block_lists(given: bool, sizes: tuple[int, ...], message: str) -> None:
    made = tree_case(LENGTH)
    lists = made.lists.key_side if given else (None,) * 4
    with pytest.raises(ValueError, match=message):
        OPS.block_lists(made.q_vals, made.k_vals, made.predicate, LENGTH, LENGTH, *lists, *sizes)


def test_block_lists_of_full_blocks_only() -> None:
    made = tree_case(LENGTH)
    lists = (None, None, *made.lists.key_side[:2])
    with pytest.raises(ValueError, match="kv_num_blocks is missing"):
        OPS.block_lists(
            made.q_vals, made.k_vals, made.predicate, LENGTH, LENGTH, *lists, 32, 32, 32, 32
        )


def test_full_at_ends_is_for_derived_lists() -> None:
    made = tree_case(LENGTH)
    arguments = (made.q_vals, made.k_vals, made.predicate, LENGTH, LENGTH)
    with pytest.raises(ValueError, match="full_at_ends=False is for lists derived"):
        OPS.block_lists(*arguments, *made.lists.key_side, 32, 32, 32, 32, False)
