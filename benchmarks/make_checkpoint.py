"""Writes a checkpoint of Qwen-Image's shape with random weights, without a download: a diffusers folder to serve.

    python -m benchmarks.make_checkpoint FOLDER --layers 6

The transformer has its real width and as many of its 60 blocks as you say (6: 2.08 B parameters), the VAE its real
shape. The text encoder is a real Qwen2.5-VL of two layers, so that encoding a prompt costs little, and the tokenizer
knows bytes alone. `--tiny` makes everything narrow, for a CPU.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import QwenImagePipeline
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from benchmarks.full_size import qwen_image_modules

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<|vision_start|>",
    "<|vision_end|>",
)
VOCABULARY = 512
LONGEST_PROMPT = 4096
TINY = {"heads": 2, "text_width": 128, "vae_width": 16}


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the folder."""
    arguments = _options().parse_args(argv)
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    began = time.perf_counter()
    pipeline = make_pipeline(device, arguments.layers, tiny=arguments.tiny)
    pipeline.save_pretrained(arguments.folder)
    parameters = sum(parameter.numel() for parameter in pipeline.transformer.parameters())
    seconds = time.perf_counter() - began
    print(f"{arguments.folder}: a transformer of {parameters / 1e9:.2f} B parameters, in {seconds:.1f} s")
    return 0


def make_pipeline(device: str, layers: int, *, tiny: bool = False) -> QwenImagePipeline:
    """The pipeline in memory, bf16."""
    shape = TINY if tiny else {}
    modules = qwen_image_modules(device, layers, **shape)
    encoder = text_encoder(device, modules["transformer"].config.joint_attention_dim)
    pipeline = QwenImagePipeline(**modules, text_encoder=encoder, tokenizer=tokenizer())
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def text_encoder(device: str, width: int) -> Qwen2_5_VLForConditionalGeneration:
    """Two layers of that width, bf16, with heads as the real one has them (28 of 128, in groups of 7)."""
    heads = max(width // 128, 4)
    half = width // heads // 2
    section = [half - 2 * (3 * half // 8), 3 * half // 8, 3 * half // 8]
    text: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": width,
        "intermediate_size": max(width, 128),
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": 4 if heads % 4 == 0 else 1,
        "max_position_embeddings": LONGEST_PROMPT,
        "rope_theta": 1e6,
        "rope_scaling": {"type": "default", "rope_type": "default", "mrope_section": section},
        "bos_token_id": 257,
        "eos_token_id": 258,
        "pad_token_id": 256,
    }
    vision: dict[str, Any] = {
        "depth": 1,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": width,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 56,
        "fullatt_block_indexes": [0],
        "in_channels": 3,
    }
    ids = {"image_token_id": 259, "video_token_id": 260, "vision_start_token_id": 261, "vision_end_token_id": 262}
    torch.manual_seed(2)
    with torch.device(device):
        encoder = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision, **ids))
    return encoder.to(torch.bfloat16).eval()


def tokenizer() -> Qwen2Tokenizer:
    """A token for each byte, and those that Qwen-Image's prompt template holds."""
    symbols = sorted(bytes_to_unicode().values())
    vocabulary = {token: number for number, token in enumerate([*symbols, *SPECIAL_TOKENS])}
    return Qwen2Tokenizer(
        vocab=vocabulary,
        merges=[],
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        unk_token=None,
        additional_special_tokens=list(SPECIAL_TOKENS[1:]),
        model_max_length=LONGEST_PROMPT,
    )


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.make_checkpoint",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="where it goes; made if need be")
    parser.add_argument("--layers", type=int, default=6, help="blocks of the transformer (the real one has 60)")
    parser.add_argument("--device", help="where the weights are drawn; a GPU if there is one")
    parser.add_argument("--tiny", action="store_true", help="narrow modules, for a CPU")
    return parser


if __name__ == "__main__":
    sys.exit(main())
