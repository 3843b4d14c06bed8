"""Attention of a draft's blocks: many short blocks of one row against the same context."""

from .block_plan import TILE, BlockPlan, block_plan, padded_anchors
from .draft_blocks import attend_blocks, attend_blocks_ref

__all__ = ["TILE", "BlockPlan", "attend_blocks", "attend_blocks_ref", "block_plan", "padded_anchors"]
