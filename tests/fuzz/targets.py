"""The public functions, with arguments that they take."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest

import passes
from tree_attn_op import Predicate, PrefixTree, TreeMask, tree_attention
from tree_attn_op import create_block_mask as linear_block_mask
from tree_attn_op.integrations import dispatch, transformers, windows
from tree_attn_op.tree.plot import plot_mask

from ..attention_cases import operands, tree_case
from .malformed import Target

LENGTH = 40


def _mask() -> TreeMask:
    made = tree_case(LENGTH)
    return TreeMask(Predicate.parse(made.predicate), made.q_vals, made.k_vals, made.lists)


def _qkv() -> dict[str, Any]:
    names = ("query", "key", "value")
    tensors = operands(2, (2, 1), (LENGTH, LENGTH), (8, 8), dtype=torch.float32)
    return dict(zip(names, tensors, strict=True))


def _op_mask() -> dict[str, Any]:
    made = tree_case(LENGTH)
    names = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
    names += ("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices")
    return {
        "q_vals": made.q_vals,
        "k_vals": made.k_vals,
        "predicate": made.predicate,
        **dict(zip(names, made.lists.tensors, strict=True)),
        "q_block_size": 32,
        "kv_block_size": 32,
        "scale": 0.3,
    }


def _mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def _nothing() -> None:
    pass


def _tree() -> PrefixTree:
    return PrefixTree.from_sequences([[1, 2, 3, 4], [1, 2, 5], [1, 2, 3, 6, 7]])


def _logits() -> Tensor:
    return torch.randn(_tree().num_tokens, 10)


def _positioned() -> dict[str, Any]:
    tree = _tree()
    return {"mask": tree.mask, "position_ids": tree.position_ids}


def _block_lists_arguments() -> dict[str, Any]:
    names = ("q_vals", "k_vals", "predicate", "kv_num_blocks", "kv_indices", "full_kv_num_blocks")
    names += ("full_kv_indices", "q_block_size", "kv_block_size")
    given = {name: value for name, value in _op_mask().items() if name in names}
    return {
        **given,
        "q_len": LENGTH,
        "kv_len": LENGTH,
        "new_q_block_size": 16,
        "new_kv_block_size": 32,
    }


def _backward_arguments() -> dict[str, Any]:
    arguments = {**_qkv(), **_op_mask()}
    out, lse = torch.ops.tree_attn_op.tree_attention(**arguments)
    return {
        "grad_out": torch.randn_like(out),
        "grad_lse": torch.randn_like(lse),
        "out": out,
        "lse": lse,
        **arguments,
    }


# Wrong values, by label, that some arguments take all the same.
_NUMBERS = ("a float", "a negative int", "a huge int")
_INTEGERS = ("an array", r"of torch\.int(16|64)")
_FLAGS = ("None", "an array", "a complex tensor", r"of torch\..*")
_DTYPES = (r"of torch\..*",)
_WIDTHS = ("shorter in dim 3", "longer in dim 3")
# Rows that the predicate does not read, and a batch where there was none.
_MORE_ROWS = ("longer in dim 1", "longer in dim 0")
_NO_BATCH = ("empty",)
_DEFAULT = ("None",)

_OP_LISTS = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
_OP_LISTS += ("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices")
# The dispatcher refuses sparse tensors before any code of ours runs.
_OP_TENSORS = ("query", "key", "value", "q_vals", "k_vals", "out", "lse", "grad_out", "grad_lse")
_OP_NAMES = dict.fromkeys((*_OP_TENSORS, *_OP_LISTS, "scale"), ("SparseCPU", "SparseTensorImpl"))
# The schema turns a scalar tensor into a number.
_SCALE = {"scale": (*_NUMBERS, "a scalar tensor")}

_VALUES = {"q_vals": _NO_BATCH, "k_vals": (*_NO_BATCH, *_MORE_ROWS)}
# The length of values without rows is not looked at.
_ANY_LENGTH = {**_VALUES, "q_vals": (*_NO_BATCH, r"(short|long)er in dim 2")}
# Where two arguments contradict each other, the error may call the other one wrong.
_OTHER_VALUES = {"q_vals": ("k_vals",)}
_LENGTHS = {"q_len": ("length",), "kv_len": ("length",)}
_LOGITS = {
    "logits": ("one dimension more", *_WIDTHS, *(f"{w}er in dim 1" for w in ("short", "long"))),
    "temperature": ("a float", "a huge int"),
}
_LOGITS["logits"] += ("of torch.float64",)


def _values() -> dict[str, Any]:
    return {"q_vals": _mask().q_vals, "k_vals": _mask().k_vals}


def _lengths() -> dict[str, Any]:
    return {"q_len": LENGTH, "kv_len": LENGTH}


def _sizes() -> dict[str, Any]:
    return {"Q_LEN": LENGTH, "KV_LEN": LENGTH, "device": "cpu", "BLOCK_SIZE": 32}


def _of_tree(name: str) -> Any:
    return lambda **arguments: getattr(_tree(), name)(**arguments)


OPS = [
    Target(
        "tree_attention",
        torch.ops.tree_attn_op.tree_attention,
        lambda: {**_qkv(), **_op_mask()},
        accepted={**_SCALE, "value": _WIDTHS, "k_vals": _MORE_ROWS},
        also_named=_OP_NAMES,
    ),
    Target(
        "tree_attention_backward",
        torch.ops.tree_attn_op.tree_attention_backward,
        _backward_arguments,
        accepted={
            **_SCALE,
            "k_vals": _MORE_ROWS,
            "grad_out": ("of torch.float64",),
            "grad_lse": ("None", "of torch.float64"),
            "out": ("of torch.float64",),
            "lse": ("of torch.float64",),
        },
        also_named={**_OP_NAMES, "value": (*_OP_NAMES["value"], "grad_out")},
    ),
    Target(
        "block_lists",
        torch.ops.tree_attn_op.block_lists,
        _block_lists_arguments,
        accepted=_VALUES,
        also_named={**_OP_NAMES, **_LENGTHS, "q_vals": (*_OP_NAMES["q_vals"], "k_vals")},
    ),
]

ATTENTION = [
    Target(
        "tree_attention",
        tree_attention,
        lambda: {
            **_qkv(),
            "mask": _mask(),
            "scale": 0.2,
            "enable_gqa": True,
            "return_aux": AuxRequest(lse=True),
        },
        accepted={"value": _WIDTHS, "scale": ("None", *_NUMBERS), "return_aux": _DEFAULT},
    ),
    Target(
        "integrations.dispatch.attention",
        dispatch.attention,
        lambda: {
            **_qkv(),
            "mask": _mask(),
            "layout": "BHSD",
            "scale": 0.2,
            "sink": torch.zeros(2),
            "backend": "tree",
        },
        accepted={
            "value": _WIDTHS,
            "scale": ("None", *_NUMBERS),
            "sink": ("None", *_DTYPES),
            "backend": _DEFAULT,
        },
    ),
    Target(
        "integrations.dispatch.choose_backend",
        dispatch.choose_backend,
        lambda: {"backend": "tree"},
        accepted={"backend": _DEFAULT},
    ),
    Target(
        "integrations.dispatch.add_sink",
        dispatch.add_sink,
        lambda: {
            "out": torch.randn(1, 2, 5, 4),
            "lse": torch.randn(1, 2, 5),
            "sink": torch.zeros(2),
        },
        accepted={
            "out": (*_DTYPES, *_WIDTHS),
            "lse": ("of torch.float64",),
            "sink": _DTYPES,
        },
        also_named={"out": ("sink", "lse")},
    ),
    Target("integrations.dispatch.as_tree_mask", dispatch.as_tree_mask, lambda: {"mask": _mask()}),
    Target(
        "integrations.dispatch.as_block_mask", dispatch.as_block_mask, lambda: {"mask": _mask()}
    ),
    Target(
        "integrations.windows.windowed",
        windows.windowed,
        lambda: {**_positioned(), "window": 2},
        accepted={
            "position_ids": ("one dimension more", "of torch.int16"),
            "window": ("a huge int",),
        },
    ),
    Target(
        "integrations.windows.PositionedMask.windowed",
        lambda mask, position_ids, window: windows.PositionedMask(mask, position_ids).windowed(
            window
        ),
        lambda: {**_positioned(), "window": 2},
        accepted={
            "position_ids": ("one dimension more", "of torch.int16"),
            "window": ("None", "a huge int"),
        },
    ),
]

MASKS = [
    Target(
        "TreeMask",
        TreeMask,
        lambda: {"predicate": _mask().predicate, **_values(), "lists": _mask().lists},
        accepted=_VALUES,
        also_named=_OTHER_VALUES,
    ),
    Target(
        "TreeMask.from_predicate",
        TreeMask.from_predicate,
        lambda: {"predicate": "q >= k & q < k0", **_values(), **_lengths(), "BLOCK_SIZE": 32},
        accepted=_VALUES,
        also_named={**_OTHER_VALUES, "predicate": ("not a predicate",)},
    ),
    Target(
        "TreeMask.from_mask_mod",
        TreeMask.from_mask_mod,
        lambda: {"mask_mod": _mask_mod, "B": 1, **_sizes()},
        accepted={"B": _DEFAULT},
        also_named={"mask_mod": ("returns something other",)},
    ),
    Target(
        "TreeMask.from_block_mask",
        TreeMask.from_block_mask,
        lambda: {"block_mask": _mask().block_mask},
    ),
    Target("TreeMask.to", lambda **given: _mask().to(**given), lambda: {"device": "cpu"}),
    Target(
        "TreeMask.block_lists_for",
        lambda **given: _mask().block_lists_for(**given),
        lambda: {"q_block_size": 16, "kv_block_size": 16},
    ),
    Target(
        "create_block_mask",
        linear_block_mask,
        lambda: {"mask_mod": _mask_mod, "B": 1, "H": 1, **_sizes()},
        accepted={"B": _DEFAULT, "H": _DEFAULT, "device": _DEFAULT},
        # What cannot be proven goes to flex's builder, whose error it then is.
        left_out={"mask_mod": ("a function",)},
    ),
    Target("Predicate", Predicate, lambda: {"root": _mask().predicate.root}),
    Target(
        "Predicate.parse",
        Predicate.parse,
        lambda: {"text": "q >= k"},
        also_named={"text": ("predicate",)},
    ),
    Target(
        "Predicate.check_values", _mask().predicate.check_values, _values, accepted=_ANY_LENGTH
    ),
    Target(
        "Predicate.dense",
        _mask().predicate.dense,
        lambda: {**_values(), **_lengths()},
        accepted=_ANY_LENGTH,
    ),
    Target(
        "tree.plot.plot_mask",
        plot_mask,
        lambda: {"mask": _mask(), "batch": 0},
    ),
]

_SEQUENCES = {"sequences": ("sequence",)}

TREES = [
    Target(
        "PrefixTree.from_sequences",
        PrefixTree.from_sequences,
        lambda: {"sequences": [[1, 2], [1, 3]], "share_lengths": [1, 1], "device": "cpu"},
        accepted={"share_lengths": _DEFAULT, "device": _DEFAULT},
        also_named=_SEQUENCES,
    ),
    Target(
        "PrefixTree.from_padded",
        PrefixTree.from_padded,
        lambda: {
            "input_ids": torch.ones(2, 3, dtype=torch.int64),
            "attention_mask": torch.ones(2, 3),
            "share_lengths": torch.tensor([1, 1]),
            "device": "cpu",
        },
        accepted={
            "input_ids": _INTEGERS,
            "attention_mask": _FLAGS,
            "share_lengths": ("None", *_INTEGERS),
            "device": _DEFAULT,
        },
        also_named={"input_ids": ("attention_mask",)},
    ),
    Target(
        "PrefixTree.from_ragged",
        PrefixTree.from_ragged,
        lambda: {
            "input_ids": torch.arange(5),
            "cu_seqlens": torch.tensor([0, 2, 5]),
            "share_lengths": torch.tensor([1, 1]),
            "device": "cpu",
        },
        accepted={
            "input_ids": _INTEGERS,
            "cu_seqlens": _INTEGERS,
            "share_lengths": ("None", *_INTEGERS),
            "device": _DEFAULT,
        },
    ),
    Target(
        "PrefixTree.from_parents",
        PrefixTree.from_parents,
        lambda: {
            "parents": torch.tensor([-1, 0, 0, 1]),
            "input_ids": torch.arange(4),
            "attention_mask": torch.ones(4),
            "ends": torch.tensor([2, 3]),
            "device": "cpu",
        },
        accepted={
            "parents": _INTEGERS,
            "input_ids": ("None", *_INTEGERS),
            "attention_mask": _FLAGS,
            # Any number of trajectories, which may end at one token.
            "ends": ("None", "empty", "shorter in dim 0", "longer in dim 0", *_INTEGERS),
            "device": _DEFAULT,
        },
        also_named={"parents": ("attention_mask", "input_ids")},
    ),
    Target(
        "PrefixTree.from_groups",
        PrefixTree.from_groups,
        lambda: {
            "group_ids": torch.tensor([0, 0, 1, 2]),
            "parent_ids": torch.tensor([-1, -1, 0, 0]),
            "input_ids": torch.arange(4),
            "attention_mask": torch.ones(4),
            "device": "cpu",
        },
        accepted={
            "group_ids": _INTEGERS,
            "parent_ids": _INTEGERS,
            "input_ids": ("None", *_INTEGERS),
            "attention_mask": _FLAGS,
            "device": _DEFAULT,
        },
    ),
    Target(
        "PrefixTree.from_nodes",
        PrefixTree.from_nodes,
        lambda: {"nodes": [(-1, [1, 2]), (0, [3])], "ends": [1], "device": "cpu"},
        accepted={"ends": _DEFAULT, "device": _DEFAULT},
        also_named={"nodes": ("node",)},
    ),
    Target(
        "PrefixTree.pack",
        PrefixTree.pack,
        lambda: {
            "sequences": [[1, 2], [1, 3]],
            "max_tokens": 10,
            "num_ranks": 2,
            "min_trees": 1,
            "share_lengths": [1, 1],
            "device": "cpu",
        },
        accepted={"share_lengths": _DEFAULT, "device": _DEFAULT},
        also_named=_SEQUENCES,
    ),
    Target("PrefixTree.to", _of_tree("to"), lambda: {"device": "cpu"}),
    Target(
        "PrefixTree.positions",
        _of_tree("positions"),
        lambda: {"index": 1},
        accepted={"index": ("a negative int",)},
    ),
    Target(
        "PrefixTree.unpack",
        _of_tree("unpack"),
        lambda: {"x": torch.randn(2, _tree().num_tokens), "dim": 1},
        accepted={"x": ("on meta", "empty", *_DTYPES, r"(short|long)er in dim 0")},
    ),
    Target(
        "PrefixTree.scatter",
        _of_tree("scatter"),
        lambda: {"values": torch.randn(12), "reduction": "sum", "tolerance": 0.0},
        accepted={"values": ("on meta", "one dimension more", *_DTYPES), "tolerance": _NUMBERS},
    ),
    Target(
        "PrefixTree.scatter",
        _of_tree("scatter"),
        lambda: {"values": torch.ones(12), "reduction": "equal", "tolerance": 0.0},
        accepted={"values": _DTYPES, "tolerance": ("a float", "a huge int")},
    ),
    *(
        Target(
            f"PrefixTree.{name}",
            _of_tree(name),
            lambda: {"logits": _logits(), "temperature": 1.0},
            accepted=_LOGITS,
        )
        for name in ("token_logprobs", "token_entropy", "gather_logprobs", "gather_entropy")
    ),
]

PASSES = [
    Target("passes.PassOptions", passes.PassOptions, lambda: {"plan": "lists"}),
    Target("passes.TreeAttentionPass", passes.TreeAttentionPass, lambda: {"plan": "lists"}),
    Target("passes.install", passes.install, lambda: {"plan": "lists"}),
    Target(
        "passes.explain",
        lambda fn, plan: passes.explain(fn, plan=plan),
        lambda: {"fn": _nothing, "plan": "lists"},
        accepted={"fn": ("a function",)},
        also_named={"fn": ("explain takes",)},
    ),
]

_FORWARD = {"scaling": ("scale",), "s_aux": ("sink",), "attention_mask": ("mask",)}

TRANSFORMERS = [
    Target(
        "integrations.transformers.model_inputs",
        transformers.model_inputs,
        lambda: {"tree": _tree()},
    ),
    Target(
        "integrations.transformers.tree_attention_forward",
        lambda **given: transformers.tree_attention_forward(None, **given),
        lambda: {
            **_qkv(),
            "attention_mask": _mask(),
            "scaling": 0.2,
            "dropout": 0.0,
            "sliding_window": 3,
            "s_aux": torch.zeros(2),
            "position_ids": torch.arange(LENGTH)[None],
            "tree_mask": None,
            "backend": "tree",
        },
        accepted={
            "value": _WIDTHS,
            "scaling": ("None", *_NUMBERS),
            "dropout": _DEFAULT,
            "sliding_window": ("None", "a huge int"),
            "s_aux": ("None", *_DTYPES),
            "position_ids": ("of torch.int16", "one dimension less", "longer in dim 0"),
            "tree_mask": _DEFAULT,
            "backend": _DEFAULT,
        },
        also_named={**_FORWARD, "sliding_window": ("window",), "tree_mask": ("both",)},
    ),
    Target(
        "integrations.transformers.register",
        transformers.register,
        lambda: {"name": "tree_attention", "backend": "tree"},
        accepted={"backend": _DEFAULT},
        # Right, and would stay registered.
        left_out={"name": ("text",)},
    ),
]

TARGETS = [*OPS, *ATTENTION, *MASKS, *TREES, *PASSES, *TRANSFORMERS]
