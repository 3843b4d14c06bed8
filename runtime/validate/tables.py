"""The report as headed tables of text: one source for Markdown, HTML and the terminal."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .figures import describe_difference
from .probes import WIDE_TREE_BUDGET
from .prompts import ALL
from .stats import reason_of

Report = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Table:
    """Cells of text under a title; every row is as long as the header."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


def figure_text(figure: Any, key: str, form: str = "{:.2f}") -> str:
    """A figure of a dictionary, formatted, or why there is none."""
    reason = reason_of(figure)
    return f"not measured: {reason}" if reason is not None else form.format(figure[key])


def verdict(report: Report) -> list[tuple[str, str, str]]:
    """(label, value, remark) of the lines a reader wants first."""
    lossless, acceptance, ups, quality = report["lossless"], report["acceptance"], report["speed_up"], report["quality"]
    lines = []
    reason = reason_of(lossless["greedy"])
    if reason is not None:
        lines.append(("lossless", "not measured", reason))
    else:
        equal = all(c["equal"] == c["total"] for c in lossless.values())
        counts = ", ".join(f"{kind} {c['equal']}/{c['total']}" for kind, c in lossless.items())
        lines.append(("lossless", "yes" if equal else "NO", f"texts equal with and without draft: {counts}"))
    figure = acceptance["greedy"] if reason_of(acceptance["greedy"]) is not None else acceptance["greedy"][ALL]["raw"]
    remark = reason_of(figure) or f"tokens a target forward; repeats cut {figure_text(acceptance['greedy'][ALL]['repeats_cut'], 'length')}; greedy, all domains"
    lines.append(("acceptance length", _or_not(figure, "length", "{:.2f}"), remark))
    figure = ups["greedy"] if reason_of(ups["greedy"]) is not None else ups["greedy"][ALL]
    remark = reason_of(figure) or f"tokens/s of draft by those of {figure['against']}; greedy, all domains"
    lines.append(("speed-up", _or_not(figure, "speed_up", "{:.2f}x"), remark))
    figure = quality if reason_of(quality) is not None else quality["domains"][ALL]
    if reason_of(quality) is None:
        parent = reason_of(quality["parent"])
        remark = (f"parent: not measured: {parent}" if parent is not None else
                  f"parent {figure['parent_perplexity']:.3f}, KL to it {figure['kl']:.4f} nats; {figure['tokens']} tokens")
    lines.append(("perplexity", _or_not(figure, "perplexity", "{:.3f}"), reason_of(figure) or remark))
    return lines


def _or_not(figure: Any, key: str, form: str) -> str:
    return "not measured" if reason_of(figure) is not None else form.format(figure[key])


def tables(report: Report) -> list[Table]:
    """Everything but the single requests."""
    found = [_lossless(report), *_acceptance(report), _trees(report), _adaptive(report), _speed(report), _speed_up(report), _quality(report)]
    if "cost" in report:
        found.append(_cost(report["cost"]))
    sizes = [(name.removesuffix("_bytes").replace("_", " "), f"{size:,} bytes" if isinstance(size, int) else f"not measured: {reason_of(size)}")
             for name, size in report["sizes"].items()]
    found += [
        _pairs("Sizes on disk", sizes), _pairs("Settings", list(_flatten(report["settings"]))), _pairs("Provenance", list(_flatten(report["provenance"])))]
    return found


def _lossless(report: Report) -> Table:
    rows = []
    named = [(f"{kind}: with draft against without", c) for kind, c in report["lossless"].items()]
    for name, c in [*named, ("greedy: one column against column rule (information)", report["one_column"])]:
        reason = reason_of(c)
        if reason is not None:
            rows.append((name, f"not measured: {reason}", "", ""))
        else:
            rows.append((name, str(c["equal"]), str(c["total"]), describe_difference(c) if c["differences"] else "none"))
    return Table(title="Same text, token for token", header=("comparison", "equal", "texts", "first difference"), rows=tuple(rows),
                 note="Positions count the answer's tokens from 0. Plain decoding of one column gives up the rule that a token's numbers do not depend on how "
                      "many tokens are read at once, so its texts may differ in near ties.")


def _acceptance(report: Report) -> list[Table]:
    lengths: list[tuple[str, ...]] = []
    positions: list[tuple[str, ...]] = []
    most = max((len(domains[ALL]["positions"]) for domains in report["acceptance"].values() if reason_of(domains) is None), default=0)
    for kind, domains in report["acceptance"].items():
        reason = reason_of(domains)
        if reason is not None:
            lengths.append((kind, "", f"not measured: {reason}", "", "", ""))
            continue
        for domain, figure in domains.items():
            raw, cut = figure["raw"], figure["repeats_cut"]
            lengths.append((kind, domain, figure_text(raw, "length"), "" if reason_of(raw) else str(raw["rounds"]), figure_text(cut, "length"),
                            "" if reason_of(cut) else str(cut["rounds"])))
            rates = [f"{p['rate']:.3f} ({p['accepted']}/{p['drafted']})" for p in figure["positions"]]
            positions.append((kind, domain, *rates, *[""] * (most - len(rates))))
    found = [Table(title="Acceptance length", header=("decoding", "domain", "raw", "rounds", "repeats cut", "rounds"), rows=tuple(lengths),
                   note="Tokens that decode rounds committed, the bonus token included, by the number of those rounds; the prefill is none. "
                        "'Repeats cut' stops each text at the third occurrence of an 8-gram, because loops are easy to draft.")]
    if most:
        header = ("decoding", "domain", *[str(k) for k in range(1, most + 1)])
        found.append(Table(title="Acceptance by position", header=header, rows=tuple(positions),
                           note="Of the rounds that drafted at least k tokens, the share that accepted at least k."))
    return found


def _trees(report: Report) -> Table:
    rows: list[tuple[str, ...]] = []
    for kind, ways in report["trees"].items():
        reason = reason_of(ways)
        if reason is not None:
            rows.append((kind, "", f"not measured: {reason}", "", "", ""))
            continue
        for domain in next(iter(ways.values())):
            for way, domains in ways.items():
                figure = domains[domain]
                rows.append((kind, domain, way, figure_text(figure["verified"], "mean"), figure_text(figure["raw"], "length"),
                             figure_text(figure["repeats_cut"], "length")))
    header = ("decoding", "domain", "proposals", "verified a round", "acceptance length", "repeats cut")
    return Table(title="Chain against tree", header=header, rows=tuple(rows),
                 note=f"'draft' is the chain, one proposal a position. A tree has the same number of proposals, a wide tree {WIDE_TREE_BUDGET}, spread over "
                      "several candidates a position. 'Verified a round' is the mean of the tokens the target reads, the anchor included; a chain is shortened "
                      "near the end of a text, a tree is not. Both executors read a tree path by path, so the speed of trees here says nothing of trees "
                      "elsewhere.")


def _adaptive(report: Report) -> Table:
    rows: list[tuple[str, ...]] = []
    for kind, domains in report["adaptive"].items():
        reason = reason_of(domains)
        if reason is not None:
            rows.append((kind, "", f"not measured: {reason}", "", "", "", "", "", ""))
            continue
        for domain, figure in domains.items():
            verified, by = figure["verified"], figure["by"]
            ratios = [f"not measured: {reason_of(by)}", ""] if reason_of(by) is not None else [f"{value:.2f}x" for value in by.values()]
            drafted = {} if reason_of(verified) is not None else verified["drafted"]
            rows.append((kind, domain, figure_text(verified, "length"), figure_text(verified, "share_drafted", "{:.0%}"),
                         figure_text(drafted, "length") if drafted else "", figure_text(verified, "tokens_a_round"),
                         figure_text(figure["speed"], "tokens_per_s", "{:.1f}"), *ratios))
    header = ("decoding", "domain", "verified a round", "with any", "tokens a round with any", "tokens a round", "tokens/s", "by full drafts", "by plain")
    return Table(title="Adaptive drafts", header=header, rows=tuple(rows),
                 note="Drafts of which as much is verified as pays by the rounds measured so far, and none where drafting does not pay, by domain; what is "
                      "learned in one request serves the next, so the first ones pay for it. 'Verified' counts proposals, without the anchor, over all "
                      "decode rounds; 'with any' are the rounds that verified some. Plain is decoding under the column rule.")


def _speed(report: Report) -> Table:
    rows = []
    for domain in next(iter(report["speed"].values())):
        for mode, domains in report["speed"].items():
            decode, first = domains[domain]["decode"], domains[domain]["first_token_s"]
            latency = f"{_milliseconds(first['median'])} ({_milliseconds(first['p20'])} - {_milliseconds(first['p80'])})"
            if reason_of(decode) is not None:
                rows.append((domain, mode, "", "", f"not measured: {reason_of(decode)}", "", latency))
            else:
                rows.append((domain, mode, str(decode["requests"]), str(decode["tokens"]), f"{decode['tokens_per_s']:.1f}",
                             f"{decode['median']:.1f} ({decode['p20']:.1f} - {decode['p80']:.1f})", latency))
    header = ("domain", "mode", "requests", "tokens", "tokens/s, all", "tokens/s, median (p20 - p80)", "first token ms, median (p20 - p80)")
    return Table(title="Speed", header=header, rows=tuple(rows),
                 note="One request at a time, timed at the client: HTTP and JSON are in it. 'First token' is the first text. Tokens/s counts the tokens "
                      "after it; 'all' is all tokens by all seconds.")


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"


def _speed_up(report: Report) -> Table:
    rows: list[tuple[str, ...]] = []
    for kind, domains in report["speed_up"].items():
        reason = reason_of(domains)
        if reason is not None:
            rows.append((kind, "", f"not measured: {reason}", ""))
            continue
        for domain, figure in domains.items():
            rows.append((kind, domain, figure_text(figure, "speed_up", "{:.2f}x"), figure.get("against", "")))
    return Table(title="Speed-up by the draft", header=("decoding", "domain", "speed-up", "against"), rows=tuple(rows),
                 note="Tokens/s with draft by tokens/s of the fastest way to decode without one, measured in the same minutes.")


def _quality(report: Report) -> Table:
    quality = report["quality"]
    title, header = "Quality", ("domain", "tokens", "perplexity", "perplexity of the parent", "KL(parent || target), nats")
    if reason_of(quality) is not None:
        return Table(title=title, header=header, rows=(("", "", f"not measured: {reason_of(quality)}", "", ""),))
    reason = reason_of(quality["parent"])
    rows = tuple((domain, str(q["tokens"]), f"{q['perplexity']:.4f}", *(("not measured", "not measured") if reason is not None else
                  (f"{q['parent_perplexity']:.4f}", f"{q['kl']:.5f}"))) for domain, q in quality["domains"].items())
    compared = f"Parent: not measured: {reason}" if reason is not None else f"Parent: {quality['parent']}"
    return Table(title=title, header=header, rows=rows,
                 note=f"Held-out prompts with their reference answers, every token after the first; reference executor, sums in float64. {compared}.")


def _cost(cost: Mapping[str, Any]) -> Table:
    reason = reason_of(cost)
    rows = [("per million output tokens", f"not measured: {reason}")] if reason is not None else [
        (f"per million output tokens, {mode}", f"{value:.4f}") for mode, value in cost["per_million_tokens"].items()]
    price = "" if reason is not None else f"At a price of {cost['price_per_hour']} per hour, same currency; one request at a time, decoding only."
    return Table(title="Cost", header=("figure", "value"), rows=tuple(rows), note=price)


def _pairs(title: str, pairs: list[tuple[str, str]]) -> Table:
    return Table(title=title, header=("item", "value"), rows=tuple(pairs))


def _flatten(value: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Nested dictionaries as dotted names."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _flatten(inner, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, "none" if value is None else str(value)
