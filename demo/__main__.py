"""Pack a GRPO batch as a tree, compile a model for it, and show that the results are the same."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

import passes
from tree_attn_op import PrefixTree

from . import batch as batches
from . import model as models
from .picture import draw
from .step_time import compare_steps

# Of float32 runs that add the same numbers in another order, relative to a tensor's largest value.
TOLERANCE = 1e-4


@dataclass
class Checks:
    """Comparisons made so far; each is printed as it is made."""

    failed: list[str] = field(default_factory=list)

    def close(self, what: str, actual: list[Tensor], expected: list[Tensor]) -> None:
        """Compare tensors: the largest difference of each over its largest value."""
        worst = torch.stack(
            [
                (a.detach() - e.detach()).abs().max() / e.detach().abs().max()
                for a, e in zip(actual, expected, strict=True)
            ]
        ).max()
        # A NaN compares false, so that it does not pass.
        self.true(f"{what}: at most {float(worst):.1e} apart", bool(worst <= TOLERANCE))

    def true(self, what: str, holds: bool) -> None:
        print(f"  {'ok    ' if holds else 'FAILED'} {what}")
        if not holds:
            self.failed.append(what)


def gradients(model: torch.nn.Module, logits: list[Tensor], batch: batches.Batch) -> list[Tensor]:
    """The gradient of the policy loss by each parameter."""
    return list(torch.autograd.grad(batches.policy_loss(logits, batch), list(model.parameters())))


def main(args: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m demo", description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=Path("build/demo"), help="folder of the picture"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden-size", type=int, default=128)
    options = parser.parse_args(args)
    device = options.device
    checks = Checks()

    batch = batches.load()
    tree = PrefixTree.from_sequences(batch.sequences, device=device)
    print(
        f"A batch of {batch.groups} problems with {len(tree) // batch.groups} completions each, "
        f"on {device}, torch {torch.__version__}"
    )
    print(
        f"  {tree.num_trajectory_tokens} tokens in {len(tree)} trajectories, {tree.num_tokens} "
        f"packed as a tree ({tree.tree_token_ratio:.0%})"
    )

    if importlib.util.find_spec("matplotlib"):
        tiles = draw(tree, options.out / "mask.png")
        print(f"  mask and tiles drawn in {options.out / 'mask.png'}: {tiles}")
    else:
        print("  no picture of the mask: matplotlib is not installed")

    model = models.build(device, layers=options.layers, hidden_size=options.hidden_size)
    print("\nWhat the pass does with the model's flex_attention calls (passes.explain):")
    with torch.no_grad():
        report = passes.explain(model, rewrite_small=True, **models.packed_inputs(tree))
    print(report)
    checks.true("every call is rewritten", len(report) > 0 and all(c.rewritten for c in report))

    print("\nThe tree against the separate trajectories, float32:")
    # On a GPU the pass leaves calls as small as these to flex, unless told otherwise.
    options = {"tree_attn.rewrite_small": True}
    compiled = torch.compile(model, backend="tree_attn", options=options)
    # flex_attention on CPU has no backward, so that torch refuses it before any pass sees it.
    trains_compiled = device != "cpu"
    with torch.set_grad_enabled(trains_compiled):
        packed = models.packed_logits(compiled, tree)
        packed_gradients = gradients(model, packed, batch) if trains_compiled else []
    models.use_explicit_op(model, tree.mask)
    explicit = models.packed_logits(model, tree)
    explicit_gradients = gradients(model, explicit, batch)
    model.set_attn_implementation("sdpa")
    expected = models.unpacked_logits(model, batch.sequences, device)
    expected_gradients = gradients(model, expected, batch)

    checks.close("logits, torch.compile with the pass", packed, expected)
    checks.close("logits, explicit op", explicit, expected)
    if trains_compiled:
        checks.close(
            "gradients, torch.compile with the pass", packed_gradients, expected_gradients
        )
    checks.close("gradients, explicit op", explicit_gradients, expected_gradients)

    if device == "cuda":
        print("\nOne training step, bfloat16:")
        for line in compare_steps(batch, tree):
            print(f"  {line}")

    for what in checks.failed:
        print(f"FAILED: {what}", file=sys.stderr)
    return 1 if checks.failed else 0


if __name__ == "__main__":
    sys.exit(main())
