"""Which samples advance together. Request, prompt, seed, step index and step kind may all differ within a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from diffusion_rl.batch import ImageShapes, Size
from diffusion_rl.rollout.queue import SampleState


@dataclass(frozen=True)
class BatchKey:
    """What samples of one transformer forward must agree in. Text length is not part of it; the adapter is."""

    size: Size
    image_shapes: ImageShapes
    guided: bool
    lora_name: str | None
    transformer: str


def batch_key(sample: SampleState) -> BatchKey:
    """Of a sample that has a step to take."""
    request = sample.request
    return BatchKey(
        size=request.size,
        image_shapes=request.image_shapes,
        guided=request.guidance.negative_prompt is not None,
        lora_name=request.params.lora_name,
        transformer=request.schedule.transformers[sample.step],
    )


def pick_batch(samples: Sequence[SampleState], max_batch_size: int) -> list[SampleState]:
    """The most urgent sample (the oldest, among equals) and up to `max_batch_size - 1` that can share its forward.

    Samples that have taken all their steps are passed over. Urgent first means that a request, once begun, is finished
    before a younger one of the same key takes its place.
    """
    stepping = [s for s in samples if s.step < s.request.schedule.steps]
    ordered = sorted(stepping, key=lambda s: (-s.request.params.priority, s.request.arrival, s.members))
    if not ordered:
        return []
    key = batch_key(ordered[0])
    return [s for s in ordered if batch_key(s) == key][:max_batch_size]
