"""Models that edit pictures: a sample's bits beside other pictures, prompts in every form, refits, ranks, HTTP, and
what is refused. Their contract as a family is in `test_families`."""

from __future__ import annotations

import base64
import io
import json
import re
import struct
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Service, free_port, start_service, stop_service
from equality import assert_same_bits
from PIL import Image
from tiny_models import (
    a_picture,
    qwen_image_edit_pipeline,
    qwen_image_edit_plus_pipeline,
    rollout_pipeline,
    save,
    sd3_pipeline,
)
from torch.nn.utils.rnn import pad_sequence
from typer.testing import CliRunner

from diffusion_rl import RolloutPipeline
from diffusion_rl.cli import app
from diffusion_rl.condition_images import load_images, load_wire_images
from diffusion_rl.config import EngineConfig, ParallelConfig
from diffusion_rl.params import params_from_mapping
from diffusion_rl.rollout.replay import replay_step
from diffusion_rl.sample import RolloutSample
from diffusion_rl.trainer import exact_training
from engine_control.errors import InvalidRequestError, LimitExceededError

Fields = dict[str, Any]
WIDE, TALL, LIMIT = a_picture(120, 50), a_picture(50, 120), 4096
FULL: Fields = {
    "num_inference_steps": 3,
    "output_type": "both",
    "rollout_return_dit_trajectory": True,
    "rollout_return_denoising_env": True,
}
GUIDED: Fields = {"true_cfg_scale": 3.5, "negative_prompt": "blurry"}


@pytest.fixture(scope="module")
def pipeline() -> RolloutPipeline:
    return rollout_pipeline(qwen_image_edit_pipeline(torch.bfloat16))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(qwen_image_edit_pipeline(torch.bfloat16), tmp_path_factory.mktemp("edit") / "model")


def mirrored(picture: Image.Image) -> Image.Image:
    return picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)


def file_of(picture: Image.Image, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, kind)
    return buffer.getvalue()


def text_of(picture: Image.Image, kind: str = "PNG") -> str:
    return base64.b64encode(file_of(picture, kind)).decode()


def together(pipeline: RolloutPipeline, *requests: Fields) -> tuple[list[RolloutSample], int]:
    """The first sample of each request, all in the engine at once, and how many steps of batches that took."""
    engine, done = pipeline.engine, dict[str, RolloutSample]()
    steps = engine.stats()["steps"]
    for number, request in enumerate(requests):
        given = {**request, "image": load_images(request["image"], max_pixels=1e9)}
        engine.add_request(str(number), params_from_mapping(given))
    while engine.has_unfinished_requests():
        for finished in engine.step():
            assert finished.result is not None, finished.error
            done[finished.request_id] = finished.result[0]
    return [done[str(number)] for number in range(len(requests))], int(engine.stats()["steps"] - steps)


def conditions(sample: RolloutSample) -> list[torch.Tensor]:
    """What the transformer is told of the sample's prompts and its picture."""
    env: Any = sample.denoising_env
    prompts = [kwargs["encoder_hidden_states"] for kwargs in (env.pos_cond_kwargs, env.neg_cond_kwargs)]
    return [*prompts, env.image_kwargs["image_latents"]]


def test_pictures_share_batches_with_those_of_their_shape_and_never_a_bit(pipeline: RolloutPipeline) -> None:
    requests = [
        {**FULL, **GUIDED, "prompt": "make it red", "image": WIDE, "seed": 3},
        {**FULL, **GUIDED, "prompt": "a very small dog", "image": TALL, "seed": 3},
        {**FULL, **GUIDED, "prompt": "make it red", "image": mirrored(WIDE), "seed": 3, "rollout_sde_type": "ode"},
        {**FULL, "prompt": "make it red", "image": WIDE, "seed": 3},
        {**FULL, **GUIDED, "prompt": "make it red", "image": TALL, "seed": 3, "height": 32, "width": 96},
    ]
    alone = [pipeline(**request)[0] for request in requests]
    beside, steps = together(pipeline, *requests)
    assert steps == 4 * 3  # the first and the third share their forwards
    for one, other in zip(alone, beside, strict=True):
        assert_same_bits(one, other)
    assert [sample.size for sample in alone[:2]] == [(32, 96), (96, 32)]  # of the picture's own proportions
    for other in (mirrored(WIDE), mirrored(mirrored(WIDE))):
        again = pipeline(**{**requests[0], "image": other})[0]
        for one, before in zip(conditions(again), conditions(alone[0]), strict=True):
            assert torch.equal(one, before) == (other.tobytes() == WIDE.tobytes())


def test_samples_of_other_shapes_are_not_replayed_together(pipeline: RolloutPipeline) -> None:
    fields = {**FULL, "seed": 1, "height": 64, "width": 64}
    wide, tall = (pipeline("cat", image=picture, **fields)[0] for picture in (WIDE, TALL))
    with pytest.raises(InvalidRequestError, match="pictures' sizes"):
        pipeline.replay([wide, tall])


def test_a_trainers_own_call_of_what_the_environment_says_has_the_rollouts_velocity(pipeline: RolloutPipeline) -> None:
    samples = pipeline(["make it red", "cat"], image=WIDE, seed=6, height=64, width=64, **FULL)
    family, envs = pipeline.engine.family, [sample.denoising_env for sample in samples]
    trajectories: list[Any] = [sample.dit_trajectory for sample in samples]
    prompts: list[Any] = [env.pos_cond_kwargs for env in envs if env is not None]
    pictures: list[Any] = [env.image_kwargs["image_latents"] for env in envs if env is not None]
    noisy = torch.stack([trajectory.latents[1] for trajectory in trajectories]).bfloat16()
    with torch.no_grad(), exact_training(pipeline.transformer, family):
        output = pipeline.transformer(
            hidden_states=torch.cat([noisy, torch.stack(pictures)], dim=1),
            timestep=torch.stack([trajectory.timesteps[1] for trajectory in trajectories]).bfloat16() / 1000,
            encoder_hidden_states=pad_sequence([p["encoder_hidden_states"] for p in prompts], batch_first=True),
            encoder_hidden_states_mask=pad_sequence(
                [p["encoder_hidden_states_mask"] for p in prompts], batch_first=True
            ),
            img_shapes=[p["img_shapes"] for p in prompts],
            return_dict=False,
        )[0]
        expected = replay_step(family, samples, 1)
    assert torch.equal(expected.log_probs, torch.stack([s.rollout_log_probs[1] for s in samples]))  # type: ignore[index]
    assert torch.equal(output[:, : noisy.shape[1]].float(), expected.model_outputs.float())


def test_ids_and_embeddings_have_the_bits_of_their_text(pipeline: RolloutPipeline) -> None:
    stock = pipeline.engine.family.pipeline
    fields = {**FULL, "image": WIDE, "seed": 2, "true_cfg_scale": 3.5}
    text = pipeline("make it red", negative_prompt="blurry", **fields)[0]
    seen = stock.image_processor.resize(WIDE, 32, 96)
    ids = stock.processor(text=[stock.prompt_template_encode.format("make it red")], images=[seen]).input_ids[0]
    assert text.denoising_env is not None
    returned = text.denoising_env.prompt_fields()
    tables: Any = text.denoising_env.pos_cond_kwargs["freqs_cis"]
    assert len(tables[0]) == len(text.denoising_env.image_kwargs["image_latents"]) + 12 == 24  # type: ignore[arg-type]
    for form in ({"prompt_ids": ids, "negative_prompt": "blurry"}, returned):
        (sample,) = pipeline(**form, **fields)
        assert_same_bits(sample, text)
        assert torch.equal(pipeline.replay([sample]).detach(), sample.rollout_log_probs[None])  # type: ignore[index]
    with pytest.raises(InvalidRequestError, match=r"1 placeholders for pictures.*prompt_ids"):
        pipeline(prompt_ids=stock.tokenizer(stock.prompt_template_encode.format("make it red")).input_ids, **fields)


@pytest.mark.parametrize(
    ("module", "name"),
    [("vae", "encoder.conv_in.weight"), ("text_encoder", "model.visual.patch_embed.proj.weight")],
)
def test_a_refit_of_what_encodes_pictures_is_seen_by_the_next_request(
    pipeline: RolloutPipeline, module: str, name: str
) -> None:
    fields = {**FULL, "image": WIDE, "seed": 2}
    before = pipeline("make it red", **fields)[0]
    weight = getattr(pipeline.engine.family.pipeline, module).state_dict()[name].clone()
    try:
        pipeline.refit({name: weight * 1.5}, partial=True, module=module, weight_version="other")
        after = pipeline("make it red", **fields)[0]
        for kept, (one, other) in {
            "vae": [(s.denoising_env.image_kwargs["image_latents"]) for s in (before, after)],  # type: ignore[union-attr]
            "text_encoder": [(s.denoising_env.pos_cond_kwargs["encoder_hidden_states"]) for s in (before, after)],  # type: ignore[union-attr]
        }.items():
            assert torch.equal(one, other) == (kept != module)  # type: ignore[arg-type]
    finally:
        pipeline.refit({name: weight}, partial=True, module=module, weight_version="default")
    assert_same_bits(pipeline("make it red", **fields)[0], before)


def test_ranks_that_share_the_tokens_of_pictures_have_the_bits_of_one(tmp_path: Path) -> None:
    folder = save(qwen_image_edit_plus_pipeline(torch.bfloat16), tmp_path / "model")
    alone = RolloutPipeline.from_config(EngineConfig(str(folder)))
    config = EngineConfig(str(folder), parallel=ParallelConfig(sp_degree=2), deterministic="on")
    with RolloutPipeline.from_config(config) as ranks:
        for images in ([WIDE], [TALL, a_picture(60, 80)]):  # 12 tokens, and 28
            fields = {**FULL, **GUIDED, "image": images, "seed": 4}
            shared = ranks(["make it red", "cat"], **fields)
            for one, other in zip(alone(["make it red", "cat"], **fields), shared, strict=True):
                assert_same_bits(one, other)


@pytest.fixture(scope="module")
def service(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    log = tmp_path_factory.mktemp("edit-service") / "log.txt"
    started = start_service({"model_path": str(folder)}, {"port": free_port()}, log)
    started.wait_until(started.healthy)
    yield started
    stop_service(started)


def test_the_service_has_the_bits_of_the_pipeline_however_the_picture_travels(
    service: Service, folder: Path, tmp_path: Path
) -> None:
    alone = RolloutPipeline.from_config(EngineConfig(str(folder)))
    fields = {**FULL, "seed": 5}
    expected = alone("make it red", image=WIDE, **fields)[0]
    (tmp_path / "wide.png").write_bytes(file_of(WIDE))
    client = service.client()
    for image in (WIDE, str(tmp_path / "wide.png")):
        assert_same_bits(client.generate("make it red", image=image, **fields)[0], expected)
    for text in (text_of(WIDE), f"data:image/png;base64,{text_of(WIDE)}", [text_of(WIDE, "WEBP")]):
        reply = service.generate({"prompt": "make it red", "image": text, "height": 32, "width": 96, "seed": 5})
        assert reply.status_code == 200, reply.text
    assert service.http.get("/health_generate").status_code == 200
    arguments = ["rollout", "--url", service.base_url, "--prompt", "make it red", "--image", str(tmp_path / "wide.png")]
    result = CliRunner().invoke(app, [*arguments, "-k", "1", "--seed", "5", "--steps", "3", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    (entry,) = json.loads((tmp_path / "summary.json").read_text())["samples"]
    assert entry["log_probs"] == expected.rollout_log_probs.tolist()  # type: ignore[union-attr]


def test_doctor_tries_a_picture(folder: Path) -> None:
    result = CliRunner().invoke(app, ["doctor", str(folder), "--json"])
    found = {check["name"]: check["status"] for check in json.loads(result.stdout)["checks"]}
    assert {found[name] for name in ("model loads", "one step", "batch invariance", "replay")} == {"ok"}, found


@pytest.mark.parametrize(
    ("image", "what"),
    [
        (None, "there is none"),
        ("/etc/passwd", "no base64"),
        ("https://example.org/a.png", "no base64"),
        ("data:text/html;base64,aGVsbG8=", "no data URL"),
        (base64.b64encode(b"hello").decode(), "no picture"),
        (text_of(a_picture(64, 64))[:400], "no picture"),
        ([text_of(WIDE), text_of(TALL)], "2 pictures"),
        ([], "0 pictures"),
        ({"__tensor__": True, "data": "AAAA"}, "can't be read"),
        (text_of(a_picture(2000, 8)), "too long and narrow"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_picture_that_can_not_be_used_is_refused_by_name(service: Service, image: object, what: str) -> None:
    reply = service.generate({"prompt": "make it red", "image": image, "seed": 5})
    problem = reply.json()
    assert (reply.status_code, problem["field"]) == (400, "image"), problem
    assert re.search(what, problem["detail"]), problem
    assert problem["hint"]
    assert len(reply.content) < 1024


def test_a_picture_of_too_many_pixels_is_refused_before_it_is_decoded() -> None:
    for picture in (a_picture(65, 64), text_of(a_picture(65, 64)), torch.zeros(3, 64, 65)):
        read = partial(load_wire_images, most=1) if isinstance(picture, str) else load_images
        with pytest.raises(LimitExceededError, match="65 x 64"):
            read(picture, max_pixels=LIMIT)
    for side in (100, 60_000):  # which a file says that has no such pixels
        head = bytearray(file_of(Image.new("1", (8, 8))))
        head[16:24] = struct.pack(">II", side, side)
        head[29:33] = struct.pack(">I", zlib.crc32(head[12:29]))
        with pytest.raises(LimitExceededError, match="pixels"):
            load_images(bytes(head), max_pixels=LIMIT)


@pytest.mark.parametrize(
    "value",
    [torch.zeros(1, 8, 8), torch.full((3, 8, 8), 2.0), torch.full((3, 8, 8), torch.nan), torch.zeros(3, 8, 8).int(), 7],
    ids=["one channel", "beyond 1", "NaN", "integers", "number"],
)
def test_a_tensor_that_is_no_picture_is_refused(value: object) -> None:
    for read in (load_images, partial(load_wire_images, most=1)):
        with pytest.raises(InvalidRequestError, match="image"):
            read(value, max_pixels=LIMIT)


def test_a_picture_has_one_set_of_pixels_in_every_form(tmp_path: Path) -> None:
    (tmp_path / "wide.png").write_bytes(file_of(WIDE))
    (pixels,) = load_images(WIDE, max_pixels=1e9)
    forms = [tmp_path / "wide.png", file_of(WIDE), pixels, pixels[None].float() / 255, WIDE.convert("RGBA")]
    assert all(torch.equal(load_images(form, max_pixels=1e9)[0], pixels) for form in forms)
    assert load_images(torch.full((3, 1, 1), 0.499), max_pixels=1e9)[0].tolist() == [[[127]]] * 3  # of 127.2
    assert load_images(torch.full((3, 1, 1), 0.501), max_pixels=1e9)[0].tolist() == [[[128]]] * 3  # of 127.76


def test_a_picture_is_refused_by_a_model_that_takes_none_and_a_placeholder_in_a_text_by_one_that_does(
    pipeline: RolloutPipeline,
) -> None:
    with pytest.raises(InvalidRequestError, match="no use for image"):
        RolloutPipeline(sd3_pipeline())("cat", image=WIDE)
    with pytest.raises(InvalidRequestError, match="2 placeholders for pictures"):
        pipeline("a <|image_pad|> cat", image=WIDE)
    with pytest.raises(InvalidRequestError, match="reads at most 512"):
        pipeline("a cat" * 100, image=WIDE)
