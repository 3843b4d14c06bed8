"""From one layout to another, byte for byte: codes and scales are renamed and moved, never computed again.

So there and back again gives the same bytes. `dense` writes the values instead, as an unquantized checkpoint of the family that can be
trained further or read by any tool; bf16 holds every one of them exactly.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from ..archs import ExpertSlice, check_model_dir, find_arch
from ..formats import Packed, find_format
from ..tensor import SOURCE_DTYPE
from .disk import give_name, refuse_existing, require_free_space, resumable_directory
from .export import copy_rest
from .layouts import WRITABLE, Content, Layout, PackedModule, find_layout, ordered
from .metadata import METADATA, read_export_metadata, read_json, values_of
from .packed import PackedCheckpoint, exactly
from .reader import DTYPE_NAMES, CheckpointReader, sha256_of_weights
from .readers import reader_warnings
from .run_units import require_equal
from .stream import TensorSpec, Unit, check_shards, dtype_counts, plan_shards, write_index, write_shards

DENSE = "dense"
DRAFT = "dflash"   # a draft head beside the target stays beside it
TARGETS = (*WRITABLE, DENSE)


@dataclass(frozen=True, kw_only=True)
class ConvertResult:
    """What was written."""

    directory: Path
    source_layout: str
    layout: str
    weights: int             # packed weights compared with the source, all equal
    kept_tensors: int
    bytes_before: int
    bytes_after: int
    dtypes: dict[str, int]
    warnings: tuple[str, ...]


def convert_directory(source: Path, out: Path, *, layout: str, dtype: torch.dtype | None = None, jobs: int = 1) -> ConvertResult:
    """Write the weights of `source`, a directory in any of the layouts, to `out` in another; re-read and compare before `out` gets its name.

    layout: a writable layout, or `dense`: the values, in `dtype` (bf16 unless given; no other layout takes one). A draft head in dflash/ goes along, but not
        with `dense`.
    Errors: FileExistsError for an `out` that exists; ValueError for a directory that is damaged or not packed, a layout that cannot hold it, and
        values that `dtype` cannot hold; OSError for a full disk. Nothing is left behind in any case.
    """
    refuse_existing(out)
    check_model_dir(source)
    if layout not in TARGETS:
        raise ValueError(f"layout: must be one of {', '.join(TARGETS)}; got {layout!r}.")
    if jobs < 1:
        raise ValueError(f"jobs: must be at least 1; got {jobs}.")
    if dtype is not None and layout != DENSE:
        raise ValueError(f"dtype: is of the values that layout {DENSE} writes; {layout} keeps codes and scales as they are. Leave it out.")
    dtype = dtype or torch.bfloat16
    config = read_json(source / "config.json")
    arch = find_arch(config.get("model_type"), where=str(source))
    checkpoint = PackedCheckpoint(source, arch=arch)
    if checkpoint.layout is None:
        raise ValueError(f"{source}: is not quantized: there is nothing to convert. Train it with `train qat`, and export the run.")
    checkpoint.require_agreement()
    content = content_of(checkpoint)
    if layout == DENSE:
        units = list(_dense_units(checkpoint, dtype=dtype))
        new_config = {k: v for k, v in config.items() if k not in ("quantization_config", "expert_dtype")}
        new_config["dtype"] = str(dtype).removeprefix("torch.")
        warnings: tuple[str, ...] = ()
    else:
        target = find_layout(layout)
        written_content = _in_layout(checkpoint, content, layout=target)
        inside = replace(written_content, packed=tuple(m for m in written_content.packed if not checkpoint.is_beyond(m.stem)))
        if (problem := target.problem(inside)) is not None:
            raise ValueError(f"convert: layout {layout}: {problem}. Choose another.")
        units = list(_packed_units(checkpoint, content=written_content, layout=target))
        plain = {k: v for k, v in config.items() if k not in ("quantization_config", "expert_dtype")}
        new_config = target.config_json(plain, written_content)
        warnings = reader_warnings(written_content, layout=layout)
    shards = plan_shards(units)
    sha256 = sha256_of_weights(source, jobs=jobs)
    origin: dict[str, object] = {"layout": checkpoint.layout.name, "sha256": sha256, "values_of": values_of(source, sha256=sha256)}
    metadata = {**(read_export_metadata(source) or {}), "layout": layout, "converted_from": origin}
    draft = source / DRAFT if (source / DRAFT).is_dir() and layout != DENSE else None
    if draft is not None:
        CheckpointReader(draft)     # damaged ones are found before anything is written
    draft_bytes = 0 if draft is None else sum(path.stat().st_size for path in draft.rglob("*") if path.is_file())
    names = [(s.file, t.name, t.dtype, t.shape) for s in shards for u in s.units for t in u.tensors]
    fingerprint = hashlib.sha256(json.dumps([names, metadata]).encode()).hexdigest()
    with resumable_directory(out, fingerprint=fingerprint) as partial:
        present = sum(s.num_bytes for s in shards if s.is_complete(partial))
        require_free_space(out, num_bytes=sum(s.num_bytes for s in shards) - present + draft_bytes + 2**20, what="convert")
        write_shards(partial, shards, jobs=jobs, label="convert")
        write_index(partial, shards)
        copy_rest(source, partial)
        (partial / "config.json").write_text(json.dumps(new_config, indent=2) + "\n")
        if layout != DENSE:
            origin["into"] = sha256_of_weights(partial, jobs=jobs)
            (partial / METADATA).write_text(json.dumps(metadata, indent=2) + "\n")
        if draft is not None:
            _copy_folder(draft, partial / DRAFT)
        written = PackedCheckpoint(partial, arch=arch)
        weights, num_bytes = check_shards(written, shards, jobs=jobs, label="convert"), written.reader.num_bytes
        give_name(partial, out)
    return ConvertResult(directory=out, source_layout=checkpoint.layout.name, layout=layout, weights=weights, kept_tensors=len(checkpoint.plain_names),
                         bytes_before=checkpoint.reader.num_bytes, bytes_after=num_bytes, dtypes=dtype_counts(shards),
                         warnings=warnings)


def _copy_folder(source: Path, to: Path) -> None:
    """OSError with the first error's words."""
    try:
        shutil.copytree(source, to, dirs_exist_ok=True)
    except shutil.Error as error:
        raise OSError(f"{error.args[0][0][0]}: cannot be copied to {to} ({error.args[0][0][2]}).") from error


def content_of(checkpoint: PackedCheckpoint) -> Content:
    """What a directory holds, told by its tensors."""
    arch, reader = checkpoint.arch, checkpoint.reader
    linears: list[str] = []
    kept: dict[str, int] = {}
    for name in checkpoint.plain_names:
        place, shape = arch.expert_slice(name), reader.info(name)[1]
        if place is not None and not checkpoint.is_beyond(name):
            kept[place.fused] = shape[0] if place.expert is None else max(kept.get(place.fused, 0), place.expert + 1)
        if name.endswith(".weight") and len(shape) == 2 and "embed" not in name:
            linears.append(name.removesuffix(".weight"))
    return Content(arch=arch, packed=ordered(checkpoint.modules.values(), arch=arch), linears=tuple(linears), kept_experts=kept)


def _in_layout(checkpoint: PackedCheckpoint, content: Content, *, layout: Layout) -> Content:
    """The same content with experts one by one or a layer at a time, as a layout keeps them, and under names that transformers writes."""
    arch = content.arch
    modules: list[PackedModule] = []
    for m in content.packed:
        if m.place is None or (m.place.expert is None) == layout.is_fused:
            modules.append(replace(m, stem=arch.standard_name(m.stem)))
        elif m.place.expert is None:
            for parts in arch.disk_names(m.place.fused, num_experts=checkpoint.fused_shape(m.place.fused)[0]):
                for stem in (part.removesuffix(".weight") for part in parts):
                    modules.append(PackedModule(stem=stem, module=arch.memory_module(stem), format=m.format, place=arch.packed_slice(stem)))
        elif (m.place.expert, m.place.part) == (0, 0):
            fused = m.place.fused
            modules.append(PackedModule(stem=fused, module=fused.rsplit(".", 1)[0], format=m.format,
                                        place=ExpertSlice(fused=fused, expert=None, part=0, parts=1)))
    linears = tuple(arch.standard_name(f"{n}.weight").removesuffix(".weight") for n in content.linears)
    return Content(arch=arch, packed=ordered(modules, arch=arch), linears=linears, kept_experts=content.kept_experts)


def _packed_units(checkpoint: PackedCheckpoint, *, content: Content, layout: Layout) -> Iterator[Unit]:
    for name in checkpoint.plain_names:
        yield _copied(checkpoint, name)
    stems = {checkpoint.arch.standard_name(stem): stem for stem in checkpoint.modules}
    for m in content.packed:
        yield _packed_unit(checkpoint, m, layout=layout, stem=stems.get(m.stem))


def _copied(checkpoint: PackedCheckpoint, name: str) -> Unit:
    dtype, shape = checkpoint.reader.info(name)
    spec = TensorSpec(name=checkpoint.arch.standard_name(name), dtype=dtype, shape=shape)

    def check(written: PackedCheckpoint) -> int:
        require_equal(written.reader.get(spec.name), checkpoint.reader.get(name), name=name)
        return 0

    return Unit(tensors=(spec,), make=lambda: [checkpoint.reader.get(name)], check=check)


def _packed_unit(checkpoint: PackedCheckpoint, module: PackedModule, *, layout: Layout, stem: str | None) -> Unit:
    """stem: the name in the source of a weight that keeps its form; None for experts that are split or put together."""
    place, scales = module.place, SOURCE_DTYPE
    if stem is not None:
        shape, scales = checkpoint.shape(stem), checkpoint.scales_dtype(stem)
    else:
        assert place is not None
        shape = checkpoint.fused_shape(place.fused)
        if place.expert is not None:
            shape = (shape[1] // place.parts, shape[2])

    def source() -> Packed:
        if stem is not None:
            return checkpoint.packed(stem)
        assert place is not None
        if place.expert is not None:
            return checkpoint.expert(place.fused, expert=place.expert, part=place.part, parts=place.parts)
        return checkpoint.fused(place.fused)

    def check(written: PackedCheckpoint) -> int:
        wanted, got = source(), written.packed(module.stem)
        require_equal(got.elements, wanted.elements, name=module.stem)
        require_equal(got.scales, wanted.scales, name=f"{module.stem} (scales)")
        return torch.Size(shape).numel()

    specs = tuple(TensorSpec(name=name, dtype=dtype, shape=on_disk) for name, (dtype, on_disk) in zip(
        layout.names(module.stem, module.format), layout.specs(module.format, shape, scales=scales), strict=True))
    return Unit(tensors=specs, make=lambda: layout.to_disk(source()), check=check)


def _dense_units(checkpoint: PackedCheckpoint, *, dtype: torch.dtype) -> Iterator[Unit]:
    """An unquantized checkpoint of the family: fp32 tensors stay, bf16 and packed ones become `dtype`."""
    arch, reader, kind = checkpoint.arch, checkpoint.reader, DTYPE_NAMES[dtype]
    for name in checkpoint.plain_names:
        stored, shape = reader.info(name)
        if stored not in ("BF16", "F16") or stored == kind:
            yield _copied(checkpoint, name)
        else:
            spec = TensorSpec(name=arch.standard_name(name), dtype=kind, shape=shape)
            yield _valued(spec, lambda n=name: exactly(reader.get(n), dtype, name=n), weights=0)   # type: ignore[misc]
    for stem, m in checkpoint.modules.items():
        if m.place is None or (m.place.expert is not None and arch.stored == "per_expert"):
            spec = TensorSpec(name=arch.standard_name(f"{stem}.weight"), dtype=kind, shape=checkpoint.shape(stem))
            yield _valued(spec, lambda s=stem: exactly(checkpoint.dense(s), dtype, name=s), weights=torch.Size(spec.shape).numel())   # type: ignore[misc]
    if arch.stored == "fused":
        for fused in dict.fromkeys(m.place.fused for m in checkpoint.modules.values() if m.place is not None):
            num, rows, columns = checkpoint.fused_shape(fused)
            shape = (num, columns, rows) if arch.transposed else (num, rows, columns)
            spec = TensorSpec(name=arch.stored_name(fused), dtype=kind, shape=shape)
            yield _valued(spec, lambda f=fused: _dense_fused(checkpoint, f, dtype=dtype), weights=num * rows * columns)   # type: ignore[misc]


def _valued(spec: TensorSpec, make: Callable[[], Tensor], *, weights: int) -> Unit:
    def check(written: PackedCheckpoint) -> int:
        require_equal(written.reader.get(spec.name), make(), name=spec.name)
        return weights

    return Unit(tensors=(spec,), make=lambda: [make()], check=check)


def _dense_fused(checkpoint: PackedCheckpoint, fused: str, *, dtype: torch.dtype) -> Tensor:
    """A fused expert weight as the family stores it unquantized, one expert after another."""
    arch, (num, rows, columns) = checkpoint.arch, checkpoint.fused_shape(fused)
    result = torch.empty((num, columns, rows) if arch.transposed else (num, rows, columns), dtype=dtype)
    parts = len(arch.fused[fused.rsplit(".", 1)[1]])
    for e in range(num):
        packed = [checkpoint.expert(fused, expert=e, part=p, parts=parts) for p in range(parts)]
        values = arch.join([find_format(p.format).decode(p) for p in packed])
        arch.canonical(result)[e] = exactly(values, dtype, name=f"{fused}[{e}]")
    return result
