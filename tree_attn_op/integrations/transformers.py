"""Tree attention for Hugging Face transformers, as ``attn_implementation="tree_attention"``.

.. code-block:: python

    from tree_attn_op.integrations import transformers as tree_transformers

    tree_transformers.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="tree_attention")
    logits = model(**tree_transformers.model_inputs(tree)).logits

The mask goes in as ``attention_mask=tree.mask``; any other attention implementation fails on it
loudly, so that it cannot be lost. Where a model looks into its attention_mask itself, give
``tree_mask=tree.mask`` instead, a keyword argument that models hand on to their attention.

``position_ids`` are depths and jump where the tree forks. transformers takes such jumps for the
starts of unrelated sequences if it is given no mask, and would split the pack silently; this
implementation raises if no tree mask arrives.

Layers with a sliding window get it on depths. Attention sinks are exact. Soft-capped logits,
position biases, dropout, padding masks, chunked and bidirectional attention and key/value caches
are refused.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from ..arguments import check_number, check_type
from ..mask import TreeMask
from ..tree import PrefixTree
from .dispatch import as_block_mask, as_tree_mask, attention, choose_backend
from .windows import windowed

NAME = "tree_attention"

_REFUSED = {
    "softcap": "logit soft-capping changes the scores before the softmax",
    "position_bias": "a position bias is added to the scores before the softmax",
    "indices": "sparse attention picks keys of its own",
    "block_indices": "sparse attention picks keys of its own",
    "cu_seq_lens_q": "the tree mask already says which tokens belong together",
    "cu_seq_lens_k": "the tree mask already says which tokens belong together",
    "output_attentions": "the attention weights are never computed as a whole",
}
"""Options that change what attention computes, and why it does not take them."""

_NO_MASK = (
    "no tree mask reached attention: call the model with attention_mask=tree.mask (or "
    "tree_mask=tree.mask). Without it the pack would be attended to as one sequence. If this is a "
    "part of the model without a tree, such as an image encoder, give it another implementation: "
    'attn_implementation={{"text_config": "{name}", "vision_config": "sdpa"}}'
)


def register(name: str = NAME, *, backend: str | None = None) -> None:
    """Make ``attn_implementation=name`` known to transformers. Calling it again changes nothing.

    Args:
        name: how models will call it.
        backend: ``"tree"`` or ``"flex"``; None: what ``TREE_ATTN_BACKEND`` says at each call.

    Raises:
        ImportError: transformers is not installed.
        TypeError: the name is no str.
        ValueError: there is no such backend.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    check_type("name", name, str, "a str")
    if backend is not None:
        choose_backend(backend)
    AttentionInterface.register(name, partial(tree_attention_forward, backend=backend, name=name))
    # Without this, transformers hands no mask at all to an implementation that it does not know.
    AttentionMaskInterface.register(name, tree_attention_mask)


def model_inputs(tree: PrefixTree) -> dict[str, Any]:
    """The keyword arguments with which a causal LM runs over a whole tree as one sequence.

    Returns:
        ``input_ids [1, N]``, ``position_ids [1, N]`` (depths), ``attention_mask`` (the TreeMask)
        and ``use_cache=False``.

    Raises:
        TypeError: it is no tree.
    """
    check_type("tree", tree, PrefixTree, "a PrefixTree")
    return {
        "input_ids": tree.input_ids[None],
        "position_ids": tree.position_ids[None],
        "attention_mask": tree.mask,
        "use_cache": False,
    }


def flex_attention_masks(
    config: Any, mask: TreeMask, position_ids: Tensor
) -> BlockMask | dict[str, BlockMask]:
    """The ``attention_mask`` for a model that runs with ``attn_implementation="flex_attention"``.

    transformers takes a BlockMask as it is, for all layers alike. A model with sliding windows
    takes one for each kind of layer, or would see too far.

    Args:
        config: the model's configuration.
        mask: the mask, for as many queries as keys.
        position_ids: integer ``[S]`` or ``[B or 1, S]``, depths.

    Returns:
        One BlockMask, or one for each of the configuration's ``layer_types``.

    Raises:
        ValueError: the model has layers of another kind.
    """
    config = config.get_text_config()
    window: Any = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or ())
    if not kinds:
        kinds = {"full_attention" if window is None else "sliding_attention"}
    if unknown := kinds - {"full_attention", "sliding_attention"}:
        raise ValueError(
            "tree masks serve layers of full_attention and sliding_attention, the model has "
            f"{', '.join(sorted(unknown))}"
        )
    masks = {
        kind: as_block_mask(
            mask if kind == "full_attention" else windowed(mask, position_ids, window)
        )
        for kind in sorted(kinds)
    }
    return masks if len(masks) > 1 else masks.popitem()[1]


class LayerMask:
    """What the model's mask creation hands to the attention of all layers of one kind.

    Attributes:
        mask: the mask that was given to the model as attention_mask, or None.
        window: the sliding window of these layers, or None.
    """

    def __init__(self, mask: TreeMask | None, window: int | None) -> None:
        self.mask = mask
        self.window = window


def tree_attention_mask(
    *positional: Any,
    attention_mask: Tensor | TreeMask | None = None,
    local_size: int | None = None,
    q_offset: int | Tensor = 0,
    use_vmap: bool = False,
    allow_is_causal_skip: bool = True,
    config: Any = None,
    **others: Any,
) -> LayerMask:
    """transformers' mask interface: keeps the tree mask and notes the layers' window.

    Args:
        positional: sizes and a mask function, which the tree mask replaces.
        attention_mask: what the model was called with: a TreeMask of batch 1 or B, or None. A
            tensor, such as a padding mask [B, S], is refused.
        local_size: the sliding window of these layers; None: full attention.
        q_offset: tokens in a cache; must be 0.
        use_vmap, allow_is_causal_skip: set where the model adds a mask of its own.
        config: the model's.
        others: what else transformers passes; a sign of bidirectional attention is refused.

    Raises:
        ValueError: the layers' own mask is neither causal nor a sliding window, a padding mask was
            given, there are tokens in a cache, or a rank of a ContextParallelMask has no tokens.
    """
    if isinstance(attention_mask, Tensor):
        raise ValueError(
            f"attention_mask is a tensor of shape {tuple(attention_mask.shape)}, with "
            f"attn_implementation={NAME!r} it must be a TreeMask: a tree has no padding to mask"
        )
    if isinstance(q_offset, int) and q_offset != 0:
        raise ValueError(
            f"a tree runs as a whole, without a cache, got a cache of {q_offset} tokens: pass "
            "use_cache=False"
        )
    if "allow_is_bidirectional_skip" in others:
        raise ValueError(
            "a layer with bidirectional attention takes no tree mask: give this part of the model "
            "another attn_implementation"
        )
    if local_size is not None and local_size == getattr(config, "attention_chunk_size", None):
        raise ValueError(
            f"chunked attention (attention_chunk_size={local_size}) is not supported on a tree"
        )
    # Without a mask, the position ids of a tree are themselves a reason not to skip.
    own = use_vmap or (attention_mask is not None and not allow_is_causal_skip)
    if own:
        raise ValueError(
            "the model adds a mask of its own to the causal one (bidirectional blocks of image "
            "tokens, for instance), which would be lost on a tree"
        )
    _check_ranks(attention_mask)
    return LayerMask(attention_mask, local_size)


def _check_ranks(mask: object) -> None:
    """Refuse a mask with ranks that transformers cannot run, on all ranks before any waits."""
    if mask is None or isinstance(mask, (TreeMask, BlockMask)):
        return
    # Not at the top: torch.distributed is of no use to most.
    from ..distributed import ContextParallelMask

    if isinstance(mask, ContextParallelMask) and mask.has_empty_rank:
        raise ValueError(
            f"every rank must hold tokens, got {mask.load_balancer.lengths}: attention layers of "
            "transformers reshape to [B, n, -1, D], which means nothing for n = 0. Make the mask "
            "with a smaller BLOCK_SIZE, a multiple of 16, or use fewer ranks"
        )


def tree_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: LayerMask | TreeMask | BlockMask | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    position_ids: Tensor | None = None,
    tree_mask: TreeMask | None = None,
    backend: str | None = None,
    name: str = NAME,
    **options: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface.

    Args:
        module: the attention layer; not looked at.
        query: ``[B, Hq, S, D]``.
        key, value: ``[B, Hkv, S, D]`` and ``[B, Hkv, S, Dv]``.
        attention_mask: what :func:`tree_attention_mask` made, or a mask that is used as it is.
        scaling: factor of the scores; None: ``D ** -0.5``.
        dropout: must be 0.
        sliding_window: the layer's window, on positions; None: all ancestors are seen.
        s_aux: ``[Hq]``, the attention sinks.
        position_ids: ``[B or 1, S]``, depths; needed by layers with a window.
        tree_mask: the mask where it is not given as attention_mask.
        backend, name: of :func:`register`.
        options: of other implementations.

    Returns:
        ``out [B, S, Hq, Dv]`` and None for the weights.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: no mask arrived, two did, or the model asks for what is not supported.
    """
    if dropout is not None and check_number("dropout", dropout):
        raise ValueError(
            f"tree attention has no dropout, got {dropout}: set config.attention_dropout to 0, or "
            "call model.eval()"
        )
    for option, why in _REFUSED.items():
        given = options.get(option)
        if given is not None and given is not False:
            raise ValueError(f"tree attention does not support {option}: {why}")
    window = sliding_window
    given_mask: TreeMask | BlockMask | None
    if isinstance(attention_mask, LayerMask):
        given_mask = attention_mask.mask
        window = attention_mask.window if window is None else window
        if attention_mask.window not in (None, window):
            raise ValueError(
                f"the layer has a sliding window of {window}, the mask was made for layers with a "
                f"window of {attention_mask.window}"
            )
    else:
        given_mask = attention_mask
    if tree_mask is not None:
        if given_mask is not None:
            raise ValueError("pass the mask as attention_mask or as tree_mask, got both")
        given_mask = tree_mask
    if given_mask is None:
        raise ValueError(_NO_MASK.format(name=name))
    _check_ranks(given_mask)
    if window is not None:
        if position_ids is None:
            raise ValueError(
                f"a layer with a sliding window ({window}) needs position_ids (depths) to put it "
                "on the tree, and the model hands none to its attention"
            )
        given_mask = windowed(as_tree_mask(given_mask), position_ids, window)
    out = attention(
        query, key, value, given_mask, scale=scaling, sink=s_aux, backend=backend
    ).transpose(1, 2)
    return out.contiguous(), None
