"""One attention call for all engines: tensor layouts, masks of both kinds, sinks, backends."""

from __future__ import annotations

import os
from functools import cache
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from ..api import tree_attention
from ..arguments import check_number, check_tensor
from ..blocks import BlockLists
from ..lasting import making_lasting
from ..lowering.cache import prove
from ..mask import TreeMask
from .snapshot import Snapshot

if TYPE_CHECKING:
    from collections.abc import Callable

BACKEND_VARIABLE = "TREE_ATTN_BACKEND"
"""Environment variable that names the backend where the caller does not."""

BACKENDS = ("tree", "flex")
"""``tree``: this project's op. ``flex``: PyTorch's flex_attention, to compare with."""

Layout = Literal["BHSD", "BSHD", "SBHD", "SHD"]
"""Order of dimensions: batch, sequence, heads, head dim. ``SHD`` is one packed sequence."""

_TO_BHSD: dict[str, tuple[int, ...]] = {
    "BHSD": (0, 1, 2, 3),
    "BSHD": (0, 2, 1, 3),
    "SBHD": (1, 2, 0, 3),
}
_FROM_BHSD: dict[str, tuple[int, ...]] = {
    "BHSD": (0, 1, 2, 3),
    "BSHD": (0, 2, 1, 3),
    "SBHD": (2, 0, 1, 3),
}


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: TreeMask | BlockMask,
    *,
    layout: Layout = "BHSD",
    scale: float | None = None,
    sink: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Attention under a tree mask, in the layout and through the backend that an engine uses.

    Differentiable in query, key, value and sink. Heads of key and value are not repeated.

    Args:
        query: of the given layout with Hq heads, for instance ``[B, S, Hq, D]``.
        key: likewise, with Hkv heads; Hkv divides Hq.
        value: as key, with Dv instead of D.
        mask: which tokens see which. A BlockMask is proven once and kept while it lives.
        layout: order of the dimensions of query, key, value and the result.
        scale: factor of the scores; None: ``D ** -0.5``.
        sink: ``[Hq]``, a logit for each head that takes its share of the softmax and has no value
            (an attention sink; 0 is "softmax off by one"). None: no sink.
        backend: ``"tree"`` or ``"flex"``; None: what the environment variable
            ``TREE_ATTN_BACKEND`` says at this call, or ``"tree"``. Compiled code reads it when it
            is traced.

    Returns:
        Tensor in the layout of query, its last dimension Dv.

    Raises:
        TypeError: the mask is neither, or dtypes do not fit.
        ValueError: sizes that do not fit each other, an unknown layout or backend.
        UnsupportedMask: a BlockMask whose mask_mod cannot be proven.
    """
    chosen = choose_backend(backend)
    query, key, value = (
        _to_bhsd(name, tensor, layout)
        for name, tensor in (("query", query), ("key", key), ("value", value))
    )
    if scale is not None:
        check_number("scale", scale)
    if sink is not None:
        _check_sink(sink, query)
    run = _flex if chosen == "flex" else _tree
    out, lse = run(query, key, value, mask, scale, sink is not None)
    if sink is not None:
        assert lse is not None
        out = add_sink(out, lse, sink)
    return _from_bhsd(out, layout)


def choose_backend(backend: str | None = None) -> str:
    """The backend that is asked for: by the argument, else by ``TREE_ATTN_BACKEND``, else tree.

    Raises:
        ValueError: there is no such backend.
    """
    source = "backend"
    if backend is None:
        source, backend = BACKEND_VARIABLE, os.environ.get(BACKEND_VARIABLE) or BACKENDS[0]
    if backend not in BACKENDS:
        raise ValueError(f"{source} must be one of {', '.join(BACKENDS)}, got {backend!r}")
    return backend


def add_sink(out: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    """What attention gives once a logit without a value takes its share of every softmax.

    The softmax's denominator grows from ``exp(lse)`` to ``exp(lse) + exp(sink)``, so the output
    shrinks by ``sigmoid(lse - sink)``. The gradient through lse makes it exact for query and key.

    Args:
        out: ``[B, H, S, Dv]``.
        lse: ``[B, H, S]``, base e; -inf where a query sees nothing.
        sink: ``[H]``.

    Returns:
        Tensor of out's shape and dtype.

    Raises:
        TypeError, ValueError: these are no tensors, or their sizes or devices do not fit.
    """
    check_tensor("out", out)
    check_tensor("lse", lse)
    if out.dim() != 4 or lse.shape != out.shape[:3]:
        raise ValueError(
            "out must be [B, H, S, Dv] and lse [B, H, S] of the same sizes, got shapes "
            f"{tuple(out.shape)} and {tuple(lse.shape)}"
        )
    if not lse.is_floating_point() or lse.device != out.device:
        raise ValueError(
            f"lse must be floating and on {out.device}, got {lse.dtype} on {lse.device}"
        )
    _check_sink(sink, out)
    share = torch.sigmoid(lse - sink.to(lse.dtype).view(1, -1, 1))
    return (out * share.unsqueeze(-1)).to(out.dtype)


def as_tree_mask(mask: TreeMask | BlockMask) -> TreeMask:
    """The TreeMask that means what ``mask`` means: itself, or what is proven of a BlockMask.

    A BlockMask is proven once and the result kept while it lives and its tensors stay as they are.

    Raises:
        TypeError: it is neither.
        UnsupportedMask: the BlockMask's mask_mod is no separable predicate; ``.reason`` says why.
        RuntimeError: a BlockMask inside of compiled code.
    """
    if isinstance(mask, TreeMask):
        return mask
    if not isinstance(mask, BlockMask):
        raise TypeError(f"mask must be a TreeMask or a BlockMask, got {type(mask).__name__}")
    if torch.compiler.is_compiling():
        raise RuntimeError(
            "a BlockMask cannot be proven while torch.compile traces: make "
            "TreeMask.from_block_mask(block_mask) before the compiled code, or call "
            "flex_attention there and compile with backend='tree_attn'"
        )
    known = _proven.get(mask)
    if known is not None and known[0].is_current():
        return known[1]
    lists = BlockLists.from_block_mask(mask)
    device = lists.kv_num_blocks.device
    batch = lists.kv_num_blocks.shape[0]
    found = prove(mask.mask_mod, batch, lists.q_len, lists.kv_len, device)
    proven = TreeMask(found.predicate, *found.values(), lists)
    _proven[mask] = Snapshot([*found.captured, *lists.tensors]), proven
    return proven


_proven: WeakKeyDictionary[BlockMask, tuple[Snapshot, TreeMask]] = WeakKeyDictionary()
_block_masks: WeakKeyDictionary[TreeMask, BlockMask] = WeakKeyDictionary()


def as_block_mask(mask: TreeMask | BlockMask) -> BlockMask:
    """The flex BlockMask that means what ``mask`` means; made once for each TreeMask.

    Raises:
        TypeError: it is neither.
    """
    if isinstance(mask, BlockMask):
        return mask
    if not isinstance(mask, TreeMask):
        raise TypeError(f"mask must be a TreeMask or a BlockMask, got {type(mask).__name__}")
    if torch.compiler.is_compiling():
        return mask.block_mask
    known = _block_masks.get(mask)
    if known is None:
        with making_lasting():
            known = _block_masks[mask] = mask.block_mask
    return known


def _tree(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: TreeMask | BlockMask,
    scale: float | None,
    with_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    call, tree_mask = _call_of(mask)
    out, aux = call(
        query,
        key,
        value,
        tree_mask,
        scale=scale,
        enable_gqa=True,
        return_aux=AuxRequest(lse=with_lse),
    )
    return out, aux.lse


def _call_of(mask: Any) -> tuple[Callable[..., Any], Any]:
    """The attention function for a mask, and the mask that it takes."""
    if not isinstance(mask, (TreeMask, BlockMask)):
        # Not at the top: torch.distributed is of no use to most, and whoever has such a mask has
        # imported it.
        from ..distributed import ContextParallelMask, context_parallel_attention

        if isinstance(mask, ContextParallelMask):
            return context_parallel_attention, mask
    return tree_attention, as_tree_mask(mask)


def _flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: TreeMask | BlockMask,
    scale: float | None,
    with_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    block_mask = as_block_mask(mask)
    _check_lengths(query, key, mask)
    # On a CPU flex computes the same uncompiled, and needs no C++ compiler for it.
    compiled = torch.compiler.is_compiling() or query.device.type == "cpu"
    flex: Any = flex_attention if compiled else _compiled_flex()
    options: dict[str, Any] = {"scale": scale, "enable_gqa": True}
    if with_lse:
        options["return_aux"] = AuxRequest(lse=True)
    result = flex(query, key, value, block_mask=block_mask, **options)
    return (result[0], result[1].lse) if with_lse else (result, None)


def _check_lengths(query: Tensor, key: Tensor, mask: TreeMask | BlockMask) -> None:
    """What the tree backend says too. flex names the lengths in some versions of torch only."""
    made_for = (mask.q_len, mask.kv_len) if isinstance(mask, TreeMask) else mask.seq_lengths
    given = (query.shape[2], key.shape[2])
    if made_for != given:
        raise ValueError(
            f"the mask was built for lengths {made_for[0]} (query) and {made_for[1]} (key), got "
            f"{given[0]} and {given[1]}"
        )


@cache
def _compiled_flex() -> Callable[..., Any]:
    """flex_attention compiled, and left as it is by a pass that is installed for everything."""
    options: dict[str, Any] = {"pre_grad_custom_pass": None}
    return torch.compile(flex_attention, options=options)


def _check_sink(sink: Tensor, query: Tensor) -> None:
    check_tensor("sink", sink)
    if sink.shape != query.shape[1:2]:
        raise ValueError(
            f"sink must have one logit for each of {query.shape[1]} query heads, got shape "
            f"{tuple(sink.shape)}"
        )
    if sink.device != query.device:
        raise ValueError(
            f"sink must be on the device of query and out, {query.device}, got {sink.device}"
        )


def _to_bhsd(name: str, tensor: Tensor, layout: str) -> Tensor:
    check_tensor(name, tensor)
    if layout == "SHD":
        return _permuted(name, tensor, 3, (1, 0, 2), layout).unsqueeze(0)
    if not isinstance(layout, str) or layout not in _TO_BHSD:
        raise ValueError(f"layout must be one of {', '.join(_TO_BHSD)}, SHD, got {layout!r}")
    return _permuted(name, tensor, 4, _TO_BHSD[layout], layout)


def _permuted(name: str, tensor: Tensor, dims: int, order: tuple[int, ...], layout: str) -> Tensor:
    if tensor.dim() != dims:
        raise ValueError(
            f"layout {layout} is of {dims} dimensions, got shape {tuple(tensor.shape)} of {name}"
        )
    return tensor.permute(order)


def _from_bhsd(tensor: Tensor, layout: str) -> Tensor:
    if layout == "SHD":
        return tensor[0].transpose(0, 1)
    return tensor.permute(_FROM_BHSD[layout])
