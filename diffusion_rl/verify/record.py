"""A record: what some requests gave once, as digests of every tensor of every step, in one safetensors file.

The file's metadata holds four texts: `format`, `format_version`, `record` (JSON: the environment, and for each request
its fields and samples) and `sha256` (of that JSON). A full record's tensors lie in the file too, each under its own
digest, so that equal ones are there once. The digests find damage, not malice: whoever writes a file can write them.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from diffusion_rl.params import RolloutParams, params_from_mapping
from diffusion_rl.sample import RolloutSample
from diffusion_rl.verify.environment import Environment, environment_from_plain, environment_of
from diffusion_rl.verify.fingerprint import Place, TensorPrint, digest, prints_of
from diffusion_rl.verify.requests import RequestFields, completed, fields_of
from diffusion_rl.verify.submission import Source, roll_out
from engine_control.errors import InvalidRequestError

FORMAT = "diffusion-rl verify record"
FORMAT_VERSION = "1"
SUFFIX = ".safetensors"
WAY_OUT = "Make one with `diffusion-rl verify record`."


@dataclass(frozen=True)
class RecordedSample:
    """One sample: its plain values (seed, step kinds, ...), its log-probs in full (a float holds an fp32 exactly), and
    the digests of its tensors, in the order in which they were computed."""

    values: Mapping[str, Any]
    log_probs: tuple[float, ...]
    prints: tuple[TensorPrint, ...]


@dataclass(frozen=True)
class RecordedRequest:
    """A request and its K samples."""

    params: RolloutParams
    samples: tuple[RecordedSample, ...]


@dataclass(frozen=True)
class Record:
    """What requests gave, and under what. `tensors` has a full record's tensors by digest; else it is empty."""

    environment: Environment
    requests: tuple[RecordedRequest, ...]
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict, compare=False, repr=False)

    @property
    def full(self) -> bool:
        return bool(self.tensors)

    def save(self, path: str | Path) -> Path:
        """Writes the file, in place of an older one only when it is complete, and returns its path.

        Raises:
            InvalidRequestError: the name doesn't end with `.safetensors`, or the file can't be written.
        """
        target = checked_target(path)
        text = json.dumps(_plain_record(self), separators=(",", ":"), allow_nan=False)
        metadata = {"format": FORMAT, "format_version": FORMAT_VERSION, "record": text, "sha256": _sha256(text)}
        partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            partial.touch()
            mode = partial.stat().st_mode  # as the umask has it; save_file would make a file that only its owner reads
            save_file({name: tensor.contiguous() for name, tensor in self.tensors.items()}, partial, metadata=metadata)
            partial.chmod(mode)
            partial.replace(target)
        except (OSError, SafetensorError) as error:
            raise InvalidRequestError(
                f"the record can't be written: {error}", field="out", value=str(target), hint="Name a writable place."
            ) from error
        finally:
            with suppress(OSError):  # it is gone if all went well
                partial.unlink()
        return target

    @classmethod
    def load(cls, path: str | Path) -> Record:
        """The record that `save` wrote, and nothing else: every digest is checked.

        Raises:
            InvalidRequestError: there is no such file, or it is truncated, damaged, foreign or of another version.
        """
        metadata, tensors = _read(Path(path))
        if metadata.get("format") != FORMAT:
            raise _unusable(path, "it is a safetensors file, but no record", WAY_OUT)
        version = metadata.get("format_version")
        if version != FORMAT_VERSION:
            raise _unusable(
                path,
                f"it has format version {version!r}, and this program reads version {FORMAT_VERSION!r}",
                "Compare with the diffusion-rl that wrote it, or record again.",
            )
        text = metadata.get("record", "")
        if _sha256(text) != metadata.get("sha256"):
            raise _unusable(path, "it is damaged: its content doesn't have the digest that stands beside it")
        try:
            plain = json.loads(text)
            record = cls(
                environment=environment_from_plain(plain["environment"]),
                requests=tuple(_request_from_plain(item) for item in plain["requests"]),
                tensors=tensors,
            )
            kept = plain["tensors"]
        except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
            raise _unusable(path, f"its content is no record ({error!r})", WAY_OUT) from error
        if kept != sorted(tensors) or any(digest(tensor) != name for name, tensor in tensors.items()):
            raise _unusable(path, "it is damaged: its tensors are not those that it names")
        return record


def record(source: Source, requests: Sequence[RequestFields], *, full: bool = False) -> Record:
    """Rolls the requests out, together, and records what comes.

    Requests may leave out their seed, and what is to be returned: then it is everything. With `full` the tensors are
    kept as well, so that a later difference can be measured, not only found.

    Raises:
        InvalidRequestError: there is no request, or one is invalid.
        EngineUnavailableError: the service was not reached.
    """
    asked = [completed(request) for request in requests]
    if not asked:
        raise InvalidRequestError("there is nothing to record", field="requests", value=[], hint="Give one request.")
    environment = environment_of(source)
    made = tuple(recorded(p, samples) for p, samples in zip(asked, roll_out(source, asked), strict=True))
    tensors: dict[str, torch.Tensor] = {}
    for item in (item for request in made for sample in request.samples for item in sample.prints):
        if full and item.tensor is not None and item.sha256 not in tensors:
            tensors[item.sha256] = item.tensor.clone()
    return Record(environment, tuple(_without_tensors(request) for request in made), tensors)


def recorded(params: RolloutParams, samples: Sequence[RolloutSample]) -> RecordedRequest:
    """A request and the samples that it gave, with their digests; the prints refer to the samples' tensors."""
    return RecordedRequest(params, tuple(_recorded_sample(sample) for sample in samples))


def checked_target(path: str | Path) -> Path:
    """The path of a record that is to be written.

    Raises:
        InvalidRequestError: its name doesn't end as a safetensors file's does, or it is a folder.
    """
    target = Path(path)
    if target.suffix != SUFFIX or target.is_dir():
        raise InvalidRequestError(
            "a record is a safetensors file, with or without --full",
            field="out",
            value=str(path),
            hint=f"Name it like {target.with_suffix(SUFFIX).name}." if target.name else f"Name it *{SUFFIX}.",
        )
    return target


def _recorded_sample(sample: RolloutSample) -> RecordedSample:
    log_probs = sample.rollout_log_probs
    values = {
        "sample_index": sample.sample_index,
        "seed": sample.seed,
        "step_kinds": list(sample.rollout_step_kinds),
        "sde_type": sample.sde_type,
        "noise_level": float(sample.noise_level),
        "sigma_max": float(sample.sigma_max),
        "guidance_scale": float(sample.guidance_scale),
        "num_elements": sample.num_elements,
        "width": sample.width,
        "height": sample.height,
    }
    if sample.num_frames is not None:
        values["num_frames"] = sample.num_frames
    if sample.rollout_step_transformers is not None:
        values["step_transformers"] = list(sample.rollout_step_transformers)
    if sample.embedded_guidance is not None:
        values["embedded_guidance"] = float(sample.embedded_guidance)
    return RecordedSample(values, () if log_probs is None else tuple(log_probs.tolist()), prints_of(sample))


def _without_tensors(request: RecordedRequest) -> RecordedRequest:
    """The request's digests alone, so that a record holds no sample's memory."""
    samples = [
        replace(sample, prints=tuple(replace(item, tensor=None) for item in sample.prints))
        for sample in request.samples
    ]
    return replace(request, samples=tuple(samples))


def _plain_record(made: Record) -> dict[str, Any]:
    requests = [
        {"fields": fields_of(request.params), "samples": [_plain_sample(sample) for sample in request.samples]}
        for request in made.requests
    ]
    return {"environment": asdict(made.environment), "requests": requests, "tensors": sorted(made.tensors)}


def _plain_sample(sample: RecordedSample) -> dict[str, Any]:
    prints = [[item.place.tensor, item.place.step, item.sha256] for item in sample.prints]
    return {"values": dict(sample.values), "log_probs": list(sample.log_probs), "prints": prints}


def _request_from_plain(plain: Mapping[str, Any]) -> RecordedRequest:
    samples = tuple(
        RecordedSample(
            values=dict(sample["values"]),
            log_probs=tuple(float(value) for value in sample["log_probs"]),
            prints=tuple(TensorPrint(Place(name, step), sha256) for name, step, sha256 in sample["prints"]),
        )
        for sample in plain["samples"]
    )
    return RecordedRequest(params_from_mapping(plain["fields"]), samples)


def _read(path: Path) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    if not path.is_file():
        raise _unusable(path, "there is no such file", WAY_OUT)
    try:
        with safe_open(path, framework="pt") as file:
            return file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise _unusable(path, f"it is no safetensors file, or a truncated one ({error})") from error


def _unusable(
    path: str | Path, reason: str, hint: str = "Record again, or fetch the file again."
) -> InvalidRequestError:
    return InvalidRequestError(
        f"cannot read a record from {str(path)!r}: {reason}",
        code="bad_record",
        field="file",
        value=str(path),
        hint=hint,
    )


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
