"""RUN/metrics.csv: one row a logging step, kept across resumes."""

import csv
from argparse import Namespace
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only

COLUMNS = ("step", "loss", "kl", "cross_entropy", "lr", "heldout_kl", "heldout_perplexity")


class MetricsCSV(Logger):
    """Appends; a row's step counts the optimizer steps before it. On a resume, rows from the resumed step on are
    dropped, because those steps are done again.

    (Lightning's CSVLogger deletes the earlier file.)
    """

    def __init__(self, path: Path, *, resumed_step: int) -> None:
        super().__init__()
        self.path = path
        self._start(resumed_step)

    @rank_zero_only
    def _start(self, resumed_step: int) -> None:
        path = self.path
        kept: list[dict[str, str]] = []
        if path.exists():
            with path.open(newline="") as f:
                kept = [row for row in csv.DictReader(f) if row["step"].isdigit() and int(row["step"]) < resumed_step]   # a torn row is dropped
        partial = path.with_name(f".{path.name}.partial")
        with partial.open("w", newline="") as f:
            writer = csv.DictWriter(f, COLUMNS)
            writer.writeheader()
            writer.writerows(kept)
        partial.replace(path)

    @property
    def name(self) -> str:
        return "csv"

    @property
    def version(self) -> str:
        return ""

    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """The recipe is in RUN/recipe.yaml."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        row: dict[str, float | int | None] = {k: v for k, v in metrics.items() if k in COLUMNS}
        if not row:
            return
        with self.path.open("a", newline="") as f:
            csv.DictWriter(f, COLUMNS).writerow({**row, "step": step})
