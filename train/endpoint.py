"""Responses from a server of the target: any that speaks OpenAI's completions, such as `kilotok serve`, vLLM and SGLang.

Prompts go out as token ids, so the chat template is applied once, here, and no server adds tokens of its own (what it counts is compared).
Answers come back as token ids where the server gives them (`return_token_ids`). Elsewhere the text is tokenized again, and an answer counts
only if that gives the text back and as many tokens as the server generated; the others are left out. Greedy answers of another engine
are the target's own up to its rounding, sampled ones are draws from the same distribution.
"""

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from .responses import Answers, Batch, wrong_tokens

ATTEMPTS = 6              # of a request that meets a broken connection, 429, 5xx or a torn answer
FIRST_PAUSE_S = 1.0       # doubled before every further attempt: half a minute in all
REQUEST_TIMEOUT_S = 1800.0   # an answer may wait for its turn and then be thousands of tokens long
CHAT_SERVERS = ("vllm", "sglang")   # owned_by of servers whose defaults of sampling come from the model's generation_config.json


@dataclass(frozen=True, kw_only=True)
class EndpointTarget:
    """What a server's answers are checked against."""

    sha256: str               # of the target's weights
    tokenizer: Any
    eos_ids: frozenset[int]
    max_length: int           # tokens of prompt and answer together
    vocab_size: int
    max_new_tokens: int


class Endpoint:
    """A server that answers batches of prompts; an `Answerer`.

    Errors: ValueError for a server without the model, of other weights, or that refuses or changes a prompt, and without the openai client;
        ConnectionError for one that cannot be reached, or fails ATTEMPTS times in a row.
    """

    def __init__(self, url: str, *, model: str | None, concurrency: int, target: EndpointTarget, say: Callable[[str], None]) -> None:
        try:
            import openai
        except ImportError as error:
            raise ValueError("data.endpoint: needs the openai client. Install kilotok[serve], or leave data.endpoint out.") from error
        self._openai, self.url, self.target, self.concurrency = openai, _base_url(url), target, concurrency
        self._client = openai.OpenAI(base_url=self.url, api_key=os.environ.get("OPENAI_API_KEY") or "none", max_retries=0, timeout=REQUEST_TIMEOUT_S)
        card = self._choose(model)
        self.model, self._owner = str(card["id"]), card.get("owned_by")
        limit = card.get("max_model_len")   # of vLLM and SGLang
        self._max_length = min(target.max_length, limit) if isinstance(limit, int) else target.max_length
        say(f"{self.url}: answers come from {self.model!r}; {self._check_weights()}")

    def __call__(self, batches: Sequence[Batch]) -> Iterator[Answers]:
        """The answers to each batch, in order; `concurrency` prompts are under way at any time, over the borders of batches."""
        pool = ThreadPoolExecutor(max_workers=self.concurrency, thread_name_prefix="endpoint")
        try:
            asked = [[pool.submit(self.answer, text, temperature=b.temperature, seed=b.seed(i)) for i, text in enumerate(b.texts)] for b in batches]
            for futures in asked:
                yield [f.result() for f in futures]
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def answer(self, prompt: Sequence[int], *, temperature: float, seed: int) -> list[int] | None:
        """Token ids of one answer, its end token kept; None when they cannot be told. Errors: as the class."""
        t = self.target
        body: dict[str, Any] = {
            "model": self.model, "prompt": list(prompt), "max_tokens": min(t.max_new_tokens, self._max_length - len(prompt)), "temperature": temperature,
            "top_p": 1.0, "top_k": t.vocab_size, "seed": seed, "return_token_ids": True}   # top_k: all, in a form that every server takes
        if body["max_tokens"] < 1:
            raise ValueError(f"data.endpoint: {self.url} has a context of {self._max_length} tokens, and a prompt has {len(prompt)}. "
                             "Serve the target with a longer one, or lower data.sequence_length.")
        if self._owner in CHAT_SERVERS:
            body |= {"repetition_penalty": 1.0, "min_p": 0.0, "skip_special_tokens": False, "spaces_between_special_tokens": False}
        reply = self._request("/completions", body=body)
        try:
            return self._tokens(reply, prompt=prompt)
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise ValueError(f"data.endpoint: {self.url} sent what is no completion ({type(error).__name__}: {error}): {json.dumps(reply):.200}. "
                             "Give the URL of an OpenAI-compatible server.") from error

    def _tokens(self, reply: dict[str, Any], *, prompt: Sequence[int]) -> list[int] | None:
        choice, usage, eos_ids = reply["choices"][0], reply.get("usage") or {}, self.target.eos_ids
        read = choice.get("prompt_token_ids")   # of vLLM and SGLang
        if usage.get("prompt_tokens", len(prompt)) != len(prompt) or (read is not None and read != list(prompt)):
            count = usage.get("prompt_tokens") if read is None else len(read)
            raise ValueError(f"data.endpoint: {self.url} read other tokens than were sent ({count} for {len(prompt)}): it adds some of its own, or takes ids "
                             "as text. Prompts are templated already: use a server that reads token ids as they are.")
        reason = choice["finish_reason"]
        if reason not in ("stop", "length"):
            raise ValueError(f"data.endpoint: {self.url} ended an answer with finish_reason {reason!r}; only stop and length are whole answers. "
                             "Look at the server's log.")
        ids = choice.get("token_ids")
        if ids is None:
            ids = (reply.get("kilotok") or {}).get("token_ids")
        told = ids is not None
        ids = self._told(ids) if told else self._tokenize(choice["text"])
        if ids is None:
            return None
        end = next((n + 1 for n, token in enumerate(ids) if token in eos_ids), None)
        if end is not None:
            return ids[:end]
        if reason == "stop":
            eos = self._end_token(choice)
            if eos is None:
                return None
            ids.append(eos)
        if not told and (count := usage.get("completion_tokens")) is not None and count not in {len(ids), len(ids) - (reason == "stop")}:
            return None   # the model wrote the same text in other tokens
        if not told and wrong_tokens(ids, vocab_size=self.target.vocab_size, longest=self.target.max_new_tokens) is not None:
            return None
        return self._told(ids) if told else ids

    def _told(self, ids: Any) -> list[int]:
        """The ids that the server sent. Errors: ValueError for what the target cannot have answered."""
        wrong = wrong_tokens(ids, vocab_size=self.target.vocab_size, longest=self.target.max_new_tokens)
        if wrong is not None:
            raise ValueError(f"data.endpoint: {self.url} sent an answer that {wrong}. Serve the target itself, with its own tokenizer; "
                             "nothing of this answer is stored.")
        return list(ids)

    def _tokenize(self, text: str) -> list[int] | None:
        tokenizer = self.target.tokenizer
        ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        back = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return ids if back == text else None

    def _end_token(self, choice: dict[str, Any]) -> int | None:
        """The token that ended an answer: the one that vLLM (stop_reason) or SGLang (matched_stop) names, else the only one there is."""
        eos_ids = self.target.eos_ids
        named = choice.get("stop_reason", choice.get("matched_stop"))
        if named is not None:
            return named if named in eos_ids else None
        if "stop_reason" in choice and self.target.tokenizer.eos_token_id in eos_ids:   # vLLM names all but the tokenizer's
            return int(self.target.tokenizer.eos_token_id)
        return next(iter(eos_ids)) if len(eos_ids) == 1 else None

    def _choose(self, name: str | None) -> dict[str, Any]:
        reply = self._request("/models")
        cards = reply.get("data") if isinstance(reply, dict) else None
        if not isinstance(cards, list) or not all(isinstance(c, dict) and "id" in c for c in cards):
            raise ValueError(f"data.endpoint: {self.url}/models is no list of models: {json.dumps(reply):.200}. Give the URL of an OpenAI-compatible server.")
        names = [str(c["id"]) for c in cards]
        if name is None and len(names) != 1:
            raise ValueError(f"data.endpoint_model: {self.url} serves {len(names)} models: {', '.join(names) or 'none'}. Name the one that is the target.")
        if name is not None and name not in names:
            raise ValueError(f"data.endpoint_model: {self.url} does not serve {name!r}; it has {', '.join(names) or 'none'}. Name one of these, or null.")
        card: dict[str, Any] = cards[0 if name is None else names.index(name)]
        return card

    def _check_weights(self) -> str:
        """`kilotok serve` tells the hash of its weights; no other server does. Errors: ValueError for other weights than the target's."""
        mine = self.target.sha256
        if self._owner != "kilotok":
            return f"NOT CHECKED: that it is the target (weights {mine[:12]}); this server tells no hash of its weights"
        theirs = self._request(f"{self.url.removesuffix('/v1')}/health").get("weights_sha256")
        if theirs is None:
            return f"NOT CHECKED: that it is the target (weights {mine[:12]}); its /health names no weights_sha256"
        if theirs != mine:
            raise ValueError(f"data.endpoint: {self.url} serves weights {theirs[:12]}; the target has {mine[:12]}. A draft learns from the model that it "
                             "drafts for: serve the target.")
        return f"it has the target's weights ({mine[:12]})"

    def _request(self, path: str, *, body: dict[str, Any] | None = None) -> Any:
        """The reply as JSON, after as many attempts as it takes; a POST when there is a body."""
        errors, pause, trouble = self._openai, FIRST_PAUSE_S, ""
        for attempt in range(ATTEMPTS):
            if attempt:
                time.sleep(pause)
                pause *= 2
            try:
                text = self._client.get(path, cast_to=str) if body is None else self._client.post(path, body=body, cast_to=str)
                return json.loads(text)
            except errors.APIStatusError as error:
                trouble = f"status {error.status_code}: {error.response.text:.300}"
                if error.status_code < 500 and error.status_code != 429:
                    raise ValueError(f"data.endpoint: {self.url} refused {path}: {trouble}") from error
            except (errors.APIConnectionError, json.JSONDecodeError) as error:
                trouble = f"{type(error).__name__}: {error.__cause__ or error}"
        raise ConnectionError(f"data.endpoint: {self.url} failed {ATTEMPTS} times in a row, the last time with {trouble}. "
                              "Start the server and run again: finished batches are kept.")


def _base_url(url: str) -> str:
    """The URL as given, without a slash at its end; /v1 is added to a bare host. Errors: ValueError for what is no http URL."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ValueError(f"data.endpoint: must be a URL such as http://127.0.0.1:8000/v1; got {url!r}.")
    return url.rstrip("/") + ("" if parts.path.strip("/") else "/v1")
