"""What one configures of the control layer, and the environment of engine processes. Imports nothing heavy. The only
file of this package that reads environment variables."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class ControlConfig:
    """What one configures of the control layer.

    implicit_weight_sessions: an update call without an open session is a session of its own.
    weight_session_timeout_s: a session that is silent for so long is undone.
    refuse_during_update: new requests get 503 while weights are being updated, instead of waiting.
    enable_memory_saver: memory can be released. weights_backup: what a release does that doesn't say.
    """

    implicit_weight_sessions: bool = False
    weight_session_timeout_s: float = 600.0
    refuse_during_update: bool = False
    enable_memory_saver: bool = False
    weights_backup: bool = True


@dataclass(frozen=True)
class RankSettings:
    """rank, world_size: of this engine. load_formats: import paths that may be named as custom loaders. timeout_s: how
    long a weight sender may keep a transport waiting."""

    rank: int = 0
    world_size: int = 1
    load_formats: tuple[str, ...] = ()
    timeout_s: float = 300.0


def default_threads(ranks: int = 1) -> int:
    """CPU threads of each of `ranks` processes: `OMP_NUM_THREADS` if set, else their share of this process's cores."""
    value = os.environ.get("OMP_NUM_THREADS", "")
    return int(value) if value.isdigit() and int(value) > 0 else max(len(os.sched_getaffinity(0)) // ranks, 1)


def engine_environment(ranks: int = 1) -> dict[str, str]:
    """Environment of an engine process, one of `ranks`, to be set before it imports torch.

    Passive waiting keeps the OpenMP threads of the engine from spinning against the HTTP process on a small machine.
    The malloc settings (glibc's) keep freed activations in the process: by default it hands buffers of many megabytes
    back to the system and faults them in again at every step, which doubles the time of a large batch on a CPU.
    """
    environment = dict(os.environ)
    environment.setdefault("OMP_WAIT_POLICY", "passive")
    environment.setdefault("OMP_NUM_THREADS", str(default_threads(ranks)))
    environment.setdefault("TOKENIZERS_PARALLELISM", "false")
    environment.setdefault("MALLOC_MMAP_THRESHOLD_", str(2**30))
    environment.setdefault("MALLOC_TRIM_THRESHOLD_", str(2**32))
    environment.setdefault("MALLOC_TOP_PAD_", str(2**26))
    return environment
