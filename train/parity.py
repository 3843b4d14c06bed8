"""Does training compute what serving will? Measured on the run's own rows before its first step.

A draft that is trained on one thing and served with another looks right in training and is hardly ever accepted. Four things are compared, in the
run's own process, with its own target, rows and draft:

    features     tapped layer outputs of a packed row, and of the target reading the same document as in serving: prompt, then rounds
    logits       the draft's training form and the drafter at work, on the same features, in fp32
    block mask   (GPU) the training form as it will run, against the dense fp32 one
    labels       how often the token a slot is trained on is the target's own likeliest, and how often the token before or after it is
"""

import copy
import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..dflash.anchors import draw_anchors, valid_anchors
from ..dflash.context import Taps
from ..dflash.drafter import DFlashDrafter
from ..dflash.hf_target import HFTarget
from ..dflash.model import Blocks, DraftModel
from ..kernels.attention import padded_anchors
from ..quant.quality import head_weight
from .distill_data import DOCUMENTS, IDS, POSITIONS, SUPERVISED
from .slot_pass import run_target

ANCHORS = 8              # of one document
DOCUMENT_TOKENS = 384    # of the document that is looked at
CHUNKS = (1, 8, 3, 5)    # tokens that serving reads at a time after the prompt
LOGITS_BOUND = 1e-4      # fp32, the same terms in another order
MASK_BOUND = 0.05        # bf16 against fp32, through all layers
FEATURES_BOUND = {torch.float32: 1e-3, torch.float64: 1e-6, torch.bfloat16: 0.05}   # median over tokens; a router's near tie may move single ones


@dataclass(frozen=True, kw_only=True)
class Parity:
    """Relative distances of the two forms, and the shares of labels that are the target's choice (with the token before, and after, in their place)."""

    features: float
    features_bound: float
    logits: float
    block_mask: float | None
    labels: float
    labels_before: float
    labels_after: float

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        mask = "" if self.block_mask is None else f", block mask {self.block_mask:.1e} (bound {MASK_BOUND})"
        return (f"training against serving: features {self.features:.1e} (bound {self.features_bound}), draft logits {self.logits:.1e} "
                f"(bound {LOGITS_BOUND}){mask}, labels {100 * self.labels:.1f} % the target's own choice (a token early "
                f"{100 * self.labels_before:.1f} %, late {100 * self.labels_after:.1f} %)")

    def require(self) -> None:
        """ValueError that names what differs."""
        for what, distance, bound in (("tapped features", self.features, self.features_bound), ("draft logits", self.logits, LOGITS_BOUND),
                                      ("block mask", self.block_mask, MASK_BOUND)):
            if distance is not None and not distance <= bound:
                raise ValueError(f"train dflash-distill: {what}: the training form is {distance:.2e} from the serving form, bound {bound}. "
                                 "A draft trained like this would not be accepted in serving. This is an error of the target's code or of kilotok: report it.")
        if not self.labels >= max(self.labels_before, self.labels_after):
            raise ValueError(f"train dflash-distill: the labels are the target's choice in {100 * self.labels:.1f} %, and shifted by one token in "
                             f"{100 * max(self.labels_before, self.labels_after):.1f} %: hidden states and tokens are not aligned. This is an error of the "
                             "target's code or of kilotok: report it.")


@torch.no_grad()
def measure_parity(draft: DraftModel, target: nn.Module, row_4S: Tensor, *, max_length: int, autocast: torch.dtype | None, flex_rows: Tensor | None = None,
                   num_anchors: int = 0) -> Parity:
    """Compare the two forms on the longest document of a row.

    Shapes: row_4S as `pack_row` makes it, on the target's device; flex_rows [B, 4, S]: also check the block mask, on rows and anchors as in training.
    """
    row = row_4S.unsqueeze(0)
    document = _longest_document(row_4S)
    start, length = int(document[0]), min(len(document), DOCUMENT_TOKENS)
    ids = row[0, IDS, start:start + length]
    prompt = max(1, int((row[0, SUPERVISED, start:start + length] == 0).sum()))
    features, hidden = run_target(target, row[:, IDS], documents_BS=row[:, DOCUMENTS], positions_BS=row[:, POSITIONS], layer_ids=draft.config.target_layer_ids)
    served = _serving_features(draft, target, ids.tolist(), prompt=prompt, max_length=max_length)
    here = slice(start, start + length)
    taps = len(draft.config.target_layer_ids)
    a, b = (f.double().unflatten(-1, (taps, -1)) for f in (features[0, here], served))
    distance = float(((a - b).norm(dim=-1) / b.norm(dim=-1)).median(dim=0).values.max())
    same_features = features.clone()
    same_features[0, here] = served
    labels = _label_shares(hidden[0, here], ids, head_VD=head_weight(target), prompt=prompt)
    dtype = features.dtype
    return Parity(features=distance, features_bound=FEATURES_BOUND.get(dtype, 0.05),
                  logits=_logits_distance(draft, target, row, same_features, start=start, length=length, prompt=prompt),
                  block_mask=None if flex_rows is None else _mask_distance(draft, target, flex_rows, num_anchors=num_anchors, autocast=autocast),
                  labels=labels[0], labels_before=labels[1], labels_after=labels[2])


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
    more = padded_anchors(anchors.shape[1], block_size=draft.config.block_size) - anchors.shape[1]
    anchors, is_valid = nn.functional.pad(anchors, (0, more)), nn.functional.pad(is_valid, (0, more))
    embedding: Tensor = target.get_input_embeddings().weight.detach()  # type: ignore[operator]
    with torch.autocast(ids.device.type, dtype=autocast or torch.bfloat16, enabled=autocast is not None):
        got = draft(features, blocks=Blocks(anchors_BA=anchors, ids_BA=ids.gather(1, anchors), positions_BS=positions), embedding_VD=embedding, flex=True)
    few = torch.linspace(0, int(is_valid[0].sum()) - 1, 4 * ANCHORS, device=ids.device).long().unique()
    some = anchors[:1, few]
    expected = copy.deepcopy(draft).float()(features[:1].float(), blocks=Blocks(anchors_BA=some, ids_BA=ids[:1].gather(1, some), positions_BS=positions[:1]),
                                            embedding_VD=embedding.float())
    difference = got[:1, few, 1:].double() - expected[:, :, 1:].double()
    return float(difference.norm() / expected[:, :, 1:].double().norm())


def _label_shares(hidden_TD: Tensor, ids: Tensor, *, head_VD: Tensor, prompt: int) -> tuple[float, float, float]:
    """Shares of response tokens that are the target's likeliest after the tokens before them; then with the token before and the token after in their place."""
    places = torch.arange(prompt, len(ids), device=ids.device)
    choice = nn.functional.linear(hidden_TD[places - 1].to(head_VD.dtype), head_VD).argmax(-1)
    shares = []
    for shift in (0, -1, 1):
        inside = (places + shift < len(ids)) & (places + shift >= 0)
        shares.append(float((choice[inside] == ids[places[inside] + shift]).float().mean()) if bool(inside.any()) else 0.0)
    return shares[0], shares[1], shares[2]
