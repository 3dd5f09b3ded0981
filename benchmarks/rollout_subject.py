"""What the rollout benchmark measures: one model, asked by the engine and by a plain loop under the same prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.full_size import Computed, computing
from benchmarks.measure import PromptSupply
from benchmarks.plain_diffusers import PlainModel, PlainQwenImage, PlainSD3
from diffusion_rl.batch import Conditioning, DenoiseBatch, PromptEmbeds
from diffusion_rl.models import ModelFamily
from diffusion_rl.models.qwen_image import QwenImageFamily
from diffusion_rl.models.runner import eager
from diffusion_rl.params import RolloutParams
from diffusion_rl.rollout.engine import RolloutEngine
from rl_kernels.mode import LIBRARY

SEED = 42
NOISE_LEVEL = 0.7
GUIDANCE = 4.5
PROMPT, NEGATIVE = "a group of three red balls", ""


@dataclass(frozen=True)
class Subject:
    """A model, its engine, and how prompts come to it: `fresh` means a new one each time, encoded inside the clock."""

    engine: RolloutEngine
    size: tuple[int, int]
    steps: int
    fresh: PromptSupply | None
    known: dict[str, PromptEmbeds]

    @property
    def family(self) -> ModelFamily:
        return self.engine.family

    def prompt(self) -> str:
        return PROMPT if self.fresh is None else self.fresh.take(1)[0]

    @torch.no_grad()
    def embeds(self, prompt: str) -> PromptEmbeds:
        if self.fresh is not None:
            return self._encoded(prompt)
        if prompt not in self.known:
            self.known[prompt] = self._encoded(prompt)
        return self.known[prompt]

    def _encoded(self, prompt: str) -> PromptEmbeds:
        return self.family.encode_prompt(prompt, self.family.defaults.max_sequence_length)

    def request(self, group: int, *, steps: int | None = None, **fields: Any) -> RolloutParams:
        return RolloutParams(
            self.prompt(),
            negative_prompt=NEGATIVE,
            height=self.size[0],
            width=self.size[1],
            num_inference_steps=steps or self.steps,
            guidance_scale=GUIDANCE,
            true_cfg_scale=GUIDANCE,
            rollout_noise_level=NOISE_LEVEL,
            **{"seed": SEED, "num_outputs_per_prompt": group, **fields},
        )

    def plain(self, group: int) -> PlainModel:
        """The plain loop's model, under a prompt for a whole group."""
        positive, negative = self.embeds(self.prompt()), self.embeds(NEGATIVE)
        rows = [[p.prompt_embeds.to(self.family.dtype)] * group for p in (negative, positive)]
        if isinstance(self.family, QwenImageFamily):
            return PlainQwenImage(self.family.pipeline, torch.stack(rows[1]), torch.stack(rows[0]), GUIDANCE, self.size)
        pooled = [p.pooled.to(self.family.dtype) for p in (negative, positive) if p.pooled is not None]
        grid = tuple(pixels // self.family.pipeline.vae_scale_factor for pixels in self.size)
        text, pooled_rows = torch.stack(rows[0] + rows[1]), torch.stack([pooled[0]] * group + [pooled[1]] * group)
        return PlainSD3(self.family.pipeline, text, pooled_rows, GUIDANCE, (grid[0], grid[1]))

    def batch(self, group: int) -> DenoiseBatch:
        """`group` guided samples of random numbers, at different steps."""
        family, (height, width) = self.family, self.size
        prompts = self.embeds(self.prompt()), self.embeds(NEGATIVE)
        return DenoiseBatch(
            torch.randn(group, *family.latent_shape(height, width), device=family.device).to(family.dtype),
            torch.linspace(900, 100, group, device=family.device),
            tuple(Conditioning(*prompts, GUIDANCE) for _ in range(group)),
            height,
            width,
        )


@torch.no_grad()
def counted_flops(subject: Subject) -> dict[str, int]:
    """Operations (a multiply-add is two) of one guided sample-step, and of one picture."""
    family, batch = subject.family, subject.batch(1)
    stock = Computed(replace(LIBRARY, fused=False), eager)  # a graph's replay would count nothing
    with computing(family, stock):
        evaluation = _count(lambda: family.predict(batch))
    return {
        "guided_evaluation": evaluation,
        "picture": _count(lambda: family.decode(batch.latents, *subject.size)),
    }


def _count(work: Callable[[], object]) -> int:
    # torch knows the operations of attention on GPUs; the CPU's own attention operator has to be told
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    with FlopCounterMode(display=False, custom_mapping={attention: _attention_flops}) as counter:
        work()
    return int(counter.get_total_flops())


def _attention_flops(query: Sequence[int], key: Sequence[int], *others: Any, **options: Any) -> int:
    """Two products of queries with keys and of weights with values, given the shapes `[B, heads, tokens, D]`."""
    batch, heads, tokens, width = query
    return 2 * 2 * batch * heads * tokens * key[2] * width
