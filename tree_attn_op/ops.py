"""The ops: schemas, fakes, autograd, autocast and the choice of implementation by device.

- ``tree_attn_op::tree_attention``: attention over the pairs that block lists and predicate allow;
- ``tree_attn_op::tree_attention_backward``: its gradients, through lse as well;
- ``tree_attn_op::block_lists``: block lists from a predicate, or finer ones from given lists;
- ``tree_attn_op::block_lists_of_mask``: block lists of a dense mask, which stands in a graph until
  the pass has proven what the mask means.

DESIGN.md has the schemas, the shapes and what always holds. Importing this needs no Triton.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import autograd, block_lists_op, blocks, cpu, list_checks, validation
from .block_lists_op import flex_lists
from .blocks import cdiv
from .implementations import gpu_kernels, on_gpu
from .kernels.choice import choose_kernels
from .kernels.configs import current
from .kernels.plans import Immediate, Plan, Plans, Substitute
from .layout import empty_like_layout

__all__ = ["NAMESPACE", "OP_SCHEMA_VERSION", "flex_lists", "forget_plans"]

NAMESPACE = "tree_attn_op"

OP_SCHEMA_VERSION = 1
"""Goes up with every change of what a graph that holds these ops means; part of cache keys."""

_MASK = """Tensor q_vals, Tensor k_vals, str predicate, Tensor kv_num_blocks, Tensor kv_indices,
    Tensor? full_kv_num_blocks, Tensor? full_kv_indices, Tensor? q_num_blocks, Tensor? q_indices,
    Tensor? full_q_num_blocks, Tensor? full_q_indices, SymInt q_block_size, SymInt kv_block_size,
    float scale"""

_SCHEMAS = {
    "tree_attention": f"(Tensor query, Tensor key, Tensor value, {_MASK}) -> (Tensor, Tensor)",
    "tree_attention_backward": f"""(Tensor grad_out, Tensor? grad_lse, Tensor query, Tensor key,
    Tensor value, Tensor out, Tensor lse, {_MASK}) -> (Tensor, Tensor, Tensor)""",
    "block_lists": """(Tensor q_vals, Tensor k_vals, str predicate, SymInt q_len, SymInt kv_len,
    Tensor? kv_num_blocks, Tensor? kv_indices, Tensor? full_kv_num_blocks, Tensor? full_kv_indices,
    SymInt q_block_size, SymInt kv_block_size, SymInt new_q_block_size, SymInt new_kv_block_size,
    bool full_at_ends=True)
    -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)""",
    "block_lists_of_mask": """(Tensor mask, SymInt q_block_size, SymInt kv_block_size)
    -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)""",
}

_library = torch.library.Library(NAMESPACE, "DEF")
for _name, _schema in _SCHEMAS.items():
    # Kernels and fakes go by the strides that they are given: Inductor must not change them.
    _library.define(
        _name + " ".join(_schema.split()),
        tags=(torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag),
    )

_GPU = "CUDA"


def _lse_dtype(query: Tensor) -> torch.dtype:
    return torch.float64 if query.dtype == torch.float64 else torch.float32


# -------------------------------------------------------------------------------------------------
# tree_attention


def _check_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    q_vals: Tensor,
    k_vals: Tensor,
    predicate: str,
    lists: tuple[Tensor | None, ...],
    q_block_size: int,
    kv_block_size: int,
    scale: float,
) -> None:
    validation.check_operands(query, key, value)
    validation.check_scale(scale)
    q_len, kv_len = query.shape[2], key.shape[2]
    validation.check_lists(lists, q_len, kv_len, q_block_size, kv_block_size, query.device)
    validation.check_values(predicate, q_vals, k_vals, q_len, kv_len, query.device)
    assert lists[0] is not None
    validation.check_broadcast(query.shape[0], query.shape[1], q_vals, k_vals, lists[0])
    if list_checks.enabled():
        list_checks.check_contents(lists)


def _forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    _refuse_forward_mode()
    query = arguments[0]
    if on_gpu(query):
        look = _look_at_lists if list_checks.enabled() else None
        with current(query.device):
            return _forward_plans.run(_plan_forward, arguments, query.dtype, look)
    _check_forward(arguments)
    if _nothing_to_attend(query, arguments[1]):
        return _no_attention(*arguments)
    return cpu.forward(*(*arguments[:6], *_key_side(arguments[6:14]), *arguments[14:]))


_forward_plans = Plans()


def _check_forward(arguments: tuple[Any, ...]) -> None:
    _check_call(*(*arguments[:6], arguments[6:14], *arguments[14:]))


def _look_at_lists(arguments: tuple[Any, ...]) -> None:
    list_checks.check_contents(arguments[-11:-3])


def _plan_forward(arguments: tuple[Any, ...]) -> Plan:
    _check_forward(arguments)
    query, key, value = arguments[:3]
    if _nothing_to_attend(query, key):
        return Immediate(_no_attention)
    return _serving(query, key, value, arguments[6], arguments[14:]).plan_forward(*arguments)


def _nothing_to_attend(query: Tensor, key: Tensor) -> bool:
    return 0 in query.shape[:3] or key.shape[2] == 0


def _no_attention(*arguments: Any) -> tuple[Tensor, Tensor]:
    out, lse = _fake_forward(*arguments)
    return out.zero_(), lse.fill_(float("-inf"))


def _serving(
    query: Tensor, key: Tensor, value: Tensor, kv_num_blocks: Tensor | None, sizes: Any
) -> Any:
    """The package of GPU kernels that serves a call."""
    assert kv_num_blocks is not None
    choice = choose_kernels(query, key, value, kv_num_blocks.shape[1], *sizes)
    return gpu_kernels(choice.kernels)


def _fake_forward(query: Tensor, key: Tensor, value: Tensor, *mask: Any) -> tuple[Tensor, Tensor]:
    validation.check_fakes("tree_attention", query, key, value, *mask)
    batch, heads, q_len, _ = query.shape
    out = empty_like_layout(query, (batch, heads, q_len, value.shape[3]), query.dtype)
    lse = query.new_empty((batch, heads, q_len), dtype=_lse_dtype(query))
    return out, lse


# -------------------------------------------------------------------------------------------------
# tree_attention_backward


def _backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    query = arguments[2]
    if on_gpu(query):
        look = _look_at_lists if list_checks.enabled() else None
        with current(query.device):
            return _backward_plans.run(_plan_backward, arguments, query.dtype, look)
    _check_backward(arguments)
    if _nothing_to_attend(query, arguments[3]):
        return _no_gradients(*arguments)
    return cpu.backward(*(*arguments[:10], *_key_side(arguments[10:18]), *arguments[18:]))


_backward_plans = Plans()


def _check_backward(arguments: tuple[Any, ...]) -> None:
    grad_out, grad_lse, query, key, value, out, lse = arguments[:7]
    _check_call(*(query, key, value, *arguments[7:10], arguments[10:18], *arguments[18:]))
    validation.check_gradients(grad_out, grad_lse, query, value, out, lse)


def _plan_backward(arguments: tuple[Any, ...]) -> Plan:
    _check_backward(arguments)
    query, key, value = arguments[2:5]
    if _nothing_to_attend(query, key):
        return Immediate(_no_gradients)
    lists = arguments[10:18]
    if any(lists[at] is not None and lists[at + 4] is None for at in (0, 2)):
        return Substitute(_with_query_side)
    return _serving(query, key, value, lists[0], arguments[18:]).plan_backward(*arguments)


def _no_gradients(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = _fake_backward(*arguments)
    return dq.zero_(), dk.zero_(), dv.zero_()


def _with_query_side(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    columns = cdiv(arguments[3].shape[2], arguments[19])
    return (*arguments[:14], *_query_side(arguments[10:18], columns), *arguments[18:])


def _key_side(
    lists: tuple[Tensor | None, ...],
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    assert lists[0] is not None
    assert lists[1] is not None
    return lists[0], lists[1], lists[2], lists[3]


def _query_side(lists: tuple[Tensor | None, ...], columns: int) -> tuple[Tensor | None, ...]:
    """The query-side lists: as given, or the transpose of the key-side ones."""
    by_query: list[Tensor | None] = []
    for at in (0, 2):
        number, indices = lists[at : at + 2]
        given = lists[at + 4 : at + 6]
        if number is None or indices is None or given[0] is not None:
            by_query += given
        else:
            by_query += blocks.transpose_lists(number, indices, columns)
    return tuple(by_query)


def _fake_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    validation.check_fakes("tree_attention_backward", grad_out, grad_lse, query, key, value, *rest)
    dq, dk, dv = (
        empty_like_layout(tensor, tensor.shape, tensor.dtype) for tensor in (query, key, value)
    )
    return dq, dk, dv


# -------------------------------------------------------------------------------------------------
# block_lists (block_lists_op.py) and block_lists_of_mask


# Composite, so that a compiler sees the arithmetic and never holds the whole mask.
_library.impl("block_lists_of_mask", blocks.lists_of_mask, "CompositeImplicitAutograd")


def forget_plans() -> None:
    """Have all calls on a GPU checked and decided anew, as after a change of Triton's settings."""
    for plans in (_forward_plans, _backward_plans, block_lists_op.plans):
        plans.clear()


# -------------------------------------------------------------------------------------------------
# Autograd and autocast


def _refuse_forward_mode() -> None:
    # Where no input requires a gradient, torch would drop the tangents and say nothing. Whether
    # there are any cannot be asked for everywhere that a kernel may be called from.
    if forward_ad._current_level >= 0:
        raise RuntimeError(
            "tree attention does not support forward-mode differentiation (torch.func.jvp and "
            "linearize, forward_ad): use torch.autograd.grad or backward"
        )


def _no_functorch(*arguments: Any) -> Any:
    raise RuntimeError(
        "tree attention does not support the transforms of torch.func (grad, vmap, jvp, ...): use "
        "torch.autograd.grad or backward"
    )


def _autocast(device_type: str) -> Any:
    """The op under torch.autocast: operands in autocast's dtype, as for PyTorch's attention."""

    def attention(query: Tensor, key: Tensor, value: Tensor, *mask: Any) -> Any:
        validation.check_ranks_and_devices(query, key, value)
        operands = [query, key, value]
        if all(tensor.is_floating_point() for tensor in operands) and not any(
            tensor.dtype == torch.float64 for tensor in operands
        ):
            dtype = torch.get_autocast_dtype(device_type)
            operands = [tensor.to(dtype) for tensor in operands]
        with torch.autocast(device_type, enabled=False):
            return torch.ops.tree_attn_op.tree_attention.default(*operands, *mask)

    return attention


def _backward_in_autocast(device_type: str) -> Any:
    """The backward where it is called under torch.autocast: in the dtypes that it is given."""

    def backward(*arguments: Any) -> Any:
        with torch.autocast(device_type, enabled=False):
            return torch.ops.tree_attn_op.tree_attention_backward.default(*arguments)

    return backward


for _key in ("CPU", _GPU):
    _library.impl("tree_attention", _forward, _key)
    _library.impl("tree_attention_backward", _backward, _key)
    _library.impl("block_lists", block_lists_op.block_lists, _key)
    _library.impl("tree_attention", _autocast(_key.lower()), f"Autocast{_key}")
    _library.impl(
        "tree_attention_backward", _backward_in_autocast(_key.lower()), f"Autocast{_key}"
    )
# Else torch reports that an autograd.Function inside torch.library lacks a method.
_library.impl("tree_attention", _no_functorch, "FuncTorchDynamicLayerFrontMode")
for _name, _fake in (
    ("tree_attention", _fake_forward),
    ("tree_attention_backward", _fake_backward),
    ("block_lists", block_lists_op.fake_block_lists),
):
    torch.library.register_fake(f"{NAMESPACE}::{_name}", _fake, lib=_library)
for _name, _kernel in (
    ("tree_attention", autograd.attention_kernel(_forward)),
    ("tree_attention_backward", autograd.backward_kernel(_backward)),
):
    _library.impl(_name, _kernel, "Autograd", with_keyset=True)
