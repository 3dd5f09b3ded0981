"""The decoders of diffusers' VAEs with fewer passes over memory: their own modules, with other forwards for a while.

A norm computes the SiLU behind it as well, in one fused operation, and the module of that SiLU hands on what it gets;
nearest neighbours are copied in the dtype that they have; and a decoder of pictures computes with its channels
innermost, as a GPU's convolutions do. Modules, parameters and their names stay what they are, and weights are read at
each call: whoever refits, saves or moves them sees no difference.

In half precision a fused norm rounds less often than the modules it stands for: pictures are within rounding of the
stock decoder's, and are not equal to them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import (
    QwenImageDecoder3d,
    QwenImageResidualBlock,
    QwenImageRMS_norm,
    QwenImageUpsample,
)
from diffusers.models.autoencoders.autoencoder_kl_wan import (
    WanDecoder3d,
    WanResidualBlock,
    WanRMS_norm,
    WanUpsample,
)
from diffusers.models.autoencoders.vae import Decoder
from diffusers.models.resnet import ResnetBlock2D
from torch import nn

from diffusion_rl.models.graphs import CudaGraphs
from rl_kernels import reference
from rl_kernels.channel_norm import channel_norm
from rl_kernels.fused import DTYPES
from rl_kernels.group_norm import group_norm
from rl_kernels.replacing import Replacement, replaced_forwards, runs_forward_of

# By the module that calls them: its norms, and the activation that it calls behind each of them and nowhere else.
ACTIVATED: Mapping[type[nn.Module], tuple[tuple[str, ...], str]] = {
    ResnetBlock2D: (("norm1", "norm2"), "nonlinearity"),
    Decoder: (("conv_norm_out",), "conv_act"),
    QwenImageResidualBlock: (("norm1", "norm2"), "nonlinearity"),
    QwenImageDecoder3d: (("norm_out",), "nonlinearity"),
    WanResidualBlock: (("norm1", "norm2"), "nonlinearity"),
    WanDecoder3d: (("norm_out",), "nonlinearity"),
}
UPSAMPLERS = (QwenImageUpsample, WanUpsample)
# Fused norm and twin round once from nearly the same fp32 number: at most one unit in the last place between them.
TOLERANCE = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 1e-4}
MAX_CAPTURED_PIXELS = 512 * 512  # of a picture, or of all frames; more keep the device busy longer than their launches


def gains_by_capture(size: tuple[int, ...]) -> bool:
    """Whether launching the decode of such a picture or video may take longer than its work."""
    return math.prod(size) <= MAX_CAPTURED_PIXELS


@dataclass(frozen=True)
class Decoding:
    """How pictures are decoded: with which other forwards, and whether the launches of small ones are captured."""

    forwards: tuple[Replacement, ...] = ()
    graphs: CudaGraphs | None = None

    def __call__(self, decode: Callable[..., torch.Tensor], latents: torch.Tensor, *size: int) -> torch.Tensor:
        """`decode(latents, *size)`."""
        with replaced_forwards(self.forwards):
            if self.graphs is None or torch.is_grad_enabled() or not gains_by_capture(size):
                return decode(latents, *size)
            key = (tuple(latents.shape), latents.dtype, size)
            return self.graphs.run(key, lambda given: decode(given["latents"], *size), {"latents": latents})


@dataclass(frozen=True)
class Operation:
    """A fused norm, its twin, and what both take of a module beside x."""

    fused: Callable[..., torch.Tensor]
    twin: Callable[..., torch.Tensor]
    arguments: Callable[[Any], dict[str, Any]]


def _of_group_norm(module: nn.GroupNorm) -> dict[str, Any]:
    return {"groups": module.num_groups, "weight": module.weight, "bias": module.bias, "eps": module.eps}


def _of_channel_norm(module: Any) -> dict[str, Any]:
    bias = module.bias.flatten() if isinstance(module.bias, torch.Tensor) else None
    return {"gamma": module.gamma.flatten(), "bias": bias}


_CHANNEL_NORM = Operation(channel_norm, reference.channel_norm, _of_channel_norm)
OPERATIONS: Mapping[type[nn.Module], Operation] = {
    nn.GroupNorm: Operation(group_norm, reference.group_norm, _of_group_norm),
    QwenImageRMS_norm: _CHANNEL_NORM,
    WanRMS_norm: _CHANNEL_NORM,
}


@dataclass(frozen=True)
class Norm:
    """A norm of a decoder by its name there, and the module of the SiLU behind it, if there is one."""

    name: str
    module: Any
    operation: Operation
    activation: nn.Module | None

    def fits(self, x: torch.Tensor) -> bool:
        """Whether x and the weights are of one dtype, and that is one of the fused operation's."""
        return x.dtype in DTYPES and all(p.dtype == x.dtype for p in self.module.parameters(recurse=False))

    def forward(self, module: Any, x: torch.Tensor) -> torch.Tensor:
        """In place of the norm's own: with its SiLU, fused where x fits."""
        if self.fits(x):
            return self.compute(self.operation.fused, x)
        normed: torch.Tensor = type(module).forward(module, x)
        return normed if self.activation is None else F.silu(normed)

    def compute(self, operation: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        """What the fused operation, or its twin, makes of x."""
        return operation(x, **self.operation.arguments(self.module), silu=self.activation is not None)


def norms_of(decoder: nn.Module) -> list[Norm]:
    """All that can be fused, in the decoder's own order: of a known class, with a forward that nobody has replaced."""
    activations = dict(_activated(decoder))
    found = []
    for name, module in decoder.named_modules():
        operation = next((o for cls, o in OPERATIONS.items() if runs_forward_of(module, cls)), None)
        if operation is not None and getattr(module, "channel_first", True):
            found.append(Norm(name, module, operation, activations.get(module)))
    return found


def _activated(decoder: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Norms and the SiLUs behind them. A block that is told the time calls its SiLU for that as well."""
    for module in decoder.modules():
        for cls, (norms, activation) in ACTIVATED.items():
            silu = getattr(module, activation, None) if runs_forward_of(module, cls) else None
            if runs_forward_of(silu, nn.SiLU) and getattr(module, "time_emb_proj", None) is None:
                named = [getattr(module, name) for name in norms]
                if all(any(runs_forward_of(norm, known) for known in OPERATIONS) for norm in named):
                    yield from ((norm, silu) for norm in named)


def fused_decoder(vae: object, *, channels_last: bool = True) -> tuple[Replacement, ...]:
    """Other forwards for modules of the VAE's decoder; none where it is of no class that is known here.

    channels_last: a decoder of pictures, `[B, C, H, W]`, computes with its channels innermost.
    """
    decoder = getattr(vae, "decoder", None)
    if not isinstance(decoder, nn.Module):
        return ()
    found = [r for norm in norms_of(decoder) for r in _replacements(norm, norm.forward)]
    found += [Replacement(m, _upsampled) for m in decoder.modules() if any(runs_forward_of(m, u) for u in UPSAMPLERS)]
    if found and channels_last and runs_forward_of(decoder, Decoder):
        found.append(Replacement(decoder, _channels_innermost))
    return tuple(found)


def _replacements(norm: Norm, forward: Callable[..., torch.Tensor]) -> Iterator[Replacement]:
    yield Replacement(norm.module, forward)
    if norm.activation is not None:
        yield Replacement(norm.activation, _handed_on)


def _handed_on(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x


def _upsampled(module: Any, x: torch.Tensor) -> torch.Tensor:
    """What a detour by fp32 copies, copied without it."""
    return nn.Upsample.forward(module, x) if x.dtype in DTYPES else type(module).forward(module, x)


def _channels_innermost(module: Any, sample: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Layers keep the memory order of what they get, down to the picture, which leaves in the usual one."""
    sample = sample.contiguous(memory_format=torch.channels_last)
    picture: torch.Tensor = type(module).forward(module, sample, *args, **kwargs)
    return picture.contiguous()


def wrong_norm(vae: Any, decode: Callable[[], object]) -> str | None:
    """The first norm that `decode()` calls whose fused operation is far from its twin on what it gets there, or has
    other bits alone than beside another sample, and how; None: none does."""
    wrong: list[str] = []
    probed = [r for n in norms_of(vae.decoder) for r in _replacements(n, partial(_probe, norm=n, wrong=wrong))]
    with replaced_forwards(probed):
        decode()
    return wrong[0] if wrong else None


def _probe(module: Any, x: torch.Tensor, *, norm: Norm, wrong: list[str]) -> torch.Tensor:
    ours = norm.forward(module, x)
    if not norm.fits(x):
        return ours
    twin = norm.compute(norm.operation.twin, x)
    off = (ours.float() - twin.float()).abs() / (1 + twin.float().abs())
    if not bool((off <= TOLERANCE[x.dtype]).all()):  # a NaN isn't
        wrong.append(f"{norm.name}: {float(off.max()):.2g} off its twin")
    both = x.new_empty_strided((2 * len(x), *x.shape[1:]), (x[0].numel(), *x.stride()[1:]))
    both[: len(x)], both[len(x) :] = -x, x
    if not torch.equal(norm.forward(module, both)[len(x) :], ours):
        wrong.append(f"{norm.name}: a sample beside another one")
    return ours
