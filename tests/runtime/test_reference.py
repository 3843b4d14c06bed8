"""The reference executor: transformers' numbers, and the column rule to the bit."""

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import POCKET, save_tiny_moe
from tolerances import FP32_EPS, Bound, assert_equal, assert_within
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from transformers.models.qwen3_moe import modeling_qwen3_moe as theirs

from kilotok.dflash.context import Taps
from kilotok.quant.archs import load_model
from kilotok.runtime import reference
from kilotok.runtime.reference import KV_CHUNK, ONE_PASS, TILE, ReferenceExecutor, ReferenceSequence
from kilotok.runtime.weights import load_executor

pytestmark = pytest.mark.xdist_group("reference")   # texts read a token at a time are read once
LENGTH = 2 * KV_CHUNK + 3 * TILE + 5   # ends inside the third cache chunk and inside a tile
# Shapes that differ wherever the code could take one for the other; taps out of order, the last layer among them.
TINY: dict[str, dict[str, Any]] = {
    "tied": {"num_hidden_layers": 3},
    "untied": {"num_hidden_layers": 3, "norm_topk_prob": False, "tie_word_embeddings": False, "hidden_size": 72, "num_attention_heads": 6,
               "num_key_value_heads": 1, "head_dim": 20, "num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "rms_norm_eps": 1e-3,
               "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}},
}
TAPS = {"tied": (2, 0), "untied": (2, 0), "pocket": (1, 3, 5)}
MODELS = ("pocket", *TINY)
FP64_EPS = 2.0**-52
# Largest errors over five texts and the three models (maximum, RMS), in units of eps: 14 and 7; 5.4 and 2.3; 19 and 5.5.
FP64_WIDENED = Bound(maximum=64 * FP64_EPS, rms=32 * FP64_EPS, reason="the same float64 operations; sums in another order")
FP64_AS_IT_IS = Bound(maximum=16 * FP32_EPS, rms=8 * FP32_EPS, reason="transformers' norms and router are fp32 in a float64 model too; the rest is float64")
FP32 = Bound(maximum=64 * FP32_EPS, rms=16 * FP32_EPS, reason="fp32 sums in another order, through all layers")
# One pass of many rows against tiles of 8: the same operations, so less apart than two implementations.
ONE_COLUMN_FP32 = Bound(maximum=64 * FP32_EPS, rms=16 * FP32_EPS, reason="fp32 products of another row count sum in another order")


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {"pocket": POCKET, **{name: save_tiny_moe(root / name, **shape) for name, shape in TINY.items()}}


@pytest.fixture(scope="module")
def executor_of(directories: dict[str, Path]) -> Callable[..., ReferenceExecutor]:
    """An executor by model, dtype and placement (None: as measured), made once."""
    made: dict[tuple[Any, ...], ReferenceExecutor] = {}

    def get(name: str, dtype: torch.dtype = torch.float32, placement: reference.Placement | None = None) -> ReferenceExecutor:
        key = (name, dtype, placement)
        if key not in made:
            measured = load_executor(directories[name], device="cpu", dtype=dtype, taps=TAPS[name])
            made[name, dtype, None] = measured
            made[key] = measured if placement is None else ReferenceExecutor(measured.graph, measured.weights, taps=TAPS[name], placement=placement)
        return made[key]
    return get


def random_ids(count: int, *, seed: int, vocab_size: int = 4096) -> list[int]:
    return torch.randint(4, vocab_size, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def hf_model(directory: Path, *, dtype: torch.dtype) -> torch.nn.Module:
    model = load_model(directory, dtype=dtype)
    model.set_experts_implementation("eager")  # type: ignore[operator]
    return model


def widen_fp32_islands(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers computes RMS norms and the router's softmax in fp32 even in a float64 model: here in the model's own dtype.

    (Rotary angles are fp32 in both, on purpose.)
    """
    def norm(self: Any, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon))  # type: ignore[no-any-return]

    def router(self: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = F.linear(x.reshape(-1, self.hidden_dim), self.weight)
        top, experts = logits.softmax(-1).topk(self.top_k, dim=-1)
        return logits, top / top.sum(-1, keepdim=True) if self.norm_topk_prob else top, experts

    monkeypatch.setattr(theirs.Qwen3MoeRMSNorm, "forward", norm)
    monkeypatch.setattr(theirs.Qwen3MoeTopKRouter, "forward", router)


def assert_same_model(executor: ReferenceExecutor, model: torch.nn.Module, *, bound: Bound) -> None:
    ids = random_ids(LENGTH, seed=7)
    with Taps(model, layer_ids=executor.taps) as taps, torch.no_grad():
        logits, features = model(torch.tensor([ids])).logits[0], taps.take()[0]
    step = executor.open().read(ids)
    assert_within(step.logits_TV, logits, bound=bound, what="logits")
    assert_within(step.features_TF, features, bound=bound, what="features")
    assert_equal(step.logits_TV.argmax(-1), logits.argmax(-1), what="greedy tokens")


@pytest.mark.parametrize("name", MODELS)
def test_float64_is_transformers_to_the_last_digits(
        name: str, directories: dict[str, Path], executor_of: Callable[..., ReferenceExecutor], monkeypatch: pytest.MonkeyPatch) -> None:
    widen_fp32_islands(monkeypatch)
    assert_same_model(executor_of(name, torch.float64), hf_model(directories[name], dtype=torch.float64), bound=FP64_WIDENED)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, FP64_AS_IT_IS), (torch.float32, FP32)], ids=["float64", "float32"])
def test_transformers_as_it_is(
        name: str, dtype: torch.dtype, bound: Bound, directories: dict[str, Path], executor_of: Callable[..., ReferenceExecutor]) -> None:
    assert_same_model(executor_of(name, dtype), hf_model(directories[name], dtype=dtype), bound=bound)


# ---- the column rule: how a text was cut into reads leaves no trace, to the bit


PLACEMENTS = pytest.mark.parametrize("placement", [None, "aligned"], ids=["measured", "aligned"])
RULE_CASES: tuple[tuple[str, torch.dtype, reference.Placement | None], ...] = (
    ("pocket", torch.float32, None), ("untied", torch.float32, None), ("untied", torch.float32, "aligned"), ("untied", torch.float64, None),
    ("tied", torch.float64, "aligned"), ("tied", torch.bfloat16, None))


def one_by_one(sequence: ReferenceSequence, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Logits and features of a text that is read a token at a time."""
    steps = [sequence.read([i]) for i in ids]
    return torch.cat([s.logits_TV for s in steps]), torch.cat([s.features_TF for s in steps])


@pytest.fixture(scope="module")
def singly(executor_of: Callable[..., ReferenceExecutor]) -> Callable[..., tuple[list[int], Tensor, Tensor]]:
    """(text, logits, features) of a text read a token at a time."""
    made: dict[tuple[Any, ...], tuple[list[int], Tensor, Tensor]] = {}

    def get(*key: Any) -> tuple[list[int], Tensor, Tensor]:
        if key not in made:
            ids = random_ids(LENGTH, seed=11)
            made[key] = (ids, *one_by_one(executor_of(*key).open(), ids))
        return made[key]
    return get


def read_in_pieces(sequence: ReferenceSequence, ids: Sequence[int], *, sizes: Iterator[int], garbage: random.Random | None = None,
                   before: Callable[[], None] = lambda: None) -> tuple[Tensor, Tensor]:
    """Read with the given sizes; with `garbage`, other tokens are read and rewound in between, sometimes the last good ones too."""
    logits, features = [], []
    while sequence.length < len(ids):
        if garbage is not None and garbage.random() < 0.5:
            here = sequence.length
            room = min(garbage.randint(1, TILE + 2), sequence.max_length - here)
            sequence.read([garbage.randrange(4, 4096) for _ in range(room)])
            sequence.rewind(here)
        before()
        start = sequence.length
        step = sequence.read(ids[start:start + next(sizes)])
        logits.append(step.logits_TV)
        features.append(step.features_TF)
    return torch.cat(logits), torch.cat(features)


@pytest.mark.parametrize(("name", "dtype", "placement"), RULE_CASES, ids=lambda v: str(v).removeprefix("torch."))
def test_any_cut_of_a_text_gives_the_same_bits(
        name: str, dtype: torch.dtype, placement: reference.Placement | None, executor_of: Callable[..., ReferenceExecutor],
        singly: Callable[..., tuple[list[int], Tensor, Tensor]]) -> None:
    ids, logits, features = singly(name, dtype, placement)
    executor = executor_of(name, dtype, placement)
    prefills = (1, 7, KV_CHUNK - 1, KV_CHUNK, KV_CHUNK + 1, 2 * KV_CHUNK + 3, LENGTH) if (name, dtype) == ("untied", torch.float32) else (5, KV_CHUNK + 1)
    for seed, prefill in enumerate(prefills):
        rng = random.Random(seed)
        sizes = itertools.chain([prefill], iter(lambda r=rng: r.randint(1, TILE), 0))  # type: ignore[misc]
        got = read_in_pieces(executor.open(), ids, sizes=sizes, garbage=rng)
        assert_equal(got[0], logits, what=f"logits, prefill {prefill}", bits=True)
        assert_equal(got[1], features, what=f"features, prefill {prefill}", bits=True)


@PLACEMENTS
def test_another_text_behind_the_same_beginning_changes_nothing(placement: reference.Placement | None, executor_of: Callable[..., ReferenceExecutor]) -> None:
    executor, ids = executor_of("tied", torch.float32, placement), random_ids(3 * TILE, seed=3)
    for at in range(len(ids)):
        one, other = executor.open(), executor.open()
        a, b = one.read(ids), other.read([*ids[:at], *random_ids(len(ids) - at, seed=100 + at)])
        assert_equal(a.logits_TV[:at], b.logits_TV[:at], what=f"logits before {at}", bits=True)
        assert_equal(a.features_TF[:at], b.features_TF[:at], what=f"features before {at}", bits=True)
        assert not torch.equal(a.logits_TV[at:], b.logits_TV[at:])


@PLACEMENTS
def test_the_last_logits_alone_are_the_last_of_all(placement: reference.Placement | None, singly: Callable[..., tuple[list[int], Tensor, Tensor]],
                                                   executor_of: Callable[..., ReferenceExecutor]) -> None:
    ids, logits, features = singly("tied", torch.float32, placement)
    sequence = executor_of("tied", torch.float32, placement).open()
    start = 0
    for stop in (1, 9, 16, 21, KV_CHUNK + 5, LENGTH):
        step = sequence.read(ids[start:stop], last_logits_only=True)
        assert_equal(step.logits_TV, logits[stop - 1:stop], bits=True)
        assert_equal(step.features_TF, features[start:stop], bits=True)
        start = stop


@PLACEMENTS
@pytest.mark.parametrize("poison", [1e30, -1e30])
def test_what_lies_beyond_the_length_in_the_cache_is_never_seen(
        poison: float, placement: reference.Placement | None, singly: Callable[..., tuple[list[int], Tensor, Tensor]],
        executor_of: Callable[..., ReferenceExecutor]) -> None:
    ids, logits, features = singly("untied", torch.float32, placement)
    sequence = executor_of("untied", torch.float32, placement).open()
    sequence._reserve(LENGTH)

    def fill() -> None:
        sequence._cache[:, :, :, sequence.length:] = poison

    got = read_in_pieces(sequence, ids, sizes=itertools.cycle((3, 8, 1, 5)), before=fill)
    assert_equal(got[0], logits, what="logits")
    assert_equal(got[1], features, what="features")


@PLACEMENTS
def test_dead_columns_store_nothing_and_reach_nobody(
        placement: reference.Placement | None, directories: dict[str, Path], singly: Callable[..., tuple[list[int], Tensor, Tensor]]) -> None:
    ids, logits, features = singly("tied", torch.float32, placement)
    executor = load_executor(directories["tied"], device="cpu", dtype=torch.float32, taps=TAPS["tied"])
    executor.placement = placement or executor.placement
    sequence = executor.open()
    sequence._reserve(LENGTH)
    sequence._cache[:] = 5.0
    executor.weights.embedding[0] = torch.nan   # the token that fills dead columns (and no column of this text: its head is the embedding too)
    assert 0 not in ids
    got = read_in_pieces(sequence, ids[:50], sizes=itertools.cycle((1, 4, 2, 7)))
    assert_equal(got[0][:, 1:], logits[:50, 1:], what="logits", bits=True)
    assert_equal(got[1], features[:50], what="features", bits=True)
    assert bool((sequence._cache[:, :, :, 50:] == 5.0).all()) and not bool((sequence._cache[:, :, :, :50] == 5.0).any())


def test_sequences_of_one_executor_do_not_meet(executor_of: Callable[..., ReferenceExecutor], singly: Callable[..., tuple[list[int], Tensor, Tensor]]) -> None:
    ids, logits, _ = singly("tied", torch.float32, None)
    executor = executor_of("tied")
    one, other = executor.open(), executor.open()
    rows = []
    for token, noise in zip(ids[:60], random_ids(60, seed=4), strict=True):
        rows.append(one.read([token]).logits_TV)
        other.read([noise])
    assert_equal(torch.cat(rows), logits[:60], bits=True)


# ---- which column a token takes is measured


def products(linear: Callable[[Tensor, Tensor], Tensor]) -> SimpleNamespace:
    """torch.nn.functional as the executor uses it, with other products."""
    return SimpleNamespace(linear=linear, silu=F.silu, pad=F.pad)


def test_rows_that_differ_by_their_place_are_found_and_given_a_fixed_place(directories: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    heads: list[int] = []   # rows of every product with the head

    def skewed(x: Tensor, w: Tensor) -> Tensor:
        if w.shape[0] == 4096:
            heads.append(x.shape[0])
        return F.linear(x, w) + 1e-4 * torch.arange(x.shape[0]).unsqueeze(1)

    monkeypatch.setattr(reference, "F", products(skewed))
    executor = load_executor(directories["tied"], device="cpu", dtype=torch.float32)
    assert executor.placement == "aligned"
    assert executor.description["column_rule"].endswith("a token in the column of its position modulo 8 (rows of a product differ on this machine)")
    ids = random_ids(70, seed=5)
    logits, _ = one_by_one(executor.open(), ids)
    for seed in range(4):
        rng = random.Random(seed)
        got = read_in_pieces(executor.open(), ids, sizes=iter(lambda r=rng: r.randint(1, TILE), 0), garbage=rng)  # type: ignore[misc]
        assert_equal(got[0], logits, what="logits", bits=True)
    sequence = executor.open()
    sequence.read(ids[:5])
    heads.clear()
    sequence.read(ids[5:13])   # columns 5, 6, 7 and, in a second tile, 0 to 4
    assert heads == [TILE, TILE]
    free = ReferenceExecutor(executor.graph, executor.weights, placement="free")
    got = read_in_pieces(free.open(), ids, sizes=itertools.cycle((3, 8)))
    assert not torch.equal(got[0], logits)   # so the rule was needed


class RowByRow(TorchFunctionMode):
    """Computes every row of a product alone, so that rows are alike on any machine."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ in ("linear", "matmul", "__matmul__"):
            return torch.cat([func(row, args[1]) for row in args[0].split(1, dim=-2)], dim=-2)
        return func(*args, **(kwargs or {}))


def test_rows_that_are_alike_take_any_column(directories: dict[str, Path]) -> None:
    ids = random_ids(KV_CHUNK + 9, seed=8)
    with RowByRow():
        executor = load_executor(directories["tied"], device="cpu", dtype=torch.float32)
        assert executor.placement == "free" and executor.description["column_rule"].endswith(", a token in any column")
        logits, _ = one_by_one(executor.open(), ids)
        got = read_in_pieces(executor.open(), ids, sizes=iter((KV_CHUNK - 3, TILE, 4)))   # the middle read ends in the second cache chunk
    assert_equal(got[0], logits, what="logits", bits=True)


def test_products_that_do_not_repeat_themselves_are_refused(directories: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    noise = torch.Generator().manual_seed(0)
    monkeypatch.setattr(reference, "F", products(lambda x, w: F.linear(x, w) + 1e-4 * torch.randn(x.shape[0], 1, generator=noise)))
    with pytest.raises(RuntimeError, match=r"^executor: this machine's matrix products do not repeat themselves, so text with and without a draft "):
        load_executor(directories["tied"], device="cpu", dtype=torch.float32)


class Products(TorchFunctionMode):
    """Records the shapes of all matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[tuple[int, ...], ...]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ in ("linear", "matmul", "__matmul__", "mm", "bmm", "addmm", "baddbmm", "mv", "einsum", "scaled_dot_product_attention"):
            self.shapes.append(tuple(tuple(a.shape) for a in args if isinstance(a, Tensor)))
        return func(*args, **(kwargs or {}))


@PLACEMENTS
def test_every_product_has_one_shape_however_much_is_read(placement: reference.Placement | None, executor_of: Callable[..., ReferenceExecutor]) -> None:
    """Equal bits can be luck with one machine's library; equal shapes are the rule itself."""
    executor = executor_of("untied", torch.float32, placement)
    d, k, f, rows = 72, 20, 40, TILE
    linears = {((rows, d), ((6 + 2) * k, d)), ((rows, 6 * k), (d, 6 * k)), ((rows, d), (7, d)), ((rows, d), (2 * f, d)), ((rows, f), (d, f)),
               ((rows, d), (4096, d))}
    attention = {((1, rows * 6, k), (1, k, KV_CHUNK)), ((1, rows * 6, KV_CHUNK), (1, KV_CHUNK, k))}
    sequence = executor.open()
    for count in (1, 3, 8, 13, 300):
        with Products() as products_of:
            sequence.read(random_ids(count, seed=1))
        assert set(products_of.shapes) == linears | attention, count
        if count == 1:
            assert products_of.shapes.count(((rows, d), (2 * f, d))) == 3 * 3   # three layers, three experts of the one token: dead columns choose none
    with Products() as products_of:
        executor.open(one_column=True).read(random_ids(5, seed=1))
    assert ((5, d), (4096, d)) in products_of.shapes and not [s for s in products_of.shapes if s[0][0] == rows]


# ---- without the rule


def test_one_column_is_close_to_the_tiles_and_repeats_itself(executor_of: Callable[..., ReferenceExecutor]) -> None:
    executor, ids = executor_of("pocket"), random_ids(ONE_PASS + 40, seed=2)
    tiled = executor.open().read(ids)
    first, second = (executor.open(one_column=True) for _ in range(2))
    runs = [(s.read(ids), *one_by_one(s, ids[:20])) for s in (first, second)]
    step = runs[0][0]
    assert_within(step.logits_TV, tiled.logits_TV, bound=ONE_COLUMN_FP32, what="logits")
    assert_within(step.features_TF, tiled.features_TF, bound=ONE_COLUMN_FP32, what="features")
    assert_equal(runs[1][0].logits_TV, step.logits_TV, bits=True)
    assert_equal(runs[1][1], runs[0][1], bits=True)


# ---- the sequence as a container


def test_reads_and_rewinds_that_do_not_fit_are_refused_and_change_nothing(directories: dict[str, Path], tmp_path: Path) -> None:
    executor = load_executor(save_tiny_moe(tmp_path / "short", max_position_embeddings=150), device="cpu", dtype=torch.float32)
    assert executor.max_length == 150 and executor.open().max_length == 150
    ids = random_ids(150, seed=1)
    sequence = executor.open()
    with pytest.raises(ValueError, match=r"^read: takes 1 to 150 tokens more \(context 150\); got 0\.$"):
        sequence.read([])
    with pytest.raises(ValueError, match=r"^read: takes 1 to 150 tokens more \(context 150\); got 151\.$"):
        sequence.read([*ids, 4])
    assert sequence.length == 0
    whole = sequence.read(ids).logits_TV
    assert sequence.length == 150
    with pytest.raises(ValueError, match=r"^read: takes 1 to 0 tokens more \(context 150\); got 1\.$"):
        sequence.read([4])
    for length in (-1, 151):
        with pytest.raises(ValueError, match=rf"^rewind: must be to 0\.\.150, the tokens read; got {length}\.$"):
            sequence.rewind(length)
    assert sequence.length == 150
    sequence.rewind(147)
    with pytest.raises(ValueError, match=r"^rewind: must be to 0\.\.147, "):
        sequence.rewind(148)   # forgotten is forgotten
    assert_equal(sequence.read(ids[147:]).logits_TV, whole[147:], bits=True)
    sequence.rewind(0)
    assert_equal(sequence.read(ids).logits_TV, whole, bits=True)


def test_the_cache_grows_in_whole_chunks_and_keeps_what_it_holds(executor_of: Callable[..., ReferenceExecutor]) -> None:
    executor, ids = executor_of("tied"), random_ids(500, seed=6)
    sequence, sizes = executor.open(), []
    for start in range(0, 500, 5):
        before = sequence._cache
        sequence.read(ids[start:start + 5])
        after = sequence._cache
        if after is not before:
            sizes.append(after.shape[3])
            assert_equal(after[:, :, :, :start], before[:, :, :, :start], bits=True)
            assert not bool(after[:, :, :, sequence.length:].any())
    assert sizes == [KV_CHUNK, 2 * KV_CHUNK, 4 * KV_CHUNK]   # doubled
    assert executor.open().read(ids).features_TF.shape == (500, 2 * 64)
    assert load_executor(POCKET, device="cpu", dtype=torch.float32).open().read(ids[:3]).features_TF.shape == (3, 0)   # no taps
