"""Loss of draft slots with its gradient, in ms and peak memory: python tests/benchmarks/bench_slot_loss.py [--check] [--sweep].

bf16 states and head of the size of an 8B model (D = 4096, V = 151,936), T = 512 and 4096 anchors of 7 slots. TFLOP/s count the
products that an implementation runs, 2 T D V each: the fused op has logits, teacher logits and the gradient; the checkpointed one
computes both kinds of logits again in backward. So compare ms, not TFLOP/s. Memory is the peak above what the inputs hold.

    fused         kernels.loss.slot_losses, forward and backward
    evaluation    the same without a gradient
    checkpointed  plain torch: log_softmax in fp32 of a chunk of rows, recomputed in backward
    pass          the elementwise kernel alone on the logits of a chunk, beside a copy of them; bytes as each must move, logits read twice
                  and the gradient written

With --check the kernel is compared with its twin first; with --sweep the elementwise kernel is timed over launch sizes.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from machine import environment
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from triton.testing import do_bench

from kilotok.kernels.loss import slot_losses, slots

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "kernels")]   # test_slot_losses
HIDDEN, VOCAB = 4096, 151936
ROWS = (512 * 7, 4096 * 7)
WEIGHTS = {"CE": (1.0, 0.0), "KL": (0.0, 1.0), "CE + KL": (0.3, 0.7)}


def _checkpointed_chunk(hidden_TD: Tensor, head_VD: Tensor, labels_T: Tensor, weights_T: Tensor, teacher_TD: Tensor | None, ce_weight: float,
                        kl_weight: float) -> Tensor:
    log_q = F.linear(hidden_TD, head_VD).float().log_softmax(-1)
    loss_T = ce_weight * F.nll_loss(log_q, labels_T, reduction="none") if ce_weight else log_q.new_zeros(len(hidden_TD))
    if teacher_TD is not None:
        with torch.no_grad():
            log_p = F.linear(teacher_TD, head_VD).float().log_softmax(-1)
        loss_T = loss_T + kl_weight * F.kl_div(log_q, log_p, log_target=True, reduction="none").sum(-1)
    return (loss_T * weights_T).sum()


class Inputs:
    def __init__(self, rows: int) -> None:
        generator = torch.Generator("cuda").manual_seed(rows)

        def random(count: int, scale: float) -> Tensor:
            return (torch.randn(count, HIDDEN, generator=generator, device="cuda") * scale).to(torch.bfloat16)

        self.rows = rows
        self.hidden_TD = random(rows, 1.0).requires_grad_(True)
        self.teacher_TD, self.head_VD = random(rows, 1.0), random(VOCAB, 3.0 / HIDDEN**0.5)   # logits of standard deviation 3
        self.labels_T = torch.randint(0, VOCAB, (rows,), generator=generator, device="cuda")
        self.weights_T = torch.rand(rows, generator=generator, device="cuda")

    def fused(self, ce_weight: float, kl_weight: float, *, chunk_rows: int) -> Tensor:
        losses = slot_losses(self.hidden_TD, head_VD=self.head_VD, labels_T=self.labels_T, teacher_TD=self.teacher_TD, ce_weight=ce_weight,
                             kl_weight=kl_weight, chunk_rows=chunk_rows)
        return (losses.loss_T * self.weights_T).sum()

    def checkpointed(self, ce_weight: float, kl_weight: float, *, chunk_rows: int) -> Tensor:
        total = torch.zeros((), device="cuda")
        for start in range(0, self.rows, chunk_rows):
            part = slice(start, start + chunk_rows)
            total = total + checkpoint(_checkpointed_chunk, self.hidden_TD[part], self.head_VD, self.labels_T[part], self.weights_T[part],
                                       self.teacher_TD[part] if kl_weight else None, ce_weight, kl_weight, use_reentrant=False)
        return total


def line(name: str, call: Callable[[], object], *, rows: int, products: int, rep: int) -> None:
    call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    peak = torch.cuda.max_memory_allocated() - before
    median, p20, p80 = do_bench(call, warmup=rep // 4, rep=rep, quantiles=[0.5, 0.2, 0.8])
    print(f"{name:34s} {median:9.2f} ms  p20 {p20:9.2f}  p80 {p80:9.2f}  {2e-9 * products * rows * HIDDEN * VOCAB / median:6.0f} TFLOP/s of {products} products"
          f"  peak {peak / 2**30:6.2f} GiB", flush=True)


def losses(rows: int, *, chunk_rows: int, rep: int) -> None:
    """Every loss, fused and checkpointed."""
    inputs = Inputs(rows)
    print(f"\nT = {rows}, D = {HIDDEN}, V = {VOCAB}, bf16, {chunk_rows} rows a chunk")
    for name, (ce_weight, kl_weight) in WEIGHTS.items():
        teacher = int(kl_weight > 0)

        def step(loss: Callable[..., Tensor], ce: float = ce_weight, kl: float = kl_weight) -> None:
            inputs.hidden_TD.grad = None
            loss(ce, kl, chunk_rows=chunk_rows).backward()

        def evaluate(ce: float = ce_weight, kl: float = kl_weight) -> None:
            with torch.no_grad():
                inputs.fused(ce, kl, chunk_rows=chunk_rows)

        line(f"{name}, fused", lambda s=step: s(inputs.fused), rows=rows, products=2 + teacher, rep=rep)  # type: ignore[misc]
        line(f"{name}, evaluation", evaluate, rows=rows, products=1 + teacher, rep=rep)
        line(f"{name}, checkpointed", lambda s=step: s(inputs.checkpointed), rows=rows, products=3 + 2 * teacher, rep=rep)  # type: ignore[misc]


def elementwise(*, chunk_rows: int, rep: int, sweep: bool) -> None:
    """The kernel between the products, in bytes a second."""
    logits_TV = torch.randn(chunk_rows, VOCAB, device="cuda", dtype=torch.bfloat16)
    teacher_TV = torch.randn_like(logits_TV)
    labels_T = torch.randint(0, VOCAB, (chunk_rows,), device="cuda")
    figures = slots._RowFigures(*(torch.zeros(chunk_rows, dtype=d, device="cuda") for d in (*[torch.float32] * 3, torch.bool)))
    read_once = logits_TV.numel() * logits_TV.element_size()

    def timed(name: str, call: Callable[[], object], tensors: int) -> None:
        median, p20, p80 = do_bench(call, warmup=rep // 4, rep=rep, quantiles=[0.5, 0.2, 0.8])
        print(f"{name:34s} {median:9.3f} ms  p20 {p20:9.3f}  p80 {p80:9.3f}  {tensors * read_once / median / 1e6:7.0f} GB/s of {tensors} times the logits",
              flush=True)

    print(f"\npass over {chunk_rows} x {VOCAB} bf16 logits ({read_once / 2**30:.2f} GiB)")
    timed("copy", lambda: teacher_TV.copy_(logits_TV), 2)
    sizes = [(b, w) for b in (1024, 2048, 4096, 8192) for w in (4, 8, 16) if 4 <= b // (32 * w) <= 32] if sweep else [(slots.BLOCK, slots.NUM_WARPS)]
    for slots.BLOCK, slots.NUM_WARPS in sizes:
        for teacher in (None, teacher_TV):
            for softcap in (None, 30.0):
                for gradient in (True, False):
                    terms = slots._Terms(1.0, float(teacher is not None), 0.0, 1.0, softcap, 1.0, softcap)
                    passes = 2 if gradient or teacher is not None else 1
                    name = f"{slots.BLOCK}/{slots.NUM_WARPS}{'' if teacher is None else ' teacher'}{'' if softcap is None else ' softcap'}"
                    timed(name + ("" if gradient else " evaluation"),
                          lambda t=teacher, k=terms, g=gradient: slots._chunk_kernel(logits_TV, t, labels_T, figures, k, g),  # type: ignore[misc]
                          passes * (1 + (teacher is not None)) + gradient)


def check() -> None:
    """The kernel against its twin, as the tests do it."""
    from test_slot_losses import GRADIENT_BF16, ROWS_FP32, check_kernel
    for dtype, bound in ((torch.bfloat16, GRADIENT_BF16), (torch.float32, ROWS_FP32)):
        for vocab in (13, 5001, VOCAB):
            check_kernel(vocab, dtype=dtype, device="cuda", gradient_bound=bound)
    print("check: the kernel equals its twin within its bounds")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the twin first")
    parser.add_argument("--sweep", action="store_true", help="time launch sizes of the elementwise kernel")
    parser.add_argument("--chunk_rows", type=int, default=8192)
    parser.add_argument("--rep", type=int, default=2000, help="ms that each line is measured for")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench_slot_loss: needs a CUDA GPU; torch sees none.")
    print(environment(), flush=True)
    if arguments.check:
        check()
    elementwise(chunk_rows=arguments.chunk_rows, rep=min(arguments.rep, 200), sweep=arguments.sweep)
    for rows in ROWS:
        losses(rows, chunk_rows=arguments.chunk_rows, rep=arguments.rep)


if __name__ == "__main__":
    main()
