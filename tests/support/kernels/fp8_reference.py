"""The reference for block-scaled FP8: the formula on the full tensor, block by block, in plain torch."""

from __future__ import annotations

import torch


def quantize_reference(weight: torch.Tensor, block: tuple[int, int] = (128, 128)) -> tuple[torch.Tensor, torch.Tensor]:
    """``q`` and ``scale_inv`` of a weight: per block, scale = amax / 448 (1 where that is 0), q = round(w / scale).

    A block with a NaN or an infinity is NaN throughout: scale 0x7fc00000, elements 0x7f.
    """
    rows, cols = weight.shape
    quantised = torch.zeros(rows, cols, dtype=torch.float8_e4m3fn)
    scales = torch.zeros(-(-rows // block[0]), -(-cols // block[1]), dtype=torch.float32)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            where = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
            part = weight[where].to(torch.float32)
            if not part.isfinite().all():
                scales.view(torch.int32)[i, j] = 0x7FC00000
                quantised.view(torch.uint8)[where] = 0x7F
                continue
            scale = part.abs().max() / 448.0
            scale = scale if scale > 0 else torch.tensor(1.0)
            quantised[where] = torch.clamp(part / scale, -448.0, 448.0).to(torch.float8_e4m3fn)
            scales[i, j] = scale
    return quantised, scales
