"""The page allocator: no page is in two places, none is lost, and errors change nothing."""

import contextlib
import random

import pytest

from kilotok.kernels.persistent.plan import CHUNK
from kilotok.runtime.kv_pages import PAGE, UNUSED, OutOfPages, PagePool, pages_for


def pool(num_pages: int = 8, num_slots: int = 3, max_length: int = 5 * PAGE) -> PagePool:
    return PagePool(num_pages=num_pages, num_slots=num_slots, max_length=max_length)


def test_a_page_is_the_chunk_that_attention_reads() -> None:
    assert PAGE == CHUNK
    assert [pages_for(n) for n in (0, 1, 128, 129, 256)] == [0, 1, 1, 2, 2]


def test_pages_come_as_positions_need_them() -> None:
    p = pool()
    slot = p.open()
    assert p.append(slot, 1) == {0: 0}
    assert p.append(slot, PAGE - 1) == {}
    assert p.append(slot, PAGE + 1) == {1: 1, 2: 2}
    assert (p.length(slot), p.pages(slot), p.num_free) == (2 * PAGE + 1, (0, 1, 2), 5)
    assert p.table() == [[0, 1, 2, UNUSED, UNUSED], [UNUSED] * 5, [UNUSED] * 5]


def test_a_rejected_draft_gives_back_whole_pages_only() -> None:
    p = pool()
    slot = p.open()
    p.append(slot, PAGE - 2)
    p.append(slot, 8)
    p.rewind(slot, PAGE)
    assert (p.pages(slot), p.num_free) == ((0,), 7)
    p.rewind(slot, PAGE - 1)
    assert p.pages(slot) == (0,)
    assert p.append(slot, 2) == {1: 1}


def test_errors_change_nothing() -> None:
    p = pool(num_pages=4)
    a, b = p.open(), p.open()
    p.append(a, 3 * PAGE)
    before = p.table(), p.num_free, p.length(b)
    for call, error, words in (
        (lambda: p.append(b, PAGE + 1), OutOfPages, "need 2 pages of 128, and 1 of 4 are free"),
        (lambda: p.append(a, 3 * PAGE), ValueError, "more than the context of 640"),
        (lambda: p.append(a, -1), ValueError, "not negative; got -1"),
        (lambda: p.rewind(b, 1), ValueError, r"rewind must be to 0\.\.0"),
        (lambda: p.append(2, 1), ValueError, r"slot 2 is not open; open are \[0, 1\]"),
        (lambda: p.close(7), ValueError, "slot 7 is not open"),
    ):
        with pytest.raises(error, match=words):
            call()
        assert (p.table(), p.num_free, p.length(b)) == before


def test_all_slots_taken() -> None:
    p = pool(num_slots=2)
    p.open()
    p.open()
    with pytest.raises(OutOfPages, match="all 2 sequence slots are taken"):
        p.open()
    p.close(0)
    assert p.open() == 0 and p.slots == (1, 0)


def test_a_pool_has_something_in_it() -> None:
    with pytest.raises(ValueError, match="needs a page, a slot and a position"):
        pool(num_pages=0)


@pytest.mark.parametrize("seed", range(5))
def test_any_history_keeps_every_page_once_and_leaves_all_free_pages_usable(seed: int) -> None:
    rng = random.Random(seed)
    p = pool(num_pages=40, num_slots=6, max_length=40 * PAGE)
    for _ in range(400):
        what = rng.random()
        if what < 0.2 and len(p.slots) < 6:
            p.open()
        elif p.slots and what < 0.7:
            slot = rng.choice(p.slots)
            row = dict(enumerate(p.pages(slot)))
            with contextlib.suppress(OutOfPages):
                row |= p.append(slot, rng.randrange(3 * PAGE))
            assert tuple(row.values()) == p.pages(slot)
        elif p.slots and what < 0.9:
            slot = rng.choice(p.slots)
            p.rewind(slot, rng.randrange(p.length(slot) + 1))
        elif p.slots:
            p.close(rng.choice(p.slots))
        held = [page for slot in p.slots for page in p.pages(slot)]
        assert len(set(held)) == len(held) and len(held) + p.num_free == 40
        assert all(len(p.pages(slot)) == pages_for(p.length(slot)) for slot in p.slots)
    if len(p.slots) == 6:
        p.close(p.slots[0])
    free = p.num_free
    last = p.open()
    p.append(last, free * PAGE)   # however scattered
    assert p.num_free == 0
