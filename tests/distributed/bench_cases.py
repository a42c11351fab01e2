"""The context-parallel benchmark on processes of a CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch.distributed as dist

from bench import context_parallel as bench
from bench.workloads import SMOKE
from tests.distributed.attention_checks import cp_mesh


def smoke() -> None:
    arguments = "--workloads smoke --heads 4 --kv-heads 2 --head-dim 16 --rounds 2 --chunks 2"
    options = bench.parse_args(f"{arguments} --device cpu".split())
    case = bench.run_case(SMOKE, options, cp_mesh())
    assert [outcome.status for outcome in case.outcomes] == ["ok"] * 7
    for outcome in case.outcomes[1:]:
        assert outcome.step.p50 > 0
        assert sum(outcome.lengths) == SMOKE.tree("cpu").num_tokens
        assert outcome.speedup == pytest.approx(case.outcomes[0].step.p50 / outcome.step.p50)
    page = bench.markdown({"GPUs": "2"}, [case])
    assert all(f"| {outcome.name} |" in page for outcome in case.outcomes)


def what_is_wrong_gets_no_time() -> None:
    # Rank 0 alone knows the errors.
    errors = {"out": 1e-3, "dq": 1e-3} if dist.get_rank() == 0 else {}
    right = bench.Outcome(bench.ONE_GPU, [8], 1.0, errors)
    wrong = replace(right, name="another", errors={**errors, "dq": 2.1e-3} if errors else {})
    lost = replace(right, name="a third", errors={**errors, "out": float("nan")} if errors else {})
    bench._judge([right, wrong, lost])
    assert right.status == "ok"
    assert wrong.status == "wrong: dq 2.10e-03, one GPU 1.00e-03"
    assert lost.status == "wrong: out nan, one GPU 1.00e-03"


CASES = (smoke, what_is_wrong_gets_no_time)
