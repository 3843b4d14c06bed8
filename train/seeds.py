"""Several QAT runs in one table, and the mean and spread over seeds: `train qat-report RUN [RUN ...]`."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ..quant.checkpoint.run import read_meta
from .report import gap_closed, kl_removed, qualities

COLUMNS = ("parent", "rounded", "QAT", "gap closed", "KL rounded", "KL QAT", "KL removed")
FORMATS = (".4f", ".4f", ".4f", ".1%", ".5f", ".5f", ".1%")


@dataclass(frozen=True, kw_only=True)
class FinishedRun:
    """A run's record, and the recipe it was made by."""

    name: str
    meta: dict[str, Any]
    recipe: dict[str, Any]

    @classmethod
    def open(cls, directory: Path) -> "FinishedRun":
        """Errors: FileNotFoundError for no run, ValueError for one that is not of `train qat` or not finished."""
        if not (directory / "meta.json").is_file() or not (directory / "recipe.yaml").is_file():
            raise FileNotFoundError(f"{directory.absolute()}: no meta.json and recipe.yaml. Give the run directories that `train qat` wrote.")
        meta = read_meta(directory)
        if meta["kind"] != "qat":
            raise ValueError(f"{directory}: is a run of kind {meta['kind']!r}. qat-report takes runs of `train qat`.")
        if "qat" not in meta:
            raise ValueError(f"{directory}: is not finished: it has no figures of the trained model. Finish it with train qat RECIPE --resume.")
        return cls(name=str(directory), meta=meta, recipe=yaml.safe_load((directory / "recipe.yaml").read_text(encoding="utf-8")))

    @property
    def seed(self) -> int:
        return int(self.recipe["trainer"]["seed"])

    def figures(self) -> dict[str, tuple[float, ...]]:
        """Domain -> the figures of COLUMNS."""
        rounded, trained = qualities(self.meta["round_to_nearest"]), qualities(self.meta["qat"])
        return {d: (q.parent_perplexity, rounded[d].perplexity, q.perplexity, gap_closed(rounded[d], q), rounded[d].kl, q.kl, kl_removed(rounded[d], q))
                for d, q in trained.items()}


def seeds_table(runs: Sequence[FinishedRun]) -> str:
    """A row a run and domain; after them mean and sample standard deviation by domain, where the runs differ in nothing but their seed."""
    width = max(len("mean +- std"), *(len(r.name) for r in runs))
    cell = 18 if len(runs) > 1 else 11
    lines = [f"{'run':<{width}} {'seed':>6} {'text':<9} " + " ".join(f"{c:>{cell}}" for c in COLUMNS)]
    for run in runs:
        for domain, values in run.figures().items():
            cells = [("-" if math.isnan(v) else f"{v:{spec}}").rjust(cell) for v, spec in zip(values, FORMATS, strict=True)]
            lines.append(f"{run.name:<{width}} {run.seed:>6} {domain:<9} " + " ".join(cells))
    if len(runs) == 1:
        return "\n".join(lines)
    if (different := _differences(runs)):
        return "\n".join([*lines, f"no mean: the runs differ in {', '.join(different)}"])
    if len({r.seed for r in runs}) < len(runs):
        return "\n".join([*lines, "no mean: two of the runs have the same seed and recipe"])
    for domain in runs[0].figures():
        cells = []
        for values, spec in zip(zip(*(r.figures()[domain] for r in runs), strict=True), FORMATS, strict=True):
            known = [v for v in values if not math.isnan(v)]   # no gap to close where rounding added none
            text = f"{statistics.mean(known):{spec}} +- {statistics.stdev(known):{spec}}" if len(known) == len(values) else "-"
            cells.append(text.rjust(cell))
        lines.append(f"{'mean +- std':<{width}} {len(runs):>6} {domain:<9} " + " ".join(cells))
    lines.append(f"mean and sample standard deviation over {len(runs)} seeds; parent, rounded and QAT are perplexities, KL is in nats")
    return "\n".join(lines)


def _differences(runs: Sequence[FinishedRun]) -> list[str]:
    """What the runs do not share, beside their seed and place."""
    def shared(run: FinishedRun) -> dict[str, Any]:
        flat = dict(_flatten(run.recipe))
        for own in ("run", "model", "trainer.seed", "baselines.scale_modes", "baselines.control"):   # measured beside the training, not part of it
            flat.pop(own, None)
        return {**flat, "the parent": run.meta["parent"]["sha256"], "the text": run.meta["text_sha256"]}

    tables = [shared(r) for r in runs]
    return [k for k in sorted({k for t in tables for k in t}) if any(t.get(k) != tables[0].get(k) for t in tables[1:])]


def _flatten(tree: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found = []
    for key, value in tree.items():
        found += _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else [(prefix + key, value)]
    return found
