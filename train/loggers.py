"""What a run says beside its own lines: Weights & Biases when the recipe asks for it, and Lightning without what does not concern it."""

import logging
import netrc
import os
import socket
import warnings
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

EXPECTED_WARNINGS = (
    r"Found \d+ module\(s\) in eval mode",              # on purpose, see QATModule
    r"Checkpoint directory .* exists and is not empty",  # a resumed run
    r".*does not have many workers",                     # the rows are in memory
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",  # inside Lightning
)


def quiet_lightning() -> None:
    """Hide the warnings named above and the advertisement for another logger; everything else is still printed."""
    for message in EXPECTED_WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(_is_not_a_tip)


def _is_not_a_tip(record: logging.LogRecord) -> bool:
    return "litlogger" not in record.getMessage()


def wandb_logger(project: str | None, *, run_dir: Path) -> list[Any]:
    """[] or [WandbLogger]; offline, said aloud, without a network or an API key. Files go to RUN/wandb."""
    if project is None:
        return []
    from lightning.pytorch.loggers import WandbLogger

    reason = _offline_reason()
    if reason is not None:
        print(f"wandb: offline ({reason}); upload later with `wandb sync {run_dir}/wandb/offline-run-*`", flush=True)
    return [WandbLogger(project=project, name=run_dir.name, save_dir=str(run_dir), offline=reason is not None)]


def _offline_reason() -> str | None:
    mode = os.environ.get("WANDB_MODE")
    if mode in ("offline", "disabled", "dryrun"):
        return f"WANDB_MODE={mode}"
    url = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai"))
    host, port = url.hostname or "", url.port or (80 if url.scheme == "http" else 443)
    try:
        socket.create_connection((host, port), timeout=3).close()
    except OSError as error:
        return f"{host} cannot be reached: {error}"
    if not os.environ.get("WANDB_API_KEY") and not _has_netrc_entry(host):
        return "no API key; run `wandb login` or set WANDB_API_KEY"
    return None


def _has_netrc_entry(host: str) -> bool:
    try:
        return netrc.netrc().authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
