"""What an engine has measured of its drafts, for /metrics and /health. What was not measured is not shown.

vLLM counts drafts and accepted tokens (metrics.py); for how much of a draft is verified, and whether drafting is on, it has no names, so these are ours.
"""

from collections.abc import Iterator
from typing import Any

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from ..draft_costs import PLAIN
from ..pacing import NO_DOMAIN, DraftState, Speculation

MS = 1e3


class DraftCollector(Collector):
    """Asked at every scrape."""

    def __init__(self, speculation: Speculation, *, model_name: str) -> None:
        self._speculation, self._model_name = speculation, model_name

    def collect(self) -> Iterator[Metric]:
        state = self._speculation.state()
        yield self._gauge("kilotok:verify_length", "Proposals verified in a round that drafted, on average",
                          [] if state.verify_length is None else [((), state.verify_length)])
        yield self._counter("kilotok:draft_rounds", "Decode rounds of requests with a draft head", ("drafted",),
                            [(("yes",), state.rounds_drafted), (("no",), state.rounds_plain)])
        yield self._counter("kilotok:drafting_switches", "Times that drafting was switched on or off, of draft_length auto", ("to",),
                            [(("off",), state.switched_off), (("on",), state.switched_on)])
        yield self._gauge("kilotok:drafting_requests", "Requests of draft_length auto under way, by whether drafting is on",
                          [(("on",), state.requests_on), (("off",), state.requests_off)], labels=("drafting",))
        gates = [((domain, _decode(is_tree)), gate) for (domain, is_tree), gate in state.gates.items()]
        yield self._gauge("kilotok:drafting", "1 where drafting is on, 0 where it is off; without a domain: for the next request that names none",
                          [(key, float(gate.is_open)) for key, gate in gates], labels=("domain", "decode"))
        yield self._gauge("kilotok:draft_gain", "Tokens per second with drafts over those without, of the newest drafted rounds",
                          [(key, gate.gain) for key, gate in gates if gate.gain is not None], labels=("domain", "decode"))
        yield self._gauge("kilotok:draft_confidence_scale", "Acceptances observed by the confidence of the draft, drawn to 1 by a prior",
                          [((_decode(kind.is_tree), _sampling(kind.is_sampled), str(depth - 1)), scale)
                           for kind, scales in state.scales.items() for depth, (scale, _) in scales.items()], labels=("decode", "sampling", "position"))
        yield self._gauge("kilotok:round_seconds", "Median time of a decode round by the proposals it verified, draft included",
                          [((_decode(is_tree), str(together), _length(length)), seconds)
                           for (is_tree, together), costs in state.costs_s.items() for length, seconds in costs.items()],
                          labels=("decode", "sequences", "proposals"))

    def _gauge(self, name: str, doc: str, values: list[tuple[tuple[str, ...], float]], *, labels: tuple[str, ...] = ()) -> Metric:
        family = GaugeMetricFamily(name, doc, labels=("model_name", *labels))
        for key, value in values:
            family.add_metric((self._model_name, *key), value)
        return family

    def _counter(self, name: str, doc: str, labels: tuple[str, ...], values: list[tuple[tuple[str, ...], int]]) -> Metric:
        family = CounterMetricFamily(name, doc, labels=("model_name", *labels))
        for key, value in values:
            family.add_metric((self._model_name, *key), value)
        return family


def drafting_health(state: DraftState) -> dict[str, Any]:
    """The same in short, for a person: null is not measured."""
    return {"verify_length": state.verify_length, "rounds_drafted": state.rounds_drafted, "rounds_without_a_draft": state.rounds_plain,
            "switched_off": state.switched_off, "switched_on": state.switched_on,
            "gates": [{"domain": domain or None, "decode": _decode(is_tree), "drafting": "on" if gate.is_open else "off", "gain": gate.gain,
                       "of_rounds": gate.num_rounds} for (domain, is_tree), gate in state.gates.items() if domain != NO_DOMAIN or gate.num_rounds],
            "round_ms": [{"decode": _decode(is_tree), "sequences": together, **{_length(v): MS * s for v, s in costs.items()}}
                         for (is_tree, together), costs in state.costs_s.items() if costs]}


def _decode(is_tree: bool) -> str:
    return "tree" if is_tree else "draft"


def _sampling(is_sampled: bool) -> str:
    return "sampled" if is_sampled else "greedy"


def _length(length: int) -> str:
    return "none drafted" if length == PLAIN else str(length)
