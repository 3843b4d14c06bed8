"""The draft of a distillation run, finished or not, taken from its newest checkpoint."""

from pathlib import Path
from typing import Any

from ..quant.checkpoint import new_directory
from ..quant.checkpoint.run import newest_checkpoint, read_checkpoint, read_meta, step_of
from .checkpoint import write_draft
from .config import DraftConfig
from .model import DraftModel

KIND = "dflash-distill"
WEIGHTS_PREFIX = "draft."                                                       # of the trained module inside a Lightning checkpoint
RECORDED = ("target", "started_from", "features_from", "responses", "parity", "before", "after", "max_steps", "versions", "device", "commit")


def export_draft(run_dir: Path, out: Path) -> int:
    """Write the draft of RUN's newest checkpoint to `out`; the step it is of.

    Errors: FileNotFoundError without a checkpoint, ValueError for a run of another kind or a checkpoint that does not fit.
    """
    meta = read_meta(run_dir)
    if meta["kind"] != KIND:
        raise ValueError(f"{run_dir}: is a run of kind {meta['kind']!r}, not of `train dflash-distill`.")
    checkpoint = newest_checkpoint(run_dir)
    if checkpoint is None:
        raise FileNotFoundError(f"{run_dir}: no checkpoint yet. Continue the run with --resume.")
    draft = DraftModel(DraftConfig.from_json(meta["draft_config"], where=f"{run_dir}: draft_config"))
    state = {name.removeprefix(WEIGHTS_PREFIX): tensor for name, tensor in read_checkpoint(checkpoint).items() if name.startswith(WEIGHTS_PREFIX)}
    own_head, own_embedding = state.pop("own_head", None), state.pop("own_embedding", None)   # frozen ones of a draft it started from
    if draft.draft_ids is not None and own_head is None:
        remedy = f"It is finished: use what it wrote to {meta['draft']}." if meta["status"] == "complete" else "Continue it with --resume."
        raise NotImplementedError(f"{run_dir}: a draft with a reduced vocabulary goes with rows of its target's head, which the run writes when it is "
                                  f"finished. {remedy}")
    try:
        draft.load_state_dict(state)
    except RuntimeError as error:
        raise ValueError(f"{checkpoint}: does not hold the draft that the run describes ({str(error).splitlines()[0]}).") from error
    draft.own_head, draft.own_embedding = own_head, own_embedding
    with new_directory(out) as partial:
        write_draft(partial, draft, metadata=draft_record(meta, step=step_of(checkpoint)))
    return step_of(checkpoint)


def draft_record(meta: dict[str, Any], *, step: int) -> dict[str, Any]:
    """What a draft's own metadata keeps of its run."""
    return {"step": step, **{key: meta[key] for key in RECORDED if key in meta}}
