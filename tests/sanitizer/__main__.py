"""Small calls of every kernel, well-formed and malformed, for NVIDIA's compute-sanitizer.

    compute-sanitizer --tool memcheck python -m tests.sanitizer
    compute-sanitizer --tool racecheck python -m tests.sanitizer
    compute-sanitizer --tool initcheck python -m tests.sanitizer

Compares each result with the float64 oracle, prints a line a case, and ends with 0 if all are
right; what the tool finds makes it end with an error of its own (``--error-exitcode 1``). Without
the tool it is a quick check of a GPU.
"""

from __future__ import annotations

import os
import sys
from unittest import mock

# Each tensor in an allocation of its own, or reads beyond one would hit its neighbour unseen.
os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"

import torch

from tests.attention_cases import operands
from tests.fuzz.bounds import check_results, run_op
from tests.fuzz.problems import Choices, draw
from tests.malformed_lists import LENGTHS, malformed, mask_of, meaning
from tree_attn_op import list_checks, ops, tree_attention
from tree_attn_op.kernels import configs
from tree_attn_op.reference import reference_attention

_SEEDS = range(4)


def _kernels() -> list[Choices]:
    """One choice for each set of kernels, with lengths that end within a block."""
    common = {"longest": 200, "device": "cuda", "values": (torch.int32,)}
    return [
        Choices(
            dtypes=(dtype,),
            dims=(dims,),
            heads=((4, 2),),
            blocks=(blocks,),
            predicates=(predicate,),
            layouts=("BSHD", "sliced"),
            full_lists=(True,),
            **common,
        )
        for dtype, dims, blocks, predicate in (
            (torch.bfloat16, (64, 64), (64, 64), "q >= k & q < k0"),
            (torch.bfloat16, (128, 128), (128, 128), "q >= k & (q0 == k0 | q1 == k0)"),
            (torch.float32, (40, 24), (16, 48), "q0 - k0 < 3 | k1 != 2"),
        )
    ]


def _malformed(name: str, named: str, made) -> None:
    inputs = operands(1, (2, 1), LENGTHS, dtype=torch.float32)
    on_gpu = [tensor.cuda().requires_grad_() for tensor in inputs]
    out = tree_attention(*on_gpu, mask_of(made).to("cuda"), enable_gqa=True)
    out.sum().backward()
    want, _ = reference_attention(*(tensor.double() for tensor in inputs), meaning(made))
    torch.testing.assert_close(out.detach().cpu().double(), want, rtol=1e-4, atol=1e-4)
    os.environ[list_checks.VARIABLE] = "1"
    arguments = [t.cuda() if isinstance(t, torch.Tensor) else t for t in made.mask_arguments]
    try:
        torch.ops.tree_attn_op.tree_attention(*on_gpu, *arguments, 0.3)
    except ValueError as error:
        if named not in str(error):
            raise AssertionError(f"{name}: the error does not name {named}") from error
    else:
        raise AssertionError(f"{name}: not found")
    finally:
        del os.environ[list_checks.VARIABLE]


def main() -> int:
    if not torch.cuda.is_available():
        print("needs a CUDA GPU", file=sys.stderr)
        return 2
    torch.set_float32_matmul_precision("highest")
    for choices in _kernels():
        for seed in _SEEDS:
            problem = draw(seed, choices)
            check_results(problem, run_op(problem))
            print(f"right: {problem.description}")
    if configs.device_of(torch.device("cuda")).family == "sm90":
        from tree_attn_op.kernels.hopper.form import LONG_ROWS

        backward = sys.modules["tree_attn_op.kernels.hopper.backward"]
        few = mock.patch.object(backward, "FEW_TILES", 0)
        with mock.patch.dict(LONG_ROWS, {1: 0}), few:
            ops.forget_plans()
            for seed in _SEEDS:
                problem = draw(seed, _kernels()[0])
                check_results(problem, run_op(problem))
                print(f"right in the fast form: {problem.description}")
    for name, named, made in malformed():
        _malformed(name, named, made)
        print(f"right: {name}")
    torch.cuda.synchronize()
    return 0


if __name__ == "__main__":
    sys.exit(main())
