"""The server as a subprocess, and one streamed request to it with the public `openai` client.

Times are taken at the client, so they hold what a user waits for: HTTP, tokenizer and JSON included.
"""

import contextlib
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, TypeVar

from ...dflash.generate import Round
from .prompts import Prompt

READY = "listening on "
START_TIMEOUT_S = 1800.0      # reading 60 GB of weights from a slow disk
REQUEST_TIMEOUT_S = 1800.0    # one answer of a large model on a CPU
STOP_TIMEOUT_S = 30.0
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One measured request."""

    prompt_id: str
    domain: str
    mode: str
    prompt_tokens: int
    token_ids: tuple[int, ...]
    rounds: tuple[Round, ...]     # the first is the prefill
    first_text_tokens: int        # tokens that came with the first text; more than one when the very first has no text of its own
    first_token_s: float          # from sending the request to its first text
    last_token_s: float           # from sending the request to its last token
    total_s: float                # from sending the request to the end of the stream
    finish_reason: str

    @property
    def decode_tokens(self) -> int:
        """Tokens that came after the first text, in decode_s."""
        return len(self.token_ids) - self.first_text_tokens

    @property
    def decode_s(self) -> float:
        return self.last_token_s - self.first_token_s


class Server:
    """A running server: its process, its address, its last words."""

    def __init__(self, process: subprocess.Popen[str], *, url: str, errors: TextIO) -> None:
        self.process, self.url, self._errors = process, url, errors

    def require_alive(self, *, while_doing: str) -> None:
        """RuntimeError with the end of the server's stderr when it has exited."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=1)   # a connection breaks a moment before the process is gone
        if self.process.returncode is not None:
            raise RuntimeError(f"server: must run until it is stopped; it ended with status {self.process.returncode} {while_doing}. "
                               f"Its last words: {_tail(self._errors)}")


@contextlib.contextmanager
def start_server(command: Sequence[str], *, timeout_s: float = START_TIMEOUT_S) -> Iterator[Server]:
    """Run `command` until the block ends, however it ends; SIGTERM to this process ends the block too.

    Errors: RuntimeError with the command's stderr when it exits before it is ready, or is not ready in time.
    """
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors, _sigterm_unwinds():
        process = subprocess.Popen(list(command), stdout=subprocess.PIPE, stderr=errors, text=True, encoding="utf-8", errors="replace")
        try:
            yield Server(process, url=_wait_until_ready(process, errors=errors, timeout_s=timeout_s), errors=errors)
        finally:
            process.terminate()
            try:
                process.wait(timeout=STOP_TIMEOUT_S)
            except BaseException:   # it hangs, or the user is in a hurry: it must not be left behind
                process.kill()
                process.wait()
                raise


def _wait_until_ready(process: subprocess.Popen[str], *, errors: TextIO, timeout_s: float) -> str:
    found: list[str] = []
    ready_or_ended = threading.Event()

    def drain() -> None:   # to the end: a full pipe would stop the server
        assert process.stdout is not None, "stdout was asked for"
        for line in process.stdout:
            if READY in line and not found:
                found.append(line.partition(READY)[2].strip())
                ready_or_ended.set()
        ready_or_ended.set()

    threading.Thread(target=drain, name="server-stdout", daemon=True).start()
    if not ready_or_ended.wait(timeout_s):
        raise RuntimeError(f"server: must say '{READY}...' within {timeout_s:.0f} s; it did not. Its last words: {_tail(errors)}")
    if not found:
        process.wait()
        raise RuntimeError(f"server: did not start (status {process.returncode}). Its last words: {_tail(errors)}")
    return found[0]


def _tail(errors: TextIO) -> str:
    errors.flush()
    errors.seek(0)
    return errors.read().strip()[-2000:] or "none"


@contextlib.contextmanager
def _sigterm_unwinds() -> Iterator[None]:
    """SIGTERM raises SystemExit, so that `finally` blocks run; without this the server would be left behind."""
    if threading.current_thread() is not threading.main_thread():
        yield   # only the main thread may set handlers
        return
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


class Client:
    """Asks one server, one request at a time. has_text: whether tokens have text to show, as the model's tokenizer sees it."""

    def __init__(self, server: Server, *, has_text: Callable[[Sequence[int]], bool]) -> None:
        import openai

        self._server, self._openai, self._has_text = server, openai, has_text
        self._http = openai.DefaultHttpxClient(trust_env=False)   # the server is on this machine: no proxy of the environment
        self._transport_error = _transport_error(self._http)
        self._client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=REQUEST_TIMEOUT_S, http_client=self._http)
        self.model = self._guarded(lambda: self._client.models.list().data[0].id, while_doing="when asked for its models")

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def health(self) -> Any:
        """What GET /health says."""
        return self._guarded(lambda: self._http.get(f"{self._server.url}/health").raise_for_status().json(), while_doing="when asked for its health")

    def ask(self, prompt: Prompt, *, mode: str, fields: Mapping[str, Any], extensions: Mapping[str, Any]) -> Answer:
        """Send one request and time its stream.

        Errors: ValueError when the server refuses the prompt, RuntimeError when it fails, dies, or breaks its own contract.
        """
        return self._guarded(lambda: self._ask(prompt, mode=mode, fields=fields, extensions=extensions),
                             while_doing=f"while answering {prompt.id} ({mode})", prompt_id=prompt.id)

    def _guarded(self, call: Callable[[], Result], *, while_doing: str, prompt_id: str | None = None) -> Result:
        try:
            return call()
        except self._openai.APIStatusError as error:
            message = str(error.body.get("message", error.message) if isinstance(error.body, dict) else error.message)
            if prompt_id is not None and 400 <= error.status_code < 500:
                raise ValueError(f"prompt {prompt_id}: the server refuses it ({message}) Change or remove this row of the prompts.") from error
            raise RuntimeError(f"server: failed {while_doing}: {message}") from error
        except (self._openai.APIError, OSError, self._transport_error) as error:
            self._server.require_alive(while_doing=while_doing)
            raise RuntimeError(f"server: failed {while_doing}: {type(error).__name__}: {error}") from error

    def _ask(self, prompt: Prompt, *, mode: str, fields: Mapping[str, Any], extensions: Mapping[str, Any]) -> Answer:
        body: dict[str, Any] = {"model": self.model, "stream": True, "stream_options": {"include_usage": True}, **fields,
                                "extra_body": {"return_token_ids": True, **extensions}}
        if prompt.prompt is not None:
            body["prompt"] = prompt.prompt
        else:
            body["messages"] = list(prompt.messages or ())
            if prompt.tools is not None:
                body["tools"] = list(prompt.tools)
        create: Any = self._client.completions.create if prompt.prompt is not None else self._client.chat.completions.create
        first = last = None
        finish = usage = None
        said: dict[str, Any] = {}
        began = time.perf_counter()
        for chunk in create(**body):
            now = time.perf_counter() - began
            said.update((chunk.model_extra or {}).get("kilotok") or {})
            usage = chunk.usage or usage
            if chunk.choices:
                finish = chunk.choices[0].finish_reason or finish
                if first is None and (_text(chunk.choices[0]) or finish):
                    first = now
                last = now
        total = time.perf_counter() - began
        if finish is None:
            self._server.require_alive(while_doing=f"while answering {prompt.id} ({mode})")   # a closed connection looks like the end of a stream
        if first is None or last is None or finish is None or usage is None or not {"token_ids", "rounds", "decode", "seed"} <= set(said):
            raise RuntimeError(f"server: a stream must end with finish_reason, token_ids, rounds and usage; the answer to {prompt.id} ({mode}) has "
                               f"finish_reason {finish!r}, usage {usage is not None}, and of ours {sorted(said)}. This server speaks another protocol.")
        for name, asked in (*extensions.items(), ("seed", fields.get("seed"))):
            if asked is not None and said.get(name) != asked:
                raise RuntimeError(f"server: must run what it is asked to; {prompt.id} asked for {name} {asked!r} and got {said.get(name)!r}. "
                                   "Figures under the wrong name are worse than none.")
        ids = tuple(int(i) for i in said["token_ids"])
        if usage.completion_tokens != len(ids):
            raise RuntimeError(f"server: usage must count the tokens; {prompt.id} ({mode}) has {len(ids)} ids and usage says {usage.completion_tokens}.")
        rounds = rounds_of(said["rounds"], token_ids=ids, where=f"{prompt.id} ({mode})")
        return Answer(prompt_id=prompt.id, domain=prompt.domain, mode=mode, prompt_tokens=usage.prompt_tokens, token_ids=ids, rounds=rounds,
                      first_text_tokens=first_text_tokens(rounds, has_text=self._has_text), first_token_s=first, last_token_s=last, total_s=total,
                      finish_reason=finish)


def rounds_of(counts: Sequence[Sequence[int]], *, token_ids: Sequence[int], where: str) -> tuple[Round, ...]:
    """Rounds as the decode loop made them, from [num_drafted, num_accepted, num_tokens], of trees also num_positions, and the tokens.

    Errors: RuntimeError when the counts cannot be those of a decode loop.
    """
    rounds: list[Round] = []
    start = 0
    for i, (drafted, accepted, count, *positions) in enumerate(counts):
        most = min([drafted, *positions])
        possible = (drafted, accepted, count) == (0, 0, 1) if i == 0 else 1 <= count <= most + 1 and count - 1 <= accepted <= min(count, most)
        if not possible:
            raise RuntimeError(f"server: {where}: round {i} cannot have {drafted} drafted, {accepted} accepted and {count} tokens. "
                               "This is a bug of the server.")
        rounds.append(Round(tokens=tuple(token_ids[start:start + count]), num_drafted=drafted, num_accepted=accepted, is_prefill=i == 0,
                            num_positions=positions[0] if positions else None))
        start += count
    if start != len(token_ids) or not rounds:
        raise RuntimeError(f"server: {where}: rounds must add up to the tokens; got {start} in rounds and {len(token_ids)} ids. This is a bug of the server.")
    return tuple(rounds)


def first_text_tokens(rounds: Sequence[Round], *, has_text: Callable[[Sequence[int]], bool]) -> int:
    """Tokens up to the end of the first round that makes text visible; all, when none does.

    A special token and a part of a character have no text, so their round sends nothing. Counting its tokens as decoded after the
    first text would flatter long rounds, that is, drafts.
    """
    ids: list[int] = []
    for r in rounds:
        ids += r.tokens
        if has_text(ids):
            break
    return len(ids)


def has_text_by(tokenizer: Any) -> Callable[[Sequence[int]], bool]:
    """Whether tokens show text: special ones have none, and an incomplete character at the end is not shown yet."""
    return lambda ids: bool(tokenizer.decode(list(ids), skip_special_tokens=True).rstrip("\ufffd"))


def _text(choice: Any) -> str:
    """The text of a chunk of either endpoint."""
    delta = getattr(choice, "delta", None)
    return (choice.text if delta is None else delta.content) or ""


def _transport_error(http: Any) -> type[Exception]:
    """What the HTTP library that this openai client is built on (httpx or its successor) raises when a stream breaks."""
    library = sys.modules[type(http).__mro__[1].__module__.partition(".")[0]]
    error: type[Exception] = library.HTTPError
    return error


def serve_command(out: Path, *, device: str, executor: str, threads: int | None) -> list[str]:
    """The server of this installation, on a free port."""
    command = [sys.executable, "-m", "kilotok.runtime.cli", "serve", str(out), "--port", "0", "--device", device, "--executor", executor]
    return command if threads is None else [*command, "--threads", str(threads)]
