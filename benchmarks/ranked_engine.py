"""An engine of one or several ranks in processes of its own, for benchmarks that compare layouts in one run.

`RankedEngine` is the benchmark's side; `main` is rank 0's process. Each rank gets its share of the
cores that one process would use alone.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from typing import Any

import msgspec
import torch

from diffusion_rl.config import EngineConfig
from diffusion_rl.parallel.layout import layout_of
from diffusion_rl.sample import RolloutSample
from engine_control.child import connection_from_descriptor, start_child
from engine_control.config import default_threads, engine_environment
from engine_control.wire import PeerClosedError, receive_message, send_message


@dataclass(frozen=True)
class Work:
    """What one rank has done since its start."""

    tokens: int
    bytes_sent: int


class RankedEngine:
    """A started engine. It idles until it is asked, and ends with `close`."""

    def __init__(self, config: EngineConfig) -> None:
        """Starts its processes and waits for none; `wait_ready` does."""
        ranks = layout_of(config.parallel).ranks
        self.threads = max(default_threads() // ranks, 1)
        environment = engine_environment(ranks) | {"OMP_NUM_THREADS": str(self.threads)}
        self._process, self._connection = start_child("benchmarks.ranked_engine", environment)
        send_message(self._connection, asdict(config))

    def wait_ready(self) -> dict[str, Any]:
        """What the engine says of its exactness."""
        about: dict[str, Any] = receive_message(self._connection)
        return about

    def roll_out(self, **fields: Any) -> None:
        """Rolls a request out; nothing comes back but the news that it is done."""
        self._ask({"fields": fields, "tensors": False})

    def results(self, **fields: Any) -> list[torch.Tensor]:
        """Rolls a request out: latents, states and log-probs of all samples."""
        found: list[torch.Tensor] = self._ask({"fields": fields, "tensors": True})["tensors"]
        return found

    def work(self, **fields: Any) -> list[Work]:
        """What each rank does for that request."""
        before, after = (self._ask({"fields": fields, "tensors": False})["ranks"] for _ in range(2))
        return [
            Work(b["tokens"] - a["tokens"], b["bytes_sent"] - a["bytes_sent"])
            for a, b in zip(before, after, strict=True)
        ]

    def close(self) -> None:
        """Afterwards its processes are gone."""
        self._connection.close()
        self._process.wait()

    def _ask(self, question: object) -> Any:
        send_message(self._connection, question)
        return receive_message(self._connection)


def main() -> None:
    """Rolls out what it is asked for until the benchmark goes away."""
    connection = connection_from_descriptor(int(sys.argv[1]))
    config = msgspec.convert(receive_message(connection), EngineConfig)
    from diffusion_rl.cli.loading import load_pipeline

    with load_pipeline(config) as pipeline:
        engine = pipeline.engine
        send_message(connection, engine.exactness.describe())
        try:
            while True:
                question = receive_message(connection)
                samples = pipeline(**question["fields"])
                work = engine.ranks.arrangement.work
                ranks = engine.ranks.describe() or [{"tokens": work.tokens, "bytes_sent": 0}]
                tensors = [tensor for s in samples for tensor in _tensors(s)] if question["tensors"] else []
                send_message(connection, {"ranks": ranks, "tensors": tensors})
        except PeerClosedError:
            return


def _tensors(sample: RolloutSample) -> list[torch.Tensor]:
    trajectory = sample.dit_trajectory
    found = (sample.generated_latents, sample.rollout_log_probs, None if trajectory is None else trajectory.latents)
    return [tensor for tensor in found if tensor is not None]
