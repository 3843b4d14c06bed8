"""What config.json says of the packed weights, for the engines that read it.

compressed-tensors: one config group a format, targets by regular expression on module names, every other linear layer in `ignore`. vLLM
looks an experts layer up as `<experts>.0.gate_proj` whatever the names on disk, and transformers by its names in memory, so targets and
kept experts are given in each spelling.
gpt-oss: `quant_method: mxfp4`; the experts of every layer are packed but those named.
Source: compressed-tensors 0.20.1 (QuantizationConfig), transformers 5.24.0 (quantizers), vLLM 0.33.0 (scheme lookup of a fused experts layer).
"""

import re
from typing import Any

from ..formats import find_format
from ..plan import PlannedWeight, QuantPlan
from .reader import CheckpointReader

NEUTRAL = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}   # the spelling vLLM asks in


def quantization_config(plan: QuantPlan, *, reader: CheckpointReader, packed: set[str], on_disk: dict[str, str]) -> dict[str, Any]:
    """`quantization_config` of the export. packed: module names on disk of the packed weights. on_disk: in-memory name -> name on disk of
    the planned linear weights."""
    if plan.arch.layout == "gpt-oss":
        kept = sorted({w.module for w in plan.experts if w.format == "bf16"}, key=natural)
        return {"quant_method": "mxfp4",
                "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head", *kept]}
    groups: dict[str, Any] = {}
    for fmt in dict.fromkeys(w.format for w in plan.weights):   # in plan order: experts first, where transformers looks
        weights = [w for w in plan.weights if w.format == fmt and w.role != "router"]
        if fmt == "bf16" or not weights:
            continue
        groups[f"group_{len(groups)}"] = {"targets": _targets(plan, weights, fmt=fmt, on_disk=on_disk), "input_activations": None, "output_activations": None,
                                          **find_format(fmt).scheme()}
    formats = {g["format"] for g in groups.values()}
    linears = [n.removesuffix(".weight") for n in reader.names
               if n.endswith(".weight") and len(reader.info(n)[1]) == 2 and "embed" not in n and n.removesuffix(".weight") not in packed]
    if "lm_head" not in linears:
        linears.append("lm_head")   # tied to the embedding on disk, still a linear layer in memory
    ignored = set(linears) | {s for w in plan.experts if w.format == "bf16" for s in _expert_modules(plan, w)}
    return {"quant_method": "compressed-tensors", "format": formats.pop() if len(formats) == 1 else "mixed-precision", "quantization_status": "compressed",
            "config_groups": groups, "ignore": sorted(ignored, key=natural), "kv_cache_scheme": None}


def reader_warnings(plan: QuantPlan) -> tuple[str, ...]:
    """Who cannot read what this plan mixes, each a sentence; measured with transformers 5.24.0 and compressed-tensors 0.20.1."""
    if plan.arch.misread is not None:
        return (f"{plan.arch.misread}. kilotok reads the directory right; vLLM was not run here.",)
    kept = {w.module: set[str]() for w in plan.experts}
    for w in plan.experts:
        kept[w.module].add(w.format)
    if plan.arch.layout != "compressed-tensors" or all(formats == {"mxfp4"} for formats in kept.values()):
        return ()
    if any(len(formats) > 1 for formats in kept.values()):
        return ("one layer holds experts of two formats: transformers 5.24 loads such a directory WRONG (random weights, only a warning), and vLLM "
                "has one scheme a layer. Read it with kilotok alone, or keep whole layers.",)
    return ("some layers keep their experts at higher precision: transformers 5.24 with compressed-tensors refuses such a directory; kilotok reads it, "
            "and vLLM is told by `ignore` (bf16) or a group of their own (MXFP8), which was not run here.",)


def _targets(plan: QuantPlan, weights: list[PlannedWeight], *, fmt: str, on_disk: dict[str, str]) -> list[str]:
    targets = []
    experts = [w for w in weights if w.role == "experts"]
    if experts and fmt == "mxfp4":   # all that are not in `ignore`
        inside, outside = (re.escape(segment) for segment in plan.arch.renamed or (".", "."))
        pattern_on_disk = plan.arch.experts.replace(inside, outside)
        for pattern in dict.fromkeys((pattern_on_disk, plan.arch.experts)):
            names = [p for ps in plan.arch.fused.values() for p in ps] + [p for ps in NEUTRAL.values() for p in ps]
            prefix = re.sub(r"^model\\\.", ".*", pattern)
            targets.append(rf"re:{_not_these(plan, fmt=fmt)}{prefix}\.\d+\.({'|'.join(dict.fromkeys(names))})$")
    elif experts:
        targets += [s for w in experts for s in _expert_modules(plan, w)]
    for w in weights:
        if w.role != "experts":   # in both spellings: engines ask by the names on disk, transformers by those in memory
            targets += dict.fromkeys((on_disk[w.name].removesuffix(".weight"), w.module))
    return targets


def _not_these(plan: QuantPlan, *, fmt: str) -> str:
    """A lookahead that keeps the experts of another packed format out of a regular expression, whatever the order of the groups."""
    others = []
    for w in plan.experts:
        if w.format not in (fmt, "bf16"):
            names = "|".join(dict.fromkeys((*plan.arch.fused[w.leaf], *NEUTRAL.get(w.leaf, ()))))
            others += [rf"(?!.*{re.escape(m)}\.\d+\.({names})$)" for m in dict.fromkeys((plan.arch.disk_module(w.module), w.module))]
    return "".join(others)


def _expert_modules(plan: QuantPlan, weight: PlannedWeight) -> list[str]:
    """Module names of one fused weight's experts, in each spelling."""
    found = []
    for module in dict.fromkeys((plan.arch.disk_module(weight.module), weight.module)):
        for e in range(weight.shape[0]):
            for p in dict.fromkeys((*plan.arch.fused[weight.leaf], *NEUTRAL.get(weight.leaf, ()))):
                found.append(f"{module}.{e}.{p}")
    return found


def natural(name: str) -> list[Any]:
    """Sort key: numbers by value."""
    return [(0, int(p)) if p.isdigit() else (1, p) for p in re.split(r"(\d+)", name)]
