"""What a layout must say: how the weights of a directory are named, shaped and described in config.json.

A packed weight is found under its stem: `<module>` for one matrix, `<experts>.<leaf>` for a layout that keeps all experts of a layer in one
tensor. A layout turns the exchange form (`Packed`: elements and scales) into the two tensors under that stem and back, byte for byte;
nothing else in the project knows a name or a shape on disk.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...archs import ExpertSlice, MoEArch
from ...formats import Packed
from ..reader import CheckpointReader

E8M0_NAN = 255


@dataclass(frozen=True, kw_only=True)
class PackedModule:
    """A packed weight of a directory."""

    stem: str                     # its name on disk, without the layout's suffixes
    module: str                   # its module in memory; for a fused weight the experts module
    format: str
    place: ExpertSlice | None     # where it lies in a fused expert weight; None: it is no routed expert


@dataclass(frozen=True, kw_only=True)
class Content:
    """What a directory holds, as far as its config.json speaks of it."""

    arch: MoEArch
    packed: tuple[PackedModule, ...]
    linears: tuple[str, ...]                                         # modules on disk of the 2-D weights that are not packed, head included
    kept_experts: dict[str, int] = field(default_factory=dict)       # fused expert weights that are not packed -> number of experts

    @property
    def packed_experts(self) -> tuple[PackedModule, ...]:
        return tuple(p for p in self.packed if p.place is not None)

    def formats_of(self, fused: str) -> set[str]:
        return {p.format for p in self.packed_experts if p.place is not None and p.place.fused == fused}


class Layout(ABC):
    """One layout; stateless."""

    name: str                                # of `--layout` and of kilotok.json
    is_fused: bool = False                   # all experts of a layer in one tensor
    can_write: bool = True

    @abstractmethod
    def names(self, stem: str, fmt: str) -> tuple[str, str]:
        """Names on disk of a packed weight's elements and scales."""

    @abstractmethod
    def specs(self, fmt: str, shape: tuple[int, ...], *, scales: torch.dtype) -> tuple[tuple[str, tuple[int, ...]], tuple[str, tuple[int, ...]]]:
        """(safetensors dtype, shape) of elements and scales of a weight [out, in], or [E, out, in] where the layout is fused.

        scales: the dtype of an FP8 tile's scales, bf16 where that is exact.
        """

    @abstractmethod
    def to_disk(self, packed: Packed) -> tuple[Tensor, Tensor]:
        """Elements and scales as `specs` describes them; a view or a copy."""

    @abstractmethod
    def from_disk(self, fmt: str, elements: Tensor, scales: Tensor, *, name: str) -> Packed:
        """The inverse of `to_disk`. Errors: ValueError naming the weight for shapes that do not belong together and for a scale that is NaN."""

    def contradiction(self, config: dict[str, Any], *, formats: set[str]) -> str | None:
        """What config.json says of packed weights that the files, which hold `formats`, do not."""
        return None

    @abstractmethod
    def find(self, reader: CheckpointReader, *, arch: MoEArch) -> list[PackedModule]:
        """The packed weights of a directory, told by their tensors. Errors: ValueError for elements without scales or the other way round."""

    @abstractmethod
    def matches(self, config: dict[str, Any]) -> bool:
        """Whether a config.json describes this layout."""

    @abstractmethod
    def quantization_config(self, content: Content) -> dict[str, Any]:
        """`quantization_config` of config.json."""

    def config_json(self, config: dict[str, Any], content: Content) -> dict[str, Any]:
        """config.json of a directory in this layout, from the unquantized model's."""
        return {**config, "quantization_config": self.quantization_config(content)}

    @abstractmethod
    def problem(self, content: Content) -> str | None:
        """Why this layout cannot hold a content; None when it can."""


def neutral(arch: MoEArch) -> dict[str, tuple[str, ...]]:
    """Fused weight -> the spelling of its projections that vLLM asks in, whatever the names on disk."""
    return {leaf: ("gate_proj", "up_proj") if len(parts) == 2 else ("down_proj",) for leaf, parts in arch.fused.items()}


def expert_modules(arch: MoEArch, fused: str, *, num_experts: int) -> list[str]:
    """Module names of one fused weight's experts, in each spelling."""
    module, leaf = fused.rsplit(".", 1)
    projections = dict.fromkeys((*arch.fused[leaf], *neutral(arch)[leaf]))
    return [f"{m}.{e}.{p}" for m in dict.fromkeys((arch.disk_module(module), module)) for e in range(num_experts) for p in projections]


# Linear layers that engines put together. vLLM asks for the parts, and for some models for the whole; SGLang for the whole where a model does not say
# what it is made of.
_FUSED_BY_ENGINES = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def fused_by_engines(linears: Iterable[str]) -> set[str]:
    """The names that engines give to what they make of these modules; experts, which they ask for one by one, left out."""
    return {f"{parent}.{whole}" for parent, _, leaf in (module.rpartition(".") for module in linears) if ".experts." not in parent
            for whole, parts in _FUSED_BY_ENGINES.items() if leaf in parts}


def natural(name: str) -> list[Any]:
    """Sort key: numbers by value."""
    return [(0, int(p)) if p.isdigit() else (1, p) for p in re.split(r"(\d+)", name)]


def ordered(modules: Iterable[PackedModule], *, arch: MoEArch) -> tuple[PackedModule, ...]:
    """Experts first, layer by layer in the order of the family's fused weights; then the others by name."""
    leaves = list(arch.fused)

    def key(m: PackedModule) -> tuple[Any, ...]:
        if m.place is None:
            return (1, natural(m.stem))
        module, leaf = m.place.fused.rsplit(".", 1)
        return (0, natural(module), leaves.index(leaf), m.place.expert or 0, m.place.part)

    return tuple(sorted(modules, key=key))


def linear_module(stem: str, *, arch: MoEArch, fmt: str) -> PackedModule:
    """A packed matrix by its stem on disk: an expert's projection, or another linear layer."""
    place = arch.packed_slice(stem)
    return PackedModule(stem=stem, module=arch.memory_module(stem), format=fmt, place=place)


def check_scales(fmt: str, scales: Tensor, *, name: str) -> None:
    """ValueError for a scale that is NaN, infinite or zero."""
    if scales.dtype == torch.uint8:
        if scales.numel() and int(scales.max()) == E8M0_NAN:
            index = tuple(int(i) for i in (scales == E8M0_NAN).nonzero()[0])
            raise ValueError(f"{name}: scale byte 255 (NaN) at index {index} of shape {tuple(scales.shape)}. "
                             "The checkpoint is damaged: copy or export it again.")
    elif not bool((torch.isfinite(scales.float()) & (scales.float() > 0)).all()):
        index = tuple(int(i) for i in (~(torch.isfinite(scales.float()) & (scales.float() > 0))).nonzero()[0])
        raise ValueError(f"{name}: scale {float(scales[index])} at index {index} of shape {tuple(scales.shape)} must be a positive number. "
                         "The checkpoint is damaged: copy or export it again.")


def check_wiped(elements: Tensor, scales: Tensor, *, name: str) -> None:
    """ValueError for MXFP4 codes that are not zero under scales that all are: a reader that lost the scales writes this."""
    if scales.numel() and not bool(scales.any()) and bool((elements & 0x77).any()):   # the sign of zero does not count
        raise ValueError(f"{name}: all {scales.numel()} scale bytes are 0 while its codes are not: the scales were lost. "
                         "The checkpoint is damaged: copy or export it again.")


def require_shapes(elements: tuple[int, ...], scales: tuple[int, ...], *, expected_scales: tuple[int, ...], name: str) -> None:
    if scales != expected_scales:
        raise ValueError(f"{name}: elements {elements} and scales {scales} do not belong together; scales must be {expected_scales}. "
                         "The checkpoint is damaged or in another layout.")
