"""attn_implementation="tree_attention": models on a tree equal their unpacked runs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tree_attn_op import PrefixTree, TreeMask
from tree_attn_op.integrations import transformers as tree_transformers

from .models import WINDOW, tiny, transformers
from .trajectories import (
    assert_equal_runs,
    multi_turn,
    next_token_loss,
    unpacked_logits,
)


@pytest.fixture(autouse=True)
def registered() -> None:
    tree_transformers.register()


@pytest.fixture
def sequences() -> list[Tensor]:
    return multi_turn(3)


@pytest.fixture
def tree(sequences: list[Tensor]) -> PrefixTree:
    return PrefixTree.from_sequences(sequences)


def unpacked(model: Any, sequences: list[Tensor]) -> list[Tensor]:
    """The same weights through transformers' own attention."""
    implementation = model.config._attn_implementation
    model.set_attn_implementation("eager")
    logits = unpacked_logits(model, sequences)
    model.set_attn_implementation(implementation)
    return logits


def test_the_trajectories_fork_beyond_the_window(tree: PrefixTree) -> None:
    """Depth and place in the pack differ, and paths are longer than the window."""
    assert tree.tree_token_ratio < 0.8
    assert int(tree.position_ids.max()) > 2 * WINDOW
    assert (tree.position_ids.diff() < 0).sum() > 4


@pytest.mark.parametrize(
    "kind", ["llama", "mistral", "qwen3", "qwen3-window", "gemma3", "gpt-oss"]
)
def test_logits_and_gradients_equal_the_unpacked_run(
    kind: str, tree: PrefixTree, sequences: list[Tensor]
) -> None:
    model = tiny(kind)
    packed = model(**tree_transformers.model_inputs(tree)).logits
    assert_equal_runs(model, tree, packed, sequences, unpacked(model, sequences))


def test_a_window_matters(tree: PrefixTree) -> None:
    """What the comparison above would not show if the windows were ignored on both sides."""
    model = tiny("gemma3")
    with torch.no_grad():
        cut = model(**tree_transformers.model_inputs(tree)).logits
        model.config.sliding_window = 10**6
        for layer in model.model.layers:
            if layer.self_attn.sliding_window is not None:
                layer.self_attn.sliding_window = 10**6
        whole = model(**tree_transformers.model_inputs(tree)).logits
    assert (cut - whole).abs().max() > 1e-3


@pytest.mark.parametrize("kind", ["qwen3", "gemma3"])
def test_other_ways_to_give_the_mask(kind: str, tree: PrefixTree) -> None:
    model = tiny(kind)
    inputs = tree_transformers.model_inputs(tree)
    with torch.no_grad():
        expected = model(**inputs).logits
        mask = inputs.pop("attention_mask")
        by_keyword = model(**inputs, tree_mask=mask).logits
        block_mask = model(**inputs, attention_mask=mask.block_mask).logits
        cached = model(**{**inputs, "use_cache": True}, attention_mask=mask).logits
    for logits in (by_keyword, block_mask, cached):
        torch.testing.assert_close(logits, expected)


def test_a_batch_of_trees() -> None:
    """One tree a row, of one length: the mask has a batch."""
    rows = []
    for fork in (3, 5):
        stem = list(range(1, 9))
        rows.append([torch.tensor(stem), torch.tensor([*stem[:fork], *range(20, 30 - fork)])])
    trees = [PrefixTree.from_sequences(row) for row in rows]
    length = min(tree.num_tokens for tree in trees)
    ends = torch.stack([tree.subtree_end.clamp(max=length)[:length] for tree in trees])
    mask = TreeMask.from_predicate(
        "q >= k & q < k0", ends.new_empty(2, 0, length), ends[:, None], length, length
    )
    model = tiny("gemma3")
    with torch.no_grad():
        logits = model(
            input_ids=torch.stack([tree.input_ids[:length] for tree in trees]),
            position_ids=torch.stack([tree.position_ids[:length] for tree in trees]),
            attention_mask=mask,
            use_cache=False,
        ).logits
        for index, tree in enumerate(trees):
            alone = model(**tree_transformers.model_inputs(tree)).logits
            torch.testing.assert_close(logits[index], alone[0, :length], atol=1e-5, rtol=1e-5)


def test_training_equals_the_unpacked_training() -> None:
    """50 steps of AdamW, each on another tree; the loss of each step is the same to 1e-4."""
    models = [tiny("qwen3"), tiny("qwen3", "sdpa")]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=2e-3) for model in models]
    first = last = 0.0
    for step in range(50):
        sequences = multi_turn(step, turns=4, longest=16)
        tree = PrefixTree.from_sequences(sequences)
        assert (tree.position_ids.diff() < 0).sum() >= 3, "no tree with forks"
        packed = models[0](**tree_transformers.model_inputs(tree)).logits
        losses = []
        for optimizer, logits in zip(
            optimizers,
            (tree.unpack(packed[0], dim=0), unpacked_logits(models[1], sequences)),
            strict=True,
        ):
            loss = next_token_loss(logits, sequences)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert abs(losses[0] - losses[1]) < 1e-4, f"step {step}: {losses}"
        first, last = first or losses[0], losses[0]
    assert last < first - 0.3, f"it has not learned anything: {first} to {last}"


class TestRefusals:
    """What the implementation does not compute it says."""

    def test_no_mask(self, tree: PrefixTree) -> None:
        inputs = tree_transformers.model_inputs(tree)
        del inputs["attention_mask"]
        with pytest.raises(ValueError, match=r"no tree mask reached attention: .*attention_mask="):
            tiny("llama")(**inputs)

    def test_a_padding_mask(self, tree: PrefixTree) -> None:
        inputs = tree_transformers.model_inputs(tree)
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        with pytest.raises(ValueError, match=r"tensor of shape \(1, \d+\).*must be a TreeMask"):
            tiny("qwen3")(**inputs)

    def test_both_masks(self, tree: PrefixTree) -> None:
        with pytest.raises(ValueError, match="got both"):
            tiny("llama")(**tree_transformers.model_inputs(tree), tree_mask=tree.mask)

    @pytest.mark.parametrize("implementation", ["sdpa", "eager", "flex_attention"])
    def test_another_implementation_does_not_lose_the_mask(
        self, implementation: str, tree: PrefixTree
    ) -> None:
        with pytest.raises((TypeError, AttributeError), match="TreeMask"):
            tiny("llama", implementation)(**tree_transformers.model_inputs(tree))

    def test_softcap(self, tree: PrefixTree) -> None:
        with pytest.raises(ValueError, match="does not support softcap: logit soft-capping"):
            tiny("gemma2")(**tree_transformers.model_inputs(tree))

    def test_dropout(self, tree: PrefixTree) -> None:
        model = tiny("llama", attention_dropout=0.1)
        with pytest.raises(ValueError, match=r"no dropout, got 0\.1"):
            model(**tree_transformers.model_inputs(tree))
        model.eval()(**tree_transformers.model_inputs(tree))

    def test_a_filled_cache(self, tree: PrefixTree) -> None:
        model = tiny("llama").eval()
        inputs = {**tree_transformers.model_inputs(tree), "use_cache": True}
        n, cache = tree.num_tokens, transformers.DynamicCache(config=model.config)
        model(**inputs, past_key_values=cache)
        with pytest.raises(ValueError, match=rf"a cache of {n} tokens|for lengths {n}"):
            model(**inputs, past_key_values=cache)

    def test_another_length(self, tree: PrefixTree) -> None:
        inputs = tree_transformers.model_inputs(tree)
        inputs["input_ids"] = inputs["input_ids"][:, :-1]
        inputs["position_ids"] = inputs["position_ids"][:, :-1]
        with pytest.raises(ValueError, match="the mask was built for lengths"):
            tiny("llama")(**inputs)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"allow_is_bidirectional_skip": True}, "bidirectional attention takes no tree mask"),
            ({"use_vmap": True}, "adds a mask of its own"),
            ({"allow_is_causal_skip": False}, "adds a mask of its own"),
            (
                {"local_size": 8, "config": transformers.Llama4TextConfig(attention_chunk_size=8)},
                "chunked attention",
            ),
        ],
    )
    def test_masks_that_models_add(
        self, options: dict[str, Any], message: str, tree: PrefixTree
    ) -> None:
        with pytest.raises(ValueError, match=message):
            tree_transformers.tree_attention_mask(attention_mask=tree.mask, **options)

    def test_windows_that_contradict_each_other(self, tree: PrefixTree) -> None:
        layer = tree_transformers.LayerMask(tree.mask, 5)
        one = torch.randn(1, 1, tree.num_tokens, 8)
        with pytest.raises(ValueError, match=r"window of 6, the mask.* window of 5"):
            tree_transformers.tree_attention_forward(
                torch.nn.Identity(), one, one, one, layer, sliding_window=6
            )
        with pytest.raises(ValueError, match="needs position_ids"):
            tree_transformers.tree_attention_forward(torch.nn.Identity(), one, one, one, layer)

    @pytest.mark.parametrize("option", ["position_bias", "indices", "cu_seq_lens_q"])
    def test_options_of_other_attentions(self, option: str, tree: PrefixTree) -> None:
        one = torch.randn(1, 1, tree.num_tokens, 8)
        with pytest.raises(ValueError, match=f"does not support {option}"):
            tree_transformers.tree_attention_forward(
                torch.nn.Identity(), one, one, one, tree.mask, **{option: torch.ones(1)}
            )


@pytest.fixture
def other_name() -> Iterator[str]:
    name = "tree_attention_for_this_test"
    yield name
    for interface in (transformers.AttentionInterface, transformers.AttentionMaskInterface):
        interface._global_mapping.pop(name, None)


def test_register_with_a_backend(
    other_name: str, tree: PrefixTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The argument wins over the environment variable, and both backends give the same."""
    with pytest.raises(ValueError, match="backend must be one of tree, flex, got 'cuda'"):
        tree_transformers.register(other_name, backend="cuda")
    tree_transformers.register(other_name, backend="flex")
    monkeypatch.setenv("TREE_ATTN_BACKEND", "nonsense")
    inputs = tree_transformers.model_inputs(tree)
    with torch.no_grad():
        by_flex = tiny("gemma3", other_name)(**inputs).logits
        with pytest.raises(ValueError, match="TREE_ATTN_BACKEND must be one of"):
            tiny("gemma3")(**inputs)
        monkeypatch.setenv("TREE_ATTN_BACKEND", "tree")
        by_tree = tiny("gemma3")(**inputs).logits
    torch.testing.assert_close(by_flex, by_tree, atol=1e-5, rtol=1e-5)


def test_nothing_is_registered_on_import() -> None:
    code = """
import sys
import tree_attn_op.integrations.transformers
assert "transformers" not in sys.modules
assert "megatron" not in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
