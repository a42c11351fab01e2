"""What can be chosen about the rewrite, by arguments and by the environment."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

Plan = Literal["lists", "predicate"]

REWRITE_SMALL = "TREE_ATTN_REWRITE_SMALL"
"""Environment variable: the default of ``PassOptions.rewrite_small``."""


@dataclass(frozen=True)
class PassOptions:
    """What can be chosen about the rewrite.

    Attributes:
        plan: "lists" computes what the BlockMask's lists and its mask_mod say together, as flex
            does. "predicate" takes the block lists from the proven predicate alone and drops the
            BlockMask, and with it the cost of building it inside the compiled region: only right
            where the BlockMask was built from its own mask_mod, not where its lists were chosen
            by hand.
        rewrite_small: also rewrite calls on a GPU that are so small that launching the op costs
            more than it saves (:data:`passes.checks.SMALL_CALL`). None: if the environment says
            ``TREE_ATTN_REWRITE_SMALL=1``.
    """

    plan: Plan = "lists"
    rewrite_small: bool | None = None

    def __post_init__(self) -> None:
        if self.plan not in ("lists", "predicate"):
            raise ValueError(f'plan must be "lists" or "predicate", not {self.plan!r}')
        if self.rewrite_small is None:
            setting = os.environ.get(REWRITE_SMALL, "")
            if setting not in ("", "0", "1"):
                raise ValueError(f"{REWRITE_SMALL} must be 0 or 1, got {setting!r}")
            object.__setattr__(self, "rewrite_small", setting == "1")
        elif not isinstance(self.rewrite_small, bool):
            raise TypeError(f"rewrite_small must be a bool or None, got {self.rewrite_small!r}")
