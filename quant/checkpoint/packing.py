"""From a parent's tensor to the tensors of the export, and from the export's tensors back to dense ones.

The export keeps the parent's names. A tensor that is not in the plan is copied, or, when the run trained it, rounded to the parent's
dtype. A planned weight is packed in its format, in the layout of its family:

    compressed-tensors   one weight an expert and projection; families that store fused experts are split for it
    gpt-oss              `<fused>_blocks` [E, out, in / 32, 16] and `<fused>_scales` [E, out, in / 32]
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..archs import MoEArch, build_model, memory_names, to_disk_state
from ..formats import find_format
from ..plan import PlannedWeight, QuantPlan
from ..tensor import SOURCE_DTYPE, MXFP4Tensor, quantize_weight
from .reader import CheckpointReader

BLOCKS, SCALES = "_blocks", "_scales"   # of the gpt-oss layout


class ParentTensors:
    """The parent's tensors by name, each with what the run made of it.

    trained: by in-memory name; each of the model's, and the parent complete (`require_fitting_parent`).
    """

    def __init__(self, reader: CheckpointReader, *, config: Any, plan: QuantPlan, trained: dict[str, Tensor]) -> None:
        self.reader, self.plan, self.trained = reader, plan, trained
        self._planned = {w.name: w for w in plan.weights}
        model = build_model(config, device="meta")
        self.memory_name = memory_names(model, reader.names)
        experts = {w.name for w in plan.experts}
        others = {n: t for n, t in trained.items() if n not in experts}
        self._trained_on_disk = to_disk_state(model, others) if others else {}
        for name, tensor in others.items():   # the parent may keep a name that transformers would write otherwise
            self._trained_on_disk.setdefault(name, tensor)
        unplaced = set(others) - set(self.memory_name.values())
        assert not unplaced, f"{min(unplaced)}: trained, and no tensor of {reader.directory} becomes it; the parent and the run were checked before"

    def planned(self, name: str) -> PlannedWeight | None:
        """The plan's entry for a tensor of the parent."""
        place = self.plan.arch.expert_slice(name)
        return self._planned.get(place.fused if place is not None else self.memory_name[name])

    def is_trained(self, name: str) -> bool:
        place = self.plan.arch.expert_slice(name)
        return place.fused in self.trained if place is not None else name in self._trained_on_disk

    def dense(self, name: str) -> Tensor:
        """The tensor as the run left it, masters unrounded; experts canonical, [out, in] or [E, out, in]."""
        place = self.plan.arch.expert_slice(name)
        if place is None:
            return self._trained_on_disk[name] if name in self._trained_on_disk else self.reader.get(name)
        if place.fused in self.trained:
            return self.plan.arch.part(self.plan.arch.canonical(self.trained[place.fused]), place=place)
        tensor = self.reader.get(name)
        return self.plan.arch.canonical(tensor) if place.expert is None else tensor

    def exported(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """The tensors that the export writes for one of the parent's."""
        weight = self.planned(name)
        dense = self.dense(name)
        if weight is None or weight.format == "bf16":
            kept = self.reader.get(name)
            if self.is_trained(name):
                source = dense.to(SOURCE_DTYPE) if weight is not None else dense   # what a planned bf16 weight computed with
                kept = _rounded(self._as_stored(name, source), kept.dtype, name=name, exact=weight is not None)
            yield name, kept
            return
        fmt, mode = find_format(weight.format), self.plan.scale_mode
        if weight.role == "router":   # no engine reads a packed router: its values, exact in bf16
            values = fmt.fake_quant(dense, name=name, scale_mode=mode, dim=-1, dtype=torch.float32, faults=None)
            yield name, _rounded(values, self.reader.get(name).dtype, name=name, exact=True)
            return
        place = self.plan.arch.expert_slice(name)
        if place is None or place.expert is not None:
            yield from fmt.to_disk(dense, name=name, scale_mode=mode).items()
        elif self.plan.arch.layout == "gpt-oss":
            packed = quantize_weight(dense, name=name, scale_mode=mode)
            yield f"{name}{BLOCKS}", packed.blocks
            yield f"{name}{SCALES}", packed.scales
        else:
            for parts in self.plan.arch.disk_names(place.fused, num_experts=dense.shape[0]):
                for part in parts:
                    slot = self.plan.arch.packed_slice(part.removesuffix(".weight"))
                    assert slot is not None, part
                    yield from fmt.to_disk(self.plan.arch.part(dense, place=slot), name=part, scale_mode=mode).items()

    def expected(self, name: str) -> Tensor:
        """What a reader must find for one of the parent's tensors: the values training computed with, in the form the parent stores."""
        weight = self.planned(name)
        if weight is None or weight.format == "bf16" or weight.role == "router":
            return next(iter(self.exported(name)))[1]
        values = find_format(weight.format).fake_quant(
            self.dense(name), name=name, scale_mode=self.plan.scale_mode, dim=-1, dtype=SOURCE_DTYPE, faults=None)
        return self._as_stored(name, values)

    def _as_stored(self, name: str, canonical: Tensor) -> Tensor:
        place = self.plan.arch.expert_slice(name)
        if place is not None and place.expert is None:
            return self.plan.arch.canonical(canonical).contiguous()   # its own inverse
        return canonical


def _rounded(weight: Tensor, dtype: torch.dtype, *, name: str, exact: bool = False) -> Tensor:
    """A trained tensor in its parent's dtype; ValueError when that cannot hold it, or with `exact` not every value of it."""
    rounded = weight.to(dtype).contiguous()
    if exact and not torch.equal(rounded.float(), weight.float()):
        raise ValueError(f"export: {name}: the parent's {dtype} cannot hold the values that training computed with. Start from a bf16 or fp32 parent.")
    if not bool(torch.isfinite(rounded).all()):
        raise ValueError(f"export: {name}: the trained weights (largest {float(weight.abs().max()):.3g}) do not fit the parent's {dtype}: it has diverged.")
    return rounded


def packed_stems(reader: CheckpointReader) -> dict[str, str]:
    """Stem -> format of every packed weight of a directory, told by its tensors; gpt-oss's fused ones included (format `gpt-oss`)."""
    found: dict[str, str] = {}
    for name in reader.names:
        if name.endswith(".weight_packed"):
            found[name.removesuffix(".weight_packed")] = "mxfp4"
        elif name.endswith(BLOCKS):
            found[name.removesuffix(BLOCKS)] = "gpt-oss"
        elif name.endswith(".weight_scale") and f"{name.removesuffix('.weight_scale')}.weight" in reader:
            found[name.removesuffix(".weight_scale")] = "mxfp8" if reader.info(name)[0] == "U8" else "fp8_block"
    return found


def tensors_of(stem: str, *, fmt: str) -> list[str]:
    """The names that a packed weight has on disk."""
    if fmt == "gpt-oss":
        return [f"{stem}{BLOCKS}", f"{stem}{SCALES}"]
    return [f"{stem}.{suffix}" for suffix in find_format(fmt).suffixes]


def read_packed(reader: CheckpointReader, stem: str, *, fmt: str) -> Tensor:
    """A packed weight dequantized, bf16, [out, in] (or [E, out, in]). Errors: ValueError when a part is missing."""
    names = tensors_of(stem, fmt=fmt)
    if fmt == "gpt-oss":
        return MXFP4Tensor(blocks=reader.get(names[0]), scales=reader.get(names[1]), scale_mode=None).dequantize(dtype=SOURCE_DTYPE)
    return find_format(fmt).from_disk({suffix: reader.get(name) for suffix, name in zip(find_format(fmt).suffixes, names, strict=True)})


def dense_state(reader: CheckpointReader, *, arch: MoEArch, dtype: torch.dtype) -> dict[str, Tensor]:
    """All tensors of a directory by the names an unquantized checkpoint of the family has, packed ones dequantized (exact in bf16 and wider)."""
    stems = packed_stems(reader)
    packed_names = {n for stem, fmt in stems.items() for n in tensors_of(stem, fmt=fmt)}
    state = {name: _as_float(reader.get(name), dtype) for name in reader.names if name not in packed_names}
    split: dict[str, dict[tuple[int, int], Tensor]] = {}
    for stem, fmt in stems.items():
        weight = read_packed(reader, stem, fmt=fmt).to(dtype)
        place = arch.packed_slice(stem)
        if fmt == "gpt-oss":
            state[stem] = arch.canonical(weight).contiguous()
        elif place is not None and arch.stored == "fused":
            assert place.expert is not None
            split.setdefault(place.fused, {})[place.expert, place.part] = weight
        else:
            state[f"{stem}.weight"] = weight
    for fused, pieces in split.items():
        state[arch.stored_name(fused)] = arch.canonical(join_experts(pieces, arch=arch, fused=fused, where=str(reader.directory))).contiguous()
    return state


def join_experts(pieces: dict[tuple[int, int], Tensor], *, arch: MoEArch, fused: str, where: str) -> Tensor:
    """[E, out, ...] from the parts of all experts by (expert, part). Errors: ValueError naming what is missing."""
    num_experts, parts = 1 + max(e for e, _ in pieces), len(arch.fused[fused.rsplit(".", 1)[1]])
    missing = [(e, p) for e in range(num_experts) for p in range(parts) if (e, p) not in pieces]
    if missing:
        raise ValueError(f"{where}: {fused}: expert {missing[0][0]}, part {missing[0][1]} is not in the files. The export is incomplete.")
    return torch.stack([arch.join([pieces[e, p] for p in range(parts)]) for e in range(num_experts)])


def _as_float(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor

