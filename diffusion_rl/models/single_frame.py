"""Causal 3D convolutions of a VAE for videos, where the video is a single picture.

Such a layer looks at its frame and at the ones before it, which are zeros for the first. All of its kernel but the last
slice in time multiplies zeros, so a 2D convolution by that slice is the same sum in a third of the operations, and
libraries compute it faster. It is summed in another order: pictures differ from the stock layer's by rounding.

Nor does anybody come after a single frame, for whom its decoder would have to keep a copy of what each layer got.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F


def first_frame(conv: Any, x: torch.Tensor, cache_x: torch.Tensor | None = None) -> torch.Tensor:
    """The forward of a diffusers `...CausalConv3d`, in two dimensions if x `[n, C, F, H, W]` is a video's first frame.

    On a GPU frames leave it with their channels last, as its convolutions compute them.
    """
    if cache_x is not None or x.shape[2] != 1 or conv.stride[0] != 1 or conv.groups != 1 or conv.dilation[0] != 1:
        return type(conv).forward(conv, x, cache_x)
    left, right, top, bottom, *_ = conv._padding
    if (left, top) != (right, bottom) or conv.padding_mode != "zeros":
        return type(conv).forward(conv, x, cache_x)
    frame = x.squeeze(2)
    if frame.device.type == "cuda":
        frame = frame.contiguous(memory_format=torch.channels_last)
    kernel = conv.weight[:, :, -1]
    return F.conv2d(frame, kernel, conv.bias, conv.stride[1:], (top, left), conv.dilation[1:]).unsqueeze(2)


def without_memory(decoder: Any, x: torch.Tensor, *caches: Any, **named_caches: Any) -> torch.Tensor:
    """The forward of a diffusers `...Decoder3d` for a video of one frame: the same layers, and no copies for later."""
    picture: torch.Tensor = type(decoder).forward(decoder, x)
    return picture
