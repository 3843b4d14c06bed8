"""The loss of the slots, one slot at a time in float64: what counts, how much, and what flows back."""

import math
from typing import Any

import pytest
import torch
from tolerances import Bound, assert_equal, assert_within
from torch import Tensor
from torch.nn import functional as F

from kilotok.dflash import loss as loss_module
from kilotok.dflash.loss import SlotLossOptions, SlotSums, SlotTargets, default_gamma, dpace_weights, slot_sums, slot_targets, slot_weights

# weights are fp32 whatever the logits are: exp(-(n - 1) / gamma) to half a step
FP64 = Bound(maximum=1e-12, rms=1e-12, reason="the same float64 terms added in another order, times the same fp32 weights")
FP32 = Bound(maximum=1e-5, rms=1e-5, reason="fp32 softmax over 13 logits against float64")
SUPERVISED = 0.85
KINDS: dict[str, dict[str, Any]] = {
    "ce": {"ce_weight": 1.0, "kl_weight": 0.0}, "kl": {"ce_weight": 0.0, "kl_weight": 1.0}, "all": {"ce_weight": 0.3, "kl_weight": 0.7, "z_weight": 0.01},
}


def make_rows(seed: int = 0, *, batch: int = 2, length: int = 40) -> tuple[Tensor, Tensor, Tensor]:
    """ids, documents of 3 to 14 tokens and supervision with gaps; the last document runs to the end of the row or padding follows."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 13, (batch, length), generator=generator)
    documents = torch.full((batch, length), -1)
    for b in range(batch):
        start = number = 0
        while start < length - 4 * b:
            size = int(torch.randint(3, 15, (), generator=generator))
            documents[b, start:min(start + size, length - 4 * b)] = number
            start, number = start + size, number + 1
    supervised = (torch.rand(batch, length, generator=generator) < SUPERVISED) & (documents >= 0)
    return ids, documents, supervised


Slot = tuple[int, int, int]   # row, anchor, slot


def targets_by_rule(ids: Tensor, documents: Tensor, supervised: Tensor, index: Tensor, valid: Tensor, *, block_size: int) -> dict[Slot, tuple[int, int]]:
    """slot -> (label, index before it), for the slots that count: walking from the anchor until something ends the block."""
    found = {}
    for b in range(len(ids)):
        for a, start in enumerate(index[b].tolist()):
            if not valid[b, a] or not supervised[b, start]:
                continue
            for n in range(1, block_size):
                i = start + n
                if i >= ids.shape[1] or documents[b, i] != documents[b, start] or not supervised[b, i]:
                    break
                found[b, a, n] = (int(ids[b, i]), i - 1)
    return found


@pytest.mark.parametrize("block_size", [2, 5, 8])
@pytest.mark.parametrize("seed", range(5))
def test_slots_count_until_document_supervision_or_row_ends(seed: int, block_size: int) -> None:
    ids, documents, supervised = make_rows(seed)
    index = torch.arange(40).repeat(2, 1)   # every token as an anchor, the last ones included
    valid = torch.rand(2, 40, generator=torch.Generator().manual_seed(seed)) < 0.9
    expected = targets_by_rule(ids, documents, supervised, index, valid, block_size=block_size)
    got = slot_targets(ids, documents_BS=documents, supervised_BS=supervised, anchor_index_BA=index, anchor_valid_BA=valid, block_size=block_size)
    assert got.labels.shape == got.counts.shape == got.before.shape == (2, 40, block_size)
    assert got.counts.dtype == torch.bool and {tuple(i) for i in got.counts.nonzero().tolist()} == set(expected)
    for where, (label, before) in expected.items():
        assert (int(got.labels[where]), int(got.before[where])) == (label, before), where
    for t in (got.labels, got.before):   # what does not count can still be gathered
        assert int(t.min()) >= 0 and int(t.max()) < 40
    if block_size == 8:
        ends = {next((n for n in range(1, 8) if (b, a, n) not in expected), 8) for b, a, _ in expected}
        assert ends >= {2, 3, 8}   # blocks of many lengths


def test_counts_by_hand() -> None:
    """Two documents and padding; the anchor's own token has to be supervised; slot 0 never counts."""
    ids = torch.arange(12)[None]
    documents = torch.tensor([[0, 0, 0, 0, 0, 0, 1, 1, 1, 1, -1, -1]])
    supervised = torch.tensor([[0, 1, 1, 1, 0, 1, 1, 1, 1, 1, 0, 0]], dtype=torch.bool)
    index = torch.tensor([[0, 1, 2, 3, 5, 6, 8, 9, 1, 6]])
    valid = torch.tensor([[True] * 8 + [False] * 2])
    got = slot_targets(ids, documents_BS=documents, supervised_BS=supervised, anchor_index_BA=index, anchor_valid_BA=valid, block_size=4)
    assert got.counts.sum(-1)[0].tolist() == [0, 2, 1, 0, 0, 3, 1, 0, 0, 0]
    assert not got.counts[..., 0].any()
    assert got.labels[0, 1, :3].tolist() == [1, 2, 3] and got.before[0, 1, :3].tolist() == [0, 1, 2]
    to_the_end = slot_targets(ids[:, :9], documents_BS=documents[:, :9], supervised_BS=supervised[:, :9], anchor_index_BA=torch.tensor([[6, 8]]),
                              anchor_valid_BA=torch.tensor([[True, True]]), block_size=4)
    assert to_the_end.counts[0].tolist() == [[False, True, True, False], [False] * 4]


def test_weights_by_hand() -> None:
    def weights(gamma: float | None) -> list[float]:
        return slot_weights(4, gamma=gamma, device=torch.device("cpu")).tolist()

    assert weights(None) == [0.0, 1.0, 1.0, 1.0]
    assert weights(4.0) == pytest.approx([0.0, 1.0, 0.7788007830714049, 0.6065306597126334], rel=1e-7)
    assert weights(7.0) == pytest.approx([0.0, 1.0, math.exp(-1 / 7), math.exp(-2 / 7)], rel=1e-7)
    # MiMo: gamma 7 leaves the last slot of eight 0.42, gamma 4 leaves it 0.22
    assert [round(float(slot_weights(8, gamma=g, device=torch.device("cpu"))[7]), 2) for g in (7.0, 4.0)] == [0.42, 0.22]


# --- the sums ---


class Case:
    """Draft states of every block of two packed rows, a head and the target's states."""

    def __init__(self, *, dtype: torch.dtype = torch.float64, anchors: int = 15, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        ids, documents, supervised = make_rows(seed)
        index = torch.stack([torch.randperm(40, generator=generator)[:anchors] for _ in range(2)])
        self.targets = slot_targets(ids, documents_BS=documents, supervised_BS=supervised, anchor_index_BA=index,
                                    anchor_valid_BA=torch.rand(2, anchors, generator=generator) < 0.9, block_size=8)
        self.hidden = torch.randn(2, anchors, 8, 6, generator=generator, dtype=torch.float64).to(dtype).requires_grad_(True)
        self.head = torch.randn(13, 6, generator=generator, dtype=torch.float64).to(dtype)
        self.teacher = torch.randn(2, 40, 6, generator=generator, dtype=torch.float64).to(dtype)

    def sums(self, *, targets: SlotTargets | None = None, draft_ids: Tensor | None = None, logits: dict[str, float] | None = None, **options: Any) -> SlotSums:
        return slot_sums(self.hidden, targets=targets or self.targets, head_VD=self.head if draft_ids is None else self.head[draft_ids],
                         target_hidden_BSD=self.teacher, options=SlotLossOptions(**options), draft_ids_U=draft_ids, **(logits or {}))

    def by_rule(self, options: SlotLossOptions, *, draft_ids: Tensor | None = None) -> tuple[Tensor, float, list[int], list[int]]:
        """(loss, weight, correct, count), block by block and slot by slot."""
        loss, weight, correct, count = torch.zeros((), dtype=torch.float64), 0.0, [0] * 8, [0] * 8
        ids = list(range(13)) if draft_ids is None else draft_ids.tolist()
        head = self.head.double()[ids]
        for b, a in self.targets.counts.any(-1).nonzero().tolist():
            losses, q = {}, {}
            for n in self.targets.counts[b, a].nonzero().flatten().tolist():
                count[n] += 1
                if int(self.targets.labels[b, a, n]) not in ids:
                    continue
                label = ids.index(int(self.targets.labels[b, a, n]))
                logits = head @ self.hidden[b, a, n].double()
                lse = logits.exp().sum().log()
                teacher = head @ self.teacher[b, int(self.targets.before[b, a, n])].double()
                log_p = teacher - teacher.exp().sum().log()
                losses[n] = (options.ce_weight * (lse - logits[label]) + options.kl_weight * (log_p.exp() * (log_p - logits + lse)).sum()
                             + options.z_weight * lse**2)
                q[n] = float((logits[label] - lse).exp().detach())
                correct[n] += int(logits.argmax()) == label
            for n in losses:
                if options.weighting == "decay":
                    w = 1.0 if options.decay_gamma is None else float(torch.tensor(math.exp(-(n - 1) / options.decay_gamma), dtype=torch.float32))
                else:
                    w = sum(math.prod((1 - options.dpace_alpha) * q[i] + options.dpace_alpha for i in losses if i <= m) for m in losses if m >= n)
                loss, weight = loss + w * losses[n], weight + w
        return loss, weight, correct, count


@pytest.mark.parametrize("chunk_rows", [1, 7, 1000])
@pytest.mark.parametrize("reduced", [False, True], ids=["", "reduced"])
@pytest.mark.parametrize("options", [*({"decay_gamma": gamma, **kind} for gamma in (None, 4.0, 7.0) for kind in KINDS.values()),
                                     *({"weighting": "dpace", "dpace_alpha": alpha} for alpha in (0.1, 0.5, 1.0)),
                                     {"weighting": "dpace", "z_weight": 0.01}], ids=str)
def test_sums_and_gradients_equal_the_loop_over_slots(options: dict[str, Any], reduced: bool, chunk_rows: int) -> None:
    """Whatever is weighed how, with all tokens or the draft's ten of thirteen, whose rows make gaps inside blocks."""
    case = Case()
    ids = torch.tensor([0, 1, 3, 4, 5, 6, 8, 9, 10, 11]) if reduced else None
    got = case.sums(draft_ids=ids, chunk_rows=chunk_rows, **options)
    loss, weight, correct, count = case.by_rule(SlotLossOptions(**options), draft_ids=ids)
    assert sum(count) > 40 and sum(count) % 7 and 0 < sum(correct) < sum(count)
    assert got.correct_N.tolist() == correct and got.count_N.tolist() == count == case.targets.counts.sum((0, 1)).tolist()
    assert got.loss.dtype == torch.float64
    assert_within(got.loss, loss, bound=FP64, what="loss")
    assert float(got.weight) == pytest.approx(weight, rel=1e-6)   # summed in fp32
    (gradient,) = torch.autograd.grad(got.loss, case.hidden)
    (expected,) = torch.autograd.grad(loss, case.hidden)
    assert_within(gradient, expected, bound=FP64, what="gradient")
    assert not gradient[~case.targets.counts].any()


def test_dpace_weights_by_hand() -> None:
    """Three slots of 1/2, alpha 1/2: factors 3/4. The second block has a gap, the third nothing."""
    counts = torch.tensor([[0, 1, 1, 1], [0, 1, 0, 1], [0, 0, 0, 0]], dtype=torch.bool)
    got = dpace_weights(torch.where(counts, 0.5, float("nan")), counts_RN=counts, alpha=0.5)
    one, two, three = 0.75, 0.75**2, 0.75**3
    assert got.tolist() == [[0, one + two + three, two + three, three], [0, one + two, 0, two], [0] * 4]
    sure = dpace_weights(torch.zeros(1, 4), counts_RN=counts[:1], alpha=1.0)
    assert sure.tolist() == [[0, 3, 2, 1]]


def test_the_mean_does_not_depend_on_the_number_of_anchors() -> None:
    """Under either weighting: every block twice doubles both sums."""
    case = Case()
    for weighting in ("decay", "dpace"):
        once = case.sums(weighting=weighting)
        twice = slot_sums(case.hidden.repeat(1, 2, 1, 1), targets=SlotTargets(*(t.repeat(1, 2, 1) for t in case.targets)), head_VD=case.head,
                          target_hidden_BSD=case.teacher, options=SlotLossOptions(weighting=weighting))
        assert_within(twice.loss / twice.weight, once.loss / once.weight, bound=FP32, what=weighting)
        assert float(twice.weight) == pytest.approx(2 * float(once.weight), rel=1e-6)


def test_the_default_gamma_is_the_published_one() -> None:
    assert {size: default_gamma(size) for size in (2, 4, 8, 10, 16, 32)} == {2: 4, 4: 4, 8: 4, 10: 5, 16: 7, 32: 7}
    assert default_gamma(9) == 4.5 and default_gamma(13) == 6.0


def test_auto_is_the_gamma_of_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks here are of 8; what `auto` asks for is that size, and what it gets is what is used."""
    case, asked = Case(), []
    monkeypatch.setattr(loss_module, "default_gamma", lambda size: asked.append(size) or 6.0)
    auto, six, four = (case.sums(decay_gamma=gamma) for gamma in ("auto", 6.0, 4.0))
    assert asked == [8] and float(auto.loss) == float(six.loss) and float(auto.weight) == float(six.weight) != float(four.weight)


def test_logits_are_scaled_and_capped_on_either_side() -> None:
    """Doubling the logits is doubling the states; a cap is for the side it is named after."""
    case = Case()
    doubled = Case()
    with torch.no_grad():
        doubled.hidden *= 2
        doubled.teacher *= 3
    scaled = case.sums(**KINDS["kl"], logits={"multiplier": 2.0, "target_multiplier": 3.0})
    assert_within(scaled.loss, doubled.sums(**KINDS["kl"]).loss, bound=FP64)
    plain = case.sums(**KINDS["kl"]).loss
    for name in ("softcap", "target_softcap"):
        assert abs(float(case.sums(**KINDS["kl"], logits={name: 2.0}).loss - plain)) > 0.1
        assert abs(float(case.sums(**KINDS["kl"], logits={name: 1e6}).loss - plain)) < 1e-6


@pytest.mark.parametrize(("options", "words"), [
    ({"decay_gamma": 0.0}, r"loss.decay_gamma \(null for no decay\): must be positive; got 0.0"),
    ({"chunk_rows": 0}, "loss.chunk_rows: must be positive; got 0"),
    ({"ce_weight": 0.0}, "one of the first two must be positive"), ({"z_weight": -1.0}, "must not be negative"), ({"ce_weight": math.nan}, "nan"),
    ({"weighting": "mse"}, "must be decay or dpace; got 'mse'"),
    ({"weighting": "dpace", "kl_weight": 0.1}, "cross-entropy alone.*Set kl_weight to 0"),
    ({"weighting": "dpace", "dpace_alpha": 0.0}, r"dpace_alpha in \(0, 1\]"), ({"weighting": "dpace", "dpace_alpha": 1.1}, "dpace_alpha 1.1"),
], ids=str)
def test_what_the_options_refuse(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SlotLossOptions(**options)


def test_a_head_of_other_rows_than_the_draft_vocabulary_is_refused() -> None:
    case = Case()
    with pytest.raises(ValueError, match="head_VD must hold the rows of draft_ids_U; got 13 rows and 10 ids"):
        slot_sums(case.hidden, targets=case.targets, head_VD=case.head, target_hidden_BSD=case.teacher, options=SlotLossOptions(), draft_ids_U=torch.arange(10))


def test_the_target_and_its_head_get_no_gradient_from_kl() -> None:
    case = Case()
    case.teacher.requires_grad_(True)
    case.head.requires_grad_(True)
    case.sums(**KINDS["kl"], chunk_rows=5).loss.backward()
    assert case.teacher.grad is None and case.head.grad is None and case.hidden.grad is not None


@pytest.mark.parametrize("options", [*KINDS.values(), {"weighting": "dpace"}], ids=str)
def test_fp32_is_near_float64(options: dict[str, Any]) -> None:
    case, wide = Case(dtype=torch.float32), Case()
    got, expected = case.sums(chunk_rows=9, **options), wide.sums(**options)
    assert got.loss.dtype == torch.float32
    assert_within(got.loss, expected.loss, bound=FP32, what="loss")
    assert_within(torch.autograd.grad(got.loss, case.hidden)[0], torch.autograd.grad(expected.loss, wide.hidden)[0], bound=FP32, what="gradient")


def test_bf16_logits_are_summed_in_fp32() -> None:
    """Rounding happens before the softmax and nowhere after: equal to fp32 arithmetic on the same rounded logits."""
    case = Case(dtype=torch.bfloat16)
    got = case.sums(decay_gamma=None, chunk_rows=4)
    counts = case.targets.counts
    logits = F.linear(case.hidden.detach()[counts], case.head)
    expected = F.cross_entropy(logits.float(), case.targets.labels[counts], reduction="sum")
    assert got.loss.dtype == torch.float32
    assert_within(got.loss, expected, bound=FP32, what="loss")


def test_kl_of_equal_distributions_is_zero_and_of_others_is_not() -> None:
    case = Case()
    with torch.no_grad():
        for b, a, n in case.targets.counts.nonzero().tolist():
            case.hidden[b, a, n] = case.teacher[b, int(case.targets.before[b, a, n])]
    assert abs(case.sums(**KINDS["kl"]).loss.item()) < 1e-12 < case.sums(**KINDS["ce"]).loss.item()
    case.teacher = case.teacher.roll(1, dims=1)   # one position off
    assert case.sums(**KINDS["kl"]).loss.item() > 1


@pytest.mark.parametrize("options", [*KINDS.values(), {"weighting": "dpace"}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_no_counting_slot_gives_zero_connected_to_the_draft(options: dict[str, Any], dtype: torch.dtype) -> None:
    case = Case(dtype=dtype)
    got = case.sums(**options, targets=case.targets._replace(counts=torch.zeros_like(case.targets.counts)))
    assert got.loss.item() == 0.0 and got.weight.item() == 0.0
    assert got.count_N.tolist() == got.correct_N.tolist() == [0] * 8
    got.loss.backward()
    assert case.hidden.grad is not None
    assert_equal(case.hidden.grad, torch.zeros_like(case.hidden), what="gradient")


def test_sums_of_parts_add_up() -> None:
    """What makes ranks and micro-batches one batch: numerators and denominators of two halves are those of the whole."""
    case = Case()
    options = SlotLossOptions(**KINDS["kl"], chunk_rows=11)
    whole = case.sums(**KINDS["kl"])
    halves = [slot_sums(case.hidden[b:b + 1], targets=SlotTargets(*(t[b:b + 1] for t in case.targets)), head_VD=case.head,
                        target_hidden_BSD=case.teacher[b:b + 1], options=options) for b in range(2)]
    assert_within(halves[0].loss + halves[1].loss, whole.loss, bound=FP64, what="loss")
    assert float(halves[0].weight + halves[1].weight) == pytest.approx(float(whole.weight), rel=1e-6)
    assert_equal(halves[0].count_N + halves[1].count_N, whole.count_N, what="counts")
    assert_equal(halves[0].correct_N + halves[1].correct_N, whole.correct_N, what="correct")
