"""Acceptance on held-out prompts: the draft-verify loop run on the target, greedy, by domain."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..dflash.context import Taps
from ..dflash.drafter import DFlashDrafter
from ..dflash.generate import Round, generate
from ..dflash.hf_target import HFTarget
from ..dflash.metrics import acceptance_by_position, acceptance_length, without_repeats
from ..dflash.model import DraftModel
from ..dflash.sampling import Sampling
from ..quant.quality import head_weight
from .prompts import Prompt


@torch.no_grad()
def measure_acceptance(
    draft: DraftModel, target: nn.Module, prompts: Mapping[str, Sequence[Prompt]], *, max_tokens: int, eos_ids: Collection[int], max_length: int,
) -> dict[str, Any]:
    """By domain and for `all`: acceptance length raw and with repeats cut, acceptance by position, rounds, tokens.

    A prompt without room for max_tokens in the target's context gives as many as there is room for.
    """
    raw: dict[str, list[Round]] = {}
    cut: dict[str, list[Round]] = {}
    embedding = target.get_input_embeddings().weight  # type: ignore[operator]
    with Taps(target, layer_ids=draft.config.target_layer_ids) as taps:
        for domain, some in prompts.items():
            for prompt in some:
                drafter = DFlashDrafter(draft, embedding_VD=embedding, head_VD=head_weight(target))
                rounds = list(generate(HFTarget(target, taps=taps, max_length=max_length), prompt=prompt.ids, drafter=drafter, sampling=Sampling(),
                                       max_tokens=max_tokens, eos_ids=eos_ids))
                for name in (domain, "all"):
                    raw.setdefault(name, []).extend(rounds)
                    cut.setdefault(name, []).extend(without_repeats(rounds))
    order = [*prompts, "all"]
    return {d: {"acceptance_length": acceptance_length(raw[d]), "acceptance_length_repeats_cut": acceptance_length(cut[d]),
                "acceptance_by_position": acceptance_by_position(raw[d], num_drafts=draft.config.num_drafts),
                "rounds": sum(not r.is_prefill for r in raw[d]), "tokens": sum(len(r.tokens) for r in raw[d])} for d in order}


def acceptance_figures(measured: Mapping[str, Any]) -> dict[str, float]:
    """Acceptance length with repeats cut, by domain."""
    return {d: m["acceptance_length_repeats_cut"] for d, m in measured.items()}


def acceptance_table(measured: Mapping[str, Any], *, before: Mapping[str, Any] | None = None) -> str:
    """As text: tokens a target forward, bonus included, and the share of rounds that accept the first k drafts."""
    slots = range(1, 1 + len(next(iter(measured.values()))["acceptance_by_position"]))
    second = f"{'prompts':<9} {'':>7} | {'raw':>7} {'no loops':>9} | " + " ".join(f"{k:>5}" for k in slots)
    lines = [f"{'held-out':<9} {'rounds':>7} | {'acceptance length':^17} | accepted at position", second + ("" if before is None else " | before (no loops)")]
    for domain, m in measured.items():
        line = (f"{domain:<9} {m['rounds']:>7} | {m['acceptance_length']:>7.3f} {m['acceptance_length_repeats_cut']:>9.3f} | "
                + " ".join(f"{share:>5.2f}" for share in m["acceptance_by_position"]))
        lines.append(line if before is None else f"{line} | {before[domain]['acceptance_length_repeats_cut']:.3f}")
    lines.append("acceptance length: tokens committed by a target forward, bonus included; no loops: text cut at the third repeat of an 8-gram")
    return "\n".join(lines)
