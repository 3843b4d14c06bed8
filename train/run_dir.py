"""A run directory: who may write it, what it was started with, and that a resume continues the same run.

RUN/recipe.yaml (resolved), RUN/meta.json (what it was made from, versions, results), RUN/checkpoints/, RUN/metrics.csv.
"""

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.pytorch.utilities import rank_zero_only
from torch import nn

from ..quant.checkpoint import write_atomically
from ..quant.checkpoint.run import RUN_METADATA, newest_checkpoint, read_checkpoint, read_meta, step_of
from .provenance import run_record
from .recipe import RecipeError, load_recipe, to_yaml


def is_first_rank() -> bool:
    """Lightning starts the command again for every further device; only the first checks, creates and writes the run."""
    return getattr(rank_zero_only, "rank", None) in (None, 0)   # None before Lightning knows: a single process


@rank_zero_only
def rank_zero_print(text: str) -> None:
    print(text, flush=True)


def require_folder(name: str, path: Path) -> None:
    """RecipeError, by the option's name, when `path` or something above it is a file, so that no folder can be there."""
    for place in (path.absolute(), *path.absolute().parents):
        if os.path.lexists(place):
            if not place.is_dir():
                raise RecipeError(f"{name}: {path} cannot be a folder: {place} is a file. Choose another path.")
            return


def resume_point(run_dir: Path, *, recipe: Any, resume: bool) -> Path | None:
    """The readable checkpoint to continue from; None for a fresh start.

    Errors: RecipeError for a run that exists without `resume`, was made by another recipe, or is no run of ours; ValueError for a
        damaged checkpoint.
    """
    if is_first_rank():
        checkpoint = _check_run_dir(run_dir, recipe=recipe, resume=resume)
    else:
        checkpoint = newest_checkpoint(run_dir) if resume else None
    if checkpoint is not None:
        read_checkpoint(checkpoint)
    return checkpoint


def completed(run_dir: Path, *, checkpoint: Path | None, max_steps: int) -> dict[str, Any] | None:
    """RUN/meta.json of a run that has nothing left to do; None for all others."""
    if checkpoint is None or step_of(checkpoint) < max_steps:
        return None
    meta = read_meta(run_dir)
    if meta["status"] != "complete":
        return None
    print(f"{run_dir}: complete at step {step_of(checkpoint)}; nothing to do")
    return meta


def _check_run_dir(run_dir: Path, *, recipe: Any, resume: bool) -> Path | None:
    if not run_dir.exists():
        if resume:
            print(f"{run_dir}: no run to resume; starting a new one", flush=True)
        return None
    if not (run_dir / RUN_METADATA).is_file():
        if {p.name for p in run_dir.iterdir() if ".partial" not in p.name} - {"recipe.yaml"}:   # recipe.yaml alone: killed while starting
            raise RecipeError(f"run: {run_dir.absolute()} exists and is no run of ours. Choose another --run, or remove it.")
        return None
    if not resume:
        raise RecipeError(f"run: {run_dir.absolute()} exists. Continue it with --resume, choose another --run, or remove it.")
    then = load_recipe(type(recipe), path=run_dir / "recipe.yaml", overrides=[])   # fields that did not exist then get their defaults
    before, now = _comparable(to_yaml(then)), _comparable(to_yaml(recipe))
    if before != now:
        changed = next((f"{k}: {now.get(k)}, was {before.get(k)}" for k in (*now, *before) if now.get(k) != before.get(k)), "")
        raise RecipeError(f"run: {run_dir} was started with another recipe (now {changed}). "
                          f"Resume with the recipe in {run_dir / 'recipe.yaml'}, or choose another --run.")
    checkpoint = newest_checkpoint(run_dir)
    print(f"{run_dir}: resuming from {checkpoint.name if checkpoint else 'step 0: it has no checkpoint yet'}", flush=True)
    return checkpoint


def _comparable(text: str) -> dict[str, Any]:
    """The fields of a recipe that a resume may not change: all but the place of the run itself, which may have been moved.

    A sharded run may go on with other devices and batches, as long as a step has the same rows.
    """
    raw = yaml.safe_load(text)
    raw.pop("run")
    trainer = raw["trainer"]
    if trainer.get("strategy") == "fsdp":
        parts = [trainer.pop(key) for key in ("batch_size", "accumulate_grad_batches", "devices", "num_nodes")]
        trainer["rows of a step (batch_size * accumulate_grad_batches * devices * num_nodes)"] = math.prod(parts)
    return dict(_flat(raw))


def _flat(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def open_run(run_dir: Path, *, recipe: Any, fresh: dict[str, Any], unchanged: dict[str, str]) -> dict[str, Any]:
    """RUN/meta.json: `fresh` and a record of this process for a new run, else as it was with this process added to `resumed`.

    unchanged: key of `fresh`, dotted below the top -> what to say (RecipeError) when the run on disk has another value.
    """
    record = run_record()
    if (run_dir / RUN_METADATA).exists():
        meta: dict[str, Any] = read_meta(run_dir)
        for key, message in unchanged.items():
            if _at(meta, key) is not None and _at(meta, key) != _at(fresh, key):   # None: a record of before there was such a key
                raise RecipeError(message)
        meta["resumed"] = [*meta.get("resumed", []), record]
    else:
        meta = {**fresh, **record}
    write_meta(run_dir, meta, recipe=recipe)
    return meta


def _at(tree: dict[str, Any], key: str) -> Any:
    """The value under a dotted key; None when there is none."""
    value: Any = tree
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


@rank_zero_only
def write_meta(run_dir: Path, meta: dict[str, Any], *, recipe: Any = None) -> None:
    """RUN/meta.json, and RUN/recipe.yaml before it when the run is new: a folder with meta.json is a run."""
    run_dir.mkdir(parents=True, exist_ok=True)
    if recipe is not None:
        write_atomically(run_dir / "recipe.yaml", text=to_yaml(recipe))
    write_atomically(run_dir / RUN_METADATA, text=json.dumps(meta, indent=2) + "\n")


def require_finite(model: nn.Module) -> None:
    """ValueError naming the first parameter that holds NaN or infinity, and the index."""
    for name, parameter in model.named_parameters():
        values = parameter.detach()
        values = values.to_local() if hasattr(values, "to_local") else values   # this rank's piece
        finite = torch.isfinite(values)
        if not bool(finite.all()):
            index = tuple(int(i) for i in (~finite).nonzero()[0])
            raise ValueError(f"{name}: weights must be finite; got {float(values[index])} at index {index} of shape {tuple(parameter.shape)}. "
                             "The checkpoint is damaged or diverged: repair it before training.")
