"""In what precision reference bodies compute: float32, or float64 when the caller runs the whole graph in float64."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["dequantised_blocks", "dequantised_groups", "quantised_rows", "widened"]

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E4M3_MAX = 448.0


def widened(x: Tensor) -> Tensor:
    """`x` in float64 if it is float64, else in float32."""
    return x if x.dtype == torch.float64 else x.to(torch.float32)


def dequantised_blocks(weight: Tensor, scale: Tensor, block: int = 128) -> Tensor:
    """float32 [..., O, I] from e4m3 values and float32 scales [..., ceil(O/block), ceil(I/block)]; last blocks may be partial."""
    rows, columns = weight.shape[-2:]
    full = scale.repeat_interleave(block, -2)[..., :rows, :].repeat_interleave(block, -1)[..., :columns]
    return weight.to(torch.float32) * full


def dequantised_groups(packed: Tensor, scale: Tensor, global_scale: Tensor) -> Tensor:
    """float32 [..., O, I] from NVFP4: packed uint8 [..., O, I/2] (low nibble = even column), e4m3 bits uint8 [..., O, I/16],
    and a global scale that broadcasts over [..., O, I]."""
    table = torch.tensor(_E2M1 + tuple(-v for v in _E2M1), device=packed.device)
    nibbles = torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)
    groups = scale.view(torch.float8_e4m3fn).to(torch.float32).repeat_interleave(16, -1)
    return table[nibbles.long()] * groups * global_scale


def quantised_rows(x: Tensor, group: int = 128) -> Tensor:
    """`x` rounded to e4m3 with one float32 scale (amax / 448) per row and `group` columns, as float32."""
    wide = x.to(torch.float32)
    columns = wide.shape[-1]
    padded = torch.nn.functional.pad(wide, (0, -columns % group)).unflatten(-1, (-1, group))
    scale = padded.abs().amax(-1, keepdim=True).clamp_min(1e-10) / E4M3_MAX
    rounded = (padded / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).to(torch.float32) * scale
    return rounded.flatten(-2)[..., :columns]
