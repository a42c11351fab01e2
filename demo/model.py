"""A small Hugging Face causal LM, and its runs on the tree and on the trajectories."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface, Qwen3Config, Qwen3ForCausalLM

from tree_attn_op import PrefixTree, TreeMask, tree_attention

from .batch import VOCABULARY

EXPLICIT_OP = "tree_attn_op_demo"


def build(device: str, *, layers: int, hidden_size: int) -> Qwen3ForCausalLM:
    """A Qwen3 with random weights in float32; nothing is downloaded."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=hidden_size // 64 * 2,
        num_key_value_heads=hidden_size // 64,
        head_dim=64,
        max_position_embeddings=4096,
        attn_implementation="flex_attention",
        use_cache=False,
    )
    return Qwen3ForCausalLM(config).to(device)


def packed_inputs(tree: PrefixTree) -> dict[str, object]:
    """The model's arguments for the whole tree as one sequence.

    The mask must be given: without one, transformers takes position ids that jump, as they do
    where the tree forks, for the starts of unrelated sequences.
    """
    return {
        "input_ids": tree.input_ids[None],
        "position_ids": tree.position_ids[None],
        "attention_mask": tree.mask.block_mask,
    }


def packed_logits(model: nn.Module, tree: PrefixTree) -> list[Tensor]:
    """Logits [length, vocabulary] of each trajectory from one run over the tree."""
    logits = model(**packed_inputs(tree)).logits
    return tree.unpack(logits[0], dim=0)


def unpacked_logits(model: nn.Module, sequences: list[Tensor], device: str) -> list[Tensor]:
    """The same from a padded batch of all trajectories; causality hides the padding."""
    lengths = [sequence.numel() for sequence in sequences]
    logits = model(input_ids=pad_sequence(sequences, batch_first=True).to(device)).logits
    return [row[:length] for row, length in zip(logits, lengths, strict=True)]


def use_explicit_op(model: Qwen3ForCausalLM, mask: TreeMask) -> None:
    """Make the model call `tree_attention` itself, without any compilation."""

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: object,
        scaling: float | None = None,
        **options: object,
    ) -> tuple[Tensor, None]:
        out = tree_attention(query, key, value, mask, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2), None

    AttentionInterface.register(EXPLICIT_OP, attention)
    model.set_attn_implementation(EXPLICIT_OP)
