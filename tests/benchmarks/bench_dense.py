"""The dense phases of a decode step in us, and in percent of a read stream of the same run: python tests/benchmarks/bench_dense.py --check.

Each timed launch walks over matrices that lie one after the other, over a gigabyte of them, so that none comes from L2; their weights are read once each.
A phase of a few megabytes takes as long as a launch does: `graph` is the time of one launch in a CUDA graph of all matrices, what the sequence of
launches pays, and the slope between two graphs, of a quarter and of all of them, leaves out what a graph costs itself. The host's 50-100 us of TMA
descriptors are in neither.

    stream     a Triton kernel that only reads, best of a few launch shapes; the roof of this machine in this run
    phases     qkv, o_proj, router and head of Qwen3-30B-A3B, the pocket and SmolLM2-MoE, with 1 live column and with all 8; the floor is
               the weights that the layout reads, pad included, over the stream
    no norm    the same with activations in place of the norm: what the norm costs
    long       the same as one matrix of all their rows: what the loop keeps of the stream when nothing begins or ends
    resident   o_proj and qkv of Qwen3-30B-A3B in one launch, with two barriers over the grid a layer, against the same in a graph of launches: us a layer,
               the slope between 8 and 48 layers; floor is the bytes of both
    sweep      other ways to cut the weights into stages, and other layouts (--sweep)

With --check the checks of tests/kernels/test_dense.py run first, on every shape.
"""

import argparse
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from bench_moe import num_programs, read_stream, timed_us
from machine import environment
from torch import Tensor

from kilotok.kernels.persistent import Cut, Dense, DenseLayout, DenseWeight, live_mask

sys.path[:0] = [str(Path(__file__).parents[1])]
from dense_chain import QKV, Chain, check_chain  # noqa: E402
from dense_checks import MOST_ROUNDED_APART, activations, check_dense  # noqa: E402
from dense_compile import SHAPES, Shape  # noqa: E402

BYTES = 10**9             # at least, of all matrices of a graph, if that is no more than
MOST_MATRICES = 256
REPEATS = 15
LAYERS = (8, 48)          # of the two launches whose difference is timed


def launches(shape: Shape, dense: Dense, *, columns: int) -> list[tuple[Tensor, ...]]:
    """Arguments of a launch of each matrix; a norm's input and outputs are shared, as they are in a step."""
    layout = dense.weight.layout
    x = activations(8, layout.depth, seed=1, device="cuda")
    if shape.norm and shape.residual == "fp32":
        x = x.float()
    live = live_mask(torch.arange(8, device="cuda") < columns)
    residual = torch.randn(8, layout.rows, device="cuda") if shape.add else None
    return [(x, live) if residual is None else (x, live, residual)] * dense.num_matrices


def graph_of(dense: Dense, arguments: list[tuple[Tensor, ...]]) -> torch.cuda.CUDAGraph:
    layout = dense.weight.layout

    def launch_all() -> None:
        for matrix, (x, live, *residual) in enumerate(arguments):
            dense(x, out=out, live=live, residual_CR=residual[0] if residual else None, matrix=matrix)

    out = torch.empty((8, layout.rows) if len(arguments[0]) == 3 else (layout.splits, 8, layout.rows), device="cuda")
    launch_all()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch_all()
    graph.replay()
    return graph


def graph_us(graphs: list[torch.cuda.CUDAGraph]) -> list[list[float]]:
    """Sorted times of each graph; replays of one after the other, so that what drifts drifts for all."""
    times: list[list[float]] = [[] for _ in graphs]
    for _ in range(REPEATS):
        for graph, seen in zip(graphs, times, strict=True):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(200_000)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            seen.append(start.elapsed_time(end) * 1e3)
    return [sorted(seen) for seen in times]


def weight_of(layout: DenseLayout) -> DenseWeight:
    """Random weights of as many matrices as fill BYTES: words of small bf16 numbers."""
    count = max(4, min(MOST_MATRICES, -(-BYTES // layout.num_bytes)))
    words = torch.randint(-2**31, 2**31 - 1, (count, layout.num_bytes // 4), dtype=torch.int32, device="cuda") & -0x40004001   # exponents below 2**0
    return DenseWeight(words=words, layout=layout)


def phase_line(shape: Shape, weight: DenseWeight, stream: float, *, columns: int, cut: Cut | None = None, say: str = "") -> None:
    """A launch of each matrix, in graphs; or of one matrix, as often."""
    layout = weight.layout
    norm = torch.ones(weight.words.shape[0], layout.depth, dtype=torch.bfloat16, device="cuda") if shape.norm else None
    dense = Dense(weight, norm=norm, cut=cut)
    some = launches(shape, dense, columns=columns)
    few = max(1, len(some) // 4)
    short, long = graph_us([graph_of(dense, some[:few]), graph_of(dense, some)])

    def at(quantile: float) -> float:
        i = min(REPEATS - 1, int(quantile * REPEATS))
        return (long[i] - short[i]) / (len(some) - few) if len(some) > few else long[i]

    rate = layout.num_bytes / at(0.5) / 1e6
    print(f"| {shape.name}{say} | {layout.rows} x {layout.depth} | {layout.depth_warps} x {layout.num_blocks}, {layout.pairs}, {layout.splits} | "
          f"{dense.cut.stages} x {8 * dense.cut.stage_blocks} KB | {columns} | {layout.num_bytes / 1e6:.2f} MB, pad "
          f"{100 * layout.pad_bytes / layout.num_bytes:.1f} % | {layout.num_bytes / stream / 1e6:.2f} | {at(0.5):.2f} ({at(0.2):.2f}, {at(0.8):.2f}) | "
          f"{long[REPEATS // 2] / len(some):.2f} | {rate:.3f} | {100 * rate / stream:.1f} % |", flush=True)


def as_one(weight: DenseWeight) -> DenseWeight:
    """Its matrices as one of all their rows; where which row lies is another matter, and so is padding."""
    layout = weight.layout
    return DenseWeight(words=weight.words.view(1, -1), layout=replace(layout, rows=layout.num_groups * layout.group_rows * weight.words.shape[0]))


def phases(stream: float, *, sweep: bool) -> None:
    print("\n| phase | rows x input | depth warps x blocks, pairs, splits | a consumer's ring | live columns | bytes | floor us | "
          "us, slope of graphs (p20, p80) | us of a launch | TB/s | of the stream |\n|---|---|---|---|---|---|---|---|---|---|---|")
    for shape in SHAPES:
        layout = shape.layout
        weight = weight_of(layout)
        for columns in (1, 8):
            phase_line(shape, weight, stream, columns=columns)
        for columns in (1, 8):
            phase_line(shape, as_one(weight), stream, columns=columns, say=", long")
        if shape.norm:
            phase_line(replace(shape, norm=False), weight, stream, columns=8, say=", no norm")
        if sweep and shape.name.startswith("Qwen3"):
            for blocks, stages in ((1, 4), (1, 6), (2, 2), (2, 4), (4, 2), (4, 3)):
                if layout.num_blocks % blocks == 0:
                    phase_line(shape, weight, stream, columns=8, cut=Cut(stage_blocks=blocks, stages=stages), say=", sweep")
            for other in other_layouts(layout):
                phase_line(shape, weight_of(other), stream, columns=8, say=", sweep")
        del weight


def resident(stream: float) -> None:
    print("\n| o_proj and qkv, 2 barriers | live columns | bytes a layer | floor us | us a layer (p20, p80) | times the floor |\n|---|---|---|---|---|---|")
    chains = [Chain(num_layers=count, seed=3) for count in LAYERS]
    programs = num_programs(torch.device("cuda"))
    num_bytes = (chains[0].out.words.numel() + chains[0].qkv.words.numel()) * 4 // LAYERS[0]
    floor = num_bytes / stream / 1e6
    for columns in (1, 8):
        live = live_mask(torch.arange(8, device="cuda") < columns)
        qkv = torch.empty(chains[0].qkv.layout.splits, 8, QKV.rows, device="cuda")
        for name in ("resident", "launches in a graph"):
            times = []
            for chain in chains:
                if name == "resident":
                    times.append(timed_us(partial(chain.resident, chain.residual, qkv, live=live, programs=programs)))
                else:
                    chain.launches(chain.residual, qkv, live=live)
                    torch.cuda.synchronize()
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph):
                        chain.launches(chain.residual, qkv, live=live)
                    times.append(timed_us(graph.replay))
                if int(chain.fault):
                    raise SystemExit("bench_dense: a program gave up at a barrier.")
            each = [(long - short) / (LAYERS[1] - LAYERS[0]) for short, long in zip(times[0], times[1], strict=True)]
            print(f"| {name} | {columns} | {num_bytes / 1e6:.2f} MB | {floor:.2f} | {each[0]:.2f} ({each[1]:.2f}, {each[2]:.2f}) | {each[0] / floor:.2f} |",
                  flush=True)


def other_layouts(layout: DenseLayout) -> list[DenseLayout]:
    """The same matrix without splits, with and without pairs, where a warp can hold its activations."""
    found = []
    for pairs, splits in ((1, 1), (2, 1), (1, 2), (2, 2)):
        blocks = -(-layout.depth // (32 * 8 * pairs * splits))
        if blocks <= 8 and (pairs, splits) != (layout.pairs, layout.splits):
            found.append(replace(layout, depth_warps=8, num_blocks=blocks, pairs=pairs, splits=splits))
    return found


def check() -> None:
    started = time.time()
    for shape in SHAPES:
        errors = check_dense(shape, seed=torch.seed() % 2**31)
        print(f"{shape.name}: " + ", ".join(f"{name} {error:.1e}" for name, error in errors.items()), flush=True)
        if not (errors["sums"] <= 1e-6 and errors.get("norm", 0.0) <= MOST_ROUNDED_APART):
            raise SystemExit(f"bench_dense: sums must be within 1e-6 and {MOST_ROUNDED_APART} of the activations rounded apart; got {errors}.")
    check_chain(seed=torch.seed() % 2**31, programs=num_programs(torch.device("cuda")))
    print(f"resident kernel: bitwise its launches; checked in {time.time() - started:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare with float64 first")
    parser.add_argument("--sweep", action="store_true", help="also other ways to cut the weights")
    options = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        raise SystemExit("bench_dense: needs a Hopper GPU (sm_90): these kernels are built for no other.")
    print(environment())
    if options.check:
        check()
    stream = read_stream()
    print(f"read stream: {stream:.3f} TB/s")
    resident(stream)
    phases(stream, sweep=options.sweep)


if __name__ == "__main__":
    main()
