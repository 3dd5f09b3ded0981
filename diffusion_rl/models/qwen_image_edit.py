"""Qwen-Image-Edit: one picture, which the text encoder sees as the VAE does."""

from __future__ import annotations

from diffusion_rl.batch import Pictures
from diffusion_rl.models.picture_editing import PictureEditingFamily


class QwenImageEditFamily(PictureEditingFamily):
    """Its template has the picture's placeholder."""

    pipeline_class_name = "QwenImageEditPipeline"
    most_pictures = 1

    def pictured_text(self, text: str, pictures: Pictures) -> str:
        return self.templated(text)
