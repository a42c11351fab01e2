"""The bench on tiny CPU problems: workloads, oracle, and no time for a wrong result."""

from __future__ import annotations

import inspect
import json
from dataclasses import asdict, replace

import pytest
import torch
import torch.nn.functional as F

import bench.__main__ as command
from bench import (
    bf16_training,
    end_to_end,
    implementations,
    numerics,
    ours,
    peers,
    runner,
    training,
    workloads,
)
from bench.model import Model, Shape
from bench.oracle import compare, reference, reference_sample, sample_of, select_head
from bench.problem import Heads, Problem
from bench.runner import run_case
from tree_attn_op import TreeMask, cpu

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
    names = ["flex", "tree_attn_op", "sdpa_causal", "unpacked", "gather", "flex_flash"]
    case = smoke([*names, "tree_attn_op_hopper"], repeats=3)
    by_name = {outcome.name: outcome for outcome in case.outcomes}
    own = by_name["tree_attn_op"]
    assert own.status == "ok"
    assert own.errors.keys() == {"out", "dq", "dk", "dv"}
    assert own.forward.milliseconds.p20 <= own.forward.milliseconds.p80
    assert own.forward.ratios.keys() == {"flex", "gather"}
    assert own.backward.tflops > 0
    assert own.same_bits == 3
    # flex on CPU has no backward, so there is nothing to compare ours with.
    assert by_name["flex"].status == "ok"
    assert by_name["flex"].backward is None
    assert by_name["flex"].same_bits is None
    assert own.backward.ratios.keys() == {"gather"}
    for name in ("unpacked", "gather"):
        assert by_name[name].status == "ok"
        assert by_name[name].errors.keys() == {"out", "dq", "dk", "dv"}
        assert by_name[name].note == "SDPA, one call a sequence"
    assert by_name["sdpa_causal"].status == "ok"
    assert by_name["sdpa_causal"].forward.ratios == {}
    for name in ("flex_flash", "tree_attn_op_hopper"):
        assert by_name[name].status == "not run: needs a CUDA GPU"
    assert case.mask_building.keys() == {"tree_attn_op", "flex, eager"}


def test_gathered_keys_are_the_ancestors_of_each_stretch():
    p = Problem.make(workloads.load()["agentic_32k"], HEADS, torch.float32, "cpu")
    keys, ragged = peers.gathered_paths(p.tree)
    ends = torch.tensor(ragged.q_lens).cumsum(0) - 1
    parents = [parent for parent, _ in p.workload.nodes]
    # A node that is its parent's only child continues it.
    assert len(ragged.q_lens) == sum(parents.count(parent) > 1 or parent < 0 for parent in parents)
    for end, path in zip(ends.tolist(), keys.split(ragged.k_lens), strict=True):
        walk = [end]
        while (parent := int(p.tree.parents[walk[-1]])) >= 0:
            walk.append(parent)
        assert path.tolist() == walk[::-1]


def test_deterministic_algorithms_are_on_where_asked_and_off_again():
    seen = []
    for implementation in (ours.TreeAttention, ours.DeterministicTreeAttention):
        one = implementation(problem())
        out = one.forward()
        out.grad_fn.register_prehook(
            lambda _: seen.append(torch.are_deterministic_algorithms_enabled())
        )
        one.backward(out)
    assert seen == [False, True]
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory


def test_the_kernels_called_past_the_op_give_its_results():
    """The CPU implementation, whose arguments are a package's, stands in for one."""

    class StandIn(ours.Kernels):
        @staticmethod
        def functions():
            return cpu.forward, cpu.backward

        @staticmethod
        def list_blocks(problem):
            return 64, 64

    p = problem()
    stand_in, op = StandIn(p), ours.TreeAttention(p)
    (out, grads), (wanted, wanted_grads) = stand_in.packed_results(), op.packed_results()
    torch.testing.assert_close((out, *grads), (wanted, *wanted_grads))
    known = inspect.signature(cpu.backward).parameters.keys() | stand_in.arguments.keys()
    for package in (ours.PortableKernels, ours.HopperKernels, ours.FastHopperKernels):
        for function in package.functions():
            parameters = inspect.signature(function).parameters.values()
            required = {one.name for one in parameters if one.default is one.empty}
            assert required <= known


def test_a_wrong_result_gets_no_time(monkeypatch):
    class OneTokenOff(ours.TreeAttention):
        def forward(self):
            out = super().forward()
            return out.index_copy(2, torch.tensor([5]), out[:, :, 6:7])

    class WrongGradient(ours.TreeAttention):
        def backward(self, out):
            dq, dk, dv = super().backward(out)
            return dq, dk, dv * 1.01

    class Failing(ours.TreeAttention):
        def forward(self):
            raise RuntimeError("no kernel\nfor this")

    wrong = {"one": OneTokenOff, "gradient": WrongGradient, "failing": Failing}
    monkeypatch.setattr(runner, "IMPLEMENTATIONS", {**implementations.IMPLEMENTATIONS, **wrong})
    case = smoke(["tree_attn_op", *wrong])
    right, one, gradient, failing = case.outcomes
    assert right.status == "ok"
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
    # The overview of tree_attn_op, and a table a case.
    assert [row.count("|") for row in rows] == [11] * 4 + [15] * 8
    assert "tree_attn_op" in capsys.readouterr().out


def test_a_sample_of_the_oracle_equals_all_of_it():
    p = problem(torch.float64)
    sample = sample_of(p.tree.num_tokens, 20, "cpu")
    assert len(sample.queries) >= 20
    for kv_head in range(HEADS.kv):
        expected = sample.of(reference(p, kv_head))
        for error in compare(reference_sample(p, kv_head, sample), expected).values():
            assert error.max < 1e-12


def test_numerics_writes_json_and_markdown(tmp_path, monkeypatch):
    monkeypatch.setattr(numerics, "_SAMPLED_FROM", 100)
    impls = ("gather", "tree_attn_op", "sdpa_causal", "flex_flash")
    numerics.main(["--smoke", "--device", "cpu", "--impls", *impls, "--out", str(tmp_path)])
    rows = json.loads((tmp_path / "numerics.json").read_text())["rows"]
    for row in rows[:2]:
        assert row["errors"].keys() == {"out", "dq", "dk", "dv"}
        assert all(error["max"] < 1e-4 for error in row["errors"].values())
    assert [row["status"] for row in rows[2:]] == [
        "not run: it computes something else",
        "not run: needs a CUDA GPU",
    ]
    table = (tmp_path / "numerics.md").read_text()
    assert table.count("| smoke | float32 | 4/2 | 16 |") == 4
    with pytest.raises(SystemExit):
        numerics.parse_args(["--workloads", "agentic_32k", "--head-dims", "3"])


TINY = Shape(64, 2, 4, 2, 16, 96, 199, 1e4)


def tiny_model(dtype=torch.float32):
    return Model(TINY).to(dtype).initialise(0)


def test_a_step_on_the_tree_is_that_of_its_trajectories():
    model = tiny_model(torch.float64)
    tree = end_to_end.random_tree(workloads.SMOKE, TINY.vocabulary, "cpu")
    variants = [
        training.unpacked_variant(tree, limit, torch.float64, compiled=False)
        for limit in (10_000, 250, 1)
    ]
    assert [len(variant.batches) for variant in variants] == [1, 3, 6]
    variants.append(training.tree_variant("op", tree, TINY.head_dim, compiled=False))
    results = []
    for variant in variants:
        for checkpointing in (False, True):
            loss = training.backward(model, variant, checkpointing=checkpointing, chunk=50)
            results.append((loss, training.gradients(model)))
    for other in results[1:]:
        # The weights of the terms are float32.
        torch.testing.assert_close(other, results[0], rtol=1e-6, atol=1e-9)

    # The same from the definition, one trajectory at a time.
    def causal(query, key, value, mask):
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    total = 0.0
    sequences = tree.unpack(tree.input_ids)
    for tokens in sequences:
        hidden = model.hidden(tokens, torch.arange(len(tokens)), None, causal)
        logits = hidden[:-1] @ model.embedding.weight.T
        total += F.cross_entropy(logits, tokens[1:], reduction="sum")
    mean = total / sum(len(tokens) - 1 for tokens in sequences)
    torch.testing.assert_close(results[0][0], mean.detach(), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("wrong", [False, True])
def test_training_steps_are_checked_and_timed(wrong, tmp_path, monkeypatch, capsys):
    if wrong:
        # Each token of the tree sees all before it: a mask, but not the tree's.
        causal = TreeMask.from_predicate(
            "q >= k", *(torch.empty(1, 0, 338, dtype=torch.int32) for _ in range(2)), 338, 338
        )
        make = training.tree_variant

        def with_causal_mask(name, tree, *options):
            variant = make(name, tree, *options)
            batches = [replace(batch, mask=causal) for batch in variant.batches]
            return replace(variant, batches=batches)

        # Not through the reference, which names its options.
        monkeypatch.setattr(
            end_to_end,
            "make_variant",
            lambda name, tree, model, limit, compiled: (
                with_causal_mask(name, tree, model.shape.head_dim, compiled)
                if name == "op"
                else training.unpacked_variant(tree, limit, torch.float32, compiled)
            ),
        )
    shape = [
        part for n, v in asdict(TINY).items() for part in (f"--{n.replace('_', '-')}", str(v))
    ]
    end_to_end.main(
        [
            *("--smoke", "--device", "cpu", "--dtype", "float32", "--no-compile", "--rounds", "1"),
            *("--variants", "unpacked", "op", "flex", "--checkpointing", "off"),
            *("--batch-tokens", "250", "250", *shape, "--out", str(tmp_path)),
        ]
    )
    (case,) = json.loads((tmp_path / "end_to_end.json").read_text())["cases"]
    unpacked, op, flex = case["outcomes"]
    assert unpacked["status"] == "ok"
    assert (unpacked["batches"], op["batches"]) == (3, 1)
    assert (unpacked["tokens"], op["tokens"]) == (618, 338)
    assert unpacked["tokens_per_second"] == pytest.approx(618 / unpacked["seconds"]["p50"])
    assert flex["status"] == "not run: flex_attention does not train on a CPU"
    if wrong:
        assert op["status"].startswith("wrong: gradients of")
        assert op["seconds"] is None
    else:
        assert op["status"] == "ok"
        assert op["speedup"] is not None
    assert "| op |" in (tmp_path / "end_to_end.md").read_text()


def test_bf16_training_is_judged_by_the_noise_of_the_order():
    unpacked = [[4.0, 2.0], [4.0, 2.02], [4.0, 2.01]]
    trial = bf16_training.Trial.of("bfloat16", unpacked, [4.0, 2.03])
    assert trial.order.most == pytest.approx(0.02 / 3.0, rel=1e-2)
    assert trial.tree.most == pytest.approx(0.02 / 3.0, rel=1e-2)
    assert trial.passed
    assert not bf16_training.Trial.of("bfloat16", unpacked, [4.0, 2.06]).passed


def test_bf16_training_notices_a_wrong_mask(monkeypatch):
    right = bf16_training.run_trial("float32", 2, "cpu")
    assert right.passed
    assert right.order.most > 0

    def with_causal_mask(tree, order, step, make=bf16_training.variant):
        variant = make(tree, order, step)
        n = tree.num_tokens
        none = torch.empty(1, 0, n, dtype=torch.int32)
        causal = TreeMask.from_predicate("q >= k", none, none, n, n)
        return replace(variant, batches=[replace(variant.batches[0], mask=causal)])

    monkeypatch.setattr(bf16_training, "variant", with_causal_mask)
    wrong = bf16_training.train(None, "float32", 2, "cpu")
    assert not bf16_training.Trial.of("float32", right.unpacked, wrong).passed


@pytest.mark.gpu
@pytest.mark.parametrize("weights", ["bfloat16", "float32"])
def test_bf16_training_on_trees_is_within_the_noise_of_the_order(weights):
    trial = bf16_training.run_trial(weights, 50, "cuda")
    assert trial.packed[-1] < trial.packed[0] - 1.0
    assert trial.passed, (trial.order, trial.tree)
