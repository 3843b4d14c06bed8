"""The table of a QAT run: parent, round-to-nearest and trained, by domain and pooled."""

from typing import Any

from ..quant.quality import Quality, pool


def qat_table(meta: dict[str, Any]) -> str:
    """RUN/meta.json as text. The gap is in nats: what share of round-to-nearest's loss over the parent training removed."""
    rtn, qat = _qualities(meta["round_to_nearest"]), _qualities(meta["qat"])
    rtn["all"], qat["all"] = pool(list(rtn.values())), pool(list(qat.values()))
    lines = [f"{'held-out':<9} {'':>7} | {'perplexity':^30} | {'gap':>7} | {'KL to the parent, nats':^29}",
             f"{'text':<9} {'tokens':>7} | {'parent':>9} {'rounded':>10} {'QAT':>9} | {'closed':>7} | {'rounded':>10} {'QAT':>9} {'removed':>8}"]
    for domain, q in qat.items():
        r = rtn[domain]
        lines.append(f"{domain:<9} {q.tokens:>7} | {q.parent_perplexity:>9.4f} {r.perplexity:>10.4f} {q.perplexity:>9.4f} | {gap_closed(r, q):>7.1%} | "
                     f"{r.kl:>10.5f} {q.kl:>9.5f} {1 - q.kl / r.kl if r.kl else float('nan'):>8.1%}")
    plan = meta["plan"]
    before, after = plan["bytes_before"], plan["bytes_after"]
    lines.append(f"weights: {before / 1e6:.2f} MB before, {after / 1e6:.2f} MB after ({after / before:.0%}); "
                 f"{plan['expert_tensors']} fused expert tensors in MXFP4, scale_mode {meta['quant']['scale_mode']}")
    lines.append("gap closed: share of the cross-entropy that rounding added and training took back; above 100 % the trained model predicts this text "
                 "better than its parent.")
    lines.append("text: " + "; ".join(f"{d} = {t}" for d, t in meta["heldout_text"].items()))
    return "\n".join(lines)


def gap_closed(rounded: Quality, trained: Quality) -> float:
    """Share of the cross-entropy that rounding added and training took back; nan when rounding added none."""
    added = rounded.cross_entropy - rounded.parent_cross_entropy
    return (rounded.cross_entropy - trained.cross_entropy) / added if added > 0 else float("nan")


def _qualities(results: dict[str, Any]) -> dict[str, Quality]:
    fields = ("tokens", "kl", "cross_entropy", "parent_cross_entropy")
    return {d: Quality(**{k: q[k] for k in fields}) for d, q in results.items()}
