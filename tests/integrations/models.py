"""Tiny Hugging Face models with random weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from .trajectories import VOCABULARY

transformers = pytest.importorskip("transformers")

WINDOW = 7
"""Shorter than most trajectories, so that it cuts paths through the tree."""

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
_MIXED = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}

_KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"sliding_window": WINDOW}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 16}),
    "qwen3-window": (
        "Qwen3Config",
        "Qwen3ForCausalLM",
        {"head_dim": 16, "use_sliding_window": True, **_MIXED},
    ),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", {"head_dim": 16, **_MIXED}),
    "gemma3": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {"head_dim": 16, "query_pre_attn_scalar": 24, **_MIXED},
    ),
    "gpt-oss": (
        "GptOssConfig",
        "GptOssForCausalLM",
        {"head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 1, **_MIXED},
    ),
}


def tiny(kind: str, implementation: str = "tree_attention", **changes: Any) -> Any:
    """A model of one of the kinds, float32 in training mode, and what it says of its attention."""
    config_name, model_name, own = _KINDS[kind]
    config = getattr(transformers, config_name)(
        **{**_COMMON, **own, **changes}, attn_implementation=implementation
    )
    torch.manual_seed(0)
    model = getattr(transformers, model_name)(config)
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter)
    return model.train()
