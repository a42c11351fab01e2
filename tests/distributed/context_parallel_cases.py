"""Cases of context-parallel attention; each runs on every rank of a group of any size."""

from __future__ import annotations

from collections import Counter

import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import aot_eager
from torch._inductor.compile_fx import compile_fx
from torch.distributed.tensor.experimental._attention import _context_parallel_shard
from torch.nn.attention.flex_attention import AuxRequest
from torch.utils.checkpoint import checkpoint

from tests.attention_cases import case, hand_made_lists, ids_case, operands, tree_case
from tests.distributed.attention_checks import attend, check_case, close, cp_mesh, mask_of
from tree_attn_op import TreeMask, tree_attention
from tree_attn_op.distributed import (
    TreeLoadBalancer,
    context_parallel_attention,
    context_parallel_mask,
    context_parallel_shard,
    context_parallel_unshard,
)


def a_tree() -> None:
    check_case(tree_case(150, (16, 16)))


def a_tree_of_64_bit_values_in_larger_tiles() -> None:
    given = tree_case(201, (16, 32), dtype=torch.int64)
    balancer = TreeLoadBalancer.of_mask(mask_of(given), dist.get_world_size(), tile_size=48)
    check_case(given, balancer)


def random_ids_with_a_batch_and_rows_that_see_nothing() -> None:
    check_case(ids_case(75, 75, batch=2, blocks=(16, 16)), batch=2)


def differences_of_indices() -> None:
    rows = torch.randint(-3, 7, (1, 1, 90), dtype=torch.int32)
    check_case(case("q - k < 20 & q0 - k >= -60 & k - q <= k0", rows, rows.flip(2), (16, 16)))


def hand_made_lists_that_differ_by_head() -> None:
    given = hand_made_lists(ids_case(100, 100, blocks=(32, 16)), batch=2, heads=4)
    check_case(given, batch=2, num_chunks=2)


def fewer_tiles_than_ranks() -> None:
    given = tree_case(40, (32, 32))
    check_case(given)
    everything = [[0, 1], *[[]] * (dist.get_world_size() - 1)]
    check_case(given, TreeLoadBalancer(everything[::-1], 40, 32), reshard_after_forward=True)


def heads_in_chunks() -> None:
    check_case(tree_case(70, (16, 16)), heads=(8, 4), num_chunks=4)


def gathered_again_in_the_backward() -> None:
    check_case(tree_case(70, (16, 16)), heads=(8, 4), num_chunks=2, reshard_after_forward=True)


def summed_in_another_dtype() -> None:
    check_case(tree_case(70, (16, 16)), reduce_dtype=torch.float64)


def one_output_only() -> None:
    """No gradient of out, or none of lse, is not the same as zeros in all code paths."""
    given = tree_case(50, (16, 16))
    whole = operands(1, (2, 2), (50, 50), requires_grad=True)
    mask = context_parallel_mask(cp_mesh(), mask_of(given))
    here = [x.detach()[:, :, mask.positions].requires_grad_() for x in whole]
    aux = AuxRequest(lse=True)
    for which, inputs in ((0, 3), (1, 2)):
        out, lse = tree_attention(*whole, mask_of(given), return_aux=aux)
        loss = (out, lse.lse)[which].square().sum()
        expected = torch.autograd.grad(loss, whole[:inputs])
        for reshard in (False, True):
            out, lse = context_parallel_attention(
                *here, mask, return_aux=aux, reshard_after_forward=reshard
            )
            loss = (out, lse.lse)[which].square().sum()
            grads = torch.autograd.grad(loss, here[:inputs])
            for ours, theirs in zip(grads, expected, strict=True):
                close(ours, theirs[:, :, mask.positions])


def a_mask_made_in_inference_mode() -> None:
    """Trained with, after the policy that sampled was scored with it."""
    with torch.inference_mode():
        mask = context_parallel_mask(cp_mesh(), mask_of(tree_case(50, (16, 16))))
        here = operands(1, (2, 2), (mask.local.q_len,) * 2)
        scored = context_parallel_attention(*here, mask)
    here = operands(1, (2, 2), (mask.local.q_len,) * 2, requires_grad=True)
    for reshard in (False, True):
        out = context_parallel_attention(*here, mask, reshard_after_forward=reshard)
        assert out.shape == scored.shape
        grads = torch.autograd.grad(out.square().sum(), here)
        # Ranks without tokens only have to have taken part.
        assert all(bool(grad.any()) for grad in grads) or not mask.local.q_len


def checkpointed() -> None:
    given = tree_case(50, (16, 16))
    mask = context_parallel_mask(cp_mesh(), mask_of(given))
    here = operands(1, (2, 2), (mask.local.q_len,) * 2, requires_grad=True)
    grads = []
    for wrapped in (False, True):
        call = (
            (lambda *x: checkpoint(context_parallel_attention, *x, use_reentrant=False))
            if wrapped
            else context_parallel_attention
        )
        grads.append(torch.autograd.grad(call(*here, mask).square().sum(), here))
    for ours, theirs in zip(*grads, strict=True):
        assert torch.equal(ours, theirs)


def under_autocast() -> None:
    given = tree_case(50, (16, 16))
    mask = context_parallel_mask(cp_mesh(), mask_of(given))
    whole = operands(1, (2, 2), (50, 50), dtype=torch.float32, requires_grad=True)
    here = [x.detach()[:, :, mask.positions].requires_grad_() for x in whole]
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autocast("cpu", torch.bfloat16):
        expected = tree_attention(*whole, mask_of(given))
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            out = context_parallel_attention(*here, mask)
    # What is exchanged and kept is already in the dtype of autocast.
    assert {x.dtype for x in (out, *kept) if x.dim() == 4 and x.is_floating_point()} == {
        torch.bfloat16
    }
    close(out, expected[:, :, mask.positions], rtol=2e-2, atol=2e-2)
    expected_grads = torch.autograd.grad(expected.float().square().sum(), whole)
    grads = torch.autograd.grad(out.float().square().sum(), here)
    for ours, theirs in zip(grads, expected_grads, strict=True):
        close(ours, theirs[:, :, mask.positions], rtol=5e-2, atol=5e-2)


def the_same_bits_twice() -> None:
    mask = context_parallel_mask(cp_mesh(), mask_of(tree_case(150, (16, 16))))
    here = operands(1, (4, 2), (mask.local.q_len,) * 2, dtype=torch.float32, requires_grad=True)
    runs = []
    for _ in range(2):
        out = context_parallel_attention(*here, mask, enable_gqa=True)
        runs.append((out, *torch.autograd.grad(out.square().sum(), here)))
    assert all(torch.equal(*pair) for pair in zip(*runs, strict=True))


def per_token_tensors_there_and_back() -> None:
    mesh = cp_mesh()
    given = tree_case(75, (16, 16))
    balancer = TreeLoadBalancer.of_mask(mask_of(given), dist.get_world_size())
    wholes = [
        torch.arange(75),
        torch.randint(0, 9, (2, 75), dtype=torch.int32),
        torch.randn(2, 3, 75, 4),
        torch.rand(75, 2) < 0.5,
    ]
    dims = [0, 1, -2, 0]
    *shards, mask = context_parallel_shard(mesh, [*wholes, mask_of(given)], [*dims, 0], balancer)
    assert torch.equal(shards[0], mask.positions)
    for whole, shard, dim in zip(wholes, shards, dims, strict=True):
        assert torch.equal(shard, whole.index_select(dim, mask.positions))
    back = context_parallel_unshard(mesh, shards, dims, balancer)
    for ours, whole in zip(back, wholes, strict=True):
        assert ours.dtype == whole.dtype
        assert torch.equal(ours, whole)


def sharded_by_torch_itself() -> None:
    """torch's helper takes the load balancer, where shards are of one length."""
    world_size = dist.get_world_size()
    balancer = TreeLoadBalancer.of_mask(mask_of(tree_case(48 * world_size, (16, 16))), world_size)
    whole = torch.randn(2, 48 * world_size)
    (ours,) = context_parallel_shard(cp_mesh(), [whole], [1], balancer)
    (theirs,) = _context_parallel_shard(cp_mesh(), [whole], [1], balancer)
    assert torch.equal(ours, theirs)


def no_tokens_at_all() -> None:
    values = torch.zeros(1, 0, 0, dtype=torch.int64)
    mask = TreeMask.from_predicate("q >= k", values, values, 0, 0)
    here = operands(1, (4, 2), (0, 0), requires_grad=True)
    local_mask = context_parallel_mask(cp_mesh(), mask)
    out = context_parallel_attention(*here, local_mask, enable_gqa=True)
    grads = torch.autograd.grad(out.sum(), here)
    assert [grad.shape for grad in grads] == [x.shape for x in here]


CASES = tuple(
    given for given in list(globals().values()) if getattr(given, "__module__", None) == __name__
)


def compiled_without_a_graph_break() -> None:
    for options in ({}, {"num_chunks": 2, "reshard_after_forward": True}):
        torch._dynamo.reset()
        run = torch.compile(attend, fullgraph=True, backend="aot_eager")
        check_case(tree_case(70, (16, 16)), run=run, **options)


def compiled_for_many_lengths() -> None:
    """The number of graphs does not grow with that of lengths, whichever ranks pad."""
    world_size = dist.get_world_size()
    compiled: list[torch.fx.GraphModule] = []

    def counting(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        compiled.append(graph)
        return aot_eager(graph, inputs)

    def with_few(few: list[int], rank: int, num_tiles: int, over: int) -> TreeLoadBalancer:
        """A plan in which one rank has these few tiles; the last tile has ``over`` tokens."""
        rest = [tile for tile in range(num_tiles) if tile not in few]
        hands = [rest[start :: world_size - 1] for start in range(world_size - 1)]
        hands.insert(rank, few)
        return TreeLoadBalancer(hands, 16 * (num_tiles - 1) + over, 16)

    for dynamic, most in ((None, 3), (True, 2)):
        torch._dynamo.reset()
        compiled.clear()
        run = torch.compile(attend, fullgraph=True, backend=counting, dynamic=dynamic)
        for num_tiles in range(3 * world_size, 3 * world_size + 4):
            for over in (1, 9, 16):
                check_case(tree_case(16 * (num_tiles - 1) + over, (16, 16)), run=run)
        # Static, then dynamic in what has changed, then in all; or in all from the start.
        assert len(compiled) <= most, len(compiled)
        # One tile, one token and none are sizes that Dynamo takes for constants.
        for num_tiles in (9, 11):
            last = num_tiles - 1
            for rank in range(world_size):
                for few, over in (([2], 9), ([last], 9), ([last], 1), ([], 5)):
                    plan = with_few(few, rank, num_tiles, over)
                    check_case(tree_case(plan.seq_length, (16, 16)), plan, run=run)
        assert len(compiled) <= most + 4, len(compiled)


def compiled_by_inductor_for_ranks_that_pad() -> None:
    """Inductor compares strides as well, in the backward too."""
    compiled: list[torch.fx.GraphModule] = []

    def counting(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        compiled.append(graph)
        return compile_fx(graph, inputs)

    torch._dynamo.reset()
    run = torch.compile(attend, fullgraph=True, backend=counting, dynamic=True)
    # Which of two ranks pads differs; each has tiles in a number that is not one of heads.
    for length in (16 * 9 + 3, 16 * 10, 16 * 11 + 7):
        check_case(tree_case(length, (16, 16)), run=run)
    assert len(compiled) == 1, len(compiled)


def collectives_of_compiled_code() -> None:
    """Traced as they are; keys and values that are gathered again are not kept."""
    mask = context_parallel_mask(cp_mesh(), mask_of(tree_case(70, (16, 16))))
    here = operands(1, (4, 2), (mask.local.q_len,) * 2, requires_grad=True)
    for reshard in (False, True):
        found: list[Counter[str]] = []

        def record(graph: torch.fx.GraphModule, inputs: object, found=found) -> object:
            names = [str(node.target).split(".")[-2:][0] for node in graph.graph.nodes]
            found.append(Counter(names))
            return make_boxed_func(graph.forward)

        backend = aot_autograd(
            fw_compiler=record,
            bw_compiler=record,
            partition_fn=min_cut_rematerialization_partition,
        )
        torch._dynamo.reset()

        @torch.compile(backend=backend, fullgraph=True)
        def attend(*inputs: torch.Tensor, reshard=reshard) -> torch.Tensor:
            return context_parallel_attention(
                *inputs, mask, enable_gqa=True, reshard_after_forward=reshard
            )

        attend(*here).sum().backward()
        forward, backward = found
        gather, scatter = "all_gather_into_tensor", "reduce_scatter_tensor"
        assert (forward[gather], forward[scatter]) == (1, 0)
        assert (backward[gather], backward[scatter]) == (int(reshard), 1)


COMPILED_CASES = (compiled_without_a_graph_break, collectives_of_compiled_code)
RECOMPILED_CASES = (compiled_for_many_lengths, compiled_by_inductor_for_ranks_that_pad)
