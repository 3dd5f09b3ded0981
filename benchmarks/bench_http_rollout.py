"""How many pictures a second reach a client over HTTP, and where is the time between its request and its last byte?

    python -m benchmarks.bench_http_rollout --groups 24,8,1

A real service in a process of its own serves a checkpoint of Qwen-Image's shape (see `make_checkpoint`; `--model`
serves another one). A client posts one group after the other and reads each reply to its end, with everything that a
trainer keeps: debug tensors, trajectory, environment. The same groups with pictures alone, and with latents alone, say
by difference what pictures and what copies, encoding and transport take; headers come when the engine has finished and
the reply is encoded. `--concurrency 1,2` has a second group in the engine while the first one's reply is sent.

Each group is written when it is done; what `--budget-s` leaves no time for is left out.
"""

from __future__ import annotations

import argparse
import http.client
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from benchmarks.measure import (
    REPOSITORY,
    Budget,
    Report,
    alternate,
    command_line,
    integers,
    print_table,
    seconds_of,
    settings_of,
)
from benchmarks.served import Served, cpu_seconds, resident_bytes, served
from diffusion_rl.client import DECODERS
from diffusion_rl.server.encoding import CONTENT_TYPES
from engine_control.wire import uninitialised

PROMPT, NEGATIVE = "a red ball on a blue table", " "
CONTENTS: Mapping[str, Mapping[str, Any]] = {
    "all": {"rollout_return_dit_trajectory": True, "rollout_return_denoising_env": True, "rollout_debug_mode": True},
    "pictures": {"rollout_debug_mode": False},
    "latents": {"rollout_debug_mode": False, "output_type": "latent"},
}
LIMIT = (
    "A group's time is at least that of its denoising (`latents`) and of its pictures, which the GPU computes; copies "
    "to the host, encoding and transport (`all` - `pictures`) could run beside the computation of what comes next."
)


@dataclass(frozen=True)
class Reply:
    """One reply: seconds until its headers and until its end, its length, and the engine's own timings."""

    headers_s: float
    total_s: float
    nbytes: int
    timings: Mapping[str, float]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark."""
    arguments = _arguments(argv)
    report = Report("http_rollout", (__doc__ or "").splitlines()[0], settings_of(arguments), limit=LIMIT)
    with checkpoint(arguments) as model:
        began = time.perf_counter()
        with served(model, arguments.serve) as service:
            _add(report, arguments, {"name": "start", "seconds": time.perf_counter() - began})
            budget = Budget(arguments.budget_s)
            for group in arguments.groups:
                if budget.allows(0):
                    _measure(report, arguments, service, group, budget)
            peak = resident_bytes(service.engine_process, "VmHWM") / 1e9
            _add(report, arguments, {"name": "engine process, most memory", "gb": peak})
    columns = ["reply", "at once", "group", "median s", "images/s", "headers s", "MB"]
    rows = [
        [r["name"], r["concurrency"], r["group"], r["median_s"], r["images_per_s"], r["headers_s"], r["megabytes"]]
        for r in report.results
        if "images_per_s" in r
    ]
    print_table("Groups over HTTP", columns, rows)
    return 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command_line("http_rollout", __doc__ or "", repeats=5)
    parser.set_defaults(model=None)
    parser.add_argument("--layers", type=int, default=6, help="blocks of the checkpoint that is made without --model")
    parser.add_argument("--tiny", action="store_true", help="a narrow checkpoint, for a CPU")
    parser.add_argument("--size", type=int, default=512, help="pixels a side")
    parser.add_argument("--steps", type=int, default=10, help="denoising steps")
    parser.add_argument("--guidance", type=float, default=4.0, help="scale of classifier-free guidance")
    parser.add_argument("--groups", type=integers, default=[24, 8, 1], help="samples of a request, one case each")
    parser.add_argument("--concurrency", type=integers, default=[1], help="requests at once, one case each")
    parser.add_argument("--wire", choices=list(CONTENT_TYPES), default="msgpack", help="the reply's encoding")
    parser.add_argument("--serve", type=str.split, default=[], help="further arguments of `serve`, in one string")
    parser.add_argument(
        "--budget-s",
        type=float,
        default=600.0,
        help="seconds from the start of the service after which no further group begins",
    )
    return parser.parse_args(argv)


@contextmanager
def checkpoint(arguments: argparse.Namespace) -> Iterator[str]:
    """The folder to serve: the one that was named, or one that is made and removed again."""
    if arguments.model is not None:
        yield arguments.model
        return
    with tempfile.TemporaryDirectory() as folder:
        # In a process of its own: what made the weights would keep its share of the GPU.
        command = [sys.executable, "-m", "benchmarks.make_checkpoint", folder, "--layers", str(arguments.layers)]
        subprocess.run(command + ["--tiny"] * arguments.tiny, check=True, cwd=REPOSITORY)
        yield folder


def _measure(report: Report, arguments: argparse.Namespace, service: Served, group: int, budget: Budget) -> None:
    """Replies of each content, in turn; with several at once those with all alone."""
    replies: dict[str, list[Reply]] = {}
    arms: dict[str, Callable[[], object]] = {}
    for name, fields in CONTENTS.items():
        for concurrency in arguments.concurrency if name == "all" else arguments.concurrency[:1]:
            arm = f"{name}, {concurrency} at once"
            replies[arm] = []
            arms[arm] = _arm(arguments, service, body(arguments, group, fields), concurrency, replies[arm])
    processes = {"http": service.http_process, "engine": service.engine_process}
    first = seconds_of(next(iter(arms.values())))  # captures graphs
    before = {name: cpu_seconds(process) for name, process in processes.items()}
    series = alternate(arms, arguments.repeats, warmups=1, budget=budget)
    cpu = {f"{name}_cpu_s": cpu_seconds(process) - before[name] for name, process in processes.items()}
    medians: dict[str, float] = {}
    for (arm, one), (name, concurrency) in zip(series.items(), _cases(arguments), strict=True):
        mine = replies[arm][-len(one.seconds) * concurrency :]
        row = {
            "group": group,
            "concurrency": concurrency,
            "images_per_s": group * concurrency / one.median,
            "headers_s": statistics.median(reply.headers_s for reply in mine),
            "body_s": statistics.median(reply.total_s - reply.headers_s for reply in mine),
            "megabytes": mine[0].nbytes / 1e6,
            "engine": {key: statistics.median(reply.timings[key] for reply in mine) for key in mine[0].timings},
        }
        _add(report, arguments, {**one.row(**row), "name": name})
        medians.setdefault(name, one.median)
        report.ratios[f"images_per_s, {arm}, group {group}"] = row["images_per_s"]
    shares = {
        "latents": medians["latents"],
        "pictures": medians["pictures"] - medians["latents"],
        "copies, encoding, transport": medians["all"] - medians["pictures"],
    }
    _add(report, arguments, {"name": "parts", "group": group, "first_s": first, "seconds": shares, **cpu})
    print({name: f"{value:.4g} s" for name, value in shares.items()}, flush=True)
    for name, value in shares.items():
        report.ratios[f"share of {name}, group {group}"] = value / medians["all"]


def _cases(arguments: argparse.Namespace) -> list[tuple[str, int]]:
    """`(content, requests at once)`, in the order of the arms."""
    return [(n, c) for n in CONTENTS for c in (arguments.concurrency if n == "all" else arguments.concurrency[:1])]


def body(arguments: argparse.Namespace, group: int, fields: Mapping[str, Any]) -> bytes:
    """A request as bytes."""
    return json.dumps(
        {
            "prompt": PROMPT,
            "negative_prompt": NEGATIVE,
            "seed": 42,
            "width": arguments.size,
            "height": arguments.size,
            "num_inference_steps": arguments.steps,
            "num_outputs_per_prompt": group,
            "true_cfg_scale": arguments.guidance,
            "guidance_scale": arguments.guidance,
            "rollout": True,
            **fields,
        }
    ).encode()


def _arm(
    arguments: argparse.Namespace, service: Served, content: bytes, concurrency: int, replies: list[Reply]
) -> Callable[[], None]:
    def work() -> None:
        with ThreadPoolExecutor(concurrency) as pool:
            sent = [pool.submit(post, service.url, content, arguments.wire) for _ in range(concurrency)]
            received = [one.result() for one in sent]
        replies.extend(_reply(*one, arguments.wire) for one in received)

    return work


def post(url: str, content: bytes, wire: str) -> tuple[memoryview, float, float]:
    """The reply's body, and the seconds until its headers and until its end.

    Raises:
        RuntimeError: the service answered with an error; with what it said.
    """
    address, began = urlsplit(url), time.perf_counter()
    connection = http.client.HTTPConnection(address.hostname or "", address.port)
    try:
        headers = {"content-type": "application/json", "accept": CONTENT_TYPES[wire]}  # type: ignore[index]
        connection.request("POST", "/rollout/generate", content, headers)
        response = connection.getresponse()
        until_headers = time.perf_counter() - began
        if response.status != 200:
            raise RuntimeError(f"HTTP {response.status}: {response.read()[:600]!r}")
        data, position = uninitialised(int(response.headers["content-length"])), 0
        while position < len(data):
            count = response.readinto(data[position:])
            if not count:
                raise RuntimeError(f"the reply ended after {position} of {len(data)} bytes")
            position += count
        return data, until_headers, time.perf_counter() - began
    finally:
        connection.close()


def _reply(data: memoryview, headers_s: float, total_s: float, wire: str) -> Reply:
    timings = DECODERS[CONTENT_TYPES[wire]](data)[0]["timings"]  # type: ignore[index]
    return Reply(headers_s, total_s, len(data), timings)


def _add(report: Report, arguments: argparse.Namespace, row: dict[str, Any]) -> None:
    """Adds a row to the results, prints it, and writes what there is by now."""
    report.results.append(row)
    shown = {k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items() if not isinstance(v, list)}
    print(shown, flush=True)
    report.write(arguments.out)


if __name__ == "__main__":
    raise SystemExit(main())
