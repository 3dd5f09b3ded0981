"""The options of the commands, with their help. A default that is None leaves the choice to the model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from diffusion_rl.config import EngineConfig, ParallelConfig, TimestepsForm, Wire
from diffusion_rl.parallel.layout import layout_of
from engine_control.errors import InvalidRequestError

EMBEDDED = EngineConfig().model_path
REPLIES = "Requests and replies"
LIMITS = "Largest accepted request"
STEPS = "Stochastic steps"
LOADING = "Model"
REQUESTS = "Requests"
SUBMISSION = "What must not matter"
BatchOrders = Literal["as-recorded", "reverse", "shuffle"]


def _limit(text: str) -> typer.models.OptionInfo:
    return typer.Option(min=1, help=text, rich_help_panel=LIMITS)  # type: ignore[no-any-return]


def _step(*names: str, text: str) -> typer.models.OptionInfo:
    return typer.Option(*names, help=text, rich_help_panel=STEPS)  # type: ignore[no-any-return]


ModelArgument = Annotated[
    str | None,
    typer.Argument(metavar="MODEL", show_default=EMBEDDED, help="A diffusers folder, a hub id, or 'embedded'."),
]
ModelPath = Annotated[str | None, typer.Option(help="The same as MODEL, under the name that SGLang uses.")]
Deterministic = Annotated[
    bool | None,
    typer.Option(
        "--enable-deterministic-inference/--disable-deterministic-inference",
        help="Exact mode: a sample's bits never depend on its batch. By default on wherever the model is certified for "
        "it on this device; enabled, the start fails by name where it can't be; disabled, libraries are left alone.",
        rich_help_panel=LOADING,
    ),
]
Dtype = Annotated[
    str,
    typer.Option(
        help="Precision of transformer and encoders: auto (as stored), float32, bfloat16, float16.",
        rich_help_panel=LOADING,
    ),
]
DisableCudaGraph = Annotated[
    bool,
    typer.Option(
        "--disable-cuda-graph",
        help="Launch every kernel of small forwards one by one: less GPU memory, slower, the same bits.",
        rich_help_panel=LOADING,
    ),
]
EnableTorchCompile = Annotated[
    bool,
    typer.Option(
        "--enable-torch-compile",
        help="Compile the transformer (minutes at the start, and again for each new picture size). A sample's bits "
        "still don't depend on its batch, but a trainer's ratios are no longer exactly 1. Not with several ranks.",
        rich_help_panel=LOADING,
    ),
]
TorchCompileRows = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Rows of every compiled forward: fewer are filled up, more are cut. If left out, what a full guided batch "
        "brings, at most 8.",
        rich_help_panel=LOADING,
    ),
]
DitLayerwiseOffload = Annotated[
    bool,
    typer.Option(
        "--dit-layerwise-offload",
        help="Keep the transformer's blocks in pinned host memory, and bring each to the GPU while the one before "
        "computes: for models that don't fit. Slower, the same bits. No CUDA graphs then; not with torch.compile.",
        rich_help_panel=LOADING,
    ),
]
DitOffloadGroupSize = Annotated[
    int,
    typer.Option(
        min=1,
        help="Blocks that come to the GPU together; two such groups are there at a time.",
        rich_help_panel=LOADING,
    ),
]
Device = Annotated[
    str, typer.Option(help="auto (the first GPU if there is one), cpu, cuda, cuda:1, ...", rich_help_panel=LOADING)
]
NoVerdictCache = Annotated[
    bool,
    typer.Option(
        "--no-verdict-cache",
        help="Probe everything at this start, and keep nothing of it for the next one. DIFFUSION_RL_VERDICT_CACHE "
        "names another folder than the user's cache.",
        rich_help_panel=LOADING,
    ),
]
RANKS = "Several ranks (processes, one device each)"


def _rank(*names: str, text: str, least: int | None = None) -> typer.models.OptionInfo:
    return typer.Option(*names, help=text, min=least, rich_help_panel=RANKS)  # type: ignore[no-any-return]


TpSize = Annotated[
    int,
    _rank(text="Ranks that share the transformer's weights. A sample has one set of bits at each number.", least=1),
]
SpDegree = Annotated[int, _rank(text="Ranks that share a forward's tokens, and inside attention its heads.", least=1)]
UlyssesDegree = Annotated[int | None, _rank(text="Another name for --sp-degree.", least=1)]
RingDegree = Annotated[int, _rank(text="Accepted if it is 1: ring attention can't keep the bits.")]
CfgParallel = Annotated[
    bool, _rank("--enable-cfg-parallel", text="Half of the ranks computes the negative prompts, half the positive.")
]
Guidance = Annotated[
    Literal["batched", "split"],
    _rank(text="Without CFG parallelism: both prompts in one forward, or in two with half the activations."),
]
ShareDevice = Annotated[
    bool, _rank("--share-device", text="All ranks on one GPU, through the host: to check bits, not for speed.")
]
SequenceExchange = Annotated[
    Literal["auto", "collectives"],
    _rank(text="How tokens go for heads: GPUs write each other's memory where they can, or use NCCL. Same bits."),
]

CONTROL = "Weights, pause and sleep"


def _control(*names: str, text: str) -> typer.models.OptionInfo:
    return typer.Option(*names, help=text, rich_help_panel=CONTROL)  # type: ignore[no-any-return]


WeightVersion = Annotated[str, _control(text="What the weights that are loaded first are called.")]
ImplicitSessions = Annotated[
    bool,
    _control(
        "--implicit-weight-sessions",
        text="An update call without begin_weight_update is a session of its own. For trainers that open none; all or "
        "nothing then holds for each call alone.",
    ),
]
SessionTimeout = Annotated[
    float, _control("--weight-session-timeout", text="Seconds after which a silent weight session is undone.")
]
RefuseDuringUpdate = Annotated[
    bool, _control("--refuse-during-update", text="Answer rollouts with 503 while weights are updated; else they wait.")
]
EnableMemorySaver = Annotated[
    bool, _control("--enable-memory-saver", text="Memory can be released and resumed (sleep and wake).")
]
Mechanism = Annotated[
    Literal["auto", "host", "vmm"],
    _control(
        "--memory-saver",
        text="How: host swaps storage on any device; vmm (torch-memory-saver) keeps addresses on a GPU; auto is host.",
    ),
]
WeightsBackup = Annotated[
    bool,
    _control(
        "--enable-weights-cpu-backup/--disable-weights-cpu-backup",
        text="Whether a release keeps the transformer's weights in host memory, unless the call says. Without, a "
        "complete update must follow the resume. Everything else is always kept.",
    ),
]
CustomWeightLoader = Annotated[
    list[str] | None,
    _control("--custom-weight-loader", text="A package.module:function that load_format may name; repeat it."),
]

Host = Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on.")]
MaxBatchSize = Annotated[int, typer.Option(min=1, help="Samples that one denoising step advances together.")]
ServedModelName = Annotated[str | None, typer.Option(help="Name of the model in replies; MODEL if left out.")]
RolloutWire = Annotated[
    Wire, typer.Option(help="Encoding of replies to clients whose Accept names none.", rich_help_panel=REPLIES)
]
LenientFields = Annotated[
    bool,
    typer.Option(
        "--lenient-fields", help="Ignore unknown request fields instead of refusing them.", rich_help_panel=REPLIES
    ),
]
TrajectoryTimesteps = Annotated[
    TimestepsForm,
    typer.Option(help="Send all T + 1 timesteps, or only those of the returned states.", rich_help_panel=REPLIES),
]
MaxOutputs = Annotated[int, _limit("K, samples of one group.")]
MaxSteps = Annotated[int, _limit("T, denoising steps.")]
MaxPixels = Annotated[int, _limit("Width x height.")]
MaxImagePixels = Annotated[int, _limit("Width x height of a picture to edit, before it is scaled.")]
MaxFrames = Annotated[int, _limit("Frames of a video.")]
MaxLatent = Annotated[int, _limit("Numbers in one sample's latent, as frames x width x height of a video make them.")]
MaxPrompt = Annotated[int, _limit("Characters of a prompt.")]
MaxQueued = Annotated[int, _limit("Samples in the engine; for more, clients get a 429.")]
MaxBody = Annotated[int, _limit("MiB of a request's body.")]
MaxReplies = Annotated[int, _limit("MiB of replies that clients have not taken yet; beyond, others get a 429.")]
BodyTimeout = Annotated[
    float, typer.Option(min=0.1, help="Seconds that a request may take to arrive.", rich_help_panel=LIMITS)
]
SendTimeout = Annotated[
    float,
    typer.Option(
        min=0.1, help="Seconds that a client may take nothing of its reply; then it is dropped.", rich_help_panel=LIMITS
    ),
]

Prompts = Annotated[list[str], typer.Option("--prompt", help="What to draw; repeat it for several prompts.")]
Outputs = Annotated[int, typer.Option("--num-outputs-per-prompt", "-k", help="Samples of each prompt.")]
Seed = Annotated[
    int | None,
    typer.Option(help="Sample i of prompt p gets seed + p * k + i. Left out, one is chosen and shown."),
]
Steps = Annotated[int | None, typer.Option(help="Denoising steps; the model's default if left out.")]
GuidanceScale = Annotated[float | None, typer.Option(help="Classifier-free guidance; FLUX.1 dev embeds it.")]
GuidanceScale2 = Annotated[
    float | None, typer.Option("--guidance-scale-2", help="That of a second transformer, if the model has one.")
]
TrueCfgScale = Annotated[float | None, typer.Option(help="Classifier-free guidance of Qwen-Image and FLUX.")]
NegativePrompt = Annotated[str | None, typer.Option(help="What guidance leads away from.")]
Images = Annotated[
    list[Path] | None, typer.Option("--image", help="A picture to edit; several times, where the model takes several.")
]
Pixels = Annotated[int | None, typer.Option(help="Pixels; the model's default if left out.")]
NumFrames = Annotated[int | None, typer.Option(min=1, help="Of a video; the model's default if left out.")]
Fps = Annotated[float, typer.Option(min=1, max=1000, help="Frames a second at which a video is written.")]
Out = Annotated[Path, typer.Option(help="Folder for the results.", file_okay=False)]
Filmstrips = Annotated[bool, typer.Option(help="Draw every sample's way from noise to picture.")]
SdeType = Annotated[str | None, _step(text="Step kind: sde (if left out), cps, dance, ode.")]
NoiseLevel = Annotated[float | None, _step(text="eta; 0.7 if left out, 0 is an ODE.")]
StepIndices = Annotated[str | None, _step(text="Which steps are stochastic, such as 0,1,2; all if left out.")]
WindowSize = Annotated[int | None, _step(text="A run of that many stochastic steps instead.")]
InitSameNoise = Annotated[
    bool, _step("--init-same-noise", text="Start all samples of a prompt from one initial latent.")
]
Model = Annotated[str, typer.Option(help="A diffusers folder, a hub id, or 'embedded'.", rich_help_panel=LOADING)]
Url = Annotated[
    str | None,
    typer.Option(
        help="Use the running service there instead of loading a model; the other options of this panel then do "
        "nothing.",
        rich_help_panel=LOADING,
    ),
]

ServicePort = Annotated[int, typer.Option(min=0, max=65535, help="Port of the service; 0 takes a free one.")]
Captions = Annotated[int, typer.Option(min=1, max=200, help="How many captions to roll out.")]
Show = Annotated[
    bool | None, typer.Option("--show/--no-show", help="Draw the pictures here; in a terminal by default.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")]

RecordOut = Annotated[Path, typer.Argument(metavar="OUT.safetensors", help="The record to write.", dir_okay=False)]
RecordFile = Annotated[
    Path, typer.Argument(metavar="FILE.safetensors", help="The record to compare with.", dir_okay=False)
]
RecordedModel = Annotated[
    str | None,
    typer.Argument(metavar="MODEL", show_default="the record's", help="A diffusers folder, a hub id, or 'embedded'."),
]
RecordedDtype = Annotated[
    str | None,
    typer.Option(
        help="auto (as stored), float32, bfloat16, float16; the record's if left out.", rich_help_panel=LOADING
    ),
]
RecordPrompts = Annotated[
    list[str] | None,
    typer.Option("--prompt", help="Instead of one held-out caption; repeat it.", rich_help_panel=REQUESTS),
]
RecordKinds = Annotated[
    list[str] | None,
    typer.Option("--sde-type", help="Instead of sde, cps, dance and ode; repeat it.", rich_help_panel=REQUESTS),
]
RecordSize = Annotated[
    str | None,
    typer.Option(help="Pixels: 64, or WIDTHxHEIGHT; small if left out.", rich_help_panel=REQUESTS),
]
RecordSteps = Annotated[
    int | None, typer.Option(min=1, help="Denoising steps; 4 if left out.", rich_help_panel=REQUESTS)
]
RequestsFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.json",
        help="A JSON list of requests, with the fields of /rollout/generate, instead of the four above.",
        rich_help_panel=REQUESTS,
    ),
]
Full = Annotated[
    bool, typer.Option("--full", help="Keep the tensors too: a later difference is then measured, not only found.")
]
BatchOrder = Annotated[BatchOrders, typer.Option(help="Order of submission.", rich_help_panel=SUBMISSION)]
OneByOne = Annotated[
    bool,
    typer.Option(
        "--one-by-one/--together",
        help="Submit a request when the one before is finished, or all at once.",
        rich_help_panel=SUBMISSION,
    ),
]
VerifyBatchSize = Annotated[
    int | None,
    typer.Option(
        "--max-batch-size", min=1, help="Samples that one step advances; not with --url.", rich_help_panel=SUBMISSION
    ),
]
VerifyWire = Annotated[
    Wire | None,
    typer.Option("--wire", help="Encoding of a service's replies; with --url.", rich_help_panel=SUBMISSION),
]
Replay = Annotated[
    bool,
    typer.Option(
        "--replay",
        help="Re-score the new rollout with autograd as well, by MODEL in this process: ratios must be 1.0 exactly.",
    ),
]


def chosen_model(argument: str | None, option: str | None) -> str:
    """The model that was named, either way; the embedded one if none was.

    Raises:
        InvalidRequestError: two different ones were named.
    """
    if argument is not None and option is not None and argument != option:
        raise InvalidRequestError(
            f"two models are named: {argument!r} and --model-path {option!r}",
            field="model_path",
            value=option,
            hint="Name one; MODEL and --model-path are the same thing.",
        )
    return argument or option or EMBEDDED


def step_indices(text: str | None) -> list[int] | None:
    """`0,1,2` as numbers.

    Raises:
        InvalidRequestError: it is no such list.
    """
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise InvalidRequestError(
            "must be a list of steps", field="sde_step_indices", value=text, hint="Write it like 0,1,2."
        ) from None


def picture_size(text: str | None) -> tuple[int, int] | None:
    """`64` or `96x64` as (width, height).

    Raises:
        InvalidRequestError: it is neither.
    """
    if text is None:
        return None
    sides = text.lower().split("x")
    if len(sides) > 2 or not all(side.strip().isdecimal() and int(side) > 0 for side in sides):
        raise InvalidRequestError("must be pixels", field="size", value=text, hint="Write it like 64 or 96x64.")
    return int(sides[0]), int(sides[-1])


def chosen_determinism(deterministic: bool | None) -> Literal["auto", "on", "off"]:
    """What `EngineConfig.deterministic` is called for the two flags, or for neither."""
    return "auto" if deterministic is None else "on" if deterministic else "off"


def chosen_layout(
    sp_degree: int,
    ulysses_degree: int | None = None,
    ring_degree: int = 1,
    *,
    enable_cfg_parallel: bool,
    guidance: Literal["batched", "split"] = "batched",
    share_device: bool,
    tp_size: int = 1,
    sequence_exchange: Literal["auto", "collectives"] = "auto",
) -> ParallelConfig:
    """The ranks that the options ask for; raises where they contradict each other."""
    config = ParallelConfig(
        sp_degree,
        ulysses_degree,
        ring_degree,
        enable_cfg_parallel,
        guidance,
        share_device,
        tp_size=tp_size,
        sequence_exchange=sequence_exchange,
    )
    layout_of(config)
    return config
