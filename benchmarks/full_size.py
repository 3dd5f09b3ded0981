"""Pipelines of full-size shapes with random weights, from public configurations; no download. For a GPU; the `tiny`
ones are for trying what uses them on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLQwenImage,
    AutoencoderKLWan,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
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

from diffusion_rl.batch import PromptEmbeds
from diffusion_rl.config import EngineConfig
from diffusion_rl.models import ModelFamily
from diffusion_rl.models.flux import FluxFamily
from diffusion_rl.models.qwen_image import QwenImageFamily
from diffusion_rl.models.runner import Runner
from diffusion_rl.models.stable_diffusion3 import StableDiffusion3Family
from diffusion_rl.models.wan import WanFamily
from diffusion_rl.models.z_image import ZImageFamily
from diffusion_rl.parallel.layout import check_heads, layout_of
from diffusion_rl.params import RolloutParams
from diffusion_rl.rollout.engine import RolloutEngine
from diffusion_rl.sample import RolloutSample
from rl_kernels.mode import Choices

SD3_TEXT_TOKENS = 205  # 77 of the CLIPs, 128 of T5: what FlowGRPO trains SD3.5 with
T5_TOKENS = 512  # to which the pipelines of FLUX.1 and Wan pad every prompt


def load(config: EngineConfig, device: str) -> ModelFamily:
    """The shape that `config.model_path` names, on that device: a loader for `start_ranks`. Ranks get equal weights.

    Raises:
        InvalidRequestError: its heads don't fit the layout.
    """
    family = SHAPES[config.model_path](device)
    check_heads(family.attention_heads, layout_of(config.parallel))
    return family


def sd35_medium(
    device: str, dtype: torch.dtype = torch.bfloat16, *, layers: int = 24, heads: int = 24, vae_width: int = 128
) -> StableDiffusion3Family:
    """The transformer of SD3.5-medium (2.24 B parameters) and its VAE's shape; prompts are random embeddings."""
    transformer = _random_module(
        SD3Transformer2DModel,
        device,
        dtype,
        sample_size=128,
        patch_size=2,
        in_channels=16,
        num_layers=layers,
        attention_head_dim=64,
        num_attention_heads=heads,
        joint_attention_dim=4096,
        caption_projection_dim=64 * heads,
        pooled_projection_dim=2048,
        out_channels=16,
        pos_embed_max_size=384,
        dual_attention_layers=tuple(range(13)),
        qk_norm="rms_norm",
    )
    vae = _kl_vae(device, dtype, vae_width, scaling_factor=1.5305, shift_factor=0.0609)
    names = ("text_encoder", "text_encoder_2", "text_encoder_3", "tokenizer", "tokenizer_2", "tokenizer_3")
    pipeline = StableDiffusion3Pipeline(
        transformer=transformer,
        vae=vae,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        **dict.fromkeys(names),
    )
    return _SD3WithRandomText(pipeline)


def qwen_image(device: str, dtype: torch.dtype = torch.bfloat16, *, layers: int, **shape: int) -> QwenImageFamily:
    """Qwen-Image at its real width with that many of its 60 blocks; prompts are random embeddings of their length.
    `shape`: as for `qwen_image_modules`."""
    modules = qwen_image_modules(device, layers, dtype, **shape)
    return _QwenWithRandomText(QwenImagePipeline(**modules, text_encoder=None, tokenizer=None))


def qwen_image_modules(
    device: str,
    layers: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    heads: int = 24,
    text_width: int = 3584,
    vae_width: int = 96,
) -> dict[str, Any]:
    """Transformer, VAE and scheduler of a `QwenImagePipeline`; its real widths if nothing else is said."""
    transformer = _random_module(
        QwenImageTransformer2DModel,
        device,
        dtype,
        patch_size=2,
        in_channels=64,
        out_channels=16,
        num_layers=layers,
        attention_head_dim=128,
        num_attention_heads=heads,
        joint_attention_dim=text_width,
        axes_dims_rope=(16, 56, 56),
    )
    vae = _random_module(
        AutoencoderKLQwenImage,
        device,
        dtype,
        base_dim=vae_width,
        z_dim=16,
        dim_mult=[1, 2, 4, 4],
        num_res_blocks=2,
        attn_scales=[],
        temperal_downsample=[False, True, True],
        dropout=0.0,
        latents_mean=[0.0] * 16,
        latents_std=[1.0] * 16,
    )
    scheduler = FlowMatchEulerDiscreteScheduler(
        base_image_seq_len=256,
        base_shift=0.5,
        max_image_seq_len=8192,
        max_shift=0.9,
        shift_terminal=0.02,
        use_dynamic_shifting=True,
        time_shift_type="exponential",
    )
    return {"transformer": transformer, "vae": vae, "scheduler": scheduler}


def wan(
    device: str,
    dtype: torch.dtype = torch.bfloat16,
    *,
    layers: int = 30,
    heads: int = 12,
    ffn_width: int = 8960,
    vae_width: int = 96,
) -> WanFamily:
    """Wan 2.1 T2V 1.3B and its VAE's shape; prompts are random embeddings of their length, padded with zeros."""
    transformer = _random_module(
        WanTransformer3DModel,
        device,
        dtype,
        num_layers=layers,
        num_attention_heads=heads,
        ffn_dim=ffn_width,
    )
    vae = _random_module(AutoencoderKLWan, device, dtype, base_dim=vae_width)
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    return _WanWithRandomText(
        WanPipeline(tokenizer=None, text_encoder=None, vae=vae, scheduler=scheduler, transformer=transformer)
    )


def flux(
    device: str,
    dtype: torch.dtype = torch.bfloat16,
    *,
    layers: int = 19,
    single_layers: int = 38,
    heads: int = 24,
    vae_width: int = 128,
) -> FluxFamily:
    """FLUX.1 dev (12 B parameters) and its VAE's shape; prompts are random embeddings."""
    transformer = _random_module(
        FluxTransformer2DModel,
        device,
        dtype,
        num_layers=layers,
        num_single_layers=single_layers,
        num_attention_heads=heads,
        guidance_embeds=True,
    )
    scheduler = FlowMatchEulerDiscreteScheduler(
        base_image_seq_len=256,
        base_shift=0.5,
        max_image_seq_len=4096,
        max_shift=1.15,
        shift=3.0,
        use_dynamic_shifting=True,
    )
    vae = _kl_vae(device, dtype, vae_width, scaling_factor=0.3611, shift_factor=0.1159)
    names = ("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2")
    return _FluxWithRandomText(
        FluxPipeline(transformer=transformer, vae=vae, scheduler=scheduler, **dict.fromkeys(names))
    )


def z_image(
    device: str,
    dtype: torch.dtype = torch.bfloat16,
    *,
    layers: int = 30,
    heads: int = 30,
    vae_width: int = 128,
) -> ZImageFamily:
    """Z-Image (6 B parameters) and its VAE's shape; prompts are random embeddings of their length."""
    transformer = _random_module(
        ZImageTransformer2DModel, device, dtype, n_layers=layers, n_heads=heads, n_kv_heads=heads, dim=128 * heads
    )
    vae = _kl_vae(device, dtype, vae_width, scaling_factor=0.3611, shift_factor=0.1159)
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    return _ZImageWithRandomText(
        ZImagePipeline(transformer=transformer, vae=vae, scheduler=scheduler, text_encoder=None, tokenizer=None)
    )


SHAPES: dict[str, Callable[..., ModelFamily]] = {
    "sd3.5-medium": sd35_medium,
    "qwen-image-6": partial(qwen_image, layers=6),
    "qwen-image": partial(qwen_image, layers=60),
    "wan-1.3b": wan,
    "flux.1": flux,
    "z-image": z_image,
    "tiny-sd3": partial(sd35_medium, layers=2, heads=2, vae_width=32),
    "tiny-qwen-image": partial(qwen_image, layers=2, heads=2, vae_width=16),
    "tiny-wan": partial(wan, layers=2, heads=2, ffn_width=256, vae_width=16),
    "tiny-flux": partial(flux, layers=1, single_layers=1, heads=2, vae_width=32),
    "tiny-z-image": partial(z_image, layers=1, heads=2, vae_width=32),
}


def asked(size: int, prompt: str, **fields: Any) -> RolloutParams:
    """A guided request; 4 steps and a square picture if nothing else is said."""
    given = {"num_inference_steps": 4, "height": size, "width": size, **fields}
    if "seeds" in given:
        given["num_outputs_per_prompt"] = len(given["seeds"])
    return RolloutParams(
        prompt,
        guidance_scale=4.5,
        true_cfg_scale=4.0,
        negative_prompt="blurry",
        rollout_return_dit_trajectory=True,
        **given,
    )


def run(engine: RolloutEngine, requests: dict[str, RolloutParams]) -> dict[str, list[RolloutSample]]:
    """Runs the requests together to their end; raises the first error."""
    for name, request in requests.items():
        engine.add_request(name, request)
    results: dict[str, list[RolloutSample]] = {}
    while engine.has_unfinished_requests():
        for finished in engine.step():
            if finished.error is not None:
                raise finished.error
            results[finished.request_id] = finished.result or []
    return results


@dataclass(frozen=True)
class Computed:
    """How a family computes a forward."""

    choices: Choices
    runner: Runner


@contextmanager
def computing(family: ModelFamily, how: Computed) -> Iterator[None]:
    """Inside, the family computes in that way; afterwards as before."""
    before = Computed(family.choices, family.runner)
    family.choices, family.runner = how.choices, how.runner
    try:
        yield
    finally:
        family.choices, family.runner = before.choices, before.runner


class _AnyText:
    """Any text is a prompt: its embeddings are random numbers, a function of it."""

    def check_text(self, text: str, name: str, max_sequence_length: int) -> None:
        """It will do."""


class _SD3WithRandomText(_AnyText, StableDiffusion3Family):
    def encode_text(self, text: str, max_sequence_length: int) -> PromptEmbeds:
        embeds = _random_text(text, SD3_TEXT_TOKENS, 4096, self)
        return PromptEmbeds(embeds, _random_text(text, 1, 2048, self)[0])


class _QwenWithRandomText(_AnyText, QwenImageFamily):
    def encode_text(self, text: str, max_sequence_length: int) -> PromptEmbeds:
        return PromptEmbeds(_random_text(text, 10 + 4 * len(text), 3584, self))


class _WanWithRandomText(_AnyText, WanFamily):
    def encode_text(self, text: str, max_sequence_length: int) -> PromptEmbeds:
        embeds = _random_text(text, min(10 + 4 * len(text), T5_TOKENS), 4096, self)
        return PromptEmbeds(torch.nn.functional.pad(embeds, (0, 0, 0, T5_TOKENS - len(embeds))))


class _FluxWithRandomText(_AnyText, FluxFamily):
    def encode_text(self, text: str, max_sequence_length: int) -> PromptEmbeds:
        embeds = _random_text(text, T5_TOKENS, 4096, self)
        return PromptEmbeds(embeds, _random_text(text, 1, 768, self)[0])


class _ZImageWithRandomText(_AnyText, ZImageFamily):
    def encode_text(self, text: str, max_sequence_length: int) -> PromptEmbeds:
        return PromptEmbeds(_random_text(text, 10 + 4 * len(text), 2560, self))


def _random_text(prompt: str, tokens: int, width: int, family: Any) -> torch.Tensor:
    seed = int.from_bytes(prompt.encode()[:7].ljust(7, b"\0"), "little")
    numbers = torch.randn(tokens, width, generator=torch.Generator().manual_seed(seed))
    return numbers.to(family.device, family.dtype)


def _kl_vae(device: str, dtype: torch.dtype, width: int, **scaling: float) -> torch.nn.Module:
    """The VAE of SD3.5, FLUX.1 and Z-Image, 16 channels of 8 x 8 pixels; its real width is 128."""
    return _random_module(
        AutoencoderKL,
        device,
        dtype,
        block_out_channels=(width, 2 * width, 4 * width, 4 * width),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=2,
        latent_channels=16,
        use_quant_conv=False,
        use_post_quant_conv=False,
        **scaling,
    )


def _random_module(cls: Any, device: str, dtype: torch.dtype, **config: Any) -> torch.nn.Module:
    """A module with random weights in every layer, those that are usually initialised to zero included; in that dtype,
    but for what loading a checkpoint leaves in fp32."""
    torch.manual_seed(0)
    with torch.device(device):
        module: torch.nn.Module = cls(**config).eval()
    wide = set(cls._keep_in_fp32_modules or ())
    with torch.no_grad():
        for name, tensor in module.state_dict(keep_vars=True).items():
            if not wide & set(name.split(".")):
                tensor.data = tensor.data.to(dtype)
        for parameter in module.parameters():
            if parameter.dim() > 1 and not parameter.any():
                parameter.normal_(std=0.02)
    return module
