# mypy: disable-error-code="no-untyped-def,untyped-decorator,assignment"
# ruff: noqa: RUF005 (a tuple of tensors grows by +)
"""A hand-over between programs of a resident step without a barrier over the grid: every word says itself whether it is there.

A word is 8 bytes, as fp32 [..., 2]: the bits of an fp32 value, and of an int32 tag. An aligned store and load of 8 bytes is one access, so whoever finds the
tag that it expects has the value that was stored with it: one store and one load, where a barrier takes a store, a fence, an addition, a poll and a load, each
of which waits for the one before. It is NCCL's LL protocol. It orders nothing else that the writer wrote.

    tags       Of a resident launch first + number of the layer in the launch, where the host has `first` advance by all that a launch may use (`TagCounter`):
               no two layers of any launches have the same, so a word that is left over never matches. Memory begins as zeros, and no tag is 0. A launch of one
               phase has LAUNCH_TAG, which no resident launch has; there the order of launches says that words are of this layer.
    reuse      A word is written again one layer later. In between are barriers over the grid, at which every reader of the word arrives behind its read.
    fault      A poll is bounded as `step_barrier` is, sets the same fault word and goes on with whatever is there.

Words that a lane needs are loaded together, before the first of their tags is looked at: a poll is one trip to L2 however many there are.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..moe.stream import store_tagged as store_tagged

LAUNCH_TAG = 1 << 30            # of launches of one phase; below are those of resident launches. Neither is a NaN's bits, which tests fill memory with.


@dataclass
class TagCounter:
    """Which tags resident launches have not used yet, of all kernels that write these words."""

    words: list[Tensor]
    next: int = 1

    @staticmethod
    def of(*shapes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> "TagCounter":
        """dtype: fp32, or of a twin's words, whose tags nobody reads."""
        return TagCounter([torch.zeros(*shape, 2, dtype=dtype, device=device) for shape in shapes])

    def take(self, count: int) -> int:
        """The first of as many tags, for the next launch. Every few hours all tags are used up: then no word keeps one."""
        if self.next + count > LAUNCH_TAG:
            for tensor in self.words:
                tensor.zero_()
            self.next = 1
        first, self.next = self.next, self.next + count
        return first


@gluon.constexpr_function
def _load_ptx(together, places, stride):
    """Operands: together * places values out; of each of `together` elements, of which the first counts, address, whether it lives, tag, address of the fault
    word, most polls. Between two looks at the fault word are 1024 polls."""
    values, first = together * places, together * places
    address, live, tag, fault, most = (f"${first + i * together}" for i in range(5))
    lines = [f"// {together} words at {places} places, {stride} words apart", ".reg .pred p;", ".reg .b32 polls, other, now;", f".reg .b32 tag<{values}>;",
             f".reg .b64 word<{values}>;", "mov.u32 polls, 0;", *(f"mov.u32 ${i}, 0;" for i in range(values)), f"setp.eq.u32 p, {live}, 0;", "@p bra DONE;",
             "POLL:"]
    for place in range(places):
        for i in range(0, together, 2):
            at, word = f"[{address} + {8 * (place * stride + i)}]", place * together + i
            if together == 1:
                lines.append(f"ld.relaxed.gpu.global.b64 word{word}, {at};")
            else:
                lines.append(f"ld.relaxed.gpu.global.v2.b64 {{word{word}, word{word + 1}}}, {at};")
    lines += [f"mov.b64 {{${i}, tag{i}}}, word{i};" for i in range(values)]
    lines += [f"xor.b32 other, tag0, {tag};"]
    for i in range(1, values):
        lines += [f"xor.b32 now, tag{i}, {tag};", "or.b32 other, other, now;"]
    lines += ["setp.eq.u32 p, other, 0;", "@p bra DONE;", "add.u32 polls, polls, 1;", "and.b32 now, polls, 1023;", "setp.ne.u32 p, now, 0;",
              "@p bra POLL;", f"ld.relaxed.gpu.global.u32 now, [{fault}];", "setp.ne.u32 p, now, 0;", "@p bra DONE;", f"setp.lt.u32 p, polls, {most};",
              "@p bra POLL;", "mov.u32 now, 1;", f"st.relaxed.gpu.global.u32 [{fault}], now;", "DONE:", "bar.warp.sync 0xffffffff;"]
    return "{\n" + "\n".join(lines) + "\n}"


@gluon.constexpr_function
def _constraints_of(together, places):
    return ",".join(["=&r"] * (together * places) + ["l"] * together + ["r"] * (2 * together) + ["l"] * together + ["r"] * together)


@gluon.constexpr_function
def _types_of(places):
    return (gl.int32,) * places


@gluon.jit
def load_tagged(words_ptr, live, tag, fault_ptr, polls, TOGETHER: gl.constexpr, PLACES: gl.constexpr, STRIDE: gl.constexpr):
    """PLACES tensors of fp32 values, STRIDE words apart, once they have the tag; 0 where not `live`.

    TOGETHER: consecutive elements of a lane, 1 or even, that are consecutive words; words_ptr and live of all of them are those of the first. Of a polling
    lane all words come in one trip.
    """
    ptx: gl.constexpr = _load_ptx(TOGETHER, PLACES, STRIDE)
    constraints: gl.constexpr = _constraints_of(TOGETHER, PLACES)
    found = gl.inline_asm_elementwise(ptx, constraints, [words_ptr.to(gl.int64, bitcast=True), live.to(gl.int32), tag,
                                                         fault_ptr.to(gl.int64, bitcast=True), polls],
                                      dtype=_types_of(PLACES), is_pure=False, pack=TOGETHER)
    values = ()
    for place in gl.static_range(PLACES):
        values = values + (found[place].to(gl.float32, bitcast=True),)
    return values
