"""From trajectories to one packed tree, and from its results back to trajectories.

- `prefix_tree`, `token_tree`: `PrefixTree`, how it is made and what it offers
- `inputs`: what users give, checked
- `trie`: sequences, sorted and merged; `explicit`, `forest`: trees that are known, put in order
- `layout`, `arrays`, `indexing`: the arrays of a tree and operations on them
- `packing`: several trees under a token budget
- `training`, `scatter`: log-probabilities and entropy at forks; values from trajectories to pack
- `statistics`, `plot`: figures and pictures
"""

from .prefix_tree import PrefixTree
from .statistics import TreeStatistics
from .training import LossTerms

__all__ = ["LossTerms", "PrefixTree", "TreeStatistics"]
