"""Verdicts of certification, remembered: in the process, and in a folder for the processes that come after it.

A verdict is an answer to a `Question` in an `environment`, and is kept under everything in both: the device, the
library versions and switches, the thread count, the sources of this package, the operation with its shape and dtype,
and the candidates. What changes any of them is a question that was never asked, and is probed.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import math
import os
import platform
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

FORMAT = 1
LARGEST_FILE = 64 * 1024  # bytes; a verdict takes less than one
WRITABLE_BY_OTHERS = 0o022
LIBRARIES = ("torch", "diffusers", "triton", "peft")
CPU_FACTS = (  # of /proc/cpuinfo, x86 and Arm: what decides which kernel a library takes
    *("vendor_id", "cpu family", "model", "model name", "stepping", "cache size", "flags"),
    *("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "CPU revision", "Features"),
)


@dataclass(frozen=True)
class Verdict:
    """What was found for one class of operation. implementation is the first that passed; None: none did.

    cached: an earlier process probed it, and this one read what it had found.
    """

    operation: str
    implementation: str | None
    tried: tuple[str, ...]
    failed_at: str | None = None
    microseconds: float | None = None
    cached: bool = False

    @property
    def exact(self) -> bool:
        return self.implementation is not None


@dataclass(frozen=True)
class Question:
    """What is asked: which of `candidates` makes `operation` exact? details: whatever else the answer depends on."""

    operation: str
    candidates: tuple[str, ...]
    details: str = ""


class VerdictCache:
    """A folder of verdicts, one small JSON file each: `<environment's digest>/<question's digest>.json`.

    The folder is made if it isn't there, for its owner alone (0700). It may be deleted at any time, and any number of
    processes may use it at once: a file is written beside its name and then moved there. What can't be read, isn't
    ours, or doesn't answer the very question in the very environment counts as absent; a folder that can't be written,
    or that others could write to, is not used. The first such finding is logged, and nothing is ever raised.
    """

    def __init__(self, folder: str | Path, *, conditions: Mapping[str, str] | None = None) -> None:
        """`conditions` are further things that verdicts depend on, as the caller knows them (a library's switches)."""
        self.folder = Path(folder)
        self._conditions = dict(conditions or {})
        self._complained = False

    def read(self, question: Question, device: torch.device) -> Verdict | None:
        """The verdict that an earlier process left, marked as `cached`; None if there is none that can be used."""
        file = self._file(question, device)
        try:
            self._refuse_open_folder()
            with file.open("rb") as stream:
                content = stream.read(LARGEST_FILE + 1)
            return self._parse(content, question, device)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            self._complain(f"{file}: {error}")
            return None

    def write(self, question: Question, device: torch.device, verdict: Verdict) -> None:
        """Leaves the verdict for later processes, whole or not at all. One that is there already is replaced."""
        file = self._file(question, device)
        kept = {k: v for k, v in asdict(verdict).items() if k != "cached"}
        content = json.dumps({**self._heading(question, device), "verdict": kept}, indent=1)
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._refuse_open_folder()
            file.parent.mkdir(mode=0o700, exist_ok=True)
            _write_atomically(file, content.encode())
        except OSError as error:
            self._complain(str(error))

    def _file(self, question: Question, device: torch.device) -> Path:
        heading = self._heading(question, device)
        return self.folder / digest(heading["environment"]) / f"{digest(heading['question'])}.json"

    def _heading(self, question: Question, device: torch.device) -> dict[str, object]:
        """What stands in a file beside the verdict. A reader compares it: digests only have to find the file."""
        surroundings = {**environment(device), "conditions": self._conditions}
        return {"format": FORMAT, "environment": surroundings, "question": _plain(question)}

    def _parse(self, content: bytes, question: Question, device: torch.device) -> Verdict:
        if len(content) > LARGEST_FILE:
            raise ValueError("too large for a verdict")
        data = json.loads(content)
        if not isinstance(data, dict) or "verdict" not in data:
            raise ValueError("it holds no verdict")
        verdict = _verdict(data.pop("verdict"), question)
        if data != self._heading(question, device):
            raise ValueError("it answers another question")
        return verdict

    def _refuse_open_folder(self) -> None:
        found = self.folder.stat()
        if found.st_uid != os.geteuid() or found.st_mode & WRITABLE_BY_OTHERS:
            raise PermissionError(f"{self.folder} belongs to, or can be written by, somebody else (chmod go-w)")

    def _complain(self, what: str) -> None:
        if not self._complained:
            logger.warning("verdict cache: %s; what can't be used is probed again", what)
        self._complained = True


def find_verdict(
    question: Question, device: torch.device, probe: Callable[[], Verdict], *, cache: VerdictCache | None = None
) -> Verdict:
    """The answer that this process has, else the one in `cache`, else that of `probe()`; afterwards both have it.

    Negative verdicts are answers like any other. Ask inside the mode that the probe runs in: the library switches of
    that moment are part of the environment.
    """
    key = digest({"environment": environment(device), "question": _plain(question)})
    stored = None if cache is None else cache.read(question, device)
    known = _known.get(key) or stored or probe()
    _known[key] = known
    if cache is not None and stored is None:
        cache.write(question, device, known)
    return known


# What this process has found or read. It is one, as the device and the libraries are, for any number of engines: keys
# hold all that an answer depends on.
_known: dict[str, Verdict] = {}


def forget() -> None:
    """Drops what this process remembers; a cache on disk keeps what it has."""
    _known.clear()


def environment(device: torch.device) -> dict[str, object]:
    """All that a verdict depends on beside the question, as JSON would give it back."""
    return {
        "device": _gpu(device) if device.type == "cuda" else _cpu_facts(),
        "threads": torch.get_num_threads(),
        "switches": _switches(),
        "versions": _versions(),
        "kernels": sources_digest(Path(__file__).parent),
    }


def digest(value: object) -> str:
    """16 hexadecimal digits that stand for a JSON value, whatever the order of its keys."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@cache
def sources_digest(folder: Path) -> str:
    """Stands for all Python files below a folder, as they were when this process first asked."""
    files = sorted(folder.rglob("*.py"))
    return digest([[str(f.relative_to(folder)), hashlib.sha256(f.read_bytes()).hexdigest()] for f in files])


def structure_digest(module: torch.nn.Module) -> str:
    """Stands for what a module is made of: classes, configuration, names, shapes and dtypes; not for its weights.

    An adapter that is added, a layer of another class, or another attention processor changes it.
    """
    parts = [
        [name, _qualified(type(part)), _qualified(type(getattr(part, "processor", None)))]
        for name, part in module.named_modules()
    ]
    tensors = [
        [name, list(tensor.shape), str(tensor.dtype)]
        for tensors in (module.named_parameters(), module.named_buffers())
        for name, tensor in tensors
    ]
    return digest([parts, tensors, _configuration(module)])


def _configuration(module: torch.nn.Module) -> str:
    """A diffusers module's configuration without the notes beside it (the folder it came from, defaults in the order of
    a set), which differ from process to process."""
    config = getattr(module, "config", None)
    if not isinstance(config, Mapping):
        return repr(config)
    return json.dumps({k: v for k, v in config.items() if not k.startswith("_")}, sort_keys=True, default=repr)


def _plain(question: Question) -> dict[str, object]:
    return {**asdict(question), "candidates": list(question.candidates)}


def _verdict(data: object, question: Question) -> Verdict:
    """The verdict that was read.

    Raises:
        ValueError: it isn't one, or isn't one that the question could have.
    """
    names = {"operation", "implementation", "tried", "failed_at", "microseconds"}
    if not isinstance(data, dict) or set(data) != names:
        raise ValueError("it holds no verdict")
    verdict = Verdict(**{**data, "tried": question.candidates}, cached=True)
    timed, failed = verdict.microseconds, verdict.failed_at
    if (
        verdict.operation != question.operation
        or verdict.implementation not in (None, *question.candidates)
        or data["tried"] != list(question.candidates)
        or not ((failed is None and verdict.exact) or isinstance(failed, str))
        or not (timed is None or (isinstance(timed, float) and math.isfinite(timed)))
    ):
        raise ValueError("no probe would have found that verdict")
    return verdict


def _write_atomically(file: Path, content: bytes) -> None:
    """Readers see the old file or the new one; a failed attempt leaves nothing behind."""
    handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=".", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
        os.replace(temporary, file)
    except OSError:
        Path(temporary).unlink(missing_ok=True)
        raise


def _qualified(kind: object) -> str:
    return f"{getattr(kind, '__module__', None)}.{getattr(kind, '__qualname__', repr(kind))}"


@cache
def _cpu_facts() -> dict[str, object]:
    """Which CPU this is. The instruction set flags are digested: they are long, and nobody reads them."""
    facts = {"type": "cpu", "machine": platform.machine(), "capability": torch.backends.cpu.get_cpu_capability()}
    found: dict[str, str] = {}
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
        found = dict(re.findall(r"^([^\t:]+?)\s*: (.*)$", first, re.MULTILINE))
    except OSError:
        found = {"model name": platform.processor()}
    known = {name: found[name] for name in CPU_FACTS if name in found}
    long = {name: known.pop(name) for name in ("flags", "Features") if name in known}
    return {**facts, **known, "instructions": digest(long)}


def _gpu(device: torch.device) -> dict[str, object]:
    return _cuda_facts(torch.cuda.current_device() if device.index is None else device.index)


@cache
def _cuda_facts(index: int) -> dict[str, object]:
    properties = torch.cuda.get_device_properties(index)
    driver = Path("/proc/driver/nvidia/version")
    try:
        driver_version = driver.read_text().splitlines()[0]
    except (OSError, IndexError):
        driver_version = "unknown"
    return {
        "type": "cuda",
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "processors": properties.multi_processor_count,  # a slice of a GPU has fewer, and other kernels
        "memory_gib": round(properties.total_memory / 2**30),
        "driver": driver_version,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }


@cache
def _versions() -> dict[str, str | None]:
    """Versions of the libraries whose kernels run, the CUDA libraries that came as packages included."""
    versions: dict[str, str | None] = dict.fromkeys(LIBRARIES)
    for name in LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    versions["torch"] = torch.__version__  # with its build, +cpu or +cu128
    versions["torch build"] = digest(torch.__config__.show())
    if torch.version.cuda is not None:
        for found in importlib.metadata.distributions():
            name = (found.metadata["Name"] or "").lower()
            if name.startswith("nvidia-"):
                versions[name] = found.version
    return versions


def _switches() -> dict[str, object]:
    """The process-wide settings of torch that choose kernels, as they are now."""
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    try:
        precision: str = torch.get_float32_matmul_precision()
    except RuntimeError:  # set through torch's newer interface, which the old one can't express
        precision = "other"
    return {
        "float32_matmul_precision": precision,
        "mkldnn": torch.backends.mkldnn.enabled,
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "cudnn": [cudnn.enabled, cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32],
        "sdp": [cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()],
        "cudnn_sdp": cuda.cudnn_sdp_enabled(),
    }
