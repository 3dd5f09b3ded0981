"""Does a faulty refit ever go unnoticed? Seeded faults, by the thousand, through a real service.

    python -m benchmarks.refit_campaign --refits 1000
    python -m benchmarks.refit_campaign --engine llm --refits 1000

Each round sends one refit of the embedded model with one fault (or none), and then looks at what the engine has: the
checksum of its weights, the output of a probe request, the version and the history. After a good round they must be
those of the new weights; after a faulty one those of the old weights, and the fault must have been refused. The probe's
output is compared bit for bit with that of an engine that loaded the same weights from disk, and after a commit nothing
of it may come from a cache that the old weights filled. At the end the same faults are sent as a foreign trainer would,
without a manifest and a session id; what goes unnoticed then is listed.
Last, the engine sleeps and wakes, with a backup and without, between refits: the same checks, and nothing may grow.
"""

from __future__ import annotations

import os
import random
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
from benchmarks.campaign_engines import ENGINES, CampaignEngine, Probe
from benchmarks.refit_faults import CHANGES, Bucket, Weights, buckets_of, reorder
from benchmarks.served import resident_bytes
from engine_control.client import RAW_TYPE, checked
from engine_control.errors import EngineError, EngineUnavailableError
from engine_control.refit.manifest import manifest_of
from engine_control.refit.payload.safetensors_format import file_bytes
from engine_control.service_process import ServiceProcess

SESSION_TIMEOUT_S = 1.5
RESTART_TIMEOUT_S = 120.0
GROWTH = {"resident_bytes": 16 * 2**20, "file_descriptors": 0, "dev_shm_files": 0}
WARM_CYCLES = 10  # of which allocators keep something
KILL = "kill the engine"
LIMIT = "Undetected corruptions of our own client: 0. Those of foreign clients are what their protocol can't show."


@dataclass
class Known:
    """The weights of each version, their checksum, and the probe by an engine that loaded them from disk."""

    weights: list[Weights]
    sums: list[str]
    probes: list[Probe]


@dataclass
class Campaign:
    """One service, and what it must hold now."""

    engine: CampaignEngine
    client: Any
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
    parser.add_argument("--engine", choices=list(ENGINES), default="diffusion", help="whose service and model")
    parser.set_defaults(out=None)
    parser.add_argument("--refits", type=int, default=1000, help="rounds, each of one refit")
    parser.add_argument("--foreign", type=int, default=60, help="rounds without manifest and session id")
    parser.add_argument("--cycles", type=int, default=1000, help="sleeps and wakes, interleaved with refits")
    parser.add_argument("--kill-every", type=int, default=100, help="rounds between two deaths of the engine process")
    parser.add_argument("--versions", type=int, default=5, help="sets of weights between which refits go")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    engine = ENGINES[arguments.engine]()
    report = measure.Report(
        "refit_campaign",
        "Does a faulty refit ever go unnoticed?",
        measure.settings_of(arguments),
        limit=LIMIT,
    )
    choose = random.Random(arguments.seed)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        known = versions(engine, arguments.model, arguments.versions, Path(folder))
        with campaign(engine, arguments.model, known, choose, Path(folder)) as run:
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
    result = "refit_campaign" if arguments.engine == "diffusion" else f"refit_campaign_{arguments.engine}"
    report.write(arguments.out or measure.RESULTS / f"{result}.json")
    print(f"after {arguments.cycles} sleeps: wrong {slept['wrong']}, growth {slept['growth']}")
    grew = any(slept["growth"][name] > most for name, most in GROWTH.items())
    return 1 if own["undetected"] or slept["wrong"] or grew else 0


def versions(engine: CampaignEngine, model: str, count: int, folder: Path) -> Known:
    """Version 0 is the model's own. Each is saved to disk, and probed in an engine that loads it anew."""
    torch.manual_seed(0)
    first = engine.weights(model)
    known = Known([first], [], [])
    while len(known.weights) < count:
        known.weights.append({name: t + 0.01 * t.std() * torch.randn_like(t) for name, t in first.items()})
    for number, weights in enumerate(known.weights):
        checksum, probe = engine.fresh(model, weights, folder / f"version-{number}")
        known.sums.append(checksum)
        known.probes.append(probe)
    return known


@contextmanager
def campaign(
    engine: CampaignEngine, model: str, known: Known, choose: random.Random, folder: Path
) -> Iterator[Campaign]:
    arguments = [
        "--enable-memory-saver",
        "--weight-session-timeout",
        str(SESSION_TIMEOUT_S),
        "--implicit-weight-sessions",
    ]
    with engine.service(model, folder / "service.log", arguments) as service:
        service.wait_ready()
        with engine.client(service.url) as client, httpx.Client(base_url=service.url, timeout=120) as http:
            run = Campaign(engine, client, http, service, known, choose)
            require_meaningful(run)
            yield run


def require_meaningful(run: Campaign) -> None:
    """The probe tells the versions apart, and a cache that must be empty after a commit is used without one."""
    outputs = [list(probe.outputs.values()) for probe in run.known.probes]
    assert all(one != other for i, one in enumerate(outputs) for other in outputs[:i])
    run.engine.probe(run.client)
    assert run.engine.has_cache == (run.engine.probe(run.client).found_in_cache > 0)


def rounds(run: Campaign, count: int, faults: dict[str, Callable[..., bool]], *, kill_every: int) -> dict[str, Any]:
    """Sends `count` refits; what each was, and what went unnoticed."""
    names = list(faults)
    for number in range(count):
        fault = KILL if kill_every and number % kill_every == kill_every - 1 else run.choose.choice(names)
        wanted, before = run.choose.randrange(len(run.known.weights)), run.committed
        done = kill(run, wanted) if fault == KILL else faults[fault](run, wanted)
        run.counts[fault] += 1
        if done:
            run.current = wanted
            run.committed += 1
            run.history.append(wanted)
        check(run, fault, number, changed=fault == KILL or run.committed != before)
    return {"faults": dict(run.counts), "undetected": run.undetected, "committed": run.committed}


def check(run: Campaign, fault: str, number: int, *, changed: bool) -> None:
    """The engine holds what it must: by checksum, by output, by version and by history. `changed`: its weights were
    written since the last check, so nothing may be left in a cache."""
    found = []
    if checksum(run) != run.known.sums[run.current]:
        found.append("checksum")
    found += wrong_outputs(run, cache_is_empty=changed)
    info = run.client.weight_info()
    if info["weight_version"] != name_of(run) or info["weight_update_count"] != run.committed:
        found.append(f"version {info['weight_version']} after {info['weight_update_count']} updates")
    numbers = [update["number"] for update in info["history"]]
    if numbers != list(range(run.committed - len(numbers) + 1, run.committed + 1)):
        found.append("history")
    if found:
        run.undetected.append({"round": number, "fault": fault, "found": found})


def checksum(run: Campaign) -> str:
    module = run.engine.module
    return str(run.client.get_weights_checksum([module])[module])


def wrong_outputs(run: Campaign, *, cache_is_empty: bool) -> list[str]:
    """What of a probe isn't as it should be."""
    probe, known = run.engine.probe(run.client), run.known.probes[run.current]
    wrong = [name for name, found in probe.outputs.items() if found != known.outputs[name]]
    if cache_is_empty and probe.found_in_cache:
        wrong.append(f"{probe.found_in_cache} tokens of a cache that should be empty")
    return wrong


def name_of(run: Campaign) -> str:
    return "default" if not run.history else f"{run.committed}:{run.history[-1]}"


# Each fault sends one refit and says whether it was committed, as far as the client was told.


def good(run: Campaign, wanted: int) -> bool:
    run.client.refit(
        run.known.weights[wanted],
        module=run.engine.module,
        weight_version=f"{run.committed + 1}:{wanted}",
        staged=run.choose.random() < 0.5,
        bucket_bytes=_bucket_bytes(run),
    )
    return True


def session(run: Campaign, wanted: int, change: Callable[[Any, list[Bucket]], Iterator[Any]], *, good: bool) -> bool:
    """A session by hand: begins with the true manifest, sends what `change` makes of the buckets, and ends."""
    weights = run.known.weights[wanted]
    owner = f"round-{run.choose.random()}"
    manifest = manifest_of((run.engine.module, name, tensor) for name, tensor in weights.items())
    fields = {"session_id": owner, "target_modules": [run.engine.module], "manifest": manifest}
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
    params = {"target_modules": run.engine.module} | ({} if owner is None else {"session_id": owner})
    reply = run.http.post(
        "/update_weights_from_tensor", content=content, params=params, headers={"content-type": RAW_TYPE}
    )
    checked(reply)


def silent_sender(run: Campaign, wanted: int) -> bool:
    """The sender dies in the middle: no abort, no end. The engine undoes it by itself."""
    buckets = buckets_of(run.known.weights[wanted])
    owner = f"dead-{run.choose.random()}"
    run.client.begin_weight_update(session_id=owner, target_modules=[run.engine.module])
    for bucket in buckets[: run.choose.randrange(len(buckets))]:
        post(run, bytes(file_bytes(bucket)), owner)
    deadline = time.monotonic() + 20
    while run.http.get("/ready").status_code != 200 and time.monotonic() < deadline:
        time.sleep(0.05)
    return False


def cut_connection(run: Campaign, wanted: int) -> bool:
    """The connection breaks in the middle of a body."""
    owner = f"cut-{run.choose.random()}"
    run.client.begin_weight_update(session_id=owner, target_modules=[run.engine.module])
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
    choices = [wanted, (wanted + 1) % len(run.known.weights)]
    outcome: dict[int, bool] = {}
    order: list[int] = []

    def refit(number: int) -> None:
        with run.engine.client(run.service.url) as client:
            name = f"{run.committed + 1}:{choices[number]}"
            try:
                client.refit(run.known.weights[choices[number]], module=run.engine.module, weight_version=name)
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
    run.client.begin_weight_update(target_modules=[run.engine.module])
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
        fault, wanted = names[number % len(names)], run.choose.randrange(len(run.known.weights))
        faults[fault] += 1
        try:
            for body in CHANGES[fault](run.choose, buckets_of(run.known.weights[wanted])):
                post(run, body if isinstance(body, bytes) else bytes(file_bytes(body)), None)
            refused = False
        except EngineError:
            refused = True
        if not refused and checksum(run) != run.known.sums[wanted]:
            unnoticed.append({"round": number, "fault": fault})
        run.client.refit(run.known.weights[0], module=run.engine.module)
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
            run.current = run.choose.randrange(len(run.known.weights))
            run.client.refit(run.known.weights[run.current], module=run.engine.module, staged=keep)
        looked = cycle % 5 == 0
        if checksum(run) != run.known.sums[run.current] or (looked and wrong_outputs(run, cache_is_empty=True)):
            run.undetected.append({"cycle": cycle, "backup": keep})
    after = resources(run)
    return {"wrong": run.undetected, "growth": {name: after[name] - before[name] for name in after}, "after": after}


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


if __name__ == "__main__":
    sys.exit(main())
