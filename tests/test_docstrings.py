"""Every public name says what it takes, what it gives and what it raises."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import passes
import tree_attn_op
from tree_attn_op import distributed

MODULES = (
    "tree_attn_op",
    "passes",
    "tree_attn_op.distributed",
    "tree_attn_op.integrations.dispatch",
    "tree_attn_op.integrations.transformers",
    "tree_attn_op.integrations.megatron",
    "tree_attn_op.integrations.windows",
)
OPTIONAL = {"tree_attn_op.integrations.megatron": "megatron.core"}


def own_names(module: Any) -> list[str]:
    """A package's ``__all__``; of a module, the public names that it defines."""
    if hasattr(module, "__all__"):
        return list(module.__all__)
    return [
        name
        for name, thing in vars(module).items()
        if not name.startswith("_") and getattr(thing, "__module__", None) == module.__name__
    ]


def public_things() -> Iterator[tuple[str, Any]]:
    """Every public function and class, with the public methods and properties that are its own."""
    for module_name in MODULES:
        if module_name in OPTIONAL:
            try:
                importlib.import_module(OPTIONAL[module_name])
            except ImportError:
                continue
        module = importlib.import_module(module_name)
        for name in own_names(module):
            thing = getattr(module, name)
            yield f"{module_name}.{name}", thing
            if not inspect.isclass(thing):
                continue
            for base in thing.__mro__:
                if not base.__module__.startswith(("tree_attn_op", "passes")):
                    continue
                for attribute, value in vars(base).items():
                    if not attribute.startswith("_") and isinstance(
                        value, (property, staticmethod, classmethod)
                    ) | inspect.isfunction(value):
                        yield f"{module_name}.{name}.{attribute}", value


THINGS = dict(public_things())


def function_of(thing: Any) -> Callable[..., Any] | None:
    """The function that a thing's docstring describes; of a class, the constructor it wrote."""
    if isinstance(thing, property):
        return thing.fget
    if isinstance(thing, (staticmethod, classmethod)):
        return thing.__func__
    if inspect.isclass(thing):
        written = inspect.isfunction(thing.__init__) and not dataclasses.is_dataclass(thing)
        return thing.__init__ if written else None
    return thing if inspect.isfunction(thing) else None


def parameters_of(function: Callable[..., Any]) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name not in ("self", "cls")]


def tensors_of(function: Callable[..., Any]) -> list[str]:
    """Parameters that are tensors, and ``return`` if that is one."""
    hints = inspect.get_annotations(function)
    return [name for name, hint in hints.items() if re.match(r"(torch\.)?Tensor\b", str(hint))]


def raised_by(function: Callable[..., Any]) -> set[str]:
    """Names of the exceptions that the body of a function raises itself and does not catch."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    caught = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.Try) and node.handlers
        for statement in node.body
        for inner in ast.walk(statement)
    }
    raised = set()
    for node in set(ast.walk(tree)) - caught:
        if isinstance(node, ast.Raise) and node.exc is not None:
            call = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            raised.add(call.id if isinstance(call, ast.Name) else ast.unparse(call))
    return {name for name in raised if name.endswith(("Error", "UnsupportedMask"))}


def section(text: str, title: str) -> str:
    """The indented body of a Google-style section; empty if there is none."""
    match = re.search(rf"^{title}:\n((?:[ ]+.*\n|\n)+)", text + "\n", re.MULTILINE)
    return match[1] if match else ""


@pytest.mark.parametrize("name", THINGS)
def test_it_has_a_docstring(name: str) -> None:
    text = inspect.getdoc(THINGS[name])
    assert text, f"{name} has no docstring"
    first = text.split("\n\n")[0]
    assert first.endswith((".", "::", ":")), f"{name}: the first paragraph is no sentence: {first}"


FUNCTIONS = {name: f for name, thing in THINGS.items() if (f := function_of(thing)) is not None}


# What a single parameter is, the first paragraph says.
@pytest.mark.parametrize("name", [n for n, f in FUNCTIONS.items() if len(parameters_of(f)) > 1])
def test_its_parameters_are_described(name: str) -> None:
    text = inspect.getdoc(THINGS[name]) or ""
    listed = re.findall(
        r"^ +([\w, *]+):", section(text, "(?:Args(?: and attributes)?|Attributes)"), re.MULTILINE
    )
    quoted = re.findall(r"``?([^`]+)``?", text)
    described = set(re.findall(r"\w+", " ".join([*listed, *quoted])))
    missing = [p for p in parameters_of(FUNCTIONS[name]) if p not in described]
    assert not missing, f"{name} does not describe {missing}"


@pytest.mark.parametrize("name", [n for n, f in FUNCTIONS.items() if raised_by(f)])
def test_what_it_raises_is_described(name: str) -> None:
    text = inspect.getdoc(THINGS[name]) or ""
    missing = [error for error in raised_by(FUNCTIONS[name]) if error not in text]
    assert not missing, f"{name} does not say that it raises {missing}"


@pytest.mark.parametrize("name", [n for n, f in FUNCTIONS.items() if tensors_of(f)])
def test_tensors_have_shapes(name: str) -> None:
    text = inspect.getdoc(THINGS[name]) or ""
    assert re.search(r"\[[^\]]+\]|0-d|broadcast|as of the class", text), (
        f"{name}: no shape of {tensors_of(FUNCTIONS[name])}"
    )


def test_the_public_names_are_those_of_the_packages() -> None:
    assert sorted(tree_attn_op.__all__) == tree_attn_op.__all__
    assert sorted(passes.__all__) == passes.__all__
    assert sorted(distributed.__all__) == distributed.__all__
    for package in (tree_attn_op, passes):
        for name in package.__all__:
            assert getattr(package, name).__module__.split(".")[0] == package.__name__, name
