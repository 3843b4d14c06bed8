"""Decode attention in us and in percent of the time that its cache bytes take: python tests/benchmarks/bench_decode_attention.py --check.

One sequence with T = 1 or 8 columns (a verify block), or eight with one each, and a context of 512, 4096 and 32768 positions. A timed graph runs over many
layers, each with a cache of its own, so that what it reads was not read lately; the launches of a layer are nodes of that CUDA graph, as in a step. Figures
are us a layer.

    floor     keys and values of the context over the read stream of the same run (a Triton kernel that only reads)
    last      partial results added by the item that comes last: one launch
    all       by all programs: a second launch, behind the first
    128/16    positions in flight / query rows of an item (attention.AttentionForm); with 64 in flight two programs fit an SM
    stages    of one launch: us from the first program's start until the last program came last to: its start, queries and new keys, weights, mixed values,
              partial results, merged; median of 20 launches, one after the other
    router    logits to the routing list by one program, for the same columns

With --check the checks of tests/kernels/test_persistent_attention.py run first: against the twin and float64 from poisoned memory, repeated runs,
columns alone and among others bit by bit.
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from bench_moe import read_stream, timed_us
from machine import environment

from kilotok.kernels.persistent.attention import COLUMNS, FORM, AttentionForm, AttentionWorkspace, Heads, Step, attention, plan_columns, rope_table
from kilotok.kernels.persistent.attention_device import STAMPS
from kilotok.kernels.persistent.plan import CHUNK
from kilotok.kernels.persistent.router import empty_routing, router

sys.path[:0] = [str(Path(__file__).parents[1])]
from attention_checks import DEAD, HEADS, case_of, check_alone, check_case, check_placed, run_on_gpu  # noqa: E402

LAYERS = 16
CONTEXTS = (512, 4096, 32768)
EXPERTS = {"Qwen3-30B-A3B": (128, 8), "SmolLM2-MoE": (8, 2), "pocket": (8, 2)}
COLD_BYTES = 2**29         # of all caches, at least: far more than the L2 cache, as the weights of a step push them out too
MOST_LAYERS = 512
CASES = ((1, 1), (1, 8), (8, 1))    # sequences, columns of each
FORMS = tuple(AttentionForm(keys=keys, queries=queries, last_merges=last) for keys, queries in ((128, 16), (64, 16), (128, 32), (128, 64))
              for last in (True, False))
STAGES = ("start", "queries", "weights", "mixed", "partial", "merged")


def graph_us(call: Callable[[], object], *, nodes: int) -> tuple[float, float, float]:
    """Median, p20 and p80 of a node of a CUDA graph."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    median, low, high = timed_us(graph.replay)
    return median / nodes, low / nodes, high / nodes


def attention_lines(name: str, heads: Heads, stream: float, *, context: int, sequences: int, live: int, columns: int, forms: tuple[AttentionForm, ...]) -> None:
    device = torch.device("cuda")
    chunks = -(-context // CHUNK)
    layer_bytes = 2 * sequences * context * heads.num_kv_heads * heads.head_dim * 2
    layers = min(MOST_LAYERS, max(LAYERS, COLD_BYTES // layer_bytes))
    caches = [torch.randn(heads.cache_shape(sequences * chunks), device=device, dtype=torch.bfloat16) for _ in range(layers)]
    slots = torch.full((columns,), -1, dtype=torch.int32, device=device)
    positions = torch.zeros(columns, dtype=torch.int32, device=device)
    slots[:sequences * live] = torch.arange(sequences, dtype=torch.int32, device=device).repeat_interleave(live)
    positions[:sequences * live] = torch.arange(context - live, context, dtype=torch.int32, device=device).repeat(sequences)
    pages = torch.randperm(sequences * chunks, device=device).to(torch.int32).view(sequences, chunks)
    step = Step(slots_C=slots, positions_C=positions, pages_SP=pages)
    cos, sin = rope_table(head_dim=heads.head_dim, theta=1e6, max_length=context, device=device)
    norm = torch.ones(heads.num_heads + heads.num_kv_heads, heads.head_dim, dtype=torch.bfloat16, device=device) if heads.rms_eps is not None else None
    qkv = torch.randn(columns, heads.qkv_width, device=device)
    space = AttentionWorkspace.of(heads, num_columns=columns, max_length=context, device=device)
    out = torch.empty(columns, heads.num_heads * heads.head_dim, dtype=torch.bfloat16, device=device)
    floor = layer_bytes / stream / 1e6

    def run(form: AttentionForm, cache: torch.Tensor, stamps: torch.Tensor | None = None) -> None:
        attention(qkv, step, heads=heads, cache=cache, cos_LK=cos, sin_LK=sin, workspace=space, out_CW=out, qk_norm=norm, form=form, stamps=stamps)

    print(f"{name} C {columns}, {sequences} sequences of {live}, context {context}: floor {floor:.2f} us, {layers} layers", flush=True)
    for form in forms:
        plan_columns(step, heads=heads, workspace=space, max_length=context, form=form)

        def layers_of(form: AttentionForm = form) -> None:
            for cache in caches:
                run(form, cache)

        median, low, high = graph_us(layers_of, nodes=layers)
        kind = f"{'last' if form.last_merges else 'all '} {form.keys:3d}/{form.queries}"
        line = f"    {kind}  {median:7.2f} us ({low:.2f}-{high:.2f}), {100 * floor / median:5.1f} %"
        if form.queries == FORM.queries:
            stamps = torch.zeros(torch.cuda.get_device_properties(device).multi_processor_count, STAMPS, dtype=torch.int64, device=device)
            rounds = []
            for cache in (caches * 20)[:20]:
                stamps.zero_()
                run(form, cache, stamps)
                begin = int(stamps[:, 0].min())
                rounds.append([max(0, int(stamps[:, i].max()) - begin) / 1e3 for i in range(len(STAGES))])
            line += "; stages " + ", ".join(f"{stage} {statistics.median(times):.2f}" for stage, times in zip(STAGES, zip(*rounds, strict=True), strict=True))
        print(line, flush=True)


def router_line(name: str, *, columns: int) -> None:
    experts, per_token = EXPERTS[name]
    logits = torch.randn(columns, experts, device="cuda")
    slots = torch.zeros(columns, dtype=torch.int32, device="cuda")
    routing = empty_routing(num_columns=columns, experts_per_token=per_token, num_experts=experts, device=logits.device)

    def run() -> None:
        for _ in range(LAYERS):
            router(logits, slots, routing=routing, normalize=True)

    median, low, high = graph_us(run, nodes=LAYERS)
    print(f"{name:14s} C {columns:2d} router {median:7.2f} us ({low:.2f}-{high:.2f})", flush=True)


def checks() -> None:
    """Everything that the GPU test of attention asks, over random columns too; raises at the first that fails."""
    mixed = ((1, 126), (1, 127), (1, 128), DEAD, (0, 4700), DEAD, (2, 0), (2, 1))
    far = tuple((0, 33000 + t) for t in range(8))
    for name, heads in HEADS.items():
        for columns, length in ((mixed, 4864), (tuple((0, 253 + t) for t in range(8)), 4864), (far, 40960)):
            case = case_of(heads, columns, max_length=length, seed=torch.seed() % 2**31, device="cuda")
            for form in FORMS:
                check_case(case, run_on_gpu, form)
                check_alone(case, run_on_gpu, form)
                for wider in COLUMNS[1:]:
                    check_placed(case, run_on_gpu, form, num_columns=wider)
        print(f"checked {name}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="check results first")
    parser.add_argument("--shapes", nargs="+", default=list(HEADS), choices=list(HEADS), help="models (default: all)")
    parser.add_argument("--columns", nargs="+", type=int, default=[8], choices=COLUMNS, help="columns of the step (default: 8)")
    options = parser.parse_args()
    print(environment(), flush=True)
    if options.check:
        checks()
    stream = read_stream()
    print(f"read stream {stream:.3f} TB/s", flush=True)
    for name in options.shapes:
        for columns in options.columns:
            for context in CONTEXTS:
                for sequences, live in CASES:
                    attention_lines(name, HEADS[name], stream, context=context, sequences=sequences, live=live, columns=columns, forms=FORMS)
            router_line(name, columns=columns)


if __name__ == "__main__":
    main()
