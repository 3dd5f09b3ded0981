"""Refits and sleep on a GPU: the same bits after a hundred cycles, and nothing that grows."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from diffusion_rl.config import EngineConfig
from diffusion_rl.pipeline import RolloutPipeline
from engine_control.checksum import device_digests
from engine_control.config import ControlConfig
from engine_control.errors import InvalidRequestError

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
FIELDS: dict[str, Any] = {"seed": 3, "num_inference_steps": 3, "num_outputs_per_prompt": 2, "height": 64, "width": 64}
CYCLES = 100
Weights = dict[str, torch.Tensor]


@pytest.fixture
def pipeline(tiny_sd3_folder: Path) -> Iterator[RolloutPipeline]:
    config = EngineConfig(
        str(tiny_sd3_folder),
        dtype="bfloat16",
        device="cuda",
        control=ControlConfig(enable_memory_saver=True),
    )
    with RolloutPipeline.from_config(config) as made:
        yield made


def weights_of(pipeline: RolloutPipeline) -> Weights:
    return {name: tensor.clone() for name, tensor in pipeline.transformer.state_dict().items()}


def pictures(pipeline: RolloutPipeline) -> torch.Tensor:
    return torch.stack([s.generated_output for s in pipeline("a red circle", **FIELDS)])  # type: ignore[misc]


def resources() -> dict[str, int]:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    resident = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return {
        "device": total - free,
        "rss": int(resident.split()[1]) * 1024,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "shm": len(os.listdir("/dev/shm")),
    }


def test_a_hundred_sleeps_and_refits_leave_the_bits_and_nothing_else(pipeline: RolloutPipeline) -> None:
    base = weights_of(pipeline)
    versions = [base, {name: tensor * 1.25 for name, tensor in base.items()}]
    expected = []
    for weights in versions:
        pipeline.refit(weights)
        expected.append(pictures(pipeline))
    assert not torch.equal(*expected)
    before: dict[str, int] = {}
    for cycle in range(CYCLES):
        if cycle == 10:
            before = resources()
        keep = cycle % 3 != 0
        assert pipeline.release_memory_occupation(backup=keep)["sleeping"]
        pipeline.resume_memory_occupation(["weights"])
        if cycle % 2 or not keep:
            pipeline.refit(versions[cycle % 2], staged=cycle % 4 == 1 and keep)
            current = cycle % 2
        pipeline.resume_memory_occupation()
        assert torch.equal(pictures(pipeline), expected[current]), cycle
    after = resources()
    assert after["device"] - before["device"] <= 2 * 2**20
    assert after["rss"] - before["rss"] <= 16 * 2**20
    assert after["descriptors"] <= before["descriptors"]
    assert after["shm"] <= before["shm"]


@pytest.mark.parametrize("fault", ["nan", "infinite"])
def test_what_is_not_finite_is_refused_on_the_device(pipeline: RolloutPipeline, fault: str) -> None:
    base, expected = weights_of(pipeline), pictures(pipeline)
    for name in (next(iter(base)), list(base)[-1]):
        new = {key: tensor * 1.25 for key, tensor in base.items()}
        new[name].view(-1)[-1] = float("nan" if fault == "nan" else "inf")
        with pytest.raises(InvalidRequestError, match="NaN or infinity"):
            pipeline.refit(new)
    assert torch.equal(pictures(pipeline), expected)


def test_a_gpu_and_a_cpu_find_the_same_digest() -> None:
    torch.manual_seed(0)
    for shape, dtype in (
        ((3, 5), torch.bfloat16),
        ((1 << 20,), torch.float32),
        ((7,), torch.uint8),
        ((0,), torch.int64),
    ):
        tensor = torch.randn(shape).mul(100).to(dtype)
        assert device_digests([("t", tensor)]) == device_digests([("t", tensor.cuda())])
