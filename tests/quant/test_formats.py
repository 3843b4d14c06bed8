"""Number formats against models of their own in float64: MXFP8 and FP8 in tiles exactly, and what every format promises of disk and training."""

import math
from typing import Any

import pytest
import torch
from cases import MODES, ScaleMode
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from tolerances import assert_equal
from torch import Tensor

from kilotok.quant.checkpoint.layouts import find_layout
from kilotok.quant.checkpoint.reader import DTYPE_NAMES
from kilotok.quant.formats import FORMATS, NumberFormat, fake_quant_activation, find_format

NAME = "model.layers.3.self_attn.q_proj.weight"
MXFP8, FP8 = find_format("mxfp8"), find_format("fp8_block")
# E4M3 by its definition: 4 exponent bits with bias 7, 3 of mantissa; code 127 is NaN, 126 is 448
E4M3 = torch.tensor([(c & 7) * 2.0**-9 if c < 8 else (8 + (c & 7)) * 2.0 ** ((c >> 3) - 10) for c in range(127)], dtype=torch.float64)


def e4m3_model(x: Tensor) -> Tensor:
    """x, float64 with |x| <= 448, to the nearest E4M3 value, ties to the even code; from the table alone."""
    magnitude = x.abs().contiguous()
    upper = torch.searchsorted(E4M3, magnitude).clamp(max=126)
    lower = (upper - 1).clamp(min=0)
    below, above = magnitude - E4M3[lower], E4M3[upper] - magnitude
    take_lower = (below < above) | ((below == above) & (lower % 2 == 0))
    return torch.where(take_lower, E4M3[lower], E4M3[upper]) * x.sign()


def mxfp8_model(w: Tensor) -> tuple[Tensor, Tensor]:
    """Values float64 and exponents of w [..., 32 * Q]: the least exponent >= -127 with amax <= 448 * 2**e, found by trying them all."""
    blocks = w.to(torch.bfloat16).double().unflatten(-1, (-1, 32))
    amax = blocks.abs().amax(-1)
    candidates = 448.0 * torch.tensor(2.0, dtype=torch.float64) ** torch.arange(-127, 128, dtype=torch.float64)
    exponents = torch.searchsorted(candidates, amax.contiguous()) - 127     # the first candidate >= amax
    scale = torch.tensor(2.0, dtype=torch.float64) ** exponents
    return (e4m3_model(blocks / scale[..., None]) * scale[..., None]).flatten(-2), exponents


def fp8_model(w: Tensor) -> tuple[Tensor, Tensor]:
    """Values bf16 and scales bf16 of w [out, in], one tile after another."""
    source = w.to(torch.bfloat16).double()
    rows, columns = source.shape
    values = torch.empty(rows, columns, dtype=torch.float64)
    scales = torch.empty(math.ceil(rows / 128), math.ceil(columns / 128), dtype=torch.bfloat16)
    for i in range(0, rows, 128):
        for j in range(0, columns, 128):
            tile = source[i: i + 128, j: j + 128]
            scale = (tile.abs().max() / 448).to(torch.bfloat16)
            scales[i // 128, j // 128] = scale if scale > 0 else 1.0
            s = float(scales[i // 128, j // 128])
            values[i: i + 128, j: j + 128] = e4m3_model((tile / s).clamp(-448, 448)) * s
    return values.to(torch.bfloat16), scales


def fake(fmt: NumberFormat, w: Tensor, *, dim: int = -1, dtype: torch.dtype = torch.bfloat16, mode: ScaleMode = "even", faults: Tensor | None = None) -> Tensor:
    return fmt.fake_quant(w, name=NAME, scale_mode=mode, dim=dim, dtype=dtype, faults=faults)


def on_disk(fmt: NumberFormat, w: Tensor, *, mode: ScaleMode = "even") -> dict[str, Tensor]:
    """By suffix, as the compressed-tensors layout names them."""
    packed = fmt.encode(w, name=NAME, scale_mode=mode)
    if fmt.name == "bf16":
        return {"weight": packed.elements}
    layout = find_layout("compressed-tensors")
    names, specs = layout.names("x", fmt.name), layout.specs(fmt.name, tuple(w.shape), scales=packed.scales.dtype)
    tensors = layout.to_disk(packed)
    assert [(DTYPE_NAMES[t.dtype], tuple(t.shape)) for t in tensors] == list(specs)
    return {name.removeprefix("x."): tensor for name, tensor in zip(names, tensors, strict=True)}


def heavy(*shape: int, seed: int = 0) -> Tensor:
    """fp32 weights whose blocks lie many binades apart, with zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(shape, generator=generator) * torch.exp2(torch.randint(-30, 30, (*shape[:-1], 1), generator=generator).float())
    return torch.where(torch.rand(shape, generator=generator) < 0.05, torch.zeros_like(w), w)


# --- MXFP8 against the model ---


def test_the_table_of_the_model_is_e4m3() -> None:
    assert E4M3[126] == 448 and E4M3[1] == 2.0**-9 and bool((E4M3.diff() > 0).all())
    assert_equal(E4M3, torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double())


@pytest.mark.parametrize("exponent", [-127, -126, -120, -9, 0, 7, 119])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_mxfp8_every_tie_and_its_neighbours(exponent: int, sign: float) -> None:
    """A block per midpoint of neighbouring E4M3 values: the tie, the bf16 values beside it, both E4M3 values, and 448 to fix the scale."""
    ties = (E4M3[:-1] + E4M3[1:]) / 2
    scale = 2.0**exponent
    rows = []
    for k, tie in enumerate(ties.tolist()):
        t = torch.tensor(sign * tie * scale, dtype=torch.float64).to(torch.bfloat16)
        around = [t, torch.nextafter(t, torch.full_like(t, math.inf)), torch.nextafter(t, torch.full_like(t, -math.inf))]
        row = torch.zeros(32, dtype=torch.bfloat16)
        row[:6] = torch.stack([*around, *(torch.tensor(sign * float(E4M3[c]) * scale).to(torch.bfloat16) for c in (k, k + 1)),
                               torch.tensor(448 * scale).to(torch.bfloat16)])
        rows.append(row)
    w = torch.stack(rows)
    if exponent > -124:   # below, the smallest midpoints are no bf16 values
        assert_equal(w[:, 0].double(), sign * ties * scale)
    values, exponents = mxfp8_model(w)
    assert set(exponents.flatten().tolist()) == {exponent}
    assert_equal(fake(MXFP8, w, dtype=torch.float32).double(), values)
    tensors = on_disk(MXFP8, w)
    assert set(tensors["weight_scale"].flatten().tolist()) == {exponent + 127}
    if exponent > -124:
        even = torch.where(torch.arange(126) % 2 == 0, E4M3[:-1], E4M3[1:])
        assert_equal(fake(MXFP8, w, dtype=torch.float32)[:, 0].double(), sign * even * scale)


def test_mxfp8_of_every_largest_magnitude_there_is() -> None:
    """All bf16 magnitudes that may be the largest of a block, subnormals and zero included; the 8 above 1.9375 * 2**127 are refused."""
    amax = torch.arange(0x7F80, dtype=torch.int16).view(torch.bfloat16)
    for fmt in (MXFP8, FP8):
        for too_large in amax[-8:]:
            with pytest.raises(ValueError, match=rf"^{NAME}: weights must be finite and below 3\.29\d+e\+38 in magnitude; got 3\.[0-9]+e\+38 at index \(7,\)"):
                fake(fmt, torch.nn.functional.pad(too_large[None], (7, 24)))
    amax = amax[:-8]
    share = torch.rand(len(amax), 31, generator=torch.Generator().manual_seed(0)) * 2 - 1
    w = torch.cat((-amax[:, None], (amax[:, None].float() * share).to(torch.bfloat16)), dim=1)
    values, exponents = mxfp8_model(w)
    assert_equal(fake(MXFP8, w, dtype=torch.float32).double(), values)
    tensors = on_disk(MXFP8, w)
    assert_equal(tensors["weight_scale"].int(), exponents.int() + 127)
    elements = tensors["weight"].double()
    assert bool(torch.isfinite(elements).all()) and float(elements.abs().max()) == 448
    # nothing saturates: before rounding no element is above 448, and the next smaller scale would put one there
    scaled = w.double() * torch.tensor(2.0, dtype=torch.float64) ** -exponents
    assert float(scaled.abs().max()) == 448
    assert bool((scaled.abs().amax(1) > 224)[exponents[:, 0] > -127].all())


def test_mxfp8_of_zeros_and_of_the_smallest_weights() -> None:
    assert_equal(fake(MXFP8, torch.zeros(2, 64)), torch.zeros(2, 64, dtype=torch.bfloat16), bits=True)
    assert_equal(on_disk(MXFP8, torch.zeros(2, 64))["weight_scale"], torch.zeros(2, 2, dtype=torch.uint8))
    smallest = torch.zeros(32, dtype=torch.bfloat16)
    smallest[0], smallest[1] = 2.0**-133, -(2.0**-133)
    assert_equal(fake(MXFP8, smallest), smallest)
    vanishing = torch.zeros(32)
    vanishing[0], vanishing[1], vanishing[2] = 448.0, -(2.0**-11), 2.0**-11
    got = fake(MXFP8, vanishing)
    assert got[0] == 448 and math.copysign(1, float(got[1])) == 1 and float(got[1]) == 0.0   # no negative zero


def test_activations_are_rounded_like_weights() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        x = heavy(3, 5, 96, seed=2).to(dtype)
        got = fake_quant_activation(x)
        assert got.dtype == dtype and not torch.equal(got, x)
        assert_equal(got.double(), mxfp8_model(x)[0])


# --- FP8 in tiles against the definition ---


@pytest.mark.parametrize("shape", [(128, 128), (256, 128), (130, 70), (127, 257), (1, 300), (300, 1), (1, 1)], ids=str)
@pytest.mark.parametrize("seed", [0, 1])
def test_fp8_tiles_are_the_definition(shape: tuple[int, int], seed: int) -> None:
    w = heavy(*shape, seed=seed)
    values, scales = fp8_model(w)
    tensors = on_disk(FP8, w)
    assert tensors["weight"].dtype == torch.float8_e4m3fn and tensors["weight"].shape == shape
    assert_equal(tensors["weight_scale"], scales)
    assert_equal(fake(FP8, w), values)
    assert FP8.num_bytes(shape) == sum(t.numel() * t.element_size() for t in tensors.values())
    if min(shape) > 2:
        assert not torch.equal(fake(FP8, w), w.to(torch.bfloat16))


def test_fp8_tiles_do_not_touch_each_other() -> None:
    w = heavy(200, 200, seed=3)
    before = fake(FP8, w)
    w[150, 150] = 1e6   # in the last tile
    after = fake(FP8, w)
    assert_equal(after[:128], before[:128])
    assert_equal(after[128:, :128], before[128:, :128])
    assert not torch.equal(after[128:, 128:], before[128:, 128:])


def test_fp8_of_zeros_is_zero_and_of_tiny_weights_finite() -> None:
    assert_equal(fake(FP8, torch.zeros(3, 5)), torch.zeros(3, 5, dtype=torch.bfloat16), bits=True)
    assert_equal(on_disk(FP8, torch.zeros(3, 5))["weight_scale"], torch.ones(1, 1, dtype=torch.bfloat16))
    for exponent in (-133, -130, -126, -120):
        w = torch.full((2, 3), 2.0**exponent)
        assert_equal(fake(FP8, w), fp8_model(w)[0])


# --- every format ---


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
@pytest.mark.parametrize("shape", [(1, 32), (96, 64), (130, 160), (0, 64)], ids=str)
def test_disk_reads_back_to_the_values_of_training(fmt: NumberFormat, shape: tuple[int, int], mode: ScaleMode) -> None:
    for w in (heavy(*shape, seed=4), heavy(*shape, seed=5).to(torch.bfloat16)):
        expected = fake(fmt, w, mode=mode)
        got = fmt.decode(fmt.encode(w, name=NAME, scale_mode=mode))
        assert expected.dtype == got.dtype == torch.bfloat16
        assert_equal(got, expected, bits=fmt.name != "bf16")
        assert_equal(fake(fmt, w, dtype=torch.float32, mode=mode), expected.float())
        assert fmt.num_bytes(shape) == sum(t.numel() * t.element_size() for t in on_disk(fmt, w, mode=mode).values())


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_the_input_may_be_the_second_dim_from_the_end(fmt: NumberFormat) -> None:
    """[E, in, out] gives the transposed values of [E, out, in]."""
    w = heavy(3, 64, 96, seed=6)
    assert_equal(fake(fmt, w, dim=-2), fake(fmt, w.mT.contiguous()).mT)
    if fmt.name.startswith("mxfp"):
        assert not torch.equal(fake(fmt, w, dim=-2), fake(fmt, w))


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_an_expert_alone_gets_the_values_it_has_among_others(fmt: NumberFormat) -> None:
    w = heavy(4, 130, 64, seed=7)
    together = fake(fmt, w)
    for e in range(4):
        assert_equal(together[e], fake(fmt, w[e]))


@pytest.mark.parametrize("name", ["mxfp4", "mxfp8", "bf16"])
def test_values_are_their_own_values(name: str) -> None:
    """Quantizing twice changes nothing. Not so for FP8 tiles, whose bf16 scale moves when the largest weight was rounded."""
    for mode in MODES if name == "mxfp4" else MODES[:1]:
        once = fake(find_format(name), heavy(64, 128, seed=8), mode=mode)
        if mode != "mse":   # the scale of least error depends on what is to be approximated
            assert_equal(fake(find_format(name), once, mode=mode), once)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3.4e38])   # the last is finite in fp32 and infinite in bf16
def test_what_is_not_finite_is_named(fmt: NumberFormat, value: float) -> None:
    w = heavy(8, 64)
    w[5, 33] = value
    read = float(torch.tensor(value).to(torch.bfloat16))
    for call in (lambda: fake(fmt, w), lambda: fmt.encode(w, name=NAME, scale_mode="even")):
        with pytest.raises(ValueError, match=rf"^{NAME}: .*got {read} at index \(5, 33\) of shape \(8, 64\)"):
            call()


@pytest.mark.parametrize("name", ["mxfp8", "fp8_block", "bf16"])
def test_a_fault_is_a_flag_where_one_is_given(name: str) -> None:
    faults = torch.zeros(1, dtype=torch.int32)
    w = heavy(8, 64)
    fake(find_format(name), w, faults=faults)
    assert int(faults) == 0
    w[5, 33] = math.nan
    fake(find_format(name), w, faults=faults)
    assert int(faults) == 1
    fake(find_format(name), heavy(8, 64), faults=faults)
    assert int(faults) == 1, "a later sound weight must not clear it"


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_what_a_format_cannot_hold(fmt: NumberFormat) -> None:
    problem = fmt.problem((64, 48))
    assert (problem is not None) == fmt.name.startswith("mxfp")
    assert problem is None or ("multiple of 32" in problem and "got 48" in problem)
    assert fmt.problem((48, 64)) is None


def test_an_unknown_format_names_those_there_are() -> None:
    with pytest.raises(ValueError, match="one of mxfp4, mxfp8, fp8_block, bf16; got 'fp8'"):
        find_format("fp8")


@pytest.mark.parametrize("name", ["mxfp4", "mxfp8", "fp8_block"])
@pytest.mark.parametrize("shape", [(96, 64), (256, 128), (130, 160)], ids=str)
def test_compressed_tensors_decompresses_to_the_values_of_training(name: str, shape: tuple[int, int]) -> None:
    fmt = find_format(name)
    w = heavy(*shape, seed=9)
    described: dict[str, Any] = fmt.scheme()
    scheme = QuantizationScheme(targets=["Linear"], **described)
    theirs = BaseCompressor.get_value_from_registry(described["format"]).decompress(on_disk(fmt, w), scheme)["weight"]
    assert_equal(theirs.to(torch.bfloat16), fake(fmt, w))


def test_bits_a_weight() -> None:
    assert [f.bits_per_weight((256, 256)) for f in FORMATS] == [4.25, 8.25, 8 + 16 / 128**2, 16]
