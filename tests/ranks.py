"""Processes that are ranks of one gloo group, for tests of what several devices do: forked, so that nothing is imported again."""

import multiprocessing
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def on_ranks(world: int, work: Callable[[int], Any], *, folder: Path, exit_code: int = 0, timeout_s: float = 120) -> list[Any]:
    """What `work(rank)` returns on every rank, by way of torch.save in `folder`; fails when a rank fails or hangs.

    exit_code: what the ranks are meant to end with; with another than 0 there is nothing to return.
    """
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_rank, args=(rank, world, port, work, folder)) for rank in range(world)]
    for p in processes:
        p.start()
    for p in processes:
        p.join(timeout_s)
    codes = [p.exitcode for p in processes]
    for p in processes:
        p.kill()
    assert codes == [exit_code] * world, f"exit codes {codes}; None: hangs"
    return [] if exit_code else [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(world)]


def _rank(rank: int, world: int, port: int, work: Callable[[int], Any], folder: Path) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), NODE_RANK="0")
    dist.init_process_group("gloo", rank=rank, world_size=world)
    torch.save(work(rank), folder / f"rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
