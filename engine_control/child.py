"""A child process of ours, and the unnamed socket pair that joins it to its parent.

There is no path or port that anybody else could connect to, and nothing to clean up. Each end sees at once when the
other is gone.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import IO

SEND_BUFFER_BYTES = 4 * 1024 * 1024

Pipe = int | IO[bytes] | None


def start_child(
    module: str, environment: Mapping[str, str], *, stdin: Pipe = None, stdout: Pipe = None, stderr: Pipe = None
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Runs the module's `main()` in a process with that environment, which finds the descriptor of its socket in
    `sys.argv[1]`. Returns the process and this end of the socket."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "engine_control.start", module, str(theirs.fileno())],
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            pass_fds=(theirs.fileno(),),
            # The child must import the very code that this process runs, however it found it.
            env={**environment, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
    return process, ours


def connection_from_descriptor(descriptor: int) -> socket.socket:
    """The child's end. Afterwards no process that the child starts inherits it, and a terminal's Ctrl-C, which every
    process of the group gets, is left to the process that serves."""
    os.set_inheritable(descriptor, False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = socket.socket(fileno=descriptor)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    return connection


def how_it_ended(code: int) -> str:
    """A process's return code in words."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
