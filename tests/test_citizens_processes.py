"""Trees, masks and the op in threads, in data loaders' processes, and in an odd interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from tree_attn_op import PrefixTree, TreeMask, tree_attention
from tree_attn_op.reference import reference_attention

from .attention_cases import operands, tree_case

ROOT = Path(__file__).parents[1]


class Groups(Dataset):
    """Trees of sampled answers with their masks, made where they are asked for."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[PrefixTree, TreeMask]:
        prompt = list(range(10 + index))
        tree = PrefixTree.from_sequences([[*prompt, 100 + i, 7, i] for i in range(3)])
        ids = tree.position_ids // 4
        mask = TreeMask.from_mask_mod(
            lambda b, h, q, k: (q >= k) & (ids[q] >= ids[k]), 1, tree.num_tokens, tree.num_tokens
        )
        assert tree.mask.q_len == tree.num_tokens  # made here, not sent along
        return tree, mask


def _first(batch: list) -> object:
    return batch[0]


def _use(tree: PrefixTree, mask: TreeMask) -> None:
    for each in (tree.mask, mask):
        inputs = operands(1, (2, 2), (tree.num_tokens, tree.num_tokens), requires_grad=True)
        out = tree_attention(*inputs, each)
        want, _ = reference_attention(*inputs, each.to_dense())
        torch.testing.assert_close(out, want)
        out.sum().backward()


@pytest.mark.parametrize(("start", "workers"), [("fork", 2), ("spawn", 1)])
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_data_loaders_build_trees(start: str, workers: int) -> None:
    """Forked after the parent has used the op and its threads, or in fresh processes."""
    _use(*Groups(1)[0])
    loader = DataLoader(
        Groups(4),
        num_workers=workers,
        multiprocessing_context=start,
        collate_fn=_first,
        timeout=300,
    )
    seen = 0
    for index, (tree, mask) in enumerate(loader):
        want, _ = Groups(4)[index]
        assert torch.equal(tree.input_ids, want.input_ids)
        assert torch.equal(tree.mask.to_dense(), want.mask.to_dense())
        _use(tree, mask)
        seen += 1
    assert seen == 4


def test_threads() -> None:
    """Forward, backward, proofs and trees in several threads give what one thread gives."""

    def work(seed: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        length = 90 + seed % 3
        ids = torch.randint(0, 4, (length,), generator=generator)
        proven = TreeMask.from_mask_mod(
            lambda b, h, q, k: (q >= k) & (ids[q] == ids[k]), 1, length, length
        )
        made = tree_case(length, leaves=2 + seed % 3)
        derived = TreeMask.from_predicate(made.predicate, made.q_vals, made.k_vals, length, length)
        results = []
        for mask in (proven, derived):
            inputs = [
                torch.randn(1, 2, length, 8, generator=generator).requires_grad_()
                for _ in range(3)
            ]
            out = tree_attention(*inputs, mask)
            results += [out.detach(), *torch.autograd.grad(out.cos().sum(), inputs)]
        sequences = torch.randint(0, 3, (6, 12), generator=generator).tolist()
        return [*results, PrefixTree.from_sequences(sequences).subtree_end]

    seeds = [*range(8), *range(8)]
    want = [work(seed) for seed in seeds]
    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(work, seeds))
    for one, other in zip(got, want, strict=True):
        for first, second in zip(one, other, strict=True):
            assert torch.equal(first, second)


SCRIPT = """
    import sys, torch
    import passes
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    from tree_attn_op import PrefixTree, TreeMask, tree_attention
    from tree_attn_op import create_block_mask as linear_block_mask
    from tree_attn_op.reference import reference_attention

    def check(condition, what):
        if not condition:
            sys.exit(what)

    check(sys.flags.optimize == 1, "asserts are on")
    tree = PrefixTree.from_sequences([[1, 2, 3], [1, 2, 4, 5]])
    query, key, value = (torch.randn(1, 2, 5, 8, requires_grad=True) for _ in range(3))
    out = tree_attention(query, key, value, tree.mask)
    want, _ = reference_attention(query, key, value, tree.mask.to_dense())
    check(torch.allclose(out, want, atol=1e-5), "wrong result")
    for one, other in zip(
        torch.autograd.grad(out.sum(), (query, key, value)),
        torch.autograd.grad(want.sum(), (query, key, value)),
    ):
        check(torch.allclose(one, other, atol=1e-5), "wrong gradient")

    lists = tree.mask.lists
    values = tree.mask.q_vals, tree.mask.k_vals
    for call, error in (
        (lambda: tree_attention(query, key[:, :, :4], value, tree.mask), ValueError),
        (lambda: tree_attention(query, key, value, None), TypeError),
        (lambda: TreeMask.from_predicate("q >", *values, 5, 5), ValueError),
        (lambda: TreeMask.from_block_mask(None), TypeError),
        (lambda: PrefixTree.from_parents([1, 0]), ValueError),
        (lambda: torch.ops.tree_attn_op.tree_attention(
            query, key, value, *values, "q >= k & q < k0",
            lists.kv_num_blocks, lists.kv_indices, lists.full_kv_num_blocks, None,
            None, None, None, None, 128, 128, 1.0), ValueError),
    ):
        try:
            call()
        except error:
            continue
        sys.exit(f"accepted: {call.__code__.co_firstlineno}")

    ids = torch.arange(200) // 40
    mask_mod = lambda b, h, q, k: (q >= k) & (ids[q] == ids[k])
    sizes = (None, None, 200, 200)
    mask = linear_block_mask(mask_mod, *sizes, device="cpu")
    tensors = torch.randn(3, 1, 2, 200, 8).unbind(0)
    attention = lambda *t: flex_attention(*t, block_mask=mask)
    try:
        torch.compile(attention, backend="eager")(*tensors)
    except torch._dynamo.exc.InternalTorchDynamoError:
        # torch 2.11 cannot trace flex_attention itself without asserts.
        print("all right")
        sys.exit()
    (call,) = passes.explain(attention, *tensors)
    check(call.rewritten, str(call))

    def rewritten(gm, inputs):
        passes.TreeAttentionPass()(gm.graph)
        return gm.forward

    out = torch.compile(attention, backend=rewritten)(*tensors)
    check(torch.allclose(out, attention(*tensors), atol=1e-5), "wrong compiled result")
    print("all right")
"""


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder like Linux's /proc")
def test_without_asserts_and_without_a_cache_folder(tmp_path: Path) -> None:
    """``python -O``, and a cache folder that cannot be written to: nothing of ours needs one."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    # There, but not to be written to, not even by root. torch itself wants a folder that is there.
    nowhere = "/proc"
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HOME": nowhere,
        "TORCHINDUCTOR_CACHE_DIR": nowhere,
        "TRITON_CACHE_DIR": nowhere,
        "XDG_CACHE_HOME": nowhere,
    }
    finished = subprocess.run(
        [sys.executable, "-O", str(script)],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stderr[-4000:]
    assert finished.stdout.strip() == "all right"
