"""``explain``: what it says, and that it leaves no trace."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch._inductor import config as inductor_config

import passes
from passes import CallReport, Report

from .helpers import PassThenEager, Tree, attention, block_mask, compiled, form_1, qkv


class Model(torch.nn.Module):
    """Layers with a mask each, and a graph break after each if asked for."""

    def __init__(self, masks: tuple[Any, ...], graph_break: bool = False) -> None:
        super().__init__()
        self.masks, self.graph_break = masks, graph_break
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, query: Any, key: Any, value: Any) -> torch.Tensor:
        for mask in self.masks:
            query = attention(query, key, value, mask) * self.scale
            if self.graph_break:
                torch._dynamo.graph_break()
        return query


def two_masks(tensors: tuple[torch.Tensor, ...]) -> tuple[Any, Any]:
    table = torch.rand(192, 192) > 0.5
    return (
        block_mask(form_1(Tree(2, 192)), tensors),
        block_mask(lambda b, h, q, k: table[q, k], tensors),
    )


def expect_two(report: Report) -> None:
    assert [call.rewritten for call in report] == [True, False]
    first, second = report
    assert first.predicate == "q >= k & (q0 == k0 | q1 == k0)"
    assert first.reason is None
    assert second.predicate is None
    assert "table" in second.reason
    assert second.hint
    assert second.source is not None
    assert __file__.rsplit("/", 1)[-1] in second.source


def test_a_function() -> None:
    tensors = qkv()
    with torch.no_grad():
        expect_two(passes.explain(Model(two_masks(tensors)).forward, *tensors))


@pytest.mark.usefixtures("traceable_training")
def test_a_module_with_gradients() -> None:
    tensors = qkv()
    model = Model(two_masks(tensors))
    expect_two(passes.explain(model, *tensors))
    assert model.scale.grad is None


def test_graph_breaks() -> None:
    tensors = qkv()
    with torch.no_grad():
        expect_two(passes.explain(Model(two_masks(tensors), graph_break=True), *tensors))


def test_what_is_compiled_already_is_explained_and_stays() -> None:
    tensors = qkv()
    backend = PassThenEager()
    with torch.no_grad():
        model = compiled(Model(two_masks(tensors)), backend)
        expected = model(*tensors)
        for _ in range(12):
            expect_two(passes.explain(model, *tensors))
        torch.testing.assert_close(model(*tensors), expected)
    assert len(backend.graphs) == 1
    assert inductor_config.pre_grad_custom_pass is None


@pytest.mark.skipif(
    "isolate_recompiles" not in inspect.signature(torch.compile).parameters,
    reason="before torch 2.13 the pieces after a graph break share one set of cache entries",
)
def test_explaining_does_not_use_up_recompilations() -> None:
    tensors = qkv()
    model = Model(two_masks(tensors), graph_break=True)
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=2):
        for _ in range(4):
            expect_two(passes.explain(model, *tensors))
        backend = PassThenEager()
        torch.compile(model, backend=backend)(*tensors)
    assert len(backend.report) == 2


def test_predicate_plan() -> None:
    tensors = qkv()
    with torch.no_grad():
        expect_two(passes.explain(Model(two_masks(tensors)), *tensors, plan="predicate"))


def test_nothing_to_explain() -> None:
    report = passes.explain(lambda x: x + 1, torch.ones(3))
    assert len(report) == 0
    assert str(report).startswith("no flex_attention call was compiled")


def test_table() -> None:
    report = Report(
        [
            CallReport(True, predicate="q >= k & q0 == k0", layer="layers.0.attn", node="flex"),
            CallReport(
                False,
                reason="looks up a q-by-k table",
                hint="compare one number a token",
                source="model.py:12: table[q, k]",
                layer="layers.1.attn",
                node="flex_1",
            ),
        ]
    )
    assert str(report) == (
        "#  call           verdict    predicate or reason\n"
        "0  layers.0.attn  rewritten  q >= k & q0 == k0\n"
        "1  layers.1.attn  kept flex  looks up a q-by-k table\n"
        "                             instead: compare one number a token\n"
        "                             at model.py:12: table[q, k]\n"
        "1 of 2 flex_attention calls rewritten"
    )
    assert len(report.rewritten) == len(report.kept) == 1
    assert isinstance(report[1:], Report)
    assert str(report[1]) == "kept flex: looks up a q-by-k table; compare one number a token"
    assert str(report[0]) == "rewritten: q >= k & q0 == k0"


def test_report_forgets_the_oldest() -> None:
    report = Report()
    for number in range(3):
        report.extend(CallReport(True, predicate=str(number)) for _ in range(4000))
    assert len(report) == 10_000
    assert report[0].predicate == "0"
    assert report[-1].predicate == "2"


def test_what_cannot_be_called_is_refused() -> None:
    with pytest.raises(TypeError, match="takes a function or module, got NoneType"):
        passes.explain(None)


def test_arguments_may_be_called_fn() -> None:
    def call(fn: torch.Tensor) -> torch.Tensor:
        return fn + 1

    assert len(passes.explain(call, fn=torch.ones(2))) == 0
