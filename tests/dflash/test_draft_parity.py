"""One block, three ways: the training form on packed rows, the drafter at work, and the published computation written out.

A draft that is trained on one thing and served with another drafts badly and nothing else shows it. So the two forms are
held to each other at every position of every document, and each known mistake has to break the bound a hundredfold.
The options of a draft: test_draft_options.py.
"""

import dataclasses
import functools

import pytest
import torch
from draft_forms import (
    BOUNDS,
    CHUNKS,
    LENGTHS,
    MISTAKES,
    PAD,
    ROWS,
    TAPS,
    WINDOW,
    deviation,
    document,
    dtype_of,
    embedding_of,
    ids_of,
    make_draft,
    make_target,
    published,
    serve_form,
    train_form,
)
from tolerances import assert_equal, assert_within
from torch import Tensor, nn

from kilotok.dflash.context import Taps
from kilotok.dflash.drafter import DFlashDrafter
from kilotok.dflash.hf_target import HFTarget
from kilotok.dflash.loss import slot_targets
from kilotok.dflash.model import Blocks, DraftModel
from kilotok.dflash.sampling import Sampling
from kilotok.train.distill_data import DOCUMENTS, IDS, SUPERVISED, pack_row

pytestmark = pytest.mark.xdist_group("draft_parity")   # the forms below are computed once


@pytest.fixture(scope="module", params=[torch.float64, torch.float32], ids=["fp64", "fp32"])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> nn.Module:
    return make_target(tmp_path_factory.mktemp("target") / "tiny", dtype=request.param)


# Both forms of a test's draft, computed once for all rows, chunks and mistakes that they are held to.


@functools.cache
def draft_of(target: nn.Module, window: int | None) -> DraftModel:
    return make_draft(target, window=window)


@functools.cache
def trained_by(target: nn.Module, window: int | None, rows: tuple[tuple[int, ...], ...], length: int) -> dict[tuple[int, int, int], Tensor]:
    return train_form(draft_of(target, window), target, rows, length=length)


@functools.cache
def served_by(target: nn.Module, window: int | None, number: int, chunks: tuple[int, ...] = (1,), *, with_head: bool = False) -> dict[int, Tensor]:
    return serve_form(draft_of(target, window), target, number, chunks=chunks, head_VD=embedding_of(target) if with_head else None)


# --- parity ---


@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
@pytest.mark.parametrize("window", [None, WINDOW])
@pytest.mark.parametrize(("rows", "length"), ROWS.values(), ids=ROWS)
def test_training_and_serving_compute_the_same_block(target: nn.Module, rows: list[tuple[int, ...]], length: int, window: int | None,
                                                     chunks: tuple[int, ...]) -> None:
    head = embedding_of(target)
    trained = trained_by(target, window, tuple(rows), length)
    assert len(trained) == sum(LENGTHS[d] - 1 for row in rows for d in row)
    for d in {d for row in rows for d in row}:
        served = served_by(target, window, d, chunks)
        logits = served_by(target, window, d, chunks, with_head=True)
        assert (chunks != (1,) or set(served) == set(range(1, LENGTHS[d]))) and (d == 1 or served)
        for (row, number, position), hidden in trained.items():
            if number == d and position in served:
                where = f"row {row}, document {d}, anchor at {position}"
                assert_within(hidden, served[position], bound=BOUNDS[head.dtype], what=f"hidden states, {where}")
                assert_within(hidden @ head.T, logits[position], bound=BOUNDS[head.dtype], what=f"logits, {where}")


@pytest.mark.parametrize("window", [None, WINDOW])
def test_both_compute_what_is_published(target: nn.Module, window: int | None) -> None:
    draft, trained = draft_of(target, window), trained_by(target, window, ((0, 3),), 60)
    for d in (0, 3):
        served = served_by(target, window, d)
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


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("window", [None, WINDOW])
def test_a_mistake_in_the_block_breaks_the_bound(target: nn.Module, window: int | None, mistake: str) -> None:
    draft, bound = draft_of(target, window), BOUNDS[dtype_of(target)]
    trained, served = trained_by(target, window, ((2, 3),), 50), served_by(target, window, 3)
    for position in (1, 6, WINDOW, 20, 29):
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


def test_labels_shifted_by_one_break_the_bound(target: nn.Module) -> None:
    """A slot's loss in the training form on its label is that of the drafter's logits on the token that follows; of the one before it is another."""
    slot_losses = functools.partial(nn.functional.cross_entropy, reduction="none")
    draft, head = make_draft(target, window=WINDOW), embedding_of(target)
    bound, ids = BOUNDS[head.dtype], ids_of(3)
    row = pack_row([document(3)], length=31, pad_id=PAD)[None]
    trained, served = train_form(draft, target, [(3,)], length=31), serve_form(draft, target, 3, head_VD=head)
    for p in (5, 9, 23):
        targets = slot_targets(row[:, IDS], documents_BS=row[:, DOCUMENTS], supervised_BS=row[:, SUPERVISED].bool(), anchor_index_BA=torch.tensor([[p]]),
                               anchor_valid_BA=torch.tensor([[True]]), block_size=8)
        losses = slot_losses(trained[0, 3, p] @ head.T, targets.labels[0, 0, 1:])
        assert_within(losses, slot_losses(served[p], torch.tensor(ids[p + 1:p + 8])), bound=bound, what=f"losses, anchor at {p}")
        assert deviation(slot_losses(served[p], torch.tensor(ids[p:p + 7])), losses) > HUNDRED * bound.maximum


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
