"""The control flow of the step kernel at the sizes of real models: every wait, arrival and stage of every program, without the products.

What the device code decides by numbers is kept: how many items and stages a partition has, who meets whom how often, which signals are given. What it
computes is left out. Every consumer draws a routing list of its own, so that partitions disagree more than they ever can on a GPU.
"""

import random
import threading
from typing import Any

import step_on_cpu
import torch
from gluon_on_cpu import Pointer
from step_compile import code_of
from step_on_cpu import Kernel, Word

from kilotok.kernels.persistent import StepShape
from kilotok.kernels.persistent.step_code import POINTER_TYPES, Pointers


class Nothing:
    """Memory that takes and gives nothing."""

    dtype = torch.float32

    def index(self, _i: Any) -> "Nothing":
        return self

    def _reinterpret(self, *_: Any) -> "Nothing":
        return self

    def load(self, _layout: Any) -> "Nothing":
        return self

    def store(self, _value: Any) -> None:
        return None

    def to(self, *_: Any) -> "Nothing":
        return self

    def __add__(self, _other: Any) -> "Nothing":
        return self

    __radd__ = __add__


_NOTHING = Nothing()


def _allocate(dtype: torch.dtype, shape: Any, layout: Any) -> Any:
    return step_on_cpu._allocate(dtype, shape, layout) if dtype == torch.int64 or list(shape) == [32] else _NOTHING


def _count_box(_desc: Any, _at: list[Any], barrier: Any, _target: Any, size: int) -> None:
    barrier.change(copied=size)


def count_stages(shape: StepShape, *, num_columns: int, programs: int, num_layers: int, num_steps: int, seed: int) -> dict[str, int]:
    """Runs the kernel's control flow to its end; returns the stages that all producers copied and all consumers released. Raises `Stuck` if they wait
    for each other."""
    code = code_of(shape, num_columns=num_columns, programs=programs)
    counts, lock = {"copied": 0, "released": 0}, threading.Lock()
    draw = random.Random(seed)

    def multiply_item(_ring: Any, full: Any, empty: Any, slot: Any, phase: Any, _x: Any, num_blocks: int, stage_blocks: int, _units: int, stages: int,
                      _warps: int) -> Any:
        for _ in range(num_blocks // stage_blocks):
            full.index(slot).wait(phase)
            kernel.modules["moe.stream"].release(empty, slot)
            slot, phase = kernel.modules["moe.stream"].advance(slot, phase, stages)
        return _NOTHING, slot, phase

    def normalize(_x: Any, _w: Any, _live: Any, _area: Any, _squares: Any, met: Any, turn: Any, *_: Any) -> Any:
        meet = kernel.modules["persistent.dense_device"].meet
        return meet(met, meet(met, turn))

    def route(_logits: Any, _slots: Any, tiles: Pointer, experts: Pointer, *_: Any) -> None:
        with lock:
            live = draw.choice((0, 1, 2, code.K, code.TILES, draw.randrange(code.TILES + 1)))
        tiles.memory[tiles.offset] = live
        experts.memory[int(experts.offset):int(experts.offset) + live] = torch.arange(live, dtype=torch.int32) % code.E

    def release(empty: Any, slot: Any) -> None:
        with lock:
            counts["released"] += 1
        empty.index(slot).change(arrivals=1)

    def expect(barrier: Any, size: Any) -> None:
        with lock:
            counts["copied"] += 1
        barrier.change(arrivals=1, expected=int(size))

    def nothing(*_: Any, **__: Any) -> Any:
        return _NOTHING

    cheap: dict[str, dict[str, Any]] = {
        "moe.stream": {"release": release},
        "persistent.dense_device": {"multiply_item": multiply_item, "normalize": normalize, "load_norm": nothing, "load_fragments": nothing,
                                    "read_fragments": nothing, "rows_of": lambda *_: (Word(0), False), "sum_over_warps": nothing},
        "moe.device": {"load_activations": lambda *_: ((), ()), "multiply": lambda *_: (_NOTHING,), "down_columns": lambda *_: (0, 0, 0),
                       "_store_channels": nothing, "_store_partials": nothing},
        "persistent.step_phases": {"live_of": lambda *_: 255, "choose_and_route": route,
                                   "_count_experts": nothing, "attend": nothing, "fetch_first_values": nothing},
        "persistent.step_device": {"embed_phase": nothing, "add_phase": nothing, "sample_phase": nothing, "finish_phase": nothing,
                                   "fetch_first_keys": nothing, "load_norm": nothing},
    }
    kernel = Kernel(programs, cheap=cheap, language={"allocate_shared_memory": _allocate, "store": nothing},
                    mbarrier={"expect": expect}, copy=lambda desc, at, barrier, target: _count_box(desc, at, barrier, target, int(desc[0, 0])))
    sizes = {"list_tiles": 2 * programs, "list_experts": 2 * programs * code.TILES, "list_pairs": 2 * programs * code.TILES * 8,
             "list_weights": 2 * programs * code.TILES * 8}
    pointers = Pointers(**{name: torch.zeros(sizes.get(name, 1), dtype=torch.float32 if kind == "*fp32" else torch.int32)
                           for name, kind in POINTER_TYPES._asdict().items()})
    # instead of weights: bytes of a box
    descriptors = [torch.tensor([[size]]) for size in (4096,) * 5 + (4 * code.up.SCALE_BOX, 4096, 4 * code.down.SCALE_BOX)]
    kernel.launch(tuple(descriptors), pointers, num_layers, num_steps, 1, 1, 1000, 0, 1, code=code)
    return counts
