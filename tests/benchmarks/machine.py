"""The line that every table of a benchmark starts with."""

import subprocess
from pathlib import Path

import torch
import triton


def environment() -> str:
    properties = torch.cuda.get_device_properties(0)
    asked = ["nvidia-smi", "--query-gpu=driver_version,clocks.max.sm,clocks.max.mem", "--format=csv,noheader", "--id=0"]
    driver = subprocess.run(asked, capture_output=True, text=True).stdout.strip() or "unknown"
    commit = subprocess.run(["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    return (f"{properties.name}, {properties.multi_processor_count} SMs, {properties.total_memory / 2**30:.0f} GiB; driver, SM and memory clock: {driver}; "
            f"torch {torch.__version__}, triton {triton.__version__}, CUDA {torch.version.cuda}; commit {commit or 'unknown'}")
