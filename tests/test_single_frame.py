"""A picture's way through a VAE for videos."""

from __future__ import annotations

import pytest
import torch
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import QwenImageCausalConv3d
from tiny_models import qwen_image_pipeline

from diffusion_rl.models import family_for
from diffusion_rl.models.single_frame import first_frame


@pytest.mark.parametrize(("kernel", "padding"), [(3, 1), (1, 0), ((3, 1, 1), (1, 0, 0))])
def test_a_first_frame_in_two_dimensions_is_the_stock_layers(
    kernel: int | tuple[int, int, int], padding: int | tuple[int, int, int]
) -> None:
    conv = QwenImageCausalConv3d(4, 6, kernel, padding=padding).double()
    x = torch.randn(2, 4, 1, 9, 7, dtype=torch.float64)
    torch.testing.assert_close(first_frame(conv, x), conv(x), atol=1e-12, rtol=0)


def test_later_frames_take_the_stock_layers_way() -> None:
    conv, clip = QwenImageCausalConv3d(4, 6, 3, padding=1), torch.randn(1, 4, 3, 8, 8)
    assert torch.equal(first_frame(conv, clip), conv(clip))
    assert torch.equal(first_frame(conv, clip[:, :, 2:], clip[:, :, :2]), conv(clip[:, :, 2:], clip[:, :, :2]))


def test_a_qwen_image_picture_is_decoded_in_two_dimensions() -> None:
    family = family_for(qwen_image_pipeline())
    latents = torch.randn(1, *family.latent_shape(32, 32))
    volumes: list[str] = []

    class Watched(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if func is torch.nn.functional.conv3d:
                volumes.append(func.__name__)
            return func(*args, **(kwargs or {}))

    with torch.no_grad(), Watched():
        family.decode(latents, 32, 32)
    assert not volumes
