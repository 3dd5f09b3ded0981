"""What the embedded model consists of: tokenizer, VAE, text encoders and transformer, untrained, and their saving."""

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from torch import nn
from torch.nn import functional
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, CLIPTokenizer

LATENT_SIZE = 16


@dataclass(frozen=True)
class Architecture:
    """The sizes of every part; the VAE is fixed but for its latent channels."""

    latent_channels: int = 4
    hidden: int = 128
    layers: int = 2
    heads: int = 8
    text_hidden: int = 64
    text_layers: int = 2
    text_layers_2: int = 2
    text_length: int = 16


class TextToImage(nn.Module):
    """The transformer and both text encoders, trained together."""

    def __init__(self, sizes: Architecture, tokenizer: CLIPTokenizer) -> None:
        super().__init__()
        self.transformer = build_transformer(sizes)
        self.text_encoder = build_text_encoder(sizes, sizes.text_layers, tokenizer)
        self.text_encoder_2 = build_text_encoder(sizes, sizes.text_layers_2, tokenizer)

    def embed(self, token_ids: torch.Tensor, zero_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return prompt embeddings and pooled embeddings, just as the pipeline's `encode_prompt` makes them."""
        encoders = (self.text_encoder, self.text_encoder_2)
        encoded = [encoder(token_ids, output_hidden_states=True) for encoder in encoders]
        tokens = torch.cat([output.hidden_states[-2] for output in encoded], dim=-1)
        width = self.transformer.config.joint_attention_dim
        tokens = functional.pad(tokens, (0, width - tokens.shape[-1], 0, zero_tokens))
        return tokens, torch.cat([output.text_embeds for output in encoded], dim=-1)

    def forward(self, noisy: torch.Tensor, sigma: torch.Tensor, ids: torch.Tensor, zero_tokens: int) -> torch.Tensor:
        """Return the predicted velocity, noise minus latents, at noise level sigma [batch] in [0, 1]."""
        tokens, pooled = self.embed(ids, zero_tokens)
        return self.transformer(noisy, tokens, pooled, sigma * 1000.0, return_dict=False)[0]


def build_tokenizer(captions: Sequence[str], length: int) -> CLIPTokenizer:
    """Return a CLIP tokenizer whose vocabulary makes one token of each word of the captions."""
    trained = Tokenizer(models.BPE(end_of_word_suffix="</w>", unk_token="<|endoftext|>"))
    trained.normalizer = normalizers.Lowercase()
    trained.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.ByteLevel(False)])
    trainer = trainers.BpeTrainer(
        vocab_size=1000, min_frequency=1, end_of_word_suffix="</w>", special_tokens=[], show_progress=False
    )
    trained.train_from_iterator(captions, trainer)
    learned = json.loads(trained.to_str())["model"]
    tokens = [*sorted(learned["vocab"], key=learned["vocab"].get), "<|startoftext|>", "<|endoftext|>"]
    merges = [tuple(pair.split(" ")) if isinstance(pair, str) else tuple(pair) for pair in learned["merges"]]
    vocab = {token: number for number, token in enumerate(tokens)}
    tokenizer = CLIPTokenizer(vocab=vocab, merges=merges, model_max_length=length)
    longest = max(len(tokenizer(text).input_ids) for text in captions)
    if longest > length:
        raise ValueError(f"a caption has {longest} tokens, more than the length {length}")
    return tokenizer


def build_text_encoder(sizes: Architecture, layers: int, tokenizer: CLIPTokenizer) -> CLIPTextModelWithProjection:
    width = sizes.text_hidden
    config = CLIPTextConfig(
        vocab_size=-(-len(tokenizer) // 64) * 64,
        hidden_size=width,
        intermediate_size=4 * width,
        projection_dim=width,
        num_hidden_layers=layers,
        num_attention_heads=width // 16,
        max_position_embeddings=sizes.text_length,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return CLIPTextModelWithProjection(config)


def build_transformer(sizes: Architecture) -> SD3Transformer2DModel:
    return SD3Transformer2DModel(
        sample_size=LATENT_SIZE,
        patch_size=2,
        in_channels=sizes.latent_channels,
        out_channels=sizes.latent_channels,
        num_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        attention_head_dim=sizes.hidden // sizes.heads,
        caption_projection_dim=sizes.hidden,
        joint_attention_dim=2 * sizes.text_hidden,
        pooled_projection_dim=2 * sizes.text_hidden,
        pos_embed_max_size=LATENT_SIZE // 2,
    )


def build_vae(latent_channels: int) -> AutoencoderKL:
    """Return a VAE from 64 x 64 pixels to 16 x 16 latents, as cheap to decode as whole multiples of 64 channels get."""
    return AutoencoderKL(
        block_out_channels=(64, 64, 64),
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        layers_per_block=0,
        latent_channels=latent_channels,
        sample_size=64,
        mid_block_add_attention=False,
        use_quant_conv=False,
        use_post_quant_conv=False,
        force_upcast=False,
        shift_factor=0.0,
    )


def save_pipeline(
    model: TextToImage, vae: AutoencoderKL, tokenizer: CLIPTokenizer, folder: str, shift: float, defaults: dict
) -> None:
    """Write the diffusers folder, with vocab.json and merges.txt beside tokenizer.json for older readers.

    `defaults` become rollout_defaults.json: what a rollout request gets for the fields that it leaves out.
    """
    parts = {name: copy.deepcopy(part).float().cpu().eval() for name, part in [("vae", vae), *model.named_children()]}
    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    absent = {"text_encoder_3": None, "tokenizer_3": None}
    pipeline = StableDiffusion3Pipeline(
        **parts, **absent, scheduler=scheduler, tokenizer=tokenizer, tokenizer_2=tokenizer
    )
    pipeline.save_pretrained(folder)
    Path(folder, "rollout_defaults.json").write_text(json.dumps(defaults) + "\n")
    for name in ("tokenizer", "tokenizer_2"):
        bpe = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
        merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in bpe["merges"]]
        Path(folder, name, "vocab.json").write_text(json.dumps(bpe["vocab"]) + "\n")
        Path(folder, name, "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    for path in Path(folder).rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
