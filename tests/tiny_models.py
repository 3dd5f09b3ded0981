"""Tiny random pipelines of the real diffusers and transformers classes, built without a hub. Every width is a multiple
of 64, as the row-invariant operations on a CPU need."""

from __future__ import annotations

import json
import string
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLQwenImage,
    AutoencoderKLWan,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    QwenImageEditPipeline,
    QwenImageEditPlusPipeline,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    UniPCMultistepScheduler,
    WanPipeline,
    WanTransformer3DModel,
    ZImagePipeline,
    ZImageTransformer2DModel,
)
from PIL import Image
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    Qwen2VLImageProcessor,
    Qwen3Config,
    Qwen3Model,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
    UMT5Config,
    UMT5EncoderModel,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode

from diffusion_rl import RolloutPipeline
from diffusion_rl.models.base import DEFAULTS_FILE
from diffusion_rl.models.processor import PictureProcessor


def clip_tokenizer(max_length: int = 24) -> CLIPTokenizer:
    symbols = list(bytes_to_unicode().values())
    vocab = [*symbols, *(s + "</w>" for s in symbols), "<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(vocab={t: i for i, t in enumerate(vocab)}, merges=[], model_max_length=max_length)


def clip_config(max_length: int = 24) -> CLIPTextConfig:
    return CLIPTextConfig(
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


def clip_encoder(seed: int, max_length: int = 24) -> CLIPTextModelWithProjection:
    torch.manual_seed(seed)
    return CLIPTextModelWithProjection(clip_config(max_length)).eval()


def t5_tokenizer() -> T5Tokenizer:
    """A token a letter."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581", -2.0)]
    letters = [(letter, -3.0) for letter in string.ascii_letters + string.digits + string.punctuation]
    return T5Tokenizer(vocab=pieces + letters, extra_ids=0, model_max_length=512)


def t5_encoder(seed: int) -> T5EncoderModel:
    torch.manual_seed(seed)
    config = T5Config(vocab_size=128, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4)
    return T5EncoderModel(config).eval()


def small_vae(blocks: int) -> AutoencoderKL:
    """Of pictures that are 2 ** (blocks - 1) times as wide as their latents of 16 channels."""
    vae = AutoencoderKL(
        block_out_channels=(64,) * blocks,
        down_block_types=("DownEncoderBlock2D",) * blocks,
        up_block_types=("UpDecoderBlock2D",) * blocks,
        layers_per_block=1,
        latent_channels=16,
        norm_num_groups=16,
        use_quant_conv=False,
        use_post_quant_conv=False,
        shift_factor=0.06,
        scaling_factor=1.5,
    )
    return vae.eval()


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
    vae = small_vae(3)
    pipeline = StableDiffusion3Pipeline(
        transformer=transformer.eval().to(dtype),
        vae=vae.to(dtype),
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
    return _quiet(QwenImagePipeline(**_qwen_image_parts(dtype, heads), tokenizer=_qwen_tokenizer()))


@cache
def qwen_image_edit_pipeline(dtype: torch.dtype = torch.float32, heads: int = 2) -> QwenImageEditPipeline:
    """Qwen-Image-Edit at toy size."""
    return _quiet(QwenImageEditPipeline(**_qwen_image_parts(dtype, heads), **_qwen_readers()))


@cache
def qwen_image_edit_plus_pipeline(dtype: torch.dtype = torch.float32) -> QwenImageEditPlusPipeline:
    """The same for several pictures, whose tokens the transformer takes for noiseless, as that of 2511."""
    return _quiet(QwenImageEditPlusPipeline(**_qwen_image_parts(dtype, 2, zero_cond_t=True), **_qwen_readers()))


def a_picture(width: int, height: int) -> Image.Image:
    """Noise of its own for each size."""
    generator = torch.Generator().manual_seed(width * 1000 + height)
    pixels = torch.randint(0, 256, (height, width, 3), generator=generator, dtype=torch.uint8)
    return Image.fromarray(pixels.numpy())


def _quiet(pipeline: Any) -> Any:
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _qwen_readers() -> dict[str, Any]:
    tokenizer = _qwen_tokenizer(pictures=True)
    return {"tokenizer": tokenizer, "processor": PictureProcessor(Qwen2VLImageProcessor(), tokenizer)}


def _qwen_image_parts(dtype: torch.dtype, heads: int, *, zero_cond_t: bool = False) -> dict[str, Any]:
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
        zero_cond_t=zero_cond_t,
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
    return {
        "transformer": transformer.eval().to(dtype),
        "vae": vae.eval().to(dtype),
        "scheduler": FlowMatchEulerDiscreteScheduler(
            base_image_seq_len=256,
            base_shift=0.5,
            max_image_seq_len=8192,
            max_shift=0.9,
            shift_terminal=0.02,
            use_dynamic_shifting=True,
            time_shift_type="exponential",
        ),
        "text_encoder": _qwen_text_encoder().to(dtype),
    }


CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)


@cache
def z_image_pipeline(dtype: torch.dtype = torch.float32, layers: int = 2) -> ZImagePipeline:
    """Z-Image at toy size: 4 heads, feed-forwards of 512, 8 x 8 latents for 64 x 64 pixels."""
    torch.manual_seed(0)
    transformer = ZImageTransformer2DModel(
        dim=192,
        n_layers=layers,
        n_refiner_layers=1,
        n_heads=4,
        n_kv_heads=4,
        cap_feat_dim=64,
        axes_dims=[16, 16, 16],
        axes_lens=[130, 16, 16],
    )
    for pad in (transformer.x_pad_token, transformer.cap_pad_token):  # zeros would hide them
        torch.nn.init.normal_(pad)
    torch.manual_seed(3)
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=1024,
        bos_token_id=257,
        eos_token_id=258,
        pad_token_id=256,
    )
    pipeline = ZImagePipeline(
        transformer=transformer.eval().to(dtype),
        vae=small_vae(4).to(dtype),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        text_encoder=Qwen3Model(config).eval().to(dtype),
        tokenizer=_qwen_tokenizer(chat_template=CHAT_TEMPLATE),
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@cache
def flux_pipeline(dtype: torch.dtype = torch.float32, guidance_embeds: bool = True) -> FluxPipeline:
    """FLUX.1 at toy size, with blocks of both kinds: as dev, or without embedded guidance as schnell."""
    torch.manual_seed(0)
    transformer = FluxTransformer2DModel(
        in_channels=64,
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=32,
        num_attention_heads=4,
        joint_attention_dim=64,
        pooled_projection_dim=64,
        guidance_embeds=guidance_embeds,
        axes_dims_rope=(8, 12, 12),
    )
    torch.manual_seed(4)
    clip = CLIPTextModel(clip_config()).eval()
    pipeline = FluxPipeline(
        transformer=transformer.eval().to(dtype),
        vae=small_vae(4).to(dtype),
        scheduler=FlowMatchEulerDiscreteScheduler(
            base_image_seq_len=256,
            base_shift=0.5,
            max_image_seq_len=4096,
            max_shift=1.15,
            use_dynamic_shifting=guidance_embeds,
        ),
        text_encoder=clip.to(dtype),
        tokenizer=clip_tokenizer(),
        text_encoder_2=t5_encoder(5).to(dtype),
        tokenizer_2=t5_tokenizer(),
    )
    pipeline.default_sample_size = 32  # latents, which certification takes for its pictures
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@cache
def wan_pipeline(
    dtype: torch.dtype = torch.float32, boundary: float | None = None, layers: int = 2, expand_timesteps: bool = False
) -> WanPipeline:
    """Wan at toy size: videos of 4 k + 1 frames, tokens of 16 pixels. With a boundary it has two transformers; its
    normalisations stay in fp32, as a checkpoint's do."""
    torch.manual_seed(0)
    transformers = [
        _with_fp32_parts(
            WanTransformer3DModel(
                patch_size=(1, 2, 2),
                num_attention_heads=4,
                attention_head_dim=32,
                in_channels=16,
                out_channels=16,
                text_dim=64,
                freq_dim=64,
                ffn_dim=128,
                num_layers=layers,
                rope_max_seq_len=32,
            ),
            dtype,
        )
        for _ in range(1 if boundary is None else 2)
    ]
    vae = AutoencoderKLWan(
        base_dim=16,
        z_dim=16,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        attn_scales=[],
        temperal_downsample=[False, True, True],
        latents_mean=[0.1 * i - 0.8 for i in range(16)],
        latents_std=[1.0 + 0.1 * i for i in range(16)],
    )
    torch.manual_seed(3)
    text = UMT5Config(vocab_size=128, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, pad_token_id=0)
    pipeline = WanPipeline(
        tokenizer=t5_tokenizer(),
        text_encoder=UMT5EncoderModel(text).eval().to(dtype),
        vae=vae.eval().to(dtype),
        scheduler=UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
        transformer=transformers[0],
        transformer_2=transformers[1] if boundary is not None else None,
        boundary_ratio=boundary,
        expand_timesteps=expand_timesteps,
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _with_fp32_parts(transformer: WanTransformer3DModel, dtype: torch.dtype) -> WanTransformer3DModel:
    """In that dtype, but for what `from_pretrained` would keep in fp32."""
    kept = transformer._keep_in_fp32_modules
    for name, parameter in transformer.eval().named_parameters():
        if not set(kept) & set(name.split(".")):
            parameter.data = parameter.data.to(dtype)
    return transformer


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


VISION = ["<|object_ref_start|>", "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]  # from 259 on


def _qwen_tokenizer(chat_template: str | None = None, *, pictures: bool = False) -> Qwen2Tokenizer:
    symbols = sorted(bytes_to_unicode().values())
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(VISION if pictures else ())]
    vocab = {t: i for i, t in enumerate([*symbols, *specials])}
    special = {"pad_token": "<|endoftext|>", "eos_token": "<|im_end|>", "unk_token": None}
    more = {"additional_special_tokens": VISION} if pictures else {}
    return Qwen2Tokenizer(vocab=vocab, merges=[], chat_template=chat_template, **special, **more)


SMALL_DEFAULTS: dict[type[DiffusionPipeline], dict[str, int]] = {
    FluxPipeline: {"height": 64, "width": 64, "max_sequence_length": 77},
    QwenImagePipeline: {"height": 64, "width": 64},
    QwenImageEditPipeline: {"height": 64, "width": 64, "image_area": 64 * 64},
    QwenImageEditPlusPipeline: {"height": 64, "width": 64, "image_area": 64 * 64},
    ZImagePipeline: {"height": 64, "width": 64},
    WanPipeline: {"height": 64, "width": 64, "num_frames": 5, "max_sequence_length": 77},
}


@cache
def small_defaults(pipeline_class: type[DiffusionPipeline]) -> tempfile.TemporaryDirectory[str] | None:
    """A folder that says small defaults to `RolloutPipeline(pipeline, defaults_folder=...)`."""
    if pipeline_class not in SMALL_DEFAULTS:
        return None
    folder = tempfile.TemporaryDirectory(prefix="defaults-")
    (Path(folder.name) / DEFAULTS_FILE).write_text(json.dumps(SMALL_DEFAULTS[pipeline_class]))
    return folder


def rollout_pipeline(pipeline: DiffusionPipeline, **options: Any) -> RolloutPipeline:
    """As loaded from its folder (see `save`)."""
    folder = small_defaults(type(pipeline))
    return RolloutPipeline(pipeline, defaults_folder=None if folder is None else Path(folder.name), **options)


def save(pipeline: DiffusionPipeline, folder: Path) -> Path:
    """Writes the pipeline as a diffusers folder that `DiffusionPipeline.from_pretrained` loads."""
    pipeline.save_pretrained(folder)
    index = json.loads((folder / "model_index.json").read_text())
    assert index["_class_name"]
    if "processor" in index:  # as checkpoints name it
        index["processor"] = ["transformers", "Qwen2VLProcessor"]
        (folder / "model_index.json").write_text(json.dumps(index))
    if type(pipeline) in SMALL_DEFAULTS:  # its own sizes would take long to certify
        (folder / DEFAULTS_FILE).write_text(json.dumps(SMALL_DEFAULTS[type(pipeline)]))
    return folder
