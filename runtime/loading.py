"""From an exported directory to what a server serves: executor, draft head, tokenizer, end tokens."""

from pathlib import Path

import torch
from transformers import AutoTokenizer

from ..dflash.checkpoint import DRAFT_DIRECTORY, read_config, read_draft, require_fitting_draft, target_record
from ..dflash.drafter import DFlashDrafter
from ..quant.checkpoint import end_token_ids
from .engine import MAX_TREE_BUDGET
from .server.served import Served
from .weights import load_executor, read_json

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


def load_served(out: Path, *, name: str | None, use_draft: bool, device: str, dtype: str | None,
                tree_budget: int | None = None) -> Served:
    """Load a directory of `kilotok export` and the draft head in its dflash/, if there is one and it is wanted.

    dtype: of weights and activations; None: float32 on a CPU, bfloat16 on a GPU.
    tree_budget: nodes of draft trees, which requests then get unless they say otherwise; None: chains.
    Errors: ValueError for a draft made for another target, naming both; FileNotFoundError, ValueError and NotImplementedError for a
        directory that cannot be served.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device: cuda asked for, but torch sees no CUDA device. Use cpu, or install a CUDA build of torch.")
    if tree_budget is not None and not 1 <= tree_budget <= MAX_TREE_BUDGET:
        raise ValueError(f"tree_budget: must lie in 1..{MAX_TREE_BUDGET}; got {tree_budget}. Leave it out for chains.")
    kind = DTYPES[dtype or ("bfloat16" if device == "cuda" else "float32")]
    if not out.is_dir():
        raise FileNotFoundError(f"{out.absolute()}: no such directory. Give a directory written by `kilotok export`.")
    config = read_json(out / "config.json")
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
    executor = load_executor(out, device=device, dtype=kind, taps=taps)
    make_drafter = None
    if taps:
        draft = read_draft(draft_dir, dtype=kind).to(device)

        def make_drafter() -> DFlashDrafter:
            return DFlashDrafter(draft, embedding_VD=executor.embedding_VD, head_VD=executor.head_VD)

    sha256 = record["sha256"]
    served_name = name or out.resolve().name
    return Served(
        name=served_name, executor=executor, make_drafter=make_drafter, tokenizer=tokenizer,
        eos_ids=end_token_ids(out), max_length=executor.max_length, tree_budget=tree_budget,
        fingerprint=f"{sha256[:12]}-{executor.description['dtype']}",
        description={**executor.description, "model": served_name, "weights_sha256": sha256, "max_length": executor.max_length, "draft": fit,
                     "threads": torch.get_num_threads()})
