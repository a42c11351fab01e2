"""Errors that users meet."""

from __future__ import annotations


class UnsupportedMask(ValueError):
    """A mask that is no separable predicate, or that this package cannot prove to be one.

    Attributes:
        reason: what about the mask is unsupported, in a few words.
        hint: what to write instead, or None where there is no separable way to say it.
        node_name: the name of the graph node that caused it, or None.
        source: ``file:line`` of that node in the user's code where known, or None.
    """

    def __init__(
        self,
        reason: str,
        *,
        hint: str | None = None,
        node_name: str | None = None,
        source: str | None = None,
    ):
        super().__init__(reason)
        self.reason = reason
        self.hint = hint
        self.node_name = node_name
        self.source = source

    def __str__(self) -> str:
        text = self.reason
        if self.source is not None:
            text += f" (at {self.source})"
        elif self.node_name is not None:
            text += f" (at graph node {self.node_name!r})"
        return f"{text}. {self.hint}" if self.hint is not None else text
