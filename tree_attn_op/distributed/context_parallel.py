"""Context parallelism: the tokens of one tree on several ranks.

Each rank holds some query tiles (:class:`TreeLoadBalancer`) and runs the model on those tokens.
Attention gathers the keys and values of all ranks, computes the rank's queries against them, and
sums the gradients of keys and values back to where the tokens live. This is the all-gather form of
context parallelism (as in Llama 3, arXiv:2407.21783, section 3.3.2): it asks nothing of the mask,
where a ring exchange relies on causal chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest

from .. import validation
from ..api import check_options, list_blocks
from ..mask import TreeMask
from ..tree import LossTerms
from . import checks
from .attention import ShardedAttention
from .balance import TreeLoadBalancer, checked_tile_size
from .collectives import Group, in_order, padded, start_gather, wait
from .local_mask import shard_mask

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class ContextParallelMask:
    """What a rank holds of a mask whose tokens are sharded. Immutable; made by
    :func:`context_parallel_mask`, from the whole ``mask``.

    Attributes:
        mesh: one-dimensional.
        local: this rank's queries against all keys.
        load_balancer: which tokens each rank holds.
        places, tokens, group: how they are exchanged, see ``collectives.py``.
    """

    # No dataclass, for the same reason as TreeMask.

    mesh: DeviceMesh
    local: TreeMask
    load_balancer: TreeLoadBalancer
    places: Tensor
    tokens: Tensor
    group: Group

    def __init__(self, mesh: DeviceMesh, mask: TreeMask, load_balancer: TreeLoadBalancer) -> None:
        group = group_of(mesh)
        for name, given in (
            ("mesh", mesh),
            ("local", shard_mask(mask, load_balancer, group.rank)),
            ("load_balancer", load_balancer),
            ("places", load_balancer.places(mask.device)),
            ("tokens", load_balancer.padded_tokens(mask.device)),
            ("group", group),
        ):
            object.__setattr__(self, name, given)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("a ContextParallelMask is immutable")

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """``(batch_size, heads, this rank's queries, all keys)``."""
        return self.local.shape

    @property
    def ndim(self) -> int:
        """4, as of a TreeMask."""
        return 4

    @property
    def device(self) -> torch.device:
        """Where the mask is."""
        return self.local.device

    @property
    def positions(self) -> Tensor:
        """int64 ``[this rank's queries]``, their places in the whole sequence, ascending."""
        return self.load_balancer.positions(self.group.rank, self.device)

    def __repr__(self) -> str:
        return (
            f"ContextParallelMask(rank={self.group.rank}, local={self.local!r}, "
            f"load_balancer={self.load_balancer!r})"
        )


def context_parallel_mask(
    mesh: DeviceMesh,
    mask: TreeMask,
    load_balancer: TreeLoadBalancer | None = None,
    *,
    check: bool | None = None,
) -> ContextParallelMask:
    """The part of a mask that this rank computes. Every rank of the mesh has to call it.

    Args:
        mesh: one-dimensional, for instance ``mesh_2d["cp"]``.
        mask: the whole mask, the same on every rank, for as many queries as keys.
        load_balancer: which rank holds which tokens; None: :meth:`TreeLoadBalancer.of_mask`.
        check: compare mask and partition between the ranks; None: unless
            ``TREE_ATTN_CHECK_RANKS=0``.

    Raises:
        TypeError, ValueError: a mesh, mask or partition that do not fit each other.
        RankMismatchError: the ranks were given different ones.
    """
    group = group_of(mesh)
    if not isinstance(mask, TreeMask):
        raise TypeError(f"mask must be a TreeMask, got {type(mask).__name__}")
    if checks.checks_masks(check):
        # First of all: what one rank refuses, the others would wait for.
        checks.check_masks(mask, load_balancer, group)
    if load_balancer is None:
        load_balancer = TreeLoadBalancer.of_mask(mask, group.size)
    check_partition(load_balancer, group.size)
    if not load_balancer.seq_length == mask.q_len == mask.kv_len:
        raise ValueError(
            f"the mask is for {mask.q_len} queries and {mask.kv_len} keys, both must be the "
            f"load balancer's length {load_balancer.seq_length}"
        )
    checked_tile_size(mask, load_balancer.tile_size)
    return ContextParallelMask(mesh, mask, load_balancer)


def context_parallel_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: ContextParallelMask,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_aux: AuxRequest | None = None,
    num_chunks: int = 1,
    reshard_after_forward: bool = False,
    reduce_dtype: torch.dtype | None = None,
    check: bool | None = None,
) -> Tensor | tuple[Tensor, AuxOutput]:
    """:func:`tree_attn_op.tree_attention` over a sequence whose tokens are sharded.

    Every rank of the mask's mesh has to call it, also one that holds no tokens, and has to run the
    backward if any does. Works under ``torch.compile(fullgraph=True)`` and ``torch.autocast``.

    Args:
        query: this rank's, ``[B, Hq, n, D]``.
        key: this rank's, ``[B, Hkv, n, D]``.
        value: this rank's, ``[B, Hkv, n, Dv]``.
        mask: of :func:`context_parallel_mask`.
        scale, enable_gqa, return_aux: as of ``tree_attention``.
        num_chunks: parts, a divisor of Hkv, in which heads are exchanged one after another: the
            exchange of one runs beside the computation of another. More chunks mean more, smaller
            launches: on two H200 they paid at 128k tokens, not at 32k.
        reshard_after_forward: keep this rank's keys and values only and gather them again in the
            backward, as FSDP2 does with parameters. False: keep what was gathered.
        reduce_dtype: in which the gradients of keys and values are summed over the ranks; None:
            their own.
        check: compare the call between the ranks; None: if ``TREE_ATTN_CHECK_RANKS=1``. Compiled
            code compares nothing.

    Returns:
        ``out [B, Hq, n, Dv]`` and, with ``return_aux``, ``lse [B, Hq, n]`` of this rank's queries.

    Raises:
        TypeError, ValueError: as of ``tree_attention``.
        RankMismatchError: calls, lengths or dtypes differ between the ranks.
    """
    if not isinstance(mask, ContextParallelMask):
        raise TypeError(f"mask must be a ContextParallelMask, got {type(mask).__name__}")
    validation.check_ranks_and_devices(query, key, value)
    if scale is None:
        scale = query.shape[3] ** -0.5
    if not torch.compiler.is_compiling() and checks.checks_calls(check):
        options = (num_chunks, reshard_after_forward, reduce_dtype)
        lengths = mask.load_balancer.lengths
        checks.check_call(query, key, value, lengths, scale, options, mask.group)
    query, key, value = _autocast(query, key, value)
    validation.check_operands(query, key, value)
    _check_call(query, key, mask, enable_gqa, return_aux, num_chunks)
    local = mask.local
    lists = local.block_lists_for(*list_blocks(query, key, value, local))
    longest = mask.tokens.shape[0] // mask.group.size
    out, lse = ShardedAttention.apply(
        query,
        padded(key, 2, longest),
        padded(value, 2, longest),
        local.q_vals,
        local.k_vals,
        str(local.predicate),
        *lists.tensors,
        lists.q_block_size,
        lists.kv_block_size,
        float(scale),
        mask.places,
        mask.tokens,
        mask.group,
        num_chunks,
        reshard_after_forward,
        reduce_dtype,
    )
    if return_aux is None:
        return out
    return out, AuxOutput(lse=lse if return_aux.lse else None)


def context_parallel_shard(
    mesh: DeviceMesh,
    buffers: Sequence[Tensor | TreeMask],
    seq_dims: Sequence[int],
    load_balancer: TreeLoadBalancer,
) -> list[Any]:
    """This rank's part of per-token tensors and masks, all in the same order.

    Like ``torch.distributed.tensor.experimental._context_parallel_shard``, for shards of any
    lengths. Differentiable; no communication but for masks (see :func:`context_parallel_mask`).

    Args:
        mesh: one-dimensional.
        buffers: the same on every rank: input_ids, position_ids, labels, TreeMasks, ...
        seq_dims: the dimension of each that is the sequence; not looked at for masks.
        load_balancer: which rank holds which tokens.

    Raises:
        ValueError: a length that is not the load balancer's, or another number of dimensions.
    """
    group = group_of(mesh)
    check_partition(load_balancer, group.size)
    _check_buffers(buffers, seq_dims)
    shards: list[Any] = []
    for buffer, dim in zip(buffers, seq_dims, strict=True):
        if isinstance(buffer, TreeMask):
            shards.append(context_parallel_mask(mesh, buffer, load_balancer))
            continue
        if buffer.shape[dim] != load_balancer.seq_length:
            raise ValueError(
                f"a buffer of shape {tuple(buffer.shape)} has {buffer.shape[dim]} tokens in "
                f"dimension {dim}, the load balancer is for {load_balancer.seq_length}"
            )
        positions = load_balancer.positions(group.rank, buffer.device)
        shards.append(buffer.index_select(dim, positions))
    return shards


@torch.no_grad()
def context_parallel_unshard(
    mesh: DeviceMesh,
    buffers: Sequence[Tensor],
    seq_dims: Sequence[int],
    load_balancer: TreeLoadBalancer,
) -> list[Tensor]:
    """The whole tensors, in the order of the sequence, on every rank.

    Like ``torch.distributed.tensor.experimental._attention.context_parallel_unshard``, for shards
    of any lengths; without gradients, as that is. Every rank of the mesh has to call it.

    Args:
        mesh: one-dimensional.
        buffers: this rank's parts, as :func:`context_parallel_shard` gives them.
        seq_dims: the dimension of each that is the sequence.
        load_balancer: which rank holds which tokens.

    Raises:
        ValueError: a length that is not this rank's, or another number of dimensions.
    """
    group = group_of(mesh)
    check_partition(load_balancer, group.size)
    _check_buffers(buffers, seq_dims)
    lengths = load_balancer.lengths
    whole = []
    for buffer, dim in zip(buffers, seq_dims, strict=True):
        if buffer.shape[dim] != lengths[group.rank]:
            raise ValueError(
                f"a buffer of shape {tuple(buffer.shape)} has {buffer.shape[dim]} tokens in "
                f"dimension {dim}, rank {group.rank} holds {lengths[group.rank]}"
            )
        gathered = wait(start_gather(padded(buffer.movedim(dim, 0), 0, max(lengths)), group))
        places = load_balancer.places(buffer.device)
        whole.append(in_order(gathered, places).movedim(0, dim))
    return whole


def context_parallel_loss_terms(terms: LossTerms, mask: ContextParallelMask) -> LossTerms:
    """The next-token predictions that this rank's logits make, ``PrefixTree.loss_terms`` in part.

    At a fork one position predicts several tokens, which may live on other ranks; labels sharded
    with the tokens cannot say that. The ranks' terms are a partition of all terms.

    Args:
        terms: of the whole tree.
        mask: of :func:`context_parallel_mask`.

    Returns:
        Terms whose ``source`` is a row of this rank's logits ``[n, V]``; ``token`` remains the
        place in the whole pack.
    """
    row = torch.full((mask.load_balancer.seq_length,), -1, device=terms.source.device)
    positions = mask.positions.to(row.device)
    row[positions] = torch.arange(positions.numel(), device=row.device)
    source = row[terms.source]
    own = torch.nonzero(source >= 0).squeeze(1)
    return LossTerms(source[own], terms.token[own], terms.label[own], terms.multiplicity[own])


def group_of(mesh: DeviceMesh) -> Group:
    """The ranks of a mesh of one dimension.

    Raises:
        ValueError: it has more; the message says how to take one.
    """
    if mesh.ndim != 1:
        raise ValueError(
            f"context parallelism is over one mesh dimension, got a mesh of {mesh.ndim} "
            f"({mesh.mesh_dim_names}): pass mesh[name]"
        )
    group = mesh.get_group()
    return Group(group.rank(), group.size(), group.group_name)


def check_partition(load_balancer: TreeLoadBalancer, world_size: int) -> None:
    """Check that a load balancer is for so many ranks."""
    if not isinstance(load_balancer, TreeLoadBalancer):
        raise TypeError(
            f"load_balancer must be a TreeLoadBalancer, got {type(load_balancer).__name__}"
        )
    if load_balancer.world_size != world_size:
        raise ValueError(
            f"the load balancer is for {load_balancer.world_size} ranks, the mesh has {world_size}"
        )


def _check_buffers(buffers: Sequence[Any], seq_dims: Sequence[int]) -> None:
    if len(buffers) != len(seq_dims):
        raise ValueError(
            f"seq_dims must have one dimension for each of {len(buffers)} buffers, got "
            f"{len(seq_dims)}"
        )


def _check_call(
    query: Tensor,
    key: Tensor,
    mask: ContextParallelMask,
    enable_gqa: bool,
    return_aux: AuxRequest | None,
    num_chunks: int,
) -> None:
    length = mask.local.q_len
    if query.shape[2] != length or key.shape[2] != length:
        raise ValueError(
            f"rank {mask.group.rank} holds {length} tokens of this mask, got query and key of "
            f"{query.shape[2]} and {key.shape[2]}"
        )
    if mask.device != query.device:
        raise ValueError(f"the mask is on {mask.device} and query on {query.device}")
    check_options(query, key, enable_gqa, return_aux)
    if num_chunks < 1 or key.shape[1] % num_chunks:
        raise ValueError(
            f"num_chunks must divide the number of key heads {key.shape[1]}, got {num_chunks}"
        )


def _autocast(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Operands in autocast's dtype, as the op has them: before they are exchanged."""
    kind = query.device.type
    dtypes = (query.dtype, key.dtype, value.dtype)
    if not torch.is_autocast_enabled(kind) or torch.float64 in dtypes:
        return query, key, value
    dtype = torch.get_autocast_dtype(kind)
    return query.to(dtype), key.to(dtype), value.to(dtype)
