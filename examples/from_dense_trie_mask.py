"""Moving an engine that builds a dense mask from a trie to tree attention, step by step.

Such an engine inserts its trajectories into a trie token by token, numbers the nodes, marks for
each token its ancestors in a ``[S, S]`` mask, and gives that to ``scaled_dot_product_attention``.
Both the time of the Python trie and the memory of the mask grow until they limit the batch.

Run it: ``python examples/from_dense_trie_mask.py``. Every step is compared with the engine as it
was, for the output and for the gradients.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tree_attn_op import PrefixTree, TreeMask
from tree_attn_op.integrations.dispatch import attention

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16
WIDTH = HEADS * HEAD_DIM
VOCABULARY = 32

# ---------------------------------------------------------------------------------------------
# The engine as it was: a trie, and a dense mask.


@dataclass
class TrieNode:
    token: int
    parent: int
    children: dict[int, int] = field(default_factory=dict)


def build_trie(sequences: list[list[int]]) -> list[TrieNode]:
    """One node a token, in the order in which the trajectories bring them."""
    nodes: list[TrieNode] = []
    roots: dict[int, int] = {}
    for sequence in sequences:
        parent, children = -1, roots
        for token in sequence:
            if token not in children:
                children[token] = len(nodes)
                nodes.append(TrieNode(token, parent))
            parent = children[token]
            children = nodes[parent].children
    return nodes


def dense_mask(nodes: list[TrieNode]) -> Tensor:
    """bool ``[S, S]``: each token sees itself and its ancestors."""
    mask = torch.zeros(len(nodes), len(nodes), dtype=torch.bool)
    for index, node in enumerate(nodes):
        if node.parent >= 0:
            mask[index] = mask[node.parent]
        mask[index, index] = True
    return mask


class Layer(nn.Module):
    """A layer's attention, with grouped heads; ``attend`` is what the move replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.projection = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
        self.output = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, mask: Tensor | TreeMask) -> Tensor:
        packed = self.projection(self.embedding(tokens)).unflatten(-1, (-1, HEAD_DIM))
        query, key, value = packed.split([HEADS, KV_HEADS, KV_HEADS], dim=-2)
        attend = attend_dense if isinstance(mask, Tensor) else attend_tree
        return self.output(attend(query, key, value, mask).flatten(-2))


def attend_dense(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """``[B, S, H, D]`` with a dense mask."""
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
    return out.transpose(1, 2)


# ---------------------------------------------------------------------------------------------
# The move.


def attend_tree(query: Tensor, key: Tensor, value: Tensor, mask: TreeMask) -> Tensor:
    """The same call with a TreeMask; ``TREE_ATTN_BACKEND=flex`` compares with flex_attention."""
    return attention(query, key, value, mask, layout="BSHD")


def keep_the_trie(nodes: list[TrieNode]) -> TreeMask:
    """Step 1: the engine's own token order stays; only the mask is made from parents instead.

    No ``[S, S]`` tensor is left. Any order of tokens is right, this one as well.
    """
    parents = torch.tensor([node.parent for node in nodes])
    return PrefixTree.from_parents(parents).source_mask


def drop_the_trie(sequences: list[list[int]]) -> PrefixTree:
    """Step 2: the tree is built from the trajectories, without a loop over tokens in Python.

    Its order is depth-first, which leaves fewer tiles to compute, and it offers what the engine
    had to write itself: positions, log-probabilities at forks, unpacking.
    """
    return PrefixTree.from_sequences(sequences)


def run(layer: Layer, tokens: Tensor, mask: Tensor | TreeMask) -> tuple[Tensor, list[Tensor]]:
    """The logits ``[S, vocabulary]`` and the gradients of a sum over all of them."""
    logits = layer(tokens[None], mask)[0]
    gradients = torch.autograd.grad(logits.square().sum(), list(layer.parameters()))
    return logits.detach(), list(gradients)


def main() -> int:
    torch.manual_seed(0)
    prompt = torch.randint(VOCABULARY, (60,)).tolist()
    turns = [prompt + torch.randint(VOCABULARY, (30,)).tolist() for _ in range(4)]
    sequences = [turn + torch.randint(VOCABULARY, (20,)).tolist() for turn in turns * 3]
    layer = Layer()

    nodes = build_trie(sequences)
    tokens = torch.tensor([node.token for node in nodes])
    dense = dense_mask(nodes)
    want, want_gradients = run(layer, tokens, dense)

    mask = keep_the_trie(nodes)
    print(f"1. the engine's order, {len(nodes)} tokens: {mask.predicate}")
    torch.testing.assert_close(mask.to_dense()[0], dense)
    got, gradients = run(layer, tokens, mask)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gradients, want_gradients, atol=1e-3, rtol=1e-4)

    tree = drop_the_trie(sequences)
    print(f"2. depth-first, {tree.num_tokens} tokens: {tree.mask.predicate}")
    got, gradients = run(layer, tree.input_ids, tree.mask)
    torch.testing.assert_close(gradients, want_gradients, atol=1e-3, rtol=1e-4)
    for sequence, logits in zip(sequences, tree.unpack(got, dim=0), strict=True):
        torch.testing.assert_close(logits, want[path(nodes, sequence)], atol=1e-5, rtol=1e-5)

    values = sum(tensor.nbytes for tensor in (tree.mask.q_vals, tree.mask.k_vals))
    print(f"the mask was {dense.nbytes} bytes, now {values} and its lists of tiles")
    return 0


def path(nodes: list[TrieNode], sequence: list[int]) -> list[int]:
    """The nodes of one trajectory, from its first token on."""
    found = [next(i for i, n in enumerate(nodes) if n.parent < 0 and n.token == sequence[0])]
    for token in sequence[1:]:
        found.append(nodes[found[-1]].children[token])
    return found


if __name__ == "__main__":
    sys.exit(main())
