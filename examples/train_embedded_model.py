"""Train the embedded model from nothing: a text-to-image flow-matching model for 64 x 64 pictures of shapes.

The result is a complete `StableDiffusion3Pipeline` folder in diffusers format: a tokenizer, two CLIP text encoders, a
VAE, and a joint-attention transformer, all trained here on pictures that `diffusion_rl.shapes` draws as they are
needed. No weights and no data come from elsewhere. Run it from the repository's root:

    PYTHONPATH=. python examples/train_embedded_model.py --device cuda

Training stops at the first check at which the share of held-out captions drawn right reaches `--stop-accuracy`.
"""

import argparse
import copy
import json
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import diffusers
import numpy as np
import torch
import transformers
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler
from embedded_model.architecture import (
    LATENT_SIZE,
    Architecture,
    TextToImage,
    build_tokenizer,
    build_vae,
    save_pipeline,
)
from embedded_model.reporting import draw_contact_sheet, draw_curves
from torch import nn
from torch.nn import functional
from transformers import CLIPTokenizer

from diffusion_rl.shapes import CheckResult, check, draw_batch, held_out_captions, parse, training_captions

PIPELINE_ZERO_TOKENS = 256
"""How many zero tokens `StableDiffusion3Pipeline` appends for the absent T5 when no `max_sequence_length` is given."""


@dataclass(frozen=True)
class Settings(Architecture):
    """Every knob of a run; each is a command-line option of the same name."""

    out: str = "diffusion_rl/assets/shapes-64"
    results: str = "examples/embedded_model"
    device: str = "cpu"
    seed: int = 0
    time_budget: float = 490.0  # seconds, the whole run
    vae_steps: int = 6000
    vae_seconds: float = 90.0
    vae_batch_size: int = 256
    vae_rate: float = 1e-3
    kl_weight: float = 1e-3
    steps: int = 40000
    batch_size: int = 1024
    rate: float = 1e-3
    warmup: int = 500
    ema: float = 0.999
    zero_tokens: int = 8  # the `max_sequence_length` that most steps train with
    long_share: float = 0.1  # share of steps that train with the pipeline's default of 256 zero tokens
    caption_dropout: float = 0.1
    shift: float = 3.0
    guidance: float = 4.0
    sampling_steps: int = 10
    eval_every: int = 500
    eval_captions: int = 200
    stop_accuracy: float = 0.72
    compile: bool = False

    def rollout_defaults(self) -> dict:
        """What a rollout request gets for the fields it leaves out; guidance 3 was best in the sweep."""
        return {
            "num_inference_steps": self.sampling_steps,
            "guidance_scale": 3.0,
            "max_sequence_length": self.zero_tokens,
        }


def parse_settings() -> Settings:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for field in fields(Settings):
        option = "--" + field.name.replace("_", "-")
        if field.type is bool:
            parser.add_argument(option, action="store_true")
        else:
            parser.add_argument(option, type=field.type, default=field.default, help=f"default {field.default}")
    return Settings(**vars(parser.parse_args()))


@dataclass(frozen=True)
class Clock:
    """The time of a run, in seconds since it started."""

    started: float

    def seconds(self) -> float:
        return time.perf_counter() - self.started

    def log(self, message: str) -> None:
        print(f"[{self.seconds():7.1f} s] {message}", flush=True)


@dataclass(frozen=True)
class Corpus:
    """Captions on the device: token ids [captions, length], scene attributes [captions, 6], and the empty caption."""

    token_ids: torch.Tensor
    attributes: torch.Tensor
    empty_ids: torch.Tensor  # [1, length]

    def random_rows(self, count: int) -> torch.Tensor:
        return torch.randint(len(self.token_ids), (count,), device=self.token_ids.device)

    def pictures(self, rows: torch.Tensor) -> torch.Tensor:
        """Draw fresh pictures of the captions in these rows: [rows, 3, 64, 64] in [-1, 1], as a VAE takes them."""
        return draw_batch(self.attributes[rows]) * 2.0 - 1.0


def build_corpus(tokenizer: CLIPTokenizer, captions: Sequence[str], device: str) -> Corpus:
    def ids(texts: Sequence[str]) -> torch.Tensor:
        length = tokenizer.model_max_length
        encoded = tokenizer(list(texts), padding="max_length", max_length=length, truncation=True, return_tensors="pt")
        return encoded.input_ids.to(device)

    attributes = torch.tensor([parse(text).attributes() for text in captions], device=device)
    return Corpus(ids(captions), attributes, ids([""]))


def half_precision(settings: Settings) -> torch.autocast:
    """Autocast to bfloat16 on a GPU; on a CPU everything stays in float32. Weights are float32 in both cases."""
    kind = torch.device(settings.device).type
    return torch.autocast(kind, dtype=torch.bfloat16, enabled=kind == "cuda")


def set_rate(optimizer: torch.optim.Optimizer, rate: float, step: int, warmup: int, progress: float) -> None:
    """Warm up over the first steps, hold until half of the run, then fall linearly to a twentieth."""
    factor = min(1.0, (step + 1) / warmup) * min(1.0, 1.0 - 0.95 * max(0.0, 2.0 * progress - 1.0))
    for group in optimizer.param_groups:
        group["lr"] = rate * factor


def adam(module: nn.Module, rate: float, device: str) -> torch.optim.AdamW:
    fused = torch.device(device).type == "cuda"
    return torch.optim.AdamW(module.parameters(), lr=rate, betas=(0.9, 0.99), weight_decay=0.0, fused=fused)


def train_vae(vae: AutoencoderKL, corpus: Corpus, settings: Settings, clock: Clock) -> list[dict]:
    """Train the VAE, set its scaling and shift factors from what it encodes, and return its loss curve."""
    optimizer = adam(vae, settings.vae_rate, settings.device)
    began, curve = clock.seconds(), []
    for step in range(settings.vae_steps):
        progress = max(step / settings.vae_steps, (clock.seconds() - began) / settings.vae_seconds)
        if progress >= 1.0:
            break
        set_rate(optimizer, settings.vae_rate, step, 100, progress)
        pictures = corpus.pictures(corpus.random_rows(settings.vae_batch_size))
        with half_precision(settings):
            posterior = vae.encode(pictures).latent_dist
            decoded = vae.decode(posterior.sample(), return_dict=False)[0]
        difference = decoded.float() - pictures
        mean, logvar = posterior.mean.float(), posterior.logvar.float()
        kl = 0.5 * (mean.square() + logvar.exp() - 1.0 - logvar).mean()
        loss = difference.abs().mean() + difference.square().mean() + settings.kl_weight * kl
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        if step % max(1, settings.vae_steps // 60) == 0:
            curve.append({"step": step, "loss": loss.item(), "l1": difference.abs().mean().item(), "kl": kl.item()})
            clock.log(f"vae step {step}: l1 {curve[-1]['l1']:.4f}, kl {curve[-1]['kl']:.3f}")
    vae.eval().requires_grad_(False)
    with torch.no_grad():
        latents = torch.cat([encode(vae, corpus.pictures(corpus.random_rows(128))) for _ in range(8)])
    vae.register_to_config(scaling_factor=1.0 / latents.std().item(), shift_factor=latents.mean().item())
    spread = latents.std(dim=(0, 2, 3)).sort().values.tolist()
    clock.log(f"latents: std {latents.std():.3f}, mean {latents.mean():.3f}, channels' std {np.round(spread, 2)}")
    return curve


def encode(vae: AutoencoderKL, pictures: torch.Tensor) -> torch.Tensor:
    return vae.encode(pictures).latent_dist.mode()


def train_flow(
    model: TextToImage,
    vae: AutoencoderKL,
    corpora: tuple[Corpus, Corpus],
    settings: Settings,
    clock: Clock,
    until: float,
) -> tuple[TextToImage, list[dict], list[dict]]:
    """Train by flow matching until `until` seconds; return the averaged weights, the loss curve and the checks."""
    corpus, held_out = corpora
    average = copy.deepcopy(model).eval().requires_grad_(False)
    weights, averages = list(model.parameters()), list(average.parameters())
    predict = torch.compile(model) if settings.compile else model
    optimizer = adam(model, settings.rate, settings.device)
    lengths = np.random.default_rng(settings.seed)
    began, curve, checks, losses = clock.seconds(), [], [], []
    for step in range(settings.steps):
        progress = max(step / settings.steps, (clock.seconds() - began) / max(1.0, until - began))
        if step and (step % settings.eval_every == 0 or progress >= 1.0):
            checks.append({"step": step, "seconds": clock.seconds(), **accuracy(average, vae, held_out, settings)})
            clock.log(f"step {step}: {describe(checks[-1])}")
            if checks[-1]["correct"] >= settings.stop_accuracy:
                break
        if progress >= 1.0:
            break
        set_rate(optimizer, settings.rate, step, settings.warmup, progress)
        zero_tokens = PIPELINE_ZERO_TOKENS if lengths.random() < settings.long_share else settings.zero_tokens
        loss = flow_loss(predict, vae, corpus, settings, zero_tokens)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        share = 1.0 - min(settings.ema, step / (step + 10))
        torch._foreach_lerp_(averages, [weight.detach() for weight in weights], share)
        losses.append(loss.detach())
        if len(losses) == 100 or step + 1 == settings.steps:
            curve.append({"step": step + 1, "seconds": clock.seconds(), "loss": torch.stack(losses).mean().item()})
            clock.log(f"step {step + 1}: loss {curve[-1]['loss']:.4f}")
            losses.clear()
    return average, curve, checks


def flow_loss(
    predict: nn.Module, vae: AutoencoderKL, corpus: Corpus, settings: Settings, zero_tokens: int
) -> torch.Tensor:
    """Return the mean squared error of the predicted velocity over one fresh batch."""
    count, device = settings.batch_size, settings.device
    rows = corpus.random_rows(count)
    dropped = torch.rand(count, 1, device=device) < settings.caption_dropout
    ids = torch.where(dropped, corpus.empty_ids, corpus.token_ids[rows])
    with torch.no_grad():
        latents = (encode(vae, corpus.pictures(rows)) - vae.config.shift_factor) * vae.config.scaling_factor
        noise = torch.randn_like(latents)
        sigma = torch.sigmoid(torch.randn(count, device=device))
        sigma = torch.where(torch.rand(count, device=device) < 0.2, torch.rand(count, device=device), sigma)
        sigma = settings.shift * sigma / (1.0 + (settings.shift - 1.0) * sigma)
        level = sigma[:, None, None, None]
        noisy = level * noise + (1.0 - level) * latents
    with half_precision(settings):
        velocity = predict(noisy, sigma, ids, zero_tokens)
    return functional.mse_loss(velocity.float(), noise - latents)


@torch.no_grad()
def generate(
    model: TextToImage, vae: AutoencoderKL, corpus: Corpus, settings: Settings, seed: int, guidance: float, shift: float
) -> torch.Tensor:
    """Return one picture per caption of the corpus, [captions, 3, 64, 64] in [0, 1], by the pipeline's own loop."""
    ids = torch.cat([corpus.empty_ids.expand_as(corpus.token_ids), corpus.token_ids])
    tokens, pooled = model.embed(ids, settings.zero_tokens)
    generator = torch.Generator("cpu").manual_seed(seed)
    shape = (len(corpus.token_ids), settings.latent_channels, LATENT_SIZE, LATENT_SIZE)
    latents = torch.randn(shape, generator=generator).to(settings.device)
    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    scheduler.set_timesteps(settings.sampling_steps, device=settings.device)
    for moment in scheduler.timesteps:
        both = torch.cat([latents, latents])
        plain, guided = model.transformer(both, tokens, pooled, moment.expand(len(both)), return_dict=False)[0].chunk(2)
        latents = scheduler.step(plain + guidance * (guided - plain), moment, latents, return_dict=False)[0]
    decoded = vae.decode(latents / vae.config.scaling_factor + vae.config.shift_factor, return_dict=False)[0]
    return (decoded / 2.0 + 0.5).clamp(0.0, 1.0)


def accuracy(
    model: TextToImage,
    vae: AutoencoderKL,
    corpus: Corpus,
    settings: Settings,
    seeds: Sequence[int] = (0, 1),
    guidance: float | None = None,
    shift: float | None = None,
) -> dict[str, float]:
    """Return the share of held-out captions drawn right, in all and by attribute, over one picture a seed."""
    guidance, shift = guidance or settings.guidance, shift or settings.shift
    results: list[CheckResult] = []
    for seed in seeds:
        pictures = generate(model, vae, corpus, settings, seed, guidance, shift).cpu().numpy()
        captions = held_out_captions()[: len(pictures)]
        results += [check(picture, text) for picture, text in zip(pictures, captions, strict=True)]
    names = [*(field.name for field in fields(CheckResult)), "correct", "score"]
    return {name: float(np.mean([getattr(result, name) for result in results])) for name in names}


def describe(shares: dict[str, float]) -> str:
    parts = [f"{name} {shares[name]:.2f}" for name in ("colour", "shape", "count", "position", "size", "background")]
    return f"held out {shares['correct']:.3f} right, score {shares['score']:.3f} ({', '.join(parts)})"


def report(results: dict, pictures: np.ndarray, settings: Settings, clock: Clock) -> None:
    """Write results.json, the contact sheet and, where matplotlib is installed, the loss curve."""
    folder = Path(settings.results)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    draw_contact_sheet(pictures, folder / "contact_sheet.png")
    try:
        draw_curves(results, folder / "loss_curve.png")
    except ImportError:
        clock.log("matplotlib is not installed: no loss_curve.png")


def main() -> None:
    settings, clock = parse_settings(), Clock(time.perf_counter())
    torch.manual_seed(settings.seed)
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    tokenizer = build_tokenizer(training_captions() + held_out_captions(), settings.text_length)
    corpus = build_corpus(tokenizer, training_captions(), settings.device)
    held_out = build_corpus(tokenizer, held_out_captions()[: settings.eval_captions], settings.device)
    on_gpu = torch.device(settings.device).type == "cuda"
    machine = torch.cuda.get_device_name(settings.device) if on_gpu else f"CPU {platform.machine()}"
    clock.log(f"{machine}, {len(corpus.token_ids)} training captions, {len(tokenizer)} tokens")

    vae = build_vae(settings.latent_channels).to(settings.device)
    vae_curve = train_vae(vae, corpus, settings, clock)
    vae_seconds = clock.seconds()
    model = TextToImage(settings, tokenizer).to(settings.device)
    until = settings.time_budget - min(45.0, 0.2 * settings.time_budget)
    average, curve, checks = train_flow(model, vae, (corpus, held_out), settings, clock, until)
    flow_seconds = clock.seconds() - vae_seconds
    save_pipeline(average, vae, tokenizer, settings.out, settings.shift, settings.rollout_defaults())
    clock.log(f"saved {settings.out}")

    final = accuracy(average, vae, held_out, settings, seeds=(2, 3, 4))
    clock.log(f"final: {describe(final)}")
    sweep = []
    for guidance, shift in [(g, s) for s in (settings.shift, 1.0) for g in (1.0, 2.0, 3.0, 4.0, 5.0, 7.0)]:
        if clock.seconds() < settings.time_budget - 5.0:
            found = accuracy(average, vae, held_out, settings, seeds=(2,), guidance=guidance, shift=shift)
            sweep.append({"guidance": guidance, "shift": shift, **found})
            clock.log(f"guidance {guidance}, shift {shift}: {found['correct']:.3f} right")
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    versions |= {"diffusers": diffusers.__version__, "transformers": transformers.__version__}
    results = {
        "hardware": machine,
        "versions": versions,
        "settings": asdict(settings),
        "seconds": {"vae": vae_seconds, "flow": flow_seconds, "total": clock.seconds()},
        "parameters": {name: sum(p.numel() for p in part.parameters()) for name, part in average.named_children()}
        | {"vae": sum(p.numel() for p in vae.parameters())},
        "final": final,
        "sweep": sweep,
        "vae_curve": vae_curve,
        "curve": curve,
        "checks": checks,
    }
    pictures = generate(average, vae, held_out, settings, 2, settings.guidance, settings.shift).cpu().numpy()
    report(results, pictures, settings, clock)
    clock.log("done")


if __name__ == "__main__":
    main()
