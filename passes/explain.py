"""``explain``: which flex_attention calls of a function would be rewritten, and why others not."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from .flex_call import FLEX_ATTENTION
from .options import Plan
from .report import Report
from .rewrite import TreeAttentionPass

_fresh_lines = itertools.count(1)


def explain(
    fn: Callable[..., Any],
    /,
    *args: Any,
    plan: Plan = "lists",
    rewrite_small: bool | None = None,
    **kwargs: Any,
) -> Report:
    """Compile and run ``fn`` once, and report what the pass does with each flex_attention call.

    The function is traced anew whatever has been compiled before, nothing goes through Inductor's
    caches, and what has been compiled stays. The function does run, with all its side effects. A
    mode of another torch.compile is not known here: under ``mode="reduce-overhead"`` small calls,
    which this reports as kept, are rewritten as well.

    Args:
        fn: a function or module; one that torch.compile returned is explained as what it wraps.
        args, kwargs: what to call it with.
        plan, rewrite_small: see :class:`passes.PassOptions`.

    Returns:
        One entry a flex_attention call, in the order of the graph, those of graphs nested in it
        (checkpointed bodies) first; ``print`` shows a table.

    Raises:
        TypeError: ``fn`` can't be called.
    """
    if not callable(fn):
        raise TypeError(f"explain takes a function or module, got {type(fn).__name__}")
    graph_pass = TreeAttentionPass(plan=plan, rewrite_small=rewrite_small)

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        graph_pass(gm.graph)
        if _needs_inductor(gm):
            from torch._inductor.compile_fx import compile_fx

            run: Any = compile_fx(gm, list(example_inputs))
            return run
        return gm.forward

    # A cache entry of a code object counts toward its recompile limit, whoever made it: trace
    # from a code object of our own.
    call = _fresh_call()
    options: dict[str, Any] = {"backend": backend}
    if "isolate_recompiles" in inspect.signature(torch.compile).parameters:
        options["isolate_recompiles"] = True
    with _no_recompile_limit():
        torch.compile(call, **options)(_unwrapped(fn), args, kwargs)
    return graph_pass.report


def _call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return fn(*args, **kwargs)


def _fresh_call() -> Callable[..., Any]:
    code = _call.__code__.replace(co_firstlineno=next(_fresh_lines))
    return types.FunctionType(code, _call.__globals__, "explain")


def _unwrapped(fn: Callable[..., Any]) -> Callable[..., Any]:
    while True:
        inner = getattr(fn, "_orig_mod", None) or getattr(fn, "_torchdynamo_orig_callable", None)
        if inner is None:
            return fn
        fn = inner


def _needs_inductor(gm: fx.GraphModule) -> bool:
    # Without Inductor, a flex call builds the whole matrix of scores. On a GPU that may not fit;
    # on a CPU Inductor serves inference only, and sizes are small.
    kept = [
        node
        for module in gm.modules()
        if isinstance(module, fx.GraphModule)
        for node in module.graph.find_nodes(op="call_function", target=FLEX_ATTENTION)
    ]
    return any(node.args[0].meta["example_value"].device.type != "cpu" for node in kept)


def _no_recompile_limit() -> contextlib.AbstractContextManager[Any]:
    return torch._dynamo.config.patch(recompile_limit=1 << 20, accumulated_recompile_limit=1 << 20)
