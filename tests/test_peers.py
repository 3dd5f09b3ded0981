"""Tokens for heads by writing other ranks' memory: the same bytes as by collectives."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from interpreter import passed_in_interpreter
from torch.distributed import HashStore, ProcessGroupGloo

from diffusion_rl import RolloutPipeline
from diffusion_rl.config import EngineConfig, ParallelConfig
from diffusion_rl.models.graphs import CudaGraphs
from diffusion_rl.parallel.exchange import Collectives, Exchange
from diffusion_rl.parallel.peers import PeerExchange, agreed, exchanged
from diffusion_rl.parallel.shards import Shards, Stream
from engine_control.errors import EngineDiedError, EngineFaultError
from engine_control.groups import RankGroup
from rl_kernels import exchange as kernels
from rl_kernels.fused import triton_is_installed

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CPU = torch.device("cpu")


class Place:
    """Where ranks that are threads of one process meet, and find each other's buffers."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.buffers: dict[tuple[str, int, int], torch.Tensor] = {}


class ThreadMemory:
    """A `Memory` of threads: their buffers begin as garbage, and what is asked for again lies where it lay."""

    def __init__(self, place: Place, group: RankGroup) -> None:
        self.group = group
        self._place = place

    def buffer(self, name: str, nbytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        self._place.buffers.setdefault(
            (name, nbytes, self.group.rank), torch.full((nbytes + 64,), 0x7F, dtype=torch.uint8)
        )
        self.meet()
        found = [self._place.buffers[name, nbytes, rank] for rank in range(self.group.size)]
        aligned = [whole[-whole.data_ptr() % 64 :][:nbytes] for whole in found]
        return aligned[self.group.rank], torch.tensor([x.data_ptr() for x in aligned])

    def meet(self) -> None:
        self._place.barrier.wait(timeout=60)

    def give_back(self) -> None:
        self._place.buffers.clear()

    def check(self) -> None:
        pass

    def abort(self) -> None:
        self._place.barrier.abort()


def groups(size: int) -> list[RankGroup]:
    """One for each of `size` threads."""
    store = HashStore()

    def joined(rank: int) -> RankGroup:
        return RankGroup(ProcessGroupGloo(store, rank, size, timedelta(seconds=30)), rank, size, through_host=False)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(joined, range(size)))


def round_trip(exchange: Exchange, shards: Shards, streams: tuple[Stream, ...]) -> list[torch.Tensor]:
    """What a rank has of an attention's arguments, of its result, and of a stage's output."""
    made = torch.Generator().manual_seed(exchange.group.rank)
    local = sum(map(shards.share, streams))
    projected = torch.randn(2, local, 3, 8, 16, generator=made)  # as one projection leaves q, k and v
    query, key, value = (projected[:, :, i].transpose(1, 2) for i in range(3))
    found = [exchange.to_heads((query, key, value), shards, streams).clone()]
    found.append(exchange.to_heads((key,), shards, streams).clone())
    attended = found[0][0] + found[0][1] * 3
    found.append(exchange.to_tokens(attended, shards, streams))  # read behind the next call of its kind
    found.append(exchange.to_tokens(attended.transpose(1, 2).contiguous().transpose(1, 2) * 2, shards, streams))
    output = torch.randn(2, local, 32, generator=made)
    return [*found, exchange.gather(output, shards, streams), exchange.gather(output[..., :16], shards, streams)]


@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize(
    ("shards", "streams"),
    [
        (Shards(19, 5, True, 2), ("text", "image")),
        (Shards(70, 3, False, 4), ("image", "text")),  # a rank without text, and several programs of tokens
        (Shards(600, 5, False, 2), ("image",)),
        (Shards(33, 33, True, 8), ("text", "image")),
    ],
    ids=str,
)
@torch.no_grad()
def test_each_rank_receives_what_collectives_bring(
    shards: Shards, streams: tuple[Stream, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    one_at_a_time = threading.Lock()  # the interpreter can't run two kernels at once

    def alone(launch: object) -> object:
        def call(*args: object, **kwargs: object) -> None:
            with one_at_a_time:
                launch(*args, **kwargs)  # type: ignore[operator]

        return call

    for name in ("push_heads", "push_tokens"):
        monkeypatch.setattr(kernels, name, alone(getattr(kernels, name)))
    size, place = shards.degree, Place(shards.degree)
    by_collectives = [Collectives(group) for group in groups(size)]
    by_memory = [PeerExchange(ThreadMemory(place, group)) for group in groups(size)]
    with ThreadPoolExecutor(size) as pool:
        expected = list(pool.map(lambda exchange: round_trip(exchange, shards, streams), by_collectives))
        for _ in range(2):  # the second time the buffers are used again
            found = list(pool.map(lambda exchange: round_trip(exchange, shards, streams), by_memory))
            for ours, theirs in zip(found, expected, strict=True):
                for a, b in zip(ours, theirs, strict=True):
                    assert a.shape == b.shape
                    assert torch.equal(a, b)
    assert all(a.stride() == b.stride() for a, b in zip(found[0], expected[0], strict=True))


@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
def test_a_rank_that_leaves_a_meeting_comes_to_none_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    from rl_kernels.jit import exchange as jit

    clock = itertools.count()
    monkeypatch.setattr(jit, "globaltimer", lambda: next(clock))
    flags = torch.zeros(2, 2, dtype=torch.int32)
    addresses = torch.tensor([of_rank.data_ptr() for of_rank in flags])
    turns, stop = torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)

    def meet(other: int) -> tuple[list[int], bool]:
        """Rank 0, where rank 1 has come to that turn: what it has told both, and whether it has left."""
        flags[0, 1] = other
        jit.meet[(1,)](addresses, turns, stop, 0, 3, SIZE=2)
        return flags[:, 0].tolist(), bool(stop[1])

    assert meet(1) == ([1, 1], False)
    assert meet(3) == ([2, 2], False)  # the other one is ahead
    last = 2**31 - 1
    turns[0] = last - 1
    assert meet(last) == ([last, last], False)
    assert meet(-last - 1) == ([-last - 1] * 2, False)  # they wrap around, and so did the other one
    turns[0] = last
    assert meet(last) == ([-last - 1] * 2, True)  # the other one hasn't come there
    asked = next(clock)
    assert meet(last) == ([-last - 1] * 2, True)
    assert next(clock) == asked + 1  # it has waited for nobody


@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
def test_ranks_meet_before_a_buffer_is_written_again() -> None:
    memory = ThreadMemory(Place(1), groups(1)[0])
    buffer, events = memory.buffer, list[str]()

    def found(name: str, nbytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        given = buffer(name, nbytes)
        events[-1:] = [name]  # finding it is a meeting of threads, not of ranks
        return given

    memory.buffer, memory.meet = found, lambda: events.append("meet")  # type: ignore[method-assign]
    exchange, shards = PeerExchange(memory), Shards(6, 2, True, 1)
    x = torch.zeros(1, 2, 8, 16)
    for _ in range(2):
        attended = exchange.to_heads((x,), shards, ("text", "image"))[0]
    exchange.to_tokens(attended, shards, ("text", "image"))
    assert events == ["heads", "meet", "meet", "heads", "meet", "tokens", "meet"]


class OnCpu:
    """As a `GraphPool`: what it captures is called when it is replayed. Of rank `failing` nothing can be captured."""

    def __init__(self, rank: int, failing: int | None) -> None:
        self._fails = rank == failing

    def capture(self, call: Callable[[], torch.Tensor]) -> tuple[Any, torch.Tensor]:
        result = call()
        if self._fails:
            raise RuntimeError("operation not permitted when stream is capturing")
        return SimpleNamespace(replay=lambda: result.copy_(call())), result


@pytest.mark.parametrize("failing", [None, 1])
def test_ranks_capture_a_shared_call_together_or_not_at_all(
    failing: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    def of_rank(group: RankGroup) -> tuple[int, int, int]:
        graphs, calls = CudaGraphs(group=group), itertools.count(1)
        graphs._pool = OnCpu(group.rank, failing)  # type: ignore[assignment]

        def call(inputs: dict[str, Any]) -> torch.Tensor:
            next(calls)
            return group.all_gather(inputs["x"]).sum(0)

        for step in range(4):
            found = graphs._run(("key",), call, {"x": torch.full((2,), group.rank + step)})
            assert found.tolist() == [1 + 2 * step] * 2
        return graphs.captured, graphs.replayed, next(calls) - 1

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(of_rank, groups(2))) == [(1, 3, 5) if failing is None else (0, 0, 5)] * 2


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (signal.SIGKILL, "rank 1 of the engine was killed by SIGKILL"),
        (signal.SIGSTOP, "a rank did not come to an exchange"),  # nobody hears of it but by the time-out
    ],
    ids=str,
)
@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_a_rank_that_ends_or_stands_still_amid_exchanges_ends_the_engine_in_time(
    sent: signal.Signals, said: str, cuda_graphs: bool
) -> None:
    parallel = ParallelConfig(sp_degree=2, collective_timeout_s=20)
    config = EngineConfig("embedded", device="cuda", parallel=parallel, cuda_graphs=cuda_graphs)
    began = 0.0
    with RolloutPipeline.from_config(config) as ranks:
        arrangement = ranks.engine.ranks.arrangement
        assert arrangement.sequence is not None
        assert isinstance(arrangement.sequence.exchange, PeerExchange)
        follower = ranks.engine.ranks.describe()[1]["process_id"]
        assert isinstance(follower, int)

        def strike(done: int, total: int) -> None:
            nonlocal began
            if done == 5:
                began = time.monotonic()
                os.kill(follower, sent)

        with pytest.raises(EngineDiedError, match=said):
            ranks("cat", seed=1, num_inference_steps=200, progress=strike)
    assert time.monotonic() - began < 2 * parallel.collective_timeout_s


def test_ranks_tell_each_other_what_json_can_carry_and_agree_on_an_obstacle() -> None:
    said = [{"rank": 0, "handle": "x" * 300}, {"rank": 1}, {}]

    def of_rank(group: RankGroup) -> list[object]:
        agreed(group, CPU, "")
        with pytest.raises(EngineFaultError, match=r"rank 1 .*: out of memory"):
            agreed(group, CPU, "out of memory" if group.rank == 1 else "")
        return exchanged(group, CPU, said[group.rank])

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(of_rank, groups(3))) == [said] * 3


@pytest.mark.skipif(not triton_is_installed() or INTERPRETED, reason="needs Triton, outside of its interpreter")
def test_in_the_interpreter_all_of_it_holds() -> None:
    assert passed_in_interpreter(__file__) > 0
