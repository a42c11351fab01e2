"""Every Python snippet of README.md runs on a CPU and prints what the README says."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

import pytest
import torch

README = Path(__file__).parents[1] / "README.md"
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks() -> list[tuple[str, str, int]]:
    """(language, text, first line) of each fenced block."""
    text = README.read_text()
    return [
        (match[1], match[2], text.count("\n", 0, match.start(2)) + 1)
        for match in _BLOCK.finditer(text)
    ]


def test_the_snippets_run_and_print_what_the_readme_says(capsys, request, monkeypatch):
    request.addfinalizer(torch._dynamo.reset)
    torch._dynamo.reset()
    # One module, as the snippets are read from top to bottom; Dynamo looks up its globals by name.
    module = types.ModuleType("readme_snippets")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    printed: str | None = None
    ran = compared = 0
    for language, text, line in blocks():
        if language == "python":
            assert not printed, f"README.md shows no output for the snippet before line {line}"
            code = compile("\n" * (line - 1) + text, str(README), "exec")
            exec(code, module.__dict__)
            printed = capsys.readouterr().out.replace(f"{README.parent}/", "")
            ran += 1
        elif language == "text":
            assert printed == text, f"README.md, line {line}"
            printed = None
            compared += 1
    assert not printed
    assert (ran, compared) == (8, 2)


def test_make_targets_of_the_readme_exist():
    makefile = README.with_name("Makefile").read_text()
    shown = re.findall(r"^make (\w+)", README.read_text(), re.MULTILINE)
    assert {"demo", "test"} <= set(shown)
    for target in shown:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "DESIGN.md"])
def test_links_lead_somewhere(page):
    text = README.with_name(page).read_text()
    for target in re.findall(r"\]\((?!http)([^)#]+)", text):
        assert (README.parent / target).exists(), target
