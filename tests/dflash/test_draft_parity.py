"""One block, three ways: the training form on packed rows, the drafter at work, and the published computation written out.

A draft that is trained on one thing and served with another drafts badly and nothing else shows it. So the two forms are
held to each other at every position of every document, and each known mistake has to break the bound a hundredfold.
"""

import dataclasses
import functools
from collections.abc import Sequence

import pytest
import torch
from conftest import save_tiny_moe
from tolerances import Bound, assert_equal, assert_within
from torch import Tensor, nn

from kilotok.dflash.config import DraftConfig
from kilotok.dflash.context import Taps
from kilotok.dflash.drafter import DFlashDrafter
from kilotok.dflash.hf_target import HFTarget
from kilotok.dflash.loss import slot_targets
from kilotok.dflash.model import Blocks, DraftModel
from kilotok.dflash.sampling import Sampling
from kilotok.quant.archs import load_model
from kilotok.train.distill_data import DOCUMENTS, IDS, POSITIONS, SUPERVISED, pack_row
from kilotok.train.responses import Response
from kilotok.train.slot_pass import run_target

TAPS = (2, 0)      # of four layers; the order is that of the features
WINDOW = 9
MASK, PAD = 4090, 0
WHY = "the same terms, summed over a packed row or over the cache of one document"
BOUNDS = {torch.float64: Bound(maximum=1e-10, rms=1e-10, reason=WHY), torch.float32: Bound(maximum=1e-4, rms=1e-4, reason=WHY)}
LENGTHS = (23, 1, 17, 31)   # with a prompt of 5 at most; 23 and 31 are longer than the window and two blocks
ROWS = {"one document": ([(3,)], 31), "packed": ([(0, 1, 2, 3)], 72), "padded": ([(2, 0)], 57), "two rows": ([(0, 3, 2), (3, 1)], 80)}
# how many committed tokens the target reads at a time: a prompt longer than the window, then rounds of 1 to 8
CHUNKS = {"token by token": (1,), "rounds": (12, 1, 8, 2, 1, 5)}


def document(number: int) -> Response:
    ids = torch.randint(4, MASK, (LENGTHS[number],), generator=torch.Generator().manual_seed(100 + number)).tolist()
    return Response(prompt=tuple(ids[:5]), response=tuple(ids[5:]))


def ids_of(number: int) -> list[int]:
    d = document(number)
    return [*d.prompt, *d.response]


@pytest.fixture(scope="module", params=[torch.float64, torch.float32], ids=["fp64", "fp32"])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> nn.Module:
    """Four random layers whose norms are not ones, so that before and after the final norm are different things."""
    directory = save_tiny_moe(tmp_path_factory.mktemp("target") / "tiny", num_hidden_layers=4)
    model = load_model(directory, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5, generator=generator)
    model.set_experts_implementation("eager")   # type: ignore[operator]  # grouped_mm has no float64
    return model.to(request.param)


def make_draft(target: nn.Module, *, window: int | None, taps: Sequence[int] = TAPS) -> DraftModel:
    """Random weights large enough for sharp attention, and norms that are not ones."""
    config = DraftConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=4096,
                         target_layer_ids=tuple(taps), num_target_layers=4, mask_token_id=MASK, sliding_window=window, rope_theta=1e4)
    draft, generator = DraftModel(config), torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in draft.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=1.5 * parameter.shape[1] ** -0.5, generator=generator)
            else:
                parameter.uniform_(0.5, 1.5, generator=generator)
    return draft.to(dtype_of(target)).requires_grad_(False)


def dtype_of(model: nn.Module) -> torch.dtype:
    return next(model.parameters()).dtype


def embedding_of(target: nn.Module) -> Tensor:
    return target.get_input_embeddings().weight.detach()   # type: ignore[operator]


# --- the three ways ---


def train_form(draft: DraftModel, target: nn.Module, rows: Sequence[Sequence[int]], *, length: int, each_anchor_alone: bool = False,
               taps: Sequence[int] = TAPS, one_document: bool = False) -> dict[tuple[int, int, int], Tensor]:
    """(row, document, position) -> hidden states [7, D] of the masked slots, for every position but a document's first."""
    batch = torch.stack([pack_row([document(d) for d in row], length=length, pad_id=PAD) for row in rows])
    ids, documents, positions = batch[:, IDS], batch[:, DOCUMENTS], batch[:, POSITIONS]
    features, _ = run_target(target, ids, documents_BS=documents, positions_BS=positions, layer_ids=tuple(taps))
    valid = positions > 0
    if one_document:   # a block's rotations depend on differences only, so this changes nothing but what it sees
        positions = torch.arange(length).expand_as(positions)
    index = torch.stack([v.nonzero().flatten()[torch.arange(int(valid.sum(1).max())) % int(v.sum())] for v in valid])   # the shorter row comes round again
    columns = index.split(1, dim=1) if each_anchor_alone else [index]
    hidden = torch.cat([draft(features, blocks=Blocks(anchors_BA=c, ids_BA=ids.gather(1, c), positions_BS=positions),
                              embedding_VD=embedding_of(target)) for c in columns], dim=1)
    found = {}
    for b, row in enumerate(rows):
        starts = [sum(LENGTHS[d] for d in row[:n]) for n in range(len(row))]
        for a, i in enumerate(index[b].tolist()):
            n = max(n for n, s in enumerate(starts) if s <= i)
            found[b, row[n], i - starts[n]] = hidden[b, a, 1:]
    return found


@functools.cache
def committed_features(target: nn.Module, number: int, *, chunks: Sequence[int], taps: Sequence[int]) -> list[Tensor]:
    """Features of a document as a round after the other commits it; the target reads wrong proposals as well and is rewound."""
    ids, found = ids_of(number), []
    with Taps(target, layer_ids=taps) as entered:
        reader = HFTarget(target, taps=entered, max_length=512)
        start = step = 0
        while start + (size := chunks[min(step, len(chunks) - 1)]) < len(ids):
            found.append(reader.read([*ids[start:start + size], *([7] * (8 - size))]).features_TF[:size])
            start, step = start + size, step + 1
            reader.rewind(start)
    return found


def serve_form(draft: DraftModel, target: nn.Module, number: int, *, chunks: Sequence[int] = (1,), head_VD: Tensor | None = None) -> dict[int, Tensor]:
    """position -> logits [7, V] of the drafter when the anchor is there; without a head its hidden states [7, D]."""
    embedding, found, start = embedding_of(target), {}, 0
    drafter = DFlashDrafter(draft, embedding_VD=embedding, head_VD=torch.eye(64, dtype=embedding.dtype) if head_VD is None else head_VD)
    for features in committed_features(target, number, chunks=chunks, taps=draft.config.target_layer_ids):
        drafter.observe(features)
        start += len(features)
        found[start] = drafter.logits(ids_of(number)[start])
    return found


def published(draft: DraftModel, target: nn.Module, number: int, position: int, *, mistake: str = "") -> Tensor:
    """Hidden states [7, D], one document and one slot at a time, from the published description; `mistake` names what is done wrong."""
    c, w, ids = draft.config, draft.state_dict(), ids_of(number)
    with Taps(target, layer_ids=c.target_layer_ids) as taps, torch.no_grad():
        target(torch.tensor([ids]))
        features = taps.take()[0]

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + c.rms_norm_eps).sqrt() * w[f"{name}.weight"]

    def rope(x: Tensor, places: Tensor) -> Tensor:
        """x [T, H, K]: the pair (i, i + K/2) is a complex number turned by place * theta**(-2i / K)."""
        angle = places[:, None, None] * c.rope_theta ** (-torch.arange(0, c.head_dim, 2).double() / c.head_dim)
        turned = torch.complex(*x.double().chunk(2, dim=-1)) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat((turned.real, turned.imag), dim=-1).to(x.dtype)

    context = torch.arange(position + (mistake == "anchor leaked into the context"))
    slots = torch.arange(c.block_size) + position + (mistake == "position off by one")
    ctx = norm(features[context] @ w["fc.weight"].T, "hidden_norm")
    x = embedding_of(target)[[MASK if mistake == "MASK in the anchor slot" else ids[position], *[MASK] * (c.block_size - 1)]]
    for i in range(c.num_hidden_layers):
        at = f"layers.{i}.self_attn"
        h = norm(x, f"layers.{i}.input_layernorm")
        q = rope(norm((h @ w[f"{at}.q_proj.weight"].T).view(len(slots), -1, c.head_dim), f"{at}.q_norm"), slots)
        both = torch.cat((ctx, h))
        k = rope(norm((both @ w[f"{at}.k_proj.weight"].T).view(len(both), -1, c.head_dim), f"{at}.k_norm"), torch.cat((context, slots)))
        v = (both @ w[f"{at}.v_proj.weight"].T).view(len(both), -1, c.head_dim)
        mixed = []
        for n, slot in enumerate(slots.tolist()):
            seen = [s for s in context.tolist() if c.sliding_window is None or slot - s < c.sliding_window]
            seen += [len(context) + m for m in range(len(slots)) if mistake != "causal in the block" or m <= n]
            heads = []
            for head in range(c.num_attention_heads):
                g = head * c.num_key_value_heads // c.num_attention_heads
                heads.append((k[seen, g] @ q[n, head] * c.head_dim**-0.5).softmax(0) @ v[seen, g])
            mixed.append(torch.cat(heads))
        x = x + torch.stack(mixed) @ w[f"{at}.o_proj.weight"].T
        h = norm(x, f"layers.{i}.post_attention_layernorm")
        gate = h @ w[f"layers.{i}.mlp.gate_proj.weight"].T
        x = x + (gate * gate.sigmoid() * (h @ w[f"layers.{i}.mlp.up_proj.weight"].T)) @ w[f"layers.{i}.mlp.down_proj.weight"].T
    return norm(x, "norm")[1:]


def deviation(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).abs().max() / expected.abs().max())


# --- parity ---


@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
@pytest.mark.parametrize("window", [None, WINDOW])
@pytest.mark.parametrize(("rows", "length"), ROWS.values(), ids=ROWS)
def test_training_and_serving_compute_the_same_block(target: nn.Module, rows: list[tuple[int, ...]], length: int, window: int | None,
                                                     chunks: tuple[int, ...]) -> None:
    draft, head = make_draft(target, window=window), embedding_of(target)
    trained = train_form(draft, target, rows, length=length)
    assert len(trained) == sum(LENGTHS[d] - 1 for row in rows for d in row)
    for d in {d for row in rows for d in row}:
        served = serve_form(draft, target, d, chunks=chunks)
        logits = serve_form(draft, target, d, chunks=chunks, head_VD=head)
        assert (chunks != (1,) or set(served) == set(range(1, LENGTHS[d]))) and (d == 1 or served)
        for (row, number, position), hidden in trained.items():
            if number == d and position in served:
                where = f"row {row}, document {d}, anchor at {position}"
                assert_within(hidden, served[position], bound=BOUNDS[head.dtype], what=f"hidden states, {where}")
                assert_within(hidden @ head.T, logits[position], bound=BOUNDS[head.dtype], what=f"logits, {where}")


@pytest.mark.parametrize("window", [None, WINDOW])
def test_both_compute_what_is_published(target: nn.Module, window: int | None) -> None:
    draft = make_draft(target, window=window)
    trained = train_form(draft, target, [(0, 3)], length=60)
    for d in (0, 3):
        served = serve_form(draft, target, d)
        for position in (1, 2, WINDOW - 1, WINDOW, WINDOW + 1, 22):
            expected = published(draft, target, d, position)
            assert_within(trained[0, d, position], expected, bound=BOUNDS[dtype_of(target)], what=f"training, document {d}, anchor at {position}")
            assert_within(served[position], expected, bound=BOUNDS[dtype_of(target)], what=f"serving, document {d}, anchor at {position}")


@pytest.mark.parametrize("window", [None, WINDOW])
def test_blocks_do_not_see_each_other(target: nn.Module, window: int | None) -> None:
    draft = make_draft(target, window=window)
    together = train_form(draft, target, [(2, 0), (3, 1)], length=48)
    alone = train_form(draft, target, [(2, 0), (3, 1)], length=48, each_anchor_alone=True)
    assert together.keys() == alone.keys()
    for key, hidden in together.items():
        assert_within(hidden, alone[key], bound=BOUNDS[dtype_of(target)], what=f"anchor {key}")


@pytest.mark.parametrize("window", [None, WINDOW])
def test_a_block_without_context_is_finite_and_the_same(target: nn.Module, window: int | None) -> None:
    """Where a row has too few anchors, the rest are at index 0 and must not poison the gradient; serving never drafts there."""
    draft, ids, one = make_draft(target, window=window), ids_of(3), torch.tensor([[0, 0]])
    row = torch.arange(31)[None]
    features = torch.full((1, 31, 128), 1e3, dtype=dtype_of(target))
    trained = draft(features, blocks=Blocks(anchors_BA=one, ids_BA=one + ids[0], positions_BS=row), embedding_VD=embedding_of(target))
    drafter = DFlashDrafter(draft, embedding_VD=embedding_of(target), head_VD=torch.eye(64, dtype=dtype_of(target)))
    for form in (trained[0, 0, 1:], trained[0, 1, 1:], drafter.logits(ids[0])):
        assert_within(form, published(draft, target, 3, 0), bound=BOUNDS[dtype_of(target)], what="no context")


def test_what_a_slot_is_trained_to_say_is_what_serving_compares_it_with(target: nn.Module) -> None:
    """The proposals at an anchor are the likeliest tokens of slots 1..; the labels of those slots are the tokens that follow."""
    draft, head = make_draft(target, window=WINDOW), embedding_of(target)
    row = pack_row([document(2), document(0)], length=48, pad_id=PAD)[None]
    trained = train_form(draft, target, [(2, 0)], length=48)
    for d, start in ((2, 0), (0, 17)):
        ids = ids_of(d)
        with Taps(target, layer_ids=TAPS) as taps:
            drafter, reader = DFlashDrafter(draft, embedding_VD=head, head_VD=head), HFTarget(target, taps=taps, max_length=64)
            drafter.observe(reader.read(ids[:8]).features_TF)
        assert drafter.propose(ids[8], count=7, sampling=Sampling()) == (trained[0, d, 8] @ head.T).argmax(-1).tolist()
        targets = slot_targets(row[:, IDS], documents_BS=row[:, DOCUMENTS], supervised_BS=row[:, SUPERVISED].bool(),
                               anchor_index_BA=torch.tensor([[start + 8]]), anchor_valid_BA=torch.tensor([[True]]), block_size=8)
        assert targets.labels[0, 0].tolist() == ids[8:16]   # slot n is compared with the token at anchor + n
        assert targets.counts[0, 0].tolist() == [False] + [True] * 7


# --- mistakes ---

HUNDRED = 100


@pytest.mark.parametrize("mistake", ["MASK in the anchor slot", "position off by one", "anchor leaked into the context", "causal in the block"])
@pytest.mark.parametrize("window", [None, WINDOW])
def test_a_mistake_in_the_block_breaks_the_bound(target: nn.Module, window: int | None, mistake: str) -> None:
    draft, bound = make_draft(target, window=window), BOUNDS[dtype_of(target)]
    trained = train_form(draft, target, [(2, 3)], length=50)
    served = serve_form(draft, target, 3)
    for position in (1, 6, WINDOW, 20, 30):
        wrong = published(draft, target, 3, position, mistake=mistake)
        for form in (trained[0, 3, position], served[position]):
            assert deviation(form, wrong) > HUNDRED * bound.maximum, f"{mistake} would pass with the anchor at {position}"


@pytest.mark.parametrize("taps", [(3, 1), (1, 3), (0, 2)], ids=["one layer later", "later and swapped", "swapped"])
def test_other_taps_break_the_bound(target: nn.Module, taps: tuple[int, ...]) -> None:
    draft, bound = make_draft(target, window=None), BOUNDS[dtype_of(target)]
    wrong = train_form(draft, target, [(3,)], length=31, taps=taps)
    served = serve_form(draft, target, 3)
    assert all(deviation(wrong[0, 3, p], served[p]) > HUNDRED * bound.maximum for p in range(1, 31))


@pytest.mark.parametrize("off", [-1, 1])
def test_a_window_off_by_one_breaks_the_bound(target: nn.Module, off: int) -> None:
    """Where the context is longer than the narrower of the two windows; before that they are the same."""
    draft, bound = make_draft(target, window=WINDOW), BOUNDS[dtype_of(target)]
    wrong = train_form(make_draft(target, window=WINDOW + off), target, [(3,)], length=31)
    served = serve_form(draft, target, 3)
    wrong_served = serve_form(make_draft(target, window=WINDOW + off), target, 3)
    right = train_form(draft, target, [(3,)], length=31)
    assert all(deviation(wrong[0, 3, p], served[p]) > HUNDRED * bound.maximum for p in range(WINDOW, 31))
    assert all(deviation(wrong_served[p], right[0, 3, p]) > HUNDRED * bound.maximum for p in range(WINDOW, 31))


@pytest.mark.parametrize("window", [None, WINDOW])
def test_a_packed_row_without_document_borders_breaks_the_bound(target: nn.Module, window: int | None) -> None:
    draft, bound = make_draft(target, window=window), BOUNDS[dtype_of(target)]
    wrong = train_form(draft, target, [(0, 3, 2)], length=80, one_document=True)
    for d in (3, 2):   # behind another document; with a window the border is in sight of the first anchors only
        served = serve_form(draft, target, d)
        assert all(deviation(wrong[0, d, p], served[p]) > HUNDRED * bound.maximum for p in range(1, 17 if window is None else WINDOW - 3))


# --- taps ---


def test_a_tap_is_the_layers_output_before_the_final_norm(target: nn.Module) -> None:
    """hidden_states[i + 1] of transformers, except the last, which transformers gives after the final norm."""
    ids = torch.tensor([ids_of(3)])
    with Taps(target, layer_ids=(3, 0, 1, 2)) as taps, torch.no_grad():
        states = target(ids, output_hidden_states=True).hidden_states
        last, *others = taps.take().split(64, dim=-1)
        for i, tapped in enumerate(others):
            assert_equal(tapped, states[i + 1], what=f"tap {i}", bits=True)
        assert_equal(target.model.norm(last), states[4], what="the last layer, normed", bits=True)   # type: ignore[operator, union-attr]
        assert deviation(states[4], last) > 0.1
        with pytest.raises(RuntimeError, match=r"^taps: layers \[3, 0, 1, 2\] have not run since the last take"):
            taps.take()


def test_taps_of_the_last_layer_are_the_same_in_both_forms(target: nn.Module) -> None:
    draft = make_draft(target, window=None, taps=(3, 0))
    trained = train_form(draft, target, [(0, 3)], length=54, taps=(3, 0))
    served = serve_form(draft, target, 3)
    for position, hidden in served.items():
        assert_within(trained[0, 3, position], hidden, bound=BOUNDS[dtype_of(target)], what=f"anchor at {position}")


def test_hooks_are_gone_after_the_taps(target: nn.Module) -> None:
    with Taps(target, layer_ids=(1,)) as taps:
        pass
    with torch.no_grad():
        target(torch.tensor([[5, 6]]))
    with pytest.raises(RuntimeError, match=r"layers \[1\] have not run"):
        taps.take()


def test_taps_refuse_layers_that_are_not_there(target: nn.Module) -> None:
    with pytest.raises(ValueError, match=r"^taps: the target has layers 0\.\.3; got \[1, 4\]\."):
        Taps(target, layer_ids=(1, 4))
    with pytest.raises(ValueError, match=r"^taps: the target has layers 0\.\.3; got \[-1\]\."):
        Taps(target, layer_ids=(-1,))
    with pytest.raises(ValueError, match=r"^taps: decoder layers must be at model\.layers; Linear has none there\."):
        Taps(nn.Linear(2, 2), layer_ids=(0,))


def test_the_published_tensors_and_no_other(target: nn.Module) -> None:
    draft = make_draft(target, window=None)
    assert len(draft.state_dict()) == 11 * 2 + 3
    config = dataclasses.replace(draft.config, num_hidden_layers=5)
    assert len(DraftModel(config).state_dict()) == 58
