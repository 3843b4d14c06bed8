"""Which columns make the next step: decoding first, prompts fill, nobody starves."""

import random

import pytest

from kilotok.runtime.schedule import Want, choose_columns


def one(columns: int = 1) -> Want:
    return Want(columns=columns, divisible=False)


def prompt(columns: int = 8) -> Want:
    return Want(columns=columns, divisible=True)


@pytest.mark.parametrize(("wants", "num_columns", "expected"), [
    ([one()], 8, [(0, 1)]),
    ([one()] * 9, 8, [(n, 1) for n in range(8)]),
    ([one(8), one(8)], 8, [(0, 8)]),
    ([one(8), one(8), one(8)], 16, [(0, 8), (1, 8)]),
    ([one(), prompt(), one(3)], 8, [(0, 1), (1, 4), (2, 3)]),          # decoding first, the prompt fills
    ([one(2), prompt(), prompt(5)], 16, [(0, 2), (1, 8), (2, 5)]),
    ([one(), prompt(), prompt(), one(5)], 8, [(0, 1), (1, 2), (3, 5)]),   # nothing is left for the second prompt
    ([prompt(6), one(), one(3)], 8, [(0, 6), (1, 1)]),                 # a prompt that has waited longest of all
    ([one(5), one(5), one(3)], 8, [(0, 5), (2, 3)]),                   # what does not fit as a whole waits; narrower ones go
    ([one(8), prompt(8)], 8, [(0, 8)]),
    ([], 8, []),
])
def test_by_hand(wants: list[Want], num_columns: int, expected: list[tuple[int, int]]) -> None:
    assert choose_columns(wants, num_columns=num_columns) == expected


def test_a_wish_that_no_step_holds_is_refused() -> None:
    for columns in (0, 9):
        with pytest.raises(ValueError, match=rf"^schedule: a sequence has 1 to 8 columns in a step; got {columns}\.$"):
            choose_columns([one(), one(columns)], num_columns=64)


def test_steps_are_never_overfull_and_hold_decoding_whole() -> None:
    draw = random.Random(0)
    for _ in range(2000):
        wants = [Want(columns=draw.randint(1, 8), divisible=draw.random() < 0.4) for _ in range(draw.randint(0, 20))]
        width = draw.choice((8, 16, 32, 64))
        chosen = choose_columns(wants, num_columns=width)
        assert [place for place, _ in chosen] == sorted({place for place, _ in chosen})
        assert sum(columns for _, columns in chosen) <= width
        assert all(columns == wants[place].columns or (wants[place].divisible and 1 <= columns < wants[place].columns) for place, columns in chosen)
        left = width - sum(columns for _, columns in chosen)
        taken = {place for place, _ in chosen}
        assert all(want.columns > left for place, want in enumerate(wants) if place not in taken), "a column stayed empty that somebody wanted"


@pytest.mark.parametrize("num_columns", [8, 16])
def test_with_served_ones_behind_the_others_nobody_waits_for_more_steps_than_there_are_requests(num_columns: int) -> None:
    draw = random.Random(1)

    def drawn(name: int) -> Want:
        return Want(columns=draw.randint(1, 8), divisible=name < 3)

    wants = {name: drawn(name) for name in range(12)}
    order, waited, longest = list(wants), dict.fromkeys(wants, 0), dict.fromkeys(wants, 0)
    for _ in range(500):
        served = [order[place] for place, _ in choose_columns([wants[name] for name in order], num_columns=num_columns)]
        for name in order:
            waited[name] = 0 if name in served else waited[name] + 1
            longest[name] = max(longest[name], waited[name])
        order = [name for name in order if name not in served] + served
        for name in served:
            wants[name] = drawn(name)
    assert 2 < max(longest.values()) < len(wants) and max(longest[name] for name in range(3)) > 2
