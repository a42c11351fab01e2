"""Attention over gathered keys and values, with their gradients brought back to their ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .collectives import Group, in_order, start_gather, start_reduce_scatter, wait

_NUM_LISTS = 8


class ShardedAttention(torch.autograd.Function):
    """out and lse of this rank's queries against all ranks' keys.

    Key heads go in chunks: all exchanges are started first and each is waited for just before its
    chunk is computed, so that the later ones run beside the computation of the earlier ones. The
    sums of gradients are started chunk by chunk and waited for at the end.

    Arguments are the op's, ``places`` and ``tokens`` of :mod:`.collectives`, the group, then
    ``num_chunks``, ``reshard_after_forward`` and ``reduce_dtype`` of
    :func:`context_parallel_attention`. Key and value come padded to the longest shard: nothing
    here computes with lengths, of which Dynamo of torch 2.11 loses track in such functions.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        q_vals: Tensor,
        k_vals: Tensor,
        predicate: str,
        *rest: Any,
    ) -> tuple[Tensor, Tensor]:
        lists, rest = rest[:_NUM_LISTS], rest[_NUM_LISTS:]
        q_block, kv_block, scale, places, tokens, group, num_chunks, reshard, reduce_dtype = rest
        pending = start_gathers(key, value, group, num_chunks)
        outs, lses, gathered = [], [], []
        for chunk in range(num_chunks):
            full_key, full_value = end_gather(pending[chunk], key.shape[3], places)
            out, lse = torch.ops.tree_attn_op.tree_attention.default(
                _heads(query, chunk, num_chunks),
                full_key,
                full_value,
                q_vals,
                k_vals,
                predicate,
                *_lists_of_heads(lists, chunk, num_chunks),
                q_block,
                kv_block,
                scale,
            )
            outs.append(out)
            lses.append(lse)
            gathered += [full_key, full_value]
        out, lse = _joined(outs), _joined(lses)
        kept = [key, value] if reshard else gathered
        ctx.save_for_backward(query, out, lse, q_vals, k_vals, places, tokens, *lists, *kept)
        ctx.mask = predicate, q_block, kv_block, scale
        ctx.options = group, num_chunks, reshard, reduce_dtype
        # An output that takes no part in the loss has no gradient, rather than a tensor of zeros.
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Any, grad_lse: Any) -> Any:
        query, out, lse, q_vals, k_vals, places, tokens, *rest = ctx.saved_tensors
        lists, kept = rest[:_NUM_LISTS], rest[_NUM_LISTS:]
        predicate, q_block, kv_block, scale = ctx.mask
        group, num_chunks, reshard, reduce_dtype = ctx.options
        given = grad_lse.unsqueeze(-1) if grad_out is None and grad_lse is not None else grad_out
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        pending: list[Tensor] = []
        if reshard:
            tied = _tied(kept[1], grad_out if given is None else given)
            pending = start_gathers(kept[0], tied, group, num_chunks)
        dqs, sums = [], []
        for chunk in range(num_chunks):
            if reshard:
                key, value = end_gather(pending[chunk], kept[0].shape[3], places)
            else:
                key, value = kept[2 * chunk], kept[2 * chunk + 1]
            dq, dk, dv = torch.ops.tree_attn_op.tree_attention_backward.default(
                _heads(grad_out, chunk, num_chunks),
                None if grad_lse is None else _heads(grad_lse, chunk, num_chunks),
                _heads(query, chunk, num_chunks),
                key,
                value,
                _heads(out, chunk, num_chunks),
                _heads(lse, chunk, num_chunks),
                q_vals,
                k_vals,
                predicate,
                *_lists_of_heads(lists, chunk, num_chunks),
                q_block,
                kv_block,
                scale,
            )
            dqs.append(dq)
            rows = rows_of(dk, dv)
            rows = rows if reduce_dtype is None else rows.to(reduce_dtype)
            sums.append(start_reduce_scatter(rows, tokens, group))
        own = [wait(one).to(query.dtype) for one in sums]
        pairs = [_heads_of_rows(one, key.shape[3]) for one in own]
        dk, dv = _joined([pair[0] for pair in pairs]), _joined([pair[1] for pair in pairs])
        return (_joined(dqs), dk, dv, *(None,) * 20)


def rows_of(key: Tensor, value: Tensor) -> Tensor:
    """Key and value side by side, a row for each token: ``[S, B, H, D + Dv]``."""
    return torch.cat([key.permute(2, 0, 1, 3), value.permute(2, 0, 1, 3)], -1)


def _heads_of_rows(rows: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """The inverse of :func:`rows_of`, as views."""
    both = rows.permute(1, 2, 0, 3)
    return both[..., :head_dim], both[..., head_dim:]


def start_gathers(key: Tensor, value: Tensor, group: Group, num_chunks: int) -> list[Tensor]:
    """Begin to gather this rank's padded key and value, chunk of heads by chunk of heads."""
    return [
        start_gather(
            rows_of(_heads(key, chunk, num_chunks), _heads(value, chunk, num_chunks)),
            group,
        )
        for chunk in range(num_chunks)
    ]


def _tied(tensor: Tensor, gradient: Tensor) -> Tensor:
    """The tensor, as something that cannot be computed before the gradient is there.

    A compiler would else find that the forward has gathered it already, and keep the result.
    """
    nothing = gradient[..., :0].to(tensor.dtype).reshape(*tensor.shape[:3], 0)
    return torch.cat([tensor, nothing], -1)


def end_gather(pending: Tensor, head_dim: int, places: Tensor) -> tuple[Tensor, Tensor]:
    """All ranks' key ``[B, H, S, D]`` and value of a chunk, each dense as ``[S, B, H, *]``."""
    gathered = wait(pending)
    key, value = (
        in_order(rows, places).permute(1, 2, 0, 3)
        for rows in (gathered[..., :head_dim], gathered[..., head_dim:])
    )
    return key, value


def _heads(tensor: Tensor, chunk: int, num_chunks: int) -> Tensor:
    """The heads (dimension 1) of one chunk."""
    size = tensor.shape[1] // num_chunks
    return tensor[:, chunk * size : (chunk + 1) * size]


def _lists_of_heads(
    lists: tuple[Tensor | None, ...] | list[Tensor | None], chunk: int, num_chunks: int
) -> list[Tensor | None]:
    """Lists that differ by head at the heads of one chunk; others as they are."""
    return [
        one if one is None or one.shape[1] == 1 else _heads(one, chunk, num_chunks)
        for one in lists
    ]


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)
