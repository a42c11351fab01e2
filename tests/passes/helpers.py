"""Models, masks and graph printing shared by the tests of the pass."""

from __future__ import annotations

import itertools
import operator
import textwrap
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from passes import TreeAttentionPass
from passes.flex_call import is_flex_call, read_flex_call

MaskMod = Callable[..., torch.Tensor]


class Tree:
    """Token-level arrays of a small random token tree, one for each batch row.

    Nodes of random length in pre-order; every array is int64 ``[B, S]``: ``node`` and ``parent``
    ids, ``tin`` and ``tout`` (the node's interval in pre-order) and ``end`` (one past the last
    position of the token's subtree).
    """

    def __init__(self, batch: int, length: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        rows = [self._row(length, generator) for _ in range(batch)]
        for name in ("node", "parent", "tin", "tout", "end"):
            setattr(self, name, torch.stack([row[name] for row in rows]))

    node: torch.Tensor
    parent: torch.Tensor
    tin: torch.Tensor
    tout: torch.Tensor
    end: torch.Tensor

    @staticmethod
    def _row(length: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
        def below(high: int) -> int:
            return int(torch.randint(0, high, (), generator=generator))

        starts, parents, path = [0], [-1], [0]
        while (start := starts[-1] + 1 + below(max(2, length // 6))) < length:
            del path[1 + below(len(path)) :]
            parents.append(path[-1])
            path.append(len(starts))
            starts.append(start)
        last = list(range(1, len(starts) + 1))
        for node in range(len(starts) - 1, 0, -1):
            last[parents[node]] = max(last[parents[node]], last[node])
        bounds = [*starts, length]
        of_token = torch.repeat_interleave(
            torch.arange(len(starts)), torch.tensor(bounds[1:]) - torch.tensor(starts)
        )
        return {
            "node": of_token,
            "parent": torch.tensor(parents)[of_token],
            "tin": of_token.clone(),
            "tout": torch.tensor(last)[of_token],
            "end": torch.tensor([bounds[end] for end in last])[of_token],
        }


def form_1(tree: Tree) -> MaskMod:
    """Parent and own node: not transitive."""
    node, parent = tree.node, tree.parent
    return lambda b, h, q, k: (
        (q >= k) & ((node[b, q] == node[b, k]) | (parent[b, q] == node[b, k]))
    )


def form_3(tree: Tree) -> MaskMod:
    """Enter and exit numbers, with a length in a 0-d tensor and no causal term."""
    tin, tout = tree.tin[0], tree.tout[0]
    count = torch.tensor(tin.shape[0] - 3)
    return lambda b, h, q, k: (q < count) & (k < count) & (tin[k] <= tin[q]) & (tin[q] < tout[k])


def form_8(tree: Tree) -> MaskMod:
    """Pre-order with the end of each subtree."""
    end = tree.end[0]
    return lambda b, h, q, k: (q >= k) & (q < end[k])


def form_9(tree: Tree) -> MaskMod:
    """Documents, with a window."""
    document = tree.node
    return lambda b, h, q, k: (document[b, q] == document[b, k]) & (q >= k) & (q - k < 40)


REWRITTEN = {1: form_1, 3: form_3, 8: form_8, 9: form_9}


def block_mask(mask_mod: MaskMod, tensors: tuple[torch.Tensor, ...], **sizes: Any) -> BlockMask:
    """The BlockMask of a mask for query, key and value."""
    query, key, _ = tensors
    return create_block_mask(
        mask_mod, query.shape[0], None, query.shape[2], key.shape[2], device="cpu", **sizes
    )


def qkv(
    batch: int = 2,
    length: int = 192,
    *,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 16,
    kv_length: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random query, key and value, stored as a model stores them: ``[B, S, H, D]``."""
    kv_length = length if kv_length is None else kv_length
    shapes = [(length, heads), (kv_length, kv_heads), (kv_length, kv_heads)]
    query, key, value = (
        torch.randn(batch, size, count, dim, dtype=dtype).transpose(1, 2) for size, count in shapes
    )
    return query, key, value


def attention(query: Any, key: Any, value: Any, mask: BlockMask | None, **options: Any) -> Any:
    """flex_attention with grouped heads."""
    return flex_attention(query, key, value, block_mask=mask, enable_gqa=True, **options)


class PassThenEager:
    """A Dynamo backend that runs passes on each graph and then the graph itself, uncompiled.

    Attributes:
        graph_pass: the pass; its report has all calls.
        graphs: the graphs after the pass, in order of compilation.
        before, after: how the graphs print, before and after the pass.
    """

    def __init__(self, graph_pass: Any = None) -> None:
        self.graph_pass = TreeAttentionPass() if graph_pass is None else graph_pass
        self.graphs: list[fx.GraphModule] = []
        self.before: list[str] = []
        self.after: list[str] = []

    def __call__(self, gm: fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        names = role_names(gm.graph)
        self.before.append(print_graph(gm.graph, names))
        self.graph_pass(gm.graph)
        self.after.append(print_graph(gm.graph, names))
        gm.graph.lint()
        self.graphs.append(gm)
        return gm.forward

    @property
    def report(self) -> Any:
        """The report of the pass."""
        return self.graph_pass.report


def compiled(fn: Callable[..., Any], backend: Any, **options: Any) -> Callable[..., Any]:
    """``fn`` compiled afresh in one graph."""
    torch._dynamo.reset()
    return torch.compile(fn, backend=backend, fullgraph=True, **options)


def count_calls(gm: fx.GraphModule, op: str) -> int:
    """How many nodes in a graph and the graphs nested in it call an op of this project."""
    target = getattr(torch.ops.tree_attn_op, op).default
    return sum(
        len(module.graph.find_nodes(op="call_function", target=target))
        for module in gm.modules()
        if isinstance(module, fx.GraphModule)
    )


def role_names(graph: fx.Graph) -> dict[fx.Node, str]:
    """Names that don't depend on the torch version for what the first flex call is given."""
    names: dict[fx.Node, str] = {}
    for node in graph.nodes:
        if not is_flex_call(node):
            continue
        call = read_flex_call(node)
        roles = ["query", "key", "value", "kv_num_blocks", "kv_indices"]
        roles += ["full_kv_num_blocks", "full_kv_indices"]
        for role in roles:
            if getattr(call, role) is not None:
                names.setdefault(getattr(call, role), role)
        for index, capture in enumerate(call.mask_captures):
            if isinstance(capture, fx.Node):
                names.setdefault(capture, f"captured{index}")
    return names


def print_graph(graph: fx.Graph, names: dict[fx.Node, str], prefix: str = "v") -> str:
    """A graph in a form that is the same for all torch versions: no inputs, no metadata.

    Nodes without a name in ``names`` are numbered; a flex call shows its mask as an indented graph
    and leaves the kernel options out.
    """
    names, numbers = dict(names), itertools.count()
    lines = []

    def name(node: fx.Node) -> str:
        if node not in names:
            names[node] = f"{prefix}{next(numbers)}"
        return names[node]

    def show(argument: Any) -> str:
        if isinstance(argument, fx.Node):
            return name(argument)
        if isinstance(argument, (tuple, list)):
            comma = "," if len(argument) == 1 else ""
            return "(" + ", ".join(map(show, argument)) + comma + ")"
        if isinstance(argument, float):
            return f"{argument:.6g}"
        return repr(argument) if not isinstance(argument, torch.dtype) else str(argument)

    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            continue
        if node.op == "output":
            lines.append(f"return {show(node.args[0])}")
        elif is_flex_call(node):
            call = read_flex_call(node)
            given = [call.query, call.key, call.value, *call.lists, call.q_block_size]
            given += [call.kv_block_size, call.scale]
            lines.append(f"{name(node)} = flex_attention({', '.join(map(show, given))})")
            inputs = call.mask_mod.graph.find_nodes(op="placeholder")
            inner = dict(zip(inputs, ["b", "h", "q", "k"], strict=False))
            for placeholder, capture in zip(inputs[4:], call.mask_captures, strict=True):
                inner[placeholder] = show(capture)
            mask_graph = print_graph(call.mask_mod.graph, inner, prefix="m")
            lines += textwrap.indent(mask_graph, "    ").splitlines()
        elif node.target is operator.getitem:
            lines.append(f"{name(node)} = {show(node.args[0])}[{show(node.args[1])}]")
        else:
            arguments = [show(argument) for argument in node.args]
            arguments += [f"{key}={show(value)}" for key, value in node.kwargs.items()]
            lines.append(f"{name(node)} = {_short(node)}({', '.join(arguments)})")
    wrapped = (textwrap.wrap(line, 90, subsequent_indent=" " * 8) for line in lines)
    return "\n".join(itertools.chain.from_iterable(wrapped))


def _short(node: fx.Node) -> str:
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.name.replace("::", ".")
    name = str(getattr(node.target, "__name__", node.target))
    if node.op == "call_method" and not name.startswith("__"):
        return f"Tensor.{name}"
    # a == b is operator.eq or Tensor.__eq__, a & b operator.and_ or Tensor.__and__.
    return name.strip("_")


def dense(mask: BlockMask, batch: int, heads: int) -> torch.Tensor:
    """What a BlockMask allows, as flex computes it: bool ``[batch, heads, Q, K]``.

    Full blocks as they are, partial blocks under the mask_mod, nothing elsewhere.
    """
    q_len, kv_len = mask.seq_lengths
    b = torch.arange(batch).view(-1, 1, 1, 1)
    h = torch.arange(heads).view(1, -1, 1, 1)
    q = torch.arange(q_len).view(1, 1, -1, 1)
    k = torch.arange(kv_len).view(1, 1, 1, -1)
    under_mask = mask.mask_mod(b, h, q, k).expand(batch, heads, q_len, kv_len)
    partial = _listed(mask.kv_num_blocks, mask.kv_indices, mask)
    allowed = partial & under_mask
    if mask.full_kv_num_blocks is not None:
        allowed = allowed | _listed(mask.full_kv_num_blocks, mask.full_kv_indices, mask)
    return allowed


def _listed(counts: torch.Tensor, indices: torch.Tensor, mask: BlockMask) -> torch.Tensor:
    q_len, kv_len = mask.seq_lengths
    q_block, kv_block = mask.BLOCK_SIZE
    columns = -(-kv_len // kv_block)
    listed = torch.zeros(*indices.shape[:3], columns, dtype=torch.bool)
    for place in torch.cartesian_prod(*(torch.arange(n) for n in counts.shape)).tolist():
        listed[tuple(place)][indices[tuple(place)][: int(counts[tuple(place)])].long()] = True
    tokens = listed.repeat_interleave(q_block, 2).repeat_interleave(kv_block, 3)
    return tokens[:, :, :q_len, :kv_len]
