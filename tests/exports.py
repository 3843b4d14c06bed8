"""Exports of tiny families, and what they must hold."""

from pathlib import Path
from typing import Any

import torch
from conftest import finished_run
from families import save_family
from torch import Tensor, nn

from kilotok.quant.archs import load_config, load_model
from kilotok.quant.checkpoint import ExportOptions, export_run
from kilotok.quant.formats import find_format
from kilotok.quant.plan import PlanOptions, make_plan

IDS = torch.randint(4, 4096, (2, 12), generator=torch.Generator().manual_seed(5))


def differing(model: nn.Module, values: dict[str, Tensor]) -> list[str]:
    """Names of the tensors that a model does not hold to the bit."""
    state = model.state_dict()
    return [n for n, w in values.items() if n not in state or not torch.equal(state[n].float(), w)]


def files_of(directory: Path) -> dict[str, bytes]:
    """Everything but our metadata, which says what was converted."""
    return {p.name: p.read_bytes() for p in directory.iterdir() if p.name != "kilotok.json"}


def exported(tmp_path: Path, name: str, layout: str, *, quant: dict[str, Any] | None = None, **changes: Any) -> tuple[Path, dict[str, Tensor]]:
    """A family exported in a layout, and the values training computed with, by in-memory name."""
    parent = save_family(tmp_path / "parent", name, **changes)
    trained = finished_run(tmp_path / "run", parent, move=0.02, quant=quant)
    export_run(tmp_path / "run", tmp_path / "out", options=ExportOptions(layout=layout))
    plan = make_plan(load_config(parent), scale_mode="even", where="test", options=PlanOptions.from_json(quant or {}))
    values = {n: p.detach() for n, p in load_model(parent, dtype=torch.float32).named_parameters()} | trained
    for w in plan.weights:
        values[w.name] = find_format(w.format).fake_quant(values[w.name], name=w.name, scale_mode="even", dim=w.dim, dtype=torch.float32, faults=None)
    return tmp_path / "out", values
