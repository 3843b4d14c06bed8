"""Two 4-bit codes in a byte: the low nibble holds the even element, as every public MXFP4 checkpoint has it."""

import torch
from torch import Tensor


def pack_codes_ref(codes: Tensor) -> Tensor:
    """Shapes: codes uint8 [..., 2n] in 0..15. Returns uint8 [..., n]; byte i is codes[2i] | codes[2i + 1] << 4."""
    if codes.dtype != torch.uint8 or codes.shape[-1] % 2:
        raise ValueError(f"pack_codes: codes must be uint8 with an even last dimension; got {codes.dtype} {tuple(codes.shape)}.")
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_codes_ref(packed: Tensor) -> Tensor:
    """Shapes: packed uint8 [..., n]. Returns codes uint8 [..., 2n]. The inverse of pack_codes_ref."""
    if packed.dtype != torch.uint8:
        raise TypeError(f"unpack_codes: packed codes must be uint8; got {packed.dtype}.")
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)
