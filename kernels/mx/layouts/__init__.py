"""Storage orders of packed MXFP4 weights, each with its exact inverse; `checkpoint` order is [rows, Q, 16] bytes as files hold it."""

from .mma_fragments import MAX_STEPS, FragmentLayout, FragmentWeight, RowPairs, choose_layout, pack_fragments, row_order, unpack_fragments

__all__ = ["MAX_STEPS", "FragmentLayout", "FragmentWeight", "RowPairs", "choose_layout", "pack_fragments", "row_order", "unpack_fragments"]
