"""Acceptance length on many texts at once, from the training form.

Greedy decoding with a draft writes the target's own text whatever the draft says, so given that text the rounds are known as soon as it is known which slots
are right at every anchor: a round at anchor p accepts the leading right slots and moves on by one more. One pass of target and draft over a text gives all of
it, where the draft-verify loop runs a target forward a round. It is the same walk as the loop's as long as training computes what serving does (`parity.py`),
up to the last bits of the target's logits.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..dflash.generate import Round
from ..dflash.model import Blocks, DraftModel
from ..quant.quality import head_weight
from .distill_data import DOCUMENTS, IDS, POSITIONS, pack_row
from .responses import Response
from .slot_pass import run_target

CHUNK_BLOCKS = 512   # whose slots' logits exist at one time


@torch.no_grad()
def walk_rounds(draft: DraftModel, target: nn.Module, text: Response) -> list[Round]:
    """The rounds in which a draft-verify loop would have written `text`, the target's greedy answer."""
    row = pack_row([text], length=len(text.prompt) + len(text.response), pad_id=0).unsqueeze(0).to(next(target.parameters()).device)
    ids, positions = row[:, IDS], row[:, POSITIONS]
    features, _ = run_target(target, ids, documents_BS=row[:, DOCUMENTS], positions_BS=positions, layer_ids=draft.config.target_layer_ids)
    anchors = torch.arange(len(text.prompt), len(text.prompt) + len(text.response) - 1, device=ids.device).unsqueeze(0)
    if not anchors.numel():
        return rounds_of(text.response, is_right=[])
    dtype = next(target.parameters()).dtype
    with torch.autocast(ids.device.type, dtype=dtype, enabled=dtype not in (torch.float32, torch.float64)):
        hidden = draft(features, blocks=Blocks(anchors_BA=anchors, ids_BA=ids.gather(1, anchors), positions_BS=positions),
                       embedding_VD=target.get_input_embeddings().weight)[0]  # type: ignore[operator]
    return rounds_of(text.response, is_right=_right_slots(draft, hidden, anchors[0], ids[0], head_VD=head_weight(target)).tolist())


def _right_slots(draft: DraftModel, hidden_AND: Tensor, anchors_A: Tensor, ids_S: Tensor, *, head_VD: Tensor) -> Tensor:
    """bool [A, N - 1]: slots 1.. whose likeliest token is the text's; beyond the text none is."""
    head = draft.head_rows(head_VD)
    places = anchors_A.unsqueeze(1) + torch.arange(1, hidden_AND.shape[1], device=anchors_A.device)
    labels = ids_S[places.clamp(max=len(ids_S) - 1)]
    chosen = torch.cat([draft.logits(h, head_UD=head).argmax(-1) for h in hidden_AND[:, 1:].split(CHUNK_BLOCKS)])
    if draft.draft_ids is not None:
        chosen = draft.draft_ids[chosen]
    return (chosen == labels) & (places < len(ids_S))


def rounds_of(text: Sequence[int], *, is_right: Sequence[Sequence[bool]]) -> list[Round]:
    """The walk over a text: its first token is the prefill's; is_right[t] says of the block anchored at text[t] which slots are right."""
    rounds = [Round(tokens=(text[0],), num_drafted=0, num_accepted=0, is_prefill=True)]
    anchor = 0
    while anchor < len(text) - 1:
        slots = is_right[anchor]
        drafted = min(len(slots), len(text) - anchor - 2)   # as in the loop: what lies beyond the last token but one could not be used
        accepted = next((n for n, right in enumerate(slots[:drafted]) if not right), drafted)
        rounds.append(Round(tokens=tuple(text[anchor + 1:anchor + 2 + accepted]), num_drafted=drafted, num_accepted=accepted))
        anchor += accepted + 1
    return rounds
