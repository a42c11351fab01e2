"""Every row of the table of mask forms has its verdict, in every spelling and both dialects."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import fx

from tests.lowering.checks import dense, reference
from tests.lowering.forms import BATCH, FORMS, KV_LEN, OPERANDS, Q_LEN, Form
from tests.lowering.generator import symbolic_int
from tree_attn_op.lowering import (
    CapturedInfo,
    Lowered,
    UnsupportedMask,
    lower,
    lower_mask_mod,
)


def python_graph(form: Form) -> tuple[fx.Graph, list[CapturedInfo]]:
    """The mask as a graph of Python operators, its captured Python ints symbolic."""
    count = len(form.captured)
    assert len(inspect.signature(form.mask).parameters) == 4 + count
    infos = [
        CapturedInfo.of(symbolic_int() if isinstance(value, int) else value)
        for value in form.operands
    ]
    return fx.symbolic_trace(form.mask).graph, infos


def lowered(form: Form, dialect: str) -> tuple[Lowered, list[Any]]:
    if dialect == "aten":
        return lower_mask_mod(form.mask_mod, "cpu")
    graph, infos = python_graph(form)
    return lower(graph, infos), form.operands


@pytest.mark.parametrize("dialect", ["python", "aten"])
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_forms(form: Form, dialect: str) -> None:
    if form.keep:
        with pytest.raises(UnsupportedMask) as refused:
            lowered(form, dialect)
        assert refused.value.reason == form.expected
        assert refused.value.hint
        assert refused.value.node_name
        return
    mask, captured = lowered(form, dialect)
    symbolic = dialect == "python" and any(isinstance(v, int) for v in form.operands)
    expected = form.text_if_symbolic if symbolic and form.text_if_symbolic else form.expected
    assert str(mask.predicate) == expected
    if not symbolic:
        assert mask.value_dtype is form.dtype
    found = dense(mask, captured, BATCH, Q_LEN, KV_LEN)
    assert torch.equal(found, reference(form.mask_mod, BATCH, Q_LEN, KV_LEN))
    assert mask.captures_used == any(isinstance(v, torch.Tensor) for v in form.operands)


def test_forms_cover_the_table() -> None:
    assert {form.row for form in FORMS} == set(range(1, 17))


def test_parent_is_not_ancestor() -> None:
    # Row 1 at depth 2: the grandparent's tokens stay invisible.
    group, parent = torch.tensor([[0, 1, 2]]), torch.tensor([[0, 0, 1]])

    def mask_mod(b, h, q, k):
        return (q >= k) & ((group[b, q] == group[b, k]) | (parent[b, q] == group[b, k]))

    mask, captured = lower_mask_mod(mask_mod, "cpu")
    expected = torch.tensor([[[1, 0, 0], [1, 1, 0], [0, 1, 1]]], dtype=torch.bool)
    assert torch.equal(dense(mask, captured, 1, 3, 3), expected)


def test_captured_int_may_change_between_calls() -> None:
    form = next(form for form in FORMS if form.name == "row09-everything")
    mask, _ = lowered(form, "python")
    for window in (1, 3, 30):
        group, pad, _ = form.operands

        def mask_mod(b, h, q, k, window=window):
            return form.mask(b, h, q, k, OPERANDS["group"], OPERANDS["pad"], window)

        found = dense(mask, [group, pad, window], BATCH, Q_LEN, KV_LEN)
        assert torch.equal(found, reference(mask_mod, BATCH, Q_LEN, KV_LEN))
