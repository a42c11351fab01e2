"""What the tree attention op can serve: each check raises ``KeepFlex`` with the user's reason."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._inductor import config as inductor_config
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import guard_or_false

from tree_attn_op.validation import BLOCK_MULTIPLE, MAX_HEAD_DIM

from .flex_call import (
    FlexCall,
    KeepFlex,
    check_kernel_options,
    example_value,
    is_identity,
    static_int,
    uses_decoding_kernel,
)

SMALL_CALL = 3e11
"""Floating-point operations of a call's whole forward rectangle, ``4 * B * Hq * Q * K * D``, from
which on flex keeps a GPU busy for longer than the op's launches take the CPU. 2k tokens, 32 heads,
D=128 are 0.7e11; there an H200 needs 83 us for flex and the CPU 358 us for a rewritten call, with
the backward 451 and 1703 (``bench/launch_overhead.py``): 4 times as much."""

_HALF_AND_SINGLE = (torch.bfloat16, torch.float16, torch.float32)
_DTYPES = {"cpu": (*_HALF_AND_SINGLE, torch.float64), "cuda": _HALF_AND_SINGLE}


def check_call(call: FlexCall) -> None:
    """Raise :class:`KeepFlex` unless the op computes what this call does, whatever its mask."""
    check_kernel_options(call)
    if not math.isfinite(call.scale):
        raise KeepFlex(f"its scale is {call.scale}")
    if not is_identity(call.score_mod):
        hint = "a mask belongs in the block_mask's mask_mod, not in score_mod"
        raise KeepFlex(
            "its score_mod changes the scores",
            hint=hint if _only_masks(call.score_mod) else None,
        )
    _check_tensors(call)
    _check_lengths(call)
    if uses_decoding_kernel(call):
        raise KeepFlex("flex serves a short query against a long cache with its decoding kernel")


def check_size(call: FlexCall) -> None:
    """Raise :class:`KeepFlex` for a call on a GPU that is over before the op is launched.

    Lengths that are not known are taken for long ones, and CUDA graphs launch at no cost.
    """
    query, key, value = map(example_value, (call.query, call.key, call.value))
    sizes = [static_int(size) for size in (*query.shape, key.shape[2], value.shape[3])]
    if query.device.type == "cpu" or None in sizes or inductor_config.triton.cudagraphs:
        return
    batch, heads, q_len, head_dim, kv_len, value_dim = map(int, sizes)  # type: ignore[arg-type]
    if 2 * batch * heads * q_len * kv_len * (head_dim + value_dim) < SMALL_CALL:
        raise KeepFlex(
            f"{q_len} by {kv_len} tokens and {heads} heads of {head_dim} keep a GPU busy for less "
            "time than the op's launches take",
            hint="rewrite_small=True (TREE_ATTN_REWRITE_SMALL=1) rewrites it all the same",
        )


def check_capture(capture: Any, call: FlexCall) -> None:
    """Raise :class:`KeepFlex` for a captured tensor on another device than the query's."""
    value, query = example_value(capture), example_value(call.query)
    if isinstance(value, torch.Tensor) and value.device != query.device and value.dim() > 0:
        name = capture.name if isinstance(capture, fx.Node) else "a tensor"
        raise KeepFlex(
            f"its mask reads {name} on {value.device}, the query is on {query.device}",
            hint=f"move {name} to {query.device}",
        )


def operand_dtype(call: FlexCall) -> torch.dtype:
    """The dtype that query, key and value are computed in.

    Under autocast the higher-order op casts its inputs, and the traced dtype of its output tells
    to what; that is the one sign of autocast that a graph carries.
    """
    dtypes = {example_value(node).dtype for node in (call.query, call.key, call.value)}
    query: torch.dtype = example_value(call.query).dtype
    computed: torch.dtype = example_value(call.node)[0].dtype
    if len(dtypes) > 1 and computed == query:
        key, value = example_value(call.key).dtype, example_value(call.value).dtype
        raise KeepFlex(f"query is {query}, key {key} and value {value}; the op takes one dtype")
    return computed


def _only_masks(score_mod: fx.GraphModule) -> bool:
    """Whether a score_mod keeps its score where a condition holds, and is -inf elsewhere."""
    score = next(iter(score_mod.graph.find_nodes(op="placeholder")), None)
    (output,) = score_mod.graph.find_nodes(op="output")
    (result,) = output.args
    if isinstance(result, Sequence) and len(result) == 1:
        (result,) = result
    if not isinstance(result, fx.Node):
        return False
    name = str(getattr(result.target, "__name__", result.target)).partition(".")[0]
    if name == "where" and len(result.args) == 3:
        branches = list(result.args[1:])
    elif name in ("masked_fill", "masked_fill_") and len(result.args) == 3:
        branches = [result.args[0], result.args[2]]
    else:
        return False
    return score in branches and any(_is_minus_infinity(branch) for branch in branches)


def _is_minus_infinity(argument: Any) -> bool:
    # Dynamo may record a number that PyTorch turns into a tensor: full(...), tensor(...).
    if isinstance(argument, fx.Node):
        return any(_is_minus_infinity(inner) for inner in argument.args)
    return isinstance(argument, float) and argument == -math.inf


def _check_tensors(call: FlexCall) -> None:
    tensors = {
        "query": example_value(call.query),
        "key": example_value(call.key),
        "value": example_value(call.value),
        "kv_num_blocks": example_value(call.kv_num_blocks),
        "kv_indices": example_value(call.kv_indices),
    }
    query, key, value = tensors["query"], tensors["key"], tensors["value"]
    for name, tensor in tensors.items():
        if type(tensor) is not FakeTensor:
            raise KeepFlex(f"{name} is a {type(tensor).__name__}, not a plain tensor")
        if tensor.device != query.device:
            raise KeepFlex(f"{name} is on {tensor.device}, the query is on {query.device}")
    if query.device.type not in _DTYPES:
        raise KeepFlex(f"no implementation for device type {query.device.type}")
    dtype = operand_dtype(call)
    if dtype not in _DTYPES[query.device.type]:
        raise KeepFlex(f"no implementation for {dtype} on {query.device.type}")

    if not guard_or_false(query.shape[0] == key.shape[0]) or not guard_or_false(
        key.shape[0] == value.shape[0]
    ):
        raise KeepFlex("query, key and value differ in batch size")
    heads, kv_heads = static_int(query.shape[1]), static_int(key.shape[1])
    if heads is None or kv_heads is None or static_int(value.shape[1]) != kv_heads:
        raise KeepFlex("the head counts are not constants, or differ between key and value")
    if not kv_heads or heads % kv_heads:
        raise KeepFlex(f"{heads} query heads are no multiple of {kv_heads} key heads")
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        head_dim = static_int(tensor.shape[3])
        if head_dim is None or not 1 <= head_dim <= MAX_HEAD_DIM:
            raise KeepFlex(
                f"head dimension {tensor.shape[3]} of {name} is not in 1 to {MAX_HEAD_DIM}"
            )
    if static_int(query.shape[3]) != static_int(key.shape[3]):
        raise KeepFlex("query and key differ in head dimension")


def _check_lengths(call: FlexCall) -> None:
    q_len, kv_len = example_value(call.query).shape[2], example_value(call.key).shape[2]
    if not guard_or_false(example_value(call.value).shape[2] == kv_len):
        raise KeepFlex("key and value differ in length")
    if not guard_or_false(q_len > 0) or not guard_or_false(kv_len > 0):
        raise KeepFlex("the query or the key is empty")
    if call.is_for_any_length:
        return
    made_for = example_value(call.q_len), example_value(call.kv_len)
    if not guard_or_false(made_for[0] == q_len) or not guard_or_false(made_for[1] == kv_len):
        raise KeepFlex(
            f"the block mask was made for Q_LEN {made_for[0]} and KV_LEN {made_for[1]}, "
            f"the call has {q_len} and {kv_len}"
        )


def check_lists(call: FlexCall) -> None:
    """Raise :class:`KeepFlex` for block lists or block sizes that the op doesn't take."""
    query = example_value(call.query)
    for name, size in (("query", call.q_block_size), ("key", call.kv_block_size)):
        if size <= 0 or size % BLOCK_MULTIPLE:
            raise KeepFlex(
                f"block size {size} on the {name} side is no multiple of {BLOCK_MULTIPLE}",
                hint="make the block mask with BLOCK_SIZE=128",
            )
    batch, heads, q_len = query.shape[:3]
    rows = (q_len + call.q_block_size - 1) // call.q_block_size
    columns = (example_value(call.key).shape[2] + call.kv_block_size - 1) // call.kv_block_size
    leading = example_value(call.kv_num_blocks).shape[:2]
    for node, rank in zip(call.lists, (3, 4, 3, 4), strict=True):
        if node is None:
            continue
        value = example_value(node)
        if type(value) is not FakeTensor or value.dtype != torch.int32 or value.dim() != rank:
            raise KeepFlex(f"block list {node.name} is no int32 tensor of {rank} dimensions")
        for name, given, whole, common in zip(
            ("batch", "head"), value.shape, (batch, heads), leading, strict=False
        ):
            if not guard_or_false(given == 1) and not guard_or_false(given == whole):
                raise KeepFlex(f"block list {node.name} has {name} size {given}, not 1 or {whole}")
            if not guard_or_false(given == common):
                raise KeepFlex(f"the block lists differ in {name} size: {given} and {common}")
        if not guard_or_false(value.shape[2] == rows):
            raise KeepFlex(
                f"block list {node.name} has {value.shape[2]} rows of blocks, not {rows}"
            )
        width = value.shape[3] if rank == 4 else columns
        if not guard_or_false(width == columns) and not guard_or_false(width < columns):
            raise KeepFlex(f"block list {node.name} has {width} columns of blocks, over {columns}")
