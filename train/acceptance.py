"""A draft on held-out prompts, by domain: acceptance in the draft-verify loop, greedy, and accuracy of every slot.

Acceptance by position asks how often a round got so far; accuracy by slot asks each slot alone, for blocks at every anchor of the
text that the target wrote, whatever the slots before it say.
"""

import math
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
from .distill_config import SlotLossConfig
from .distill_data import pack_row
from .prompts import Prompt
from .responses import Response
from .slot_pass import slot_pass
from .walk import walk_rounds

ALARM_ROUNDS, ALARM_EXPECTED = 20, 5   # no acceptance where 5 were expected: by chance in less than 1 of 100 runs (e**-5)
LITTLE_ACCURACY = 0.05                 # of the first slots: what a draft has before it has learnt anything of the text


@torch.no_grad()
def measure_acceptance(
    draft: DraftModel, target: nn.Module, prompts: Mapping[str, Sequence[Prompt]], *, max_tokens: int, eos_ids: Collection[int], max_length: int,
    tree_budget: int | None = None, texts: Mapping[str, Sequence[Response]] | None = None,
) -> dict[str, Any]:
    """By domain and for `all`: acceptance length raw and with repeats cut, acceptance by position, accuracy by slot, rounds, tokens.

    texts: greedy answers of the target, cut at repeats; `walk` is the acceptance length that a draft-verify loop would have had on them.

    tree_budget: every prompt is also decoded with trees of so many nodes, for `tree`, their acceptance length with repeats cut;
        the draft's number of proposals makes it comparable with the chain's. None: no trees.
    A prompt without room for max_tokens in the target's context gives as many as there is room for.
    """
    rounds_of: dict[int | None, dict[str, list[list[Round]]]] = {budget: {d: [] for d in prompts} for budget in (None, tree_budget)}
    correct = {d: torch.zeros(draft.config.block_size) for d in prompts}
    counted = {d: torch.zeros(draft.config.block_size) for d in prompts}
    embedding = target.get_input_embeddings().weight  # type: ignore[operator]
    for domain, some in prompts.items():
        for prompt in some:
            with Taps(target, layer_ids=draft.config.target_layer_ids) as taps:
                for budget, decoded in rounds_of.items():
                    drafter = DFlashDrafter(draft, embedding_VD=embedding, head_VD=head_weight(target))
                    decoded[domain].append(list(generate(
                        HFTarget(target, taps=taps, max_length=max_length), prompt=prompt.ids, drafter=drafter, sampling=Sampling(), max_tokens=max_tokens,
                        eos_ids=eos_ids, tree_budget=budget)))
            rounds = rounds_of[None][domain][-1]
            right, count = _slot_accuracy(draft, target, Response(prompt=prompt.ids, response=tuple(t for r in rounds for t in r.tokens)))
            correct[domain] += right
            counted[domain] += count
    measured = {}
    for d, parts in [*((d, [d]) for d in prompts), ("all", list(prompts))]:
        texts_of = {budget: [r for part in parts for r in decoded[part]] for budget, decoded in rounds_of.items()}
        measured[d] = _figures(texts_of[None], correct=sum(correct[p] for p in parts), counted=sum(counted[p] for p in parts))
        if tree_budget is not None:
            measured[d]["tree"] = {"budget": tree_budget, "acceptance_length_repeats_cut": _cut_length(texts_of[tree_budget])}
    if texts:
        walks = {d: [walk_rounds(draft, target, text) for text in some] for d, some in texts.items()}
        for d, parts in [*((d, [d]) for d in walks), ("all", list(walks))]:
            walked = [rounds for part in parts for rounds in walks[part]]
            measured[d]["walk"] = {"texts": len(walked), "tokens": sum(len(r.tokens) for rounds in walked for r in rounds),
                                   "acceptance_length": _or_none(acceptance_length(r for rounds in walked for r in rounds))}
    return measured


def _figures(texts: Sequence[Sequence[Round]], *, correct: Any, counted: Any) -> dict[str, Any]:
    """Plain numbers for JSON; None where nothing was counted."""
    rounds = [r for text in texts for r in text]
    return {"acceptance_length": _or_none(acceptance_length(rounds)), "acceptance_length_repeats_cut": _cut_length(texts),
            "acceptance_by_position": [_or_none(share) for share in acceptance_by_position(rounds, num_drafts=len(correct) - 1)],
            "accuracy_by_slot": [float(c / n) if n else None for c, n in zip(correct[1:], counted[1:], strict=True)],
            "rounds": sum(not r.is_prefill for r in rounds), "tokens": sum(len(r.tokens) for r in rounds)}


def _cut_length(texts: Sequence[Sequence[Round]]) -> float | None:
    return _or_none(acceptance_length([r for text in texts for r in without_repeats(text)]))


def _or_none(figure: float) -> float | None:
    return None if math.isnan(figure) else figure


def _slot_accuracy(draft: DraftModel, target: nn.Module, text: Response) -> tuple[torch.Tensor, torch.Tensor]:
    """(slots right, slots counted), by slot, over blocks at every anchor of a text."""
    length = len(text.prompt) + len(text.response)
    device = next(target.parameters()).device
    row = pack_row([text], length=length, pad_id=0).unsqueeze(0).to(device)
    dtype = next(target.parameters()).dtype
    with torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32):
        sums = slot_pass(draft, target, row, loss=SlotLossConfig(anchors=length), generator=torch.Generator(device).manual_seed(0))
    return sums.correct_N.cpu(), sums.count_N.cpu()


def acceptance_alarm(measured: Mapping[str, Any]) -> str | None:
    """What to say when not one draft was accepted anywhere; None otherwise.

    With nothing accepted the rounds are at every token of the text, where accuracy by slot is measured too, in the form that trains. So the accuracy of slot 1
    says how many first drafts should have been accepted: a draft that is right there and never accepted is wrong in serving, one that is wrong
    there too is weak.
    """
    everything = measured["all"]
    rounds, accuracy = everything["rounds"], everything["accuracy_by_slot"][0] or 0.0
    if rounds == 0 or everything["acceptance_length"] != 1.0:
        return None
    found = f"the acceptance length is exactly 1.00 over {rounds} rounds: not one draft was accepted"
    expected = f"{100 * accuracy:.1f} % of the first slots are right by teacher forcing"
    if rounds >= ALARM_ROUNDS and rounds * accuracy >= ALARM_EXPECTED:
        return (f"ALARM: {found}, although {expected}. That is no weak draft but a wrong one: what is served differs from what was trained, such as "
                "other taps, another mask token or embedding.")
    if rounds < ALARM_ROUNDS and accuracy > LITTLE_ACCURACY:
        return f"{found}, and {expected}: too few rounds to tell why. Raise data.heldout_prompts or data.heldout_new_tokens."
    return f"{found}, and only {expected}: the draft is untrained or has had too little training, or began as one of another target."


def acceptance_figures(measured: Mapping[str, Any]) -> dict[str, float]:
    """Acceptance length with repeats cut, by domain."""
    return {d: float("nan") if (length := m["acceptance_length_repeats_cut"]) is None else length for d, m in measured.items()}


def acceptance_table(measured: Mapping[str, Any], *, before: Mapping[str, Any] | None = None) -> str:
    """As text: tokens a target forward, bonus included, and the share of rounds that accept the first k drafts."""
    trees, walks = (all(key in m for m in measured.values()) for key in ("tree", "walk"))
    slots = range(1, 1 + len(next(iter(measured.values()))["acceptance_by_position"]))
    second = f"{'prompts':<9} {'':>7} | {'raw':>7} {'no loops':>9} | " + " ".join(f"{k:>5}" for k in slots)
    lines = [f"{'held-out':<9} {'rounds':>7} | {'acceptance length':^17} | share of rounds that accept so many",
             second + (" | tree (no loops)" if trees else "") + (" | walk (no loops)" if walks else "") + ("" if before is None else " | before (no loops)")]
    for domain, m in measured.items():
        line = (f"{domain:<9} {m['rounds']:>7} | {_shown(m['acceptance_length'], 3):>7} {_shown(m['acceptance_length_repeats_cut'], 3):>9} | "
                + " ".join(f"{_shown(share, 2):>5}" for share in m["acceptance_by_position"]))
        if trees:
            line += f" | {_shown(m['tree']['acceptance_length_repeats_cut'], 3):>15}"
        if walks:
            line += f" | {_shown(m['walk']['acceptance_length'], 3):>15}"
        lines.append(line if before is None else f"{line} | {_shown(before[domain]['acceptance_length_repeats_cut'], 3)}")
    lines.append("acceptance length: tokens committed by a target forward, bonus included; no loops: text cut at the third repeat of an 8-gram")
    if trees:
        lines.append(f"tree: the same with {next(iter(measured.values()))['tree']['budget']} proposals a round spread over several candidates a position")
    if walks:
        lines.append(f"walk: on {measured['all']['walk']['texts']} greedy texts by teacher forcing; the columns before are of the draft-verify loop itself")
    return "\n".join(lines)


def _shown(figure: float | None, digits: int) -> str:
    return "-" if figure is None else f"{figure:.{digits}f}"
