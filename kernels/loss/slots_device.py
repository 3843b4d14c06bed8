# Device code has no Python types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""One row of logits a program: what its loss is made of, and the gradient in the place of the logits.

Two passes over the row. The first keeps the largest logit and the sum of exponentials lane by lane, without talking to other lanes
until the end, with one exponential an element: of two neighbours of the maximum one always has exponent 0. It also sees whether
any token beats the label. The second reads the row again, adds up the KL and writes the gradient. All of it in fp32 whatever the
logits are, so bf16 logits are read twice and written once: 6 bytes an element, 10 with a teacher, against 16,384 operations of the
two products at D = 4096.

    softcap    c * tanh(z / c) from e = exp(-2 |z| / c): tanh = (1 - e) / (1 + e), slope 4 e / (1 + e)**2, without the cancellation of
               1 - tanh**2; absolute error of a logit about c * 2**-23
    KL         sum p ((t - max t) - (l - max l)) + log S_l - log S_t: differences first, so that equal distributions give 0 exactly
"""

import triton
import triton.language as tl

_LOWEST = tl.constexpr(-3.4028234663852886e38)   # finite, so that two lanes that saw nothing do not give inf - inf


@triton.jit
def _capped(raw, multiplier, softcap, HAS_SOFTCAP: tl.constexpr):
    """The logit of a product."""
    z = raw * multiplier
    if HAS_SOFTCAP:
        e = tl.exp(-2.0 * tl.abs(z) / softcap)
        tanh = (1.0 - e) / (1.0 + e)
        z = tl.where(z < 0, -tanh, tanh) * softcap
    return z


@triton.jit
def _slope(raw, multiplier, softcap, HAS_SOFTCAP: tl.constexpr):
    """The derivative of `_capped` by raw."""
    slope = multiplier
    if HAS_SOFTCAP:
        e = tl.exp(-2.0 * tl.abs(raw * multiplier) / softcap)
        slope = 4.0 * multiplier * e / ((1.0 + e) * (1.0 + e))
    return slope


@triton.jit
def _add(largest, total, z):
    """Running maximum and sum of exp(z - maximum), lane by lane; z of -inf adds nothing."""
    above = z - largest
    e = tl.exp(-tl.abs(above))
    return tl.maximum(largest, z), tl.where(above > 0, total * e + 1.0, total + e)


@triton.jit
def slot_rows_kernel(logits_ptr, teacher_ptr, labels_ptr, lse_ptr, label_log_prob_ptr, kl_ptr, right_ptr, vocab, ce_weight, kl_weight, z_weight,
                     multiplier, softcap, teacher_multiplier, teacher_softcap, HAS_TEACHER: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
                     HAS_TEACHER_SOFTCAP: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr):
    """Rows of `vocab` logits one after the other; labels int64 in 0..vocab-1."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * vocab
    teacher_ptr += row * vocab
    lane = tl.arange(0, BLOCK)
    label = tl.load(labels_ptr + row).to(tl.int32)
    label_raw = tl.load(logits_ptr + label).to(tl.float32)
    nothing = tl.full((BLOCK,), float("-inf"), tl.float32)

    largest = tl.full((BLOCK,), _LOWEST, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    teacher_largest = tl.full((BLOCK,), _LOWEST, tl.float32)
    teacher_total = tl.zeros((BLOCK,), tl.float32)
    beaten = tl.zeros((BLOCK,), tl.int1)
    for start in range(0, vocab, BLOCK):
        column = start + lane
        mask = column < vocab
        raw = tl.load(logits_ptr + column, mask=mask, other=float("-inf")).to(tl.float32)
        beaten |= mask & ((raw > label_raw) | ((raw == label_raw) & (column < label)))
        z = _capped(raw, multiplier, softcap, HAS_SOFTCAP)
        largest, total = _add(largest, total, tl.where(mask, z, nothing))
        if HAS_TEACHER:
            t = _capped(tl.load(teacher_ptr + column, mask=mask, other=float("-inf")).to(tl.float32), teacher_multiplier, teacher_softcap,
                        HAS_TEACHER_SOFTCAP)
            teacher_largest, teacher_total = _add(teacher_largest, teacher_total, tl.where(mask, t, nothing))

    top = tl.max(largest, axis=0)
    mass = tl.sum(total * tl.exp(largest - top), axis=0)
    label_z = _capped(label_raw, multiplier, softcap, HAS_SOFTCAP)
    lse = top + tl.log(mass)
    tl.store(lse_ptr + row, lse)
    tl.store(label_log_prob_ptr + row, (label_z - top) - tl.log(mass))
    tl.store(right_ptr + row, tl.max(beaten.to(tl.int32), axis=0) == 0)

    teacher_top = 0.0
    teacher_mass = 1.0
    if HAS_TEACHER:
        teacher_top = tl.max(teacher_largest, axis=0)
        teacher_mass = tl.sum(teacher_total * tl.exp(teacher_largest - teacher_top), axis=0)
    if GRADIENT or HAS_TEACHER:
        share = (ce_weight + kl_weight + 2.0 * z_weight * lse) / mass
        teacher_share = kl_weight / teacher_mass
        kl = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, vocab, BLOCK):
            column = start + lane
            mask = column < vocab
            raw = tl.load(logits_ptr + column, mask=mask, other=0.0).to(tl.float32)
            z = _capped(raw, multiplier, softcap, HAS_SOFTCAP)
            gradient = tl.exp(z - top) * share - tl.where(column == label, ce_weight, 0.0)
            if HAS_TEACHER:
                t = _capped(tl.load(teacher_ptr + column, mask=mask, other=0.0).to(tl.float32), teacher_multiplier, teacher_softcap,
                            HAS_TEACHER_SOFTCAP)
                p = tl.exp(t - teacher_top)
                kl += tl.where(mask, p * ((t - teacher_top) - (z - top)), 0.0)
                gradient -= p * teacher_share
            if GRADIENT:
                gradient *= _slope(raw, multiplier, softcap, HAS_SOFTCAP)
                tl.store(logits_ptr + column, gradient.to(logits_ptr.dtype.element_ty), mask=mask)
        if HAS_TEACHER:
            tl.store(kl_ptr + row, tl.sum(kl, axis=0) / teacher_mass + tl.log(mass) - tl.log(teacher_mass))
