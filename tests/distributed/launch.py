"""Runs functions on several processes of this machine, as ranks of one process group."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tree_attn_op.distributed.checks import VARIABLE

SEED = 20261130
PRELOADED = ("torch", "torch.distributed.fsdp", "tree_attn_op.distributed")

Case = Callable[[], None]


def run_on_ranks(world_size: int, cases: Sequence[Case], backend: str = "gloo") -> None:
    """Run each case on all ranks, one after another; the first failure ends all and is raised.

    Args:
        world_size: number of processes.
        cases: functions of a module, without arguments.
        backend: of the process group; with ``"nccl"`` rank r has GPU r.
    """
    # Processes of the server start with torch imported, which takes seconds.
    multiprocessing.set_forkserver_preload(list(PRELOADED))
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        mp.start_processes(
            _run_rank,
            (world_size, tuple(cases), backend, store),
            nprocs=world_size,
            start_method="forkserver",
        )


def _run_rank(rank: int, world_size: int, cases: Sequence[Case], backend: str, store: str) -> None:
    torch.set_num_threads(1)
    os.environ[VARIABLE] = "1"
    options = {}
    if backend == "nccl":
        torch.cuda.set_device(rank)
        options["device_id"] = torch.device("cuda", rank)
    dist.init_process_group(
        backend,
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(minutes=5),
        **options,
    )
    try:
        for case in cases:
            torch.manual_seed(SEED)
            try:
                case()
            except Exception as error:
                raise AssertionError(f"{case.__name__} failed on rank {rank}: {error}") from error
            dist.barrier()
    finally:
        dist.destroy_process_group()
