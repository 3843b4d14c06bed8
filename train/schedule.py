"""Learning-rate curves: pure functions of the step."""

import math
from typing import Literal

Schedule = Literal["cosine", "linear", "constant", "wsd"]


def warmup_cosine(step: int, *, warmup_steps: int, max_steps: int, final_ratio: float) -> float:
    """Share of the peak rate at `step` (from 0): linear up over warmup_steps, then a cosine down to final_ratio."""
    return rate_share(step, schedule="cosine", warmup_steps=warmup_steps, max_steps=max_steps, final_ratio=final_ratio, decay_share=0.0)


def rate_share(step: int, *, schedule: Schedule, warmup_steps: int, max_steps: int, final_ratio: float, decay_share: float) -> float:
    """Share of the peak rate at `step` (from 0): linear up over warmup_steps, then the schedule.

    cosine and linear go down to final_ratio at max_steps and stay there; constant stays at 1; wsd (warm-up, stable, decay) stays at 1
    and goes linearly down to final_ratio over the last decay_share of max_steps, though never before the warm-up is over.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if schedule == "constant":
        return 1.0
    start = max(warmup_steps, max_steps - round(decay_share * max_steps)) if schedule == "wsd" else warmup_steps
    done = min(1.0, max(0, step - start) / max(1, max_steps - start))
    if schedule == "cosine":
        return final_ratio + (1 - final_ratio) * 0.5 * (1 + math.cos(math.pi * done))
    return final_ratio + (1 - final_ratio) * (1 - done)
