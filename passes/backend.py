"""Ways to have the pass run: a Dynamo backend by name, or installed for plain torch.compile.

The backend is Inductor with the pass in ``pre_grad_custom_pass``. A pass that the user has set
there already keeps running, before ours.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import fx
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass

from .options import PassOptions, Plan
from .rewrite import TreeAttentionPass

log = logging.getLogger(__name__)

GraphPass = Callable[[fx.Graph], None]

_SLOT = "pre_grad_custom_pass"
_OPTION_PREFIX = "tree_attn."


class PassSequence(CustomGraphPass):
    """Several graph passes as one, for a slot that takes one (torch 2.11).

    Args:
        passes: run in this order.
    """

    def __init__(self, passes: Sequence[GraphPass]) -> None:
        self.passes = tuple(passes)

    def __call__(self, graph: fx.Graph) -> None:
        """Run the passes on ``graph``, in order."""
        for graph_pass in self.passes:
            graph_pass(graph)

    def uuid(self) -> Any | None:
        """The passes' uuids, or None (which rules caching out) if one of them has none."""
        uuids = tuple(
            graph_pass.uuid() if isinstance(graph_pass, CustomGraphPass) else None
            for graph_pass in self.passes
        )
        return None if None in uuids else uuids

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PassSequence) and other.passes == self.passes

    def __hash__(self) -> int:
        return hash(self.passes)


def compose(existing: Any, added: TreeAttentionPass) -> GraphPass:
    """A pass that runs what is in the slot already, then ``added``.

    Args:
        existing: the value of ``pre_grad_custom_pass``: None, a pass, a list or tuple of passes.
        added: the pass to add; if one with the same options is there, nothing is added.
    """
    if existing is None:
        return added
    if isinstance(existing, (list, tuple)):
        passes: tuple[GraphPass, ...] = tuple(existing)
    else:
        passes = existing.passes if isinstance(existing, PassSequence) else (existing,)
    if added in passes:
        return existing if callable(existing) else PassSequence(passes)
    return PassSequence((*passes, added))


def tree_attn(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Any:
    """The Dynamo backend ``"tree_attn"``: Inductor with :class:`TreeAttentionPass`.

    ``torch.compile(model, backend="tree_attn")`` finds it by the name of its entry point; nothing
    needs to be imported.

    Args:
        gm: the captured graph.
        example_inputs: its fake inputs.
        mode: as for the Inductor backend, "reduce-overhead" for example.
        options: as for the Inductor backend; ``"tree_attn.plan"`` and
            ``"tree_attn.rewrite_small"`` set options of the pass (see
            :class:`passes.PassOptions`).

    Returns:
        The compiled callable.

    Raises:
        RuntimeError: a mode or an option that neither Inductor nor the pass knows.
    """
    from torch._inductor.compile_fx import compile_fx

    patches: dict[str, Any] = {}
    if mode is not None and mode != "default":
        patches.update(torch._inductor.list_mode_options(mode))
    own: dict[str, Any] = {}
    known = inductor_config.get_config_copy()
    for name, setting in (options or {}).items():
        attribute = name.replace("-", "_")
        if name.startswith(_OPTION_PREFIX):
            own[name.removeprefix(_OPTION_PREFIX)] = setting
        elif attribute in known:
            patches[attribute] = setting
        else:
            raise RuntimeError(
                f"unexpected option {name!r}: the options are Inductor's "
                f"(torch._inductor.list_options()) and {_own_options()}"
            )
    if not own.keys() <= PassOptions.__dataclass_fields__.keys():
        raise RuntimeError(f"unexpected options {sorted(own)}: the pass has {_own_options()}")
    existing = patches.get(_SLOT, getattr(inductor_config, _SLOT))
    patches[_SLOT] = compose(existing, TreeAttentionPass(**own))
    return compile_fx(gm, list(example_inputs), config_patches=patches)


def _own_options() -> str:
    return " and ".join(f'"{_OPTION_PREFIX}{name}"' for name in PassOptions.__dataclass_fields__)


def _reset() -> None:
    """Drop the CUDA graphs that ``mode="reduce-overhead"`` recorded, for torch._dynamo.reset."""
    if torch.cuda.is_available():
        from torch._inductor.cudagraph_trees import reset_cudagraph_trees

        reset_cudagraph_trees()


tree_attn.reset = _reset  # type: ignore[attr-defined]


class Installation:
    """What :func:`install` did, to be taken back once; also a context manager."""

    def __init__(self, graph_pass: TreeAttentionPass) -> None:
        self.graph_pass = graph_pass
        self._previous = getattr(inductor_config, _SLOT)
        self._installed = compose(self._previous, graph_pass)
        setattr(inductor_config, _SLOT, self._installed)
        _installations.append(self)

    def remove(self) -> None:
        """Take the pass out of the slot, which is then as it was; a second time, do nothing.

        Later installations stay. If something else was put in the slot since, it stays there.
        """
        if self not in _installations:
            return
        untouched = getattr(inductor_config, _SLOT) is _installations[-1]._installed
        index = _installations.index(self)
        del _installations[index]
        content = self._previous
        for later in _installations[index:]:
            later._previous = content
            content = later._installed = compose(content, later.graph_pass)
        if untouched:
            setattr(inductor_config, _SLOT, content)
        else:
            log.warning("pre_grad_custom_pass was replaced since install(); it stays as it is")

    def __enter__(self) -> TreeAttentionPass:
        return self.graph_pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.remove()


_installations: list[Installation] = []


def install(*, plan: Plan = "lists", rewrite_small: bool | None = None) -> Installation:
    """Let plain ``torch.compile`` rewrite flex_attention calls from now on.

    It may be called several times; :func:`uninstall` takes the latest back. What is compiled
    already stays as it is. As a context manager it takes itself back at the end::

        with passes.install() as tree_attention_pass:
            model = torch.compile(model)
            model(inputs)
        print(tree_attention_pass.report)

    Args:
        plan, rewrite_small: see :class:`passes.PassOptions`.
    """
    return Installation(TreeAttentionPass(plan=plan, rewrite_small=rewrite_small))


def uninstall() -> None:
    """Take back the latest :func:`install` that is still in place.

    Raises:
        RuntimeError: nothing is installed.
    """
    if not _installations:
        raise RuntimeError("the pass is not installed")
    _installations[-1].remove()
