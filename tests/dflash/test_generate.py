"""The draft-verify loop on a toy target: the text is the target's, whoever drafts, and nobody is told anything but the text."""

import functools
import hashlib
import random
from collections.abc import Collection, Sequence

import pytest
import torch
from conftest import exact_moe
from torch import Tensor, nn

from kilotok.dflash.config import DraftConfig
from kilotok.dflash.context import Taps
from kilotok.dflash.drafter import DFlashDrafter
from kilotok.dflash.generate import Round, Target, TargetStep, generate
from kilotok.dflash.hf_target import HFTarget
from kilotok.dflash.metrics import acceptance_length
from kilotok.dflash.model import DraftModel
from kilotok.dflash.sampling import Sampling, choose_tokens

VOCAB, DRAFTS = 11, 7
PROMPT = (3, 1, 4, 1, 5)
SAMPLINGS = {"greedy": Sampling(), "sampled": Sampling(temperature=1.0, seed=5), "top_p": Sampling(temperature=1.3, top_p=0.8, seed=6),
             "top_k": Sampling(temperature=0.9, top_k=3, top_p=0.95, seed=2**40)}


@functools.cache
def toy_logits(history: tuple[int, ...]) -> Tensor:
    """[V], a function of every token of the history and of its order."""
    key = int.from_bytes(hashlib.sha256(bytes(history)).digest()[:7], "little")
    return 2 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(key))


@functools.cache
def plain_text(prompt: tuple[int, ...], count: int, sampling: Sampling) -> tuple[int, ...]:
    """`count` tokens one at a time, without the loop under test."""
    text: tuple[int, ...] = ()
    while len(text) < count:
        text += tuple(choose_tokens(toy_logits(prompt + text)[None], first_position=len(prompt) + len(text), sampling=sampling))
    return text


class ToyTarget:
    """Remembers what it has read, and what it was asked."""

    def __init__(self, *, max_length: int = 1000) -> None:
        self.max_length = max_length
        self.ids: list[int] = []
        self.reads: list[tuple[int, ...]] = []

    @property
    def length(self) -> int:
        return len(self.ids)

    def read(self, ids: Sequence[int], *, last_logits_only: bool = False) -> TargetStep:
        assert ids and len(self.ids) + len(ids) <= self.max_length, "read beyond the context"
        assert last_logits_only == (not self.reads), "only the prefill needs no more than the last logits"
        first = len(self.ids)
        self.reads.append(tuple(ids))
        self.ids += ids
        logits = torch.stack([toy_logits(tuple(self.ids[:i + 1])) for i in range(first, len(self.ids))])
        features = torch.tensor([[i, self.ids[i]] for i in range(first, len(self.ids))], dtype=torch.float32)
        return TargetStep(logits_TV=logits[-1:] if last_logits_only else logits, features_TF=features)

    def rewind(self, length: int) -> None:
        assert 0 < length <= len(self.ids)
        del self.ids[length:]


class ToyDrafter:
    """Sees the committed tokens in its features; `right` says how many of its proposals at a position agree with the target."""

    num_drafts = DRAFTS

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.seen: list[int] = []
        self.asked: list[tuple[int, int]] = []

    def observe(self, features_TF: Tensor) -> None:
        assert features_TF[:, 0].tolist() == [*range(len(self.seen), len(self.seen) + len(features_TF))], "positions out of order"
        self.seen += [int(t) for t in features_TF[:, 1]]

    def propose(self, anchor: int, *, count: int, sampling: Sampling) -> list[int]:
        assert 1 <= count <= self.num_drafts
        self.asked.append((anchor, count))
        draw = random.Random(len(self.seen))
        if self.kind == "random":
            return [draw.randrange(VOCAB) for _ in range(count)]
        history = (*self.seen, anchor)
        text = plain_text(history, count, sampling)
        right = {"always right": count, "always wrong": 0, "sometimes right": draw.randrange(count + 1), "right but once": count}[self.kind]
        wrong = [] if self.kind != "right but once" else [draw.randrange(count)]
        return [t if n < right and n not in wrong else (t + 1) % VOCAB for n, t in enumerate(text)]


KINDS = ("random", "always wrong", "always right", "sometimes right", "right but once")


def decode(kind: str | None, *, max_tokens: int, sampling: Sampling, eos_ids: Collection[int] = (), max_length: int = 1000,
           prompt: Sequence[int] = PROMPT) -> tuple[list[int], list[Round], ToyTarget]:
    """Text, rounds and the target; what must hold of every run is checked on the way."""
    target, drafter = ToyTarget(max_length=max_length), ToyDrafter(kind) if kind else None
    text: list[int] = []
    rounds: list[Round] = []
    for r in generate(target, prompt=prompt, drafter=drafter, sampling=sampling, max_tokens=max_tokens, eos_ids=eos_ids):
        rounds.append(r)
        text += r.tokens
        committed = [*prompt, *text[:-1]]   # the newest token has not been read yet
        assert target.ids == committed
        if drafter is not None and not r.is_prefill:
            assert drafter.seen == committed
    prefill, *others = rounds
    assert target.reads[0] == tuple(prompt) and len(target.reads) == len(rounds)
    assert prefill.is_prefill and len(prefill.tokens) == 1 and prefill.num_drafted == prefill.num_accepted == 0
    anchors = [r.tokens[-1] for r in rounds]
    for r, anchor, read in zip(others, anchors, target.reads[1:], strict=False):
        assert not r.is_prefill and read[0] == anchor and len(read) == 1 + r.num_drafted
        assert r.num_accepted <= r.num_drafted <= (DRAFTS if kind else 0)
        accepted = list(read[1:1 + r.num_accepted])
        assert list(r.tokens[:r.num_accepted]) == accepted
        cut = r.stopped and r.num_accepted == len(r.tokens)   # the end of the sequence was itself a proposal
        assert len(r.tokens) == r.num_accepted + (not cut)
        if not cut and r.num_accepted < r.num_drafted:
            assert r.tokens[-1] != read[1 + r.num_accepted]   # the bonus differs from the proposal it replaces
    assert [r.stopped for r in rounds] == [False] * len(others) + [text[-1] in eos_ids]
    return text, rounds, target


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("kind", [None, *KINDS])
def test_text_is_that_of_plain_decoding(kind: str | None, sampling: Sampling) -> None:
    for max_tokens in range(1, 21):
        text, rounds, target = decode(kind, max_tokens=max_tokens, sampling=sampling)
        assert tuple(text) == plain_text(PROMPT, max_tokens, sampling), f"{max_tokens} tokens"
        assert sum(len(r.tokens) for r in rounds) == max_tokens
        assert sum(map(len, target.reads)) == len(PROMPT) + sum(1 + r.num_drafted for r in rounds[1:])


def test_the_drafters_are_what_they_are_called() -> None:
    """Else the equality above would be tested on fewer ways to be right and wrong than it seems."""
    seen = {k: [r.num_accepted for r in decode(k, max_tokens=200, sampling=Sampling())[1][1:-1]] for k in KINDS}
    assert set(seen["always right"]) == {DRAFTS} and set(seen["always wrong"]) == {0}
    assert set(seen["sometimes right"]) == set(range(DRAFTS + 1)) and set(seen["right but once"]) == set(range(DRAFTS))
    assert {0, 1} <= set(seen["random"])


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_greedy_and_sampled_are_different_texts(sampling: Sampling) -> None:
    """And the toy's greedy text is no loop."""
    text = plain_text(PROMPT, 60, sampling)
    assert len(set(text)) > 5
    assert sampling == Sampling() or text != plain_text(PROMPT, 60, Sampling())


@pytest.mark.parametrize("kind", KINDS)
def test_text_ends_at_the_end_of_sequence_wherever_it_is(kind: str) -> None:
    """Every token of the vocabulary and pairs of them, so that it is the first token, a proposal, or a bonus."""
    where = set()
    for sampling in (*SAMPLINGS.values(), *(Sampling(temperature=1.0, seed=s) for s in range(10))):
        whole = plain_text(PROMPT, 60, sampling)
        for eos_ids in ({0}, {1}, {2}, {3}, {4}, {5}, {6}, {7}, {8}, {9}, {10}, {2, 9}, {0, 10}):
            end = next((i for i, t in enumerate(whole) if t in eos_ids), 59)
            text, rounds, _ = decode(kind, max_tokens=60, sampling=sampling, eos_ids=eos_ids)
            assert tuple(text) == whole[:end + 1]
            last = rounds[-1]
            if last.stopped:
                where.add("first" if last.is_prefill else "proposal" if last.num_accepted == len(last.tokens) else "bonus")
                if not last.is_prefill and last.num_accepted == len(last.tokens) < last.num_drafted:
                    where.add("proposal before others")
    expected = {"first", "bonus"} if kind == "always wrong" else {"first", "proposal", "proposal before others", "bonus"}
    assert where == expected


@pytest.mark.parametrize("kind", [None, *KINDS])
@pytest.mark.parametrize("sampling", [SAMPLINGS["greedy"], SAMPLINGS["top_p"]], ids=["greedy", "top_p"])
def test_prompt_and_text_fill_the_context_and_no_more(kind: str | None, sampling: Sampling) -> None:
    """The toy target fails when it is asked to read beyond its context; the last token is never read."""
    for room in range(1, 21):
        text, rounds, target = decode(kind, max_tokens=1000, sampling=sampling, max_length=len(PROMPT) + room)
        assert tuple(text) == plain_text(PROMPT, room, sampling), f"room for {room}"
        assert target.length == target.max_length - 1 and not rounds[-1].stopped
        fewer, _, _ = decode(kind, max_tokens=max(1, room - 1), sampling=sampling, max_length=len(PROMPT) + room)
        assert fewer == text[:max(1, room - 1)]


def test_nothing_is_drafted_that_could_not_be_used() -> None:
    """With seven tokens to go after the anchor, six proposals and the bonus; with one to go, none."""
    for max_tokens, max_length in ((9, 1000), (1000, len(PROMPT) + 9)):
        target, drafter = ToyTarget(max_length=max_length), ToyDrafter("always wrong")
        rounds = list(generate(target, prompt=PROMPT, drafter=drafter, sampling=Sampling(), max_tokens=max_tokens, eos_ids=()))
        assert [r.num_drafted for r in rounds] == [0, 7, 6, 5, 4, 3, 2, 1, 0]
        assert [count for _, count in drafter.asked] == [7, 6, 5, 4, 3, 2, 1]


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_a_perfect_draft_commits_eight_tokens_a_round(sampling: Sampling) -> None:
    for rest in range(8):
        _, rounds, _ = decode("always right", max_tokens=1 + 5 * 8 + rest, sampling=sampling)
        assert [len(r.tokens) for r in rounds] == [1, 8, 8, 8, 8, 8, *([rest] if rest else [])]
        assert acceptance_length(rounds[:6]) == 8.0
    _, rounds, _ = decode("always wrong", max_tokens=20, sampling=sampling)
    assert acceptance_length(rounds) == 1.0


def test_a_consumer_can_stop_between_rounds() -> None:
    target = ToyTarget()
    rounds = generate(target, prompt=PROMPT, drafter=ToyDrafter("sometimes right"), sampling=Sampling(), max_tokens=50, eos_ids=())
    first, second = next(rounds), next(rounds)
    rounds.close()
    assert (*first.tokens, *second.tokens) == plain_text(PROMPT, len(first.tokens) + len(second.tokens), Sampling())
    assert len(target.reads) == 2


@pytest.mark.parametrize(("prompt", "max_length", "message"), [
    ((), 10, "prompt: must hold at least one token; got none."),
    (PROMPT, 5, "prompt: 5 tokens leave no room in a context of 5. Shorten the prompt."), (PROMPT, 3, "prompt: 5 tokens leave no room in a context of 3."),
])
def test_prompts_that_cannot_be_continued(prompt: tuple[int, ...], max_length: int, message: str) -> None:
    target = ToyTarget(max_length=max_length)
    with pytest.raises(ValueError) as error:
        next(generate(target, prompt=prompt, drafter=None, sampling=Sampling(), max_tokens=5, eos_ids=()))
    assert str(error.value).startswith(message) and not target.reads


# --- a transformers model and a draft head ---


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> nn.Module:
    return exact_moe(tmp_path_factory.mktemp("target") / "tiny")


def draft_of(model: nn.Module, *, window: int | None) -> DraftModel:
    config = DraftConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=4096,
                         target_layer_ids=(0, 1), num_target_layers=2, mask_token_id=4090, sliding_window=window)
    draft = DraftModel(config)
    draft.initialize(generator=torch.Generator().manual_seed(3), final_norm_D=model.model.norm.weight)   # type: ignore[union-attr, arg-type]
    return draft.double()


@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8, top_p=0.9, top_k=50, seed=4)], ids=["greedy", "sampled"])
def test_transformers_with_a_draft_head_says_what_it_says_alone(model: nn.Module, sampling: Sampling, window: int | None) -> None:
    draft, embedding = draft_of(model, window=window), model.get_input_embeddings().weight.detach()   # type: ignore[operator]
    prompt, count = [100, 7, 2000, 33, 5, 6], 30
    text: list[int] = []
    with torch.no_grad():
        while len(text) < count:   # no cache at all
            text += choose_tokens(model(torch.tensor([prompt + text])).logits[0, -1:], first_position=len(prompt) + len(text), sampling=sampling)
    with Taps(model, layer_ids=(0, 1)) as taps:
        for drafter in (None, DFlashDrafter(draft, embedding_VD=embedding, head_VD=embedding)):
            target: Target = HFTarget(model, taps=taps, max_length=len(prompt) + count)
            rounds = list(generate(target, prompt=prompt, drafter=drafter, sampling=sampling, max_tokens=1000, eos_ids=()))
            assert [t for r in rounds for t in r.tokens] == text
            assert (sum(r.num_drafted for r in rounds) > 0) == (drafter is not None)


def test_a_rewound_target_reads_on_as_if_it_had_never_read(model: nn.Module) -> None:
    ids = [9, 8, 7, 6, 5, 4, 30, 20, 10]
    with Taps(model, layer_ids=(1, 0)) as taps:
        target = HFTarget(model, taps=taps, max_length=20)
        whole = target.read(ids)
        assert target.length == 9 and whole.logits_TV.shape == (9, 4096) and whole.features_TF.shape == (9, 128)
        last = HFTarget(model, taps=taps, max_length=20).read(ids, last_logits_only=True)
        assert last.logits_TV.shape == (1, 4096) and last.features_TF.shape == (9, 128)
        torch.testing.assert_close(last.logits_TV, whole.logits_TV[-1:], rtol=1e-9, atol=1e-9)
        for keep in (1, 4, 8):
            target.rewind(keep)
            assert target.length == keep
            target.read([1, 2, 3])
            target.rewind(keep)
            again = target.read(ids[keep:])
            torch.testing.assert_close(again.logits_TV, whole.logits_TV[keep:], rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(again.features_TF, whole.features_TF[keep:], rtol=1e-9, atol=1e-9)
        target.rewind(9)
        assert target.length == 9   # to where it is: nothing to forget
        with pytest.raises(ValueError, match=r"^target: 9 \+ 12 tokens exceed its context of 20\. Shorten the text\."):
            target.read([1] * 12)
        assert target.length == 9


def test_a_drafter_gives_at_most_its_block(model: nn.Module) -> None:
    embedding = model.get_input_embeddings().weight.detach()   # type: ignore[operator]
    drafter = DFlashDrafter(draft_of(model, window=None), embedding_VD=embedding, head_VD=embedding)
    drafter.observe(torch.randn(5, 128, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
    seven = drafter.propose(50, count=7, sampling=Sampling())
    assert drafter.num_drafts == 7 and all(drafter.propose(50, count=n, sampling=Sampling()) == seven[:n] for n in range(8))
    for count in (-1, 8):
        with pytest.raises(ValueError, match=rf"^propose: a block of 8 gives at most 7 drafts; got count {count}\."):
            drafter.propose(50, count=count, sampling=Sampling())


@pytest.mark.parametrize(("window", "observed"), [(None, (5,)), (8, (5,)), (8, (20,)), (8, (9, 1, 12))])
def test_a_drafter_samples_with_the_noise_of_the_position(model: nn.Module, window: int | None, observed: tuple[int, ...]) -> None:
    """Five positions observed, the anchor at 5: the first proposal is for position 6. Positions a window drops are counted too."""
    embedding, sampling = model.get_input_embeddings().weight.detach(), Sampling(temperature=1.0, seed=9)   # type: ignore[operator]
    drafter = DFlashDrafter(draft_of(model, window=window), embedding_VD=embedding, head_VD=embedding)
    for size in observed:
        drafter.observe(torch.randn(size, 128, dtype=torch.float64, generator=torch.Generator().manual_seed(size)))
    proposals, anchor = drafter.propose(50, count=7, sampling=sampling), sum(observed)
    assert proposals == choose_tokens(drafter.logits(50), first_position=anchor + 1, sampling=sampling)
    assert proposals != choose_tokens(drafter.logits(50), first_position=anchor, sampling=sampling)


def test_a_drafter_tells_the_probability_of_every_token_it_proposes(model: nn.Module) -> None:
    embedding = model.get_input_embeddings().weight.detach()   # type: ignore[operator]
    drafter = DFlashDrafter(draft_of(model, window=None), embedding_VD=embedding, head_VD=embedding)
    drafter.observe(torch.randn(5, 128, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
    for sampling, temperature in ((Sampling(), 1.0), (Sampling(temperature=0.5, top_k=3, seed=1), 0.5)):
        tree = drafter.propose_chain(50, count=7, sampling=sampling)
        assert list(tree.token_ids) == drafter.propose(50, count=7, sampling=sampling) and tree.parents == tuple(range(-1, 6))
        expected = (drafter.logits(50) / temperature).softmax(-1)[torch.arange(7), list(tree.token_ids)].tolist()
        assert tree.confidences == pytest.approx(expected, rel=1e-5)
    ranked = drafter.propose_tree(50, count=7, budget=9, sampling=Sampling())
    probabilities = drafter.logits(50).softmax(-1)
    assert ranked.confidences == pytest.approx([float(probabilities[d - 1, t]) for d, t in zip(ranked.depths, ranked.token_ids, strict=True)])
    first = ranked.first(4)
    assert first == drafter.propose_tree(50, count=7, budget=4, sampling=Sampling()) and first.confidences == ranked.confidences[:4]  # type: ignore[index]
