"""Block-scaled formats: MXFP8, MXFP4 and NVFP4, as ``torch._scaled_mm`` takes them.

A and B are stored by lines along K: rows of A, columns of B.  A block of 32 or 16 elements of a line shares a scale.
The scales lie in tiles of 128 lines by 4 blocks, tile after tile along K and then along the lines, ``SWIZZLE_32_4_4``:
line ``l`` of a tile and its block ``c`` are at ``(l % 32) * 16 + (l // 32) * 4 + c``.  What fills up a tile is 0.
"""

from __future__ import annotations

from typing import Any, Final

# A torch.Tensor or an array of NumPy where both have the method; a Problem.
Tensor = Any
Problem = Any

_TILE: Final = (128, 4)
# The values of the codes 0 to 7 of e2m1; the sign is the highest of its four bits.
MAGNITUDES: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def tiled(lines: int, blocks: int) -> tuple[int, int]:
    """How many lines and blocks there are in whole tiles."""
    return -(-lines // _TILE[0]) * _TILE[0], -(-blocks // _TILE[1]) * _TILE[1]


def swizzled(scales: Tensor) -> Tensor:
    """Scales of (lines, blocks), which fill whole tiles, in the order in which kernels read them: flat."""
    lines, blocks = scales.shape
    return scales.reshape(lines // 128, 4, 32, blocks // 4, 4).transpose(0, 3, 2, 1, 4).reshape(-1)


def unswizzled(flat: Tensor, lines: int, blocks: int) -> Tensor:
    """The scales as (lines, blocks) without what fills up the tiles, from a tensor in swizzled order."""
    all_lines, all_blocks = tiled(lines, blocks)
    tiles = flat.reshape(all_lines // 128, all_blocks // 4, 32, 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(all_lines, all_blocks)[:lines, :blocks]


def unpacked(torch: Any, lines: Tensor) -> Tensor:
    """The values of lines of e2m1, f32: the low half of each byte first."""
    codes = lines.contiguous().view(torch.uint8)
    both = torch.stack([codes & 15, codes >> 4], -1).flatten(-2).long()
    table = [*MAGNITUDES, *(-x for x in MAGNITUDES)]
    return torch.tensor(table, dtype=torch.float32, device=lines.device)[both]


def decoded(torch: Any, p: Problem, name: str, x: Tensor, scale: Tensor, dtype: Any) -> Tensor:
    """A or B, ``name``, with the scales of its blocks multiplied into it, in a dtype."""
    if x.dim() == 3:
        return torch.stack([decoded(torch, p, name, *one, dtype) for one in zip(x, scale, strict=True)])
    lines = x if name == "a" else x.mT
    values = (unpacked(torch, lines) if p.dtypes.a.is_packed else lines).to(dtype)
    block = p.micro_block
    lies = scale if p.has("program.unswizzled") else unswizzled(scale, values.shape[0], -(-p.shape.k // block))
    found = values * lies.to(dtype).repeat_interleave(block, 1)[:, : p.shape.k]
    return found if name == "a" else found.mT
