"""`diffusion-rl serve`: the HTTP service in the foreground."""

from __future__ import annotations

import typer

from diffusion_rl.cli import options
from diffusion_rl.config import EngineConfig, ParallelConfig, ServerConfig, default_verdict_cache
from diffusion_rl.params import Limits
from engine_control.commands import INTERRUPTED
from engine_control.config import ControlConfig
from engine_control.start import without_collections

ENGINE, SERVER, LIMITS, RANKS = EngineConfig(), ServerConfig(), Limits(), ParallelConfig()
CONTROL = ControlConfig()
MEBIBYTE = 1024 * 1024


def serve(
    model: options.ModelArgument = None,
    model_path: options.ModelPath = None,
    host: options.Host = SERVER.host,
    port: options.Port = SERVER.port,
    dtype: options.Dtype = ENGINE.dtype,
    device: options.Device = ENGINE.device,
    deterministic: options.Deterministic = None,
    no_verdict_cache: options.NoVerdictCache = False,
    disable_cuda_graph: options.DisableCudaGraph = False,
    enable_torch_compile: options.EnableTorchCompile = False,
    torch_compile_rows: options.TorchCompileRows = None,
    dit_layerwise_offload: options.DitLayerwiseOffload = False,
    dit_offload_group_size: options.DitOffloadGroupSize = ENGINE.dit_offload_group_size,
    max_batch_size: options.MaxBatchSize = ENGINE.max_batch_size,
    tp_size: options.TpSize = RANKS.tp_size,
    sp_degree: options.SpDegree = RANKS.sp_degree,
    ulysses_degree: options.UlyssesDegree = RANKS.ulysses_degree,
    ring_degree: options.RingDegree = RANKS.ring_degree,
    enable_cfg_parallel: options.CfgParallel = RANKS.enable_cfg_parallel,
    guidance: options.Guidance = RANKS.guidance,
    share_device: options.ShareDevice = RANKS.share_device,
    sequence_exchange: options.SequenceExchange = RANKS.sequence_exchange,
    weight_version: options.WeightVersion = ENGINE.weight_version,
    implicit_weight_sessions: options.ImplicitSessions = CONTROL.implicit_weight_sessions,
    weight_session_timeout: options.SessionTimeout = CONTROL.weight_session_timeout_s,
    refuse_during_update: options.RefuseDuringUpdate = CONTROL.refuse_during_update,
    enable_memory_saver: options.EnableMemorySaver = CONTROL.enable_memory_saver,
    memory_saver: options.Mechanism = ENGINE.memory_saver,
    weights_backup: options.WeightsBackup = CONTROL.weights_backup,
    custom_weight_loader: options.CustomWeightLoader = None,
    served_model_name: options.ServedModelName = SERVER.served_model_name,
    rollout_wire: options.RolloutWire = SERVER.rollout_wire,
    lenient_fields: options.LenientFields = SERVER.lenient_fields,
    dit_trajectory_timesteps: options.TrajectoryTimesteps = SERVER.dit_trajectory_timesteps,
    max_num_outputs_per_prompt: options.MaxOutputs = LIMITS.max_num_outputs_per_prompt,
    max_num_inference_steps: options.MaxSteps = LIMITS.max_num_inference_steps,
    max_pixels: options.MaxPixels = LIMITS.max_pixels,
    max_image_pixels: options.MaxImagePixels = LIMITS.max_image_pixels,
    max_num_frames: options.MaxFrames = LIMITS.max_num_frames,
    max_latent_elements: options.MaxLatent = LIMITS.max_latent_elements,
    max_prompt_characters: options.MaxPrompt = LIMITS.max_prompt_characters,
    max_queued_samples: options.MaxQueued = LIMITS.max_queued_samples,
    max_body_mb: options.MaxBody = SERVER.max_body_bytes // MEBIBYTE,
    max_reply_mb: options.MaxReplies = SERVER.max_reply_bytes_in_flight // MEBIBYTE,
    body_timeout_s: options.BodyTimeout = SERVER.body_timeout_s,
    send_timeout_s: options.SendTimeout = SERVER.send_timeout_s,
) -> None:
    """Serve rollouts over HTTP until Ctrl-C or SIGTERM.

    POST prompts to /rollout/generate; /docs describes every field, and /health says when the engine is ready.

    What is set here never fills in a field of a request: a field that a request leaves out gets the model's default.
    """
    limits = Limits(
        max_num_outputs_per_prompt=max_num_outputs_per_prompt,
        max_num_inference_steps=max_num_inference_steps,
        max_pixels=max_pixels,
        max_image_pixels=max_image_pixels,
        max_num_frames=max_num_frames,
        max_latent_elements=max_latent_elements,
        max_prompt_characters=max_prompt_characters,
        max_queued_samples=max_queued_samples,
    )
    chosen = options.chosen_model(model, model_path)
    exact = options.chosen_determinism(deterministic)
    parallel = options.chosen_layout(
        sp_degree,
        ulysses_degree,
        ring_degree,
        enable_cfg_parallel=enable_cfg_parallel,
        guidance=guidance,
        share_device=share_device,
        tp_size=tp_size,
        sequence_exchange=sequence_exchange,
    )
    engine_config = EngineConfig(
        chosen,
        dtype,
        device,
        max_batch_size,
        deterministic=exact,
        cuda_graphs=not disable_cuda_graph,
        torch_compile=enable_torch_compile,
        torch_compile_rows=torch_compile_rows,
        dit_layerwise_offload=dit_layerwise_offload,
        dit_offload_group_size=dit_offload_group_size,
        parallel=parallel,
        verdict_cache=None if no_verdict_cache else default_verdict_cache(),
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
        limits=limits,
    )
    server_config = ServerConfig(
        host=host,
        port=port,
        served_model_name=served_model_name,
        rollout_wire=rollout_wire,
        lenient_fields=lenient_fields,
        dit_trajectory_timesteps=dit_trajectory_timesteps,
        max_body_bytes=max_body_mb * MEBIBYTE,
        max_reply_bytes_in_flight=max_reply_mb * MEBIBYTE,
        body_timeout_s=body_timeout_s,
        send_timeout_s=send_timeout_s,
    )
    with without_collections():
        from diffusion_rl.server.app import serve as serve_http

    try:
        serve_http(engine_config, server_config)
    except KeyboardInterrupt:  # the service has stopped by now
        raise typer.Exit(INTERRUPTED) from None
