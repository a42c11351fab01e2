"""GPU kernels: data in, data out. Nothing here knows of ``torch.library`` or of a mask_mod.

Importing this package or :mod:`.configs` needs neither Triton nor a GPU; the implementations below
it (``portable``) import Triton.
"""
