"""The options of the commands, with their help. Names are SGLang's where it has them."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from engine_control.errors import InvalidRequestError
from llm_runtime.config import LLMConfig

EMBEDDED = LLMConfig().model_path
LOADING = "Model"
BATCHING = "Batches and caches"
CONTROL = "Control"
REQUESTS = "Requests and replies"
SAMPLING = "Sampling"


def _of(panel: str, *names: str, text: str, least: int | None = None) -> typer.models.OptionInfo:
    return typer.Option(*names, help=text, rich_help_panel=panel, min=least)  # type: ignore[no-any-return]


ModelArgument = Annotated[
    str | None,
    typer.Argument(metavar="MODEL", show_default=EMBEDDED, help="A Hugging Face folder, a hub id, or 'embedded'."),
]
ModelPath = Annotated[str | None, typer.Option(help="The same as MODEL, under the name that SGLang uses.")]
Model = Annotated[str, _of(LOADING, text="A Hugging Face folder, a hub id, or 'embedded'.")]
TokenizerPath = Annotated[str | None, _of(LOADING, text="Another tokenizer than the model's own.")]
SkipTokenizer = Annotated[
    bool, _of(LOADING, "--skip-tokenizer-init", text="Load no tokenizer: token ids alone are taken and given.")
]
Dtype = Annotated[str, _of(LOADING, text="Precision: auto (as stored), float32, bfloat16, float16.")]
Device = Annotated[str, _of(LOADING, text="auto is the first GPU if there is one, else the CPU.")]
LoadFormat = Annotated[
    Literal["auto", "dummy"], _of(LOADING, text="dummy: weights at random, for a trainer that sends its own.")
]
Quantization = Annotated[
    Literal["fp8"] | None,
    _of(LOADING, text="fp8: linear layers in one byte a number, quantised at the start and at each commit of a refit."),
]
TpSize = Annotated[int, _of(LOADING, "--tp-size", "--tp", text="Devices that share every layer.", least=1)]
Deterministic = Annotated[
    bool | None,
    _of(
        LOADING,
        "--enable-deterministic-inference/--disable-deterministic-inference",
        text="Exact mode: a sample's bits never depend on its batch. By default on wherever the model is certified for "
        "it on this device; enabled, the start fails by name where it can't be; disabled, libraries are left alone.",
    ),
]
DisableCudaGraph = Annotated[
    bool, _of(LOADING, "--disable-cuda-graph", text="Launch every kernel of decoding one by one; the same bits.")
]
DisableOverlap = Annotated[
    bool,
    _of(
        BATCHING,
        "--disable-overlap-schedule",
        text="Launch decoding's next step when the last one's tokens are known, not before; the same bits.",
    ),
]
ContextLength = Annotated[int | None, _of(BATCHING, text="Most tokens of prompt and output.", least=1)]
MaxRunning = Annotated[int, _of(BATCHING, text="Sequences computed at the same time.", least=1)]
MaxQueued = Annotated[int, _of(BATCHING, text="Sequences that may wait.", least=1)]
MaxPrefill = Annotated[
    int | None,
    _of(
        BATCHING,
        "--max-prefill-tokens",
        "--chunked-prefill-size",
        text="Prompt tokens of one step; by default 16,384 on a GPU, 4,096 on a CPU.",
        least=1,
    ),
]
PageSize = Annotated[int, _of(BATCHING, text="Tokens of one page of the KV cache.", least=1)]
DraftModel = Annotated[
    str | None, _of(BATCHING, text="A small model with the same tokens that guesses ahead; every bit stays the same.")
]
DraftSteps = Annotated[int, _of(BATCHING, text="Tokens that a draft model guesses at a time.", least=1)]
MaxTotal = Annotated[int | None, _of(BATCHING, text="Tokens of the KV cache; by default what memory allows.", least=1)]
MemFraction = Annotated[float, _of(BATCHING, text="Share of a GPU's memory for weights and KV cache.")]
DisableRadix = Annotated[bool, _of(BATCHING, "--disable-radix-cache", text="Compute every prompt anew.")]
RandomSeed = Annotated[int | None, _of(BATCHING, text="Requests without a seed get theirs from it.", least=0)]
WeightVersion = Annotated[str, _of(CONTROL, text="What the weights that are loaded first are called.")]
ImplicitSessions = Annotated[
    bool,
    _of(
        CONTROL,
        "--implicit-weight-sessions",
        text="An update without an open session is a session of its own, as slime, verl and AReaL send them.",
    ),
]
SessionTimeout = Annotated[float, _of(CONTROL, text="Seconds after which a silent weight session is undone.")]
RefuseDuringUpdate = Annotated[
    bool, _of(CONTROL, "--refuse-during-update", text="New requests get 503 during an update, instead of waiting.")
]
EnableMemorySaver = Annotated[bool, _of(CONTROL, "--enable-memory-saver", text="Memory can be released and resumed.")]
MemorySaver = Annotated[
    Literal["auto", "host", "vmm"], _of(CONTROL, text="How: by moving it (host), or by unmapping it (vmm, on a GPU).")
]
WeightsBackup = Annotated[
    bool,
    _of(
        CONTROL,
        "--enable-weights-cpu-backup/--disable-weights-cpu-backup",
        text="Whether a release that doesn't say keeps the weights in host memory.",
    ),
]
CustomWeightLoader = Annotated[
    list[str] | None, _of(CONTROL, text="An import path that an update may name as load_format. Repeatable.")
]
Host = Annotated[str, _of(REQUESTS, text="Address to listen on.")]
Port = Annotated[int, _of(REQUESTS, text="Port to listen on.")]
ServedModelName = Annotated[str | None, _of(REQUESTS, text="The model's name for clients; by default MODEL.")]
Incremental = Annotated[
    bool,
    _of(REQUESTS, "--incremental-streaming-output", text="A stream's chunks hold what is new, instead of all so far."),
]
MaxBody = Annotated[int, _of(REQUESTS, text="Longest request body, in MiB.", least=1)]
BodyTimeout = Annotated[float, _of(REQUESTS, text="Seconds in which a request must have arrived.")]
SendTimeout = Annotated[float, _of(REQUESTS, text="Seconds that a client may take nothing of its reply.")]
MaxInFlight = Annotated[int, _of(REQUESTS, text="Requests in flight, at most.", least=1)]

Prompts = Annotated[list[str], typer.Argument(help="What to go on from.")]
MaxNewTokens = Annotated[int, _of(SAMPLING, text="Tokens to make, at most.", least=1)]
Temperature = Annotated[float, _of(SAMPLING, text="0 takes the likeliest token each time.")]
TopP = Annotated[float, _of(SAMPLING, text="Only the likeliest tokens whose probabilities reach it.")]
TopK = Annotated[int, _of(SAMPLING, text="Only so many of the likeliest tokens; -1: no limit.")]
Samples = Annotated[int, _of(SAMPLING, "--n", "-n", text="Samples of each prompt.", least=1)]
Seed = Annotated[int | None, _of(SAMPLING, text="Of the first sample; the others count on.", least=0)]
Stop = Annotated[list[str] | None, _of(SAMPLING, text="A text that ends the output. Repeatable.")]
Logprobs = Annotated[bool, _of(SAMPLING, "--logprobs", text="Show each token's log-prob.")]
Url = Annotated[str | None, typer.Option(help="A running service, instead of an engine in this process.")]


def chosen_model(argument: str | None, option: str | None) -> str:
    """The model that one of the two names, or the embedded one.

    Raises:
        InvalidRequestError: they name two.
    """
    if argument is not None and option is not None and argument != option:
        raise InvalidRequestError(
            f"MODEL is {argument!r} and --model-path {option!r}", field="model_path", hint="Name it once."
        )
    return argument or option or EMBEDDED


def chosen_determinism(enabled: bool | None) -> Literal["auto", "on", "off"]:
    return "auto" if enabled is None else "on" if enabled else "off"
