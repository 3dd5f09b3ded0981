"""A diffusion rollout service for RL post-training: per-step log-probs and trajectories, the same bits in any batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from diffusion_rl.client import RolloutClient as RolloutClient
    from diffusion_rl.pipeline import RolloutPipeline as RolloutPipeline

_PUBLIC = {
    "RolloutClient": "diffusion_rl.client",
    "RolloutParams": "diffusion_rl.params",
    "RolloutPipeline": "diffusion_rl.pipeline",
    "RolloutSample": "diffusion_rl.sample",
}

__all__ = ["RolloutClient", "RolloutParams", "RolloutPipeline", "RolloutSample", "__version__"]


def __getattr__(name: str) -> object:
    """Public names are imported on first use, so that the HTTP process and the client load no model library."""
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_PUBLIC[name]), name)
