"""Exports of tiny families, and what they must hold."""

import json
import re
from pathlib import Path
from typing import Any

import torch
from conftest import finished_run
from families import save_family
from torch import Tensor, nn

from kilotok.quant.archs import load_config, load_model
from kilotok.quant.checkpoint import CheckpointReader, ExportOptions, export_run
from kilotok.quant.formats import find_format
from kilotok.quant.plan import PlanOptions, make_plan

ENGINE_NAMES = json.loads((Path(__file__).parent / "goldens" / "engine_names.json").read_text())
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


def pattern(name: str) -> str:
    """A tensor's name with its numbers as *."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


def tensor_table(directory: Path) -> dict[str, list[Any]]:
    """Pattern of name -> [dtype, shapes, count], of every tensor of a directory."""
    reader, found = CheckpointReader(directory), dict[str, tuple[str, set[tuple[int, ...]], list[str]]]()
    for name in reader.names:
        dtype, shape = reader.info(name)
        entry = found.setdefault(pattern(name), (dtype, set(), []))
        assert entry[0] == dtype, f"{name}: layers differ in dtype"
        entry[1].add(shape)
        entry[2].append(name)
    return {p: [dtype, [list(s) for s in sorted(shapes)], len(names)] for p, (dtype, shapes, names) in sorted(found.items())}


def require_engine_names(directory: Path, *, name: str, layout: str) -> None:
    """An export holds the names, shapes, dtypes and counts that were tried with the engines, and no packed tensor of zeros alone."""
    recorded = ENGINE_NAMES["exports"][f"{name}/{layout}"]
    table = tensor_table(directory)
    assert table == recorded["tensors"]
    for engine in ("vllm", "sglang"):
        taken = recorded.get(engine, {})
        if "parameters" in taken:
            assert set(table) == set(taken["parameters"]) | set(taken["not_taken"]) | set(taken.get("not_offered", ())), engine
    reader = CheckpointReader(directory)
    for tensor in reader.names:
        if reader.info(tensor)[0] in ("U8", "F8_E4M3"):
            assert bool(reader.get(tensor).view(torch.uint8).any()), tensor
