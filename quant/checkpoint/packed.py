"""A checkpoint in any of the layouts, as the weights it stands for: dense ones by the names of an unquantized checkpoint, experts in MXFP4."""

import re
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...kernels.mx import ScaleMode
from ..archs import ExpertSlice, MoEArch
from ..formats import Packed, as_mxfp4, find_format
from ..tensor import MXFP4Tensor
from .layouts import Layout, PackedModule, layout_of
from .layouts.mimo import narrowed
from .metadata import read_json, read_scale_mode
from .reader import DTYPES, CheckpointReader

_NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")     # of config.json, by family
_MTP = re.compile(r"(^|\.)mtp\.")   # multi-token-prediction layers of families that number them apart


class PackedCheckpoint:
    """The packed and the plain tensors of a directory, read one at a time.

    Errors: FileNotFoundError and ValueError for missing and damaged files, a quantization that is none of ours, an expert or a projection that is
        missing, and scales that are missing, NaN or all zero; each names the tensor.
    """

    def __init__(self, directory: Path, *, arch: MoEArch) -> None:
        self.directory, self.arch = directory, arch
        self.reader = CheckpointReader(directory)
        self.config: dict[str, Any] = read_json(directory / "config.json")
        self.layout: Layout | None = layout_of(self.config, where=str(directory))
        modules = self.layout.find(self.reader, arch=arch) if self.layout is not None else []
        self.modules: dict[str, PackedModule] = {m.stem: m for m in modules}
        for m in modules:
            if m.place is None and m.format == "mxfp4" and not self.is_beyond(m.stem) and not re.fullmatch(arch.shared, f"{m.module}.weight"):
                raise ValueError(f"{directory}: {m.stem} is packed but is no routed expert of a {arch.name} model. Only experts may be MXFP4 here.")
        for fused, pieces in self._pieces.items():
            require_all_parts(pieces, arch=arch, fused=fused, where=str(directory))

    def require_agreement(self) -> None:
        """ValueError where config.json and the files say different things: layers, experts, what packed weights are. Who loads a model finds the same on the
        way; who only moves tensors asks here."""
        layers = {int(found[1]) for name in self.reader.names if (found := re.search(r"(?:^|\.)layers\.(\d+)\.", name)) is not None}
        said = self.config.get("num_hidden_layers")
        if layers and said is not None and max(layers) + 1 < said:
            raise ValueError(f"{self.directory}: config.json has {said} layers; the files have {max(layers) + 1}. Fetch the checkpoint again.")
        for fused in self.fused_names("mxfp4"):
            there = self.fused_shape(fused)[0]
            for key in _NUM_EXPERTS:
                if isinstance(said := self.config.get(key), int) and said != there and not self.is_beyond(fused):
                    raise ValueError(f"{self.directory}: config.json has {key} {said}; {fused} has {there} experts in the files. Fetch the checkpoint again.")
        for m in self.modules.values():
            assert self.layout is not None
            if m.format == "mxfp4":
                for name in self.layout.names(m.stem, m.format):
                    if DTYPES[self.reader.info(name)[0]].itemsize != 1:
                        raise ValueError(f"{self.directory}: {name} is {self.reader.info(name)[0]}; MXFP4 codes and scales are bytes. Export it again.")
        if self.layout is not None and (problem := self.layout.contradiction(self.config, formats={m.format for m in self.modules.values()})) is not None:
            raise ValueError(f"{self.directory}: config.json: {problem}. Restore config.json, or export again.")

    def is_beyond(self, name: str) -> bool:
        """Whether a tensor is of a layer behind the model's own: multi-token prediction, which transformers does not build."""
        number, layers = re.search(r"(?:^|\.)layers\.(\d+)\.", name), self.config.get("num_hidden_layers")
        return bool(_MTP.search(name)) or (number is not None and layers is not None and int(number[1]) >= layers)

    @cached_property
    def packed_names(self) -> frozenset[str]:
        """Tensors on disk that belong to a packed weight."""
        assert self.layout is not None or not self.modules
        return frozenset(n for m in self.modules.values() for n in self.layout.names(m.stem, m.format)) if self.layout is not None else frozenset()

    @cached_property
    def plain_names(self) -> list[str]:
        """Tensors on disk that are what they say."""
        return [n for n in self.reader.names if n not in self.packed_names]

    @cached_property
    def _pieces(self) -> dict[str, dict[tuple[int, int], PackedModule]]:
        """Fused expert weight -> (expert, part) -> its packed weight, where they are stored one by one."""
        found: dict[str, dict[tuple[int, int], PackedModule]] = {}
        for m in self.modules.values():
            if m.place is not None and m.place.expert is not None:
                found.setdefault(m.place.fused, {})[m.place.expert, m.place.part] = m
        return found

    def packed(self, stem: str) -> Packed:
        """A packed weight, [out, in], or [E, out, in] where the layout is fused."""
        module = self.modules[stem]
        assert self.layout is not None
        elements, scales = (self.reader.get(n) for n in self.layout.names(stem, module.format))
        return self.layout.from_disk(module.format, elements, scales, name=f"{self.directory}: {stem}")

    def shape(self, stem: str) -> tuple[int, ...]:
        """[out, in] or [E, out, in], without reading values."""
        module = self.modules[stem]
        assert self.layout is not None
        shape = self.reader.info(self.layout.names(stem, module.format)[0])[1]
        if module.format != "mxfp4":
            return shape
        return (*shape[:-2], shape[-2] * 32) if self.layout.is_fused else (*shape[:-1], shape[-1] * 2)

    def fused_shape(self, fused: str) -> tuple[int, int, int]:
        """[E, out, in] of a fused expert weight, however it is kept."""
        if fused not in self._pieces:
            num, rows, columns = self.shape(fused)
            return num, rows, columns
        pieces = self._pieces[fused]
        num_experts, parts = require_all_parts(pieces, arch=self.arch, fused=fused, where=str(self.directory))
        rows, columns = self.shape(pieces[0, 0].stem)
        return num_experts, rows * parts, columns

    def num_bytes(self, fmt: str) -> int:
        """Bytes of the weights packed in a format, scales included."""
        assert self.layout is not None or not self.modules
        infos = [self.reader.info(n) for m in self.modules.values() if m.format == fmt and self.layout for n in self.layout.names(m.stem, fmt)]
        return sum(torch.Size(shape).numel() * DTYPES[dtype].itemsize for dtype, shape in infos)

    def scales_dtype(self, stem: str) -> torch.dtype:
        """Of the exchange form: FP8 tile scales are bf16 where that is exact. Reads the scales."""
        if self.modules[stem].format != "fp8_block":
            return torch.uint8
        assert self.layout is not None
        scales = self.reader.get(self.layout.names(stem, "fp8_block")[1])
        return scales.dtype if scales.dtype == torch.bfloat16 else narrowed(scales).dtype

    def dense(self, stem: str) -> Tensor:
        """A packed weight's values, bf16. Errors: ValueError also for a scale that bf16 cannot hold."""
        try:
            return find_format(self.modules[stem].format).decode(self.packed(stem))
        except ValueError as error:
            raise error if str(error).startswith(str(self.directory)) else ValueError(f"{self.directory}: {stem}: {error}") from error

    def expert(self, fused: str, *, expert: int, part: int, parts: int) -> Packed:
        """One projection of one expert, [out / parts, in], however the layout keeps it; of a fused layout only its rows are read."""
        if fused in self._pieces:
            return self.packed(self._pieces[fused][expert, part].stem)
        assert self.layout is not None
        module = self.modules[fused]
        elements, scales = (self.reader.rows(n, start=expert, stop=expert + 1) for n in self.layout.names(fused, module.format))
        whole = self.layout.from_disk(module.format, elements, scales, name=f"{self.directory}: {fused}")
        place = ExpertSlice(fused=fused, expert=0, part=part, parts=parts)   # of the one expert that was read
        rows = [self.arch.part(t, place=place).contiguous() for t in (whole.elements, whole.scales)]
        return Packed(format=module.format, elements=rows[0], scales=rows[1])
    def get(self, name: str) -> Tensor:
        """A tensor by the name an unquantized checkpoint of the family has it under, packed ones as bf16 values. Experts one by one."""
        stem = name.removesuffix(".weight")
        return self.dense(stem) if stem in self.modules and name != stem else self.reader.get(name)

    def experts(self) -> dict[str, MXFP4Tensor]:
        """Fused expert weights in MXFP4 by in-memory name, canonical [E, out, in]. Errors: also for a directory without one."""
        mode = self.scale_mode
        found = {fused: self.fused(fused) for fused in self.fused_names("mxfp4")}
        if not found:
            raise ValueError(f"{self.directory}: no packed expert found. Give a directory written by `kilotok export`.")
        return {name: as_mxfp4(packed, scale_mode=mode) for name, packed in found.items()}

    @property
    def scale_mode(self) -> ScaleMode | None:
        return read_scale_mode(self.directory)

    def fused_names(self, fmt: str) -> list[str]:
        """Fused expert weights all of whose parts are in one format."""
        alone = [m.stem for m in self.modules.values() if m.place is not None and m.place.expert is None and m.format == fmt]
        return alone + [fused for fused, pieces in self._pieces.items() if {m.format for m in pieces.values()} == {fmt}]

    def fused(self, fused: str) -> Packed:
        """A fused expert weight from all of its parts, [E, out, in]."""
        if fused not in self._pieces:
            return self.packed(fused)
        pieces = {key: self.packed(m.stem) for key, m in self._pieces[fused].items()}
        elements, scales = (join_experts({k: getattr(p, field) for k, p in pieces.items()}, arch=self.arch, fused=fused, where=str(self.directory))
                            for field in ("elements", "scales"))
        return Packed(format=next(iter(pieces.values())).format, elements=elements, scales=scales)

    def dense_state(self, *, dtype: torch.dtype) -> dict[str, Tensor]:
        """All tensors of the model by the names an unquantized checkpoint of the family has, packed ones dequantized.

        Errors: ValueError for a value that `dtype` cannot hold.
        """
        state = {self.arch.standard_name(name): as_float(self.reader.get(name), dtype) for name in self.plain_names if not self.is_beyond(name)}
        for stem, m in self.modules.items():
            if not self.is_beyond(stem) and (m.place is None or (m.place.expert is not None and self.arch.stored == "per_expert")):
                state[self.arch.standard_name(f"{stem}.weight")] = exactly(self.dense(stem), dtype, name=f"{self.directory}: {stem}")
        for fused in dict.fromkeys(m.place.fused for m in self.modules.values() if m.place is not None):
            if self.arch.stored == "fused":
                state[self.arch.stored_name(fused)] = self.arch.canonical(exactly(self._dense_fused(fused), dtype, name=fused)).contiguous()
        return state

    def _dense_fused(self, fused: str) -> Tensor:
        if fused not in self._pieces:
            return self.dense(fused)
        return join_experts({key: self.dense(m.stem) for key, m in self._pieces[fused].items()}, arch=self.arch, fused=fused, where=str(self.directory))


def join_experts(pieces: dict[tuple[int, int], Tensor], *, arch: MoEArch, fused: str, where: str) -> Tensor:
    """[E, out, ...] from the parts of all experts by (expert, part). Errors: ValueError naming what is missing."""
    num_experts, parts = require_all_parts(pieces, arch=arch, fused=fused, where=where)
    return torch.stack([arch.join([pieces[e, p] for p in range(parts)]) for e in range(num_experts)])


def exactly(values: Tensor, dtype: torch.dtype, *, name: str) -> Tensor:
    """Values in `dtype`. Errors: ValueError when it cannot hold every one of them."""
    result = values.to(dtype)
    if dtype == torch.float16 and not torch.equal(result.to(values.dtype), values):
        largest = float(values.abs().max())
        reason = f"its largest, {largest:.4g}, overflows" if not bool(torch.isfinite(result).all()) else "some vanish or lose bits"
        raise ValueError(f"{name}: float16 cannot hold its values ({reason}). Use bfloat16 or float32, which hold every MXFP4 value.")
    return result


def as_float(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def require_all_parts(pieces: dict[tuple[int, int], Any], *, arch: MoEArch, fused: str, where: str) -> tuple[int, int]:
    num_experts, parts = 1 + max(e for e, _ in pieces), len(arch.fused[fused.rsplit(".", 1)[1]])
    missing = [(e, p) for e in range(num_experts) for p in range(parts) if (e, p) not in pieces]
    if missing:
        raise ValueError(f"{where}: {fused}: expert {missing[0][0]}, part {missing[0][1]} is not in the files. The export is incomplete.")
    return num_experts, parts
