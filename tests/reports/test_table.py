"""The table of reports names tests that exist, and all tests made for it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "docs" / "reports.md"
ROWS = 37
"""Reports that are answered."""


def rows() -> list[list[str]]:
    """The cells of each row of the tables."""
    lines = [line for line in TABLE.read_text().splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return [row for row in cells if row[0] not in ("report", "---")]


def names(row: list[str]) -> list[str]:
    return re.findall(r"`([^`]+)`", row[3])


def defined_in(path: Path) -> set[str]:
    """The tests that a file defines: functions, classes, and ``Class::method``."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        inner = node.body if isinstance(node, ast.ClassDef) else []
        methods = [one.name for one in inner if isinstance(one, ast.FunctionDef)]
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found |= {node.name, *(f"{node.name}::{method}" for method in methods)}
    return {name for name in found if name.split("::")[-1].lower().startswith("test")}


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0])
def test_the_tests_of_a_report_exist(row: list[str]) -> None:
    assert len(row) == 4
    assert names(row), "a report without a test"
    for name in names(row):
        path, _, test = name.partition("::")
        assert test in defined_in(ROOT / path), name


def test_no_report_and_no_test_is_left_out() -> None:
    assert len(rows()) == ROWS
    listed = {name for row in rows() for name in names(row)}
    here = Path(__file__).parent
    made = {
        f"{path.relative_to(ROOT).as_posix()}::{test}"
        for path in here.glob("test_*.py")
        if path.name != Path(__file__).name
        for test in defined_in(path)
    }
    assert made <= listed, made - listed
