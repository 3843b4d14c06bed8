"""The table of sensitivities as Markdown, and a bar chart of it as SVG that stands alone."""

import html
import math
from typing import Any

COLORS = ("#1f5a99", "#d9822b", "#3c8d5a")
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 960, 360, 80, 16, 48, 48   # pixels; the last four are margins


def report_text(record: dict[str, Any]) -> str:
    """sensitivity.md."""
    domains, projections = list(record["all"]["domains"]), _projections(record)
    kl = {(w["layer"], w["projection"]): w["kl"] for w in record["weights"]}
    ranks = {layer["layer"]: i + 1 for i, layer in enumerate(sorted(record["layers"], key=lambda r: -r["kl"]))}
    header = ["layer", *projections, "together", "rank", "perplexity", *(f"KL, {d}" for d in domains)]
    lines = ["# Sensitivity of the routed experts", "",
             f"KL to the bf16 parent in nats a token, with the named weights alone in MXFP4 (scale_mode {record['scale_mode']}), all else in bf16. "
             f"Held-out text, {record['part']}: {record['all']['tokens']:,} tokens; {record['precision']}.",
             f"Parent: {record['parent']['path']}, {record['parent']['sha256'][:12]}, perplexity {record['none']['parent_perplexity']:.4f}.", "",
             _row(header), _row(["---:"] * len(header))]
    for layer in record["layers"]:
        i = layer["layer"]
        lines.append(_row([str(i), *(_kl(kl.get((i, p))) for p in projections), _kl(layer["kl"]), str(ranks[i]), f"{layer['perplexity']:.4f}",
                           *(_kl(layer["domains"][d]["kl"]) for d in domains)]))
    for name in ("all", "none"):
        figures = record[name]
        lines.append(_row([name, *("" for _ in projections), _kl(figures["kl"]), "", f"{figures['perplexity']:.4f}",
                           *(_kl(figures["domains"][d]["kl"]) for d in domains)]))
    total, parts = sum(layer["kl"] for layer in record["layers"]), sum(w["kl"] for w in record["weights"])
    lines += ["", f"Sum of the weights {_kl(parts)}, of the layers {_kl(total)}, all together {_kl(record['all']['kl'])}: a plan is chosen as if costs add up.",
              "`none` is the parent run again: what repeating a run costs on this machine."]
    if record["comparison"] is not None:
        lines += ["", *_comparison(record["comparison"], domains=domains)]
    lines += ["", "Text: " + "; ".join(f"{d} = {t}" for d, t in record["heldout_text"].items()), ""]
    return "\n".join(lines)


def _comparison(comparison: dict[str, Any], *, domains: list[str]) -> list[str]:
    plans = comparison["plans"]
    tokens = plans["chosen"]["tokens"]
    lines = [f"## Plans at {comparison['bits_per_weight']:g} bits a routed expert weight", "",
             f"Rounded to nearest, kept weights in {comparison['keep_format']}, kept by {comparison['granularity']}; {comparison['part']}, which chose "
             f"nothing: {tokens:,} tokens.", "",
             _row(["plan", "kept weights", "bits", "KL", "perplexity", *(f"KL, {d}" for d in domains)]), _row(["---", *["---:"] * (4 + len(domains))])]
    for name, plan in plans.items():
        lines.append(_row([name, str(len(plan["kept"])), f"{plan['bits']:.4f}", _kl(plan["kl"]), f"{plan['perplexity']:.4f}",
                           *(_kl(plan["domains"][d]["kl"]) for d in domains)]))
    lines += ["", "Kept by the chosen plan: " + (", ".join(plans["chosen"]["kept"]) or "nothing"),
              "", "Kept by the uniform plan: " + (", ".join(plans["uniform"]["kept"]) or "nothing")]
    return lines


def svg_chart(record: dict[str, Any]) -> str:
    """KL by layer, a bar for each fused weight."""
    projections, layers = _projections(record), [layer["layer"] for layer in record["layers"]]
    kl = {(w["layer"], w["projection"]): max(w["kl"], 0.0) for w in record["weights"]}
    top, step = _axis(max(kl.values()))
    plot_width, plot_height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    slot = plot_width / len(layers)
    bar = 0.8 * slot / len(projections)

    def y(value: float) -> float:
        return TOP + plot_height * (1 - value / top)

    title = "KL to the parent with one fused expert weight in MXFP4"
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img" '
             f'font-family="sans-serif" font-size="12">', f"<title>{title}</title>", f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
             f'<text x="{LEFT}" y="20" font-size="14">{title}</text>']
    for i in range(round(top / step) + 1):
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(i * step):.1f}" y2="{y(i * step):.1f}" stroke="{"#444" if i == 0 else "#ddd"}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y(i * step) + 4:.1f}" text-anchor="end">{i * step:.3g}</text>')
    every = math.ceil(len(layers) / 32)   # so many labels fit side by side
    for i, layer in enumerate(layers):
        left = LEFT + i * slot + 0.1 * slot
        for j, projection in enumerate(projections):
            value = kl.get((layer, projection), 0.0)
            parts.append(f'<rect x="{left + j * bar:.2f}" y="{y(value):.2f}" width="{bar:.2f}" height="{y(0) - y(value):.2f}" '
                         f'fill="{COLORS[j % len(COLORS)]}"><title>layer {layer}, {html.escape(projection)}: {value:.3g}</title></rect>')
        if i % every == 0:
            parts.append(f'<text x="{LEFT + (i + 0.5) * slot:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{layer}</text>')
    parts.append(f'<text x="{LEFT + plot_width / 2}" y="{HEIGHT - 10}" text-anchor="middle">layer</text>')
    middle = TOP + plot_height / 2
    parts.append(f'<text x="16" y="{middle}" text-anchor="middle" transform="rotate(-90 16 {middle})">KL, nats a token</text>')
    for j, projection in enumerate(projections):
        x = WIDTH - RIGHT - 130 * (len(projections) - j)
        parts.append(f'<rect x="{x}" y="10" width="12" height="12" fill="{COLORS[j % len(COLORS)]}"/>'
                     f'<text x="{x + 18}" y="20">{html.escape(projection)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _axis(largest: float) -> tuple[float, float]:
    """(top, step) of an axis from 0 with four to ten steps of 1, 2 or 5 times a power of ten."""
    if largest <= 0:
        return 1.0, 0.2
    power = 10.0 ** math.floor(math.log10(largest / 4))
    step = next(s for s in (power, 2 * power, 5 * power, 10 * power) if largest / s <= 8)
    return step * math.ceil(largest / step), step


def _projections(record: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(w["projection"] for w in record["weights"]))


def _kl(value: float | None) -> str:
    return "" if value is None else f"{value:.3e}"


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
