"""From a QAT run to a Hugging Face directory with packed experts, compared with the run before it gets its name.

The parent's tensors are walked one by one. A routed expert's weight is taken from the run, packed and written under its
packed names; a tensor that the run trained is written in the parent's dtype; everything else is copied bit for bit, and
so are tokenizer, template and generation config.
"""

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from ..archs import load_config
from ..plan import QuantPlan, make_plan
from ..tensor import SOURCE_DTYPE, fake_quant_weight, quantize_weight
from . import compressed_tensors
from .check import require_fitting_parent
from .disk import new_directory, refuse_existing, require_free_space, share
from .load import METADATA, read_exported_experts
from .reader import INDEX, SINGLE, CheckpointReader, sha256_of_weights
from .run import Run

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
CHAT_TEMPLATES = "additional_chat_templates"   # where transformers stores further templates
MAX_SHARD_BYTES = 5_000_000_000   # the shard size Hugging Face tools write


@dataclass(frozen=True, kw_only=True)
class ExportResult:
    """What was written and what the comparison with the run found."""

    directory: Path
    expert_tensors: int
    expert_weights: int          # weights compared with the run, all equal
    kept_tensors: int            # copied bit for bit
    rounded_tensors: int         # trained beside the experts, written in the parent's dtype
    bytes_before: int            # weight files of the parent
    bytes_after: int             # weight files of the export


def export_run(run_dir: Path, out: Path, *, parent_dir: Path | None = None) -> ExportResult:
    """Write the trained weights of a run to `out`, re-read them and compare exactly; only then does `out` exist.

    parent_dir: where the parent lies now, when it has moved since the run.
    Errors: FileExistsError for an `out` that exists, ValueError for a parent that is not the run's, a damaged file or a
        difference found on re-reading, OSError for a full disk. Nothing is left behind in any case.
    """
    refuse_existing(out)
    run = Run.open(run_dir)
    parent = parent_dir or run.parent
    reader = CheckpointReader(parent)
    if (found := sha256_of_weights(parent)) != run.parent_sha256:
        raise ValueError(f"{parent}: is not the parent of {run_dir}: weights hash to {found[:12]}, the run was made from {run.parent_sha256[:12]}. "
                         "Give the right one with --parent.")
    config = load_config(parent)
    plan = make_plan(config, scale_mode=run.scale_mode, where=str(parent))
    require_fitting_parent(reader, config=config, plan=plan)
    trained = run.load_trained_weights()
    if config.tie_word_embeddings and EMBEDDING in trained and HEAD in reader:
        trained.setdefault(HEAD, trained[EMBEDDING])   # one tensor in memory, a copy on disk
    missing = [e.name for e in plan.experts if e.name not in trained]
    if missing:
        raise ValueError(f"{run_dir}: the checkpoint at step {run.step} holds no {missing[0]} (of {len(missing)} missing). It belongs to another model.")
    require_free_space(out, num_bytes=plan.bytes_after + 2**20, what="export")
    with new_directory(out) as partial:
        try:
            _write_weights(partial, reader=reader, plan=plan, trained=trained)
            _write_rest(partial, parent=parent, plan=plan, reader=reader, metadata=run.export_metadata())
        except SafetensorError as error:   # safetensors reports a failed write as its own error
            raise OSError(f"export: writing to {partial.parent} failed ({error}). Free some space or write elsewhere; nothing was kept.") from error
        for path in partial.rglob("*.safetensors"):
            share(path)
        expert_weights = _verify(partial, reader=reader, plan=plan, trained=trained)
        written = CheckpointReader(partial)
        others = [n for n in reader.names if plan.arch.expert_slice(n) is None]
        rounded = sum(n in trained for n in others)
        result = ExportResult(directory=out, expert_tensors=len(reader.names) - len(others), expert_weights=expert_weights,
                              kept_tensors=len(others) - rounded, rounded_tensors=rounded,
                              bytes_before=reader.num_bytes, bytes_after=written.num_bytes)
    return result


def _expert_part(trained: dict[str, Tensor], *, plan: QuantPlan, name: str) -> Tensor | None:
    """The rows of the trained fused weight that the checkpoint tensor `name` is; None for anything but an expert."""
    place = plan.arch.expert_slice(name)
    if place is None:
        return None
    return trained[place.fused][place.expert].chunk(place.parts, dim=0)[place.part]


def _rounded(weight: Tensor, dtype: torch.dtype, *, name: str) -> Tensor:
    """A trained tensor in its parent's dtype; ValueError when that cannot hold it."""
    rounded = weight.to(dtype).contiguous()
    if not bool(torch.isfinite(rounded).all()):
        raise ValueError(f"export: {name}: the trained weights (largest {float(weight.abs().max()):.3g}) do not fit the parent's {dtype}: it has diverged.")
    return rounded


def _write_weights(directory: Path, *, reader: CheckpointReader, plan: QuantPlan, trained: dict[str, Tensor]) -> None:
    shards: list[dict[str, Tensor]] = [{}]
    shard_bytes = 0
    for name in reader.names:
        part = _expert_part(trained, plan=plan, name=name)
        if part is not None:
            tensors = compressed_tensors.to_disk(quantize_weight(part, name=name, scale_mode=plan.scale_mode), name=name)
        else:
            kept = reader.get(name)
            tensors = {name: _rounded(trained[name], kept.dtype, name=name) if name in trained else kept}
        size = sum(t.numel() * t.element_size() for t in tensors.values())
        if shards[-1] and shard_bytes + size > MAX_SHARD_BYTES:
            shards.append({})
            shard_bytes = 0
        shards[-1].update(tensors)
        shard_bytes += size
    if len(shards) == 1:
        save_file(shards[0], directory / SINGLE, metadata={"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, directory / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, file))
    total = sum(t.numel() * t.element_size() for s in shards for t in s.values())
    (directory / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2) + "\n")


def _write_rest(directory: Path, *, parent: Path, plan: QuantPlan, reader: CheckpointReader, metadata: dict[str, Any]) -> None:
    for path in sorted(parent.iterdir()):
        is_weights = path.suffix in (".safetensors", ".bin", ".pt", ".pth", ".h5", ".gguf", ".msgpack", ".onnx") or path.name.endswith(".index.json")
        if path.is_file() and not path.name.startswith(".") and not is_weights and path.name not in ("config.json", METADATA):
            shutil.copyfile(path, directory / path.name)
    if (parent / CHAT_TEMPLATES).is_dir():
        shutil.copytree(parent / CHAT_TEMPLATES, directory / CHAT_TEMPLATES)
    config = json.loads((parent / "config.json").read_text())
    linears = [n.removesuffix(".weight") for n in reader.names
               if n.endswith(".weight") and plan.arch.expert_slice(n) is None and len(reader.info(n)[1]) == 2 and "embed" not in n]
    if "lm_head" not in linears:
        linears.append("lm_head")   # tied to the embedding on disk, still a linear layer in memory
    config["quantization_config"] = compressed_tensors.quantization_config(plan.arch, kept_linears=sorted(linears, key=_natural))
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (directory / METADATA).write_text(json.dumps(metadata, indent=2) + "\n")


def _natural(name: str) -> list[Any]:
    return [(0, int(p)) if p.isdigit() else (1, p) for p in re.split(r"(\d+)", name)]


def _verify(directory: Path, *, reader: CheckpointReader, plan: QuantPlan, trained: dict[str, Tensor]) -> int:
    """Number of expert weights re-read from `directory`, all equal to what training computed with; ValueError otherwise."""
    reread = read_exported_experts(directory, arch=plan.arch)
    compared = 0
    for expert in plan.experts:
        if expert.name not in reread:
            raise ValueError(f"export: {expert.name} is missing in the re-read files. This is a bug of the export: please report it.")
        expected = fake_quant_weight(trained[expert.name], name=expert.name, scale_mode=plan.scale_mode)
        got = reread[expert.name].dequantize(dtype=SOURCE_DTYPE)
        _require_equal(got, expected, name=expert.name)
        compared += expected.numel()
    written = CheckpointReader(directory)
    for name in reader.names:
        if plan.arch.expert_slice(name) is None:
            source = reader.get(name)
            _require_equal(written.get(name), trained[name].to(source.dtype) if name in trained else source, name=name)
    return compared


def _require_equal(got: Tensor, expected: Tensor, *, name: str) -> None:
    if got.shape != expected.shape or got.dtype != expected.dtype:
        raise ValueError(f"export: {name}: wrote {got.dtype} {tuple(got.shape)}, training had {expected.dtype} {tuple(expected.shape)}. Nothing was kept.")
    # bytes, so that NaN and the sign of zero count
    different = (got.contiguous().view(torch.uint8) != expected.contiguous().view(torch.uint8)).view(*got.shape, -1).any(-1)
    if bool(different.any()):
        index = tuple(int(i) for i in different.nonzero()[0])
        raise ValueError(f"export: {name}: {int(different.sum())} of {got.numel()} values differ from training; first at {index}: "
                         f"wrote {float(got[index])}, training had {float(expected[index])}. Nothing was kept.")
