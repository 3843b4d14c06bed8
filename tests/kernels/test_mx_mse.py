"""scale_mode mse against a float64 model that tries the three scales one by one, and what makes it reproducible."""

import pytest
import torch
from cases import CODE_VALUES, MODES, MX_BLOCK_SIZE
from tolerances import assert_equal
from torch import Tensor

from kilotok.kernels.mx import dequantize_mxfp4_ref, fake_quant_mxfp4_ref, pack_codes_ref, quantize_mxfp4_ref
from kilotok.kernels.mx.quantize import _squared_error_ref

GRID = torch.tensor(CODE_VALUES[:8], dtype=torch.float64)
# An element's error is cut to 2**-20, and rounded to fp32 before: at most 25 * 2**-24, less than two units more.
RESOLUTION = MX_BLOCK_SIZE * 3 * 2.0**-20
DTYPES = [torch.bfloat16, torch.float32]


def blocks_of(name: str, *, seed: int, dtype: torch.dtype) -> Tensor:
    """4096 blocks, [4096, 32]."""
    g = torch.Generator().manual_seed(seed)
    shape = (4096, MX_BLOCK_SIZE)
    normal = torch.randn(shape, generator=g, dtype=torch.float64)
    if name == "gauss":
        w = normal * 0.02
    elif name == "heavy":
        w = normal / torch.rand(shape, generator=g, dtype=torch.float64).clamp_min(1e-3)
    elif name == "on_the_grid":   # many exact ties between candidates
        w = torch.tensor(CODE_VALUES, dtype=torch.float64)[torch.randint(16, shape, generator=g)] * 2.0 ** torch.randint(-3, 2, shape, generator=g)
    elif name == "crowded":       # one large weight over many whose grid is too coarse: where half the floor scale wins
        w = 0.75 + 0.05 * normal
        w[:, 7] = 4.0 + 0.3 * torch.rand(4096, generator=g, dtype=torch.float64)
    elif name == "half_steps":
        w = torch.randint(-32, 33, shape, generator=g) / 4.0
    else:   # where scales are clamped, and subnormals
        w = normal * 2.0 ** torch.randint(-135, -118, (4096, 1), generator=g).double()
    return w.to(dtype)


NAMES = ["gauss", "heavy", "crowded", "on_the_grid", "half_steps", "smallest_scale"]


def floor_exponents(w: Tensor) -> Tensor:
    """By float64 comparison with powers of two, not by frexp."""
    powers = 2.0 ** torch.arange(-149, 128, dtype=torch.float64)
    floor = (w.double().abs().amax(-1, keepdim=True) >= powers).sum(-1) - 150   # of log2
    return (floor - 2).clamp_min(-127)


def error_under(w: Tensor, exponents: Tensor, *, unit: Tensor) -> Tensor:
    """Squared error of each block, float64, in units of 2**(2 * unit), when its scale is 2**exponents."""
    scale = 2.0 ** exponents.double()[:, None, None]
    distance = (w.double().abs()[..., None] - GRID * scale).abs().amin(-1)
    return (distance / 2.0 ** unit.double()[:, None]).square().sum(-1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_the_scale_is_the_best_of_three(name: str, dtype: torch.dtype) -> None:
    w = blocks_of(name, seed=11, dtype=dtype)
    floor = floor_exponents(w)
    chosen = quantize_mxfp4_ref(w, scale_mode="mse")[1][:, 0].int() - 127
    candidates = torch.stack([floor, floor + 1, (floor - 1).clamp_min(-127)])
    errors = torch.stack([error_under(w, c, unit=floor) for c in candidates])
    errors[2, floor == -127] = torch.inf   # the same scale as candidate 0
    assert bool((chosen == candidates).any(0).all()), "a scale that is no candidate"
    assert bool((error_under(w, chosen, unit=floor) <= errors.amin(0) + RESOLUTION).all()), "a better candidate was left"
    clear = errors.sort(0).values
    decided = clear[1] - clear[0] > RESOLUTION
    best = candidates.gather(0, errors.argmin(0)[None])[0]
    assert_equal(chosen[decided].long(), best[decided].long(), what="exponents")
    assert float(decided.double().mean()) > (0.6 if name == "smallest_scale" else 0.9), "the check decides too few blocks"
    reached = {int(d) for d in (chosen - floor).unique()}
    assert reached >= {"gauss": {0, 1}, "heavy": {0, 1}, "crowded": {-1, 0}}.get(name, set()), "the inputs do not reach their candidates"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_no_other_rule_errs_less(name: str, dtype: torch.dtype) -> None:
    w = blocks_of(name, seed=12, dtype=dtype)
    floor = floor_exponents(w)
    errors = {m: ((fake_quant_mxfp4_ref(w, scale_mode=m).double() - w.double()) / 2.0 ** floor.double()[:, None]).square().sum(-1) for m in MODES}
    for mode in MODES:
        assert bool((errors["mse"] <= errors[mode] + RESOLUTION).all()), mode
    if name == "gauss":
        assert float(errors["mse"].sum()) < 0.995 * min(float(errors[m].sum()) for m in MODES if m != "mse")


@pytest.mark.parametrize("name", NAMES)
def test_equal_errors_keep_floor(name: str) -> None:
    """Blocks of the floor scale's own values have no error there, whatever the neighbours do."""
    w = fake_quant_mxfp4_ref(blocks_of(name, seed=13, dtype=torch.float32), scale_mode="floor")
    assert_equal(quantize_mxfp4_ref(w, scale_mode="mse")[1], quantize_mxfp4_ref(w, scale_mode="floor")[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_bytes_return_when_quantized_again(name: str, dtype: torch.dtype) -> None:
    codes, scales = quantize_mxfp4_ref(blocks_of(name, seed=14, dtype=dtype), scale_mode="mse")
    again, scales_again = quantize_mxfp4_ref(dequantize_mxfp4_ref(pack_codes_ref(codes), scales, dtype=dtype).reshape(-1, MX_BLOCK_SIZE), scale_mode="mse")
    assert_equal(scales_again, scales, what="scales")
    assert_equal(again, codes, what="codes")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_the_order_of_weights_does_not_matter(dtype: torch.dtype) -> None:
    w = torch.cat([blocks_of(name, seed=15, dtype=dtype) for name in ("heavy", "crowded")])
    order = torch.randperm(MX_BLOCK_SIZE, generator=torch.Generator().manual_seed(0))
    assert_equal(quantize_mxfp4_ref(w[:, order], scale_mode="mse")[1], quantize_mxfp4_ref(w, scale_mode="mse")[1])


def test_the_largest_error_fits_an_int32() -> None:
    """32 weights just below 8 under half the scale err by 5 each, as much as there is."""
    x = torch.full((1, MX_BLOCK_SIZE), float(torch.nextafter(torch.tensor(8.0), torch.tensor(0.0))))
    error = int(_squared_error_ref(x, torch.tensor([-1], dtype=torch.int32)))
    assert 31.99 * 25 * 2**20 < error <= 32 * 25 * 2**20 < 2**31
