"""Checkpoints that are whole or absent, whenever the process dies."""

import os
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes beside the target, syncs, renames, then removes the older ones. Lightning's own goes through the temporary folder, which may be another disk."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Errors: OSError from a full disk, after the partial file is removed; earlier checkpoints stay."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        for stale in target.parent.glob(".*.partial"):
            stale.unlink()
        partial = target.with_name(f".{target.name}.partial")
        try:
            with partial.open("wb") as f:
                torch.save(checkpoint, f)
                f.flush()
                os.fsync(f.fileno())
            partial.replace(target)
            for older in target.parent.glob("step-[0-9]*.ckpt"):   # also the one a resume started from, which Lightning forgets
                if older != target:
                    older.unlink()
        except (OSError, RuntimeError) as error:   # torch.save reports a short write as a RuntimeError
            partial.unlink(missing_ok=True)
            raise OSError(f"checkpoint: writing {target} failed ({error}). Free some space and continue with --resume; "
                          "earlier checkpoints are intact.") from error
