"""Learning-rate curves: pure functions of the step."""

import math


def warmup_cosine(step: int, *, warmup_steps: int, max_steps: int, final_ratio: float) -> float:
    """Share of the peak rate at `step` (from 0): linear up over warmup_steps, then a cosine down to final_ratio."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    done = min(1.0, (step - warmup_steps) / max(1, max_steps - warmup_steps))
    return final_ratio + (1 - final_ratio) * 0.5 * (1 + math.cos(math.pi * done))
