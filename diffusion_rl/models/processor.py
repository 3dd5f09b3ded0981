"""A processor of text and pictures for machines without torchvision, which transformers' own needs for videos."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import Qwen2VLProcessor
from transformers.utils import is_torchvision_available


class PictureProcessor(Qwen2VLProcessor):
    """transformers' processor with its picture half alone: the same inputs, but for videos."""

    @classmethod
    def get_attributes(cls) -> list[str]:
        return ["image_processor", "tokenizer"]


def processor_of(folder: Path, index: dict[str, Any]) -> dict[str, Any]:
    """`processor` for diffusers, where the pipeline in that folder has one that it couldn't load itself."""
    named = (index.get("processor") or [None, None])[1]
    if named != Qwen2VLProcessor.__name__ or is_torchvision_available():
        return {}
    return {"processor": PictureProcessor.from_pretrained(str(folder / "processor"))}
