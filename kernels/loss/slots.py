"""The loss of the masked slots of a draft, row by row, fused with the language-model head.

A row's logits are l = c * tanh(m * (h W^T) / c); without a softcap c they are m * (h W^T). With q = softmax(l), p the teacher's:

    loss      ce_weight * -log q[label] + kl_weight * KL(p || q) + z_weight * logsumexp(l)**2
    d/d l     ce_weight * (q - [label]) + kl_weight * (q - p) + 2 * z_weight * logsumexp(l) * q
    d/d h     m * (d/d l * (1 - (l / c)**2)) W

The head is frozen, so the gradient of a row depends on nothing that comes after it but one number, its weight in the total. It is
therefore finished in the forward pass: for a chunk of rows one product gives the logits, one elementwise pass turns them into the
gradient in place, a second product gives d/d h, kept as [T, D]; backward multiplies that by the weights. Nothing is computed twice
(recomputing costs a third product) and no [T, V] tensor exists: chunk_rows * V logits, the same again with a teacher, and T * D, twice
while backward runs. Since losses are per row, whatever weighs rows (a decay by slot, confidence) is plain torch behind this op.

Precision: products in the compute dtype: that of autocast where it is on, else that of hidden_TD; hidden, teacher and heads are
converted to it once a call. fp64 stays fp64 under autocast, as in torch. Everything after the logits is fp32 (fp64 for fp64); the
gradient of the logits is rounded to the compute dtype once, because the second product reads it.

Legend: T rows, D hidden, V vocabulary.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from .slots_device import slot_rows_kernel

BLOCK, NUM_WARPS = 2048, 8   # 8 logits a thread: one load of bf16, and 45 to 80 registers, so three to five programs on an SM


class SlotLosses(NamedTuple):
    """One number a row. Only `loss_T` is differentiable; all but `is_right_T` are fp32, or fp64 for fp64 input."""

    loss_T: Tensor
    cross_entropy_T: Tensor
    kl_T: Tensor               # KL(teacher || draft) in nats; 0 where kl_weight is 0, because no teacher is run
    label_log_prob_T: Tensor
    is_right_T: Tensor         # bool: the label has the largest logit, and no lower id the same one


class _Terms(NamedTuple):
    ce_weight: float
    kl_weight: float
    z_weight: float
    multiplier: float
    softcap: float | None
    teacher_multiplier: float
    teacher_softcap: float | None


class _RowFigures(NamedTuple):
    """What the elementwise pass writes."""

    lse_T: Tensor
    label_log_prob_T: Tensor
    kl_T: Tensor
    is_right_T: Tensor


# (logits_TV, teacher_TV or None, labels_T, figures to write, terms, whether the gradient is to replace the logits)
_ChunkPass = Callable[[Tensor, Tensor | None, Tensor, _RowFigures, _Terms, bool], None]


def slot_losses(
    hidden_TD: Tensor, *, head_VD: Tensor, labels_T: Tensor, teacher_TD: Tensor | None = None, teacher_head_VD: Tensor | None = None, ce_weight: float,
    kl_weight: float, z_weight: float = 0.0, multiplier: float = 1.0, softcap: float | None = None, teacher_multiplier: float = 1.0,
    teacher_softcap: float | None = None, chunk_rows: int,
) -> SlotLosses:
    """Cross-entropy to the labels, KL to a teacher and a penalty on the logits' normalizer, per row.

    Shapes: hidden_TD [T, D]; head_VD [V, D]; labels_T int64 in 0..V-1; teacher_TD [T, D'], the teacher's states, needed where kl_weight
        is not 0; teacher_head_VD [V, D'], head_VD by default. With the rows of a reduced vocabulary in both heads the teacher is
        renormalized over them.
    Numerics: see above. is_right_T compares the logits as the product gives them, before multiplier and softcap, which keep order.
    Gradient: of loss_T by hidden_TD only, finished in forward; skipped where hidden_TD needs none. Heads and teacher get none.
    Cost: 4 T D V operations with the gradient, 2 T D V without; the teacher adds 2 T D' V. Memory: as above; labels are checked with one
        synchronization.
    Implementation: the Triton kernel on CUDA for bf16, fp16 and fp32; the twin on the CPU and for fp64.
    Errors: ValueError for shapes, labels or numbers that do not fit.
    """
    on_device = hidden_TD.is_cuda and hidden_TD.dtype != torch.float64
    terms = _Terms(ce_weight, kl_weight, z_weight, multiplier, softcap, teacher_multiplier, teacher_softcap)
    return _losses(hidden_TD, head_VD, labels_T, teacher_TD, teacher_head_VD, terms, chunk_rows, _chunk_kernel if on_device else _chunk_ref)


def slot_losses_ref(
    hidden_TD: Tensor, *, head_VD: Tensor, labels_T: Tensor, teacher_TD: Tensor | None = None, teacher_head_VD: Tensor | None = None, ce_weight: float,
    kl_weight: float, z_weight: float = 0.0, multiplier: float = 1.0, softcap: float | None = None, teacher_multiplier: float = 1.0,
    teacher_softcap: float | None = None, chunk_rows: int,
) -> SlotLosses:
    """`slot_losses` with the elementwise pass in plain torch, on any device."""
    terms = _Terms(ce_weight, kl_weight, z_weight, multiplier, softcap, teacher_multiplier, teacher_softcap)
    return _losses(hidden_TD, head_VD, labels_T, teacher_TD, teacher_head_VD, terms, chunk_rows, _chunk_ref)


def _losses(hidden_TD: Tensor, head_VD: Tensor, labels_T: Tensor, teacher_TD: Tensor | None, teacher_head_VD: Tensor | None, terms: _Terms, chunk_rows: int,
            chunk_pass: _ChunkPass) -> SlotLosses:
    teacher_head_VD = head_VD if teacher_head_VD is None else teacher_head_VD
    _check(hidden_TD, head_VD, labels_T, teacher_TD, teacher_head_VD, terms, chunk_rows)
    kind, dtype = hidden_TD.device.type, hidden_TD.dtype
    if dtype != torch.float64 and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
    teacher = None
    if terms.kl_weight and teacher_TD is not None:
        teacher = (teacher_TD.detach().to(dtype), teacher_head_VD.detach().to(dtype))
    with torch.autocast(kind, enabled=False):
        wants_gradient = hidden_TD.requires_grad and torch.is_grad_enabled()
        return SlotLosses(*_SlotLosses.apply(hidden_TD.to(dtype), head_VD.detach().to(dtype), labels_T.contiguous(), teacher, terms, chunk_rows, chunk_pass,
                                             wants_gradient))


def _check(hidden_TD: Tensor, head_VD: Tensor, labels_T: Tensor, teacher_TD: Tensor | None, teacher_head_VD: Tensor, terms: _Terms, chunk_rows: int) -> None:
    where, rows = "slot_losses", len(hidden_TD)
    if hidden_TD.dim() != 2 or head_VD.dim() != 2 or hidden_TD.shape[1] != head_VD.shape[1]:
        raise ValueError(f"{where}: hidden states [T, D] and head [V, D] must share D; got {tuple(hidden_TD.shape)} and {tuple(head_VD.shape)}.")
    if labels_T.shape != (rows,) or labels_T.dtype != torch.int64:
        raise ValueError(f"{where}: labels must be int64 [{rows}], one a row; got {labels_T.dtype} {tuple(labels_T.shape)}.")
    if chunk_rows < 1:
        raise ValueError(f"{where}: chunk_rows must be positive; got {chunk_rows}.")
    if min(terms.ce_weight, terms.kl_weight, terms.z_weight) < 0:
        raise ValueError(f"{where}: weights must not be negative; got ce {terms.ce_weight}, kl {terms.kl_weight}, z {terms.z_weight}.")
    if any(value is not None and not value > 0 for value in terms[3:]):
        raise ValueError(f"{where}: multipliers and softcaps must be positive (None for no softcap); got {terms[3:]}.")
    if terms.kl_weight:
        if teacher_TD is None:
            raise ValueError(f"{where}: kl_weight {terms.kl_weight} needs teacher_TD, the teacher's states. Pass them, or set kl_weight to 0.")
        if teacher_TD.shape != (rows, teacher_head_VD.shape[1]) or len(teacher_head_VD) != len(head_VD):
            raise ValueError(f"{where}: teacher states [T, D'] and head [V, D'] must fit {rows} rows and {len(head_VD)} tokens; "
                             f"got {tuple(teacher_TD.shape)} and {tuple(teacher_head_VD.shape)}.")
    if rows:
        low, high = (int(x) for x in torch.stack(labels_T.aminmax()).tolist())
        if low < 0 or high >= len(head_VD):
            raise ValueError(f"{where}: labels must lie in 0..{len(head_VD) - 1}, the rows of the head; got {low}..{high}. Leave other rows out.")


class _SlotLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, hidden_TD: Tensor, head_VD: Tensor, labels_T: Tensor, teacher: tuple[Tensor, Tensor] | None, terms: _Terms,
                chunk_rows: int, chunk_pass: _ChunkPass, wants_gradient: bool) -> tuple[Tensor, ...]:
        rows, vocab = len(hidden_TD), len(head_VD)
        wide = torch.promote_types(hidden_TD.dtype, torch.float32)
        figures = _RowFigures(*(hidden_TD.new_zeros(rows, dtype=d) for d in (wide, wide, wide, torch.bool)))
        logits_TV = hidden_TD.new_empty(min(chunk_rows, rows), vocab)   # of a chunk; its gradient afterwards
        teacher_TV = None if teacher is None else torch.empty_like(logits_TV)
        gradient_TD = torch.empty_like(hidden_TD, memory_format=torch.contiguous_format) if wants_gradient else None
        for start in range(0, rows, chunk_rows):
            part = slice(start, min(start + chunk_rows, rows))
            count = part.stop - part.start
            logits = torch.mm(hidden_TD[part], head_VD.mT, out=logits_TV[:count])
            teacher_logits = None if teacher is None or teacher_TV is None else torch.mm(teacher[0][part], teacher[1].mT, out=teacher_TV[:count])
            chunk_pass(logits, teacher_logits, labels_T[part], _RowFigures(*(f[part] for f in figures)), terms, wants_gradient)
            if gradient_TD is not None:
                torch.mm(logits, head_VD, out=gradient_TD[part])
        loss_T = -terms.ce_weight * figures.label_log_prob_T + terms.kl_weight * figures.kl_T
        if terms.z_weight:   # not 0 * inf
            loss_T += terms.z_weight * figures.lse_T**2
        others = (-figures.label_log_prob_T, figures.kl_T, figures.label_log_prob_T, figures.is_right_T)
        if gradient_TD is not None:
            ctx.save_for_backward(gradient_TD)
        ctx.mark_non_differentiable(*others)
        return (loss_T, *others)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss_T: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        (gradient_TD,) = ctx.saved_tensors
        # into the gradient's dtype directly: the fp32 product is rounded once and never stored
        return (torch.mul(gradient_TD, grad_loss_T.unsqueeze(1), out=torch.empty_like(gradient_TD)), *[None] * 7)


def _chunk_ref(logits_TV: Tensor, teacher_TV: Tensor | None, labels_T: Tensor, figures: _RowFigures, terms: _Terms, gradient: bool) -> None:
    """The elementwise pass: figures of each row, and with `gradient` d loss / d logits in the place of the logits."""
    wide, label_T1 = figures.lse_T.dtype, labels_T.unsqueeze(1)
    figures.is_right_T.copy_(logits_TV.argmax(-1) == labels_T)
    capped_TV = _capped_ref(logits_TV.to(wide), multiplier=terms.multiplier, softcap=terms.softcap)
    figures.lse_T.copy_(capped_TV.logsumexp(-1))
    log_q_TV = capped_TV.log_softmax(-1)
    figures.label_log_prob_T.copy_(log_q_TV.gather(1, label_T1).squeeze(1))
    log_p_TV = None
    if teacher_TV is not None:
        log_p_TV = _capped_ref(teacher_TV.to(wide), multiplier=terms.teacher_multiplier, softcap=terms.teacher_softcap).log_softmax(-1)
        figures.kl_T.copy_((log_p_TV.exp() * (log_p_TV - log_q_TV)).sum(-1))
    if gradient:
        gradient_TV = log_q_TV.exp() * (terms.ce_weight + terms.kl_weight + 2.0 * terms.z_weight * figures.lse_T.unsqueeze(1))
        if log_p_TV is not None:
            gradient_TV -= terms.kl_weight * log_p_TV.exp()
        gradient_TV.scatter_add_(1, label_T1, torch.full_like(label_T1, -terms.ce_weight, dtype=wide))
        gradient_TV *= terms.multiplier
        if terms.softcap is not None:
            gradient_TV *= 1.0 - (capped_TV / terms.softcap) ** 2
        logits_TV.copy_(gradient_TV)


def _capped_ref(logits: Tensor, *, multiplier: float, softcap: float | None) -> Tensor:
    return logits * multiplier if softcap is None else torch.tanh(logits * multiplier / softcap) * softcap


def _chunk_kernel(logits_TV: Tensor, teacher_TV: Tensor | None, labels_T: Tensor, figures: _RowFigures, terms: _Terms, gradient: bool) -> None:
    """`_chunk_ref` as one kernel. Contiguous rows."""
    rows, vocab = logits_TV.shape
    with torch.cuda.device_of(logits_TV):
        slot_rows_kernel[(rows,)](
            logits_TV, logits_TV if teacher_TV is None else teacher_TV, labels_T, *figures, vocab,
            *(1.0 if value is None else float(value) for value in terms), HAS_TEACHER=teacher_TV is not None,
            HAS_SOFTCAP=terms.softcap is not None, HAS_TEACHER_SOFTCAP=terms.teacher_softcap is not None, GRADIENT=gradient, BLOCK=BLOCK,
            num_warps=NUM_WARPS)
