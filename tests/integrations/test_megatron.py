"""Tree attention inside a real, tiny Megatron GPTModel on a CPU."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

with warnings.catch_warnings():
    # Without Transformer Engine and Apex, Megatron warns of its own fall-backs.
    warnings.simplefilter("ignore")
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

from tree_attn_op import PrefixTree
from tree_attn_op.integrations import megatron as tree_megatron
from tree_attn_op.integrations.windows import PositionedMask

from .trajectories import VOCABULARY, multi_turn, next_token_loss

WINDOW = (6, 0)


@pytest.fixture(scope="module", autouse=True)
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Megatron's groups of one process, and its calls of CUDA answered by the CPU."""
    store = tmp_path_factory.mktemp("megatron") / "store"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
        patch.setattr(tensor_parallel.random, "_get_all_rng_states", lambda: ())
        patch.setattr(tensor_parallel.random, "_set_all_rng_states", lambda *states: None)
        patch.setattr(tensor_parallel.random, "_fork_rng", contextlib.nullcontext)
        tracker = tensor_parallel.random.get_cuda_rng_tracker()
        patch.setattr(tracker, "fork", contextlib.nullcontext, raising=False)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        yield
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


@pytest.fixture
def sequences() -> list[Tensor]:
    return multi_turn(4)


@pytest.fixture
def tree(sequences: list[Tensor]) -> PrefixTree:
    return PrefixTree.from_sequences(sequences)


def configuration(**changes: Any) -> TransformerConfig:
    return TransformerConfig(
        **{
            "num_layers": 2,
            "hidden_size": 32,
            "num_attention_heads": 4,
            "num_query_groups": 2,
            "attention_dropout": 0.0,
            "hidden_dropout": 0.0,
            "use_cpu_initialization": True,
            "attention_softmax_in_fp32": True,
            **changes,
        }
    )


def gpt(spec: Any = None, *, position_embedding_type: Any = "rope", **changes: Any) -> GPTModel:
    torch.manual_seed(0)
    model = GPTModel(
        config=configuration(**changes),
        transformer_layer_spec=spec
        or tree_megatron.with_tree_attention(get_gpt_layer_local_spec()),
        vocab_size=VOCABULARY,
        max_sequence_length=256,
        position_embedding_type=position_embedding_type,
        parallel_output=False,
    )
    return model.train()


def unpacked(
    model: GPTModel, sequences: list[Tensor], window: tuple[int, int] | None = None
) -> list[Tensor]:
    """Each trajectory alone, through Megatron's own attention."""
    logits = []
    for tokens in sequences:
        positions = torch.arange(len(tokens))
        distance = positions[:, None] - positions
        hidden = distance < 0 if window is None else (distance < 0) | (distance > window[0])
        logits.append(model(tokens[None], positions[None], hidden[None, None])[0])
    return logits


def compare(
    model: GPTModel,
    reference: GPTModel,
    tree: PrefixTree,
    sequences: list[Tensor],
    window: tuple[int, int] | None = None,
) -> None:
    """The tree through one model against its trajectories through another with its weights."""
    reference.load_state_dict(model.state_dict())
    results = []
    for one, logits in (
        (model, tree.unpack(tree_megatron.run_tree(model, tree)[0], dim=0)),
        (reference, unpacked(reference, sequences, window)),
    ):
        one.zero_grad()
        loss = next_token_loss(list(logits), sequences)
        loss.backward()
        results.append((logits, {n: p.grad for n, p in one.named_parameters()}))
    (got, got_gradients), (want, want_gradients) = results
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    assert got_gradients.keys() == want_gradients.keys()
    for name, gradient in want_gradients.items():
        torch.testing.assert_close(
            got_gradients[name], gradient, atol=1e-5, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
        )


RECOMPUTATION = {
    "none": {},
    "core attention": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "uniform": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
    "block": {
        "recompute_granularity": "full",
        "recompute_method": "block",
        "recompute_num_layers": 1,
    },
}


@pytest.mark.parametrize("recomputation", RECOMPUTATION)
@pytest.mark.parametrize("softmax_type", ["vanilla", "off-by-one", "learnable"])
def test_logits_and_gradients_equal_the_unpacked_run(
    softmax_type: Any, recomputation: str, tree: PrefixTree, sequences: list[Tensor]
) -> None:
    options = {"softmax_type": softmax_type, **RECOMPUTATION[recomputation]}
    if softmax_type == "learnable":
        options["softmax_scale"] = 0.2
    compare(gpt(**options), gpt(get_gpt_layer_local_spec(), **options), tree, sequences)


def test_windows_are_on_depths(tree: PrefixTree, sequences: list[Tensor]) -> None:
    assert int(tree.position_ids.max()) > 2 * WINDOW[0]
    # The reference is given its window as a mask: Megatron makes its own on a GPU only.
    reference = gpt(get_gpt_layer_local_spec())
    compare(gpt(window_size=WINDOW), reference, tree, sequences, window=WINDOW)


def test_windows_of_some_layers() -> None:
    model = gpt(window_size=WINDOW, window_attn_skip_freq=2)
    cores = [layer.self_attention.core_attention for layer in model.decoder.layers]
    assert [core.window for core in cores] == [7, None]
    assert tree_megatron._window(configuration(window_size=(-1, 0)), 1) is None
    with pytest.raises(ValueError, match=r"\(tokens before, 0\), got \(6, 6\)"):
        gpt(window_size=(6, 6))


def test_learned_positions(tree: PrefixTree, sequences: list[Tensor]) -> None:
    models = [
        gpt(spec, position_embedding_type="learned_absolute")
        for spec in (None, get_gpt_layer_local_spec())
    ]
    compare(*models, tree, sequences)


def test_rotary_positions_end_with_the_block(tree: PrefixTree) -> None:
    model = gpt(get_gpt_layer_local_spec())
    table = model.rotary_pos_emb(tree.num_tokens)
    with tree_megatron.rotary_positions(model, tree.position_ids[None]):
        looked_up = model.rotary_pos_emb(tree.num_tokens)
    assert torch.equal(looked_up, table[tree.position_ids])
    assert torch.equal(model.rotary_pos_emb(tree.num_tokens), table)


def test_rotary_positions_of_a_batch(tree: PrefixTree) -> None:
    """Two rows of other depths, under a mask that both share."""
    model, length = gpt(), tree.num_tokens
    positions = torch.stack([tree.position_ids, torch.arange(length)])
    tokens = tree.input_ids.expand(2, -1)

    def logits(rows: slice) -> Tensor:
        with tree_megatron.rotary_positions(model, positions[rows]):
            bias = {"attention_bias": tree.mask}
            return model(tokens[rows], positions[rows], None, extra_block_kwargs=bias)

    both = logits(slice(0, 2))
    torch.testing.assert_close(both[:1], logits(slice(0, 1)))
    torch.testing.assert_close(both[1:], logits(slice(1, 2)))
    assert (both[0] - both[1]).abs().max() > 1e-4


@pytest.mark.parametrize("given", ["TreeMask", "BlockMask", "PositionedMask"])
@pytest.mark.parametrize("argument", ["attention_bias", "attention_mask"])
def test_ways_to_give_the_mask(argument: str, given: str, tree: PrefixTree) -> None:
    model = gpt()
    expected = tree_megatron.run_tree(model, tree)
    positions = tree.position_ids[None]
    mask: Any = {
        "TreeMask": tree.mask,
        "BlockMask": tree.mask.block_mask,
        "PositionedMask": PositionedMask(tree.mask, positions),
    }[given]
    as_bias = argument == "attention_bias"
    with tree_megatron.rotary_positions(model, positions):
        logits = model(
            tree.input_ids[None],
            positions,
            None if as_bias else mask,
            extra_block_kwargs={"attention_bias": mask} if as_bias else None,
        )
    torch.testing.assert_close(logits, expected)


@pytest.mark.parametrize("recomputation", ["core attention", "uniform"])
def test_a_mask_that_recomputation_would_save(recomputation: str, tree: PrefixTree) -> None:
    model = gpt(**RECOMPUTATION[recomputation])
    with pytest.raises(ValueError, match=r"which must be a tensor then: pass .* attention_bias"):
        model(tree.input_ids[None], tree.position_ids[None], tree.mask)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_dropout": 0.1}, r"no dropout, got attention_dropout=0\.1"),
        ({"qk_clip": True}, "does not compute maximal logits"),
        ({"log_max_attention_logit": True}, "does not compute maximal logits"),
        ({"softmax_type": "softplus"}, "vanilla, off-by-one or learnable, got 'softplus'"),
        ({"fp8_dot_product_attention": True}, "has no fp8"),
        ({"context_parallel_size": 2}, "context_parallel_size=2"),
        ({"multi_latent_attention": True}, "does not support multi_latent_attention"),
        ({"mtp_num_layers": 1}, "mtp_num_layers: .*wrong at forks"),
    ],
)
def test_configurations_that_are_refused(changes: dict[str, Any], message: str) -> None:
    config = configuration()
    for name, value in changes.items():
        # Past the configuration's own checks, which refuse some without a GPU.
        setattr(config, name, value)
    with pytest.raises(ValueError, match=message):
        core(config)


def core(config: TransformerConfig | None = None, **changes: Any) -> Any:
    arguments = {"attn_mask_type": AttnMaskType.causal, "attention_type": "self", **changes}
    return tree_megatron.TreeCoreAttention(config or configuration(), 1, **arguments)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attn_mask_type": AttnMaskType.padding}, "causal or arbitrary.*got padding"),
        ({"attention_type": "cross"}, "attention_type='cross'"),
        ({"attention_dropout": 0.5}, r"attention_dropout=0\.5"),
        ({"backend": "fused"}, "backend must be one of tree, flex, got 'fused'"),
    ],
)
def test_arguments_that_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        core(**changes)


def test_calls_that_are_refused(tree: PrefixTree) -> None:
    attention = core()
    one = torch.randn(tree.num_tokens, 1, 4, 8)
    mask = tree.mask
    with pytest.raises(ValueError, match=r"no tree mask reached attention: .*extra_block_kwargs"):
        attention(one, one, one, None)
    with pytest.raises(ValueError, match="got both: a Tensor and a TreeMask"):
        attention(one, one, one, torch.ones(1), attention_bias=mask)
    with pytest.raises(TypeError, match=r"attention_mask must be a TreeMask, .*got Tensor"):
        attention(one, one, one, torch.ones(1))
    with pytest.raises(ValueError, match="takes no packed_seq_params"):
        attention(one, one, one, None, attention_bias=mask, packed_seq_params=object())
    with pytest.raises(ValueError, match="got no_mask"):
        attention(one, one, one, None, AttnMaskType.no_mask, attention_bias=mask)
    with pytest.raises(ValueError, match=r"sliding window of 7 tokens.*PositionedMask"):
        core(configuration(window_size=WINDOW))(one, one, one, mask)


def test_the_result_is_as_megatron_expects_it(tree: PrefixTree) -> None:
    query = torch.randn(tree.num_tokens, 2, 4, 8)
    key = torch.randn(tree.num_tokens, 2, 2, 8)
    out = core()(query, key, key, None, attention_bias=tree.mask)
    assert out.shape == (tree.num_tokens, 2, 32)
    assert out.is_contiguous()


def test_a_spec_is_copied_and_its_layers_found() -> None:
    layer = get_gpt_layer_local_spec()
    before = layer.submodules.self_attention.submodules.core_attention
    block = TransformerBlockSubmodules(layer_specs=[layer, layer])
    changed = tree_megatron.with_tree_attention(block, backend="flex")
    assert layer.submodules.self_attention.submodules.core_attention is before
    for one in changed.layer_specs:
        spec = one.submodules.self_attention.submodules.core_attention
        assert spec.module is tree_megatron.TreeCoreAttention
        assert spec.params == {"backend": "flex"}
    with pytest.raises(ValueError, match="no self_attention with a core_attention"):
        tree_megatron.with_tree_attention(layer.submodules.mlp)


def test_the_backend_of_a_spec(tree: PrefixTree) -> None:
    spec = tree_megatron.with_tree_attention(get_gpt_layer_local_spec(), backend="flex")
    by_flex, by_tree = gpt(spec).eval(), gpt().eval()
    with torch.no_grad():
        torch.testing.assert_close(
            tree_megatron.run_tree(by_flex, tree),
            tree_megatron.run_tree(by_tree, tree),
            atol=1e-5,
            rtol=1e-5,
        )


@pytest.mark.parametrize("softmax_type", ["vanilla", "off-by-one", "learnable"])
def test_checkpoints_are_those_of_megatrons_own_attention(softmax_type: Any) -> None:
    states = [
        gpt(spec, softmax_type=softmax_type).sharded_state_dict()
        for spec in (None, get_gpt_layer_local_spec())
    ]
    ours, theirs = states
    assert ours.keys() == theirs.keys()
    offsets = [name for name in ours if name.endswith("softmax_offset")]
    assert len(offsets) == (2 if softmax_type == "learnable" else 0)
    for name in offsets:
        assert ours[name].global_shape == theirs[name].global_shape
        assert ours[name].axis_fragmentations == theirs[name].axis_fragmentations
