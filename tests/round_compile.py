"""Kernels of rounds built for sm_90 without a GPU."""

from dataclasses import replace
from functools import cache

from step_compile import SHAPES, VARIANTS, Built, Variant, build_kernel, layouts_of_shape

from kilotok.kernels.persistent import Heads
from kilotok.kernels.persistent.draft_code import DRAFT_POINTER_TYPES, DraftCode, round_code, round_options
from kilotok.kernels.persistent.draft_device import round_kernel
from kilotok.kernels.persistent.draft_model import DraftShape
from kilotok.kernels.persistent.step_code import POINTER_TYPES, StepCode

# the pocket's published form is smaller; this one crosses a window in a short context
DRAFTS = {
    "pocket": DraftShape(hidden_size=256, num_layers=2, heads=Heads(num_heads=8, num_kv_heads=4, head_dim=32, rms_eps=1e-6, window=256), intermediate_size=512,
                         num_taps=2, mask_token_id=4, rms_eps=1e-6, rope_theta=1e4, max_length=2048),
    "Qwen3-30B-A3B": DraftShape(hidden_size=2048, num_layers=5, heads=Heads(num_heads=32, num_kv_heads=4, head_dim=128, rms_eps=1e-6, window=1024),
                                intermediate_size=6144, num_taps=5, mask_token_id=151669, rms_eps=1e-6, rope_theta=1e6, max_length=4096),
}
ROUND_VARIANTS = {name: VARIANTS[name] for name in ("rolled", "two programs")}


def round_code_of(name: str, *, num_columns: int = 8, programs: int = 132, profile: bool = False,
                  variant: Variant = VARIANTS["two programs"]) -> tuple[StepCode, DraftCode]:
    """programs: SMs."""
    shape = replace(SHAPES[name], rolled=True)
    return round_code(shape, DRAFTS[name], layouts=layouts_of_shape(shape, programs=programs), num_columns=num_columns, programs=programs * variant.per_sm,
                      profile=profile, **variant.code)


@cache
def build_rounds(name: str, *, num_columns: int = 8, phase: str = "rounds", profile: bool = False, variant: Variant = VARIANTS["two programs"]) -> Built:
    code, draft = round_code_of(name, num_columns=num_columns, profile=profile, variant=variant)
    draft = draft.of_phase(phase)
    return build_kernel(round_kernel, code, pointers={"p": POINTER_TYPES, "q": DRAFT_POINTER_TYPES}, codes={"S": code, "T": draft},
                        options=round_options(code, draft))
