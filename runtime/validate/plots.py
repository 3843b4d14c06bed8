"""The four plots of the report as SVG text that stands alone: text drawn as paths, no reference to anything outside.

Drawn with matplotlib's SVG backend, which needs no display. What it writes is made for a file of its own: prolog, metadata
and namespaces are removed here, and ids get a prefix, because several drawings share one page.
"""

import html
import io
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .prompts import ALL
from .stats import reason_of

PAIRS = ("#1f5a99", "#8db8e2", "#b8651b", "#eeb882")   # dark: raw, light: repeats cut
COLORS = ("#1f5a99", "#d9822b", "#3c8d5a", "#8c4a9e", "#7a7a7a", "#b23a48", "#2a9d9d", "#9a7b1c")   # told apart without red against green, and in grey
Draw = Callable[[Any], None]    # draws into a matplotlib Axes


def acceptance_plot(by_kind: Mapping[str, Mapping[str, Any]]) -> str:
    """Acceptance length by domain: greedy and sampled, raw and with repeats cut."""
    domains = list(next(iter(by_kind.values())))
    series = {f"{kind}, {label}": [_value(figures[d][key], "length") for d in domains]
              for kind, figures in by_kind.items() for key, label in (("raw", "raw"), ("repeats_cut", "repeats cut"))}

    def draw(axes: Any) -> None:
        _bars(axes, domains, series, colors=PAIRS)
        axes.axhline(1.0, color="#444444", linewidth=1, linestyle="--")
        axes.set_ylabel("tokens per round")

    return _svg(draw, name="acceptance", title="Acceptance length by domain",
                label=f"Bars: {_listed(series, domains, '{:.2f}')}. A dashed line marks 1.0, decoding without accepted drafts.")


def position_plot(figures: Mapping[str, Any]) -> str:
    """Acceptance by draft position, a line per domain; greedy."""
    series = {d: [(p["position"], p["rate"]) for p in figure["positions"] if p["drafted"]] for d, figure in figures.items()}

    def draw(axes: Any) -> None:
        for i, (domain, points) in enumerate(series.items()):
            axes.plot([k for k, _ in points], [rate for _, rate in points], marker="o", markersize=4, color=COLORS[i % len(COLORS)],
                      linewidth=2.5 if domain == ALL else 1.5, linestyle="-" if domain == ALL else "--", label=domain, clip_on=False)
        axes.set_ylim(0, 1)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_xlabel("position k in the draft")
        axes.set_ylabel("share accepting at least k")

    rates = "; ".join(f"{d} {', '.join(f'{rate:.2f}' for _, rate in points)}" for d, points in series.items())
    return _svg(draw, name="positions", title="Acceptance by position, greedy", label=f"Lines from position 1 on: {rates}.")


def speed_plot(speeds: Mapping[str, Mapping[str, Any]]) -> str:
    """Decode speed by domain and mode: median over prompts, p20 to p80 as whiskers."""
    return _spread_plot({m: {d: f["decode"] for d, f in figures.items()} for m, figures in speeds.items()}, scale=1, unit="tokens/s", name="speed",
                        title="Decode speed by domain and mode")


def first_token_plot(speeds: Mapping[str, Mapping[str, Any]]) -> str:
    """Time to the first token by domain and mode, likewise."""
    return _spread_plot({m: {d: f["first_token_s"] for d, f in figures.items()} for m, figures in speeds.items()}, scale=1e3, unit="ms", name="first-token",
                        title="Time to the first token by domain and mode")


def _spread_plot(spreads: Mapping[str, Mapping[str, Any]], *, scale: float, unit: str, name: str, title: str) -> str:
    domains = list(next(iter(spreads.values())))
    medians = {mode: [_value(s[d], "median", scale) for d in domains] for mode, s in spreads.items()}
    whiskers = {mode: [(_value(s[d], "p20", scale), _value(s[d], "p80", scale)) for d in domains] for mode, s in spreads.items()}

    def draw(axes: Any) -> None:
        _bars(axes, domains, medians, whiskers=whiskers)
        axes.set_ylabel(f"{unit}, median; whiskers p20 to p80")

    return _svg(draw, name=name, title=title, label=f"Median {unit}: {_listed(medians, domains, '{:.1f}')}.")


def _value(figure: Mapping[str, Any], key: str, scale: float = 1) -> float:
    return float("nan") if reason_of(figure) is not None else figure[key] * scale   # nan: matplotlib leaves the bar out


def _bars(axes: Any, groups: Sequence[str], series: Mapping[str, Sequence[float]], *,
          whiskers: Mapping[str, Sequence[tuple[float, float]]] | None = None, colors: Sequence[str] = COLORS) -> None:
    width = 0.82 / len(series)
    for i, (name, values) in enumerate(series.items()):
        places = [g + (i - (len(series) - 1) / 2) * width for g in range(len(groups))]
        axes.bar(places, values, width * 0.94, color=colors[i % len(colors)], label=name)
        for place, (low, high) in zip(places, whiskers[name] if whiskers else (), strict=False):
            axes.plot([place, place], [low, high], color="#222222", linewidth=1.2, marker="_", markersize=4)
    axes.set_xticks(range(len(groups)), [_short(g) for g in groups], rotation=30 if len(groups) > 7 else 0)
    axes.set_ylim(bottom=0)


def _listed(series: Mapping[str, Sequence[float]], groups: Sequence[str], form: str) -> str:
    """The values in words, for those who cannot see the drawing."""
    return "; ".join(f"{name}: " + ", ".join(f"{g} {form.format(v) if v == v else 'not measured'}" for g, v in zip(groups, values, strict=True))
                     for name, values in series.items())


def _short(text: str) -> str:
    return text if len(text) <= 16 else text[:15] + "..."


def _svg(draw: Draw, *, name: str, title: str, label: str) -> str:
    import matplotlib
    from matplotlib.figure import Figure

    style: Any = {"svg.fonttype": "path", "svg.hashsalt": name, "font.family": "DejaVu Sans", "font.size": 10, "text.parse_math": False,
             "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(9, 3.9), layout="constrained")
        axes = figure.subplots()
        draw(axes)
        axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
        axes.grid(axis="y", color="#dddddd", linewidth=0.8)
        handles, labels = axes.get_legend_handles_labels()
        axes.legend(handles, [text if len(text) <= 24 else _short(text) for text in labels], loc="upper left", bbox_to_anchor=(1.01, 1),
                    frameon=False, fontsize=9)
        stream = io.StringIO()
        figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return _inline(stream.getvalue(), prefix=name, title=title, label=label)


def _inline(svg: str, *, prefix: str, title: str, label: str) -> str:
    svg = svg[svg.index("<svg"):].strip()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\s+xmlns(:\w+)?="[^"]*"', "", svg)
    svg = re.sub(r'\b(id="|href="#|url\(#)', rf"\g<1>{prefix}-", svg).replace("xlink:href", "href")
    head = f'<svg role="img" aria-label="{html.escape(f"{title}. {label}")}"'
    return svg.replace("<svg", head, 1).replace(">", f"><title>{html.escape(title)}</title>", 1)
