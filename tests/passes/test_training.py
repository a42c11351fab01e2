"""Gradients through the pass, and graphs nested in the graph: checkpoints and repeated regions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from passes import TreeAttentionPass
from passes.flex_call import is_flex_call
from tree_attn_op.reference import reference_attention

from .helpers import PassThenEager, Tree, attention, block_mask, compiled, count_calls, dense, qkv
from .helpers import form_1 as parents
from .helpers import form_8 as subtrees

pytestmark = pytest.mark.usefixtures("traceable_training")

LAYERS = 3


class AotEager(PassThenEager):
    """The pass, then AOTAutograd and its partitioner, then the graphs uncompiled."""

    def __call__(self, gm: fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        super().__call__(gm, example_inputs)
        from torch._dynamo.backends.debugging import aot_eager_decomp_partition

        return aot_eager_decomp_partition(gm, example_inputs)


def leaves(tensors: tuple[torch.Tensor, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    return [tensor.detach().to(dtype).requires_grad_() for tensor in tensors]


def oracle_gradients(tensors: tuple[torch.Tensor, ...], mask: Any) -> list[torch.Tensor]:
    """Gradients of the sum of cosines of LAYERS layers, in float64."""
    query, key, value = exact = leaves(tensors, torch.float64)
    allowed = dense(mask, query.shape[0], query.shape[1])
    for _ in range(LAYERS):
        query = query + reference_attention(query, key, value, allowed)[0].sin()
    query.cos().sum().backward()
    return [tensor.grad for tensor in exact]


def layer(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any) -> torch.Tensor:
    return query + attention(query, key, value, mask).sin()


def plain(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any) -> torch.Tensor:
    for _ in range(LAYERS):
        query = layer(query, key, value, mask)
    return query.cos().sum()


def checkpointed(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any
) -> torch.Tensor:
    for _ in range(LAYERS):
        query = checkpoint(layer, query, key, value, mask, use_reentrant=False)
    return query.cos().sum()


def save_attention(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    saved = op is torch.ops.tree_attn_op.tree_attention.default
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


def selective(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any) -> Any:
    contexts = functools.partial(create_selective_checkpoint_contexts, save_attention)
    for _ in range(LAYERS):
        query = checkpoint(
            layer, query, key, value, mask, use_reentrant=False, context_fn=contexts
        )
    return query.cos().sum()


def mixed(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any) -> Any:
    """A layer outside of a checkpoint before layers inside one."""
    query = layer(query, key, value, mask)
    for _ in range(LAYERS - 1):
        query = checkpoint(layer, query, key, value, mask, use_reentrant=False)
    return query.cos().sum()


@pytest.mark.parametrize("model", [plain, checkpointed, selective, mixed])
def test_gradients_equal_the_oracle(model: Callable[..., torch.Tensor]) -> None:
    tensors = qkv()
    mask = block_mask(parents(Tree(2, 192)), tensors)
    backend = AotEager()
    inputs = leaves(tensors, torch.float32)
    compiled(model, backend)(*inputs, mask).backward()
    assert len(backend.report.rewritten) == LAYERS == len(backend.report), str(backend.report)
    for given, exact in zip(inputs, oracle_gradients(tensors, mask), strict=True):
        torch.testing.assert_close(given.grad.double(), exact, atol=5e-6, rtol=5e-5)


@pytest.mark.parametrize("model", [plain, checkpointed, selective, mixed])
def test_a_mask_is_prepared_once_for_all_layers(model: Callable[..., torch.Tensor]) -> None:
    tensors = qkv()
    mask = block_mask(parents(Tree(2, 192)), tensors)
    backend = PassThenEager()
    compiled(model, backend)(*leaves(tensors, torch.float32), mask)
    (gm,) = backend.graphs
    assert count_calls(gm, "tree_attention") == LAYERS
    assert count_calls(gm, "block_lists") == 1
    lists = torch.ops.tree_attn_op.block_lists.default
    assert len(gm.graph.find_nodes(op="call_function", target=lists)) == 1


def test_dynamic_lengths_through_checkpoints() -> None:
    backend = PassThenEager()
    model = compiled(checkpointed, backend)
    for length in (192, 300, 515, 700):
        tensors = qkv(2, length)
        mask = block_mask(parents(Tree(2, length)), tensors)
        inputs = leaves(tensors, torch.float32)
        torch.testing.assert_close(model(*inputs, mask), checkpointed(*inputs, mask))
    assert len(backend.graphs) == 2
    assert not backend.report.kept, str(backend.report)
    lists = torch.ops.tree_attn_op.block_lists.default
    for gm in backend.graphs:
        assert len(gm.graph.find_nodes(op="call_function", target=lists)) == 1
        assert count_calls(gm, "block_lists") == 1


def test_selective_policy_saves_the_op() -> None:
    """The op runs once in the forward, and isn't run again for the backward."""
    tensors = qkv()
    mask = block_mask(parents(Tree(2, 192)), tensors)
    counts = []
    for model in (selective, checkpointed):
        inputs = leaves(tensors, torch.float32)
        loss = compiled(model, AotEager())(*inputs, mask)
        with Count() as count:
            loss.backward()
        counts.append(count.calls)
    assert counts == [0, LAYERS]


class Count(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts the calls of the tree attention op."""

    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += func is torch.ops.tree_attn_op.tree_attention.default
        return func(*args, **(kwargs or {}))


def test_gradient_through_lse() -> None:
    """A sink: a logit without a value, which only lse can know of."""
    tensors = qkv()
    mask = block_mask(subtrees(Tree(2, 192)), tensors)
    sink = torch.linspace(-1, 1, 4)

    def with_sink(query: Any, key: Any, value: Any, sink: Any) -> Any:
        out, lse = attention(query, key, value, mask, return_lse=True)
        return (out * torch.sigmoid(lse - sink[:, None]).unsqueeze(-1)).cos().sum()

    inputs = leaves((*tensors, sink), torch.float32)
    backend = AotEager()
    compiled(with_sink, backend)(*inputs).backward()
    assert len(backend.report.rewritten) == 1, str(backend.report)

    query, key, value, exact_sink = exact = leaves((*tensors, sink), torch.float64)
    out, lse = reference_attention(query, key, value, dense(mask, 2, 4))
    (out * torch.sigmoid(lse - exact_sink[:, None]).unsqueeze(-1)).cos().sum().backward()
    for given, wanted in zip(inputs, exact, strict=True):
        torch.testing.assert_close(given.grad.double(), wanted.grad, atol=5e-6, rtol=5e-5)


def test_body_that_writes_to_ids_keeps_its_own_preparation() -> None:
    tensors = qkv()

    def model(query: Any, key: Any, value: Any, ids: Any, mask: Any) -> Any:
        def body(query: Any) -> Any:
            own = ids.clone()
            own.add_(1)
            return query + attention(query, key, value, mask(own)).sin()

        return checkpoint(body, query, use_reentrant=False)

    built = block_mask(parents(Tree(2, 192)), tensors)

    def with_ids(ids: Any) -> Any:
        return torch.nn.attention.flex_attention.BlockMask.from_kv_blocks(
            built.kv_num_blocks,
            built.kv_indices,
            BLOCK_SIZE=128,
            mask_mod=lambda b, h, q, k: (q >= k) & (ids[b, q] == ids[b, k]),
            seq_lengths=(192, 192),
        )

    ids = Tree(2, 192).node
    backend = PassThenEager()
    out = compiled(model, backend)(*tensors, ids, with_ids)
    assert len(backend.report.rewritten) == 1, str(backend.report)
    torch.testing.assert_close(out, model(*tensors, ids, with_ids))
    lists = torch.ops.tree_attn_op.block_lists.default
    (gm,) = backend.graphs
    assert not gm.graph.find_nodes(op="call_function", target=lists)


def test_repeated_region_is_rewritten() -> None:
    """torch.compiler.nested_compile_region: one body, called by every layer."""
    tensors = qkv()
    mask = block_mask(parents(Tree(2, 192)), tensors)
    region = torch.compiler.nested_compile_region(layer)

    def model(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        for _ in range(LAYERS):
            query = region(query, key, value, mask)
        return query

    backend = PassThenEager()
    out = compiled(model, backend)(*tensors)
    assert backend.report.rewritten
    assert not backend.report.kept, str(backend.report)
    torch.testing.assert_close(out, model(*tensors))


def test_the_pass_may_be_called_on_each_nested_graph() -> None:
    """Inductor calls a pass on the innermost graphs first, and then on those around them."""
    tensors = qkv()
    mask = block_mask(parents(Tree(2, 192)), tensors)
    causal = block_mask(lambda b, h, q, k: q >= k, tensors)

    class InnermostFirst(TreeAttentionPass):
        def __call__(self, graph: fx.Graph) -> None:
            for module in graph.owning_module.children():
                if isinstance(module, fx.GraphModule):
                    self(module.graph)
            super().__call__(graph)

    def model(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return checkpointed(query, key, value, mask) + checkpointed(query, key, value, causal)

    backend = PassThenEager(InnermostFirst())
    inputs = leaves(tensors, torch.float32)
    out = compiled(model, backend)(*inputs)
    torch.testing.assert_close(out, model(*inputs))
    assert [len(backend.report.rewritten), len(backend.report.kept)] == [LAYERS, LAYERS]
    assert count_calls(backend.graphs[0], "block_lists") == 1
    assert not any(is_flex_call(node) for node in backend.graphs[0].graph.nodes)
