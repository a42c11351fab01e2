"""What is released and where it is checked: metadata, changelog, CI."""

from __future__ import annotations

import re
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WORKFLOW = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()


def project_version() -> str:
    match = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert match is not None
    return match[1]


def test_the_installed_version_is_that_of_the_project() -> None:
    assert version("tree-attn-op") == project_version()


def test_the_changelog_ends_in_releases_of_which_the_project_is_the_newest() -> None:
    headings = re.findall(r"^## \[(.+?)\](?: - (\d{4}-\d\d-\d\d))?$", CHANGELOG, re.MULTILINE)
    assert headings[0] == ("Unreleased", "")
    releases = headings[1:]
    assert releases[0][0] == project_version()
    assert all(date for _, date in releases)
    assert releases == sorted(releases, key=lambda release: release[1], reverse=True)


def test_kinds_of_changes_are_those_of_keep_a_changelog() -> None:
    kinds = set(re.findall(r"^### (.+)$", CHANGELOG, re.MULTILINE))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


@pytest.mark.parametrize("package", ["tree_attn_op", "passes"])
def test_each_folder_of_a_package_is_released(package: str) -> None:
    # setuptools finds packages by their __init__.py and leaves other folders out.
    for path in (ROOT / package).rglob("*.py"):
        assert (path.parent / "__init__.py").exists(), path
    assert (ROOT / package / "py.typed").exists()


def test_the_workflow_makes_all_that_ci_makes() -> None:
    local = re.findall(r"^make (\w+)", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert {"lint", "test", "docs", "wheel"} == set(local)
    hosted = set(re.findall(r"run: make (\w+)", WORKFLOW))
    assert set(local) <= hosted
    makefile = (ROOT / "Makefile").read_text()
    for target in hosted:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_actions_are_pinned_by_commit() -> None:
    used = re.findall(r"uses: (\S+)", WORKFLOW)
    assert used
    for action in used:
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action), action


def test_the_workflow_and_the_documentation_have_one_list_of_torch_versions() -> None:
    tested = re.findall(r'torch: "(\d+\.\d+)\.\d+"', WORKFLOW)
    assert tested == ["2.11", "2.12", "2.13", "2.14"]
    page = (ROOT / "docs" / "portability.md").read_text()
    assert re.findall(r"^\| (2\.\d+)\.\d+ \|", page, re.MULTILINE) == tested


@pytest.mark.parametrize(
    ("torch", "triton"), [("2.11", "3.6"), ("2.12", "3.7"), ("2.13", "3.7"), ("2.14", "3.8")]
)
def test_environments_get_the_triton_that_belongs_to_their_torch(torch: str, triton: str) -> None:
    script = (ROOT / "scripts" / "venv.sh").read_text()
    cases = re.findall(r"^  (.+)\) own_triton=(\S+)\.\* ;;$", script, re.MULTILINE)
    chosen = [
        own
        for patterns, own in cases
        if any(p.strip() in ("*", f"{torch}.*") for p in patterns.split("|"))
    ]
    assert chosen[0] == triton
