"""The expert kernels built for sm_90 without a GPU, and what the assembler made of them."""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from kilotok.kernels.moe.device import down_kernel, gate_up_kernel
from kilotok.kernels.moe.layer import _layer_kernel, layer_constants
from kilotok.kernels.moe.product import SWIZZLE_NONE, Stages, constants_of
from kilotok.kernels.mx.layouts import FragmentLayout, choose_layout

# kernel arguments that are pointers, by what they point to; the others are i32
POINTERS = {name: kind for kind, names in {
    "*bf16": "out_ptr inter_out_ptr",
    "*fp32": "bias_ptr up_bias_ptr down_bias_ptr partials_ptr y_ptr weights_ptr",
    "*i32": "x_ptr inter_ptr experts_ptr pairs_ptr num_tiles_ptr num_experts_ptr barrier_ptr fault_ptr",
}.items() for name in names.split()}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One model's experts, or a rank's part of them."""

    name: str
    hidden: int
    channels: int
    experts: int
    per_token: int
    activation: str = "silu"
    bias: bool = False

    def __str__(self) -> str:
        return self.name

    @property
    def gate_up(self) -> FragmentLayout:
        return choose_layout(2 * self.channels, self.hidden)

    @property
    def down(self) -> FragmentLayout:
        return choose_layout(self.hidden, self.channels)


SHAPES = (
    Shape(name="Qwen3-30B-A3B", hidden=2048, channels=768, experts=128, per_token=8),
    Shape(name="MiMo-V2.5-Pro, 1 of 8", hidden=6144, channels=256, experts=384, per_token=8),
    Shape(name="gpt-oss-20b", hidden=2880, channels=2880, experts=32, per_token=4, activation="clamped_swiglu", bias=True),
    Shape(name="SmolLM2-MoE", hidden=576, channels=384, experts=8, per_token=2),
    Shape(name="pocket", hidden=256, channels=128, experts=8, per_token=2),
)


@dataclass(frozen=True, kw_only=True)
class Loop:
    """An innermost loop with MMAs: a batch of stages of one product."""

    num_mma: int
    instructions: int        # all of it: with waits, sums, activation and stores
    block_instructions: int  # of its basic blocks with MMAs in them
    local_accesses: int      # loads and stores of the stack

    @property
    def per_mma(self) -> float:
        return self.instructions / self.num_mma

    @property
    def per_mma_in_blocks(self) -> float:
        return self.block_instructions / self.num_mma

    def __str__(self) -> str:
        return f"{self.num_mma} MMAs, {self.per_mma:.2f} instructions an MMA ({self.per_mma_in_blocks:.2f} in the blocks with MMAs)"


@dataclass(frozen=True, kw_only=True)
class Built:
    """What the binary says of itself."""

    registers: int
    stack_bytes: int
    local_bytes: int
    shared_bytes: int
    loops: tuple[Loop, ...]
    sass: str
    ptx: str

    def __str__(self) -> str:
        return (f"{'; '.join(map(str, self.loops))}; {self.registers} registers, {self.stack_bytes}+{self.local_bytes} bytes of stack and local memory, "
                f"{self.shared_bytes / 1024:.1f} KB shared")


def build(kernel: Any, constants: dict[str, Any], descriptors: dict[str, str], *, num_warps: int = 8, maxnreg: int | None = None,
          cooperative: bool = False) -> Built:
    """Compile for sm_90, for tensors on 16-byte boundaries."""
    names = list(kernel.arg_names)
    assert set(constants) == {n for n in names if n.isupper() or len(n) == 1}, "a launch would miss or refuse some of these constants"
    signature = {n: "constexpr" if n in constants else descriptors.get(n) or POINTERS.get(n, "i32") for n in names}
    attrs = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n in POINTERS}
    source = GluonASTSource(kernel, signature, {n: constants[n] for n in names if n in constants}, attrs=attrs)
    options = {"num_warps": num_warps, "launch_cooperative_grid": cooperative} | ({"maxnreg": maxnreg} if maxnreg else {})
    return inspect(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options))


def inspect(compiled: Any) -> Built:
    """Read the binary's resource usage and its SASS."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = _tool(triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name)
        sass = _tool(triton.knobs.nvidia.nvdisasm.path, "-c", file.name)
    found = re.search(r"REG:(\d+) STACK:(\d+).*?LOCAL:(\d+)", usage)
    assert found is not None, usage
    registers, stack, local = map(int, found.groups())
    return Built(registers=registers, stack_bytes=stack, local_bytes=local, shared_bytes=compiled.metadata.shared, loops=mma_loops(sass), sass=sass,
                 ptx=compiled.asm["ptx"])


def _tool(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


_LABEL = re.compile(r"^(\.L_x_\d+):")
_INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)(.*?);")


def mma_loops(sass: str) -> tuple[Loop, ...]:
    """The loops with MMAs, in the order of the code."""
    opcodes: list[str] = []
    labels: dict[str, int] = {}
    branches: list[tuple[int, str]] = []
    for line in sass.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(opcodes)
        elif instruction := _INSTRUCTION.match(line):
            if instruction[2].startswith("BRA") and (target := re.search(r"\.L_x_\d+", instruction[3])):
                branches.append((len(opcodes), target[0]))
            opcodes.append(instruction[2])
    edges = sorted({0, len(opcodes), *labels.values(), *(at + 1 for at, _ in branches)})
    jumps = {(labels[target], at) for at, target in branches if labels.get(target, at + 1) <= at}
    # A retry of a wait lies behind its loop and jumps back into the middle of it: no loop of its own.
    back = sorted((end - start, start, end) for start, end in jumps if not any(s < start <= e < end for s, e in jumps))
    held: dict[tuple[int, int], list[int]] = {}
    for i, opcode in enumerate(opcodes):
        if opcode.startswith("HMMA"):
            smallest = next(((start, end) for _, start, end in back if start <= i <= end), None)
            assert smallest is not None, "an MMA is in no loop"
            held.setdefault(smallest, []).append(i)
    assert held, "no MMA in the kernel"
    return tuple(Loop(num_mma=len(mma), instructions=end - start + 1,
                      block_instructions=sum(b - a for a, b in pairwise(edges) if any(a <= i < b for i in mma)),
                      local_accesses=sum(opcode.startswith(("LDL", "STL")) for opcode in opcodes[start:end + 1]))
                 for (start, end), mma in sorted(held.items()))


def descriptor_types(layout: FragmentLayout, stages: Stages, *, prefix: str = "") -> dict[str, str]:
    """The types of a weight's two TMA descriptors."""
    box = constants_of(layout, stages)["SCALE_BOX"]
    return {f"{prefix}codes_desc": f"tensordesc<i32[{layout.num_warps // 2}, 256],{SWIZZLE_NONE!r}>",
            f"{prefix}scales_desc": f"tensordesc<i32[1, {box}],{SWIZZLE_NONE!r}>"}


@cache
def build_gate_up(shape: Shape, *, activation: str | None = None, stages: Stages | None = None) -> Built:
    layout = shape.gate_up
    stages = stages or Stages.of(layout)
    constants = {**constants_of(layout, stages), "K": shape.per_token, "F": shape.channels, "ACTIVATION": activation or shape.activation,
                 "HAS_BIAS": shape.bias and activation != "none", "STAGES": stages.stages, "PARTITIONS": stages.partitions, "PROGRAMS": 132,
                 "NUM_WARPS": layout.num_warps}
    return build(gate_up_kernel, constants, descriptor_types(layout, stages))


@cache
def build_down(shape: Shape, *, stages: Stages | None = None) -> Built:
    layout = shape.down
    stages = stages or Stages.of(layout)
    constants = {**constants_of(layout, stages), "D": shape.hidden, "HAS_BIAS": shape.bias, "STAGES": stages.stages,
                 "PARTITIONS": stages.partitions, "PROGRAMS": 132, "NUM_WARPS": layout.num_warps}
    return build(down_kernel, constants, descriptor_types(layout, stages))


@cache
def build_layer(shape: Shape, *, stages: tuple[Stages, Stages] | None = None) -> Built:
    up, down = stages or Stages.of_layer(shape.gate_up, shape.down)
    constants = {"K": shape.per_token, "D": shape.hidden, "F": shape.channels, "ACTIVATION": shape.activation, "UP_BIAS": shape.bias, "DOWN_BIAS": shape.bias,
                 "STAGES": up.stages, "PARTITIONS": up.partitions, "PROGRAMS": 132,
                 "NUM_WARPS": shape.gate_up.num_warps, **layer_constants(shape.gate_up, shape.down, up, down)}
    return build(_layer_kernel, constants, descriptor_types(shape.gate_up, up, prefix="up_") | descriptor_types(shape.down, down, prefix="down_"),
                 cooperative=True)
