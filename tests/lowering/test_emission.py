"""The values that a lowered mask is computed from."""

from __future__ import annotations

import expecttest
import pytest
import torch
from torch import fx

from tests.lowering.checks import dense, reference
from tree_attn_op.errors import UnsupportedMask
from tree_attn_op.lowering import CapturedInfo, Lowered, emit, evaluate, lower, lower_mask_mod
from tree_attn_op.lowering.emission import evaluator


def emitted(lowered: Lowered, infos: list[CapturedInfo], sizes: tuple[object, ...]) -> fx.Graph:
    """The graph of the values; a size of None becomes a placeholder."""
    graph = fx.Graph()
    captured = [graph.placeholder(f"captured_{i}") for i in range(len(infos))]
    names = ("batch", "q_len", "kv_len")
    lengths = [
        graph.placeholder(name) if size is None else size
        for name, size in zip(names, sizes, strict=True)
    ]
    graph.output(emit(lowered, graph, captured, *lengths, device="cpu"))
    graph.lint()
    return graph


class EmittedCode(expecttest.TestCase):
    def lowered(self, mask, *captured: torch.Tensor) -> tuple[Lowered, list[CapturedInfo]]:
        infos = [CapturedInfo.of(value) for value in captured]
        return lower(fx.symbolic_trace(mask).graph, infos), infos

    def code(self, graph: fx.Graph) -> str:
        lines = fx.GraphModule(torch.nn.Module(), graph).code.strip().splitlines()[1:]
        return "\n".join(line.strip().split(";")[0] for line in lines)

    def test_each_value_is_computed_once(self) -> None:
        def mask(b, h, q, k, group, parent):
            own = group[b, k]
            return (q >= k) & ((group[b, q] == own) | (parent[b, q] == own))

        lowered, infos = self.lowered(mask, torch.zeros(2, 8).int(), torch.zeros(2, 8).int())
        self.assertExpectedInline(
            self.code(emitted(lowered, infos, (2, 8, 8))),
            """\
arange = torch.arange(2, dtype = torch.int64, device = device(type='cpu'))
unsqueeze = torch.unsqueeze(arange, 1)
arange_1 = torch.arange(8, dtype = torch.int64, device = device(type='cpu'))
unsqueeze_1 = torch.unsqueeze(arange_1, 0)
getitem = captured_0[(unsqueeze, unsqueeze_1)]
broadcast_to = torch.broadcast_to(getitem, (2, 8))
getitem_1 = captured_1[(unsqueeze, unsqueeze_1)]
broadcast_to_1 = torch.broadcast_to(getitem_1, (2, 8))
stack = torch.stack([broadcast_to, broadcast_to_1], dim = 1)
arange_2 = torch.arange(8, dtype = torch.int64, device = device(type='cpu'))
unsqueeze_2 = torch.unsqueeze(arange_2, 0)
getitem_2 = captured_0[(unsqueeze, unsqueeze_2)]
broadcast_to_2 = torch.broadcast_to(getitem_2, (2, 8))
stack_1 = torch.stack([broadcast_to_2], dim = 1)
return (stack, stack_1)""",
        )

    def test_dynamic_sizes_and_clamped_indices(self) -> None:
        def mask(b, h, q, k, offset, doc):
            return (q >= k) & (offset[doc[q]] <= k) & (k < offset[doc[q] + 1])

        lowered, infos = self.lowered(mask, torch.zeros(5).long(), torch.zeros(8).long())
        graph = emitted(lowered, infos, (None, None, None))
        self.assertExpectedInline(
            self.code(graph),
            """\
arange = torch.arange(q_len, dtype = torch.int64, device = device(type='cpu'))
unsqueeze = torch.unsqueeze(arange, 0)
clamp = torch.clamp(unsqueeze, -8, 7)
getitem = captured_1[clamp]
add = torch.add(getitem, 1)
clamp_1 = torch.clamp(add, -5, 4)
getitem_1 = captured_0[clamp_1]
broadcast_to = torch.broadcast_to(getitem_1, (1, q_len))
clamp_2 = torch.clamp(getitem, -5, 4)
getitem_2 = captured_0[clamp_2]
broadcast_to_1 = torch.broadcast_to(getitem_2, (1, q_len))
stack = torch.stack([broadcast_to, broadcast_to_1], dim = 1)
empty = torch.empty((1, 0, kv_len), dtype = torch.int64, device = device(type='cpu'))
return (stack, empty)""",
        )


def test_out_of_range_look_ups_do_not_trap() -> None:
    # No listed block would hold tokens 4 and 5; their rows are computed all the same.
    doc = torch.tensor([0, 1, 1, 0, 99, -99])
    offset = torch.tensor([0, 2, 6])

    def mask_mod(b, h, q, k):
        return (offset[doc[q]] <= k) & (q >= k)

    lowered, captured = lower_mask_mod(mask_mod, "cpu")
    found = dense(lowered, captured, 1, 6, 6)
    assert torch.equal(found[:, :4], reference(mask_mod, 1, 4, 6))


def test_negative_look_ups_count_from_the_end() -> None:
    doc = torch.tensor([0, -1, 2, -3])
    first = torch.tensor([0, 1, 3])

    def mask_mod(b, h, q, k):
        return first[doc[q]] <= k

    lowered, captured = lower_mask_mod(mask_mod, "cpu")
    assert torch.equal(dense(lowered, captured, 1, 4, 4), reference(mask_mod, 1, 4, 4))


def test_tables_longer_and_shorter_than_the_sequence() -> None:
    limit = torch.arange(10)

    def mask_mod(b, h, q, k):
        return k <= limit[q]

    lowered, captured = lower_mask_mod(mask_mod, "cpu")
    for q_len in (3, 10):
        assert torch.equal(
            dense(lowered, captured, 1, q_len, 12), reference(mask_mod, 1, q_len, 12)
        )
    # Other operands than those it was lowered with: sizes are those of the operands given.
    with pytest.raises(UnsupportedMask, match="size 4 at 6 queries, which is out of range"):
        evaluate(lowered, [torch.arange(4)], 1, 6, 6, "cpu")


def test_division_by_zero_of_unseen_tokens_does_not_trap() -> None:
    stride = torch.tensor([2, 3, 0])

    def mask_mod(b, h, q, k):
        return q // stride[q] <= k

    lowered, captured = lower_mask_mod(mask_mod, "cpu")
    assert torch.equal(dense(lowered, captured, 1, 3, 4)[:, :2], reference(mask_mod, 1, 2, 4))


def test_no_rows_give_empty_values() -> None:
    lowered, captured = lower_mask_mod(lambda b, h, q, k: q >= k, "cpu")
    q_vals, k_vals = evaluate(lowered, captured, 3, 5, 7, "cpu")
    assert q_vals.shape == (1, 0, 5)
    assert k_vals.shape == (1, 0, 7)
    assert q_vals.dtype is k_vals.dtype is torch.int32
    assert not lowered.captures_used


def test_batch_is_one_unless_a_row_depends_on_it() -> None:
    ids, limits = torch.arange(6), torch.tensor([3, 5])
    lowered, captured = lower_mask_mod(lambda b, h, q, k: (ids[q] >= k) & (k < limits[b]), "cpu")
    q_vals, k_vals = evaluate(lowered, captured, 2, 6, 6, "cpu")
    assert (q_vals.shape[0], k_vals.shape[0]) == (1, 2)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32])
@pytest.mark.parametrize("wide_row", [False, True])
def test_differences_wrap_in_their_own_dtype(dtype: torch.dtype, wide_row: bool) -> None:
    info = torch.iinfo(dtype)
    position = torch.tensor([info.min, -1, 0, 1, info.max], dtype=dtype)
    wide = torch.arange(5) << 40

    def mask_mod(b, h, q, k):
        near = position[q] - position[k] < 3
        return near & (wide[q] >= wide[k]) if wide_row else near

    lowered, captured = lower_mask_mod(mask_mod, "cpu")
    assert lowered.value_dtype is (torch.int64 if wide_row else torch.int32)
    assert torch.equal(dense(lowered, captured, 1, 5, 5), reference(mask_mod, 1, 5, 5))


def test_narrow_difference_against_a_wide_value() -> None:
    position = torch.tensor([-128, -1, 0, 1, 127], dtype=torch.int8)
    limit = torch.tensor([-(2**40), -128, 0, 127, 2**40])

    def mask_mod(b, h, q, k):
        difference = position[q] - position[k]
        return (difference < limit[q]) | (limit[k] == difference) | (difference >= limit[k])

    lowered, captured = lower_mask_mod(mask_mod, "cpu")
    assert torch.equal(dense(lowered, captured, 1, 5, 5), reference(mask_mod, 1, 5, 5))


def test_scalar_on_another_device_is_moved() -> None:
    def mask(b, h, q, k, count, limit):
        return (q < count) & (k < limit[q])

    infos = [
        CapturedInfo(torch.int64, (), torch.device("cpu")),
        CapturedInfo(torch.int64, (8,), torch.device("cuda")),
    ]
    lowered = lower(fx.symbolic_trace(mask).graph, infos)
    graph = fx.Graph()
    captured = [graph.placeholder(name) for name in ("count", "limit")]
    graph.output(emit(lowered, graph, captured, 1, 8, 8, torch.device("cuda")))
    moves = [n for n in graph.nodes if n.op == "call_method" and torch.device("cuda") in n.args]
    assert [move.args[0].args[0] for move in moves] == [captured[0]]


def test_fingerprint_tells_masks_apart() -> None:
    def lowered(mask) -> Lowered:
        return lower(fx.symbolic_trace(mask).graph, [CapturedInfo.of(torch.zeros(8).long())] * 2)

    plain = lowered(lambda b, h, q, k, x, y: x[q] >= y[k])
    assert plain.fingerprint == lowered(lambda b, h, q, k, x, y: y[k] <= x[q]).fingerprint
    assert plain.fingerprint != lowered(lambda b, h, q, k, x, y: y[q] >= x[k]).fingerprint
    assert plain.fingerprint != lowered(lambda b, h, q, k, x, y: x[q] > y[k]).fingerprint


def test_borrowed_rows_are_views_of_what_is_captured() -> None:
    end, table = torch.arange(9), torch.randint(0, 3, (2, 5, 9))

    def mask_mod(b, h, q, k):
        return (q < end[k]) & (k <= table[b, 3, q])

    lowered, captured = lower_mask_mod(mask_mod, "cpu")
    infos = [CapturedInfo.of(tensor) for tensor in captured]
    for batch, length in ((1, 9), (2, 7)):
        module = evaluator(lowered, infos, batch, length, length, "cpu", borrow=True)
        q_vals, k_vals = module(*captured)
        expected = evaluate(lowered, captured, batch, length, length, "cpu")
        assert torch.equal(q_vals, expected[0])
        assert torch.equal(k_vals, expected[1])
        for values, source in ((q_vals, table), (k_vals, end)):
            assert values.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()
