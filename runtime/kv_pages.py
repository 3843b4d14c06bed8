"""Which page of the key/value cache holds which 128 positions of which sequence.

A page is 128 positions of all layers and heads, the chunk that attention reads, so any free page serves any sequence and nothing fragments: at most
127 positions of a sequence's last page are unused. A sequence has a slot, a row of the page table that kernels read; the table's row lists its pages
in order of position.

Pages are taken before the positions are computed and given back when a rejected draft or the end of a sequence frees them. What a page
held before does not matter: no position is read before it is written.
"""

from collections.abc import Sequence

PAGE = 128
UNUSED = -1


class OutOfPages(RuntimeError):
    """No page or slot is free: wait for a sequence to end, or end one."""


def pages_for(length: int) -> int:
    """Pages of `length` positions."""
    return -(-length // PAGE)


class PagePool:
    """All pages of a cache, the free ones and those of open sequences.

    Units: `num_pages` pages of 128 positions, at most `num_slots` sequences, of at most `max_length` positions each.
    """

    def __init__(self, *, num_pages: int, num_slots: int, max_length: int) -> None:
        if min(num_pages, num_slots, max_length) < 1:
            raise ValueError(f"PagePool: needs a page, a slot and a position at least; got {num_pages}, {num_slots} and {max_length}.")
        self.num_pages, self.num_slots, self.max_length = num_pages, num_slots, max_length
        self._free_pages = list(range(num_pages - 1, -1, -1))     # taken from the end: the lowest first, then the last given back
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._pages: dict[int, list[int]] = {}
        self._lengths: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free_pages)

    @property
    def slots(self) -> Sequence[int]:
        """Of the open sequences, in the order they came."""
        return tuple(self._pages)

    def open(self) -> int:
        """A slot for a sequence without positions. Errors: OutOfPages if all slots are taken."""
        if not self._free_slots:
            raise OutOfPages(f"kv pages: all {self.num_slots} sequence slots are taken. Wait for a sequence to end.")
        slot = self._free_slots.pop()
        self._pages[slot], self._lengths[slot] = [], 0
        return slot

    def length(self, slot: int) -> int:
        """Positions that have a page. Errors: ValueError if the slot is not open."""
        self._check(slot)
        return self._lengths[slot]

    def pages(self, slot: int) -> Sequence[int]:
        """The pages of a sequence, by chunk. Errors: ValueError if the slot is not open."""
        self._check(slot)
        return tuple(self._pages[slot])

    def append(self, slot: int, count: int) -> dict[int, int]:
        """Room for `count` positions more; returns the new entries of the slot's row of the table, page by chunk. All or nothing.

        Errors: ValueError beyond the context or for a slot that is not open; OutOfPages if too few pages are free.
        """
        self._check(slot)
        length = self._lengths[slot] + count
        if count < 0:
            raise ValueError(f"kv pages: a number of positions to append is not negative; got {count}. `rewind` gives positions back.")
        if length > self.max_length:
            raise ValueError(f"kv pages: {count} positions behind {self._lengths[slot]} are more than the context of {self.max_length}. "
                             "End the sequence or shorten its prompt.")
        pages = self._pages[slot]
        wanted = pages_for(length) - len(pages)
        if wanted > len(self._free_pages):
            raise OutOfPages(f"kv pages: {count} positions more need {wanted} pages of {PAGE}, and {len(self._free_pages)} of {self.num_pages} are free. "
                             "Wait for a sequence to end, end one, or give the cache more memory.")
        first = len(pages)
        pages.extend(self._free_pages.pop() for _ in range(wanted))
        self._lengths[slot] = length
        return dict(enumerate(pages[first:], first))

    def rewind(self, slot: int, length: int) -> None:
        """Keep the first `length` positions and give back the pages behind them. Errors: ValueError for a length that is not there."""
        self._check(slot)
        if not 0 <= length <= self._lengths[slot]:
            raise ValueError(f"kv pages: rewind must be to 0..{self._lengths[slot]}, the positions there are; got {length}.")
        pages = self._pages[slot]
        while len(pages) > pages_for(length):
            self._free_pages.append(pages.pop())
        self._lengths[slot] = length

    def close(self, slot: int) -> None:
        """Give back a sequence's pages and its slot. Errors: ValueError if the slot is not open."""
        self.rewind(slot, 0)
        del self._pages[slot], self._lengths[slot]
        self._free_slots.append(slot)

    def table(self) -> list[list[int]]:
        """The page table, a row a slot; -1 where there is no page."""
        width = pages_for(self.max_length)
        return [(pages := self._pages.get(slot, [])) + [UNUSED] * (width - len(pages)) for slot in range(self.num_slots)]

    def _check(self, slot: int) -> None:
        if slot not in self._pages:
            raise ValueError(f"kv pages: slot {slot} is not open; open are {list(self._pages)}.")
