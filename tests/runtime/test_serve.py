"""`serve`: an address that is claimed early, one line when it listens, and a clean end."""

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import httpx
import pytest
from served_fake import make_served

from kilotok.runtime import serve as module
from kilotok.runtime.serve import bind, serve

T = TypeVar("T")
LONG = {"model": "fake", "prompt": "a", "max_tokens": 250, "ignore_eos": True, "decode": "plain"}   # 12 s at 50 ms a token


def while_serving(capsys: pytest.CaptureFixture[str], client: Callable[[str], T]) -> T:
    """Serve in this thread until the client, in another, has sent a signal to the process; its result once both are done."""
    before = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}

    def run() -> T:
        end = time.monotonic() + 10
        while time.monotonic() < end:
            try:
                assert httpx.get(f"{url}/health").json()["status"] == "ok"
                break
            except httpx.ConnectError:
                time.sleep(0.02)
        return client(url)

    with bind("127.0.0.1", 0) as sock, ThreadPoolExecutor(1) as pool:
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        result = pool.submit(run)
        serve(make_served(step_s=0.05), sock=sock)
        assert capsys.readouterr() == (f"kilotok serve: listening on {url}\n", "")
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")
    assert before == {s: signal.getsignal(s) for s in before}
    assert not [t for t in threading.enumerate() if t.name == "engine"]
    return result.result()


def stop(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_idle_server_ends_at_once(number: signal.Signals, capsys: pytest.CaptureFixture[str]) -> None:
    start = time.monotonic()
    while_serving(capsys, lambda url: stop(number))
    assert time.monotonic() - start < module.GRACE_S


def test_answers_that_take_longer_than_the_grace_end_with_an_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(module, "GRACE_S", 0.5)

    def client(url: str) -> tuple[list[str], httpx.Response, float]:
        with ThreadPoolExecutor(1) as pool, httpx.stream("POST", f"{url}/v1/completions", json={**LONG, "stream": True}, timeout=20) as response:
            whole = pool.submit(httpx.post, f"{url}/v1/completions", json=LONG, timeout=20)
            events = response.iter_lines()
            assert json.loads(next(events).removeprefix("data: "))["choices"]
            time.sleep(0.2)
            stop(signal.SIGTERM)
            start = time.monotonic()
            lines = [line for line in events if line]
            return lines, whole.result(), time.monotonic() - start

    lines, whole, took_s = while_serving(capsys, client)
    assert 0.4 < took_s < 4
    assert lines[-1] == "data: [DONE]" and json.loads(lines[-2].removeprefix("data: "))["error"]["message"] == "the server is stopping."
    assert whole.status_code == 503 and whole.json()["error"]["message"] == "the server is stopping."


def test_an_answer_within_the_grace_is_completed(capsys: pytest.CaptureFixture[str]) -> None:
    def client(url: str) -> httpx.Response:
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(httpx.post, f"{url}/v1/completions", json={**LONG, "max_tokens": 12}, timeout=20)
            time.sleep(0.2)
            stop(signal.SIGTERM)
            return answer.result()

    assert while_serving(capsys, client).json()["usage"]["completion_tokens"] == 12


def test_a_port_in_use_is_named() -> None:
    with bind("127.0.0.1", 0) as first:
        first.listen()
        port = first.getsockname()[1]
        with pytest.raises(OSError, match=rf"^port: {port} on 127\.0\.0\.1 is in use\. Choose another, or 0 for any that is free\.$"):
            bind("127.0.0.1", port)


def test_a_port_that_another_took_meanwhile_is_named() -> None:
    with bind("127.0.0.1", 0) as first, bind("127.0.0.1", first.getsockname()[1]) as second:
        first.listen()
        with pytest.raises(OSError, match="is in use"):
            serve(make_served(), sock=second)


def test_nobody_connects_before_serve() -> None:
    with bind("127.0.0.1", 0) as sock, pytest.raises(ConnectionRefusedError):
        socket.create_connection(sock.getsockname(), timeout=2)


@pytest.mark.parametrize(("host", "port", "error", "words"), [
    ("127.0.0.1", -1, ValueError, r"^port: must lie in 0\.\.65535; got -1"), ("127.0.0.1", 65536, ValueError, "got 65536"),
    ("no.such.host.invalid", 0, OSError, r"^host: must be a name or an address of this machine; got 'no\.such\.host\.invalid'"),
    ("192.0.2.1", 0, OSError, r"^address: cannot listen on 192\.0\.2\.1:0: "),
])
def test_addresses_that_cannot_be_bound(host: str, port: int, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        bind(host, port)


def test_max_running_must_be_one_at_least() -> None:
    with bind("127.0.0.1", 0) as sock, pytest.raises(ValueError, match=r"^max_running: must be at least 1; got 0"):
        serve(make_served(), sock=sock, max_running=0)
