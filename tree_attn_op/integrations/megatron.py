"""Tree attention for Megatron-core: a core-attention module and a spec that uses it.

.. code-block:: python

    from tree_attn_op.integrations import megatron as tree_megatron

    spec = tree_megatron.with_tree_attention(get_gpt_layer_local_spec())
    model = GPTModel(config, transformer_layer_spec=spec, position_embedding_type="rope", ...)
    logits = tree_megatron.run_tree(model, tree)

:func:`run_tree` does two things that a training loop of your own has to do as well:

- The mask goes in as ``attention_bias``, through ``extra_block_kwargs``. Megatron's recomputation
  saves its arguments for the backward, which must be tensors; ``attention_bias`` is not among
  them, so that all recomputation settings work. As ``attention_mask`` it works without.
- Megatron's rotary embeddings ignore ``position_ids`` and count places in the sequence, which on a
  tree are not depths. :func:`rotary_positions` makes them use depths while the model runs.

What is not supported is refused when the model is built: dropout, context parallelism, latent
attention, multi-token prediction, fp8 attention, maximal logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    is_layer_window_attention,
    make_sharded_tensors_for_checkpoint,
)
from megatron.core.utils import divide
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from ..mask import TreeMask
from ..tree import PrefixTree
from .dispatch import attention, choose_backend
from .windows import PositionedMask

MASK_TYPES = (TreeMask, BlockMask, PositionedMask)

_NO_MASK = (
    "no tree mask reached attention: pass it as attention_bias, for instance "
    'model(..., extra_block_kwargs={"attention_bias": tree.mask})'
)


class TreeCoreAttention(MegatronModule):
    """Attention under a tree mask, in the place of Megatron's ``DotProductAttention``.

    Grouped query heads, softmax scale, tensor and sequence parallelism, all three softmax types
    and sliding windows (on depths) are supported.

    Args:
        config, layer_number, attn_mask_type, attention_type, softmax_scale, pg_collection: as of
            ``DotProductAttention``.
        attention_dropout: must be 0, as the configuration's must be.
        cp_comm_type: of context parallelism, which is not supported.
        backend: ``"tree"`` or ``"flex"``; None: what ``TREE_ATTN_BACKEND`` says at each call.

    Raises:
        ValueError: the configuration asks for what is not supported; the message says what.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        *,
        backend: str | None = None,
    ) -> None:
        super().__init__(config=config)
        _check_config(config, attention_dropout)
        _check_mask_type(attn_mask_type)
        if attention_type != "self":
            raise ValueError(
                f"tree attention is self-attention, got attention_type={attention_type!r}"
            )
        if backend is not None:
            choose_backend(backend)
        self.backend = backend
        self.softmax_scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale
        self.window = _window(config, layer_number)
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp"])
        self.tp_group = pg_collection.tp
        heads = divide(config.num_attention_heads, self.tp_group.size())
        self._add_softmax_offset(heads)

    def _add_softmax_offset(self, heads: int) -> None:
        """A logit for each head that has no value: none, zeros, or learned ones."""
        config = self.config
        on_cpu = config.use_cpu_initialization or not torch.cuda.is_available()
        device = torch.device("cpu" if on_cpu else torch.cuda.current_device())
        options: dict[str, Any] = {"device": device, "dtype": config.params_dtype}
        if config.softmax_type == "vanilla":
            self.softmax_offset = None
        elif config.softmax_type == "off-by-one":
            self.register_buffer("softmax_offset", torch.zeros(heads, **options), persistent=False)
        elif config.softmax_type == "learnable":
            self.softmax_offset = nn.Parameter(torch.empty(heads, **options))
            if config.perform_initialization:
                config.init_method(self.softmax_offset)
        else:
            raise ValueError(
                "softmax_type must be vanilla, off-by-one or learnable, got "
                f"{config.softmax_type!r}"
            )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | TreeMask | BlockMask | PositionedMask | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | TreeMask | BlockMask | PositionedMask | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Attention of the heads of this tensor-parallel rank.

        Args:
            query: ``[S, B, Hq, D]``.
            key, value: ``[S, B, Hkv, D]``.
            attention_mask: the mask, if it is not the attention_bias; None otherwise.
            attn_mask_type: causal or arbitrary; the mask is what counts.
            attention_bias: the mask. Layers with a sliding window need a :class:`PositionedMask`.
            packed_seq_params: must be None.

        Returns:
            ``[S, B, Hq * D]``, contiguous.

        Raises:
            ValueError: no mask or two, or what is not supported.
            TypeError: a mask that is a tensor.
        """
        if packed_seq_params is not None:
            raise ValueError(
                "tree attention takes no packed_seq_params: a tree is one sequence [S, B, H, D], "
                "its mask says which tokens belong together"
            )
        _check_mask_type(attn_mask_type)
        mask = self._layer_mask(attention_mask, attention_bias)
        out = attention(
            query,
            key,
            value,
            mask,
            layout="SBHD",
            scale=self.softmax_scale,
            sink=self.softmax_offset,
            backend=self.backend,
        )
        return out.flatten(2).contiguous()

    def _layer_mask(self, attention_mask: Any, attention_bias: Any) -> TreeMask | BlockMask:
        given = {"attention_mask": attention_mask, "attention_bias": attention_bias}
        given = {name: mask for name, mask in given.items() if mask is not None}
        if not given:
            raise ValueError(_NO_MASK)
        if len(given) > 1:
            raise ValueError(
                "pass the tree mask as attention_bias and attention_mask=None, got both: a "
                f"{type(attention_mask).__name__} and a {type(attention_bias).__name__}"
            )
        ((name, mask),) = given.items()
        if not isinstance(mask, MASK_TYPES):
            raise TypeError(
                f"{name} must be a TreeMask, a BlockMask or a PositionedMask, got "
                f"{type(mask).__name__}"
            )
        if name == "attention_mask" and self.training and _recomputes_attention(self.config):
            raise ValueError(
                "Megatron's recomputation saves attention_mask, which must be a tensor then: pass "
                'the tree mask as attention_bias, extra_block_kwargs={"attention_bias": mask}'
            )
        if isinstance(mask, PositionedMask):
            return mask.windowed(self.window)
        if self.window is not None:
            raise ValueError(
                f"this layer has a sliding window of {self.window} tokens, which on a tree is one "
                "of depths: pass attention_bias=PositionedMask(mask, position_ids)"
            )
        return mask

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """The learned softmax offset, sharded by heads, under DotProductAttention's name.

        Args:
            prefix, sharded_offsets, metadata: as of every Megatron module.
        """
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"],
        )


def with_tree_attention(spec: Any, *, backend: str | None = None) -> Any:
    """A layer or block spec with :class:`TreeCoreAttention` as the core of self-attention.

    Args:
        spec: a ModuleSpec of a transformer layer, as ``get_gpt_layer_local_spec()`` or
            ``get_gpt_layer_with_transformer_engine_spec()`` give it, or
            ``TransformerBlockSubmodules`` with a list of such. It is not changed.
        backend: of TreeCoreAttention.

    Raises:
        ValueError: it has no self-attention with a core to replace.
    """
    layers = getattr(spec, "layer_specs", None)
    if layers is not None:
        return replace(
            spec, layer_specs=[with_tree_attention(one, backend=backend) for one in layers]
        )
    attention_spec: Any = getattr(getattr(spec, "submodules", None), "self_attention", None)
    submodules: Any = getattr(attention_spec, "submodules", None)
    if getattr(submodules, "core_attention", None) is None:
        raise ValueError(f"the spec has no self_attention with a core_attention: {spec!r}")
    core = ModuleSpec(module=TreeCoreAttention, params={"backend": backend})
    attention_spec = replace(attention_spec, submodules=replace(submodules, core_attention=core))
    return replace(spec, submodules=replace(spec.submodules, self_attention=attention_spec))


@contextmanager
def rotary_positions(model: nn.Module, position_ids: Tensor) -> Iterator[None]:
    """While this lasts, the model's rotary embeddings are those of ``position_ids``.

    Megatron looks them up by place in the sequence. Recomputation in the backward uses what the
    forward looked up, so this may end with the forward. Models without rotary embeddings, and
    those with multimodal ones, which take position_ids themselves, stay as they are.

    Args:
        model: the model, wrapped or not.
        position_ids: int64 ``[B, S]``, below S.
    """

    def look_up(module: nn.Module, arguments: Any, output: Any) -> Any:
        table, *rest = output if isinstance(output, tuple) else (output,)
        rows = table.flatten(0, 2)[position_ids.T.to(table.device)].unsqueeze(2)
        return (rows, *rest) if rest else rows

    with ExitStack() as hooks:
        for module in model.modules():
            if isinstance(module, RotaryEmbedding):
                hooks.callback(module.register_forward_hook(look_up).remove)
        yield


def run_tree(model: nn.Module, tree: PrefixTree, **options: Any) -> Tensor:
    """The model's result for a whole tree as one sequence.

    Args:
        model: a GPTModel, wrapped or not, whose spec is one of :func:`with_tree_attention`.
        tree: the trajectories.
        options: of the model's forward. Labels are per packed token, which at forks is not enough:
            take the logits and ``PrefixTree``'s own losses.

    Returns:
        What the model returns, for GPTModel without labels logits ``[1, N, vocabulary]``.
    """
    position_ids = tree.position_ids[None]
    bias = PositionedMask(tree.mask, position_ids)
    with rotary_positions(model, position_ids):
        return model(
            input_ids=tree.input_ids[None],
            position_ids=position_ids,
            attention_mask=None,
            extra_block_kwargs={"attention_bias": bias},
            **options,
        )


def _check_config(config: TransformerConfig, attention_dropout: float | None) -> None:
    dropout = config.attention_dropout if attention_dropout is None else attention_dropout
    # Options that not every release has are read with a default.
    for unsupported, message in (
        (dropout, f"has no dropout, got attention_dropout={dropout}: set it to 0.0"),
        (
            config.context_parallel_size > 1,
            f"does not run under context_parallel_size={config.context_parallel_size}",
        ),
        (
            getattr(config, "multi_latent_attention", False),
            "does not support multi_latent_attention: its layers rotate by place in the sequence",
        ),
        (
            getattr(config, "mtp_num_layers", None),
            "does not support mtp_num_layers: such layers shift the pack by a token, which is "
            "wrong at forks",
        ),
        (
            getattr(config, "qk_clip", False) or getattr(config, "log_max_attention_logit", False),
            "does not compute maximal logits: turn off qk_clip and log_max_attention_logit",
        ),
        (
            getattr(config, "fp8_dot_product_attention", False)
            or getattr(config, "fp8_multi_head_attention", False),
            "has no fp8: turn off fp8_dot_product_attention and fp8_multi_head_attention",
        ),
    ):
        if unsupported:
            raise ValueError(f"tree attention {message}")


def _recomputes_attention(config: TransformerConfig) -> bool:
    if config.recompute_granularity == "selective":
        return "core_attn" in (getattr(config, "recompute_modules", None) or ("core_attn",))
    return config.recompute_granularity is not None


def _check_mask_type(attn_mask_type: AttnMaskType | None) -> None:
    if attn_mask_type not in (None, AttnMaskType.causal, AttnMaskType.arbitrary):
        raise ValueError(
            "attn_mask_type must be causal or arbitrary, as the tree mask is all that there is, "
            f"got {getattr(attn_mask_type, 'name', attn_mask_type)}"
        )


def _window(config: TransformerConfig, layer_number: int) -> int | None:
    """How many depths a token of this layer sees, its own included; None: all."""
    window: Any = getattr(config, "window_size", None)
    skip = getattr(config, "window_attn_skip_freq", None)
    if not is_layer_window_attention(window, skip, max(1, layer_number)):
        return None
    before, after = window
    if after not in (0, -1) or before < -1:
        raise ValueError(f"window_size must be (tokens before, 0), got {tuple(window)}")
    # Megatron counts the tokens before a token, -1 for all of them.
    return None if before == -1 else before + 1
