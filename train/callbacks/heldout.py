"""Held-out figures while training."""

from collections.abc import Callable

import lightning as L
from torch import Tensor

from .metrics_csv import MetricsCSV


class HeldoutFigures(L.Callback):
    """Every `every_steps` optimizer steps, measure; the named figures go to the CSV, the loggers and the screen."""

    def __init__(self, measure: Callable[[], dict[str, float]], *, every_steps: int, metrics: MetricsCSV) -> None:
        self.measure, self.every_steps, self.metrics = measure, every_steps, metrics
        self._last = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._last = trainer.global_step

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: object, batch: Tensor, batch_idx: int) -> None:
        step = trainer.global_step
        if step == self._last or step % self.every_steps:
            return
        self._last = step
        values = self.measure()
        self.metrics.write(step, values)
        for logger in trainer.loggers:
            logger.log_metrics(values, step=step)
        trainer.print(f"step {step}: " + ", ".join(f"{name} {value:.5f}" for name, value in values.items()), flush=True)
