"""What a checkpoint directory holds, read from its files alone."""

import json
from collections import Counter
from pathlib import Path

import torch

from ..archs import check_model_dir
from ..archs.catalogue import find_arch
from .load import METADATA, read_export_metadata, read_exported_experts
from .packing import packed_stems, tensors_of
from .reader import CheckpointReader
from .run import RUN_METADATA


def inspect_directory(directory: Path) -> str:
    """A report as text: model, layout, tensor counts and bytes by kind, scale and code statistics, provenance.

    Errors: FileNotFoundError for a directory without a model, ValueError for damaged files.
    """
    if (directory / RUN_METADATA).is_file():
        raise ValueError(f"{directory}: is a run of `train qat`. Write its weights with `kilotok export {directory} OUT` and inspect OUT.")
    check_model_dir(directory)
    config = json.loads((directory / "config.json").read_text())
    reader = CheckpointReader(directory)
    quantization = config.get("quantization_config") or {}
    layout = f"{quantization.get('quant_method')} {quantization.get('format', '')}".strip() if quantization else "unquantized"
    architectures = ", ".join(config.get("architectures") or ["no architecture named"])
    lines = [f"{directory}", f"  model         {config.get('model_type')} ({architectures})", f"  layout        {layout}"]
    packed = _kinds_of_packed(reader)
    kinds: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for name in reader.names:
        dtype, shape = reader.info(name)
        kind = f"kept {dtype}"
        if name in packed:
            kind = packed[name]
        kinds[kind] += 1
        sizes[kind] += torch.Size(shape).numel() * _BYTES.get(dtype, 1)
    for kind in sorted(kinds):
        lines.append(f"  {kind:<13} {kinds[kind]:>6} tensors {sizes[kind] / 1e6:>10.2f} MB")
    lines.append(f"  {'total':<13} {sum(kinds.values()):>6} tensors {sum(sizes.values()) / 1e6:>10.2f} MB in {len(reader.files)} file(s)")
    if kinds["packed experts"]:
        arch = find_arch(config["model_type"], where=str(directory))
        experts = read_exported_experts(directory, arch=arch)
        scales = torch.cat([t.scales.flatten() for t in experts.values()])
        zero_blocks = sum(int((t.blocks == 0).all(-1).sum()) for t in experts.values())
        lines.append(f"  experts       {len(experts)} fused weights, {sum(torch.Size(t.shape).numel() for t in experts.values()):,} weights, 4.25 bits each")
        lines.append(f"  scales        2**{int(scales.min()) - 127} to 2**{int(scales.max()) - 127}, {len(scales.unique())} different; "
                     f"{zero_blocks:,} of {scales.numel():,} blocks all zero")
        for name, t in experts.items():
            dead = (t.blocks == 0).flatten(1).all(1).nonzero().flatten().tolist()
            if dead:
                lines.append(f"  WARNING       {name}: experts {dead} are all zero: the checkpoint was damaged or never trained")
    meta = read_export_metadata(directory)
    if meta is not None:
        lines.append(f"  scale_mode    {meta['scale_mode']}, {meta['rounding']}, quantized from {meta['source_dtype']}")
        parent, run = meta["parent"], meta["run"]
        lines.append(f"  made from     {parent['path']} (sha256 {parent['sha256'][:12]}), QAT step {run['step']} of {run['max_steps']}")
    elif kinds["packed experts"]:
        lines.append(f"  scale_mode    not recorded (no {METADATA}: written by another tool)")
    return "\n".join(lines)


def _kinds_of_packed(reader: CheckpointReader) -> dict[str, str]:
    """What a packed weight's tensors are called in the report."""
    found = {}
    for stem, fmt in packed_stems(reader).items():
        weight, scale = tensors_of(stem, fmt=fmt)
        mxfp4 = fmt in ("mxfp4", "gpt-oss")
        found[weight], found[scale] = ("packed experts", "expert scales") if mxfp4 else (f"{fmt} weights", f"{fmt} scales")
    return found


_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8, "U8": 1, "I8": 1, "I32": 4, "I64": 8, "F8_E4M3": 1, "F8_E8M0": 1}
