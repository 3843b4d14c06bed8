"""Metrics under vLLM's names, so that dashboards and benchmarks written for it work; plus the acceptance length."""

import logging
import math

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from ...dflash.generate import Round
from ..engine import Engine
from .draft_metrics import DraftCollector

LATENCY_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
TOKEN_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
NUM_POSITIONS = 7           # shown from the start; a head that drafts more adds its own
FINISHED_REASONS = ("stop", "length", "abort", "error")
# A head that matches its target is accepted now and then even on text it has never seen; 1.05 is one draft in twenty rounds.
HELPLESS_ACCEPTANCE_LENGTH, HELPLESS_MIN_DRAFTS = 1.05, 200

logger = logging.getLogger(__name__)


class Metrics:
    """Counts of one server, in a registry of its own."""

    def __init__(self, *, model_name: str, engine: Engine, executor: str) -> None:
        self.registry = CollectorRegistry()
        self._model_name = model_name
        self._num_drafts = self._num_accepted = 0
        self._warned = False
        info = Gauge("kilotok:executor_info", "Always 1; the label says what computes", ("model_name", "executor"), registry=self.registry)
        info.labels(model_name, executor).set(1)
        self._gauge("vllm:num_requests_running", "Requests in the engine's turn").set_function(lambda: engine.num_running)
        self._gauge("vllm:num_requests_waiting", "Requests that wait for their turn").set_function(lambda: engine.num_waiting)
        self._gauge("kilotok:acceptance_length", "Tokens a draft yields on average, the bonus included").set_function(lambda: self.acceptance_length)
        self.registry.register(DraftCollector(engine.speculation, model_name=model_name))
        self._prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens read")
        self._generation_tokens = self._counter("vllm:generation_tokens", "Tokens generated")
        self._drafts = self._counter("vllm:spec_decode_num_drafts", "Drafts verified")
        self._draft_tokens = self._counter("vllm:spec_decode_num_draft_tokens", "Tokens drafted")
        self._accepted_tokens = self._counter("vllm:spec_decode_num_accepted_tokens", "Drafted tokens accepted")
        self._per_position = Counter("vllm:spec_decode_num_accepted_tokens_per_pos", "Drafted tokens accepted at a position",
                                     ("model_name", "position"), registry=self.registry)
        self._finished = Counter("vllm:request_success", "Requests ended", ("model_name", "finished_reason"), registry=self.registry)
        self._first_token = self._histogram("vllm:time_to_first_token_seconds", "From arrival to the first token", LATENCY_BUCKETS_S)
        self._latency = self._histogram("vllm:e2e_request_latency_seconds", "From arrival to the end", LATENCY_BUCKETS_S)
        self._per_token = self._histogram("vllm:time_per_output_token_seconds", "Time of a token after the first", TOKEN_BUCKETS_S)
        for position in range(NUM_POSITIONS):
            self._per_position.labels(model_name, str(position))
        for reason in FINISHED_REASONS:
            self._finished.labels(model_name, reason)

    @property
    def acceptance_length(self) -> float:
        """Accepted tokens + 1 of a draft, over the server's life; NaN before the first."""
        return 1 + self._num_accepted / self._num_drafts if self._num_drafts else math.nan

    def prefilled(self, *, prompt_tokens: int, since_arrival_s: float) -> None:
        self._prompt_tokens.inc(prompt_tokens)
        self._generation_tokens.inc()
        self._first_token.observe(since_arrival_s)

    def decoded(self, done: Round, *, took_s: float) -> None:
        """A round after the prefill."""
        self._generation_tokens.inc(len(done.tokens))
        for _ in done.tokens:   # once for each, so that sum over count is the time of a token
            self._per_token.observe(took_s / len(done.tokens))
        if not done.num_drafted:
            return
        self._num_drafts += 1
        self._num_accepted += done.num_accepted
        self._drafts.inc()
        self._draft_tokens.inc(done.num_drafted)
        self._accepted_tokens.inc(done.num_accepted)
        for position in range(done.num_accepted):
            self._per_position.labels(self._model_name, str(position)).inc()
        if not self._warned and self._num_drafts >= HELPLESS_MIN_DRAFTS and self.acceptance_length < HELPLESS_ACCEPTANCE_LENGTH:
            self._warned = True
            logger.warning("acceptance length: %.3f after %d drafts: the draft head does not help. It was nearly always made for another model, "
                           "or for other weights of this one; serve with --no-draft, or train a head for this checkpoint.",
                           self.acceptance_length, self._num_drafts)

    def ended(self, reason: str, *, since_arrival_s: float) -> None:
        """`reason` is one of FINISHED_REASONS; latencies are those of complete answers."""
        self._finished.labels(self._model_name, reason).inc()
        if reason in ("stop", "length"):
            self._latency.observe(since_arrival_s)

    def text(self) -> bytes:
        """All of it as Prometheus reads it."""
        return generate_latest(self.registry)

    def _gauge(self, name: str, doc: str) -> Gauge:
        return Gauge(name, doc, ("model_name",), registry=self.registry).labels(self._model_name)

    def _counter(self, name: str, doc: str) -> Counter:
        return Counter(name, doc, ("model_name",), registry=self.registry).labels(self._model_name)

    def _histogram(self, name: str, doc: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, doc, ("model_name",), registry=self.registry, buckets=buckets).labels(self._model_name)
