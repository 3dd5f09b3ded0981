"""Rank 0 and its followers: real processes, an ordered stream, and what happens when one of them dies."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_control.errors import EngineDiedError
from engine_control.followers import Followers

TESTS = Path(__file__).parent
RANK_0 = """
import os, sys, time
from engine_control.followers import Followers
followers = Followers("listing_follower", [dict(os.environ)], on_death=print)
followers.ask("ready")
followers.announce("sleep")
print(followers.process_ids[0], flush=True)
time.sleep(60)
"""


class Deaths:
    """Hears of a follower's end."""

    def __init__(self) -> None:
        self.heard: queue.SimpleQueue[EngineDiedError] = queue.SimpleQueue()


@pytest.fixture
def deaths() -> Deaths:
    return Deaths()


@pytest.fixture
def followers(deaths: Deaths) -> Iterator[Followers]:
    started = Followers("listing_follower", [dict(os.environ)] * 2, on_death=deaths.heard.put)
    yield started
    started.close()


def test_every_follower_is_told_everything_in_order(followers: Followers) -> None:
    for number in range(50):
        followers.announce(number)
    assert followers.ask("last") == [[*range(50), "last"]] * 2


def test_each_follower_can_be_told_something_of_its_own(followers: Followers) -> None:
    followers.tell_each(["one", "two"])
    assert followers.answers() == [["one"], ["two"]]


def test_closing_ends_the_processes_and_is_no_death(followers: Followers, deaths: Deaths) -> None:
    followers.ask("ready")
    followers.close()
    assert not any(_alive(pid) for pid in followers.process_ids)
    assert deaths.heard.empty()


def test_a_follower_that_still_imports_is_not_waited_for(followers: Followers, deaths: Deaths) -> None:
    followers.close()
    assert [rank.process.returncode for rank in followers._ranks] == [-signal.SIGKILL] * 2
    assert deaths.heard.empty()


def test_a_killed_follower_is_noticed_at_once_by_name(followers: Followers, deaths: Deaths) -> None:
    followers.ask("ready")
    os.kill(followers.process_ids[1], signal.SIGKILL)
    assert "rank 2 of the engine was killed by SIGKILL" in deaths.heard.get(timeout=5).message
    with pytest.raises(EngineDiedError, match="rank 2"):
        followers.announce("more")


def test_a_follower_that_fails_ends_and_nobody_waits_for_its_answer(followers: Followers, deaths: Deaths) -> None:
    followers.ask("ready")
    with pytest.raises(EngineDiedError, match=r"rank \d of the engine ended with exit code 1"):
        followers.ask("fail")
    assert deaths.heard.get(timeout=5) is not None


def test_a_follower_that_is_busy_ends_soon_after_its_rank_0() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
    with subprocess.Popen([sys.executable, "-c", RANK_0], stdout=subprocess.PIPE, env=environment) as rank_0:
        assert rank_0.stdout is not None
        follower = int(rank_0.stdout.readline())
        assert _alive(follower)
        rank_0.kill()
    deadline = time.monotonic() + 20
    while _alive(follower):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _alive(process_id: int) -> bool:
    """Whether the process runs (a zombie doesn't)."""
    try:
        state = Path(f"/proc/{process_id}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
