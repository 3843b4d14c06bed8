"""The HTTP application: routes, and the way of a request from its body to an answer."""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import ValidationError

from ...dflash.sampling import Sampling
from ..engine import Engine
from ..engine import Request as EngineRequest
from .answers import DONE, Answer, event
from .body import read_object
from .draft_metrics import drafting_health
from .errors import ApiError, from_validation
from .generation import Generation
from .metrics import Metrics
from .prompt import encode_prompt, fit_tokens
from .schemas import ChatRequest, CompletionRequest
from .served import Served

ENDPOINTS = "GET /v1/models, POST /v1/completions, POST /v1/chat/completions, GET /health, GET /metrics"
MAX_DRAWN_SEED = 2**31 - 1   # every JSON client keeps such a number exactly, and so can send it back
AnyRequest = TypeVar("AnyRequest", CompletionRequest, ChatRequest)
T = TypeVar("T")
logger = logging.getLogger(__name__)


class Service:
    """Answers requests with one engine."""

    def __init__(self, served: Served, *, engine: Engine) -> None:
        self.served, self.engine = served, engine
        self.metrics = Metrics(model_name=served.name, engine=engine, executor=str(served.description["executor"]))
        self._created = int(time.time())
        self._live: set[Generation] = set()
        self._encoding = ThreadPoolExecutor(max_workers=1, thread_name_prefix="encoding")   # one: a tokenizer has settings that a call may change

    async def answer(self, request: Request, schema: type[AnyRequest]) -> Response:
        """A completion or a chat, whole or as a stream."""
        try:
            return await self._answer(request, schema)
        except ApiError:
            raise
        except Exception as error:   # left to uvicorn, it would cost the client its connection
            logger.exception("a request failed")
            raise ApiError(500, f"internal error ({type(error).__name__}); the server's log has the details.") from error

    async def _answer(self, request: Request, schema: type[AnyRequest]) -> Response:
        arrived = time.perf_counter()
        body = _validated(schema, await read_object(request))
        self.check_model(body.model)
        generation, answer = await self._submit(body, arrived=arrived)
        if not body.stream:
            try:
                text = await _while_connected(request, generation, _joined(generation))
            finally:
                self._leave(generation)
            return JSONResponse(answer.whole(generation, text))
        try:   # the status goes out with the first byte: an engine that fails at the prompt should still answer 500
            await _while_connected(request, generation, generation.started())
        except BaseException:
            self._leave(generation)
            raise
        return _EventStream(_events(generation, answer), on_end=lambda: self._leave(generation))

    def check_model(self, name: str) -> None:
        if name != self.served.name:
            raise ApiError(404, f"model: this server has {self.served.name!r}; got {name!r}.", param="model", code="model_not_found")

    def model_card(self) -> dict[str, Any]:
        return {"id": self.served.name, "object": "model", "created": self._created, "owned_by": "kilotok"}

    def health(self) -> JSONResponse:
        failure = self.engine.failure
        if failure is not None:
            return JSONResponse({"status": "down", **ApiError(503, f"engine: {failure}. Restart the server.").body}, status_code=503)
        return JSONResponse({**self.served.description, "drafting": drafting_health(self.engine.speculation.state()), "status": "ok",
                             "num_running": self.engine.num_running, "num_waiting": self.engine.num_waiting})

    def stop(self) -> None:
        """End every answer under way with an error."""
        for generation in tuple(self._live):
            generation.cancel("the server is stopping.")

    async def _submit(self, body: CompletionRequest | ChatRequest, *, arrived: float) -> tuple[Generation, Answer]:
        served = self.served
        if body.decode in ("draft", "tree") and served.make_drafter is None:
            raise ApiError(400, f"decode: {body.decode!r} needs a draft head, and this server runs without one. Leave the field out.", param="decode")
        decode = body.decode or served.decode
        if body.tree_budget is not None and decode != "tree":
            raise ApiError(400, f"tree_budget: only with decode 'tree'; this request's is {decode!r}. Set it, or leave the budget out.", param="tree_budget")
        tree_budget = body.tree_budget or served.tree_budget if decode == "tree" else None
        if body.draft_length is not None and decode not in ("draft", "tree"):
            raise ApiError(400, f"draft_length: only with decode 'draft' or 'tree'; this request's is {decode!r}. Set it, or leave the length out.",
                           param="draft_length")
        draft_length = (served.draft_length if body.draft_length is None else body.draft_length) if decode in ("draft", "tree") else None
        prompt = await asyncio.get_running_loop().run_in_executor(self._encoding, encode_prompt, served.tokenizer, body)
        max_tokens = fit_tokens(body, prompt_tokens=len(prompt), max_length=served.max_length)
        seed = secrets.randbelow(MAX_DRAWN_SEED + 1) if body.seed is None else body.seed
        try:
            sampling = Sampling(temperature=body.temperature, top_p=body.top_p, top_k=body.top_k, seed=seed)
        except ValueError as error:
            raise ApiError(400, str(error), param=str(error).partition(":")[0]) from error
        request = EngineRequest(
            prompt=prompt, max_tokens=max_tokens, eos_ids=frozenset() if body.ignore_eos else served.eos_ids, decode=decode, sampling=sampling,
            tree_budget=tree_budget, draft_length=draft_length, domain=body.domain)
        generation = Generation(request, engine=self.engine, tokenizer=served.tokenizer, stops=body.stop, metrics=self.metrics, arrived=arrived)
        self._live.add(generation)
        include_usage = body.stream_options is not None and body.stream_options.include_usage
        return generation, Answer(chat=isinstance(body, ChatRequest), model=served.name, fingerprint=served.fingerprint, seed=seed, decode=decode,
                                  tree_budget=tree_budget, draft_length=draft_length, domain=body.domain, include_usage=include_usage,
                                  return_token_ids=body.return_token_ids)

    def _leave(self, generation: Generation) -> None:
        generation.cancel("the client left.")   # without effect on a complete answer
        self._live.discard(generation)


def create_app(served: Served, *, engine: Engine) -> FastAPI:
    """The application; `app.state.service.stop()` ends the answers under way. The engine stays the caller's to close."""
    app = FastAPI(title="kilotok", openapi_url=None, redirect_slashes=False)
    service = app.state.service = Service(served, engine=engine)

    @app.post("/v1/completions", response_model=None)
    async def completions(request: Request) -> Response:
        return await service.answer(request, CompletionRequest)

    @app.post("/v1/chat/completions", response_model=None)
    async def chat_completions(request: Request) -> Response:
        return await service.answer(request, ChatRequest)

    @app.get("/v1/models", response_model=None)
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [service.model_card()]})

    @app.get("/v1/models/{name:path}", response_model=None)
    async def model(name: str) -> Response:
        service.check_model(name)
        return JSONResponse(service.model_card())

    @app.get("/health", response_model=None)
    async def health() -> Response:
        return service.health()

    @app.get("/metrics", response_model=None)
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(404, _on_unknown_path)
    app.add_exception_handler(405, _on_wrong_method)
    app.add_exception_handler(Exception, _on_bug)
    return app


class _EventStream(StreamingResponse):
    """Server-sent events; `on_end` is called however the sending ends, also if it never began."""

    def __init__(self, events: AsyncIterator[str], *, on_end: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._on_end = on_end

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_end()


async def _events(generation: Generation, answer: Answer) -> AsyncIterator[str]:
    try:
        if answer.chat:
            yield event(answer.opening())
        async for text in generation.deltas():
            yield event(answer.delta(text))
        yield event(answer.closing(generation))
        if answer.include_usage:
            yield event(answer.usage(generation))
    except ApiError as error:
        yield event(error.body)   # the status went out long ago; OpenAI's clients raise on this event
    except Exception:
        logger.exception("a stream failed")
        yield event(ApiError(500, "internal error; the server's log has the details.").body)
    yield DONE


async def _joined(generation: Generation) -> str:
    return "".join([text async for text in generation.deltas()])


async def _while_connected(request: Request, generation: Generation, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; a client that goes away meanwhile cancels the generation."""
    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        generation.cancel("the client left.")

    watcher = asyncio.create_task(watch())
    try:
        return await work
    finally:
        watcher.cancel()


def _validated(schema: type[AnyRequest], body: dict[str, Any]) -> AnyRequest:
    try:
        return schema.model_validate(body)
    except ValidationError as error:
        raise from_validation(error) from error


async def _on_api_error(request: Request, error: Any) -> Response:
    response: Response = error.response()
    return response


async def _on_unknown_path(request: Request, error: Any) -> Response:
    return ApiError(404, f"path: nothing at {request.url.path}. There are {ENDPOINTS}.", code="not_found").response()


async def _on_wrong_method(request: Request, error: Any) -> Response:
    message = f"method: {request.url.path} does not take {request.method}. There are {ENDPOINTS}."
    return ApiError(405, message, code="method_not_allowed").response(headers=error.headers)


async def _on_bug(request: Request, error: Exception) -> Response:
    """After this the exception goes on to uvicorn, which logs it with its traceback."""
    return ApiError(500, f"internal error ({type(error).__name__}); the server's log has the details.").response()
