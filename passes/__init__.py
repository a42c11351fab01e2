"""Rewrites flex_attention calls in torch.compile graphs to the tree attention op.

torch.compile(model, backend="tree_attn")                                  # by name, no import
torch.compile(model, options={"pre_grad_custom_pass": TreeAttentionPass()})
passes.install(); torch.compile(model)
print(passes.explain(model, inputs))                                       # what, and why not
"""

from .backend import install, tree_attn, uninstall
from .explain import explain
from .options import PassOptions
from .report import CallReport, Report
from .rewrite import TreeAttentionPass

__all__ = [
    "CallReport",
    "PassOptions",
    "Report",
    "TreeAttentionPass",
    "explain",
    "install",
    "tree_attn",
    "uninstall",
]
