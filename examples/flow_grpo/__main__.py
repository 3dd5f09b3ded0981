"""Trains the embedded model with FlowGRPO against a rollout service, and says what it gained.

    python -m examples.flow_grpo                        # a service of its own; about 15 minutes on two CPU cores
    python -m examples.flow_grpo --shuffle-rewards      # the control: nothing to learn, no gain
    python -m examples.flow_grpo --resume --epochs 200  # goes on from the last epoch's checkpoint

Writes `checkpoint.safetensors`, `rewards.png` and `report.json` into `--folder`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from diffusion_rl.client import RolloutClient
from engine_control.errors import EngineError

from .loop import Epoch, Run, run
from .policy import Policy
from .report import plot, report_of, write_json
from .rollouts import service_of
from .settings import Places, Settings, add_options, settings_from


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m examples.flow_grpo", description=__doc__, formatter_class=_HelpWithDefaults
    )
    add_options(parser)
    parser.add_argument("--folder", type=Path, default=Path("flow_grpo_out"), help="checkpoint, log, curve, report")
    parser.add_argument("--url", help="a service that runs already, with --enable-memory-saver; None: starts one")
    parser.add_argument("--out", type=Path, help="where the report goes; None: report.json in the folder")
    parser.add_argument("--resume", action="store_true", help="go on from the folder's checkpoint")
    arguments = parser.parse_args()
    places = Places(arguments.folder, arguments.url, arguments.out, arguments.resume)
    console = Console()
    try:
        found = _train(settings_from(arguments), places, console)
    except EngineError as error:
        console.print(f"{error}", style="red")
        sys.exit(1)
    report = report_of(found)
    write_json(report, places.out or places.folder / "report.json")
    drawn = plot(found, places.folder / "rewards.png")
    _say(found, report["gain_points"], console)
    console.print(f"{places.folder.resolve()}" + ("" if drawn else " (without a curve: matplotlib isn't installed)"))


class _HelpWithDefaults(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    pass


def _train(settings: Settings, places: Places, console: Console) -> Run:
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    for logging in (diffusers_logging, transformers_logging):
        logging.set_verbosity_error()
        logging.disable_progress_bar()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with console.status("the service starts") as status, service_of(places) as url, RolloutClient(url) as client:
        policy = Policy(settings)
        status.stop()
        console.print(f"service at {url}; {sum(p.numel() for p in policy.trained.values()):,} trained weights")
        with Progress(*columns, console=console) as progress:
            bar = progress.add_task("evaluating", total=settings.epochs)

            def after_epoch(epoch: Epoch) -> None:
                console.print(_line(epoch), highlight=False)
                progress.update(bar, completed=epoch.epoch, description=f"reward {epoch.reward:.3f}")

            def evaluating(state: Run) -> None:
                progress.update(bar, completed=state.done, description="evaluating")

            return run(client, policy, settings, places, after_epoch=after_epoch, evaluating=evaluating)


def _line(epoch: Epoch) -> str:
    seconds = ", ".join(f"{name} {value:.1f}" for name, value in epoch.seconds.items() if value >= 0.05)
    exact = f"{epoch.ratios_exactly_one} of {epoch.ratios} ratios exactly 1"
    gap = f" (largest gap {epoch.largest_ratio_gap:.1e})" if epoch.largest_ratio_gap else ""
    return f"{epoch.epoch:3}: reward {epoch.reward:.3f}, right {epoch.correct:.3f}, {exact}{gap}; s: {seconds}"


def _say(found: Run, gains: dict[str, float], console: Console) -> None:
    own = f"{found.settings['steps']} ODE steps, guidance {found.settings['guidance']:g}"
    names = {"own": own, "guided": "10 ODE steps, guidance 3"}
    console.print(f"{found.samples} samples, {found.optimizer_steps} optimizer steps, {found.seconds:.0f} s")
    for way, gain in gains.items():
        before, after = (found.evaluations[when][way]["correct"] for when in ("before", "after"))
        console.print(f"held out, {names[way]}: {before:.1%} -> {after:.1%} ({gain:+.1f} points)", highlight=False)


if __name__ == "__main__":
    main()
