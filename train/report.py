"""What a QAT run found: every model it measured on the held-out text, and how tokens fell on the experts; as text and as Markdown.

Two figures compare a model with round-to-nearest in the run's own scale mode, the reference:

    gap closed    of the cross-entropy that rounding added over the parent, the share that is gone; above 100 % the model predicts this text
                  better than its parent
    KL removed    of the reference's KL to the parent, the share that is gone
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from ..quant.coverage import LayerCoverage, coverage_layers, never_routed
from ..quant.quality import Quality, pool

NAMED_ON_SCREEN = 12
LEGEND = (
    "gap closed: share of the cross-entropy that rounding added and that is gone again; above 100 % the model predicts this text better than its parent.",
    "KL removed: share of the KL to the parent that is gone. Both are against round-to-nearest in the run's own scale mode.")


class Line(NamedTuple):
    """One model on one domain; None where a figure says nothing."""

    domain: str
    tokens: int
    model: str
    perplexity: float
    gap_closed: float | None = None
    kl: float | None = None
    kl_removed: float | None = None


def qat_table(meta: dict[str, Any]) -> str:
    """RUN/meta.json as text for the screen."""
    width = max(len(line.model) for line in _lines(meta)) + 2
    lines = [f"{'held-out text':<{width}} {'perplexity':>11} {'gap closed':>11} {'KL, nats':>10} {'KL removed':>11}"]
    domain = None
    for line in _lines(meta):
        if line.domain != domain:
            lines.append(f"{line.domain}, {line.tokens} tokens")
            domain = line.domain
        _, _, model, perplexity, gap, kl, removed = _formatted(line)
        lines.append(f"  {model:<{width - 2}} {perplexity:>11} {gap:>11} {kl:>10} {removed:>11}")
    lines.append(_weights(meta))
    lines += _legend(meta)
    if (layers := _layers(meta)):
        lines.append(_coverage_summary(layers))
        lines += [f"warning: {w}" for w in _warnings(layers, limit=NAMED_ON_SCREEN)]
    return "\n".join(lines)


def qat_report(meta: dict[str, Any]) -> str:
    """RUN/meta.json as Markdown, with the routing of every layer."""
    parent, seed = meta["parent"], "" if meta.get("seed") is None else f", seed {meta['seed']}"
    out = ["# Quantization-aware training", "",
           f"Parent: `{parent['path']}`, sha256 `{parent['sha256'][:16]}`; {meta['max_steps']} steps{seed}. {_sentence(_weights(meta))}.", "",
           "| text | tokens | model | perplexity | gap closed | KL, nats | KL removed |", "|---|---:|---|---:|---:|---:|---:|"]
    out += [f"| {' | '.join(_formatted(line))} |" for line in _lines(meta)]
    for paragraph in _legend(meta):
        out += ["", _sentence(paragraph)]
    if (layers := _layers(meta)):
        out += ["", "## Experts", "", _sentence(_coverage_summary(layers)) + ".", "",
                "| layer | experts | fewest | median | most | max / mean | std / mean | entropy | never routed |",
                "|---|---:|---:|---:|---:|---:|---:|---:|---|"]
        out += [f"| {c.module} | {c.experts} | {c.tokens_min} | {c.tokens_median:g} | {c.tokens_max} | {c.max_over_mean:.2f} | {c.variation:.2f} | "
                f"{c.entropy:.3f} | {', '.join(map(str, c.never_routed)) or 'none'} |" for c in layers]
        out += ["", "Fewest, median, most: choices of an expert, one a token and expert. Entropy is relative to uniform: 1 when every expert gets the same."]
        for warning in _warnings(layers, limit=None):
            out += ["", f"**Warning:** {warning}"]
    return "\n".join(out) + "\n"


def gap_closed(rounded: Quality, trained: Quality) -> float:
    """Share of the cross-entropy that rounding added and training took back; nan when rounding added none."""
    added = rounded.cross_entropy - rounded.parent_cross_entropy
    return (rounded.cross_entropy - trained.cross_entropy) / added if added > 0 else float("nan")


def kl_removed(rounded: Quality, trained: Quality) -> float:
    """Share of round-to-nearest's KL to the parent that is gone; nan when there was none."""
    return 1 - trained.kl / rounded.kl if rounded.kl else float("nan")


def qualities(results: dict[str, Any]) -> dict[str, Quality]:
    """Figures by domain as meta.json holds them, and `all` pooled where there are several."""
    fields = ("tokens", "kl", "cross_entropy", "parent_cross_entropy")
    found = {d: Quality(**{k: q[k] for k in fields}) for d, q in results.items()}
    return {**found, "all": pool(list(found.values()))} if len(found) > 1 else found


def _models(meta: dict[str, Any]) -> Iterator[tuple[str, dict[str, Quality]]]:
    """(name, figures by domain) of every model but the parent, the reference first."""
    own, quantized = meta["quant"]["scale_mode"], meta["quant"].get("experts", "mxfp4") != "bf16"
    yield (f"round-to-nearest, {own}" if quantized else "parent, rounded to bf16"), qualities(meta["round_to_nearest"])
    for mode, results in meta.get("round_to_nearest_modes", {}).items():
        yield f"round-to-nearest, {mode}", qualities(results)
    if "control" in meta:
        yield "control: bf16, trained", qualities(meta["control"])
    yield (f"QAT, {own}" if quantized else "bf16, trained"), qualities(meta["qat"])


def _lines(meta: dict[str, Any]) -> list[Line]:
    models = list(_models(meta))
    reference = models[0][1]
    lines = []
    for domain, r in reference.items():
        lines.append(Line(domain, r.tokens, "parent", r.parent_perplexity))
        for index, (name, results) in enumerate(models):
            q = results[domain]
            share = (None, None) if index == 0 else (gap_closed(r, q), kl_removed(r, q))
            lines.append(Line(domain, q.tokens, name, q.perplexity, share[0], q.kl, share[1]))
    return lines


def _formatted(line: Line) -> tuple[str, ...]:
    def show(value: float | None, spec: str) -> str:
        return "" if value is None else "-" if math.isnan(value) else f"{value:{spec}}"

    return (line.domain, str(line.tokens), line.model, f"{line.perplexity:.4f}", show(line.gap_closed, ".1%"), show(line.kl, ".5f"),
            show(line.kl_removed, ".1%"))


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]


def _weights(meta: dict[str, Any]) -> str:
    plan = meta["plan"]
    before, after = plan["bytes_before"], plan["bytes_after"]
    what = plan.get("summary") or f"{plan['expert_tensors']} fused expert tensors in MXFP4, scale_mode {meta['quant']['scale_mode']}"   # an older run has none
    return f"weights: {before / 1e6:.2f} MB before, {after / 1e6:.2f} MB after ({after / before:.0%}); {what}"


def _legend(meta: dict[str, Any]) -> list[str]:
    lines = [*LEGEND]
    if "control" in meta:
        fits_text = meta["loss"]["ce_weight"] > 0
        lines.append("control: the bf16 parent trained by the same recipe, its experts not quantized. " + (
            "The loss has cross-entropy to the text, so what it gains over the parent is fitting to text like this, not repair of rounding." if fits_text else
            "The loss has no cross-entropy and begins at its minimum (KL 0), so what it shows is how far the training by itself moves the parent: "
            "the optimizer turns rounding noise into steps."))
    lines.append("text: " + "; ".join(f"{d} = {t}" for d, t in meta["heldout_text"].items()))
    return lines


def _layers(meta: dict[str, Any]) -> list[LayerCoverage]:
    return coverage_layers(meta["coverage"]) if "coverage" in meta else []


def _coverage_summary(layers: list[LayerCoverage]) -> str:
    fewest, most = min(layers, key=lambda c: c.tokens_min), max(layers, key=lambda c: c.max_over_mean)
    return (f"experts while training: {len(layers)} layers of {layers[0].experts}; choices of an expert {fewest.tokens_min} at least, "
            f"{max(c.tokens_max for c in layers)} at most; the least even layer {most.module}, max / mean {most.max_over_mean:.2f}, "
            f"std / mean {most.variation:.2f}, entropy {most.entropy:.3f} of uniform")


def _warnings(layers: list[LayerCoverage], *, limit: int | None) -> list[str]:
    names = never_routed(layers)
    if not names:
        return []
    shown = names[:limit]
    more = f" and {len(names) - len(shown)} more, see report.md" if len(shown) < len(names) else ""
    return [f"{len(names)} of {sum(c.experts for c in layers)} experts were never routed a token in training: they are quantized but got no gradient "
            f"({', '.join(shown)}{more}). Train on more, or on more varied, text."]
