"""Warp-specialised kernels for sm_90 (H100, H200), in Gluon."""

from __future__ import annotations

from .backward import backward, plan_backward
from .forward import forward, plan_forward

__all__ = ["backward", "forward", "plan_backward", "plan_forward"]
