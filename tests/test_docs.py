"""The documentation says what is true: its snippets run, its texts exist, its figures are read."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", ["index.md", "usage.md"])
def test_snippets_run_and_print_what_the_page_says(
    page: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()
    text = (DOCS / page).read_text()
    # One module, as a page is read from top to bottom; Dynamo looks up its globals by name.
    module = types.ModuleType(f"docs_{page.partition('.')[0]}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    printed, ran = "", 0
    for match in _BLOCK.finditer(text):
        language, block = match.groups()
        line = text.count("\n", 0, match.start(2))
        if language == "python":
            assert not printed, f"{page} shows no output for the snippet before line {line}"
            exec(compile("\n" * line + block, str(DOCS / page), "exec"), module.__dict__)
            printed = capsys.readouterr().out
            ran += 1
        elif language == "text":
            assert printed == block, f"{page}, line {line}"
            printed = ""
    assert not printed
    assert ran > 0
    torch._dynamo.reset()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_paths_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\((?!http)([^)#]+)", text):
        assert (DOCS / target).exists(), target
    for path in re.findall(r"`((?:tests|bench|tree_attn_op|passes|examples)/[\w/.]+)`", text):
        assert (ROOT / path).exists(), path


# Figures


@pytest.fixture(scope="module")
def tables() -> types.ModuleType:
    """docs/tables.py; the folder is no package, and another distribution might have one."""
    spec = importlib.util.spec_from_file_location("docs_tables", DOCS / "tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["numerics", "resources"])
def test_figures_are_those_that_were_recorded(name: str, tables: types.ModuleType) -> None:
    page, make = tables.TABLES[name]
    text = (DOCS / page).read_text()
    assert tables.filled(text, name, make()) == text, "make tables writes them"


def record(folder: Path, name: str, date: str, content: dict[str, object], dtype: str) -> None:
    environment = {"date": date, "GPU": "some GPU", "versions": "torch 9", "dtype": dtype}
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps({"environment": environment, **content}))


def rows_of(folder: Path, tables: types.ModuleType) -> list[str]:
    text = tables.numerics(folder)
    return [row for row in text.splitlines() if row.startswith(("### ", "| 64"))]


def benchmark(error: float) -> dict[str, object]:
    outcomes = [
        {"name": "ours", "errors": {"out": [error, 2 * error]}},
        {"name": "no result", "errors": {}},
    ]
    return {"cases": [{"workload": "chain", "heads": {"dim": 64}, "outcomes": outcomes}]}


def test_the_newest_run_of_each_gpu_and_dtype_is_shown(
    tmp_path: Path, tables: types.ModuleType
) -> None:
    record(tmp_path / "a", "results", "2026-01-02 10:00 UTC", benchmark(0.25), "bfloat16")
    record(tmp_path / "b", "results", "2026-01-01 10:00 UTC", benchmark(0.5), "bfloat16")
    record(tmp_path / "c", "results", "2026-01-01 11:00 UTC", benchmark(0.125), "float16")
    assert rows_of(tmp_path, tables) == [
        "### bfloat16, some GPU",
        "| 64 | chain | ours | 2.5e-01 (5.0e-01) |  |  |  |",
        "### float16, some GPU",
        "| 64 | chain | ours | 1.2e-01 (2.5e-01) |  |  |  |",
    ]


def test_a_run_of_the_numerics_goes_before_the_benchmark(
    tmp_path: Path, tables: types.ModuleType
) -> None:
    common = {"workload": "chain", "dtype": "bfloat16", "heads": {"dim": 64}}
    error = {"rms": 0.0625, "max": 0.5}
    run = {
        "rows": [
            {**common, "implementation": "ours", "status": "ok", "errors": {"dv": error}},
            {**common, "implementation": "other", "status": "not run: no", "errors": {}},
        ]
    }
    record(tmp_path / "a", "results", "2026-01-02 10:00 UTC", benchmark(0.25), "bfloat16")
    record(tmp_path / "a", "numerics", "2026-01-01 10:00 UTC", run, "")
    found = rows_of(tmp_path, tables)
    assert found[:3] == [
        "### bfloat16, some GPU",
        "| 64 | chain | ours |  |  |  | 6.2e-02 (5.0e-01) |",
        "| 64 | chain | other | not run: no |  |  |  |",
    ]
    assert found[3:] == [
        "### bfloat16, some GPU",
        "| 64 | chain | ours | 2.5e-01 (5.0e-01) |  |  |  |",
    ]


def test_a_page_without_a_place_for_the_table_is_an_error(tables: types.ModuleType) -> None:
    with pytest.raises(ValueError, match="0 places for numerics"):
        tables.filled("a page", "numerics", "a table")


# The texts of errors and reasons


def template(node: ast.expr) -> str | None:
    """The text that an expression gives, with … for each part that is not constant."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(
            str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values
        )
    return None


def sources() -> Iterator[tuple[Path, ast.Module]]:
    for package in ("tree_attn_op", "passes"):
        for path in sorted((ROOT / package).rglob("*.py")):
            yield path, ast.parse(path.read_text())


def texts_of_the_code() -> set[str]:
    """Every string of the code, ``%s`` of log messages as …."""
    texts = (template(node) for _, tree in sources() for node in ast.walk(tree) if _is_text(node))
    return {text.replace("%s", "…") for text in texts if text is not None}


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, (ast.Constant, ast.JoinedStr))


def reasons_of_the_code() -> dict[str, str]:
    """Each text with which a call is kept or a mask refused, and where."""
    reasons = {}
    for path, tree in sources():
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in ("KeepFlex", "UnsupportedMask")
                and node.args
                and (text := template(node.args[0])) is not None
            ):
                reasons[text] = f"{path.relative_to(ROOT)}:{node.lineno}"
    return reasons


QUOTE = re.compile(r"^- (`+)(.+)\1$", re.MULTILINE)
QUOTED = [match[2] for match in QUOTE.finditer((DOCS / "troubleshooting.md").read_text())]


def test_each_text_is_quoted_once() -> None:
    assert len(QUOTED) > 100
    assert len(set(QUOTED)) == len(QUOTED)


def test_each_quoted_text_is_one_of_the_code() -> None:
    texts = texts_of_the_code()
    assert [text for text in QUOTED if text not in texts] == []


def test_each_reason_is_quoted() -> None:
    missing = {text: at for text, at in reasons_of_the_code().items() if text not in QUOTED}
    assert not missing, "say in docs/troubleshooting.md what a user can do about these"


def test_each_public_module_is_in_the_reference() -> None:
    from tests.test_docstrings import MODULES

    text = (DOCS / "api.md").read_text()
    assert re.findall(r"automodule:: (\S+)", text) == list(MODULES)
