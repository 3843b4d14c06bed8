# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Reading a buffer once and doing next to nothing: the roof that a memory-bound step is measured against, in the same run on the same machine."""

import statistics
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

# (words a program takes at once, loads in flight, warps, programs an SM): what was measured to come near the bandwidth of an H200; the best one counts
STREAM_BYTES = 1 << 30
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


def timed_us(call: Callable[[], object], *, repeats: int) -> list[float]:
    """Times of a call on the current GPU, us, in ascending order; a spin of the device lets the host run ahead."""
    for _ in range(3):
        call()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(1_000_000)
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return sorted(times)


def stream_bytes_per_s(*, programs: int, repeats: int) -> float:
    """Bytes a second of reading a GiB on the current GPU: the best median of LAUNCHES. programs: SMs."""
    words = torch.empty(STREAM_BYTES // 4, dtype=torch.int32, device="cuda").random_()

    def us(launch: tuple[int, int, int, int]) -> float:
        return statistics.median(timed_us(lambda: xor_words(words, launch=launch, programs=programs), repeats=repeats))

    return STREAM_BYTES / min(us(launch) for launch in LAUNCHES) * 1e6


@triton.jit
def _xor_kernel(words_ptr, out_ptr, num_words, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    number = tl.program_id(0)
    seen = tl.zeros((BLOCK,), tl.int32)
    for i in tl.range(number * BLOCK, num_words, tl.num_programs(0) * BLOCK, num_stages=STAGES):
        seen ^= tl.load(words_ptr + i + tl.arange(0, BLOCK))
    tl.store(out_ptr + number * BLOCK + tl.arange(0, BLOCK), seen)
