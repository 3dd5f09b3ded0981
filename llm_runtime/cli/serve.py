"""`llm-runtime serve`: the HTTP service in the foreground."""

from __future__ import annotations

import typer

from engine_control.commands import INTERRUPTED
from engine_control.config import ControlConfig
from engine_control.start import without_collections
from llm_runtime.cli import options
from llm_runtime.config import LLMConfig, ServerConfig

ENGINE, SERVER, CONTROL = LLMConfig(), ServerConfig(), ControlConfig()
MEBIBYTE = 1024 * 1024


def serve(
    model: options.ModelArgument = None,
    model_path: options.ModelPath = None,
    tokenizer_path: options.TokenizerPath = ENGINE.tokenizer_path,
    skip_tokenizer_init: options.SkipTokenizer = ENGINE.skip_tokenizer_init,
    host: options.Host = SERVER.host,
    port: options.Port = SERVER.port,
    dtype: options.Dtype = ENGINE.dtype,
    device: options.Device = ENGINE.device,
    load_format: options.LoadFormat = ENGINE.load_format,
    quantization: options.Quantization = ENGINE.quantization,
    tp_size: options.TpSize = ENGINE.tp_size,
    deterministic: options.Deterministic = None,
    disable_cuda_graph: options.DisableCudaGraph = False,
    disable_overlap_schedule: options.DisableOverlap = False,
    context_length: options.ContextLength = ENGINE.context_length,
    max_running_requests: options.MaxRunning = ENGINE.max_running_requests,
    max_queued_requests: options.MaxQueued = ENGINE.max_queued_requests,
    max_prefill_tokens: options.MaxPrefill = ENGINE.max_prefill_tokens,
    page_size: options.PageSize = ENGINE.page_size,
    max_total_tokens: options.MaxTotal = ENGINE.max_total_tokens,
    mem_fraction_static: options.MemFraction = ENGINE.mem_fraction_static,
    disable_radix_cache: options.DisableRadix = ENGINE.disable_radix_cache,
    speculative_draft_model_path: options.DraftModel = None,
    speculative_num_steps: options.DraftSteps = ENGINE.speculative_num_steps,
    random_seed: options.RandomSeed = ENGINE.random_seed,
    weight_version: options.WeightVersion = ENGINE.weight_version,
    implicit_weight_sessions: options.ImplicitSessions = CONTROL.implicit_weight_sessions,
    weight_session_timeout: options.SessionTimeout = CONTROL.weight_session_timeout_s,
    refuse_during_update: options.RefuseDuringUpdate = CONTROL.refuse_during_update,
    enable_memory_saver: options.EnableMemorySaver = CONTROL.enable_memory_saver,
    memory_saver: options.MemorySaver = ENGINE.memory_saver,
    weights_backup: options.WeightsBackup = CONTROL.weights_backup,
    custom_weight_loader: options.CustomWeightLoader = None,
    served_model_name: options.ServedModelName = SERVER.served_model_name,
    incremental_streaming_output: options.Incremental = SERVER.incremental_streaming_output,
    max_requests_in_flight: options.MaxInFlight = SERVER.max_requests_in_flight,
    max_body_mb: options.MaxBody = SERVER.max_body_bytes // MEBIBYTE,
    body_timeout_s: options.BodyTimeout = SERVER.body_timeout_s,
    send_timeout_s: options.SendTimeout = SERVER.send_timeout_s,
) -> None:
    """Serve a language model over HTTP until Ctrl-C or SIGTERM.

    POST prompts to /generate, /v1/completions, /v1/chat/completions or /inference/v1/generate; /docs describes every
    field, and /health says when the engine is ready.
    """
    llm_config = LLMConfig(
        model_path=options.chosen_model(model, model_path),
        tokenizer_path=tokenizer_path,
        skip_tokenizer_init=skip_tokenizer_init,
        dtype=dtype,
        device=device,
        load_format=load_format,
        quantization=quantization,
        tp_size=tp_size,
        context_length=context_length,
        max_running_requests=max_running_requests,
        max_queued_requests=max_queued_requests,
        max_prefill_tokens=max_prefill_tokens,
        page_size=page_size,
        max_total_tokens=max_total_tokens,
        mem_fraction_static=mem_fraction_static,
        disable_radix_cache=disable_radix_cache,
        speculative_draft_model_path=speculative_draft_model_path,
        speculative_num_steps=speculative_num_steps,
        deterministic=options.chosen_determinism(deterministic),
        cuda_graphs=not disable_cuda_graph,
        overlap_schedule="off" if disable_overlap_schedule else "auto",
        weight_version=weight_version,
        control=ControlConfig(
            implicit_weight_sessions=implicit_weight_sessions,
            weight_session_timeout_s=weight_session_timeout,
            refuse_during_update=refuse_during_update,
            enable_memory_saver=enable_memory_saver,
            weights_backup=weights_backup,
        ),
        memory_saver=memory_saver,
        weight_load_formats=tuple(custom_weight_loader or ()),
        random_seed=random_seed,
    )
    server_config = ServerConfig(
        host=host,
        port=port,
        served_model_name=served_model_name,
        incremental_streaming_output=incremental_streaming_output,
        max_requests_in_flight=max_requests_in_flight,
        max_body_bytes=max_body_mb * MEBIBYTE,
        body_timeout_s=body_timeout_s,
        send_timeout_s=send_timeout_s,
    )
    with without_collections():
        from llm_runtime.server.app import serve as serve_http

    try:
        serve_http(llm_config, server_config)
    except KeyboardInterrupt:  # the service has stopped by now
        raise typer.Exit(INTERRUPTED) from None
