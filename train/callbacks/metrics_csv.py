"""RUN/metrics.csv: one row a logging step, kept across resumes; without a terminal also a line on the screen."""

import csv
import sys
from pathlib import Path

import lightning as L
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

LOGGED = ("loss", "kl", "cross_entropy", "lr")
COLUMNS = ("step", *LOGGED, "heldout_kl", "heldout_perplexity")


class MetricsCSV(L.Callback):
    """Writes a row every `every_steps` optimizer steps; `step` counts the steps done.

    A callback and no logger, because Lightning saves a checkpoint before it calls its loggers: a kill in between would lose
    the row. On a resume, rows after the resumed step are dropped, because those steps are done again.
    """

    def __init__(self, path: Path, *, resumed_step: int, every_steps: int) -> None:
        self.path, self.every_steps, self._last = path, every_steps, resumed_step
        self._start(resumed_step)

    @rank_zero_only
    def _start(self, resumed_step: int) -> None:
        kept: list[dict[str, str]] = []
        if self.path.exists():
            with self.path.open(newline="") as f:
                kept = [row for row in csv.DictReader(f) if row["step"].isdigit() and int(row["step"]) <= resumed_step]   # a torn row is dropped
        partial = self.path.with_name(f".{self.path.name}.partial")
        with partial.open("w", newline="") as f:
            writer = csv.DictWriter(f, COLUMNS)
            writer.writeheader()
            writer.writerows(kept)
        partial.replace(self.path)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: object, batch: Tensor, batch_idx: int) -> None:
        step = trainer.global_step
        if step == self._last:   # a micro-batch inside a step
            return
        self._last = step
        if step % self.every_steps == 0 or step == trainer.max_steps:
            values = {name: float(trainer.callback_metrics[name]) for name in LOGGED}
            self.write(step, values)
            if not sys.stdout.isatty():   # no progress bar is seen there
                trainer.print(f"step {step} of {trainer.max_steps}: loss {values['loss']:.5f}", flush=True)

    @rank_zero_only
    def write(self, step: int, values: dict[str, float]) -> None:
        """Append one row."""
        with self.path.open("a", newline="") as f:
            csv.DictWriter(f, COLUMNS).writerow({**values, "step": step})
