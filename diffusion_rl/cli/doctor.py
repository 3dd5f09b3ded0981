"""`diffusion-rl doctor`: what is installed, which device there is, and whether the promises hold on it."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import platform
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from diffusion_rl.cli import options
from diffusion_rl.cli.loading import load_pipeline
from diffusion_rl.config import EngineConfig
from engine_control.config import default_threads
from engine_control.errors import EngineError

if TYPE_CHECKING:
    from diffusion_rl.pipeline import RolloutPipeline
    from diffusion_rl.sample import RolloutSample

Status = Literal["ok", "note", "fail"]
STYLES: dict[Status, str] = {"ok": "green", "note": "yellow", "fail": "bold red"}
UNHEALTHY = 1  # exit code
PROBE_SEED = 2**40 + 7
PROBE_STEPS = 3

REQUIRED = {  # distribution -> what is imported
    "torch": "torch",
    "diffusers": "diffusers",
    "transformers": "transformers",
    "safetensors": "safetensors",
    "numpy": "numpy",
    "pillow": "PIL",
    "fastapi": "fastapi",
    "uvicorn": "uvicorn",
    "httptools": "httptools",
    "orjson": "orjson",
    "msgspec": "msgspec",
    "pydantic": "pydantic",
    "httpx": "httpx",
    "prometheus-client": "prometheus_client",
    "typer": "typer",
    "rich": "rich",
}
OPTIONAL = {"matplotlib": "log-prob plots: pip install 'diffusion-rl[plots]'"}


@dataclass(frozen=True)
class Check:
    """One finding. A `note` is worth knowing and breaks nothing; `way_out` says what to do about a `fail` or `note`."""

    name: str
    status: Status
    detail: str
    way_out: str | None = None


class Examination:
    """Findings in order. `look` adds one and goes on whatever happens."""

    def __init__(self, report: Callable[[str], None]) -> None:
        """`report` is told what is being looked at."""
        self.checks: list[Check] = []
        self._report = report

    @property
    def healthy(self) -> bool:
        return all(check.status != "fail" for check in self.checks)

    def look(self, name: str, probe: Callable[[], Check | str], *, way_out: str) -> bool:
        """Adds what `probe` finds: a check, or the detail of an ok one. Says whether it is no failure."""
        self._report(name)
        try:
            found = probe()
            check = found if isinstance(found, Check) else Check(name, "ok", found)
        except EngineError as error:
            check = Check(name, "fail", error.message, error.hint or way_out)
        except Exception as error:  # whatever is broken, the other findings are still wanted
            check = Check(name, "fail", f"{type(error).__name__}: {error}", way_out)
        self.checks.append(check)
        return check.status != "fail"


def doctor(
    model: options.ModelArgument = None,
    model_path: options.ModelPath = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    as_json: options.AsJson = False,
) -> None:
    """Check the installation, the device and a model; exits with 1 if something is broken.

    Loads the model as `serve` would and probes on this very device that a sample has the same bits alone and in a
    batch, and that replaying a rollout gives ratios of exactly 1.0.
    """
    config = EngineConfig(options.chosen_model(model, model_path), dtype, device)
    with Console(stderr=True).status("looking") as status:
        examination = Examination(lambda name: status.update(f"looking at: {name}"))
        _examine(examination, config)
    if as_json:
        findings = [asdict(check) for check in examination.checks]
        typer.echo(json.dumps({"ok": examination.healthy, "model": config.model_path, "checks": findings}, indent=2))
    else:
        Console().print(_table(examination))
    if not examination.healthy:
        raise typer.Exit(UNHEALTHY)


def _examine(examination: Examination, config: EngineConfig) -> None:
    look = examination.look
    look("python", lambda: f"{platform.python_version()} on {platform.platform()}", way_out="Use Python 3.11 or newer.")
    imports = [
        look(name, partial(_import, name, module), way_out=f"pip install {name}") for name, module in REQUIRED.items()
    ]
    for name, use in OPTIONAL.items():
        look(name, partial(_optional, name, use), way_out=use)
    if not all(imports):
        return
    look("cpu", _cpu, way_out="Set OMP_NUM_THREADS to the cores that this process may use.")
    look("gpu", _gpu, way_out="See to the driver: `nvidia-smi` must list the GPU.")
    look("triton", _triton, way_out="pip install 'diffusion-rl[gpu]'")
    loaded: list[RolloutPipeline] = []
    if look("model loads", partial(_load, config, loaded), way_out="Give a diffusers folder, a hub id or 'embedded'."):
        pipeline = loaded[0]
        way_out = "Try --dtype float32 or --device cpu."
        look("certificate", partial(_certificate, pipeline), way_out=way_out)
        look("one step", partial(_one_step, pipeline), way_out=way_out)
        look("batch invariance", partial(_batch_invariance, pipeline), way_out=way_out)
        look("replay", partial(_replay, pipeline), way_out=way_out)


def _import(name: str, module: str) -> str:
    importlib.import_module(module)
    return importlib.metadata.version(name)


def _optional(name: str, use: str) -> Check:
    try:
        return Check(name, "ok", _import(name, name))
    except ImportError:
        return Check(name, "note", "not installed", use)


def _cpu() -> str:
    import torch

    capability = torch.backends.cpu.get_cpu_capability()
    return f"{platform.machine()}, {capability}, {torch.get_num_threads()} threads here, {default_threads()} in `serve`"


def _gpu() -> Check:
    import torch

    if not torch.cuda.is_available():
        return Check("gpu", "note", f"none that torch {torch.__version__} can use", "Models run on the CPU.")
    names = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        names.append(f"{properties.name} ({properties.total_memory / 2**30:.0f} GiB)")
    return Check("gpu", "ok", ", ".join(names) + f", CUDA {torch.version.cuda}")


def _triton() -> Check:
    import torch

    found = _optional("triton", "pip install 'diffusion-rl[gpu]'")
    if found.status == "note" and not torch.cuda.is_available():
        return Check("triton", "note", "not installed", "Only a GPU has a use for it.")
    return found


def _load(config: EngineConfig, loaded: list[RolloutPipeline]) -> str:
    began = time.perf_counter()
    loaded.append(load_pipeline(config))
    seconds, about = time.perf_counter() - began, loaded[0].engine.describe()
    what = f"{config.model_path}: {about['pipeline_class']}, {about['dtype']} on {about['device_name']}"
    return f"{what}, {seconds:.1f} s"


def _certificate(pipeline: RolloutPipeline) -> Check:
    exactness = pipeline.engine.exactness
    if exactness.certificate is None:
        return Check("certificate", "note", "exact mode was not asked for")
    verdicts = exactness.certificate.verdicts
    if exactness.certificate.exact:
        chosen = Counter(str(v.implementation) for v in verdicts)
        how = ", ".join(f"{count} by {name}" for name, count in sorted(chosen.items()))
        known = exactness.certificate.cached
        earlier = f"; {known} found by an earlier start" if known else ""
        return Check("certificate", "ok", f"{len(verdicts)} classes of operations are exact here ({how}){earlier}")
    refused = "; ".join(f"{v.operation} ({v.failed_at})" for v in verdicts if not v.exact)
    return Check(
        "certificate",
        "fail",
        f"depends on the batch whatever is tried: {refused}",
        "Exact mode is off for this model here. Try --dtype float32 or --device cpu.",
    )


def _one_step(pipeline: RolloutPipeline) -> str:
    began = time.perf_counter()
    sample = _probe(pipeline, count=1, steps=1)[0]
    assert sample.generated_output is not None
    return f"a picture {list(sample.generated_output.shape)} in {time.perf_counter() - began:.2f} s"


def _batch_invariance(pipeline: RolloutPipeline) -> Check:
    from diffusion_rl.cli.exactness import compare_bits

    group = _probe(pipeline, count=3, steps=PROBE_STEPS)
    alone = _probe(pipeline, count=1, steps=PROBE_STEPS, seed=group[1].seed)
    comparison = compare_bits(alone[0], group[1])
    if comparison.same_bits:
        return Check(
            "batch invariance",
            "ok",
            f"a sample alone has the same bits as in a batch of 3 ({', '.join(comparison.compared)})",
        )
    return Check(
        "batch invariance",
        "fail",
        f"a sample alone differs from the same one in a batch of 3: {', '.join(comparison.different)}",
        "Results depend on the batch here: ratios will drift. Try --dtype float32 or --device cpu.",
    )


def _replay(pipeline: RolloutPipeline) -> Check:
    from diffusion_rl.cli.exactness import replay_ratios

    ratios = replay_ratios(pipeline, _probe(pipeline, count=2, steps=PROBE_STEPS))
    if bool((ratios == 1.0).all()):
        return Check("replay", "ok", f"{ratios.numel()} of {ratios.numel()} importance ratios are exactly 1.0")
    return Check(
        "replay",
        "fail",
        f"importance ratios from {float(ratios.min())} to {float(ratios.max())}, where all should be 1.0",
        "A trainer on this device would start off-policy. Try --dtype float32 or --device cpu.",
    )


def _probe(pipeline: RolloutPipeline, *, count: int, steps: int, seed: int = PROBE_SEED) -> list[RolloutSample]:
    from diffusion_rl.condition_images import plain_picture

    family = pipeline.engine.family
    frames, side = family.frame_multiple, family.size_multiple
    return pipeline(
        "a red circle",  # short enough for any text encoder
        image=plain_picture(side) if family.most_pictures else None,
        num_frames=None if frames is None else 1 + frames,
        num_outputs_per_prompt=count,
        num_inference_steps=steps,
        seed=seed,
        rollout_debug_mode=False,
        rollout_return_dit_trajectory=True,
        rollout_return_denoising_env=True,
    )


def _table(examination: Examination) -> Table:
    """One row a finding; what to do about it stands below it."""
    table = Table(title="diffusion-rl doctor", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for heading in ("", "what", "found"):
        table.add_column(heading)
    for check in examination.checks:
        found = Text(check.detail)
        if check.way_out:
            found.append(f"\n-> {check.way_out}", "bold" if check.status == "fail" else "dim")
        table.add_row(Text(check.status, STYLES[check.status]), check.name, found)
    return table
