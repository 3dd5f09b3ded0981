"""One rank of an engine that has nothing but weight transports, driven by lines of JSON: `python weight_rank.py RANK
RANKS DEVICE`. It answers with what each transport yielded, the bytes included, so that a test sees what had arrived."""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from engine_control.errors import EngineError
from engine_control.refit.backends import TransportContext, WeightTransport, transports
from engine_control.refit.payload.layout import as_bytes
from engine_control.refit.target import TensorInfo

WEIGHTS = {"transformer": {"w": TensorInfo((2,), torch.float32)}, "vae": {}}


def answer(kept: dict[Any, WeightTransport], command: dict[str, Any], rank: int, ranks: int, device: str) -> Any:
    name = command["transport"]
    key = name, command["timeout_s"]
    if key not in kept:
        context = TransportContext(rank, ranks, torch.device(device), WEIGHTS, timeout_s=command["timeout_s"])
        kept[key] = transports.get(name)(context)
    call = getattr(kept[key], command["call"])
    if command["call"] != "receive":
        return call(command["info"])
    items, stop_after = [], command.get("stop_after")
    stream = call(command["info"])
    for module, tensor_name, tensor, _ in stream:
        data = base64.b64encode(bytes(as_bytes(tensor).cpu().numpy())).decode()
        items.append([module, tensor_name, str(tensor.dtype), list(tensor.shape), data])
        if len(items) == stop_after:
            stream.close()
    return items


def main(rank: int, ranks: int, device: str) -> None:
    kept: dict[Any, WeightTransport] = {}
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        try:
            reply = {"value": answer(kept, json.loads(line), rank, ranks, device)}
        except EngineError as error:
            reply = {"error": str(error), "field": error.field, "code": error.code}
        maps = Path("/proc/self/maps").read_text()
        print(json.dumps({**reply, "mapped": maps.count("memfd:engine-weights")}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
