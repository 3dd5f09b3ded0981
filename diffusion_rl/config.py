"""What one configures. The only file of this package that reads environment variables."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Literal

from diffusion_rl.params import Limits
from engine_control.config import ControlConfig

Wire = Literal["json", "msgpack", "safetensors"]
TimestepsForm = Literal["full", "filtered"]
# Environment variables by which the libraries below choose other kernels begin with one of these.
KERNEL_SETTINGS = ("ATEN_", "CUBLAS", "CUDNN_", "DNNL_", "KMP_", "MKL_", "NVIDIA_TF32", "ONEDNN_", "TORCH_")


def default_verdict_cache() -> str | None:
    """Where verdicts are kept: `DIFFUSION_RL_VERDICT_CACHE` (`off` or empty: nowhere), else the user's cache folder."""
    named = os.environ.get("DIFFUSION_RL_VERDICT_CACHE")
    if named is not None:
        return None if named in ("", "off") else named
    base = os.environ.get("XDG_CACHE_HOME", "")
    base = base if os.path.isabs(base) else os.path.expanduser("~/.cache")
    return os.path.join(base, "diffusion-rl") if os.path.isabs(base) else None


def kernel_settings() -> dict[str, str]:
    """Environment variables by which libraries choose other kernels: verdicts depend on them."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(KERNEL_SETTINGS)}


@dataclass(frozen=True)
class ParallelConfig:
    """How many ranks (processes, one device each) compute one model together. No bit of a sample depends on it, but for
    `tp_size`: a sum that is split over ranks rounds otherwise, so a sample has one set of bits at each.

    tp_size: ranks that share the transformer's weights: heads of an attention, widths of a feed-forward.
    sp_degree: ranks that share the tokens of a forward (Ulysses). ulysses_degree is another name for it; ring_degree
        must be 1.
    enable_cfg_parallel: one half of the ranks computes the negative prompts, the other half the positive ones.
    guidance: on one device, `batched` computes both in one forward, `split` in two, with half the activations.
    share_device: all ranks on one GPU, exchanging through the host. Slow; it shows the bits, not the speed.
    sequence_exchange: how ranks exchange tokens for heads. `auto`: GPUs that can reach each other's memory write it,
        and others use `collectives`. The bits are the same.
    collective_timeout_s: how long a rank waits for another one in a collective before it gives the engine up.
    """

    sp_degree: int = 1
    ulysses_degree: int | None = None
    ring_degree: int = 1
    enable_cfg_parallel: bool = False
    guidance: Literal["batched", "split"] = "batched"
    share_device: bool = False
    collective_timeout_s: float = 300.0
    tp_size: int = 1
    sequence_exchange: Literal["auto", "collectives"] = "auto"


@dataclass(frozen=True)
class EngineConfig:
    """How a model is loaded and batched.

    model_path: a diffusers-format folder, a hub id, or `embedded` for the model that comes with this package.
    dtype: `auto` keeps the checkpoint's; else `float32`, `bfloat16` or `float16` for the transformer and encoders.
    device: `auto` is the first GPU if there is one, else the CPU.
    max_batch_size: samples that one step advances together; with guidance each is two rows of the transformer's batch.
    prompt_cache_size: encoded prompts kept for the next group that asks for them.
    deterministic: `auto` is exact mode wherever the model is certified for it on its device; `on` insists on it, and
        fails at start-up by name where it can't be had; `off` leaves the libraries as they are.
    cuda_graphs: on a GPU, forwards of few rows are captured and replayed; the bits are the same.
    torch_compile: the transformer is compiled, at `torch_compile_rows` rows a piece (None: what a full guided batch
        brings, at most 8). A sample's bits still don't depend on its batch, but they are no longer those of a forward
        with gradients: ratios in a trainer aren't exactly 1. Not with several ranks; CUDA graphs are off then.
    dit_layerwise_offload: the transformer's blocks lie in pinned host memory and come to the device, the next while one
        computes, in groups of `dit_offload_group_size`; two groups are there at a time. For models that don't fit: a
        step takes at least as long as all blocks take over the link. The bits are the same. CUDA graphs are off then;
        not with `torch_compile`.
    verdict_cache: the folder in which certification keeps what it found for later starts; None: nowhere.
    weight_version: what the weights that are loaded first are called.
    control: how the control layer (refit, pause, sleep) behaves.
    memory_saver: with `control.enable_memory_saver`, how memory is given back: `host` swaps storage on any device,
        `vmm` (torch-memory-saver) keeps addresses on a GPU, but ends the process when such memory is freed, so only for
        a service; `auto` is `host`, which was as fast when measured.
    weight_load_formats: import paths (`package.module:function`) of loaders that weight updates may name.
    weight_transfer_timeout_s: how long a weight sender may keep the engine waiting.
    """

    model_path: str = "embedded"
    dtype: str = "auto"
    device: str = "auto"
    max_batch_size: int = 32
    prompt_cache_size: int = 256
    deterministic: Literal["auto", "on", "off"] = "auto"
    cuda_graphs: bool = True
    torch_compile: bool = False
    torch_compile_rows: int | None = None
    dit_layerwise_offload: bool = False
    dit_offload_group_size: int = 1
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    verdict_cache: str | None = field(default_factory=default_verdict_cache)
    weight_version: str = "default"
    control: ControlConfig = field(default_factory=ControlConfig)
    memory_saver: Literal["auto", "host", "vmm"] = "auto"
    weight_load_formats: tuple[str, ...] = ()
    weight_transfer_timeout_s: float = 300.0
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True)
class ServerConfig:
    """How the HTTP service behaves.

    rollout_wire: the encoding for clients that send no (or a wildcard) Accept header.
    lenient_fields: ignore unknown request fields instead of refusing them (for foreign clients).
    dit_trajectory_timesteps: `full` sends all T + 1 timesteps; `filtered` only those of the returned states.
    max_restarts: engine crashes in a row (without a finished request between) after which the service gives up.
    max_body_bytes: longest request body; a longer one gets a 413. max_weights_body_bytes: of routes that take weights.
    body_timeout_s: how long a request's headers may take to arrive (then the connection is closed), and after them its
        body (then it gets a 408). weights_body_timeout_s: the same for bodies of routes that take weights.
    max_requests_in_flight: rollout requests, from their arrival to the last byte of their reply; more get a 429.
    max_reply_bytes_in_flight: while replies of more than that together are not taken by their clients, further rollout
        requests get a 429. Replies that were being computed by then still come on top.
    send_timeout_s: how long a client may take for a piece of its reply of at most 1 MiB; then it is dropped.
    health_generate_timeout_s: how long `/health_generate` waits for its tiny rollout.
    """

    host: str = "127.0.0.1"
    port: int = 30000
    served_model_name: str | None = None
    rollout_wire: Wire = "json"
    lenient_fields: bool = False
    dit_trajectory_timesteps: TimestepsForm = "full"
    max_body_bytes: int = 4 * 1024 * 1024
    max_weights_body_bytes: int = 8 * 1024**3
    body_timeout_s: float = 30.0
    weights_body_timeout_s: float = 600.0
    engine_start_timeout_s: float = 600.0
    max_restarts: int = 5
    max_requests_in_flight: int = 2048
    max_reply_bytes_in_flight: int = 4 * 1024**3
    send_timeout_s: float = 60.0
    health_generate_timeout_s: float = 30.0
