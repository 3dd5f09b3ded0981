"""Loads a model for a command, without the chatter of the libraries below."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diffusion_rl.config import EngineConfig

if TYPE_CHECKING:
    from diffusion_rl.pipeline import RolloutPipeline


def load_pipeline(config: EngineConfig) -> RolloutPipeline:
    """The pipeline that `config` names. Afterwards transformers and diffusers log errors only, and draw no bars.

    Raises:
        InvalidRequestError: the model can't be loaded, or no family serves it.
    """
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()  # before diffusers, which makes it speak while it is imported
    transformers_logging.disable_progress_bar()
    from diffusers.utils import logging as diffusers_logging

    diffusers_logging.set_verbosity_error()
    diffusers_logging.disable_progress_bar()
    from diffusion_rl.pipeline import RolloutPipeline

    return RolloutPipeline.from_config(config)
