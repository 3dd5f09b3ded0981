"""Trains the embedded language model with GRPO against a service, and says what it gained.

    python -m examples.grpo_arithmetic                             # a service of its own; about 5 minutes on two cores
    python -m examples.grpo_arithmetic --shuffle-rewards           # the control: nothing to learn, and noise does harm
    python -m examples.grpo_arithmetic --resume --iterations 200   # goes on from the last iteration's checkpoint

Writes `checkpoint.safetensors`, `rewards.png` and `report.json` into `--folder`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from engine_control.errors import EngineError
from llm_runtime.client import LLMClient

from .loop import Iteration, Run, run
from .policy import Policy
from .report import plot, report_of, write_json
from .rollouts import service_of
from .settings import Places, Settings, add_options, settings_from


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m examples.grpo_arithmetic", description=__doc__, formatter_class=_HelpWithDefaults
    )
    add_options(parser)
    folder = Path("grpo_arithmetic_out")
    parser.add_argument("--folder", type=Path, default=folder, help="checkpoint, log, curve, report")
    parser.add_argument("--url", help="a service that runs already, with --enable-memory-saver; None: starts one")
    parser.add_argument("--out", type=Path, help="where the report goes; None: report.json in the folder")
    parser.add_argument("--note", help="goes into the report, such as what else the machine did")
    parser.add_argument("--resume", action="store_true", help="go on from the folder's checkpoint")
    arguments = parser.parse_args()
    places = Places(arguments.folder, arguments.url, arguments.out, arguments.note, arguments.resume)
    console = Console()
    try:
        found = _train(settings_from(arguments), places, console)
    except EngineError as error:
        console.print(f"{error}", style="red")
        sys.exit(1)
    report = report_of(found, note=places.note)
    write_json(report, places.out or places.folder / "report.json")
    drawn = plot(found, places.folder / "rewards.png")
    _say(found, report, console)
    console.print(f"{places.folder.resolve()}" + ("" if drawn else " (without a curve: matplotlib isn't installed)"))


class _HelpWithDefaults(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    pass


def _train(settings: Settings, places: Places, console: Console) -> Run:
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with console.status("the service starts") as status, service_of(places) as url, LLMClient(url) as client:
        policy = Policy(settings)
        status.stop()
        console.print(f"service at {url}; {sum(p.numel() for p in policy.trained.values()):,} trained weights")
        with Progress(*columns, console=console) as progress:
            bar = progress.add_task("evaluating", total=settings.iterations)

            def after_iteration(iteration: Iteration) -> None:
                console.print(_line(iteration), highlight=False)
                description = f"reward {iteration.reward:.3f}"
                progress.update(bar, completed=iteration.iteration, description=description)

            def evaluating(state: Run) -> None:
                progress.update(bar, completed=state.done, description="evaluating")

            return run(client, policy, settings, places, after_iteration=after_iteration, evaluating=evaluating)


def _line(found: Iteration) -> str:
    seconds = ", ".join(f"{name} {value:.1f}" for name, value in found.seconds.items() if value >= 0.05)
    return (
        f"{found.iteration:3}: reward {found.reward:.3f}, right {found.correct:.3f}, mixed groups {found.taught:.2f}, "
        f"log-prob gap {found.largest_log_prob_gap:.0e}; s: {seconds}"
    )


def _say(found: Run, report: dict, console: Console) -> None:
    names = {"sampled": f"temperature {found.settings['temperature']:g}", "greedy": "greedy"}
    console.print(f"{found.answers} answers, {found.optimizer_steps} optimizer steps, {found.seconds:.0f} s")
    gap = report["log_prob_gap"]
    console.print(
        f"trainer and engine at equal weights: {gap['tokens']:,} tokens, log-probs at most {gap['largest']:.1e} apart",
        highlight=False,
    )
    for way, gain in report["gain_points"].items():
        before, after = (found.evaluations[when][way]["correct"] for when in ("before", "after"))
        console.print(f"held out, {names[way]}: {before:.1%} -> {after:.1%} ({gain:+.1f} points)", highlight=False)


if __name__ == "__main__":
    main()
