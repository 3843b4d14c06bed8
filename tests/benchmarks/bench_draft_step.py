"""One training step of a draft head with the target's features given: time, memory, and where it goes.

    python tests/benchmarks/bench_draft_step.py [--anchors 512 1024 2048 4096] [--window 1024]

Default shape: the published Qwen3-8B draft (hidden 4096, 5 layers, vocabulary 151,936) with blocks of 8 on a row of 4096 tokens. fp32 masters, bf16 autocast,
compiled layers. Times by CUDA events: forward and backward, then the optimizer (Muon, AdamW) apart, as several micro-batches share its step.
"""

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch
from machine import environment
from torch import Tensor, nn

from kilotok.dflash.anchors import anchor_generator, draw_anchors, fill_tiles
from kilotok.dflash.config import DraftConfig
from kilotok.dflash.loss import SlotLossOptions, slot_sums, slot_targets
from kilotok.dflash.model import Blocks, DraftModel
from kilotok.train.optim import MuonAdamW, parameter_groups

DEVICE = "cuda"
PROMPT = 64   # leading tokens that are not supervised


def timed(run: Callable[[], Any], *, steps: int, warmup: int = 3) -> list[float]:
    """Milliseconds of each call."""
    events = []
    for step in range(warmup + steps):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        if step >= warmup:
            events.append((begin, end))
    torch.cuda.synchronize()
    return sorted(b.elapsed_time(e) for b, e in events)


def spread(times: list[float]) -> str:
    n = len(times)
    return f"{statistics.median(times):8.2f} ({times[n // 5]:.2f}, {times[n - 1 - n // 5]:.2f})"


class Step:
    """Draft, features of one row and the loss; `run` is forward and backward."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.config = DraftConfig(
            hidden_size=args.hidden, intermediate_size=args.intermediate, num_hidden_layers=args.layers, num_attention_heads=args.heads,
            num_key_value_heads=args.kv_heads, head_dim=128, vocab_size=args.vocab, target_layer_ids=(1, 9, 17, 25, 33), num_target_layers=36,
            mask_token_id=args.vocab - 1, block_size=args.block, sliding_window=args.window, max_position_embeddings=40960)
        generator = torch.Generator(DEVICE).manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16, generator=generator)

        with torch.device(DEVICE):
            self.draft = DraftModel(self.config)
        for p in self.draft.parameters():
            nn.init.normal_(p, std=0.02, generator=generator) if p.dim() == 2 else nn.init.ones_(p)
        if not args.eager:
            self.draft.compile_layers()
        s = args.sequence
        self.embedding, self.head = normal(args.vocab, args.hidden), normal(args.vocab, args.hidden) * 0.02
        self.features, self.hidden = normal(1, s, 5 * args.hidden), normal(1, s, args.hidden)
        self.ids = torch.randint(0, args.vocab, (1, s), device=DEVICE, generator=generator)
        self.positions = torch.arange(s, device=DEVICE).unsqueeze(0)
        self.supervised = self.positions >= PROMPT
        self.index = 0
        self.anchors = 0
        self.loss = 0.0

    def forward(self) -> Any:
        a, index = self.args, self.index
        self.index += 1
        valid = self.supervised.clone()
        valid[:, -1] = False
        anchors, is_valid = draw_anchors(valid, num_anchors=self.anchors, generator=anchor_generator(seed=0, rank=0, index=index, device=torch.device(DEVICE)))
        anchors, is_valid = fill_tiles(anchors, is_valid, block_size=a.block)
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            slots = self.draft(self.features, blocks=Blocks(anchors_BA=anchors, ids_BA=self.ids.gather(1, anchors), positions_BS=self.positions),
                               embedding_VD=self.embedding, flex=True)
            targets = slot_targets(self.ids, documents_BS=self.positions * 0, supervised_BS=self.supervised, anchor_index_BA=anchors, anchor_valid_BA=is_valid,
                                   block_size=a.block)
            options = SlotLossOptions(ce_weight=float(a.loss == "ce"), kl_weight=float(a.loss == "kl"), chunk_rows=a.chunk)
            return slot_sums(slots, targets=targets, head_VD=self.head, target_hidden_BSD=self.hidden, options=options)

    def run(self) -> None:
        sums = self.forward()
        (sums.loss / sums.weight).backward()
        self.loss = (sums.loss / sums.weight).detach()


def operations(step: Step) -> float:
    """Floating-point operations of forward and backward, attention left out: matrices of the draft times 6, the head's two products."""
    c, a = step.config, step.args
    rows, tokens = step.anchors * a.block, a.sequence
    kv = 2 * c.num_key_value_heads * c.head_dim * c.hidden_size * c.num_hidden_layers
    context = (c.num_features * c.hidden_size + kv) * tokens
    layers = sum(p.numel() for n, p in step.draft.named_parameters() if p.dim() == 2 and n != "fc.weight") * rows
    return 6.0 * (context + layers) + 2 * (3 if a.loss == "kl" else 2) * a.vocab * c.hidden_size * step.anchors * c.num_drafts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("hidden", 4096), ("intermediate", 12288), ("layers", 5), ("heads", 32), ("kv-heads", 8), ("vocab", 151936), ("block", 8),
                        ("sequence", 4096), ("chunk", 4096), ("steps", 10)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--anchors", type=int, nargs="+", default=[512, 1024, 2048, 4096])
    parser.add_argument("--window", type=int, default=None, help="sliding window; default: full attention")
    parser.add_argument("--loss", choices=("ce", "kl"), default="ce")
    parser.add_argument("--eager", action="store_true", help="layers uncompiled")
    parser.add_argument("--optimizer", action="store_true", help="also time the optimizer's step")
    args = parser.parse_args()
    print(environment())
    step = Step(args)
    print(f"draft of {sum(p.numel() for p in step.draft.parameters()):,} weights, {args}")
    print(f"{'anchors':>8} {'signals':>8} | {'fwd+bwd ms (p20, p80)':>26} | {'tokens/s':>9} {'signals/s':>10} {'TFLOP/s':>8} | {'peak GiB':>8} | loss")
    for anchors in args.anchors:
        step.anchors = anchors
        step.draft.zero_grad(set_to_none=True)
        torch.cuda.reset_peak_memory_stats()
        times = timed(step.run, steps=args.steps)
        ms = statistics.median(times)
        signals = anchors * step.config.num_drafts
        print(f"{anchors:>8} {signals:>8} | {spread(times):>26} | {args.sequence / ms * 1e3:>9,.0f} {signals / ms * 1e3:>10,.0f} "
              f"{operations(step) / ms / 1e9:>8.0f} | {torch.cuda.max_memory_allocated() / 2**30:>8.2f} | {float(step.loss):.4f}", flush=True)
    if args.optimizer:
        for name, lr in (("Muon", 1e-4), ("AdamW", 0.0)):
            if name == "Muon":
                optimizer: Any = MuonAdamW(parameter_groups(step.draft, muon_lr=lr, muon_weight_decay=0.0, adamw_lr=lr, adamw_weight_decay=0.0,
                                                            betas=(0.9, 0.95), momentum=0.95))
            else:
                optimizer = torch.optim.AdamW(step.draft.parameters(), lr=1e-4, fused=True)
            print(f"{name}: {spread(timed(optimizer.step, steps=5))} ms, peak {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB", flush=True)
            del optimizer


if __name__ == "__main__":
    main()
