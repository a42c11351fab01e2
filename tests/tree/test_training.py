"""Log-probabilities, entropy and losses from one run over the pack against separate runs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

from tree_attn_op import PrefixTree, tree_attention
from tree_attn_op.tree import training

VOCABULARY = 11
TOKENS = st.integers(0, 2)
SEQUENCES = st.lists(st.lists(TOKENS, max_size=7), max_size=7)

FORKS = [
    [1, 2, 3, 4, 5, 6],
    [1, 2, 3, 4, 7],
    [1, 2, 3, 8, 9, 10, 0],
    [1, 2, 3],
    [1, 2, 3, 4],
    [1],
    [5, 1],
    [5, 2],
    [6],
    [],
    [1, 2, 3, 4, 7],
    [1, 9, 9, 9],
]
"""Several forks, a prefix of another, a single token, nothing, and one trajectory twice."""


def random_logits(tree, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (tree.num_tokens, VOCABULARY)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def unpacked_logprobs(logits, tokens):
    """What a separate run over one trajectory gives: [length], 0 first."""
    predicted = logits[:-1].log_softmax(-1).gather(1, tokens[1:, None]).squeeze(1)
    return torch.cat([logits.new_zeros(min(len(tokens), 1)), predicted])


def unpacked_entropy(logits, tokens):
    logp = logits[:-1].log_softmax(-1)
    return torch.cat([logits.new_zeros(min(len(tokens), 1)), -(logp.exp() * logp).sum(-1)])


@given(SEQUENCES)
def test_loss_terms_are_the_predictions_of_all_trajectories(sequences):
    tree = PrefixTree.from_sequences(sequences)
    terms = tree.loss_terms
    assert len(terms) == tree.num_tokens - int((tree.parents == -1).sum())
    assert torch.equal(terms.source, tree.parents[terms.token])
    assert torch.equal(terms.label, tree.input_ids[terms.token])
    counted = []
    for source, label, times in zip(terms.source, terms.label, terms.multiplicity, strict=True):
        counted += [(int(source), int(label))] * int(times)
    expected = []
    for index, sequence in enumerate(sequences):
        positions = tree.positions(index).tolist()
        expected += list(zip(positions[:-1], sequence[1:], strict=True))
    assert sorted(counted) == sorted(expected)
    order = list(zip(terms.source.tolist(), terms.token.tolist(), strict=True))
    assert order == sorted(order)


@pytest.mark.parametrize("chunk", [1, 3 * VOCABULARY, 1 << 24])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(
    ("gather", "expected"),
    [("gather_logprobs", unpacked_logprobs), ("gather_entropy", unpacked_entropy)],
)
def test_values_and_gradients_equal_separate_runs(
    gather, expected, temperature, chunk, monkeypatch
):
    monkeypatch.setattr(training, "_CHUNK_ELEMENTS", chunk)
    for sequences in (FORKS, [], [[]], [[3]], [[3], [3, 4]], FORKS[:1]):
        tree = PrefixTree.from_sequences(sequences)
        logits = random_logits(tree)
        values = getattr(tree, gather)(logits[None], temperature=temperature)
        separate = [
            expected(part / temperature, torch.tensor(tokens, dtype=torch.int64))
            for part, tokens in zip(tree.unpack(logits, dim=0), sequences, strict=True)
        ]
        assert [v.shape for v in values] == [v.shape for v in separate]
        if not any(map(len, sequences)):
            continue
        torch.testing.assert_close(values, separate, atol=1e-12, rtol=1e-12)
        weights = [torch.randn_like(v) for v in values]
        grads = [
            torch.autograd.grad(
                sum((v * w).sum() for v, w in zip(of, weights, strict=True)), logits
            )[0]
            for of in (values, separate)
        ]
        torch.testing.assert_close(*grads, atol=1e-12, rtol=1e-12)


def test_gradcheck():
    tree = PrefixTree.from_sequences(FORKS)
    logits = random_logits(tree)
    assert torch.autograd.gradcheck(tree.token_logprobs, logits)
    assert torch.autograd.gradcheck(tree.token_entropy, logits)


def test_equal_siblings_that_were_not_merged_both_count():
    tree = PrefixTree.from_nodes([(-1, [1]), (0, [2]), (0, [2])])
    logits = random_logits(tree)
    logprobs = tree.token_logprobs(logits)
    expected = logits.log_softmax(-1)[0, 2]
    torch.testing.assert_close(logprobs, torch.stack([expected * 0, expected, expected]))
    (grad,) = torch.autograd.grad(logprobs.sum(), logits, retain_graph=True)
    (wanted,) = torch.autograd.grad(2 * expected, logits)
    torch.testing.assert_close(grad, wanted)


def test_masked_tokens_have_no_entropy_and_no_nan():
    tree = PrefixTree.from_sequences([[1, 2, 3], [1, 2, 4]])
    logits = random_logits(tree).detach()
    logits[:, 5:] = -torch.inf
    # Nothing is predicted from leaves: their logits must not count, whatever they are.
    logits[2:] = torch.nan
    logits.requires_grad_()
    for function in (tree.token_logprobs, tree.token_entropy):
        values = function(logits)
        assert values.isfinite().all()
        (grad,) = torch.autograd.grad(values.sum(), logits)
        assert grad.isfinite().all()
        assert not grad[2:].any()
        assert not grad[:, 5:].any()
    narrow = tree.token_entropy(logits[:, :5])
    torch.testing.assert_close(tree.token_entropy(logits), narrow)


def test_half_precision_logits_are_reduced_in_float32():
    tree = PrefixTree.from_sequences(FORKS)
    logits = random_logits(tree, torch.bfloat16)
    exact = logits.detach().double().requires_grad_()
    for name in ("token_logprobs", "token_entropy"):
        values, expected = getattr(tree, name)(logits), getattr(tree, name)(exact)
        assert values.dtype == torch.float32
        torch.testing.assert_close(values.double(), expected, atol=1e-6, rtol=1e-6)
        (grad,) = torch.autograd.grad(values.sum(), logits)
        (wanted,) = torch.autograd.grad(expected.sum(), exact)
        assert grad.dtype == torch.bfloat16
        # One rounding of the right value: what autograd of a float32 copy gives as well.
        torch.testing.assert_close(grad, wanted.bfloat16(), atol=1e-6, rtol=2**-7)


def test_holds_no_copy_of_the_logits_for_the_backward():
    tree = PrefixTree.from_sequences(FORKS)
    logits = random_logits(tree, torch.float32)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: saved.append((x.data_ptr(), x.numel())) or x, lambda x: x
    ):
        values = tree.gather_logprobs(logits)
    assert len(values) == len(FORKS)
    large = [pointer for pointer, numel in saved if numel > tree.num_trajectory_tokens]
    assert large == [logits.data_ptr()]


@pytest.mark.parametrize(
    ("logits", "options", "error", "message"),
    [
        (torch.ones(3, 4), {}, ValueError, r"\[4, V\] or \[1, 4, V\] for this tree, got \[3, 4\]"),
        (torch.ones(2, 4, 9), {}, ValueError, r"got \[2, 4, 9\]"),
        (torch.ones(4), {}, ValueError, r"got \[4\]"),
        (torch.ones(4, 9, dtype=torch.int64), {}, TypeError, "floating-point dtype, got .*int64"),
        (torch.ones(4, 3), {}, ValueError, "token ids from 2 to 4, and logits only 3 columns"),
        (torch.ones(4, 9), {"temperature": 0.0}, ValueError, "temperature must be positive"),
        (torch.ones(4, 9), {"temperature": torch.nan}, ValueError, "temperature must be"),
        (torch.ones(4, 9, device="meta"), {}, ValueError, "tree is on cpu and logits on meta"),
    ],
)
def test_refuses_logits_that_do_not_fit(logits, options, error, message):
    tree = PrefixTree.from_sequences([[1, 2, 3], [1, 2, 4]])
    for function in (tree.token_logprobs, tree.gather_logprobs, tree.gather_entropy):
        with pytest.raises(error, match=message):
            function(logits, **options)


def llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.5,
        use_cache=False,
        attn_implementation="eager",
    )
    return LlamaForCausalLM(config).eval()


def run_packed(model, tree):
    def attention(module, query, key, value, attention_mask, scaling=None, **options):
        out = tree_attention(query, key, value, tree.mask, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2), None

    AttentionInterface.register("tree_attn_op_test_training", attention)
    model.set_attn_implementation("tree_attn_op_test_training")
    ids, positions = tree.input_ids[None], tree.position_ids[None]
    return model(input_ids=ids, position_ids=positions).logits


def run_separately(model, sequences):
    model.set_attn_implementation("eager")
    return [
        model(input_ids=tokens[None]).logits[0] if len(tokens) else torch.zeros(0, VOCABULARY)
        for tokens in sequences
    ]


@pytest.mark.parametrize("share_lengths", [None, [3] * len(FORKS)], ids=["all", "prompts"])
def test_a_llama_on_the_tree_equals_the_llama_on_each_trajectory(share_lengths):
    model = llama()
    sequences = [torch.tensor(tokens, dtype=torch.int64) for tokens in FORKS]
    tree = PrefixTree.from_sequences(sequences, share_lengths=share_lengths)
    assert tree.num_tokens < tree.num_trajectory_tokens
    packed = run_packed(model, tree)
    separate = run_separately(model, sequences)
    logprobs = tree.gather_logprobs(packed)
    expected = [unpacked_logprobs(*pair) for pair in zip(separate, sequences, strict=True)]
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=0)
    entropy = [unpacked_entropy(*pair) for pair in zip(separate, sequences, strict=True)]
    torch.testing.assert_close(tree.gather_entropy(packed), entropy, atol=1e-5, rtol=0)

    # A clipped policy loss, which is not linear in the log-probabilities, and the weighted sum.
    advantages = torch.randn(len(FORKS)).tolist()
    old = [value.detach() + 0.3 * torch.randn_like(value) for value in expected]
    masks = [torch.arange(len(tokens)) >= 2 for tokens in sequences]
    parameters = list(model.parameters())

    def clipped(values):
        total = torch.zeros(())
        for value, before, mask, advantage in zip(values, old, masks, advantages, strict=True):
            ratio = (value - before).exp()
            gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            total = total - gain[mask].sum()
        return total

    weights = [mask * advantage for mask, advantage in zip(masks, advantages, strict=True)]
    weighted = -(tree.token_logprobs(packed) * tree.scatter(weights)).sum()
    expected_weighted = -sum(
        (value * weight).sum() for value, weight in zip(expected, weights, strict=True)
    )
    for loss, wanted in (
        (clipped(logprobs), clipped(expected)),
        (weighted, expected_weighted),
    ):
        torch.testing.assert_close(loss, wanted, atol=1e-4, rtol=1e-5)
        grads = torch.autograd.grad(loss, parameters, retain_graph=True)
        wanted_grads = torch.autograd.grad(wanted, parameters, retain_graph=True)
        for grad, want in zip(grads, wanted_grads, strict=True):
            torch.testing.assert_close(grad, want, atol=1e-4 * float(want.abs().max() + 1), rtol=0)


def test_the_summed_loss_of_the_batch_from_loss_terms():
    model = llama()
    sequences = [torch.tensor(tokens, dtype=torch.int64) for tokens in FORKS if tokens]
    tree = PrefixTree.from_sequences(sequences)
    terms = tree.loss_terms
    logits = run_packed(model, tree)[0]
    losses = F.cross_entropy(logits[terms.source], terms.label, reduction="none")
    total = (losses * terms.multiplicity).sum()
    expected = sum(
        F.cross_entropy(logits[:-1], tokens[1:], reduction="sum")
        for logits, tokens in zip(run_separately(model, sequences), sequences, strict=True)
    )
    torch.testing.assert_close(total, expected, atol=1e-4, rtol=1e-5)


@pytest.mark.gpu
def test_the_same_bits_twice_on_a_gpu():
    sequences = [torch.randint(0, 3, (50,)).tolist() for _ in range(200)]
    tree = PrefixTree.from_sequences(sequences, device="cuda")
    logits = random_logits(tree, torch.float32).detach().cuda().requires_grad_()
    grads = []
    for _ in range(3):
        loss = sum(value.exp().sum() for value in tree.gather_logprobs(logits))
        loss = loss + sum(value.square().sum() for value in tree.gather_entropy(logits))
        loss = loss + tree.scatter(logits[:1, 0].expand(tree.num_trajectory_tokens)).sum()
        grads.append(torch.autograd.grad(loss, logits)[0])
    assert torch.equal(grads[0], grads[1])
    assert torch.equal(grads[0], grads[2])
