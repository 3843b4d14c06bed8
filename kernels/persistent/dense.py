"""The dense phase of a decode step: y = W . a for up to 8 columns, bf16 weights that are streamed once.

    prologue    a = bf16(x * rsqrt(mean(x**2) + eps) * norm), of a residual x in fp32 or bf16; or a = x, bf16 already
    product     fp32 sums of exact bf16 products
    epilogue    y, fp32 or bf16; or residual + y, which whoever owns the rows adds

Rounding points: a (once, to bf16) and the output. Which layout cuts the input into splits leaves y as that many sums, for the reader to add in order.

How fast it can be: an SM of an H200 gets 20 bytes a clock (4.5 TB/s, 132 SMs, 1.7 GHz). Experts kept that at 17.5 instructions an MMA of 136 bytes; an
MMA has 512 bytes here, so 65 instructions do. Evenness costs more: rows come in tiles of 16, and 320 of them (5120 rows) on 132 SMs are 3 where 2.4 are due.
Hence splits, which make the items smaller; and pairs, where both consumers of an SM share a tile because there are no more tiles than SMs.

A column's bits depend on its own x alone: not on the other columns, on how many live, or on where it lies. Dead columns read and write nothing.

Legend: C the 8 columns, D input, R rows, S splits.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..moe.product import num_programs, require
from .dense_device import dense_kernel
from .fragments import NUM_WARPS, UNIT_BYTES, DenseLayout, DenseWeight, unpack_dense

COLUMNS = 8
SWIZZLE_NONE = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
_RING_BYTES = 105 * 1024    # of both consumers: what an SM has in flight at full bandwidth; see kernels/moe/product.py
_BLOCK_BYTES = 2 * UNIT_BYTES


@dataclass(frozen=True, kw_only=True)
class Cut:
    """How a consumer takes its items: `stage_blocks` blocks of every warp a stage (8 KB each), `stages` slots in its ring."""

    stage_blocks: int
    stages: int

    @staticmethod
    def of(layout: DenseLayout) -> "Cut":
        """The largest stages, up to 24 KB, of which each consumer's half of 105 KB holds two; and as many of them as it holds.

        Qwen3-30B-A3B gets 16 KB and three slots, the ring that its experts have in one launch.
        """
        half = _RING_BYTES // 2
        blocks = max(b for b in range(1, half // (2 * _BLOCK_BYTES) + 1) if layout.num_blocks % b == 0)
        return Cut(stage_blocks=blocks, stages=min(8, half // (_BLOCK_BYTES * blocks)))

    def check(self, layout: DenseLayout) -> None:
        """ValueError unless stages divide an item."""
        if self.stage_blocks < 1 or layout.num_blocks % self.stage_blocks or self.stages < 2:
            raise ValueError(f"Cut: stage_blocks must divide the {layout.num_blocks} blocks of a warp, with 2 stages or more; got {self}.")


def constants_of(layout: DenseLayout, cut: Cut) -> dict[str, int]:
    """What the device code must know of one weight."""
    cut.check(layout)
    return {"ROWS": layout.rows, "DEPTH": layout.depth, "DEPTH_WARPS": layout.depth_warps, "NUM_BLOCKS": layout.num_blocks, "PAIRS": layout.pairs,
            "SPLITS": layout.splits, "STAGE_BLOCKS": cut.stage_blocks, "STAGES": cut.stages}


def descriptor(weight: DenseWeight) -> Any:
    """TMA descriptor of the words of all matrices; make it once, at load time. A box is a unit."""
    return TensorDescriptor.from_tensor(weight.words.view(-1, 256), [NUM_WARPS // 2, 256], SWIZZLE_NONE)


def live_mask(columns: Tensor) -> Tensor:
    """int32 [1] with bit c set if column c lives. Shapes: columns bool [8]."""
    if columns.shape != (COLUMNS,) or columns.dtype != torch.bool:
        raise ValueError(f"live_mask: columns must be bool [{COLUMNS}]; got {columns.dtype} {list(columns.shape)}.")
    bits = torch.arange(COLUMNS, dtype=torch.int32, device=columns.device)
    return (columns.to(torch.int32) << bits).sum(dtype=torch.int32).view(1)


def normalize_ref(x_CD: Tensor, norm_D: Tensor, *, eps: float, dtype: torch.dtype = torch.float64) -> Tensor:
    """The prologue, bf16 [C, D]: computed in `dtype`, rounded once."""
    wide = x_CD.to(dtype)
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * norm_D.to(dtype)).to(torch.bfloat16)


def dense_ref(x_CD: Tensor, weight: DenseWeight, *, norm_D: Tensor | None = None, eps: float = 1e-6, residual_CR: Tensor | None = None,
              matrix: int = 0, dtype: torch.dtype = torch.float64, unpacked_RD: Tensor | None = None) -> Tensor:
    """What the phase stores, in `dtype`: [S, C, R], S the layout's splits; with a residual [C, R].

    Shapes: x_CD fp32 or bf16 with a norm, else bf16; any number of columns. matrix: which, where several lie one after the other.
    unpacked_RD: that matrix in `dtype`, where a caller keeps it.
    Errors: ValueError for other sizes than the weight's, and for a residual with a layout of several splits.
    """
    where, layout = "dense_ref", weight.layout
    require(where, "x", x_CD, (len(x_CD), layout.depth), x_CD.dtype if norm_D is not None else torch.bfloat16, like=x_CD)
    _check_epilogue(where, layout, add=residual_CR is not None)
    a = x_CD if norm_D is None else normalize_ref(x_CD, norm_D, eps=eps, dtype=dtype)
    w = unpacked_RD if unpacked_RD is not None else unpack_dense(weight.matrix(matrix)).to(dtype)
    width = layout.padded_depth // layout.splits
    sums = torch.stack([a[:, first:first + width].to(dtype) @ w[:, first:first + width].mT for first in range(0, layout.padded_depth, width)])
    return sums if residual_CR is None else residual_CR.to(dtype) + sums[0]


def _check_epilogue(where: str, layout: DenseLayout, *, add: bool) -> None:
    if add and layout.splits > 1:
        raise ValueError(f"{where}: a residual is added by the one who has the whole sum; got a layout of {layout.splits} splits. "
                         "Choose the layout with max_splits=1.")


class Dense:
    """One kind of matrix (those of all layers lie one after the other) with its TMA descriptor, ready to launch.

    norm_D: fp32 or bf16 [D] or, of several matrices, [..., D]. Errors: ValueError for what does not fit.
    """

    def __init__(self, weight: DenseWeight, *, norm: Tensor | None = None, eps: float = 1e-6, cut: Cut | None = None) -> None:
        self.weight, self.norm, self.eps, self.cut = weight, norm, eps, cut or Cut.of(weight.layout)
        self.num_matrices = weight.words.numel() // (weight.layout.num_bytes // 4)
        if norm is not None:
            if norm.dtype not in (torch.float32, torch.bfloat16):
                raise ValueError(f"Dense: the norm's weight must be fp32 or bf16; got {norm.dtype}.")
            require("Dense", "norm", norm.view(-1, norm.shape[-1]), (self.num_matrices, weight.layout.depth), norm.dtype, like=weight.words)
        self._constants = constants_of(weight.layout, self.cut)
        self._descriptor = descriptor(weight)

    def __call__(self, x_CD: Tensor, *, out: Tensor, live: Tensor, residual_CR: Tensor | None = None, matrix: int = 0) -> Tensor:
        """`dense_ref` into `out`, rounded to its dtype. Returns it. One launch; nothing is read back.

        Shapes: x_CD [8, D], with a norm fp32 or bf16, else bf16. out [S, 8, R], or [8, R] with a residual (which it may be): fp32, or bf16 unless there
            are several splits. live int32 [1], see `live_mask`; dead columns of x may hold anything and those of `out` keep what they had.
        Numerics: within 1e-6 (relative, in norm) of the float64 sums of the same bf16 inputs. With a norm, fp32 rounds about one activation in
            ten thousand to the other neighbour.
        Errors: ValueError for shapes, dtypes or devices that do not fit; NotImplementedError on anything but sm_90.
        """
        where, layout = "dense", self.weight.layout
        if self.norm is not None and x_CD.dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"{where}: the residual must be fp32 or bf16; got {x_CD.dtype}.")
        require(where, "x", x_CD, (COLUMNS, layout.depth), x_CD.dtype if self.norm is not None else torch.bfloat16, like=self.weight.words)
        require(where, "live", live, (1,), torch.int32, like=x_CD)
        _check_epilogue(where, layout, add=residual_CR is not None)
        if out.dtype not in (torch.float32, torch.bfloat16) or (layout.splits > 1 and out.dtype != torch.float32):
            raise ValueError(f"{where}: out must be fp32, or bf16 where the layout has one split; got {out.dtype} with {layout.splits}.")
        require(where, "out", out, (COLUMNS, layout.rows) if residual_CR is not None else (layout.splits, COLUMNS, layout.rows), out.dtype, like=x_CD)
        if residual_CR is not None:
            if residual_CR.dtype not in (torch.float32, torch.bfloat16):
                raise ValueError(f"{where}: the residual must be fp32 or bf16; got {residual_CR.dtype}.")
            require(where, "residual", residual_CR, (COLUMNS, layout.rows), residual_CR.dtype, like=x_CD)
        if not 0 <= matrix < self.num_matrices:
            raise ValueError(f"{where}: matrix must be 0 to {self.num_matrices - 1}; got {matrix}.")
        if x_CD.device.type != "cuda" or torch.cuda.get_device_capability(x_CD.device)[0] != 9:
            raise NotImplementedError(f"{where}: the kernel is built for sm_90 (Hopper); got {x_CD.device}. Its twin ({where}_ref) runs anywhere.")
        programs = num_programs(x_CD.device)
        norm = live if self.norm is None else self.norm.view(self.num_matrices, -1)[matrix]     # a pointer that is not read
        dense_kernel[(programs,)](
            self._descriptor, x_CD if self.norm is not None else x_CD.view(torch.int32), norm, out, out if residual_CR is None else residual_CR, live,
            matrix * layout.num_units, NORM=self.norm is not None, EPS=self.eps, ADD=residual_CR is not None, PROGRAMS=programs, NUM_WARPS=NUM_WARPS,
            **self._constants, num_warps=NUM_WARPS)
        return out
