"""The pass as part of a cache key: uuid, equality, pickling, composition."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass

import passes
from passes import PassOptions, TreeAttentionPass
from passes.backend import PassSequence, compose
from passes.cache_key import source_digest

ROOT = Path(passes.__file__).parent.parent


class Noting(CustomGraphPass):
    """A user's pass: notes that it ran."""

    ran: int = 0

    def __call__(self, graph: fx.Graph) -> None:
        type(self).ran += 1

    def uuid(self) -> Any:
        return "noting"


def nothing(graph: fx.Graph) -> None:
    """A user's pass without a uuid."""


def test_uuid_tells_options_apart() -> None:
    lists, predicate = TreeAttentionPass(), TreeAttentionPass(plan="predicate")
    assert lists.uuid() == TreeAttentionPass(plan="lists").uuid()
    assert lists.uuid() != predicate.uuid()
    assert lists == TreeAttentionPass()
    assert lists != predicate
    assert len({lists, predicate, TreeAttentionPass()}) == 2
    small, large = (TreeAttentionPass(rewrite_small=small) for small in (True, False))
    assert small.uuid() != large.uuid()
    assert small != large


def test_uuid_follows_the_sources(tmp_path: Path) -> None:
    """Another one when any file of either package changes, wherever the packages lie."""
    changed = []
    for name in ("passes/report.py", "tree_attn_op/kernels/masking.py"):
        root = copy_sources(tmp_path / name.replace("/", "_"))
        with (root / name).open("a") as file:
            file.write("# changed\n")
        changed.append(root)
    roots = [copy_sources(tmp_path / "one"), copy_sources(tmp_path / "other"), *changed]
    digests = [source_digest((root / "passes", root / "tree_attn_op")) for root in roots]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


def copy_sources(root: Path) -> Path:
    """Both packages, copied to ``root``."""
    for package in ("passes", "tree_attn_op"):
        for source in (ROOT / package).rglob("*.py"):
            copy = root / source.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(source.read_bytes())
    return root


def test_pickles_without_its_report() -> None:
    graph_pass = TreeAttentionPass(plan="predicate", rewrite_small=True)
    fresh = pickle.dumps(graph_pass)
    graph_pass.report.extend([passes.CallReport(rewritten=True, predicate="True")])
    assert pickle.dumps(graph_pass) == fresh
    copy = pickle.loads(fresh)
    assert copy == graph_pass
    assert copy.uuid() == graph_pass.uuid()
    assert len(copy.report) == 0


def test_rewrite_small_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TREE_ATTN_REWRITE_SMALL", raising=False)
    assert PassOptions().rewrite_small is False
    monkeypatch.setenv("TREE_ATTN_REWRITE_SMALL", "1")
    assert PassOptions().rewrite_small is True
    assert PassOptions(rewrite_small=False).rewrite_small is False
    monkeypatch.setenv("TREE_ATTN_REWRITE_SMALL", "yes")
    with pytest.raises(ValueError, match="must be 0 or 1, got 'yes'"):
        PassOptions()
    with pytest.raises(TypeError, match="must be a bool or None, got 1"):
        PassOptions(rewrite_small=1)  # type: ignore[arg-type]


def test_unknown_plan() -> None:
    with pytest.raises(ValueError, match='"lists" or "predicate", not \'fast\''):
        PassOptions("fast")  # type: ignore[arg-type]


def test_composition_keeps_order_and_identity() -> None:
    ours, theirs = TreeAttentionPass(), Noting()
    assert compose(None, ours) is ours
    assert compose(ours, TreeAttentionPass()) is ours
    both = compose(theirs, ours)
    assert isinstance(both, PassSequence)
    assert both.passes == (theirs, ours)
    assert both.uuid() == ("noting", ours.uuid())
    assert compose(both, TreeAttentionPass()) is both
    assert compose((theirs, nothing), ours) == PassSequence([theirs, nothing, ours])
    assert pickle.loads(pickle.dumps(compose(nothing, ours))) == compose(nothing, ours)


def test_composition_with_a_pass_without_uuid_is_not_cached() -> None:
    both = compose(nothing, TreeAttentionPass())
    assert isinstance(both, PassSequence)
    assert both.uuid() is None


def test_composition_runs_both() -> None:
    graph, seen = fx.Graph(), []
    graph.output(())

    class Noted(TreeAttentionPass):
        def __call__(self, graph: fx.Graph) -> None:
            seen.append("ours")

    def theirs(graph: fx.Graph) -> None:
        seen.append("theirs")

    compose(theirs, Noted())(graph)
    assert seen == ["theirs", "ours"]


def test_inductor_accepts_the_pass_in_its_cache_key() -> None:
    from torch._inductor import codecache

    resolve = getattr(codecache, "resolve_pre_grad_pass_timing", None)
    if resolve is None:
        pytest.skip("this version runs the pass before it looks into its cache")
    with torch._inductor.config.patch(pre_grad_custom_pass=TreeAttentionPass()):
        assert resolve() == "late"
