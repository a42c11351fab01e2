"""The ways to have the pass run, through Inductor."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch._inductor.utils import fresh_cache

import passes
from passes import TreeAttentionPass
from passes.backend import PassSequence

from .helpers import Tree, attention, block_mask, form_1, form_8, qkv
from .test_identity import ROOT, Noting, copy_sources
from .test_rewrite import top_k_lists


@pytest.fixture
def empty_cache() -> Iterator[None]:
    with fresh_cache(), inductor_config.patch(cpp_cache_precompile_headers=False):
        yield


@pytest.fixture
def slot() -> Iterator[None]:
    """pre_grad_custom_pass, put back as it was."""
    previous = inductor_config.pre_grad_custom_pass
    yield
    inductor_config.pre_grad_custom_pass = previous


def model_and_inputs() -> tuple[Any, tuple[torch.Tensor, ...]]:
    tensors = qkv(1, 130)
    mask = block_mask(form_1(Tree(1, 130)), tensors)

    def model(query: Any, key: Any, value: Any) -> Any:
        return attention(query, key, value, mask)

    return model, tensors


def rewritten() -> int:
    return int(counters["inductor"]["tree_attn_rewritten"])


@pytest.mark.usefixtures("empty_cache")
def test_as_an_option_of_torch_compile() -> None:
    model, tensors = model_and_inputs()
    graph_pass = TreeAttentionPass()
    fn = torch.compile(model, options={"pre_grad_custom_pass": graph_pass})
    torch.testing.assert_close(fn(*tensors), model(*tensors))
    assert rewritten() == 1
    assert [call.rewritten for call in graph_pass.report] == [True]
    assert inductor_config.pre_grad_custom_pass is None


@pytest.mark.usefixtures("empty_cache")
def test_equals_compiled_flex_on_hand_made_lists() -> None:
    """Only compiled flex goes by the lists; uncompiled, it knows the mask_mod alone."""
    tensors = qkv(2, 200)
    mask = top_k_lists(block_mask(form_8(Tree(2, 200)), tensors, BLOCK_SIZE=64))
    results = []
    for settings in ({}, {"backend": passes.tree_attn}):
        torch._dynamo.reset()
        results.append(torch.compile(attention, **settings)(*tensors, mask))
    assert rewritten() == 1
    torch.testing.assert_close(*results)
    assert not torch.allclose(results[0], attention(*tensors, mask))


@pytest.mark.usefixtures("empty_cache")
def test_installed() -> None:
    model, tensors = model_and_inputs()
    with passes.install() as graph_pass:
        assert inductor_config.pre_grad_custom_pass is graph_pass
        torch.testing.assert_close(torch.compile(model)(*tensors), model(*tensors))
    assert rewritten() == 1
    assert inductor_config.pre_grad_custom_pass is None


@pytest.mark.usefixtures("empty_cache")
def test_users_own_pass_runs_too() -> None:
    model, tensors = model_and_inputs()
    before = Noting.ran
    options = {"pre_grad_custom_pass": Noting()}
    fn = torch.compile(model, backend=passes.tree_attn, options=options)
    torch.testing.assert_close(fn(*tensors), model(*tensors))
    assert rewritten() == 1
    assert Noting.ran > before


@pytest.mark.usefixtures("slot")
def test_install_nests_and_restores() -> None:
    theirs = Noting()
    inductor_config.pre_grad_custom_pass = theirs
    first = passes.install()
    assert inductor_config.pre_grad_custom_pass == PassSequence([theirs, TreeAttentionPass()])
    second = passes.install(plan="predicate")
    passes.install()
    assert inductor_config.pre_grad_custom_pass == PassSequence(
        [theirs, TreeAttentionPass(), TreeAttentionPass(plan="predicate")]
    )
    passes.uninstall()
    first.remove()
    first.remove()
    assert inductor_config.pre_grad_custom_pass == PassSequence(
        [theirs, TreeAttentionPass(plan="predicate")]
    )
    second.remove()
    assert inductor_config.pre_grad_custom_pass is theirs
    with pytest.raises(RuntimeError, match="not installed"):
        passes.uninstall()


@pytest.mark.usefixtures("slot")
def test_uninstall_leaves_what_was_set_since() -> None:
    passes.install()
    theirs = Noting()
    inductor_config.pre_grad_custom_pass = theirs
    passes.uninstall()
    assert inductor_config.pre_grad_custom_pass is theirs


def test_unknown_options() -> None:
    model, tensors = model_and_inputs()
    for options, message in (
        ({"no_such_option": 1}, "no_such_option"),
        ({"tree_attn.speed": 1}, "speed"),
    ):
        torch._dynamo.reset()
        fn = torch.compile(model, backend=passes.tree_attn, options=options)
        with pytest.raises(Exception, match=message):
            fn(*tensors)


def test_modes_and_options_reach_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []

    def compile_fx(gm: Any, inputs: Any, config_patches: Any = None, **rest: Any) -> Any:
        seen.append(config_patches)
        return gm.forward

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_fx)
    model, tensors = model_and_inputs()
    for settings in (
        {},
        {"mode": "reduce-overhead"},
        {"mode": "max-autotune-no-cudagraphs"},
        {"options": {"epilogue-fusion": False, "tree_attn.plan": "predicate"}},
    ):
        torch._dynamo.reset()
        torch.compile(model, backend=passes.tree_attn, **settings)(*tensors)
    plain, overhead, autotune, options = seen
    assert plain == {"pre_grad_custom_pass": TreeAttentionPass()}
    assert overhead["triton.cudagraphs"] is True
    assert autotune["max_autotune"] is True
    assert options["epilogue_fusion"] is False
    assert options["pre_grad_custom_pass"] == TreeAttentionPass(plan="predicate")


SCRIPT = """
    import sys, torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch.manual_seed(0)
    ids = torch.arange(130) // 20
    mask = create_block_mask(
        lambda b, h, q, k: (q >= k) & (ids[q] == ids[k]), None, None, 130, 130, device="cpu"
    )
    query, key, value = torch.randn(3, 1, 2, 130, 16)
    layer = lambda *tensors: flex_attention(*tensors, block_mask=mask)
    assert not any(name.split(".")[0] in ("passes", "tree_attn_op") for name in sys.modules)
    torch._inductor.config.cpp_cache_precompile_headers = False
    out = torch.compile(layer, backend="tree_attn")(query, key, value)
    error = (out - layer(query, key, value)).abs().max().item()
    assert error < 1e-5, error
    counters = torch._dynamo.utils.counters
    print(
        counters["inductor"]["tree_attn_rewritten"],
        counters["aot_autograd"]["autograd_cache_hit"] + counters["inductor"]["fxgraph_cache_hit"],
    )
"""


def test_by_name_in_fresh_processes(tmp_path: Path) -> None:
    """No import is needed; the second process finds what the first one compiled."""
    copy_sources(tmp_path / "sources")
    first, first_hits = run_by_name(tmp_path)
    second, second_hits = run_by_name(tmp_path)
    assert (first, first_hits) == (1, 0)
    # torch 2.11 runs the pass before it looks into its cache, later versions after.
    assert second in (0, 1)
    assert second_hits > 0


@pytest.mark.usefixtures("empty_cache")
def test_options_have_cache_entries_of_their_own() -> None:
    model, tensors = model_and_inputs()
    hits = []
    for plan in ("lists", "predicate", "lists"):
        torch._dynamo.reset()
        counters.clear()
        fn = torch.compile(model, backend=passes.tree_attn, options={"tree_attn.plan": plan})
        torch.testing.assert_close(fn(*tensors), model(*tensors))
        hits.append(cache_hits() > 0)
    assert hits == [False, False, True]


def cache_hits() -> int:
    return int(
        counters["aot_autograd"]["autograd_cache_hit"] + counters["inductor"]["fxgraph_cache_hit"]
    )


def run_by_name(tmp_path: Path) -> tuple[int, int]:
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
        "PYTHONPATH": os.pathsep.join([str(tmp_path / "sources"), str(metadata_folder(tmp_path))]),
    }
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    result = subprocess.run(
        [sys.executable, str(script)],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    calls, hits = map(int, result.stdout.split())
    return calls, hits


def metadata_folder(tmp_path: Path) -> Path:
    """The entry points of pyproject.toml as an installed distribution has them."""
    folder = tmp_path / "metadata"
    info = folder / "tree_attn_op_under_test-0.0.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    name = "Metadata-Version: 2.1\nName: tree-attn-op-under-test\nVersion: 0.0.0\n"
    (info / "METADATA").write_text(name)
    # Python 3.10 has no tomllib.
    table = (ROOT / "pyproject.toml").read_text().split('[project.entry-points."')[1]
    group, points = table.split("[")[0].split('"]')
    (info / "entry_points.txt").write_text(f"[{group}]\n" + points.replace('"', "").strip())
    return folder
