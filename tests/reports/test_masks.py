"""What users of flex_attention have reported of masks, lengths and rows."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

import passes
from tests.attention_cases import operands, tree_case
from tests.passes.helpers import PassThenEager, Tree, attention, block_mask, compiled, dense, qkv
from tests.passes.helpers import form_1 as parents
from tests.passes.helpers import form_8 as subtrees
from tests.passes.test_training import AotEager, leaves
from tree_attn_op import TreeMask, create_block_mask, tree_attention
from tree_attn_op.integrations import dispatch
from tree_attn_op.integrations.windows import windowed
from tree_attn_op.kernels import configs
from tree_attn_op.reference import reference_attention

Tensors = tuple[Tensor, ...]


def expect_gradients_of_the_oracle(
    fn: Callable[..., Tensor], tensors: Tensors, allowed: Tensor, aot: bool = False
) -> None:
    """``fn``, compiled with the pass, and its gradients equal the float64 oracle's.

    ``aot`` has AOTAutograd split forward and backward, which takes most of a second.
    """
    backend = AotEager() if aot else PassThenEager()
    inputs = leaves(tensors, torch.float32)
    out = compiled(fn, backend)(*inputs)
    assert len(backend.report.rewritten) == len(backend.report) > 0, str(backend.report)
    exact = leaves(tensors, torch.float64)
    want, _ = reference_attention(*exact, allowed)
    torch.testing.assert_close(out.double(), want, atol=5e-6, rtol=5e-5)
    out.cos().sum().backward()
    want.cos().sum().backward()
    for got, expected in zip(inputs, exact, strict=True):
        assert torch.isfinite(got.grad).all()
        torch.testing.assert_close(got.grad.double(), expected.grad, atol=1e-5, rtol=5e-5)


@pytest.mark.usefixtures("traceable_training")
def test_batch_and_length_that_change_each_step_recompile_once() -> None:
    """Masks over new ids, of another batch size and length in each step of a training run."""
    backend = PassThenEager()
    model = compiled(lambda *given: attention(*given).cos().sum(), backend)
    for step, (batch, length) in enumerate(((2, 192), (3, 260), (4, 137), (2, 315))):
        tensors = qkv(batch, length)
        mask = block_mask(parents(Tree(batch, length, seed=step)), tensors)
        inputs, exact = leaves(tensors, torch.float32), leaves(tensors, torch.float64)
        model(*inputs, mask).backward()
        want, _ = reference_attention(*exact, dense(mask, batch, 4))
        want.cos().sum().backward()
        for got, expected in zip(inputs, exact, strict=True):
            torch.testing.assert_close(got.grad.double(), expected.grad, atol=5e-6, rtol=5e-5)
        assert len(backend.graphs) == min(step + 1, 2)
    assert not backend.report.kept, str(backend.report)


def test_tiles_of_every_head_dim_fit_every_device() -> None:
    """Also those with less shared memory than any that ships: then the tiles are the smallest."""
    tiny = configs.Device("generic", 48 * 1024)
    devices = {*configs.CUDA_DEVICES.values(), configs.HIP, configs.GENERIC, tiny}
    kernels: tuple[configs.Kernel, ...] = ("forward", "dq", "dkdv")
    tried = 0
    for device in devices:
        for dims in ((64, 64), (128, 128), (192, 128), (256, 256), (128, 256), (80, 256)):
            for itemsize in (2, 4):
                for kernel in kernels:
                    choice = configs.choose(kernel, device, itemsize, *dims, 4, True, 128, 128)
                    need = configs.shared_memory_estimate(kernel, choice, itemsize, *dims)
                    smallest = max(choice.block_m // choice.pack, choice.block_n) == 16
                    assert need <= device.shared_memory or (smallest and choice.num_stages == 1), (
                        device,
                        dims,
                        itemsize,
                        choice,
                    )
                    tried += 1
    assert tried == len(devices) * 36


@pytest.mark.parametrize("length", [96 * 1024, 128 * 1024])
def test_masks_of_long_sequences_take_linear_memory(length: int) -> None:
    """Nothing is held that has a byte a pair, or one for every few hundred of them."""
    end = torch.arange(0, length, 512).add(512).repeat_interleave(512)

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (q < end[k])

    with torch.profiler.profile(profile_memory=True) as profile:
        mask = create_block_mask(mask_mod, 1, 1, length, length, device="cpu")
    largest = max(event.cpu_memory_usage for event in profile.events())
    assert 0 < largest < length * length // 256
    blocks = length // 128
    assert mask.kv_indices.shape == (1, 1, blocks, blocks)
    # A row of blocks sees at most the four of its own subtree.
    listed = mask.kv_num_blocks + mask.full_kv_num_blocks
    assert listed.amax() == 4
    assert listed.amin() == 1


def test_another_length_does_not_recompile_the_making_of_a_mask() -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def lists(end: Tensor) -> Tensor:
        length = end.shape[2]
        empty = end.new_empty(1, 0, length)
        made = TreeMask.from_predicate("q >= k & q < k0", empty, end, length, length)
        return made.lists.kv_indices, made.lists.full_kv_num_blocks

    made = torch.compile(lists, backend=counter, fullgraph=True)
    for length in (1025, 700, 4096, 96 * 1024, 5000):
        end = torch.full((1, 1, length), length, dtype=torch.int32)
        for got, want in zip(made(end), lists(end), strict=True):
            assert torch.equal(got, want)
    assert counter.frame_count == 2


@pytest.mark.usefixtures("traceable_training")
@pytest.mark.parametrize("length", [1, 2, 137, 1025])
def test_odd_lengths_train(length: int) -> None:
    """One over a block, less than a block, a single token: finite and equal to the oracle."""
    tensors = qkv(1, length, heads=2, kv_heads=1, dim=8)
    mask = block_mask(subtrees(Tree(1, length)), tensors)
    expect_gradients_of_the_oracle(
        lambda *given: attention(*given, mask), tensors, dense(mask, 1, 2)
    )


LENGTHS = {
    "longer": (2048, (2000, 2000)),
    "longer within the last block": (2010, (2000, 2000)),
    "shorter": (1999, (2000, 2000)),
    "queries only": (2000, (1990, 2000)),
    "keys only": (2000, (2000, 1990)),
}


@pytest.mark.parametrize(
    "way", ["call", "op", "integrations", "flex integration", "compiled flex"]
)
@pytest.mark.parametrize("case", LENGTHS)
def test_a_mask_of_another_length_is_refused_with_both_lengths(case: str, way: str) -> None:
    """Never cropped, also where the number of blocks is the same."""
    made_for, given = LENGTHS[case]
    made = tree_case(made_for, (128, 128))
    mask = TreeMask.from_predicate(made.predicate, made.q_vals, made.k_vals, made_for, made_for)
    inputs = operands(1, (1, 1), given, (8, 8), dtype=torch.float32)
    calls: dict[str, Callable[[], Any]] = {
        "call": lambda: tree_attention(*inputs, mask),
        "op": lambda: made.call(*inputs, 0.3),
        "integrations": lambda: dispatch.attention(*inputs, mask, backend="tree"),
        "flex integration": lambda: dispatch.attention(*inputs, mask, backend="flex"),
        "compiled flex": lambda: compiled(flex_attention, PassThenEager())(
            *inputs, block_mask=mask.block_mask
        ),
    }
    if way == "compiled flex":
        # flex refuses it itself, with words that differ between versions of torch.
        with pytest.raises(Exception, match=r"block_mask was created|block mask"):
            calls[way]()
        return
    different = next(one for one in given if one != made_for)
    with pytest.raises(Exception, match=rf"(?s){made_for}.*{different}|{different}.*{made_for}"):
        calls[way]()


@pytest.mark.usefixtures("traceable_training")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_padding_rows_give_zeros_and_no_nan(dtype: torch.dtype) -> None:
    """Pad rows that see nothing and pad keys that nobody sees, through out, lse and a sink."""
    length = 192
    tensors = qkv(2, length, dtype=dtype)
    pad = torch.arange(length) >= torch.tensor([[150], [70]])
    node = Tree(2, length).node

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (node[b, q] == node[b, k]) & ~pad[b, q] & ~pad[b, k]

    mask = block_mask(mask_mod, tensors)

    def with_sink(query: Tensor, key: Tensor, value: Tensor, sink: Tensor) -> Any:
        out, aux = attention(query, key, value, mask, return_aux=AuxRequest(lse=True))
        return out, aux.lse, dispatch.add_sink(out, aux.lse, sink)

    sink = torch.zeros(4, requires_grad=True)
    backend = AotEager()
    inputs = leaves(tensors, dtype)
    out, lse, with_share = compiled(with_sink, backend)(*inputs, sink)
    assert len(backend.report.rewritten) == 1, str(backend.report)
    hidden = pad[:, None].expand(2, 4, length)
    assert (out[hidden] == 0).all()
    assert torch.isneginf(lse[hidden]).all()
    assert torch.isfinite(lse[~hidden]).all()
    seen = torch.where(hidden, 0.0, lse)
    (out.float().sin().sum() + seen.sum() + with_share.float().cos().sum()).backward()
    for tensor in (*inputs, sink):
        assert torch.isfinite(tensor.grad).all()
    assert (inputs[0].grad[hidden] == 0).all()
    for tensor in inputs[1:]:
        assert (tensor.grad[hidden[:, :2]] == 0).all()


def test_a_window_leaves_rows_that_see_nothing_alone() -> None:
    hidden = torch.zeros(1, 1, 90, dtype=torch.int32)
    hidden[..., 40:50] = 1
    mask = TreeMask.from_predicate("q >= k & q0 == 0", hidden, hidden[:, :0], 90, 90)
    inputs = operands(1, (2, 1), (90, 90), requires_grad=True)
    cut = windowed(mask, torch.arange(90), 5)
    out, aux = tree_attention(*inputs, cut, enable_gqa=True, return_aux=AuxRequest(lse=True))
    assert (out[:, :, 40:50] == 0).all()
    assert torch.isneginf(aux.lse[:, :, 40:50]).all()
    assert all(torch.isfinite(one).all() for one in torch.autograd.grad(out.sum(), inputs))


REGIONS = {
    "documents": lambda q, k, ids: (q >= k) & (ids[q] == ids[k]),
    "documents with a window": lambda q, k, ids: (q >= k) & (ids[q] == ids[k]) & (q - k < 9),
    "a shared prefix": lambda q, k, ids: (q >= k) & ((ids[k] == 0) | (ids[q] == ids[k])),
    "two of three answers": lambda q, k, ids: (
        ~((q >= 200) & (k >= 120) & (k < 200)) & (q >= k) & (ids[k] >= 0)
    ),
    "only some keys": lambda q, k, ids: (k < 30) | ((ids[k] == 4) & (q >= k)),
}


SPLIT = ("documents with a window", "two of three answers")
"""Those whose forward and backward AOTAutograd compiles apart."""


@pytest.mark.usefixtures("traceable_training")
@pytest.mark.parametrize("regions", REGIONS)
def test_gradients_of_sparse_masks_of_several_regions(regions: str) -> None:
    length = 300
    tensors = qkv(2, length)
    ids = torch.arange(length) // 37
    formula = REGIONS[regions]
    mask = block_mask(lambda b, h, q, k: formula(q, k, ids), tensors, BLOCK_SIZE=32)
    expect_gradients_of_the_oracle(
        lambda *given: attention(*given, mask), tensors, dense(mask, 2, 4), aot=regions in SPLIT
    )


@pytest.mark.usefixtures("traceable_training")
@pytest.mark.parametrize("dims", [(72, 72), (80, 80), (96, 96), (31, 31), (192, 128), (64, 128)])
def test_head_dims_train(dims: tuple[int, int]) -> None:
    query, key, value = qkv(1, 150, heads=2, kv_heads=1, dim=dims[0])
    value = torch.randn(1, 150, 1, dims[1]).transpose(1, 2)
    mask = block_mask(subtrees(Tree(1, 150)), (query, key, value))
    expect_gradients_of_the_oracle(
        lambda *given: attention(*given, mask), (query, key, value), dense(mask, 1, 2)
    )


@pytest.mark.parametrize(
    "score_mod",
    [
        lambda score, b, h, q, k: score * 1.0,
        lambda score, b, h, q, k: score + 0.0,
        lambda score, b, h, q, k: torch.where(q >= k, score, score),
        lambda score, b, h, q, k: torch.minimum(score, score),
    ],
    ids=["times one", "plus zero", "where", "minimum"],
)
def test_a_score_mod_that_is_not_plainly_the_identity_is_kept(score_mod: Any) -> None:
    """Equal for most scores, but -0.0, NaN or the gradient may tell: not taken for granted."""
    tensors = qkv()
    mask = block_mask(parents(Tree(2, 192)), tensors)
    (call,) = passes.explain(lambda *t: attention(*t, mask, score_mod=score_mod), *tensors)
    assert not call.rewritten
    assert call.reason == "its score_mod changes the scores"
    assert "its score_mod changes the scores" in str(passes.Report([call]))


def test_queries_of_one_rank_with_true_indices_equal_the_whole() -> None:
    """Context parallelism by hand: a share of the queries, all keys, positions as values."""
    length, ranks = 230, 3
    tree = Tree(1, length)
    position = torch.arange(length, dtype=torch.int32)
    inputs = operands(1, (4, 2), (length, length), requires_grad=True)
    query, key, value = inputs
    end = tree.end.int().view(1, 1, length)
    whole = TreeMask.from_predicate("q >= k & q < k0", end[:, :0], end, length, length)
    want = tree_attention(*inputs, whole, enable_gqa=True)
    parts = torch.empty_like(want)
    for rank in range(ranks):
        mine = position[rank::ranks]
        share = TreeMask.from_predicate(
            "q0 >= k0 & q0 < k1",
            mine.view(1, 1, -1),
            torch.cat([position.view(1, 1, -1), end], 1),
            len(mine),
            length,
        )
        parts[:, :, rank::ranks] = tree_attention(
            query[:, :, rank::ranks], key, value, share, enable_gqa=True
        )
    torch.testing.assert_close(parts, want)
    weight = torch.randn_like(want)
    both = (torch.autograd.grad(out, inputs, weight) for out in (parts, want))
    for got, expected in zip(*both, strict=True):
        torch.testing.assert_close(got, expected)


def test_more_keys_than_queries_through_the_pass() -> None:
    """The queries of one rank against all keys, as a flex mask over true positions."""
    tensors = qkv(1, 70, kv_length=230)
    tree = Tree(1, 230)
    position, end = torch.arange(230)[2::3][:70], tree.end[0]

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (position[q] >= k) & (position[q] < end[k])

    mask: BlockMask = block_mask(mask_mod, tensors)
    backend = PassThenEager()
    out = compiled(attention, backend)(*tensors, mask)
    assert len(backend.report.rewritten) == 1, str(backend.report)
    want, _ = reference_attention(*(t.double() for t in tensors), dense(mask, 1, 4))
    torch.testing.assert_close(out.double(), want, atol=5e-6, rtol=5e-5)


def test_a_mask_that_goes_to_flexs_builder_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """A q-by-k table has no linear form: flex builds it, with a warning and not in silence."""
    table = torch.rand(64, 64) < 0.5
    with caplog.at_level(logging.WARNING):
        create_block_mask(lambda b, h, q, k: table[q, k], 1, 1, 64, 64, device="cpu")
    assert "built by flex_attention's own builder" in caplog.text
