"""The loss of masked slots: cross-entropy to the token, or KL to the target's own distribution, weighted by slot.

A slot is worth something only if all slots before it are right, so later ones weigh less: exp(-(n - 1) / gamma). The logits
exist a chunk of rows at a time; forward keeps hidden states, backward computes the logits again.

Legend: B rows, A anchors, N draft block length, T slots that count, D hidden, V vocabulary.
Source: DFlash, arXiv 2602.06036, for the decay.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

LossKind = Literal["ce", "kl"]


class SlotTargets(NamedTuple):
    """What the slots of a step should say, [B, A, N] each; slot 0 and slots outside their document never count."""

    labels: Tensor        # token at anchor + n
    counts: Tensor        # bool: the slot is trained on
    before: Tensor        # index in the row of the token before it, whose target logits predict the label


class SlotSums(NamedTuple):
    """Sums over the counting slots, fp32; numerator and denominator apart, so that ranks can be added up."""

    loss: Tensor          # weighted
    weight: Tensor
    correct_N: Tensor     # slots whose likeliest token is the label, by slot
    count_N: Tensor


def slot_targets(
    ids_BS: Tensor, *, documents_BS: Tensor, supervised_BS: Tensor, anchor_index_BA: Tensor, anchor_valid_BA: Tensor, block_size: int,
) -> SlotTargets:
    """Labels of the slots: the token AT anchor + n, as long as it belongs to the anchor's document and is supervised."""
    batch, length = ids_BS.shape
    index = anchor_index_BA.unsqueeze(-1) + torch.arange(block_size, device=ids_BS.device)
    inside = index < length
    index = index.clamp(max=length - 1)
    flat = index.view(batch, -1)
    labels = ids_BS.gather(1, flat).view(index.shape)
    documents = documents_BS.gather(1, flat).view(index.shape)
    counts = inside & supervised_BS.gather(1, flat).view(index.shape) & (documents == documents[..., :1]) & anchor_valid_BA.unsqueeze(-1)
    counts = counts.cumprod(-1).bool()     # a gap in the supervision ends the block
    counts[..., 0] = False
    return SlotTargets(labels=labels, counts=counts, before=(index - 1).clamp(min=0))


def slot_weights(block_size: int, *, gamma: float | None, device: torch.device) -> Tensor:
    """[N]: 0 for the anchor, exp(-(n - 1) / gamma) for slot n; all 1 without a decay."""
    slots = torch.arange(block_size, device=device, dtype=torch.float32)
    weights = torch.ones_like(slots) if gamma is None else torch.exp(-(slots - 1) / gamma)
    weights[0] = 0
    return weights


def slot_sums(
    hidden_BAND: Tensor, *, targets: SlotTargets, head_VD: Tensor, target_hidden_BSD: Tensor, kind: LossKind, gamma: float | None, chunk_rows: int,
) -> SlotSums:
    """Loss and accuracy of the slots that count.

    Shapes: hidden_BAND from the draft; head_VD and target_hidden_BSD (after the final norm) of the target.
    Numerics: logits in the hidden states' dtype, softmax and sums in fp32 (fp64 for fp64 input). No counting slot gives a
        zero loss that is still connected to the draft, so that no rank is left out of the backward pass.
    """
    slots = hidden_BAND.shape[2]
    weights_N = slot_weights(slots, gamma=gamma, device=hidden_BAND.device)
    rows = targets.counts.flatten().nonzero().squeeze(1)
    slot_of_row = rows % slots
    hidden_TD = hidden_BAND.flatten(0, 2)[rows]
    labels_T, weights_T = targets.labels.flatten()[rows], weights_N[slot_of_row]
    batch_of_row = rows // (slots * hidden_BAND.shape[1])
    before_T = batch_of_row * target_hidden_BSD.shape[1] + targets.before.flatten()[rows]
    loss = hidden_BAND.flatten()[:1].sum().to(torch.promote_types(hidden_BAND.dtype, torch.float32)) * 0.0   # the connection
    correct = []
    for start in range(0, len(rows), chunk_rows):
        part = slice(start, start + chunk_rows)
        teacher = target_hidden_BSD.flatten(0, 1)[before_T[part]] if kind == "kl" else None
        chunk_loss, chunk_correct = checkpoint(_chunk, hidden_TD[part], head_VD, labels_T[part], weights_T[part], teacher, use_reentrant=False)
        loss = loss + chunk_loss
        correct.append(chunk_correct)
    right = torch.cat(correct) if correct else torch.zeros(0, dtype=torch.bool, device=rows.device)
    return SlotSums(loss=loss, weight=weights_T.sum(), count_N=torch.bincount(slot_of_row, minlength=slots),
                    correct_N=torch.bincount(slot_of_row[right], minlength=slots))


def _chunk(hidden_TD: Tensor, head_VD: Tensor, labels_T: Tensor, weights_T: Tensor, teacher_TD: Tensor | None) -> tuple[Tensor, Tensor]:
    logits = F.linear(hidden_TD, head_VD)
    wide = torch.promote_types(logits.dtype, torch.float32)
    log_q = logits.to(wide).log_softmax(-1)
    if teacher_TD is None:
        loss_T = F.nll_loss(log_q, labels_T, reduction="none")
    else:
        with torch.no_grad():
            log_p = F.linear(teacher_TD, head_VD).to(wide).log_softmax(-1)
        loss_T = F.kl_div(log_q, log_p, log_target=True, reduction="none").sum(-1)
    return (loss_T * weights_T).sum(), logits.argmax(-1) == labels_T
