"""RUN/metrics.csv: one row a logging step, kept across resumes; without a terminal also a line on the screen."""

import csv
import sys
from pathlib import Path

import lightning as L
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor


class MetricsCSV(L.Callback):
    """Writes a row every `every_steps` optimizer steps; `step` counts the steps done.

    logged: names the module logs, a column each; extra: columns of other writers, see `write`.

    A callback and no logger, because Lightning saves a checkpoint before it calls its loggers: a kill in between would lose
    the row. On a resume, rows after the resumed step are dropped, because those steps are done again.
    """

    def __init__(self, path: Path, *, logged: tuple[str, ...], extra: tuple[str, ...], resumed_step: int, every_steps: int) -> None:
        self.path, self.logged, self.every_steps, self._last = path, logged, every_steps, resumed_step
        self.columns = ("step", *logged, *extra)
        self._start(resumed_step)

    @rank_zero_only
    def _start(self, resumed_step: int) -> None:
        kept: list[dict[str, str]] = []
        if self.path.exists():
            with self.path.open(newline="") as f:
                kept = [row for row in csv.DictReader(f) if row["step"].isdigit() and int(row["step"]) <= resumed_step]   # a torn row is dropped
        partial = self.path.with_name(f".{self.path.name}.partial")
        with partial.open("w", newline="") as f:
            writer = csv.DictWriter(f, self.columns)
            writer.writeheader()
            writer.writerows(kept)
        partial.replace(self.path)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: object, batch: Tensor, batch_idx: int) -> None:
        step = trainer.global_step
        if step == self._last:   # a micro-batch inside a step
            return
        self._last = step
        if step % self.every_steps == 0 or step == trainer.max_steps:
            values = {name: float(trainer.callback_metrics[name]) for name in self.logged}
            self.write(step, values)
            if not sys.stdout.isatty():   # no progress bar is seen there
                trainer.print(f"step {step} of {trainer.max_steps}: loss {values['loss']:.5f}", flush=True)

    @rank_zero_only
    def write(self, step: int, values: dict[str, float]) -> None:
        """Append one row."""
        with self.path.open("a", newline="") as f:
            csv.DictWriter(f, self.columns).writerow({**values, "step": step})
