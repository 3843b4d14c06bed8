"""A whole decode step: checks and times of the resident kernel and of its graph of launches: python tests/benchmarks/bench_step.py --compile --check --time.

    --groundwork  the checks of the dense phase and of attention alone, as bench_dense.py and bench_decode_attention.py have them
    --compile     build every kernel that the others need, in parallel, and say how long each took
    --check       small random weights, then two layers of SmolLM2-MoE and of Qwen3-30B-A3B: every phase's buffer against the twin's on the memory that it
                  found, from NaN; the resident kernel bitwise the launches, again and again; several steps in one launch bitwise one at a time; a column alone
                  bitwise among others; sampled tokens; the host's word and a barrier that is given up. Stops at the first wrong phase and names it
    --time        Qwen3-30B-A3B, 48 layers, random weights: us a step with 1 and 8 sequences behind a context of 512, of the resident kernel (the slope between
                  launches of 4 and 16 steps, and one step a launch) and of a CUDA graph of launches; bytes and percent of the read stream of the same run;
                  us of each phase by a clock in the kernel, and by a graph of that phase alone for all layers; at the end one table of all variants
"""

import argparse
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import bench_decode_attention
import bench_dense
import torch
from bench_moe import read_stream, timed_us
from machine import environment

sys.path[:0] = [str(Path(__file__).parents[1])]
from step_checks import Case, check_alone, check_ends, check_phases, check_resident, check_same, check_steps  # noqa: E402
from step_compile import OTHERS, SHAPES, VARIANTS  # noqa: E402

from kilotok.kernels.persistent import StepInputs, StepShape  # noqa: E402
from kilotok.kernels.persistent.step import LAYER_PHASES, StepKernel, layer_phases  # noqa: E402
from kilotok.kernels.persistent.step_code import PHASES  # noqa: E402

ALL = VARIANTS | OTHERS
CONTEXT = 512
STEPS = (4, 16)
REPEATS = 9
# (first column, columns) of each sequence, by live columns
LAYOUTS: dict[int, list[tuple[int, int]]] = {
    1: [(3, 1)], 2: [(0, 1), (7, 1)], 3: [(1, 3)], 4: [(0, 2), (4, 1), (6, 1)], 5: [(1, 1), (2, 4)], 6: [(0, 1), (2, 5)], 7: [(0, 4), (5, 3)], 8: [(0, 8)]}


def small(name: str, *, layers: int) -> StepShape:
    shape = SHAPES[name]
    return replace(shape, num_layers=min(shape.num_layers, layers), taps=tuple(t for t in shape.taps if t < layers))


# --- compile ---


def _compile(task: tuple[str, int, str, bool, str]) -> str:
    name, columns, phase, profile, variant = task
    started = time.time()
    kernel = Case(small(name, layers=1), num_columns=columns, seed=1, context=0, profile=profile, variant=ALL[variant]).kernel
    ready = time.time()
    built = kernel.compile(phase)
    what = f"{name}, {variant}, C {columns} {phase}{' profiled' if profile else ''}, {built.metadata.shared / 1024:.1f} KB shared"
    return f"{what}: {time.time() - ready:.1f} s (and {ready - started:.1f} s before)"


def compile_all(names: list[str], variants: list[str]) -> None:
    """One process a kernel, the slow ones first."""
    started = time.time()
    tasks = [(name, 8, "all", False, variant) for variant in variants for name in names if variant in VARIANTS or name == "Qwen3-30B-A3B"]
    tasks += [("Qwen3-30B-A3B", 8, "all", True, variant) for variant in variants if "Qwen3-30B-A3B" in names]
    tasks += [("pocket", 16, "all", False, variant) for variant in variants if "pocket" in names and variant in VARIANTS]
    tasks += [(name, 8, phase, False, variant) for phase in ("gate_up", "attention", *(p for p in PHASES if p not in ("gate_up", "attention")))
              for name in names for variant in variants if variant in VARIANTS]
    workers = min(len(tasks), max(1, (os.cpu_count() or 4) - 2), 14)
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        for line in pool.imap_unordered(_compile, tasks, chunksize=1):
            print(line, flush=True)
    print(f"compiled {len(tasks)} kernels in {time.time() - started:.0f} s with {workers} processes", flush=True)


# --- checks ---


def check(names: list[str], *, repeats: int, variant: str) -> None:
    started = time.time()
    print(f"--- {variant} ---", flush=True)
    how = ALL[variant]

    def said(what: str) -> None:
        torch.cuda.synchronize()
        print(f"{time.time() - started:6.1f} s  {what}", flush=True)

    if "pocket" in names:
        for seed in (1, 2):
            case = Case(small("pocket", layers=4), num_columns=8, seed=seed, context=300 if seed == 1 else 0, variant=how)
            for live, layout in LAYOUTS.items():
                inputs = case.inputs(layout, seed=live)
                worst = check_phases(case, inputs)
                said(f"pocket, seed {seed}, {live} columns: phases within {worst:.1e} of the twin")
                check_resident(case, inputs, repeats=repeats if live in (1, 4, 8) else 3)
            said(f"pocket, seed {seed}: resident kernel bitwise its launches, {repeats} times")
            apart = case.inputs([(c, 1) for c in range(8)], seed=9)
            check_steps(case, apart, num_steps=6)
            check_steps(case, case.inputs([(5, 1)], seed=10), num_steps=6)
            said("pocket: six steps in one launch bitwise one at a time")
            for column in range(8):
                check_alone(case, apart, column=column, place=(3 * column + 1) % 8)
            said("pocket: columns alone bitwise among others")
            check_phases(case, case.inputs([(c, 1) for c in range(8)], seed=11, temperature=0.8))
            said("pocket: sampled tokens are the twin's")
        if how.per_sm == 2:
            other = StepKernel(case.weights, case.state, **replace(how, per_sm=1).kernel)
            check_same(case, apart, other, what="one program an SM against two")
            said("pocket: two programs an SM bitwise one of two consumers")
        check_ends(case, apart)
        said("pocket: ended by the host, and by a barrier that was given up")
        wide = Case(small("pocket", layers=4), num_columns=16, seed=3, context=200, variant=how)
        inputs = wide.inputs([(c, 1) for c in range(0, 16, 2)] + [(9, 1)], seed=4)
        wide.fresh(inputs)
        wide.kernel.run(inputs)
        wide.kernel.check_fault()
        narrow = Case(small("pocket", layers=4), num_columns=8, seed=3, context=200, variant=how)
        narrow.cache.copy_(wide.cache[:, : narrow.cache.shape[1]])
        narrow.state.pages_SP.copy_(torch.arange(narrow.state.pages_SP.numel(), device="cuda").to(torch.int32).view_as(narrow.state.pages_SP))
        for slot in (0, 1, 8):     # the slots' pages where the narrow case has them
            pages, at = wide.state.pages_SP[slot].long(), narrow.state.pages_SP[0].long()
            narrow.cache[:, at] = wide.cache[:, pages]
            one, column = StepInputs.dead(8), inputs.slots_C.tolist().index(slot)
            one.words_8C[:, 5] = inputs.words_8C[:, column]
            one.words_8C[1, 5] = 0
            narrow.fresh(one)
            narrow.kernel.run(one)
            narrow.kernel.check_fault()
            assert torch.equal(narrow.state.logits_CV[5], wide.state.logits_CV[column]), f"C = 16: column {column} differs from C = 8"
        said("pocket: 16 columns bitwise 8")
    for name in names:
        if name == "pocket":
            continue
        case = Case(small(name, layers=2), num_columns=8, seed=5, context=CONTEXT - 1, variant=how)
        for live in (8, 1):
            inputs = case.inputs([(c, 1) for c in range(live)], seed=live)
            said(f"{name}, {live} columns: phases within {check_phases(case, inputs):.1e} of the twin")
            check_resident(case, inputs, repeats=repeats)
            said(f"{name}, {live} columns: resident kernel bitwise its launches, {repeats} times")
        inputs = case.inputs(LAYOUTS[8], seed=3)
        said(f"{name}, a block of 8: phases within {check_phases(case, inputs):.1e} of the twin")
        check_resident(case, inputs, repeats=3)
        check_steps(case, case.inputs([(c, 1) for c in range(8)], seed=4), num_steps=4)
        said(f"{name}: four steps in one launch bitwise one at a time")
        del case
        torch.cuda.empty_cache()
    print(f"checked in {time.time() - started:.0f} s", flush=True)


# --- times ---


def times_us(calls: list[Callable[[], object]]) -> list[tuple[float, float, float]]:
    """Median, p20 and p80 of each; one after the other, so that what drifts drifts for all."""
    seen: list[list[float]] = [[] for _ in calls]
    for repeat in range(REPEATS + 1):
        for call, own in zip(calls, seen, strict=True):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(2_000_000)
            start.record()
            call()
            end.record()
            end.synchronize()
            if repeat:
                own.append(start.elapsed_time(end) * 1e3)
    return [(statistics.median(own), sorted(own)[len(own) // 5], sorted(own)[-1 - len(own) // 5]) for own in seen]


def time_all(variants: list[str], *, layers: int) -> None:
    stream = read_stream()
    print(f"read stream {stream:.3f} TB/s", flush=True)
    table: list[str] = []
    for variant in variants:
        table += time_variant(variant, layers=layers, stream=stream)
        torch.cuda.empty_cache()
    print("\n".join(["all variants:", *table]), flush=True)


def time_variant(variant: str, *, layers: int, stream: float) -> list[str]:
    """Prints times; returns a line for each number of columns."""
    started = time.time()
    shape = small("Qwen3-30B-A3B", layers=layers)
    case = Case(shape, num_columns=8, seed=1, context=CONTEXT, variant=ALL[variant])
    case.cache = torch.empty(0)
    case.state.cache.normal_()
    torch.cuda.synchronize()
    kernel, profiled = case.kernel, StepKernel(case.weights, case.state, profile=True, **ALL[variant].kernel)
    print(f"--- {variant}: Qwen3-30B-A3B shapes, {layers} layers: weights in {time.time() - started:.0f} s ---", flush=True)
    lines = []
    for live in (1, 8):
        inputs = case.inputs([(c, 1) for c in range(live)], seed=live)
        kernel.run(inputs)
        kernel.check_fault()

        def steps(count: int) -> Callable[[], object]:
            return lambda: kernel.relaunch(num_steps=count)

        kernel.set_inputs(inputs, num_steps=STEPS[1])
        one, few, many = times_us([steps(1), steps(STEPS[0]), steps(STEPS[1])])
        kernel.check_fault()
        step = [(b - a) / (STEPS[1] - STEPS[0]) for a, b in zip(few, many, strict=True)]
        kernel.relaunch(num_steps=1)
        kernel.check_fault()
        distinct = case.state.distinct_L.tolist()
        heads = shape.heads
        cache_bytes = live * (CONTEXT + 1) * 2 * heads.num_kv_heads * heads.head_dim * 2 * layers
        num_bytes = case.weights.dense_bytes + sum(distinct) * case.weights.bytes_per_expert + cache_bytes
        floor = num_bytes / stream / 1e6
        in_graph = (float("nan"),) * 3      # launches of other variants are not built: seconds each
        if variant in VARIANTS:
            in_graph, = times_us([kernel.capture().replay])
        print(f"T {live}: {num_bytes / 1e6:.0f} MB ({case.weights.dense_bytes / 1e6:.0f} dense, {statistics.mean(distinct):.1f} experts a layer), "
              f"floor {floor:.0f} us")
        for what, (median, low, high) in ((f"resident, slope of {STEPS[0]} to {STEPS[1]} steps", tuple(step)), ("resident, one step a launch", one),
                                          ("graph of launches", in_graph)):
            print(f"  {what:36s} {median:8.1f} us (p20 {low:.1f}, p80 {high:.1f}), {100 * floor / median:.1f} % of the roof, "
                  f"{live * 1e6 / median:.0f} tokens/s", flush=True)
        profiled.run(inputs, num_steps=3)
        profiled.check_fault()
        clock = profiled.phase_us()
        alone = {}
        for name in layer_phases(kernel.code) if variant in VARIANTS else ():
            graph = torch.cuda.CUDAGraph()
            kernel.phase(name)
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                for layer in range(layers):
                    kernel.phase(name, layer=layer)
            alone[name] = timed_us(graph.replay)[0] / layers
        phases = ", ".join(f"{name} {clock[name] / layers:.2f}" for name in LAYER_PHASES)
        print(f"  us a layer, by the kernel's clock: {phases}; head {clock['head']:.1f}, sample {clock['sample']:.1f}, finish {clock['finish']:.1f}")
        print("  us a layer, a graph of that phase: " + ", ".join(f"{name} {us:.2f}" for name, us in alone.items()), flush=True)
        lines.append(f"  T {live}  {variant:24s} resident {step[0]:8.1f} us ({100 * floor / step[0]:.1f} % of the roof), graph {in_graph[0]:8.1f} us; "
                     f"us a layer: {phases}; head {clock['head']:.1f}, sample {clock['sample']:.1f}")
    return lines


def groundwork() -> None:
    bench_dense.check()
    bench_decode_attention.checks()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for what in ("groundwork", "compile", "check", "time"):
        parser.add_argument(f"--{what}", action="store_true")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES), help="of --compile and --check (default: all)")
    parser.add_argument("--variants", nargs="+", default=list(ALL), choices=list(ALL),
                        help="forms of the kernel (default: all); those of --check are " + ", ".join(VARIANTS))
    parser.add_argument("--repeats", type=int, default=40, help="runs of the resident kernel (default: 40)")
    parser.add_argument("--layers", type=int, default=48, help="of --time (default: 48)")
    options = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        raise SystemExit("bench_step: needs a Hopper GPU (sm_90): these kernels are built for no other.")
    print(environment(), flush=True)
    names = sorted(options.shapes, key=["pocket", "SmolLM2-MoE", "Qwen3-30B-A3B"].index)
    if options.groundwork:
        groundwork()
    if options.compile:
        compile_all(names, options.variants)
    if options.check:
        for variant in options.variants:
            if variant in VARIANTS:
                check(names, repeats=options.repeats, variant=variant)
    if options.time:
        time_all(options.variants, layers=options.layers)


if __name__ == "__main__":
    main()
