"""Self-generated responses: what the target itself answers, which is all that a draft has to predict.

Prompts are answered in batches, each batch with a seed of its own, and each batch's answers are written to
disk before the next: a killed run continues where it was, with the same text. A response ends at an
end-of-sequence token (kept: it is drafted too) and is cut where an 8-gram comes for the third time, because small models
loop and loops flatter a draft.

The target answers in process, or a server of it does (endpoint.py). Batches are independent of each other: several ranks, or several
machines that share the directory, answer every n-th of them each.
"""

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from ..dflash.metrics import cut_at_repeat
from ..quant.archs import grouped_while_decoding
from ..quant.checkpoint import write_atomically
from .prompts import Prompt
from .shares import Share, wait_for

Answers = list[list[int] | None]   # to the prompts of a batch; None where the tokens of an answer cannot be told

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
    vocab_size: int                 # the target's: no answer has other tokens
    temperatures: tuple[float, ...]
    max_new_tokens: int
    batch_size: int
    eos_ids: frozenset[int]
    pad_id: int
    seed: int
    server: str | None = None       # the model's name at an endpoint; None: in process


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Prompts that are answered together, in one of the passes over all of them."""

    run: int                # 0 for the first temperature
    temperature: float
    indices: tuple[int, ...]
    texts: tuple[tuple[int, ...], ...]
    path: Path
    key: str                # what the answers depend on

    def seed(self, index: int | None = None) -> int:
        """A seed of the batch, 32 bits, or of one of its prompts, 31 bits, which every server takes."""
        if index is None:
            return int(self.key[:8], 16)
        return int(hashlib.sha256(f"{self.key} {index}".encode()).hexdigest()[:8], 16) >> 1


Answerer = Callable[[Sequence[Batch]], Iterator[Answers]]   # the answers to each batch, in order


def check_stored(prompts: Sequence[Prompt], *, how: Answering) -> None:
    """ValueError for a stored batch that is damaged, answers other prompts, or was made by another target or with other settings."""
    for batch in _batches(prompts, how=how):
        _read(batch, how=how)


def fingerprint(prompts: Sequence[Prompt], *, how: Answering) -> str:
    """Eight hex digits of all that the answers depend on, which `how.directory` is not."""
    return hashlib.sha256("".join(batch.key for batch in _batches(prompts, how=how)).encode()).hexdigest()[:8]


def is_complete(prompts: Sequence[Prompt], *, how: Answering) -> bool:
    """Whether no batch is missing."""
    return all(batch.path.is_file() for batch in _batches(prompts, how=how))


def generate_responses(
    model: nn.Module | Answerer, prompts: Sequence[Prompt], *, how: Answering, say: Callable[[str], None], share: Share | None = None,
) -> list[Response]:
    """Every prompt answered once at each temperature, in that order; batches on disk are read, not made again.

    model: the target, or what asks a server of it. share: the batches to make here; the rest is waited for. Answers whose tokens cannot be
    told are left out. Errors: as `check_stored`, and those of the server.
    """
    batches = _batches(prompts, how=how)
    make_responses(model, prompts, how=how, say=say, share=share)
    wait_for([b.path for b in batches], what=f"{how.directory.name}: responses of the other ranks", say=say)
    found: dict[tuple[int, int], Response] = {}
    for batch in batches:
        for i, answer in zip(batch.indices, _stored(batch, how=how), strict=True):
            if answer is not None:
                found[batch.run, i] = Response(prompt=prompts[i].ids, response=tuple(answer[:cut_at_repeat(answer)]))
    return [found[key] for key in sorted(found)]


def make_responses(
    model: nn.Module | Answerer, prompts: Sequence[Prompt], *, how: Answering, say: Callable[[str], None], share: Share | None = None,
) -> int:
    """Answer the batches of a share that are not on disk, each written as soon as it is whole; returns how many. Errors: as `generate_responses`."""
    how.directory.mkdir(parents=True, exist_ok=True)
    batches = _batches(prompts, how=how)
    missing = [(n, b) for n, b in enumerate(batches) if (share is None or share.holds(n)) and _read(b, how=how) is None]
    answerer: Answerer = (lambda some: (_answer(model, b, how=how) for b in some)) if isinstance(model, nn.Module) else model
    started, tokens = time.perf_counter(), 0
    for made, ((number, batch), answers) in enumerate(zip(missing, answerer([b for _, b in missing]), strict=True), start=1):
        write_atomically(batch.path, text=json.dumps({"key": batch.key, "responses": answers}) + "\n")
        tokens += sum(len(a) for a in answers if a is not None)
        if made % 20 == 0 or made == len(missing):
            say(f"{how.directory.name}: responses: batch {number + 1} of {len(batches)}, {tokens / (time.perf_counter() - started):,.0f} tokens/s")
    return len(missing)


def _batches(prompts: Sequence[Prompt], *, how: Answering) -> list[Batch]:
    # prompts of like length share a batch, so that little is padding; the order of the answers stays the prompts'
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i].ids))
    settings: dict[str, object] = {"target": how.target_sha256, "dtype": how.dtype, "max_new_tokens": how.max_new_tokens, "seed": how.seed,
                                   "eos": sorted(how.eos_ids)}
    if how.server is not None:
        settings["server"] = how.server
    batches: list[Batch] = []
    for run, temperature in enumerate(how.temperatures):
        for start in range(0, len(prompts), how.batch_size):
            indices = tuple(order[start:start + how.batch_size])
            texts = tuple(prompts[i].ids for i in indices)
            key = hashlib.sha256(json.dumps([texts, run, temperature, settings]).encode()).hexdigest()
            batches.append(Batch(run=run, temperature=temperature, indices=indices, texts=texts, path=how.directory / f"{len(batches):06d}.json", key=key))
    return batches


def _stored(batch: Batch, *, how: Answering) -> Answers:
    answers = _read(batch, how=how)
    if answers is None:
        raise ValueError(f"{batch.path}: was there and is gone. Start again with --resume: it is made again.")
    return answers


def _read(batch: Batch, *, how: Answering) -> Answers | None:
    if not batch.path.is_file():
        return None
    try:
        stored = json.loads(batch.path.read_text())
        key, responses = stored["key"], stored["responses"]
    except (ValueError, KeyError, TypeError) as error:
        raise _unreadable(batch.path, f"{type(error).__name__}: {error}") from error
    if key != batch.key:
        raise ValueError(f"{batch.path}: holds answers of another target, to other prompts or with other settings. Choose another --run or --data.responses.")
    if not isinstance(responses, list) or len(responses) != len(batch.texts):
        raise _unreadable(batch.path, f"{len(batch.texts)} answers belong in it, and it has {len(responses) if isinstance(responses, list) else 'no list'}")
    for number, answer in enumerate(responses):
        wrong = None if answer is None and how.server is not None else wrong_tokens(answer, vocab_size=how.vocab_size, longest=how.max_new_tokens)
        if wrong is not None:
            raise _unreadable(batch.path, f"answer {number} {wrong}")
    answers: Answers = responses
    return answers


def wrong_tokens(answer: object, *, vocab_size: int, longest: int) -> str | None:
    """Why something read from a file or a server is no answer of at most `longest` token ids in 0..vocab_size - 1; None for one."""
    if not isinstance(answer, list):
        return f"is no list of token ids: {json.dumps(answer):.60}"
    if len(answer) > longest:
        return f"has {len(answer)} tokens, of at most {longest}"
    for token in answer:
        if type(token) is not int or not 0 <= token < vocab_size:   # True is an int to isinstance
            return f"has the token {json.dumps(token):.60}; the target's are 0..{vocab_size - 1}"
    return None


def _unreadable(path: Path, why: str) -> ValueError:
    return ValueError(f"{path}: not readable as stored answers ({why}). Remove it: it is made again.")


@torch.no_grad()
def _answer(model: nn.Module, batch: Batch, *, how: Answering) -> Answers:
    """transformers' own generation, left-padded. The end token is kept, what follows it is not."""
    texts, temperature = batch.texts, batch.temperature
    device = next(model.parameters()).device
    longest = max(len(t) for t in texts)
    ids = torch.full((len(texts), longest), how.pad_id, device=device)
    mask = torch.zeros_like(ids)
    for row, text in enumerate(texts):
        ids[row, longest - len(text):] = torch.tensor(text, device=device)
        mask[row, longest - len(text):] = 1
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {"do_sample": False}
    with grouped_while_decoding(model), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(batch.seed())
        output = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=how.max_new_tokens, eos_token_id=sorted(how.eos_ids) or None,  # type: ignore[operator]
                                pad_token_id=how.pad_id, **sampling)
    answers: Answers = []
    for row in output[:, longest:].tolist():
        end = next((i + 1 for i, token in enumerate(row) if token in how.eos_ids), len(row))
        answers.append(row[:end])
    return answers
