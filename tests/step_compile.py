"""The resident step and its phases built for sm_90 without a GPU."""

import re
import subprocess
import tempfile
import time
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from kilotok.kernels.moe.product import SWIZZLE_NONE
from kilotok.kernels.persistent.attention import FORM, FORM_OF_TWO, AttentionForm, Heads
from kilotok.kernels.persistent.fragments import NUM_WARPS
from kilotok.kernels.persistent.model import MATRICES, StepShape
from kilotok.kernels.persistent.step_code import POINTER_TYPES, StepCode, launch_options
from kilotok.kernels.persistent.step_device import step_kernel

SHAPES = {
    "Qwen3-30B-A3B": StepShape(
        hidden_size=2048, num_layers=48, heads=Heads(num_heads=32, num_kv_heads=4, head_dim=128, rms_eps=1e-6), num_experts=128, experts_per_token=8,
        expert_hidden=768, normalize_router_weights=True, rms_eps=1e-6, rope_theta=1e6, vocab_size=151936, max_length=4096, taps=(1, 12, 23, 34, 45)),
    "pocket": StepShape(
        hidden_size=256, num_layers=4, heads=Heads(num_heads=8, num_kv_heads=4, head_dim=32, rms_eps=1e-6), num_experts=8, experts_per_token=2,
        expert_hidden=128, normalize_router_weights=True, rms_eps=1e-6, rope_theta=1e4, vocab_size=4096, max_length=2048, taps=(1, 2)),
    "SmolLM2-MoE": StepShape(
        hidden_size=576, num_layers=30, heads=Heads(num_heads=9, num_kv_heads=3, head_dim=64), num_experts=8, experts_per_token=4, expert_hidden=384,
        normalize_router_weights=True, rms_eps=1e-5, rope_theta=1e5, vocab_size=49152, max_length=2048),
}


def layouts_of_shape(shape: StepShape, *, programs: int = 132) -> dict[str, Any]:
    return {**{name: shape.dense_layout(name, programs=programs) for name in MATRICES}, "gate_up": shape.gate_up_layout, "down": shape.down_layout}


@dataclass(frozen=True, kw_only=True)
class Variant:
    """How a model is built: rolled dense products, and programs an SM."""

    rolled: bool = False
    per_sm: int = 1
    form: AttentionForm = FORM
    parts: int = 4
    one_list: bool = False

    @property
    def code(self) -> dict[str, Any]:
        """Of StepCode."""
        return {"form": self.form, "parts": self.parts, "one_list": self.one_list, "partitions": 2 // self.per_sm}

    @property
    def kernel(self) -> dict[str, Any]:
        """Of StepKernel."""
        return {"form": self.form, "expert_parts": self.parts, "one_list": self.one_list, "per_sm": self.per_sm}


VARIANTS = {"pairs": Variant(), "rolled": Variant(rolled=True), "two programs": Variant(rolled=True, per_sm=2, form=FORM_OF_TWO)}
# more of them, for a benchmark: of the same bits as the one that they are made from, but for attention's
OTHERS = {"pairs, 2 parts": replace(VARIANTS["pairs"], parts=2), "pairs, one list": replace(VARIANTS["pairs"], one_list=True),
          "two programs, 2 parts": replace(VARIANTS["two programs"], parts=2),
          "two programs, attention by half": replace(VARIANTS["two programs"], form=replace(FORM_OF_TWO, share=2)),
          "two programs, by a quarter": replace(VARIANTS["two programs"], form=replace(FORM_OF_TWO, share=4)),
          "two programs, merge": replace(VARIANTS["two programs"], form=replace(FORM_OF_TWO, last_merges=False))}


def code_of(shape: StepShape, *, num_columns: int = 8, phase: str = "all", programs: int = 132, profile: bool = False,
            variant: Variant = VARIANTS["pairs"]) -> StepCode:
    """programs: SMs."""
    shape = replace(shape, rolled=variant.rolled)
    return StepCode.of(shape, layouts=layouts_of_shape(shape, programs=programs), num_columns=num_columns, programs=programs * variant.per_sm, phase=phase,
                       profile=profile, **variant.code)


_ADDRESS = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/")


@dataclass(frozen=True, kw_only=True)
class Built:
    registers: int
    stack_bytes: int
    local_bytes: int
    shared_bytes: int
    seconds: float
    ptx: str
    sass: str

    @property
    def code_bytes(self) -> int:
        return 16 + max(int(found[1], 16) for line in self.sass.splitlines() if (found := _ADDRESS.match(line)))

    def __str__(self) -> str:
        return (f"{self.registers} registers, {self.stack_bytes}+{self.local_bytes} bytes of stack and local memory, {self.shared_bytes / 1024:.1f} KB shared, "
                f"{self.code_bytes / 1024:.1f} KB of code, {self.seconds:.1f} s")


@cache
def build_step(name: str, *, num_columns: int = 8, phase: str = "all", profile: bool = False, variant: Variant = VARIANTS["pairs"]) -> Built:
    code = code_of(SHAPES[name], num_columns=num_columns, phase=phase, profile=profile, variant=variant)
    return build_kernel(step_kernel, code, pointers={"p": POINTER_TYPES}, codes={"S": code}, options=launch_options(code))


def build_kernel(kernel: Any, code: StepCode, *, pointers: dict[str, Any], codes: dict[str, Any], options: dict[str, Any]) -> Built:
    """pointers: argument names and types of named tuples of tensors; codes: of what is known when compiling."""
    names = list(kernel.arg_names)
    desc = f"tensordesc<i32[{NUM_WARPS // 2}, 256],{SWIZZLE_NONE!r}>"
    signature: dict[str, Any] = {n: desc if n.endswith("_desc") else "i32" for n in names} | pointers | dict.fromkeys(codes, "constexpr")
    for prefix, expert in (("up", code.up), ("down", code.down)):
        signature[f"{prefix}_scales_desc"] = f"tensordesc<i32[1, {expert.SCALE_BOX}],{SWIZZLE_NONE!r}>"
    attrs = {(names.index(n), i): [["tt.divisibility", 16]] for n, types in pointers.items() for i in range(len(types))}
    started = time.time()
    source = GluonASTSource(kernel, signature, codes, attrs=attrs)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    seconds = time.time() - started
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run([triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
        sass = subprocess.run([triton.knobs.nvidia.nvdisasm.path, "-c", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+).*?LOCAL:(\d+)", usage)
    assert found is not None, usage
    registers, stack, local = map(int, found.groups())
    return Built(registers=registers, stack_bytes=stack, local_bytes=local, shared_bytes=compiled.metadata.shared, seconds=seconds, ptx=compiled.asm["ptx"],
                 sass=sass)
