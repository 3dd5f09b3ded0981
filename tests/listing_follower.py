"""A follower process that keeps a list of what it was told."""

from __future__ import annotations

import sys
import time

from engine_control.child import connection_from_descriptor
from engine_control.followers import follow


def main() -> None:
    told: list[object] = []

    def handle(decision: object) -> object:
        if decision == "sleep":
            time.sleep(60)
        if decision == "fail":
            raise ValueError("told to fail")
        told.append(decision)
        return told

    follow(connection_from_descriptor(int(sys.argv[1])), handle)
