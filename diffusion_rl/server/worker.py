"""The engine process, started by the service (`engine_control.child`) with an `EngineConfig` as JSON on its standard
input. Imports no FastAPI."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping

import msgspec
import torch

from diffusion_rl.config import EngineConfig
from diffusion_rl.params import RolloutParams, params_from_mapping
from diffusion_rl.sample import RolloutSample
from engine_control.child import connection_from_descriptor
from engine_control.errors import EngineDiedError
from engine_control.start import keep_what_is_loaded, without_collections
from engine_control.step_loop import StepLoop
from engine_control.worker import EngineWorker


def main() -> None:
    """Serves one engine until the service goes away."""
    logging.basicConfig(level=logging.INFO, format="engine: %(levelname)s %(message)s")
    connection = connection_from_descriptor(int(sys.argv[1]))
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=EngineConfig)
    worker: EngineWorker[RolloutParams, list[RolloutSample]] = EngineWorker(
        connection, read_request=params_from_mapping, write_result=lambda samples: samples
    )
    worker.run(lambda: _build(config, worker))


def _build(
    config: EngineConfig, worker: EngineWorker[RolloutParams, list[RolloutSample]]
) -> tuple[StepLoop[RolloutParams, list[RolloutSample]], Mapping[str, object]]:
    with without_collections():  # seconds of imports, while the socket is already watched
        from diffusion_rl.rollout.engine import build_engine

    engine = build_engine(config, on_death=_end)
    engine.on_sample = lambda request_id, sample: worker.send_ahead(request_id, large_tensors(sample))
    loop = StepLoop(engine)
    control = engine.controlled_by(loop)
    loop.register("describe", lambda arguments: {**engine.describe(), "control": control.state.describe()})
    keep_what_is_loaded()
    return loop, engine.describe()


def large_tensors(sample: RolloutSample) -> list[torch.Tensor]:
    """The sample's own tensors of the size of a picture or of states."""
    debug, trajectory = sample.rollout_debug_tensors, sample.dit_trajectory
    found = [sample.generated_output, sample.generated_latents, trajectory and trajectory.latents]
    if debug is not None:
        found += [debug.rollout_variance_noises, debug.rollout_prev_sample_means, debug.rollout_model_outputs]
    return [tensor for tensor in found if tensor is not None]


def _end(error: EngineDiedError) -> None:
    """Another rank is gone, and was named in the log. Ends this process too, wherever it stands: the service sees it,
    and starts both anew."""
    os._exit(1)
