"""Trees on several devices, on PyTorch's own engine (DeviceMesh, DTensor, functional collectives).

- Tensor parallelism: importing this package teaches DTensor the ops. Models whose attention gets
  local tensors, as ``ColwiseParallel`` gives them by default, do not even need that.
- FSDP2 and DDP: nothing to do.
- Context parallelism: :func:`context_parallel_mask` and :func:`context_parallel_attention`.
"""

from . import sharding as _sharding  # registers the rules for DTensor
from .balance import TreeLoadBalancer
from .checks import RankMismatchError
from .context_parallel import (
    ContextParallelMask,
    context_parallel_attention,
    context_parallel_loss_terms,
    context_parallel_mask,
    context_parallel_shard,
    context_parallel_unshard,
)

__all__ = [
    "ContextParallelMask",
    "RankMismatchError",
    "TreeLoadBalancer",
    "context_parallel_attention",
    "context_parallel_loss_terms",
    "context_parallel_mask",
    "context_parallel_shard",
    "context_parallel_unshard",
]

del _sharding
