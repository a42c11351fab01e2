"""What users have reported of checkpoints, compilation, sharding, caches and determinism."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn.attention.flex_attention import AuxRequest
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from passes import TreeAttentionPass
from passes.flex_call import is_flex_call
from tests.attention_cases import ids_case, operands, tree_case
from tests.integrations.trajectories import multi_turn
from tests.passes.helpers import (
    PassThenEager,
    Tree,
    attention,
    block_mask,
    compiled,
    count_calls,
    qkv,
)
from tests.passes.helpers import form_1 as parents
from tests.passes.helpers import form_8 as subtrees
from tests.passes.test_training import LAYERS, AotEager, Count, layer, leaves
from tree_attn_op import PrefixTree, TreeMask, tree_attention
from tree_attn_op.integrations import dispatch
from tree_attn_op.reference import reference_attention

OP = torch.ops.tree_attn_op.tree_attention.default
ROOT = Path(__file__).parents[2]


@pytest.mark.usefixtures("traceable_training")
def test_a_save_list_inside_of_compiled_checkpoints() -> None:
    """The op's name in a list of ops to save; gradients are those without checkpoints."""
    tensors = qkv()
    mask = block_mask(parents(Tree(2, 192)), tensors)
    saved = [OP, torch.ops.aten.mm.default]
    contexts = functools.partial(create_selective_checkpoint_contexts, saved)

    def model(query: Tensor, key: Tensor, value: Tensor, use: bool) -> Tensor:
        for _ in range(LAYERS):
            if use:
                query = checkpoint(
                    layer, query, key, value, mask, use_reentrant=False, context_fn=contexts
                )
            else:
                query = layer(query, key, value, mask)
        return query.cos().sum()

    backend, inputs = AotEager(), leaves(tensors, torch.float32)
    loss = compiled(model, backend)(*inputs, True)
    assert len(backend.report.rewritten) == LAYERS, str(backend.report)
    with Count() as count:
        loss.backward()
    assert count.calls == 0
    exact = leaves(tensors, torch.float32)
    model(*exact, False).backward()
    for got, want in zip(inputs, exact, strict=True):
        torch.testing.assert_close(got.grad, want.grad, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("page", ["README.md", "examples/README.md"])
def test_the_name_for_save_lists_is_documented(page: str) -> None:
    assert str(OP) in ("tree_attn_op.tree_attention.default", "tree_attn_op::tree_attention")
    assert "torch.ops.tree_attn_op.tree_attention.default" in (ROOT / page).read_text()


class _Recompute(torch.autograd.Function):
    """A checkpoint of an engine of its own, which saves its arguments as autograd saves them."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:
        arguments = (query, key, value, *rest)
        tensors = [one if isinstance(one, Tensor) else None for one in arguments]
        ctx.scalars = [None if isinstance(one, Tensor) else one for one in arguments]
        for one in ctx.scalars:
            assert one is None or isinstance(one, (int, float, str))
        ctx.save_for_backward(*tensors)
        return OP(*arguments)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        saved = zip(ctx.saved_tensors, ctx.scalars, strict=True)
        arguments = [scalar if tensor is None else tensor for tensor, scalar in saved]
        inputs = [tensor.detach().requires_grad_() for tensor in arguments[:3]]
        with torch.enable_grad():
            out = OP(*inputs, *arguments[3:])[0]
        grads = torch.autograd.grad(out, inputs, grad)
        return (*grads, *(None,) * (len(arguments) - 3))


def test_every_argument_of_the_op_can_be_saved_for_the_backward() -> None:
    made = tree_case(70)
    inputs = operands(1, (2, 1), (70, 70), requires_grad=True)
    arguments = (*inputs, *made.mask_arguments, 0.3)
    grads = [
        torch.autograd.grad(run(*arguments).cos().sum(), inputs)
        for run in (_Recompute.apply, lambda *given: OP(*given)[0])
    ]
    for got, want in zip(*grads, strict=True):
        assert torch.equal(got, want)
    kinds = {str(argument.type) for argument in OP._schema.arguments}
    assert kinds == {"Tensor", "Optional[Tensor]", "str", "int", "float"}


class Block(nn.Module):
    """A transformer block whose attention is one of the ways to call."""

    def __init__(self, call: Callable[..., Tensor]) -> None:
        super().__init__()
        self.call = call
        self.qkv, self.out = nn.Linear(32, 64), nn.Linear(32, 32)
        self.mlp = nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 32))

    def forward(self, x: Tensor, mask: Any) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (8, 8)).transpose(1, 2)
        query, key, value = heads.split((4, 2, 2), dim=1)
        x = x + self.out(self.call(query, key, value, mask).transpose(1, 2).flatten(2))
        return x + self.mlp(x)


def explicit(query: Tensor, key: Tensor, value: Tensor, mask: TreeMask) -> Tensor:
    return tree_attention(query, key, value, mask, enable_gqa=True)


def engine(query: Tensor, key: Tensor, value: Tensor, mask: TreeMask) -> Tensor:
    return dispatch.attention(query, key, value, mask)


@pytest.mark.usefixtures("traceable_training")
@pytest.mark.parametrize("call", [attention, explicit, engine])
def test_a_whole_block_has_no_graph_break(call: Callable[..., Tensor]) -> None:
    tree = PrefixTree.from_sequences(multi_turn(4))
    block = Block(call)
    mask = tree.mask.block_mask if call is attention else tree.mask
    x = torch.randn(1, tree.num_tokens, 32)
    found = torch._dynamo.explain(block)(x, mask)
    assert found.graph_break_count == 0, found.break_reasons
    assert found.graph_count == 1
    backend = AotEager()
    torch.testing.assert_close(compiled(block, backend)(x, mask), block(x, mask))
    assert len(backend.report.rewritten) == (call is attention)


@pytest.mark.usefixtures("traceable_training")
@pytest.mark.parametrize("call", [attention, explicit])
def test_layers_compiled_one_by_one_share_one_compilation(call: Callable[..., Tensor]) -> None:
    tree = PrefixTree.from_sequences(multi_turn(4))
    mask = tree.mask.block_mask if call is attention else tree.mask
    layers = nn.ModuleList([Block(call) for _ in range(5)])
    backend = PassThenEager()
    torch._dynamo.reset()
    want = x = torch.randn(1, tree.num_tokens, 32, requires_grad=True)
    for block in layers:
        want = block(want, mask)
    for block in layers:
        block.compile(backend=backend, fullgraph=True)
        x = block(x, mask)
    torch.testing.assert_close(x, want)
    assert len(backend.graphs) == 1


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("traceable_training", "one_process")
def test_fully_sharded_layers_compiled_with_the_pass() -> None:
    """FSDP2 around layers whose flex_attention the pass rewrites: gradients are the unsharded."""
    from torch.distributed.fsdp import fully_shard

    tree = PrefixTree.from_sequences(multi_turn(4))
    mask = tree.mask.block_mask
    x = torch.randn(1, tree.num_tokens, 32)
    results = []
    for sharded in (False, True):
        torch.manual_seed(0)
        model = nn.ModuleList([Block(attention) for _ in range(2)])
        backend = AotEager()
        torch._dynamo.reset()
        for block in model:
            if sharded:
                block.compile(backend=backend)
                fully_shard(block)
        out = x
        for block in model:
            # Without the pass flex has no backward on a CPU, but its own mathematics has.
            out = block(out, mask)
        out.cos().sum().backward()
        grads = [parameter.grad for parameter in model.parameters()]
        results.append([g.full_tensor() if sharded else g for g in grads])
        assert len(backend.report.rewritten) == len(backend.report)
        assert bool(backend.report) is sharded
    for got, want in zip(*reversed(results), strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def _two_runs(device: str, dtype: torch.dtype) -> None:
    """Attention, log-probs at forks and values laid onto the pack: no error, the same bits."""
    tree = PrefixTree.from_sequences(multi_turn(4)).to(device)
    tokens = tree.num_tokens
    torch.manual_seed(0)
    query, key, value = (
        torch.randn(1, heads, tokens, 16, device=device, dtype=dtype, requires_grad=True)
        for heads in (4, 2, 2)
    )
    weight = torch.randn(4 * 16, 50, device=device, dtype=dtype, requires_grad=True)
    advantages = torch.randn(len(tree), device=device).tolist()
    runs = []
    for _ in range(2):
        out, aux = tree_attention(
            query, key, value, tree.mask, enable_gqa=True, return_aux=AuxRequest(lse=True)
        )
        logits = out.transpose(1, 2).flatten(2)[0] @ weight
        loss = torch.cat(tree.gather_logprobs(logits)).sum() + aux.lse.sin().sum()
        loss = loss + (tree.scatter(advantages) * tree.token_entropy(logits)).sum()
        runs.append((loss, *torch.autograd.grad(loss, (query, key, value, weight))))
    for first, second in zip(*runs, strict=True):
        assert torch.equal(first, second)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_bits_under_deterministic_algorithms(dtype: torch.dtype) -> None:
    _two_runs("cpu", dtype)


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_bits_under_deterministic_algorithms_on_a_gpu(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What cuBLAS asks for; the products around attention are the test's own.
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    _two_runs("cuda", dtype)


def test_a_model_learns_on_a_cpu_as_with_dense_attention() -> None:
    """flex_attention has no backward on a CPU; the op trains there, step for step the same."""
    tree = PrefixTree.from_sequences(multi_turn(4))
    allowed = tree.mask.to_dense()
    x, target = torch.randn(2, 1, tree.num_tokens, 32)
    losses = []
    for call in (explicit, lambda q, k, v, mask: reference_attention(q, k, v, allowed)[0]):
        torch.manual_seed(0)
        block = Block(call)
        optimizer = torch.optim.AdamW(block.parameters(), lr=1e-2)
        mine = []
        for _ in range(20):
            loss = (block(x, tree.mask) - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            mine.append(loss.item())
        losses.append(mine)
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert losses[0][-1] < losses[0][0] * 0.9


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "BSHD": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "SBHD": lambda t: t.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3),
    "columns": lambda t: t.mT.contiguous().mT,
    "of one projection": lambda t: torch.cat([t, t], 3)[..., : t.shape[3]],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fake_strides_of_permuted_inputs(layout: str) -> None:
    """opcheck, forward and backward, for the layouts in which models store heads."""
    made = tree_case(40)
    inputs = operands(2, (4, 2), (40, 40), (8, 16), dtype=torch.float32)
    inputs = tuple(LAYOUTS[layout](tensor).requires_grad_() for tensor in inputs)
    # The checks that trace take a second each, and see no more of a layout than its strides.
    checks = ("test_schema", "test_faketensor")
    if layout == "BSHD":
        checks += ("test_autograd_registration", "test_aot_dispatch_dynamic")
    torch.library.opcheck(OP, (*inputs, *made.mask_arguments, 0.3), test_utils=checks)
    plain = [tensor.detach() for tensor in inputs]
    out, lse = OP(*plain, *made.mask_arguments, 0.3)
    grad = LAYOUTS[layout](torch.randn(out.shape))
    torch.library.opcheck(
        torch.ops.tree_attn_op.tree_attention_backward.default,
        (grad, torch.randn_like(lse), *plain, out, lse, *made.mask_arguments, 0.3),
        test_utils=checks,
    )


def test_inputs_that_inductor_computes_keep_their_values() -> None:
    """Inductor may choose the layout of what it computes: the op is right with any."""
    assert torch.Tag.needs_exact_strides in OP.tags
    made = ids_case(70, 70)
    x = torch.randn(2, 6, 70, 16, requires_grad=True)

    def model(x: Tensor) -> Tensor:
        x = x.to(memory_format=torch.channels_last).sin()
        query, key = x[:, 0:2].mT.contiguous().mT * 2, x[:, 2:4].roll(1, 2)
        value = torch.nn.functional.pad(x[:, 4:6], (0, 3))[..., :16] + 1
        out, lse = made.call(query, key, value, 0.3)
        return (out.transpose(1, 2).flatten(2) * lse.sigmoid().mean()).cos()

    results = []
    for run in (torch.compile(model, fullgraph=True), model):
        out = run(x)
        results.append((out, *torch.autograd.grad(out.sum(), x)))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("traceable_training")
def test_nodes_in_a_checkpoint_carry_the_calls_metadata() -> None:
    """What later passes decide recomputation by is on every node that replaces the call."""
    tensors = qkv()
    mask = block_mask(parents(Tree(2, 192)), tensors)
    seen: list[dict[str, Any]] = []
    made: list[dict[str, Any]] = []

    class Tag(TreeAttentionPass):
        def _run(self, graph: fx.Graph) -> None:
            for node in graph.nodes:
                if is_flex_call(node):
                    node.meta |= {"recompute": 7, "ac_graph_id": 3, "custom": {"mine": 1}}
                    seen.append(dict(node.meta))
            super()._run(graph)
            # Now, as running a checkpoint tags its nodes anew in some versions of torch.
            for node in graph.find_nodes(op="call_function", target=OP):
                made.append(dict(node.meta))

    def model(*tensors: Tensor) -> Tensor:
        return checkpoint(layer, *tensors, mask, use_reentrant=False)

    backend = PassThenEager(Tag())
    compiled(model, backend)(*leaves(tensors, torch.float32))
    assert count_calls(backend.graphs[0], "tree_attention") == 1
    assert len(made) == len(seen) == 1
    for name in ("recompute", "ac_graph_id", "custom", "stack_trace"):
        assert made[0][name] == seen[0][name], name


def test_branches_of_a_condition_are_rewritten() -> None:
    """torch.cond: a graph for each branch, nested in the graph."""
    tensors = qkv()
    mask = block_mask(parents(Tree(2, 192)), tensors)

    def model(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return torch.cond(
            query.sum() > 0,
            lambda q, k, v: attention(q, k, v, mask),
            lambda q, k, v: attention(q * 2, k, v, mask),
            (query, key, value),
        )

    backend = PassThenEager()
    out = compiled(model, backend)(*tensors)
    doubled = tensors[0] if tensors[0].sum() > 0 else tensors[0] * 2
    torch.testing.assert_close(out, attention(doubled, *tensors[1:], mask))
    assert len(backend.report.rewritten) == 2 == len(backend.report), str(backend.report)


@pytest.mark.usefixtures("traceable_training")
def test_a_checkpoint_within_a_checkpoint_is_rewritten() -> None:
    tensors = qkv()
    mask = block_mask(subtrees(Tree(2, 192)), tensors)

    def inner(*tensors: Tensor) -> Tensor:
        return checkpoint(layer, *tensors, mask, use_reentrant=False)

    def model(*tensors: Tensor) -> Tensor:
        return checkpoint(inner, *tensors, use_reentrant=False).cos().sum()

    grads = []
    for run in (compiled(model, backend := PassThenEager()), model):
        inputs = leaves(tensors, torch.float32)
        run(*inputs).backward()
        grads.append([tensor.grad for tensor in inputs])
    assert len(backend.report.rewritten) == 1 == len(backend.report), str(backend.report)
    for got, want in zip(*grads, strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("way", ["tree", "flex", "pass"])
def test_a_sink_has_its_closed_form(way: str, traceable_training: None) -> None:
    """q = k = 1, v = 2 and a sink of logit 0: out is 2 sigmoid(1), and so its gradients."""
    ones = torch.full((1, 1, 3, 1), 1.0)
    query, key, value = (n * ones.clone() for n in (1, 1, 2))
    inputs = [tensor.requires_grad_() for tensor in (query, key, value)]
    sink = torch.zeros(1, requires_grad=True)
    made = tree_case(3)
    mask = TreeMask.from_predicate(made.predicate, made.q_vals, made.k_vals, 3, 3)
    if way == "pass":

        def call(query: Tensor, key: Tensor, value: Tensor, sink: Tensor) -> Tensor:
            out, aux = attention(
                query, key, value, mask.block_mask, scale=1.0, return_aux=AuxRequest(lse=True)
            )
            return dispatch.add_sink(out, aux.lse, sink)

        out = compiled(call, PassThenEager())(*inputs, sink)
    else:
        out = dispatch.attention(*inputs, mask, scale=1.0, sink=sink, backend=way)
    first = out[0, 0, 0, 0]
    weight = torch.sigmoid(torch.tensor(1.0))
    slope = 2 * weight * (1 - weight)
    torch.testing.assert_close(first, 2 * weight)
    grads = torch.autograd.grad(first, (*inputs, sink))
    for got, want in zip(grads, (slope, slope, weight, -slope), strict=True):
        torch.testing.assert_close(got.flatten()[0], want)
