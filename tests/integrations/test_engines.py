"""What training engines do to a model: checkpointing, compilation, sharding. Gradients stay."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from tree_attn_op import PrefixTree
from tree_attn_op.integrations import transformers as tree_transformers

from . import fsdp
from .models import tiny
from .trajectories import gradients, multi_turn, next_token_loss

ATTENTION = torch.ops.tree_attn_op.tree_attention.default


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    tree_transformers.register()
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def sequences() -> list[Tensor]:
    return multi_turn(5)


def run(model: Any, sequences: list[Tensor]) -> dict[str, Tensor]:
    """The loss and the gradients of one step on the tree of the trajectories."""
    tree = PrefixTree.from_sequences(sequences)
    logits = model(**tree_transformers.model_inputs(tree)).logits
    loss = next_token_loss(tree.unpack(logits[0], dim=0), sequences)
    return {"loss": loss.detach(), **gradients(loss, model)}


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, expected in want.items():
        torch.testing.assert_close(
            got[name], expected, atol=1e-6, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
        )


class CountAttention(TorchDispatchMode):
    """Counts the runs of the forward op."""

    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += func is ATTENTION
        return func(*args, **(kwargs or {}))


SELECTIVE = functools.partial(
    create_selective_checkpoint_contexts, [ATTENTION, torch.ops.aten.mm.default]
)


@pytest.mark.parametrize("kind", ["qwen3", "gpt-oss"])
@pytest.mark.parametrize(
    ("options", "runs"),
    [
        ({"use_reentrant": False}, 4),
        ({"use_reentrant": True}, 4),
        ({"use_reentrant": False, "context_fn": SELECTIVE}, 2),
    ],
    ids=["full", "reentrant", "selective"],
)
def test_activation_checkpointing(
    kind: str, options: dict[str, Any], runs: int, sequences: list[Tensor]
) -> None:
    """The op runs once more for each of two layers, unless it is in the save list."""
    model = tiny(kind)
    want = run(model, sequences)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    with CountAttention() as count:
        tree = PrefixTree.from_sequences(sequences)
        logits = model(**tree_transformers.model_inputs(tree)).logits
        loss = next_token_loss(tree.unpack(logits[0], dim=0), sequences)
        loss.backward()
    got = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert_same({"loss": loss.detach(), **got}, want)
    assert count.calls == runs


@pytest.mark.parametrize("kind", ["qwen3", "gemma3"])
def test_compiled_whole(kind: str, sequences: list[Tensor]) -> None:
    """Without a graph break, once for all trees but for the second one's dynamic lengths."""
    model = tiny(kind)
    batches = [sequences, multi_turn(6), multi_turn(7)]
    want = [run(model, batch) for batch in batches]
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    model.forward = torch.compile(model.forward, backend=counter, fullgraph=True)
    for batch, expected in zip(batches, want, strict=True):
        assert_same(run(model, batch), expected)
    assert counter.frame_count <= 2


def test_compiled_by_block(sequences: list[Tensor]) -> None:
    """Each layer on its own, by Inductor; all layers share the code."""
    model = tiny("qwen3")
    want = run(model, sequences)
    for layer in model.model.layers:
        layer.compile(fullgraph=True)
    assert_same(run(model, sequences), want)


def test_compiled_blocks_in_checkpoints(sequences: list[Tensor]) -> None:
    model = tiny("gemma3")
    want = run(model, sequences)
    model.gradient_checkpointing_enable(
        gradient_checkpointing_kwargs={"use_reentrant": False, "context_fn": SELECTIVE}
    )
    for layer in model.model.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    assert_same(run(model, sequences), want)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch.distributed is missing")
def test_fully_shard(tmp_path: Path) -> None:
    """Two processes, each with its own tree: the mean of the gradients of both."""
    model = tiny("gemma3")
    runs = [run(model, multi_turn(seed)) for seed in fsdp.SEEDS]
    want = {name: (runs[0][name] + runs[1][name]) / 2 for name in runs[0]}
    results = fsdp.run_workers(tmp_path)
    for variant in fsdp.VARIANTS:
        assert_same(results[variant], want)
    half = results["mixed precision"]
    assert half.keys() == want.keys()
    assert abs(half["loss"] - want["loss"]) < 2e-2
