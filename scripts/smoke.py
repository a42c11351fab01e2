"""What must work after ``pip install`` of the wheel alone: import, the op, gradients, the pass.

Run with ``python -I`` outside the checkout, so that only what is installed can be imported.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from importlib.metadata import distribution
from pathlib import Path

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import passes
import tree_attn_op

# What some modules need and the wheel does not depend on.
OPTIONAL = ("megatron", "transformers", "triton")


def check_modules() -> int:
    """Import each module that was installed, where what it needs is; returns their number."""
    imported = 0

    def failed(name: str) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, ModuleNotFoundError):
            raise SystemExit(f"{name}: {error!r}")
        if (error.name or "").partition(".")[0] not in OPTIONAL:
            raise SystemExit(f"{name} needs {error.name}, which the wheel does not depend on")

    for package in (tree_attn_op, passes):
        folder = Path(package.__file__).parent
        if "site-packages" not in folder.parts:
            raise SystemExit(f"{package.__name__} comes from {folder}, not from the wheel")
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.", failed):
            try:
                importlib.import_module(module.name)
            except ImportError:
                failed(module.name)
            else:
                imported += 1
    return imported


def check_metadata() -> None:
    installed = distribution("tree-attn-op")
    names = [point.name for point in installed.entry_points]
    if names != ["tree_attn"]:
        raise SystemExit(f"entry points: {names}")
    for wanted in ("tree_attn_op/py.typed", "passes/py.typed", "licenses/LICENSE"):
        if not any(str(file).endswith(wanted) for file in installed.files or ()):
            raise SystemExit(f"the wheel has no {wanted}")
    for unwanted in ("tests", "bench", "demo", "docs"):
        if any(file.parts[0] == unwanted for file in installed.files or ()):
            raise SystemExit(f"the wheel installs a top-level package {unwanted!r}")


def check_op() -> None:
    tree = tree_attn_op.PrefixTree.from_sequences([[1, 2, 3, 4], [1, 2, 5]])
    query = torch.randn(1, 2, tree.num_tokens, 16, dtype=torch.float64, requires_grad=True)
    out = tree_attn_op.tree_attention(query, query, query, tree.mask)
    out.sum().backward()
    assert query.grad is not None
    visible = tree.mask.predicate.dense(
        tree.mask.q_vals, tree.mask.k_vals, tree.num_tokens, tree.num_tokens
    )
    data = query.detach().clone().requires_grad_()
    expected = torch.nn.functional.scaled_dot_product_attention(
        data, data, data, attn_mask=visible.unsqueeze(1)
    )
    expected.sum().backward()
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(query.grad, data.grad)


def check_pass() -> None:
    end = torch.full((256,), 256)
    end[128:192] = 192
    block_mask = create_block_mask(
        lambda b, h, q, k: (q >= k) & (q < end[k]), None, None, 256, 256, device="cpu"
    )

    def model(query: torch.Tensor) -> torch.Tensor:
        return flex_attention(query, query, query, block_mask=block_mask)

    query = torch.randn(1, 2, 256, 32)
    (call,) = passes.explain(model, query)
    if not call.rewritten:
        raise SystemExit(f"kept flex: {call.reason}")
    compiled = torch.compile(model, backend="tree_attn")
    torch.testing.assert_close(compiled(query), model(query), atol=1e-4, rtol=1e-4)


def main() -> None:
    imported = check_modules()
    check_metadata()
    check_op()
    check_pass()
    versions = f"Python {sys.version.split()[0]}, torch {torch.__version__}"
    print(f"wheel: {imported} modules imported, op and pass work ({versions})")


if __name__ == "__main__":
    main()
