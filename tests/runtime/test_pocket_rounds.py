"""The pocket and its shipped draft in rounds without the host, on the twin: texts are those of plain decoding, and proposals are accepted."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import POCKET, ROOT, export_experts
from engine_checks import Heard, submit_together
from step_models import weights_of_directory
from torch import Tensor
from transformers import AutoTokenizer

from kilotok.dflash.checkpoint import read_config, read_draft
from kilotok.dflash.drafter import DFlashDrafter
from kilotok.dflash.generate import Round, generate
from kilotok.dflash.sampling import Sampling
from kilotok.kernels.persistent import DraftWeights, RoundInputs, RoundRef, StepRef, StepWeights
from kilotok.runtime.draft_weights import read_draft_weights
from kilotok.runtime.engine import Engine, Request, Ticket
from kilotok.runtime.persistent import PersistentExecutor

PROMPTS = ("def add(a, b):\n", "for i in range(10):\n    print(", "def add(a, b):\n")
HOW = (Sampling(), Sampling(temperature=0.8, seed=7), Sampling(temperature=0.8, top_p=0.9, seed=7))
MAX_TOKENS = 12


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = export_experts(POCKET, tmp_path_factory.mktemp("pocket") / "out")
    shutil.copytree(ROOT / "recipes" / "pocket" / "draft", directory / "dflash")
    return directory


@pytest.fixture(scope="module")
def pair(out: Path) -> tuple[StepWeights, DraftWeights]:
    weights = weights_of_directory(out, taps=read_config(out / "dflash").target_layer_ids, max_length=256)
    return weights, read_draft_weights(out / "dflash", embedding_VD=weights.embedding_VD, max_length=256)


def asked(out: Path, number: int, **changes: Any) -> Request:
    prompt = tuple(AutoTokenizer.from_pretrained(out)(PROMPTS[number])["input_ids"])
    return Request(**{"prompt": prompt, "max_tokens": MAX_TOKENS, "sampling": HOW[number], "eos_ids": frozenset(), "decode": "draft", **changes})


class Failing(RoundRef):
    """Gives up in the round that it is told."""

    fail_in = -1

    def round(self, inputs: RoundInputs) -> Tensor:
        self.fail_in -= 1
        if self.fail_in == 0:
            raise RuntimeError("step: a barrier was given up")
        return super().round(inputs)


@pytest.fixture
def engine(pair: tuple[StepWeights, DraftWeights], out: Path) -> Iterator[Engine]:
    """Rounds where they can be, and the draft head in torch for the rest."""
    weights, draft = pair
    executor = PersistentExecutor(weights, draft=draft, make_runner=lambda state, drafts: Failing(weights, state, draft, drafts), num_columns=32)
    model = read_draft(out / "dflash", dtype=weights.embedding_VD.dtype)
    engine = Engine(executor, make_drafter=lambda: DFlashDrafter(model, embedding_VD=executor.embedding_VD, head_VD=executor.head_VD))
    yield engine
    engine.close()
    assert engine.failure is None and executor.pool.num_free == executor.pool.num_pages


def rounds_of(heard: list[Heard]) -> list[Round]:
    return [event for one in heard for event in one.events if isinstance(event, Round)]


@pytest.fixture(scope="module")
def plain(pair: tuple[StepWeights, DraftWeights], out: Path) -> list[list[int]]:
    """Texts of plain decoding by an executor without a draft."""
    executor = PersistentExecutor(pair[0], make_runner=lambda state: StepRef(pair[0], state), num_columns=8)
    engine = Engine(executor, make_drafter=None)
    heard = submit_together(engine, [asked(out, n, decode="plain") for n in range(3)])
    assert [one.end().reason for one in heard] == ["length"] * 3
    engine.close()
    return [one.tokens for one in heard]


def test_texts_with_the_shipped_draft_are_those_without(out: Path, engine: Engine, plain: list[list[int]]) -> None:
    """Greedy and sampled, alone and together, then beside one that the host drafts for, as it samples with top_p."""
    alone = []
    for n in range(2):
        alone += submit_together(engine, [asked(out, n)])
        alone[-1].end()
    together = submit_together(engine, [asked(out, n) for n in range(2)])
    assert [one.end().reason for one in together] == ["length"] * 2
    assert [one.tokens for one in alone] == [one.tokens for one in together] == plain[:2] and all(len(text) == MAX_TOKENS for text in plain)
    by_torch = list[Round]()
    for n in range(2):
        request, sequence = asked(out, n), engine.executor.open()
        assert engine.make_drafter is not None
        by_torch += generate(sequence, prompt=request.prompt, drafter=engine.make_drafter(), sampling=request.sampling, max_tokens=MAX_TOKENS, eos_ids=())
        sequence.close()  # type: ignore[attr-defined]
    assert abs(sum(r.num_accepted for r in by_torch) - sum(r.num_accepted for r in rounds_of(alone))) <= 2, "the head in torch proposes other tokens"
    for heard in (alone, together):
        assert sum(r.num_accepted for r in rounds_of(heard)) >= 6 and len(rounds_of(heard)) < 2 * MAX_TOKENS - 6
    beside = submit_together(engine, [asked(out, n) for n in (0, 2)])
    assert [one.end().reason for one in beside] == ["length"] * 2 and [one.tokens for one in beside] == [plain[0], plain[2]]
    assert sum(r.num_drafted for r in rounds_of(beside[1:])) > 0, "the host drafts for it"


def test_after_a_request_is_cancelled_and_rounds_have_failed_the_next_one_has_its_text(out: Path, engine: Engine, plain: list[list[int]]) -> None:
    heard, tickets = [Heard(), Heard()], list[Ticket]()
    heard[0].on_round = lambda tokens: tickets[0].cancel() if tokens > 1 else None
    with engine._changed:
        tickets += [engine.submit(asked(out, n), heard[n]) for n in range(2)]
    assert heard[0].end().reason == "cancelled" and heard[1].end().reason == "length"
    assert heard[1].tokens == plain[1] and heard[0].tokens == plain[0][:len(heard[0].tokens)]
    engine.executor.runner(16).fail_in = 1  # type: ignore[attr-defined]
    failed = submit_together(engine, [asked(out, n) for n in range(2)])
    assert [one.end().error for one in failed] == ["RuntimeError: step: a barrier was given up"] * 2
    (after,) = submit_together(engine, [asked(out, 1)])
    assert after.end().reason == "length" and after.tokens == plain[1]
