"""Library switches that exactness needs and that are process-wide, whatever thread asks.

While any thread is inside, for the whole process: cuBLASLt is the preferred matmul library, a half-precision product is
neither split along its sum (split-K) nor reduced in half precision, TF32 is off, and attention runs on cuDNN, whose
bits depend neither on the batch nor on which heads it is given (or, for what cuDNN can't do, fp32 for example, on the
memory-efficient backend). The last one to leave restores what was there. Without a GPU nothing is switched.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

_REDUCTIONS = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")


@dataclass
class ProcessSettings:
    """Counts who needs the switches. One instance a process, since what it guards exists once a process."""

    _lock: threading.Lock = field(default_factory=threading.Lock)
    _holders: int = 0
    _switched: ExitStack = field(default_factory=ExitStack)

    def acquire(self) -> None:
        """Afterwards the switches are set, and stay so until as many `release` calls."""
        with self._lock:
            if self._holders == 0 and torch.cuda.is_available():
                self._switched = _switch_cuda()
            self._holders += 1

    def release(self) -> None:
        """Undoes one `acquire`; the last one restores every switch."""
        with self._lock:
            self._holders -= 1
            if self._holders == 0:
                self._switched.close()

    @property
    def active(self) -> bool:
        return self._holders > 0


PROCESS_SETTINGS = ProcessSettings()


@contextmanager
def exact_library_settings() -> Iterator[None]:
    """The switches, for the block; re-entrant, and from any number of threads."""
    PROCESS_SETTINGS.acquire()
    try:
        yield
    finally:
        PROCESS_SETTINGS.release()


def _switch_cuda() -> ExitStack:
    """Sets the switches; closing the result restores them in reverse order."""
    cuda, matmul, restore = torch.backends.cuda, torch.backends.cuda.matmul, ExitStack()
    restore.callback(cuda.preferred_blas_library, cuda.preferred_blas_library())
    cuda.preferred_blas_library("cublaslt")
    for name in _REDUCTIONS:
        # The plain attribute tells half of the switch; the other half, split-K, has a name of its own.
        restore.callback(setattr, matmul, name, (getattr(matmul, name), getattr(matmul, f"{name}_split_k", True)))
        setattr(matmul, name, (False, False))
    restore.callback(setattr, matmul, "allow_tf32", matmul.allow_tf32)
    matmul.allow_tf32 = False
    restore.enter_context(
        sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH], set_priority=True)
    )
    return restore
