"""How many pictures a second does a rollout give, at what fraction of the machine, and how many does a plain loop give?

    python -m benchmarks.bench_rollout                                       # the embedded model
    python -m benchmarks.bench_rollout --family sd3.5-medium --batch 24,1    # a full-size shape, for a GPU

Groups of several sizes with guidance, with pictures and with latents alone (so that denoising shows apart), by the
engine and by a plain loop on diffusers (see `plain_diffusers`), in turn in one process; then the transformer's forward
alone, requests of one sample that arrive at random against one group, and on a GPU a profile. The ceiling is a large
matrix product in the model's dtype. The model's operations are counted, not estimated. The embedded model gets a prompt
that nobody has encoded each time; full-size shapes have random embeddings, which are there before the clock runs.

Each part is written when it is done; what `--budget-s` leaves no time for is left out.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks.full_size import SHAPES, Computed, computing, run
from benchmarks.measure import (
    Budget,
    PromptSupply,
    Report,
    alternate,
    command_line,
    integers,
    matmul_ceiling,
    print_table,
    ratio,
    seconds_of,
    settings_of,
)
from benchmarks.plain_diffusers import compiled_blocks, device_noise, roll_out
from benchmarks.profile_step import account_of
from benchmarks.rollout_subject import NOISE_LEVEL, SEED, Subject, counted_flops
from diffusion_rl.config import EngineConfig
from diffusion_rl.models.compiled import CompiledForward
from diffusion_rl.models.graphs import CudaGraphs
from diffusion_rl.rollout.compilation import compile_family
from diffusion_rl.rollout.engine import RolloutEngine, build_engine

PARTS = ("forwards", "rollouts", "decoding", "arrivals", "profile")
WARM_STEPS = 3  # enough for a shape's eager forward, its capture and a replay
FORWARD_REPEATS = 5
DECODED_TOGETHER = 8
EVERYTHING: Mapping[str, bool] = {"rollout_return_dit_trajectory": True, "rollout_return_denoising_env": True}
TRAJECTORY: Mapping[str, Any] = {"rollout_return_dit_trajectory": True, "rollout_debug_mode": False}
LIMIT = (
    "The matrix product is the ceiling of the transformer and the VAE: `fraction_of_ceiling` is what share of it their "
    "counted operations reach. Memory traffic of the elementwise operations, launches, and on a GPU whatever keeps it "
    "waiting (1 - `busy`) take the rest; small matrices (the embedded model's width is 128) reach less of it."
)


Arm = Callable[[int], object]
"""A rollout of that many steps."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark."""
    arguments = _arguments(argv)
    budget = Budget(arguments.budget_s)
    report = Report("rollout", (__doc__ or "").splitlines()[0], settings_of(arguments), limit=LIMIT)
    subject = _subject(arguments, report)
    family = subject.family
    side = arguments.matmul_size or (8192 if family.device.type == "cuda" else 1024)
    ceiling = matmul_ceiling(side, family.dtype, family.device)
    flops = counted_flops(subject)
    _add(report, arguments, {"name": "matmul", "size": side, "dtype": str(family.dtype), "tflops": ceiling})
    _add(report, arguments, {"name": "counted_flop", **flops})
    bench = Bench(report, arguments, subject, budget, ceiling, flops)
    parts = arguments.parts
    for group in arguments.batch:
        if "forwards" in parts:
            bench.forwards(group)
        if "rollouts" in parts:
            bench.rollouts(group)
    if "decoding" in parts:
        bench.decoding()
    if "arrivals" in parts and arguments.arrivals > 1 and budget.allows(0):
        bench.arrivals(arguments.arrivals)
    if "profile" in parts and family.device.type == "cuda" and budget.allows(0):
        bench.profile(arguments.batch[0])
    for kind in arguments.compile:
        for group in arguments.batch:
            if budget.allows(arguments.compile_s):
                bench.compiled(kind, group)
    report.write(arguments.out)
    columns = ["arm", "group", "median s", "images/s", "image-steps/s"]
    rolled = [r for r in report.results if "image_steps_per_s" in r]
    rows = [[r["name"], r["group"], r["median_s"], r["images_per_s"], r["image_steps_per_s"]] for r in rolled]
    print_table(f"Rollouts; ceiling {ceiling:.3g} TFLOP/s", columns, rows)
    print_table("Ratios", ["", "value"], [[name, value] for name, value in report.ratios.items()])
    return 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command_line("rollout", __doc__ or "", repeats=5)
    parser.add_argument("--family", choices=list(SHAPES), help="a full-size shape with random weights, not --model")
    parser.add_argument("--size", type=int, help="pixels a side; the model's own if nothing is said")
    parser.add_argument("--batch", type=integers, default=[16, 1], help="samples of a request, one case each")
    parser.add_argument("--steps", type=int, default=10, help="denoising steps")
    parser.add_argument("--arrivals", type=int, default=16, help="single requests that arrive at random; 0: none")
    parser.add_argument("--matmul-size", type=int, help="side of the ceiling's square matrices")
    parser.add_argument(
        "--compile", type=lambda text: text.split(",") if text else [], default=[], help="of blocks, ours; a list"
    )
    parser.add_argument("--compiled-rows", type=int, default=8, help="rows of our compiled forward")
    parser.add_argument(
        "--compile-s", type=float, default=60.0, help="what compiling is thought to take, by the budget"
    )
    parser.add_argument("--parts", type=_parts, default=PARTS, help=f"which parts, a list: {', '.join(PARTS)}")
    parser.add_argument("--budget-s", type=float, default=600.0, help="seconds after which no further part begins")
    return parser.parse_args(argv)


def _parts(text: str) -> tuple[str, ...]:
    parts = tuple(text.split(","))
    if unknown := sorted(set(parts) - set(PARTS)):
        raise argparse.ArgumentTypeError(f"no such part: {', '.join(unknown)}; there are {', '.join(PARTS)}")
    return parts


def _subject(arguments: argparse.Namespace, report: Report) -> Subject:
    """Loads and certifies, and puts into the report how long that took."""
    began = time.perf_counter()
    if arguments.family is None:
        engine = build_engine(EngineConfig(arguments.model))
    else:
        engine = RolloutEngine(SHAPES[arguments.family]("cuda" if torch.cuda.is_available() else "cpu"))
    defaults = engine.family.defaults
    size = (arguments.size or defaults.height, arguments.size or defaults.width)
    fresh = PromptSupply() if arguments.family is None else None
    found = {"exact": engine.exactness.enabled, "fused": engine.family.choices.fused}
    row = {"name": "start", "seconds": time.perf_counter() - began, **found, "size": list(size)}
    _add(report, arguments, row)
    return Subject(engine, size, arguments.steps, fresh, {})


def _add(report: Report, arguments: argparse.Namespace, row: dict[str, Any]) -> None:
    """Adds a row to the results, prints it, and writes what there is by now."""
    report.results.append(row)
    shown = {k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items() if not isinstance(v, list | dict)}
    print(shown, flush=True)
    report.write(arguments.out)


@dataclass(frozen=True)
class Bench:
    """The parts of the benchmark. ceiling in TFLOP/s; flops: of one guided evaluation, and of one picture."""

    report: Report
    arguments: argparse.Namespace
    subject: Subject
    budget: Budget
    ceiling: float
    flops: Mapping[str, int]

    def forwards(self, group: int, extra: Mapping[str, Callable[[], object]] | None = None) -> None:
        """Milliseconds of one guided prediction: as the engine runs it, as one CUDA graph, and by stock diffusers."""
        family, batch = self.subject.family, self.subject.batch(group)
        plain = self.subject.plain(group)
        latents = torch.randn(plain.latents_shape, device=family.device)
        timestep = torch.tensor(500.0, device=family.device)
        arms: dict[str, Callable[[], object]] = {
            "exact": partial(family.predict, batch),
            "eager diffusers": partial(plain.velocity, latents, timestep),
            **(extra or {}),
        }
        if family.device.type == "cuda":
            graphs = Computed(family.choices, CudaGraphs(max_tokens=10**9))
            arms["exact, one CUDA graph"] = within(partial(computing, family, graphs), arms["exact"])
        with torch.no_grad():
            series = alternate(arms, FORWARD_REPEATS, warmups=WARM_STEPS, budget=self.budget)
        for name, one in series.items():
            tflops = self.flops["guided_evaluation"] * group / one.median / 1e12
            row = {
                "group": group,
                "ms": one.median * 1e3,
                "tflops": tflops,
                "fraction_of_ceiling": tflops / self.ceiling,
            }
            self.add({"name": f"forward: {name}", **row, "min_ms": one.minimum * 1e3})
            self.report.ratios[f"forward_fraction_of_ceiling: {name}, group {group}"] = tflops / self.ceiling
            if name != "exact":
                self.report.ratios[f"forward: exact over {name}, group {group}"] = ratio(one, series["exact"])

    def rollouts(self, group: int, extra: Mapping[str, Arm] | None = None) -> None:
        """Whole rollouts, and the memory that each takes beyond the weights."""
        arms: dict[str, Arm] = {
            "exact": self.ours(group, **TRAJECTORY),
            "exact, latents": self.ours(group, **TRAJECTORY, output_type="latent"),
            "exact, everything kept": self.ours(group, **EVERYTHING),
            "exact, evaluation": self.ours(group, rollout=False, output_type="latent"),
            "eager diffusers": partial(self.theirs, group, True),
            "eager diffusers, latents": partial(self.theirs, group, False),
        }
        if extra is not None:
            arms = {name: arm for name, arm in arms.items() if name in ("exact", "exact, latents")} | dict(extra)
        memory = {name: self.peak_memory(arm) for name, arm in arms.items()}
        steps = self.subject.steps
        timed = {name: partial(arm, steps) for name, arm in arms.items()}
        series = alternate(timed, self.arguments.repeats, warmups=0, budget=self.budget)
        for name, one in series.items():
            row = one.row(
                group=group,
                images_per_s=group / one.median,
                image_steps_per_s=group * steps / one.median,
                peak_gb_over_weights=memory[name],
            )
            if "latents" in name:
                row["denoising_fraction_of_ceiling"] = (
                    self.flops["guided_evaluation"] * steps * group / one.median / 1e12 / self.ceiling
                )
            self.add(row)
        for name in series:
            if name not in ("exact", "exact, latents"):
                kind = "exact" + (", latents" if "latents" in name or "evaluation" in name else "")
                self.report.ratios[f"{kind} over {name}, group {group}"] = ratio(series[name], series[kind])

    def ours(self, group: int, **fields: Any) -> Arm:
        """Rollouts by the engine."""
        return lambda steps: run(self.subject.engine, {"one": self.subject.request(group, steps=steps, **fields)})

    def theirs(self, group: int, decode: bool, steps: int) -> object:
        """One rollout by the plain loop."""
        noise = device_noise(SEED, self.subject.family.device)
        return roll_out(self.subject.plain(group), steps=steps, noise_level=NOISE_LEVEL, noise=noise, decode=decode)

    def peak_memory(self, arm: Arm) -> float | None:
        """GB beyond what was allocated before, of one short call (which also warms up); None without a GPU."""
        arm(min(WARM_STEPS, self.subject.steps))
        if self.subject.family.device.type != "cuda":
            return None
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        arm(1)
        return (torch.cuda.max_memory_allocated() - before) / 1e9

    def decoding(self) -> None:
        """Milliseconds a picture, decoded alone and with others."""
        family, size = self.subject.family, self.subject.size
        latents = torch.randn(DECODED_TOGETHER, *family.latent_shape(*size), device=family.device)
        arms = {
            "alone": lambda: [family.pictures(latent[None], *size) for latent in latents],
            f"{DECODED_TOGETHER} together": lambda: family.pictures(latents, *size),
        }
        with torch.no_grad(), family.exact():
            series = alternate(arms, self.arguments.repeats, budget=self.budget)
        for name, one in series.items():
            seconds = one.median / DECODED_TOGETHER
            fraction = self.flops["picture"] / seconds / 1e12 / self.ceiling
            self.add({"name": f"decode: {name}", "ms_a_picture": seconds * 1e3, "fraction_of_ceiling": fraction})
            self.report.ratios[f"decode_fraction_of_ceiling: {name}"] = fraction

    def arrivals(self, count: int) -> None:
        """Single requests that arrive at random within half of the time that one group of them takes."""
        for size in range(1, count + 1):  # each of which a batch of arrivals has at some time
            self.ours(size, **TRAJECTORY)(WARM_STEPS)
        group = self.ours(count, **TRAJECTORY)
        window = seconds_of(lambda: group(self.subject.steps)) / 2
        draw = random.Random(SEED)
        arms: dict[str, Callable[[], object]] = {
            "one group": partial(group, self.subject.steps),
            "at random": lambda: self.arriving([draw.uniform(0, window) for _ in range(count)]),
        }
        series = alternate(arms, self.arguments.repeats, budget=self.budget)
        for name, one in series.items():
            self.add(
                one.row(group=count, images_per_s=count / one.median, window_s=window) | {"name": f"arrivals: {name}"}
            )
        self.report.ratios["throughput of arrivals at random over one group"] = ratio(
            series["one group"], series["at random"]
        )

    def arriving(self, moments: list[float]) -> None:
        """Runs a request of one sample for each moment (in seconds), which comes to the engine then: between two steps,
        or when it is idle. The first one's moment is when the call begins."""
        engine, began = self.subject.engine, time.perf_counter() - min(moments)
        coming = sorted(enumerate(moments), key=lambda item: -item[1])
        while coming or engine.has_unfinished_requests():
            while coming and time.perf_counter() - began >= coming[-1][1]:
                index, _ = coming.pop()
                engine.add_request(str(index), self.subject.request(1, seed=SEED + index, **TRAJECTORY))
            if not engine.has_unfinished_requests():
                time.sleep(max(began + coming[-1][1] - time.perf_counter(), 0))
                continue
            for finished in engine.step():
                if finished.error is not None:
                    raise finished.error

    def profile(self, group: int) -> None:
        """Where the GPU's time goes, by kernel class, and what share of the wall-clock time it computed at all."""
        works = {
            "denoising": (group, self.ours(group, **TRAJECTORY, output_type="latent")),
            "everything": (group, self.ours(group, **EVERYTHING)),
            "one sample": (1, self.ours(1, **EVERYTHING)),
        }
        for name, (samples, arm) in works.items():
            arm(WARM_STEPS)
            found = account_of(partial(arm, self.subject.steps))
            self.add({"name": f"profile: {name}", "group": samples, **found})
            for gap in found["longest_waits"][:5]:
                print("  waited", gap, flush=True)
            print("  ms by class:", found["ms_by_class"], flush=True)

    def compiled(self, kind: str, group: int) -> None:
        """Rollouts and forwards by diffusers' transformer compiled block by block, or by our compiled one."""
        began = time.perf_counter()
        if kind == "blocks":
            plain, family = self.subject.plain(group), self.subject.family
            compiled = compiled_blocks(plain.transformer)
            latents = torch.randn(plain.latents_shape, device=family.device)
            forward = within(compiled, partial(plain.velocity, latents, torch.tensor(500.0, device=family.device)))
            arms: dict[str, Arm] = {
                "compiled diffusers": partial(self._compiled_call, compiled, group, True),
                "compiled diffusers, latents": partial(self._compiled_call, compiled, group, False),
            }
        else:
            how = our_compiled(self.subject.engine, self.arguments.compiled_rows)
            if how is None:
                return self.add({"name": "compiled, ours", "group": group, "certified": False})
            inside = partial(computing, self.subject.family, how)
            forward = within(inside, partial(self.subject.family.predict, self.subject.batch(group)))
            ours = self.ours(group, **TRAJECTORY, output_type="latent")
            arms = {"our compiled, latents": lambda steps: within(inside, partial(ours, steps))()}
        name = next(iter(arms)).split(",")[0]
        with torch.no_grad():
            forward()
        self.add({"name": f"compiling, {kind}", "group": group, "seconds": time.perf_counter() - began})
        self.forwards(group, {name: forward})
        self.rollouts(group, arms)
        return None

    def _compiled_call(self, compiled: Callable[[], Any], group: int, decode: bool, steps: int) -> object:
        with compiled():
            return self.theirs(group, decode, steps)

    def add(self, row: dict[str, Any]) -> None:
        _add(self.report, self.arguments, row)


def within(context: Callable[[], Any], work: Callable[[], object]) -> Callable[[], object]:
    """The same work, inside that context."""

    def run_inside() -> object:
        with context():
            return work()

    return run_inside


def our_compiled(engine: RolloutEngine, rows: int) -> Computed | None:
    """How our compiled forward computes, if it is certified; the family is left as it was."""
    family = engine.family
    before = Computed(family.choices, family.runner)
    with computing(family, before):
        compile_family(family, engine.exactness, rows=rows, wanted="auto")
        return Computed(family.choices, family.runner) if isinstance(family.runner, CompiledForward) else None


if __name__ == "__main__":
    raise SystemExit(main())
