"""Processes that are ranks of one gloo group, for tests of what several devices do: forked, so that nothing is imported again."""

import contextlib
import io
import multiprocessing
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_only


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


def command_on_ranks(
    main: Callable[[list[str]], int], arguments: list[str], *, world: int, folder: Path, patch: Callable[[int], None] = lambda rank: None, exit_code: int = 0,
) -> list[str]:
    """What every rank of a command printed: `world` connected processes, as torchrun would start them. patch: what a rank does first."""
    folder.mkdir(exist_ok=True)

    def work(rank: int) -> str:
        rank_zero_only.rank = rank
        os.environ["KILOTOK_TRACEBACK"] = "1"
        patch(rank)
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()):
            assert main(arguments) == 0
        return out.getvalue()

    return on_ranks(world, work, folder=folder, exit_code=exit_code)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop_at(step: int, *, module: type[Any], how: Callable[[], None] = kill) -> Callable[[int], None]:
    """A patch for `command_on_ranks`: every rank stops before the step's gradient. module: the LightningModule."""
    real = module.training_step

    def stopped(self: Any, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if self.global_step == step:
            how()
        loss: torch.Tensor = real(self, batch, batch_idx)
        return loss

    return lambda rank: setattr(module, "training_step", stopped)


def _rank(rank: int, world: int, port: int, work: Callable[[int], Any], folder: Path) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), NODE_RANK="0")
    dist.init_process_group("gloo", rank=rank, world_size=world)
    torch.save(work(rank), folder / f"rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
