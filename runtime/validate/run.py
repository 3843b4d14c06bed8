"""`kilotok validate`: check the inputs, serve the directory, ask, measure, write one report."""

import importlib.util
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ...dflash.checkpoint import DRAFT_DIRECTORY, HELDOUT_PROMPTS
from ...dflash.metrics import counts_of
from ...quant.archs import check_model_dir, load_tokenizer
from ...quant.checkpoint import CheckpointReader
from ..executors import choose_executor
from ..weights import load_executor
from .client import Client, has_text_by, serve_command, start_server
from .figures import cost, failures_of, summarize
from .options import ValidateOptions
from .probes import TOP_P, modes_for, run_probes
from .prompts import ALL, Prompt, choose, read_prompts
from .provenance import describe, find_parent, sizes
from .quality import LogitsOf, add, measure_texts, render
from .report import summary_markdown, write_report
from .stats import not_measured, reason_of

NOT_FINITE = "logits of the target or of its parent are NaN or infinite"


def validate(options: ValidateOptions, *, command: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, write report.json, report.md and report.html, print the summary; the report, with `ok` and `failures`.

    command: starts the server; None: `kilotok serve` of this installation.
    Errors: ValueError and FileNotFoundError for wrong inputs, before anything runs where that can be known; RuntimeError
        when the server fails or does not keep its contract. The server is stopped in every case.
    """
    out, directory = options.out, options.report or options.out / "validation"
    _require_packages()
    _require_writable(directory)
    check_model_dir(out)
    CheckpointReader(out)   # names a missing or damaged weight file
    path = options.prompts or out / DRAFT_DIRECTORY / HELDOUT_PROMPTS
    rows = read_prompts(path)
    prompts = choose(rows, per_domain=options.prompts_per_domain)
    no_draft = None if (out / DRAFT_DIRECTORY / "config.json").is_file() else f"no draft head in {out.name}/{DRAFT_DIRECTORY}"
    parent = find_parent(out, given=options.parent)
    choice = choose_executor(out, executor=options.executor, device=options.device)
    tokenizer = load_tokenizer(out)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    with (
        start_server(command or serve_command(out, device=choice.device, executor=options.executor, threads=options.threads)) as server,
        Client(server, has_text=has_text_by(tokenizer)) as client,
    ):
        health = {name: value for name, value in client.health().items() if name != "drafting"}   # of which nothing is measured yet
        answers = run_probes(client, prompts, modes=modes_for(has_draft=no_draft is None, draft_length=options.draft_length), max_tokens=options.max_tokens,
                             temperature=options.temperature, draft_length=options.draft_length)
        drafting = client.health().get("drafting")
    figures = summarize(answers, no_draft=no_draft)
    quality = _quality(options, device=choice.device, prompts=prompts, parent=parent, tokenizer=tokenizer)
    failures = [*failures_of(figures), *([f"quality: {reason_of(quality)}"] if reason_of(quality) == NOT_FINITE else [])]
    report: dict[str, Any] = {
        "ok": not failures, "failures": failures, **figures,
        "quality": quality, "drafting": drafting,
        "sizes": sizes(out, no_draft=no_draft),
        "settings": {"prompts": str(path), "prompts_in_file": len(rows), "prompts_asked": len(prompts), "max_tokens": options.max_tokens,
                     "temperature": options.temperature, "top_p": TOP_P, "draft_length": options.draft_length, "quality_tokens": options.quality_tokens,
                     "quality_dtype": str(_quality_dtype(choice.device)).removeprefix("torch.")},
        "provenance": describe(out, device=choice.device, threads=options.threads, health=health),
        "requests": [{**asdict(a), "rounds": [counts_of(r) for r in a.rounds]} for a in answers]}
    if options.price_per_hour is not None:
        report["cost"] = cost(figures["speed"], price_per_hour=options.price_per_hour)
    html = write_report(report, directory=directory)
    print(f"\n{summary_markdown(report)}\nreport: {html}", flush=True)
    return report


def _quality(options: ValidateOptions, *, device: str, prompts: Sequence[Prompt], parent: Path | str, tokenizer: Any) -> dict[str, Any]:
    """Target and parent on the reference executor of this process."""
    if all(p.reference is None for p in prompts):
        return dict(not_measured("no held-out row has a reference"))
    dtype = _quality_dtype(device)
    executor = load_executor(options.out, device=device, dtype=dtype)
    texts = render(prompts, tokenizer=tokenizer, max_length=executor.max_length)
    parent_logits = _logits_of(load_executor(parent, device=device, dtype=dtype)) if isinstance(parent, Path) else None
    sums = measure_texts(texts, target=_logits_of(executor), parent=parent_logits, max_tokens=options.quality_tokens)
    if not sums:
        return dict(not_measured("every reference text has a single token"))
    if not all(s.is_finite for s in sums.values()):
        return dict(not_measured(NOT_FINITE))
    figures: dict[str, Any] = {"domains": {**{d: s.to_json() for d, s in sums.items()}, ALL: add(sums.values()).to_json()}}
    figures["parent"] = str(parent) if isinstance(parent, Path) else not_measured(parent)
    return figures


def _quality_dtype(device: str) -> torch.dtype:
    return torch.bfloat16 if device == "cuda" else torch.float32   # two large models in fp32 do not fit one GPU


def _logits_of(executor: Any) -> LogitsOf:
    return lambda ids: executor.open().read(ids).logits_TV


def _require_packages() -> None:
    missing = [name for name in ("openai", "matplotlib") if importlib.util.find_spec(name) is None]
    if missing:
        raise RuntimeError(f"validate: needs the package {' and '.join(missing)}, not installed here. Run: pip install 'kilotok[serve]'.")


def _require_writable(directory: Path) -> None:
    """OSError now rather than after the measurement."""
    existing = directory.absolute()
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise NotADirectoryError(f"{directory}: must be a directory that can be written, or the place for one; got {existing}. "
                                 "Choose another with --report DIR.")
