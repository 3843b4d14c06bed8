"""From prompts to what a training step reads: the target's answers, packed rows of them, and on request its states of the rows."""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from ..quant.archs import load_config, load_tokenizer
from ..quant.checkpoint import end_token_ids, load_exported_model, sha256_of_weights, write_atomically
from .data import describe_source
from .distill_config import DistillRecipe
from .distill_data import DOCUMENTS, IDS, POSITIONS, SUPERVISED, PromptData, packed_rows
from .endpoint import Endpoint, EndpointTarget
from .features import StoredRows, check_store, describe_store, write_features
from .fit import require_accelerator
from .precision import AUTOCAST
from .prompts import Prompt, pick_heldout
from .responses import Answerer, Answering, Batch, Response, check_stored, fingerprint, generate_responses, is_complete, make_responses
from .run_dir import rank_zero_print, write_meta
from .shares import Share
from .slot_pass import run_target

ENDPOINT_RECORD = "endpoint.json"   # beside the answers: the model's name is part of what they depend on, also when the server is gone


class Answers:
    """Who answers the prompts of each source, and where the answers are kept.

    Errors: ValueError for stored batches that are damaged or of something else; those of Endpoint, which is asked only when an answer is missing.
    """

    def __init__(self, recipe: DistillRecipe, data: PromptData, *, run_dir: Path, target: nn.Module | None, dtype: torch.dtype, target_sha256: str,
                 eos_ids: frozenset[int], tokenizer: Any, config: Any) -> None:
        d = recipe.data
        self.recipe, self.data, self.target, self.pad_id = recipe, data, target, _pad_id(tokenizer, eos_ids)
        self.root = Path(d.responses) if d.responses is not None else run_dir / "responses"
        self.server: Endpoint | None = None

        def connect(model: str | None) -> Endpoint:
            against = EndpointTarget(sha256=target_sha256, tokenizer=tokenizer, eos_ids=eos_ids, max_length=config.max_position_embeddings,
                                     vocab_size=config.vocab_size, max_new_tokens=d.max_new_tokens)
            return Endpoint(d.endpoint or "", model=model, concurrency=d.endpoint_concurrency, target=against, say=rank_zero_print)

        name = d.endpoint_model or self._recorded_name() if d.endpoint is not None else None
        if d.endpoint is not None and name is None:
            self.server = connect(None)
            name = self.server.model
        self.how = [Answering(directory=self.root / f"{number:02d}-{source.domain}", target_sha256=target_sha256, dtype=str(dtype),
                              vocab_size=config.vocab_size, temperatures=tuple(d.temperatures), max_new_tokens=d.max_new_tokens, batch_size=d.generation_batch,
                              eos_ids=eos_ids, pad_id=self.pad_id, seed=recipe.trainer.seed, server=name) for number, source in enumerate(d.train)]
        self.heldout = {domain: self._of_heldout(domain, prompts) for domain, prompts in data.heldout_file.items() if d.heldout_texts}
        for prompts, how in (*zip(data.train, self.how, strict=True), *self.heldout.values()):
            check_stored(prompts, how=how)
        if d.endpoint is not None and self.server is None and not all(is_complete(p, how=h) for p, h in zip(data.train, self.how, strict=True)):
            self.server = connect(name)

    @property
    def answerer(self) -> nn.Module | Answerer:
        return self.server or self.target or _nobody

    def record_server(self, *, share: Share | None) -> None:
        """Keep the server's name of the model, for a run after it has gone."""
        if self.server is not None and (share is None or share.index == 0):
            self.root.mkdir(parents=True, exist_ok=True)
            write_atomically(self.root / ENDPOINT_RECORD, text=json.dumps({"endpoint": self.server.url, "model": self.server.model}) + "\n")

    def make_share(self) -> int:
        """Answer the batches of data.shard; returns how many were missing."""
        share = Share.parse(self.recipe.data.shard or "1/1", where="data.shard")
        self.record_server(share=share)
        return sum(make_responses(self.answerer, prompts, how=how, say=rank_zero_print, share=share)
                   for prompts, how in zip(self.data.train, self.how, strict=True))

    def _of_heldout(self, domain: str, prompts: list[Prompt]) -> tuple[list[Prompt], Answering]:
        """What the target answers for acceptance by a walk. The directory tells what the answers depend on: runs that measure otherwise share the root."""
        d = self.recipe.data
        how = dataclasses.replace(self.how[0], temperatures=(0.0,), max_new_tokens=d.heldout_new_tokens, server=None)
        some = pick_heldout(prompts, limit=d.heldout_texts)
        return some, dataclasses.replace(how, directory=self.root / f"heldout-{domain}-{fingerprint(some, how=how)}")

    def _recorded_name(self) -> str | None:
        path = self.root / ENDPOINT_RECORD
        if not path.is_file():
            return None
        try:
            name = json.loads(path.read_text())["model"]
            if not isinstance(name, str):
                raise TypeError(f"model is {json.dumps(name):.60}")
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}: not readable as the record of a server ({type(error).__name__}: {error}). Remove it, and name the server's model as "
                             "data.endpoint_model.") from error
        return name


def answer_share(recipe: DistillRecipe) -> int:
    """Answer the batches of data.shard, in this process and on one device, and nothing else; returns how many were missing. No run is made.

    Errors: as `run_distill` for the target, the prompts and the answers.
    """
    target_dir, t = Path(recipe.target), recipe.trainer
    target: nn.Module | None = None
    if recipe.data.endpoint is None:
        require_accelerator(t)
    config, tokenizer, dtype = load_config(target_dir), load_tokenizer(target_dir), AUTOCAST[t.precision] or torch.float32
    data = PromptData(recipe.data, tokenizer=tokenizer, vocab_size=config.vocab_size, max_length=config.max_position_embeddings)
    if recipe.data.endpoint is None:
        target = load_exported_model(target_dir, dtype=dtype).to("cuda" if torch.cuda.is_available() and t.accelerator != "cpu" else "cpu")
    answers = Answers(recipe, data, run_dir=Path(recipe.run), target=target, dtype=dtype, target_sha256=sha256_of_weights(target_dir),
                      eos_ids=end_token_ids(target_dir), tokenizer=tokenizer, config=config)
    made = answers.make_share()
    print(f"{answers.root}: share {recipe.data.shard} is answered, {made} batches of it now. When all shares are there, train without data.shard.", flush=True)
    return made


def make_rows(answers: Answers, *, run_dir: Path, meta: dict[str, Any], rank: Share | None) -> list[list[Tensor]]:
    """Packed rows of every source; the first time, the prompts are answered, by every rank its share."""
    d, data, rows, counts = answers.recipe.data, answers.data, [], []
    answers.record_server(share=rank)
    for number, (how, source, prompts) in enumerate(zip(answers.how, d.train, data.train, strict=True)):
        responses = generate_responses(answers.answerer, prompts, how=how, say=rank_zero_print, share=rank)
        unclear = len(prompts) * len(d.temperatures) - len(responses)
        if not responses:
            raise ValueError(f"data source {source.domain!r}: the tokens of none of its {unclear} answers can be told: the server sent no ids, or "
                             "not which token ended them. Answer by one that sends token_ids, or in process, into another --data.responses.")
        packed, left_out = packed_rows(responses, length=d.sequence_length, pad_id=how.pad_id)
        if not packed:
            raise ValueError(f"data source {source.domain!r}: no response fits data.sequence_length ({d.sequence_length}) or has two tokens. "
                             "Raise it, or add prompts.")
        tokens = sum(int(row[SUPERVISED].sum()) for row in packed)
        counts.append({"domain": source.domain, "source": describe_source(source), "prompts": len(prompts), "responses": len(responses), "left_out": left_out,
                       "rows": len(packed), "response_tokens": tokens,
                       **{k: n for k, n in (("duplicates", data.duplicates[number]), ("too_long", data.too_long[number]), ("tokens_unclear", unclear)) if n}})
        rank_zero_print(f"{source.domain}: {len(prompts)} prompts, {len(responses)} responses ({left_out} left out: longer than a row or under two tokens), "
                        f"{len(packed)} rows, {tokens:,} response tokens")
        if unclear:
            rank_zero_print(f"{source.domain}: {unclear} answers left out besides: the server gave text whose tokens cannot be told")
        rows.append(packed)
    meta["responses"] = counts
    write_meta(run_dir, meta)
    return rows


def heldout_texts(answers: Answers, *, rank: Share | None) -> dict[str, list[Response]]:
    """Greedy answers of the target to held-out prompts, by domain, for acceptance by a walk; kept beside the others. Empty without data.heldout_texts."""
    found = {}
    for domain, (prompts, how) in answers.heldout.items():
        responses = generate_responses(answers.target or _nobody, prompts, how=how, say=rank_zero_print, share=rank)
        found[domain] = [r for r in responses if r.response]
    return found


def check_features(recipe: DistillRecipe, *, target: nn.Module, target_sha256: str, layer_ids: tuple[int, ...]) -> None:
    """Before anything is answered. Errors: ValueError for a data.features that is a store of something else, as far as that is known without the rows."""
    if recipe.data.features is not None:
        check_store(Path(recipe.data.features), known={
            "target_sha256": target_sha256, "layer_ids": list(layer_ids), "dtype": str(next(target.parameters()).dtype), "precision": recipe.trainer.precision,
            "sequence_length": recipe.data.sequence_length, "hidden_size": _hidden_size(target)})


def store_features(
    rows: list[list[Tensor]], *, directory: Path, target: nn.Module, target_sha256: str, layer_ids: tuple[int, ...], recipe: DistillRecipe,
    trainer: L.Trainer, rank: Share | None,
) -> list[StoredRows]:
    """The sources' rows with the target's states, which are made where they are missing. Errors: as `write_features`."""
    t, device, parameter = recipe.trainer, trainer.strategy.root_device, next(target.parameters())
    everything = [row for some in rows for row in some]
    record = describe_store(everything, target_sha256=target_sha256, layer_ids=layer_ids, dtype=parameter.dtype, precision=t.precision,
                            hidden_size=_hidden_size(target), batch_size=t.batch_size)

    def read(rows_B4S: Tensor) -> tuple[Tensor, Tensor]:
        on_device = rows_B4S.to(device)
        with trainer.precision_plugin.forward_context():   # as a training step runs it
            states = run_target(target, on_device[:, IDS], documents_BS=on_device[:, DOCUMENTS], positions_BS=on_device[:, POSITIONS], layer_ids=layer_ids)
        features, hidden = (s.to("cpu", parameter.dtype) for s in states)
        return features, hidden

    write_features(directory, everything, record=record, read=read, batch_size=t.batch_size, say=rank_zero_print, part=rank)
    starts = [sum(len(some) for some in rows[:n]) for n in range(len(rows))]
    return [StoredRows(directory, some, record=record, first=start) for some, start in zip(rows, starts, strict=True)]


def start_ranks(trainer: L.Trainer) -> Share | None:
    """This process's share of the work before training, with all ranks running from here on; None for a single one."""
    if trainer.world_size == 1:
        return None
    launcher = trainer.strategy.launcher
    if launcher is not None:
        launcher.launch(lambda: None, trainer=trainer)   # Lightning starts them at most once: `fit` finds them there
    return Share(index=trainer.global_rank, count=trainer.world_size)


def _hidden_size(target: nn.Module) -> int:
    embedding: Tensor = target.get_input_embeddings().weight  # type: ignore[operator]
    return embedding.shape[1]


def _nobody(batches: Sequence[Batch]) -> Iterator[list[list[int] | None]]:
    """For answers that are all there."""
    assert not batches, "the endpoint is asked when an answer is missing"
    return iter(())


def _pad_id(tokenizer: Any, eos_ids: frozenset[int]) -> int:
    if tokenizer.pad_token_id is not None:
        return int(tokenizer.pad_token_id)
    if not eos_ids:
        raise ValueError("tokenizer: needs a pad or an eos token to pad batches with; it has neither. Set one in tokenizer_config.json.")
    return min(eos_ids)
