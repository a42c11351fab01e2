"""Every example runs, finds its own results right, and says what its page says."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[1] / "examples"
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py"))


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and Dynamo look a module up by its name.
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def test_no_example_is_left_out() -> None:
    page = (EXAMPLES / "README.md").read_text()
    assert sorted(re.findall(r"^\| \[(\w+)\.py\]\(\1\.py\) \|", page, re.MULTILINE)) == NAMES


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_from_dense_trie_mask(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert load("from_dense_trie_mask", monkeypatch).main() == 0
    shown = capsys.readouterr().out
    assert "q0 >= k0 & q0 < k1" in shown
    assert "q >= k & q < k0" in shown


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_from_group_parent_masks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert load("from_group_parent_masks", monkeypatch).main() == 0
    shown = capsys.readouterr().out
    assert "1 of 1 flex_attention calls rewritten" in shown
    assert "sees 60 as the mask is written, 100 with all its ancestors" in shown


def test_context_parallel(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    # The processes that it starts find the package as this one does.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    assert load("context_parallel", monkeypatch).main() == 0
    shown = capfd.readouterr().out
    assert "tokens of each rank: (640, 400)" in shown
    assert "loss 4.18" in shown


def test_grpo_transformers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    module = load("grpo_transformers", monkeypatch)
    # From ten steps on the reward must have risen for it to end well.
    assert module.main(["--steps", "10"]) == 0
    shown = capsys.readouterr().out
    assert len(re.findall(r"^step +\d+: reward", shown, re.MULTILINE)) == 10


def test_the_grpo_example_notices_a_difference(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    module = load("grpo_transformers", monkeypatch)
    right = module.tree_transformers.model_inputs

    def without_depths(tree):
        inputs = right(tree)
        return {**inputs, "position_ids": torch.arange(tree.num_tokens)[None]}

    monkeypatch.setattr(module.tree_transformers, "model_inputs", without_depths)
    assert module.main(["--steps", "1"]) == 1
    assert "differ" in capsys.readouterr().err


def test_the_snippets_of_the_page_run(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    page = (EXAMPLES / "README.md").read_text()
    # One inside a list is indented.
    snippets = re.findall(r"^( *)```python\n(.*?)^\1```$", page, re.MULTILINE | re.DOTALL)
    assert len(snippets) == 3
    module = types.ModuleType("examples_page")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for indent, code in snippets:
        text = re.sub(rf"^{indent}", "", code, flags=re.MULTILINE)
        exec(compile(text, "examples/README.md", "exec"), module.__dict__)
    tree, logprobs = module.tree, module.logprobs
    assert [len(one) for one in logprobs] == list(tree.trajectory_lengths)
    assert module.out.shape == (1, tree.num_tokens, 8, 64)


@pytest.mark.parametrize(
    "target", re.findall(r"\]\((?!http)([^)#]+)", (EXAMPLES / "README.md").read_text())
)
def test_links_lead_somewhere(target: str) -> None:
    assert (EXAMPLES / target).exists()
