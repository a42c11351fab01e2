"""Tree attention for any GPU that Triton supports, and for Triton's interpreter."""

from tree_attn_op.kernels.portable.calls import backward, forward, plan_backward, plan_forward

__all__ = ["backward", "forward", "plan_backward", "plan_forward"]
