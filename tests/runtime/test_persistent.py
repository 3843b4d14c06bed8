"""The persistent executor on the twin of its step: reads, rewinds, trees, pages; bit for bit what reading token by token gives."""

import logging
from collections.abc import Sequence

import pytest
import torch
from step_models import TINY, Counted, twin_executor
from tolerances import assert_equal
from torch import Tensor

from kilotok.dflash.generate import TreeTarget, generate
from kilotok.dflash.sampling import Sampling, choose_tokens
from kilotok.dflash.tree import ANCHOR, DraftTree, build_tree
from kilotok.kernels.persistent.plan import CHUNK
from kilotok.runtime.batching import BatchExecutor
from kilotok.runtime.kv_pages import OutOfPages
from kilotok.runtime.persistent import Chunk, PersistentExecutor, PersistentSequence, ResidentRunner

IDS = torch.randint(TINY.vocab_size, (CHUNK + 30,), generator=torch.Generator().manual_seed(0)).tolist()
PROMPT = IDS[:CHUNK - 6]         # trees cross into the second page
FORKED = DraftTree(token_ids=(70, 81, 92, 92, 15, 70, 8, 9), parents=(ANCHOR, ANCHOR, 0, 1, 3, 4, 5, 5))
DEEP = build_tree(torch.randn(12, TINY.vocab_size, generator=torch.Generator().manual_seed(1)), budget=20, branches=3)


@pytest.fixture(scope="module")
def executor() -> PersistentExecutor:
    return twin_executor(num_slots=6)[0]


@pytest.fixture(scope="module")
def one_by_one(executor: PersistentExecutor) -> tuple[Tensor, Tensor]:
    """Logits and features of IDS read a token a step."""
    sequence = executor.open()
    steps = [sequence.read([token]) for token in IDS]
    sequence.close()
    return torch.cat([s.logits_TV for s in steps]), torch.cat([s.features_TF for s in steps])


def rows(sequence: PersistentSequence) -> Tensor:
    """Keys and values of all its tokens."""
    return torch.stack([sequence.executor.rows_at(sequence.slot, p) for p in range(sequence.length)])


def test_it_is_what_engine_and_loop_ask_for(executor: PersistentExecutor) -> None:
    sequence = executor.open()
    assert isinstance(executor, BatchExecutor) and isinstance(sequence, TreeTarget)
    sequence.close()


@pytest.mark.parametrize("cuts", [(), (3, 11, 12, 100), (CHUNK - 1, CHUNK + 1)], ids=str)
def test_a_text_in_any_pieces_has_the_bits_of_a_token_at_a_time(cuts: Sequence[int], executor: PersistentExecutor, one_by_one: tuple[Tensor, Tensor]) -> None:
    sequence, found = executor.open(), []
    for start, stop in zip((0, *cuts), (*cuts, len(IDS)), strict=True):
        found.append(sequence.read(IDS[start:stop]))
        assert sequence.length == stop
    assert_equal(torch.cat([s.logits_TV for s in found]), one_by_one[0], bits=True, what="logits")
    assert_equal(torch.cat([s.features_TF for s in found]), one_by_one[1], bits=True, what="features")
    sequence.rewind(0)
    last = sequence.read(IDS[:21], last_logits_only=True)
    assert_equal(last.logits_TV, one_by_one[0][20:21], bits=True, what="last logits")
    assert_equal(last.features_TF, one_by_one[1][:21], bits=True, what="features of a prompt")
    sequence.close()


def test_rejected_positions_leave_no_trace(executor: PersistentExecutor, one_by_one: tuple[Tensor, Tensor]) -> None:
    sequence = executor.open()
    sequence.read(IDS[:CHUNK - 3])
    sequence.read([7, 8, 9, 10, 11, 12, 13])      # over the page's end
    sequence.rewind(CHUNK - 3)
    step = sequence.read(IDS[CHUNK - 3:])
    assert_equal(step.logits_TV, one_by_one[0][CHUNK - 3:], bits=True)
    with pytest.raises(ValueError, match=rf"^rewind: must be to 0\.\.{len(IDS)}, the tokens read; got {len(IDS) + 1}\.$"):
        sequence.rewind(len(IDS) + 1)
    sequence.close()


@pytest.mark.parametrize("tree", [FORKED, DEEP], ids=["forked", "deep"])
def test_every_node_of_a_tree_is_the_step_of_plain_decoding(tree: DraftTree, executor: PersistentExecutor) -> None:
    assert len(tree) >= 8 and max(tree.depths) >= 3
    sequence, plain = executor.open(), executor.open()
    for target in (sequence, plain):
        target.read(PROMPT, last_logits_only=True)
    for node in range(ANCHOR, len(tree), 3):
        path = tree.path(node)
        for token in (33, *(tree.token_ids[n] for n in path)):
            expected = plain.read([token])
        step = sequence.read_tree(33, tree)
        assert len(step.logits_TV) == len(step.features_TF) == 1 + len(tree) and sequence.length == len(PROMPT)
        assert_equal(step.logits_TV[node + 1], expected.logits_TV[0], bits=True)
        assert_equal(step.features_TF[node + 1], expected.features_TF[0], bits=True)
        sequence.keep(path)
        assert sequence.length == plain.length
        assert_equal(rows(sequence), rows(plain), bits=True, what="keys and values")
        assert_equal(sequence.read([5, 6]).logits_TV, plain.read([5, 6]).logits_TV, bits=True, what="after it")
        for target in (sequence, plain):
            target.rewind(len(PROMPT))
    for target in (sequence, plain):
        target.close()


def test_sequences_of_a_step_do_not_see_each_other_in_any_width(executor: PersistentExecutor) -> None:
    """1, 2, 3 and 6 sequences of 8 columns each, in steps of 8 to 64 columns, behind texts of their own."""
    texts = [IDS[n:n + 12] for n in range(6)]
    alone = []
    for text in texts:
        sequence = executor.open()
        alone.append(sequence.read(text).logits_TV[4:])
        sequence.close()
    for count in (1, 2, 3, 6):
        sequences = [executor.open() for _ in range(count)]
        for sequence, text in zip(sequences, texts, strict=False):
            sequence.read(text[:4])
            sequence.reserve(12)
        steps = executor.step([Chunk(sequence=s, ids=tuple(t[4:]), position=4, sampling=Sampling(), last_only=False)
                               for s, t in zip(sequences, texts, strict=False)])
        for n, step in enumerate(steps):
            assert_equal(step.logits_TV, alone[n], bits=True, what=f"sequence {n} of {count}")
        for sequence in sequences:
            sequence.close()
    assert set(executor._runners) == {8, 16, 32, 64}


def test_a_step_picks_what_the_host_picks_from_its_logits(executor: PersistentExecutor) -> None:
    for sampling in (Sampling(), Sampling(temperature=0.9, top_k=50, top_p=0.9, seed=2**50)):
        sequence = executor.open()
        sequence.reserve(8)
        (step,) = executor.step([Chunk(sequence=sequence, ids=tuple(IDS[:8]), position=0, sampling=sampling, last_only=False)])
        assert step.tokens_T == tuple(choose_tokens(step.logits_TV, first_position=1, sampling=sampling))
        sequence.close()


def test_what_does_not_fit_the_context_or_the_vocabulary_is_refused_and_reading_goes_on(executor: PersistentExecutor) -> None:
    sequence = executor.open()
    sequence.read(IDS)
    for ids, error in ((range(TINY.max_length - len(IDS) + 1), rf"^read: takes 1 to {TINY.max_length - len(IDS)} tokens more \(context 300\); got 143\.$"),
                       ([], "^read: takes 1 to"), ([3, 300], r"^read: token ids lie in 0\.\.299; got \[3, 300\]\.$"), ([-1], "^read: token ids")):
        with pytest.raises(ValueError, match=error):
            sequence.read(list(ids))
    sequence.read(list(range(TINY.max_length - len(IDS))))
    with pytest.raises(ValueError, match=r"^read: takes 1 to 0 tokens more"):
        sequence.read([1])
    sequence.close()
    sequence.close()
    sequence.rewind(0)
    with pytest.raises(ValueError, match=r"^read: the sequence is closed\."):
        sequence.read([1])


def test_slots_and_pages_run_out_with_a_clear_error_and_closing_gives_them_back() -> None:
    executor, _ = twin_executor(num_slots=3, num_pages=4)
    first, second, third = (executor.open() for _ in range(3))
    with pytest.raises(OutOfPages, match=r"^kv pages: all 3 sequence slots are taken\."):
        executor.open()
    first.read(IDS)
    second.read(IDS)
    with pytest.raises(OutOfPages, match="need 1 pages of 128, and 0 of 4 are free"):
        third.read([1])
    first.close()
    third.read([1])
    assert executor.pool.num_free == 1
    for sequence in (second, third):
        sequence.close()
    assert executor.pool.num_free == 4 and executor.fits([300, 1]) and not executor.fits([300, 129]) and not executor.fits([1, 1, 1, 1])
    with pytest.raises(ValueError, match=r"^executor: a sequence of the whole context \(300\) takes 3 pages of 128 positions; got 2\."):
        twin_executor(num_pages=2)
    with pytest.raises(ValueError, match=r"^executor: a step has 8, 16, 32, 64 columns; got 12\."):
        twin_executor(num_columns=12)


def test_several_steps_in_a_row_are_the_tokens_of_single_steps_and_can_be_stopped() -> None:
    executor, log = twin_executor(resident=True, num_slots=3)
    assert executor.can_reside and isinstance(executor.runner(8), ResidentRunner) and not twin_executor()[0].can_reside
    samplings = (Sampling(), Sampling(temperature=0.8, seed=4))
    texts = []
    for sampling in samplings:
        fresh = executor.open()
        texts.append([t for r in generate(fresh, prompt=IDS[:5], drafter=None, sampling=sampling, max_tokens=9, eos_ids=()) for t in r.tokens])
        fresh.close()
    sequences = [executor.open() for _ in samplings]
    for sequence in sequences:
        sequence.read(IDS[:5])
    chunks = [Chunk(sequence=s, ids=(text[0],), position=5, sampling=how, last_only=False) for s, text, how in zip(sequences, texts, samplings, strict=True)]
    assert executor.run_steps(chunks, 8, stopped=lambda: False) == [text[1:] for text in texts]
    del log[:]
    assert executor.run_steps(chunks, 8, stopped=lambda: len(log) == 3) == [text[1:4] for text in texts]


def test_what_the_device_does_not_pick_is_picked_on_the_host_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    executor, _ = twin_executor(picks=lambda sampling: sampling.top_p == 1)
    sequence = executor.open()
    sequence.reserve(2)
    with caplog.at_level(logging.WARNING):
        for sampling, expected in ((Sampling(), True), (Sampling(temperature=1, top_p=0.5), False), (Sampling(temperature=1, top_p=0.6), False)):
            (step,) = executor.step([Chunk(sequence=sequence, ids=(1, 2), position=0, sampling=sampling, last_only=False)])
            assert (step.tokens_T is not None) == expected
    assert len(caplog.records) == 1 and "they are picked from the logits on the host" in caplog.text


def test_a_step_that_fails_says_so_and_the_next_is_run(executor: PersistentExecutor) -> None:
    sequence = executor.open()
    sequence.read(IDS[:4])
    twin = executor.runner(8).twin  # type: ignore[attr-defined]
    assert isinstance(twin, Counted)
    twin.fail_next = True
    with pytest.raises(RuntimeError, match="a barrier was given up"):
        sequence.read(IDS[4:6])
    assert sequence.length == 4
    sequence.read(IDS[4:6])
    sequence.close()
