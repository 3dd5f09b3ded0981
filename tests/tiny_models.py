"""Tiny random pipelines of the real diffusers and transformers classes, built without a hub. Every width is a multiple
of 64, as the row-invariant operations on a CPU need."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode


def clip_tokenizer(max_length: int = 24) -> CLIPTokenizer:
    symbols = list(bytes_to_unicode().values())
    vocab = [*symbols, *(s + "</w>" for s in symbols), "<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(vocab={t: i for i, t in enumerate(vocab)}, merges=[], model_max_length=max_length)


def clip_encoder(seed: int, max_length: int = 24) -> CLIPTextModelWithProjection:
    torch.manual_seed(seed)
    config = CLIPTextConfig(
        vocab_size=514,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=max_length,
        projection_dim=64,
        bos_token_id=512,
        eos_token_id=513,
        pad_token_id=513,
    )
    return CLIPTextModelWithProjection(config).eval()


@cache
def sd3_pipeline(
    dtype: torch.dtype = torch.float32, dual_attention: bool = False, layers: int = 2
) -> StableDiffusion3Pipeline:
    """SD3 at toy size: 8 x 8 latents of 16 channels for 64 x 64 pixels, two CLIPs, no T5."""
    torch.manual_seed(0)
    transformer = SD3Transformer2DModel(
        sample_size=16,
        patch_size=2,
        in_channels=16,
        out_channels=16,
        num_layers=layers,
        attention_head_dim=16,
        num_attention_heads=8,
        joint_attention_dim=128,
        caption_projection_dim=128,
        pooled_projection_dim=128,
        pos_embed_max_size=24,
        qk_norm="rms_norm",
        dual_attention_layers=(0,) if dual_attention else (),
    )
    for parameter in transformer.parameters():  # zero-initialised layers would hide the text and the timestep
        if parameter.abs().sum() == 0:
            torch.nn.init.normal_(parameter, std=0.02)
    vae = AutoencoderKL(
        block_out_channels=(64, 64, 64),
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        layers_per_block=1,
        latent_channels=16,
        norm_num_groups=16,
        use_quant_conv=False,
        use_post_quant_conv=False,
        shift_factor=0.06,
        scaling_factor=1.5,
    )
    pipeline = StableDiffusion3Pipeline(
        transformer=transformer.eval().to(dtype),
        vae=vae.eval().to(dtype),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        text_encoder=clip_encoder(1).to(dtype),
        tokenizer=clip_tokenizer(),
        text_encoder_2=clip_encoder(2).to(dtype),
        tokenizer_2=clip_tokenizer(),
        text_encoder_3=None,
        tokenizer_3=None,
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@cache
def qwen_image_pipeline(dtype: torch.dtype = torch.float32, heads: int = 2) -> QwenImagePipeline:
    """Qwen-Image at toy size: prompts keep their own lengths."""
    torch.manual_seed(0)
    transformer = QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=64,
        out_channels=16,
        num_layers=2,
        attention_head_dim=64,
        num_attention_heads=heads,
        joint_attention_dim=64,
        axes_dims_rope=(16, 24, 24),
    )
    vae = AutoencoderKLQwenImage(
        base_dim=16,
        z_dim=16,
        dim_mult=[1, 2, 4, 4],
        num_res_blocks=1,
        attn_scales=[],
        temperal_downsample=[False, True, True],
        dropout=0.0,
        latents_mean=[0.1 * i - 0.8 for i in range(16)],
        latents_std=[1.0 + 0.1 * i for i in range(16)],
    )
    pipeline = QwenImagePipeline(
        transformer=transformer.eval().to(dtype),
        vae=vae.eval().to(dtype),
        scheduler=FlowMatchEulerDiscreteScheduler(
            base_image_seq_len=256,
            base_shift=0.5,
            max_image_seq_len=8192,
            max_shift=0.9,
            shift_terminal=0.02,
            use_dynamic_shifting=True,
            time_shift_type="exponential",
        ),
        text_encoder=_qwen_text_encoder().to(dtype),
        tokenizer=_qwen_tokenizer(),
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _qwen_text_encoder() -> Qwen2_5_VLForConditionalGeneration:
    torch.manual_seed(3)
    text = {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "rope_theta": 1000000.0,
        "rope_scaling": {"type": "default", "rope_type": "default", "mrope_section": [2, 3, 3]},
        "bos_token_id": 257,
        "eos_token_id": 258,
        "pad_token_id": 256,
    }
    vision = {
        "depth": 1,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": 64,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 56,
        "fullatt_block_indexes": [0],
        "in_channels": 3,
    }
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=260,
        video_token_id=261,
        vision_start_token_id=262,
        vision_end_token_id=263,
    )
    return Qwen2_5_VLForConditionalGeneration(config).eval()


def _qwen_tokenizer() -> Qwen2Tokenizer:
    symbols = sorted(bytes_to_unicode().values())
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    vocab = {t: i for i, t in enumerate([*symbols, *specials])}
    return Qwen2Tokenizer(vocab=vocab, merges=[], pad_token="<|endoftext|>", eos_token="<|im_end|>", unk_token=None)


def save(pipeline: StableDiffusion3Pipeline | QwenImagePipeline, folder: Path) -> Path:
    """Writes the pipeline as a diffusers folder that `DiffusionPipeline.from_pretrained` loads."""
    pipeline.save_pretrained(folder)
    assert json.loads((folder / "model_index.json").read_text())["_class_name"]
    return folder
