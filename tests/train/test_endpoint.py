"""Answers from a server: the ids that it sends, what is left out, what it may refuse, and that its failures neither lose nor change an answer."""

import http.server
import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from conftest import export_experts, save_tiny_moe
from served_fake import EOS, MAX_LENGTH, TOKENIZER, VOCAB_SIZE, FakeExecutor, make_served, running

from kilotok.dflash.generate import generate
from kilotok.dflash.sampling import Sampling
from kilotok.quant.checkpoint import load_exported_model
from kilotok.train import endpoint
from kilotok.train.cli import main as train
from kilotok.train.endpoint import Endpoint, EndpointTarget
from kilotok.train.prompts import Prompt
from kilotok.train.responses import Answering, Batch, Response, generate_responses

SHA = "ab" * 32
PROMPTS = [Prompt(domain="d", ids=ids, row={}) for ids in ((11, 12, 13), (21,), (31, 32, 33, 34, 35), (41, 42), (51,), (61, 62, 63, 64), (71, 72))]


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "FIRST_PAUSE_S", 0.0)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


class Scripted:
    """A server of one model. `reply(body)` makes a completion (a dict), text sent as it is, or an HTTP status to fail with."""

    def __init__(self, reply: Callable[[dict[str, Any]], dict[str, Any] | str | int], *, cards: Sequence[dict[str, Any]] = ({"id": "m"},)) -> None:
        self.asked: list[dict[str, Any]] = []
        self.authorization: set[str | None] = set()
        script = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._send({"object": "list", "data": list(cards)} if self.path == "/v1/models" else 404)

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                assert self.path == "/v1/completions"
                script.asked.append(body)
                script.authorization.add(self.headers["Authorization"])
                self._send(reply(body))

            def _send(self, answer: dict[str, Any] | str | int) -> None:
                status = answer if isinstance(answer, int) else 200
                text = answer if isinstance(answer, str) else json.dumps(answer if status == 200 else {"error": {"message": "not now"}})
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(text.encode())))
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *args: Any) -> None:
                """Nothing."""

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> "Scripted":
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *args: Any) -> None:
        self._server.shutdown()
        self._server.server_close()


def completion(body: dict[str, Any], ids: Sequence[int] | None = None, *, reason: str = "stop", **choice: Any) -> dict[str, Any]:
    ids = (body["prompt"][0] + 100, body["seed"] % 400 + 3, EOS) if ids is None else ids
    return {"choices": [{"finish_reason": reason, "token_ids": list(ids), **choice}], "usage": {"prompt_tokens": len(body["prompt"])}}


def connect(url: str, *, model: str | None = None, concurrency: int = 4, said: list[str] | None = None, **changed: Any) -> Endpoint:
    target = EndpointTarget(**{"sha256": SHA, "tokenizer": TOKENIZER, "eos_ids": frozenset({EOS}), "max_length": MAX_LENGTH, "vocab_size": VOCAB_SIZE,
                               "max_new_tokens": 12, **changed})
    return Endpoint(url, model=model, concurrency=concurrency, target=target, say=(said if said is not None else []).append)


def respond(server: Any, directory: Path, *, name: str = "m", **changed: Any) -> list[Response]:
    how = Answering(**{"directory": directory, "target_sha256": SHA, "dtype": "torch.float32", "vocab_size": len(TOKENIZER),
                       "temperatures": (0.0, 0.7), "max_new_tokens": 12, "batch_size": 3,
                       "eos_ids": frozenset({EOS}), "pad_id": 0, "seed": 0, "server": name, **changed})
    return generate_responses(server, PROMPTS, how=how, say=lambda text: None)


def test_answers_of_our_server_are_its_model_s_tokens(tmp_path: Path) -> None:
    """Over HTTP and several at once, by id: greedy ones are those of the loop in process, sampled ones are those of their seeds."""
    said: list[str] = []
    with running(make_served(description={"executor": "a test's", "weights_sha256": SHA})) as server:
        asked = connect(server.url, said=said)
        responses = respond(asked, tmp_path / "a")
        assert respond(connect(server.url, concurrency=1), tmp_path / "b") == responses   # the order of requests does not matter
    assert said == [f"{server.url}/v1: answers come from 'fake'; it has the target's weights ({SHA[:12]})"]
    assert [r.prompt for r in responses] == [p.ids for p in PROMPTS] * 2
    for r in responses[:len(PROMPTS)]:
        rounds = generate(FakeExecutor().open(), prompt=r.prompt, drafter=None, sampling=Sampling(), max_tokens=12, eos_ids={EOS})
        text = tuple(t for r in rounds for t in r.tokens)
        assert r.response == text[:len(r.response)] and len(r.response) > 1
    assert len({r.response for r in responses[len(PROMPTS):]}) == len(PROMPTS)
    files = {p.name: p.read_text() for p in (tmp_path / "a").iterdir()}
    assert files == {p.name: p.read_text() for p in (tmp_path / "b").iterdir()} and len(files) == 6


def test_other_weights_are_refused_and_an_unknown_server_is_named_unchecked() -> None:
    with running(make_served(description={"executor": "a test's", "weights_sha256": "cd" * 32})) as server, pytest.raises(
            ValueError, match=r"^data\.endpoint: http://\S+ serves weights cdcdcdcdcdcd; the target has abababababab\. .* serve the target\.$"):
        connect(server.url)
    said: list[str] = []
    with Scripted(completion) as other:
        connect(other.url, said=said)
    assert "answers come from 'm'; NOT CHECKED: that it is the target (weights abababababab)" in said[0]


def test_what_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    with Scripted(completion, cards=[{"id": "m", "owned_by": "vllm", "max_model_len": 12}]) as server:
        respond(connect(server.url + "/v1/"), tmp_path)
    assert server.authorization == {"Bearer secret"} and len(server.asked) == 2 * len(PROMPTS)
    for body in server.asked:
        assert {"model": "m", "top_p": 1.0, "top_k": VOCAB_SIZE, "return_token_ids": True, "repetition_penalty": 1.0, "min_p": 0.0,
                "max_tokens": 12 - len(body["prompt"])}.items() <= body.items()   # what the server's context leaves
    assert sorted((tuple(b["prompt"]), b["temperature"]) for b in server.asked) == sorted((p.ids, t) for p in PROMPTS for t in (0.0, 0.7))
    assert len({b["seed"] for b in server.asked}) == len(server.asked)


@pytest.mark.parametrize(("choice", "kept"), [
    ({"token_ids": [7, 8, EOS, 9]}, [7, 8, EOS]),
    ({"token_ids": [7, 8]}, [7, 8, EOS]),                                  # it ended, so the end token was there
    ({"token_ids": [7, 8], "finish_reason": "length"}, [7, 8]),
    ({"token_ids": None, "text": "cat"}, [*TOKENIZER("cat")["input_ids"], EOS]),
    ({"token_ids": None, "text": "cat", "finish_reason": "length"}, TOKENIZER("cat")["input_ids"]),
    ({"token_ids": [7], "stop_reason": 9}, None),                           # ended by a token that is not the target's end
    ({"token_ids": [7], "stop_reason": "###"}, None),
    ({"token_ids": [7], "matched_stop": EOS}, [7, EOS]),
], ids=["past", "ended", "length", "text", "text_length", "other_token", "string", "named"])
def test_an_answer_keeps_its_end_token(choice: dict[str, Any], kept: list[int] | None) -> None:
    reply = {"choices": [{"finish_reason": "stop", **choice}], "usage": {"prompt_tokens": 1}}
    with Scripted(lambda body: reply) as server:
        assert connect(server.url, vocab_size=len(TOKENIZER)).answer([5], temperature=0.0, seed=1) == kept


def test_an_end_token_that_may_be_one_of_two_leaves_the_answer_out() -> None:
    with Scripted(lambda body: completion(body, [7])) as server:
        assert connect(server.url, eos_ids=frozenset({EOS, 9})).answer([5], temperature=0.0, seed=1) is None
    with Scripted(lambda body: completion(body, [7], stop_reason=9)) as server:
        assert connect(server.url, eos_ids=frozenset({EOS, 9})).answer([5], temperature=0.0, seed=1) == [7, 9]


class Capitals:
    """A tokenizer that does not give a text back."""

    def __call__(self, text: str, **how: Any) -> Any:
        return TOKENIZER(text)

    def decode(self, ids: Sequence[int], **how: Any) -> str:
        return str(TOKENIZER.decode(ids)).capitalize()


def test_text_whose_tokens_cannot_be_told_is_left_out(tmp_path: Path) -> None:
    """Another number of tokens than the server generated, or a tokenizer that does not give the text back: neither is guessed."""
    ids = TOKENIZER("the cat")["input_ids"]

    def reply(body: dict[str, Any]) -> dict[str, Any]:
        counted = len(ids) + (1 if body["prompt"][0] == 21 else 0)
        return {"choices": [{"finish_reason": "length", "text": "the cat"}], "usage": {"prompt_tokens": len(body["prompt"]), "completion_tokens": counted}}

    with Scripted(reply) as server:
        responses = respond(connect(server.url, vocab_size=len(TOKENIZER)), tmp_path, temperatures=(0.0,))
        assert [r.prompt for r in responses] == [p.ids for p in PROMPTS if p.ids != (21,)]
        assert {r.response for r in responses} == {tuple(ids)}
        assert connect(server.url, vocab_size=ids[-1]).answer([5], temperature=0.0, seed=1) is None   # the target has no such token
        assert connect(server.url, vocab_size=len(TOKENIZER), max_new_tokens=len(ids) - 1).answer([5], temperature=0.0, seed=1) is None
        assert connect(server.url, vocab_size=len(TOKENIZER), tokenizer=Capitals()).answer([5], temperature=0.0, seed=1) is None


def test_an_answer_that_the_target_cannot_have_given_is_not_stored(tmp_path: Path) -> None:
    with Scripted(lambda body: completion(body, [VOCAB_SIZE + 5] if body["prompt"] == [21] else None)) as server, pytest.raises(
            ValueError, match=r"sent an answer that has the token"):
        respond(connect(server.url), tmp_path)
    assert list(tmp_path.iterdir()) == []   # the first batch has the prompt


def test_failures_that_pass_change_nothing(tmp_path: Path) -> None:
    """500, 429 and an answer torn in the middle, then the answer."""
    with Scripted(completion) as server:
        expected = respond(connect(server.url), tmp_path / "whole")
    trouble = iter([500, 429, '{"choices": [{"finish_re', 503])
    lock = threading.Lock()

    def reply(body: dict[str, Any]) -> Any:
        with lock:
            return next(trouble, None) or completion(body)

    with Scripted(reply) as server:
        assert respond(connect(server.url), tmp_path / "broken") == expected
    assert len(server.asked) == 2 * len(PROMPTS) + 4


def test_killed_in_the_middle_only_the_rest_is_asked_for(tmp_path: Path) -> None:
    """The server dies at the fourth batch; finished batches stay, and the next run's answers are those of one that was never killed."""
    with Scripted(completion) as server:
        expected = respond(connect(server.url, concurrency=1), tmp_path / "whole")
    count = iter(range(100))
    with Scripted(lambda body: completion(body) if next(count) < 9 else 500) as server, pytest.raises(
            ConnectionError, match=r"^data\.endpoint: http://\S+ failed 6 times in a row, the last time with status 500: .* finished batches are kept\.$"):
        respond(connect(server.url, concurrency=1), tmp_path / "killed")
    assert sorted(p.name for p in (tmp_path / "killed").iterdir()) == ["000000.json", "000001.json", "000002.json"]
    with Scripted(completion) as server:
        assert respond(connect(server.url, concurrency=1), tmp_path / "killed") == expected
    assert len(server.asked) == len(PROMPTS)   # a pass over the seven is three batches, of 3, 3 and 1


@pytest.mark.parametrize(("reply", "message"), [
    (lambda body: 400, r"refused /completions: status 400: .*not now"),
    (lambda body: 401, "refused /completions: status 401"),
    (lambda body: {"choices": []}, r"sent what is no completion \(IndexError"),
    (lambda body: {**completion(body), "usage": {"prompt_tokens": len(body["prompt"]) + 1}}, r"read other tokens than were sent \(2 for 1\): it adds"),
    (lambda body: completion(body, prompt_token_ids=[1, 5]), r"read other tokens than were sent \(2 for 1\)"),
    (lambda body: completion(body, reason="content_filter"), "ended an answer with finish_reason 'content_filter'; only stop and length"),
    (lambda body: completion(body, [7, VOCAB_SIZE]), f"sent an answer that has the token {VOCAB_SIZE}; the target's are 0..{VOCAB_SIZE - 1}"),
    (lambda body: completion(body, [-1, EOS]), "sent an answer that has the token -1;"),
    (lambda body: completion(body, [7, EOS, 1.0]), "sent an answer that has the token 1.0;"),
    (lambda body: completion(body, [True, EOS]), "sent an answer that has the token true;"),
    (lambda body: completion(body, [7] * 13, reason="length"), "sent an answer that has 13 tokens, of at most 12"),
    (lambda body: completion(body, [7] * 12), "sent an answer that has 13 tokens, of at most 12"),   # and an end token besides
    (lambda body: completion(body, token_ids="7 8"), 'sent an answer that is no list of token ids: "7 8"'),
], ids=["refusal", "key", "no_completion", "counted", "shown", "filtered", "large", "negative", "float", "bool", "long", "longer", "text"])
def test_an_answer_that_cannot_be_used_ends_the_run_at_once(reply: Callable[[dict[str, Any]], Any], message: str) -> None:
    with Scripted(reply) as server:
        asked = connect(server.url)
        with pytest.raises(ValueError, match=rf"^data\.endpoint: http://127\.0\.0\.1:\d+/v1 {message}"):
            asked.answer([5], temperature=0.0, seed=1)
        assert len(server.asked) == 1


@pytest.mark.parametrize(("cards", "model", "message"), [
    ([{"id": "a"}, {"id": "b"}], None, "serves 2 models: a, b. Name the one that is the target."),
    ([], None, "serves 0 models: none."), ([{"id": "a"}], "b", "does not serve 'b'; it has a."),
], ids=["several", "none", "wrong"])
def test_the_model_is_named_or_the_only_one(cards: list[dict[str, Any]], model: str | None, message: str) -> None:
    with Scripted(completion, cards=cards) as server, pytest.raises(ValueError, match=rf"^data\.endpoint_model: http://\S+ {message}"):
        connect(server.url, model=model)


def test_a_server_that_is_not_there_and_an_address_that_is_none() -> None:
    with Scripted(completion) as server:
        url = server.url
    with pytest.raises(ConnectionError, match=r"failed 6 times in a row, the last time with APIConnectionError: .* Start the server"):
        connect(url)
    with pytest.raises(ValueError, match=r"^data\.endpoint: must be a URL such as http://127\.0\.0\.1:8000/v1; got 'localhost:80'\.$"):
        connect("localhost:80")


def test_answers_of_another_server_s_model_are_not_taken_for_these(tmp_path: Path) -> None:
    with Scripted(completion) as server:
        respond(connect(server.url), tmp_path)
        with pytest.raises(ValueError, match="holds answers of another target"):
            respond(connect(server.url), tmp_path, name="other")


def test_each_prompt_of_a_batch_has_a_seed_of_its_own_that_every_server_takes() -> None:
    batch = Batch(run=0, temperature=0.0, indices=(0, 1), texts=((5,), (6,)), path=Path("x"), key="a" * 64)
    seeds = [batch.seed(), *(batch.seed(i) for i in range(99))]
    assert len(set(seeds)) == 100 and all(0 <= s < 2**31 for s in seeds[1:])


def test_a_run_trains_on_a_server_s_answers_when_the_server_is_gone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """First the answers alone, then, with the GPU free for it, the training; without the answers it asks for the server."""
    target = export_experts(save_tiny_moe(tmp_path / "parent"), tmp_path / "target")
    for name, prompts in (("chat", ["one", "two", "three"]), ("held", ["four"])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompts))
    source = {"domain": "chat", "path": str(tmp_path / "chat.jsonl"), "prompt": "prompt"}
    recipe = {
        "target": str(target), "run": str(tmp_path / "run"), "draft": {"num_hidden_layers": 1, "intermediate_size": 32, "target_layer_ids": [0, 1]},
        "data": {"sequence_length": 64, "heldout_prompts": 1, "heldout_new_tokens": 2, "train": [source],
                 "heldout": [{**source, "domain": "held", "path": str(tmp_path / "held.jsonl")}], "responses": str(tmp_path / "responses")},
        "trainer": {"max_steps": 1, "batch_size": 1, "accelerator": "cpu", "log_every_steps": 1}}
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    model: Any = load_exported_model(target, dtype=torch.float32)

    def greedy(body: dict[str, Any]) -> dict[str, Any]:
        prompt = torch.tensor([body["prompt"]])
        return completion(body, [*model.generate(prompt, do_sample=False, max_new_tokens=6, eos_token_id=None)[0, prompt.shape[1]:].tolist(), 2])

    with Scripted(lambda body: completion(body, [40, 41, 42, 43, 44, 45, 2])) as server:   # of a model that is not the target
        wrong = ["--run", str(tmp_path / "wrong"), "--out", str(tmp_path / "wrong-draft"), "--data.responses", str(tmp_path / "wrong-responses")]
        assert train(["dflash-distill", str(path), "--data.endpoint", server.url, *wrong]) == 2
        assert "bound 50 %: another model wrote them. Check which one data.endpoint serves" in capsys.readouterr().err
    with Scripted(greedy) as server:
        command = ["dflash-distill", str(path), "--data.endpoint", server.url]
        assert train([*command, "--data.shard", "1/1"]) == 0
    assert {"endpoint": f"{server.url}/v1", "model": "m"} == json.loads((tmp_path / "responses" / "endpoint.json").read_text())
    assert train(command) == 0
    printed = capsys.readouterr().out
    assert "share 1/1 is answered, 1 batches of it now" in printed and "chat: 3 prompts, 3 responses" in printed
    assert len(server.asked) == 3 and json.loads((tmp_path / "run" / "meta.json").read_text())["status"] == "complete"
    other = [*command, "--run", str(tmp_path / "other"), "--out", str(tmp_path / "out"), "--data.responses", str(tmp_path / "elsewhere")]
    assert train(other) == 2 and "failed 6 times in a row" in capsys.readouterr().err and not (tmp_path / "other").exists()

    record = tmp_path / "responses" / "endpoint.json"
    for damaged in ("{}", '{"endpoint": "http', '{"model": null}', "[]"):
        record.write_text(damaged)
        assert train([*command, "--run", str(tmp_path / "other"), "--out", str(tmp_path / "out")]) == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert error.startswith(f"error: {record}: not readable as the record of a server ("), error
        assert not (tmp_path / "other").exists()
    with Scripted(lambda body: {"choices": [{"finish_reason": "stop", "token_ids": [7], "stop_reason": "###"}]}) as server:
        command = ["dflash-distill", str(path), "--data.endpoint", server.url, "--run", str(tmp_path / "untold"), "--data.responses", str(tmp_path / "unclear")]
        assert train([*command, "--out", str(tmp_path / "out")]) == 2
    assert "data source 'chat': the tokens of none of its 3 answers can be told" in capsys.readouterr().err


@pytest.mark.parametrize(("more", "message"), [
    (["--data.shard", "3/2", "--data.responses", "x"], "data.shard: must be K/N with 1 <= K <= N, such as 2/8 for the second of eight shares; got '3/2'."),
    (["--data.shard", "1/2"], "data.shard: a share (1/2) is written where the run that trains finds it. Give data.responses, a shared directory."),
    (["--data.endpoint_model", "m"], "data.endpoint_model: is the name of a model at data.endpoint; got 'm' and no endpoint. Give its URL."),
], ids=["share", "nowhere", "model"])
def test_options_that_do_not_fit_together(more: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(["dflash-distill", *more, "--run", str(tmp_path / "run")]) == 2
    assert message in capsys.readouterr().err and list(tmp_path.iterdir()) == []
