"""Which encoding brings a rollout's tensors to the client fastest: JSON, msgpack or the safetensors stream?

One request with everything in its reply, through real HTTP, from sending it until decoded tensors are in the client.
The engine's own time is in the reply, so it can be taken off. Encoding and decoding are also timed alone, on the same
rows, in this process.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import torch

from benchmarks.measure import (
    PromptSupply,
    Report,
    Series,
    alternate,
    command_line,
    print_table,
    settings_of,
)
from benchmarks.served import Served, cpu_seconds, served
from diffusion_rl.client import DECODERS, RolloutClient
from diffusion_rl.config import Wire
from diffusion_rl.params import params_from_mapping
from diffusion_rl.sample import RolloutSample
from diffusion_rl.server.encoding import CONTENT_TYPES, encode
from diffusion_rl.server.rows import response_rows

RATIOS = ("median_s", "beyond_engine_s", "bytes", "encode_s", "decode_s", "http_cpu_s")
WIRES: tuple[Wire, ...] = ("json", "msgpack", "safetensors")
LIMIT = (
    "A reply can't be smaller than its tensors (`tensor_bytes`), and can't reach the client without one copy out of "
    "the engine, one through each socket and one into the client's buffer. msgpack and safetensors send "
    "`bytes_over_tensors` of about 1, JSON 4/3 for its base64; safetensors sends what samples share once and decodes "
    "to views of the received body. `beyond_engine_s` is all that is not the engine's own work: two socket hops, "
    "encoding and decoding."
)


@dataclass
class Readings:
    """What was read beside the clock, a number a request."""

    engine_s: list[float] = field(default_factory=list)
    http_cpu_s: list[float] = field(default_factory=list)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark."""
    arguments = _arguments(argv)
    report = Report("encoding", __doc__.strip().splitlines()[0], settings_of(arguments), limit=LIMIT)
    body = _body(arguments)
    readings = {wire: Readings() for wire in WIRES}
    last: dict[Wire, list[RolloutSample]] = {}
    with served(arguments.model) as service:
        arms: dict[str, Callable[[], object]] = {
            wire: _request(service, body, wire, readings[wire], last) for wire in WIRES
        }
        series = alternate(arms, arguments.repeats)
        contents = {wire: _content(service, body, wire) for wire in WIRES}
    codec = _codec(last["safetensors"], body, contents, arguments.codec_repeats)
    rows = [_row(wire, series[wire], readings[wire], codec, len(contents[wire]), arguments) for wire in WIRES]
    report.results += rows
    tensors = _tensor_bytes(last["safetensors"])
    report.settings["tensor_bytes"] = tensors
    for row in rows:
        row["bytes_over_tensors"] = row["bytes"] / tensors
        for key in RATIOS:
            report.ratios[f"{row['name']}_over_json_{key}"] = row[key] / rows[0][key]
    report.write(arguments.out)
    keys = ("median_s", "engine_s", "beyond_engine_s", "bytes", "encode_s", "encode_share", "decode_s", "http_cpu_s")
    print_table("Encodings", ["wire", *keys], [[row["name"], *(row[key] for key in keys)] for row in rows])
    ratios = [[row["name"], *(report.ratios[f"{row['name']}_over_json_{key}"] for key in RATIOS)] for row in rows]
    print_table("Over JSON", ["wire", *RATIOS], ratios)
    return 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command_line("encoding", __doc__ or "", repeats=12)
    parser.add_argument("--group", type=int, default=16, help="samples of the request")
    parser.add_argument("--steps", type=int, default=15, help="denoising steps")
    parser.add_argument("--codec-repeats", type=int, default=20, help="rounds of encoding and decoding alone")
    return parser.parse_args(argv)


def _body(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "prompt": PromptSupply().take(1)[0],
        "seed": 42,
        "num_outputs_per_prompt": arguments.group,
        "num_inference_steps": arguments.steps,
        "rollout_return_dit_trajectory": True,
        "rollout_return_denoising_env": True,
        "rollout_debug_mode": True,
    }


def _request(
    service: Served, body: Mapping[str, Any], wire: Wire, readings: Readings, last: dict[Wire, list[RolloutSample]]
) -> Callable[[], None]:
    """Sends the request and keeps its decoded samples; reads the HTTP process's CPU time around it."""
    client = RolloutClient(service.url, wire=wire)

    def work() -> None:
        before = cpu_seconds(service.http_process)
        last[wire] = client.generate(**body)
        readings.http_cpu_s.append(cpu_seconds(service.http_process) - before)
        timings = last[wire][0].timings
        readings.engine_s.append(timings.queue_s + timings.inference_time_s)

    return work


def _content(service: Served, body: Mapping[str, Any], wire: Wire) -> bytes:
    """The reply as it is on the wire."""
    headers = {"accept": CONTENT_TYPES[wire]}
    response = httpx.post(f"{service.url}/rollout/generate", json=dict(body), headers=headers, timeout=None)
    response.raise_for_status()
    return response.content


def _codec(
    samples: Sequence[RolloutSample], body: Mapping[str, Any], contents: Mapping[Wire, bytes], repeats: int
) -> dict[str, Series]:
    """Encoding (chunk by chunk, as the service does it) and decoding alone: `encode_WIRE`, ..."""
    params = params_from_mapping(body)

    def encoder(wire: Wire) -> Callable[[], None]:
        def work() -> None:
            for _ in encode(response_rows(samples, params, timesteps="full"), wire).chunks():
                pass

        return work

    def decoder(wire: Wire) -> Callable[[], object]:
        data = bytearray(contents[wire])  # the client reads into one, too
        return lambda: DECODERS[CONTENT_TYPES[wire]](data)

    arms: dict[str, Callable[[], object]] = {f"encode_{wire}": encoder(wire) for wire in WIRES}
    return alternate({**arms, **{f"decode_{wire}": decoder(wire) for wire in WIRES}}, repeats)


def _row(
    wire: Wire,
    series: Series,
    readings: Readings,
    codec: Mapping[str, Series],
    size: int,
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    engine = readings.engine_s[-arguments.repeats :]
    beyond = [total - own for total, own in zip(series.seconds, engine, strict=True)]
    encode_s = codec[f"encode_{wire}"].median
    return series.row(
        bytes=size,
        engine_s=statistics.median(engine),
        beyond_engine_s=statistics.median(beyond),
        encode_s=encode_s,
        encode_share=encode_s / series.median,
        decode_s=codec[f"decode_{wire}"].median,
        http_cpu_s=statistics.median(readings.http_cpu_s[-arguments.repeats :]),
    )


def _tensor_bytes(samples: Sequence[RolloutSample]) -> int:
    """Bytes of all tensors of the reply, those that samples share counted once for each sample."""
    total = 0
    for sample in samples:
        debug, trajectory, env = sample.rollout_debug_tensors, sample.dit_trajectory, sample.denoising_env
        parts = [sample.generated_output, sample.rollout_log_probs]
        parts += list(vars(debug).values()) if debug else []
        parts += list(vars(trajectory).values()) if trajectory else []
        parts += [*env.pos_cond_kwargs.values(), *(env.neg_cond_kwargs or {}).values()] if env else []
        total += sum(part.nbytes for part in parts if isinstance(part, torch.Tensor))
    return total


if __name__ == "__main__":
    raise SystemExit(main())
