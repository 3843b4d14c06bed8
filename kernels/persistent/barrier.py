# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Where all programs of a resident step wait for each other.

A counter whose top bit turns when all have come, as in `moe/layer.py`: it needs no reset and may wrap. The wait is bounded. A program that polls in vain
for `polls` rounds (about 0.7 us each) sets the fault word and goes on with whatever is there; the others look at the fault word now and then while they
poll, so that after one fault all of them run to their ends at once instead of waiting out every barrier of the model. What such a step gives is not
valid, and the host says so.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..moe.stream import cta_barrier, program

SECONDS_OF_POLLS = 1 << 20          # in a second and less: a poll is one trip to L2
_LOOK_EVERY = 1024                  # polls between two looks at the fault word
# Operands: gave up; the counter, what to add, the thread, the fault word, the most polls, the counter before. One thread adds, which releases what the
# threads before the barrier in front of it have written, and polls; the barrier behind passes the acquire on. What the counter was is read ahead of that,
# while the stores are on their way: nobody can complete the barrier before this thread has added. So the addition returns nothing, and a poll follows it at
# once instead of a trip to L2 later.
_BEFORE_PTX = gl.constexpr("""{
.reg .pred p;
mov.u32 $0, 0;
setp.eq.u32 p, $2, 0;
@p ld.relaxed.gpu.global.u32 $0, [$1];
}""")
_WAIT_PTX = gl.constexpr(f"""{{
.reg .pred p; .reg .b32 now, polls;
mov.u32 $0, 0; mov.u32 polls, 0;
setp.ne.u32 p, $3, 0;
@p bra DONE;
red.release.gpu.global.add.u32 [$1], $2;
POLL:
ld.acquire.gpu.global.u32 now, [$1];
xor.b32 now, now, $6;
setp.lt.s32 p, now, 0;
@p bra DONE;
add.u32 polls, polls, 1;
and.b32 now, polls, {_LOOK_EVERY - 1};
setp.ne.u32 p, now, 0;
@p bra POLL;
ld.relaxed.gpu.global.u32 now, [$4];
setp.ne.u32 p, now, 0;
@p bra GIVE_UP;
setp.lt.u32 p, polls, $5;
@p bra POLL;
GIVE_UP:
mov.u32 $0, 1;
DONE:
bar.warp.sync 0xffffffff;
}}""")


@gluon.jit
def step_barrier(barrier_ptr, fault_ptr, polls, PART: gl.constexpr, PARTITIONS: gl.constexpr, PROGRAMS: gl.constexpr, NUM_WARPS: gl.constexpr):
    """Everything written before it by the consumers of any program can be read after it. All programs must be resident."""
    thread = gl.arange(0, NUM_WARPS * 32, gl.BlockedLayout([1], [32], [NUM_WARPS], [0]))
    zeros = thread * 0
    counter = zeros.to(gl.int64) + barrier_ptr.to(gl.int64, bitcast=True)
    before_ptx: gl.constexpr = _BEFORE_PTX
    before = gl.inline_asm_elementwise(before_ptx, "=r,l,r", [counter, thread], dtype=gl.int32, is_pure=False, pack=1)
    cta_barrier()
    number = program(NUM_WARPS) * PARTITIONS + PART
    added = gl.where(number == 0, 0x7FFFFFFF - (PROGRAMS * PARTITIONS - 2), 1)     # with the 1s of all others 2**31
    ptx: gl.constexpr = _WAIT_PTX
    gave_up = gl.inline_asm_elementwise(ptx, "=&r,l,r,r,l,r,r", [counter, zeros + added, thread, zeros.to(gl.int64) + fault_ptr.to(gl.int64, bitcast=True),
                                                                 zeros + polls, before], dtype=gl.int32, is_pure=False, pack=1)
    gl.store(fault_ptr + zeros, gave_up, mask=gave_up != 0)
    cta_barrier()
