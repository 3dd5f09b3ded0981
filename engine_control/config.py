"""What one configures of the control layer. Imports nothing heavy."""

from __future__ import annotations

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
