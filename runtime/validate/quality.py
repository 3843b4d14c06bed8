"""Perplexity of the target and of its parent, and KL between them, on the held-out texts.

Both models are functions from token ids to logits, so what is measured does not depend on where they run. A text is the
prompt and its reference answer as the chat template writes them; every token after the first counts. Logits become
log-probabilities in float64 and are summed there, a few rows at a time.

Legend: T tokens of a text, V vocabulary.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .prompts import Prompt

LogitsOf = Callable[[Sequence[int]], Tensor]
ROWS_AT_ONCE = 64     # float64 log-probabilities of 64 x 150k words: 80 MB


@dataclass(frozen=True, kw_only=True)
class Sums:
    """Sums over predicted tokens, nats. Those that need the parent are None without one."""

    tokens: int
    cross_entropy: float
    parent_cross_entropy: float | None = None
    kl: float | None = None          # KL(parent || target)

    @property
    def is_finite(self) -> bool:
        return all(math.isfinite(s) for s in (self.cross_entropy, self.parent_cross_entropy or 0.0, self.kl or 0.0))

    def to_json(self) -> dict[str, Any]:
        """Means per token and perplexities."""
        figures: dict[str, Any] = {"tokens": self.tokens, "perplexity": math.exp(self.cross_entropy / self.tokens)}
        if self.parent_cross_entropy is not None and self.kl is not None:
            figures |= {"parent_perplexity": math.exp(self.parent_cross_entropy / self.tokens), "kl": self.kl / self.tokens}
        return figures


@torch.no_grad()
def measure_text(ids: Sequence[int], *, target: LogitsOf, parent: LogitsOf | None) -> Sums:
    """Compare the predictions of ids[1:].

    Shapes: target and parent give [T, V] for T ids. Errors: ValueError for fewer than two ids, or vocabularies that differ.
    """
    if len(ids) < 2:
        raise ValueError(f"measure_text: at least two tokens are needed, one to predict; got {len(ids)}.")
    logits_TV = target(ids[:-1])
    parent_TV = parent(ids[:-1]) if parent is not None else None
    if parent_TV is not None and parent_TV.shape != logits_TV.shape:
        raise ValueError(f"quality: parent and target must have one vocabulary; got logits {tuple(parent_TV.shape)} and {tuple(logits_TV.shape)}. "
                         "Give the right parent with --parent.")
    labels_T = torch.tensor(ids[1:], device=logits_TV.device)
    cross_entropy = parent_cross_entropy = kl = 0.0
    for start in range(0, len(labels_T), ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        labels = labels_T[rows, None]
        log_q = logits_TV[rows].double().log_softmax(-1)
        cross_entropy -= float(log_q.gather(1, labels).sum())
        if parent_TV is not None:
            log_p = parent_TV[rows].double().log_softmax(-1)
            parent_cross_entropy -= float(log_p.gather(1, labels).sum())
            kl += float((log_p.exp() * (log_p - log_q)).sum())
    if parent_TV is None:
        return Sums(tokens=len(labels_T), cross_entropy=cross_entropy)
    return Sums(tokens=len(labels_T), cross_entropy=cross_entropy, parent_cross_entropy=parent_cross_entropy, kl=kl)


def add(parts: Iterable[Sums]) -> Sums:
    """Sums over several texts: all with a parent, or all without."""
    kept = list(parts)
    with_parent = [p for p in kept if p.parent_cross_entropy is not None and p.kl is not None]
    assert len(with_parent) in (0, len(kept)), "some texts were compared with a parent and others were not"
    tokens, cross_entropy = sum(p.tokens for p in kept), math.fsum(p.cross_entropy for p in kept)
    if not with_parent:
        return Sums(tokens=tokens, cross_entropy=cross_entropy)
    return Sums(tokens=tokens, cross_entropy=cross_entropy, parent_cross_entropy=math.fsum(p.parent_cross_entropy or 0.0 for p in kept),
                kl=math.fsum(p.kl or 0.0 for p in kept))


def measure_texts(texts: Sequence[tuple[str, Sequence[int]]], *, target: LogitsOf, parent: LogitsOf | None, max_tokens: int) -> dict[str, Sums]:
    """Sums by domain over (domain, ids), in order, until a domain has `max_tokens` predicted tokens; its last text is cut there."""
    parts: dict[str, list[Sums]] = {}
    left: dict[str, int] = {}
    for domain, ids in texts:
        count = min(left.setdefault(domain, max_tokens), len(ids) - 1)
        if count > 0:
            parts.setdefault(domain, []).append(measure_text(ids[:count + 1], target=target, parent=parent))
            left[domain] -= count
    return {domain: add(sums) for domain, sums in parts.items()}


def render(prompts: Iterable[Prompt], *, tokenizer: Any, max_length: int) -> list[tuple[str, list[int]]]:
    """(domain, ids) of every prompt that has a reference, as the model sees prompt and answer; at most max_length ids."""
    texts = []
    for p in prompts:
        if p.reference is None:
            continue
        if p.messages is not None:
            messages = [*p.messages, {"role": "assistant", "content": p.reference}]
            text = tokenizer.apply_chat_template(messages, tools=list(p.tools) if p.tools else None, tokenize=False)
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]   # the template writes them
        else:
            ids = tokenizer(f"{p.prompt}{p.reference}")["input_ids"]
        texts.append((p.domain, [int(i) for i in ids[:max_length]]))
    return texts
