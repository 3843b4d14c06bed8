"""Responses: where they end, that they are the target's own text, and that a stored batch is neither made again nor trusted blindly."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import save_tiny_moe
from torch import Tensor, nn

from kilotok.dflash.context import Taps
from kilotok.dflash.generate import generate
from kilotok.dflash.hf_target import HFTarget
from kilotok.dflash.sampling import Sampling
from kilotok.quant.archs import GROUPED, load_model
from kilotok.train.prompts import Prompt
from kilotok.train.responses import Answering, Response, generate_responses

PAD, EOS, OTHER_EOS = 0, 2, 9


class Scripted(nn.Module):
    """Answers each prompt by a rule, as transformers' generate returns it: after the padded prompt, padded to the longest answer.

    Greedy: the script's answer. Sampling: random tokens, as many as asked for. `calls` holds what it was asked.
    """

    def __init__(self, script: dict[tuple[int, ...], Sequence[int]] | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.script, self.calls = script, []  # type: ignore[var-annotated]

    def generate(self, *, input_ids: Tensor, attention_mask: Tensor, max_new_tokens: int, **how: Any) -> Tensor:
        texts = [tuple(row[keep.bool()].tolist()) for row, keep in zip(input_ids, attention_mask, strict=True)]
        assert all(keep.sort().values.equal(keep) for keep in attention_mask), "padding belongs on the left"
        assert all(bool((row[~keep.bool()] == PAD).all()) for row, keep in zip(input_ids, attention_mask, strict=True))
        self.calls.append({"texts": texts, "max_new_tokens": max_new_tokens, **how})
        if how["do_sample"]:
            answers = [torch.randint(100, 4000, (max_new_tokens,)).tolist() for _ in texts]
        else:
            answers = [list(self.script[t] if self.script is not None else (t[0] + 1000, t[0] + 2000))[:max_new_tokens] for t in texts]
        longest = max(len(a) for a in answers)
        return torch.cat((input_ids, torch.tensor([a + [PAD] * (longest - len(a)) for a in answers])), dim=1)


def prompts_of(*ids: Sequence[int]) -> list[Prompt]:
    return [Prompt(domain="d", ids=tuple(i), row={"id": str(n)}) for n, i in enumerate(ids)]


PROMPTS = prompts_of([11, 12, 13], [21], [31, 32, 33, 34, 35], [41, 42], [51], [61, 62, 63, 64], [71, 72])   # of unlike lengths, seven of them


def respond(model: nn.Module, directory: Path, *, prompts: Sequence[Prompt] = PROMPTS, said: list[str] | None = None, **changed: Any) -> list[Response]:
    settings: dict[str, Any] = {"target_sha256": "t", "dtype": "torch.float32", "vocab_size": 4096, "temperatures": [0.0], "max_new_tokens": 40,
                                "batch_size": 3, "eos_ids": {EOS}, "pad_id": PAD, "seed": 0, **changed}
    settings |= {"temperatures": tuple(settings["temperatures"]), "eos_ids": frozenset(settings["eos_ids"])}
    how = Answering(directory=directory, **settings)
    return generate_responses(model, prompts, how=how, say=(said if said is not None else []).append)


def answer_to(tmp_path: Path, answer: Sequence[int], **changed: Any) -> tuple[int, ...]:
    (response,) = respond(Scripted({(5,): answer}), tmp_path / "r", prompts=prompts_of([5]), **changed)
    assert response.prompt == (5,)
    return response.response


@pytest.mark.parametrize(("answer", "kept"), [
    ([7, 8, EOS], [7, 8, EOS]),
    ([7, EOS, 8, EOS], [7, EOS]),        # a generator that does not stop is cut at the first
    ([EOS], [EOS]),
    ([7, 8, OTHER_EOS, 8], [7, 8, OTHER_EOS]),
    ([7, 8, 7], [7, 8, 7]),              # no end within max_new_tokens
    ([7, PAD, 8, EOS], [7, PAD, 8, EOS]),   # a padding token that the target said is text
], ids=str)
def test_a_response_ends_at_the_end_token_and_keeps_it(answer: list[int], kept: list[int], tmp_path: Path) -> None:
    assert answer_to(tmp_path, answer, eos_ids={EOS, OTHER_EOS}) == tuple(kept)


def test_padding_after_a_shorter_answer_is_not_part_of_it(tmp_path: Path) -> None:
    script = {(5,): [7, EOS], (6,): [7, 8, 9, 10, EOS]}
    assert [r.response for r in respond(Scripted(script), tmp_path, prompts=prompts_of([5], [6]), batch_size=2)] == [(7, EOS), (7, 8, 9, 10, EOS)]


GRAM = [101, 102, 103, 104, 105, 106, 107, 108]


@pytest.mark.parametrize(("answer", "keep"), [
    ([*GRAM, 1, *GRAM, 3, *GRAM, 4, EOS], 18),   # up to the start of the third
    ([*GRAM, 1, *GRAM, 3, 4, EOS], 20),           # twice is allowed
    (GRAM[:7] * 3 + [EOS], 22),                        # three times seven tokens hold each 8-gram only twice
    (GRAM * 3, 16),
    ([7] * 9, 9), ([7] * 10, 2),                       # one token over and over: the third 8-gram starts at 2
    ([7, 6] * 5 + [7, 6, 5], 4),
], ids=["apart", "twice", "sevens", "loop", "nine", "ten", "pairs"])
def test_a_response_is_cut_at_the_third_repeat_of_eight_tokens(answer: list[int], keep: int, tmp_path: Path) -> None:
    assert answer_to(tmp_path, answer) == tuple(answer[:keep])


def test_what_is_stored_is_the_uncut_answer(tmp_path: Path) -> None:
    """So that another rule of cutting needs no new answers."""
    answer_to(tmp_path, GRAM * 3)
    assert json.loads((tmp_path / "r" / "000000.json").read_text())["responses"] == [GRAM * 3]


@pytest.mark.parametrize("batch_size", [1, 2, 3, 4, 7, 50])
@pytest.mark.parametrize("temperatures", [[0.0], [0.7, 0.0], [0.0, 0.6, 1.0]], ids=str)
def test_answers_come_in_the_order_of_the_prompts_at_each_temperature(batch_size: int, temperatures: list[float], tmp_path: Path) -> None:
    model = Scripted()
    responses = respond(model, tmp_path, batch_size=batch_size, temperatures=temperatures)
    assert [r.prompt for r in responses] == [p.ids for p in PROMPTS] * len(temperatures)
    greedy = temperatures.index(0.0) * len(PROMPTS)
    assert [r.response for r in responses[greedy:greedy + len(PROMPTS)]] == [(p.ids[0] + 1000, p.ids[0] + 2000) for p in PROMPTS]
    batches = -(-len(PROMPTS) // batch_size)
    assert len(model.calls) == batches * len(temperatures) == len(list(tmp_path.iterdir()))
    assert all(len(c["texts"]) <= batch_size for c in model.calls)
    assert sorted(t for c in model.calls for t in c["texts"]) == sorted([p.ids for p in PROMPTS] * len(temperatures))
    assert [c.get("temperature", 0.0) for c in model.calls] == [t for t in temperatures for _ in range(batches)]


def test_a_batch_holds_prompts_of_like_length(tmp_path: Path) -> None:
    model = Scripted()
    respond(model, tmp_path)
    assert [[len(t) for t in c["texts"]] for c in model.calls] == [[1, 1, 2], [2, 3, 4], [5]]


def test_sampling_is_from_the_whole_distribution(tmp_path: Path) -> None:
    """transformers keeps 50 tokens unless told otherwise."""
    model = Scripted()
    respond(model, tmp_path, temperatures=[0.0, 0.6], batch_size=50, eos_ids={OTHER_EOS, EOS}, max_new_tokens=5)
    common = {"max_new_tokens": 5, "eos_token_id": [EOS, OTHER_EOS], "pad_token_id": PAD}
    assert [{k: v for k, v in c.items() if k != "texts"} for c in model.calls] == \
        [{**common, "do_sample": False}, {**common, "do_sample": True, "temperature": 0.6, "top_k": 0, "top_p": 1.0}]


def test_without_an_end_token_there_is_none(tmp_path: Path) -> None:
    assert answer_to(tmp_path, [7, EOS, 8], eos_ids=frozenset()) == (7, EOS, 8)


def test_answers_depend_on_the_seed_alone(tmp_path: Path) -> None:
    def sampled(name: str, *, seed: int) -> list[Response]:
        torch.manual_seed(100 + len(name))   # a state it must not read ...
        before = torch.get_rng_state()
        responses = respond(Scripted(), tmp_path / name, temperatures=[0.5, 0.9], seed=seed)
        assert torch.equal(torch.get_rng_state(), before)   # ... nor move
        return responses

    one, same, other = sampled("one", seed=3), sampled("same", seed=3), sampled("other", seed=4)
    assert one == same
    assert all(a.response != b.response for a, b in zip(one, other, strict=True))
    assert all(a.response != b.response for a, b in zip(one[:7], one[7:], strict=True))   # each temperature draws its own
    assert len({r.response for r in one}) == len(one)   # and so does each batch


def test_stored_batches_are_read_and_the_rest_is_made(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"temperatures": [0.0, 0.8], "batch_size": 2}
    whole = respond(Scripted(), tmp_path / "whole", **settings)
    names = [f"{i:06d}.json" for i in range(8)]
    assert sorted(p.name for p in (tmp_path / "whole").iterdir()) == names
    times = {p: p.stat().st_mtime_ns for p in (tmp_path / "whole").iterdir()}
    model, said = Scripted(), list[str]()
    assert respond(model, tmp_path / "whole", said=said, **settings) == whole
    assert model.calls == [] and said == []
    for name in names[5:]:
        (tmp_path / "whole" / name).unlink()
    assert respond(model, tmp_path / "whole", said=said, **settings) == whole
    assert len(model.calls) == 3 and len(said) == 1 and said[0].startswith("whole: responses: batch 8 of 8, ")
    now = {p: p.stat().st_mtime_ns for p in (tmp_path / "whole").iterdir()}
    assert now.keys() == times.keys() and {p.name for p in now if now[p] == times[p]} == set(names[:5])


def test_a_batch_is_on_disk_before_the_next_is_made(tmp_path: Path) -> None:
    class Dies(Scripted):
        def generate(self, **how: Any) -> Tensor:
            assert len(list(tmp_path.iterdir())) == len(self.calls)
            if len(self.calls) == 2:
                raise RuntimeError("killed")
            return super().generate(**how)

    with pytest.raises(RuntimeError, match="killed"):
        respond(Dies(), tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["000000.json", "000001.json"]
    model = Scripted()
    assert respond(model, tmp_path) == respond(Scripted(), tmp_path / "whole") and len(model.calls) == 1


@pytest.mark.parametrize("changed", [
    {"target_sha256": "u"}, {"temperatures": [0.1]}, {"max_new_tokens": 39}, {"seed": 1}, {"eos_ids": {EOS, 3}}, {"batch_size": 4},
    {"prompts": prompts_of([11, 12, 14], *[p.ids for p in PROMPTS[1:]])}, {"prompts": PROMPTS[::-1]},
], ids=lambda c: next(iter(c)))
def test_answers_to_something_else_are_refused_and_untouched(changed: dict[str, Any], tmp_path: Path) -> None:
    respond(Scripted(), tmp_path)
    before = {p: (p.stat().st_mtime_ns, p.read_text()) for p in tmp_path.iterdir()}
    with pytest.raises(ValueError, match=r"00000\d\.json: holds answers of another target, to other prompts or with other settings\. Choose another"):
        respond(Scripted(), tmp_path, **changed)
    assert {p: (p.stat().st_mtime_ns, p.read_text()) for p in tmp_path.iterdir()} == before


@pytest.mark.parametrize("text", ["", '{"key": "abc", "respon', "[]", '{"responses": []}'], ids=["empty", "torn", "list", "no_key"])
def test_a_damaged_batch_is_named(text: str, tmp_path: Path) -> None:
    respond(Scripted(), tmp_path)
    (tmp_path / "000001.json").write_text(text)
    with pytest.raises(ValueError, match=r"000001\.json: "):
        respond(Scripted(), tmp_path)


@pytest.mark.parametrize(("answers", "why"), [
    ([[7, EOS]] * 2, "3 answers belong in it, and it has 2"), ([[7, EOS]] * 4, "3 answers belong in it, and it has 4"),
    (None, "3 answers belong in it, and it has no list"), ([[7], None, [7]], "answer 1 is no list of token ids: null"),
    ([[7], [7], "7"], 'answer 2 is no list of token ids: "7"'), ([[7], [7, 2.0], [7]], r"answer 1 has the token 2\.0; the target's are 0\.\.4095"),
    ([[7, True], [7], [7]], "answer 0 has the token true"), ([[7, None], [7], [7]], "answer 0 has the token null"),
    ([[4096], [7], [7]], r"answer 0 has the token 4096; the target's are 0\.\.4095"), ([[-1], [7], [7]], "answer 0 has the token -1"),
    ([[7] * 41, [7], [7]], "answer 0 has 41 tokens, of at most 40"),
], ids=["few", "many", "null", "none", "text", "float", "bool", "null_token", "large", "negative", "long"])
def test_a_batch_that_holds_no_answers_of_the_target_is_named(answers: Any, why: str, tmp_path: Path) -> None:
    respond(Scripted(), tmp_path)
    path = tmp_path / "000000.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "responses": answers}))
    with pytest.raises(ValueError, match=rf"000000\.json: not readable as stored answers \({why}.*\)\. Remove it: it is made again\.$"):
        respond(model := Scripted(), tmp_path)
    assert model.calls == []
    path.unlink()
    assert len(respond(Scripted(), tmp_path)) == len(PROMPTS)


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[nn.Module]:
    yield load_model(save_tiny_moe(tmp_path_factory.mktemp("model") / "tiny"), dtype=torch.float32)


def random_prompts(*lengths: int) -> list[Prompt]:
    generator = torch.Generator().manual_seed(5)
    return prompts_of(*(torch.randint(4, 4096, (n,), generator=generator).tolist() for n in lengths))


def decoded(model: nn.Module, prompt: Sequence[int], *, max_tokens: int, eos_ids: set[int]) -> tuple[int, ...]:
    """Greedy, one token at a time, the prompt alone."""
    with Taps(model, layer_ids=[0]) as taps:
        target = HFTarget(model, taps=taps, max_length=512)
        return tuple(t for r in generate(target, prompt=prompt, drafter=None, sampling=Sampling(), max_tokens=max_tokens, eos_ids=eos_ids) for t in r.tokens)


def test_greedy_answers_are_the_target_s_greedy_text(tiny_model: nn.Module, tmp_path: Path) -> None:
    """Batched behind padding or alone, the likeliest tokens are the same; two of its own tokens serve as end tokens."""
    prompts = random_prompts(9, 3, 17, 1, 6, 12, 2)
    texts = [decoded(tiny_model, p.ids, max_tokens=16, eos_ids=set()) for p in prompts]
    eos_ids = {texts[0][5], texts[2][0]}
    expected = [decoded(tiny_model, p.ids, max_tokens=16, eos_ids=eos_ids) for p in prompts]
    assert {len(t) for t in expected} > {1, 16}   # some end at once, some not at all
    for batch_size in (3, 7):
        responses = respond(tiny_model, tmp_path / str(batch_size), prompts=prompts, batch_size=batch_size, max_new_tokens=16, eos_ids=eos_ids)
        stored = [a for p in sorted((tmp_path / str(batch_size)).iterdir()) for a in json.loads(p.read_text())["responses"]]
        assert sorted(map(tuple, stored)) == sorted(expected)
        assert all(r.response == e[:len(r.response)] for r, e in zip(responses, expected, strict=True))


def test_sampled_answers_differ_between_temperatures_and_from_greedy(tiny_model: nn.Module, tmp_path: Path) -> None:
    prompts = random_prompts(9, 3, 17, 4)
    settings: dict[str, Any] = {"prompts": prompts, "max_new_tokens": 8, "temperatures": [0.0, 0.7, 1.3], "batch_size": 2}
    before = torch.get_rng_state()
    responses = respond(tiny_model, tmp_path / "a", **settings)
    assert torch.equal(torch.get_rng_state(), before)
    by_temperature = [[r.response for r in responses[i:i + 4]] for i in (0, 4, 8)]
    assert all(len(set(answers)) == 3 for answers in zip(*by_temperature, strict=True))
    torch.manual_seed(1)
    assert respond(tiny_model, tmp_path / "b", **settings) == responses
    assert [r.response for r in respond(tiny_model, tmp_path / "c", **{**settings, "seed": 1})][4:] != [r.response for r in responses][4:]


def test_a_high_temperature_leaves_the_fifty_likeliest(tiny_model: nn.Module, tmp_path: Path) -> None:
    """Near-uniform draws of 4096: one among the 50 likeliest is 1.2 %, so of 48 draws all would be without a cut-off far below 1e-9."""
    prompts = random_prompts(*[5] * 48)
    responses = respond(tiny_model, tmp_path, prompts=prompts, max_new_tokens=1, temperatures=[10.0], batch_size=48)
    with torch.no_grad():
        likeliest = tiny_model(torch.tensor([p.ids for p in prompts])).logits[:, -1].topk(50).indices.tolist()
    assert sum(r.response[0] in top for r, top in zip(responses, likeliest, strict=True)) < 24


def test_experts_stay_grouped_while_a_target_decodes(tiny_model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers changes `grouped_mm`, and nothing else, to a product that copies every row's experts, on all devices but a CPU."""
    model: Any = tiny_model
    model.set_experts_implementation("grouped_mm")
    in_use: list[dict[str, str]] = []
    switch = model._optimize_model_for_decode

    @contextmanager
    def watched() -> Iterator[None]:
        with monkeypatch.context() as m, switch():
            m.setattr(type(model), "device", torch.device("meta"))
            with switch():
                in_use.append(model.get_experts_implementation())
                m.undo()
                yield

    monkeypatch.setattr(model, "_optimize_model_for_decode", watched)
    grouped = respond(model, tmp_path / "grouped")
    assert in_use and all(set(names.values()) == {GROUPED} for names in in_use)
    assert set(model.get_experts_implementation().values()) == {"grouped_mm"}, "as it was before"
    with watched():
        assert set(in_use[-1].values()) == {"batched_mm"}, "else this test shows nothing"
    model.set_experts_implementation("eager")
    assert respond(model, tmp_path / "eager") == grouped
