"""A rank that follows rank 0, in a process that rank 0 starts (`engine_control.followers`).

It holds the samples that rank 0 has in flight and takes their steps on the full latents, as rank 0 does, but it keeps
no trajectory, decodes nothing, and decides nothing.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from typing import Any

import msgspec
import torch
from diffusers.utils import logging as diffusers_logging
from transformers.utils import logging as transformers_logging

from diffusion_rl.config import EngineConfig
from diffusion_rl.models import ModelFamily
from diffusion_rl.parallel.arrangement import Arrangement
from diffusion_rl.parallel.ranks import Load, Meet, Report, own_report
from diffusion_rl.params import params_from_mapping
from diffusion_rl.rollout.decisions import (
    Add,
    Admit,
    Advance,
    Decision,
    Remove,
    Retire,
    Retract,
    SampleKey,
    digest,
    key_of,
)
from diffusion_rl.rollout.prompt_cache import PromptCache
from diffusion_rl.rollout.queue import RequestState, SampleState
from diffusion_rl.rollout.rank_weights import RankWeights, rank_settings
from diffusion_rl.rollout.runners import choose_runner
from diffusion_rl.rollout.samples import advance_batch, condition, parts_here, plan_request, split, start_samples
from diffusion_rl.rollout.startup import Loader, join_ranks, load_rank, loaded, take_over, take_part
from engine_control.child import connection_from_descriptor
from engine_control.followers import follow
from engine_control.groups import Rendezvous
from engine_control.rank import Outcome, RankCommand, RankControl
from engine_control.start import keep_what_is_loaded

logger = logging.getLogger(__name__)


class Follower:
    """Carries out rank 0's decisions. A decision that can't be carried out raises, and ends the process."""

    def __init__(self, family: ModelFamily, config: EngineConfig, arrangement: Arrangement, rank: int) -> None:
        self._family = family
        self._config = config
        self._arrangement = arrangement
        self._prompts = PromptCache(family, config.prompt_cache_size)
        weights = RankWeights(family, self._prompts, config, arrangement)
        self._adapters = weights.adapters
        self._control = RankControl(weights, rank_settings(config, rank), adapters=weights.adapters)
        self._requests: dict[str, RequestState] = {}
        self._samples: dict[SampleKey, SampleState] = {}

    @torch.no_grad()
    def carry_out(self, decision: Decision) -> Report | Outcome | None:
        if isinstance(decision, RankCommand):
            return self._control.carry_out(decision)
        with self._family.exact(), torch.autocast(self._family.device.type, enabled=False):
            match decision:
                case Add():
                    self._add(decision)
                case Admit():
                    self._admit(self._requests[decision.request_id])
                case Advance():
                    self._advance([self._samples[key] for key in decision.samples])
                case Retire():
                    return own_report([digest(self._samples.pop(k)) for k in decision.samples], self._arrangement)
                case Remove() | Retract():
                    if isinstance(decision, Remove):
                        self._requests.pop(decision.request_id, None)
                    gone = [key for key in self._samples if key[0] == decision.request_id]
                    for key in gone:
                        del self._samples[key]
        return None

    def _add(self, decision: Add) -> None:
        params = params_from_mapping(decision.params)
        request = plan_request(self._family, self._config.limits, decision.request_id, params, arrival=0)
        # Rank 0 keeps what the request asks for; the schedule is planned by now and doesn't change with these.
        kept = replace(params, rollout_return_dit_trajectory=False, rollout_debug_mode=False)
        self._requests[decision.request_id] = replace(request, params=kept)

    def _admit(self, request: RequestState) -> None:
        try:
            condition(request, self._prompts)
            started = start_samples(self._family, request)
        except torch.AcceleratorError:
            raise
        except Exception:  # rank 0 meets the same, and removes the request; if it doesn't, the next step raises here
            logger.exception("request %s failed at its admission", request.request_id)
            return
        self._samples |= {key_of(sample): sample for sample in started}

    def _advance(self, batch: list[SampleState]) -> None:
        with self._adapters.active(batch[0].request.params.lora_name):
            advance_batch(self._family, batch, self._arrangement)
        for sample in batch:
            if parts_here(sample):
                del self._samples[key_of(sample)]
                self._samples |= {key_of(part): part for part in split(sample)}


class _Life:
    """The two steps of the start, then the follower."""

    def __init__(self, load: Loader) -> None:
        self._loader = load
        self._load: Load | None = None
        self._config = EngineConfig()
        self._family: ModelFamily | None = None
        self._follower: Follower | None = None

    def handle(self, message: Any) -> object:
        if self._follower is not None:
            return self._follower.carry_out(msgspec.convert(message, Decision))
        start = msgspec.convert(message, Load | Meet)
        return self._loads(start) if isinstance(start, Load) else self._meets(start)

    def _loads(self, load: Load) -> dict[str, str]:
        self._load = load
        self._config = msgspec.convert(load.config, EngineConfig)
        if torch.device(load.device).index is not None:
            torch.cuda.set_device(load.device)  # what names no device means this one
        self._family = self._loader(self._config, load.device)
        take_part(self._family, self._config, rank=load.rank, device=load.device)
        return loaded(self._family)

    def _meets(self, meet: Meet) -> bool:
        assert self._load is not None
        assert self._family is not None
        exactness = take_over(self._family, meet.exact, meet.choices)
        meeting = Rendezvous(meet.path, meet.ranks, meet.timeout_s)
        arrangement, exactness = join_ranks(
            self._family, exactness, self._config, rank=self._load.rank, meeting=meeting
        )
        if not arrangement.splits_forward:
            choose_runner(self._family, exactness, cuda_graphs=self._config.cuda_graphs)
        self._follower = Follower(self._family, self._config, arrangement, self._load.rank)
        keep_what_is_loaded()
        return exactness.enabled


def main(load: Loader = load_rank) -> None:
    """Follows until rank 0 closes the connection."""
    connection = connection_from_descriptor(int(sys.argv[1]))
    logging.basicConfig(level=logging.INFO, format="follower: %(levelname)s %(message)s")
    for library in (diffusers_logging, transformers_logging):  # rank 0 loads the same, and says so
        library.set_verbosity_error()
        library.disable_progress_bar()
    follow(connection, _Life(load).handle)
