"""Options, skips and determinism shared by all tests."""

from __future__ import annotations

import os

import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--nightly", action="store_true", help="also run the tests marked nightly (minutes each)"
    )


def pytest_configure(config: pytest.Config) -> None:
    if os.environ.get("PYTEST_XDIST_WORKER"):
        # The workers share the cores: threads of each would only wait for those of the others.
        torch.set_num_threads(1)
    # Tests are small: on a GPU the pass would keep most of their calls flex.
    os.environ.setdefault("TREE_ATTN_REWRITE_SMALL", "1")
    # A failing example must fail again on the next machine, and a slow one is no failure.
    from hypothesis import HealthCheck, settings

    settings.register_profile(
        "default",
        deadline=None,
        derandomize=True,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.register_profile(
        "nightly", settings.get_profile("default"), derandomize=False, max_examples=1000
    )
    settings.load_profile("nightly" if config.getoption("--nightly") else "default")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    no_gpu = pytest.mark.skip(reason="needs a CUDA GPU")
    no_nightly = pytest.mark.skip(reason="takes minutes: run with --nightly")
    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(no_gpu)
        if "nightly" in item.keywords and not config.getoption("--nightly"):
            item.add_marker(no_nightly)


@pytest.fixture(autouse=True)
def seed() -> int:
    """The seed of torch's generators, set anew for each test so that its order does not matter."""
    value = 20261130
    torch.manual_seed(value)
    return value
