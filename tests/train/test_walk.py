"""Acceptance by a walk over a text is what the draft-verify loop has on it, round by round; and the alarm of a draft that nobody accepts."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from conftest import save_tiny_moe
from torch import Tensor, nn
from torch.nn import functional as F

from kilotok.dflash.config import DraftConfig
from kilotok.dflash.context import Taps
from kilotok.dflash.drafter import DFlashDrafter
from kilotok.dflash.generate import Round, TargetStep, generate
from kilotok.dflash.hf_target import HFTarget
from kilotok.dflash.metrics import acceptance_length
from kilotok.dflash.model import DraftModel
from kilotok.dflash.sampling import Sampling
from kilotok.quant.archs import load_model
from kilotok.quant.quality import head_weight
from kilotok.train import acceptance
from kilotok.train.acceptance import acceptance_alarm, acceptance_figures, acceptance_table, measure_acceptance
from kilotok.train.prompts import Prompt
from kilotok.train.responses import Response
from kilotok.train.walk import rounds_of, walk_rounds

VOCAB, EOS, PROMPT = 12, 11, (3, 1, 4)


class Reciter:
    """A target whose greedy answer to PROMPT is a given text."""

    max_length = 1000

    def __init__(self, text: Sequence[int]) -> None:
        self.text, self.length = text, 0

    def read(self, ids: Sequence[int], *, last_logits_only: bool = False) -> TargetStep:
        places = range(self.length - len(PROMPT) + 1, self.length - len(PROMPT) + 1 + len(ids))   # in the text, of the token after each one read
        self.length += len(ids)
        answers = torch.tensor([self.text[p] if 0 <= p < len(self.text) else 0 for p in places])
        return TargetStep(logits_TV=F.one_hot(answers, VOCAB).float()[-1 if last_logits_only else 0:], features_TF=torch.zeros(len(ids), 1))

    def rewind(self, length: int) -> None:
        self.length = length


class Scripted:
    """A drafter that is right where the script says so, by anchor."""

    def __init__(self, text: Sequence[int], *, is_right: Sequence[Sequence[bool]], num_drafts: int) -> None:
        self.text, self.is_right, self.num_drafts, self.seen = text, is_right, num_drafts, 0

    def observe(self, features_TF: Tensor) -> None:
        self.seen += len(features_TF)

    def propose(self, anchor: int, *, count: int, sampling: Sampling) -> list[int]:
        at = self.seen - len(PROMPT)
        truth = [self.text[at + n] if at + n < len(self.text) else 0 for n in range(1, count + 1)]
        return [t if right else (t + 1) % VOCAB for t, right in zip(truth, self.is_right[at], strict=False)]


@pytest.mark.parametrize("num_drafts", [1, 3, 7])
@pytest.mark.parametrize("ends", [False, True], ids=["at max_tokens", "at an end token"])
def test_a_walk_has_the_rounds_of_the_loop(ends: bool, num_drafts: int) -> None:
    """Over random texts and scripts; where nothing ends the text early, drafted and accepted are the loop's too."""
    draw = random.Random(num_drafts + 100 * ends)
    lengths = set()
    for _ in range(150):
        text = [draw.randrange(EOS) for _ in range(draw.randrange(1, 40))] + [EOS] * ends
        likely = draw.choice([0.0, 0.5, 0.9, 1.0])
        is_right = [[draw.random() < likely if at + n < len(text) else False for n in range(1, num_drafts + 1)] for at in range(len(text) - 1)]
        expected = list(generate(Reciter(text), prompt=PROMPT, drafter=Scripted(text, is_right=is_right, num_drafts=num_drafts), sampling=Sampling(),
                                 max_tokens=len(text) + 50 * ends, eos_ids={EOS}))
        assert [t for r in expected for t in r.tokens] == text
        got = rounds_of(text, is_right=is_right)
        assert [r.tokens for r in got] == [r.tokens for r in expected]
        if not ends:
            assert got == expected
        lengths |= {len(r.tokens) for r in got if not r.is_prefill}
    assert lengths == set(range(1, num_drafts + 2))


def test_a_walk_by_hand() -> None:
    text, right, wrong = (5, 6, 7, 8, 9), [True, True], [False, True]
    assert [r.tokens for r in rounds_of(text, is_right=[right, wrong, right, wrong])] == [(5,), (6, 7, 8), (9,)]
    assert [r.tokens for r in rounds_of(text, is_right=[wrong, wrong, right, wrong])] == [(5,), (6,), (7,), (8, 9)]
    assert [(r.num_drafted, r.num_accepted) for r in rounds_of(text, is_right=[wrong, wrong, right, wrong])] == [(0, 0), (2, 0), (2, 0), (1, 1)]
    assert rounds_of((5,), is_right=[]) == [Round(tokens=(5,), num_drafted=0, num_accepted=0, is_prefill=True)]


SMALL = 8   # tokens: so that a random draft is right now and then


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> nn.Module:
    return load_model(save_tiny_moe(tmp_path_factory.mktemp("walk") / "tiny", vocab_size=SMALL, eos_token_id=None), dtype=torch.float32)


def random_draft(target: Any, *, seed: int = 0, **changes: Any) -> DraftModel:
    """With matrices large enough that what it says depends on what it sees."""
    shape: dict[str, Any] = {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "vocab_size": SMALL, "target_layer_ids": (0, 1), "num_target_layers": 2, "mask_token_id": 3, "block_size": 5, "sliding_window": 12}
    draft = DraftModel(DraftConfig(**{**shape, **changes})).eval()
    draft.initialize(generator=torch.Generator().manual_seed(seed), final_norm_D=target.model.norm.weight, mask_row_D=target.get_input_embeddings().weight[3])
    for parameter in draft.parameters():
        if parameter.dim() == 2:
            parameter.data *= 8
    return draft


@pytest.mark.parametrize("changes", [{}, {"sliding_window": None}, {"causal": "always", "attention_sinks": True},
                                     {"draft_vocab_size": 5, "mask_embedding": True}],
                         ids=["window", "full", "causal with sinks", "reduced vocabulary"])
def test_a_walk_of_a_model_has_the_rounds_of_its_loop(changes: dict[str, Any], target: Any) -> None:
    rounds: list[Round] = []
    for seed in range(6):
        draft = random_draft(target, seed=seed, **changes)
        prompt = tuple(torch.randint(0, SMALL, (3 + 5 * seed,), generator=torch.Generator().manual_seed(seed)).tolist())
        with Taps(target, layer_ids=(0, 1)) as taps, torch.no_grad():
            drafter = DFlashDrafter(draft, embedding_VD=target.get_input_embeddings().weight, head_VD=head_weight(target))
            expected = list(generate(HFTarget(target, taps=taps, max_length=512), prompt=prompt, drafter=drafter, sampling=Sampling(), max_tokens=40,
                                     eos_ids=()))
        text = tuple(t for r in expected for t in r.tokens)
        assert walk_rounds(draft, target, Response(prompt=prompt, response=text)) == expected
        rounds += expected
    assert len({r.num_accepted for r in rounds}) > 1   # else no draft ever moved a round


def prompts_of(count: int) -> dict[str, list[Prompt]]:
    return {"chat": [Prompt(domain="chat", ids=tuple(range(1, 4 + i)), row={"id": str(i)}) for i in range(count)]}


def measured(draft: DraftModel, target: Any, *, count: int = 2, max_tokens: int = 24) -> dict[str, Any]:
    return measure_acceptance(draft, target, prompts_of(count), max_tokens=max_tokens, eos_ids=(), max_length=512)


def test_a_draft_that_is_right_in_training_and_never_accepted_raises_the_alarm(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM#45343: an acceptance length of exactly 1.00. The drafter proposes what the draft holds for least likely."""
    draft = random_draft(target)
    good = measured(draft, target, max_tokens=60)
    assert good["all"]["acceptance_length"] > 1 and acceptance_alarm(good) is None

    class Reversed(DFlashDrafter):
        def logits(self, anchor: int) -> torch.Tensor:
            return -super().logits(anchor)

    monkeypatch.setattr(acceptance, "DFlashDrafter", Reversed)
    figures = measured(draft, target, max_tokens=60)["all"]
    assert figures["acceptance_length"] == 1.0 and figures["rounds"] * figures["accuracy_by_slot"][0] >= 5, figures
    alarm = acceptance_alarm({"all": figures})
    assert alarm is not None and alarm.startswith(f"ALARM: the acceptance length is exactly 1.00 over {figures['rounds']} rounds: not one draft was accepted")


def test_a_draft_that_has_learnt_nothing_is_not_accused(target: Any) -> None:
    """A vocabulary of the one token that the target never says stands in for a draft that is never right."""
    silent = random_draft(target, draft_vocab_size=1)
    said = {t for p in prompts_of(2)["chat"] for t in target.generate(torch.tensor([p.ids]), do_sample=False, max_new_tokens=24)[0].tolist()}
    (never, *_) = set(range(SMALL)) - said
    silent.draft_ids.fill_(never)   # type: ignore[union-attr, operator]
    figures = measured(silent, target)
    assert figures["all"]["acceptance_length"] == 1.0 and figures["all"]["accuracy_by_slot"] == [0.0] * 4 and figures["all"]["rounds"] >= 20
    said_of_it = acceptance_alarm(figures)
    assert said_of_it is not None and "ALARM" not in said_of_it and "wrong one" not in said_of_it
    assert "only 0.0 % of the first slots are right" in said_of_it and "too little training" in said_of_it


@pytest.mark.parametrize(("rounds", "accuracy", "said"), [
    (20, 0.25, "ALARM: "), (500, 0.01, "ALARM: "), (19, 0.9, "too few rounds to tell why"), (20, 0.24, "too little training"),
    (400, 0.01, "too little training"), (10, 0.01, "too little training"), (10, None, "too little training")])
def test_an_alarm_needs_acceptances_that_were_to_be_expected(rounds: int, accuracy: float | None, said: str) -> None:
    line = acceptance_alarm({"all": {"rounds": rounds, "acceptance_length": 1.0, "accuracy_by_slot": [accuracy, 0.5]}})
    assert line is not None and said in line and line.startswith("ALARM: ") == (said == "ALARM: ")


def test_the_alarm_is_silent_where_there_are_no_rounds(target: Any) -> None:
    figures = measured(random_draft(target), target, max_tokens=1)
    assert figures["all"]["rounds"] == 0 and acceptance_alarm(figures) is None


def test_figures_on_texts_are_the_walks(target: Any) -> None:
    draft = random_draft(target)
    texts = {"chat": [Response(prompt=(1, 2), response=tuple(target.generate(torch.tensor([[1, 2]]), do_sample=False, max_new_tokens=30)[0, 2:].tolist()))]}
    figures = measure_acceptance(draft, target, prompts_of(1), max_tokens=8, eos_ids=(), max_length=512, tree_budget=6, texts=texts)
    rounds = walk_rounds(draft, target, texts["chat"][0])
    for domain in ("chat", "all"):
        assert figures[domain]["walk"] == {"texts": 1, "tokens": 30, "acceptance_length": acceptance_length(rounds)}
        assert figures[domain]["tree"]["budget"] == 6 and figures[domain]["tree"]["acceptance_length_repeats_cut"] >= 1
    assert set(acceptance_figures(figures)) == {"chat", "all"}
    assert "walk (no loops)" in acceptance_table(figures) and "tree (no loops)" in acceptance_table(figures)
