"""What is measured before the first step and after the last, while the model is still set up as it was trained."""

from collections.abc import Callable
from pathlib import Path

import lightning as L

from ...quant.checkpoint.run import newest_checkpoint


class FinalFigures(L.Callback):
    """`before` once everything is on its device; at the last step a checkpoint of that step, then `after`.

    Both run on every rank: sharded models need all of them in every forward.
    """

    def __init__(self, *, before: Callable[[], None], after: Callable[[], None], run_dir: Path, max_steps: int) -> None:
        self.before, self.after, self.run_dir, self.max_steps = before, after, run_dir, max_steps

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.before()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.global_step != self.max_steps:
            return
        save_final(trainer, run_dir=self.run_dir)
        self.after()


def save_final(trainer: L.Trainer, *, run_dir: Path) -> None:
    """A checkpoint of the step the trainer is at, unless there is one. The first rank looks for all: what is on the disk changes while they look."""
    final = run_dir / "checkpoints" / f"step-{trainer.global_step:08d}.ckpt"
    if trainer.strategy.broadcast(newest_checkpoint(run_dir) != final):
        trainer.save_checkpoint(final)
