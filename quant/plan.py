"""What will be quantized, what stays, and why: worked out on the model's structure before anything runs.

An expert weight is a 3-D parameter owned by the experts module of a catalogued family. Names alone never decide: a dense layer or a
shared expert with the same leaf names is 2-D, or has another owner; and a 3-D parameter with an expert's name that lies anywhere
else stops the plan instead of being guessed at. MTP layers are no part of the model that transformers builds, so they are never here.
"""

import fnmatch
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import torch
from torch import nn

from ..kernels.mx import SCALE_MODES, ScaleMode
from .archs import MoEArch, build_model, find_arch
from .formats import find_format

Role = Literal["experts", "shared_experts", "attention", "router"]
ROLES: tuple[Role, ...] = ("experts", "shared_experts", "attention", "router")


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What a recipe may ask for beyond the routed experts in one scale mode."""

    experts: Literal["mxfp4", "bf16"] = "mxfp4"            # bf16: the control, trained alike and not quantized
    keep: tuple[str, ...] = ()                             # routed experts at higher precision: names of fused weights, or patterns with *
    keep_format: Literal["bf16", "mxfp8"] = "bf16"         # the precision they are kept at
    shared_experts: bool = False                           # shared experts in MXFP4 too
    attention: Literal["mxfp8", "fp8_block"] | None = None # linear layers of the attention
    router: Literal["mxfp8"] | None = None                 # the router's weight; exported as bf16 holding the MXFP8 values
    expected: dict[str, int] = field(default_factory=dict) # role -> number of weights there must be: {experts: 96}

    def __post_init__(self) -> None:
        for role in self.expected:
            if role not in ROLES:
                raise ValueError(f"quant.expected: roles are {', '.join(ROLES)}; got {role!r}.")

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "keep": list(self.keep)}

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> "PlanOptions":
        """From a run's record; keys a record of an older run does not have get their defaults."""
        known = {k: raw[k] for k in cls.__dataclass_fields__ if k in raw}
        return cls(**{**known, "keep": tuple(known.get("keep", ()))})


@dataclass(frozen=True, kw_only=True)
class PlannedWeight:
    """One parameter and the numbers it will have: its name and shape in memory, [E, out, in] or [E, in, out] or [out, in]."""

    name: str
    shape: tuple[int, ...]
    role: Role = "experts"
    format: str = "mxfp4"
    dim: int = -1          # the input dim, along which blocks run

    @property
    def module(self) -> str:
        return self.name.rsplit(".", 1)[0]

    @property
    def leaf(self) -> str:
        return self.name.rsplit(".", 1)[1]

    @property
    def canonical_shape(self) -> tuple[int, ...]:
        """[..., out, in]"""
        return self.shape if self.dim == -1 else (*self.shape[:-2], self.shape[-1], self.shape[-2])


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
    """The weights to quantize, and a row for every group of tensors of the model."""

    arch: MoEArch
    scale_mode: ScaleMode
    options: PlanOptions
    weights: tuple[PlannedWeight, ...]
    rows: tuple[PlanRow, ...]

    @property
    def experts(self) -> tuple[PlannedWeight, ...]:
        """All routed expert weights, those kept at higher precision included."""
        return tuple(w for w in self.weights if w.role == "experts")

    @property
    def bytes_before(self) -> int:
        return sum(r.bytes_before for r in self.rows)

    @property
    def bytes_after(self) -> int:
        return sum(r.bytes_after for r in self.rows)

    @property
    def bits_per_expert_weight(self) -> float:
        """Mean over the routed experts, scales included."""
        elements = sum(torch.Size(w.shape).numel() for w in self.experts)
        return 8 * sum(find_format(w.format).num_bytes(w.canonical_shape) for w in self.experts) / elements

    def summary(self) -> str:
        """What the routed experts become, in a few words."""
        counts = Counter(w.format for w in self.experts)
        parts = ", ".join(f"{n} in {find_format(f).title}" for f, n in counts.items())
        rule = f", scale_mode {self.scale_mode}" if counts["mxfp4"] else ""
        return f"of {len(self.experts)} fused expert tensors {parts}{rule}; {self.bits_per_expert_weight:.4g} bits a routed expert weight"

    def table(self) -> str:
        """The plan as text, one line a group, totals last."""
        lines = [f"{'tensors':<52} {'count':>6} {'shape':>18} {'MB before':>10} {'MB after':>9}  treatment"]
        for r in sorted(self.rows, key=lambda r: -r.bytes_before):
            lines.append(f"{r.pattern:<52} {r.count:>6} {'x'.join(map(str, r.shape)):>18} {r.bytes_before / 1e6:>10.2f} "
                         f"{r.bytes_after / 1e6:>9.2f}  {r.treatment} ({r.reason})")
        ratio = self.bytes_after / self.bytes_before
        lines.append(f"{'total':<52} {sum(r.count for r in self.rows):>6} {'':>18} {self.bytes_before / 1e6:>10.2f} {self.bytes_after / 1e6:>9.2f}  "
                     f"{ratio:.0%} of the bytes; {self.summary()}")
        kept = [w.name for w in self.experts if w.format != self.options.experts]
        if kept:
            lines.append(f"kept in {self.options.keep_format}: {', '.join(kept)}")
        return "\n".join(lines)


def make_plan(config: Any, *, scale_mode: ScaleMode, where: str, options: PlanOptions | None = None) -> QuantPlan:
    """The plan for a transformers config. Nothing is loaded: the model is laid out without memory.

    Errors: ValueError for a family not in the catalogue, for zero matches, for counts other than `options.expected`, for an expert-like
        parameter where the family keeps none, and for a weight the format cannot hold; each names the tensors and what to do.
    """
    if scale_mode not in SCALE_MODES:
        raise ValueError(f"{where}: scale_mode must be one of {', '.join(SCALE_MODES)}; got {scale_mode!r}.")
    options = options or PlanOptions()
    arch = find_arch(config.model_type, where=where)
    model = build_model(config, device="meta")
    experts = find_experts(model, arch=arch)
    if not experts:
        raise ValueError(
            f"{where}: no expert weight found: no module matching {arch.experts} owns a 3-D parameter {' or '.join(arch.fused)}. "
            "The model is dense, or every layer is in mlp_only_layers: there is nothing to quantize.")
    _refuse_look_alikes(model, arch=arch, experts=experts, where=where)
    kept = _kept_names([e.name for e in experts], options=options, where=where)
    weights = [PlannedWeight(name=e.name, shape=e.shape, dim=e.dim, format=options.keep_format if e.name in kept else options.experts) for e in experts]
    weights += _linears(model, arch=arch, options=options)
    _check_counts(weights, options=options, where=where)
    if options.experts == "bf16":   # the control: named and trained as they would be, none of them quantized
        weights = [replace(w, format="bf16") for w in weights]
    elif arch.layout == "gpt-oss":
        _refuse_what_gpt_oss_cannot_say(weights, kept=kept, options=options, where=where)
    for w in weights:
        problem = find_format(w.format).problem(w.canonical_shape)
        if problem is not None:
            raise ValueError(f"{where}: {w.name}: {problem} in shape {w.shape}. {find_format(w.format).title} cannot hold this model's {w.role}: "
                             "pad the dimension in the checkpoint, keep this weight out of the plan, or choose another model.")
    return QuantPlan(arch=arch, scale_mode=scale_mode, options=options, weights=tuple(weights),
                     rows=tuple(_rows(model, config=config, arch=arch, weights=weights)))


def find_experts(model: nn.Module, *, arch: MoEArch) -> tuple[PlannedWeight, ...]:
    """The fused expert weights of a model, in module order.

    Errors: ValueError when a module says it is transposed, or interleaved, and the catalogue says it is not, or the other way round.
    """
    found = []
    for module_name, module in model.named_modules():
        if not re.fullmatch(arch.experts, module_name):
            continue
        for leaf in arch.fused:
            parameter = module._parameters.get(leaf)
            if parameter is not None and parameter.dim() == 3:
                found.append(PlannedWeight(name=f"{module_name}.{leaf}", shape=tuple(parameter.shape), dim=arch.axis))
        layout = (getattr(module, "is_transposed", arch.transposed), not getattr(module, "is_concatenated", not arch.interleaved))
        if layout != (arch.transposed, arch.interleaved):
            raise ValueError(f"{module_name}: transformers says transposed {layout[0]}, interleaved {layout[1]}; the catalogue's {arch.name} says "
                             f"{arch.transposed} and {arch.interleaved}. Quantizing along the wrong axis would be silent: correct quant/archs/{arch.name}.py.")
    return tuple(found)


def _refuse_look_alikes(model: nn.Module, *, arch: MoEArch, experts: Sequence[PlannedWeight], where: str) -> None:
    """An expert-like parameter that is not where the family keeps its experts: a name collision, or a layout we do not know."""
    chosen = {e.name for e in experts}
    leaves = set(arch.fused) | {"gate_up_proj", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3", "w13"}
    strangers = [f"{n} {tuple(p.shape)}" for n, p in model.named_parameters() if p.dim() == 3 and n not in chosen and n.rsplit(".", 1)[1] in leaves]
    if strangers:
        raise ValueError(f"{where}: {len(strangers)} 3-D parameter(s) named like experts lie outside {arch.experts}: {', '.join(strangers[:3])}. "
                         f"{len(experts)} expert weights were found where {arch.name} keeps them. Rename the others, or describe the family in quant/archs/.")
    layers = Counter(e.module for e in experts)
    incomplete = [m for m, n in layers.items() if n != len(arch.fused)]
    if incomplete:
        raise ValueError(f"{where}: {incomplete[0]} owns {layers[incomplete[0]]} of {len(arch.fused)} fused weights ({', '.join(arch.fused)}). "
                         "The model's code and the catalogue disagree: describe the family in quant/archs/.")


def _kept_names(names: Sequence[str], *, options: PlanOptions, where: str) -> set[str]:
    kept: set[str] = set()
    for pattern in options.keep:
        matches = fnmatch.filter(names, pattern)
        if not matches:
            raise ValueError(f"{where}: quant.keep: {pattern!r} matches no expert weight. They are {names[0]} ... {names[-1]} ({len(names)}).")
        kept.update(matches)
    if len(kept) == len(names) and options.experts == "mxfp4":
        raise ValueError(f"{where}: quant.keep: covers all {len(names)} expert weights; nothing would be quantized. Keep fewer.")
    return kept


def _refuse_what_gpt_oss_cannot_say(weights: Sequence[PlannedWeight], *, kept: set[str], options: PlanOptions, where: str) -> None:
    """Its config on disk has one number format, MXFP4, and names the layers that are not in it as a whole."""
    asked = {"quant.attention": options.attention, "quant.shared_experts": options.shared_experts,
             "quant.keep_format": options.keep_format if kept and options.keep_format != "bf16" else None}
    for option, value in asked.items():
        if value:
            raise ValueError(f"{where}: {option}: the layout of gpt-oss holds MXFP4 experts and bf16, nothing else; got {value!r}. Leave the option out.")
    for w in weights:
        if w.name in kept and any(o.module == w.module and o.name not in kept for o in weights):
            raise ValueError(f"{where}: quant.keep: the layout of gpt-oss keeps the experts of a layer as a whole; got {w.name} alone. "
                             f"Keep {w.module}.* or nothing of it.")


def _linears(model: nn.Module, *, arch: MoEArch, options: PlanOptions) -> list[PlannedWeight]:
    """The 2-D weights that options add: shared experts, attention, router."""
    wanted: list[tuple[Role, str, str, bool]] = []
    if options.shared_experts:
        wanted.append(("shared_experts", arch.shared, "mxfp4", True))
    if options.attention is not None:
        wanted.append(("attention", arch.attention, options.attention, True))
    if options.router is not None:
        wanted.append(("router", arch.router, options.router, False))
    found = []
    for name, parameter in model.named_parameters():
        owner = model.get_submodule(name.rsplit(".", 1)[0])
        for role, pattern, fmt, linear in wanted:
            if role == "router" and "shared_expert" in name:   # the shared expert's gate, which picks nothing
                continue
            if re.fullmatch(pattern, name) and name.endswith(".weight") and parameter.dim() == 2 and (isinstance(owner, nn.Linear) or not linear):
                found.append(PlannedWeight(name=name, shape=tuple(parameter.shape), role=role, format=fmt))
                break
    return found


def _check_counts(weights: Sequence[PlannedWeight], *, options: PlanOptions, where: str) -> None:
    counts = Counter[str](w.role for w in weights)
    asked = {"shared_experts": options.shared_experts, "attention": options.attention, "router": options.router}
    for role, wanted in asked.items():
        if wanted and not counts[role]:
            raise ValueError(f"{where}: quant.{role}: this model has no such weight. Leave the option out.")
    for role, number in options.expected.items():
        if counts[role] != number:
            names = [w.name for w in weights if w.role == role]
            if not names and role in asked and not asked[role]:
                raise ValueError(f"{where}: quant.expected: names {number} {role}, but quant.{role} is not set, so none is quantized. "
                                 "Set it, or leave the count out.")
            raise ValueError(f"{where}: quant.expected: {role} must be {number} weights; found {counts[role]}"
                             f"{f' ({names[0]} ... {names[-1]})' if names else ''}. Correct the recipe, or look at what changed in the model.")


def _rows(model: nn.Module, *, config: Any, arch: MoEArch, weights: Sequence[PlannedWeight]) -> list[PlanRow]:
    planned = {w.name: w for w in weights}
    dtype = config.dtype or torch.bfloat16
    kept = f"kept {str(dtype).removeprefix('torch.')}"
    groups: dict[tuple[str, tuple[int, ...], str | None], list[str]] = {}
    for name, parameter in model.named_parameters():
        fmt = planned[name].format if name in planned else None
        groups.setdefault((re.sub(r"\.\d+\.", ".*.", name), tuple(parameter.shape), fmt), []).append(name)
    rows = []
    for (pattern, shape, fmt), names in groups.items():
        weight, count = planned.get(names[0]), len(names)
        before = count * torch.Size(shape).numel() * (torch.finfo(dtype).bits // 8)
        after = before
        if weight is not None and fmt is not None and fmt != "bf16" and weight.role != "router":   # both are written in the parent's dtype
            after = count * find_format(fmt).num_bytes(weight.canonical_shape)
        treatment = kept if fmt is None or fmt == "bf16" else find_format(fmt).title
        rows.append(PlanRow(pattern=pattern, count=count, shape=shape, treatment=treatment,
                            reason=_reason(pattern, weight, arch=arch), bytes_before=before, bytes_after=after))
    return rows


def _reason(pattern: str, weight: PlannedWeight | None, *, arch: MoEArch) -> str:
    name = pattern.replace("*", "0")
    if weight is not None:
        return {"experts": "routed experts", "shared_experts": "shared expert, as asked", "attention": "attention, as asked",
                "router": "router, as asked"}[weight.role]
    if re.fullmatch(arch.router, name):
        return "router"
    if any(re.fullmatch(p, name) for p in arch.not_experts):
        return "expert biases" if name.endswith("_bias") else "shared expert or dense layer"
    for word, reason in (("norm", "norm"), ("attn", "attention"), ("embed", "embedding"), ("lm_head", "head")):
        if word in name:
            return reason
    return "not a routed expert"
