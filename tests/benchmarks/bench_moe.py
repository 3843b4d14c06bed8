"""Expert products and the two-phase layer in us, and in percent of a read stream of the same run: python tests/benchmarks/bench_moe.py --check.

Each timed launch reads weights that the launches before it did not: a product runs over a gigabyte of experts, every layer over experts in memory
of its own. The host's 50-100 us of TMA descriptors a launch are not in the time. A layer's time is the slope between a launch of 8 layers and one of
48: what a layer costs inside a persistent step, both barriers and the sum of the partials in it.

    stream     a Triton kernel that only reads, best of a few launch shapes; the roof of this machine in this run
    products   gate and up with the activation, and down up to its partials, over every expert with 1 live column (8 tokens
               give a routed expert 1.1 to 1.7) and with all 8; bytes are what the layout reads, pad included
    layer      routing list given; T = 8, 4, 1 with distinct experts as drawn; the byte floor is weights over the stream
    sweep      the same over ways to cut the weights (--sweep): no repacking, the layout does not depend on them

With --check the checks of tests/kernels/test_moe_product.py run first, on every shape.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from machine import environment
from torch import Tensor

from kilotok.kernels.moe.device import down_kernel, gate_up_kernel
from kilotok.kernels.moe.layer import Experts, Workspace
from kilotok.kernels.moe.product import Stages, constants_of, descriptors, num_programs
from kilotok.kernels.moe.routing import Routing, route, stack_routings
from kilotok.kernels.moe.weights import ExpertWeights
from kilotok.kernels.mx.layouts import FragmentWeight
from kilotok.kernels.persistent.read_stream import stream_bytes_per_s
from kilotok.kernels.persistent.read_stream import timed_us as sorted_us

sys.path[:0] = [str(Path(__file__).parents[1])]
from moe_checks import activations, check_products, checkpoint_of  # noqa: E402
from moe_compile import SHAPES, Shape  # noqa: E402

LAYERS = (8, 48)          # of the two launches whose difference is timed
SETS = 4                  # different weights and routings; every layer has memory of its own
PRODUCT_BYTES = 10**9     # at least, of gate and up
REPEATS = 9
_sets: dict[Shape, ExpertWeights] = {}


def cut_of(groups: int, parts: int, stages: int, partitions: int) -> Stages:
    return Stages(groups=groups, parts=parts, stages=stages, partitions=partitions)


# Other ways to cut the weights than `Stages.of` chooses, gate and up with down: what a sweep tries
PRODUCT_CUTS = (
    (SHAPES[0], ((cut_of(1, 4, 3, 2), cut_of(2, 1, 2, 2)), (cut_of(4, 1, 2, 1), cut_of(1, 4, 3, 2)))),
    (SHAPES[1], ((cut_of(2, 1, 2, 1), cut_of(1, 1, 4, 2)),)),
    (SHAPES[2], ((cut_of(2, 2, 2, 1), cut_of(1, 2, 2, 2)),)),
)
# Of Qwen3-30B-A3B
LAYER_CUTS = ((cut_of(1, 4, 2, 2), cut_of(1, 4, 2, 2)), (cut_of(1, 4, 4, 2), cut_of(1, 4, 4, 2)), (cut_of(2, 2, 2, 2), cut_of(2, 2, 2, 2)))


def timed_us(call: Callable[[], object]) -> tuple[float, float, float]:
    """Median, p20 and p80 of one call."""
    times = sorted_us(call, repeats=REPEATS)
    return statistics.median(times), times[len(times) // 5], times[-1 - len(times) // 5]


def read_stream() -> float:
    """TB/s of reading a GiB."""
    return stream_bytes_per_s(programs=num_programs(torch.device("cuda")), repeats=REPEATS) / 1e12


def all_experts(num_experts: int, *, live: int) -> Routing:
    """Every expert with `live` columns of eight tokens: a stream over all weights. More experts a token than a router gives; the kernels take any."""
    ids = torch.arange(num_experts, dtype=torch.int32, device="cuda")
    column = torch.arange(8, dtype=torch.int32, device="cuda")[None, :]
    pairs = torch.where(column < live, column * num_experts + ids[:, None], -1).to(torch.int32)
    return Routing(num_tiles=torch.tensor([num_experts], dtype=torch.int32, device="cuda"), experts_M=ids, pairs_MC=pairs.contiguous(),
                   weights_MC=torch.full((num_experts, 8), 1.0 / num_experts, device="cuda"),
                   num_experts_T=torch.full((8,), num_experts, dtype=torch.int32, device="cuda"), num_experts_per_token=num_experts, num_experts=num_experts)


def repeated(weights: ExpertWeights, times: int) -> ExpertWeights:
    """The same experts again and again, each in memory of its own."""
    def again(weight: FragmentWeight) -> FragmentWeight:
        return replace(weight, codes=weight.codes.repeat(times, 1), scales=weight.scales.repeat(times, 1))

    def bias(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.repeat(times, *[1] * (tensor.dim() - 1))

    return replace(weights, gate_up=again(weights.gate_up), down=again(weights.down), gate_up_bias_E2F=bias(weights.gate_up_bias_E2F),
                   down_bias_ED=bias(weights.down_bias_ED))


def product_lines(shape: Shape, stream: float, *, live: int, cuts: tuple[Stages | None, Stages | None] = (None, None), say: str = "") -> None:
    """Gate and up, and down up to its partials, over every expert."""
    copies = max(1, -(-PRODUCT_BYTES // (shape.experts * shape.gate_up.num_bytes)))
    weights = copied(shape, copies)
    experts = weights.num_experts
    routing = all_experts(experts, live=live)
    programs = num_programs(weights.gate_up.codes.device)
    x = activations(8, shape.hidden, seed=2, device="cuda").view(torch.int32)
    inter = torch.randn(experts, 8, shape.channels, device="cuda").to(torch.bfloat16)
    partials = torch.empty(8 * experts, shape.hidden, device="cuda")
    none = routing.weights_MC
    up_bias, down_bias = weights.gate_up_bias_E2F, weights.down_bias_ED
    for name, weight, cut in (("gate and up", weights.gate_up, cuts[0]), ("down", weights.down, cuts[1])):
        stages = cut or Stages.of(weight.layout)
        descs, constants = descriptors(weight, stages), constants_of(weight.layout, stages)
        constants |= {"STAGES": stages.stages, "PARTITIONS": stages.partitions, "PROGRAMS": programs, "NUM_WARPS": 8, "num_warps": 8}

        def run(d: tuple[Any, ...] = descs, c: dict[str, int] = constants, up: bool = name != "down") -> None:
            if up:
                gate_up_kernel[(programs,)](*d, x, inter, none if up_bias is None else up_bias, routing.experts_M, routing.pairs_MC, routing.num_tiles,
                                             K=experts, F=shape.channels, ACTIVATION=shape.activation, HAS_BIAS=up_bias is not None, **c)
            else:
                down_kernel[(programs,)](*d, inter.view(torch.int32), partials, none if down_bias is None else down_bias, routing.experts_M,
                                          routing.pairs_MC, routing.weights_MC, routing.num_tiles, D=shape.hidden, HAS_BIAS=down_bias is not None, **c)

        median, p20, p80 = timed_us(run)
        num_bytes = experts * weight.layout.num_bytes
        rate = num_bytes / median / 1e6
        print(f"| {shape.name} | {name}{say} | {stages.groups}x{stages.parts}, {stages.partitions} rings of {stages.stages} | {live} | "
              f"{num_bytes / 1e6:.1f} MB, pad {100 * weight.layout.pad_bytes / weight.layout.num_bytes:.1f} % | {experts} | "
              f"{median:.1f} ({p20:.1f}, {p80:.1f}) | {rate:.3f} | {100 * rate / stream:.1f} % |", flush=True)


@cache
def copied(shape: Shape, copies: int) -> ExpertWeights:
    return repeated(checkpoint_of(shape, seed=1, device="cuda").pack(), copies)


def layer_line(shape: Shape, stream: float, *, num_tokens: int, stages: tuple[Stages, Stages] | None = None, seed: int = 200) -> None:
    """The slope of a launch of many layers over a launch of few."""
    each_set = checkpoint_of(shape, seed=1, experts=SETS * shape.experts, device="cuda").pack() if shape not in _sets else None
    if each_set is not None:
        _sets[shape] = repeated(each_set, LAYERS[1] // SETS)
    weights = _sets[shape]
    space = Workspace.of(weights, num_tokens=num_tokens, num_experts_per_token=shape.per_token, device=weights.gate_up.codes.device)
    routings, distinct = [], []
    for i in range(SETS):
        g = torch.Generator().manual_seed(seed + i)
        ids = torch.rand(num_tokens, shape.experts, generator=g).argsort(dim=-1)[:, :shape.per_token].to(torch.int32)
        distinct.append(len(ids.unique()))
        routings.append(route(ids.cuda(), torch.full((num_tokens, shape.per_token), 1.0 / shape.per_token, device="cuda"), num_experts=shape.experts))
    times = []
    for count in LAYERS:
        part = replace(weights, gate_up=_first(weights.gate_up, count * shape.experts), down=_first(weights.down, count * shape.experts))
        layers = Experts(part, workspace=space, num_layers=count, stages=stages)
        x = torch.stack([activations(num_tokens, shape.hidden, seed=i, device="cuda") for i in range(count)])
        y = torch.empty(count, num_tokens, shape.hidden, device="cuda")
        stacked = stack_routings([routings[i % SETS] for i in range(count)])
        times.append(timed_us(lambda run=layers, a=x, r=stacked, b=y: run(a, r, y_TD=b)))
        layers.check_fault()
    each = [(long - short) / (LAYERS[1] - LAYERS[0]) for short, long in zip(times[0], times[1], strict=True)]
    mean = statistics.mean(distinct)
    num_bytes = mean * weights.bytes_per_expert
    floor = num_bytes / stream / 1e6
    cut = layers.stages
    print(f"| {shape.name} | T = {num_tokens} | {mean:.1f} {distinct} | {num_bytes / 1e6:.1f} MB | {floor:.2f} | "
          f"{each[0]:.2f} ({each[1]:.2f}, {each[2]:.2f}) | {each[0] / floor:.2f} | "
          f"{cut[0].groups}x{cut[0].parts}, {cut[1].groups}x{cut[1].parts}, {cut[0].partitions} rings of {cut[0].stages} |", flush=True)


def _first(weight: FragmentWeight, experts: int) -> FragmentWeight:
    return replace(weight, codes=weight.codes[:experts], scales=weight.scales[:experts])


def products(stream: float, *, sweep: bool) -> None:
    print("\n| model | product | cut | live columns | bytes | experts | us, median (p20, p80) | TB/s | of the stream |\n|---|---|---|---|---|---|---|---|---|")
    for shape in SHAPES[:3]:
        for live in (1, 8):
            product_lines(shape, stream, live=live)
    if not sweep:
        return
    for shape, cuts in PRODUCT_CUTS:
        for up, down in cuts:
            product_lines(shape, stream, live=1, cuts=(up, down), say=", sweep")


def layers(stream: float, *, sweep: bool) -> None:
    print("\n| model | tokens | distinct experts | bytes | floor us | us a layer (p20, p80) | times the floor | cut |\n|---|---|---|---|---|---|---|---|")
    for shape in SHAPES[:3]:
        for num_tokens in (8, 4, 1):
            layer_line(shape, stream, num_tokens=num_tokens)
        if sweep and shape is SHAPES[0]:
            for cut in LAYER_CUTS:
                for num_tokens in (8, 1):
                    layer_line(shape, stream, num_tokens=num_tokens, stages=cut)
        _sets.clear()


def check() -> None:
    started = time.time()
    for shape in SHAPES:
        for num_tokens in (1, 4, 8):
            errors = check_products(shape, num_tokens=num_tokens, seed=torch.seed() % 2**31)
            print(f"{shape.name}, T = {num_tokens}: " + ", ".join(f"{name} {error:.1e}" for name, error in errors.items()), flush=True)
            exact = {name: error for name, error in errors.items() if "bf16" not in name}
            if not all(error <= 1e-6 for error in exact.values()):
                raise SystemExit(f"bench_moe: relative errors must be at most 1e-6; got {exact}.")
    print(f"checked in {time.time() - started:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare with float64 first")
    parser.add_argument("--sweep", action="store_true", help="also other ways to cut the weights")
    options = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        raise SystemExit("bench_moe: needs a Hopper GPU (sm_90): these kernels are built for no other.")
    print(environment())
    if options.check:
        check()
    stream = read_stream()
    print(f"read stream: {stream:.3f} TB/s")
    products(stream, sweep=options.sweep)
    layers(stream, sweep=options.sweep)


if __name__ == "__main__":
    main()
