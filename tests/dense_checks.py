"""Inputs of the dense phase, and the checks that tests and the benchmark share."""

import torch
from dense_compile import Shape
from torch import Tensor

from kilotok.kernels.persistent import Dense, DenseLayout, dense_ref, live_mask, normalize_ref, pack_dense

BF16 = torch.bfloat16
# Of activations with a norm: fp32 is off by about 2e-7, a bf16 number from a tie by up to 2e-3, so one in ten thousand is expected to round apart; five of
# the pocket's 2048.
MOST_ROUNDED_APART = 2.5e-3
REPEATS = 40    # a race that spoiled one run in a hundred went unseen with two
CHECKED_ROWS = 16384


def matrix_of(layout: DenseLayout, *, seed: int, device: str = "cpu") -> Tensor:
    g = torch.Generator(device=device).manual_seed(seed)
    return (torch.randn(layout.rows, layout.depth, device=device, generator=g) * layout.depth**-0.5).to(BF16)


def activations(columns: int, depth: int, *, seed: int, device: str = "cpu") -> Tensor:
    """bf16 with a few large channels."""
    g = torch.Generator(device=device).manual_seed(seed)
    x = torch.randn(columns, depth, device=device, generator=g)
    x[:, ::97] *= 20
    return x.to(BF16)


def relative(got: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm."""
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def run(dense: Dense, x_CD: Tensor, *, live: Tensor, residual_CR: Tensor | None, matrix: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """One launch into poisoned memory."""
    layout = dense.weight.layout
    shape = (layout.splits, 8, layout.rows) if residual_CR is None else (8, layout.rows)
    return dense(x_CD, out=torch.full(shape, float("nan"), dtype=dtype, device=x_CD.device), live=live, residual_CR=residual_CR, matrix=matrix)


def check_dense(shape: Shape, *, seed: int) -> dict[str, float]:
    """Errors against float64; bitwise checks on the way.

    sums: relative, of activations that the kernel had exactly, which with a norm are read out of it by a product with single ones. norm: the share of
        those that float64 rounds to the neighbour; more than a neighbour apart none may be.
    Bitwise: an output in bf16 against that in fp32, rounded; REPEATS runs; each column alone and among others in another place, where dead columns hold
        NaN and keep what they had.
    """
    device = "cuda"
    layout = shape.layout
    count = 1 if shape.rows > CHECKED_ROWS else 2
    w = torch.stack([matrix_of(layout, seed=seed + i, device=device) for i in range(count)])
    norm = (torch.rand(count, layout.depth, device=device, generator=torch.Generator(device=device).manual_seed(seed)) + 0.5).to(BF16) if shape.norm else None
    dense, matrix = Dense(pack_dense(w, layout=layout), norm=norm), count - 1
    g = torch.Generator(device=device).manual_seed(seed + 7)
    x = activations(8, layout.depth, seed=seed, device=device)
    if shape.norm and shape.residual == "fp32":
        x = torch.randn(8, layout.depth, device=device, generator=g)
    residual = torch.randn(8, layout.rows, device=device, generator=g).to(BF16 if shape.residual == "bf16" else torch.float32) if shape.add else None
    everyone = live_mask(torch.ones(8, dtype=torch.bool, device=device))
    y = run(dense, x, live=everyone, residual_CR=residual, matrix=matrix)

    errors: dict[str, float] = {}
    a = x
    if norm is not None:
        expected = normalize_ref(x, norm[matrix], eps=dense.eps)
        a = _activations_of(shape, x, norm[matrix])
        errors["norm"] = float((a != expected).double().mean())
        apart = (a.float() - expected.float()).abs() > 2.0**-7 * expected.float().abs()
        assert not bool(apart.any()), f"{int(apart.sum())} activations are more than a neighbour away"
    errors["sums"] = relative(y, _sums(a, w[matrix], layout, residual))
    assert norm is None or relative(y, _sums(expected, w[matrix], layout, residual)) <= 1e-3

    if layout.splits == 1:
        rounded = run(dense, x, live=everyone, residual_CR=residual, matrix=matrix, dtype=BF16)
        assert torch.equal(rounded, y.to(BF16)), "a bf16 output is not the fp32 output, rounded"
    wrong = [i for i in range(REPEATS) if not torch.equal(run(dense, x, live=everyone, residual_CR=residual, matrix=matrix), y)]
    assert not wrong, f"runs {wrong} of {REPEATS} differ from the first"
    for column in range(8):
        place = (column * 3 + 1) % 8
        alone = torch.full_like(x, float("nan"))
        alone[place] = x[column]
        beside = None if residual is None else torch.full_like(residual, float("nan"))
        if beside is not None and residual is not None:
            beside[place] = residual[column]
        got = run(dense, alone, live=live_mask(torch.arange(8, device=device) == place), residual_CR=beside, matrix=matrix)
        assert torch.equal(got[..., place, :], y[..., column, :]), f"column {column} depends on its neighbours or on its place"
        assert bool(got[..., torch.arange(8) != place, :].isnan().all()), "a dead column was written"
    rolled = run(dense, x.roll(3, 0), live=everyone, residual_CR=None if residual is None else residual.roll(3, 0), matrix=matrix)
    assert torch.equal(rolled, y.roll(3, -2)), "a column depends on its place"
    return errors


def _sums(a_CD: Tensor, w_RD: Tensor, layout: DenseLayout, residual_CR: Tensor | None) -> Tensor:
    """The twin's sums without unpacking, some rows at a time: a head's weights in float64 are gigabytes."""
    width = layout.padded_depth // layout.splits
    a = a_CD.double()
    parts = [torch.cat([a[:, k:k + width] @ rows[:, k:k + width].double().mT for rows in w_RD.split(CHECKED_ROWS)], dim=-1)
             for k in range(0, layout.padded_depth, width)]
    return torch.stack(parts) if residual_CR is None else residual_CR.double() + parts[0]


def _activations_of(shape: Shape, x_CD: Tensor, norm_D: Tensor) -> Tensor:
    """The kernel's normalized activations, exactly: the product with single ones has one term a sum."""
    # the layout of the input is the shape's own, so that the order of the squares is
    layout = DenseLayout(rows=shape.depth, depth=shape.depth, depth_warps=shape.layout.depth_warps, num_blocks=shape.layout.num_blocks,
                         pairs=shape.layout.pairs, splits=shape.layout.splits)
    weight = pack_dense(torch.eye(shape.depth, dtype=BF16, device=x_CD.device), layout=layout)
    read = Dense(weight, norm=norm_D)
    live = live_mask(torch.ones(8, dtype=torch.bool, device=x_CD.device))
    values = run(read, x_CD, live=live, residual_CR=None, matrix=0).sum(0)      # of the splits, one holds the column and the others zeros
    exact = values.to(BF16)
    assert torch.equal(exact.float(), values), "a product with single ones is not the activation"
    assert dense_ref(exact, weight).sum(0).to(BF16).equal(exact)
    return exact
