"""Storage orders of packed MXFP4 weights, each with its exact inverse; `checkpoint` order is [rows, Q, 16] bytes as files hold it."""

from .mma_fragments import FragmentLayout, FragmentWeight, RowPairs, choose_layout, pack_fragments, row_order, unpack_fragments

__all__ = ["FragmentLayout", "FragmentWeight", "RowPairs", "choose_layout", "pack_fragments", "row_order", "unpack_fragments"]
