# Device code has no Python types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""The experts of a resident step, taken apart: python tests/benchmarks/bench_router_list.py

First the choice of experts alone, warm, in a kernel that makes it again and again on every SM: up to where the producer of weights can begin, and with the
whole list. Then gate and up, and down, as launches in a graph, for each form of their code, with the clock of one consumer behind its list, its first weights
and its end. Shapes of Qwen3-30B-A3B, two layers, random logits; 1 and 8 columns live. Before any time is taken, every form must give the bits of the first.
"""

import argparse
import statistics
import sys
from dataclasses import replace
from pathlib import Path

import torch
from bench_moe import timed_us
from machine import environment
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kilotok.kernels.moe.stream import cta_barrier
from kilotok.kernels.persistent import StepInputs, StepState, StepWeights
from kilotok.kernels.persistent.router import choose_and_route, choose_experts, empty_routing, make_tables, router_constants
from kilotok.kernels.persistent.step import StepKernel

sys.path[:0] = [str(Path(__file__).parents[1])]
from step_compile import SHAPES  # noqa: E402

ROUNDS = (8, 72)
LAYERS = 2
FORMS = ((4, True, 1, False), (4, True, 1, True), (2, True, 1, False), (4, False, 1, False), (4, True, 2, False))    # see time_products


@gluon.jit(do_not_specialize=["rounds"])
def _choose_again(logits_ptr, slots_ptr, num_tiles_ptr, experts_ptr, pairs_ptr, weights_ptr, num_experts_ptr, rounds, WHOLE: gl.constexpr, C: gl.constexpr,
                  E: gl.constexpr, K: gl.constexpr, EXPERTS: gl.constexpr, TILES: gl.constexpr, PADDED_TILES: gl.constexpr, NUM_WARPS: gl.constexpr):
    table, ends = make_tables(C, EXPERTS)
    number = gl.program_id(0)
    tiles = num_tiles_ptr + number
    for _ in range(rounds):
        if WHOLE:
            choose_and_route(logits_ptr, slots_ptr, table, ends, tiles, experts_ptr + number * TILES, pairs_ptr + number * (TILES * 8),
                             weights_ptr + number * (TILES * 8), num_experts_ptr + number * C, C, E, K, EXPERTS, TILES, PADDED_TILES, True, NUM_WARPS)
        else:
            num_tiles, _, _ = choose_experts(logits_ptr, slots_ptr, table, ends, C, E, K, EXPERTS, NUM_WARPS)
            gl.store(tiles, num_tiles)
        cta_barrier()


def time_choice() -> None:
    """us of one choice, the slope between few and many in one launch."""
    shape, programs = SHAPES["Qwen3-30B-A3B"], torch.cuda.get_device_properties(0).multi_processor_count
    for columns, live in ((8, 1), (8, 8), (16, 16), (64, 64)):
        constants = router_constants(num_columns=columns, experts_per_token=shape.experts_per_token, num_experts=shape.num_experts)
        one = empty_routing(num_columns=columns, experts_per_token=shape.experts_per_token, num_experts=shape.num_experts, device=torch.device("cuda"))
        lists = [t.new_empty(programs * t.numel()) for t in one.tensors()]
        logits, slots = torch.randn(columns, shape.num_experts, device="cuda"), torch.arange(columns, dtype=torch.int32, device="cuda")
        slots[live:] = -1
        found = {}
        for what, whole in (("up to the signal", False), ("whole list", True)):
            def launch(rounds: int, whole: bool = whole) -> None:
                _choose_again[(programs,)](logits, slots, *lists, rounds, WHOLE=whole, NUM_WARPS=8, num_warps=8, **constants)  # noqa: B023

            few, many = (timed_us(lambda n=n: launch(n))[0] for n in ROUNDS)
            found[what] = (many - few) / (ROUNDS[1] - ROUNDS[0])
        print(f"{columns} columns, {live} live: " + ", ".join(f"{what} {us:.2f} us" for what, us in found.items()), flush=True)


def time_products() -> None:
    shape = replace(SHAPES["Qwen3-30B-A3B"], num_layers=LAYERS, taps=(), vocab_size=4096, rolled=True)
    weights = StepWeights.random(shape, seed=1, device="cuda")
    state = StepState.of(shape, num_columns=8, num_slots=8, num_pages=8, device="cuda")
    state.router_logits_SCE.normal_()
    state.normed_CD.normal_()
    first: dict[tuple[str, int], torch.Tensor] = {}
    for parts, rolled, per_sm, one_list in FORMS:
        form = f"parts {parts}, {'rolled' if rolled else 'unrolled'}, {per_sm} programs an SM{', one list' if one_list else ''}"
        kernel = StepKernel(weights, state, profile=True, expert_parts=parts, rolled=rolled, one_list=one_list, per_sm=per_sm)
        for live in (1, 8):
            inputs = StepInputs.dead(8)
            for c in range(live):
                inputs.set(c, token_id=0, slot=c, position=0)
            kernel.set_inputs(inputs)
            state.inter_MCF.fill_(0)
            state.partials_RD.fill_(0)
            stamps = []
            for _ in range(20):
                kernel.phase("gate_up")
                torch.cuda.synchronize()
                begin, *others = kernel.memory.stamps[:4].tolist()
                stamps.append([(t - begin) / 1e3 for t in others])
            kernel.phase("down")
            for name, got in (("inter", state.inter_MCF), ("partials", state.partials_RD)):
                bits = got.view(torch.int16 if got.dtype == torch.bfloat16 else torch.int32).clone()
                if not torch.equal(first.setdefault((name, live), bits), bits):
                    raise SystemExit(f"bench_router_list: {name} of {form} and {live} columns has other bits than the first form's.")
            times = []
            for name in ("gate_up", "down"):
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    for i in range(24):
                        kernel.phase(name, layer=i % LAYERS)
                times.append(timed_us(graph.replay)[0] / 24)
            listed, fed, ended = (statistics.median(column) for column in zip(*stamps, strict=True))
            print(f"{form}, {live} live ({int(kernel.memory.list_tiles_R[0])} tiles): gate_up {times[0]:.2f} us, "
                  f"down {times[1]:.2f} us; in gate_up the list is there at {listed:.2f}, the first weights at {fed:.2f}, the end at {ended:.2f}", flush=True)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        raise SystemExit("bench_router_list: needs a Hopper GPU (sm_90): these kernels are built for no other.")
    print(environment(), flush=True)
    time_choice()
    time_products()


if __name__ == "__main__":
    main()
