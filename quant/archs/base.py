"""What the catalogue says of one family of models: where its experts are, how they lie in memory, and their names on disk.

In memory every family has fused weights, one 3-D parameter for all experts of a layer. They differ in three ways:

    transposed    [E, in, out] instead of [E, out, in]: MX blocks then run along dim -2
    interleaved   rows of the fused gate_up alternate gate, up, gate, up; elsewhere all gate rows come first
    stored        on disk one tensor an expert and projection, or the fused tensor itself

`canonical` undoes the first: all code below the catalogue sees [E, out, in].
"""

import re
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class ExpertSlice:
    """Where one tensor of a checkpoint lies inside a fused in-memory weight."""

    fused: str            # in-memory parameter
    expert: int | None    # None: all experts, the checkpoint stores the fused tensor
    part: int             # which of the `parts` row groups of the fused weight
    parts: int


@dataclass(frozen=True, kw_only=True)
class MoEArch:
    """One family. Regular expressions match in-memory names; `renamed` gives the names on disk where they differ.

    per_expert: `<experts>.<e>.<projection>.weight`, [out / parts, in]; fused: `stored_names[leaf]` beside the experts module.
    """

    name: str
    model_types: tuple[str, ...]
    experts: str = r"model\.layers\.\d+\.mlp\.experts"   # the module that owns the fused weights
    # fused parameter -> projections on disk, in row order
    fused: dict[str, tuple[str, ...]] = field(default_factory=lambda: {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)})
    renamed: tuple[str, str] | None = None               # path segment in memory, on disk: (".mlp.", ".block_sparse_moe.")
    stored: Literal["per_expert", "fused"] = "per_expert"
    stored_names: dict[str, str] = field(default_factory=dict)   # fused leaf -> its name on disk, replacing `experts.<leaf>`
    transposed: bool = False
    interleaved: bool = False
    not_experts: tuple[str, ...] = (r".*\.mlp\.shared_experts?\..*", r".*\.mlp\.(gate|up|down)_proj\..*")   # look-alikes, named in the plan as kept
    shared: str = r".*\.mlp\.shared_experts?\.(gate|up|down)_proj\.weight"       # what `quant.shared_experts` adds
    attention: str = r".*\.(self_attn|linear_attn)\..*\.weight"                  # what `quant.attention` covers, where it is a linear layer
    router: str = r".*\.mlp\.gate\..*"                                           # the tensors that pick experts
    layout: str = "compressed-tensors"                       # how the export packs the experts unless another layout is asked for
    released: tuple[tuple[str, str], ...] = ()               # names of the release that transformers does not write: (regular expression, replacement)
    misread: str | None = None    # what transformers does with the export, where it does not read it right

    def canonical(self, weight: Tensor) -> Tensor:
        """A fused weight as [E, out, in]: a view."""
        return weight.mT if self.transposed else weight

    @property
    def axis(self) -> int:
        """The input dim of a fused weight in memory, along which MX blocks run."""
        return -2 if self.transposed else -1

    def part(self, canonical: Tensor, *, place: ExpertSlice) -> Tensor:
        """The rows of a canonical fused weight (or of its codes or scales, [E, out, ...]) that a slice covers."""
        rows = canonical if place.expert is None else canonical[place.expert]
        dim = 1 if place.expert is None else 0
        if place.parts == 1:
            return rows
        if self.interleaved:
            return rows[(slice(None),) * dim + (slice(place.part, None, place.parts),)]
        return rows.chunk(place.parts, dim=dim)[place.part]

    def join(self, parts: list[Tensor]) -> Tensor:
        """Row groups of one expert, [out / parts, ...] each, as the rows of the fused weight; the inverse of `part`."""
        if len(parts) == 1:
            return parts[0]
        if self.interleaved:
            return torch.stack(parts, dim=1).flatten(0, 1)
        return torch.cat(parts)

    def disk_module(self, module: str) -> str:
        """The name on disk of a module's tensors."""
        return module if self.renamed is None else module.replace(*self.renamed)

    def standard_name(self, name: str) -> str:
        """A checkpoint's name as transformers would write it, where the family's release has names of its own."""
        for pattern, replacement in self.released:
            name = re.sub(pattern, replacement, name)
        return name

    def memory_module(self, module: str) -> str:
        module = self.standard_name(module)
        return module if self.renamed is None else module.replace(self.renamed[1], self.renamed[0])

    def disk_names(self, fused_name: str, *, num_experts: int) -> list[list[str]]:
        """[expert][part] names of one fused weight, one tensor an expert and projection; those of an export where the parent stores it fused."""
        module, leaf = fused_name.rsplit(".", 1)
        return [[f"{self.disk_module(module)}.{e}.{p}.weight" for p in self.fused[leaf]] for e in range(num_experts)]

    def stored_name(self, fused_name: str) -> str:
        """The one tensor on disk of a fused weight of a family that stores them so."""
        module, leaf = fused_name.rsplit(".", 1)
        if leaf in self.stored_names:
            return f"{self.disk_module(module).rsplit('.', 1)[0]}.{self.stored_names[leaf]}"
        return f"{self.disk_module(module)}.{leaf}"

    def expert_slice(self, disk_name: str) -> ExpertSlice | None:
        """The place of a checkpoint tensor in its fused weight; None when it is not an expert's."""
        if self.stored == "per_expert":
            return self.packed_slice(disk_name.removesuffix(".weight")) if disk_name.endswith(".weight") else None
        for leaf in self.fused:
            tail = self.stored_names.get(leaf, f"experts.{leaf}")
            if disk_name.endswith(f".{tail}"):
                module = f"{self.memory_module(disk_name.removesuffix(f'.{tail}'))}.experts"
                if re.fullmatch(self.experts, module):
                    return ExpertSlice(fused=f"{module}.{leaf}", expert=None, part=0, parts=1)
        return None

    def packed_slice(self, stem: str) -> ExpertSlice | None:
        """The place of `<experts>.<e>.<projection>`, the form in which the export packs experts one by one."""
        match = re.fullmatch(r"(?P<experts>.*)\.(?P<e>\d+)\.(?P<proj>\w+)", stem)
        if match is None or not re.fullmatch(self.experts, module := self.memory_module(match["experts"])):
            return None
        for leaf, projections in self.fused.items():
            if match["proj"] in projections:
                return ExpertSlice(fused=f"{module}.{leaf}", expert=int(match["e"]), part=projections.index(match["proj"]), parts=len(projections))
        return None

