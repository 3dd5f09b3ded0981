"""A rank that follows rank 0, in a process that rank 0 starts (`engine_control.followers`).

It computes its part of every batch, and carries out every command of the control layer. It decides nothing.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from typing import Any

import msgspec
import torch
from transformers.utils import logging as transformers_logging

from engine_control.child import connection_from_descriptor
from engine_control.followers import follow
from engine_control.rank import RankCommand, RankControl
from engine_control.start import keep_what_is_loaded
from llm_runtime.config import LLMConfig
from llm_runtime.engine.batches import ForwardBatch
from llm_runtime.engine.certification import make_exact
from llm_runtime.engine.model_runner import ModelRunner
from llm_runtime.engine.rank_weights import RankWeights, rank_settings
from llm_runtime.engine.startup import make_runner, pages_for, prefill_tokens
from llm_runtime.models.base import CausalLM
from llm_runtime.models.loading import load_model
from llm_runtime.parallel.ranks import Load, Prepare, Shared, meet


class Follower:
    """Load, prepare, then batches and commands. What can't be carried out raises, and ends the process."""

    def __init__(self) -> None:
        self._rank = 0
        self._config = LLMConfig()
        self._model: CausalLM | None = None
        self._runner: ModelRunner | None = None
        self._control: RankControl | None = None

    def handle(self, message: Any) -> object:
        if self._runner is None:
            start = msgspec.convert(message, Load | Prepare)
            return self._load(start) if isinstance(start, Load) else self._prepare(start.pages)
        decision = msgspec.convert(message, ForwardBatch | RankCommand)
        if isinstance(decision, RankCommand):
            assert self._control is not None
            return self._control.carry_out(decision)
        self._runner.compute(decision)
        return None

    def _load(self, load: Load) -> int:
        self._rank = load.rank
        self._config = replace(msgspec.convert(load.config, LLMConfig), device=load.device)
        if torch.device(load.device).index is not None:
            torch.cuda.set_device(load.device)
        group = meet(load.path, load.rank, self._config.tp_size, load.device, load.timeout_s)
        self._model = load_model(self._config, Shared(group))
        return pages_for(self._model, self._config)

    def _prepare(self, pages: int) -> bool:
        assert self._model is not None
        runner = make_runner(self._model, self._config, pages)
        rows = prefill_tokens(self._config, runner.device)
        exactness = make_exact(runner, self._config.deterministic, rows=rows)
        self._control = RankControl(
            RankWeights(runner, self._config, lambda: None), rank_settings(self._config, self._rank)
        )
        self._runner = runner
        keep_what_is_loaded()
        return exactness.enabled


def main() -> None:
    """Follows until rank 0 closes the connection."""
    connection = connection_from_descriptor(int(sys.argv[1]))
    logging.basicConfig(level=logging.INFO, format="follower: %(levelname)s %(message)s")
    transformers_logging.set_verbosity_error()  # rank 0 loads the same, and says so
    follow(connection, Follower().handle)
