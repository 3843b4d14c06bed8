"""Phases of a decode step, each a function of the device that a launch of its own and a resident kernel call alike, with its twin `x_ref` in plain torch."""

from .attention import Heads
from .dense import Cut, Dense, dense_ref, live_mask, normalize_ref
from .draft_model import DraftLayer, DraftShape, DraftState, DraftWeights
from .draft_ref import RoundRef
from .fragments import DenseLayout, DenseWeight, choose_dense_layout, pack_dense, unpack_dense
from .model import Column, LayerMatrices, StepInputs, StepShape, StepState, StepWeights
from .round_inputs import RoundColumn, RoundInputs
from .step_ref import LAYER_PHASES, PHASES, StepRef, sample_ref, step_ref

__all__ = [
    "LAYER_PHASES",
    "PHASES",
    "Column",
    "Cut",
    "Dense",
    "DenseLayout",
    "DenseWeight",
    "DraftLayer",
    "DraftShape",
    "DraftState",
    "DraftWeights",
    "Heads",
    "LayerMatrices",
    "RoundColumn",
    "RoundInputs",
    "RoundRef",
    "StepInputs",
    "StepRef",
    "StepShape",
    "StepState",
    "StepWeights",
    "choose_dense_layout",
    "dense_ref",
    "live_mask",
    "normalize_ref",
    "pack_dense",
    "sample_ref",
    "step_ref",
    "unpack_dense",
]
