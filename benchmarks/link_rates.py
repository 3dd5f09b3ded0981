"""At what rate do ranks exchange? The limit of what several ranks do together, measured in the run that it limits.

`link_rates` starts a process for each rank, which runs `main`.
"""

from __future__ import annotations

import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.distributed import BroadcastOptions

from benchmarks import measure
from diffusion_rl.parallel.layout import Layout, device_of
from engine_control.child import connection_from_descriptor, how_it_ended, start_child
from engine_control.config import engine_environment
from engine_control.groups import RankGroup, Rendezvous
from engine_control.wire import PeerClosedError, receive_message, send_message

COLLECTIVES = ("all_to_all", "all_gather", "broadcast")
TIMEOUT_S = 120.0


def link_rates(
    ranks: int, device: str, nbytes: int, *, share_device: bool = False, repeats: int = 10
) -> dict[str, float]:
    """Bytes a second of each collective on a tensor of `nbytes`: what a rank sends in an `all_to_all`, what it gets in
    an `all_gather` of its part, what everybody gets in a `broadcast`. `device` is rank 0's.

    Raises:
        RuntimeError: a rank's process ended, or nothing came for two minutes.
    """
    children: list[tuple[subprocess.Popen[bytes], socket.socket]] = []
    with tempfile.TemporaryDirectory() as folder:
        asked = {"path": str(Path(folder) / "store"), "ranks": ranks, "nbytes": nbytes, "repeats": repeats}
        try:
            for rank in range(ranks):
                place = device_of(rank, device, Layout(ranks, 1), share_device=share_device)
                children.append(start_child("benchmarks.link_rates", engine_environment(ranks)))
                children[-1][1].settimeout(TIMEOUT_S)
                send_message(children[-1][1], {**asked, "rank": rank, "device": place, "shared": share_device})
            answers: list[dict[str, float]] = [_answer(*child) for child in children]
        finally:
            for process, connection in children:
                connection.close()
                process.kill()
                process.wait()
    return answers[0]


def _answer(process: subprocess.Popen[bytes], connection: socket.socket) -> dict[str, float]:
    try:
        answer: dict[str, float] = receive_message(connection)
    except PeerClosedError as error:
        raise RuntimeError(f"a rank {how_it_ended(process.wait())} before it had measured the link") from error
    except TimeoutError as error:
        raise RuntimeError(f"no rate of the link came within {TIMEOUT_S:g} s") from error
    return answer


def main() -> None:
    """Measures as one of the ranks, and waits to be ended."""
    connection = connection_from_descriptor(int(sys.argv[1]))
    asked = receive_message(connection)
    device = torch.device(asked["device"])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    meeting = Rendezvous(asked["path"], asked["ranks"], TIMEOUT_S)
    group = meeting.join("link", asked["rank"], asked["ranks"], device, shared_device=asked["shared"])
    send_message(connection, _rates(group, device, asked["nbytes"], asked["repeats"]))
    try:
        receive_message(connection)
    except PeerClosedError:
        group.abort()


def _rates(group: RankGroup, device: torch.device, nbytes: int, repeats: int) -> dict[str, float]:
    size = group.size
    whole = torch.zeros(size, nbytes // size, dtype=torch.uint8, device=device)
    arms = {
        "all_to_all": (lambda: group.all_to_all(whole), whole[1:].nbytes),
        "all_gather": (lambda: group.all_gather(whole[0]), whole[1:].nbytes),
        "broadcast": (lambda: _broadcast(group, whole), whole.nbytes),
    }
    rates: dict[str, Any] = {}
    for name, (work, moved) in arms.items():  # in one order on every rank
        for _ in range(3):
            work()
        rates[name] = moved / statistics.median(measure.seconds_of(work) for _ in range(repeats))
    return rates


def _broadcast(group: RankGroup, x: torch.Tensor) -> None:
    given = group._outgoing(x)
    options = BroadcastOptions()
    options.rootRank = 0
    group._backend.broadcast([given], options).wait()
