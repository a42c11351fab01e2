"""Context parallelism: the tokens of one tree on several ranks.

Each rank holds some query tiles (:class:`TreeLoadBalancer`) and runs the model on those tokens.
Attention gathers the keys and values of all ranks, computes the rank's queries against them, and
sums the gradients of keys and values back to where the tokens live. This is the all-gather form of
context parallelism (as in Llama 3, arXiv:2407.21783, section 3.3.2): it asks nothing of the mask,
where a ring exchange relies on causal chunks.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest

from .. import validation
from ..api import list_blocks
from ..arguments import check_number, check_type
from ..lasting import lasting
from ..mask import TreeMask
from ..tree import LossTerms
from . import arguments, checks
from .arguments import check_partition, group_of
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
        has_empty_rank: whether some rank holds no token.
        fingerprint: int64, 0-d, of whole mask and partition; None: made in compiled code.
    """

    # No dataclass, for the same reason as TreeMask.

    mesh: DeviceMesh
    local: TreeMask
    load_balancer: TreeLoadBalancer
    places: Tensor
    tokens: Tensor
    group: Group
    has_empty_rank: bool
    fingerprint: Tensor | None

    def __init__(
        self,
        mesh: DeviceMesh,
        mask: TreeMask,
        load_balancer: TreeLoadBalancer,
        fingerprint: Tensor | None,
    ) -> None:
        group = group_of(mesh)
        for name, given in (
            ("mesh", mesh),
            ("local", shard_mask(mask, load_balancer, group.rank)),
            ("load_balancer", load_balancer),
            ("places", lasting(load_balancer.places(mask.device))),
            ("tokens", lasting(load_balancer.padded_tokens(mask.device))),
            ("group", group),
            ("has_empty_rank", 0 in load_balancer.lengths),
            ("fingerprint", fingerprint),
        ):
            object.__setattr__(self, name, given)
        # Dynamo takes seconds to import, and what has not imported it has compiled nothing.
        if "torch._dynamo" in sys.modules and not torch.compiler.is_compiling():
            self._mark_lengths()

    def _mark_lengths(self) -> None:
        """Tell Dynamo which sizes differ from mask to mask.

        Tokens, blocks and the longest shard do not all change at once: it would else find them
        one by one, each with a graph of its own. Sizes that it wants constant stay so.
        """
        local = self.local
        for values in (self.places, self.tokens, local.q_vals, local.k_vals):
            torch._dynamo.maybe_mark_dynamic(values, values.dim() - 1)
        for one in local.lists.tensors:
            if one is not None:
                torch._dynamo.maybe_mark_dynamic(one, list(range(2, one.dim())))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("a ContextParallelMask is immutable")

    def __delattr__(self, name: str) -> None:
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
    check_type("mask", mask, TreeMask, "a TreeMask")
    kinds = (TreeLoadBalancer, type(None))
    check_type("load_balancer", load_balancer, kinds, "a TreeLoadBalancer or None")
    arguments.check_optional_bool("check", check)
    # While torch.compile traces nothing is compared, and the values are not there.
    fields = None if torch.compiler.is_compiling() else checks.mask_fields(mask)
    if fields is not None and checks.checks_masks(check):
        # First of all: what one rank refuses, the others would wait for.
        checks.check_masks(fields, load_balancer, mask.device, group)
    if load_balancer is None:
        load_balancer = TreeLoadBalancer.of_mask(mask, group.size)
    check_partition(load_balancer, group.size)
    if not load_balancer.seq_length == mask.q_len == mask.kv_len:
        raise ValueError(
            f"the mask is for {mask.q_len} queries and {mask.kv_len} keys, both must be the "
            f"load balancer's length {load_balancer.seq_length}"
        )
    checked_tile_size(mask, load_balancer.tile_size)
    fingerprint = None
    if fields is not None:
        fingerprint = checks.fingerprint(fields, load_balancer, mask.device)
    return ContextParallelMask(mesh, mask, load_balancer, fingerprint)


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
        reduce_dtype: floating-point, in which the gradients of keys and values are summed over the
            ranks; None: their own.
        check: compare the call between the ranks; None: if ``TREE_ATTN_CHECK_RANKS=1``. Compiled
            code compares nothing.

    Returns:
        ``out [B, Hq, n, Dv]`` and, with ``return_aux``, ``lse [B, Hq, n]`` of this rank's queries.

    Raises:
        TypeError, ValueError: as of ``tree_attention``.
        RankMismatchError: calls, lengths or dtypes differ between the ranks.
    """
    check_type("mask", mask, ContextParallelMask, "a ContextParallelMask")
    for name, operand in (("query", query), ("key", key), ("value", value)):
        arguments.check_local(name, operand)
    validation.check_ranks_and_devices(query, key, value)
    scale = query.shape[3] ** -0.5 if scale is None else check_number("scale", scale)
    arguments.check_exchange(num_chunks, reshard_after_forward, reduce_dtype)
    arguments.check_optional_bool("check", check)
    if not torch.compiler.is_compiling() and checks.checks_calls(check):
        options = (num_chunks, reshard_after_forward, reduce_dtype)
        lengths, own = mask.load_balancer.lengths, mask.fingerprint
        checks.check_call(query, key, value, own, lengths, scale, options, mask.group)
    query, key, value = _autocast(query, key, value)
    validation.check_operands(query, key, value)
    arguments.check_call(query, key, mask, enable_gqa, return_aux, num_chunks)
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
        scale,
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
        TypeError: what is no plain tensor, mask or dimension.
        ValueError: a length that is not the load balancer's, or dimensions that do not fit.
    """
    group = group_of(mesh)
    check_partition(load_balancer, group.size)
    length = load_balancer.seq_length
    arguments.check_buffers(buffers, seq_dims, masks=True)
    arguments.check_lengths(buffers, seq_dims, length, "the load balancer is for")
    shards: list[Any] = []
    for buffer, dim in zip(buffers, seq_dims, strict=True):
        if isinstance(buffer, TreeMask):
            shards.append(context_parallel_mask(mesh, buffer, load_balancer))
            continue
        positions = load_balancer.positions(group.rank, buffer.device)
        shards.append(buffer.index_select(dim, positions))
    return shards


@torch.no_grad()
def context_parallel_unshard(
    mesh: DeviceMesh,
    buffers: Sequence[Tensor],
    seq_dims: Sequence[int],
    load_balancer: TreeLoadBalancer,
    *,
    check: bool | None = None,
) -> list[Tensor]:
    """The whole tensors, in the order of the sequence, on every rank.

    Like ``torch.distributed.tensor.experimental._attention.context_parallel_unshard``, for shards
    of any lengths; without gradients, as that is. Every rank of the mesh has to call it.

    Args:
        mesh: one-dimensional.
        buffers: this rank's parts, as :func:`context_parallel_shard` gives them.
        seq_dims: the dimension of each that is the sequence.
        load_balancer: which rank holds which tokens.
        check: compare dtypes and sizes between the ranks; None: if ``TREE_ATTN_CHECK_RANKS=1``.
            Compiled code compares nothing.

    Raises:
        TypeError: what is no plain tensor or dimension.
        ValueError: a length that is not this rank's, or dimensions that do not fit.
        RankMismatchError: buffers or partitions differ between the ranks.
    """
    group = group_of(mesh)
    check_partition(load_balancer, group.size)
    arguments.check_optional_bool("check", check)
    arguments.check_buffers(buffers, seq_dims, masks=False)
    if not torch.compiler.is_compiling() and checks.checks_calls(check):
        device = torch.device(mesh.device_type)
        checks.check_unshard(buffers, seq_dims, load_balancer, device, group)
    lengths = load_balancer.lengths
    holder = f"rank {group.rank} holds"
    arguments.check_lengths(buffers, seq_dims, lengths[group.rank], holder)
    whole = []
    for buffer, dim in zip(buffers, seq_dims, strict=True):
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

    Raises:
        TypeError: terms or a mask of another type.
        ValueError: terms of a tree of another length than the mask's.
    """
    check_type("terms", terms, LossTerms, "LossTerms")
    check_type("mask", mask, ContextParallelMask, "a ContextParallelMask")
    arguments.check_loss_terms(terms, mask.load_balancer.seq_length)
    row = torch.full((mask.load_balancer.seq_length,), -1, device=terms.source.device)
    positions = mask.positions.to(row.device)
    row[positions] = torch.arange(positions.numel(), device=row.device)
    source = row[terms.source]
    own = torch.nonzero(source >= 0).squeeze(1)
    tensors = (source[own], terms.token[own], terms.label[own], terms.multiplicity[own])
    return LossTerms(*tensors, num_tokens=terms.num_tokens)


def _autocast(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Operands in autocast's dtype, as the op has them: before they are exchanged."""
    kind = query.device.type
    dtypes = (query.dtype, key.dtype, value.dtype)
    if not torch.is_autocast_enabled(kind) or torch.float64 in dtypes:
        return query, key, value
    dtype = torch.get_autocast_dtype(kind)
    return query.to(dtype), key.to(dtype), value.to(dtype)
