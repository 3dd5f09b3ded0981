"""How fast do new weights come to an engine of several ranks, by broadcast and mapped, and how fast do all ranks sleep?

    python -m benchmarks.bench_rank_refit --shapes sd3.5-medium,qwen-image --layout sp2 --trainers 1,2

Each trainer's rank is a process with its share of the weights, on a GPU of its own behind the engine's (random weights,
public configuration); every engine rank gets all of them. Each refit is a session with an undo copy, verified at its
end by every rank against the trainers' digests. Arms: `broadcast` sends flattened buckets, a call each, over a group
for each trainer (`--trainers` says how many there are), `packed` all in one call a trainer, through buffers of a
bucket's size; `mapped` has every rank map one trainer's buffer on rank 0's device, `mapped
each` one on its own device; `sleep` releases and resumes all ranks' memory, with a backup and without. The link's rate
is that of a broadcast of one large buffer to as many ranks, in the same run. What fails leaves its error in the report.
A broadcast arm's update calls are broken down as `refit_breakdown` says.
`--device cpu` with a `tiny` shape is for trying it.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from benchmarks import measure
from benchmarks.bench_gpu_ranks import attempted, noted, parallel_of
from benchmarks.full_size import SHAPES, load
from benchmarks.link_rates import link_rates
from benchmarks.refit_breakdown import HOST, Breakdown
from diffusion_rl.config import EngineConfig
from diffusion_rl.parallel.layout import Layout, device_of, layout_of
from diffusion_rl.rollout.engine import RolloutEngine
from diffusion_rl.rollout.startup import start_ranks
from engine_control.child import start_child
from engine_control.config import ControlConfig, engine_environment
from engine_control.step_loop import StepLoop
from engine_control.wire import receive_message, send_message

TRAINER = "benchmarks.rank_refit_sender"
FOLLOWER = "benchmarks.full_size_follower"
QUESTION = "How far is a refit of an engine of several ranks from the link between trainer and ranks?"
LIMIT = (
    "By broadcast every byte comes over the link once, at the rate of one large buffer's broadcast in this run "
    "(`of_link`); behind it each rank writes it twice, the old one into the undo copy and the new one over it, and "
    "reads it once more to verify."
)
ARMS = ("broadcast", "packed", "mapped", "mapped each", "sleep")
WAIT_S = 300.0

Parts = dict[str, float]


class TrainerRank:
    """The benchmark's end of a trainer's process."""

    def __init__(self, names: list[list[Any]], device: str, receivers: int) -> None:
        self.process, self._connection = start_child(TRAINER, engine_environment())
        self._connection.settimeout(WAIT_S)
        send_message(self._connection, {"names": names, "device": device, "receivers": receivers})
        self.answer()

    def tell(self, do: str, **fields: Any) -> None:
        send_message(self._connection, {"do": do, **fields})

    def answer(self) -> Any:
        """
        Raises:
            RuntimeError: it could not do what it was told.
        """
        found = receive_message(self._connection)
        if "error" in found:
            raise RuntimeError(f"the trainer: {found['error']}")
        return found

    def ask(self, do: str, **fields: Any) -> Any:
        self.tell(do, **fields)
        return self.answer()

    def close(self) -> None:
        self._connection.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Engine:
    """An engine of several ranks without requests, and its control layer."""

    def __init__(self, shape: str, arguments: Any) -> None:
        parallel = parallel_of(arguments.layout, share_device=arguments.share_device)
        control = ControlConfig(enable_memory_saver=True)
        config = EngineConfig(
            shape, device=arguments.device, parallel=parallel, deterministic="off", cuda_graphs=False, control=control
        )
        self.layout = layout_of(parallel)
        family, exactness, ranks = start_ranks(config, load=load, follower=FOLLOWER)
        self._engine = RolloutEngine(family, config, exactness=exactness, ranks=ranks)
        self._loop = StepLoop(self._engine)
        self._engine.controlled_by(self._loop)
        weights = family.transformer.state_dict()
        self.bytes = sum(t.nbytes for t in weights.values())
        self.names = [[n, list(t.shape), str(t.dtype).removeprefix("torch.")] for n, t in weights.items()]
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def call(self, name: str, **arguments: Any) -> Any:
        answer = self._loop.call(name, arguments)
        self._loop.run_until_idle()
        return answer.result()

    def session(self, updates: Callable[[], None], manifest: dict[str, Any]) -> Parts:
        """One verified refit, and the seconds of its parts. A failure leaves no session open."""
        at = [measure.now()]
        self.call("begin_weight_update")
        try:
            at.append(measure.now())
            updates()
            at.append(measure.now())
        except BaseException:
            self.call("abort_weight_update")
            raise
        self.call("end_weight_update", manifest=manifest, flush_cache=False)
        at.append(measure.now())
        parts = {f"{name}_s": at[i + 1] - at[i] for i, name in enumerate(("begun", "applied", "verified"))}
        return {**parts, "total_s": at[-1] - at[0]}

    def breakdown(self, group_name: str) -> Breakdown:
        return Breakdown(self._engine._rank, group_name)

    def close(self) -> None:
        self._engine.close()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; exits with 1 if a part failed."""
    parser = options()
    arguments = parser.parse_args(argv)
    unknown = set(arguments.arms.split(",")) - set(ARMS)
    if unknown:
        parser.error(f"no such arms: {', '.join(sorted(unknown))}; there are {', '.join(ARMS)}")
    if arguments.device == "cuda":
        arguments.device = "cuda:0"
    report = measure.Report("rank_refit", QUESTION, measure.settings_of(arguments), limit=LIMIT)
    budget = measure.Budget(arguments.budget_s)
    ranks = layout_of(parallel_of(arguments.layout, share_device=arguments.share_device)).ranks
    link: dict[str, Any] = {}
    if {"broadcast", "packed"} & set(arguments.arms.split(",")):
        link = attempted(lambda: link_of(ranks, arguments))
        noted(report, arguments, {"case": f"link, a trainer and {ranks} ranks", **link})
    for shape in arguments.shapes.split(","):
        failed = attempted(lambda shape=shape: measure_shape(shape, link, budget, report, arguments))
        if "error" in failed:
            noted(report, arguments, {"case": shape, **failed})
    rows = [[r["case"], r["total_ms"], r["bytes_per_s"] / 1e9] for r in report.results if "total_ms" in r]
    measure.print_table("Refits and sleep of all ranks", ["case", "ms", "GB/s"], rows)
    columns = [*HOST, "written", "sender_waiting", "sender_host"]
    rows = [[r["case"], *(r.get(f"{name}_ms", "") for name in columns)] for r in report.results if "first_ms" in r]
    if rows:
        measure.print_table("Milliseconds of the update calls, by what rank 0 did", ["case", *columns], rows)
    wrong = [f"{r['case']}: {r['error']}" for r in report.results if "error" in r]
    for one in wrong:
        print(f"WRONG: {one}")
    return 1 if wrong else 0


def options() -> Any:
    parser = measure.command_line("rank_refit", __doc__ or "", repeats=5)
    parser.add_argument("--shapes", default="sd3.5-medium", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--layout", default="sp2", help="of the engine, such as sp1, sp4, sp2cfg2")
    parser.add_argument("--trainers", type=measure.integers, default=[1], help="how many send, such as 1,2")
    parser.add_argument("--arms", default=",".join(ARMS), help="which to measure")
    parser.add_argument("--bucket-mib", type=int, default=1024, help="of a flattened bucket or a packed buffer")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to try it")
    parser.add_argument("--share-device", action="store_true", help="all engine ranks on one GPU")
    parser.add_argument("--budget-s", type=float, default=540.0, help="no arm is begun after so many seconds")
    return parser


def link_of(ranks: int, arguments: Any) -> dict[str, Any]:
    found = link_rates(ranks + 1, arguments.device, arguments.bucket_mib << 20)
    return {f"{name}_bytes_per_s": rate for name, rate in found.items()}


def measure_shape(
    shape: str, link: dict[str, Any], budget: measure.Budget, report: measure.Report, arguments: Any
) -> None:
    """A row for each arm, of one engine."""
    engine = Engine(shape, arguments)
    arms: dict[str, Callable[[], dict[str, Any]]] = {}
    for name in arguments.arms.split(","):
        match name:
            case "broadcast" | "packed":
                for count in arguments.trainers:
                    arms[f"{name}, {count} to {engine.layout.ranks}"] = partial(
                        broadcast, engine, count, arguments, packed=name == "packed"
                    )
            case "mapped":
                arms["mapped, 1 buffer"] = lambda: mapped(engine, arguments, each=False)
            case "mapped each":
                arms[f"mapped, {engine.layout.ranks} buffers"] = lambda: mapped(engine, arguments, each=True)
            case "sleep":
                for backup in (True, False):
                    text = "with" if backup else "without"
                    arms[f"sleep and wake, {text} a backup"] = lambda backup=backup: slept(engine, arguments, backup)
    try:
        for name, work in arms.items():
            title = f"{shape}: {name}"
            if not budget.allows(0):
                noted(report, arguments, {"case": title, "left_out": "the budget is spent"})
                continue
            row = attempted(work)
            if "error" not in row:
                rate = engine.bytes / (row.get("applied_ms", row.get("resumed_ms")) / 1e3)
                row |= {"bytes": engine.bytes, "bytes_per_s": rate}
                report.ratios[f"{title}: ms"] = row["total_ms"]
                if name.startswith(("broadcast", "packed")) and "broadcast_bytes_per_s" in link:
                    row["of_link"] = report.ratios[f"{title}: of the link"] = rate / link["broadcast_bytes_per_s"]
            noted(report, arguments, {"case": title, **row})
    finally:
        engine.close()


def broadcast(engine: Engine, count: int, arguments: Any, *, packed: bool) -> dict[str, Any]:
    """`count` trainers, each with its share of the weights and a group with all engine ranks; their calls come in
    turn."""
    ranks = engine.layout.ranks
    behind = 1 if arguments.share_device else ranks  # devices of the engine, behind which the trainers' are
    trainers: list[TrainerRank] = []
    groups: list[str] = []
    try:
        for index in range(count):
            device = device_of(behind + index, arguments.device, Layout(behind + count, 1), share_device=False)
            trainers.append(TrainerRank(engine.names[index::count], device, 1))
        whole = manifest(trainers)
        opened = []
        for index, trainer in enumerate(trainers):
            group, size = f"trainer-{index}", arguments.bucket_mib << 20
            opened.append(trainer.ask("open", world_size=1 + ranks, group=group, bucket_bytes=size, packed=packed))
            trainer.tell("join")
            engine.call("init_weight_transfer", transport="distributed", info=opened[-1]["init"])
            groups.append(group)
            trainer.answer()

        watched = [engine.breakdown(group) for group in groups]

        def once() -> Parts:
            parts: Counter[str] = Counter()

            def updates() -> None:
                for index in range(max(len(one["buckets"]) for one in opened)):
                    for trainer, one, breakdown in zip(trainers, opened, watched, strict=True):
                        if index < len(one["buckets"]):
                            trainer.tell("send", bucket=index)
                            bucket = one["buckets"][index]
                            parts.update(breakdown.watch(lambda bucket=bucket: take(engine, "distributed", bucket)))
                            parts.update(trainer.answer())

            return {**engine.session(updates, whole), **parts}

        row = rounds(once, arguments.repeats)
        return {**row, "calls": sum(len(one["buckets"]) for one in opened)}
    finally:
        for group in groups:
            engine.call("shutdown_weight_transfer", transport="distributed", info={"group_name": group})
        for trainer in trainers:
            trainer.close()


def mapped(engine: Engine, arguments: Any, *, each: bool) -> dict[str, Any]:
    """All ranks map one trainer's buffer on rank 0's device; or each that of a trainer on its own."""
    ranks = engine.layout.ranks
    trainers: list[TrainerRank] = []
    try:
        for rank in range(ranks if each else 1):
            device = device_of(rank, arguments.device, engine.layout, share_device=arguments.share_device)
            receivers = rank + 1 if each else ranks  # a rank takes the export of its own number
            trainers.append(TrainerRank(engine.names, device, receivers))
        infos = [trainer.ask("mapped") for trainer in trainers]
        info = {"per_rank": infos} if each else infos[0]
        whole = trainers[0].ask("manifest")["manifest"]
        return rounds(lambda: engine.session(lambda: take(engine, "ipc", info), whole), arguments.repeats)
    finally:
        attempted(lambda: engine.call("shutdown_weight_transfer", transport="ipc", info={}))
        for trainer in trainers:
            trainer.close()


def slept(engine: Engine, arguments: Any, backup: bool) -> dict[str, Any]:
    """All ranks' memory goes and comes."""

    def once() -> Parts:
        at = [measure.now()]
        engine.call("release_memory_occupation", backup=backup)
        at.append(measure.now())
        engine.call("resume_memory_occupation")
        at.append(measure.now())
        return {"released_s": at[1] - at[0], "resumed_s": at[2] - at[1], "total_s": at[2] - at[0]}

    return rounds(once, arguments.repeats)


def take(engine: Engine, transport: str, info: dict[str, Any]) -> None:
    engine.call("update_weights", transport=transport, info=info, flush_cache=False)


def manifest(trainers: list[TrainerRank]) -> dict[str, Any]:
    """Of all trainers' tensors."""
    whole: dict[str, Any] = {}
    for trainer in trainers:
        for module, entries in trainer.ask("manifest")["manifest"].items():
            whole.setdefault(module, {}).update(entries)
    return whole


def rounds(work: Callable[[], Parts], repeats: int) -> dict[str, Any]:
    """Median milliseconds of each part; one round more goes before, which allocates what is kept."""
    work()
    found = [work() for _ in range(repeats)]
    return {name.replace("_s", "_ms"): 1e3 * sorted(one[name] for one in found)[len(found) // 2] for name in found[0]}


if __name__ == "__main__":
    sys.exit(main())
