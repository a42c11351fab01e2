"""Checks of what users give to public functions: each error names the argument and what it was."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

_INT64_MAX = 2**63 - 1


def check_type(name: str, value: object, kinds: type | tuple[type, ...], what: str) -> None:
    """Check that a value is of a class.

    Args:
        name: the argument's.
        value: what was given.
        kinds: the class, or several.
        what: how an error calls them, such as "a TreeMask".

    Raises:
        TypeError: it is not.
    """
    if not isinstance(value, kinds):
        raise TypeError(f"{name} must be {what}, got {type(value).__name__}")


def check_tensor(name: str, value: object) -> None:
    """Check that a value is a tensor with one number an element: not sparse, not nested.

    Raises:
        TypeError: it is no such tensor.
    """
    check_type(name, value, Tensor, "a Tensor")
    assert isinstance(value, Tensor)
    if value.layout is not torch.strided:
        raise TypeError(f"{name} must be a dense Tensor, got one of layout {value.layout}")


def check_data(name: str, value: Tensor) -> None:
    """Check that a tensor's numbers can be read: dense, and not on the meta device.

    Raises:
        TypeError: they cannot.
    """
    check_tensor(name, value)
    if value.is_meta:
        raise TypeError(f"{name} must hold numbers, got a Tensor on the meta device")


def check_number(name: str, value: Any) -> float:
    """A real number as a float.

    Raises:
        TypeError: it is no int or float.
    """
    number = isinstance(value, (int, float, torch.SymInt, torch.SymFloat))
    if not number or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, got {_described(value)}")
    if isinstance(value, int) and abs(value) > 2**1000:
        raise ValueError(f"{name} must be finite, got an int of {value.bit_length()} bits")
    return float(value)


def check_positive(name: str, value: Any) -> float:
    """A finite number above 0 as a float.

    Raises:
        TypeError, ValueError: it is none.
    """
    number = check_number(name, value)
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f"{name} must be positive, got {value}")
    return number


def check_int(name: str, value: object, least: int | None = None) -> None:
    """Check that a value is an int of 64 bits, and not below ``least``.

    Raises:
        TypeError, ValueError: it is not.
    """
    if not isinstance(value, (int, torch.SymInt)) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int, got {_described(value)}")
    if isinstance(value, int) and abs(value) > _INT64_MAX:
        raise ValueError(f"{name} must fit in 64 bits, got {value}")
    if least is not None and value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


def check_callable(name: str, value: object) -> None:
    """Check that a value can be called.

    Raises:
        TypeError: it cannot.
    """
    if not callable(value):
        raise TypeError(f"{name} must be a function, got {_described(value)}")


def check_iterable(name: str, value: object, of: str) -> None:
    """Check that a value can be iterated over, and is no text.

    Raises:
        TypeError: it cannot.
    """
    scalar = isinstance(value, Tensor) and value.dim() == 0
    if not isinstance(value, Iterable) or isinstance(value, (str, bytes)) or scalar:
        raise TypeError(f"{name} must be a sequence of {of}, got {_described(value)}")


def as_device(device: Any, name: str = "device") -> torch.device:
    """``device`` as torch.device.

    Raises:
        TypeError, ValueError: there is no such device.
    """
    if isinstance(device, torch.device):
        return device
    check_type(name, device, (str, int), "a torch.device, its name or its index")
    try:
        return torch.device(device)
    except (RuntimeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{name} must be a device, got {device!r}: {reason}") from None


def _described(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a Tensor of shape {tuple(value.shape)}"
    if isinstance(value, (int, float, str)):
        return repr(value)
    return f"{type(value).__name__}"
