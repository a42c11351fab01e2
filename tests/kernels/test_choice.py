"""Which kernels serve a call, and the reasons that are told."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor

from passes.report import CallReport, Report
from tree_attn_op.kernels import choice
from tree_attn_op.kernels.choice import Choice, call_choice, static_choice
from tree_attn_op.kernels.configs import CUDA_DEVICES, GENERIC, HIP, Device

H200 = CUDA_DEVICES[90]
OTHERS = [device for capability, device in CUDA_DEVICES.items() if capability != 90]


def tensors(
    heads: tuple[int, int] = (8, 2),
    dims: tuple[int, int] = (128, 128),
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Tensor, Tensor]:
    shapes = ((heads[0], dims[0]), (heads[1], dims[0]), (heads[1], dims[1]))
    query, key, value = (torch.empty(1, 64, n, dim, dtype=dtype) for n, dim in shapes)
    return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)


def chosen(
    operands: tuple[Tensor, Tensor, Tensor],
    device: Device = H200,
    list_heads: int = 1,
    blocks: tuple[int, int] = (64, 64),
    scale: float = 0.125,
) -> Choice:
    return call_choice(device, *operands, list_heads, *blocks, scale)


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (96, 96), (80, 80), (128, 64), (8, 16)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_hopper_kernels_serve_what_they_take(dims: tuple[int, int], dtype: torch.dtype) -> None:
    assert chosen(tensors(dims=dims, dtype=dtype)) == Choice("hopper")
    assert chosen(tensors((6, 2), dims, dtype), blocks=(128, 64)) == Choice("hopper")


@pytest.mark.parametrize("device", [*OTHERS, HIP, GENERIC], ids=lambda device: device.family)
def test_other_devices_run_the_portable_kernels_without_a_word(device: Device) -> None:
    assert chosen(tensors(), device) == Choice("portable")


@pytest.mark.parametrize(
    ("operands", "options", "reason"),
    [
        (tensors(dtype=torch.float32), {}, "dtype torch.float32"),
        (tensors(dims=(256, 256)), {}, "head dim 256 of query"),
        (tensors(dims=(64, 192)), {}, "head dim 192 of value"),
        (tensors(dims=(68, 64)), {}, "head dim 68 of query"),
        (tensors(), {"scale": -0.1}, "scale -0.1"),
        (tensors(), {"scale": 0.0}, "scale 0.0"),
        (tensors(), {"scale": 1e-40}, "scale 1e-40"),
        (tensors(), {"list_heads": 8}, "block lists for 8 heads"),
        (tensors(), {"blocks": (128, 128)}, "blocks of 128 by 128; 64 by 64"),
        (tensors((6, 2)), {}, "blocks of 64 by 64; 128 by 64"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_they_do_not_take_has_a_reason(operands, options, reason) -> None:
    found = chosen(operands, **options)
    assert found.kernels == "portable"
    assert found.reason is not None
    assert found.reason.startswith(reason)


def test_strides_decide() -> None:
    query, key, value = tensors()
    narrow = torch.empty(1, 2, 64, 132, dtype=key.dtype)[..., :128]
    for name, operands in (
        ("key", (query, narrow, value)),
        ("value", (query, key, narrow)),
        ("query", (query[:, :, :, ::2].expand(1, 8, 64, 64), key[..., :64], value)),
        ("key", (query, key[:, :1].expand(1, 2, 64, 128), value)),
    ):
        reason = chosen(operands).reason
        assert reason is not None
        assert reason.startswith(f"{name} has strides")
    # A dimension of size 1 has a stride that means nothing.
    alone = torch.empty(128, dtype=key.dtype).as_strided((1, 1, 1, 128), (3, 5, 7, 1))
    assert chosen((alone, alone, alone), blocks=(128, 64)) == Choice("hopper")


@pytest.mark.parametrize(
    ("dtype", "shape", "strides", "wanted"),
    [
        # What is ordinary keeps its strides.
        (torch.float16, (2, 4, 9, 64), (2304, 576, 64, 1), (2304, 576, 64, 1)),
        (torch.float16, (2, 4, 9, 64), (2304, 64, 256, 1), (2304, 64, 256, 1)),
        (torch.float32, (2, 4, 9, 12), (432, 108, 12, 1), (432, 108, 12, 1)),
        # Steps are of 16 bytes, however many elements those are, and lead onwards.
        (torch.float16, (2, 4, 9, 12), (432, 108, 12, 1), None),
        (torch.float16, (2, 4, 9, 64), (2305, 576, 64, 1), None),
        (torch.float16, (2, 4, 9, 64), (2304, 0, 64, 1), None),
        (torch.float32, (2, 4, 9, 31), (1116, 279, 31, 1), None),
        (torch.float16, (2, 4, 9, 64), (4608, 1152, 128, 2), None),
        # Where there is no second step, it may be any.
        (torch.float16, (1, 4, 9, 64), (3, 576, 64, 1), (64, 576, 64, 1)),
        (torch.float16, (2, 1, 9, 60), (576, 0, 64, 1), (576, 64, 64, 1)),
        (torch.float32, (1, 1, 1, 31), (1 << 60, 5, 31, 1), (32, 32, 32, 1)),
        (torch.float32, (1, 1, 9, 31), (3, 5, 31, 1), None),
        (torch.float16, (1, 0, 9, 64), (576, 576, 64, 1), None),
    ],
)
def test_strides_of_descriptors(dtype, shape, strides, wanted) -> None:
    tensor = torch.empty(16384, dtype=dtype).as_strided(shape, strides)
    assert choice.tma_strides(tensor) == wanted
    assert choice.tma_can_read(tensor) == (wanted is not None)
    # The same a few bytes further on.
    moved = torch.empty(16385, dtype=dtype)[1:].as_strided(shape, strides)
    assert choice.tma_strides(moved) is None


def test_the_environment_keeps_them_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(choice.ENVIRONMENT, "portable")
    assert chosen(tensors()) == Choice("portable", "TREE_ATTN_KERNELS=portable is set")
    monkeypatch.setenv(choice.ENVIRONMENT, "auto")
    assert chosen(tensors()) == Choice("hopper")


def test_a_reason_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(choice.configs, "device_of", lambda device: H200)
    choice._log.cache_clear()
    with caplog.at_level(logging.INFO, logger="tree_attn_op"):
        for _ in range(3):
            choice.choose_kernels(*tensors(dims=(256, 256)), 1, 64, 64, 0.1)
    assert [record.message for record in caplog.records] == [
        "tree_attention runs the portable kernels, not the Hopper ones: head dim 256 of query; "
        "multiples of 8 up to 128 are taken"
    ]


def test_lists_are_as_fine_as_the_kernels_want(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice.configs, "device_of", lambda device: H200)
    cuda, bf16 = torch.device("cuda"), torch.bfloat16
    assert choice.preferred_list_blocks(cuda, bf16, 128, 128, 4) == (64, 64)
    assert choice.preferred_list_blocks(cuda, bf16, 128, 128, 3) == (128, 64)
    wide = choice.preferred_list_blocks(cuda, bf16, 256, 256, 4)
    assert wide == choice.configs.preferred_list_blocks(cuda, bf16, 256, 4)
    assert choice.preferred_list_blocks(torch.device("cpu"), bf16, 128, 128, 4) == (128, 128)


def test_the_report_says_what_serves_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice.configs, "device_of", lambda device: H200)
    cuda, bf16 = torch.device("cuda"), torch.bfloat16
    assert choice.describe(torch.device("cpu"), bf16, 64, 64, 4, (128, 128)) == "cpu"
    assert choice.describe(cuda, bf16, 64, 64, 4, (64, 64)) == "hopper"
    why = choice.describe(cuda, bf16, 64, 64, 4, (32, 32))
    assert why == "portable: blocks of 32 by 32; 64 by 64 are taken"
    assert "kernels: portable: blocks of 32 by 32" in str(
        Report([CallReport(True, "q >= k", why)])
    )
    assert "kernels:" not in str(Report([CallReport(True, "q >= k", "hopper")]))


def test_static_choice_agrees_with_the_call() -> None:
    for dims in ((64, 64), (128, 64), (136, 128), (60, 64)):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            static = static_choice(H200, dtype, *dims)
            assert chosen(tensors(dims=dims, dtype=dtype)) == static
