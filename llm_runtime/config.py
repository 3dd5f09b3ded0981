"""What one configures. The only file of this package that reads environment variables."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from engine_control.config import ControlConfig
from engine_control.errors import InvalidRequestError


@dataclass(frozen=True)
class LLMConfig:
    """How a model is loaded and batched.

    model_path: a Hugging Face folder or hub id, or `embedded` for the model that comes with this package.
    tokenizer_path: None is the model's own; skip_tokenizer_init: none is loaded, only token ids are taken and given.
    dtype: `auto` keeps the checkpoint's; else `float32`, `bfloat16` or `float16`. device: `auto` is the first GPU if
        there is one, else the CPU. load_format: `auto` reads the checkpoint; `dummy` fills the weights at random.
    quantization: `fp8` keeps the linear layers of attention and MLP in one byte a number, with a scale for each output
        channel; they are quantised when they are loaded and at each commit of a refit. It saves memory, not time.
    fp8_activations: products of such weights are of activations that are quantised too, token by token, by the
        library's product of bytes. Only with `deterministic="off"` and bfloat16.
    tp_size: ranks (processes, one device each) that share every layer's heads and widths.
    context_length: the most tokens of prompt and output; None is what the model's config says.
    max_running_requests: sequences that are computed at the same time.
    max_prefill_tokens: prompt tokens that one step computes at most; longer prompts are computed in chunks. None:
        16,384 on a GPU, 4,096 on a CPU.
    page_size: tokens of one page of the KV cache, and the unit of the prefix cache.
    max_total_tokens: the KV cache's tokens. None: on a GPU what `mem_fraction_static` of its memory leaves beside the
        weights, on a CPU 65,536.
    disable_radix_cache: prompts are computed anew even if their beginning was computed before.
    speculative_draft_model_path: a small model with the same tokens that guesses up to `speculative_num_steps` of them
        ahead. No token or log-prob depends on it; it is a refit's `draft`.
    deterministic: `auto` is exact mode wherever it is certified; `on` insists on it; `off` leaves the libraries alone.
    cuda_graphs: on a GPU, decoding is captured and replayed; the bits are the same.
    overlap_schedule: decoding's next step is launched before the host has read the last one's tokens: `auto` where
        steps are graphs, `on` wherever one rank decodes without a draft, `off` nowhere. The bits are the same.
    weight_version: what the weights that are loaded first are called.
    memory_saver: as the diffusion engine's: `host` on any device, `vmm` on a GPU, `auto` is `host`.
    random_seed: requests without a seed get one from it and their number. None: an arbitrary one.
    """

    model_path: str = "embedded"
    tokenizer_path: str | None = None
    skip_tokenizer_init: bool = False
    dtype: str = "auto"
    device: str = "auto"
    load_format: Literal["auto", "dummy"] = "auto"
    quantization: Literal["fp8"] | None = None
    fp8_activations: bool = False
    tp_size: int = 1
    context_length: int | None = None
    max_running_requests: int = 256
    max_queued_requests: int = 65_536
    max_prefill_tokens: int | None = None
    page_size: int = 16
    max_total_tokens: int | None = None
    mem_fraction_static: float = 0.85
    disable_radix_cache: bool = False
    speculative_draft_model_path: str | None = None
    speculative_num_steps: int = 4
    deterministic: Literal["auto", "on", "off"] = "auto"
    cuda_graphs: bool = True
    overlap_schedule: Literal["auto", "on", "off"] = "auto"
    weight_version: str = "default"
    control: ControlConfig = field(default_factory=ControlConfig)
    memory_saver: Literal["auto", "host", "vmm"] = "auto"
    weight_load_formats: tuple[str, ...] = ()
    weight_transfer_timeout_s: float = 300.0
    random_seed: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_running_requests", "max_prefill_tokens", "page_size", "max_total_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:  # no step would ever compute anything
                raise InvalidRequestError(f"{name} must be at least 1, not {value}", field=name, value=value)


@dataclass(frozen=True)
class ServerConfig:
    """How the HTTP service behaves.

    served_model_name: None is the model path. incremental_streaming_output: a stream's chunks hold what is new, instead
        of all so far. max_body_bytes: longest request body; max_weights_body_bytes: of routes that take weights.
    max_restarts: engine crashes in a row (without a finished request between) after which the service gives up.
    """

    host: str = "127.0.0.1"
    port: int = 30000
    served_model_name: str | None = None
    incremental_streaming_output: bool = False
    max_body_bytes: int = 64 * 1024 * 1024
    max_weights_body_bytes: int = 8 * 1024**3
    body_timeout_s: float = 30.0
    weights_body_timeout_s: float = 600.0
    engine_start_timeout_s: float = 600.0
    max_restarts: int = 5
    max_requests_in_flight: int = 65_536
    send_timeout_s: float = 60.0
    health_generate_timeout_s: float = 20.0
