"""The chunked distillation sums against float64, for every chunk size, and without a [rows, vocabulary] tensor.

Legend: T token rows, D hidden, V vocabulary.
"""

from typing import Any, NamedTuple

import pytest
import torch
from tolerances import DISTILL_BF16_LOGITS, DISTILL_CHUNKS_FP32, DISTILL_GRAD_FP32, DISTILL_SUM_FP32, assert_equal, assert_within
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kilotok.kernels.loss import DistillationSums, distillation_sums_ref

T, D, V = 37, 16, 101
WEIGHTS = {"kl": (1.0, 0.0), "ce": (0.0, 1.0), "both": (0.7, 0.3)}


class Inputs(NamedTuple):
    hidden_TD: Tensor
    teacher_hidden_TD: Tensor
    head_VD: Tensor
    teacher_head_VD: Tensor
    labels_T: Tensor

    def to(self, dtype: torch.dtype) -> "Inputs":
        return Inputs(*(t.to(dtype) for t in self[:4]), self.labels_T)

    def sums(self, *, chunk_rows: int, **changes: Any) -> DistillationSums:
        arguments = {**self._asdict(), **changes}
        return distillation_sums_ref(arguments.pop("hidden_TD"), **arguments, chunk_rows=chunk_rows)


def inputs(*, seed: int = 0, rows: int = T, dim: int = D, vocab: int = V) -> Inputs:
    """Logits of a few units, teacher and student apart, and different hidden sizes as a distilled draft would have."""
    g = torch.Generator().manual_seed(seed)
    student, teacher = torch.randn(rows, dim, generator=g), torch.randn(rows, dim + 3, generator=g)
    heads = torch.randn(vocab, dim, generator=g) / 2, torch.randn(vocab, dim + 3, generator=g) / 2
    return Inputs(student, teacher, *heads, torch.randint(vocab, (rows,), generator=g))


def direct(x: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """The three sums written out from the definition, in float64 unless given otherwise."""
    log_q = (x.hidden_TD @ x.head_VD.T).log_softmax(-1)
    log_p = (x.teacher_hidden_TD @ x.teacher_head_VD.T).log_softmax(-1)
    rows = torch.arange(len(x.labels_T))
    return (log_p.exp() * (log_p - log_q)).sum(), -log_q[rows, x.labels_T].sum(), -log_p[rows, x.labels_T].sum()


@pytest.mark.parametrize("seed", range(3))
def test_sums_equal_the_definition_in_float64(seed: int) -> None:
    x = inputs(seed=seed)
    got = x.sums(chunk_rows=8)   # 37 rows: four chunks of 8 and one of 5
    assert all(s.dtype == torch.float32 and s.shape == () for s in got)
    for name, g, e in zip(got._fields, got, direct(x.to(torch.float64)), strict=True):
        assert float(e) > 1.0
        assert_within(g, e, bound=DISTILL_SUM_FP32, what=name)


@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS)
def test_gradients_equal_autograd_in_float64(weights: tuple[float, float]) -> None:
    x = inputs(seed=10)
    kl_weight, ce_weight = weights
    leaves = [t.requires_grad_() for t in (x.hidden_TD, x.head_VD)]
    sums = x.sums(chunk_rows=8)
    got = torch.autograd.grad(kl_weight * sums.kl + ce_weight * sums.cross_entropy, leaves)
    wide = x.to(torch.float64)
    kl, ce, _ = direct(wide)
    expected = torch.autograd.grad(kl_weight * kl + ce_weight * ce, [wide.hidden_TD, wide.head_VD])
    for name, g, e in zip(("hidden_TD", "head_VD"), got, expected, strict=True):
        assert_within(g, e, bound=DISTILL_GRAD_FP32, what=name)


def test_gradients_reach_student_only() -> None:
    x = inputs(seed=11)
    for t in x[:4]:
        t.requires_grad_()
    sums = x.sums(chunk_rows=8)
    (sums.kl + sums.cross_entropy + sums.teacher_cross_entropy).backward()
    assert x.teacher_hidden_TD.grad is None and x.teacher_head_VD.grad is None
    with_teacher_term = x.hidden_TD.grad
    x.hidden_TD.grad = None
    sums = x.sums(chunk_rows=8)
    (sums.kl + sums.cross_entropy).backward()
    assert_equal(with_teacher_term, x.hidden_TD.grad)
    assert float(x.hidden_TD.grad.abs().min()) > 0


def test_a_head_shared_by_teacher_and_student_gets_the_student_gradient() -> None:
    x = inputs(seed=12)
    x = x._replace(teacher_hidden_TD=x.teacher_hidden_TD[:, :D], teacher_head_VD=x.head_VD.requires_grad_())
    got, = torch.autograd.grad(x.sums(chunk_rows=8).kl, [x.head_VD])
    apart = x._replace(teacher_head_VD=x.head_VD.detach().clone())
    expected, = torch.autograd.grad(apart.sums(chunk_rows=8).kl, [x.head_VD])
    assert_equal(got, expected)


@pytest.mark.parametrize("chunk_rows", [1, 2, 5, T - 1, T, T + 1, 1000])
def test_sums_and_gradients_do_not_depend_on_the_chunk(chunk_rows: int) -> None:
    x = inputs(seed=20)
    leaves = [t.requires_grad_() for t in (x.hidden_TD, x.head_VD)]
    results = []
    for rows in (chunk_rows, T):
        sums = x.sums(chunk_rows=rows)
        results.append((*sums, *torch.autograd.grad(sums.kl + sums.cross_entropy, leaves)))
    for name, g, e in zip((*DistillationSums._fields, "hidden gradient", "head gradient"), *results, strict=True):
        assert_within(g, e, bound=DISTILL_CHUNKS_FP32, what=f"{name}, chunk_rows {chunk_rows}")


def test_last_partial_chunk_counts() -> None:
    """Rows 32..36 alone are the difference between 37 and 32 rows."""
    x = inputs(seed=21)
    head, tail = (Inputs(x.hidden_TD[s], x.teacher_hidden_TD[s], x.head_VD, x.teacher_head_VD, x.labels_T[s]) for s in (slice(0, 32), slice(32, T)))
    for name, whole, a, b in zip(DistillationSums._fields, x.sums(chunk_rows=8), head.sums(chunk_rows=8), tail.sums(chunk_rows=8), strict=True):
        assert float(b) > 0
        assert_within(whole, a + b, bound=DISTILL_CHUNKS_FP32, what=name)


def test_zero_rows() -> None:
    sums = inputs(rows=0).sums(chunk_rows=8)
    assert [float(s) for s in sums] == [0.0, 0.0, 0.0]
    assert all(s.dtype == torch.float32 for s in sums)


def test_teacher_equal_to_student_has_kl_exactly_zero() -> None:
    x = inputs(seed=22)
    same = x._replace(teacher_hidden_TD=x.hidden_TD, teacher_head_VD=x.head_VD)
    sums = same.sums(chunk_rows=8)
    assert float(sums.kl) == 0.0
    assert float(sums.cross_entropy) == float(sums.teacher_cross_entropy) > 0
    assert float(x.sums(chunk_rows=8).kl) > 1.0


def test_bf16_hidden_states_give_bf16_logits_and_fp32_sums() -> None:
    x = inputs(seed=23).to(torch.bfloat16)
    got = x.sums(chunk_rows=T)   # one chunk: the same product, so the same bf16 logits, as below
    log_q = torch.nn.functional.linear(x.hidden_TD, x.head_VD).double().log_softmax(-1)
    log_p = torch.nn.functional.linear(x.teacher_hidden_TD, x.teacher_head_VD).double().log_softmax(-1)
    rows = torch.arange(T)
    expected = ((log_p.exp() * (log_p - log_q)).sum(), -log_q[rows, x.labels_T].sum(), -log_p[rows, x.labels_T].sum())
    for name, g, e in zip(got._fields, got, expected, strict=True):
        assert g.dtype == torch.float32
        assert_within(g, e, bound=DISTILL_BF16_LOGITS, what=name)


# --- memory ---


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation returns."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.numel = max([self.numel, *(t.numel() for t in tree_leaves(result) if isinstance(t, Tensor))])
        return result


@pytest.mark.parametrize("chunk_rows", [1, 8, 64])
def test_no_tensor_is_larger_than_a_chunk_of_logits(chunk_rows: int) -> None:
    rows, dim, vocab = 64, 8, 96
    x = inputs(seed=30, rows=rows, dim=dim, vocab=vocab)
    leaves = [t.requires_grad_() for t in (x.hidden_TD, x.head_VD)]
    with LargestTensor() as forward:
        sums = x.sums(chunk_rows=chunk_rows)
        loss = sums.kl + sums.cross_entropy
    with LargestTensor() as backward:
        torch.autograd.grad(loss, leaves)
    # a chunk of logits, or what was given: heads and hidden states
    limit = max(chunk_rows * vocab, vocab * (dim + 3), rows * (dim + 3))
    assert (limit < rows * vocab) == (chunk_rows < rows)
    for name, seen in (("forward", forward.numel), ("backward", backward.numel)):
        assert seen >= chunk_rows * vocab, f"{name}: the recorder saw no logits, only {seen} elements"
        assert seen <= limit, f"{name}: a tensor of {seen} elements; at most {limit} expected, [T, V] has {rows * vocab}"


def test_logits_of_all_chunks_are_not_kept_for_backward() -> None:
    """Without recomputation autograd would save two [chunk, V] tensors a chunk, [T, V] in all."""
    rows, dim, vocab = 64, 8, 96
    x = inputs(seed=31, rows=rows, dim=dim, vocab=vocab)
    x.hidden_TD.requires_grad_()
    saved: list[Tensor] = []

    def keep(t: Tensor) -> Tensor:
        saved.append(t)
        return t

    def kept_elements() -> int:
        """Elements of the distinct storages that autograd keeps, without the inputs' own."""
        given = {t.untyped_storage().data_ptr() for t in x}
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() // 4 for t in saved}
        return sum(elements for pointer, elements in storages.items() if pointer not in given)

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        kl = x.sums(chunk_rows=8).kl
        ours = kept_elements()
        saved.clear()
        expected = direct(x)[0]
    assert kl.requires_grad and expected.requires_grad
    assert kept_elements() >= rows * vocab, "the hook misses what the direct computation keeps"
    assert ours < rows * vocab // 8, f"autograd keeps {ours} elements; [T, V] has {rows * vocab}"


# --- wrong arguments ---


@pytest.mark.parametrize("chunk_rows", [0, -1])
def test_chunk_rows_must_be_positive(chunk_rows: int) -> None:
    with pytest.raises(ValueError, match=f"chunk_rows {chunk_rows}"):
        inputs().sums(chunk_rows=chunk_rows)


def test_rows_must_agree() -> None:
    x = inputs()
    with pytest.raises(ValueError, match=f"got {T}, {T - 1} and {T} rows"):
        x.sums(chunk_rows=8, teacher_hidden_TD=x.teacher_hidden_TD[1:])
    with pytest.raises(ValueError, match=f"got {T}, {T} and {T + 2} rows"):
        x.sums(chunk_rows=8, labels_T=torch.zeros(T + 2, dtype=torch.int64))
    with pytest.raises(ValueError, match=f"got {T - 3}, {T} and {T} rows"):
        x.sums(chunk_rows=8, hidden_TD=x.hidden_TD[3:])


def test_sizes_that_do_not_fit_raise() -> None:
    x = inputs()
    with pytest.raises(RuntimeError):   # hidden and head disagree about D
        x.sums(chunk_rows=8, head_VD=x.head_VD[:, 1:])
    with pytest.raises(RuntimeError):   # the vocabularies differ
        x.sums(chunk_rows=8, teacher_head_VD=torch.cat((x.teacher_head_VD, x.teacher_head_VD)))
    with pytest.raises(IndexError):
        x.sums(chunk_rows=8, labels_T=torch.full((T,), V))
