"""How much memory does a large reply cost, and does memory stay flat over many requests?

The peaks of the engine process and of the HTTP process over what they held before, for a group with its full
trajectory in each encoding, against an evaluation rollout of the same group (`rollout=false`) and against the bytes of
the reply; each in a fresh service, since a process keeps what it once had. Then many smaller requests to one service,
with readings of what both processes hold.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from benchmarks.measure import PromptSupply, Report, command_line, print_table, settings_of
from benchmarks.served import Served, reset_peak, resident_bytes, served
from diffusion_rl.config import Wire
from diffusion_rl.server.encoding import CONTENT_TYPES

PROCESSES = ("engine", "http")
COLLECTED = {
    "rollout_return_dit_trajectory": True,
    "rollout_return_denoising_env": True,
    "rollout_debug_mode": True,
}
CASES: Mapping[str, tuple[Wire, dict[str, Any]]] = {
    "evaluation": ("safetensors", {"rollout": False}),
    "json": ("json", COLLECTED),
    "msgpack": ("msgpack", COLLECTED),
    "safetensors": ("safetensors", COLLECTED),
}
LIMIT = (
    "Each process must hold the reply's tensors once: a peak of 1 reply over what it held. A model's activations come "
    "on top in the engine process (they are the evaluation's peak), one chunk of at most 1 MiB in the HTTP process. "
    "Flat means that the slope over the later requests is about 0."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark."""
    arguments = _arguments(argv)
    report = Report("memory", __doc__.strip().splitlines()[0], settings_of(arguments), limit=LIMIT)
    _peaks(report, arguments)
    with served(arguments.model) as service, httpx.Client(base_url=service.url, timeout=None) as client:
        _flatness(report, arguments, service, client)
    report.write(arguments.out)
    peaks = [r for r in report.results if r["name"] in CASES]
    columns = ["case", "reply MB", "engine peak MB", "HTTP peak MB", "engine / reply", "HTTP / reply"]
    table = [
        [r["name"], r["bytes"] / 1e6, *(r[f"{p}_peak_bytes"] / 1e6 for p in PROCESSES)]
        + [r[f"{p}_peak_over_bytes"] for p in PROCESSES]
        for r in peaks
    ]
    print_table("Peak over what the process held before (median)", columns, table)
    flat = [r for r in report.results if r["name"] not in CASES]
    columns = ["process", "early MB", "late MB", "KiB a request", "fitted slope KiB"]
    keys = ("rss_early_bytes", "rss_late_bytes")
    slopes = ("growth_kib_per_request", "fitted_kib_per_request")
    table = [[r["name"], *(r[k] / 1e6 for k in keys), *(r[k] for k in slopes)] for r in flat]
    print_table(f"Held after {arguments.early} and after {arguments.late} requests", columns, table)
    return 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command_line("memory", __doc__ or "", repeats=2)
    parser.add_argument(
        "--cases", nargs="+", choices=list(CASES), default=list(CASES), help="cases of the large request"
    )
    parser.add_argument("--group", type=int, default=16, help="samples of the large request")
    parser.add_argument("--steps", type=int, default=60, help="denoising steps of the large request")
    parser.add_argument("--early", type=int, default=20, help="requests before the first reading")
    parser.add_argument("--late", type=int, default=200, help="requests before the last reading")
    parser.add_argument("--flat-group", type=int, default=8, help="samples of each of the many requests")
    parser.add_argument("--flat-steps", type=int, default=4, help="denoising steps of each of the many requests")
    return parser.parse_args(argv)


def _peaks(report: Report, arguments: argparse.Namespace) -> None:
    """One entry a case: the peak of each process over what it held when the request came, a number a repeat."""
    peaks: dict[str, dict[str, list[int]]] = {case: {process: [] for process in PROCESSES} for case in arguments.cases}
    sizes: dict[str, int] = {}
    for _ in range(arguments.repeats):
        for case in arguments.cases:
            sizes[case], found = _peaks_of(case, arguments)
            for process, value in found.items():
                peaks[case][process].append(value)
    for case, all_values in peaks.items():
        entry: dict[str, Any] = {"name": case, "bytes": sizes[case], "repeats": arguments.repeats}
        for process, values in all_values.items():
            median = statistics.median(values)
            entry[f"{process}_peak_bytes"] = median
            entry[f"{process}_peak_bytes_all"] = values
            entry[f"{process}_peak_over_bytes"] = median / sizes[case]
            report.ratios[f"{process}_peak_over_bytes_{case}"] = median / sizes[case]
            if case != "evaluation" and "evaluation" in peaks:
                above = median - statistics.median(peaks["evaluation"][process])
                report.ratios[f"{process}_peak_above_evaluation_over_bytes_{case}"] = above / sizes[case]
        report.results.append(entry)


def _peaks_of(case: str, arguments: argparse.Namespace) -> tuple[int, dict[str, int]]:
    """The reply's bytes, and the peak of each process of a fresh service that has rolled out one step before."""
    wire, fields = CASES[case]
    (prompt,) = PromptSupply().take(1)
    with served(arguments.model) as service, httpx.Client(base_url=service.url, timeout=None) as client:
        _send(client, prompt, wire, arguments.group, 1, fields)
        ids = {"engine": service.engine_process, "http": service.http_process}
        before = {process: resident_bytes(number) for process, number in ids.items()}
        for number in ids.values():
            reset_peak(number)
        size = _send(client, prompt, wire, arguments.group, arguments.steps, fields)
        return size, {process: resident_bytes(number, "VmHWM") - before[process] for process, number in ids.items()}


def _flatness(report: Report, arguments: argparse.Namespace, service: Served, client: httpx.Client) -> None:
    """What both processes hold at some twenty points from `early` to `late`, encodings in turn."""
    ids = {"engine": service.engine_process, "http": service.http_process}
    readings: dict[str, list[tuple[int, int]]] = {process: [] for process in ids}
    supply, wires = PromptSupply(), list(CONTENT_TYPES)
    prompts = supply.take(10)
    interval = max(1, (arguments.late - arguments.early) // 18)
    for count in range(1, arguments.late + 1):
        wire = wires[count % len(wires)]
        _send(client, prompts[count % len(prompts)], wire, arguments.flat_group, arguments.flat_steps, COLLECTED)
        if (count >= arguments.early and (count - arguments.early) % interval == 0) or count == arguments.late:
            for process, number in ids.items():
                readings[process].append((count, resident_bytes(number)))
    for process, pairs in readings.items():
        counts, held = zip(*pairs, strict=True)
        growth = (held[-1] - held[0]) / (counts[-1] - counts[0]) / 1024
        fitted = statistics.linear_regression(counts, held).slope / 1024
        report.results.append(
            {
                "name": f"{process} process over many requests",
                "rss_early_bytes": held[0],
                "rss_late_bytes": held[-1],
                "growth_kib_per_request": growth,
                "fitted_kib_per_request": fitted,
                "readings": [list(pair) for pair in pairs],
            }
        )
        report.ratios[f"{process}_late_over_early"] = held[-1] / held[0]


def _send(client: httpx.Client, prompt: str, wire: Wire, group: int, steps: int, fields: Mapping[str, Any]) -> int:
    """Sends one request and reads its reply piece by piece; returns the reply's bytes."""
    body = {
        "prompt": prompt,
        "seed": 42,
        "num_outputs_per_prompt": group,
        "num_inference_steps": steps,
        **fields,
    }
    headers = {"accept": CONTENT_TYPES[wire]}
    with client.stream("POST", "/rollout/generate", json=body, headers=headers) as response:
        response.raise_for_status()
        return sum(len(chunk) for chunk in response.iter_raw())


if __name__ == "__main__":
    raise SystemExit(main())
