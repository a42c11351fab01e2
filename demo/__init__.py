"""The main job end to end: `python -m demo` (or `make demo`, which sets everything up)."""
