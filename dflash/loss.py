"""The loss of masked slots: cross-entropy to the token, KL to the target's own distribution, or both, weighted by slot.

A slot is worth something only if all slots before it are right, so later ones weigh less. How much less is said in advance,

    decay    w_n = exp(-(n - 1) / gamma)

or by the draft itself. With q_n its probability of the label of slot n and r_n = (1 - alpha) q_n + alpha,

    dpace    w_n = sum over m >= n of (r_1 r_2 ... r_m), detached

which is how much of the expected accepted length hangs on slot n. Slots that do not count take no part in product or sum. Here the
sum of w * loss is divided by the sum of w, under either weighting, so the scale of the loss and the learning rate that fits it do
not depend on how many anchors or slots a step has; public trainers divide the dpace sum by the batch size instead, so their loss
grows with the number of anchors and with the draft's confidence.

Losses are per row (`kernels.loss.slot_losses`, which never holds [rows, vocabulary]), so weights are plain torch behind it.

Legend: B rows, A anchors, N draft block length, T slots that train, D hidden, V vocabulary, U draft vocabulary (V where it is not reduced).
Source: DFlash, arXiv 2602.06036, for the decay; D-PACE, arXiv 2605.18810.
"""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..kernels.loss import slot_losses

PUBLISHED_GAMMAS = ((8, 4.0), (10, 5.0), (16, 7.0))   # block size, gamma (DFlash)


@dataclass(frozen=True, kw_only=True)
class SlotLossOptions:
    """What the masked slots are trained on."""

    ce_weight: float = 1.0                           # of the cross-entropy to the token of the response
    kl_weight: float = 0.0                           # of KL(target || draft), the target's whole distribution there
    z_weight: float = 0.0                            # of logsumexp(logits)**2, which keeps logits from drifting
    weighting: Literal["decay", "dpace"] = "decay"   # of slots: fixed, or by the draft's own confidence
    decay_gamma: float | Literal["auto"] | None = "auto"   # decay: slot n weighs exp(-(n - 1) / gamma); auto: by block size; null: all the same
    dpace_alpha: float = 0.5                         # dpace: confidence q counts as (1 - alpha) * q + alpha; 1 weighs as if sure of every slot
    chunk_rows: int = 8192                           # slots whose logits exist at one time

    def __post_init__(self) -> None:
        for name, value in (("decay_gamma (null for no decay)", self.decay_gamma), ("chunk_rows", self.chunk_rows)):
            if not (value is None or value == "auto") and not 0 < value < math.inf:
                raise ValueError(f"loss.{name}: must be positive; got {value}.")
        weights = (self.ce_weight, self.kl_weight, self.z_weight)
        if not all(0 <= w < math.inf for w in weights) or not self.ce_weight + self.kl_weight:
            raise ValueError(f"loss: ce_weight, kl_weight and z_weight must not be negative, and one of the first two must be positive; got {weights}.")
        if self.weighting not in ("decay", "dpace"):
            raise ValueError(f"loss.weighting: must be decay or dpace; got {self.weighting!r}.")
        if self.weighting == "dpace" and (self.kl_weight or not 0 < self.dpace_alpha <= 1):
            raise ValueError(f"loss.weighting dpace: is defined for cross-entropy alone, with dpace_alpha in (0, 1]; got kl_weight {self.kl_weight} and "
                             f"dpace_alpha {self.dpace_alpha}. Set kl_weight to 0, or weighting to decay.")


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


def default_gamma(block_size: int) -> float:
    """Gamma of the decay for a block of so many tokens, the anchor counted.

    4 up to a block of 8, 5 at 10, 7 at 16, which are the published values, straight lines between them, and 7 above.
    """
    if block_size <= PUBLISHED_GAMMAS[0][0]:
        return PUBLISHED_GAMMAS[0][1]
    for (low, first), (high, last) in pairwise(PUBLISHED_GAMMAS):
        if block_size <= high:
            return first + (last - first) * (block_size - low) / (high - low)
    return PUBLISHED_GAMMAS[-1][1]


def dpace_weights(label_prob_RN: Tensor, *, counts_RN: Tensor, alpha: float) -> Tensor:
    """[R, N]: the D-PACE weight of each slot of R blocks; 0 where it does not count.

    Shapes: label_prob_RN the draft's probability of the label, anything where counts_RN (bool) is false.
    """
    factors = torch.where(counts_RN, (1.0 - alpha) * label_prob_RN + alpha, 1.0)
    prefixes = torch.where(counts_RN, factors.cumprod(-1), 0.0)
    return torch.where(counts_RN, prefixes.flip(-1).cumsum(-1).flip(-1), 0.0)


def slot_sums(
    hidden_BAND: Tensor, *, targets: SlotTargets, head_VD: Tensor, target_hidden_BSD: Tensor, options: SlotLossOptions, draft_ids_U: Tensor | None = None,
    target_head_VD: Tensor | None = None, multiplier: float = 1.0, softcap: float | None = None, target_multiplier: float = 1.0,
    target_softcap: float | None = None,
) -> SlotSums:
    """Loss and accuracy of the slots that count.

    Shapes: hidden_BAND from the draft; head_VD and target_hidden_BSD (after the final norm) of the target. With a reduced draft
        vocabulary draft_ids_U holds the target's ids of its rows, int64 and ascending, and head_VD those rows only, [U, D]. A draft with a
        head of its own has that in head_VD, and the target's, the same rows, in target_head_VD.
    Numerics: logits in the hidden states' dtype, or autocast's; softmax, weights and sums in fp32 (fp64 for fp64 input). multiplier and
        softcap as in `slot_losses`. No counting slot gives a zero loss that is still connected to the draft, so that no rank is left
        out of the backward pass.
    Gradient: of the loss by hidden_BAND only.
    Reduced vocabulary: KL is to the target renormalized over the draft's rows. A slot whose label has no row takes no part in the loss, but
        stands in count_N, and never in correct_N.
    """
    slots = hidden_BAND.shape[2]
    labels, in_draft = targets.labels, targets.counts
    if draft_ids_U is not None:
        if len(draft_ids_U) != len(head_VD):
            raise ValueError(f"slot_sums: head_VD must hold the rows of draft_ids_U; got {len(head_VD)} rows and {len(draft_ids_U)} ids.")
        labels = torch.searchsorted(draft_ids_U, targets.labels).clamp(max=len(draft_ids_U) - 1)
        in_draft = targets.counts & (draft_ids_U[labels] == targets.labels)
    rows = in_draft.flatten().nonzero().squeeze(1)
    teacher_TD = None
    if options.kl_weight:
        batch_of_row = rows // (slots * hidden_BAND.shape[1])
        teacher_TD = target_hidden_BSD.flatten(0, 1)[batch_of_row * target_hidden_BSD.shape[1] + targets.before.flatten()[rows]]
    losses = slot_losses(hidden_BAND.flatten(0, 2).index_select(0, rows), head_VD=head_VD, labels_T=labels.flatten()[rows], teacher_TD=teacher_TD,
                         teacher_head_VD=target_head_VD, ce_weight=options.ce_weight, kl_weight=options.kl_weight, z_weight=options.z_weight,
                         multiplier=multiplier, softcap=softcap, teacher_multiplier=target_multiplier, teacher_softcap=target_softcap,
                         chunk_rows=options.chunk_rows)
    if options.weighting == "dpace":
        label_prob = torch.zeros(in_draft.numel(), dtype=losses.label_log_prob_T.dtype, device=rows.device)
        label_prob[rows] = losses.label_log_prob_T.exp()
        weights_T = dpace_weights(label_prob.view(-1, slots), counts_RN=in_draft.view(-1, slots), alpha=options.dpace_alpha).flatten()[rows]
    else:
        gamma = default_gamma(slots) if options.decay_gamma == "auto" else options.decay_gamma
        weights_T = slot_weights(slots, gamma=gamma, device=rows.device)[rows % slots]
    return SlotSums(loss=(losses.loss_T * weights_T).sum(), weight=weights_T.sum(), count_N=targets.counts.flatten(0, 1).sum(0),
                    correct_N=torch.bincount(rows[losses.is_right_T] % slots, minlength=slots))
