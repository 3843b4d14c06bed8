"""What a checkpoint directory holds, read from its files alone, one weight at a time."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ..archs import check_model_dir
from ..archs.catalogue import find_arch
from .convert import content_of
from .metadata import METADATA, read_export_metadata, read_json
from .packed import PackedCheckpoint
from .reader import DTYPES, CheckpointReader
from .readers import engine_notes, geometry_warnings, reader_warnings
from .run import RUN_METADATA


def inspect_directory(directory: Path) -> str:
    """A report as text: model, layout, tensor counts and bytes by kind, scale and code statistics, provenance, who cannot read it.

    Errors: FileNotFoundError for a directory without a model, ValueError for damaged files.
    """
    if (directory / RUN_METADATA).is_file():
        raise ValueError(f"{directory}: is a run of `train qat`. Write its weights with `kilotok export {directory} OUT` and inspect OUT.")
    check_model_dir(directory)
    config = read_json(directory / "config.json")
    quantization = config.get("quantization_config") or {}
    if not quantization:
        return "\n".join([*_header(directory, config, layout="unquantized"), *_tensor_lines(CheckpointReader(directory), kinds={})])
    checkpoint = PackedCheckpoint(directory, arch=find_arch(config.get("model_type"), where=str(directory)))
    checkpoint.require_agreement()
    assert checkpoint.layout is not None
    described = f"{checkpoint.layout.name} ({quantization.get('quant_method')} {quantization.get('format', quantization.get('store_dtype', ''))}".rstrip() + ")"
    lines = [*_header(directory, config, layout=described), *_tensor_lines(checkpoint.reader, kinds=_kinds_of_packed(checkpoint))]
    statistics = _statistics(checkpoint)
    if statistics.weights:
        fused = {m.place.fused for m in checkpoint.modules.values() if m.place is not None and m.format == "mxfp4"}
        lines.append(f"  experts       {len(fused)} fused weights, {statistics.weights:,} weights, 4.25 bits each")
        lines += statistics.lines()
    meta = read_export_metadata(directory)
    if meta is not None:
        lines.append(f"  scale_mode    {meta['scale_mode']}, {meta['rounding']}, quantized from {meta['source_dtype']}")
        parent, run = meta["parent"], meta["run"]
        lines.append(f"  made from     {parent['path']} (sha256 {parent['sha256'][:12]}), QAT step {run['step']} of {run['max_steps']}")
        if isinstance(converted := meta.get("converted_from"), dict):
            lines.append(f"  values of     weights {str(converted.get('sha256'))[:12]} in layout {converted.get('layout')}, converted")
    elif statistics.weights:
        lines.append(f"  scale_mode    not recorded (no {METADATA}: written by another tool)")
    shapes = [checkpoint.fused_shape(f) for f in checkpoint.fused_names("mxfp4") if f.endswith("down_proj")]
    if shapes:
        _, hidden, expert_hidden = shapes[0]
        lines += [f"  geometry      {warning}" for warning in geometry_warnings(hidden=hidden, expert_hidden=expert_hidden)]
    notes = reader_warnings(content_of(checkpoint), layout=checkpoint.layout.name) + engine_notes(config["model_type"], layout=checkpoint.layout.name)
    lines += [f"  readers       {note}" for note in notes]
    return "\n".join(lines)


@dataclass(kw_only=True)
class _Statistics:
    """Of the MXFP4 experts of a directory."""

    weights: int = 0
    zero_blocks: int = 0
    lost_scales: int = 0                                        # blocks with codes under scale byte 0, which makes them next to nothing
    scales: Counter[int] = field(default_factory=Counter)       # blocks by scale byte
    dead: dict[str, list[int]] = field(default_factory=dict)    # fused weight -> experts with a projection of zeros alone

    def lines(self) -> list[str]:
        total, used = self.scales.total(), sorted(self.scales)
        median = _quantile(self.scales, 0.5)
        lines = [f"  scales        2**{used[0] - 127} to 2**{used[-1] - 127}, median 2**{median - 127}, {len(used)} different; "
                 f"{self.zero_blocks:,} of {total:,} blocks all zero"]
        if self.lost_scales:
            lines.append(f"  WARNING       {self.lost_scales:,} blocks hold codes under scale byte 0, 2**-127: "
                         "their scales may have been lost")
        lines += [f"  WARNING       {name}: experts {dead} are all zero: the checkpoint was damaged or never trained" for name, dead in self.dead.items()]
        return lines


def _statistics(checkpoint: PackedCheckpoint) -> _Statistics:
    found, parts_of = _Statistics(), {leaf: len(parts) for leaf, parts in checkpoint.arch.fused.items()}
    for fused in checkpoint.fused_names("mxfp4"):
        parts, dead = parts_of[fused.rsplit(".", 1)[1]], []
        for e in range(checkpoint.fused_shape(fused)[0]):
            for part in range(parts):
                packed = checkpoint.expert(fused, expert=e, part=part, parts=parts)
                blocks = (packed.elements & 0x77).ne(0).unflatten(-1, (-1, 16)).any(-1)   # the sign of zero does not count
                found.weights += packed.elements.numel() * 2
                found.zero_blocks += int((~blocks).sum())
                found.lost_scales += int(((packed.scales == 0) & blocks).sum())
                found.scales.update(dict(zip(*(t.tolist() for t in packed.scales.unique(return_counts=True)), strict=True)))
                if not bool(blocks.any()) and e not in dead:
                    dead.append(e)
        if dead:
            found.dead[fused] = dead
    return found


def _quantile(counts: Counter[int], share: float) -> int:
    reached, wanted = 0, share * counts.total()
    for value in sorted(counts):
        reached += counts[value]
        if reached >= wanted:
            return value
    raise AssertionError("no values")


def _header(directory: Path, config: dict[str, object], *, layout: str) -> list[str]:
    named = config.get("architectures")
    architectures = ", ".join(named) if isinstance(named, list) and named else "no architecture named"
    return [f"{directory}", f"  model         {config.get('model_type')} ({architectures})", f"  layout        {layout}"]


def _tensor_lines(reader: CheckpointReader, *, kinds: dict[str, str]) -> list[str]:
    """Counts and bytes by kind; kinds: of packed tensors by name, others are kept in their dtype."""
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for name in reader.names:
        dtype, shape = reader.info(name)
        kind = kinds.get(name, f"kept {dtype}")
        counts[kind] += 1
        sizes[kind] += torch.Size(shape).numel() * DTYPES[dtype].itemsize
    lines = [f"  {kind:<13} {counts[kind]:>6} tensors {sizes[kind] / 1e6:>10.2f} MB" for kind in sorted(counts)]
    return [*lines, f"  {'total':<13} {counts.total():>6} tensors {sizes.total() / 1e6:>10.2f} MB in {len(reader.files)} file(s)"]


def _kinds_of_packed(checkpoint: PackedCheckpoint) -> dict[str, str]:
    """What a packed weight's tensors are called in the report."""
    found: dict[str, str] = {}
    assert checkpoint.layout is not None
    for m in checkpoint.modules.values():
        kinds = ("packed experts", "expert scales") if m.format == "mxfp4" else (f"{m.format} weights", f"{m.format} scales")
        found.update(zip(checkpoint.layout.names(m.stem, m.format), kinds, strict=True))
    return found
