"""Causal attention over ragged sequences, by the fastest kernel that is installed.

FlashAttention-4 (`flash_attn.cute`), else PyTorch's own varlen attention (FlashAttention-2), else
one call of scaled_dot_product_attention a sequence, which runs anywhere.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right


@dataclass(frozen=True)
class Ragged:
    """Lengths of sequences whose tokens lie one after another; queries end where keys end.

    Attributes:
        q_lens, k_lens: tokens of each sequence, no more queries than keys.
        cu_q, cu_k: int32 [sequences + 1], where each begins and the last ends.
    """

    q_lens: tuple[int, ...]
    k_lens: tuple[int, ...]
    cu_q: Tensor
    cu_k: Tensor

    @classmethod
    def of(
        cls, q_lens: Sequence[int], k_lens: Sequence[int], device: torch.device | str
    ) -> Ragged:
        def offsets(lens: Sequence[int]) -> Tensor:
            return torch.tensor([0, *accumulate(lens)], dtype=torch.int32, device=device)

        return cls(tuple(q_lens), tuple(k_lens), offsets(q_lens), offsets(k_lens))

    @property
    def max_q(self) -> int:
        return max(self.q_lens)

    @property
    def max_k(self) -> int:
        return max(self.k_lens)


VarlenCall = Callable[[Tensor, Tensor, Tensor, Ragged], Tensor]
"""(query [Tq, Hq, D], key [Tk, Hkv, D], value [Tk, Hkv, D], lengths) -> out [Tq, Hq, D]."""


@cache
def flash_attention_4_missing() -> str | None:
    """Why FlashAttention-4 cannot be used here, None where it can."""
    if not torch.cuda.is_available():
        return "needs a CUDA GPU"
    parent = importlib.util.find_spec("flash_attn")
    if parent is None or importlib.util.find_spec("flash_attn.cute") is None:
        return "flash_attn.cute (FlashAttention-4) is not installed"
    return None


def flash_attention_4(query: Tensor, key: Tensor, value: Tensor, ragged: Ragged) -> Tensor:
    """Its own varlen function, whose causal mask is aligned to the ends."""
    from flash_attn.cute import flash_attn_varlen_func

    out, _ = flash_attn_varlen_func(
        query,
        key,
        value,
        cu_seqlens_q=ragged.cu_q,
        cu_seqlens_k=ragged.cu_k,
        max_seqlen_q=ragged.max_q,
        max_seqlen_k=ragged.max_k,
        causal=True,
    )
    return out


def pytorch_varlen(query: Tensor, key: Tensor, value: Tensor, ragged: Ragged) -> Tensor:
    """torch.nn.attention.varlen, FlashAttention-2 unless something else was activated."""
    call = _varlen_attn()
    return call(query, key, value, ragged.cu_q, ragged.cu_k, ragged.max_q, ragged.max_k)


def _varlen_attn() -> Callable[..., Any]:
    """Causal varlen_attn with fewer key/value heads than query heads."""
    from torch.nn.attention.varlen import varlen_attn

    options: dict[str, Any] = {"window_size": (-1, 0)}
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        # torch 2.11 has no such keyword and takes fewer key/value heads as they are.
        options["enable_gqa"] = True
    return partial(varlen_attn, **options)


def one_by_one(query: Tensor, key: Tensor, value: Tensor, ragged: Ragged) -> Tensor:
    """A call of scaled_dot_product_attention for each sequence."""
    outs = []
    parts = (x.split(lens) for x, lens in ((query, ragged.q_lens), (key, ragged.k_lens)))
    for q, k, v in zip(*parts, value.split(ragged.k_lens), strict=True):
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        # The class that stands for this mask does not take fewer key/value heads.
        group = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        mask = causal_lower_right(q.shape[2], k.shape[2])
        outs.append(F.scaled_dot_product_attention(q, k, v, attn_mask=mask)[0].transpose(0, 1))
    return torch.cat(outs)


@cache
def best_varlen(device: str, dtype: torch.dtype) -> tuple[str, VarlenCall]:
    """The fastest kernel that is installed for a device and dtype, and what to call it."""
    if device != "cpu" and dtype in (torch.bfloat16, torch.float16):
        if flash_attention_4_missing() is None:
            return "FlashAttention-4 varlen", flash_attention_4
        if importlib.util.find_spec("torch.nn.attention.varlen") is not None:
            return "FlashAttention-2 varlen", pytorch_varlen
    return "SDPA, one call a sequence", one_by_one
