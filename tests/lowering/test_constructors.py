"""Tensors that a mask makes, views and measures: both dialects, against what PyTorch computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from tests.lowering.checks import dense, reference
from tree_attn_op.lowering import CapturedInfo, UnsupportedMask, lower, lower_mask_mod

B, LENGTH = 3, 12
TokenMask = Callable[[Any, Any, Any, Any], Any]


def call(like: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``function(*args, **kwargs)``; a node of the graph while ``like`` is traced symbolically.

    Symbolic tracing sees calls with traced arguments only, Dynamo these too.
    """
    if isinstance(like, fx.Proxy):
        return like.tracer.create_proxy("call_function", function, args, kwargs)
    return function(*args, **kwargs)


# Each takes (b, q, k, ids), ids being int64 [B, LENGTH], and means a mask of its own.
MADE: dict[str, TokenMask] = {
    "zeros": lambda b, q, k, ids: (
        ids[b, q] + call(q, torch.zeros, (), dtype=torch.int64) == ids[b, k]
    ),
    "ones": lambda b, q, k, ids: (
        ids[b, q] - ids[b, k] < call(q, torch.ones, (), dtype=torch.int64)
    ),
    "full": lambda b, q, k, ids: ids[b, q] - ids[b, k] < call(q, torch.full, (), 2),
    "scalar_tensor": lambda b, q, k, ids: (
        (ids[b, q] < call(q, torch.scalar_tensor, 2, dtype=torch.int64)) | (q >= k)
    ),
    "zeros_like": lambda b, q, k, ids: (ids[b, q] > torch.zeros_like(q)) & (q >= k),
    "ones_like": lambda b, q, k, ids: torch.ones_like(q, dtype=torch.bool) & (q >= k),
    "full_like": lambda b, q, k, ids: ids[b, q] - ids[b, k] > torch.full_like(q, -2),
    "new_zeros": lambda b, q, k, ids: (ids[b, k] > q.new_zeros(())) & (q >= k),
    "new_ones": lambda b, q, k, ids: ids[b, q] - ids[b, k] <= q.new_ones(()),
    "new_full": lambda b, q, k, ids: ids[b, q] - ids[b, k] <= q.new_full((), 1),
    "new_tensor": lambda b, q, k, ids: ids[b, q] - ids[b, k] <= q.new_tensor(1),
    "tensor": lambda b, q, k, ids: ids[b, q] - ids[b, k] <= call(q, torch.tensor, 1),
    "as_tensor": lambda b, q, k, ids: ids[b, q] - ids[b, k] <= call(q, torch.as_tensor, 1),
    "float that is then an integer": lambda b, q, k, ids: (
        ids[b, q] - ids[b, k] <= call(q, torch.ones, ()).to(torch.int64)
    ),
}
VIEWED: dict[str, TokenMask] = {
    "t": lambda b, q, k, ids: ids.t()[q, b] == ids[b, k],
    "transpose": lambda b, q, k, ids: ids.transpose(0, 1)[q, b] == ids.swapaxes(1, 0)[k, b],
    "permute": lambda b, q, k, ids: ids.permute(1, 0)[q, b] == ids.permute((1, 0))[k, b],
    "flatten": lambda b, q, k, ids: ids.flatten()[b * LENGTH + q] == ids[b, k],
    "ravel": lambda b, q, k, ids: ids.ravel()[b * LENGTH + q] == ids[b, k],
    "reshape": lambda b, q, k, ids: ids.reshape(-1)[b * LENGTH + q] == ids[b, k],
    "view": lambda b, q, k, ids: ids.view(B * LENGTH)[b * LENGTH + q] == ids[b, k],
    "unsqueeze": lambda b, q, k, ids: ids.unsqueeze(1)[b, 0, q] == ids[b, k],
    "select": lambda b, q, k, ids: ids.select(0, 1)[q] == ids.select(-2, 2)[k],
    "slice": lambda b, q, k, ids: ids[1:][0, q] == ids[b, k],
    "take": lambda b, q, k, ids: torch.take(ids, b * LENGTH + q) == ids[b, k],
    "0-d view": lambda b, q, k, ids: (q.view(()) >= k.reshape(())) & (ids[b, q] == ids[b, k]),
    "0-d expand": lambda b, q, k, ids: (q.expand(()) >= k.squeeze()) & (ids[b, q] > 1),
    "0-d copy": lambda b, q, k, ids: (q.clone() >= k.contiguous()) & (ids[b, q].detach() > 1),
}
MEASURED: dict[str, TokenMask] = {
    "size": lambda b, q, k, ids: (q < ids.size(1) - 3) & (q >= k) & (ids[b, q] > 0),
    "shape": lambda b, q, k, ids: (q < ids.shape[-1] - 3) & (q >= k) & (ids[b, q] > 0),
    "all sizes": lambda b, q, k, ids: (q < ids.size()[0]) & (q >= k) & (ids[b, q] > 0),
    "dim": lambda b, q, k, ids: ids[b, q] - ids[b, k] < ids.dim() + ids.ndim,
    "numel": lambda b, q, k, ids: (q * B < ids.numel() - 9) & (q >= k) & (ids[b, q] > 0),
    "dtype": lambda b, q, k, ids: q.new_ones((), dtype=ids.dtype) + ids[b, q] > ids[b, k],
}
ACCEPTED = {**MADE, **VIEWED, **MEASURED}

REFUSED: dict[str, tuple[TokenMask, str]] = {
    "1-d zeros": (
        lambda b, q, k, ids: call(q, torch.zeros, 2)[0] < ids[b, q],
        "makes a tensor of shape",
    ),
    "1-d full": (
        lambda b, q, k, ids: call(q, torch.full, (2,), 1)[0] < ids[b, q],
        "makes a tensor of",
    ),
    "1-d new_full": (lambda b, q, k, ids: q.new_full((2,), 1)[0] < ids[b, q], "makes a tensor"),
    "zeros like a row": (
        lambda b, q, k, ids: torch.zeros_like(ids)[b, q] == ids[b, k],
        "makes a tensor of shape",
    ),
    "a row of copies": (lambda b, q, k, ids: q.expand(2)[0] >= k, "makes a tensor of shape"),
    "another dtype": (lambda b, q, k, ids: ids.view(torch.int32)[b, q] == k, "another dtype"),
    "squeeze": (lambda b, q, k, ids: ids.squeeze()[b, q] == ids[b, k], "uses squeeze"),
    "flatten of some": (
        lambda b, q, k, ids: ids.flatten(1)[b, q] == ids[b, k],
        "flatten of some of the dimensions",
    ),
    "a list": (
        lambda b, q, k, ids: call(q, torch.tensor, [1, 2])[0] < ids[b, q],
        "torch.tensor of a list",
    ),
    "item": (lambda b, q, k, ids: q >= ids[0, 0].item(), "reads the contents of a tensor"),
    "tolist": (lambda b, q, k, ids: q >= ids.tolist()[0][0], "reads the contents of a tensor"),
    "an attribute": (lambda b, q, k, ids: ids.real[b, q] == ids[b, k], "the attribute 'real'"),
}


def group_ids() -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randint(0, 4, (B, LENGTH), generator=generator)


def graph_of(mask: TokenMask) -> fx.GraphModule:
    """The mask as Dynamo would write it: methods, operators and attributes of proxies."""

    def function(b: Any, h: Any, q: Any, k: Any, ids: Any) -> Any:
        return mask(b, q, k, ids)

    return fx.symbolic_trace(function)


def expected_of(mask: TokenMask, ids: Tensor) -> Tensor:
    return reference(lambda b, h, q, k: mask(b, q, k, ids), B, LENGTH, LENGTH)


@pytest.mark.parametrize("name", ACCEPTED)
def test_as_dynamo_writes_it(name: str) -> None:
    ids = group_ids()
    lowered = lower(graph_of(ACCEPTED[name]), [CapturedInfo.of(ids)])
    assert torch.equal(
        dense(lowered, [ids], B, LENGTH, LENGTH), expected_of(ACCEPTED[name], ids)
    ), lowered.predicate


@pytest.mark.parametrize("name", ACCEPTED)
def test_as_aten_operations(name: str) -> None:
    ids = group_ids()
    mask = ACCEPTED[name]
    lowered, captured = lower_mask_mod(lambda b, h, q, k: mask(b, q, k, ids), "cpu")
    assert torch.equal(dense(lowered, captured, B, LENGTH, LENGTH), expected_of(mask, ids)), (
        lowered.predicate
    )


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    mask, reason = REFUSED[name]
    with pytest.raises(UnsupportedMask, match=reason):
        lower(graph_of(mask), [CapturedInfo.of(group_ids())])
