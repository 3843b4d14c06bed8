"""From a QAT run to a Hugging Face directory with packed experts, compared with the run before it gets its name.

The parent's tensors are walked one by one. A routed expert's weight is taken from the run, packed and written under its
packed names; a tensor that the run trained is written in the parent's dtype; everything else is copied bit for bit, and
so are tokenizer, template and generation config.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from ..archs import build_model, load_config
from ..plan import QuantPlan, make_plan
from .check import require_fitting_parent
from .disk import new_directory, refuse_existing, require_free_space, share
from .load import METADATA
from .packing import ParentTensors, join_experts, packed_stems, read_packed
from .quantization_config import quantization_config, reader_warnings
from .reader import EMBEDDING, HEAD, INDEX, SINGLE, CheckpointReader, sha256_of_weights
from .run import Run

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
    warnings: tuple[str, ...]    # readers that do not take this mix of formats


def export_run(run_dir: Path, out: Path, *, parent_dir: Path | None = None) -> ExportResult:
    """Write the trained weights of a run to `out`, re-read them and compare exactly; only then does `out` exist.

    parent_dir: where the parent lies now, when it has moved since the run.
    Errors: FileExistsError for an `out` that exists, ValueError for a parent that is not the run's, a damaged file or a
        difference found on re-reading, OSError for a full disk. Nothing is left behind in any case.
    """
    refuse_existing(out)
    run = Run.open(run_dir)
    parent = parent_dir or run.parent
    if not parent.is_dir():
        raise FileNotFoundError(f"{parent}: the parent that {run_dir} was made from is not there. Give its place now with --parent DIR.")
    reader = CheckpointReader(parent)
    if (found := sha256_of_weights(parent)) != run.parent_sha256:
        raise ValueError(f"{parent}: is not the parent of {run_dir}: weights hash to {found[:12]}, the run was made from {run.parent_sha256[:12]}. "
                         "Give the right one with --parent.")
    config = load_config(parent)
    plan = make_plan(config, scale_mode=run.scale_mode, where=str(parent), options=run.plan_options)
    require_fitting_parent(reader, config=config, plan=plan)
    trained = run.load_trained_weights()
    if plan.options.experts == "bf16":
        raise ValueError(f"{run_dir}: is the control of a run: nothing is quantized in it, so there is nothing to pack. Export the QAT run.")
    if getattr(config, "tie_word_embeddings", False) and HEAD in trained:   # one tensor in memory, which a sharded run may call by its other name
        trained.setdefault(EMBEDDING, trained.pop(HEAD))
    _require_fitting_run(run, trained=trained, plan=plan, config=config)
    if getattr(config, "tie_word_embeddings", False) and EMBEDDING in trained and HEAD in reader:
        trained[HEAD] = trained[EMBEDDING]   # a copy on disk
    tensors = ParentTensors(reader, config=config, plan=plan, trained=trained)
    require_free_space(out, num_bytes=plan.bytes_after + 2**20, what="export")
    with new_directory(out) as partial:
        try:
            _write_weights(partial, tensors=tensors)
            _write_rest(partial, parent=parent, tensors=tensors, metadata=run.export_metadata())
        except SafetensorError as error:   # safetensors reports a failed write as its own error
            raise OSError(f"export: writing to {partial.parent} failed ({error}). Free some space or write elsewhere; nothing was kept.") from error
        for path in partial.rglob("*.safetensors"):
            share(path)
        expert_weights = _verify(partial, tensors=tensors)
        written = CheckpointReader(partial)
        others = [n for n in reader.names if (w := tensors.planned(n)) is None or w.format == "bf16" or w.role == "router"]
        rounded = sum(tensors.is_trained(n) or tensors.planned(n) is not None for n in others)
        result = ExportResult(directory=out, expert_tensors=len(reader.names) - len(others), expert_weights=expert_weights,
                              kept_tensors=len(others) - rounded, rounded_tensors=rounded,
                              bytes_before=reader.num_bytes, bytes_after=written.num_bytes, warnings=reader_warnings(plan))
    return result


def _require_fitting_run(run: Run, *, trained: dict[str, Tensor], plan: QuantPlan, config: Any) -> None:
    """ValueError when the checkpoint lacks a tensor the run trained, or holds one the model does not have, or of another shape."""
    shapes = {n: tuple(p.shape) for n, p in build_model(config, device="meta").named_parameters()}
    wanted = set(shapes) if run.meta["quant"].get("trainable") == "all" else {w.name for w in plan.weights}
    where = f"{run.directory}: the checkpoint at step {run.step}"
    for name in sorted(wanted - set(trained)):
        raise ValueError(f"{where} holds no {name} (of {len(wanted - set(trained))} missing). It belongs to another model, or is damaged.")
    for name in sorted(set(trained) - set(shapes)):
        raise ValueError(f"{where} holds {name}, which {run.parent} does not have. It belongs to another model.")
    for name, tensor in trained.items():
        if tuple(tensor.shape) != shapes[name]:
            raise ValueError(f"{where}: {name} has shape {tuple(tensor.shape)}; the model asks for {shapes[name]}. It belongs to another model.")


def _write_weights(directory: Path, *, tensors: ParentTensors) -> None:
    """Shards of at most MAX_SHARD_BYTES, each written as soon as it is full."""
    files: list[list[str]] = []
    shard: dict[str, Tensor] = {}
    shard_bytes = total = 0

    def flush() -> None:
        nonlocal shard, shard_bytes
        save_file(shard, directory / f"shard-{len(files)}.safetensors", metadata={"format": "pt"})
        files.append(list(shard))
        shard, shard_bytes = {}, 0

    for parent_name in tensors.reader.names:
        for name, tensor in tensors.exported(parent_name):
            size = tensor.numel() * tensor.element_size()
            if shard and shard_bytes + size > MAX_SHARD_BYTES:
                flush()
            shard[name] = tensor.contiguous()
            shard_bytes += size
            total += size
    flush()
    if len(files) == 1:
        (directory / "shard-0.safetensors").rename(directory / SINGLE)
        return
    weight_map: dict[str, str] = {}
    for i, names in enumerate(files):
        file = f"model-{i + 1:05d}-of-{len(files):05d}.safetensors"
        (directory / f"shard-{i}.safetensors").rename(directory / file)
        weight_map.update(dict.fromkeys(names, file))
    (directory / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2) + "\n")


def _write_rest(directory: Path, *, parent: Path, tensors: ParentTensors, metadata: dict[str, Any]) -> None:
    for path in sorted(parent.iterdir()):
        is_weights = path.suffix in (".safetensors", ".bin", ".pt", ".pth", ".h5", ".gguf", ".msgpack", ".onnx") or path.name.endswith(".index.json")
        if path.is_file() and not path.name.startswith(".") and not is_weights and path.name not in ("config.json", METADATA):
            shutil.copyfile(path, directory / path.name)
    if (parent / CHAT_TEMPLATES).is_dir():
        shutil.copytree(parent / CHAT_TEMPLATES, directory / CHAT_TEMPLATES)
    config = json.loads((parent / "config.json").read_text())
    packed = set(packed_stems(CheckpointReader(directory)))
    on_disk = {memory: name for name, memory in tensors.memory_name.items()}
    config["quantization_config"] = quantization_config(tensors.plan, reader=tensors.reader, packed=packed, on_disk=on_disk)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (directory / METADATA).write_text(json.dumps(metadata, indent=2) + "\n")


def _verify(directory: Path, *, tensors: ParentTensors) -> int:
    """Number of packed weights re-read from `directory`, all equal to what training computed with; ValueError otherwise."""
    written = CheckpointReader(directory)
    found = packed_stems(written)
    arch = tensors.plan.arch
    compared = 0
    for name in tensors.reader.names:
        expected, weight = tensors.expected(name), tensors.planned(name)
        if weight is None or weight.format == "bf16" or weight.role == "router":
            _require_equal(written.get(name), expected, name=name)
            continue
        place = arch.expert_slice(name)
        stem = name if arch.layout == "gpt-oss" and place is not None else name.removesuffix(".weight")
        if stem in found:
            got = read_packed(written, stem, fmt=found[stem])
            got = arch.canonical(got).contiguous() if place is not None and place.expert is None else got
        else:   # split into one weight an expert and projection
            assert place is not None
            names = [p for ps in arch.disk_names(place.fused, num_experts=weight.shape[0]) for p in ps]
            pieces = {}
            for part in names:
                slot, part_stem = arch.packed_slice(part.removesuffix(".weight")), part.removesuffix(".weight")
                assert slot is not None and slot.expert is not None, part
                if part_stem not in found:
                    raise ValueError(f"export: {part} is missing in the re-read files. This is a bug of the export: please report it.")
                pieces[slot.expert, slot.part] = read_packed(written, part_stem, fmt=found[part_stem])
            got = arch.canonical(join_experts(pieces, arch=arch, fused=place.fused, where=str(directory))).contiguous()
        _require_equal(got, expected, name=name)
        compared += expected.numel()
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
