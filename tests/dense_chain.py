# Device code has no Python types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Two dense phases of many layers in one launch, as a resident kernel has them: o_proj with its residual, a barrier, norm and qkv, a barrier.

It shows that the device functions of kernels/persistent go together in one kernel, with one ring whose producers never wait for a barrier, and gives
the time of a phase and its boundary without launches. Attention and experts, which lie between in a model, are left out: o_proj reads activations that
are given, and qkv's output is overwritten layer by layer.
"""

from functools import cache
from typing import Any

import torch
import triton
from dense_checks import BF16, matrix_of
from dense_compile import SHAPES, Shape
from moe_compile import Built, inspect
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from kilotok.kernels.moe.layer import grid_barrier
from kilotok.kernels.persistent import Cut, Dense, DenseLayout, DenseWeight, live_mask, pack_dense
from kilotok.kernels.persistent.dense import SWIZZLE_NONE, constants_of, descriptor
from kilotok.kernels.persistent.dense_device import consume_dense, load_norm, make_dense_ring, make_shared_area, stream_dense
from kilotok.kernels.persistent.fragments import NUM_WARPS

QKV, O_PROJ = SHAPES[0], SHAPES[1]
EPS = 1e-6


@gluon.jit
def _chain_consumer(ring, full, empty, exchange, pair, met, x_area, squares, attention_ptr, residual_ptr, norm_ptr, qkv_ptr, live_ptr, barrier_ptr, fault_ptr,
                    num_layers, OUT_ROWS: gl.constexpr, OUT_DEPTH: gl.constexpr, OUT_DEPTH_WARPS: gl.constexpr, OUT_NUM_BLOCKS: gl.constexpr,
                    OUT_PAIRS: gl.constexpr, OUT_STAGE_BLOCKS: gl.constexpr, QKV_ROWS: gl.constexpr, QKV_DEPTH: gl.constexpr,
                    QKV_DEPTH_WARPS: gl.constexpr, QKV_NUM_BLOCKS: gl.constexpr, QKV_PAIRS: gl.constexpr, QKV_SPLITS: gl.constexpr,
                    QKV_STAGE_BLOCKS: gl.constexpr, SLOT_UNITS: gl.constexpr, STAGES: gl.constexpr, EPSILON: gl.constexpr, PART: gl.constexpr,
                    PROGRAMS: gl.constexpr, WARPS: gl.constexpr):
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    live = gl.load(live_ptr)
    for layer in range(num_layers):
        slot, phase, turn = consume_dense(ring, full, empty, slot, phase, exchange, pair, met, turn, x_area, squares,
                                          attention_ptr + layer * (8 * OUT_DEPTH // 2), (), residual_ptr, residual_ptr, live, False, EPSILON, True, OUT_ROWS,
                                          OUT_DEPTH, OUT_DEPTH_WARPS, OUT_NUM_BLOCKS, OUT_PAIRS, 1, OUT_STAGE_BLOCKS, SLOT_UNITS, STAGES, PART, 2, PROGRAMS,
                                          WARPS)
        norm = load_norm(residual_ptr, norm_ptr + layer * QKV_DEPTH, QKV_DEPTH, QKV_DEPTH_WARPS, QKV_NUM_BLOCKS, QKV_SPLITS * QKV_PAIRS, PART, 2, WARPS)
        grid_barrier(barrier_ptr, fault_ptr, PART, 2, PROGRAMS, WARPS)
        slot, phase, turn = consume_dense(ring, full, empty, slot, phase, exchange, pair, met, turn, x_area, squares, residual_ptr, norm, qkv_ptr, qkv_ptr,
                                          live, True, EPSILON, False, QKV_ROWS, QKV_DEPTH, QKV_DEPTH_WARPS, QKV_NUM_BLOCKS, QKV_PAIRS, QKV_SPLITS,
                                          QKV_STAGE_BLOCKS, SLOT_UNITS, STAGES, PART, 2, PROGRAMS, WARPS)
        grid_barrier(barrier_ptr, fault_ptr, PART, 2, PROGRAMS, WARPS)


@gluon.jit
def _chain_producer(out_desc, qkv_desc, ring, full, empty, num_layers, OUT_ITEMS: gl.constexpr, OUT_NUM_BLOCKS: gl.constexpr, OUT_PAIRS: gl.constexpr,
                    OUT_STAGE_BLOCKS: gl.constexpr, QKV_ITEMS: gl.constexpr, QKV_NUM_BLOCKS: gl.constexpr, QKV_PAIRS: gl.constexpr,
                    QKV_STAGE_BLOCKS: gl.constexpr, SLOT_UNITS: gl.constexpr, STAGES: gl.constexpr, PART: gl.constexpr, PROGRAMS: gl.constexpr,
                    WARPS: gl.constexpr):
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    for layer in range(num_layers):
        slot, phase = stream_dense(out_desc, ring, full, empty, slot, phase, layer * (OUT_ITEMS * OUT_PAIRS * OUT_NUM_BLOCKS * 2), OUT_ITEMS, OUT_PAIRS,
                                   OUT_NUM_BLOCKS, OUT_STAGE_BLOCKS, SLOT_UNITS, STAGES, PART, 2, PROGRAMS, WARPS)
        slot, phase = stream_dense(qkv_desc, ring, full, empty, slot, phase, layer * (QKV_ITEMS * QKV_PAIRS * QKV_NUM_BLOCKS * 2), QKV_ITEMS, QKV_PAIRS,
                                   QKV_NUM_BLOCKS, QKV_STAGE_BLOCKS, SLOT_UNITS, STAGES, PART, 2, PROGRAMS, WARPS)


@gluon.jit(do_not_specialize=["num_layers"])
def chain_kernel(out_desc, qkv_desc, attention_ptr, residual_ptr, norm_ptr, qkv_ptr, live_ptr, barrier_ptr, fault_ptr, num_layers, OUT_ROWS: gl.constexpr,
                 OUT_DEPTH: gl.constexpr, OUT_DEPTH_WARPS: gl.constexpr, OUT_NUM_BLOCKS: gl.constexpr, OUT_PAIRS: gl.constexpr,
                 OUT_STAGE_BLOCKS: gl.constexpr, OUT_ITEMS: gl.constexpr, QKV_ROWS: gl.constexpr, QKV_DEPTH: gl.constexpr, QKV_DEPTH_WARPS: gl.constexpr,
                 QKV_NUM_BLOCKS: gl.constexpr, QKV_PAIRS: gl.constexpr, QKV_SPLITS: gl.constexpr, QKV_STAGE_BLOCKS: gl.constexpr, QKV_ITEMS: gl.constexpr,
                 STAGES: gl.constexpr, EPSILON: gl.constexpr, PROGRAMS: gl.constexpr, WARPS: gl.constexpr):
    SLOT_UNITS: gl.constexpr = 2 * (OUT_STAGE_BLOCKS if OUT_STAGE_BLOCKS > QKV_STAGE_BLOCKS else QKV_STAGE_BLOCKS)
    ring, full, empty, exchange = make_dense_ring(out_desc, SLOT_UNITS, STAGES, WARPS)
    ring_1, full_1, empty_1, exchange_1 = make_dense_ring(out_desc, SLOT_UNITS, STAGES, WARPS)
    pair, met, x_area, squares = make_shared_area((QKV_SPLITS * QKV_PAIRS * QKV_NUM_BLOCKS * QKV_DEPTH_WARPS + 7) // 8 * 8, WARPS // OUT_DEPTH_WARPS, WARPS)
    gl.warp_specialize([
        (_chain_consumer, (ring, full, empty, exchange, pair, met, x_area, squares, attention_ptr, residual_ptr, norm_ptr, qkv_ptr, live_ptr, barrier_ptr,
                           fault_ptr, num_layers, OUT_ROWS, OUT_DEPTH, OUT_DEPTH_WARPS, OUT_NUM_BLOCKS, OUT_PAIRS, OUT_STAGE_BLOCKS, QKV_ROWS, QKV_DEPTH,
                           QKV_DEPTH_WARPS, QKV_NUM_BLOCKS, QKV_PAIRS, QKV_SPLITS, QKV_STAGE_BLOCKS, SLOT_UNITS, STAGES, EPSILON, 0, PROGRAMS, WARPS)),
        (_chain_consumer, (ring_1, full_1, empty_1, exchange_1, pair, met, x_area, squares, attention_ptr, residual_ptr, norm_ptr, qkv_ptr, live_ptr,
                           barrier_ptr, fault_ptr, num_layers, OUT_ROWS, OUT_DEPTH, OUT_DEPTH_WARPS, OUT_NUM_BLOCKS, OUT_PAIRS, OUT_STAGE_BLOCKS, QKV_ROWS,
                           QKV_DEPTH, QKV_DEPTH_WARPS, QKV_NUM_BLOCKS, QKV_PAIRS, QKV_SPLITS, QKV_STAGE_BLOCKS, SLOT_UNITS, STAGES, EPSILON, 1, PROGRAMS,
                           WARPS)),
        (_chain_producer, (out_desc, qkv_desc, ring, full, empty, num_layers, OUT_ITEMS, OUT_NUM_BLOCKS, OUT_PAIRS, OUT_STAGE_BLOCKS, QKV_ITEMS,
                           QKV_NUM_BLOCKS, QKV_PAIRS, QKV_STAGE_BLOCKS, SLOT_UNITS, STAGES, 0, PROGRAMS, WARPS)),
        (_chain_producer, (out_desc, qkv_desc, ring_1, full_1, empty_1, num_layers, OUT_ITEMS, OUT_NUM_BLOCKS, OUT_PAIRS, OUT_STAGE_BLOCKS, QKV_ITEMS,
                           QKV_NUM_BLOCKS, QKV_PAIRS, QKV_STAGE_BLOCKS, SLOT_UNITS, STAGES, 1, PROGRAMS, WARPS)),
    ], [WARPS, 1, 1], [112, 24, 24])


def constants(out: DenseLayout, qkv: DenseLayout, *, programs: int) -> dict[str, Any]:
    cuts = Cut.of(out), Cut.of(qkv)
    assert cuts[0].stages == cuts[1].stages and out.splits == 1, "one ring for both"
    found: dict[str, Any] = {"STAGES": cuts[0].stages, "EPSILON": EPS, "PROGRAMS": programs, "WARPS": NUM_WARPS}
    for prefix, layout, cut in (("OUT", out, cuts[0]), ("QKV", qkv, cuts[1])):
        found |= {f"{prefix}_{name}": value for name, value in constants_of(layout, cut).items() if name != "STAGES"}
        found[f"{prefix}_ITEMS"] = layout.num_items
    del found["OUT_SPLITS"]
    return found


@cache
def build_chain(out: Shape = O_PROJ, qkv: Shape = QKV) -> Built:
    found = constants(out.layout, qkv.layout, programs=132)
    names = list(chain_kernel.arg_names)
    assert set(found) == {n for n in names if n.isupper()}, "a launch would miss or refuse some of these constants"
    pointers = {"attention_ptr": "*i32", "residual_ptr": "*fp32", "norm_ptr": "*bf16", "qkv_ptr": "*fp32", "live_ptr": "*i32", "barrier_ptr": "*i32",
                "fault_ptr": "*i32"}
    desc = f"tensordesc<i32[{NUM_WARPS // 2}, 256],{SWIZZLE_NONE!r}>"
    signature = {n: "constexpr" if n in found else pointers.get(n, desc if n.endswith("desc") else "i32") for n in names}
    attrs = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n in pointers}
    source = GluonASTSource(chain_kernel, signature, {n: found[n] for n in names if n in found}, attrs=attrs)
    return inspect(triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": NUM_WARPS, "launch_cooperative_grid": True}))


class Chain:
    """Both matrices of `num_layers` layers on a GPU."""

    def __init__(self, *, num_layers: int, seed: int, device: str = "cuda") -> None:
        self.num_layers = num_layers
        each = min(num_layers, 4)     # different ones, in memory of their own

        def weights(layout: DenseLayout) -> DenseWeight:
            packed = pack_dense(torch.stack([matrix_of(layout, seed=seed + i, device=device) for i in range(each)]), layout=layout)
            return DenseWeight(words=packed.words.repeat(-(-num_layers // each), 1)[:num_layers].contiguous(), layout=layout)

        self.out, self.qkv = weights(O_PROJ.layout), weights(QKV.layout)
        g = torch.Generator(device=device).manual_seed(seed)
        self.norm = (torch.rand(num_layers, QKV.depth, device=device, generator=g) + 0.5).to(BF16)
        self.attention = torch.randn(num_layers, 8, O_PROJ.depth, device=device, generator=g).to(BF16)
        self.residual = torch.randn(8, QKV.depth, device=device, generator=g)
        self.barrier, self.fault = (torch.zeros(1, dtype=torch.int32, device=device) for _ in range(2))
        self._descriptors = descriptor(self.out), descriptor(self.qkv)

    def resident(self, residual: Tensor, qkv: Tensor, *, live: Tensor, programs: int) -> None:
        """One launch; `residual` is added to in place."""
        chain_kernel[(programs,)](*self._descriptors, self.attention.view(torch.int32), residual, self.norm, qkv, live, self.barrier, self.fault,
                                  self.num_layers, **constants(self.out.layout, self.qkv.layout, programs=programs), num_warps=NUM_WARPS,
                                  launch_cooperative_grid=True)

    def launches(self, residual: Tensor, qkv: Tensor, *, live: Tensor) -> None:
        """The same, a launch a phase."""
        out, first = Dense(self.out), Dense(self.qkv, norm=self.norm, eps=EPS)
        for layer in range(self.num_layers):
            out(self.attention[layer], out=residual, live=live, residual_CR=residual, matrix=layer)
            first(residual, out=qkv, live=live, matrix=layer)


def check_chain(*, seed: int, num_layers: int = 6, programs: int, repeats: int = 40) -> None:
    """The resident kernel and the launches end with the same bits, whichever columns live."""
    chain = Chain(num_layers=num_layers, seed=seed)
    for mask in (255, 1, 0b10100110):
        live = live_mask((torch.tensor(mask) >> torch.arange(8)) % 2 == 1).cuda()
        results = []
        for i in range(repeats + 1):
            residual, qkv = chain.residual.clone(), torch.full((chain.qkv.layout.splits, 8, QKV.rows), float("nan"), device="cuda")
            if i:
                chain.resident(residual, qkv, live=live, programs=programs)
            else:
                chain.launches(residual, qkv, live=live)
            results.append((residual.view(torch.int32), qkv.view(torch.int32)))
        wrong = [i for i, pair in enumerate(results) if not all(torch.equal(a, b) for a, b in zip(pair, results[0], strict=True))]
        assert not wrong and not int(chain.fault), f"columns {mask:08b}: runs {wrong} of the resident kernel differ from the launches; fault {int(chain.fault)}"
