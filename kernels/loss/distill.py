"""KL to a teacher and cross-entropy to labels, from hidden states, a chunk of rows at a time.

The logits of a chunk exist only while that chunk is worked on: forward keeps its hidden states, backward recomputes the
logits. Memory is chunk_rows * V floats twice (student, teacher) instead of T * V; the price is one more head product.

Legend: T token rows, D hidden, V vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class DistillationSums(NamedTuple):
    """Sums over the T rows, in nats, fp32 scalars; `kl` is KL(teacher || student)."""

    kl: Tensor
    cross_entropy: Tensor
    teacher_cross_entropy: Tensor


def _chunk_sums(hidden_TD: Tensor, teacher_hidden_TD: Tensor, head_VD: Tensor, teacher_head_VD: Tensor, labels_T: Tensor) -> Tensor:
    log_q_TV = F.linear(hidden_TD, head_VD).float().log_softmax(-1)
    with torch.no_grad():
        log_p_TV = F.linear(teacher_hidden_TD, teacher_head_VD).float().log_softmax(-1)
        teacher_ce = F.nll_loss(log_p_TV, labels_T, reduction="sum")
    kl = F.kl_div(log_q_TV, log_p_TV, log_target=True, reduction="sum")
    return torch.stack((kl, F.nll_loss(log_q_TV, labels_T, reduction="sum"), teacher_ce))


def distillation_sums_ref(
    hidden_TD: Tensor, *, teacher_hidden_TD: Tensor, head_VD: Tensor, teacher_head_VD: Tensor, labels_T: Tensor, chunk_rows: int,
) -> DistillationSums:
    """KL(teacher || student) at temperature 1 and both cross-entropies, summed over rows.

    Shapes: hidden_TD, teacher_hidden_TD [T, D]; head_VD, teacher_head_VD [V, D]; labels_T int64 in 0..V-1, every row counted.
    Numerics: logits in the hidden states' dtype, softmax and sums in fp32. Gradients reach hidden_TD and head_VD only.
    Errors: ValueError when the rows disagree or chunk_rows is not positive.
    """
    rows = hidden_TD.shape[0]
    if chunk_rows < 1 or teacher_hidden_TD.shape[0] != rows or labels_T.shape[0] != rows:
        raise ValueError(
            f"distillation_sums: rows must agree and chunk_rows be positive; got {rows}, {teacher_hidden_TD.shape[0]} "
            f"and {labels_T.shape[0]} rows, chunk_rows {chunk_rows}.")
    total = hidden_TD.new_zeros(3, dtype=torch.float32)
    for start in range(0, rows, chunk_rows):
        part = slice(start, start + chunk_rows)
        total = total + checkpoint(
            _chunk_sums, hidden_TD[part], teacher_hidden_TD[part], head_VD, teacher_head_VD, labels_T[part], use_reentrant=False)
    return DistillationSums(*total.unbind())
