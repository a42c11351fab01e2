"""Training steps of a model of Qwen3's shape: trajectories unpacked, and packed as a tree.

    python -m bench.end_to_end --out build/end_to_end

Forward, backward and a fused AdamW step in bfloat16, blocks compiled, without and with activation
checkpointing (every block recomputed). Variants:

- unpacked: all trajectories one after another through varlen attention, in as few batches as
  memory allows, gradients added up;
- flex, flex_flash: the tree through flex_attention, with its two backends;
- pass: the same model, whose flex_attention calls this project's pass rewrites;
- op (not by default): the model calls this project's op itself.

First every variant's loss and gradients are set against those of the same step in float32. The
rounding error of the unpacked run says what is to be expected: a variant with more than twice as
much gets no time. Then the variants take turns, one step each a round. Figures are
trajectory tokens a second: those of the unpacked trajectories, whatever a variant computes, over
the step's time.

Without checkpointing a block keeps about 70 KiB a token at the default sizes (4 KiB for each of
its two residual inputs, 4 KiB for their norms, 14 KiB for queries and keys before and behind the
rotary embedding, 2 KiB values, 4 KiB attention, 36 KiB in the SwiGLU): 62 GiB for 32k tokens and
28 layers, beside 13 GiB of weights, gradients and AdamW's moments. So unpacked trajectories (90k
to 122k tokens here) go in batches of at most 44k tokens, 83 GiB. With checkpointing a token keeps
4 KiB a layer, and they go in one.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tree_attn_op import PrefixTree

from . import training
from .agreement import Agreement, Reference, verdict
from .model import Model, Shape, weighted_cross_entropy
from .report import environment
from .timing import Percentiles
from .training import TREE_VARIANTS, UNPACKED, VARIANTS, Variant
from .workloads import SMOKE, Workload, select


@dataclass
class Outcome:
    """A variant on one workload, with or without checkpointing.

    Attributes:
        status: "ok", or why it has no time.
        note: what it runs, where that depends on what is installed.
        batches: forwards and backwards a step.
        tokens: that a step computes.
        seconds: a step.
        tokens_per_second: trajectory tokens over the median step.
        speedup: the unpacked step's time over this one's, by rounds.
        peak_bytes: the most memory that a step had allocated, weights included.
    """

    name: str
    status: str = "ok"
    note: str = ""
    batches: int = 0
    tokens: int = 0
    agreement: Agreement | None = None
    seconds: Percentiles | None = None
    tokens_per_second: float | None = None
    speedup: Percentiles | None = None
    peak_bytes: int | None = None


@dataclass
class Case:
    """A workload, with or without checkpointing."""

    workload: str
    checkpointing: bool
    num_tokens: int
    num_trajectory_tokens: int
    outcomes: list[Outcome] = field(default_factory=list)


def random_tree(workload: Workload, vocabulary: int, device: str, seed: int = 0) -> PrefixTree:
    """A workload's tree with random token ids."""
    generator = torch.Generator().manual_seed(seed)
    nodes = [
        (parent, torch.randint(vocabulary, (count,), generator=generator))
        for parent, count in workload.nodes
    ]
    return PrefixTree.from_nodes(nodes, device=device)


def make_variant(name: str, tree: PrefixTree, model: Model, limit: int, compiled: bool) -> Variant:
    """One of VARIANTS for a model; `limit`: tokens of a batch of unpacked trajectories."""
    if name == UNPACKED:
        dtype = model.embedding.weight.dtype
        return training.unpacked_variant(tree, limit, dtype, compiled)
    return training.tree_variant(name, tree, model.shape.head_dim, compiled)


def run_case(
    workload: str,
    tree: PrefixTree,
    reference: Reference,
    model: Model,
    names: list[str],
    *,
    checkpointing: bool,
    limit: int,
    rounds: int,
    compiled: bool,
    chunk: int = 4096,
) -> Case:
    """Check and time the named variants on one workload.

    Args:
        workload: its name.
        tree: what is trained on.
        reference: of the model and the tree.
        model: left as it is.
        names: of VARIANTS.
        checkpointing: whether blocks are recomputed in the backward.
        limit: tokens of a batch of unpacked trajectories.
        rounds: timed steps of each variant.
        compiled: whether blocks and loss are compiled.
        chunk: loss terms whose logits exist at a time.
    """
    weight = model.embedding.weight
    device = weight.device.type
    case = Case(workload, checkpointing, tree.num_tokens, tree.num_trajectory_tokens)
    options: dict[str, Any] = {"checkpointing": checkpointing, "chunk": chunk}
    if compiled:
        options["chunk_loss"] = _compiled_loss()
    variants: dict[str, Variant] = {}
    for name in names:
        outcome = Outcome(name)
        case.outcomes.append(outcome)
        reason = training.unavailable(name, device, weight.dtype)
        if reason is not None:
            outcome.status = f"not run: {reason}"
            continue
        variant = make_variant(name, tree, model, limit, compiled)
        outcome.note, outcome.batches = variant.note, len(variant.batches)
        outcome.tokens = sum(batch.input_ids.numel() for batch in variant.batches)
        variants[name] = variant
    by_name = {outcome.name: outcome for outcome in case.outcomes}
    for name in list(variants):
        try:
            loss = float(training.backward(model, variants[name], **options))
            own = reference.agreement(loss, training.gradients(model))
            by_name[name].agreement = own
            training.check_rewritten(variants[name])
        except Exception as error:  # a variant that fails must not hide the others
            message = next(iter(str(error).strip().splitlines()), "no message")
            by_name[name].status = f"failed: {type(error).__name__}: {message}"
            del variants[name]
            model.zero_grad(set_to_none=True)
            gc.collect()
    unpacked = by_name[UNPACKED].agreement if UNPACKED in by_name else None
    for name in list(variants):
        first = by_name[name].agreement
        assert first is not None
        by_name[name].status = verdict(first, unpacked)
        if by_name[name].status != "ok":
            del variants[name]
    # Without a learning rate the work is the same, and all steps go on from the same weights.
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0, fused=True)
    steps = {
        name: (lambda v=variant: training.step(model, optimizer, v, **options))
        for name, variant in variants.items()
    }
    for name, one in steps.items():
        by_name[name].peak_bytes = _peak(one, device)
    times = interleaved(steps, rounds, device)
    for name, seconds in times.items():
        outcome = by_name[name]
        outcome.seconds = Percentiles.of(seconds)
        outcome.tokens_per_second = tree.num_trajectory_tokens / outcome.seconds.p50
        if UNPACKED in times:
            outcome.speedup = Percentiles.of(times[UNPACKED] / seconds)
    model.zero_grad(set_to_none=True)
    return case


def interleaved(
    steps: Mapping[str, Callable[[], object]], rounds: int, device: str
) -> dict[str, np.ndarray]:
    """Seconds of each step in each round, waited for."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, one in steps.items():
            _wait(device)
            start = time.perf_counter()
            one()
            _wait(device)
            times[name].append(time.perf_counter() - start)
    return {name: np.array(taken) for name, taken in times.items()}


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _peak(one: Callable[[], object], device: str) -> int | None:
    if device != "cuda":
        one()
        return None
    torch.cuda.reset_peak_memory_stats()
    one()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def _compiled_loss() -> Callable[..., Tensor]:
    return torch.compile(weighted_cross_entropy, dynamic=True)


def markdown(about: dict[str, str], cases: list[Case]) -> str:
    """The results as tables."""
    lines = ["# Training steps", "", *(f"- {name}: {value}" for name, value in about.items())]
    lines += [
        "",
        "Trajectory tokens a second are those of the unpacked trajectories over the median step. "
        "`x unpacked` is the unpacked step's time over the variant's, as the median (p20 to p80) "
        "of the rounds' ratios. The gradient error is the largest of all kinds of parameters, "
        "relative to the gradients of the same step in a wider dtype.",
    ]
    for case in cases:
        kind = "with" if case.checkpointing else "without"
        lines += [
            "",
            f"## {case.workload}, {kind} checkpointing",
            "",
            f"{case.num_tokens} tokens packed, {case.num_trajectory_tokens} unpacked.",
            "",
            "| variant | step s | trajectory tokens/s | x unpacked | peak GiB | batches | loss "
            "| loss error | gradient error |",
            "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
            *map(_row, case.outcomes),
        ]
    return "\n".join(lines) + "\n"


def _row(outcome: Outcome) -> str:
    name = f"{outcome.name} ({outcome.note})" if outcome.note else outcome.name
    cells = [outcome.status, "", "", ""]
    if outcome.seconds is not None:
        seconds, speedup, peak = outcome.seconds, outcome.speedup, outcome.peak_bytes
        cells = [
            f"{seconds.p50:.3f} ({seconds.p20:.3f} to {seconds.p80:.3f})",
            f"{outcome.tokens_per_second:.0f}",
            ""
            if speedup is None
            else f"{speedup.p50:.2f} ({speedup.p20:.2f} to {speedup.p80:.2f})",
            "" if peak is None else f"{peak / 2**30:.1f}",
        ]
    cells.append(str(outcome.batches))
    own = outcome.agreement
    if own is not None:
        worst = max(own.gradient_errors.values())
        cells += [f"{own.loss:.5f}", f"{own.loss_error:.1e}", f"{worst:.1e}"]
    return f"| {' | '.join([name, *cells])} |"


def parse_args(args: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.end_to_end", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, default=Path("build/end_to_end"))
    parser.add_argument(
        "--workloads", nargs="+", metavar="NAME", default=["grpo_8x8_32k", "agentic_32k"]
    )
    parser.add_argument("--smoke", action="store_true", help="one tiny workload instead")
    parser.add_argument(
        "--variants", nargs="+", choices=VARIANTS, default=[UNPACKED, *TREE_VARIANTS[:3]]
    )
    parser.add_argument("--checkpointing", choices=["off", "on", "both"], default="both")
    for name, value in asdict(Shape()).items():
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=type(value), default=value)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--batch-tokens",
        type=int,
        nargs=2,
        metavar=("OFF", "ON"),
        default=[45056, 131072],
        help="limit of a batch of unpacked trajectories without and with checkpointing",
    )
    parser.add_argument("--chunk", type=int, default=4096, help="loss terms with logits at a time")
    parser.add_argument("--no-compile", action="store_true", help="run everything as it is")
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu"
    )
    options = parser.parse_args(args)
    try:
        options.workloads = [SMOKE] if options.smoke else select(options.workloads)
    except ValueError as error:
        parser.error(str(error))
    return options


def main(args: list[str] | None = None) -> None:
    options = parse_args(args)
    shape = Shape(**{name: getattr(options, name) for name in asdict(Shape())})
    # Blocks of several variants share one code; each of them is compiled for its shapes.
    torch._dynamo.config.recompile_limit = 64
    dtype = getattr(torch, options.dtype)
    with torch.device(options.device):
        model = Model(shape).to(dtype).initialise(0)
    parameters = sum(p.numel() for p in model.parameters())
    about = environment(options.device)
    about |= {"dtype": options.dtype, "rounds": str(options.rounds)}
    about |= {"model": f"{parameters / 1e9:.3g}B parameters, {shape}"}
    cases: list[Case] = []
    modes = {"off": [False], "on": [True], "both": [False, True]}[options.checkpointing]
    for workload in options.workloads:
        tree = random_tree(workload, shape.vocabulary, options.device)
        reference = Reference.of(model, tree, options.chunk)
        for checkpointing in modes:
            start = time.perf_counter()
            case = run_case(
                workload.name,
                tree,
                reference,
                model,
                options.variants,
                checkpointing=checkpointing,
                limit=options.batch_tokens[checkpointing],
                rounds=options.rounds,
                compiled=not options.no_compile,
                chunk=options.chunk,
            )
            cases.append(case)
            options.out.mkdir(parents=True, exist_ok=True)
            results = {"environment": about, "cases": [asdict(case) for case in cases]}
            (options.out / "end_to_end.json").write_text(json.dumps(results, indent=1) + "\n")
            (options.out / "end_to_end.md").write_text(markdown(about, cases))
            shown = [
                f"{o.name} {o.tokens_per_second:.0f}/s"
                if o.tokens_per_second
                else f"{o.name} {o.status}"
                for o in case.outcomes
            ]
            seconds = time.perf_counter() - start
            kind = "with" if checkpointing else "without"
            print(f"{case.workload}, {kind} checkpointing: {'; '.join(shown)} [{seconds:.0f} s]")
    print(f"Written to {options.out / 'end_to_end.md'} and {options.out / 'end_to_end.json'}")


if __name__ == "__main__":
    main()
