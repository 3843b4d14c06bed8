"""What an export writes for each tensor of the parent, in a layout.

The export keeps the parent's names. A tensor that is not in the plan is copied, or, when the run trained it, rounded to the parent's
dtype. A planned weight is packed in its format and its layout; of a fused expert weight one expert is read and packed at a time, and only
where the layout keeps the experts of a layer together are they collected.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..archs import ExpertSlice, build_model, memory_names, to_disk_state
from ..formats import find_format
from ..plan import PlannedWeight, QuantPlan
from ..tensor import SOURCE_DTYPE
from .layouts import Content, Layout, PackedModule, ordered
from .masters import Masters
from .packed import PackedCheckpoint
from .reader import CheckpointReader
from .stream import TensorSpec, Unit


class RunUnits:
    """The parent's tensors by name, each with what the run made of it and what is written for it.

    masters: by in-memory name; each of the model's, and the parent complete (`require_fitting_parent`). ranks: that share the export.
    """

    def __init__(self, reader: CheckpointReader, *, config: Any, plan: QuantPlan, masters: Masters, layout: Layout, ranks: int = 1) -> None:
        self.reader, self.plan, self.masters, self.layout, self.ranks = reader, plan, masters, layout, ranks
        self._planned = {w.name: w for w in plan.weights}
        self._model = build_model(config, device="meta")
        self.memory_name = memory_names(self._model, reader.names)
        self._parts: dict[str, list[str]] = {}   # in-memory name -> names on disk
        for disk, memory in self.memory_name.items():
            self._parts.setdefault(memory, []).append(disk)
        experts = {w.name for w in plan.experts}
        unplaced = {n for n in masters if n not in experts} - set(self.memory_name.values())
        assert not unplaced, f"{min(unplaced)}: trained, and no tensor of {reader.directory} becomes it; the parent and the run were checked before"

    def planned(self, name: str) -> PlannedWeight | None:
        """The plan's entry for a tensor of the parent."""
        place = self.plan.arch.expert_slice(name)
        return self._planned.get(place.fused if place is not None else self.memory_name[name])

    def is_packed(self, name: str) -> bool:
        weight = self.planned(name)
        return weight is not None and weight.format != "bf16" and weight.role != "router"

    def is_trained(self, name: str) -> bool:
        place = self.plan.arch.expert_slice(name)
        return (place.fused if place is not None else self.memory_name[name]) in self.masters

    def content(self) -> Content:
        """What the written directory holds, for its config.json."""
        packed: list[PackedModule] = []
        kept: dict[str, int] = {}
        linears: list[str] = []
        for name in self.reader.names:
            place, weight = self.plan.arch.expert_slice(name), self.planned(name)
            if self.is_packed(name):
                packed += self._modules(name)
            elif place is not None and weight is not None:
                kept[place.fused] = weight.shape[0]
            if not self.is_packed(name) and name.endswith(".weight") and len(self.reader.info(name)[1]) == 2 and "embed" not in name:
                linears.append(name.removesuffix(".weight"))
        return Content(arch=self.plan.arch, packed=ordered(packed, arch=self.plan.arch), linears=tuple(linears), kept_experts=kept)

    def units(self) -> list[Unit]:
        """Everything that is written, in the parent's order."""
        return [unit for name in self.reader.names for unit in self._units_of(name)]

    def _units_of(self, name: str) -> Iterator[Unit]:
        if not self.is_packed(name):
            dtype, shape = self.reader.info(name)
            yield Unit(tensors=(TensorSpec(name=name, dtype=dtype, shape=shape),), make=lambda: [self._plain(name)],
                       check=lambda written: self._check_plain(written, name), owner=self._owner(name))
            return
        weight = self.planned(name)
        assert weight is not None
        for module in self._modules(name):
            yield self._packed_unit(name, module=module, weight=weight)

    def _modules(self, name: str) -> list[PackedModule]:
        """The packed weights that stand for a planned tensor of the parent."""
        place, weight, arch = self.plan.arch.expert_slice(name), self.planned(name), self.plan.arch
        assert weight is not None
        stem = name.removesuffix(".weight")
        if place is None or place.expert is not None:
            module = weight.module if place is None else arch.memory_module(stem)
            return [PackedModule(stem=stem, module=module, format=weight.format, place=place)]
        if self.layout.is_fused:
            return [PackedModule(stem=place.fused, module=weight.module, format=weight.format, place=place)]
        found = []
        for parts in arch.disk_names(place.fused, num_experts=weight.shape[0]):
            for part in parts:
                slot = arch.packed_slice(stem := part.removesuffix(".weight"))
                assert slot is not None, part
                found.append(PackedModule(stem=stem, module=arch.memory_module(stem), format=weight.format, place=slot))
        return found

    def _packed_unit(self, name: str, *, module: PackedModule, weight: PlannedWeight) -> Unit:
        fmt, place, mode = find_format(weight.format), module.place, self.plan.scale_mode
        label = f"{module.stem}.weight"
        if place is not None and place.expert is None:   # a layout that keeps all experts of a layer together
            shape = weight.canonical_shape

            def make() -> list[Tensor]:
                elements, scales = (torch.empty(s, dtype=torch.uint8) for _, s in self.layout.specs(fmt.name, shape, scales=SOURCE_DTYPE))
                for e in range(shape[0]):
                    packed = fmt.encode(self._expert(name, fused=place.fused, expert=e), name=f"{module.stem}[{e}]", scale_mode=mode)
                    elements[e], scales[e] = self.layout.to_disk(packed)
                return [elements, scales]

            def check(written: PackedCheckpoint) -> int:
                for e in range(shape[0]):
                    read = written.expert(place.fused, expert=e, part=0, parts=1)
                    source = self._expert(name, fused=place.fused, expert=e)
                    wanted = fmt.fake_quant(source, name=label, scale_mode=mode, dim=-1, dtype=SOURCE_DTYPE, faults=None)
                    require_equal(fmt.decode(read), wanted, name=f"{module.stem}[{e}]")
                return torch.Size(shape).numel()
        else:
            rows, columns = weight.canonical_shape[-2:]
            shape = (rows // (place.parts if place is not None else 1), columns)

            def make() -> list[Tensor]:
                return list(self.layout.to_disk(fmt.encode(self._matrix(name, place=place), name=label, scale_mode=mode)))

            def check(written: PackedCheckpoint) -> int:
                wanted = fmt.fake_quant(self._matrix(name, place=place), name=label, scale_mode=mode, dim=-1, dtype=SOURCE_DTYPE, faults=None)
                require_equal(written.dense(module.stem), wanted, name=label)
                return wanted.numel()

        specs = tuple(TensorSpec(name=n, dtype=dtype, shape=s) for n, (dtype, s) in zip(
            self.layout.names(module.stem, fmt.name), self.layout.specs(fmt.name, shape, scales=SOURCE_DTYPE), strict=True))
        return Unit(tensors=specs, make=make, check=check, owner=self._owner(name, place=place))

    def _owner(self, name: str, *, place: ExpertSlice | None = None) -> int:
        if self.ranks == 1 or place is None or place.expert is None or place.fused not in self.masters:
            return 0
        return self.masters.owner(place.fused, row=place.expert, ranks=self.ranks)

    def _matrix(self, name: str, *, place: ExpertSlice | None) -> Tensor:
        """A planned weight [out, in] as the run left it, masters unrounded; of an expert its own projection."""
        if place is None:
            return self._trained_plain(name) if self.is_trained(name) else self.reader.get(name)
        assert place.expert is not None
        if place.fused not in self.masters and self.plan.arch.stored == "per_expert":
            return self.reader.get(name)
        rows = self._expert(name, fused=place.fused, expert=place.expert)
        return self.plan.arch.part(rows[None], place=ExpertSlice(fused=place.fused, expert=0, part=place.part, parts=place.parts))

    def _expert(self, name: str, *, fused: str, expert: int) -> Tensor:
        """One expert of a fused weight, canonical [out, in]; only it is read."""
        if fused in self.masters:
            return self.plan.arch.canonical(self.masters.rows(fused, start=expert, stop=expert + 1))[0]
        return self.plan.arch.canonical(self.reader.rows(name, start=expert, stop=expert + 1))[0]

    def _trained_plain(self, name: str) -> Tensor:
        """A trained tensor beside the experts, under its name on disk."""
        memory = self.memory_name[name]
        if len(self._parts[memory]) == 1 and self.masters.shape(memory) == self.reader.info(name)[1]:
            return self.masters.get(memory)
        return to_disk_state(self._model, {memory: self.masters.get(memory)})[name]

    def _plain(self, name: str) -> Tensor:
        """A tensor that is not packed, as it is written."""
        weight, place = self.planned(name), self.plan.arch.expert_slice(name)
        kept = self.reader.get(name)
        if weight is not None and weight.role == "router" and weight.format != "bf16":   # no engine reads a packed router: its values, exact in bf16
            source = self._trained_plain(name) if self.is_trained(name) else kept
            values = find_format(weight.format).fake_quant(
                source, name=name, scale_mode=self.plan.scale_mode, dim=-1, dtype=torch.float32, faults=None)
            return _rounded(values, kept.dtype, name=name, exact=True)
        if not self.is_trained(name):
            return kept
        if place is None:
            dense = self._trained_plain(name)
        elif place.expert is None:
            dense = self.masters.get(place.fused)
        else:
            dense = self._matrix(name, place=place)
        source = dense.to(SOURCE_DTYPE) if weight is not None else dense   # what a planned bf16 weight computed with
        return _rounded(source, kept.dtype, name=name, exact=weight is not None)

    def _check_plain(self, written: PackedCheckpoint, name: str) -> int:
        require_equal(written.reader.get(name), self._plain(name), name=name)
        return 0


def _rounded(weight: Tensor, dtype: torch.dtype, *, name: str, exact: bool = False) -> Tensor:
    """A trained tensor in its parent's dtype; ValueError when that cannot hold it, or with `exact` not every value of it."""
    rounded = weight.to(dtype).contiguous()
    if exact and not torch.equal(rounded.float(), weight.float()):
        raise ValueError(f"export: {name}: the parent's {dtype} cannot hold the values that training computed with. Start from a bf16 or fp32 parent.")
    if not bool(torch.isfinite(rounded).all()):
        raise ValueError(f"export: {name}: the trained weights (largest {float(weight.abs().max()):.3g}) do not fit the parent's {dtype}: it has diverged.")
    return rounded


def require_equal(got: Tensor, expected: Tensor, *, name: str) -> None:
    """ValueError with count and first coordinates when two tensors differ in a bit."""
    if got.shape != expected.shape or got.dtype != expected.dtype:
        raise ValueError(f"export: {name}: wrote {got.dtype} {tuple(got.shape)}, training had {expected.dtype} {tuple(expected.shape)}. Nothing was kept.")
    # bytes, so that NaN and the sign of zero count
    a, b = (t.contiguous().view(-1).view(torch.uint8) for t in (got, expected))
    if torch.equal(a, b):
        return
    different = (a != b).view(*got.shape, -1).any(-1)
    index = tuple(int(i) for i in different.nonzero()[0])
    raise ValueError(f"export: {name}: {int(different.sum())} of {got.numel()} values differ from training; first at {index}: "
                     f"wrote {float(got[index])}, training had {float(expected[index])}. Nothing was kept.")


