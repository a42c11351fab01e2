"""What makes two runs of the pass the same run, for torch's compile caches."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

from tree_attn_op import ops


@functools.cache
def source_digest(roots: tuple[Path, ...]) -> str:
    """A digest of every source file under some folders, and of the version of the ops' schemas.

    ``torch._inductor.custom_graph_pass.get_hash_for_files`` is not used: it remembers one set of
    files for the whole process, whoever asks.
    """
    digest = hashlib.sha256(str(ops.OP_SCHEMA_VERSION).encode())
    for root in roots:
        for path in sorted(root.rglob("*.py")):
            digest.update(f"{root.name}/{path.relative_to(root).as_posix()}\n".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()
