"""`diffusion-rl rollout`: prompts in, a folder of pictures, filmstrips, log-prob plots and numbers out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from diffusion_rl.cli import options
from diffusion_rl.cli.loading import load_pipeline
from diffusion_rl.config import EngineConfig
from diffusion_rl.params import Limits, params_from_mapping
from engine_control.errors import EngineUnavailableError

if TYPE_CHECKING:
    from diffusion_rl.cli.filmstrip import Filmstrip
    from diffusion_rl.sample import RolloutSample

NO_PLOTS = "no log-prob plots: matplotlib is not installed (pip install 'diffusion-rl[plots]')"


@dataclass(frozen=True)
class Rolled:
    """One group of samples for each prompt, and how to draw a sample's filmstrip."""

    groups: list[list[RolloutSample]]
    filmstrip: Callable[[RolloutSample], Filmstrip]


def rollout(
    prompt: options.Prompts,
    num_outputs_per_prompt: options.Outputs = 4,
    seed: options.Seed = None,
    steps: options.Steps = None,
    guidance_scale: options.GuidanceScale = None,
    true_cfg_scale: options.TrueCfgScale = None,
    guidance_scale_2: options.GuidanceScale2 = None,
    negative_prompt: options.NegativePrompt = None,
    image: options.Images = None,
    height: options.Pixels = None,
    width: options.Pixels = None,
    num_frames: options.NumFrames = None,
    fps: options.Fps = 16.0,
    sde_type: options.SdeType = None,
    noise_level: options.NoiseLevel = None,
    sde_step_indices: options.StepIndices = None,
    sde_window_size: options.WindowSize = None,
    init_same_noise: options.InitSameNoise = False,
    out: options.Out = Path("rollout_out"),
    filmstrips: options.Filmstrips = True,
    model: options.Model = options.EMBEDDED,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    url: options.Url = None,
) -> None:
    """Roll out prompts and write what came out: pictures or videos, filmstrips, log-prob plots and summary.json."""
    asked = {
        "seed": seed,
        "num_inference_steps": steps,
        "guidance_scale": guidance_scale,
        "true_cfg_scale": true_cfg_scale,
        "guidance_scale_2": guidance_scale_2,
        "negative_prompt": negative_prompt,
        "image": image or None,
        "height": height,
        "width": width,
        "num_frames": num_frames,
        "rollout_sde_type": sde_type,
        "rollout_noise_level": noise_level,
        "rollout_sde_step_indices": options.step_indices(sde_step_indices),
        "rollout_sde_window_size": sde_window_size,
        "init_same_noise": init_same_noise or None,
    }
    fields = {name: value for name, value in asked.items() if value is not None}  # the rest is the model's to choose
    fields |= {"num_outputs_per_prompt": num_outputs_per_prompt, "rollout_return_dit_trajectory": True}
    console = Console()
    if url is not None:
        rolled = _from_service(url, prompt, fields, console)
    else:
        rolled = _in_process(EngineConfig(model, dtype, device), prompt, fields, console)
    _write(rolled, out, console, filmstrips=filmstrips, fps=fps)


def _in_process(config: EngineConfig, prompts: Sequence[str], fields: dict[str, Any], console: Console) -> Rolled:
    """Loads the model here. Fields that no model could serve are refused before that."""
    with console.status(Text(f"loading {config.model_path}")):
        from diffusion_rl.schedulers import step_kinds

        for prompt in prompts:
            request = params_from_mapping({**fields, "prompt": prompt})
            request.validate(Limits(), step_kinds=step_kinds.names())
        pipeline = load_pipeline(config)
        from diffusion_rl.cli.filmstrip import decoded_filmstrip

    with _progress(console) as progress:
        task = progress.add_task("denoising", total=None)
        samples = pipeline(
            prompts, progress=lambda done, total: progress.update(task, completed=done, total=total), **fields
        )
    size = len(samples) // len(prompts)
    groups = [samples[start : start + size] for start in range(0, len(samples), size)]
    return Rolled(groups, lambda sample: decoded_filmstrip(pipeline.engine.family, sample))


def _from_service(url: str, prompts: Sequence[str], fields: dict[str, Any], console: Console) -> Rolled:
    """Sends one request a prompt."""
    import httpx

    from diffusion_rl.cli.filmstrip import false_colour_filmstrip
    from diffusion_rl.client import RolloutClient

    groups = []
    with RolloutClient(url) as client, _progress(console) as progress:
        task = progress.add_task(f"waiting for {url}", total=len(prompts))
        for index, prompt in enumerate(prompts):
            seed = {"seed": fields["seed"] + index * fields["num_outputs_per_prompt"]} if "seed" in fields else {}
            try:
                groups.append(client.generate(prompt, **{**fields, **seed, "rollout_debug_mode": False}))
            except httpx.TransportError as error:
                raise EngineUnavailableError(
                    f"no service was reached at {url}: {error}",
                    hint="Start one with `diffusion-rl serve`, or leave --url out to load the model here.",
                ) from error
            progress.advance(task)
    return Rolled(groups, false_colour_filmstrip)


def _write(rolled: Rolled, out: Path, console: Console, *, filmstrips: bool, fps: float) -> None:
    """Writes the folder; prints a table a prompt, and where everything is."""
    from diffusion_rl.cli.summary import group_table, log_probs_of, summary_of, tile_of, write_json
    from diffusion_rl.pictures import SheetRow, draw_sheet, plot_log_probs

    entries, rows, plots = [], [], []
    for index, group in enumerate(rolled.groups):
        folder = out / f"prompt-{index:02d}"
        kinds, prompt = group[0].rollout_step_kinds, group[0].prompt
        by_seed = {f"seed {sample.seed}": log_probs_of(sample) for sample in group}
        plots.append(plot_log_probs(by_seed, kinds, folder / "log_probs.png", title=prompt))
        for sample in group:
            files = _write_output(sample, folder, fps=fps)
            if filmstrips:
                files["filmstrip"] = rolled.filmstrip(sample).save(folder / f"filmstrip-{sample.sample_index:02d}.png")
            entries.append(summary_of(sample, {**files, "log_prob_plot": plots[-1]}, out))
        rows.append(SheetRow(prompt, tuple(tile for sample in group if (tile := tile_of(sample)) is not None)))
        console.print(group_table(group, f"prompt-{index:02d}: {prompt}"))
    draw_sheet(rows, out / "contact_sheet.png", side=144)
    write_json({"samples": entries}, out / "summary.json")
    if None in plots:
        console.print(Text(NO_PLOTS, "yellow"))
    count = sum(len(group) for group in rolled.groups)
    console.print(Text.assemble(f"{count} samples in ", (str(out.resolve()), "bold")), soft_wrap=True)


def _write_output(sample: RolloutSample, folder: Path, *, fps: float) -> dict[str, Path | None]:
    """A sample's picture, or its video with a strip of its frames; by what they are."""
    from diffusion_rl.pictures import draw_sheet, frames_row, save_png, save_video

    output, name = sample.generated_output, f"{sample.sample_index:02d}"
    if output is None or output.dim() == 3:
        return {"picture": None if output is None else save_png(output, folder / f"sample-{name}.png")}
    strip = frames_row(output, f"{sample.prompt} (seed {sample.seed})")
    return {
        "video": save_video(output, folder / f"sample-{name}.webp", fps=fps),
        "frames": draw_sheet([strip], folder / f"frames-{name}.png", side=96),
    }


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )
