"""A record beside a rollout of the same requests: where the bits part first, and by how much."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from diffusion_rl.params import RolloutParams
from diffusion_rl.verify.environment import Environment, Mismatch, environment_of, mismatches
from diffusion_rl.verify.fingerprint import Place, TensorPrint
from diffusion_rl.verify.record import Record, RecordedRequest, RecordedSample, recorded
from diffusion_rl.verify.replayed import ReplayFinding, replay_findings
from diffusion_rl.verify.submission import Order, Source, roll_out

if TYPE_CHECKING:
    from diffusion_rl.pipeline import RolloutPipeline


@dataclass(frozen=True)
class Difference:
    """Something of a sample that has other bits, or another value, than was recorded.

    max_abs_diff: the largest difference of two elements; None where it can't be measured, because the record holds no
    tensors, or these have other shapes. 0.0 means that signs of zeros differ.
    note: what else there is to say.
    """

    request: int
    sample: int
    place: Place
    max_abs_diff: float | None = None
    note: str = ""

    def __str__(self) -> str:
        measured = [] if self.max_abs_diff is None else [f"max abs diff {self.max_abs_diff:.3g}"]
        more = ", ".join([*measured, *([self.note] if self.note else [])])
        return f"request {self.request}, sample {self.sample}: {self.place}" + (f" ({more})" if more else "")


@dataclass(frozen=True)
class RequestComparison:
    """One request. places: what was compared; differences: those of all samples, in the order of computation."""

    params: RolloutParams
    step_kinds: tuple[str, ...]
    places: tuple[Place, ...]
    compared: int
    differences: tuple[Difference, ...]

    @property
    def equal(self) -> bool:
        return not self.differences


@dataclass(frozen=True)
class Comparison:
    """All requests. environment: what differs beside the bits, so that equal bits are not promised at all.

    ratios: of every replayed step; None if none was replayed.
    """

    recorded: Environment
    found: Environment
    environment: tuple[Mismatch, ...]
    requests: tuple[RequestComparison, ...]
    ratios: tuple[ReplayFinding, ...] | None = None

    @property
    def equal(self) -> bool:
        """Whether all bits are the recorded ones, and all ratios exactly 1.0. False if nothing was compared."""
        return self.compared > 0 and all(request.equal for request in self.requests) and not self.wrong_ratios

    @property
    def compared(self) -> int:
        """Tensors and values that were compared."""
        return sum(request.compared for request in self.requests)

    @property
    def first(self) -> Difference | None:
        """Of the first request that differs, what differs first in the order of computation."""
        return next((request.differences[0] for request in self.requests if request.differences), None)

    @property
    def wrong_ratios(self) -> tuple[ReplayFinding, ...]:
        return tuple(finding for finding in self.ratios or () if finding.ratio != 1.0)


def compare(
    record: Record,
    source: Source,
    *,
    order: Order = "as-recorded",
    one_by_one: bool = False,
    replay_by: RolloutPipeline | None = None,
) -> Comparison:
    """Rolls the record's requests out again and compares all bits.

    order, one_by_one: what must not matter, see `submission.roll_out`. replay_by: a pipeline of the same weights, which
    re-scores the new rollout with autograd.

    Raises:
        InvalidRequestError: this model can't serve one of the requests.
        EngineUnavailableError: the service was not reached.
    """
    found = environment_of(source)
    params = [request.params for request in record.requests]
    groups = roll_out(source, params, order=order, one_by_one=one_by_one)
    requests = []
    for index, (before, samples) in enumerate(zip(record.requests, groups, strict=True)):
        requests.append(_compare_request(index, before, recorded(before.params, samples), record.tensors))
    ratios = None if replay_by is None else replay_findings(replay_by, groups)
    return Comparison(record.environment, found, mismatches(record.environment, found), tuple(requests), ratios=ratios)


def _compare_request(
    index: int, before: RecordedRequest, now: RecordedRequest, tensors: Mapping[str, torch.Tensor]
) -> RequestComparison:
    differences: list[Difference] = []
    compared = 0
    if len(before.samples) != len(now.samples):
        note = f"{len(now.samples)} samples instead of {len(before.samples)}"
        differences.append(Difference(index, 0, Place("samples"), note=note))
    for sample, (old, new) in enumerate(zip(before.samples, now.samples, strict=False)):
        differences += _values_that_differ(index, sample, old, new)
        differences += _tensors_that_differ(index, sample, old, new, tensors)
        compared += len(old.values) + len(old.prints)
    places = tuple(item.place for item in before.samples[0].prints) if before.samples else ()
    rank = {place: position for position, place in enumerate(places)}
    differences.sort(key=lambda d: rank.get(d.place, -1))  # stable: values first, and samples in order
    kinds = tuple(before.samples[0].values.get("step_kinds", ())) if before.samples else ()
    return RequestComparison(before.params, kinds, places, compared, tuple(differences))


def _values_that_differ(request: int, index: int, old: RecordedSample, new: RecordedSample) -> list[Difference]:
    return [
        Difference(request, index, Place(name), note=f"{new.values.get(name)!r} instead of {old.values.get(name)!r}")
        for name in dict.fromkeys([*old.values, *new.values])
        if old.values.get(name) != new.values.get(name)
    ]


def _tensors_that_differ(
    request: int, index: int, old: RecordedSample, new: RecordedSample, tensors: Mapping[str, torch.Tensor]
) -> list[Difference]:
    before = {item.place: item for item in old.prints}
    now = {item.place: item for item in new.prints}
    differences = []
    for place in dict.fromkeys([*before, *now]):
        if place not in before or place not in now:
            note = "was not recorded" if place in now else "is not there any more"
            differences.append(Difference(request, index, place, note=note))
        elif before[place].sha256 != now[place].sha256:
            log_probs = (old.log_probs, new.log_probs) if place.tensor == "log_prob" else None
            size, note = _measured(tensors.get(before[place].sha256), now[place], log_probs)
            differences.append(Difference(request, index, place, size, note))
    return differences


def _measured(
    old: torch.Tensor | None, new: TensorPrint, log_probs: tuple[Sequence[float], Sequence[float]] | None
) -> tuple[float | None, str]:
    """The largest difference, and a note where there is none to be measured."""
    step = new.place.step
    if log_probs is not None and step is not None and step < min(len(part) for part in log_probs):
        return abs(log_probs[0][step] - log_probs[1][step]), ""
    if old is None or new.tensor is None:
        return None, ""
    if old.shape != new.tensor.shape or old.dtype != new.tensor.dtype:
        return None, f"{list(new.tensor.shape)} {new.tensor.dtype} instead of {list(old.shape)} {old.dtype}"
    return float((old.double() - new.tensor.cpu().double()).abs().max()), ""
