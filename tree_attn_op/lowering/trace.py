"""Tracing a Python mask_mod into a graph."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx import traceback as fx_traceback
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

from ..errors import UnsupportedMask
from . import reasons
from .dialects import MUTATING_NAMES
from .functions import sliced

_READS = {
    getattr(Tensor, name): name
    for name in ("item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__")
}
_LIFTED_LITERAL = (torch.ops.aten.lift_fresh_copy.default, torch.ops.aten.lift_fresh.default)
_TORCH_HOME = os.path.dirname(torch.__file__)


class _MaskTracing(TorchFunctionMode):
    """What tracing a mask needs beyond make_fx.

    Indexing with a 0-d tensor reads it in eager PyTorch; here it becomes a look-up, as it does
    under flex_attention's vmap. Reading a tensor would turn its contents into part of the mask,
    and is refused. Each call leaves the user's source line on the nodes that it makes.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.startswith(_TORCH_HOME):
            frame = frame.f_back
        if frame is not None:
            code = frame.f_code
            fx_traceback.set_stack_trace(
                [f'File "{code.co_filename}", line {frame.f_lineno}, in {code.co_name}\n']
            )
        if func in _READS:
            error = reasons.reads_data(f"Tensor.{_READS[func]}")
            if frame is not None:
                error.source = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            raise error
        if _mutates(func) and type(args[0]) in (Tensor, torch.nn.Parameter):
            # Refused before it runs: what is no fake tensor is captured, and would be changed.
            raise UnsupportedMask("changes a captured tensor in place")
        if func is Tensor.__getitem__:
            return _look_up(*args)
        return func(*args, **(kwargs or {}))


def _mutates(func: Callable[..., Any]) -> bool:
    name = getattr(func, "__name__", "")
    if name.startswith("__"):
        return name.strip("_") in MUTATING_NAMES
    return name.endswith("_")


def _look_up(target: Tensor, items: Any) -> Tensor:
    items = items if isinstance(items, tuple) else (items,)
    if not any(_is_position(item) for item in items) or any(item is None for item in items):
        return target[items]
    dims = target.dim() - sum(item is not Ellipsis for item in items)
    indices: list[Tensor | None] = []
    for item in items:
        if item is Ellipsis:
            indices.extend([None] * dims)
        elif isinstance(item, slice):
            target = target[sliced(len(indices), item.start, item.stop, item.step)]
            indices.append(None)
        elif type(item) is int:
            target = target.select(len(indices), item)
        else:
            indices.append(item)
    return torch.ops.aten.index.Tensor(target, indices)


def _is_position(item: Any) -> bool:
    return (
        isinstance(item, Tensor)
        and item.dim() == 0
        and not item.is_floating_point()
        and item.dtype not in (torch.bool, torch.uint8)
    )


def trace_mask_mod(
    mask_mod: Callable[..., Tensor], device: torch.device | str
) -> tuple[fx.Graph, list[Tensor]]:
    """The aten graph of a mask_mod, and the tensors that it captures.

    Placeholders of the graph are b, h, q, k and then the captured tensors in order.

    make_fx with fake tensors: it sees through closures, partial functions, bound methods and
    composite operations alike, runs nothing on the device, and lifts every tensor that it did not
    make itself as an attribute of its module, from where it becomes an operand here. Its inputs
    are int64 0-d tensors, as flex_attention's indices are in eager PyTorch; under vmap the mask
    sees 0-d tensors too, so tracing it without vmap gives the same types.

    Raises:
        UnsupportedMask: tracing fails, or the mask reads the contents of a tensor.
    """
    try:
        inputs = [torch.zeros((), dtype=torch.int64, device=device) for _ in range(4)]
        with torch.no_grad(), _MaskTracing(), fx_traceback.preserve_node_meta():
            module = make_fx(
                lambda b, h, q, k: mask_mod(b, h, q, k),
                tracing_mode="fake",
                _allow_non_fake_inputs=True,
            )(*inputs)
    except UnsupportedMask:
        raise
    except Exception as error:
        message = str(error).strip().split("\n", 1)[0]
        raise UnsupportedMask(f"could not be traced: {type(error).__name__}: {message}") from error
    return _with_operands(module)


def _with_operands(module: fx.GraphModule) -> tuple[fx.Graph, list[Tensor]]:
    """The module's graph with its tensor attributes as placeholders."""
    graph = module.graph
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    operands: dict[int, fx.Node] = {}
    tensors: list[Tensor] = []
    for node in list(graph.nodes):
        tensor = getattr(module, str(node.target), None) if node.op == "get_attr" else None
        if not isinstance(tensor, Tensor):
            continue
        for user in list(node.users):
            if user.target in _LIFTED_LITERAL and tensor.dim() == 0:
                # torch.tensor(5) inside the mask: a number of the mask, no captured tensor.
                with graph.inserting_before(user):
                    literal = graph.call_function(
                        torch.ops.aten.scalar_tensor.default,
                        (tensor.item(),),
                        {"dtype": tensor.dtype},
                    )
                literal.meta.update(user.meta)
                user.replace_all_uses_with(literal)
                graph.erase_node(user)
        if node.users:
            if id(tensor) not in operands:
                with graph.inserting_after(last):
                    last = operands[id(tensor)] = graph.placeholder(f"captured_{len(tensors)}")
                last.meta.update(node.meta)
                tensors.append(tensor)
            node.replace_all_uses_with(operands[id(tensor)])
        graph.erase_node(node)
    return graph, tensors
