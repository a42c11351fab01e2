"""The fixtures of the tests of the pass."""

from __future__ import annotations

from tests.passes.conftest import fresh_dynamo, traceable_training

__all__ = ["fresh_dynamo", "traceable_training"]
