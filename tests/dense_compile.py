"""The dense phase built for sm_90 without a GPU."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import triton
from moe_compile import Built, inspect
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from kilotok.kernels.persistent import Cut, DenseLayout, choose_dense_layout
from kilotok.kernels.persistent.dense import SWIZZLE_NONE, constants_of
from kilotok.kernels.persistent.dense_device import dense_kernel
from kilotok.kernels.persistent.fragments import NUM_WARPS


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One matrix of a model, with what happens around it."""

    name: str
    rows: int
    depth: int
    norm: bool
    add: bool = False
    max_splits: int = 1
    residual: str = "fp32"   # of the norm's input, and of what is added to
    out: str = "fp32"

    def __str__(self) -> str:
        return self.name

    @property
    def layout(self) -> DenseLayout:
        return choose_dense_layout(self.rows, self.depth, max_splits=self.max_splits)


def shapes_of(model: str, *, hidden: int, qkv: int, heads: int, router: int, vocabulary: int) -> tuple[Shape, ...]:
    """The four dense phases of a model; `heads` is heads times head dimension."""
    return (Shape(name=f"{model} qkv", rows=qkv, depth=hidden, norm=True, max_splits=2),
            Shape(name=f"{model} o_proj", rows=hidden, depth=heads, norm=False, add=True),
            Shape(name=f"{model} router", rows=router, depth=hidden, norm=True, max_splits=2),
            Shape(name=f"{model} head", rows=vocabulary, depth=hidden, norm=True))


SHAPES = (*shapes_of("Qwen3-30B-A3B", hidden=2048, qkv=5120, heads=4096, router=128, vocabulary=151936),
          *shapes_of("pocket", hidden=256, qkv=512, heads=256, router=8, vocabulary=4096),
          *shapes_of("SmolLM2-MoE", hidden=576, qkv=960, heads=576, router=8, vocabulary=49152))


@cache
def build_dense(shape: Shape, *, layout: DenseLayout | None = None, cut: Cut | None = None, programs: int = 132) -> Built:
    layout = layout or shape.layout
    cut = cut or Cut.of(layout)
    constants: dict[str, Any] = {**constants_of(layout, cut), "NORM": shape.norm, "EPS": 1e-6, "ADD": shape.add, "PROGRAMS": programs, "NUM_WARPS": NUM_WARPS}
    names = list(dense_kernel.arg_names)
    assert set(constants) == {n for n in names if n.isupper()}, "a launch would miss or refuse some of these constants"
    types = {"desc": f"tensordesc<i32[{NUM_WARPS // 2}, 256],{SWIZZLE_NONE!r}>", "x_ptr": f"*{shape.residual}" if shape.norm else "*i32", "norm_ptr": "*bf16",
             "out_ptr": f"*{shape.out}", "residual_ptr": f"*{shape.residual}", "live_ptr": "*i32", "first_unit": "i32"}
    signature = {n: "constexpr" if n in constants else types[n] for n in names}
    attrs = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n.endswith("_ptr")}
    source = GluonASTSource(dense_kernel, signature, {n: constants[n] for n in names if n in constants}, attrs=attrs)
    return inspect(triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": NUM_WARPS}))
