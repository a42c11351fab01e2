"""Tree attention inside frameworks. Nothing is imported or patched until you ask for it.

- ``tree_attn_op.integrations.transformers``: ``register()`` for Hugging Face models;
- ``tree_attn_op.integrations.megatron``: a core-attention module for Megatron-core;
- ``tree_attn_op.integrations.dispatch``: layouts, sinks and the choice of backend, which those
  share and which an engine of your own can call;
- ``tree_attn_op.integrations.windows``: sliding windows on tree positions.
"""
