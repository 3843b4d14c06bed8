"""Self-generated responses: what the target itself answers, which is all that a draft has to predict.

Prompts are answered in batches, each batch with a seed of its own, and each batch's answers are written to
disk before the next: a killed run continues where it was, with the same text. A response ends at an
end-of-sequence token (kept: it is drafted too) and is cut where an 8-gram comes for the third time, because small models
loop and loops flatter a draft.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

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


@dataclass(frozen=True, kw_only=True)
class Answering:
    """How the prompts of one source are answered, and where the answers are kept."""

    directory: Path
    target_sha256: str
    dtype: str                      # the target's
    temperatures: tuple[float, ...]
    max_new_tokens: int
    batch_size: int
    eos_ids: frozenset[int]
    pad_id: int
    seed: int


@dataclass(frozen=True, kw_only=True)
class _Batch:
    """Prompts that are answered together, in one of the passes over all of them."""

    run: int                # 0 for the first temperature
    temperature: float
    indices: tuple[int, ...]
    texts: tuple[tuple[int, ...], ...]
    path: Path
    key: str                # what the answers depend on


def check_stored(prompts: Sequence[Prompt], *, how: Answering) -> None:
    """ValueError for a stored batch that is damaged, answers other prompts, or was made by another target or with other settings."""
    for batch in _batches(prompts, how=how):
        _read(batch)


def generate_responses(model: nn.Module, prompts: Sequence[Prompt], *, how: Answering, say: Callable[[str], None]) -> list[Response]:
    """Every prompt answered once at each temperature, in that order; batches on disk are read, not made again. Errors: as `check_stored`."""
    found: dict[tuple[int, int], Response] = {}
    how.directory.mkdir(parents=True, exist_ok=True)
    batches = _batches(prompts, how=how)
    made = 0
    for number, batch in enumerate(batches):
        answers = _read(batch)
        if answers is None:
            answers = _answer(model, batch.texts, temperature=batch.temperature, how=how, seed=int(batch.key[:8], 16))
            write_atomically(batch.path, text=json.dumps({"key": batch.key, "responses": answers}) + "\n")
            made += 1
        for i, answer in zip(batch.indices, answers, strict=True):
            found[batch.run, i] = Response(prompt=prompts[i].ids, response=tuple(answer[:cut_at_repeat(answer)]))
        if made and (made % 20 == 0 or number + 1 == len(batches)):
            say(f"{how.directory.name}: responses: batch {number + 1} of {len(batches)}")
    return [found[key] for key in sorted(found)]


def _batches(prompts: Sequence[Prompt], *, how: Answering) -> list[_Batch]:
    # prompts of like length share a batch, so that little is padding; the order of the answers stays the prompts'
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i].ids))
    settings = {"target": how.target_sha256, "dtype": how.dtype, "max_new_tokens": how.max_new_tokens, "seed": how.seed, "eos": sorted(how.eos_ids)}
    batches: list[_Batch] = []
    for run, temperature in enumerate(how.temperatures):
        for start in range(0, len(prompts), how.batch_size):
            indices = tuple(order[start:start + how.batch_size])
            texts = tuple(prompts[i].ids for i in indices)
            key = hashlib.sha256(json.dumps([texts, run, temperature, settings]).encode()).hexdigest()
            batches.append(_Batch(run=run, temperature=temperature, indices=indices, texts=texts, path=how.directory / f"{len(batches):06d}.json", key=key))
    return batches


def _read(batch: _Batch) -> list[list[int]] | None:
    if not batch.path.is_file():
        return None
    try:
        stored = json.loads(batch.path.read_text())
        key, responses = stored["key"], stored["responses"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{batch.path}: not readable as stored answers ({type(error).__name__}: {error}). Remove it: it is made again.") from error
    if key != batch.key:
        raise ValueError(f"{batch.path}: holds answers of another target, to other prompts or with other settings. Choose another --run or --data.responses.")
    answers: list[list[int]] = responses
    return answers


@torch.no_grad()
def _answer(model: nn.Module, texts: Sequence[Sequence[int]], *, temperature: float, how: Answering, seed: int) -> list[list[int]]:
    """transformers' own generation, left-padded. The end token is kept, what follows it is not."""
    device = next(model.parameters()).device
    longest = max(len(t) for t in texts)
    ids = torch.full((len(texts), longest), how.pad_id, device=device)
    mask = torch.zeros_like(ids)
    for row, text in enumerate(texts):
        ids[row, longest - len(text):] = torch.tensor(text, device=device)
        mask[row, longest - len(text):] = 1
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {"do_sample": False}
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        output = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=how.max_new_tokens, eos_token_id=sorted(how.eos_ids) or None,  # type: ignore[operator]
                                pad_token_id=how.pad_id, **sampling)
    answers = []
    for row in output[:, longest:].tolist():
        end = next((i + 1 for i, token in enumerate(row) if token in how.eos_ids), len(row))
        answers.append(row[:end])
    return answers
