"""What plans are remembered by, and that a repeated launch is what Triton would launch."""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tree_attn_op import ops
from tree_attn_op.kernels import choice
from tree_attn_op.kernels.plans import Plans, call_key, copies, with_copies
from tree_attn_op.layout import sequence_major


class _Plan:
    """A plan that returns which decision it came of."""

    substitute = None

    def __init__(self, number: int):
        self.number = number

    def __call__(self, *arguments: Any) -> int:
        return self.number


class _Decisions:
    def __init__(self) -> None:
        self.count = 0

    def __call__(self, arguments: tuple[Any, ...]) -> _Plan:
        self.count += 1
        return _Plan(self.count)


def _arguments(**changes: Any) -> tuple[Any, ...]:
    given = {
        "query": torch.zeros(1, 4, 32, 16),
        "lists": torch.zeros(1, 1, 2, dtype=torch.int32),
        "optional": None,
        "predicate": "q >= k",
        "block": 64,
        "scale": 0.5,
    }
    return tuple((given | changes).values())


CHANGES: dict[str, Callable[[], dict[str, Any]]] = {
    "length": lambda: {"query": torch.zeros(1, 4, 33, 16)},
    "strides": lambda: {"query": torch.zeros(1, 32, 4, 16).transpose(1, 2)},
    "dtype": lambda: {"query": torch.zeros(1, 4, 32, 16, dtype=torch.bfloat16)},
    "alignment": lambda: {"query": torch.zeros(2049)[1:].view(1, 4, 32, 16)},
    "alignment of a list": lambda: {"lists": torch.zeros(3, dtype=torch.int32)[1:].view(1, 1, 2)},
    "device": lambda: {"lists": torch.zeros(1, 1, 2, dtype=torch.int32, device="meta")},
    "a list that was missing": lambda: {"optional": torch.zeros(1, 1, 2, dtype=torch.int32)},
    "predicate": lambda: {"predicate": "q <= k"},
    "block size": lambda: {"block": 128},
    "scale": lambda: {"scale": 0.25},
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_differs_gets_a_plan_of_its_own(name: str) -> None:
    plans, decide = Plans(), _Decisions()
    assert plans.run(decide, _arguments()) == 1
    assert plans.run(decide, _arguments()) == 1
    assert plans.run(decide, _arguments(**CHANGES[name]())) == 2
    assert plans.run(decide, _arguments()) == 1


def test_settings_are_part_of_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    plans, decide = Plans(), _Decisions()
    monkeypatch.delenv(choice.ENVIRONMENT, raising=False)
    dtype = torch.float32
    assert plans.run(decide, _arguments(), dtype) == 1
    monkeypatch.setenv(choice.ENVIRONMENT, "portable")
    assert plans.run(decide, _arguments(), dtype) == 2
    monkeypatch.delenv(choice.ENVIRONMENT)
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        torch.backends.cuda.matmul.fp32_precision = "tf32" if before != "tf32" else "ieee"
        assert plans.run(decide, _arguments(), dtype) == 3
        assert plans.run(decide, _arguments()) == 4
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert plans.run(decide, _arguments()) == 4
    assert plans.run(decide, _arguments(), dtype) == 1
    try:
        torch.use_deterministic_algorithms(True)
        assert plans.run(decide, _arguments()) == 5
    finally:
        torch.use_deterministic_algorithms(False)
    assert plans.run(decide, _arguments()) == 4


def test_other_tensors_alike_are_not_decided_again() -> None:
    assert call_key(_arguments()) == call_key(_arguments())
    assert hash(call_key(_arguments())) == hash(call_key(_arguments()))


def test_known_calls_are_looked_at() -> None:
    """What no key holds, the numbers in lists, is checked with every call, by one or the other."""
    plans, decide, seen = Plans(), _Decisions(), []
    for _ in range(3):
        plans.run(decide, _arguments(), look=seen.append)
    assert decide.count == 1
    assert len(seen) == 2


def test_errors_are_not_remembered() -> None:
    plans = Plans()

    def refuse(arguments: tuple[Any, ...]) -> Any:
        raise ValueError("no")

    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            plans.run(refuse, _arguments())
    assert len(plans) == 0


def test_the_oldest_are_forgotten() -> None:
    plans, decide = Plans(limit=3), _Decisions()
    for block in (16, 32, 48, 64):
        plans.run(decide, _arguments(block=block))
    assert len(plans) == 3
    assert plans.run(decide, _arguments(block=64)) == 4
    assert plans.run(decide, _arguments(block=16)) == 5
    plans.clear()
    assert len(plans) == 0


def test_threads() -> None:
    plans, wrong = Plans(limit=8), []

    def decide(arguments: tuple[Any, ...]) -> _Plan:
        return _Plan(arguments[4])

    def call() -> None:
        for turn in range(300):
            block = 16 * (1 + turn % 13)
            if plans.run(decide, _arguments(block=block)) != block:
                wrong.append(block)

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(plans) <= 8


def test_copies_come_first() -> None:
    """The plan of a call on tensors that cannot be read is that of the call on their copies."""
    strided = torch.arange(1024.0).view(1, 4, 8, 32)[..., ::2]

    def decide(arguments: tuple[Any, ...]) -> Any:
        return _Plan(7) if arguments[0].stride(-1) == 1 else copies((0,))

    plans = Plans()
    for _ in range(2):
        assert plans.run(decide, _arguments(query=strided)) == 7
    assert len(plans) == 2


@pytest.mark.parametrize("by_sequence", [False, True])
def test_copies_lie_as_outputs_do(by_sequence: bool) -> None:
    tensor = torch.randn(2, 8, 4, 32)[..., ::2]
    tensor = tensor.transpose(1, 2) if by_sequence else tensor
    lists = torch.arange(48).view(2, 1, 4, 6)[..., ::2]
    copy, other, dense = with_copies((tensor, 3, lists), (0, 2))
    assert torch.equal(copy, tensor)
    assert other == 3
    assert torch.equal(dense, lists)
    assert copy.stride(-1) == 1
    assert dense.is_contiguous()
    assert sequence_major(copy) == sequence_major(tensor) == by_sequence


# -------------------------------------------------------------------------------------------------
# Launches

triton = pytest.importorskip("triton")

from tests.kernels.cases import Case, make_inputs  # noqa: E402
from tests.kernels.repeated import check_repeated, recorded  # noqa: E402
from tree_attn_op.kernels import configs, portable  # noqa: E402
from tree_attn_op.kernels.launching import Output  # noqa: E402
from tree_attn_op.kernels.portable import block_lists, launch  # noqa: E402
from tree_attn_op.predicate import Predicate  # noqa: E402

compiled = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter does not compile"
)


CASES = {
    "plain": Case(q_len=128, kv_len=128, dtype=torch.bfloat16, blocks=(64, 64), dim=64),
    "tails": Case(
        batch=2, heads=4, kv_heads=2, q_len=100, kv_len=77, predicate="q0 >= k0", full_lists=False,
        grad_lse=True,
    ),
    "copy_engine": Case(
        q_len=128, kv_len=128, dtype=torch.float16, dim=128, heads=4, blocks=(64, 128),
        sequence_major=False,
    ),
}  # fmt: skip


def test_unaligned_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches are repeated on fresh memory that no key describes."""
    output = Output.dense((4, 4), torch.float32, torch.device("cpu"))
    assert output().shape == (4, 4)
    monkeypatch.setattr(torch, "empty_strided", lambda *_, **__: torch.zeros(17)[1:].view(4, 4))
    with pytest.raises(RuntimeError, match="multiples of 16 bytes"):
        output()


@compiled
@pytest.mark.parametrize("name", CASES)
def test_portable_launches(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "device_of", lambda device: configs.CUDA_DEVICES[90])
    case = CASES[name]
    forward, backward = [], []
    for seed in (0, 1):
        inputs = make_inputs(Case(**{**vars(case), "seed": seed}))
        tensors = [inputs.query, inputs.key, inputs.value]
        mask = [inputs.q_vals, inputs.k_vals, case.predicate, *inputs.key_lists]
        mask += inputs.query_lists
        sizes = [*case.blocks, case.softmax_scale]
        shape = (case.batch, case.heads, case.q_len)
        out, lse = torch.empty_like(inputs.grad_out), torch.empty(shape)
        forward.append([*tensors, *mask, *sizes])
        grads = [inputs.grad_out, inputs.grad_lse]
        backward.append([*grads, *tensors, out, lse, *mask, *sizes])
    with recorded() as launches:
        check_repeated(portable.plan_forward, forward, launches)
        check_repeated(portable.plan_backward, backward, launches)


@compiled
@pytest.mark.parametrize("refine", [False, True])
def test_block_list_launches(refine: bool) -> None:
    predicate = Predicate.parse("q >= k & q0 == k0")
    calls = []
    for seed in (0, 1):
        generator = torch.Generator().manual_seed(seed)
        q_vals, k_vals = torch.randint(0, 9, (2, 2, 1, 300), generator=generator).int()
        given = [None] * 4
        if refine:
            given = [torch.zeros(2, 1, 3).int(), torch.zeros(2, 1, 3, 3).int()] * 2
        calls.append([q_vals, k_vals, predicate, 300, 300, *given, 128, 128, 64, 64, True])
    with recorded() as launches:
        check_repeated(block_lists.plan_block_lists, calls, launches)


def test_three_substitutes_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists are made, a query copied for the portable kernels, a gradient for the Hopper ones."""
    case = Case(
        heads=8, kv_heads=2, q_len=256, kv_len=256, dim=128, blocks=(64, 64), last_stride=2,
        dtype=torch.bfloat16, value_range=(0, 256),
    )  # fmt: skip
    inputs = make_inputs(case, "cpu")
    made: list[str] = []

    class Done:
        substitute = None

        def __init__(self, *arguments: Any):
            made.append("hopper")

        def __call__(self, *arguments: Any) -> tuple[torch.Tensor, ...]:
            return arguments[2:5]

    monkeypatch.setattr(ops, "on_gpu", lambda tensor: True)
    monkeypatch.setattr(configs, "device_of", lambda device: configs.CUDA_DEVICES[90])
    backward = importlib.import_module("tree_attn_op.kernels.hopper.backward")
    monkeypatch.setattr(backward, "BackwardPlan", Done)
    grad_out = torch.randn(128, dtype=torch.bfloat16).expand(1, 8, 256, 128)
    out, lse = torch.randn(1, 8, 256, 128, dtype=torch.bfloat16), torch.randn(1, 8, 256)
    mask = (inputs.q_vals, inputs.k_vals, case.predicate, *inputs.key_lists, *(None,) * 4)
    ops.forget_plans()
    ops._backward(
        *(grad_out, None, inputs.query, inputs.key, inputs.value, out, lse, *mask),
        *(64, 64, case.softmax_scale),
    )
    ops.forget_plans()
    assert made == ["hopper"]
