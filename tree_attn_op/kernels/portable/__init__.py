"""Tree attention for any GPU that Triton supports, and for Triton's interpreter."""

from tree_attn_op.kernels.portable.launch import backward, forward

__all__ = ["backward", "forward"]
