"""Under what a rollout was made: versions, device, dtype, certificate, model and weights. Equality holds within it."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffusion_rl import __version__
from diffusion_rl.client import RolloutClient
from diffusion_rl.verify.fingerprint import weights_digests
from diffusion_rl.verify.submission import Source, reached

if TYPE_CHECKING:
    from diffusion_rl.pipeline import RolloutPipeline


@dataclass(frozen=True)
class Environment:
    """What bits may depend on, beside the request. None: not known, as of a service's weights and CPU.

    versions: of this project and of the libraries that compute.
    dtype: what the transformer computes in; load_dtype: what was asked for when the model was loaded (`auto`, ...).
    deterministic: the engine's certificate, as in `/server_info`.
    weights: a digest for each of the model's modules.
    """

    model_path: str
    pipeline_class: str
    dtype: str
    load_dtype: str | None
    device_name: str
    cpu: str | None
    versions: Mapping[str, str]
    deterministic: Mapping[str, Any]
    weight_version: str
    weights: Mapping[str, str] | None

    @property
    def exact(self) -> bool:
        """Whether the engine ran in exact mode, so that a sample's bits don't depend on its batch."""
        return bool(self.deterministic.get("enabled"))


@dataclass(frozen=True)
class Mismatch:
    """Something that two environments don't have in common. Between them, equal bits are not promised."""

    name: str
    recorded: str
    found: str


def environment_of(source: Source) -> Environment:
    """What a pipeline or a service says of itself; of a pipeline the weights are digested too.

    Raises:
        EngineUnavailableError: the service was not reached.
    """
    if isinstance(source, RolloutClient):
        return _environment(reached(source.server_info))
    return _of_pipeline(source)


def mismatches(recorded: Environment, found: Environment) -> tuple[Mismatch, ...]:
    """What differs, of all that both know. Where a model lies makes no difference to its bits."""
    pairs: dict[str, tuple[Any, Any]] = {}
    for name in ("pipeline_class", "dtype", "device_name", "cpu", "weight_version"):
        pairs[name] = (getattr(recorded, name), getattr(found, name))
    for name in sorted({*recorded.versions, *found.versions}):
        pairs[f"version of {name}"] = (recorded.versions.get(name), found.versions.get(name))
    ours, theirs = _certificate(recorded), _certificate(found)
    for name in sorted({*ours, *theirs}):
        pairs[name] = (ours.get(name, "absent"), theirs.get(name, "absent"))
    if recorded.weights is not None and found.weights is not None:
        for name in sorted({*recorded.weights, *found.weights}):
            pairs[f"weights of {name}"] = (recorded.weights.get(name, "absent"), found.weights.get(name, "absent"))
    return tuple(
        Mismatch(name, str(a), str(b))
        for name, (a, b) in pairs.items()
        if a is not None and b is not None and str(a) != str(b)
    )


def environment_from_plain(plain: Mapping[str, Any]) -> Environment:
    """The environment again, from the maps and texts that it is in a file."""
    return Environment(**{field.name: plain[field.name] for field in fields(Environment)})


def _of_pipeline(pipeline: RolloutPipeline) -> Environment:
    engine = pipeline.engine
    described = {**engine.describe(), "version": __version__}
    cpu = _cpu() if engine.family.device.type == "cpu" else None
    weights = None if engine.family.tensor is not None else weights_digests(pipeline)  # rank 0 has a part of them
    return _environment(described, load_dtype=engine.config.dtype, cpu=cpu, weights=weights)


def _environment(
    described: Mapping[str, Any],
    *,
    load_dtype: str | None = None,
    cpu: str | None = None,
    weights: Mapping[str, str] | None = None,
) -> Environment:
    known = json.loads(json.dumps(described, default=str))  # plain, as it will be in the file
    return Environment(
        model_path=known["model_path"],
        pipeline_class=known["pipeline_class"],
        dtype=known["dtype"],
        load_dtype=load_dtype,
        device_name=known["device_name"],
        cpu=cpu,
        versions={"diffusion-rl": known["version"], **known["versions"]},
        deterministic=known["deterministic"],
        weight_version=known["weight_version"],
        weights=weights,
    )


def _certificate(environment: Environment) -> dict[str, object]:
    """Exact mode, and which implementation stands for each class of operations; not how long the probes took."""
    found: dict[str, object] = {"exact mode": environment.deterministic.get("enabled")}
    for verdict in environment.deterministic.get("table", ()):
        found[f"implementation of {verdict['operation']}"] = str(verdict["implementation"])
    return found


def _cpu() -> str:
    """Model of the CPU, and the vector instructions that torch uses on it."""
    import torch

    about = Path("/proc/cpuinfo")
    lines = about.read_text(errors="replace").splitlines() if about.is_file() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{(named or [platform.machine()])[0]}, {torch.backends.cpu.get_cpu_capability()}"
