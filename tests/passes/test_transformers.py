"""A Hugging Face model with ``attn_implementation="flex_attention"`` is rewritten as it is."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from .helpers import PassThenEager, Tree, form_1

transformers = pytest.importorskip("transformers")


def tiny_llama() -> torch.nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        attn_implementation="flex_attention",
    )
    return transformers.LlamaForCausalLM(config).eval()


@torch.no_grad()
def test_llama_is_rewritten() -> None:
    model, length = tiny_llama(), 192
    tree = Tree(2, length)
    mask = create_block_mask(form_1(tree), 2, None, length, length, device="cpu")
    tokens = torch.randint(0, 64, (2, length))
    positions = torch.arange(length).expand(2, -1)

    def logits(tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return model(
            input_ids=tokens, position_ids=positions, attention_mask=mask, use_cache=False
        ).logits

    backend = PassThenEager()
    out = torch.compile(logits, backend=backend)(tokens, positions)
    assert len(backend.report) == 3, str(backend.report)
    assert not backend.report.kept, str(backend.report)
    assert {call.predicate for call in backend.report} == {"q >= k & (q0 == k0 | q1 == k0)"}

    # The same model with the mask written out, through another attention altogether.
    model.set_attn_implementation("sdpa")
    b = torch.arange(2).view(-1, 1, 1, 1)
    q = torch.arange(length).view(1, 1, -1, 1)
    k = torch.arange(length).view(1, 1, 1, -1)
    written_out = model(
        input_ids=tokens,
        position_ids=positions,
        attention_mask=form_1(tree)(b, 0, q, k),
        use_cache=False,
    ).logits
    torch.testing.assert_close(out, written_out, atol=1e-5, rtol=1e-4)
