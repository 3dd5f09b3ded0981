"""From a configuration to an engine: alone, or as rank 0 of several. Every rank takes the same two steps.

First each loads the model, or its part of the weights, and rank 0 certifies it. Then they meet: the others take over
what rank 0 chose, and all certify together that sharing the work keeps what was promised.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch

from diffusion_rl.config import EngineConfig
from diffusion_rl.models import ModelFamily, load_family
from diffusion_rl.models.offload import check_group_size, offload_pipeline, refuse_combinations, refuse_offloaded
from diffusion_rl.parallel.arrangement import Arrangement, arrange
from diffusion_rl.parallel.exchange import Collectives, Exchange
from diffusion_rl.parallel.layout import check_heads, device_of, layout_of
from diffusion_rl.parallel.peers import PeerExchange, peer_memory
from diffusion_rl.parallel.ranks import FOLLOWER, NoRanks, OnDeath, OtherRanks, Ranks
from diffusion_rl.parallel.tensor import TensorParallel
from diffusion_rl.rollout.certification import cache_of, certify_ranks, make_exact
from diffusion_rl.rollout.compilation import refuse_compiled_ranks
from diffusion_rl.rollout.runners import choose_runner
from engine_control.errors import InvalidRequestError
from engine_control.groups import RankGroup, Rendezvous
from rl_kernels.certify import Certificate, Exactness
from rl_kernels.mode import Choices

Loader = Callable[[EngineConfig, str], ModelFamily]
"""`(configuration, device)` -> the model. Another one than `load_rank` needs a follower module that uses it too."""


def load_rank(config: EngineConfig, device: str) -> ModelFamily:
    """The model on that device; on the CPU if its weights are to be split.

    Raises:
        InvalidRequestError: it can't be loaded, no family serves it, or its heads don't fit the layout.
    """
    dtype, layout = None if config.dtype == "auto" else _dtype(config.dtype), layout_of(config.parallel)
    device = "cpu" if layout.tp_size > 1 else device
    offload = config.dit_offload_group_size if config.dit_layerwise_offload else None
    family = load_family(config.model_path, dtype=dtype, device=device, offload=offload)
    check_heads(family.attention_heads, layout)
    return family


def take_part(family: ModelFamily, config: EngineConfig, *, rank: int, device: str) -> None:
    """Afterwards the family holds this rank's part of the weights, if ranks share them.

    Raises:
        InvalidRequestError: a width can't be dealt out evenly.
    """
    layout = layout_of(config.parallel)
    if layout.tp_size > 1:
        family.split_weights(TensorParallel(layout.place(rank).part, layout.tp_size), device)


def join_ranks(
    family: ModelFamily, exactness: Exactness, config: EngineConfig, *, rank: int, meeting: Rendezvous
) -> tuple[Arrangement, Exactness]:
    """This rank's part in the forwards, and what the ranks found together. Every rank calls it at the same time."""

    def join(name: str, place: int, size: int) -> RankGroup:
        return meeting.join(name, place, size, family.device, shared_device=config.parallel.share_device)

    def exchange(group: RankGroup) -> Exchange:
        memory = None
        parallel = config.parallel
        if family.device.type == "cuda" and not parallel.share_device and parallel.sequence_exchange == "auto":
            memory = peer_memory(group, family.device, timeout_s=meeting.timeout_s)
        return Collectives(group) if memory is None else PeerExchange(memory)

    layout = layout_of(config.parallel)
    arrangement = arrange(
        rank,
        layout,
        family.transformers.values(),
        family.sequence_spec,
        guidance=config.parallel.guidance,
        join=join,
        exchange=exchange,
        tensor=family.tensor,
    )
    exactness = certify_ranks(family, exactness, arrangement, layout, config.deterministic)
    if arrangement.splits_forward:
        exactness = choose_runner(family, exactness, cuda_graphs=config.cuda_graphs, arrangement=arrangement)
    return arrangement, exactness


def start_ranks(
    config: EngineConfig,
    *,
    on_death: OnDeath | None = None,
    load: Loader = load_rank,
    follower: str = FOLLOWER,
) -> tuple[ModelFamily, Exactness, Ranks]:
    """The loaded model, what certification found, and the other ranks, all of them ready.

    `on_death` is called in a thread of its own when a rank ends that wasn't told to; by default whoever waits for it
    in a collective gets an error. `follower` is the module that the other ranks run.

    Raises:
        InvalidRequestError: what `config` asks for can't be; the message names it.
        NotExactError: exactness is insisted on and can't be had.
        EngineDiedError: another rank could not start.
    """
    layout, device = layout_of(config.parallel), config.device
    check_offload(config)
    if config.torch_compile:
        refuse_compiled_ranks(layout)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    own = device_of(0, device, layout, share_device=config.parallel.share_device)
    if layout.ranks == 1:
        family = load(config, own)
        exactness = make_exact(family, config.deterministic, cache=cache_of(config))
        return family, exactness, NoRanks(one_rank(family, config))
    others = OtherRanks(config, layout, device, on_death=on_death, follower=follower)
    try:
        family = load(config, own)
        take_part(family, config, rank=0, device=own)
        exactness = make_exact(family, config.deterministic, cache=cache_of(config))
        meeting = others.meeting(loaded(family), exact=exactness.enabled, choices=plain(family.choices))
        others.arrangement, exactness = join_ranks(family, exactness, config, rank=0, meeting=meeting)
        others.complete(exact=exactness.enabled)
    except BaseException:
        others.close()
        raise
    return family, exactness, others


def check_offload(config: EngineConfig) -> None:
    """Refuses layerwise offload where it can't work, before anything is loaded.

    Raises:
        InvalidRequestError: together with torch.compile or shared weights, or in groups of no block.
    """
    check_group_size(config.dit_offload_group_size)
    if config.dit_layerwise_offload:
        refuse_combinations(torch_compile=config.torch_compile, tp_size=config.parallel.tp_size)


def offload_as_configured(family: ModelFamily, config: EngineConfig) -> None:
    """Offloads the blocks of a family that was loaded without, if that is wanted.

    Raises:
        InvalidRequestError: as `check_offload`.
        ConflictError: another engine has offloaded this pipeline, and this one is not to be.
    """
    check_offload(config)
    if config.dit_layerwise_offload:
        offload_pipeline(family.pipeline, family.device, group_size=config.dit_offload_group_size)
    else:
        refuse_offloaded(family.pipeline)


def one_rank(family: ModelFamily, config: EngineConfig) -> Arrangement:
    """The arrangement of an engine without other ranks."""
    layout = layout_of(config.parallel)
    if layout.ranks > 1:
        raise InvalidRequestError(
            "a pipeline that is loaded already can't be shared with other ranks",
            field=layout.field[0],
            value=layout.field[1],
            hint="Save it, and use RolloutPipeline.from_config with its folder.",
        )

    def nobody(name: str, place: int, size: int) -> RankGroup:
        raise AssertionError("one rank joins no group")

    spec = family.sequence_spec
    return arrange(0, layout, family.transformers.values(), spec, guidance=config.parallel.guidance, join=nobody)


def loaded(family: ModelFamily) -> dict[str, str]:
    """What must be equal on all ranks, or what rank 0 certified wouldn't hold for them."""
    device = family.device
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "torch": str(torch.__version__),
        "dtype": str(family.dtype),
    }


def take_over(family: ModelFamily, exact: bool, choices: dict[str, Any]) -> Exactness:
    """What rank 0 found, for this rank's family. It has no table of its own."""
    family.choices = from_plain(choices)
    return Exactness(exact, Certificate(str(family.device), (), family.choices))


def plain(choices: Choices) -> dict[str, Any]:
    """Choices as what a message can carry."""
    return {
        **{f.name: getattr(choices, f.name) for f in fields(choices)},
        "linear": [[k, n, str(dtype), name] for (k, n, dtype), name in choices.linear.items()],
        "attention_per_sample": [[heads, d, str(dtype)] for heads, d, dtype in choices.attention_per_sample],
        "folded_means": [[k, str(dtype)] for k, dtype in choices.folded_means],
    }


def from_plain(values: dict[str, Any]) -> Choices:
    """`plain` undone."""

    def dtype(name: str) -> torch.dtype:
        found: torch.dtype = getattr(torch, name.removeprefix("torch."))
        return found

    return Choices(
        **{
            **values,
            "linear": {(k, n, dtype(name)): chosen for k, n, name, chosen in values["linear"]},
            "attention_per_sample": frozenset((h, d, dtype(name)) for h, d, name in values["attention_per_sample"]),
            "folded_means": frozenset((k, dtype(name)) for k, name in values["folded_means"]),
        }
    )


def _dtype(name: str) -> torch.dtype:
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in known:
        raise InvalidRequestError(
            f"unknown dtype {name!r}", field="dtype", value=name, hint=f"Known: auto, {', '.join(known)}."
        )
    return known[name]
