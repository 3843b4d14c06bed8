"""Prompts, the target's responses to them, and the packed rows that a draft is trained on."""

import hashlib
from collections.abc import Sequence
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from .data import step_loader
from .distill_config import HELDOUT_FILE_PROMPTS, PromptConfig
from .packing import pack_documents
from .prompts import Prompt, pick_heldout, read_prompts, sha256_of_prompts
from .responses import Response

IDS, DOCUMENTS, POSITIONS, SUPERVISED = range(4)   # the planes of a row


def pack_row(documents: Sequence[Response], *, length: int, pad_id: int) -> Tensor:
    """One row of whole documents, int64 [4, S]: ids, document, position inside the document, 1 where the target wrote the token.

    Padding is a document of its own (-1) at position 0, never supervised.
    """
    row = torch.zeros(4, length, dtype=torch.int64)
    row[IDS], row[DOCUMENTS] = pad_id, -1
    start = 0
    for number, d in enumerate(documents):
        size = len(d.prompt) + len(d.response)
        part = slice(start, start + size)
        row[IDS, part] = torch.tensor((*d.prompt, *d.response))
        row[DOCUMENTS, part] = number
        row[POSITIONS, part] = torch.arange(size)
        row[SUPERVISED, start + len(d.prompt):start + size] = 1
        start += size
    return row


def packed_rows(responses: Sequence[Response], *, length: int, pad_id: int) -> tuple[list[Tensor], int]:
    """(rows, how many responses were left out): those that give no block (under two tokens) and those longer than a row."""
    usable = [r for r in responses if len(r.response) >= 2 and len(r.prompt) + len(r.response) <= length]
    bins = pack_documents([len(r.prompt) + len(r.response) for r in usable], row_length=length)
    return [pack_row([usable[i] for i in b], length=length, pad_id=pad_id) for b in bins], len(responses) - len(usable)


class PromptData:
    """The prompts of a recipe, by source for training and by domain for evaluation.

    heldout: those that this run measures, by domain; heldout_file: more of them, written beside the draft for `kilotok validate`.
    """

    def __init__(self, config: PromptConfig, *, tokenizer: Any, vocab_size: int, max_length: int) -> None:
        if not config.train or not config.heldout:
            raise ValueError("data: data.train and data.heldout need at least one source each; see recipes/pocket/distill.yaml.")
        how = {"tokenizer": tokenizer, "prompt_tokens": config.prompt_tokens, "per_document": config.prompts_per_document}
        longest = config.sequence_length - 2
        unfiltered = [read_prompts(s, **how) for s in config.train]
        self.train = [[p for p in prompts if len(p.ids) <= longest] for prompts in unfiltered]
        self.too_long = [len(prompts) - len(kept) for prompts, kept in zip(unfiltered, self.train, strict=True)]   # by source
        if "all" in {s.domain for s in config.heldout}:
            raise ValueError("data.heldout: a domain cannot be called 'all', the name of the figures over all domains. Rename it.")
        by_domain: dict[str, list[Prompt]] = {}
        for source in config.heldout:
            by_domain.setdefault(source.domain, []).extend(read_prompts(source, **how))
        self.heldout_file = {d: pick_heldout(p, limit=HELDOUT_FILE_PROMPTS) for d, p in by_domain.items()}
        self.heldout = {d: pick_heldout(p, limit=config.heldout_prompts) for d, p in self.heldout_file.items()}
        for source, prompts, number in zip(config.train, self.train, self.too_long, strict=True):
            if not prompts:
                raise ValueError(f"data source {source.domain!r}: every prompt is longer than data.sequence_length - 2 ({longest} tokens). Raise it.")
            if number:
                print(f"{source.domain}: {number} of {number + len(prompts)} prompts left out: longer than data.sequence_length - 2 ({longest} tokens)",
                      flush=True)
        everything = [p for group in (*self.train, *self.heldout_file.values()) for p in group]
        largest = max(max(p.ids) for p in everything)
        if largest >= vocab_size:
            raise ValueError(f"tokenizer: gives token {largest}, but the target's vocab_size is {vocab_size}. They do not belong together.")
        for prompt in (p for group in self.heldout_file.values() for p in group):
            if len(prompt.ids) >= max_length:
                raise ValueError(f"data.heldout: prompt {prompt.row['id']!r} has {len(prompt.ids)} tokens, and the target's context is {max_length}. "
                                 "Shorten or remove it.")
        self._keep_apart(config, by_domain)
        self.duplicates = self._answer_once(config)   # by source
        self.sha256 = hashlib.sha256("".join(sha256_of_prompts(g) for g in (*self.train, *self.heldout_file.values())).encode()).hexdigest()

    def _keep_apart(self, config: PromptConfig, heldout: dict[str, list[Prompt]]) -> None:
        """No prompt of data.heldout is trained on, also none beyond those kept. Documents that `part` keeps apart may still begin alike:
        those leave the training.
        """
        held_out = {p.ids for group in heldout.values() for p in group}
        for number, source in enumerate(config.train):
            both = [p for p in self.train[number] if p.ids in held_out]
            if both and source.part != "train":
                raise ValueError(f"data: {len(both)} held-out prompts are also trained on, such as {both[0].row['id']!r}. "
                                 "Use part: train and part: heldout.")
            if both:
                print(f"{source.domain}: {len(both)} prompts left out of training: a held-out one is the same", flush=True)
            self.train[number] = [p for p in self.train[number] if p.ids not in held_out]
            if not self.train[number]:
                raise ValueError(f"data source {source.domain!r}: every prompt is a held-out one too. Give other text.")

    def _answer_once(self, config: PromptConfig) -> list[int]:
        """Each prompt stays in the first source that has it, once; returns how many left each."""
        seen: set[tuple[int, ...]] = set()
        removed = []
        for number, source in enumerate(config.train):
            fresh = []
            for p in self.train[number]:
                if p.ids not in seen:
                    fresh.append(p)
                    seen.add(p.ids)
            removed.append(len(self.train[number]) - len(fresh))
            if removed[-1]:
                print(f"{source.domain}: {removed[-1]} of {len(self.train[number])} prompts left out: the same are before them, or in an earlier source",
                      flush=True)
            if not fresh:
                raise ValueError(f"data source {source.domain!r}: every prompt is in an earlier source too. Leave the source out, or give other text.")
            self.train[number] = fresh
        return removed


class RowData(L.LightningDataModule):
    """Packed rows by (seed, step); the sources' weights are their shares of the rows. A source may be a list, or what reads its rows from disk."""

    def __init__(self, sources: list[Any], *, weights: list[float], seed: int, batch_size: int, accumulate: int, max_steps: int) -> None:
        super().__init__()
        self.sources, self.weights, self.seed = sources, weights, seed
        self.batch_size, self.accumulate, self.max_steps = batch_size, accumulate, max_steps

    def train_dataloader(self) -> DataLoader[Tensor]:
        return step_loader(self.sources, weights=self.weights, seed=self.seed, trainer=self.trainer, batch_size=self.batch_size,
                           accumulate=self.accumulate, max_steps=self.max_steps)
