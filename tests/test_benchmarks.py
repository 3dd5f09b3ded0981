"""Each benchmark runs at its smallest setting and leaves a complete report. No time is asserted."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import (
    bench_collecting,
    bench_encoding,
    bench_exactness_cost,
    bench_gpu_ranks,
    bench_http_rollout,
    bench_kernels,
    bench_llm,
    bench_memory,
    bench_memory_saver,
    bench_prefix_sharing,
    bench_rank_refit,
    bench_ranks,
    bench_ratio_deviation,
    bench_refit,
    bench_rollout,
    bench_step_batching,
    bench_train_loop,
    make_checkpoint,
    profile_decode,
    profile_llm,
    profile_step,
    run_all,
    tune_paged_attention,
)
from benchmarks.full_size import SHAPES, asked, run
from benchmarks.measure import Budget, Series, alternate, quartiles, ratio
from benchmarks.plain_diffusers import PlainRollout, plain_rollout, roll_out
from benchmarks.rank_refit_sender import bucketed
from benchmarks.refit_breakdown import HOST
from benchmarks.rollout_subject import NOISE_LEVEL, Subject
from diffusion_rl.assets import embedded_model_path
from diffusion_rl.config import EngineConfig
from diffusion_rl.rollout.engine import RolloutEngine
from diffusion_rl.rollout.noise import NoiseStream, normal_noise

KEYS = {
    "benchmark",
    "question",
    "commit",
    "date",
    "hardware",
    "versions",
    "settings",
    "results",
    "ratios",
    "limit",
}
SMALLEST = {
    "collecting": (bench_collecting.main, "--batch 1 --steps 1 --profiled-calls 1"),
    "exactness_cost": (bench_exactness_cost.main, "--rows 2"),
    "prefix_sharing": (bench_prefix_sharing.main, "--groups 2 --first-steps 1 --steps 2"),
    "rollout": (bench_rollout.main, "--batch 1,2 --steps 1 --matmul-size 64 --arrivals 2"),
    "ranks": (
        bench_ranks.main,
        "--cases wide --layouts sp2 --group 1 --steps 1 --width 64 --layers 1 --size 64",
    ),
    "ratio_deviation": (
        bench_ratio_deviation.main,
        "--dtypes fp32 --prompts 1 --group 2 --steps 2 --micro-batches 1,2 --lora-rank 4 --layouts none",
    ),
    "step_batching": (bench_step_batching.main, "--requests 2 --groups 2,2 --steps 2 --no-http"),
    "encoding": (bench_encoding.main, "--group 2 --steps 2 --codec-repeats 1"),
    "refit": (bench_refit.main, "--device cpu --arms packed,disk"),
    "llm": (bench_llm.main, "--batch 2 --new 3 --device cpu"),
    "memory_saver": (bench_memory_saver.main, "--gib 0.01 --tensors 3 --device cpu"),
    "memory": (
        bench_memory.main,
        "--cases safetensors --group 2 --steps 2 --early 2 --late 4 --flat-group 1 --flat-steps 1",
    ),
}
NEED_A_GPU = {"gpu_exactness", "gpu_ranks", "http_rollout", "kernels", "rank_refit", "train_loop"}
needs_embedded_model = pytest.mark.skipif(not embedded_model_path().is_dir(), reason="the embedded model is not here")


@needs_embedded_model
@pytest.mark.parametrize("name", SMALLEST)
def test_a_benchmark_leaves_a_complete_report(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main, options = SMALLEST[name]
    report = report_of(main, [*options.split(), "--repeats", "1"], tmp_path / "results" / f"{name}.json")
    assert set(report) == KEYS
    assert report["benchmark"] == name
    assert report["question"].endswith("?")
    assert all(report[key] for key in ("results", "ratios", "limit"))
    assert all(isinstance(value, float | int) for value in report["ratios"].values())
    assert report["settings"]["repeats"] == 1
    assert {"cpu", "cores", "threads", "gpu"} <= set(report["hardware"])
    assert str(Path.home()) not in json.dumps(report)
    assert str(tmp_path) not in json.dumps(report)
    assert "│" in capsys.readouterr().out  # a table


@needs_embedded_model
def test_a_benchmark_whose_samples_differ_says_so_and_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def guided_otherwise(*arguments: Any, **fields: Any) -> PlainRollout:
        return plain_rollout(*arguments, **{**fields, "guidance_scale": 1.5})

    monkeypatch.setattr(bench_step_batching, "plain_rollout", guided_otherwise)
    options = ["--requests", "2", "--groups", "2,2", "--steps", "2", "--no-http", "--repeats", "1"]
    assert bench_step_batching.main([*options, "--out", str(tmp_path / "report.json")]) == 1
    assert "NOT THE SAME: the plain loop's pictures" in capsys.readouterr().out


def test_ranks_are_compared_at_full_size_and_a_layout_that_fails_leaves_its_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = "--cases tiny-sd3:64x32:1 --layouts sp3,sp2 --steps 1 --repeats 1 --link-mib 0 --device cpu"
    assert bench_gpu_ranks.main([*options.split(), "--out", str(tmp_path / "report.json")]) == 1
    alone, failed, ranks = json.loads((tmp_path / "report.json").read_text())["results"]
    assert "2 attention heads can't be shared by 3 ranks" in failed["error"]
    assert ranks["case"] == "tiny-sd3 64x32, 1 samples: sp2"
    assert ranks["compared_elements"] == alone["compared_elements"] > 0
    assert ranks["differing_elements"] == 0
    assert ranks["efficiency"] == pytest.approx(ranks["one_device_over_this"] / 2, rel=1e-4)
    assert [rank["tokens"] for rank in ranks["work_of_ranks"]] == [ranks["work_of_ranks"][0]["tokens"]] * 2
    assert "WRONG: tiny-sd3: sp3" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["sd3.5-medium", "unknown:512", "wan-1.3b:480x832x33x2", "wan-1.3b:480:"])
def test_a_case_that_says_too_little_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="SHAPE:SIZE"):
        bench_gpu_ranks.case(text)


def test_several_trainers_refit_an_engine_of_ranks_and_an_arm_that_fails_leaves_its_error(tmp_path: Path) -> None:
    options = (
        "--shapes unknown,tiny-sd3 --layout sp1 --trainers 2 --bucket-mib 4 --device cpu --arms broadcast,packed,sleep"
    )
    assert bench_rank_refit.main([*options.split(), "--repeats", "1", "--out", str(tmp_path / "report.json")]) == 1
    report = json.loads((tmp_path / "report.json").read_text())
    link, unknown, refit, packed, *slept = report["results"]
    assert "unknown" in unknown["error"]
    assert refit["calls"] > packed["calls"] == 2
    assert refit["of_link"] == pytest.approx(refit["bytes_per_s"] / link["broadcast_bytes_per_s"], rel=1e-4)
    assert refit["total_ms"] >= refit["applied_ms"] > 0
    for row in (refit, packed):
        assert min(row[f"{part}_ms"] for part in HOST) >= 0
        assert row["applied_ms"] >= sum(row[f"{part}_ms"] for part in HOST) > row["first_ms"] > 0
    assert [row["bytes"] for row in slept] == [refit["bytes"]] * 2


def test_a_training_loop_has_a_trainer_and_an_engine_of_their_own(tmp_path: Path) -> None:
    sizes = "--shape tiny-sd3 --size 64 --epochs 2 --prompts 2 --group 2 --steps 3 --lora 4 --bucket-mib 16"
    assert bench_train_loop.main([*sizes.split(), "--device", "cpu", "--out", str(tmp_path / "report.json")]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    _, first, second = report["results"]
    assert first["warmup"]["ratios"] == first["warmup"]["ratios_exactly_one"] == 2 * 2 * 2
    assert first["warmup"]["gradient_norm"] > 0
    assert 0 < second["largest_ratio_gap"] < 1e-2  # merged weights are rounded once more than the adapter's own sum
    assert sum(second["seconds"][name] for name in bench_train_loop.PHASES) == pytest.approx(
        second["seconds"]["epoch"], rel=1e-4
    )
    assert report["ratios"]["trainer: idle share"] == second["idle"]["trainer"]


def test_ranks_that_share_a_language_models_weights_stand_beside_one(tmp_path: Path) -> None:
    sizes = "--shape tiny --workload nano --requests 1 --longest 100 --tp-size 2 --repeats 1 --device cpu"
    report = report_of(bench_llm.main, sizes.split(), tmp_path / "report.json")
    alone, _, ranks = report["results"]
    assert (alone["output_tokens"], ranks["output_tokens"]) == (100, 100)
    expected = pytest.approx(alone["median_s"] / ranks["median_s"], rel=1e-4)
    assert report["ratios"]["nano: exact on 1 rank / on 2, seconds"] == expected


def test_buckets_hold_every_tensor_in_order_and_no_more_than_they_may() -> None:
    named = [(str(size), torch.zeros(size, dtype=torch.uint8)) for size in (3, 3, 9, 1, 4, 2)]
    buckets = bucketed(named, 6)
    assert [[name for name, _ in bucket] for bucket in buckets] == [["3", "3"], ["9"], ["1", "4"], ["2"]]


def test_a_checkpoint_is_made_and_served_and_its_replies_are_taken_apart(tmp_path: Path) -> None:
    assert make_checkpoint.main([str(tmp_path / "model"), "--tiny", "--layers", "2"]) == 0
    options = f"--model {tmp_path / 'model'} --size 64 --steps 2 --groups 2 --concurrency 1,2 --repeats 1"
    report = report_of(bench_http_rollout.main, options.split(), tmp_path / "report.json")
    rows = {row["name"]: row for row in report["results"] if row.get("concurrency") == 1}
    assert set(rows) == {"all", "pictures", "latents"}
    assert rows["all"]["megabytes"] > rows["pictures"]["megabytes"] > rows["latents"]["megabytes"] > 0
    assert report["ratios"]["images_per_s, all, 2 at once, group 2"] > 0


@torch.no_grad()
@pytest.mark.parametrize("shape", ["tiny-sd3", "tiny-qwen-image"])
def test_the_plain_loop_rolls_out_what_the_engine_does_given_equal_noise(shape: str) -> None:
    family = SHAPES[shape]("cpu", torch.float32)
    engine, size = RolloutEngine(family, EngineConfig(deterministic="off")), (64, 64)
    subject = Subject(engine, size, 2, None, {})
    samples = run(engine, {"one": subject.request(2, **bench_rollout.TRAJECTORY)})["one"]
    seeds = [sample.seed for sample in samples]

    def same_noise(step: int, shape: tuple[int, ...]) -> torch.Tensor:
        if step < 0:
            return family.pack(
                normal_noise(seeds, NoiseStream.INITIAL_LATENT, [0, 0], family.initial_noise_shape(*size))
            )
        return normal_noise(seeds, NoiseStream.STEP, [step] * 2, shape[1:])

    plain = roll_out(subject.plain(2), steps=2, noise_level=NOISE_LEVEL, noise=same_noise)
    for index, sample in enumerate(samples):
        assert plain.pictures is not None
        assert sample.dit_trajectory is not None
        assert sample.rollout_log_probs is not None
        torch.testing.assert_close(plain.states[index], sample.dit_trajectory.latents, rtol=0, atol=1e-4)
        torch.testing.assert_close(plain.log_probs[index], sample.rollout_log_probs, rtol=0, atol=1e-4)
        torch.testing.assert_close(plain.pictures[index], sample.generated_output, rtol=0, atol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("shape", ["tiny-wan", "tiny-flux", "tiny-z-image"])
def test_a_shape_of_random_weights_rolls_out(shape: str) -> None:
    engine = RolloutEngine(SHAPES[shape]("cpu"), EngineConfig(deterministic="off"))
    video = {"num_frames": 5} if shape == "tiny-wan" else {}
    found = run(engine, {"one": asked(64, "short", seeds=(1, 2), num_inference_steps=2, **video)})["one"]
    assert not torch.equal(found[0].generated_output, found[1].generated_output)
    assert all(torch.isfinite(sample.rollout_log_probs).all() for sample in found)


def test_a_benchmark_ends_with_its_budget_but_not_before_its_first_round() -> None:
    order: list[str] = []
    series = alternate({"A": lambda: order.append("A")}, 5, warmups=0, budget=Budget(0))
    assert order == ["A"]
    assert len(series["A"].seconds) == 1
    assert len(alternate({"A": lambda: None}, 3, warmups=0, budget=Budget(60))["A"].seconds) == 3


def test_time_in_which_kernels_overlap_counts_once() -> None:
    assert profile_step.busy_seconds([("a", 0.0, 2.0), ("b", 1.0, 3.0), ("c", 1.5, 2.5), ("d", 5.0, 6.0)]) == 4.0
    assert profile_step.busy_seconds([]) == 0.0


def test_a_wait_is_known_by_the_kernels_around_it() -> None:
    kernels = [("a", 0.0, 4.0), ("b", 1.0, 2.0), ("c", 5.0, 6.0), ("a", 6.0, 7.0), ("c", 9.0, 9.5)]
    assert profile_step.longest_gaps(kernels) == [(3.0, 2, "a", "c")]


def test_arms_are_timed_in_turn_and_each_begins_as_often() -> None:
    order: list[str] = []
    arms = {name: lambda name=name: order.append(name) for name in "AB"}
    series = alternate(arms, 4, warmups=1)
    assert "".join(order) == "AB" + "ABBA" + "BAAB"
    assert all(len(one.seconds) == 4 for one in series.values())


def test_a_ratio_is_that_of_the_medians() -> None:
    assert ratio(Series("a", [4.0, 9.0, 2.0]), Series("b", [1.0, 2.0, 50.0])) == 2.0
    assert quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == (2.0, 4.0)
    assert quartiles([1.0]) == (1.0, 1.0)


def test_run_all_runs_every_benchmark_there_is_but_those_that_need_a_gpu() -> None:
    scripts = {path.stem.removeprefix("bench_") for path in Path(run_all.__file__).parent.glob("bench_*.py")}
    assert set(run_all.NAMES) == scripts - NEED_A_GPU == set(SMALLEST)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.parametrize(
    "main",
    [bench_kernels.main, profile_decode.main, profile_llm.main, profile_step.main, tune_paged_attention.main],
)
def test_a_benchmark_that_needs_a_gpu_says_so(main: Callable[[Sequence[str]], int], tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="needs an NVIDIA GPU"):
        main(["--out", str(tmp_path / "report.json")])
    assert not (tmp_path / "report.json").exists()


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        ("nvjet_tst_192x192_64x4_2x1_v_bz_coopB_bias_TNT", "gemm"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", "attention"),
        ("void at::native::elementwise_kernel<128, 4, at::native::direct_copy_kernel_cuda(...)>", "copy"),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy<...>", "copy"),
        ("void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16, float>", "norm"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl>", "elementwise"),
        ("gated_residual", "fused"),
        ("Memcpy DtoH (Device -> Pageable)", "host_copy"),
        ("Memcpy DtoD (Device -> Device)", "copy"),
        ("sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x128x64", "convolution"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "collective"),
        ("something_new", "other"),
    ],
)
def test_a_kernel_is_classed_by_its_name(kernel: str, expected: str) -> None:
    assert profile_step.class_of(kernel) == expected


def report_of(main: Callable[[Sequence[str]], int], options: list[str], out: Path) -> dict[str, Any]:
    assert main([*options, "--out", str(out)]) == 0
    report: dict[str, Any] = json.loads(out.read_text())
    return report
