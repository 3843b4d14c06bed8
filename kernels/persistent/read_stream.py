# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Reading a buffer once and doing next to nothing: the roof that a memory-bound step is measured against, in the same run on the same machine."""

import torch
import triton
import triton.language as tl
from torch import Tensor

# (words a program takes at once, loads in flight, warps, programs an SM): what was measured to come near the bandwidth of an H200; the best one counts
LAUNCHES = ((4096, 4, 8, 1), (8192, 4, 16, 1), (4096, 4, 8, 2), (8192, 3, 8, 2), (4096, 4, 4, 4))


def xor_words_ref(words: Tensor) -> int:
    """All words combined by exclusive or."""
    found = 0
    for word in words.flatten().tolist():
        found ^= word
    return found


def xor_words(words: Tensor, *, launch: tuple[int, int, int, int] = LAUNCHES[0], programs: int) -> Tensor:
    """Read int32 `words` once; int32 [programs * block] whose words combined by exclusive or are `xor_words_ref`. One launch.

    Errors: ValueError for another dtype, or a number of words that is no multiple of a block.
    """
    block, stages, warps, per_sm = launch
    if words.dtype != torch.int32 or words.numel() % block or not words.is_contiguous():
        raise ValueError(f"xor_words: words must be contiguous int32, a multiple of {block}; got {words.dtype} {list(words.shape)}.")
    out = torch.empty(programs * per_sm * block, dtype=torch.int32, device=words.device)
    _xor_kernel[(programs * per_sm,)](words, out, words.numel(), BLOCK=block, STAGES=stages, num_warps=warps)
    return out


@triton.jit
def _xor_kernel(words_ptr, out_ptr, num_words, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    number = tl.program_id(0)
    seen = tl.zeros((BLOCK,), tl.int32)
    for i in tl.range(number * BLOCK, num_words, tl.num_programs(0) * BLOCK, num_stages=STAGES):
        seen ^= tl.load(words_ptr + i + tl.arange(0, BLOCK))
    tl.store(out_ptr + number * BLOCK + tl.arange(0, BLOCK), seen)
