"""On a GPU, where flex has kernels for training: the same forward and backward, both compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache
from torch.nn.attention.flex_attention import create_block_mask

import passes

from .helpers import REWRITTEN, Tree, attention, form_1, qkv
from .test_rewrite import per_head, top_k_lists, with_empty_rows

pytestmark = pytest.mark.gpu

LENGTH = 700


def on_gpu(form: Any, batch: int = 2) -> tuple[Any, list[torch.Tensor]]:
    tree = Tree(batch, LENGTH)
    for name in ("node", "parent", "tin", "tout", "end"):
        setattr(tree, name, getattr(tree, name).cuda())
    with torch.device("cuda"):
        mask = create_block_mask(form(tree), batch, None, LENGTH, LENGTH, device="cuda")
    tensors = qkv(batch, LENGTH, dim=64, dtype=torch.bfloat16)
    return mask, [tensor.cuda().requires_grad_() for tensor in tensors]


def run(mask: Any, tensors: list[torch.Tensor], **settings: Any) -> list[torch.Tensor]:
    torch._dynamo.reset()
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    with fresh_cache():
        out = torch.compile(lambda *t: attention(*t, mask), **settings)(*leaves)
        out.float().cos().sum().backward()
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def expect_as_flex(mask: Any, tensors: list[torch.Tensor], **settings: Any) -> None:
    expected = run(mask, tensors)
    assert counters["inductor"]["tree_attn_rewritten"] == 0
    actual = run(mask, tensors, backend=passes.tree_attn, **settings)
    assert counters["inductor"]["tree_attn_rewritten"] == 1
    for given, wanted in zip(actual, expected, strict=True):
        torch.testing.assert_close(given, wanted, atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("form", REWRITTEN)
def test_equals_compiled_flex(form: int) -> None:
    expect_as_flex(*on_gpu(REWRITTEN[form]))


@pytest.mark.parametrize("change", [top_k_lists, with_empty_rows, per_head])
def test_hand_made_lists(change: Any) -> None:
    mask, tensors = on_gpu(form_1)
    expect_as_flex(change(mask.to("cpu")).to("cuda"), tensors)


def test_cuda_graphs() -> None:
    mask, tensors = on_gpu(form_1)
    expect_as_flex(mask, tensors, mode="reduce-overhead")


def test_decoding_is_kept() -> None:
    mask, tensors = on_gpu(form_1)
    del mask
    ids = torch.zeros(2, LENGTH, dtype=torch.int64, device="cuda")
    short = create_block_mask(
        lambda b, h, q, k: ids[b, q] == ids[b, k], 2, None, 64, LENGTH, device="cuda"
    )
    (call,) = passes.explain(attention, tensors[0][:, :, :64], *tensors[1:], short)
    assert not call.rewritten
    assert "decoding kernel" in call.reason
