"""One view of a ``flex_attention`` call in a graph, whatever the torch version wrote it.

Everything that this project knows of how torch lays a flex_attention call out, and of which kernel
it serves the call with, is in this file (read from torch 2.11 to 2.14). What it does not recognise
is not guessed: :func:`read_flex_call` raises :class:`KeepFlex`, and the call stays as it is.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import guard_or_false
from torch.nn.attention.flex_attention import BlockMask

FLEX_ATTENTION = torch.ops.higher_order.flex_attention

LN2 = 0.6931471805599453
"""The higher-order op's lse is in units of ln 2 (base 2), except with ``BACKEND="FLASH"``."""

_PARAMETERS = (
    "query",
    "key",
    "value",
    "score_mod",
    "block_mask",
    "scale",
    "kernel_options",
    "score_mod_other_buffers",
    "mask_mod_other_buffers",
)

# The lists and sizes that every layout has, by their place; negative places count from the end.
# torch 2.13 put three write-order lists and a flag for a FLASH backward before the block sizes:
# they order work and change no value.
_BLOCK_MASK_PLACES = {
    "q_len": 0,
    "kv_len": 1,
    "kv_num_blocks": 2,
    "kv_indices": 3,
    "full_kv_num_blocks": 4,
    "full_kv_indices": 5,
    "q_block_size": -3,
    "kv_block_size": -2,
    "mask_mod": -1,
}
_BLOCK_MASK_SIZES = {13: "torch 2.11 and 2.12", 17: "torch 2.13 and 2.14"}

# torch.nn.attention.flex_attention._LARGE_SPARSE_BLOCK_SIZE; the lengths of such a mask are 1.
_ONE_BLOCK = 1 << 30

# Options that choose tiles, stages, instructions or a kernel, or that promise something about the
# mask, and leave the values as they are. An option in neither set may mean anything (SM_SCALE, for
# one, replaces the scale), so a call with it is kept.
_SCHEDULING_OPTIONS = frozenset(
    {
        "BLOCK_M",
        "BLOCK_N",
        "BLOCK_M1",
        "BLOCK_N1",
        "BLOCK_M2",
        "BLOCK_N2",
        "BLOCKS_ARE_CONTIGUOUS",
        "FORCE_USE_FLEX_ATTENTION",
        "IS_DIVISIBLE",
        "PARTITION_SIZE",
        "PRESCALE_QK",
        "ROWS_GUARANTEED_SAFE",
        "SAFE_N_BOUNDARY",
        "SPLIT_KV",
        "USE_TMA",
        "WRITE_DQ",
        "kpack",
        "matrix_instr_nonkdim",
        "maxnreg",
        "num_buffers_warp_spec",
        "num_consumer_groups",
        "num_stages",
        "num_warps",
        "waves_per_eu",
    }
)
# Options with a meaning that the rewrite looks at.
_HANDLED_OPTIONS = frozenset({"BACKEND", "OUTPUT_LOGSUMEXP", "OUTPUT_MAX", "FLOAT32_PRECISION"})


class KeepFlex(Exception):
    """A call must stay flex_attention.

    Args:
        reason: why, in words that the author of the model can act on.
        hint: what to write instead, where something equivalent can be rewritten.
        source: the user's source line that caused it, if it isn't that of the call.
        node_name: the node of the mask graph that caused it.
    """

    def __init__(
        self,
        reason: str,
        *,
        hint: str | None = None,
        source: str | None = None,
        node_name: str | None = None,
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.hint = hint
        self.source = source
        self.node_name = node_name


@dataclass(frozen=True)
class FlexCall:
    """A flex_attention call.

    Tensors are nodes of the graph that holds the call; ``q_len`` and ``kv_len`` are the lengths
    that the BlockMask was made for, either numbers or nodes. The query-side lists are left out:
    they repeat the key-side lists, from which the op derives its own.
    """

    node: fx.Node
    query: fx.Node
    key: fx.Node
    value: fx.Node
    score_mod: fx.GraphModule
    mask_mod: fx.GraphModule
    q_len: int | fx.Node
    kv_len: int | fx.Node
    kv_num_blocks: fx.Node
    kv_indices: fx.Node
    full_kv_num_blocks: fx.Node | None
    full_kv_indices: fx.Node | None
    q_block_size: int
    kv_block_size: int
    scale: float
    kernel_options: Mapping[str, Any]
    score_captures: tuple[Any, ...]
    mask_captures: tuple[Any, ...]

    @property
    def is_for_any_length(self) -> bool:
        """Whether it has the BlockMask of one huge block that flex makes when it is given none."""
        return self.q_block_size == self.kv_block_size == _ONE_BLOCK

    @property
    def lists(self) -> tuple[fx.Node, fx.Node, fx.Node | None, fx.Node | None]:
        """kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices."""
        return (
            self.kv_num_blocks,
            self.kv_indices,
            self.full_kv_num_blocks,
            self.full_kv_indices,
        )

    def output_users(self, index: int) -> list[fx.Node]:
        """The users of one of the call's three outputs: 0 is out, 1 is lse, 2 is max_scores."""
        return [user for item in self.node.users if item.args[1] == index for user in item.users]


def is_flex_call(node: fx.Node) -> bool:
    """Whether ``node`` calls the flex_attention higher-order op, directly or through the API."""
    return node.op == "call_function" and node.target is FLEX_ATTENTION


def example_value(node: Any) -> Any:
    """The fake value that tracing recorded for a node; what is no node is its own value."""
    if not isinstance(node, fx.Node):
        return node
    return node.meta["example_value"] if "example_value" in node.meta else node.meta.get("val")


class _NamedParts(BlockMask):
    """A BlockMask each of whose parts is its own name, to ask torch where it puts them."""

    def __init__(self) -> None:
        self.seq_lengths: Any = ("q_len", "kv_len")
        self.BLOCK_SIZE: Any = ("q_block_size", "kv_block_size")

    def __getattr__(self, name: str) -> Any:
        return name


@lru_cache(maxsize=1)
def unknown_layout() -> str | None:
    """How this torch writes calls in another way than this file reads them; None if it doesn't.

    A later torch may put the parts of a BlockMask in another order without changing their number,
    which no single call would show.
    """
    names = tuple(inspect.signature(type(FLEX_ATTENTION).__call__).parameters)[1:]
    if names != _PARAMETERS:
        return f"unknown arguments of flex_attention: {', '.join(names)}"
    parts = _NamedParts().as_tuple()
    if len(parts) not in _BLOCK_MASK_SIZES:
        return _unknown_entries(len(parts))
    for name, place in _BLOCK_MASK_PLACES.items():
        if parts[place] != name:
            return (
                f"unknown layout of the block mask: this torch has {parts[place]} where {name} "
                "is known to be"
            )
    return None


def read_flex_call(node: fx.Node) -> FlexCall:
    """Read the arguments of a flex_attention call.

    Raises:
        KeepFlex: the layout of the call is none of those known, or a part that must be a constant
            isn't.
    """
    if (unknown := unknown_layout()) is not None:
        raise KeepFlex(unknown)
    arguments: dict[str, Any] = dict(zip(_PARAMETERS, node.args, strict=False))
    arguments.update(node.kwargs)
    arguments.setdefault("score_mod_other_buffers", ())
    arguments.setdefault("mask_mod_other_buffers", ())
    if set(arguments) != set(_PARAMETERS) or len(node.args) > len(_PARAMETERS):
        raise KeepFlex(f"unknown arguments of flex_attention: {sorted(arguments)}")

    block_mask = arguments["block_mask"]
    if not isinstance(block_mask, (tuple, list)) or len(block_mask) not in _BLOCK_MASK_SIZES:
        given = len(block_mask) if isinstance(block_mask, (tuple, list)) else type(block_mask)
        raise KeepFlex(_unknown_entries(given))
    parts = {name: block_mask[place] for name, place in _BLOCK_MASK_PLACES.items()}

    tensors = {name: arguments[name] for name in ("query", "key", "value")}
    tensors |= {name: parts[name] for name in ("kv_num_blocks", "kv_indices")}
    for name in ("full_kv_num_blocks", "full_kv_indices"):
        if parts[name] is not None:
            tensors[name] = parts[name]
    for name, tensor in tensors.items():
        if not isinstance(tensor, fx.Node) or not isinstance(example_value(tensor), torch.Tensor):
            raise KeepFlex(f"{name} is not a tensor that tracing recorded")
    if (parts["full_kv_num_blocks"] is None) != (parts["full_kv_indices"] is None):
        raise KeepFlex("one list of full blocks is given without the other")

    for user in node.users:
        if not _is_getitem(user, node):
            raise KeepFlex("the results of the call are used as a tuple")

    # flex makes its kernels for one number of heads and one head dim, with a guard on them; the
    # scale follows from the head dim unless it is given.
    for name in ("query", "key", "value"):
        shape = example_value(tensors[name]).shape
        if len(shape) != 4:
            raise KeepFlex("query, key and value must have 4 dimensions")
        for dim in (1, 3):
            int(shape[dim])
    options = arguments["kernel_options"] or {}
    if not isinstance(options, Mapping):
        raise KeepFlex("the kernel options are not constant")
    return FlexCall(
        node=node,
        query=tensors["query"],
        key=tensors["key"],
        value=tensors["value"],
        score_mod=_subgraph(node, arguments["score_mod"], "score_mod"),
        mask_mod=_subgraph(node, parts["mask_mod"], "mask_mod"),
        q_len=parts["q_len"],
        kv_len=parts["kv_len"],
        kv_num_blocks=tensors["kv_num_blocks"],
        kv_indices=tensors["kv_indices"],
        full_kv_num_blocks=parts["full_kv_num_blocks"],
        full_kv_indices=parts["full_kv_indices"],
        q_block_size=_constant_size(parts["q_block_size"]),
        kv_block_size=_constant_size(parts["kv_block_size"]),
        scale=_constant_scale(arguments["scale"]),
        kernel_options=dict(options),
        score_captures=tuple(arguments["score_mod_other_buffers"]),
        mask_captures=tuple(arguments["mask_mod_other_buffers"]),
    )


def check_kernel_options(call: FlexCall) -> None:
    """Raise :class:`KeepFlex` for an option that gives the call a meaning that the op lacks."""
    options = call.kernel_options
    names = {name: name.removeprefix("fwd_").removeprefix("bwd_") for name in options}
    unknown = [
        name
        for name, base in names.items()
        if base not in _SCHEDULING_OPTIONS and base not in _HANDLED_OPTIONS
    ]
    if unknown:
        raise KeepFlex(f"kernel option {', '.join(sorted(unknown))} may change the result")
    if call.output_users(2) or options.get("OUTPUT_MAX"):
        raise KeepFlex("max_scores is asked for; the tree attention op returns out and lse only")
    if options.get("BACKEND") == "FLASH" and call.output_users(1):
        raise KeepFlex(
            'lse is used with BACKEND="FLASH", whose lse has another base than flex\'s others',
            hint='leave BACKEND out, or use "TRITON"',
        )
    precision = [name for name, base in names.items() if base == "FLOAT32_PRECISION"]
    if precision and example_value(call.query).dtype == torch.float32:
        raise KeepFlex(
            "kernel option FLOAT32_PRECISION sets the precision of this call alone",
            hint="use torch.set_float32_matmul_precision, which the op follows",
        )


def uses_decoding_kernel(call: FlexCall) -> bool:
    """Whether flex serves the call with a decoding kernel: few queries, split over the keys.

    The conditions are those of ``torch._inductor.kernel.flex.flex_decoding`` and, on a CPU, of
    ``torch._inductor.codegen.cpp_flex_attention_template`` (since torch 2.13). A symbolic length
    is decided by its example, with a guard, as flex does itself.
    """
    query, key = example_value(call.query), example_value(call.key)
    if query.device.type == "cpu":
        batch, q_len, kv_len = map(static_int, (query.shape[0], query.shape[2], key.shape[2]))
        partition = call.kernel_options.get("PARTITION_SIZE", 128)
        if not batch or q_len != 1 or kv_len is None or partition % call.kv_block_size:
            return False
        return bool(kv_len / batch >= max(2 * partition, 512))
    backend = call.kernel_options.get("BACKEND", "AUTO")
    if backend != "AUTO":
        return backend == "TRITON_DECODE"
    if call.kernel_options.get("FORCE_USE_FLEX_ATTENTION") or call.kernel_options.get(
        "OUTPUT_MAX"
    ):
        return False
    heads, kv_heads = static_int(query.shape[1]), static_int(key.shape[1])
    if static_int(query.shape[0]) is None or not heads or not kv_heads:
        return False
    group = heads // kv_heads
    if group == 0 or group & (group - 1):
        return False
    list_heads = example_value(call.kv_indices).shape[1]
    per_head_lists = heads == kv_heads and guard_or_false(list_heads == heads)
    if not per_head_lists and not guard_or_false(list_heads == 1):
        return False
    q_len = query.shape[2]
    return guard_or_false(q_len < 128) and guard_or_false(q_len > 0)


def static_int(size: int | torch.SymInt) -> int | None:
    """A size as a number where it is one, without a guard; else None."""
    return size if isinstance(size, int) else size.node.maybe_as_int()


def is_identity(score_mod: fx.GraphModule) -> bool:
    """Whether a score_mod returns the score that it was given, whatever else it computes."""
    (output,) = score_mod.graph.find_nodes(op="output")
    (result,) = output.args
    if isinstance(result, Sequence) and len(result) == 1:
        (result,) = result
    return result is next(iter(score_mod.graph.find_nodes(op="placeholder")), None)


def _unknown_entries(given: object) -> str:
    known = " and ".join(f"{n} ({where})" for n, where in _BLOCK_MASK_SIZES.items())
    return f"unknown layout of the block mask: {given} entries, known are {known}"


def _is_getitem(user: fx.Node, node: fx.Node) -> bool:
    return (
        user.op == "call_function"
        and user.target is operator.getitem
        and user.args[0] is node
        and user.args[1] in (0, 1, 2)
    )


def _subgraph(node: fx.Node, argument: Any, name: str) -> fx.GraphModule:
    owner = node.graph.owning_module
    if owner is None or not isinstance(argument, fx.Node) or argument.op != "get_attr":
        raise KeepFlex(f"{name} is not a subgraph of the graph")
    module: Any = owner
    for part in str(argument.target).split("."):
        module = getattr(module, part, None)
    if not isinstance(module, fx.GraphModule):
        raise KeepFlex(f"{name} is not a subgraph of the graph")
    return module


def _constant_scale(scale: Any) -> float:
    value = example_value(scale)
    if isinstance(value, torch.SymFloat):
        expression = value.node.shape_env.replace(value.node.expr)
        value = float(expression) if expression.is_number else None
    if not isinstance(value, (int, float)):
        raise KeepFlex("the scale is not a constant")
    return float(value)


def _constant_size(size: Any) -> int:
    value = example_value(size)
    if not isinstance(value, (int, torch.SymInt)):
        raise KeepFlex("a block size is not a number")
    # flex makes its kernels for one block size, with a guard on it; so does this.
    return int(value)
