"""What a recipe's precision means for the products."""

import torch

AUTOCAST = {"32-true": None, "bf16-mixed": torch.bfloat16}
