"""The ops: schemas, fakes, autograd, autocast and the choice of implementation by device.

- ``tree_attn_op::tree_attention``: attention over the pairs that block lists and predicate allow;
- ``tree_attn_op::tree_attention_backward``: its gradients, through lse as well;
- ``tree_attn_op::block_lists``: block lists from a predicate, or finer ones from given lists;
- ``tree_attn_op::block_lists_of_mask``: block lists of a dense mask, which stands in a graph until
  the pass has proven what the mask means.

DESIGN.md has the schemas, the shapes and what always holds. Importing this needs no Triton.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import blocks, cpu, list_checks, validation
from .arguments import check_tensor
from .blocks import cdiv
from .kernels.choice import choose_kernels
from .kernels.configs import current
from .layout import empty_like_layout
from .predicate import Predicate

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


_OPS = getattr(torch.ops, NAMESPACE)


def _lse_dtype(query: Tensor) -> torch.dtype:
    return torch.float64 if query.dtype == torch.float64 else torch.float32


@cache
def _kernels(package: str) -> Any:
    """A package of Triton kernels, imported with the first call that needs it."""
    try:
        return importlib.import_module(f".kernels.{package}", __package__)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "triton":
            raise
        raise RuntimeError(
            "tree attention on a GPU needs Triton, which is not installed: install triton"
        ) from error


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


def _forward(query: Tensor, key: Tensor, value: Tensor, *mask: Any) -> tuple[Tensor, Tensor]:
    q_vals, k_vals, predicate, *rest = mask
    lists, sizes = tuple(rest[:8]), rest[8:]
    _check_call(query, key, value, q_vals, k_vals, predicate, lists, *sizes)
    _refuse_forward_mode()
    if 0 in query.shape[:3] or key.shape[2] == 0:
        out, lse = _fake_forward(query, key, value, *mask)
        return out.zero_(), lse.fill_(float("-inf"))
    arguments = (query, key, value, q_vals, k_vals, predicate)
    if query.device.type == "cpu":
        return cpu.forward(*arguments, *_key_side(lists), *sizes)
    with current(query.device):
        package = _serving(query, key, value, lists[0], sizes)
        return package.forward(*arguments, *lists[:4], *sizes)


def _serving(
    query: Tensor, key: Tensor, value: Tensor, kv_num_blocks: Tensor | None, sizes: Any
) -> Any:
    """The package of GPU kernels that serves a call."""
    assert kv_num_blocks is not None
    choice = choose_kernels(query, key, value, kv_num_blocks.shape[1], *sizes)
    return _kernels(choice.kernels)


def _fake_forward(query: Tensor, key: Tensor, value: Tensor, *mask: Any) -> tuple[Tensor, Tensor]:
    _check_fakes("tree_attention", query, key, value, *mask)
    batch, heads, q_len, _ = query.shape
    out = empty_like_layout(query, (batch, heads, q_len, value.shape[3]), query.dtype)
    lse = query.new_empty((batch, heads, q_len), dtype=_lse_dtype(query))
    return out, lse


# -------------------------------------------------------------------------------------------------
# tree_attention_backward


def _backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    *mask: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    q_vals, k_vals, predicate, *rest = mask
    lists, sizes = tuple(rest[:8]), rest[8:]
    _check_call(query, key, value, q_vals, k_vals, predicate, lists, *sizes)
    validation.check_gradients(grad_out, grad_lse, query, value, out, lse)
    if 0 in query.shape[:3] or key.shape[2] == 0:
        dq, dk, dv = _fake_backward(grad_out, grad_lse, query, key, value, out, lse, *mask)
        return dq.zero_(), dk.zero_(), dv.zero_()
    saved = (grad_out, grad_lse, query, key, value, out, lse, q_vals, k_vals, predicate)
    if query.device.type == "cpu":
        return cpu.backward(*saved, *_key_side(lists), *sizes)
    by_query = _query_side(lists, cdiv(key.shape[2], sizes[1]))
    with current(query.device):
        package = _serving(query, key, value, lists[0], sizes)
        return package.backward(*saved, *lists[:4], *by_query, *sizes)


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
    _check_fakes("tree_attention_backward", grad_out, grad_lse, query, key, value, *rest)
    dq, dk, dv = (
        empty_like_layout(tensor, tensor.shape, tensor.dtype) for tensor in (query, key, value)
    )
    return dq, dk, dv


# -------------------------------------------------------------------------------------------------
# block_lists


def _block_lists(
    q_vals: Tensor,
    k_vals: Tensor,
    predicate: str,
    q_len: int,
    kv_len: int,
    kv_num_blocks: Tensor | None,
    kv_indices: Tensor | None,
    full_kv_num_blocks: Tensor | None,
    full_kv_indices: Tensor | None,
    q_block_size: int,
    kv_block_size: int,
    new_q_block_size: int,
    new_kv_block_size: int,
    full_at_ends: bool = True,
) -> tuple[Tensor, ...]:
    lists = (kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices)
    check_tensor("q_vals", q_vals)
    validation.check_values(predicate, q_vals, k_vals, q_len, kv_len, q_vals.device)
    validation.check_lists(lists, q_len, kv_len, q_block_size, kv_block_size, q_vals.device)
    for name, new, old in (
        ("new_q_block_size", new_q_block_size, q_block_size),
        ("new_kv_block_size", new_kv_block_size, kv_block_size),
    ):
        validation.check_block_size(name, new)
        if kv_num_blocks is not None and old % new:
            raise ValueError(f"{name} must divide the lists' block size {old}, got {new}")
    validation.check_list_batch(q_vals, k_vals, kv_num_blocks)
    if kv_num_blocks is None and full_kv_num_blocks is not None:
        raise ValueError("kv_num_blocks is missing, full_kv_num_blocks is given")
    if kv_num_blocks is not None and not full_at_ends:
        raise ValueError("full_at_ends=False is for lists derived from the predicate alone")
    if kv_num_blocks is not None and list_checks.enabled():
        list_checks.check_contents(lists)
    sizes = (q_block_size, kv_block_size, new_q_block_size, new_kv_block_size)
    empty = 0 in (q_len, kv_len, q_vals.shape[0], k_vals.shape[0])
    empty = empty or (kv_num_blocks is not None and 0 in kv_num_blocks.shape)
    parsed = Predicate.parse(predicate)
    if q_vals.device.type != "cpu" and not empty:
        build = _kernels("portable.block_lists").block_lists
        at_ends = {"full_at_ends": full_at_ends}
        return build(q_vals, k_vals, parsed, q_len, kv_len, *lists, *sizes, **at_ends)
    states = blocks.refined_states(parsed, q_vals, k_vals, q_len, kv_len, lists, *sizes)
    if not full_at_ends:
        states = blocks.partial_at_ends(states, q_len, kv_len, *sizes[2:])
    return blocks.lists_of(states)


def flex_lists(
    predicate: Predicate,
    q_vals: Tensor,
    k_vals: Tensor,
    q_len: int,
    kv_len: int,
    q_block_size: int,
    kv_block_size: int,
    batch: int,
    heads: int,
) -> tuple[Tensor, ...]:
    """The eight lists that flex's builder makes: ``block_lists`` with ``full_at_ends=False``.

    Not an op, and the arguments are not checked: for callers who made the values themselves.

    Args:
        predicate, q_vals, k_vals: as in ``block_lists``; the values may have any strides.
        q_len, kv_len, q_block_size, kv_block_size: lengths and tokens a block.
        batch, heads: of the lists.
    """
    if q_vals.device.type != "cpu" and 0 not in (q_len, kv_len, batch, heads):
        build = _kernels("portable.block_lists").block_lists
        sizes = (q_block_size, kv_block_size) * 2
        return build(
            *(q_vals, k_vals, predicate, q_len, kv_len, None, None, None, None, *sizes),
            batch=batch,
            heads=heads,
            full_at_ends=False,
        )
    sizes = (q_len, kv_len, q_block_size, kv_block_size)
    states = blocks.classify_tiles(predicate, q_vals, k_vals, *sizes)
    lists = blocks.lists_of(blocks.partial_at_ends(states.unsqueeze(1), *sizes))
    return tuple(tensor.expand(batch, heads, *tensor.shape[2:]).contiguous() for tensor in lists)


def _fake_block_lists(
    q_vals: Tensor,
    k_vals: Tensor,
    predicate: str,
    q_len: int,
    kv_len: int,
    kv_num_blocks: Tensor | None,
    kv_indices: Tensor | None,
    full_kv_num_blocks: Tensor | None,
    full_kv_indices: Tensor | None,
    q_block_size: int,
    kv_block_size: int,
    new_q_block_size: int,
    new_kv_block_size: int,
    full_at_ends: bool = True,
) -> tuple[Tensor, ...]:
    lists = (kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices)
    _check_fakes("block_lists", q_vals, k_vals, predicate, q_len, kv_len, *lists)
    batches = [q_vals.shape[:1], k_vals.shape[:1]]
    heads = 1
    if kv_num_blocks is not None:
        batches.append(kv_num_blocks.shape[:1])
        heads = kv_num_blocks.shape[1]
    (batch,) = torch.broadcast_shapes(*batches)
    rows, columns = cdiv(q_len, new_q_block_size), cdiv(kv_len, new_kv_block_size)
    made = []
    for shape in ((rows, columns), (columns, rows)):
        for tail in (shape[:1], shape, shape[:1], shape):
            made.append(q_vals.new_empty((batch, heads, *tail), dtype=torch.int32))
    return tuple(made)


def _check_fakes(name: str, *arguments: Any) -> None:
    """What fakes check: what needs no guard on a size.

    A meta tensor among others brings a call here too, whose result would be of no meaning.
    """
    names = [argument.name for argument in getattr(_OPS, name).default._schema.arguments]
    given = dict(zip(names, arguments, strict=False))
    for each in ("query", "q_vals", "k_vals"):
        if each in given:
            check_tensor(each, given[each])
    if "query" in given:
        validation.check_ranks_and_devices(given["query"], given["key"], given["value"])
    device = given["query" if "query" in given else "q_vals"].device
    for each, tensor in given.items():
        if isinstance(tensor, Tensor) and tensor.device != device:
            raise ValueError(f"{each} must be on {device}, got {tensor.device}")


# Composite, so that a compiler sees the arithmetic and never holds the whole mask.
_library.impl("block_lists_of_mask", blocks.lists_of_mask, "CompositeImplicitAutograd")


# -------------------------------------------------------------------------------------------------
# Autograd and autocast


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, q_vals, k_vals, predicate, *rest = inputs
    ctx.save_for_backward(query, key, value, *output, q_vals, k_vals, *rest[:8])
    ctx.predicate, ctx.sizes = predicate, rest[8:]
    # An output that takes no part in the loss has no gradient, rather than a tensor of zeros.
    ctx.set_materialize_grads(False)


def _autograd_backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> Any:
    unused = (None,) * 14
    if grad_out is None and grad_lse is None:
        return (None, None, None, *unused)
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
    return (*grads, *unused)


def _no_double_backward(ctx: Any, *grads: Tensor) -> Any:
    raise RuntimeError(
        "tree attention has no second derivative: call backward without create_graph=True"
    )


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
    _library.impl("block_lists", _block_lists, _key)
    _library.impl("tree_attention", _autocast(_key.lower()), f"Autocast{_key}")
    _library.impl(
        "tree_attention_backward", _backward_in_autocast(_key.lower()), f"Autocast{_key}"
    )
# Else torch reports that an autograd.Function inside torch.library lacks a method.
_library.impl("tree_attention", _no_functorch, "FuncTorchDynamicLayerFrontMode")
for _name, _fake in (
    ("tree_attention", _fake_forward),
    ("tree_attention_backward", _fake_backward),
    ("block_lists", _fake_block_lists),
):
    torch.library.register_fake(f"{NAMESPACE}::{_name}", _fake, lib=_library)
torch.library.register_autograd(
    f"{NAMESPACE}::tree_attention",
    _autograd_backward,
    setup_context=_setup_context,
    lib=_library,
)
torch.library.register_autograd(
    f"{NAMESPACE}::tree_attention_backward", _no_double_backward, lib=_library
)
