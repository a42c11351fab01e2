"""Whether every matrix product of a compiled kernel finds the descriptors of its operands.

ptxas 12.8 has been seen to set up a loop's descriptors in front of another loop, which need not
run. Then the uniform registers hold what they held before. The upper word of a descriptor is a
constant, so an interpretation of the instructions over "this constant", "the exclusive or of these
unknowns" and "unknown" shows where a product may read something else.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from functools import cache

UPPER_WORD = "0x40000040"
"""Swizzle of 128 bytes, 1024 bytes between groups of eight rows."""

Value = frozenset
"""Unknowns whose exclusive or a register holds; ``frozenset()`` is 0."""
State = dict[str, Value]

_STORES = ("STG", "STS", "HGMMA", "SYNCS", "BAR", "UTMALDG", "UTMASTG", "UTMACMDFLUSH")
_INSTRUCTION = re.compile(r"(?:@(!?U?P\w+)\s+)?(\S+)\s*(.*)")


def _next(register: str) -> str:
    """The register, or the word of local memory, behind another one."""
    memory = re.fullmatch(r"\[(\w+?)(?:\+0x([0-9a-f]+))?\]", register)
    if memory:
        return f"[{memory[1]}+{hex(int(memory[2] or '0', 16) + 4)}]"
    kind, number = re.fullmatch(r"(U?R)(\w+)", register).groups()  # type: ignore[union-attr]
    return register if number == "Z" else f"{kind}{int(number) + 1}"


def _value(state: State, operand: str) -> Value:
    if operand in ("URZ", "RZ"):
        return Value()
    if operand.startswith("0x"):
        return Value([operand])
    return state.get(operand, Value([f"unset {operand}"]))


def _results(state: State, opcode: str, operands: list[str], at: int) -> State:
    """What an instruction writes."""
    base, *flags = opcode.split(".")
    target = operands[0]
    unknown = Value([f"{target} of {at}"])
    if base in ("STL", "LDL"):
        source = operands[1]
        results = {target: state.get(source, unknown)}
        if "64" in flags:
            behind = Value([f"behind {target} of {at}"])
            results[_next(target)] = state.get(_next(source), behind)
        return results
    if base in ("UMOV", "MOV", "R2UR") or (
        opcode.startswith(("IMAD.U32", "IMAD.MOV")) and operands[1:3] == ["RZ", "RZ"]
    ):
        return {target: _value(state, operands[-1])}
    if base in ("UIADD3", "IADD3") and "X" in flags:
        # The carry of the lower word never reaches the constant: addresses have 14 bits there.
        upper = [x for x in operands[1:] if _value(state, x) == Value([UPPER_WORD])]
        return {target: Value([UPPER_WORD]) if len(upper) == 1 else unknown}
    if base == "UIADD3" and "64" in flags:
        return {target: unknown, _next(target): _value(state, _next(operands[1]))}
    if base in ("ULOP3", "LOP3") and "0x3c" in operands and operands[3] in ("URZ", "RZ"):
        return {target: _value(state, operands[1]) ^ _value(state, operands[2])}
    results = {target: unknown}
    words = 4 if "128" in flags else 2 if {"64", "WIDE"} & set(flags) or base == "CS2R" else 1
    for _ in range(1, words):
        target = _next(target)
        results[target] = Value([f"{target} of {at}"])
    return results


def _after(state: State, instruction: str, at: int) -> State:
    predicate, opcode, text = _INSTRUCTION.fullmatch(instruction).groups()  # type: ignore[union-attr]
    operands = [x.strip().replace(".reuse", "").lstrip("-~") for x in text.split(",")]
    base = opcode.split(".")[0]
    if len(operands) > 1 and re.fullmatch(r"U?P\d", operands[0]):
        # A predicate comes first; a register may follow.
        operands = operands[1:]
    to_register = re.fullmatch(r"U?R\d+", operands[0]) and base not in _STORES
    if not (to_register or base == "STL"):
        return state
    results = _results(state, opcode, operands, at)
    if predicate:
        results = {
            name: value if state.get(name) == value else Value([f"{name} of {at}, perhaps"])
            for name, value in results.items()
        }
    return state | results


def _successors(sass: Sequence[str]) -> list[list[int]]:
    labels = {line: at for at, line in enumerate(sass) if line.startswith(".L_x_")}
    successors = []
    for at, line in enumerate(sass):
        targets = [labels[x] for x in re.findall(r"\.L_x_\d+", line) if x in labels]
        if re.search(r"\bBRX\b", line):
            following = targets
        elif re.search(r"\bBRA\b", line):
            following = [*targets, at + 1] if line.startswith("@") else targets
        else:
            following = [] if line.startswith("EXIT") else [at + 1]
        successors.append([x for x in following if x < len(sass)])
    return successors


@cache
def _where_paths_meet(name: str, at: int) -> Value:
    return Value([f"{name} where paths meet at {at}"])


def _states(sass: Sequence[str]) -> list[State | None]:
    """What is known in front of every instruction that can be reached."""
    successors = _successors(sass)
    entries = Counter(x for following in successors for x in following)
    known: list[State | None] = [None] * len(sass)
    known[0] = {}
    work = [0]
    while work:
        at = work.pop()
        before = known[at]
        assert before is not None
        after = before if sass[at].startswith(".L") else _after(before, sass[at], at)
        for successor in successors[at]:
            there = known[successor]
            if there is None or (entries[successor] == 1 and there != after):
                known[successor] = after
                work.append(successor)
            elif entries[successor] > 1:
                merged = {}
                for name in there.keys() | after.keys():
                    value = there.get(name)
                    if value != after.get(name):
                        unknown = _where_paths_meet(name, successor)
                        if value != unknown:
                            merged[name] = unknown
                if merged:
                    known[successor] = there | merged
                    work.append(successor)
    return known


def stale_descriptors(sass: Sequence[str]) -> list[str]:
    """Products of a kernel one of whose descriptors is not one on every path to it.

    Args:
        sass: instructions and labels, as ``nvdisasm -c`` names them.
    """
    stale = []
    for at, (line, state) in enumerate(zip(sass, _states(sass), strict=True)):
        if "HGMMA" not in line or state is None:
            continue
        operand = line.split(",")[1].strip()
        number = int(re.search(r"gdesc\[UR(\d+)\]", line).group(1))  # type: ignore[union-attr]
        # Four registers: the descriptors of A, unless A is in registers, and of B.
        uppers = [number + 3] if operand.startswith("R") else [number + 1, number + 3]
        for upper in uppers:
            value = _value(state, f"UR{upper}")
            if value != Value([UPPER_WORD]):
                stale.append(f"{at}: {line}: UR{upper} is {set(value)}")
    return stale
