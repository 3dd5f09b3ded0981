"""How a child process of ours begins: `python -m engine_control.start MODULE DESCRIPTOR` calls the module's `main()`.

What torch and the model libraries make when they are imported, a million objects, stays to the end. Collections of
garbage would walk it again and again while it comes, between two steps later on, and once more when the interpreter
ends: more than a third of the CPU time of a process that starts, loads a small model and ends.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """For imports. Inside, no garbage is collected; afterwards no collection walks what is there by then."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collects:
            gc.enable()


def keep_what_is_loaded() -> None:
    """For a model that has been loaded: its garbage is collected, and no collection walks the rest again, in the middle
    of a step or a refit."""
    gc.collect()
    gc.freeze()


def main() -> None:
    name = sys.argv.pop(1)
    with without_collections():
        module = importlib.import_module(name)
    module.main()


if __name__ == "__main__":
    main()
