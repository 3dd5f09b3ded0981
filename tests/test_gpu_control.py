"""Refits and sleep on a GPU: the same bits after a hundred cycles, and nothing that grows."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import save, sd3_pipeline

from diffusion_rl.config import EngineConfig
from diffusion_rl.models.offload import LayerwiseOffload
from diffusion_rl.models.runner import eager
from diffusion_rl.pipeline import RolloutPipeline
from diffusion_rl.rollout.offloaded_target import OffloadedTarget
from engine_control.checksum import device_digests
from engine_control.config import ControlConfig
from engine_control.errors import InvalidRequestError

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
FIELDS: dict[str, Any] = {"seed": 3, "num_inference_steps": 3, "num_outputs_per_prompt": 2, "height": 64, "width": 64}
CYCLES = 100
Weights = dict[str, torch.Tensor]


def config_of(folder: Path, **others: Any) -> EngineConfig:
    control = ControlConfig(enable_memory_saver=True)
    return EngineConfig(str(folder), dtype="bfloat16", device="cuda", control=control, **others)


@pytest.fixture(params=[False, True], ids=["resident", "offloaded"])
def pipeline(tiny_sd3_folder: Path, request: pytest.FixtureRequest) -> Iterator[RolloutPipeline]:
    config = config_of(tiny_sd3_folder, dit_layerwise_offload=request.param)
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


def test_an_offloaded_transformer_has_the_bits_of_a_resident_one_and_captures_no_graph(tmp_path: Path) -> None:
    """Fused blocks, merges and staged refits included; its blocks lie in pinned host memory."""
    folder = save(sd3_pipeline(layers=6), tmp_path / "deep")
    generator = torch.Generator().manual_seed(5)
    layer = "transformer_blocks.3.attn.to_q"
    halves = {f"{layer}.{half}.weight": torch.randn(128, 128, generator=generator) for half in ("lora_A", "lora_B")}
    found = []
    for offload in (False, True):
        with RolloutPipeline.from_config(config_of(folder, dit_layerwise_offload=offload)) as made:
            bits = [pictures(made) for _ in range(3)]  # the third would replay a graph
            assert torch.equal(bits[0], bits[2])
            made.begin_weight_update(partial=True)
            made.update_weights_from_tensor(halves.items(), weight_update_mode="lora_merge")
            made.end_weight_update()
            bits.append(pictures(made))
            made.refit({name: t * 1.25 for name, t in weights_of(made).items()}, staged=True)
            bits.append(pictures(made))
            fused = made.engine.family.choices.fused
            found.append((bits, made.get_weights_checksum(), fused, made.engine.exactness.enabled))
            if offload:
                told: Any = made.engine.describe()["dit_layerwise_offload"]
                assert told["pinned"]
                assert made.engine.family.runner is eager
                assert {p.device.type for p in made.transformer.transformer_blocks.parameters()} == {"cpu"}  # type: ignore[union-attr]
    (resident, *rest), (offloaded, *same) = found
    assert all(torch.equal(a, b) for a, b in zip(resident, offloaded, strict=True))
    assert rest == same


class Wide(torch.nn.Module):
    """Blocks whose weights take longer to copy, or to compute with, than a launch takes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(4096, 4096, bias=False) for _ in range(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        return x


@pytest.mark.parametrize("rows", [16, 16384], ids=["copies are slower", "computing is slower"])
@torch.no_grad()
def test_offloaded_blocks_wait_for_their_copies_and_take_two_slots_however_far_the_host_is_ahead(rows: int) -> None:
    resident = Wide().to("cuda", torch.bfloat16)
    inputs = [torch.randn(rows, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(10)]
    expected = [resident(x) for x in inputs]
    block = resident.blocks[0].weight.nbytes  # type: ignore[union-attr, operator]
    moved = copy.deepcopy(resident)
    del resident
    LayerwiseOffload(moved, torch.device("cuda", torch.cuda.current_device()))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = [moved(x) for x in inputs]  # nothing is waited for in between
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    kept = sum(x.nbytes for x in found)
    assert torch.cuda.max_memory_allocated() - before <= 2 * block + kept + 4 * inputs[0].nbytes


@torch.no_grad()
def test_new_bytes_never_reach_a_forward_that_was_launched_before_them() -> None:
    """The host writes as soon as it may; the device is then still busy with the forward."""
    moved = Wide().to("cuda", torch.bfloat16)
    offload = LayerwiseOffload(moved, torch.device("cuda", torch.cuda.current_device()))
    target = OffloadedTarget({"transformer": moved}, [offload])
    x = torch.randn(8192, 4096, device="cuda", dtype=torch.bfloat16)
    versions = [{n: (t * scale).clone() for n, t in moved.state_dict().items()} for scale in (1.0, 1.5)]
    expected = []
    for weights in versions:
        resident = Wide().to("cuda", torch.bfloat16)
        resident.load_state_dict(weights)
        expected.append(resident(x))
    assert not torch.equal(*expected)
    for turn in range(20):
        found = moved(x)
        for name, tensor in versions[(turn + 1) % 2].items():
            for live, new in target.destinations("transformer", name, tensor):
                live.copy_(new)
        assert torch.equal(found, expected[turn % 2]), turn


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
