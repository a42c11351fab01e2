"""What the pass did with each flex_attention call, and why."""

from __future__ import annotations

import linecache
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import overload

from torch import fx

# Each compilation of a long-running program adds its calls; older ones are dropped beyond this.
_MAX_CALLS = 10_000


@dataclass(frozen=True)
class CallReport:
    """What became of one flex_attention call.

    Attributes:
        rewritten: whether the call is now the tree attention op.
        predicate: the text of the predicate that its mask was proven to be, if it was.
        kernels: what will serve it if it was rewritten: ``cpu``, ``hopper`` or ``portable``, and
            why not the faster kernels of this device.
        reason: why the call was kept; None if it was rewritten.
        hint: what to write instead, where something equivalent can be rewritten.
        source: the user's ``file:line: code`` of the call, or of what in its mask kept it.
        layer: the module that made the call, as a path such as ``layers.3.self_attn``; empty when
            it isn't known.
        node: the name of the call's node in the graph.
        mask_node: the name of the node of the mask graph that kept it, if it was one.
    """

    rewritten: bool
    predicate: str | None = None
    kernels: str | None = None
    reason: str | None = None
    hint: str | None = None
    source: str | None = None
    layer: str = ""
    node: str = ""
    mask_node: str | None = None

    def __str__(self) -> str:
        if self.rewritten:
            return f"rewritten: {self.predicate}"
        hint = f"; {self.hint}" if self.hint else ""
        return f"kept flex: {self.reason}{hint}"


class Report(Sequence[CallReport]):
    """The calls that a pass has seen, oldest first; ``str()`` of it is a table."""

    def __init__(self, calls: Iterable[CallReport] = ()) -> None:
        self._calls: list[CallReport] = list(calls)

    @overload
    def __getitem__(self, index: int) -> CallReport: ...
    @overload
    def __getitem__(self, index: slice) -> Report: ...
    def __getitem__(self, index: int | slice) -> CallReport | Report:
        if isinstance(index, slice):
            return Report(self._calls[index])
        return self._calls[index]

    def __len__(self) -> int:
        return len(self._calls)

    def __iter__(self) -> Iterator[CallReport]:
        return iter(self._calls)

    def __repr__(self) -> str:
        return f"Report({self._calls!r})"

    @property
    def rewritten(self) -> Report:
        """The calls that were rewritten."""
        return Report(call for call in self if call.rewritten)

    @property
    def kept(self) -> Report:
        """The calls that were kept."""
        return Report(call for call in self if not call.rewritten)

    def extend(self, calls: Iterable[CallReport]) -> None:
        """Add calls, forgetting the oldest beyond ten thousand."""
        self._calls.extend(calls)
        del self._calls[:-_MAX_CALLS]

    def __str__(self) -> str:
        if not self._calls:
            return "no flex_attention call was compiled (or what was came from a compile cache)"
        rows = [("#", "call", "verdict", "predicate or reason")]
        for number, call in enumerate(self._calls):
            where = call.layer or call.node
            lines = _wrapped(call.predicate if call.rewritten else call.reason)
            if call.hint:
                lines += _wrapped(f"instead: {call.hint}")
            if call.kernels and ":" in call.kernels:
                lines += _wrapped(f"kernels: {call.kernels}")
            if call.source and not call.rewritten:
                lines += [f"at {call.source}"]
            verdict = "rewritten" if call.rewritten else "kept flex"
            rows.append((str(number), where, verdict, lines[0]))
            rows.extend(("", "", "", line) for line in lines[1:])
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        table = [
            "  ".join(
                [*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]
            )
            for row in rows
        ]
        count = len(self.rewritten)
        table.append(f"{count} of {len(self)} flex_attention calls rewritten")
        return "\n".join(line.rstrip() for line in table)


def source_line(node: fx.Node) -> str | None:
    """The user's innermost line in a node's stack trace, as ``file:line: code``."""
    return innermost_line(node.meta.get("stack_trace"))


def innermost_line(stack_trace: str | None) -> str | None:
    """The innermost frame of a printed stack trace that isn't torch's, as ``file:line: code``."""
    lines = (stack_trace or "").splitlines()
    for index in range(len(lines) - 1, -1, -1):
        head = lines[index].strip()
        if head.startswith('File "') and "/torch/nn/attention/" not in head:
            path, _, rest = head.removeprefix('File "').partition('", line ')
            number = rest.partition(",")[0]
            code = lines[index + 1].strip() if index + 1 < len(lines) else ""
            return f"{path}:{number}: {code}" if code else f"{path}:{number}"
    return None


def with_code(source: str | None) -> str | None:
    """``file:line`` with the code of that line added, where the file can be read."""
    path, _, number = (source or "").rpartition(":")
    code = linecache.getline(path, int(number)).strip() if path and number.isdigit() else ""
    return f"{source}: {code}" if code else source


def layer_path(node: fx.Node) -> str:
    """The path of the module that a node was traced in, from its ``nn_module_stack``."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path = str(next(reversed(stack.values()))[0])
    # Where Dynamo found the outermost module: L['self'].layers.0, L['args'][0].layers.0, L['fn'].
    path = re.sub(r"^L\['\w+'\](?:\[\d+\])*\.?", "", path).removeprefix("self.")
    return path.replace("._modules['", ".").replace("']", "").removeprefix("_modules['")


def _wrapped(text: str | None) -> list[str]:
    return textwrap.wrap(text or "", width=80) or [""]
