"""Unmodified attn_implementation="flex_attention", rewritten by the pass: logits and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import passes
from tree_attn_op import PrefixTree
from tree_attn_op.integrations.transformers import flex_attention_masks

from ..passes.helpers import PassThenEager
from .models import WINDOW, tiny
from .trajectories import assert_equal_runs, multi_turn, unpacked_logits


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def inputs_of(model: Any, tree: PrefixTree) -> dict[str, Any]:
    return {
        "input_ids": tree.input_ids[None],
        "position_ids": tree.position_ids[None],
        "attention_mask": flex_attention_masks(model.config, tree.mask, tree.position_ids),
        "use_cache": False,
    }


@pytest.mark.parametrize(
    ("kind", "predicates"),
    [
        ("llama", ["q >= k & q < k0"] * 2),
        ("mistral", [f"q >= k & q < k0 & q0 - k1 < {WINDOW}"] * 2),
        ("gemma3", [f"q >= k & q < k0 & q0 - k1 < {WINDOW}", "q >= k & q < k0"]),
    ],
)
def test_logits_and_gradients_equal_the_unpacked_run(
    kind: str, predicates: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # flex refuses to be traced for training on a CPU; the op that the pass puts in has a backward.
    flex = torch.nn.attention.flex_attention
    monkeypatch.setattr(flex, "_validate_device", lambda *tensors: None)
    sequences = multi_turn(3)
    tree = PrefixTree.from_sequences(sequences)
    model = tiny(kind, "flex_attention")
    inputs = inputs_of(model, tree)

    def logits(**inputs: Any) -> Tensor:
        return model(**inputs).logits

    backend = PassThenEager()
    packed = torch.compile(logits, backend=backend, fullgraph=True)(**inputs)
    assert not backend.report.kept, str(backend.report)
    assert [call.predicate for call in backend.report] == predicates
    model.set_attn_implementation("eager")
    assert_equal_runs(model, tree, packed, sequences, unpacked_logits(model, sequences))


def test_the_installed_pass_and_plain_torch_compile() -> None:
    """As a user runs it: torch.compile(model), nothing else."""
    sequences = multi_turn(3)
    tree = PrefixTree.from_sequences(sequences)
    model = tiny("qwen3", "flex_attention", num_hidden_layers=1).eval()
    with torch.no_grad(), passes.install():
        packed = torch.compile(model)(**inputs_of(model, tree)).logits
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = unpacked_logits(model, sequences)
    for one, other in zip(tree.unpack(packed[0], dim=0), expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_a_mask_for_each_kind_of_layer() -> None:
    tree = PrefixTree.from_sequences(multi_turn(3))

    def masks(kind: str) -> Any:
        return flex_attention_masks(
            tiny(kind, "flex_attention").config, tree.mask, tree.position_ids
        )

    assert sorted(masks("gpt-oss")) == ["full_attention", "sliding_attention"]
    assert (
        masks("llama")
        is masks("qwen3")
        is flex_attention_masks(
            tiny("gemma3", "flex_attention").config, tree.mask, tree.position_ids
        )["full_attention"]
    )
    config = tiny("llama", "flex_attention").config
    config.layer_types = ["chunked_attention", "full_attention"]
    with pytest.raises(ValueError, match="the model has chunked_attention"):
        flex_attention_masks(config, tree.mask, tree.position_ids)
