"""Rounds of the persistent kernel on a GPU: python tests/benchmarks/bench_round.py --compile --check --time

    --compile     every kernel that the other two need, built in parallel processes into Triton's cache
    --check       every launch of a round against its twin, buffer by buffer; then the resident kernel bit by bit against the launches, several rounds a launch
                  against one at a time, and the text against plain decoding in the same kernel, caches too. The target's own phases are bench_step.py's. Stops
                  at the first wrong phase and names it
    --time        Qwen3-30B-A3B of 48 layers and a draft of 5, random weights, behind a context of 512: us of a step of the kernel without a draft, of a step
                  of the kernel of rounds (which keeps the draft's context), and of a round that verifies 0, 1, 3, 5 and 7 proposals, by the slope between
                  launches of 2 and 8; bytes and percent of the read stream of the same run; tokens a second as accepted (random weights: next to none of the
                  proposals come true) and with an assumed number accepted, which is labelled so: it moves sequences on without being their text; us of every
                  phase by a clock in the kernel
"""

import argparse
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from bench_moe import read_stream
from bench_step import times_us
from machine import environment

sys.path[:0] = [str(Path(__file__).parents[1])]
from round_checks import RoundCase, check_resident_rounds, check_round_phases, check_rounds, check_step, check_text  # noqa: E402
from round_compile import DRAFTS, ROUND_VARIANTS  # noqa: E402
from step_compile import SHAPES  # noqa: E402

from kilotok.kernels.persistent import StepInputs, StepShape  # noqa: E402
from kilotok.kernels.persistent.draft_code import ROUND_PHASES  # noqa: E402
from kilotok.kernels.persistent.draft_model import DraftShape, DraftWeights  # noqa: E402
from kilotok.kernels.persistent.round_inputs import TILE, RoundInputs  # noqa: E402
from kilotok.kernels.persistent.rounds import RoundKernel  # noqa: E402
from kilotok.kernels.persistent.step import StepKernel  # noqa: E402
from kilotok.kernels.persistent.step_code import PHASES  # noqa: E402

CONTEXT = 512
ROUNDS = (2, 8)                     # of the two launches whose difference is timed
VERIFIED = (0, 1, 3, 5, 7)


def small(name: str, *, layers: int, draft_layers: int) -> tuple[StepShape, DraftShape]:
    """A model with fewer layers, and its draft; the last layers are tapped."""
    shape, draft = SHAPES[name], DRAFTS[name]
    layers = min(shape.num_layers, layers)
    taps = tuple(range(layers))[-draft.num_taps:] if layers < shape.num_layers else shape.taps
    return replace(shape, num_layers=layers, taps=taps), replace(draft, num_layers=min(draft.num_layers, draft_layers), num_taps=len(taps))


# --- compile ---


def _compile(task: tuple[str, str, int, int, int, bool, str]) -> str:
    name, phase, columns, layers, draft_layers, profile, variant = task
    started = time.time()
    shape, draft = small(name, layers=layers, draft_layers=draft_layers)
    kernel = RoundCase.of(shape, draft, num_columns=columns, seed=1, context=0, profile=profile, variant=ROUND_VARIANTS[variant]).kernel
    ready = time.time()
    built = kernel.compile(phase)
    what = f"{name}, {variant}, C {columns} {phase}{' profiled' if profile else ''}, {built.metadata.shared / 1024:.1f} KB shared"
    return f"{what}: {time.time() - ready:.1f} s (and {ready - started:.1f} s before)"


def compile_tasks(names: Sequence[str], variants: Sequence[str]) -> list[tuple[str, str, int, int, int, bool, str]]:
    """What --check and --time launch, the slow ones first. The number of layers is in no code, that of taps and of the draft's layers is."""
    tasks = [(name, "all", 8, DRAFTS[name].num_taps, DRAFTS[name].num_layers, profile, variant) for name in names if name != "pocket"
             for profile in (False, True) for variant in variants]
    small_ones = [(name, columns) for name in names for columns in ((8, 16) if name == "pocket" else (8,))]
    for phase in ("all", *ROUND_PHASES, *PHASES[:-1]):
        tasks += [(name, phase, columns, 2, 2, False, variant) for name, columns in small_ones for variant in variants]
    return tasks


def compile_all(names: Sequence[str], variants: Sequence[str]) -> None:
    """One process a kernel."""
    started, tasks = time.time(), compile_tasks(names, variants)
    workers = min(len(tasks), max(1, (os.cpu_count() or 4) - 2), 14)
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        for line in pool.imap_unordered(_compile, tasks, chunksize=1):
            print(line, flush=True)
    print(f"compiled {len(tasks)} kernels in {time.time() - started:.0f} s with {workers} processes", flush=True)


# --- checks ---


def check(names: Sequence[str], *, repeats: int, variant: str) -> None:
    started = time.time()
    print(f"--- {variant} ---", flush=True)

    def said(what: str) -> None:
        torch.cuda.synchronize()
        print(f"{time.time() - started:6.1f} s  {what}", flush=True)

    for name in names:
        shape, draft = small(name, layers=2, draft_layers=2)
        for columns, context in ((8, CONTEXT - 3), (16, 250)) if name == "pocket" else ((8, CONTEXT - 3),):
            case = RoundCase.of(shape, draft, num_columns=columns, seed=columns, context=context, variant=ROUND_VARIANTS[variant])
            what = f"{name}, {columns} columns"
            for limit, temperature in ((7, 0.0), (3, 1.0), (0, 0.0)):
                inputs = case.inputs(seed=limit + 1, limit=limit, temperature=temperature)
                said(f"{what}, limit {limit}: phases of two rounds within {check_round_phases(case, inputs, rounds=2):.1e} of the twin")
                check_resident_rounds(case, inputs, repeats=repeats)
                said(f"{what}, limit {limit}: resident kernel bitwise its launches, {repeats} times")
            inputs = case.inputs(seed=7, limit=7, temperature=1.0, live=1)
            check_resident_rounds(case, inputs, repeats=3)
            for temperature in (0.0, 4.0, 20.0):        # the hotter, the more do target and draft follow the noise that they share
                tokens = check_text(case, case.inputs(seed=5, limit=7, temperature=temperature), num_rounds=6)
                said(f"{what}: six rounds in a launch bitwise one at a time, text and caches those of plain decoding; {tokens:.2f} tokens a round at "
                     f"temperature {temperature}")
            check_step(case, StepKernel(case.weights, case.state, **ROUND_VARIANTS[variant].kernel))
            said(f"{what}: a step bitwise that of a kernel without a draft")
            check_end(case)
            said(f"{what}: near the end of the context, and ended by the host")
            del case
            torch.cuda.empty_cache()
    print(f"checked in {time.time() - started:.0f} s", flush=True)


def check_end(case: RoundCase, *, backs: Iterable[int] = range(1, 11)) -> None:
    """Rounds up to the context's last position and beyond, from anchors at each of the last ten; and a host's word that ends a launch at its next round."""
    length = case.weights.shape.max_length
    for back in backs:
        inputs = case.inputs(seed=back, limit=7, temperature=20.0)
        inputs.positions_S[inputs.slots_S >= 0] = length - back
        case.fresh()
        for cache in (case.state.cache, case.draft_state.cache):
            cache.nan_to_num_(nan=0.5)
        case.kernel.run_rounds(inputs, num_rounds=12)
        case.kernel.check_fault()
        tokens = case.kernel.tokens_so_far()
        counts = [int((tokens[:, i * TILE:(i + 1) * TILE] >= 0).sum()) for i in range(case.kernel.code.C // TILE)]
        assert counts == [back] * len(counts), f"from {back} before the end of the context sequences gave {counts} tokens"
        assert int(case.kernel.verified_so_far().max()) <= max(0, back - 2), "a round verified beyond the context"
    case.fresh(case.inputs(seed=1, limit=7), num_rounds=8)
    case.kernel.memory.ring_count[0] = 0
    case.kernel.memory.host_stop[0] = 1
    case.kernel.relaunch_rounds(num_rounds=8)
    case.kernel.check_fault()
    assert int(case.kernel.memory.ring_count) == 1, f"the host's word ended it after {int(case.kernel.memory.ring_count)} rounds"
    assert len(check_rounds(case, case.inputs(seed=2, limit=7), num_rounds=2)[0]) == 2


# --- times ---


def draft_bytes(weights: DraftWeights, *, head_bytes: int, sequences: int, context: int) -> int:
    """What a draft and its context read in a round: its matrices, the head once more, keys and values of the block's window in every layer."""
    matrices = sum(4 * one.words.numel() for one in (weights.qkv, weights.out, weights.gate_up, weights.down, weights.fc, weights.keys))
    heads = weights.shape.heads
    seen = context if heads.window is None else min(context, heads.window)
    return matrices + head_bytes + sequences * seen * 2 * heads.num_kv_heads * heads.head_dim * 2 * weights.shape.num_layers


def target_bytes(case: RoundCase, distinct: Sequence[int], *, sequences: int, context: int) -> int:
    """What a step of the target reads: dense matrices, the experts that were chosen, the cache."""
    shape, heads = case.weights.shape, case.weights.shape.heads
    cache = sequences * context * 2 * heads.num_kv_heads * heads.head_dim * 2 * shape.num_layers
    return case.weights.dense_bytes + sum(distinct) * case.weights.bytes_per_expert + cache


def slope(few: Sequence[float], many: Sequence[float], *, counts: tuple[int, int] = ROUNDS) -> list[float]:
    """Of medians, p20 and p80 of two launches: us of one more."""
    return [(b - a) / (counts[1] - counts[0]) for a, b in zip(few, many, strict=True)]


def line_of(what: str, us: Sequence[float], *, floor_us: float, tokens: float, assumed: bool) -> str:
    median, low, high = us
    return (f"  {what:44s} {median:8.1f} us (p20 {low:.1f}, p80 {high:.1f}), {100 * floor_us / median:5.1f} % of the roof, "
            f"{tokens * 1e6 / median:7.0f} tokens/s{' assumed' if assumed else ''}")


def time_variant(variant: str, *, layers: int, stream: float) -> None:
    started = time.time()
    shape, draft = small("Qwen3-30B-A3B", layers=layers, draft_layers=5)
    case = RoundCase.of(shape, draft, num_columns=8, seed=1, context=CONTEXT, variant=ROUND_VARIANTS[variant])
    case.state.cache.normal_()
    case.draft_state.cache.normal_()
    torch.cuda.synchronize()
    kernel = case.kernel
    print(f"--- {variant}: Qwen3-30B-A3B shapes, {layers} layers, a draft of {draft.num_layers}: weights in {time.time() - started:.0f} s ---", flush=True)

    inputs = case.inputs(seed=1, limit=7)
    plain = StepInputs.dead(8)
    plain.words_8C[:, 0] = inputs.words_9S[:8, 0]
    alone = StepKernel(case.weights, case.state, **ROUND_VARIANTS[variant].kernel)
    for what, one in (("a step, kernel without a draft", alone), ("a step, kernel of rounds", kernel)):
        one.run(plain, num_steps=ROUNDS[1])
        one.check_fault()
        # relaunched steps go on from where the last one ended in the kernel of rounds, from the same columns in the other: 8 a launch, 10 launches
        times = times_us([_steps(one, plain, count) for count in ROUNDS])
        one.check_fault()
        num_bytes = target_bytes(case, case.state.distinct_L.tolist(), sequences=1, context=CONTEXT)
        print(line_of(what, slope(*times), floor_us=num_bytes / stream / 1e6, tokens=1, assumed=False), flush=True)

    head_bytes = 4 * case.weights.head.words.numel()
    more = draft_bytes(case.draft_weights, head_bytes=head_bytes, sequences=1, context=CONTEXT)
    costs = []
    for limit in VERIFIED:
        inputs = case.inputs(seed=1, limit=limit)
        for assumed in (None, *range(1, limit + 1, 2)):
            times = times_us([_rounds(case, inputs, count, assumed) for count in ROUNDS])
            kernel.check_fault()
            tokens = kernel.tokens_so_far()
            verified = kernel.verified_so_far()
            assert bool((verified == limit).all()), f"rounds verified {verified.flatten().tolist()}, not {limit}"
            distinct = case.state.distinct_L.tolist()
            num_bytes = target_bytes(case, distinct, sequences=1, context=CONTEXT) + more
            us = slope(*times)
            a_round = float((tokens >= 0).sum()) / len(tokens)
            print(line_of(f"a round, {limit} verified, {a_round - 1:.2f} accepted", us, floor_us=num_bytes / stream / 1e6, tokens=a_round,
                          assumed=assumed is not None) + f"; {num_bytes / 1e6:.0f} MB, {statistics.mean(distinct):.1f} experts a layer", flush=True)
            if assumed is None:
                costs.append(us[0])
    print("  cost of a round by proposals verified, us: " + ", ".join(f"{v}: {us:.1f}" for v, us in zip(VERIFIED, costs, strict=True)), flush=True)

    kernel.set_rounds(case.inputs(seed=1, limit=7))
    in_graph, = times_us([kernel.capture_rounds().replay])
    kernel.check_fault()
    print(line_of("a round, 7 verified, a graph of launches", in_graph, floor_us=num_bytes / stream / 1e6, tokens=1, assumed=False), flush=True)

    clocked = RoundKernel(case.weights, case.state, case.draft_weights, case.draft_state, profile=True, **ROUND_VARIANTS[variant].kernel)
    clocked.run_rounds(case.inputs(seed=1, limit=7), num_rounds=3)
    clocked.check_fault()
    found = clocked.phase_us()
    print("  us a round, by the kernel's clock: " + ", ".join(f"{name} {us:.1f}" for name, us in found.items()))
    whole = sum(found.values())
    own = sum(us for name, us in found.items() if name.startswith("draft_") or name == "choose")
    context = sum(found[name] for name in ("accept", "fc", "keys", "append"))
    print(f"  of {whole:.1f} us the draft takes {own:.1f}, acceptance and the context {context:.1f}", flush=True)


def _steps(kernel: StepKernel, inputs: StepInputs, count: int) -> Callable[[], object]:
    kernel.set_inputs(inputs, num_steps=count)
    return lambda: kernel.relaunch(num_steps=count)


def _rounds(case: RoundCase, inputs: RoundInputs, count: int, assumed: int | None) -> Callable[[], object]:
    return lambda: case.kernel.run_rounds(inputs, num_rounds=count, assumed=assumed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for what in ("compile", "check", "time"):
        parser.add_argument(f"--{what}", action="store_true")
    parser.add_argument("--shapes", nargs="+", default=list(DRAFTS), choices=list(DRAFTS), help="of --compile and --check (default: all)")
    parser.add_argument("--variants", nargs="+", default=list(ROUND_VARIANTS), choices=list(ROUND_VARIANTS), help="forms of the kernel (default: all)")
    parser.add_argument("--repeats", type=int, default=20, help="runs of the resident kernel (default: 20)")
    parser.add_argument("--layers", type=int, default=48, help="of the target, of --time (default: 48)")
    options = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        raise SystemExit("bench_round: needs a Hopper GPU (sm_90): these kernels are built for no other.")
    print(environment(), flush=True)
    if options.compile:
        compile_all(options.shapes, options.variants)
    if options.check:
        for variant in options.variants:
            check(options.shapes, repeats=options.repeats, variant=variant)
    if options.time:
        stream = read_stream()
        print(f"read stream {stream:.3f} TB/s", flush=True)
        for variant in options.variants:
            time_variant(variant, layers=options.layers, stream=stream)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
