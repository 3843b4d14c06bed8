"""Held-out figures while training."""

from collections.abc import Callable

import lightning as L
from torch import Tensor

from ...quant.quality import Quality


class HeldoutQuality(L.Callback):
    """Every `every_steps` optimizer steps, measure the held-out text and log `heldout_kl` and `heldout_perplexity`."""

    def __init__(self, measure: Callable[[], Quality], *, every_steps: int) -> None:
        self.measure, self.every_steps = measure, every_steps
        self._last = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._last = trainer.global_step

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: object, batch: Tensor, batch_idx: int) -> None:
        step = trainer.global_step
        if step == self._last or step % self.every_steps:
            return
        self._last = step
        quality = self.measure()
        for logger in trainer.loggers:   # each measures the same rows; loggers write on the first device only
            logger.log_metrics({"heldout_kl": quality.kl, "heldout_perplexity": quality.perplexity}, step=step - 1)   # the row of the step just done
        trainer.print(f"step {step}: held-out KL {quality.kl:.5f} nats, perplexity {quality.perplexity:.4f}")
