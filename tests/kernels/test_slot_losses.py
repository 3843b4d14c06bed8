"""The losses of slots: against float64 autograd through all logits, the kernel against its twin, and what is never stored."""

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Collection
from typing import Any

import pytest
import torch
import triton
from interpreted import run_in_interpreter
from tolerances import FP32_EPS, Bound, assert_equal, assert_within
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kilotok.kernels.loss import SlotLosses, slot_losses, slot_losses_ref, slots
from kilotok.kernels.loss.slots_device import slot_rows_kernel

FP64 = Bound(maximum=1e-12, rms=1e-12, reason="the closed form in float64 against autograd")
FP32 = Bound(maximum=64 * FP32_EPS, rms=32 * FP32_EPS, reason="fp32 logits of up to 30, each off by half a step of their size, against float64")
# Of the same logits. Exponentials of the device are good to 2 steps, a sum in another order to a few; a softcap of 30 loses c * 2**-23 of a logit.
ROWS_FP32 = Bound(maximum=32 * FP32_EPS, rms=32 * FP32_EPS, reason="the same logits in fp32: other exponentials and another order of sums")
GRADIENT_BF16 = Bound(maximum=2**-7, rms=2**-9, reason="the same fp32 gradient up to a few steps, rounded to bf16 once: at most one step of bf16, rarely")
HIDDEN_BF16 = Bound(maximum=2**-6, rms=2**-8, reason="bf16 gradients of logits that differ by a rounding, summed by the product and rounded again")

OPTIONS: dict[str, dict[str, Any]] = {
    "ce": {"ce_weight": 1.0, "kl_weight": 0.0},
    "kl": {"ce_weight": 0.0, "kl_weight": 1.0},
    "mixed": {"ce_weight": 0.3, "kl_weight": 0.9, "z_weight": 0.02},
    "z": {"ce_weight": 1.0, "kl_weight": 0.0, "z_weight": 0.1},
    "capped": {"ce_weight": 1.0, "kl_weight": 0.0, "multiplier": 0.7, "softcap": 5.0},
    "all": {"ce_weight": 0.3, "kl_weight": 0.9, "z_weight": 0.02, "multiplier": 1.3, "softcap": 4.0, "teacher_multiplier": 0.8, "teacher_softcap": 3.0},
    "one cap": {"ce_weight": 0.1, "kl_weight": 0.5, "teacher_softcap": 3.0},
}
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def make(rows: int = 11, *, vocab: int = 37, hidden: int = 6, dtype: torch.dtype = torch.float64, device: str = "cpu") -> dict[str, Tensor]:
    """Arguments of `slot_losses`; the teacher has a head and a width of its own."""
    generator = torch.Generator().manual_seed(rows)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).to(device)

    labels = torch.randint(0, vocab, (rows,), generator=generator).to(device)
    return {"hidden_TD": random(rows, hidden).requires_grad_(True), "head_VD": random(vocab, hidden), "labels_T": labels,
            "teacher_TD": random(rows, hidden + 1), "teacher_head_VD": random(vocab, hidden + 1)}


def by_autograd(case: dict[str, Tensor], *, ce_weight: float, kl_weight: float, z_weight: float = 0.0, multiplier: float = 1.0, softcap: float | None = None,
                teacher_multiplier: float = 1.0, teacher_softcap: float | None = None) -> SlotLosses:
    """Through all logits at once, in float64."""
    def logits(states: Tensor, head: Tensor, scale: float, cap: float | None) -> Tensor:
        z = scale * (states.double() @ head.double().mT)
        return z if cap is None else cap * torch.tanh(z / cap)

    z = logits(case["hidden_TD"], case["head_VD"], multiplier, softcap)
    log_q, labels = z.log_softmax(-1), case["labels_T"]
    log_p = logits(case["teacher_TD"], case["teacher_head_VD"], teacher_multiplier, teacher_softcap).log_softmax(-1)
    ce, kl = F.nll_loss(log_q, labels, reduction="none"), (log_p.exp() * (log_p - log_q)).sum(-1) * (kl_weight > 0)
    loss = ce_weight * ce + kl_weight * kl + z_weight * z.logsumexp(-1) ** 2
    return SlotLosses(loss, ce.detach(), kl.detach(), -ce.detach(), z.argmax(-1) == labels)


def weighted_gradient(losses: SlotLosses, hidden: Tensor) -> Tensor:
    weights = torch.linspace(-1, 2, len(hidden), dtype=losses.loss_T.dtype, device=hidden.device)
    return torch.autograd.grad((losses.loss_T * weights).sum(), hidden)[0]


def compare(got: SlotLosses, expected: SlotLosses, *, bound: Bound) -> None:
    for name in ("loss_T", "cross_entropy_T", "kl_T", "label_log_prob_T"):
        assert_within(getattr(got, name), getattr(expected, name), bound=bound, what=name)
    assert_equal(got.is_right_T, expected.is_right_T)


# --- the op on the CPU ---


@pytest.mark.parametrize("chunk_rows", [1, 5, 11, 100])
@pytest.mark.parametrize("name", OPTIONS)
def test_losses_and_gradients_equal_autograd_through_all_logits(name: str, chunk_rows: int) -> None:
    case = make()
    got, expected = slot_losses(**case, **OPTIONS[name], chunk_rows=chunk_rows), by_autograd(case, **OPTIONS[name])
    assert got.loss_T.requires_grad and not any(t.requires_grad for t in got[1:]) and got.loss_T.dtype == torch.float64
    compare(got, expected, bound=FP64)
    assert (float(got.kl_T.min()) > 0.1) == (OPTIONS[name]["kl_weight"] > 0)
    assert_within(weighted_gradient(got, case["hidden_TD"]), weighted_gradient(expected, case["hidden_TD"]), bound=FP64, what="gradient")


@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_pass_finite_differences(name: str) -> None:
    case = make(3, vocab=7)
    hidden = case.pop("hidden_TD")
    assert torch.autograd.gradcheck(lambda h: slot_losses(h, **case, **OPTIONS[name], chunk_rows=2).loss_T, (hidden,))


@pytest.mark.parametrize("name", OPTIONS)
def test_fp32_is_near_float64(name: str) -> None:
    case = make(dtype=torch.float32)
    got, expected = slot_losses(**case, **OPTIONS[name], chunk_rows=4), by_autograd(case, **OPTIONS[name])
    assert got.loss_T.dtype == torch.float32
    compare(got, expected, bound=FP32)
    assert_within(weighted_gradient(got, case["hidden_TD"]), weighted_gradient(expected, case["hidden_TD"]), bound=FP32, what="gradient")


def test_the_teacher_has_the_drafts_head_where_none_is_given() -> None:
    case = make()
    case |= {"teacher_TD": case["hidden_TD"].detach().roll(1, 0), "teacher_head_VD": case["head_VD"]}
    without = {k: v for k, v in case.items() if k != "teacher_head_VD"}
    assert_equal(slot_losses(**without, **OPTIONS["kl"], chunk_rows=3).loss_T, slot_losses(**case, **OPTIONS["kl"], chunk_rows=3).loss_T)


@pytest.mark.parametrize("name", OPTIONS)
def test_no_rows_give_no_losses_and_a_connected_graph(name: str) -> None:
    case = make(0)
    got = slot_losses(**case, **OPTIONS[name], chunk_rows=3)
    assert all(len(t) == 0 for t in got) and got.is_right_T.dtype == torch.bool
    got.loss_T.sum().backward()
    assert case["hidden_TD"].grad is not None and case["hidden_TD"].grad.shape == (0, 6)


def test_backward_can_run_twice() -> None:
    case = make()
    losses = slot_losses(**case, **OPTIONS["mixed"], chunk_rows=4)
    first = torch.autograd.grad(losses.loss_T.sum(), case["hidden_TD"], retain_graph=True)[0]
    assert_equal(torch.autograd.grad(losses.loss_T.sum(), case["hidden_TD"])[0], first)


def test_of_equal_logits_the_lowest_id_is_the_answer() -> None:
    case = make(4, vocab=5)
    case["head_VD"] = case["head_VD"][[0, 1, 2, 1, 2]]
    case["labels_T"] = (case["hidden_TD"] @ case["head_VD"].mT).argmax(-1)
    assert set(case["labels_T"].tolist()) & {1, 2}
    assert slot_losses(**case, **OPTIONS["ce"], chunk_rows=3).is_right_T.all()
    twins = torch.tensor([0, 3, 4, 3, 4])[case["labels_T"]]
    assert_equal(slot_losses(**case | {"labels_T": twins}, **OPTIONS["ce"], chunk_rows=3).is_right_T, twins == case["labels_T"])


class Outputs(TorchDispatchMode):
    """The largest tensor that an operation gave, and how often each ran."""

    def __init__(self) -> None:
        super().__init__()
        self.largest, self.calls = 0, Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor):
                self.largest = max(self.largest, tensor.numel())
        self.calls[func.overloadpacket.__name__] += 1
        return out


@pytest.mark.parametrize("name", OPTIONS)
def test_no_tensor_is_larger_than_the_logits_of_a_chunk(name: str) -> None:
    case = make(40, vocab=101)
    with Outputs() as seen:
        slot_losses(**case, **OPTIONS[name], chunk_rows=7).loss_T.sum().backward()
    assert seen.largest == 7 * 101
    with Outputs() as seen:   # what the check would say of all logits
        by_autograd(case, **OPTIONS[name])
    assert seen.largest == 40 * 101


@pytest.mark.parametrize(("name", "products"), [("ce", 1), ("kl", 2), ("all", 2)])
def test_evaluation_has_no_product_for_a_gradient(name: str, products: int) -> None:
    """Six chunks; training adds one product a chunk, and backward none."""
    case = make(40)
    with Outputs() as training:
        trained = slot_losses(**case, **OPTIONS[name], chunk_rows=7)
        trained.loss_T.sum().backward()
    with Outputs() as evaluation, torch.no_grad():
        evaluated = slot_losses(**case, **OPTIONS[name], chunk_rows=7)
    with Outputs() as detached:
        slot_losses(**case | {"hidden_TD": case["hidden_TD"].detach()}, **OPTIONS[name], chunk_rows=7)
    assert (training.calls["mm"], evaluation.calls["mm"], detached.calls["mm"]) == (6 * products + 6, 6 * products, 6 * products)
    assert not evaluated.loss_T.requires_grad
    for a, b in zip(trained, evaluated, strict=True):
        assert_equal(a, b)


def test_autocast_decides_the_dtype_of_the_products() -> None:
    """fp32 states and master head under bf16 autocast are bf16 ones, converted once; the gradient comes back in fp32. fp64 stays."""
    case = make(40, dtype=torch.float32)
    rounded = {k: v.detach().bfloat16() if v.is_floating_point() else v for k, v in case.items()}
    rounded["hidden_TD"].requires_grad_(True)
    with torch.autocast("cpu", dtype=torch.bfloat16), Outputs() as seen:
        got = slot_losses(**case, **OPTIONS["mixed"], chunk_rows=7)
    assert seen.calls["_to_copy"] < 4 + 3 * 6   # four inputs, and what the twin widens in a chunk
    expected = slot_losses(**rounded, **OPTIONS["mixed"], chunk_rows=7)
    for a, b in zip(got, expected, strict=True):
        assert_equal(a, b)
    gradient = weighted_gradient(got, case["hidden_TD"])
    assert gradient.dtype == torch.float32
    assert_equal(gradient, weighted_gradient(expected, rounded["hidden_TD"]).float())
    wide = make()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        compare(slot_losses(**wide, **OPTIONS["mixed"], chunk_rows=7), by_autograd(wide, **OPTIONS["mixed"]), bound=FP64)


@pytest.mark.parametrize(("changed", "words"), [
    ({"head_VD": torch.zeros(5, 7)}, r"must share D; got \(11, 6\) and \(5, 7\)"),
    ({"labels_T": torch.zeros(11)}, r"labels must be int64 \[11\]"), ({"labels_T": torch.zeros(3, dtype=torch.int64)}, r"int64 \[11\], one a row"),
    ({"labels_T": torch.full((11,), -100)}, r"labels must lie in 0..36, .*got -100..-100. Leave"), ({"labels_T": torch.arange(27, 38)}, "got 27..37"),
    ({"chunk_rows": 0}, "chunk_rows must be positive; got 0"), ({"z_weight": -1.0}, "must not be negative; got ce 0.3, kl 0.9, z -1.0"),
    ({"softcap": 0.0}, "multipliers and softcaps must be positive"), ({"teacher_multiplier": -1.0}, "multipliers and softcaps must be positive"),
    ({"teacher_TD": None}, "kl_weight 0.9 needs teacher_TD"), ({"teacher_TD": torch.zeros(4, 7)}, "teacher states .* must fit 11 rows and 37 tokens"),
    ({"teacher_head_VD": torch.zeros(36, 7)}, "must fit 11 rows and 37 tokens"),
], ids=lambda v: v if isinstance(v, str) else "")
def test_what_is_refused(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"^slot_losses: .*{words}"):
        slot_losses(**{**make(), **OPTIONS["mixed"], "chunk_rows": 4, **changed})


# --- the kernel without a GPU ---


def extreme_logits(vocab: int, *, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """(logits, labels): random small and large ones, all equal, one huge, all far below zero, and ties of the largest around the label."""
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(12, vocab, generator=generator) * torch.tensor([1.0, 10.0, 0.01] + [3.0] * 9)[:, None]
    labels = torch.randint(0, vocab, (12,), generator=generator)
    logits[3], logits[4], logits[5] = 0.0, -2.5e4, 7.0
    logits[6, labels[6]] = 3e4
    logits[7, (labels[7] + 1) % vocab] = 3e4
    logits[8, labels[8]:] = 20.0                          # the label is the first of the ties
    logits[9, :int(labels[9]) + 1] = 20.0                 # and the last
    logits[10, labels[10]] = 1.0 + float(logits[10].max())
    labels[3] = 0
    return logits.to(dtype).to(device), labels.to(device)


def check_kernel(vocab: int, *, dtype: torch.dtype, device: str, gradient_bound: Bound, names: Collection[str] = OPTIONS) -> None:
    """The kernel against its twin on the same logits."""
    for name, options in ((n, OPTIONS[n]) for n in names):
        logits, labels = extreme_logits(vocab, dtype=dtype, device=device)
        teacher = logits.flip(0).clone() if options["kl_weight"] else None
        terms = slots._Terms(**{"z_weight": 0.0, "multiplier": 1.0, "softcap": None, "teacher_multiplier": 1.0, "teacher_softcap": None, **options})
        for gradient in (False, True):
            results = []
            for run in (slots._chunk_kernel, slots._chunk_ref):
                figures = slots._RowFigures(*(torch.zeros(len(labels), dtype=d, device=device) for d in (*[torch.float32] * 3, torch.bool)))
                written = logits.clone()
                run(written, teacher, labels, figures, terms, gradient)
                results.append((figures, written))
            (got, got_logits), (expected, expected_logits) = results
            for figure in ("lse_T", "label_log_prob_T", "kl_T"):
                for row in range(len(labels)):   # each on its own scale, which is that of its logits
                    g, e = getattr(got, figure)[row], getattr(expected, figure)[row]
                    scale = max(1.0, float(e.abs()))
                    assert abs(float(g - e)) <= 32 * FP32_EPS * scale, (name, figure, row, float(g), float(e))
            assert_equal(got.is_right_T, expected.is_right_T, what=name)
            assert got.is_right_T[[3, 6, 8, 10]].all() and not got.is_right_T[7] and bool(got.is_right_T[9]) == (int(labels[9]) == 0)
            if gradient:
                scale = expected_logits.float().abs().amax(-1, keepdim=True).clamp(min=1.0)   # of a row: of what is subtracted in it, or the normalizer's
                assert_within(got_logits / scale, expected_logits / scale, bound=gradient_bound, what=name)
            else:
                assert_equal(got_logits, logits, what=f"{name}: logits of an evaluation")


INTERPRETED = (("mixed", 2), ("z", 64), ("capped", 150), ("all", 70), ("one cap", 64))   # each part of the kernel, and rows of one to three blocks


def run_interpreted() -> None:
    slots.BLOCK = 64
    for name, vocab in INTERPRETED:
        check_kernel(vocab, dtype=torch.float32, device="cpu", gradient_bound=ROWS_FP32, names=[name])
        print(name, vocab, flush=True)


@pytest.mark.xdist_group("interpreter")
def test_the_interpreted_kernel_equals_its_twin() -> None:
    """Less than a block of lanes, one block, and several of which the last is not full; ties, huge and equal logits."""
    assert run_in_interpreter("test_slot_losses") == [f"{name} {vocab}" for name, vocab in INTERPRETED]


@pytest.mark.parametrize("gradient", [False, True], ids=["evaluation", "gradient"])
@pytest.mark.parametrize("capped", [False, True], ids=["", "softcap"])
@pytest.mark.parametrize("teacher", [False, True], ids=["", "teacher"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_the_kernel_compiles_to_wide_accesses_without_spills(dtype: str, teacher: bool, capped: bool, gradient: bool) -> None:
    constants = {"HAS_TEACHER": teacher, "HAS_SOFTCAP": capped, "HAS_TEACHER_SOFTCAP": capped, "GRADIENT": gradient, "BLOCK": slots.BLOCK}
    kinds = {"logits_ptr": f"*{dtype}", "teacher_ptr": f"*{dtype}", "labels_ptr": "*i64", "right_ptr": "*i1", "vocab": "i32"}
    names = list(slot_rows_kernel.arg_names)
    signature = {n: "constexpr" if n in constants else kinds.get(n, "*fp32" if n.endswith("_ptr") else "fp32") for n in names}
    attrs = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n.endswith("_ptr") or n == "vocab"}
    kernel = triton.compile(ASTSource(fn=slot_rows_kernel, signature=signature, constexprs=constants, attrs=attrs), target=GPUTarget("cuda", 90, 32),
                            options={"num_warps": slots.NUM_WARPS})
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = subprocess.run([triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+).*?LOCAL:(\d+)", usage)
    assert found is not None, usage
    assert found.groups()[1:] == ("0", "0") and int(found[1]) <= 80, usage   # 80 let three programs of eight warps share an SM
    of_16_bytes = slots.BLOCK // (32 * slots.NUM_WARPS) * (2 if dtype == "bf16" else 4) // 16
    passes = 2 if gradient or teacher else 1
    loads = len(re.findall(r"ld\.global\S*\.v4\.b32", kernel.asm["ptx"]))
    stores = len(re.findall(r"st\.global\S*\.v4\.b32", kernel.asm["ptx"]))
    assert (loads, stores) == (of_16_bytes * passes * (1 + teacher), of_16_bytes * gradient)


# --- on a GPU ---


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, GRADIENT_BF16), (torch.float32, ROWS_FP32)], ids=str)
@pytest.mark.parametrize("vocab", [2, 13, 2048, 5001, 32000, 151936])
def test_gpu_equals_the_twin_on_extreme_logits(vocab: int, dtype: torch.dtype, bound: Bound) -> None:
    check_kernel(vocab, dtype=dtype, device="cuda", gradient_bound=bound)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(("dtype", "rows_bound", "gradient_bound"), [(torch.bfloat16, ROWS_FP32, HIDDEN_BF16), (torch.float32, ROWS_FP32, FP32)], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(("rows", "vocab", "hidden"), [(37, 1003, 64), (200, 151936, 256)])
def test_gpu_losses_and_gradients_equal_the_twins(rows: int, vocab: int, hidden: int, name: str, dtype: torch.dtype, rows_bound: Bound,
                                                  gradient_bound: Bound) -> None:
    """Logits of standard deviation 3; the same products on both sides."""
    case = make(rows, vocab=vocab, hidden=hidden, dtype=dtype, device="cuda")
    case |= {n: (case[n] * (3 / hidden**0.5)).to(dtype) for n in ("head_VD", "teacher_head_VD")}
    got, expected = (op(**case, **OPTIONS[name], chunk_rows=64) for op in (slot_losses, slot_losses_ref))
    compare(got, expected, bound=rows_bound)
    assert_within(weighted_gradient(got, case["hidden_TD"]), weighted_gradient(expected, case["hidden_TD"]), bound=gradient_bound, what="gradient")


@pytest.mark.gpu
@needs_gpu
def test_gpu_memory_is_that_of_a_chunk() -> None:
    """4096 rows of 151,936 tokens: 1.2 GB of logits in bf16, of which a chunk of 256 rows has 78 MB."""
    case = make(4096, vocab=151936, hidden=64, dtype=torch.bfloat16, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    slot_losses(**case, **OPTIONS["mixed"], chunk_rows=256).loss_T.sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 2 * 256 * 151936 * 2 + 2**26
