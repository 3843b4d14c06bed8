"""Words with tags: what they carry, what a reader waits for, what the host counts; and steps whose words come late or never."""

import math
import threading
import time
from contextlib import nullcontext
from typing import Any

import pytest
import tagged_on_cpu
import torch
from gluon_on_cpu import Pointer, bitcasts
from step_on_cpu import Kernel
from steps_on_cpu import MODELS, OnCpu, assert_like_the_twin, inputs_of
from thread_waits import waits
from torch import Tensor

from kilotok.kernels.persistent.step import StepKernel
from kilotok.kernels.persistent.tagged import LAUNCH_TAG, TagCounter

VALUES = torch.tensor([0.0, -0.0, 1.5, -math.inf, math.inf, math.nan, 1e-45, -3.0])


class Words:
    """Eight words at each of two places, of a lane four together, and a fault word."""

    def __init__(self) -> None:
        self.words, self.fault = torch.zeros(2, 8, 2), torch.zeros(1, dtype=torch.int32)
        self.tagged = vars(Kernel(1).modules["persistent.tagged"])
        Pointer.to = lambda self, *_a, **_o: self  # type: ignore[attr-defined]

    def store(self, place: int, values: Tensor, tag: int, live: Tensor | None = None) -> None:
        at = Pointer(self.words, (place * 8 + torch.arange(8)) * 2)
        self.tagged["store_tagged"](at, values, tag, torch.ones(8, dtype=torch.bool) if live is None else live)

    def load(self, tag: int, live: Tensor | None = None) -> tuple[Tensor, ...]:
        at = Pointer(self.words, torch.arange(8) // 4 * 4 * 2)
        return self.tagged["load_tagged"](at, torch.ones(8, dtype=torch.bool) if live is None else live, tag, Pointer(self.fault), 1000, 4, 2, 8)


@pytest.fixture
def words() -> Words:
    waits.begin(1)
    return Words()


def test_every_value_passes_unchanged(words: Words) -> None:
    with bitcasts():
        words.store(0, VALUES, 7)
        words.store(1, VALUES.flip(0), 7)
        first, second = words.load(7)
        assert torch.equal(first.view(torch.int32), VALUES.view(torch.int32)) and torch.equal(second.view(torch.int32), VALUES.flip(0).view(torch.int32))


def test_a_reader_waits_for_the_last_word(words: Words) -> None:
    """Words of the layer before are not taken for this one's."""
    late = torch.arange(8) == 6
    with bitcasts():
        for place in range(2):
            words.store(place, VALUES, 7)
            words.store(place, VALUES + 1, 8, ~late if place else None)
        found: list[tuple[Tensor, ...]] = []
        waits.begin(2)
        reader = threading.Thread(target=lambda: found.append(words.load(8)), daemon=True)
        reader.start()
        reader.join(0.2)
        assert reader.is_alive() and not found
        words.store(1, VALUES + 1, 8, late)
        reader.join()
        assert torch.equal(found[0][1].nan_to_num(9.0), (VALUES + 1).nan_to_num(9.0)) and not int(words.fault)


def test_nobody_waits_for_words_that_are_not_live(words: Words) -> None:
    live = torch.arange(8) >= 4
    with bitcasts():
        for place in range(2):
            words.store(place, VALUES, 7, live)
        first, _ = words.load(7, live)
        assert first[:4].tolist() == [0.0] * 4 and torch.equal(first[4:].view(torch.int32), VALUES[4:].view(torch.int32)) and not int(words.fault)


def test_a_word_that_nobody_writes_is_a_fault(words: Words) -> None:
    """And behind it nobody waits any more."""
    with bitcasts():
        words.store(0, VALUES, 7)
        words.load(7)
        assert int(words.fault) == 1
        words.load(8)


def test_no_two_launches_have_a_tag_in_common() -> None:
    tags = TagCounter.of((3,), (2, 2), dtype=torch.float32, device=torch.device("cpu"))
    assert [tags.take(5), tags.take(1), tags.take(4)] == [1, 6, 7]


def test_when_all_tags_are_used_up_no_word_has_one() -> None:
    tags = TagCounter.of((3,), (2, 2), dtype=torch.float32, device=torch.device("cpu"))
    tags.next = LAUNCH_TAG - 5
    tags.words[1].fill_(1.0)
    assert tags.take(5) == LAUNCH_TAG - 5 and bool((tags.words[1] == 1).all()), "all below LAUNCH_TAG can be used"
    assert tags.take(5) == 1 and not any(bool(words.any()) for words in tags.words)


@pytest.mark.parametrize("stale", [False, True])
def test_a_word_of_the_layer_before_is_not_taken(stale: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Words come late; a reader that took those of the layer before (which is planted) would have other results than the twin."""
    run, store = OnCpu(MODELS["rolled"]), tagged_on_cpu.store

    def late(*operands: Any) -> Tensor:
        time.sleep(0.05)
        return store(*operands)

    monkeypatch.setattr(tagged_on_cpu, "store", late)
    if stale:
        monkeypatch.setattr(tagged_on_cpu, "expected", lambda found, tags: bool(((found == tags) | (found == tags - 1)).all()))
    inputs = inputs_of({0: (5, 1, 0), 5: (9, 0, 0)})
    run.memory.words_8C.copy_(inputs.words_8C)
    run.launch(num_steps=2)
    run.twin.run_steps(inputs, 2)
    assert not int(run.state.fault)
    with pytest.raises(AssertionError, match="relative error") if stale else nullcontext():
        assert_like_the_twin(run, inputs.slots_C >= 0)


@pytest.mark.parametrize("off", [None, 1, -1])
@pytest.mark.parametrize(("lost", "partitions"), [("partials", 1), ("partials", 2), ("statistics", 2), ("mixed values", 2)])
def test_words_that_nobody_writes_are_a_fault(lost: str, partitions: int, off: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor those whose tag is off by one. All programs run to the end of the step, and the host raises; the next launch is right, whatever the faulted one
    left."""
    run, store = OnCpu(MODELS["rolled"], partitions=partitions), tagged_on_cpu.store
    words = {"partials": run.state.partial_words_RD2, "statistics": run.state.attention.stats_words, "mixed values": run.state.attention.mixed_words}[lost]
    inputs = inputs_of({0: (5, 1, 0), 5: (9, 0, 0)})
    run.memory.words_8C.copy_(inputs.words_8C)
    with monkeypatch.context() as patch:
        patch.setattr(tagged_on_cpu, "store", lambda at, bits, tag, live: store(at, bits, tag, live & (at.memory.data_ptr() != words.data_ptr())) if off is None
                      else store(at, bits, tag + off * (at.memory.data_ptr() == words.data_ptr()), live))
        run.launch(num_steps=5)
    assert int(run.memory.ring_count) == 1
    with pytest.raises(RuntimeError, match="for their words, in vain and gave up"):
        StepKernel.check_fault(run)  # type: ignore[arg-type]
    run.launch()
    run.twin.step(inputs)
    assert_like_the_twin(run, inputs.slots_C >= 0)
