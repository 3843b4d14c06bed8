"""Self-generated responses: what the target itself answers, which is all that a draft has to predict.

Prompts are answered in batches, each batch with a seed of its own, and each batch's answers are written to
disk before the next: a killed run continues where it was, with the same text. A response ends at an
end-of-sequence token (kept: it is drafted too) and is cut where an 8-gram comes for the third time, because small models
loop and loops flatter a draft.
"""

import hashlib
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..dflash.metrics import cut_at_repeat
from ..quant.checkpoint import write_atomically
from .prompts import Prompt


@dataclass(frozen=True, kw_only=True)
class Response:
    """A prompt and what the target said."""

    prompt: tuple[int, ...]
    response: tuple[int, ...]


def generate_responses(
    model: nn.Module, prompts: Sequence[Prompt], *, directory: Path, target_sha256: str, temperatures: Sequence[float], max_new_tokens: int, batch_size: int,
    eos_ids: Collection[int], pad_id: int, seed: int, say: Any,
) -> list[Response]:
    """Every prompt answered once at each temperature, in that order; batches already in `directory` are read, not made again.

    Errors: ValueError for a stored batch that answers other prompts, or was made by another target or with other settings.
    """
    starts = range(0, len(prompts), batch_size)
    jobs = [(temperature, start) for temperature in temperatures for start in starts]
    # prompts of like length share a batch, so that little is padding; the order of the answers stays the prompts'
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i].ids))
    found: dict[tuple[int, int], Response] = {}
    directory.mkdir(parents=True, exist_ok=True)
    made = 0
    for number, (temperature, start) in enumerate(jobs):
        batch = order[start:start + batch_size]
        path = directory / f"{number:06d}.json"
        texts = [prompts[i].ids for i in batch]
        key = _batch_key(texts, target=target_sha256, temperature=temperature, max_new_tokens=max_new_tokens, seed=seed, eos=sorted(eos_ids))
        answers = _read_batch(path, key=key)
        if answers is None:
            answers = _answer(model, texts, temperature=temperature, max_new_tokens=max_new_tokens, eos_ids=eos_ids, pad_id=pad_id, seed=int(key[:8], 16))
            write_atomically(path, text=json.dumps({"key": key, "responses": answers}) + "\n")
            made += 1
        for i, answer in zip(batch, answers, strict=True):
            found[number // len(starts), i] = Response(prompt=prompts[i].ids, response=tuple(answer[:cut_at_repeat(answer)]))
        if made and (made % 20 == 0 or number + 1 == len(jobs)):
            say(f"responses: batch {number + 1} of {len(jobs)}")
    return [found[key] for key in sorted(found)]


def _batch_key(texts: Sequence[Sequence[int]], **settings: Any) -> str:
    """Hash of what a batch of answers depends on."""
    return hashlib.sha256(json.dumps([texts, settings]).encode()).hexdigest()


def _read_batch(path: Path, *, key: str) -> list[list[int]] | None:
    if not path.is_file():
        return None
    stored = json.loads(path.read_text())
    if stored["key"] != key:
        raise ValueError(f"{path}: holds answers of another target, to other prompts or with other settings. Choose another --run or --data.responses.")
    responses: list[list[int]] = stored["responses"]
    return responses


@torch.no_grad()
def _answer(
    model: nn.Module, texts: Sequence[Sequence[int]], *, temperature: float, max_new_tokens: int, eos_ids: Collection[int], pad_id: int, seed: int,
) -> list[list[int]]:
    """transformers' own generation, left-padded. The end token is kept, what follows it is not."""
    device = next(model.parameters()).device
    longest = max(len(t) for t in texts)
    ids = torch.full((len(texts), longest), pad_id, device=device)
    mask = torch.zeros_like(ids)
    for row, text in enumerate(texts):
        ids[row, longest - len(text):] = torch.tensor(text, device=device)
        mask[row, longest - len(text):] = 1
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {"do_sample": False}
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        output = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=max_new_tokens, eos_token_id=sorted(eos_ids) or None,  # type: ignore[operator]
                                pad_token_id=pad_id, **sampling)
    answers = []
    for row in output[:, longest:].tolist():
        end = next((i + 1 for i, token in enumerate(row) if token in eos_ids), len(row))
        answers.append(row[:end])
    return answers
