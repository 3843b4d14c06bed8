"""Held-out figures while training."""

from collections.abc import Callable

import lightning as L
from torch import Tensor

from ...quant.quality import Quality
from .metrics_csv import MetricsCSV


class HeldoutQuality(L.Callback):
    """Every `every_steps` optimizer steps, measure the held-out text; `heldout_kl` and `heldout_perplexity` go to the CSV and the loggers."""

    def __init__(self, measure: Callable[[], Quality], *, every_steps: int, metrics: MetricsCSV) -> None:
        self.measure, self.every_steps, self.metrics = measure, every_steps, metrics
        self._last = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._last = trainer.global_step

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: object, batch: Tensor, batch_idx: int) -> None:
        step = trainer.global_step
        if step == self._last or step % self.every_steps:
            return
        self._last = step
        quality = self.measure()
        values = {"heldout_kl": quality.kl, "heldout_perplexity": quality.perplexity}
        self.metrics.write(step, values)
        for logger in trainer.loggers:
            logger.log_metrics(values, step=step)
        trainer.print(f"step {step}: held-out KL {quality.kl:.5f} nats, perplexity {quality.perplexity:.4f}", flush=True)
