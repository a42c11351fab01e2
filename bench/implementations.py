"""What is measured, by name."""

from __future__ import annotations

from .base import Implementation
from .ours import (
    DeterministicTreeAttention,
    FastHopperKernels,
    HopperKernels,
    PortableKernels,
    TreeAttention,
)
from .peers import Flex, FlexFlash, Gather, SdpaCausal, Unpacked

IMPLEMENTATIONS: dict[str, type[Implementation]] = {
    implementation.name: implementation
    for implementation in (
        Flex,
        FlexFlash,
        Gather,
        TreeAttention,
        DeterministicTreeAttention,
        PortableKernels,
        HopperKernels,
        FastHopperKernels,
        Unpacked,
        SdpaCausal,
    )
}
BASELINE = Flex.name
COMPARED = (Flex.name, FlexFlash.name, Gather.name)
"""Those whose time is set against that of all others, the baseline first."""
