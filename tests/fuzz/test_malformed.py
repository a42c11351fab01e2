"""Wrong arguments to every public function: an error that names the argument, and nothing else."""

from __future__ import annotations

import contextlib
import logging
import zlib
from collections.abc import Iterator

import pytest
import torch

import passes

from . import settings
from .malformed import Target, problem_of, wrong_values
from .targets import TARGETS


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """What a call that should have failed installs or logs does not reach the other tests."""
    logging.disable(logging.WARNING)
    before = torch._inductor.config.pre_grad_custom_pass
    yield
    with contextlib.suppress(RuntimeError):  # raised when nothing is installed
        while True:
            passes.uninstall()
    torch._inductor.config.pre_grad_custom_pass = before
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_wrong_arguments_are_refused_by_name(target: Target) -> None:
    problems = []
    for name, right in target.arguments.items():
        seed = settings.first_seed() + zlib.crc32(name.encode())
        for label, wrong in wrong_values(right, seed):
            problem = problem_of(target, name, label, wrong)
            if problem is not None:
                problems.append(problem)
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_right_arguments_are_taken(target: Target) -> None:
    """The refusals above are of the argument that is wrong, not of the others."""
    if target.name.startswith("tree.plot."):
        pytest.importorskip("matplotlib")
    if target.name == "integrations.transformers.register":
        pytest.importorskip("transformers")
    target.call(**target.arguments)
