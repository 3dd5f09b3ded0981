"""How long does a refit of a whole transformer take, and a wake-up with one, against copies of as many bytes?

    python -m benchmarks.bench_refit --shapes sd3.5-medium,qwen-image
    python -m benchmarks.bench_refit

The first is for a GPU (full-size shapes, random weights); on a CPU it is the embedded model. Another process on the
same device holds the new weights. Each refit is a session with an undo copy on the device, verified at the end by the
device's digest. Arms: `flat` reads them where the sender has them in one buffer, mapped once; `handles` by a handle for
each tensor (GPU); `packed` out of a double buffer that the sender fills meanwhile; `direct` out of this process's
memory; `disk` from a checkpoint in the page cache; `wake` resumes memory that was released without a backup, and
refits; `flat_torch` is `flat` without the engine's own kernels (GPU). Beside them stand the digest alone, with and
without kernels, and what the host alone takes for a tensor, of small ones. Ceilings are measured in the same run: a
copy's rate, and that of a sum, which reads memory once.
"""

from __future__ import annotations

import gc
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks import measure
from benchmarks.full_size import SHAPES
from diffusion_rl.config import EngineConfig
from diffusion_rl.models import ModelFamily, load_family
from diffusion_rl.rollout.engine import RolloutEngine
from engine_control.checksum import device_digests
from engine_control.child import start_child
from engine_control.config import ControlConfig, engine_environment
from engine_control.memory.base import mechanisms
from engine_control.memory.saver import MemorySaver
from engine_control.rank import RankCommand, RankControl
from engine_control.refit.backends.direct import direct_info
from engine_control.refit.manifest import manifest_of
from engine_control.refit.target import ModuleTarget
from engine_control.step_loop import StepLoop
from engine_control.weight_kernels import WeightKernels
from engine_control.wire import receive_message, send_message
from rl_kernels.weights import weight_kernels

SENDER = "benchmarks.refit_sender"
CEILING_BYTES = 1 << 30
SMALL_TENSORS, SMALL_BYTES = 2000, 4096
PLAIN_READ_BYTES = 8 << 20  # at a time
LIMIT = (
    "In place every byte is read and written twice, the old ones into the undo copy and the new ones over them: the "
    "limit is the time of two copies (`fraction_of_copies`). Verification reads them once more. From disk the link to "
    "the device, or memory, is the limit."
)


class Rig:
    """One engine without requests, its control layer, and a sender in another process."""

    def __init__(self, shape: str, device: str, folder: Path, *, half_bytes: int) -> None:
        self.family: ModelFamily = SHAPES[shape](device) if shape in SHAPES else load_family(shape, device=device)
        control = ControlConfig(enable_memory_saver=True)
        config = EngineConfig(shape, device=device, deterministic="off", cuda_graphs=False, control=control)
        self.engine = RolloutEngine(self.family, config)
        self.loop = StepLoop(self.engine)
        self.engine.controlled_by(self.loop)
        self.device, self.folder, self._half_bytes = torch.device(device), folder, half_bytes
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # what loading left there; the sender needs room
        weights = self.family.transformer.state_dict()
        self.bytes, self.tensors = sum(t.nbytes for t in weights.values()), len(weights)
        self.process, self.sender = start_child(SENDER, engine_environment())
        names = [[n, list(t.shape), str(t.dtype).removeprefix("torch.")] for n, t in weights.items()]
        self.ask("hold", names=names, device=device)
        self.manifest = self.ask("manifest")["manifest"]

    def ask(self, do: str, **fields: Any) -> Any:
        send_message(self.sender, {"do": do, **fields})
        return receive_message(self.sender)

    def call(self, name: str, **arguments: Any) -> Any:
        answer = self.loop.call(name, arguments)
        self.loop.run_until_idle()
        return answer.result()

    def session(self, updates: Callable[[], Iterator[tuple[str, dict[str, Any]]]], *, verify: bool) -> dict[str, float]:
        """One refit, and the seconds of its parts. The undo copy is made while updates are applied."""
        at = [time.perf_counter()]
        begun = self.call("begin_weight_update")
        undo = begun["undo"]
        at.append(self.now())
        for transport, info in updates():
            undo = self.call("update_weights", transport=transport, info=info, flush_cache=False)["undo"]
        at.append(self.now())
        self.call("end_weight_update", manifest=self.manifest if verify else None, flush_cache=False)
        at.append(self.now())
        self.undo = undo
        parts = {f"{name}_s": at[i + 1] - at[i] for i, name in enumerate(("begun", "applied", "verified"))}
        return {**parts, "total_s": at[-1] - at[0]}

    def now(self) -> float:
        measure.synchronise()
        return time.perf_counter()

    def flat(self) -> Iterator[tuple[str, dict[str, Any]]]:
        yield "ipc", self.ask("flat")

    def handles(self) -> Iterator[tuple[str, dict[str, Any]]]:
        yield "ipc", self.ask("handles")

    def packed(self) -> Iterator[tuple[str, dict[str, Any]]]:
        info = self.ask("pack", half_bytes=self._half_bytes)["info"]
        while info is not None:
            yield "ipc", info
            info = self.ask("next")["info"]

    def direct(self, weights: dict[str, torch.Tensor]) -> Iterator[tuple[str, dict[str, Any]]]:
        yield "direct", direct_info(weights.items(), "transformer")

    def disk(self) -> Iterator[tuple[str, dict[str, Any]]]:
        yield "disk", {"model_path": str(self.folder / "transformer")}

    def close(self) -> None:
        self.engine.close()
        self.sender.close()
        self.process.wait(30)


def main(argv: list[str] | None = None) -> int:
    parser = measure.command_line("refit", __doc__ or "", repeats=5)
    parser.add_argument("--shapes", help=f"of {', '.join(SHAPES)}, or a model; by default the embedded model")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--arms", default="flat,flat_torch,handles,packed,direct,disk,wake", help="which to time")
    parser.add_argument("--half-bytes", type=int, default=1 << 30, help="of each half of the double buffer")
    arguments = parser.parse_args(argv)
    report = measure.Report(
        "refit",
        "How far is a refit of all weights from the copies that it can't do without?",
        measure.settings_of(arguments),
        limit=LIMIT,
    )
    ceilings = measured_ceilings(arguments.device)
    report.results.append({"case": "ceilings", **ceilings})
    device = f"{arguments.device}:0" if arguments.device == "cuda" else arguments.device
    report.results.append({"case": "host", **host_time(torch.device(device), arguments.repeats)})
    print(report.results[-1], flush=True)
    for shape in (arguments.shapes or "embedded").split(","):
        with rig(shape, device, half_bytes=arguments.half_bytes) as found:
            for arm in arguments.arms.split(","):
                if arm in ("handles", "flat_torch") and found.device.type != "cuda":
                    continue
                row = timed(found, arm, arguments.repeats, ceilings["copy_bytes_per_s"])
                if arm == "disk":
                    row |= reading(found, row["applied_ms"], arguments.repeats, ceilings)
                report.results.append({"case": f"{shape}: {arm}", **row})
                print(report.results[-1], flush=True)
                report.ratios[f"{shape}_{arm}_fraction_of_copies"] = row["fraction_of_copies"]
                report.write(arguments.out)
            digest = digest_time(found, arguments.repeats, ceilings["sum_bytes_per_s"])
            report.results.append({"case": f"{shape}: digest", **digest})
            print(report.results[-1], flush=True)
    rows = [[r["case"], r["total_ms"], r["fraction_of_copies"]] for r in report.results if "total_ms" in r]
    measure.print_table("refits of whole transformers", ["case", "ms", "of two copies' rate"], rows)
    report.write(arguments.out)
    return 0


@contextmanager
def rig(shape: str, device: str, *, half_bytes: int) -> Iterator[Rig]:
    with tempfile.TemporaryDirectory() as folder:
        made = Rig(shape, device, Path(folder), half_bytes=half_bytes)
        try:
            yield made
        finally:
            made.close()
            del made
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


def timed(found: Rig, arm: str, repeats: int, copy_rate: float) -> dict[str, Any]:
    """Medians of an arm's parts; one round more goes before, which allocates what is kept."""
    work = arms(found)[arm]
    work()
    gc.collect()
    gc.freeze()  # or a collection of all that is loaded falls into some round
    try:
        rounds = [work() for _ in range(repeats)]
    finally:
        gc.unfreeze()
    parts = {name.replace("_s", "_ms"): 1e3 * sorted(r[name] for r in rounds)[len(rounds) // 2] for name in rounds[0]}
    limit = 2 * found.bytes / copy_rate
    return {
        "bytes": found.bytes,
        "tensors": found.tensors,
        "undo": found.undo,
        **parts,
        "two_copies_ms": 1e3 * limit,
        "fraction_of_copies": 1e3 * limit / parts["total_ms"],
    }


def reading(found: Rig, applied_ms: float, repeats: int, ceilings: dict[str, float]) -> dict[str, float]:
    """Bytes a second that an update from disk applies, beside those of one thread that only reads the same files, and
    of the link if the device has one."""
    files = sorted((found.folder / "transformer").glob("*.safetensors"))
    piece = memoryview(bytearray(PLAIN_READ_BYTES))

    def read() -> None:
        for path in files:
            with open(path, "rb", buffering=0) as file:
                while file.readinto(piece):
                    pass

    seconds = measure.alternate({"read": read}, repeats, warmups=1)["read"].median
    applied, plain = 1e3 * found.bytes / applied_ms, sum(path.stat().st_size for path in files) / seconds
    row = {"applied_bytes_per_s": applied, "plain_read_bytes_per_s": plain, "fraction_of_plain_read": applied / plain}
    link = ceilings.get("host_to_device_bytes_per_s")
    return row if link is None else {**row, "fraction_of_link": applied / link}


def arms(found: Rig) -> dict[str, Callable[[], dict[str, float]]]:
    def direct() -> dict[str, float]:
        own = {name: tensor.clone() for name, tensor in found.family.transformer.state_dict().items()}
        return found.session(lambda: found.direct(own), verify=False)

    def disk() -> dict[str, float]:
        if not (found.folder / "transformer").exists():
            found.family.transformer.save_pretrained(found.folder / "transformer", max_shard_size="5GB")
        return found.session(found.disk, verify=False)

    def flat_torch() -> dict[str, float]:
        weights = found.engine.weights
        kernels, weights.weight_kernels = weights.weight_kernels, None
        try:
            return found.session(found.flat, verify=True)
        finally:
            weights.weight_kernels = kernels

    def wake() -> dict[str, float]:
        found.call("release_memory_occupation", backup=False)
        began = found.now()
        found.call("resume_memory_occupation")
        resumed = found.now() - began
        parts = found.session(found.flat, verify=True)
        return {"resumed_s": resumed, **parts, "total_s": resumed + parts["total_s"]}

    return {
        "flat": lambda: found.session(found.flat, verify=True),
        "flat_torch": flat_torch,
        "handles": lambda: found.session(found.handles, verify=True),
        "packed": lambda: found.session(found.packed, verify=True),
        "direct": direct,
        "disk": disk,
        "wake": wake,
    }


def digest_time(found: Rig, repeats: int, sum_rate: float) -> dict[str, Any]:
    """Milliseconds of the digests of all weights as they lie, and how near that is to reading them once."""
    weights = list(found.family.transformer.state_dict().items())
    kernels = found.engine.weights.weight_kernels
    arms: dict[str, Callable[[], object]] = {"torch": lambda: device_digests(weights)}
    if kernels is not None:
        assert device_digests(weights) == device_digests(weights, kernels)
        arms["kernels"] = lambda: device_digests(weights, kernels)
    limit = found.bytes / sum_rate
    row: dict[str, Any] = {"bytes": found.bytes, "tensors": found.tensors, "sum_ms": 1e3 * limit}
    for name, taken in measure.alternate(arms, repeats).items():
        row |= {f"{name}_ms": 1e3 * taken.median, f"{name}_fraction_of_sum": limit / taken.median}
    return row


class SmallTensors:
    """A rank's engine of many weights that are nothing to copy: what a refit of them takes is the host's time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.weight_kernels: WeightKernels | None = weight_kernels(device)
        self.memory = MemorySaver(mechanisms.get("host")(device), pinned=False)
        weights = torch.zeros(SMALL_TENSORS, SMALL_BYTES // 2, dtype=torch.bfloat16, device=device)
        self.module = torch.nn.ParameterList(torch.nn.Parameter(w, requires_grad=False) for w in weights)
        self.target = ModuleTarget({"transformer": self.module})

    def flush_caches(self, modules: Any) -> None:
        """There are none."""

    def drop_graphs(self) -> None:
        """There are none."""

    def synchronize(self) -> None:
        measure.synchronise()


def host_time(device: torch.device, repeats: int) -> dict[str, Any]:
    """Microseconds a tensor of each part of a refit of `SmallTensors`, out of this process's memory; medians."""
    engine = SmallTensors(device)
    rank = RankControl(engine)
    new = {name: torch.ones_like(tensor) for name, tensor in engine.module.state_dict().items()}
    manifest = manifest_of(("transformer", name, tensor) for name, tensor in new.items())
    begin = {"modules": ["transformer"], "partial": False, "staged": False, "undo": True}
    info = direct_info(new.items())
    parts: dict[str, dict[str, Any]] = {
        "begin": begin,
        "update": {"transport": "direct", "info": info},
        "verify": {"manifest": manifest},
        "commit": {"flush": True},
    }
    seconds: dict[str, list[float]] = {name: [] for name in parts}
    for _ in range(1 + repeats):
        for name, arguments in parts.items():
            began = time.perf_counter()
            outcome = rank.carry_out(RankCommand(name, arguments))
            measure.synchronise()
            seconds[name].append(time.perf_counter() - began)
            assert outcome.error is None, outcome.error
    medians = {f"{name}_us": 1e6 * sorted(s[1:])[repeats // 2] / SMALL_TENSORS for name, s in seconds.items()}
    return {"tensors": SMALL_TENSORS, "bytes_each": SMALL_BYTES, **medians, "total_us": sum(medians.values())}


def measured_ceilings(device: str) -> dict[str, float]:
    """Bytes a second of a copy on the device (each byte counted once), of a sum of int64, and over the link, pinned."""
    source, target = (torch.empty(CEILING_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
    arms: dict[str, Callable[[], object]] = {
        "copy": lambda: target.copy_(source),
        "sum": lambda: source.view(torch.int64).sum(),
    }
    if device == "cuda":
        host = torch.empty(CEILING_BYTES, dtype=torch.uint8, pin_memory=True)
        arms |= {"host_to_device": lambda: target.copy_(host), "device_to_host": lambda: host.copy_(source)}
    series = measure.alternate(arms, 10, warmups=2)
    return {f"{name}_bytes_per_s": CEILING_BYTES / taken.median for name, taken in series.items()}


if __name__ == "__main__":
    sys.exit(main())
