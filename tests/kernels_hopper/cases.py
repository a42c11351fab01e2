"""Random attention problems for the Hopper kernels, and what they should return in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tree_attn_op.blocks import BlockLists, build, cdiv, dense_meaning, lists_of
from tree_attn_op.kernels.choice import hopper_list_blocks
from tree_attn_op.kernels.hopper import backward, forward
from tree_attn_op.kernels.hopper.backward import Form
from tree_attn_op.kernels.hopper.configs import Config
from tree_attn_op.predicate import Predicate


@dataclass(frozen=True)
class Case:
    """Shapes and a mask.

    Attributes:
        lists: "built" from the predicate, or "random": every tile empty, partial or full at
            random, whatever the predicate says of it.
        sequence_major: memory order ``[B, S, H, D]`` instead of ``[B, H, S, D]``.
        hidden_rows: every fifth query has a value in row 0 that no key has.
    """

    name: str
    predicate: str = "q >= k & q < k0"
    q_len: int = 512
    kv_len: int = 512
    batch: int = 1
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 128
    v_head_dim: int = 0
    dtype: torch.dtype = torch.bfloat16
    index_dtype: torch.dtype = torch.int32
    lists: str = "built"
    sequence_major: bool = True
    hidden_rows: bool = False
    grad_lse: bool = True


CASES = [
    Case("tree"),
    Case("tree_long", q_len=2048, kv_len=2048),
    Case("tree_tail", q_len=1000, kv_len=1000, sequence_major=False),
    Case("parents", "q >= k & (q0 == k0 | q1 == k0)", 640, 640, hidden_rows=True),
    Case("batch_group_1", "q >= k & q0 == k0", 300, 300, batch=2, heads=3, kv_heads=3),
    Case("group_3_fp16", q_len=777, kv_len=777, heads=6, dtype=torch.float16),
    Case("window_int64", "q >= k & q0 - k1 < 40", 512, 512, index_dtype=torch.int64),
    Case("cross", "q0 >= k0 & q1 != k1", 200, 1500, heads=4, kv_heads=1),
    Case("cross_short_keys", "q0 >= k0", 900, 70, heads=2, kv_heads=1, grad_lse=False),
    Case("one_token", q_len=1, kv_len=1),
    Case("everything", "True", 450, 450, batch=2),
    Case("nothing", "False", 130, 130),
    Case("random_lists", "q >= k & q0 == k0", 1024, 1024, lists="random", batch=2),
    Case("random_lists_tail", "q0 <= k0", 1010, 990, lists="random", heads=4),
    Case("random_lists_group_1", "q0 <= k0", 900, 1100, lists="random", heads=2),
    Case("causal", "q >= k", 1000, 1000),
    Case("many_rows", "q >= k", 2048, 2048, heads=32, kv_heads=8),
    Case("everything_group_1", "True", 450, 330, heads=2, batch=2),
    Case("dim_64_causal", "q >= k", 1000, 1000, head_dim=64),
    Case("dim_64", q_len=800, kv_len=800, head_dim=64),
    Case("dim_64_random", "q0 <= k0", 1024, 700, lists="random", head_dim=64, batch=2),
    Case("dim_64_group_1", q_len=500, kv_len=500, heads=2, head_dim=64),
    Case("dim_80", q_len=320, kv_len=320, head_dim=80),
    Case("dim_128_64", q_len=320, kv_len=320, v_head_dim=64),
]


class Problem:
    """A case's tensors on the GPU, fresh random ones for each seed."""

    def __init__(self, case: Case, seed: int, device: str = "cuda"):
        self.case = case
        self.predicate = Predicate.parse(case.predicate)
        generator = torch.Generator(device).manual_seed(seed)

        def tensor(heads: int, length: int, width: int) -> Tensor:
            shape = (case.batch, heads, length, width)
            if case.sequence_major:
                shape = (case.batch, length, heads, width)
            x = torch.randn(shape, generator=generator, device=device).to(case.dtype)
            return x.transpose(1, 2) if case.sequence_major else x

        def integers(rows: int, length: int, low: int, high: int) -> Tensor:
            shape = (case.batch, rows, length)
            x = torch.randint(low, high, shape, generator=generator, device=device)
            return x.to(case.index_dtype)

        v_dim = case.v_head_dim or case.head_dim
        self.scale = case.head_dim**-0.5
        self.query = tensor(case.heads, case.q_len, case.head_dim)
        self.key = tensor(case.kv_heads, case.kv_len, case.head_dim)
        self.value = tensor(case.kv_heads, case.kv_len, v_dim)
        self.grad_out = tensor(case.heads, case.q_len, v_dim)
        shape = (case.batch, case.heads, case.q_len)
        self.grad_lse = (
            torch.randn(shape, generator=generator, device=device) if case.grad_lse else None
        )
        self.q_vals = integers(2, case.q_len, 0, 4)
        self.k_vals = integers(2, case.kv_len, 0, 4)
        if "< k0" in case.predicate:
            position = torch.arange(case.kv_len, device=device)
            self.k_vals[:, 0] = position + integers(1, case.kv_len, 0, 400)[:, 0]
        if " - k1" in case.predicate:
            self.q_vals[:, 0] = torch.arange(case.q_len, device=device)
            self.k_vals[:, 1] = torch.arange(case.kv_len, device=device)
        if case.hidden_rows:
            self.q_vals[:, :, ::5] = -7
        q_block, kv_block = hopper_list_blocks(case.heads // case.kv_heads)
        if case.lists == "built":
            self.lists = build(
                self.predicate, self.q_vals, self.k_vals, case.q_len, case.kv_len,
                q_block, kv_block,
            )  # fmt: skip
        else:
            shape = (case.batch, 1, cdiv(case.q_len, q_block), cdiv(case.kv_len, kv_block))
            state = torch.randint(0, 3, shape, generator=generator, device=device)
            self.lists = BlockLists(
                *lists_of(state.to(torch.int8)), q_block, kv_block, case.q_len, case.kv_len
            )

    def forward(self, config: Config | None = None) -> tuple[Tensor, Tensor]:
        lists = self.lists
        return forward(
            self.query, self.key, self.value, self.q_vals, self.k_vals, self.case.predicate,
            *lists.tensors[:4], lists.q_block_size, lists.kv_block_size, self.scale, config,
        )  # fmt: skip

    def backward(
        self, out: Tensor, lse: Tensor, form: Form = "deterministic", **configs: Config
    ) -> tuple[Tensor, Tensor, Tensor]:
        lists = self.lists
        return backward(
            self.grad_out, self.grad_lse, self.query, self.key, self.value, out, lse,
            self.q_vals, self.k_vals, self.case.predicate, *lists.tensors,
            lists.q_block_size, lists.kv_block_size, self.scale, form, **configs,
        )  # fmt: skip

    def expected(self) -> dict[str, Tensor]:
        """out, lse, dq, dk and dv from the definition in float64, one query head at a time."""
        case = self.case
        visible = dense_meaning(self.predicate, self.q_vals, self.k_vals, self.lists)
        visible = visible.expand(case.batch, 1, -1, -1)[:, 0]
        group = case.heads // case.kv_heads
        query, key, value, grad_out = (
            x.double() for x in (self.query, self.key, self.value, self.grad_out)
        )
        out, dq = torch.zeros_like(grad_out), torch.zeros_like(query)
        dk, dv = torch.zeros_like(key), torch.zeros_like(value)
        lse = query.new_zeros(query.shape[:3])
        for head in range(case.heads):
            k, v = key[:, head // group], value[:, head // group]
            q, g = query[:, head], grad_out[:, head]
            scores = (q @ k.mT * self.scale).masked_fill(~visible, -torch.inf)
            lse[:, head] = scores.logsumexp(-1)
            p = torch.where(visible, (scores - lse[:, head].unsqueeze(-1)).exp(), 0.0)
            out[:, head] = p @ v
            delta = (out[:, head] * g).sum(-1, keepdim=True)
            if self.grad_lse is not None:
                delta -= self.grad_lse[:, head].double().unsqueeze(-1)
            ds = p * (g @ v.mT - delta) * self.scale
            dq[:, head] = ds @ k
            dk[:, head // group] += ds.mT @ q
            dv[:, head // group] += p.mT @ g
        return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Norm of the difference over that of the expected; inf for NaN or a misplaced infinity."""
    if not torch.equal(torch.isinf(actual), torch.isinf(expected)):
        return float("inf")
    finite = torch.isfinite(expected)
    difference = (actual.double() - expected)[finite].norm()
    error = float(difference / expected[finite].norm().clamp_min(1e-6))
    return float("inf") if error != error else error


class poisoned_memory:
    """Within it ``torch.empty`` and its kin are filled with NaN, or the largest integer."""

    def __enter__(self) -> None:
        self.before = (
            torch.are_deterministic_algorithms_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,
        )
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = True

    def __exit__(self, *error: object) -> None:
        torch.use_deterministic_algorithms(self.before[0])
        torch.utils.deterministic.fill_uninitialized_memory = self.before[1]


def errors(case: Case, seed: int, parts: Literal["forward"] | Form) -> dict[str, float]:
    """Relative errors of a case's results; ``parts`` is "forward" or a form of the backward.

    A backward starts from the definition's out and lse, so that it is judged by itself.
    """
    problem = Problem(case, seed)
    expected = problem.expected()
    with poisoned_memory():
        if parts == "forward":
            actual = dict(zip(("out", "lse"), problem.forward(), strict=True))
        else:
            out, lse = expected["out"].to(case.dtype), expected["lse"].float()
            grads = problem.backward(out, lse, parts)
            actual = dict(zip(("dq", "dk", "dv"), grads, strict=True))
    return {name: relative_error(tensor, expected[name]) for name, tensor in actual.items()}


LIMITS = {torch.bfloat16: 8e-3, torch.float16: 2e-3}
"""Greatest relative error: rounding of inputs, probabilities and results to the dtype."""
