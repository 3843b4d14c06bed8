"""Runs the server: a socket bound early, the engine, uvicorn, and a clean end."""

import asyncio
import contextlib
import errno
import signal
import socket
import threading
from collections.abc import Iterator

import uvicorn

from .engine import Engine
from .server.app import create_app
from .server.served import Served

GRACE_S = 3.0        # answers under way may take so long after a signal to stop
FORCED_AFTER_S = 5   # then connections are dropped whose clients do not read


def bind(host: str, port: int) -> socket.socket:
    """A socket that holds the address; nobody can connect before `serve`. Port 0 picks a free one.

    Errors: OSError for a port in use or an address that is not ours; ValueError for a port that is none.
    """
    if not 0 <= port < 2**16:
        raise ValueError(f"port: must lie in 0..65535; got {port}.")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except socket.gaierror as error:
        raise OSError(f"host: must be a name or an address of this machine; got {host!r} ({error.strerror}).") from error
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)   # else a restart waits a minute for the old connections
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise _bind_error(error, host, port) from error
    return sock


def serve(served: Served, *, sock: socket.socket, max_running: int = 8) -> None:
    """Serve on a socket of `bind` until SIGINT or SIGTERM; prints one line on stdout as soon as clients can connect.

    Errors: OSError if another process took the port since `bind`.
    """
    if max_running < 1:
        raise ValueError(f"max_running: must be at least 1; got {max_running}.")
    host, port = sock.getsockname()[:2]
    try:
        sock.listen()   # of two that are bound to a port, this is where the second fails
    except OSError as error:
        raise _bind_error(error, host, port) from error
    engine = Engine(served.executor, make_drafter=served.make_drafter, max_running=max_running)
    app = create_app(served, engine=engine)
    config = uvicorn.Config(app, log_level="warning", access_log=False, http="h11", ws="none", loop="asyncio", lifespan="off",
                            timeout_graceful_shutdown=FORCED_AFTER_S)
    try:
        _Server(config, url=f"http://{f'[{host}]' if ':' in host else host}:{port}").run(sockets=[sock])
    finally:
        engine.close()
        sock.close()


class _Server(uvicorn.Server):
    """uvicorn's server that says when it listens, and takes a signal for a wish to end, not for a failure."""

    def __init__(self, config: uvicorn.Config, *, url: str) -> None:
        super().__init__(config)
        self._url = url

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self.started:
            print(f"kilotok serve: listening on {self._url}", flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        app = self.config.app
        timer = asyncio.get_running_loop().call_later(GRACE_S, app.state.service.stop)  # type: ignore[union-attr]
        await super().shutdown(sockets=sockets)
        timer.cancel()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's, which in the end raises the signal again and so ends the process with its number."""
        if threading.current_thread() is not threading.main_thread():
            yield   # signals go to the main thread; whoever runs us sets should_exit
            return
        previous = {s: signal.signal(s, self.handle_exit) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def _bind_error(error: OSError, host: str, port: int) -> OSError:
    if error.errno == errno.EADDRINUSE:
        return OSError(f"port: {port} on {host} is in use. Choose another, or 0 for any that is free.")
    return OSError(f"address: cannot listen on {host}:{port}: {error.strerror}.")
