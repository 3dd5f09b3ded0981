"""Does a faulty refit ever go unnoticed? Seeded faults, by the thousand, through a real service.

    python -m benchmarks.refit_campaign --refits 1000

Each round sends one refit of the embedded model with one fault (or none), and then looks at what the engine has: the
checksum of its weights, the output of a probe request, the version and the history. After a good round they must be
those of the new weights; after a faulty one those of the old weights, and the fault must have been refused. The probe's
output is compared bit for bit with that of a fresh process that loaded the same weights from disk. At the end the same
faults are sent as a foreign trainer would, without a manifest and a session id; what goes unnoticed then is listed.
Last, the engine sleeps and wakes, with a backup and without, between refits: the same checks, and nothing may grow.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch

from benchmarks import measure
from benchmarks.refit_faults import CHANGES, Bucket, Weights, buckets_of, reorder
from benchmarks.served import resident_bytes
from diffusion_rl.assets import embedded_model_path
from diffusion_rl.cli.service_process import ServiceProcess, running_service
from diffusion_rl.client import RolloutClient
from diffusion_rl.config import EngineConfig
from diffusion_rl.pipeline import RolloutPipeline
from diffusion_rl.sample import RolloutSample
from engine_control.checksum import module_sha256
from engine_control.client import RAW_TYPE, checked
from engine_control.errors import EngineError, EngineUnavailableError
from engine_control.refit.manifest import manifest_of
from engine_control.refit.payload.safetensors_format import file_bytes

VERSIONS = 5
SESSION_TIMEOUT_S = 1.5
RESTART_TIMEOUT_S = 120.0
GROWTH = {"resident_bytes": 16 * 2**20, "file_descriptors": 0, "dev_shm_files": 0}
WARM_CYCLES = 10  # of which allocators keep something
PROBE: dict[str, Any] = {
    "seed": 11,
    "num_inference_steps": 2,
    "num_outputs_per_prompt": 1,
    "guidance_scale": 1.0,
    "output_type": "both",
}
PROMPT = "a red circle"
LIMIT = "Undetected corruptions of our own client: 0. Those of foreign clients are what their protocol can't show."


@dataclass
class Known:
    """The weights of each version, their checksum, and the probe's output by a fresh process that loaded them."""

    weights: list[Weights]
    sums: list[str]
    outputs: list[torch.Tensor]
    latents: list[torch.Tensor]


@dataclass
class Campaign:
    """One service, and what it must hold now."""

    client: RolloutClient
    http: httpx.Client
    service: ServiceProcess
    known: Known
    choose: random.Random
    current: int = 0
    committed: int = 0
    history: list[int] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    undetected: list[dict[str, Any]] = field(default_factory=list)


def main(argv: list[str] | None = None) -> int:
    parser = measure.command_line("refit_campaign", __doc__ or "", repeats=1)
    parser.add_argument("--refits", type=int, default=1000, help="rounds, each of one refit")
    parser.add_argument("--foreign", type=int, default=60, help="rounds without manifest and session id")
    parser.add_argument("--cycles", type=int, default=1000, help="sleeps and wakes, interleaved with refits")
    parser.add_argument("--kill-every", type=int, default=100, help="rounds between two deaths of the engine process")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    report = measure.Report(
        "refit_campaign",
        "Does a faulty refit ever go unnoticed?",
        measure.settings_of(arguments),
        limit=LIMIT,
    )
    choose = random.Random(arguments.seed)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        known = versions(arguments.model, Path(folder))
        with campaign(arguments.model, known, choose, Path(folder)) as run:
            before = resources(run)
            own = rounds(run, arguments.refits, FAULTS, kill_every=arguments.kill_every)
            after = resources(run)
            foreign = foreign_rounds(run, arguments.foreign)
            slept = sleeps(run, arguments.cycles)
    seconds = time.monotonic() - began
    report.results = [
        {"case": "our client", "refits": arguments.refits, **own, "before": before, "after": after},
        {"case": "a foreign client", "refits": arguments.foreign, **foreign},
        {"case": "sleep and wake", "cycles": arguments.cycles, **slept},
    ]
    report.ratios = {
        "undetected_of_ours": len(own["undetected"]),
        "undetected_of_foreign": len(foreign["undetected"]),
        "wrong_after_sleep": len(slept["wrong"]),
        "resident_growth_bytes": slept["growth"]["resident_bytes"],
        "seconds_a_refit": seconds / (arguments.refits + arguments.foreign),
    }
    rows = [[fault, count] for fault, count in sorted(own["faults"].items())]
    measure.print_table("rounds by fault, our client", ["fault", "rounds"], rows)
    print(f"undetected: {own['undetected']}; of a foreign client: {Counter(u['fault'] for u in foreign['undetected'])}")
    report.write(arguments.out)
    print(f"after {arguments.cycles} sleeps: wrong {slept['wrong']}, growth {slept['growth']}")
    grew = any(slept["growth"][name] > most for name, most in GROWTH.items())
    return 1 if own["undetected"] or slept["wrong"] or grew else 0


def versions(model: str, folder: Path) -> Known:
    """Version 0 is the model's own. Each is saved to disk, and rolled out by a pipeline that loads it anew."""
    torch.manual_seed(0)
    with RolloutPipeline.from_pretrained(model, device="cpu") as base:
        first = {name: tensor.clone() for name, tensor in base.transformer.state_dict().items()}
        known = Known([first], [], [], [])
        while len(known.weights) < VERSIONS:
            known.weights.append({name: t + 0.01 * t.std() * torch.randn_like(t) for name, t in first.items()})
        for number, weights in enumerate(known.weights):
            base.transformer.load_state_dict(weights)
            place = folder / f"version-{number}"
            shutil.copytree(embedded_model_path() if model == "embedded" else model, place)
            base.transformer.save_pretrained(place / "transformer")
            with RolloutPipeline.from_config(EngineConfig(str(place), device="cpu")) as fresh:
                [sample] = fresh(PROMPT, **PROBE)
            known.sums.append(module_sha256(weights))
            known.outputs.append(_picture(sample))
            known.latents.append(_latents(sample))
    return known


@contextmanager
def campaign(model: str, known: Known, choose: random.Random, folder: Path) -> Iterator[Campaign]:
    arguments = [
        "--enable-memory-saver",
        "--weight-session-timeout",
        str(SESSION_TIMEOUT_S),
        "--implicit-weight-sessions",
    ]
    with running_service(model, port=0, log=folder / "service.log", arguments=arguments) as service:
        service.wait_ready()
        with RolloutClient(service.url, timeout=120) as client, httpx.Client(base_url=service.url, timeout=120) as http:
            yield Campaign(client, http, service, known, choose)


def rounds(run: Campaign, count: int, faults: dict[str, Callable[..., bool]], *, kill_every: int) -> dict[str, Any]:
    """Sends `count` refits; what each was, and what went unnoticed."""
    names = list(faults)
    for number in range(count):
        fault = "kill the engine" if kill_every and number % kill_every == kill_every - 1 else run.choose.choice(names)
        wanted = run.choose.randrange(VERSIONS)
        done = kill(run, wanted) if fault == "kill the engine" else faults[fault](run, wanted)
        run.counts[fault] += 1
        if done:
            run.current = wanted
            run.committed += 1
            run.history.append(wanted)
        check(run, fault, number)
    return {"faults": dict(run.counts), "undetected": run.undetected, "committed": run.committed}


def check(run: Campaign, fault: str, number: int) -> None:
    """The engine holds what it must: by checksum, by output, by version and by history."""
    found = []
    if run.client.get_weights_checksum(["transformer"])["transformer"] != run.known.sums[run.current]:
        found.append("checksum")
    [sample] = run.client.generate(PROMPT, **PROBE)
    if not torch.equal(_picture(sample), run.known.outputs[run.current]):
        found.append("picture")
    if not torch.equal(_latents(sample), run.known.latents[run.current]):
        found.append("latents")
    info = run.client.weight_info()
    if info["weight_version"] != name_of(run) or info["weight_update_count"] != run.committed:
        found.append(f"version {info['weight_version']} after {info['weight_update_count']} updates")
    numbers = [update["number"] for update in info["history"]]
    if numbers != list(range(run.committed - len(numbers) + 1, run.committed + 1)):
        found.append("history")
    if found:
        run.undetected.append({"round": number, "fault": fault, "found": found})


def name_of(run: Campaign) -> str:
    return "default" if not run.history else f"{run.committed}:{run.history[-1]}"


# Each fault sends one refit and says whether it was committed, as far as the client was told.


def good(run: Campaign, wanted: int) -> bool:
    run.client.refit(
        run.known.weights[wanted],
        weight_version=f"{run.committed + 1}:{wanted}",
        staged=run.choose.random() < 0.5,
        bucket_bytes=_bucket_bytes(run),
    )
    return True


def session(run: Campaign, wanted: int, change: Callable[[Any, list[Bucket]], Iterator[Any]], *, good: bool) -> bool:
    """A session by hand: begins with the true manifest, sends what `change` makes of the buckets, and ends."""
    weights = run.known.weights[wanted]
    owner = f"round-{run.choose.random()}"
    manifest = manifest_of(("transformer", name, tensor) for name, tensor in weights.items())
    fields = {"session_id": owner, "target_modules": ["transformer"], "manifest": manifest}
    run.client.begin_weight_update(staged=run.choose.random() < 0.5, **fields)
    try:
        for body in change(run.choose, buckets_of(weights)):
            content = body if isinstance(body, bytes) else bytes(file_bytes(body))
            post(run, content, owner)
        run.client.end_weight_update(session_id=owner, weight_version=f"{run.committed + 1}:{wanted}")
    except EngineError:
        give_up(run, owner)
        return False
    except httpx.HTTPError:
        give_up(run, owner)
        return False
    if not good:
        run.undetected.append({"fault": "a faulty refit was committed", "found": ["committed"]})
    return True


def give_up(run: Campaign, owner: str) -> None:
    """Afterwards no session of that owner is open, whoever ended it."""
    with suppress(EngineError):
        run.client.abort_weight_update(session_id=owner)


def post(run: Campaign, content: bytes, owner: str | None) -> None:
    params = {"target_modules": "transformer"} | ({} if owner is None else {"session_id": owner})
    reply = run.http.post(
        "/update_weights_from_tensor", content=content, params=params, headers={"content-type": RAW_TYPE}
    )
    checked(reply)


def silent_sender(run: Campaign, wanted: int) -> bool:
    """The sender dies in the middle: no abort, no end. The engine undoes it by itself."""
    buckets = buckets_of(run.known.weights[wanted])
    owner = f"dead-{run.choose.random()}"
    run.client.begin_weight_update(session_id=owner, target_modules=["transformer"])
    for bucket in buckets[: run.choose.randrange(len(buckets))]:
        post(run, bytes(file_bytes(bucket)), owner)
    deadline = time.monotonic() + 20
    while run.http.get("/ready").status_code != 200 and time.monotonic() < deadline:
        time.sleep(0.05)
    return False


def cut_connection(run: Campaign, wanted: int) -> bool:
    """The connection breaks in the middle of a body."""
    owner = f"cut-{run.choose.random()}"
    run.client.begin_weight_update(session_id=owner, target_modules=["transformer"])
    content = bytes(file_bytes(buckets_of(run.known.weights[wanted])[0]))
    head = (
        f"POST /update_weights_from_tensor?session_id={owner} HTTP/1.1\r\nhost: x\r\ncontent-type: {RAW_TYPE}\r\n"
        f"content-length: {len(content)}\r\n\r\n"
    )
    url = httpx.URL(run.service.url)
    with socket.create_connection((url.host, url.port or 80)) as connection:
        connection.sendall(head.encode() + content[: run.choose.randrange(len(content))])
    give_up(run, owner)
    return False


def two_controllers(run: Campaign, wanted: int) -> bool:
    """Two clients refit at the same time: one of them at least must be told so, and each is all or nothing."""
    choices = [wanted, (wanted + 1) % VERSIONS]
    outcome: dict[int, bool] = {}
    order: list[int] = []

    def refit(number: int) -> None:
        with RolloutClient(run.service.url, timeout=120) as client:
            try:
                client.refit(
                    run.known.weights[choices[number]], weight_version=f"{run.committed + 1}:{choices[number]}"
                )
                order.append(number)
                outcome[number] = True
            except EngineError:
                outcome[number] = False

    threads = [threading.Thread(target=refit, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    info = run.client.weight_info()
    done = info["weight_update_count"] - run.committed
    if done != len(order):
        run.undetected.append({"fault": "two controllers", "found": [f"{done} updates, {len(order)} acknowledged"]})
    if done == 0:
        return False
    last = int(info["weight_version"].split(":")[1])
    run.committed += done
    run.current = last
    run.history += [choices[number] for number in order]
    # The last one's name was chosen before the other had committed; it is renamed so that names count again.
    run.history[-1] = last
    run.client.update_weight_version(name_of(run))
    return False


def kill(run: Campaign, wanted: int) -> bool:
    """The engine process dies in an open session. It comes back with the checkpoint's weights and version."""
    run.client.begin_weight_update(target_modules=["transformer"])
    post(run, bytes(file_bytes(buckets_of(run.known.weights[wanted])[0])), None)
    engine = int(run.client.server_info()["engine"]["process_id"])
    os.kill(engine, signal.SIGKILL)
    deadline = time.monotonic() + RESTART_TIMEOUT_S
    while time.monotonic() < deadline:
        with suppress(EngineUnavailableError, httpx.HTTPError):
            info = run.client.server_info()["engine"]
            if info["state"] == "ready" and info["process_id"] != engine:
                break
        time.sleep(0.1)
    run.current, run.committed, run.history = 0, 0, []
    return False


def _by_session(change: Callable[[Any, list[Bucket]], Iterator[Any]], *, good: bool = False) -> Callable[..., bool]:
    return lambda run, wanted: session(run, wanted, change, good=good)


FAULTS: dict[str, Callable[..., bool]] = {
    "none": good,
    "reorder": _by_session(reorder, good=True),
    **{name: _by_session(change) for name, change in CHANGES.items()},
    "the sender goes silent": silent_sender,
    "cut the connection": cut_connection,
    "two controllers": two_controllers,
}


def foreign_rounds(run: Campaign, count: int) -> dict[str, Any]:
    """The same faults without manifest and session id, in implicit sessions: what goes unnoticed is repaired after."""
    unnoticed: list[dict[str, Any]] = []
    faults: Counter[str] = Counter()
    names = list(CHANGES)
    for number in range(count):
        fault, wanted = names[number % len(names)], run.choose.randrange(VERSIONS)
        faults[fault] += 1
        try:
            for body in CHANGES[fault](run.choose, buckets_of(run.known.weights[wanted])):
                post(run, body if isinstance(body, bytes) else bytes(file_bytes(body)), None)
            refused = False
        except EngineError:
            refused = True
        found = run.client.get_weights_checksum(["transformer"])["transformer"]
        if not refused and found != run.known.sums[wanted]:
            unnoticed.append({"round": number, "fault": fault})
        run.client.refit(run.known.weights[0])
    return {"faults": dict(faults), "undetected": unnoticed}


def sleeps(run: Campaign, count: int) -> dict[str, Any]:
    """Releases and resumes, each third time without a backup, and refits in between; what was wrong, and what grew."""
    run.undetected, run.current = [], 0
    before = resources(run)
    for cycle in range(count):
        if cycle == WARM_CYCLES:
            before = resources(run)
        keep = cycle % 3 != 0
        run.client.release_memory_occupation(backup=keep)
        run.client.resume_memory_occupation()
        if cycle % 2 or not keep:
            run.current = run.choose.randrange(VERSIONS)
            run.client.refit(run.known.weights[run.current], staged=keep)
        sums = run.client.get_weights_checksum(["transformer"])
        if sums["transformer"] != run.known.sums[run.current] or (cycle % 5 == 0 and not probe_is_right(run)):
            run.undetected.append({"cycle": cycle, "backup": keep})
    after = resources(run)
    return {"wrong": run.undetected, "growth": {name: after[name] - before[name] for name in after}, "after": after}


def probe_is_right(run: Campaign) -> bool:
    [sample] = run.client.generate(PROMPT, **PROBE)
    return torch.equal(_picture(sample), run.known.outputs[run.current])


def resources(run: Campaign) -> dict[str, int]:
    """What the engine process holds: resident bytes and file descriptors; and how much lies in /dev/shm."""
    engine = int(run.client.server_info()["engine"]["process_id"])
    return {
        "resident_bytes": resident_bytes(engine),
        "file_descriptors": len(os.listdir(f"/proc/{engine}/fd")),
        "dev_shm_files": len(os.listdir("/dev/shm")),
    }


def _bucket_bytes(run: Campaign) -> int:
    return run.choose.choice([1 << 16, 1 << 20, 1 << 30])


def _picture(sample: RolloutSample) -> torch.Tensor:
    assert sample.generated_output is not None
    return sample.generated_output


def _latents(sample: RolloutSample) -> torch.Tensor:
    assert sample.generated_latents is not None
    return sample.generated_latents


if __name__ == "__main__":
    sys.exit(main())
