"""Autograd of the ops: what torch.library.register_autograd does, with less of it a call.

Its wrapper fills in defaults, wraps metadata and dispatches again for every call, which costs the
host as much as a forward on a short sequence. The kernels here are registered at the same key, do
the same below autograd, and call the implementation itself where dispatching could lead nowhere
else. Everything of ``torch._C`` that they need is used by ``torch.library`` in the same way, in
PyTorch 2.11 to 2.14.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_BELOW = torch._C._after_autograd_keyset
_below_autograd = torch._C._AutoDispatchBelowAutograd


def _plain_keysets() -> frozenset[int]:
    """The keys below autograd of a call on tensors of a CPU, or of a CUDA device, and no more.

    No mode, no subclass, no lazy conjugation or negation, no other device has a say in those.
    """
    keys = torch._C.DispatchKey
    found = []
    for key in (keys.CPU, keys.CUDA):
        alone = torch._C.DispatchKeySet(key)
        found += [alone, alone.add(keys.ADInplaceOrView)]
    return frozenset(keyset.raw_repr() for keyset in found)


_PLAIN = _plain_keysets()


def _below(name: str, implementation: Callable[..., Any]) -> Callable[..., Any]:
    """The op below autograd, called with the key set and the op's arguments."""

    def below(keyset: Any, arguments: tuple[Any, ...]) -> Any:
        keyset &= _BELOW
        with _below_autograd():
            if keyset.raw_repr() in _PLAIN:
                return implementation(*arguments)
            op = getattr(torch.ops.tree_attn_op, name).default
            return op.redispatch(keyset, *arguments)

    return below


def attention_kernel(implementation: Callable[..., Any]) -> Callable[..., Any]:
    """The op ``tree_attention`` at the Autograd key.

    Args:
        implementation: the op on a CPU and on a GPU.
    """
    below = _below("tree_attention", implementation)

    class Attention(torch.autograd.Function):
        """The op with its gradients."""

        @staticmethod
        def forward(ctx: Any, keyset: Any, *arguments: Any) -> Any:
            query, key, value, q_vals, k_vals, predicate, *rest = arguments
            out, lse = below(keyset, arguments)
            ctx.save_for_backward(query, key, value, out, lse, q_vals, k_vals, *rest[:8])
            ctx.predicate, ctx.sizes = predicate, rest[8:]
            # An output that takes no part in the loss has no gradient, rather than zeros.
            ctx.set_materialize_grads(False)
            return out, lse

        @staticmethod
        def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> Any:
            if grad_out is None and grad_lse is None:
                return _NONE
            query, key, value, out, lse, q_vals, k_vals, *lists = ctx.saved_tensors
            if grad_out is None:
                grad_out = torch.zeros_like(out)
            grads = torch.ops.tree_attn_op.tree_attention_backward.default(
                grad_out,
                grad_lse,
                query,
                key,
                value,
                out,
                lse,
                q_vals,
                k_vals,
                ctx.predicate,
                *lists,
                *ctx.sizes,
            )
            return (None, *grads, *_NONE[4:])

    def kernel(keyset: Any, *arguments: Any) -> Any:
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments[:5]):
            return Attention.apply(keyset, *arguments)
        return below(keyset, arguments)

    return kernel


_NONE = (None,) * 18
"""No gradient for the key set, nor for any argument."""


def backward_kernel(implementation: Callable[..., Any]) -> Callable[..., Any]:
    """The op ``tree_attention_backward`` at the Autograd key: it has no gradients.

    Args:
        implementation: the op on a CPU and on a GPU.
    """
    below = _below("tree_attention_backward", implementation)

    class AttentionBackward(torch.autograd.Function):
        """The op, without gradients of its own."""

        @staticmethod
        def forward(ctx: Any, keyset: Any, *arguments: Any) -> Any:
            return below(keyset, arguments)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            raise RuntimeError(
                "tree attention has no second derivative: call backward without create_graph=True"
            )

    def kernel(keyset: Any, *arguments: Any) -> Any:
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments[:9]):
            return AttentionBackward.apply(keyset, *arguments)
        return below(keyset, arguments)

    return kernel
