"""What certification found outlives the process, and a cache that is broken in any way changes nothing."""

from __future__ import annotations

import copy
import json
import logging
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import free_port, start_service, stop_service
from equality import assert_same_bits
from tiny_models import sd3_pipeline

from diffusion_rl import RolloutPipeline
from diffusion_rl.cli.doctor import _certificate
from diffusion_rl.cli.service_process import running_service
from diffusion_rl.config import EngineConfig, ParallelConfig, default_verdict_cache, kernel_settings
from diffusion_rl.models import family_for
from diffusion_rl.models.loading import load_pipeline
from diffusion_rl.rollout.certification import make_exact
from rl_kernels import verdict_cache
from rl_kernels.certify import Certificate, OperationClass, Recorded, certify
from rl_kernels.linear import IMPLEMENTATIONS, padded_rows
from rl_kernels.verdict_cache import Question, Verdict, VerdictCache, find_verdict, forget, structure_digest

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[1]
QUESTION = Question("linear 8x8 float32", ("padded_rows", "fixed_tiles"), "rows 1 to 16")
FOUND = Verdict(QUESTION.operation, "fixed_tiles", QUESTION.candidates, "padded_rows: 1 rows from 0", 12.5)
RECORDED = {
    OperationClass("linear", (64, 32), torch.float32): Recorded(F.linear, tokens=(12,)),
    OperationClass("attention", (4, 12, 16), torch.float32): Recorded(F.scaled_dot_product_attention),
    OperationClass("silu", (12, 64), torch.float32): Recorded(F.silu),
}
ANOTHER_PROCESS = """
import sys, torch, torch.nn.functional as F
from rl_kernels.certify import OperationClass, Recorded, certify
from rl_kernels.verdict_cache import VerdictCache
torch.set_num_threads(int(sys.argv[2]))
recorded = {OperationClass("linear", (64, 32), torch.float32): Recorded(F.linear, tokens=(12,))}
certificate = certify(recorded, torch.device("cpu"), cache=VerdictCache(sys.argv[1]))
print(certificate.exact, certificate.cached)
"""


@pytest.fixture(autouse=True)
def _nothing_remembered() -> Iterator[None]:
    forget()
    yield
    forget()


@pytest.fixture
def cache(tmp_path: Path) -> VerdictCache:
    return VerdictCache(tmp_path / "verdicts")


def never() -> Verdict:
    raise AssertionError("it was probed although the verdict was known")


def certified(cache: VerdictCache | None) -> Certificate:
    """As a fresh process would certify."""
    forget()
    return certify(RECORDED, CPU, cache=cache)


def files(cache: VerdictCache) -> list[Path]:
    return sorted(p for p in cache.folder.rglob("*") if p.is_file())


def without_times(certificate: Certificate) -> list[Verdict]:
    return [replace(v, microseconds=None, cached=False) for v in certificate.verdicts]


def test_the_next_process_reads_what_this_one_probed(cache: VerdictCache) -> None:
    first, second = certified(cache), certified(cache)
    assert [v.cached for v in first.verdicts] == [False] * 3
    assert [v.cached for v in second.verdicts] == [True] * 3
    assert (first.cached, second.cached) == (0, 3)
    assert [replace(v, cached=False) for v in second.verdicts] == list(first.verdicts)
    assert second.choices == first.choices


def test_another_process_reads_it_but_not_at_another_thread_count(cache: VerdictCache) -> None:
    def run(threads: int) -> str:
        command = [sys.executable, "-c", ANOTHER_PROCESS, str(cache.folder), str(threads)]
        env = {**os.environ, "PYTHONPATH": str(ROOT / "kernels")}
        return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.strip()

    assert [run(1), run(1), run(2), run(2)] == ["True 0", "True 1", "True 0", "True 1"]


def test_within_a_process_nothing_is_probed_twice_and_a_cache_given_later_gets_it_all(cache: VerdictCache) -> None:
    find_verdict(QUESTION, CPU, lambda: FOUND)
    assert find_verdict(QUESTION, CPU, never) == FOUND
    assert certify(RECORDED, CPU).cached == 0
    assert certify(RECORDED, CPU, cache=cache).cached == 0
    assert len(files(cache)) == 3
    assert certified(cache).cached == 3


def test_a_negative_verdict_is_honoured(cache: VerdictCache) -> None:
    refused = Verdict(QUESTION.operation, None, QUESTION.candidates, "padded_rows: 1 rows from 0")
    assert not find_verdict(QUESTION, CPU, lambda: refused, cache=cache).exact
    forget()
    known = find_verdict(QUESTION, CPU, never, cache=cache)
    assert known == replace(refused, cached=True)


def test_what_a_verdict_depends_on_makes_it_another_question(
    cache: VerdictCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [
        QUESTION,
        replace(QUESTION, operation="linear 8x16 float32"),
        replace(QUESTION, candidates=("fixed_tiles",)),
        replace(QUESTION, details="rows 1 to 32"),
    ]
    for question in asked:
        assert cache.read(question, CPU) is None
        cache.write(question, CPU, replace(FOUND, operation=question.operation, tried=question.candidates))
    for name, other in (
        ("_cpu_facts", {"type": "cpu", "model name": "another"}),
        ("_versions", {"torch": "2.8.0+cpu"}),
        ("_switches", {"mkldnn": False}),
        ("sources_digest", "edited"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(verdict_cache, name, lambda *_, value=other: value)
            assert cache.read(QUESTION, CPU) is None, name
    assert VerdictCache(cache.folder, conditions={"MKL_CBWR": "AVX2"}).read(QUESTION, CPU) is None
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        assert cache.read(QUESTION, CPU) is None
    finally:
        torch.set_num_threads(threads)
    assert cache.read(QUESTION, CPU) == replace(FOUND, cached=True)


def test_an_edited_kernel_is_probed_again(tmp_path: Path) -> None:
    for name, text in (("before", "ROWS = 16"), ("same", "ROWS = 16"), ("after", "ROWS = 32")):
        (tmp_path / name / "jit").mkdir(parents=True)
        (tmp_path / name / "jit" / "kernel.py").write_text(text)
    before, same, after = (verdict_cache.sources_digest(tmp_path / n) for n in ("before", "same", "after"))
    assert before == same != after


def test_an_implementation_of_another_name_is_probed_again(
    cache: VerdictCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def another(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return padded_rows(x, weight, bias)

    certified(cache)
    monkeypatch.setitem(IMPLEMENTATIONS, "padded_rows", another)
    assert [v.cached for v in certified(cache).verdicts] == [False, True, True]


def damaged(content: bytes) -> dict[str, bytes]:
    """Everything that a file may be instead of a verdict."""
    data = json.loads(content)
    verdict = data["verdict"]

    def with_verdict(**changed: object) -> bytes:
        return json.dumps({**data, "verdict": {**verdict, **changed}}).encode()

    return {
        "empty": b"",
        "truncated": content[: len(content) // 2],
        "not text": b"\xff\xfe\x00" * 50,
        "another document": b'{"hello": [1, 2]}',
        "a list": b"[]",
        "deeply nested": b"[" * 60_000,
        "huge": content + b" " * 10**6,
        "another format": json.dumps({**data, "format": 0}).encode(),
        "another environment": json.dumps({**data, "environment": {}}).encode(),
        "no verdict": json.dumps({**data, "verdict": None}).encode(),
        "a field too many": with_verdict(cached=True),
        "an implementation that was no candidate": with_verdict(implementation="library"),
        "refused without a reason": with_verdict(implementation=None, failed_at=None),
        "another operation": with_verdict(operation="silu 8 float32"),
        "other candidates": with_verdict(tried=["fixed_tiles"]),
        "candidates that are no list": with_verdict(tried=7),
        "a time that is no number": with_verdict(microseconds="fast"),
        "a time beyond all numbers": with_verdict(microseconds=10**400),
        "a time that isn't finite": with_verdict(microseconds=float("nan")),
    }


def test_whatever_stands_in_a_file_it_is_probed_again_and_replaced(
    cache: VerdictCache, caplog: pytest.LogCaptureFixture
) -> None:
    cache.write(QUESTION, CPU, FOUND)
    (file,) = files(cache)
    good = file.read_bytes()
    for name, content in damaged(good).items():
        file.write_bytes(content)
        caplog.clear()
        forget()
        fresh = VerdictCache(cache.folder)
        assert find_verdict(QUESTION, CPU, lambda: FOUND, cache=fresh) == FOUND, name
        assert len(caplog.records) == 1, name
        assert str(file) in caplog.text
        assert file.read_bytes() == good, name
        assert fresh.read(QUESTION, CPU) == replace(FOUND, cached=True), name


def test_a_cache_that_cannot_be_written_is_mentioned_once_and_the_verdicts_are_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = without_times(certified(None))
    in_the_way = tmp_path / "a file"
    in_the_way.write_text("not a folder")
    for folder in (in_the_way, in_the_way / "below", Path("/proc/verdicts")):
        caplog.clear()
        assert without_times(certified(VerdictCache(folder))) == expected
        assert len(caplog.records) == 1, folder
        assert caplog.records[0].levelno == logging.WARNING
    assert in_the_way.read_text() == "not a folder"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_cache_is_read(cache: VerdictCache, caplog: pytest.LogCaptureFixture) -> None:
    cache.write(QUESTION, CPU, FOUND)
    for folder in (cache.folder, *cache.folder.iterdir()):
        folder.chmod(0o500)
    assert find_verdict(QUESTION, CPU, never, cache=cache).cached
    other = replace(QUESTION, details="unknown")
    assert find_verdict(other, CPU, lambda: FOUND, cache=cache) == FOUND
    assert len(caplog.records) == 1


def test_a_folder_that_others_could_write_to_is_not_believed(
    cache: VerdictCache, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.write(QUESTION, CPU, FOUND)
    cache.folder.chmod(0o777)
    assert cache.read(QUESTION, CPU) is None
    assert "chmod go-w" in caplog.text
    cache.folder.chmod(0o755)
    assert cache.read(QUESTION, CPU) is not None
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert cache.read(QUESTION, CPU) is None


def test_the_folder_is_private_and_nothing_but_verdicts_is_left_in_it(cache: VerdictCache) -> None:
    certified(cache)
    for folder in (cache.folder, *(p for p in cache.folder.iterdir())):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert all(stat.S_IMODE(f.stat().st_mode) == 0o600 and f.suffix == ".json" for f in files(cache))


def test_a_write_that_fails_leaves_the_old_verdict_and_no_rubbish(
    cache: VerdictCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache.write(QUESTION, CPU, FOUND)
    before = {f: f.read_bytes() for f in files(cache)}

    def refuse(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", refuse)
    cache.write(QUESTION, CPU, replace(FOUND, microseconds=1.0))
    assert {f: f.read_bytes() for f in files(cache)} == before
    assert "No space left" in caplog.text


def test_nothing_is_written_or_logged_without_a_cache(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert certified(None).cached == 0
    assert not caplog.records


def test_a_modules_structure_is_its_classes_names_shapes_and_dtypes_but_not_its_weights() -> None:
    def net(width: int = 8, dtype: torch.dtype = torch.float32, act: type[torch.nn.Module] = torch.nn.SiLU) -> Any:
        return torch.nn.Sequential(torch.nn.Linear(4, width), act()).to(dtype)

    assert structure_digest(net()) == structure_digest(net())
    others = [net(width=16), net(dtype=torch.bfloat16), net(act=torch.nn.GELU), torch.nn.Sequential(net())]
    assert structure_digest(net()) not in {structure_digest(other) for other in others}


def test_a_modules_structure_is_the_same_wherever_it_was_loaded_from(tmp_path: Path) -> None:
    digests = set()
    for name in ("here", "there"):
        sd3_pipeline().save_pretrained(tmp_path / name)
        loaded, _ = load_pipeline(str(tmp_path / name))
        digests.add((structure_digest(loaded.transformer), structure_digest(loaded.vae)))
    in_memory = sd3_pipeline()
    digests.add((structure_digest(in_memory.transformer), structure_digest(in_memory.vae)))
    assert len(digests) == 1


ROLLOUT: dict[str, Any] = {"seed": 4, "num_inference_steps": 2, "rollout_return_dit_trajectory": True}


def tables(pipeline: RolloutPipeline) -> tuple[dict[str, Any], list[bool]]:
    """What the engine says of its exactness, and which of its verdicts an earlier start had found."""
    about: Any = pipeline.engine.describe()["deterministic"]
    return about, [verdict["cached"] for verdict in about["table"]]


def test_a_second_start_probes_nothing_and_has_the_same_choices_and_the_same_bits(cache: VerdictCache) -> None:
    config = EngineConfig(verdict_cache=str(cache.folder))
    first = RolloutPipeline.from_config(config)
    forget()
    written = {file: file.stat().st_mtime_ns for file in files(cache)}
    second = RolloutPipeline.from_config(config)
    assert {file: file.stat().st_mtime_ns for file in files(cache)} == written
    (before, probed), (after, read) = tables(first), tables(second)
    assert (before["cached"], after["cached"]) == (0, len(after["table"]))
    assert not any(probed)
    assert all(read)
    assert len(written) == len(read) + 1  # the pictures that are decoded together aren't in the table
    assert [{**v, "cached": True} for v in before["table"]] == after["table"]
    one, other = first.engine.family, second.engine.family
    assert one.choices == other.choices
    assert one.decodes_together == other.decodes_together
    for a, b in zip(first("a red circle", **ROLLOUT), second("a red circle", **ROLLOUT), strict=True):
        assert_same_bits(a, b)
    assert "found by an earlier start" not in _certificate(first).detail
    assert f"; {len(read)} found by an earlier start" in _certificate(second).detail


def test_a_service_says_what_it_took_from_an_earlier_start(cache: VerdictCache, tmp_path: Path) -> None:
    found = []
    for name in ("first", "second"):
        engine: dict[str, object] = {"verdict_cache": str(cache.folder)}
        service = start_service(engine, {"port": free_port()}, tmp_path / f"{name}.txt")
        service.wait_until(service.healthy)
        about = service.http.get("/server_info").json()["deterministic"]
        found.append((about, service.client().generate("a red circle", **ROLLOUT)))
        stop_service(service)
    (before, samples), (after, later) = found
    assert before["enabled"] is after["enabled"] is True
    assert (before["cached"], after["cached"]) == (0, len(after["table"]))
    assert_same_bits(samples[0], later[0])


def test_ranks_probe_what_they_share_at_every_start(cache: VerdictCache, tiny_sd3_folder: Path) -> None:
    config = EngineConfig(str(tiny_sd3_folder), verdict_cache=str(cache.folder), parallel=ParallelConfig(sp_degree=2))
    for known in (False, True):
        forget()
        with RolloutPipeline.from_config(config) as pipeline:
            _, read = tables(pipeline)
            assert read == [known] * (len(read) - 1) + [False]


def test_weights_that_were_broken_refuse_nothing_to_the_next_checkpoint(cache: VerdictCache) -> None:
    broken = family_for(copy.deepcopy(sd3_pipeline()))
    broken.pipeline.transformer.proj_out.bias.data[0] = float("nan")
    refused = make_exact(broken, "auto", cache=cache).describe()["refused"]
    assert refused == ["transformer SD3Transformer2DModel"]
    assert make_exact(family_for(sd3_pipeline()), "auto", cache=cache).enabled


def test_nothing_is_kept_where_no_folder_is_configured(
    cache: VerdictCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_sd3_folder: Path
) -> None:
    monkeypatch.setenv("DIFFUSION_RL_VERDICT_CACHE", str(cache.folder))
    RolloutPipeline.from_config(EngineConfig(str(tiny_sd3_folder), verdict_cache=None))
    log = tmp_path / "service.log"
    with running_service(str(tiny_sd3_folder), port=0, log=log, arguments=["--no-verdict-cache"]) as service:
        service.wait_ready()
    assert not cache.folder.exists()


def test_the_folder_is_the_users_unless_the_environment_names_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    cases: list[tuple[dict[str, str], str | None]] = [
        ({}, "/home/somebody/.cache/diffusion-rl"),
        ({"XDG_CACHE_HOME": "/fast"}, "/fast/diffusion-rl"),
        ({"XDG_CACHE_HOME": "not/absolute"}, "/home/somebody/.cache/diffusion-rl"),
        ({"DIFFUSION_RL_VERDICT_CACHE": "/verdicts", "XDG_CACHE_HOME": "/fast"}, "/verdicts"),
        ({"DIFFUSION_RL_VERDICT_CACHE": "off"}, None),
        ({"DIFFUSION_RL_VERDICT_CACHE": ""}, None),
    ]
    for variables, expected in cases:
        with monkeypatch.context() as patch:
            for name in ("DIFFUSION_RL_VERDICT_CACHE", "XDG_CACHE_HOME"):
                patch.delenv(name, raising=False)
            for name, value in variables.items():
                patch.setenv(name, value)
            assert default_verdict_cache() == expected, variables
            assert EngineConfig().verdict_cache == expected


def test_the_switches_of_the_libraries_are_part_of_the_question(monkeypatch: pytest.MonkeyPatch) -> None:
    before = kernel_settings()
    monkeypatch.setenv("MKL_CBWR", "AVX2")
    monkeypatch.setenv("MALLOC_TOP_PAD_", "1")
    assert kernel_settings() == {**before, "MKL_CBWR": "AVX2"}
