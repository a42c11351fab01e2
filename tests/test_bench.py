"""The bench on tiny CPU problems: workloads, oracle, and no time for a wrong result."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F

import bench.__main__ as command
from bench import implementations, runner, workloads
from bench.oracle import compare, reference, select_head
from bench.problem import Heads, Problem
from bench.runner import run_case

HEADS = Heads(query=4, kv=2, dim=16)


def problem(dtype=torch.float32):
    return Problem.make(workloads.SMOKE, HEADS, dtype, "cpu")


def smoke(names, **options):
    arguments = {"dtype": torch.float32, "device": "cpu", "rounds": 2, "kv_head": 1, **options}
    return run_case(workloads.SMOKE, HEADS, names, **arguments)


def test_the_workloads_have_their_documented_sizes():
    trees = {w.name: w.tree("cpu") for w in workloads.select(None)}
    assert {name: tree.num_tokens for name, tree in trees.items()} == {
        "chain_16k": 16384,
        "grpo_1x16_32k": 4096 + 16 * 1792,
        "grpo_8x8_32k": 8 * (1024 + 8 * 384),
        "longprompt_32k": 24576 + 16 * 512,
        "tinyleaf_16k": 16 * (256 + 32 * 24),
        "agentic_32k": sum(n for _, n in workloads.load()["agentic_32k"].nodes),
    }
    assert trees["grpo_8x8_32k"].num_trajectory_tokens == 8 * 8 * (1024 + 384)
    assert len(trees["agentic_32k"]) == 25


def test_nodes_are_laid_out_in_the_order_of_the_file():
    workload = workloads.load()["agentic_32k"]
    tree = workload.tree("cpu")
    nodes = torch.arange(len(workload.nodes))
    tokens = torch.tensor([n for _, n in workload.nodes])
    assert torch.equal(tree.input_ids, nodes.repeat_interleave(tokens))


def test_unknown_workload_is_an_error(capsys):
    with pytest.raises(SystemExit):
        command.parse_args(["--workloads", "nope"])
    assert "no workload named nope; there are chain_16k" in capsys.readouterr().err


def test_the_oracle_equals_autograd_of_dense_attention():
    p = problem(torch.float64)
    leaves = [x.clone().requires_grad_() for x in (p.query, p.key, p.value)]
    mask = p.tree.mask.to_dense()[:, None]
    out = F.scaled_dot_product_attention(*leaves, attn_mask=mask, enable_gqa=True)
    dq, dk, dv = torch.autograd.grad(out, leaves, p.grad_out)
    for kv_head in range(HEADS.kv):
        dense = select_head(kv_head, HEADS, out.detach(), (dq, dk, dv))
        for error in compare(dense, reference(p, kv_head)).values():
            assert error.max < 1e-12


def test_right_implementations_are_timed():
    case = smoke(["flex", "tree_attn_op", "sdpa_causal", "varlen_unpacked", "flex_flash"])
    by_name = {outcome.name: outcome for outcome in case.outcomes}
    ours = by_name["tree_attn_op"]
    assert ours.status == "ok"
    assert ours.errors.keys() == {"out", "dq", "dk", "dv"}
    assert ours.forward.milliseconds.p20 <= ours.forward.milliseconds.p80
    assert ours.forward.speedup is not None
    assert ours.backward.tflops > 0
    # flex on CPU has no backward, so there is nothing to compare ours with.
    assert by_name["flex"].status == "ok"
    assert by_name["flex"].backward is None
    assert ours.backward.speedup is None
    assert by_name["sdpa_causal"].status == "ok"
    assert by_name["sdpa_causal"].forward.speedup is None
    assert by_name["varlen_unpacked"].status == "not run: needs a CUDA GPU"
    assert case.mask_building.keys() == {"tree_attn_op", "flex, eager"}


def test_a_wrong_result_gets_no_time(monkeypatch):
    class OneTokenOff(implementations.TreeAttention):
        def forward(self):
            out = super().forward()
            return out.index_copy(2, torch.tensor([5]), out[:, :, 6:7])

    class WrongGradient(implementations.TreeAttention):
        def backward(self, out):
            dq, dk, dv = super().backward(out)
            return dq, dk, dv * 1.01

    class Failing(implementations.TreeAttention):
        def forward(self):
            raise RuntimeError("no kernel\nfor this")

    wrong = {"one": OneTokenOff, "gradient": WrongGradient, "failing": Failing}
    monkeypatch.setattr(runner, "IMPLEMENTATIONS", {**implementations.IMPLEMENTATIONS, **wrong})
    case = smoke(["tree_attn_op", *wrong])
    ours, one, gradient, failing = case.outcomes
    assert ours.status == "ok"
    assert one.status.startswith("wrong: out is off by")
    assert gradient.status.startswith("wrong: dv is off by 1.0e-02")
    assert failing.status == "failed: RuntimeError: no kernel"
    for outcome in (one, gradient, failing):
        assert outcome.forward is None
        assert outcome.backward is None


def test_the_command_writes_json_and_markdown(tmp_path, capsys):
    command.main(
        [
            *("--smoke", "--device", "cpu", "--dtype", "float32", "--rounds", "2"),
            *("--heads", "4", "--kv-heads", "2", "--head-dims", "16", "32"),
            *("--impls", "tree_attn_op", "sdpa_causal", "--out", str(tmp_path)),
        ]
    )
    results = json.loads((tmp_path / "results.json").read_text())
    assert [case["heads"]["dim"] for case in results["cases"]] == [16, 32]
    assert results["cases"][0]["outcomes"][0]["forward"]["tflops"] > 0
    assert "torch " in results["environment"]["versions"]
    table = (tmp_path / "results.md").read_text()
    assert "## smoke, D=32" in table
    rows = [line for line in table.splitlines() if line.startswith("|")]
    assert {row.count("|") for row in rows} == {10}
    assert "tree_attn_op" in capsys.readouterr().out
