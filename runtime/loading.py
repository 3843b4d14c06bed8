"""From an exported directory to what a server serves: executor, draft head, tokenizer, end tokens."""

from pathlib import Path

import torch
from transformers import AutoTokenizer

from ..dflash.checkpoint import DRAFT_DIRECTORY, read_config, read_draft, require_fitting_draft, target_record
from ..dflash.drafter import DFlashDrafter
from ..quant.checkpoint import end_token_ids
from ..quant.checkpoint.metadata import read_json
from .engine import MAX_TREE_BUDGET
from .executors import choose_executor, load_best_executor
from .pacing import AUTO, DraftLength
from .reference import ReferenceExecutor
from .server.served import Served

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def load_served(out: Path, *, name: str | None, use_draft: bool, device: str, dtype: str | None,
                tree_budget: int | None = None, executor: str = "auto", max_running: int = 8,
                draft_length: DraftLength = AUTO) -> Served:
    """Load a directory of `kilotok export` and the draft head in its dflash/, if there is one and it is wanted.

    device, executor: see `choose_executor`. dtype: of weights and activations; None: float32 on a CPU, bfloat16 on a GPU.
    tree_budget: nodes of draft trees, which requests then get unless they say otherwise; None: chains.
    max_running: requests at a time, for which the persistent executor has room.
    draft_length: of requests that do not say: "auto", or proposals a round at most.
    Errors: ValueError for a draft made for another target, naming both; FileNotFoundError, ValueError and NotImplementedError for a
        directory that cannot be served.
    """
    if tree_budget is not None and not 1 <= tree_budget <= MAX_TREE_BUDGET:
        raise ValueError(f"tree_budget: must lie in 1..{MAX_TREE_BUDGET}; got {tree_budget}. Leave it out for chains.")
    if not out.is_dir():
        raise FileNotFoundError(f"{out.absolute()}: no such directory. Give a directory written by `kilotok export`.")
    config = read_json(out / "config.json")
    choice = choose_executor(out, executor=executor, device=device, dtype=dtype)
    draft_dir = out / DRAFT_DIRECTORY
    has_draft = draft_dir.exists()   # a file of that name is no draft, and says so on reading
    record = target_record(out)
    taps: tuple[int, ...] = ()
    if use_draft and has_draft:
        fit = require_fitting_draft(draft_dir, target=out, target_config=config, record=record)
        taps = read_config(draft_dir).target_layer_ids
    else:
        fit = "draft: none in dflash/; plain decoding" if not has_draft else "draft: left out (--no-draft); plain decoding"
    if tree_budget is not None and not taps:
        raise ValueError(f"tree_budget: needs a draft head; got {tree_budget}, and {fit}. Leave it out.")
    if not any((out / name).is_file() for name in TOKENIZER_FILES):
        raise FileNotFoundError(f"{out}: no tokenizer ({' or '.join(TOKENIZER_FILES)}). transformers would make an empty one up: copy the model's own.")
    tokenizer = AutoTokenizer.from_pretrained(out)
    runs, reason = load_best_executor(out, choice, dtype=dtype, taps=taps, num_slots=max_running, may_fall_back=executor == "auto",
                                      draft_dir=draft_dir if taps else None)
    make_drafter = None
    if taps:
        draft = read_draft(draft_dir, dtype=runs.embedding_VD.dtype).to(runs.device)

        def make_drafter() -> DFlashDrafter:
            return DFlashDrafter(draft, embedding_VD=runs.embedding_VD, head_VD=runs.head_VD)

    sha256 = record["sha256"]
    served_name = name or out.resolve().name
    kind = "" if isinstance(runs, ReferenceExecutor) else "persistent-"    # whose last bits are others
    return Served(
        name=served_name, executor=runs, make_drafter=make_drafter, tokenizer=tokenizer,
        eos_ids=end_token_ids(out), max_length=runs.max_length, tree_budget=tree_budget,
        draft_length=draft_length if taps else None, fingerprint=f"{sha256[:12]}-{kind}{runs.description['dtype']}",
        description={**runs.description, "executor_reason": reason, "model": served_name, "weights_sha256": sha256, "max_length": runs.max_length, "draft": fit,
                     **({"draft_length": draft_length} if taps else {}),
                     "threads": torch.get_num_threads()})
