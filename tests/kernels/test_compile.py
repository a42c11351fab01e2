"""Odd calls and choices of a configuration, compiled without a GPU; all that ships: resources."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import get_args

import pytest
import torch

triton = pytest.importorskip("triton")

from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

from tests.kernels.aot import (  # noqa: E402
    compile_kernel,
    compiled_for,
    compiling_for,
    config_of,
    launch_of,
    target_of,
)
from tests.kernels.cases import Case, make_inputs, with_meaningless_strides  # noqa: E402
from tests.kernels.resources import device_of, resource_tool, resources_of  # noqa: E402
from tree_attn_op.kernels import configs  # noqa: E402
from tree_attn_op.kernels.configs import CUDA_DEVICES, HIP, Device, Kernel  # noqa: E402

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter does not compile"
)

KERNELS: tuple[Kernel, ...] = get_args(Kernel)
BASE = Case(
    heads=8,
    kv_heads=1,
    q_len=256,
    kv_len=256,
    blocks=(128, 128),
    value_range=(0, 256),
    dtype=torch.bfloat16,
)


def check_compiles(kernel: Kernel, case: Case, architecture: int | str) -> None:
    device = device_of(architecture)
    config = config_of(kernel, device, case)
    compiled = compile_kernel(kernel, case, config, architecture)
    shared = compiled.metadata.shared
    assert shared <= device.shared_memory, f"{config} needs {shared} bytes of shared memory"


ODD = {
    "tails": replace(BASE, dim=72, value_dim=40, q_len=250, kv_len=249),
    "dims_192_128": replace(BASE, dim=192, value_dim=128),
    "lists_per_head": replace(BASE, dim=64, list_heads=8, blocks=(48, 16)),
    "int64": replace(
        BASE, dim=64, values=torch.int64, predicate="q0 - k0 < 5 & (q1 != k1 | k > 3)"
    ),
}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", ODD)
def test_odd_calls(name: str, kernel: Kernel) -> None:
    check_compiles(kernel, ODD[name], 90)


@pytest.mark.parametrize("kernel", KERNELS)
def test_tf32_where_the_user_allows_it(kernel: Kernel) -> None:
    case = replace(BASE, dim=64, dtype=torch.float32)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        compiled = compile_kernel(kernel, case, config_of(kernel, CUDA_DEVICES[80], case), 80)
    finally:
        torch.set_float32_matmul_precision(before)
    assert "inputPrecision = tf32" in compiled.asm["ttir"]


@pytest.mark.parametrize("kernel", KERNELS)
def test_float32_is_exact_by_default(kernel: Kernel) -> None:
    case = replace(BASE, dim=64, dtype=torch.float32)
    compiled = compile_kernel(kernel, case, config_of(kernel, CUDA_DEVICES[86], case), 86)
    assert "inputPrecision = tf32" not in compiled.asm["ttir"]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dim", [64, 128])
def test_hopper_uses_its_matrix_units_and_does_not_spill(
    dim: int, kernel: Kernel, record_property: Callable[[str, object], None]
) -> None:
    if not resource_tool().exists():
        pytest.skip("this Triton ships no cuobjdump")
    case = replace(BASE, dim=dim)
    compiled = compile_kernel(kernel, case, config_of(kernel, CUDA_DEVICES[90], case), 90)
    assert "wgmma.mma_async" in compiled.asm["ptx"]
    assert "mma.sync" not in compiled.asm["ptx"]
    needs = resources_of(compiled)
    record_property("registers", needs.registers)
    record_property("stack_bytes", needs.stack)
    # Triton 3.6 spills 64 bytes of dQ at D=64, 3.7 none.
    assert needs.stack <= 64, needs


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("q_len", [1, 256])
def test_meaningless_strides_keep_the_copy_engine(q_len: int, kernel: Kernel) -> None:
    """The stride of a dimension of size 1 changes neither what is compiled nor what it reads."""
    case = replace(BASE, heads=2, q_len=q_len, dim=64)
    config = config_of(kernel, CUDA_DEVICES[90], case)
    inputs = make_inputs(case)
    plain = launch_of(kernel, case, config, inputs)
    odd = launch_of(kernel, case, config, with_meaningless_strides(inputs))
    descriptors = 0
    for name, argument in odd.arguments.items():
        if isinstance(argument, TensorDescriptor):
            descriptors += 1
            assert argument.base.data_ptr() == plain.arguments[name].base.data_ptr()
            assert vars(argument) | {"base": 0} == vars(plain.arguments[name]) | {"base": 0}
    assert descriptors == (4 if kernel == "dkdv" else 2)
    compiled = compiled_for(90, odd)
    assert "cp.async.bulk.tensor" in compiled.asm["ptx"]


def test_another_length_is_no_other_kernel() -> None:
    from tree_attn_op.kernels.portable import launch
    from tree_attn_op.kernels.portable.forward import forward_kernel

    target = target_of(90)
    binaries = set()
    for length in (97, 98, 112, 1000, 1501):
        case = replace(BASE, dim=64, q_len=length, kv_len=length, value_range=(0, length))
        inputs = make_inputs(case)
        problem = launch.Problem(
            inputs.query,
            inputs.key,
            inputs.value,
            inputs.q_vals,
            inputs.k_vals,
            case.predicate,
            *case.blocks,
            case.softmax_scale,
        )
        out, lse = torch.empty_like(inputs.query), torch.empty(inputs.query.shape[:3])
        config = problem.config("forward", True)
        planned = launch.forward_launch(problem, launch.Lists(*inputs.key_lists), out, lse, config)
        with compiling_for(target):
            compiled = forward_kernel.warmup(
                grid=planned.grid, **planned.arguments, **planned.options
            )
        binaries.add(compiled.hash)
    assert len(binaries) == 1


@pytest.mark.parametrize(
    ("group", "share", "q_block", "pack", "tokens"),
    [
        (4, True, 128, 2, 64),
        (4, True, 16, 4, 16),
        (8, True, 48, 8, 16),
        (3, True, 128, 1, 128),
        (4, False, 128, 1, 128),
        (4, False, 48, 1, 16),
    ],
)
def test_tiles_divide_blocks_and_packs_divide_groups(
    group: int, share: bool, q_block: int, pack: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = {"forward": (configs.KernelConfig(128, 64, 8, 3, pack=2),) * 3}
    monkeypatch.setitem(configs._TABLE, "test", table)
    device = Device("test", 232448)
    config = configs.choose("forward", device, 2, 64, 64, group, share, q_block, 64)
    assert (config.pack, config.block_m // config.pack) == (pack, tokens)
    assert q_block % tokens == 0
    assert group % pack == 0


@pytest.mark.parametrize("limit", [49152, 65536, 101376, 166912])
@pytest.mark.parametrize("kernel", KERNELS)
def test_tiles_shrink_to_the_shared_memory(kernel: Kernel, limit: int) -> None:
    for family in configs._TABLE:
        config = configs.choose(kernel, Device(family, limit), 2, 256, 256, 1, True, 128, 128)
        need = configs.shared_memory_estimate(kernel, config, 2, 256, 256)
        assert need <= limit, (family, config)


@pytest.mark.parametrize("size", [0, -16, 24, 8])
def test_block_sizes_are_multiples_of_16(size: int) -> None:
    with pytest.raises(ValueError, match=f"positive multiple of 16, got {size}"):
        configs.choose("forward", CUDA_DEVICES[90], 2, 64, 64, 1, True, size, 128)


def test_preferred_list_blocks_cut_no_tile() -> None:
    assert configs.preferred_list_blocks(torch.device("cpu"), torch.bfloat16, 64, 4) == (128, 128)
    for device in (*CUDA_DEVICES.values(), HIP, configs.GENERIC):
        for dim in (64, 128, 256):
            sizes = configs.list_blocks_of(device, 2, dim, 4)
            for kernel in KERNELS:
                cut = configs.choose(kernel, device, 2, dim, dim, 4, True, *sizes)
                assert cut == configs.choose(kernel, device, 2, dim, dim, 4, True, 256, 256)


def test_a_capability_without_an_entry_gets_a_safe_one() -> None:
    assert configs.device_of_capability(75).family == "generic"
    assert configs.device_of_capability(999).shared_memory == CUDA_DEVICES[120].shared_memory
