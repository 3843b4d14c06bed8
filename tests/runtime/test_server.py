"""The server over real HTTP: plain httpx, OpenAI's own client and curl see the same answers, and the numbers add up."""

import json
import math
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from served_fake import EOS, MAX_LENGTH, TOKENIZER, Running, WrongDrafter, make_served, running

MESSAGES = [{"role": "system", "content": "Answer."}, {"role": "user", "content": "Count \u65e5 \U0001f600"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(make_served()) as up:
        yield up


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=20) as http:
        yield http


@pytest.fixture(scope="module")
def sdk(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def body(chat: bool = False, **changes: Any) -> dict[str, Any]:
    return {"model": "fake", **({"messages": MESSAGES} if chat else {"prompt": "def f"}), "max_tokens": 30, "seed": 1, **changes}


def path(chat: bool) -> str:
    return "/v1/chat/completions" if chat else "/v1/completions"


def ask(client: httpx.Client, chat: bool = False, **changes: Any) -> dict[str, Any]:
    response = client.post(path(chat), json=body(chat, **changes))
    assert response.status_code == 200, response.text
    return response.json()


def stream(client: httpx.Client, chat: bool = False, **changes: Any) -> list[dict[str, Any]]:
    """The chunks; checks the framing."""
    with client.stream("POST", path(chat), json=body(chat, stream=True, **changes)) as response:
        assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
        raw = response.read().decode("ascii")
    events = raw.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""] and all(e.startswith("data: ") for e in events[:-1])
    return [json.loads(e.removeprefix("data: ")) for e in events[:-2]]


def text_of(answer: dict[str, Any]) -> str:
    choice = answer["choices"][0]
    return choice["message"]["content"] if "message" in choice else choice["text"]


def text_of_chunks(chunks: list[dict[str, Any]]) -> str:
    return "".join(c.get("text", "") or c.get("delta", {}).get("content", "") for chunk in chunks for c in chunk["choices"])


def metrics_of(client: httpx.Client) -> dict[str, float]:
    """Sample name and its labels other than the model's -> value."""
    values = {}
    for family in text_string_to_metric_families(client.get("/metrics").text):
        for sample in family.samples:
            assert sample.labels["model_name"] == "fake", sample
            labels = ",".join(v for k, v in sorted(sample.labels.items()) if k != "model_name")
            values[f"{sample.name}[{labels}]" if labels else sample.name] = sample.value
    return values


# --- what an answer is ---


@pytest.mark.parametrize("chat", [False, True])
def test_the_answer_is_the_decoded_tokens(client: httpx.Client, chat: bool) -> None:
    answer = ask(client, chat, return_token_ids=True)
    extension, usage = answer["kilotok"], answer["usage"]
    ids = extension["token_ids"]
    prompt = TOKENIZER.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False) if chat else "def f"
    prompt_tokens = len(TOKENIZER(prompt, add_special_tokens=False)["input_ids"])
    assert text_of(answer) == TOKENIZER.decode(ids, skip_special_tokens=True)
    assert answer["object"] == ("chat.completion" if chat else "text_completion") and answer["model"] == "fake"
    assert answer["system_fingerprint"] == "fp_test" and answer["choices"][0]["finish_reason"] == "length"
    assert (extension["seed"], extension["decode"]) == (1, "draft")
    assert extension["rounds"][0] == [0, 0, 1] and sum(r[2] for r in extension["rounds"]) == len(ids) == 30
    assert usage == {"prompt_tokens": prompt_tokens, "completion_tokens": 30, "total_tokens": prompt_tokens + 30, "completion_tokens_details": {
        "accepted_prediction_tokens": sum(r[1] for r in extension["rounds"]),
        "rejected_prediction_tokens": sum(r[0] - r[1] for r in extension["rounds"])}}
    assert usage["completion_tokens_details"]["accepted_prediction_tokens"] > 0


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("changes", [{}, {"temperature": 0}, {"seed": 5, "top_p": 0.9, "top_k": 20}, {"stop": ["return", "\u00e9"]}, {"decode": "plain"},
                                     {"seed": 12, "max_tokens": 60}], ids=str)
def test_stream_and_whole_are_equal(client: httpx.Client, chat: bool, changes: dict[str, Any]) -> None:
    whole = ask(client, chat, return_token_ids=True, **changes)
    chunks = stream(client, chat, return_token_ids=True, stream_options={"include_usage": True}, **changes)
    *deltas, last, usage = chunks
    assert text_of_chunks(chunks) == text_of(whole)
    assert len(text_of(whole)) > 0 and len(deltas) > 2
    assert all(c["kilotok"] == {"seed": whole["kilotok"]["seed"], "decode": whole["kilotok"]["decode"]} for c in (*deltas, usage))
    assert all(c["choices"][0]["finish_reason"] is None and c["usage"] is None for c in deltas)
    assert last["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
    assert last["kilotok"] == whole["kilotok"]
    assert usage["choices"] == [] and usage["usage"] == whole["usage"]
    assert {(c["id"], c["object"], c["created"], c["model"], c["system_fingerprint"]) for c in chunks} == {
        (chunks[0]["id"], "chat.completion.chunk" if chat else "text_completion", chunks[0]["created"], "fake", "fp_test")}
    if chat:
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""} and last["choices"][0]["delta"] == {}


def test_a_stream_without_options_has_no_usage_and_no_ids(client: httpx.Client) -> None:
    chunks = stream(client)
    assert all("usage" not in c and set(c["kilotok"]) == {"seed", "decode"} and c["choices"] for c in chunks)


@pytest.mark.parametrize("chat", [False, True])
def test_the_seed_that_was_drawn_gives_the_text_again(client: httpx.Client, chat: bool) -> None:
    first, second = ask(client, chat, seed=None), ask(client, chat, seed=None)
    assert first["kilotok"]["seed"] != second["kilotok"]["seed"] and text_of(first) != text_of(second)
    assert all(0 <= a["kilotok"]["seed"] < 2**31 for a in (first, second))
    assert text_of(ask(client, chat, seed=first["kilotok"]["seed"])) == text_of(first)
    chunks = stream(client, chat, seed=None)
    assert text_of(ask(client, chat, seed=chunks[0]["kilotok"]["seed"])) == text_of_chunks(chunks)
    assert text_of(ask(client, chat, seed=2**63 - 1)) == text_of(ask(client, chat, seed=2**63 - 1))


@pytest.mark.parametrize("temperature", [0, 1])
def test_the_ways_to_decode_agree(server: Running, client: httpx.Client, temperature: float) -> None:
    opened = server.served.executor.opened
    del opened[:]
    answers = {d: ask(client, decode=d, temperature=temperature, return_token_ids=True) for d in (None, "draft", "plain", "plain_one_column")}
    assert len({text_of(a) for a in answers.values()}) == 1
    assert [a["kilotok"]["decode"] for a in answers.values()] == ["draft", "draft", "plain", "plain_one_column"]
    assert opened == [False, False, False, True]
    trees = [ask(client, decode="tree", temperature=temperature, return_token_ids=True, **budget) for budget in ({}, {"tree_budget": 15})]
    assert {text_of(a) for a in trees} == {text_of(answers["plain"])}
    assert [(a["kilotok"]["decode"], a["kilotok"].get("tree_budget")) for a in trees] == [("tree", None), ("tree", 15)]
    assert [max(r[0] for r in a["kilotok"]["rounds"]) for a in trees] == [7, 15] and all(len(r) == 4 for r in trees[0]["kilotok"]["rounds"][1:-1])
    assert all(r[:2] == [0, 0] and r[2] == 1 for r in answers["plain"]["kilotok"]["rounds"])
    assert len(answers["draft"]["kilotok"]["rounds"]) < len(answers["plain"]["kilotok"]["rounds"])


def test_token_ids_as_prompt(client: httpx.Client) -> None:
    ids = TOKENIZER("def f")["input_ids"]
    assert text_of(ask(client, prompt=ids)) == text_of(ask(client, prompt=[ids])) == text_of(ask(client, prompt=["def f"])) == text_of(ask(client))


def test_defaults_of_max_tokens(client: httpx.Client) -> None:
    assert ask(client, max_tokens=None, ignore_eos=True)["usage"]["completion_tokens"] == 16
    chat = ask(client, True, max_tokens=None, ignore_eos=True)
    assert chat["usage"]["total_tokens"] == MAX_LENGTH and chat["choices"][0]["finish_reason"] == "length"
    assert ask(client, True, max_tokens=None, max_completion_tokens=5)["usage"]["completion_tokens"] == 5
    nearly_full = [LETTER] * (MAX_LENGTH - 3)
    assert ask(client, prompt=nearly_full, max_tokens=None, ignore_eos=True)["usage"]["completion_tokens"] == 3


LETTER = TOKENIZER("a")["input_ids"][0]


def test_the_end_token_ends_the_answer_and_is_no_text(client: httpx.Client) -> None:
    answers = [ask(client, seed=seed, max_tokens=100, return_token_ids=True) for seed in range(6)]
    ended = [a for a in answers if a["choices"][0]["finish_reason"] == "stop"]
    assert ended
    for answer in ended:
        ids = answer["kilotok"]["token_ids"]
        assert ids.index(EOS) == len(ids) - 1 == answer["usage"]["completion_tokens"] - 1
        assert text_of(answer) == TOKENIZER.decode(ids[:-1])
        longer = ask(client, seed=answer["kilotok"]["seed"], max_tokens=len(ids) + 5, ignore_eos=True, return_token_ids=True)
        assert longer["kilotok"]["token_ids"][:len(ids)] == ids and longer["usage"]["completion_tokens"] == len(ids) + 5
        assert text_of(longer) == TOKENIZER.decode(longer["kilotok"]["token_ids"], skip_special_tokens=True)


def test_an_end_token_that_is_an_ordinary_word_is_no_text_either() -> None:
    ids = [LETTER, *TOKENIZER(" return")["input_ids"]]
    with running(make_served(eos_ids=frozenset(ids))) as up, httpx.Client(base_url=up.url) as http:
        answer = ask(http, return_token_ids=True, max_tokens=200)
        made = answer["kilotok"]["token_ids"]
        assert answer["choices"][0]["finish_reason"] == "stop" and made[-1] in ids
        assert text_of(answer) == TOKENIZER.decode(made[:-1], skip_special_tokens=True)


@pytest.mark.parametrize("decode", ["draft", "plain"])
def test_stop_strings(client: httpx.Client, decode: str) -> None:
    full = ask(client, max_tokens=100, ignore_eos=True, decode=decode, return_token_ids=True)
    text, ids = text_of(full), full["kilotok"]["token_ids"]
    middle = next(text[i:i + 4] for i in range(20, len(text)) if "\ufffd" not in text[i:i + 4])
    for stops in (["return"], ["):", "return"], [middle], "at", ["0", "1", "2", "3"]):
        answer = ask(client, max_tokens=100, ignore_eos=True, decode=decode, stop=stops, return_token_ids=True)
        asked = [stops] if isinstance(stops, str) else stops
        used = answer["kilotok"]["token_ids"]
        assert text_of(answer) == text[:min(text.index(s) for s in asked if s in text)] and answer["choices"][0]["finish_reason"] == "stop"
        assert used == ids[:len(used)] and answer["usage"]["completion_tokens"] == len(used) == sum(r[2] for r in answer["kilotok"]["rounds"])
        assert all(r[1] <= r[2] for r in answer["kilotok"]["rounds"])
        # the last token is the one that completes it
        assert any(s in TOKENIZER.decode(used) for s in asked) and not any(s in TOKENIZER.decode(used[:-1]) for s in asked)


def test_text_that_was_held_back_comes_at_the_end(client: httpx.Client) -> None:
    """Of answers that end inside a character, and of answers that end in what might have become a stop string."""
    ends = []
    for max_tokens in range(1, 13):
        answer = ask(client, seed=3, ignore_eos=True, max_tokens=max_tokens, return_token_ids=True)
        text = TOKENIZER.decode(answer["kilotok"]["token_ids"], skip_special_tokens=True)
        assert text_of(answer) == text == text_of_chunks(stream(client, seed=3, ignore_eos=True, max_tokens=max_tokens))
        stopped = ask(client, seed=3, ignore_eos=True, max_tokens=max_tokens, stop=[text[-1] + "never", text + "never"])
        assert text_of(stopped) == text and stopped["choices"][0]["finish_reason"] == "length"
        ends.append(text[-1])
    assert "\ufffd" in ends and set(ends) != {"\ufffd"}


def test_a_stop_string_frees_the_engine() -> None:
    with running(make_served(step_s=0.01)) as up, httpx.Client(base_url=up.url) as http:
        answer = ask(http, stop=["a", "e", "\n", " "], max_tokens=240, ignore_eos=True, decode="plain")
        assert answer["choices"][0]["finish_reason"] == "stop" and answer["usage"]["completion_tokens"] < 30
        up.wait_idle(limit_s=1.5)   # 240 tokens would take 2.4 s


# --- other clients ---


def test_openai_client(client: httpx.Client, sdk: openai.OpenAI) -> None:
    assert [m.id for m in sdk.models.list()] == ["fake"] and sdk.models.retrieve("fake").owned_by == "kilotok"
    chat = sdk.chat.completions.create(model="fake", messages=MESSAGES, max_tokens=30, seed=1, temperature=0.5, stop=["return"])
    assert chat.choices[0].message.content == text_of(ask(client, True, temperature=0.5, stop=["return"]))
    assert chat.usage.completion_tokens_details.accepted_prediction_tokens > 0 and chat.model_extra["kilotok"] == {"seed": 1, "decode": "draft"}
    again = sdk.chat.completions.create(model="fake", max_tokens=5, messages=[
        *MESSAGES, chat.choices[0].message.model_dump(), {"role": "user", "content": [{"type": "text", "text": "more"}]}])
    assert again.usage.completion_tokens == 5
    plain = sdk.completions.create(model="fake", prompt="def f", max_tokens=30, seed=1, extra_body={"decode": "plain", "return_token_ids": True})
    assert plain.choices[0].text == text_of(ask(client)) and len(plain.model_extra["kilotok"]["token_ids"]) == 30


def test_openai_client_streaming(client: httpx.Client, sdk: openai.OpenAI) -> None:
    chunks = list(sdk.chat.completions.create(model="fake", messages=MESSAGES, max_tokens=30, seed=1, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text_of(ask(client, True))
    assert chunks[-1].usage.completion_tokens == 30 and chunks[-2].choices[0].finish_reason == "length"
    pieces = sdk.completions.create(model="fake", prompt="def f", max_tokens=30, seed=1, stream=True)
    assert "".join(c.choices[0].text for c in pieces) == text_of(ask(client))


def test_openai_client_errors(sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        sdk.completions.create(model="other", prompt="a")
    assert missing.value.code == "model_not_found" and missing.value.param == "model"
    with pytest.raises(openai.BadRequestError) as refused:
        sdk.chat.completions.create(model="fake", messages=MESSAGES, n=2)
    assert refused.value.param == "n"


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl on this machine")
def test_curl(server: Running, client: httpx.Client) -> None:
    def curl(*args: str) -> str:
        return subprocess.run(["curl", "-sS", "--max-time", "20", *args], capture_output=True, text=True, check=True).stdout

    post = ["-H", "Content-Type: application/json", "-d"]
    assert text_of(json.loads(curl(f"{server.url}/v1/completions", *post, json.dumps(body())))) == text_of(ask(client))
    lines = curl("-N", f"{server.url}/v1/chat/completions", *post, json.dumps(body(True, stream=True))).splitlines()
    assert lines[-2:] == ["data: [DONE]", ""]
    assert text_of_chunks([json.loads(line.removeprefix("data: ")) for line in lines[:-2] if line]) == text_of(ask(client, True))
    assert "Content-Type: application/json" in json.loads(curl(f"{server.url}/v1/completions", "-d", "{}"))["error"]["message"]


# --- many at once, and clients that leave ---


def test_parallel_answers_equal_sequential_ones(client: httpx.Client) -> None:
    requests = [(i % 2 == 0, {"seed": i, "max_tokens": 20 + 2 * i, "decode": ("draft", "plain")[i % 3 == 0]}) for i in range(8)]
    alone = [text_of(ask(client, chat, **r)) for chat, r in requests]
    with ThreadPoolExecutor(8) as pool:
        whole = [pool.submit(ask, client, chat, **r) for chat, r in requests]
        assert [text_of(w.result()) for w in whole] == alone
        streams = [pool.submit(stream, client, chat, **r) for chat, r in requests]
        assert [text_of_chunks(s.result()) for s in streams] == alone
    assert len(set(alone)) == 8


def test_requests_beyond_max_running_wait_and_are_answered() -> None:
    with running(make_served(step_s=0.005), max_running=2) as up, httpx.Client(base_url=up.url, timeout=20) as http, ThreadPoolExecutor(6) as pool:
        answers = [pool.submit(ask, http, temperature=0, decode="plain", ignore_eos=True) for i in range(6)]
        seen = set()
        while not all(a.done() for a in answers):
            values = metrics_of(http)
            seen.add((values["vllm:num_requests_running"], values["vllm:num_requests_waiting"]))
        assert max(r for r, _ in seen) == 2 and max(w for _, w in seen) >= 2
        assert all(a.result()["usage"]["completion_tokens"] == 30 for a in answers)
        up.wait_idle()
        health = http.get("/health").json()
        assert health.pop("drafting") == {"verify_length": None, "rounds_drafted": 0, "rounds_without_a_draft": 0, "switched_off": 0, "switched_on": 0,
                                          "gates": [], "round_ms": []}
        assert health == {"status": "ok", "executor": "fake", "draft": "fake", "num_running": 0, "num_waiting": 0}


@pytest.mark.parametrize("streaming", [False, True])
def test_a_client_that_leaves_ends_its_request(streaming: bool) -> None:
    with running(make_served(step_s=0.01)) as up, httpx.Client(base_url=up.url) as http:
        content = json.dumps(body(stream=streaming, max_tokens=240, ignore_eos=True, decode="plain")).encode()
        with socket.create_connection(("127.0.0.1", int(up.url.rsplit(":", 1)[1]))) as sock:
            sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(content) + content)
            if streaming:
                assert sock.recv(100).startswith(b"HTTP/1.1 200")
            end = time.monotonic() + 5
            while up.engine.num_running != 1:
                assert time.monotonic() < end
                time.sleep(0.005)
            time.sleep(0.1)   # some tokens
        up.wait_idle(limit_s=1.5)   # the whole answer would take 2.4 s
        values = metrics_of(http)
        assert values["vllm:request_success_total[abort]"] == 1 and values["vllm:e2e_request_latency_seconds_count"] == 0
        assert 0 < values["vllm:generation_tokens_total"] < 200
        assert ask(http)["usage"]["completion_tokens"] == 30


# --- metrics ---


def test_metrics_of_a_known_sequence() -> None:
    """Proposals at positions divisible by five are wrong. Prompt 0..3, the prefill's token at 4, then rounds that end at 5, 10 and 15."""
    with running(make_served()) as up, httpx.Client(base_url=up.url) as http:
        before = metrics_of(http)
        assert math.isnan(before["kilotok:acceptance_length"])
        assert [before[f"vllm:spec_decode_num_accepted_tokens_per_pos_total[{i}]"] for i in range(7)] == [0] * 7
        answer = ask(http, prompt=[LETTER] * 4, max_tokens=12, ignore_eos=True, return_token_ids=True)
        assert answer["kilotok"]["rounds"] == [[0, 0, 1], [7, 0, 1], [7, 4, 5], [4, 4, 5]]
        ask(http, prompt=[LETTER] * 4, max_tokens=3, ignore_eos=True, decode="plain")
        up.wait_idle()
        values = metrics_of(http)
    expected = {
        "vllm:prompt_tokens_total": 8, "vllm:generation_tokens_total": 15, "vllm:spec_decode_num_drafts_total": 3,
        "vllm:spec_decode_num_draft_tokens_total": 18, "vllm:spec_decode_num_accepted_tokens_total": 8, "kilotok:acceptance_length": 1 + 8 / 3,
        "vllm:request_success_total[length]": 2, "vllm:request_success_total[stop]": 0, "vllm:request_success_total[abort]": 0,
        "vllm:request_success_total[error]": 0, "vllm:time_to_first_token_seconds_count": 2, "vllm:e2e_request_latency_seconds_count": 2,
        "vllm:time_per_output_token_seconds_count": 13, "vllm:num_requests_running": 0, "vllm:num_requests_waiting": 0, "kilotok:executor_info[fake]": 1,
        **{f"vllm:spec_decode_num_accepted_tokens_per_pos_total[{i}]": (2, 2, 2, 2, 0, 0, 0)[i] for i in range(7)}}
    assert {name: values[name] for name in expected} == expected
    assert 0 < values["vllm:time_to_first_token_seconds_sum"] < values["vllm:e2e_request_latency_seconds_sum"]
    assert values["vllm:time_per_output_token_seconds_sum"] < values["vllm:e2e_request_latency_seconds_sum"]


def test_a_draft_head_that_never_helps_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    with running(make_served(make_drafter=WrongDrafter)) as up, httpx.Client(base_url=up.url, timeout=20) as http:
        for max_tokens, warnings in ((201, 0), (3, 1), (3, 1)):   # all but the first and the last token have a draft: 199, and one more
            assert ask(http, max_tokens=max_tokens, ignore_eos=True, temperature=0)["usage"]["completion_tokens"] == max_tokens
            assert len([r for r in caplog.records if r.name.startswith("kilotok") and "draft head does not help" in r.message]) == warnings
        assert metrics_of(http)["kilotok:acceptance_length"] == 1.0


def test_a_helpful_draft_head_is_not_named(client: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    while metrics_of(client)["vllm:spec_decode_num_drafts_total"] < 201:
        ask(client, max_tokens=200, ignore_eos=True)
    assert not [r for r in caplog.records if r.name.startswith("kilotok")]


def test_a_budget_is_for_requests_that_decode_by_trees_by_name_or_by_default() -> None:
    with running(make_served(tree_budget=15)) as trees, httpx.Client(base_url=trees.url) as client:
        answer = ask(client, tree_budget=3, return_token_ids=True)
        assert (answer["kilotok"]["decode"], answer["kilotok"]["tree_budget"]) == ("tree", 3)
        assert max(r[0] for r in answer["kilotok"]["rounds"]) == 3
        refused = client.post("/v1/completions", json={"model": "fake", "prompt": "def f", "decode": "draft", "tree_budget": 3})
        assert refused.status_code == 400 and "only with decode 'tree'; this request's is 'draft'" in refused.json()["error"]["message"]
