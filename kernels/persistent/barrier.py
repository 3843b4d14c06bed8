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
# One thread adds, which releases what the threads before the barrier in front of it have written, and polls; the barrier behind passes the acquire on. What the
# counter was is read ahead of that, while the stores are on their way: nobody can complete the barrier before this thread has added. So the addition returns
# nothing. Between the two halves, while the addition travels and others are still at work, is time for what depends on nobody.
_BEFORE_PTX = gl.constexpr("""{
.reg .pred p;
mov.u32 $0, 0;
setp.eq.u32 p, $2, 0;
@p ld.relaxed.gpu.global.u32 $0, [$1];
}""")
# Operands: none; the counter, what to add, the thread
_ARRIVE_PTX = gl.constexpr("""{
.reg .pred p;
mov.u32 $0, 0;
setp.eq.u32 p, $3, 0;
@p red.release.gpu.global.add.u32 [$1], $2;
}""")
# Operands: gave up; the counter, the thread, the fault word, the most polls, the counter before
_WAIT_PTX = gl.constexpr(f"""{{
.reg .pred p; .reg .b32 now, polls;
mov.u32 $0, 0; mov.u32 polls, 0;
setp.ne.u32 p, $2, 0;
@p bra DONE;
POLL:
ld.acquire.gpu.global.u32 now, [$1];
xor.b32 now, now, $5;
setp.lt.s32 p, now, 0;
@p bra DONE;
add.u32 polls, polls, 1;
and.b32 now, polls, {_LOOK_EVERY - 1};
setp.ne.u32 p, now, 0;
@p bra POLL;
ld.relaxed.gpu.global.u32 now, [$3];
setp.ne.u32 p, now, 0;
@p bra GIVE_UP;
setp.lt.u32 p, polls, $4;
@p bra POLL;
GIVE_UP:
mov.u32 $0, 1;
DONE:
bar.warp.sync 0xffffffff;
}}""")


@gluon.jit
def _threads(NUM_WARPS: gl.constexpr):
    return gl.arange(0, NUM_WARPS * 32, gl.BlockedLayout([1], [32], [NUM_WARPS], [0]))


@gluon.jit
def _address(pointer, zeros):
    return zeros.to(gl.int64) + pointer.to(gl.int64, bitcast=True)


@gluon.jit
def arrive(barrier_ptr, PART: gl.constexpr, PARTITIONS: gl.constexpr, PROGRAMS: gl.constexpr, NUM_WARPS: gl.constexpr):
    """This consumer is done: what it has written can be read by whoever is past the barrier, and it reads no more of what others may then write. Returns what
    `wait_arrived` goes by. Behind it all threads of the consumer have come here."""
    thread = _threads(NUM_WARPS)
    zeros = thread * 0
    counter = _address(barrier_ptr, zeros)
    before_ptx: gl.constexpr = _BEFORE_PTX
    before = gl.inline_asm_elementwise(before_ptx, "=r,l,r", [counter, thread], dtype=gl.int32, is_pure=False, pack=1)
    cta_barrier()
    number = program(NUM_WARPS) * PARTITIONS + PART
    added = gl.where(number == 0, 0x7FFFFFFF - (PROGRAMS * PARTITIONS - 2), 1)     # with the 1s of all others 2**31
    ptx: gl.constexpr = _ARRIVE_PTX
    gl.inline_asm_elementwise(ptx, "=r,l,r,r", [counter, zeros + added, thread], dtype=gl.int32, is_pure=False, pack=1)
    return before


@gluon.jit
def wait_arrived(barrier_ptr, fault_ptr, polls, before, NUM_WARPS: gl.constexpr):
    """Until all have arrived; before: of `arrive`."""
    thread = _threads(NUM_WARPS)
    zeros = thread * 0
    ptx: gl.constexpr = _WAIT_PTX
    gave_up = gl.inline_asm_elementwise(ptx, "=&r,l,r,l,r,r", [_address(barrier_ptr, zeros), thread, _address(fault_ptr, zeros), zeros + polls, before],
                                        dtype=gl.int32, is_pure=False, pack=1)
    gl.store(fault_ptr + zeros, gave_up, mask=gave_up != 0)
    cta_barrier()


@gluon.jit
def step_barrier(barrier_ptr, fault_ptr, polls, PART: gl.constexpr, PARTITIONS: gl.constexpr, PROGRAMS: gl.constexpr, NUM_WARPS: gl.constexpr):
    """Both halves. Everything written before it by the consumers of any program can be read after it. All programs must be resident."""
    before = arrive(barrier_ptr, PART, PARTITIONS, PROGRAMS, NUM_WARPS)
    wait_arrived(barrier_ptr, fault_ptr, polls, before, NUM_WARPS)
