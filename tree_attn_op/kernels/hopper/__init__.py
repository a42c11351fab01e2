"""Warp-specialised kernels for sm_90 (H100, H200), in Gluon."""

from __future__ import annotations

from .backward import backward
from .forward import forward

__all__ = ["backward", "forward"]
