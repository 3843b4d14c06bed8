"""One request on its way through the engine, as the event loop sees it.

The engine calls from its own thread; `call_soon_threadsafe` brings each event to the loop, which turns tokens into text,
looks for stop strings and counts, whether or not the client keeps up. An answer ends after the token that completes a stop
string: the rest of its round is dropped, so text, usage and token ids do not depend on how the tokens were drafted.
"""

import asyncio
import dataclasses
import logging
import time
from collections.abc import AsyncIterator
from typing import Any, Literal

from ...dflash.generate import Round
from ..engine import Engine, Event, Finished, Request
from .errors import ApiError
from .metrics import Metrics
from .text import Detokenizer, StopStrings

logger = logging.getLogger(__name__)


class Generation:
    """A submitted request and what came of it so far.

    Made on the event loop. Errors: ApiError 400 and 503 from the engine's own checks.
    """

    def __init__(self, request: Request, *, engine: Engine, tokenizer: Any, stops: tuple[str, ...], metrics: Metrics, arrived: float) -> None:
        self.prompt_tokens = len(request.prompt)
        self.token_ids: list[int] = []
        self.rounds: list[Round] = []
        self.finish_reason: Literal["stop", "length"] | None = None
        self._over = False
        self._error: ApiError | None = None
        self._metrics, self._arrived, self._last = metrics, arrived, arrived
        self._detokenizer, self._stops = Detokenizer(tokenizer), StopStrings(stops)
        self._out: asyncio.Queue[str | None] = asyncio.Queue()   # None ends it
        self._started = asyncio.Event()
        loop = asyncio.get_running_loop()

        def to_loop(event: Event) -> None:
            loop.call_soon_threadsafe(self._on_event, event, time.perf_counter())

        try:
            self._ticket = engine.submit(request, to_loop)
        except ValueError as error:
            raise ApiError(400, str(error)) from error
        except RuntimeError as error:
            raise ApiError(503, str(error)) from error

    @property
    def num_drafted(self) -> int:
        return sum(r.num_drafted for r in self.rounds)

    @property
    def num_accepted(self) -> int:
        return sum(r.num_accepted for r in self.rounds)

    async def started(self) -> None:
        """Returns with the first token. Errors: as `deltas`, when there will be none."""
        await self._started.wait()
        if self._error is not None and not self.token_ids:
            raise self._error

    async def deltas(self) -> AsyncIterator[str]:
        """Pieces of the text, none empty; `finish_reason` is set after the last.

        Errors: ApiError 500 when the engine fails, 503 when the server stops.
        """
        while (item := await self._out.get()) is not None:
            yield item
        if self._error is not None:
            raise self._error

    def cancel(self, why: str) -> None:
        """Stop generating, unless it is over; whoever still reads the text is told why."""
        if not self._over:
            self._end("abort", error=ApiError(503, why))

    def _on_event(self, event: Event, now: float) -> None:
        if self._over:   # a round that was under way when we stopped
            return
        try:
            if isinstance(event, Finished):
                self._on_finished(event)
            else:
                self._on_round(event, now)
        except Exception:   # nobody awaits a callback: without this the client would wait for ever
            logger.exception("an answer failed")
            self._end("error", error=ApiError(500, "internal error while writing the answer; the server's log has the details."))

    def _on_round(self, done: Round, now: float) -> None:
        text, count, hit = "", 0, False
        ended_by = len(done.tokens) if done.stopped else None   # the end token is no text, special or not
        for count, token in enumerate(done.tokens, start=1):
            piece, hit = self._stops.push("" if count == ended_by else self._detokenizer.push(token))
            text += piece
            if hit:
                done = dataclasses.replace(done, tokens=done.tokens[:count], num_accepted=min(done.num_accepted, count))
                break
        self.token_ids.extend(done.tokens)
        self.rounds.append(done)
        if done.is_prefill:
            self._metrics.prefilled(prompt_tokens=self.prompt_tokens, since_arrival_s=now - self._arrived)
        else:
            self._metrics.decoded(done, took_s=now - self._last)
        self._last = now
        self._started.set()
        self._put(text)
        if hit:
            self._end("stop")

    def _on_finished(self, event: Finished) -> None:
        if event.reason == "error":
            logger.error("the engine failed at a request: %s", event.error)
            self._end("error", error=ApiError(500, f"engine: {event.error}."))
        elif event.reason == "cancelled":
            self._end("abort", error=ApiError(503, "the server is stopping."))
        else:
            text, hit = self._stops.push(self._detokenizer.flush())
            self._put(text if hit else text + self._stops.flush())
            self._end("stop" if hit else event.reason)

    def _put(self, text: str) -> None:
        if text:
            self._out.put_nowait(text)

    def _end(self, reason: Literal["stop", "length", "abort", "error"], *, error: ApiError | None = None) -> None:
        self._over, self._error = True, error
        self._ticket.cancel()   # without effect on one that is done
        if reason == "stop" or reason == "length":
            self.finish_reason = reason
        self._metrics.ended(reason, since_arrival_s=time.perf_counter() - self._arrived)
        self._out.put_nowait(None)
        self._started.set()
