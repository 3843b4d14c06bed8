"""What the server refuses: every body is OpenAI's error object, names the field, and the next request is answered."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from served_fake import MAX_LENGTH, TOKENIZER, FakeExecutor, FakeTarget, Running, make_served, running

from kilotok.dflash.sampling import Sampling
from kilotok.runtime.engine import Request
from kilotok.runtime.server.body import MAX_BODY_BYTES

USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
LETTER = TOKENIZER("a")["input_ids"][0]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(make_served(make_drafter=None)) as up:
        yield up


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=20) as http:
        yield http


def check_error(response: httpx.Response, status: int, param: str | None, words: str, *, code: str | None = None) -> None:
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    error = body["error"]
    assert words in error["message"], error["message"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error" if status < 500 else "server_error", param, code)


def check_serves(client: httpx.Client) -> None:
    response = client.post("/v1/completions", json={"model": "fake", "prompt": "a", "max_tokens": 1})
    assert response.status_code == 200, response.text


BOTH = [   # field, value, words of the message
    ("temperature", "0.5", 'must be a valid number; got "0.5".'),
    ("temperature", True, "must be a valid number; got true."),
    ("temperature", -0.1, "greater than or equal to 0"),
    ("temperature", 1e-9, "must be 0 (greedy) or lie in 1e-06..100; got 1e-09."),
    ("temperature", 2.1, "less than or equal to 2; got 2.1."),
    ("temperature", [1], "must be a valid number"),
    ("top_p", 0, "greater than 0"),
    ("top_p", 1.01, "less than or equal to 1"),
    ("top_k", 0, "greater than or equal to 1"),
    ("top_k", -1, "greater than or equal to 1; got -1."),
    ("top_k", 1.5, "must be a valid integer"),
    ("max_tokens", 0, "greater than or equal to 1; got 0."),
    ("max_tokens", "5", "must be a valid integer"),
    ("max_tokens", True, "must be a valid integer; got true."),
    ("max_tokens", 2.0, "must be a valid integer"),
    ("seed", -1, "greater than or equal to 0"),
    ("seed", 2**63, "less than or equal to 9223372036854775807"),
    ("seed", 10**40, "less than or equal to 9223372036854775807"),
    ("stop", ["a"] * 5, "up to 4 strings"),
    ("stop", "", "none of them empty"),
    ("stop", ["a", ""], "none of them empty"),
    ("stop", [1], "up to 4 strings"),
    ("stop", {"a": 1}, "up to 4 strings"),
    ("stream", 1, "must be a valid boolean"),
    ("stream", "true", "must be a valid boolean"),
    ("stream_options", {"include_usage": True}, "only with a stream"),
    ("user", 5, "must be a valid string"),
    ("n", 2, "only 1 is supported; got 2. Send several requests."),
    ("n", "1", 'only 1 is supported; got "1".'),
    ("n", True, "only 1 is supported; got true."),
    ("presence_penalty", 0.5, "only 0 is supported; got 0.5."),
    ("frequency_penalty", -1, "only 0 is supported; got -1."),
    ("logit_bias", {"5": 1}, 'only {} is supported; got {"5": 1}.'),
    ("logprobs", True, "only false is supported"),
    ("logprobs", 0, "only false is supported; got 0."),
    ("decode", "fast", "must be 'draft', 'tree', 'plain' or 'plain_one_column'"),
    ("decode", "draft", "needs a draft head"),
    ("decode", "tree", "needs a draft head"),
    ("tree_budget", 7, "only with decode 'tree'"),
    ("tree_budget", 0, "greater than or equal to 1"),
    ("tree_budget", 64, "less than or equal to 63"),
    ("ignore_eos", "no", "must be a valid boolean"),
    ("return_token_ids", 1, "must be a valid boolean"),
    ("temprature", 1, "unknown field. Did you mean 'temperature'?"),
    ("max_token", 1, "unknown field. Did you mean 'max_tokens'?"),
    ("xyzzy", None, "unknown field. Known are"),
    ("store", True, "this field of OpenAI's API is not supported. Leave it out."),
    ("model", None, "must be a valid string; got null."),
    ("model", 7, "must be a valid string; got 7."),
]
COMPLETIONS = [
    ("prompt", None, "must be a string or a list of token ids; got null."),
    ("prompt", 5, "must be a string or a list of token ids; got 5."),
    ("prompt", "", "must hold at least one token; got none."),
    ("prompt", [], "must hold at least one token; got none."),
    ("prompt", [""], "must hold at least one token; got none."),
    ("prompt", ["a", "b"], "one prompt a request is supported; got 2. Send a request for each."),
    ("prompt", [[1], [2]], "one prompt a request is supported; got 2."),
    ("prompt", [1, "a"], "must be a string or a list of token ids"),
    ("prompt", [True], "must be a string or a list of token ids"),
    ("prompt", [1.0], "must be a string or a list of token ids"),
    ("echo", True, "only false is supported; got true."),
    ("suffix", "end", 'not supported; got "end".'),
    ("best_of", 2, "only 1 is supported; got 2."),
    ("messages", [USER], "unknown field."),
    ("tools", [TOOL], "unknown field."),
]
CHAT = [
    ("messages", None, "must be a valid list; got null."),
    ("messages", [], "at least 1 item"),
    ("messages", "hi", "must be a valid list"),
    ("prompt", "a", "unknown field."),
    ("max_completion_tokens", 0, "greater than or equal to 1"),
    ("tools", {}, "must be a valid list"),
    ("tool_choice", "required", "is supported; got \"required\". Use 'auto', or 'none'"),
    ("tool_choice", {"type": "function", "function": {"name": "add"}}, "Use 'auto', or 'none'"),
    ("parallel_tool_calls", False, "only true is supported; got false."),
    ("response_format", {"type": "json_object"}, "ask for the format in a message"),
    ("response_format", {"type": "json_schema", "json_schema": {}}, "ask for the format in a message"),
    ("top_logprobs", 2, "not supported; got 2."),
    ("functions", [], "this field of OpenAI's API is not supported."),
    ("reasoning_effort", "low", "this field of OpenAI's API is not supported."),
]
INSIDE = [   # fields of a chat, the place that is named, words of the message
    ({"messages": [USER, {"role": "developer", "content": "a"}]}, "messages[1].role", "'system', 'user', 'assistant' or 'tool'; got \"developer\"."),
    ({"messages": [{"content": "a"}]}, "messages[0].role", "must be given."),
    ({"messages": ["a"]}, "messages[0]", 'got "a".'),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "must be given."),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "must be given."),
    ({"messages": [{"role": "assistant", "content": None, "tool_calls": []}]}, "messages[0].content", "must be given."),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "must be a string or a list of text parts; got 5."),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages[0].content",
     "part 0: content of type 'image_url' is not supported. Send parts of type 'text'."),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "input_audio"}]}]}, "messages[0].content",
     "part 1: content of type 'input_audio' is not supported."),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content", "part 0: must be {"),
    ({"messages": [{"role": "user", "content": ["a"]}]}, "messages[0].content", "part 0: must be {"),
    ({"messages": [{**USER, "weight": 1}]}, "messages[0].weight", "unknown field."),
    ({"messages": [{**USER, "contents": "a"}]}, "messages[0].contents", "Did you mean 'content'?"),
    ({"messages": [{**USER, "name": 3}]}, "messages[0].name", "must be a valid string"),
    ({"messages": [{**USER, "tool_calls": [CALL]}]}, "messages[0].tool_calls", "only the assistant calls tools; got role 'user'."),
    ({"messages": [{**USER, "tool_call_id": "c1"}]}, "messages[0].tool_call_id", "only with role 'tool'"),
    ({"messages": [{"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "add", "arguments": "{"}}]}]},
     "messages[0].tool_calls[0].function.arguments", "must be the JSON text of an object"),
    ({"messages": [{"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "add", "arguments": '{"a": NaN}'}}]}]},
     "messages[0].tool_calls[0].function.arguments", "NaN is no JSON number"),
    ({"messages": [{"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "add", "arguments": "[]"}}]}]},
     "messages[0].tool_calls[0].function.arguments", "must be the JSON text of an object"),
    ({"messages": [{"role": "assistant", "content": "a", "audio": {"id": "x"}}]}, "messages[0].audio", "not supported"),
    ({"tools": [{"type": "web_search"}]}, "tools[0]", "a tool of type 'web_search' is not supported."),
    ({"tools": ["add"]}, "tools[0]", "must be {"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0]", "function must be an object with a name"),
    ({"tools": [{"type": "function", "function": {"name": "add", "strict": True}}]}, "tools[0]", "strict is not supported"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage", "must be a valid boolean"),
    ({"stream": True, "stream_options": {"include": True}}, "stream_options.include", "Did you mean 'include_usage'?"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens", "another name of max_tokens, which is 5; got 6."),
]


@pytest.mark.parametrize(("field", "value", "words"), [*BOTH, *COMPLETIONS], ids=str)
def test_completion_fields(client: httpx.Client, field: str, value: Any, words: str) -> None:
    check_error(client.post("/v1/completions", json={"model": "fake", "prompt": "a", field: value}), 400, field, words)
    check_serves(client)


@pytest.mark.parametrize(("field", "value", "words"), [*BOTH, *CHAT], ids=str)
def test_chat_fields(client: httpx.Client, field: str, value: Any, words: str) -> None:
    check_error(client.post("/v1/chat/completions", json={"model": "fake", "messages": [USER], field: value}), 400, field, words)
    check_serves(client)


@pytest.mark.parametrize(("fields", "param", "words"), INSIDE, ids=[i[1] for i in INSIDE])
def test_places_inside_a_chat(client: httpx.Client, fields: dict[str, Any], param: str, words: str) -> None:
    check_error(client.post("/v1/chat/completions", json={"model": "fake", "messages": [USER], **fields}), 400, param, words)
    check_serves(client)


@pytest.mark.parametrize("chat", [False, True])
def test_values_that_ask_for_nothing_are_accepted(client: httpx.Client, chat: bool) -> None:
    nothing = {
        "n": 1, "presence_penalty": 0.0, "frequency_penalty": 0, "logit_bias": {}, "logprobs": False, "user": "me", "stop": [], "stream": False,
        "temperature": 1, "top_p": 1, "top_k": 4096,
        **({"parallel_tool_calls": True, "response_format": {"type": "text"}, "tools": [], "tool_choice": "auto", "max_completion_tokens": 2} if chat
           else {"echo": False, "best_of": 1})}
    fields = {"model": "fake", "max_tokens": 2, **({"messages": [USER]} if chat else {"prompt": "a"})}
    nulls = {**dict.fromkeys(nothing), "suffix": None} if not chat else {**dict.fromkeys(nothing), "top_logprobs": None}
    for extra in (nothing, {**nulls, "seed": None, "decode": None, "ignore_eos": None, "return_token_ids": None, "stream_options": None}):
        response = client.post("/v1/chat/completions" if chat else "/v1/completions", json={**fields, **extra})
        assert response.status_code == 200 and response.json()["usage"]["completion_tokens"] <= 2, response.text


@pytest.mark.parametrize("missing", ["model", "prompt"])
def test_missing_fields(client: httpx.Client, missing: str) -> None:
    given = {"model": "fake", "prompt": "a"}
    del given[missing]
    check_error(client.post("/v1/completions", json=given), 400, missing, f"{missing}: must be given.")


@pytest.mark.parametrize("bad", [-1, len(TOKENIZER), 2**70])
def test_token_ids_outside_the_vocabulary(client: httpx.Client, bad: int) -> None:
    check_error(client.post("/v1/completions", json={"model": "fake", "prompt": [1, 2, bad]}), 400, "prompt[2]",
                f"token ids lie in 0..{len(TOKENIZER) - 1}; got {bad}.")


# --- the body itself ---


RAW = [   # bytes, words of the message, param
    (b"", "not valid JSON", None),
    (b"{", "not valid JSON", None),
    (b'{"model": "fake",}', "not valid JSON", None),
    (b"{'model': 1}", "not valid JSON", None),
    (b"[]", "must be a JSON object; got [].", None),
    (b'"text"', 'must be a JSON object; got "text".', None),
    (b"null", "must be a JSON object; got null.", None),
    (b"1", "must be a JSON object; got 1.", None),
    (b'{"model": "fake", "prompt": "a", "temperature": NaN}', "NaN is no JSON number", None),
    (b'{"model": "fake", "prompt": "a", "temperature": Infinity}', "Infinity is no JSON number", None),
    (b'{"model": "fake", "prompt": "a", "temperature": -Infinity}', "-Infinity is no JSON number", None),
    (b'{"model": "fake", "prompt": "a", "temperature": 1e999}', "1e999 is beyond what a double holds", None),
    (b'{"model": "fake", "prompt": "a", "seed": 1' + b"0" * 5000 + b"}", "not valid JSON", None),
    (b'{"model": "fake", "prompt": "\xff"}', "must be UTF-8; byte 29 is not.", None),
    (b'{"model": "fake", "prompt": "\xed\xa0\x80"}', "must be UTF-8", None),
    (b'\xef\xbb\xbf{"model": "fake", "prompt": "a"}', "not valid JSON", None),
    (b'{"model": "fake", "prompt": "a\\ud83d"}', "prompt: half of a surrogate pair", "prompt"),
    (b'{"model": "fake", "prompt": "\\uDE00\\uD83D"}', "prompt: half of a surrogate pair", "prompt"),
    (b'{"model": "fake", "prompt": "a", "stop": ["b", "\\ud800"]}', "stop[1]: half of a surrogate pair", "stop[1]"),
    (b'{"model": "fake", "prompt": "a", "\\ud800": 1}', "half of a surrogate pair", "body"),
    (b'{"model": "fake", "prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply", None),
    (b'{"model": "fake", "prompt": ' + b"[" * 900 + b"]" * 900 + b"}", "must be a string or a list of token ids", "prompt"),
]


@pytest.mark.parametrize(("content", "words", "param"), RAW, ids=[str(r[0][:60]) for r in RAW])
def test_bodies(client: httpx.Client, content: bytes, words: str, param: str | None) -> None:
    response = client.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
    check_error(response, 400, param, words)
    check_serves(client)


def test_a_whole_surrogate_pair_is_a_character(client: httpx.Client) -> None:
    usage = [client.post("/v1/completions", content=b'{"model": "fake", "max_tokens": 1, "prompt": "%s"}' % p, headers={"Content-Type": kind}).json()["usage"]
             for p, kind in ((b"\\ud83d\\ude00", "application/json"), ("\U0001f600".encode(), "Application/JSON; charset=utf-8"))]
    assert usage[0] == usage[1] and usage[0]["prompt_tokens"] == len(TOKENIZER("\U0001f600")["input_ids"])


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "", "application/jsonp"])
def test_content_types(client: httpx.Client, kind: str) -> None:
    response = client.post("/v1/completions", content=b'{"model": "fake", "prompt": "a"}', headers={"Content-Type": kind})
    check_error(response, 400, None, f"must be application/json; got {kind or 'none'}.")


def test_a_body_of_the_limit_is_read_and_one_above_is_not(client: httpx.Client) -> None:
    headers = {"Content-Type": "application/json"}
    start, end = b'{"model": "other", "prompt": "', b'"}'
    fits = start + b"a" * (MAX_BODY_BYTES - len(start) - len(end)) + end
    check_error(client.post("/v1/completions", content=fits, headers=headers), 404, "model", "got 'other'", code="model_not_found")
    check_error(client.post("/v1/completions", content=fits + b" ", headers=headers), 413, None, f"at most {MAX_BODY_BYTES} bytes; got {len(fits) + 1} bytes.")
    check_serves(client)
    chunks = (fits[i:i + 2**20] for i in range(0, len(fits), 2**20))
    check_error(client.post("/v1/completions", content=(c for part in (chunks, [b" "]) for c in part), headers=headers), 413, None, "got more.")
    check_serves(client)


# --- paths, models, contexts ---


@pytest.mark.parametrize(("method", "path", "status", "code"), [
    ("GET", "/", 404, "not_found"), ("GET", "/v1", 404, "not_found"), ("POST", "/v1/embeddings", 404, "not_found"),
    ("GET", "/v1/models/", 404, "model_not_found"), ("GET", "/docs", 404, "not_found"),
    ("POST", "/v1/completions/", 404, "not_found"), ("GET", "/v1/models/other", 404, "model_not_found"),
    ("GET", "/v1/completions", 405, "method_not_allowed"), ("POST", "/health", 405, "method_not_allowed"), ("PUT", "/v1/models", 405, "method_not_allowed"),
])
def test_paths_and_methods(client: httpx.Client, method: str, path: str, status: int, code: str) -> None:
    response = client.request(method, path)
    check_error(response, status, "model" if code == "model_not_found" else None, "", code=code)
    assert ("allow" in response.headers) == (status == 405)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_another_model(client: httpx.Client, path: str) -> None:
    content = {"model": "gpt", **({"messages": [USER]} if "chat" in path else {"prompt": "a"})}
    check_error(client.post(path, json=content), 404, "model", "this server has 'fake'; got 'gpt'.", code="model_not_found")


@pytest.mark.parametrize(("prompt_tokens", "max_tokens", "fits"), [
    (MAX_LENGTH - 1, None, True), (MAX_LENGTH - 1, 1, True), (MAX_LENGTH - 1, 2, False), (MAX_LENGTH, None, False), (MAX_LENGTH, 1, False),
    (MAX_LENGTH + 100, None, False), (1, MAX_LENGTH - 1, True), (1, MAX_LENGTH, False), (1, 10**30, False),
])
def test_the_context_is_a_limit(client: httpx.Client, prompt_tokens: int, max_tokens: int | None, fits: bool) -> None:
    response = client.post("/v1/completions", json={"model": "fake", "prompt": [LETTER] * prompt_tokens, "max_tokens": max_tokens})
    if fits:
        assert response.status_code == 200 and response.json()["usage"]["total_tokens"] <= MAX_LENGTH
    else:
        check_error(response, 400, "prompt", f"must fit the model's context of {MAX_LENGTH} tokens; got {prompt_tokens} in the prompt",
                    code="context_length_exceeded")


def test_a_long_chat_does_not_fit(client: httpx.Client) -> None:
    response = client.post("/v1/chat/completions", json={"model": "fake", "messages": [{"role": "user", "content": "a " * 2000}]})
    check_error(response, 400, "messages", "Shorten the prompt.", code="context_length_exceeded")


# --- what breaks behind the door ---


def test_an_engine_error_is_500_and_the_others_go_on() -> None:
    with running(make_served(fails_at=40)) as up, httpx.Client(base_url=up.url) as http:
        for streaming in (False, True):
            broken = {"model": "fake", "prompt": [LETTER] * 41, "stream": streaming}
            check_error(http.post("/v1/completions", json=broken), 500, None, "ArithmeticError: a position that breaks the model")
        check_serves(http)
        late = http.post("/v1/completions", json={"model": "fake", "prompt": [LETTER] * 20, "stream": True, "max_tokens": 100, "ignore_eos": True})
        events = late.text.split("\n\n")
        assert late.status_code == 200 and events[-2:] == ["data: [DONE]", ""] and len(events) > 5
        assert "ArithmeticError" in json.loads(events[-3].removeprefix("data: "))["error"]["message"]
        check_error(http.post("/v1/completions", json={**broken, "prompt": [LETTER] * 20, "stream": False, "max_tokens": 100, "ignore_eos": True}), 500, None,
                    "ArithmeticError")
        check_serves(http)
        assert 'vllm:request_success_total{finished_reason="error",model_name="fake"} 4.0' in http.get("/metrics").text


class DyingTarget(FakeTarget):
    def read(self, *args: Any, **kwargs: Any) -> Any:
        raise SystemExit("the engine's thread ends")


class DyingExecutor(FakeExecutor):
    def open(self, *, one_column: bool = False) -> FakeTarget:
        return DyingTarget(max_length=MAX_LENGTH, step_s=0.0, fails_at=None)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_dead_engine_is_503() -> None:
    with running(make_served(executor=DyingExecutor())) as up, httpx.Client(base_url=up.url) as http:
        assert http.get("/health").status_code == 200
        up.engine.submit(Request(prompt=(1,), max_tokens=1, sampling=Sampling(), eos_ids=frozenset(), decode="plain"), lambda event: None)
        up.engine._thread.join(timeout=5)
        check_error(http.post("/v1/completions", json={"model": "fake", "prompt": "a"}), 503, None, "engine: not running (SystemExit")
        health = http.get("/health")
        assert health.status_code == 503 and health.json()["status"] == "down" and "Restart the server." in health.json()["error"]["message"]
        assert http.get("/metrics").status_code == 200


class BrokenTokenizer:
    """One that breaks at some text in encoding, and at some token in decoding."""

    def __init__(self) -> None:
        self.added_tokens_decoder, self.chat_template = TOKENIZER.added_tokens_decoder, None
        self.breaks = True

    def __len__(self) -> int:
        return len(TOKENIZER)

    def __call__(self, text: str, **options: Any) -> Any:
        if text == "breaks":
            raise ZeroDivisionError("a secret")
        return TOKENIZER(text, **options)

    def decode(self, tokens: list[int], **options: Any) -> str:
        if tokens and self.breaks:
            raise ZeroDivisionError("a secret")
        return TOKENIZER.decode(tokens, **options)


def test_a_bug_is_500_with_a_traceback_in_the_log_only(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = BrokenTokenizer()
    with running(make_served(tokenizer=tokenizer)) as up, httpx.Client(base_url=up.url) as http:
        check_error(http.post("/v1/completions", json={"model": "fake", "prompt": "breaks"}), 500, None, "internal error (ZeroDivisionError)")
        for streaming in (False, True):   # breaks where tokens become text, which is no handler's code
            response = http.post("/v1/completions", json={"model": "fake", "prompt": "a", "stream": streaming, "ignore_eos": True})
            check_error(response, 500, None, "internal error while writing the answer")
            assert "secret" not in response.text
        up.wait_idle()
        tokenizer.breaks = False
        check_serves(http)
    traced = [r for r in caplog.records if r.exc_info and r.exc_info[0] is ZeroDivisionError]
    assert [r.message for r in traced] == ["a request failed", "an answer failed", "an answer failed"]
