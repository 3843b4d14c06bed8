"""Which routed experts to keep at higher precision, given what each costs when it alone is quantized. Plain Python: no tensors.

Costs are additive to first order. KL(parent || model) is quadratic in a small error of the logits; each weight's rounding adds its own
error, and the cross terms between the errors of different weights average out. So the KL of a plan is about the sum of the KLs of what it
quantizes, each measured with all else in bf16; how far that holds on a model is in the table, as the sum beside all of them together.
A kept weight counts as free of loss, which is exact for bf16 and near enough for MXFP8 (1/16 of MXFP4's error, 1/256 of its KL).

Then a budget of bits is a knapsack, filled by KL saved per extra byte. With units of one size, whole layers of a model whose MoE layers
are alike, that is the optimum of the sum. With units of several sizes its sum is behind the optimum's by at most the KL of the first unit
that did not fit.

    layer        the weights of a layer go together. vLLM has one scheme for a fused experts layer, so this is what it can serve.
    projection   each fused weight for itself: finer. transformers and our runtime read it, vLLM does not.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Granularity = Literal["layer", "projection"]
QUANTIZED = "mxfp4"
KEEP_FORMATS = ("bf16", "mxfp8")
KIND = "sensitivity"
_SLACK = 1e-9   # a budget such as 4.25 + 3 * 0.3917 is not exact in binary


@dataclass(frozen=True, kw_only=True)
class WeightCost:
    """One fused expert weight."""

    name: str
    layer: int
    projection: str
    elements: int
    num_bytes: dict[str, int]   # format -> bytes, scales included: mxfp4, bf16, mxfp8
    kl: float                   # to the parent, nats a token, with this weight alone in MXFP4


@dataclass(frozen=True, kw_only=True)
class Unit:
    """Weights that are kept together, and the KL of quantizing them together."""

    names: tuple[str, ...]
    num_bytes: dict[str, int]
    kl: float


@dataclass(frozen=True, kw_only=True)
class SensitivityTable:
    """All routed expert weights of a model, in its order. layer_kl: KL of a layer with all its weights in MXFP4."""

    parent_sha256: str
    scale_mode: str
    weights: tuple[WeightCost, ...]
    layer_kl: dict[int, float]

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> "SensitivityTable":
        """From the content of sensitivity.json."""
        weights = tuple(WeightCost(name=w["name"], layer=w["layer"], projection=w["projection"], elements=w["elements"], num_bytes=w["bytes"], kl=w["kl"])
                        for w in raw["weights"])
        return cls(parent_sha256=raw["parent"]["sha256"], scale_mode=raw["scale_mode"], weights=weights,
                   layer_kl={layer["layer"]: layer["kl"] for layer in raw["layers"]})

    def units(self, granularity: Granularity) -> tuple[Unit, ...]:
        """What is kept or quantized as a whole, by depth."""
        if granularity == "projection":
            return tuple(Unit(names=(w.name,), num_bytes=w.num_bytes, kl=w.kl) for w in self.weights)
        found = []
        for layer, kl in self.layer_kl.items():
            weights = [w for w in self.weights if w.layer == layer]
            found.append(Unit(names=tuple(w.name for w in weights), kl=kl,
                              num_bytes={f: sum(w.num_bytes[f] for w in weights) for f in (QUANTIZED, *KEEP_FORMATS)}))
        return tuple(found)

    def mean_bits(self, kept: Sequence[str], *, keep_format: str) -> float:
        """Bits of a routed expert weight, scales included, with `kept` in `keep_format` and the others in MXFP4."""
        num_bytes = sum(w.num_bytes[keep_format if w.name in kept else QUANTIZED] for w in self.weights)
        return 8 * num_bytes / sum(w.elements for w in self.weights)


def choose_kept(table: SensitivityTable, *, bits_per_weight: float, keep_format: str, granularity: Granularity = "layer") -> tuple[str, ...]:
    """Names of the weights to keep, in the model's order: most KL saved per extra byte first, never beyond the budget.

    Errors: ValueError naming the range when the budget is below all in MXFP4, leaves nothing to quantize, or is too small to keep anything.
    """
    units = table.units(granularity)
    ranked = sorted(range(len(units)), key=lambda i: -units[i].kl / _extra(units[i], keep_format))   # ties: the shallower first
    room = _room(table, bits_per_weight, keep_format)
    chosen = []
    for i in ranked:
        if _extra(units[i], keep_format) <= room:
            room -= _extra(units[i], keep_format)
            chosen.append(i)
    if not chosen and bits_per_weight > table.mean_bits((), keep_format=keep_format) * (1 + _SLACK):
        step = 8 * min(_extra(u, keep_format) for u in units) / sum(w.elements for w in table.weights)
        raise ValueError(f"quant.bits_per_weight: {bits_per_weight:g} keeps nothing: a {granularity} kept in {keep_format} takes the mean from "
                         f"{table.mean_bits((), keep_format=keep_format):g} up to at least {table.mean_bits((), keep_format=keep_format) + step:.5g}. "
                         "Ask for that much, or for everything in MXFP4 without a budget.")
    return _names(table, [units[i] for i in chosen])


def uniform_kept(table: SensitivityTable, *, bits_per_weight: float, keep_format: str, granularity: Granularity = "layer") -> tuple[str, ...]:
    """The plan to compare with: as many units as the budget holds, spread evenly over depth whatever they cost; none when not one fits."""
    units = table.units(granularity)
    room = _room(table, bits_per_weight, keep_format)
    for count in range(len(units), 0, -1):
        spread = [units[(2 * i + 1) * len(units) // (2 * count)] for i in range(count)]   # the middles of `count` equal stretches
        if sum(_extra(u, keep_format) for u in spread) <= room:
            return _names(table, spread)
    return ()


def kept_by_budget(
    path: Path, *, parent_sha256: str, scale_mode: str, bits_per_weight: float, keep_format: str, granularity: Granularity,
) -> tuple[str, ...]:
    """`choose_kept` by a table on disk.

    Errors: FileNotFoundError and ValueError for a file that is not there or no table; ValueError for one of another parent or scale mode.
    """
    table = read_table(path)
    if table.parent_sha256 != parent_sha256:
        raise ValueError(f"quant.sensitivity: {path} was measured on another parent: weights hash to {table.parent_sha256[:12]} there, this model's to "
                         f"{parent_sha256[:12]}. Measure this one with train qat RECIPE --sensitivity.")
    if table.scale_mode != scale_mode:
        raise ValueError(f"quant.sensitivity: {path} was measured with scale_mode {table.scale_mode}; this recipe's is {scale_mode}. "
                         "Measure again with train qat RECIPE --sensitivity, or set quant.scale_mode.")
    return choose_kept(table, bits_per_weight=bits_per_weight, keep_format=keep_format, granularity=granularity)


def read_table(path: Path) -> SensitivityTable:
    """Errors: FileNotFoundError, and ValueError for a file that is no table, each saying how one is made."""
    if not path.is_file():
        raise FileNotFoundError(f"quant.sensitivity: no file at {path.absolute()}. Make it with train qat RECIPE --sensitivity.")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        if raw["kind"] != KIND:
            raise ValueError(f"kind is {raw['kind']!r}")
        return SensitivityTable.from_json(raw)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"quant.sensitivity: {path} is no table of sensitivities ({error}). Give the sensitivity.json that train qat RECIPE --sensitivity "
                         "wrote.") from error


def _extra(unit: Unit, keep_format: str) -> int:
    """Bytes that keeping the unit adds."""
    return unit.num_bytes[keep_format] - unit.num_bytes[QUANTIZED]


def _room(table: SensitivityTable, bits_per_weight: float, keep_format: str) -> float:
    """Bytes that the budget leaves for kept weights."""
    least = table.mean_bits((), keep_format=keep_format)
    most = table.mean_bits([w.name for w in table.weights], keep_format=keep_format)
    if not least * (1 - _SLACK) <= bits_per_weight < most * (1 - _SLACK):
        raise ValueError(f"quant.bits_per_weight: must be at least {least:g}, all routed experts in MXFP4, and below {most:g}, all in {keep_format}; "
                         f"got {bits_per_weight:g}.")
    elements = sum(w.elements for w in table.weights)
    return (bits_per_weight * (1 + _SLACK) - least) * elements / 8


def _names(table: SensitivityTable, units: Sequence[Unit]) -> tuple[str, ...]:
    kept = {n for u in units for n in u.names}
    return tuple(w.name for w in table.weights if w.name in kept)
