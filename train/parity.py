"""Does training compute what serving will? Measured on the run's own rows before its first step.

A draft that is trained on one thing and served with another looks right in training and is hardly ever accepted. Four things are compared, in the
run's own process, with its own target, rows and draft:

    features     tapped layer outputs of a packed row, and of the target reading the same document as in serving: prompt, then rounds
    logits       the draft's training form and the drafter at work, on the same features, in fp32
    block mask   (GPU) the training form with its block mask, layers not compiled yet, against the dense fp32 one
    labels       how often the token a slot is trained on is the target's own likeliest, and how often the token before or after it is; where
                 all answers are sampled, how much less probable they are than samples of the target at that temperature, which need not be likely
"""

import copy
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..dflash.anchors import draw_anchors, fill_tiles, valid_anchors
from ..dflash.context import Taps
from ..dflash.drafter import DFlashDrafter
from ..dflash.hf_target import HFTarget
from ..dflash.model import Blocks, DraftModel
from ..quant.quality import head_weight
from .distill_data import DOCUMENTS, IDS, POSITIONS, SUPERVISED
from .slot_pass import run_target

LABELS_BOUND = 0.5       # of a greedy answer: 91.7 % was the lowest seen, in bf16; text of another origin may have any
LABEL_TOKENS = 4         # of an answer that may speak for the greedy ones
LEAST_TEMPERATURE = 0.5  # at which sampled answers are looked at: colder ones are no surprise there, and rounding counts less than at their own
SURPRISE_BOUND, SURPRISE_ERRORS = 0.5, 4   # of sampled answers: nats a token, for a server's own rounding, and standard errors
ANCHORS = 8              # of one document
DOCUMENT_TOKENS = 384    # of the document that is looked at
CHUNKS = (1, 8, 3, 5)    # tokens that serving reads at a time after the prompt
LOGITS_BOUND = 1e-4      # fp32, the same terms in another order
MASK_BOUND = 0.05        # bf16 against fp32, through all layers
FEATURES_BOUND = {torch.float32: 1e-3, torch.float64: 1e-6, torch.bfloat16: 0.05}   # median over tokens; a router's near tie may move single ones


@dataclass(frozen=True, kw_only=True)
class Parity:
    """Relative distances of the two forms, and the shares of labels that are the target's choice (with the token before, and after, in their place).

    surprise: of sampled answers, nats a token by which they are less probable than the target's own samples are on average; None for greedy ones.
    """

    features: float
    features_bound: float
    logits: float
    block_mask: float | None
    labels: float
    labels_before: float
    labels_after: float
    is_greedy: bool
    surprise: float | None
    surprise_bound: float

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        mask = "" if self.block_mask is None else f", block mask {self.block_mask:.1e} (bound {MASK_BOUND})"
        labels = (f"labels {100 * self.labels:.1f} % the target's own choice (a token early {100 * self.labels_before:.1f} %, late "
                  f"{100 * self.labels_after:.1f} %)")
        if self.surprise is not None:
            labels += f", sampled, {self.surprise:.2f} nats from the target's own samples (bound {self.surprise_bound:.2f})"
        return (f"training against serving: features {self.features:.1e} (bound {self.features_bound}), draft logits {self.logits:.1e} "
                f"(bound {LOGITS_BOUND}){mask}, {labels}")

    def require(self) -> None:
        """ValueError that names what differs."""
        for what, distance, bound in (("tapped features", self.features, self.features_bound), ("draft logits", self.logits, LOGITS_BOUND),
                                      ("block mask", self.block_mask, MASK_BOUND)):
            if distance is not None and not distance <= bound:
                raise ValueError(f"train dflash-distill: {what}: the training form is {distance:.2e} from the serving form, bound {bound}. "
                                 "A draft trained like this would not be accepted in serving. This is an error of the target's code or of kilotok: report it.")
        shifted = max(self.labels_before, self.labels_after)
        if self.is_greedy and not max(self.labels, shifted) >= LABELS_BOUND:
            raise ValueError(f"train dflash-distill: the labels should be greedy answers, and are the target's choice in {100 * self.labels:.1f} %, bound "
                             f"{100 * LABELS_BOUND:.0f} %: another model wrote them. Check which one data.endpoint serves, and remove "
                             "the answers that it gave.")
        fault = "hidden states and tokens are not aligned. This is an error of the target's code or of kilotok: report it."
        if self.is_greedy and not self.labels >= shifted:
            raise ValueError(f"train dflash-distill: the labels are the target's choice in {100 * self.labels:.1f} %, and shifted by one token in "
                             f"{100 * shifted:.1f} %: {fault}")
        if self.surprise is not None and not self.surprise <= self.surprise_bound:
            raise ValueError(f"train dflash-distill: the labels are sampled answers, and {self.surprise:.2f} nats a token less probable than the target's own, "
                             f"bound {self.surprise_bound:.2f}: another model wrote them, or {fault}")


@torch.no_grad()
def measure_parity(draft: DraftModel, target: nn.Module, row_4S: Tensor, *, max_length: int, autocast: torch.dtype | None, flex_rows: Tensor | None = None,
                   num_anchors: int = 0, temperatures: Sequence[float] = (0.0,), more_rows: Sequence[Tensor] = ()) -> Parity:
    """Compare the two forms on the longest document of a row.

    Shapes: row_4S as `pack_row` makes it, on the target's device; flex_rows [B, 4, S]: also check the block mask, on rows and anchors as in training.
    temperatures: of the answers. Of greedy ones among others the labels are those of the document that looks most greedy, in more_rows [4, S] too.
    """
    row = row_4S.unsqueeze(0)
    document = _longest_document(row_4S)
    start, length = int(document[0]), min(len(document), DOCUMENT_TOKENS)
    ids = row[0, IDS, start:start + length]
    prompt = max(1, int((row[0, SUPERVISED, start:start + length] == 0).sum()))
    features, _ = run_target(target, row[:, IDS], documents_BS=row[:, DOCUMENTS], positions_BS=row[:, POSITIONS], layer_ids=draft.config.target_layer_ids)
    served = _serving_features(draft, target, ids.tolist(), prompt=prompt, max_length=max_length)
    here = slice(start, start + length)
    taps = len(draft.config.target_layer_ids)
    a, b = (f.double().unflatten(-1, (taps, -1)) for f in (features[0, here], served))
    distance = float(((a - b).norm(dim=-1) / b.norm(dim=-1)).median(dim=0).values.max())
    same_features = features.clone()
    same_features[0, here] = served
    dtype = features.dtype
    return Parity(features=distance, features_bound=FEATURES_BOUND.get(dtype, 0.05),
                  logits=_logits_distance(draft, target, row, same_features, start=start, length=length, prompt=prompt),
                  block_mask=None if flex_rows is None else _mask_distance(draft, target, flex_rows, num_anchors=num_anchors, autocast=autocast),
                  **_labels(target, [row_4S, *more_rows], temperatures=temperatures, layer_ids=draft.config.target_layer_ids))


def _longest_document(row_4S: Tensor) -> Tensor:
    """Row indices of the document with the most tokens (the later of two), so that packing matters where it can."""
    documents = row_4S[DOCUMENTS]
    sizes = documents[documents >= 0].bincount()
    number = len(sizes) - 1 - int(sizes.flip(0).argmax())
    return (documents == number).nonzero().flatten()


def _serving_features(draft: DraftModel, target: nn.Module, ids: list[int], *, prompt: int, max_length: int) -> Tensor:
    """Tapped features [T, F] of a document that the target reads as a server does: the prompt, then rounds with wrong proposals that are taken back."""
    parts = []
    with Taps(target, layer_ids=draft.config.target_layer_ids) as taps:
        reader = HFTarget(target, taps=taps, max_length=max_length)
        size, turn, start = prompt, 0, 0
        while start < len(ids):
            size = min(size, len(ids) - start)
            wrong = [ids[0]] if turn % 2 and start + size + 1 < max_length else []
            parts.append(reader.read([*ids[start:start + size], *wrong]).features_TF[:size])
            start += size
            reader.rewind(start)
            size, turn = CHUNKS[turn % len(CHUNKS)], turn + 1
    return torch.cat(parts)


def _logits_distance(draft: DraftModel, target: nn.Module, row: Tensor, features_BSF: Tensor, *, start: int, length: int, prompt: int) -> float:
    """Largest difference of a logit over the largest logit, of slots 1.. at some anchors of the document, both forms on the same features."""
    draft = copy.deepcopy(draft).float()
    embedding, head = (w.detach().float() for w in (target.get_input_embeddings().weight, head_weight(target)))  # type: ignore[operator]
    last = length - 1
    places = sorted({prompt + round(i * (last - prompt) / max(1, ANCHORS - 1)) for i in range(ANCHORS)} - {0}) or [last]
    anchors = torch.tensor([[start + p for p in places]], device=row.device)
    hidden = draft(features_BSF.float(), blocks=Blocks(anchors_BA=anchors, ids_BA=row[:, IDS].gather(1, anchors), positions_BS=row[:, POSITIONS]),
                   embedding_VD=embedding)
    drafter = DFlashDrafter(draft, embedding_VD=embedding, head_VD=head)
    observed, largest, difference = 0, 0.0, 0.0
    for place, form in zip(places, hidden[0], strict=True):
        drafter.observe(features_BSF[0, start + observed:start + place].float())
        observed = place
        served = drafter.logits(int(row[0, IDS, start + place]))
        trained = draft.logits(form[1:], head_UD=draft.head_rows(head))
        if draft.draft_ids is not None:
            served = served[:, draft.draft_ids]
        largest, difference = max(largest, float(served.abs().max())), max(difference, float((served - trained).abs().max()))
    return difference / largest


def _mask_distance(draft: DraftModel, target: nn.Module, rows_B4S: Tensor, *, num_anchors: int, autocast: torch.dtype | None) -> float:
    """RMS distance of the hidden states of slots 1.., relative to their RMS."""
    ids, documents, positions = rows_B4S[:, IDS], rows_B4S[:, DOCUMENTS], rows_B4S[:, POSITIONS]
    features, _ = run_target(target, ids, documents_BS=documents, positions_BS=positions, layer_ids=draft.config.target_layer_ids)
    valid = valid_anchors(documents, supervised_BS=rows_B4S[:, SUPERVISED].bool(), positions_BS=positions)
    anchors, is_valid = draw_anchors(valid, num_anchors=num_anchors, generator=torch.Generator(ids.device).manual_seed(0))
    anchors, is_valid = fill_tiles(anchors, is_valid, block_size=draft.config.block_size)
    embedding: Tensor = target.get_input_embeddings().weight.detach()  # type: ignore[operator]
    with torch.autocast(ids.device.type, dtype=autocast or torch.bfloat16, enabled=autocast is not None):
        got = draft(features, blocks=Blocks(anchors_BA=anchors, ids_BA=ids.gather(1, anchors), positions_BS=positions), embedding_VD=embedding, flex=True)
    few = torch.linspace(0, int(is_valid[0].sum()) - 1, 4 * ANCHORS, device=ids.device).long().unique()
    some = anchors[:1, few]
    expected = copy.deepcopy(draft).float()(features[:1].float(), blocks=Blocks(anchors_BA=some, ids_BA=ids[:1].gather(1, some), positions_BS=positions[:1]),
                                            embedding_VD=embedding.float())
    difference = got[:1, few, 1:].double() - expected[:, :, 1:].double()
    return float(difference.norm() / expected[:, :, 1:].double().norm())


def _labels(target: nn.Module, rows: Sequence[Tensor], *, temperatures: Sequence[float], layer_ids: tuple[int, ...]) -> dict[str, Any]:
    """What Parity says of labels.

    If all answers are greedy, the first row's longest document speaks for them; if some are, the one with the highest share under any of the three
    alignments does, so that a shift is not hidden by a text that it suits; if none is, all of the first row do.
    """
    is_greedy, is_mixed = 0 in temperatures, len(set(temperatures)) > 1
    sampled = [] if is_greedy else sorted({max(t, LEAST_TEMPERATURE) for t in temperatures})
    found = []
    for row in rows if is_greedy and is_mixed else rows[:1]:
        _, hidden = run_target(target, row[None, IDS], documents_BS=row[None, DOCUMENTS], positions_BS=row[None, POSITIONS], layer_ids=layer_ids)
        numbers = range(int(row[DOCUMENTS].max()) + 1)
        documents = [(row[DOCUMENTS] == n).nonzero().flatten() for n in numbers] if is_mixed or not is_greedy else [_longest_document(row)]
        found += [_label_scores(hidden[0, d], row[IDS, d], head_VD=head_weight(target), prompt=int((row[SUPERVISED, d] == 0).sum()),
                                temperatures=sampled) for d in documents]
    said: dict[str, Any] = {"is_greedy": is_greedy, "surprise": None, "surprise_bound": SURPRISE_BOUND}
    if is_greedy:
        least = min(LABEL_TOKENS, max(right.shape[-1] for right, _ in found))
        chosen = max((right for right, _ in found if right.shape[-1] >= least), key=lambda right: (float(right.mean(-1).max()), right.shape[-1]))
    else:
        chosen = torch.cat([right for right, _ in found], dim=-1)
        # a document's temperature is not kept: the one that suits it best speaks for it
        surprise, variance = torch.stack([parts[:, parts[0].argmin()] for _, parts in found]).sum(0).tolist()
        said |= {"surprise": surprise / chosen.shape[-1], "surprise_bound": SURPRISE_BOUND + SURPRISE_ERRORS * variance ** 0.5 / chosen.shape[-1]}
    shares = chosen.mean(-1).tolist()
    return {**said, "labels": shares[0], "labels_before": shares[1], "labels_after": shares[2]}


def _label_scores(hidden_TD: Tensor, ids_T: Tensor, *, head_VD: Tensor, prompt: int, temperatures: Sequence[float]) -> tuple[Tensor, Tensor]:
    """(right [3, P], surprise [2, temperatures]), fp64, of P tokens of a response but its last.

    right: is the token there, before it or after it the target's likeliest there. surprise: at each temperature, the sum over tokens of -log p(token)
    less the entropy of p, which is 0 on average for samples of p; and its variance under p.
    """
    places = torch.arange(max(1, prompt), min(len(ids_T) - 1, prompt + DOCUMENT_TOKENS), device=ids_T.device)
    logits = nn.functional.linear(hidden_TD[places - 1].to(head_VD.dtype), head_VD).float()
    right = torch.stack([logits.argmax(-1) == ids_T[places + shift] for shift in (0, -1, 1)]).double()
    surprise = torch.zeros(2, len(temperatures), dtype=torch.float64, device=ids_T.device)
    for number, temperature in enumerate(temperatures):
        logs = (logits / temperature).log_softmax(-1)
        mean = (logs.exp() * logs).sum(-1)
        surprise[0, number] = (mean - logs.gather(-1, ids_T[places, None])[:, 0]).double().sum()
        surprise[1, number] = (logs.exp() * (logs - mean[:, None]).square()).sum(-1).double().sum()
    return right, surprise
