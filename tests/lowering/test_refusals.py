"""Masks that are kept, and what the user is told."""

from __future__ import annotations

import inspect
import operator
import re
from collections.abc import Callable

import pytest
import torch
from torch import fx

from tests.lowering.checks import dense, reference
from tree_attn_op.errors import UnsupportedMask
from tree_attn_op.lowering import CapturedInfo, emit, lower, lower_mask_mod

ids = torch.tensor([0, 1, 1, 2])
narrow = ids.int()
tiny = ids.to(torch.uint8)
table = torch.ones(4, 4, dtype=torch.bool)
floats = torch.rand(4)
count = torch.tensor(3)
empty = torch.zeros(0, dtype=torch.int64)


def refused(mask_mod: Callable[..., torch.Tensor]) -> UnsupportedMask:
    with pytest.raises(UnsupportedMask) as caught:
        lower_mask_mod(mask_mod, "cpu")
    assert isinstance(caught.value, ValueError)
    return caught.value


@pytest.mark.parametrize(
    ("mask_mod", "reason"),
    [
        (lambda b, h, q, k: table[q, k], "looks up a q-by-k table"),
        (lambda b, h, q, k: table.view(-1)[q * 4 + k], "looks up a q-by-k table"),
        (lambda b, h, q, k: ids[q - k] > 0, "looks up a q-by-k table"),
        (lambda b, h, q, k: (h == 0) | (q >= k), "depends on the head index"),
        (lambda b, h, q, k: q - k < h, "depends on the head index"),
        (lambda b, h, q, k: torch.maximum(q - k, h) < 3, "depends on the head index"),
        (lambda b, h, q, k: empty[q] >= k, "looks up a captured tensor that is empty"),
        (
            lambda b, h, q, k: floats[q] >= floats[k],
            "compares query and key values that are not integers (float32)",
        ),
        (
            lambda b, h, q, k: q / 4 == k / 4,
            "compares query and key values that are not integers (float32)",
        ),
        (lambda b, h, q, k: q * k > 3, "multiplies a value that depends on both query and key"),
        (
            lambda b, h, q, k: (q + k) >> 1 > 3,
            "computes bitwise_right_shift of a value that depends on both query and key",
        ),
        (
            lambda b, h, q, k: (q - k) % 3 < 2,
            "compares by order the remainder of a value that depends on both query and key",
        ),
        (
            lambda b, h, q, k: tiny[q] - tiny[k] < 2,
            "compares a difference of query and key values in unsigned uint8",
        ),
        (
            lambda b, h, q, k: (narrow[q] - narrow[k]).long() + q < 5,
            "computes with a difference of query and key values in int32 that is then widened "
            "to int64",
        ),
        (
            lambda b, h, q, k: narrow[q] - narrow[k] < 2**40,
            "compares with 1099511627776, which does not fit in int32",
        ),
        (
            lambda b, h, q, k: torch.isin(q, ids) & (q >= k),
            "uses aten.isin.Tensor_Tensor, which is not among the supported element-wise "
            "operations",
        ),
        (
            lambda b, h, q, k: (table[b] & table[b])[q] & (q >= k),
            "computes aten.bitwise_and.Tensor of a whole row of a captured tensor",
        ),
        (
            lambda b, h, q, k: (q < count.item()) & (q >= k),
            "reads the contents of a tensor while it is traced (Tensor.item)",
        ),
        (
            lambda b, h, q, k: q >= k if q > 3 else k >= q,
            "reads the contents of a tensor while it is traced (Tensor.__bool__)",
        ),
        (lambda b, h, q, k: q - k, "returns something other than a 0-d bool tensor"),
        (lambda b, h, q, k: (q >= k).view(1), "makes a tensor of shape [1]"),
        (lambda b, h: q >= k, None),  # noqa: F821
    ],
    ids=range(22),
)
def test_reason(mask_mod: Callable[..., torch.Tensor], reason: str | None) -> None:
    error = refused(mask_mod)
    if reason is None:
        assert error.reason.startswith("could not be traced: TypeError")
        return
    assert error.reason == reason
    assert reason in str(error)
    line = inspect.getsourcelines(mask_mod)[1]
    file, _, number = str(error.source).rpartition(":")
    if error.node_name != "output":
        assert file == __file__
        assert abs(int(number) - line) < 60


def test_message_names_the_source_line_and_what_to_write() -> None:
    def mask_mod(b, h, q, k):
        causal = q >= k
        return causal & table[q, k]

    error = refused(mask_mod)
    line = inspect.getsourcelines(mask_mod)[1] + 2
    assert error.source == f"{__file__}:{line}"
    assert error.node_name is not None
    assert "looks up a q-by-k table (at " in str(error)
    assert "(tin[k] <= tin[q]) & (tin[q] < tout[k])" in str(error)


def python_graph(mask: Callable[..., object]) -> fx.Graph:
    return fx.symbolic_trace(mask).graph


INT = CapturedInfo.of(torch.zeros(4, dtype=torch.int64))


def test_graph_refusals_name_the_node() -> None:
    graph = python_graph(lambda b, h, q, k, x: (q >= k) & x.cumsum(0)[q].bool())
    with pytest.raises(UnsupportedMask) as caught:
        lower(graph, [INT])
    assert caught.value.node_name == "cumsum"
    assert caught.value.reason.startswith("uses Tensor.cumsum,")


def test_placeholders_must_match() -> None:
    graph = python_graph(lambda b, h, q, k, x: q >= k)
    with pytest.raises(ValueError, match="5 placeholders, expected 4 indices and 0 captured"):
        lower(graph, [])


def test_captured_tensors_on_two_devices() -> None:
    graph = python_graph(lambda b, h, q, k, x, y: x[q] == y[k])
    other = CapturedInfo(torch.int64, (4,), torch.device("cuda", 0))
    with pytest.raises(UnsupportedMask, match=r"different devices \(cpu, cuda:0\)"):
        lower(graph, [INT, other])


def test_captured_tensors_on_another_device_than_the_query() -> None:
    graph = python_graph(lambda b, h, q, k, x: x[q] == x[k])
    with pytest.raises(UnsupportedMask, match=r"different devices \(cpu, cuda\)"):
        lower(graph, [INT], device=torch.device("cuda"))
    lowered = lower(graph, [INT])
    with pytest.raises(UnsupportedMask, match=r"different devices \(cpu, cuda\)"):
        emit(lowered, fx.Graph(), [torch.zeros(4)], 1, 4, 4, "cuda")
    on_gpu = CapturedInfo(torch.int64, (4,), torch.device("cuda", 0))
    lower(graph, [on_gpu], device=torch.device("cuda"))
    with pytest.raises(UnsupportedMask, match=r"different devices \(cuda:0, cuda:1\)"):
        lower(graph, [on_gpu], device=torch.device("cuda", 1))


def test_unknown_operand() -> None:
    with pytest.raises(UnsupportedMask, match="operand of type str"):
        CapturedInfo.of("text")


def test_too_many_comparisons() -> None:
    def mask_mod(b, h, q, k):
        result = q >= k
        for i in range(70):
            result = result | (ids[q] + i == ids[k] * (i + 2))
        return result

    assert refused(mask_mod).reason == "needs 71 comparisons, at most 64 are supported"


def test_too_many_rows() -> None:
    def mask_mod(b, h, q, k):
        result = q >= k
        for i in range(40):
            result = result & (ids[q] * (i + 2) >= k)
        return result

    assert refused(mask_mod).reason == "needs 40 rows of values, at most 32 are supported"


def test_too_deep_a_value() -> None:
    def mask_mod(b, h, q, k):
        value = ids[q]
        for i in range(120):
            value = value * 3 + i
        return value >= k

    assert "nested operations, at most 96" in refused(mask_mod).reason


def test_too_deep_a_formula() -> None:
    def mask_mod(b, h, q, k):
        result = q >= k
        for i in range(50):
            condition = ids[q] * (i + 2) == ids[k] * (i + 3)
            result = (result & condition) if i % 2 else (result | condition)
        return result

    assert "levels of and/or, at most 48" in refused(mask_mod).reason


def test_exclusive_or_chains_end() -> None:
    def mask_mod(b, h, q, k):
        result = q >= k
        for i in range(12):
            result = result ^ (ids[q] + i == ids[k] * (i + 2))
        return result

    assert "comparisons, at most" in refused(mask_mod).reason


def _in_place(graph: fx.Graph, *, read_later: bool = False, through_view: bool = False) -> None:
    _, _, q, k = (graph.placeholder(name) for name in "bhqk")
    causal = graph.call_function(operator.ge, (q, k))
    view = graph.call_method("view", (causal, ())) if through_view else None
    near = graph.call_function(operator.lt, (graph.call_function(operator.sub, (q, k)), 3))
    both = graph.call_function(operator.iand, (causal, near))
    if read_later:
        both = graph.call_function(operator.or_, (both, causal))
    if view is not None:
        both = graph.call_function(operator.or_, (both, view))
    graph.output(both)


def test_in_place_operation_on_a_fresh_value() -> None:
    graph = fx.Graph()
    _in_place(graph)
    assert str(lower(graph, []).predicate) == "q >= k & q - k < 3"


@pytest.mark.parametrize("option", ["read_later", "through_view"])
def test_in_place_operation_that_others_see(option: str) -> None:
    graph = fx.Graph()
    _in_place(graph, **{option: True})
    with pytest.raises(UnsupportedMask, match="changes a tensor in place"):
        lower(graph, [])


def test_in_place_operation_whose_result_is_not_used() -> None:
    graph = fx.Graph()
    _, _, q, k = (graph.placeholder(name) for name in "bhqk")
    causal = graph.call_function(operator.ge, (q, k))
    graph.call_method("logical_not_", (causal,))
    graph.output(causal)
    with pytest.raises(UnsupportedMask, match="changes a tensor in place"):
        lower(graph, [])


def test_in_place_operation_on_a_captured_tensor() -> None:
    def mask_mod(b, h, q, k):
        ids.add_(1)
        return ids[q] >= ids[k]

    before = ids.clone()
    assert "in place" in refused(mask_mod).reason
    assert torch.equal(ids, before)


def test_traced_in_place_operation() -> None:
    def mask_mod(b, h, q, k):
        mask = ids[q] == ids[k]
        mask &= q >= k
        mask.logical_or_(k == 0)
        return mask

    def same(b, h, q, k):
        return ((ids[q] == ids[k]) & (q >= k)) | (k == 0)

    lowered, captured = lower_mask_mod(mask_mod, "cpu")
    assert torch.equal(dense(lowered, captured, 1, 4, 4), reference(same, 1, 4, 4))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda b, h, q, k, x: x[q, k] > 0, "1 dimensions with 2 indices"),
        (lambda b, h, q, k, x: x[q >= k] > 0, "with a bool"),
        (lambda b, h, q, k, x: x[None, q] > 0, "adds a dimension"),
        (lambda b, h, q, k, x: x[q.to(torch.int16)] > 0, "with int16 values"),
        (lambda b, h, q, k, x: (x + q)[k] > 0, "a whole captured tensor and a value of one"),
        (lambda b, h, q, k, x: torch.max(x, 0)[0] > q, "along a dimension"),
        (lambda b, h, q, k, x: q // 0 > k, "divides by zero"),
        (lambda b, h, q, k, x: q.to(torch.uint16) == k.to(torch.int32), "PyTorch refuses"),
        (lambda b, h, q, k, x: q.to(torch.uint64) >= k.to(torch.uint64), "unsigned uint64"),
        (lambda b, h, q, k, x: q.to(torch.uint16) + 1 > 3, "wider than 8 bits"),
        (lambda b, h, q, k, x: torch.where(q, q, k) > 0, "not bool"),
        (lambda b, h, q, k, x: q.new_full((2,), True), "shape [2]"),
        (lambda b, h, q, k, x: q.device, "something other than a 0-d bool"),
    ],
    ids=range(13),
)
def test_graph_reason(wrong: Callable[..., object], message: str) -> None:
    with pytest.raises(UnsupportedMask, match=re.escape(message)):
        lower(python_graph(wrong), [INT])
