"""The mask predicate: a Boolean formula over comparisons of query terms with key terms.

One representation serves the oracle (:meth:`Predicate.evaluate`), the block-list builder
(:meth:`Predicate.classify`), the kernels (:attr:`Predicate.program`) and the graph dumps
(``str(predicate)``). The grammar and the meaning are in DESIGN.md; in short, ``q`` and ``k`` are
the token indices, ``q0, q1, ...`` and ``k0, k1, ...`` the rows of integers that belong to a query
or a key token, and ``q1 - k2 < 128`` is a difference that wraps in the dtype of the rows, as
PyTorch's does.
"""

from .intervals import Bounds
from .nodes import (
    EMPTY,
    FALSE,
    FULL,
    INT32_RANGE,
    INT64_RANGE,
    K_INDEX,
    MAX_ROWS,
    PARTIAL,
    Q_INDEX,
    TRUE,
    And,
    Compare,
    Const,
    Kind,
    Node,
    Op,
    Or,
    PredicateError,
    Side,
    Term,
    difference,
    k_row,
    literal,
    negate,
    q_row,
)
from .predicate import Predicate

__all__ = [
    "EMPTY",
    "FALSE",
    "FULL",
    "INT32_RANGE",
    "INT64_RANGE",
    "K_INDEX",
    "MAX_ROWS",
    "PARTIAL",
    "Q_INDEX",
    "TRUE",
    "And",
    "Bounds",
    "Compare",
    "Const",
    "Kind",
    "Node",
    "Op",
    "Or",
    "Predicate",
    "PredicateError",
    "Side",
    "Term",
    "difference",
    "k_row",
    "literal",
    "negate",
    "q_row",
]
