"""From measured requests to the figures of the report: plain dictionaries, ready for JSON."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...dflash.generate import Round
from ...dflash.metrics import acceptance_by_position, acceptance_length, without_repeats
from .client import Answer
from .probes import ADAPTIVE, DRAFT, PLAIN, PLAIN_ONE_COLUMN, SAMPLED_ADAPTIVE, SAMPLED_DRAFT, SAMPLED_PLAIN, SAMPLED_TREE, TREE, WIDE_TREE
from .prompts import ALL
from .stats import cost_per_million_tokens, first_difference, not_measured, pooled_speed, reason_of, spread


def by_domain(answers: Sequence[Answer], figure: Callable[[Sequence[Answer]], Any]) -> dict[str, Any]:
    """A figure for every domain, in order of appearance, and for all of them."""
    domains = list(dict.fromkeys(a.domain for a in answers))
    return {**{d: figure([a for a in answers if a.domain == d]) for d in domains}, ALL: figure(answers)}


def of_mode(answers: Sequence[Answer], mode: str) -> list[Answer]:
    return [a for a in answers if a.mode == mode]


def acceptance(answers: Sequence[Answer]) -> dict[str, Any]:
    """Acceptance length, raw and up to the third repeat of an 8-gram, and acceptance by position."""
    rounds = [r for a in answers for r in a.rounds]
    num_drafts = max((r.max_accepted for r in rounds), default=0)
    positions = []
    for k, rate in enumerate(acceptance_by_position(rounds, num_drafts=num_drafts), start=1):
        drafted = sum(r.max_accepted >= k for r in rounds)
        positions.append({"position": k, "drafted": drafted, "accepted": sum(r.num_accepted >= k for r in rounds), "rate": rate})
    return {"raw": _length(rounds), "repeats_cut": _length([r for a in answers for r in without_repeats(a.rounds)]), "positions": positions}


def _length(rounds: Sequence[Round]) -> dict[str, Any]:
    decode = [r for r in rounds if not r.is_prefill]
    if not decode:
        return dict(not_measured("no decode round"))
    return {"length": acceptance_length(rounds), "tokens": sum(len(r.tokens) for r in decode), "rounds": len(decode)}


def proposing(answers: Sequence[Answer]) -> dict[str, Any]:
    """Acceptance, and what it costs: tokens that the target reads in a decode round, the anchor included."""
    decode = [r for a in answers for r in a.rounds if not r.is_prefill]
    cost: Any = not_measured("no decode round")
    if decode:
        cost = {"mean": sum(1 + r.num_drafted for r in decode) / len(decode), "most": max(1 + r.num_drafted for r in decode)}
    return {"verified": cost, **acceptance(answers)}


def verifying(answers: Sequence[Answer]) -> dict[str, Any]:
    """Of decode rounds: proposals verified on average, the share that verified any, and tokens committed by a round of those and by a round of all."""
    decode = [r for a in answers for r in a.rounds if not r.is_prefill]
    if not decode:
        return dict(not_measured("no decode round"))
    some = [r for r in decode if r.num_drafted]
    return {"rounds": len(decode), "length": sum(r.num_drafted for r in decode) / len(decode), "share_drafted": len(some) / len(decode),
            "tokens_a_round": acceptance_length(decode), "drafted": _length(some)}


def adaptive(answers: Sequence[Answer], speeds: Mapping[str, Mapping[str, Any]], *, mode: str, full: str, plain: str) -> dict[str, Any]:
    """Per domain: what an adaptive mode verified, and its pooled speed by that of full drafts and of none, in steps of the same kind."""
    found: dict[str, Any] = {}
    for domain, figure in by_domain(of_mode(answers, mode), verifying).items():
        rates = {name: speeds[name][domain]["decode"] for name in (mode, full, plain)}
        missing = [reason for rate in rates.values() if (reason := reason_of(rate)) is not None]
        by = not_measured(missing[0]) if missing else {name: rates[mode]["tokens_per_s"] / rates[name]["tokens_per_s"] for name in (full, plain)}
        found[domain] = {"verified": figure, "speed": rates[mode], "by": by}
    return found


def speed(answers: Sequence[Answer]) -> dict[str, Any]:
    """Decode speed after the first token, and the time to the first token."""
    return {"decode": pooled_speed([(a.decode_tokens, a.decode_s) for a in answers]), "first_token_s": spread([a.first_token_s for a in answers])}


def speed_up(speeds: Mapping[str, Mapping[str, Any]], *, draft: str, plain: Sequence[str]) -> dict[str, Any]:
    """Per domain: pooled speed of `draft` by that of the fastest of the `plain` modes, which is named."""
    ups: dict[str, Any] = {}
    for domain, drafted in speeds[draft].items():
        others = {mode: speeds[mode][domain]["decode"] for mode in plain}
        missing = [reason for figure in (drafted["decode"], *others.values()) if (reason := reason_of(figure)) is not None]
        if missing:
            ups[domain] = not_measured(missing[0])
            continue
        fastest = max(others, key=lambda mode: others[mode]["tokens_per_s"])
        ups[domain] = {"speed_up": drafted["decode"]["tokens_per_s"] / others[fastest]["tokens_per_s"], "against": fastest}
    return ups


def compare(answers: Sequence[Answer], *, mode: str, reference: str) -> dict[str, Any]:
    """How many texts of `mode` are those of `reference`, token for token; every difference with its first position."""
    expected = {a.prompt_id: a for a in of_mode(answers, reference)}
    compared = of_mode(answers, mode)
    differences = []
    for answer in compared:
        position = first_difference(answer.token_ids, expected[answer.prompt_id].token_ids)
        if position is not None:
            ids = (answer.token_ids, expected[answer.prompt_id].token_ids)
            token, reference_token = (i[position] if position < len(i) else None for i in ids)
            differences.append({"prompt": answer.prompt_id, "position": position, "token": token, "reference_token": reference_token})
    return {"mode": mode, "reference": reference, "equal": len(compared) - len(differences), "total": len(compared), "differences": differences}


def summarize(answers: Sequence[Answer], *, no_draft: str | None) -> dict[str, Any]:
    """Every figure that the requests give. no_draft: why nothing was drafted; None when drafts were measured."""
    modes = list(dict.fromkeys(a.mode for a in answers))
    speeds = {mode: by_domain(of_mode(answers, mode), speed) for mode in modes}
    figures: dict[str, Any] = {"speed": speeds, "one_column": compare(answers, mode=PLAIN_ONE_COLUMN, reference=PLAIN)}
    if no_draft is not None:
        reasons = {kind: not_measured(no_draft) for kind in ("greedy", "sampled")}
        return {**figures, **dict.fromkeys(("lossless", "acceptance", "speed_up", "trees", "adaptive"), reasons)}
    is_adaptive = ADAPTIVE in modes
    lossless = {"greedy, adaptive": compare(answers, mode=ADAPTIVE, reference=PLAIN),
                "sampled, adaptive": compare(answers, mode=SAMPLED_ADAPTIVE, reference=SAMPLED_PLAIN)} if is_adaptive else {}
    lengths = {"greedy": adaptive(answers, speeds, mode=ADAPTIVE, full=DRAFT, plain=PLAIN),
               "sampled": adaptive(answers, speeds, mode=SAMPLED_ADAPTIVE, full=SAMPLED_DRAFT, plain=SAMPLED_PLAIN)} if is_adaptive else dict.fromkeys(
        ("greedy", "sampled"), not_measured("a fixed draft length was asked for"))
    return {
        **figures, "adaptive": lengths,
        "lossless": {"greedy": compare(answers, mode=DRAFT, reference=PLAIN), "sampled": compare(answers, mode=SAMPLED_DRAFT, reference=SAMPLED_PLAIN),
                     "greedy, tree": compare(answers, mode=TREE, reference=PLAIN), "greedy, wide tree": compare(answers, mode=WIDE_TREE, reference=PLAIN),
                     "sampled, tree": compare(answers, mode=SAMPLED_TREE, reference=SAMPLED_PLAIN), **lossless},
        "acceptance": {"greedy": by_domain(of_mode(answers, DRAFT), acceptance), "sampled": by_domain(of_mode(answers, SAMPLED_DRAFT), acceptance)},
        "trees": {kind: {mode: by_domain(of_mode(answers, mode), proposing) for mode in ways}
                  for kind, ways in (("greedy", (DRAFT, TREE, WIDE_TREE)), ("sampled", (SAMPLED_DRAFT, SAMPLED_TREE)))},
        "speed_up": {"greedy": speed_up(speeds, draft=DRAFT, plain=(PLAIN, PLAIN_ONE_COLUMN)),
                     "sampled": speed_up(speeds, draft=SAMPLED_DRAFT, plain=(SAMPLED_PLAIN,))}}


def failures_of(figures: Mapping[str, Any]) -> list[str]:
    """What must not be: texts that a draft changed."""
    failures = []
    for kind, figure in figures["lossless"].items():
        if reason_of(figure) is None and figure["equal"] < figure["total"]:
            failures.append(f"not lossless, {kind}: {figure['total'] - figure['equal']} of {figure['total']} texts differ with a draft; "
                            f"first {describe_difference(figure)}")
    return failures


def describe_difference(comparison: Mapping[str, Any]) -> str:
    """The first difference of a comparison, in words."""
    first = comparison["differences"][0]
    token, other = ("the end" if first[key] is None else f"token id {first[key]}" for key in ("token", "reference_token"))
    return f"{first['prompt']} at position {first['position']}: {token}, {other} in {comparison['reference']}"


def cost(speeds: Mapping[str, Mapping[str, Any]], *, price_per_hour: float) -> dict[str, Any]:
    """Cost of a million decoded tokens, one request at a time, for the draft mode and for the fastest mode."""
    measured = {mode: figure[ALL]["decode"]["tokens_per_s"] for mode, figure in speeds.items() if reason_of(figure[ALL]["decode"]) is None}
    if not measured:
        return dict(not_measured("no decode speed"))
    fastest = max(measured, key=lambda mode: measured[mode])
    shown = [mode for mode in dict.fromkeys((DRAFT, fastest)) if mode in measured]
    return {"price_per_hour": price_per_hour,
            "per_million_tokens": {mode: cost_per_million_tokens(price_per_hour=price_per_hour, tokens_per_s=measured[mode]) for mode in shown}}
