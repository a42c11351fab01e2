"""These tests need Triton's interpreter, which is chosen before Triton is imported: they run in a
process of their own, started by ``tests/kernels/test_interpreter.py``."""

from __future__ import annotations

import os

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]
