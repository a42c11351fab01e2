"""Tree attention: flex_attention masks of shared prefixes, proven and run as a faster op."""

from . import ops as _ops  # registers torch.ops.tree_attn_op
from .api import tree_attention
from .block_mask import create_block_mask
from .errors import UnsupportedMask
from .mask import TreeMask
from .predicate import Predicate, PredicateError
from .tree import PrefixTree

__all__ = [
    "Predicate",
    "PredicateError",
    "PrefixTree",
    "TreeMask",
    "UnsupportedMask",
    "create_block_mask",
    "tree_attention",
]

del _ops
