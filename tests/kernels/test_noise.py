"""Philox against the published vectors and against integers of Python; the noise against its formula and its distribution.

Statistical bounds are five standard deviations of the statistic; the seeds are fixed, so a test that passes keeps passing.
"""

import math
import random
from collections.abc import Sequence

import pytest
import torch
from tolerances import assert_equal
from torch import Tensor

from kilotok.kernels.sampling import gumbel_noise_ref, philox_4x32_ref
from kilotok.kernels.sampling import noise as noise_module

WORD = 0xFFFFFFFF
SEED = 0x0123_4567_89AB_CDEF
SIGMAS = 5

# Random123, kat_vectors, philox4x32-10: counter, key, result
KNOWN_ANSWERS = {
    "zeros": ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    "ones": ((WORD, WORD, WORD, WORD), (WORD, WORD), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    "pi": ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0), (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
}


def philox(counter: Sequence[int], key: Sequence[int]) -> tuple[int, ...]:
    """Ten rounds in integers of any size, as the paper writes a round: left and right halves swap, the key grows by the Weyl constants."""
    (x0, x1, x2, x3), (k0, k1) = counter, key
    for r in range(10):
        a, b = 0xD2511F53 * x0, 0xCD9E8D57 * x2
        x0, x1, x2, x3 = (b >> 32) ^ x1 ^ (k0 + r * 0x9E3779B9) % 2**32, b % 2**32, (a >> 32) ^ x3 ^ (k1 + r * 0xBB67AE85) % 2**32, a % 2**32
    return x0, x1, x2, x3


def run(counters: Sequence[Sequence[int]], *, seed: int) -> list[tuple[int, ...]]:
    words = philox_4x32_ref(tuple(torch.tensor(c) for c in zip(*counters, strict=True)), seed=seed)  # type: ignore[arg-type]
    return [tuple(w) for w in torch.stack(words, dim=1).tolist()]


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN_ANSWERS.values(), ids=KNOWN_ANSWERS)
def test_published_vectors(counter: tuple[int, ...], key: tuple[int, int], result: tuple[int, ...]) -> None:
    assert philox(counter, key) == result
    assert run([counter], seed=key[0] | key[1] << 32) == [result]


def test_philox_equals_integers_of_python() -> None:
    draw = random.Random(1)
    edges = [0, 1, 0xFFFF, 0x10000, 0x7FFFFFFF, 0x80000000, WORD]
    for seed in [0, 1, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1, *(draw.randrange(2**64) for _ in range(20))]:
        counters = [[draw.choice(edges) if draw.random() < 0.3 else draw.randrange(2**32) for _ in range(4)] for _ in range(100)]
        assert run(counters, seed=seed) == [philox(c, (seed % 2**32, seed >> 32)) for c in counters]


def test_words_keep_the_shape_of_the_counters() -> None:
    counter = torch.arange(24).view(2, 3, 4)
    words = philox_4x32_ref((counter, counter, counter, counter), seed=3)
    assert all(w.shape == (2, 3, 4) and w.dtype == torch.int64 for w in words)
    assert [int(w[1, 2, 3]) for w in words] == [*philox((23, 23, 23, 23), (3, 0))]


# --- the noise ---


@pytest.mark.parametrize("seed", [0, 7, SEED, 2**64 - 1])
def test_noise_is_the_formula_of_the_word(seed: int) -> None:
    """Token v at position p: word v % 4 of counter (v // 4, p, 0, 0), to one step of fp32."""
    positions = (0, 1, 15, 16, 4097, 2**31, 2**32 - 1)
    got = gumbel_noise_ref(seed=seed, positions=positions, vocab_size=29)
    assert got.shape == (len(positions), 29) and got.dtype == torch.float32
    for row, p in zip(got.tolist(), positions, strict=True):
        for v, value in enumerate(row):
            word = philox((v // 4, p, 0, 0), (seed % 2**32, seed >> 32))[v % 4]
            assert value == pytest.approx(-math.log(-math.log((word + 0.5) / 2**32)), rel=2**-23), f"position {p}, token {v}"


@pytest.mark.parametrize(("word", "expected"), [(0, -math.log(math.log(2.0**33))), (WORD, 33 * math.log(2.0))], ids=["lowest", "highest"])
def test_the_extreme_words_give_finite_noise(monkeypatch: pytest.MonkeyPatch, word: int, expected: float) -> None:
    def constant(counters: tuple[Tensor, ...], *, seed: int) -> tuple[Tensor, ...]:
        return tuple(torch.full_like(c, word) for c in counters)

    monkeypatch.setattr(noise_module, "philox_4x32_ref", constant)
    got = gumbel_noise_ref(seed=1, positions=[0], vocab_size=5)
    assert got.tolist() == [[pytest.approx(expected, rel=1e-6)] * 5]
    assert float(got.min()) > -3.2 and float(got.max()) < 22.9


def test_a_position_has_the_same_noise_in_any_company() -> None:
    together = gumbel_noise_ref(seed=SEED, positions=range(40), vocab_size=50)
    for positions in ([7], [39, 0], [3, 3, 3], [*range(40)][::-1], range(13, 29)):
        assert_equal(gumbel_noise_ref(seed=SEED, positions=positions, vocab_size=50), together[list(positions)], what=f"positions {list(positions)}", bits=True)


@pytest.mark.parametrize("vocab_size", [1, 2, 3, 4, 5, 7, 8, 49])
def test_a_token_has_the_same_noise_in_any_vocabulary(vocab_size: int) -> None:
    large = gumbel_noise_ref(seed=SEED, positions=range(10), vocab_size=50)
    assert_equal(gumbel_noise_ref(seed=SEED, positions=range(10), vocab_size=vocab_size), large[:, :vocab_size].contiguous(), bits=True)


def test_no_positions() -> None:
    assert gumbel_noise_ref(seed=1, positions=[], vocab_size=6).shape == (0, 6)


def test_seed_position_and_token_all_matter() -> None:
    """Both halves of the seed: no two of these rows share a number, though each has 4000."""
    rows = [gumbel_noise_ref(seed=s, positions=[p], vocab_size=4000)[0] for s in (0, 1, 2**32, 2**63) for p in (0, 1, 2)]
    for i, a in enumerate(rows):
        assert len(a.unique()) > 3990   # fp32 has so few numbers near zero that a few words round to the same
        assert all(int((a == b).sum()) == 0 for b in rows[:i])


# --- its distribution ---


def test_mean_and_variance_are_those_of_gumbel() -> None:
    x = gumbel_noise_ref(seed=SEED, positions=range(300), vocab_size=1001).double().flatten()
    n, variance = len(x), math.pi**2 / 6
    assert abs(float(x.mean()) - 0.5772156649015329) < SIGMAS * math.sqrt(variance / n)
    # the fourth central moment of a Gumbel variable is 5.4 variances squared
    assert abs(float(x.var()) - variance) < SIGMAS * variance * math.sqrt(4.4 / n)
    for quantile in (0.001, 0.1, 0.5, 0.9, 0.999):
        below = float((x < -math.log(-math.log(quantile))).double().mean())
        assert abs(below - quantile) < SIGMAS * math.sqrt(quantile * (1 - quantile) / n), quantile


@pytest.mark.parametrize("shift", [1, 2, 3, 4, 5])
def test_neighbours_are_not_correlated(shift: int) -> None:
    """Of tokens within a counter and across counters, of positions, and of seeds that differ in their low or high half."""
    x = (gumbel_noise_ref(seed=SEED, positions=range(200), vocab_size=600).double() - 0.5772156649015329) / (math.pi / math.sqrt(6))
    pairs = {"tokens": (x[:, :-shift], x[:, shift:]), "positions": (x[:-shift], x[shift:])}
    for name, other in (("low half of the seed", SEED + shift), ("high half of the seed", SEED + (shift << 32))):
        y = (gumbel_noise_ref(seed=other, positions=range(200), vocab_size=600).double() - 0.5772156649015329) / (math.pi / math.sqrt(6))
        pairs[name] = (x, y)
    for name, (a, b) in pairs.items():
        assert abs(float((a * b).mean())) < SIGMAS / math.sqrt(a.numel()), name


def chi_square(counts: Tensor, probabilities: Tensor) -> float:
    expected = probabilities * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


def test_gumbel_max_picks_follow_the_softmax() -> None:
    logits = torch.tensor([0.0, 1.5, -1.0, 0.3, 2.0, -2.5, 0.7], dtype=torch.float64)
    trials = 40_000
    picks = (logits + gumbel_noise_ref(seed=SEED, positions=range(trials), vocab_size=7)).argmax(dim=1)
    counts = picks.bincount(minlength=7).double()
    freedom = len(logits) - 1
    bound = freedom + SIGMAS * math.sqrt(2 * freedom)
    assert chi_square(counts, logits.softmax(0)) < bound
    assert chi_square(counts, (logits / 1.1).softmax(0)) > 3 * bound   # the test sees a temperature of 1.1


# --- refusals ---


@pytest.mark.parametrize(("seed", "positions"), [(-1, [0]), (2**64, [0]), (0, [-1]), (0, [3, 2**32])])
def test_a_key_out_of_range_is_refused(seed: int, positions: list[int]) -> None:
    with pytest.raises(ValueError) as error:
        gumbel_noise_ref(seed=seed, positions=positions, vocab_size=4)
    assert str(error.value) == f"gumbel_noise: the seed must lie in 0..2**64 - 1 and positions in 0..2**32 - 1; got {seed} and {positions}."
