"""Qwen-Image-Edit Plus (2509 and later): several pictures, which the text encoder sees smaller than the VAE does."""

from __future__ import annotations

from diffusion_rl.batch import Pictures
from diffusion_rl.models.picture_editing import PictureEditingFamily


class QwenImageEditPlusFamily(PictureEditingFamily):
    """The text begins with the pictures' placeholders, by their numbers."""

    pipeline_class_name = "QwenImageEditPlusPipeline"
    most_pictures = 4
    seen_area = 384 * 384

    def pictured_text(self, text: str, pictures: Pictures) -> str:
        numbers = range(1, len(pictures.tensors) + 1)
        placeholders = "".join(f"Picture {n}: <|vision_start|><|image_pad|><|vision_end|>" for n in numbers)
        return self.templated(placeholders + text)
