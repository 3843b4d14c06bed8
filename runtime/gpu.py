"""The GPU of this process, as far as the persistent step asks for one."""

from dataclasses import dataclass

import torch

from ..kernels.persistent.step_code import SHARED_BYTES

CAPABILITY = (9, 0)     # Hopper: H100, H200


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """What is asked of it."""

    name: str
    capability: tuple[int, int]
    shared_bytes: int       # that a program can have
    num_sms: int


def find_gpu() -> Gpu | None:
    """The current CUDA device; None where torch sees none."""
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return Gpu(name=properties.name, capability=(properties.major, properties.minor), num_sms=properties.multi_processor_count,
               shared_bytes=properties.shared_memory_per_block_optin)   # type: ignore[attr-defined]  # torch's stubs lack it


def obstacle_of(gpu: Gpu | None) -> str | None:
    """Why the persistent step does not run on it; None: it does."""
    if gpu is None:
        return "torch sees no CUDA device here"
    if gpu.capability != CAPABILITY:
        return f"{gpu.name} has compute capability {gpu.capability[0]}.{gpu.capability[1]}"
    if gpu.shared_bytes < SHARED_BYTES:
        return f"{gpu.name} gives a program {gpu.shared_bytes} bytes of shared memory, and the step takes {SHARED_BYTES}"
    return None
