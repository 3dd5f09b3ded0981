"""`diffusion-rl demo`: the main job, through HTTP, on the embedded model."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from diffusion_rl.cli import options
from diffusion_rl.cli.loading import load_pipeline
from diffusion_rl.cli.rollout import NO_PLOTS
from diffusion_rl.config import EngineConfig

if TYPE_CHECKING:
    from diffusion_rl.cli.exactness import Comparison
    from diffusion_rl.client import RolloutClient
    from diffusion_rl.pipeline import RolloutPipeline
    from diffusion_rl.sample import RolloutSample

GROUP_SIZE = 4
STEPS = 10
FIRST_SEED = 42
PROBED = 2  # the sample of the first group that is rolled out again, alone
BROKEN_PROMISE = 1  # exit code
TRAINING_FIELDS: dict[str, Any] = {
    "num_inference_steps": STEPS,
    "rollout_sde_type": "sde",
    "rollout_debug_mode": False,
    "rollout_return_dit_trajectory": True,
    "rollout_return_denoising_env": True,
}


@dataclass
class Rollouts:
    """What came over HTTP. `alone` is sample `PROBED` of the first group, rolled out by itself, with debug tensors."""

    groups: list[list[RolloutSample]] = field(default_factory=list)
    evaluation: list[RolloutSample] = field(default_factory=list)
    alone: list[RolloutSample] = field(default_factory=list)
    start_s: float = 0.0
    training_s: float = 0.0

    @property
    def samples_per_second(self) -> float:
        return sum(len(group) for group in self.groups) / self.training_s


@dataclass(frozen=True)
class Proof:
    """The two promises, as they were found."""

    alone_and_in_group: Comparison
    ratios: list[float]

    @property
    def holds(self) -> bool:
        return self.alone_and_in_group.same_bits and all(ratio == 1.0 for ratio in self.ratios)


def demo(
    out: options.Out = Path("demo_out"),
    port: options.ServicePort = 0,
    prompts: options.Captions = 4,
    show: options.Show = None,
) -> None:
    """Run the main job through HTTP on the embedded model, and check its two promises in front of you.

    Starts the real service, rolls out a group of 4 for each of some captions that no training saw, shows what a
    FlowGRPO trainer would read, and checks that a sample alone has the same bits as in its group, and that replaying a
    rollout under unchanged weights gives ratios of exactly 1.0. Needs no GPU and no network; takes well under a minute.
    """
    console = Console()
    rollouts, pipeline = _roll_out(prompts, port, out, console)
    proof = _prove(rollouts, pipeline)
    _show_end(rollouts, console)
    _show_proof(proof, console)
    paths = _write(rollouts, proof, pipeline, out)
    if show if show is not None else console.is_terminal:
        _preview(rollouts, console)
    if not (out / "log_probs.png").is_file():
        console.print(Text(NO_PLOTS, "yellow"))
    for path in paths:
        console.print(Text(str(path.resolve()), "bold"), soft_wrap=True)
    if not proof.holds:
        raise typer.Exit(BROKEN_PROMISE)


def _roll_out(prompts: int, port: int, out: Path, console: Console) -> tuple[Rollouts, RolloutPipeline]:
    """Everything that goes over HTTP. Afterwards the service is gone; the pipeline has its model in this process."""
    from diffusion_rl.cli.service_process import running_service
    from diffusion_rl.client import RolloutClient
    from diffusion_rl.shapes import held_out_captions

    rollouts, began = Rollouts(), time.perf_counter()
    with running_service(options.EMBEDDED, port=port, log=out / "service.log") as service:
        console.print(f"$ diffusion-rl serve --port {service.port}", highlight=False)
        with console.status("the service and its engine process are starting"):
            pipeline = load_pipeline(EngineConfig())
            service.wait_ready()
        rollouts.start_s = time.perf_counter() - began
        console.print(f"ready at {service.url} after {rollouts.start_s:.1f} s", highlight=False)
        with RolloutClient(service.url) as client, console.status("") as status:
            captions = held_out_captions()[:prompts]
            for index, caption in enumerate(captions):
                status.update(Text(f"POST /rollout/generate, {index + 1} of {prompts}: {caption}"))
                _train(client, rollouts, caption, FIRST_SEED + index * GROUP_SIZE)
                _show_group(rollouts, console)
            status.update("an evaluation group and one sample alone")
            _evaluate(client, rollouts, captions[0])
    console.print("the service is stopped", highlight=False)
    return rollouts, pipeline


def _train(client: RolloutClient, rollouts: Rollouts, caption: str, seed: int) -> None:
    """One group, as a trainer asks for it."""
    began = time.perf_counter()
    group = client.generate(caption, num_outputs_per_prompt=GROUP_SIZE, seed=seed, **TRAINING_FIELDS)
    rollouts.training_s += time.perf_counter() - began
    rollouts.groups.append(group)


def _evaluate(client: RolloutClient, rollouts: Rollouts, caption: str) -> None:
    """An ODE group of the first caption, and one sample of its training group by itself."""
    rollouts.evaluation = client.generate(
        caption, num_outputs_per_prompt=GROUP_SIZE, seed=FIRST_SEED, num_inference_steps=STEPS, rollout=False
    )
    seed = rollouts.groups[0][PROBED].seed
    rollouts.alone = client.generate(caption, seed=seed, **{**TRAINING_FIELDS, "rollout_debug_mode": True})


def _prove(rollouts: Rollouts, pipeline: RolloutPipeline) -> Proof:
    from diffusion_rl.cli.exactness import compare_bits, replay_ratios

    comparison = compare_bits(rollouts.alone[0], rollouts.groups[0][PROBED])
    ratios = [replay_ratios(pipeline, group).flatten() for group in rollouts.groups]
    return Proof(comparison, [ratio for group in ratios for ratio in group.tolist()])


def _show_group(rollouts: Rollouts, console: Console) -> None:
    """What a trainer reads of the group that just came; before the first one, all fields of a sample."""
    from diffusion_rl.cli.summary import group_table

    group = rollouts.groups[-1]
    if len(rollouts.groups) == 1:
        console.print(_fields_table(group[0]))
    console.print(group_table(group, group[0].prompt))


def _show_end(rollouts: Rollouts, console: Console) -> None:
    """The evaluation group, the speed, and how many pictures are right."""
    from diffusion_rl.cli.summary import group_table, verdict_on

    console.print(group_table(rollouts.evaluation, f"{rollouts.evaluation[0].prompt} (rollout=false: an ODE)"))
    samples = [sample for group in rollouts.groups for sample in group]
    verdicts = [verdict for sample in samples if (verdict := verdict_on(sample)) is not None]
    right = sum(verdict.result.correct for verdict in verdicts)
    console.print(
        f"{len(samples)} samples in {rollouts.training_s:.1f} s: {rollouts.samples_per_second:.1f} samples a second; "
        f"{right} of {len(verdicts)} pictures show all that their caption says\n",
        highlight=False,
    )


def _fields_table(sample: RolloutSample) -> Table:
    table = Table(title="What a FlowGRPO trainer reads from each sample", title_justify="left", title_style="bold")
    table.add_column("field", no_wrap=True)
    table.add_column("value")
    rows: dict[str, object] = {"rollout_log_probs": _form(sample.rollout_log_probs)}
    rows["rollout_step_kinds"] = " ".join(sample.rollout_step_kinds)
    if sample.dit_trajectory is not None:
        rows |= {f"dit_trajectory.{name}": _form(value) for name, value in vars(sample.dit_trajectory).items()}
    if sample.denoising_env is not None:
        conditions = sample.denoising_env.pos_cond_kwargs
        rows |= {f"denoising_env.pos_cond_kwargs.{name}": _form(value) for name, value in conditions.items()}
        if sample.denoising_env.neg_cond_kwargs is not None:
            rows["denoising_env.neg_cond_kwargs"] = "the same, of the negative prompt"
    rows |= {"sigma_max": f"{sample.sigma_max:.6f}", "num_elements": sample.num_elements}
    rows |= {"generated_output": _form(sample.generated_output)}
    for name, value in rows.items():
        table.add_row(name, Text(str(value)))
    return table


def _form(value: object) -> str:
    """Shape and dtype of a tensor; another value as it is."""
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    return f"{list(shape)} {str(dtype).removeprefix('torch.')}" if shape is not None else str(value)


def _show_proof(proof: Proof, console: Console) -> None:
    def say(holds: bool, text: str) -> None:
        console.print(Text.assemble(("yes", "bold green") if holds else ("NO", "bold red"), f"  {text}"))

    comparison = proof.alone_and_in_group
    say(
        comparison.same_bits,
        f"sample {PROBED} alone has the same bits as in its group of {GROUP_SIZE} ({', '.join(comparison.compared)})"
        + (f"; different: {', '.join(comparison.different)}" if comparison.different else ""),
    )
    ratios, exact = proof.ratios, proof.ratios.count(1.0)
    say(
        exact == len(ratios),
        f"replayed in this process, {exact} of {len(ratios)} importance ratios are exactly 1.0 "
        f"(least {min(ratios)}, largest {max(ratios)})\n",
    )


def _write(rollouts: Rollouts, proof: Proof, pipeline: RolloutPipeline, out: Path) -> list[Path]:
    """Writes what there is to see, and summary.json; returns the paths."""
    from diffusion_rl.cli.filmstrip import decoded_filmstrip
    from diffusion_rl.cli.summary import log_probs_of, summary_of, tile_of, write_json
    from diffusion_rl.pictures import SheetRow, draw_sheet, plot_log_probs, save_png

    first, ratios = rollouts.groups[0], proof.ratios
    kinds, by_seed = first[0].rollout_step_kinds, {f"seed {s.seed}": log_probs_of(s) for s in first}
    headed = [(group[0].prompt, group) for group in rollouts.groups]
    headed.append((f"{first[0].prompt} (rollout=false: an ODE)", rollouts.evaluation))
    rows = [SheetRow(head, tuple(tile for s in group if (tile := tile_of(s)) is not None)) for head, group in headed]
    sheet = draw_sheet(
        rows, out / "contact_sheet.png", title="diffusion-rl demo: embedded model, held-out captions", side=144
    )
    strip = decoded_filmstrip(pipeline.engine.family, rollouts.alone[0]).save(out / "filmstrip.png")
    plot = plot_log_probs(by_seed, kinds, out / "log_probs.png", title=first[0].prompt)
    entries = []
    for index, (_, group) in enumerate(headed):
        for sample in group:
            picture = sample.generated_output
            path = out / f"group-{index:02d}" / f"sample-{sample.sample_index:02d}.png"
            files = {"picture": save_png(picture, path) if picture is not None else None}
            entries.append({**summary_of(sample, files, out), "evaluation": group is rollouts.evaluation})
    summary = {
        "start_s": rollouts.start_s,
        "samples_per_second": rollouts.samples_per_second,
        "same_bits_alone_and_in_group": {
            **asdict(proof.alone_and_in_group),
            "holds": proof.alone_and_in_group.same_bits,
        },
        "replay": {
            "ratios": len(ratios),
            "exactly_one": ratios.count(1.0),
            "least": min(ratios),
            "largest": max(ratios),
        },
        "samples": entries,
    }
    paths = [sheet, strip, plot, write_json(summary, out / "summary.json")]
    return [path for path in paths if path is not None]


def _preview(rollouts: Rollouts, console: Console) -> None:
    from diffusion_rl.pictures import half_blocks

    for group in rollouts.groups[:2]:
        console.print(Text(group[0].prompt, "bold"))
        pictures = [sample.generated_output for sample in group if sample.generated_output is not None]
        console.print(half_blocks(pictures, width=console.width), no_wrap=True, overflow="crop")
    console.print()
