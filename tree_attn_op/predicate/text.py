"""Text of predicates: the parser and the printer of the grammar in DESIGN.md."""

from __future__ import annotations

import re

from .nodes import (
    FALSE,
    INT64_RANGE,
    MAX_DEPTH,
    MAX_ROWS,
    SYMBOLS,
    TRUE,
    And,
    Compare,
    Const,
    Kind,
    Node,
    Or,
    PredicateError,
    Side,
    Term,
    negate,
)

_OPS = {symbol: op for op, symbol in SYMBOLS.items()}


_TOKEN = re.compile(r"\s*(?:(True|False)\b|([qk]\d*)\b|(\d+)|(==|!=|<=|>=|[<>&|~()-]))")


class Parser:
    """Recursive descent over the grammar of DESIGN.md; ``parse`` raises PredicateError."""

    def __init__(self, text: str):
        self.text = text
        self.depth = 0
        self.tokens: list[tuple[str, int]] = []
        at = 0
        while at < len(text.rstrip()):
            match = _TOKEN.match(text, at)
            if match is None:
                raise self._error(f"unexpected {text[at:].strip()[0]!r}", at)
            self.tokens.append((match.group().strip(), match.end() - len(match.group().strip())))
            at = match.end()
        self.at = 0

    def _error(self, message: str, position: int | None = None) -> PredicateError:
        if position is None:
            position = self.tokens[self.at][1] if self.at < len(self.tokens) else len(self.text)
        shown = self.text if len(self.text) <= 200 else self.text[:200] + "..."
        return PredicateError(f"not a predicate: {message} at position {position} of {shown!r}")

    def peek(self) -> str:
        return self.tokens[self.at][0] if self.at < len(self.tokens) else ""

    def take(self, *accepted: str) -> bool:
        if self.peek() in accepted and self.peek():
            self.at += 1
            return True
        return False

    def parse(self) -> Node:
        node = self.formula()
        if self.at < len(self.tokens):
            raise self._error(f"unexpected {self.peek()!r}")
        return node

    def formula(self) -> Node:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise self._error(f"nested deeper than {MAX_DEPTH}")
        parts = [self.conjunction()]
        while self.take("|"):
            parts.append(self.conjunction())
        self.depth -= 1
        return parts[0] if len(parts) == 1 else Or(tuple(parts))

    def conjunction(self) -> Node:
        parts = [self.unary()]
        while self.take("&"):
            parts.append(self.unary())
        return parts[0] if len(parts) == 1 else And(tuple(parts))

    def unary(self) -> Node:
        flipped = False
        while self.take("~"):
            flipped = not flipped
        node: Node
        if self.take("("):
            node = self.formula()
            if not self.take(")"):
                raise self._error("expected ')'")
        elif self.take("True"):
            node = TRUE
        elif self.take("False"):
            node = FALSE
        else:
            lhs = self.side()
            op = self.peek()
            if op not in _OPS:
                raise self._error("expected one of == != < <= > >=")
            self.at += 1
            node = Compare(_OPS[op], lhs, self.side())
        return negate(node) if flipped else node

    def side(self) -> Side:
        start = self.at
        plus = self.term()
        if not self.take("-"):
            return Side(plus)
        minus = self.term()
        if not ((plus.on_query and minus.on_key) or (plus.on_key and minus.on_query)):
            self.at = start
            raise self._error(
                f"a difference takes one query and one key term, got {plus} - {minus}"
            )
        return Side(plus, minus)

    def term(self) -> Term:
        sign = -1 if self.take("-") else 1
        token = self.peek()
        if token.isdecimal():
            value = sign * int(token)
            if not INT64_RANGE[0] <= value <= INT64_RANGE[1]:
                raise self._error(f"{value} does not fit in 64 bits")
            self.at += 1
            return Term(Kind.LITERAL, value)
        if sign < 0 or not token or token[0] not in "qk":
            raise self._error("expected q, k, q<row>, k<row> or an integer")
        if len(token) == 1:
            kind, number = (Kind.Q_INDEX if token == "q" else Kind.K_INDEX), 0
        else:
            kind, number = (Kind.Q_ROW if token[0] == "q" else Kind.K_ROW), int(token[1:])
            if number >= MAX_ROWS:
                raise self._error(f"row {number}, at most {MAX_ROWS} rows are supported")
        self.at += 1
        return Term(kind, number)


def print_node(node: Node, parent: type | None = None) -> str:
    """The text of ``node``; inside ``parent`` a connective is parenthesised."""
    if isinstance(node, Compare):
        return f"{node.lhs} {SYMBOLS[node.op]} {node.rhs}"
    if isinstance(node, Const):
        return str(node.value)
    symbol = " & " if isinstance(node, And) else " | "
    text = symbol.join(print_node(part, type(node)) for part in node.parts)
    return text if parent is None else f"({text})"
