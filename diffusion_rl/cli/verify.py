"""`diffusion-rl verify`: record what fixed requests give, and compare a later rollout with it, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.text import Text

from diffusion_rl.cli import options
from diffusion_rl.cli.loading import load_pipeline
from diffusion_rl.config import EngineConfig, ParallelConfig, Wire
from diffusion_rl.parallel.layout import layout_of
from engine_control.errors import InvalidRequestError

if TYPE_CHECKING:
    from diffusion_rl.pipeline import RolloutPipeline
    from diffusion_rl.verify import Comparison, Environment, Record, Source

DIFFERENT = 1  # exit code
SHOWN_RATIOS = 10
WIRE: Wire = "safetensors"
RANKS = ParallelConfig()

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Bit-exactness regression runs: record once, compare after every change.",
)


@app.command("record")
def record(
    out: options.RecordOut,
    model: options.ModelArgument = None,
    model_path: options.ModelPath = None,
    url: options.Url = None,
    prompt: options.RecordPrompts = None,
    sde_type: options.RecordKinds = None,
    size: options.RecordSize = None,
    steps: options.RecordSteps = None,
    requests: options.RequestsFile = None,
    full: options.Full = False,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
) -> None:
    """Roll out fixed requests and keep a digest of every tensor of every step, in one small file.

    By default: one caption by each step kind, with guidance and without, K = 2. Seeds are fixed.
    """
    from diffusion_rl.verify import default_requests
    from diffusion_rl.verify import record as make_record
    from diffusion_rl.verify.record import checked_target

    checked_target(out)
    pixels, console = options.picture_size(size), Console()
    own = None if requests is None else _own_requests(requests, prompt or sde_type or size or steps)
    chosen = options.chosen_model(model, model_path)
    _refuse_model_beside_url(url, model or model_path)
    with _source(url, EngineConfig(chosen, dtype, device), console) as source, console.status("rolling out"):
        asked = own or default_requests(
            **_multiples(source), prompts=prompt or (), kinds=sde_type or (), size=pixels, steps=steps
        )
        made = make_record(source, asked, full=full)
    path = made.save(out)
    console.print(Text(_origin(made.environment)))
    _warn_if_inexact(made.environment, "this rollout", console)
    console.print(Text.assemble(f"{_contents(made)} in ", (str(path.resolve()), "bold")), soft_wrap=True)


@app.command("compare")
def compare(
    file: options.RecordFile,
    model: options.RecordedModel = None,
    model_path: options.ModelPath = None,
    url: options.Url = None,
    batch_order: options.BatchOrder = "as-recorded",
    one_by_one: options.OneByOne = False,
    max_batch_size: options.VerifyBatchSize = None,
    wire: options.VerifyWire = None,
    replay: options.Replay = False,
    dtype: options.RecordedDtype = None,
    device: options.Device = "auto",
    sp_degree: options.SpDegree = RANKS.sp_degree,
    enable_cfg_parallel: options.CfgParallel = RANKS.enable_cfg_parallel,
    guidance: options.Guidance = RANKS.guidance,
    share_device: options.ShareDevice = RANKS.share_device,
    as_json: options.AsJson = False,
) -> None:
    """Roll a record's requests out again and compare all bits; exits with 0 if they are equal, 1 if not, 2 on errors.

    Order, batch size, wire and the number of ranks may be varied: they must not matter. Where versions, device or
    weights differ from the record's, equality is not promised; that is said, and compared all the same.
    """
    from diffusion_rl.verify import Record
    from diffusion_rl.verify import compare as make_comparison

    made = Record.load(file)
    parallel = options.chosen_layout(
        sp_degree, enable_cfg_parallel=enable_cfg_parallel, guidance=guidance, share_device=share_device
    )
    _check_submission(url, wire=wire, max_batch_size=max_batch_size, parallel=parallel)
    named = model or model_path
    if not replay:
        _refuse_model_beside_url(url, named)
    config = EngineConfig(
        options.chosen_model(model, model_path) if named else made.environment.model_path,
        dtype or made.environment.load_dtype or "auto",
        device,
        max_batch_size or EngineConfig().max_batch_size,
        parallel=parallel,
    )
    console = Console(stderr=as_json)
    with _source(url, config, console, wire=wire) as source:
        replay_by = _replaying(source, config, console) if replay else None
        with console.status("rolling out"):
            found = make_comparison(made, source, order=batch_order, one_by_one=one_by_one, replay_by=replay_by)
    if as_json:
        typer.echo(json.dumps(_findings(found), indent=2))
    else:
        how = ["one by one" if one_by_one else "together", batch_order]
        how += [] if max_batch_size is None else [f"batches of at most {max_batch_size}"]
        how += [] if parallel == RANKS else [_described(parallel)]
        how += [] if url is None else [f"over HTTP as {wire or WIRE}"]
        _show(found, console, how=", ".join(how))
    if not found.equal:
        raise typer.Exit(DIFFERENT)


@contextmanager
def _source(url: str | None, config: EngineConfig, console: Console, *, wire: Wire | None = None) -> Iterator[Source]:
    """The service there, or the model loaded here."""
    if url is None:
        with console.status(Text(f"loading {config.model_path}")):
            pipeline = load_pipeline(config)
        with pipeline:
            yield pipeline
        return
    from diffusion_rl.client import RolloutClient

    with RolloutClient(url, wire=wire or WIRE) as client:
        yield client


def _replaying(source: Source, config: EngineConfig, console: Console) -> RolloutPipeline:
    """The pipeline that re-scores: the one that rolls out if it is in this process, else one that is loaded now."""
    from diffusion_rl.pipeline import RolloutPipeline

    if isinstance(source, RolloutPipeline):
        return source
    with console.status(Text(f"loading {config.model_path}")):
        return load_pipeline(config)


def _multiples(source: Source) -> dict[str, Any]:
    """Of which pixels, and frames, the loaded model takes multiples."""
    from diffusion_rl.client import RolloutClient
    from diffusion_rl.verify.submission import reached

    described = reached(source.server_info) if isinstance(source, RolloutClient) else source.engine.describe()
    return {name: described[name] for name in ("size_multiple", "frame_multiple")}


def _own_requests(path: Path, others: object) -> list[Mapping[str, object]]:
    """The requests that a file holds.

    Raises:
        InvalidRequestError: it can't be read or is no list of objects; or other options describe requests too.
    """
    if others:
        raise InvalidRequestError(
            "the file says all about the requests",
            field="requests",
            value=str(path),
            hint="Leave out --prompt, --sde-type, --size and --steps, or --requests.",
        )
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidRequestError(
            f"the requests can't be read: {error}", field="requests", value=str(path), hint="Give a JSON file."
        ) from error
    if not isinstance(read, list) or not read or not all(isinstance(item, dict) for item in read):
        raise InvalidRequestError(
            "must be a list of requests",
            field="requests",
            value=str(path),
            hint='Write [{"prompt": "a red circle", "num_outputs_per_prompt": 2}].',
        )
    return read


def _refuse_model_beside_url(url: str | None, model: str | None) -> None:
    if url is not None and model is not None:
        raise InvalidRequestError(
            "the service there has a model of its own", field="model", value=model, hint="Leave out MODEL, or --url."
        )


def _check_submission(
    url: str | None, *, wire: str | None, max_batch_size: int | None, parallel: ParallelConfig
) -> None:
    """Refuses options that could have no effect: a comparison that varies nothing would say too much."""
    if url is None and wire is not None:
        raise InvalidRequestError(
            "there is no wire within this process", field="wire", value=wire, hint="Name a service with --url."
        )
    if url is not None and max_batch_size is not None:
        raise InvalidRequestError(
            "a service has the batch size that it was started with",
            field="max_batch_size",
            value=max_batch_size,
            hint="Start it with `diffusion-rl serve --max-batch-size`, or leave --url out.",
        )
    if url is not None and parallel != RANKS:
        raise InvalidRequestError(
            "a service has the ranks that it was started with",
            field="sp_degree",
            value=parallel.sp_degree,
            hint="Start it with `diffusion-rl serve --sp-degree`, or leave --url out.",
        )


def _described(parallel: ParallelConfig) -> str:
    layout = layout_of(parallel)
    guidance = "parallel" if layout.cfg_degree > 1 else parallel.guidance
    return f"{layout.ranks} ranks, tokens over {layout.sp_degree}, guidance {guidance}"


def _show(found: Comparison, console: Console, *, how: str) -> None:
    """What differs beside the bits, the table, wrong ratios, and the summary."""
    from diffusion_rl.cli.verify_table import comparison_table

    console.print(Text(f"recorded: {_origin(found.recorded)}\nnow:      {_origin(found.found)}"), soft_wrap=True)
    if found.environment:
        console.print(Text("NOT THE SAME as when it was recorded, so that equal bits are not promised:", "bold yellow"))
        for item in found.environment:
            console.print(Text(f"  {item.name}: {_short(item.recorded)} -> {_short(item.found)}", "yellow"))
    _warn_if_inexact(found.recorded, "the record", console)
    _warn_if_inexact(found.found, "this rollout", console)
    console.print(comparison_table(found))
    for finding in found.wrong_ratios[:SHOWN_RATIOS]:
        where = f"request {finding.request}, sample {finding.sample}, step {finding.step}"
        console.print(Text(f"ratio of {where}: {finding.ratio!r}, not 1.0", "red"), soft_wrap=True)
    if found.ratios is not None:
        right = len(found.ratios) - len(found.wrong_ratios)
        console.print(f"replayed: {right} of {len(found.ratios)} ratios are exactly 1.0", highlight=False)
    console.print(_summary(found, how), soft_wrap=True)


def _summary(found: Comparison, how: str) -> Text:
    wrong = sum(not request.equal for request in found.requests)
    if found.equal:
        what = f"{len(found.requests)} requests, {found.compared} tensors and values have the recorded bits"
        return Text.assemble(("equal", "bold green"), f": {what} ({how})")
    text = Text.assemble(("DIFFERENT", "bold red"), f": {wrong} of {len(found.requests)} requests ({how})")
    if found.first is not None:
        text.append(f"\nfirst: {found.first}", "bold")
    if found.wrong_ratios:
        text.append(f"\n{len(found.wrong_ratios)} replayed ratios are not 1.0", "bold")
    return text


def _findings(found: Comparison) -> dict[str, Any]:
    """The comparison as JSON values."""
    from diffusion_rl.verify.requests import fields_of

    requests = [
        {
            "fields": fields_of(request.params),
            "equal": request.equal,
            "compared": request.compared,
            "differences": [asdict(difference) for difference in request.differences],
        }
        for request in found.requests
    ]
    replayed = None
    if found.ratios is not None:
        replayed = {"ratios": len(found.ratios), "wrong": [asdict(finding) for finding in found.wrong_ratios]}
    return {
        "equal": found.equal,
        "first": None if found.first is None else str(found.first),
        "environment": [asdict(item) for item in found.environment],
        "requests": requests,
        "replay": replayed,
    }


def _origin(environment: Environment) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in environment.versions.items())
    device = environment.device_name if environment.cpu is None else environment.cpu
    return f"{environment.model_path}, {environment.dtype} on {device}; {versions}"


def _warn_if_inexact(environment: Environment, what: str, console: Console) -> None:
    if not environment.exact:
        console.print(Text(f"{what} is without exact mode: its bits may depend on the batch", "bold yellow"))


def _contents(made: Record) -> str:
    samples = [sample for request in made.requests for sample in request.samples]
    kept = f", {len(made.tensors)} tensors in full" if made.full else ""
    digests = sum(len(sample.prints) for sample in samples)
    return f"{len(made.requests)} requests, {len(samples)} samples, {digests} digests{kept}"


def _short(value: str) -> str:
    """A digest's beginning; anything else as it is."""
    return value[:12] if len(value) == 64 and " " not in value else value
