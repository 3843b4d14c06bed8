"""What will be quantized, what stays, and why: worked out on the model's structure before anything runs.

An expert weight is a 3-D parameter [E, out, in] owned by the experts module of a catalogued family. Names alone never
decide: a dense layer or a shared expert with the same leaf names is 2-D, or has another owner.
"""

import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..kernels.mx import MX_BLOCK_SIZE, SCALE_MODES, ScaleMode
from .archs import MoEArch, build_model, find_arch


@dataclass(frozen=True, kw_only=True)
class ExpertWeight:
    """One fused expert weight: its parameter name, [E, out, in] and the module that owns it."""

    name: str
    shape: tuple[int, int, int]

    @property
    def module(self) -> str:
        return self.name.rsplit(".", 1)[0]


@dataclass(frozen=True, kw_only=True)
class PlanRow:
    """Tensors of one kind: same name up to the layer number, same shape, same treatment."""

    pattern: str
    count: int
    shape: tuple[int, ...]
    treatment: str
    reason: str
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True, kw_only=True)
class QuantPlan:
    """The expert weights to quantize, and a row for every group of tensors of the model."""

    arch: MoEArch
    scale_mode: ScaleMode
    experts: tuple[ExpertWeight, ...]
    rows: tuple[PlanRow, ...]

    @property
    def bytes_before(self) -> int:
        return sum(r.bytes_before for r in self.rows)

    @property
    def bytes_after(self) -> int:
        return sum(r.bytes_after for r in self.rows)

    def table(self) -> str:
        """The plan as text, one line a group, totals last."""
        lines = [f"{'tensors':<52} {'count':>6} {'shape':>18} {'MB before':>10} {'MB after':>9}  treatment"]
        for r in sorted(self.rows, key=lambda r: -r.bytes_before):
            lines.append(f"{r.pattern:<52} {r.count:>6} {'x'.join(map(str, r.shape)):>18} {r.bytes_before / 1e6:>10.2f} "
                         f"{r.bytes_after / 1e6:>9.2f}  {r.treatment} ({r.reason})")
        ratio = self.bytes_after / self.bytes_before
        lines.append(f"{'total':<52} {sum(r.count for r in self.rows):>6} {'':>18} {self.bytes_before / 1e6:>10.2f} {self.bytes_after / 1e6:>9.2f}  "
                     f"{ratio:.0%} of the bytes; {len(self.experts)} expert tensors, scale_mode {self.scale_mode}")
        return "\n".join(lines)


def make_plan(config: Any, *, scale_mode: ScaleMode, where: str) -> QuantPlan:
    """The plan for a transformers config. Nothing is loaded: the model is laid out without memory.

    Errors: ValueError for a family not in the catalogue, for zero matches, and for an expert whose input dimension is no
        multiple of 32; each names the tensor and what to do.
    """
    if scale_mode not in SCALE_MODES:
        raise ValueError(f"{where}: scale_mode must be one of {', '.join(SCALE_MODES)}; got {scale_mode!r}.")
    arch = find_arch(config.model_type, where=where)
    model = build_model(config, device="meta")
    experts = find_experts(model, arch=arch)
    if not experts:
        raise ValueError(
            f"{where}: no expert weight found: no module matching {arch.experts} owns a 3-D parameter {' or '.join(arch.fused)}. "
            "The model is dense, or every layer is in mlp_only_layers: there is nothing to quantize.")
    for e in experts:
        if e.shape[-1] % MX_BLOCK_SIZE:
            raise ValueError(
                f"{where}: {e.name}: the input dimension must be a multiple of {MX_BLOCK_SIZE}, one MX block; got {e.shape[-1]} in shape {e.shape}. "
                "MXFP4 cannot hold this model's experts: pad the dimension in the checkpoint, or choose another model.")
    chosen = {e.name for e in experts}
    params = dict(model.named_parameters())
    element_bytes = torch.finfo(config.dtype or torch.bfloat16).bits // 8
    groups = Counter((re.sub(r"\.\d+\.", ".*.", n), tuple(p.shape), n in chosen) for n, p in params.items())
    rows = []
    for (pattern, shape, quantized), count in groups.items():
        elements = count * torch.Size(shape).numel()
        before = elements * element_bytes
        after = elements // 2 + elements // MX_BLOCK_SIZE if quantized else before
        kind = "MXFP4" if quantized else f"kept {str(config.dtype or torch.bfloat16).removeprefix('torch.')}"
        rows.append(PlanRow(pattern=pattern, count=count, shape=shape, treatment=kind, reason=_reason(pattern, quantized, arch),
                            bytes_before=before, bytes_after=after))
    return QuantPlan(arch=arch, scale_mode=scale_mode, experts=experts, rows=tuple(rows))


def find_experts(model: nn.Module, *, arch: MoEArch) -> tuple[ExpertWeight, ...]:
    """The fused expert weights of a model, in module order."""
    found = []
    for module_name, module in model.named_modules():
        if re.fullmatch(arch.experts, module_name):
            for leaf in arch.fused:
                parameter = module._parameters.get(leaf)
                if parameter is not None and parameter.dim() == 3:
                    found.append(ExpertWeight(name=f"{module_name}.{leaf}", shape=tuple(parameter.shape)))
    return tuple(found)


def _reason(pattern: str, quantized: bool, arch: MoEArch) -> str:
    name = pattern.replace("*", "0")
    if quantized:
        return "routed experts"
    if re.fullmatch(arch.router, name):
        return "router"
    if any(re.fullmatch(p, name) for p in arch.not_experts):
        return "shared expert or dense layer"
    for word, reason in (("norm", "norm"), ("self_attn", "attention"), ("embed", "embedding"), ("lm_head", "head")):
        if word in name:
            return reason
    return "not a routed expert"
