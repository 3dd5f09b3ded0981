"""Records and comparisons with real models, a real service, and files that are whole, damaged or foreign."""

from __future__ import annotations

import copy
import dataclasses
import json
import random
import shutil
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from conftest import Service
from safetensors.torch import load_file, save_file
from tiny_models import qwen_image_pipeline, rollout_pipeline, sd3_pipeline
from typer.testing import CliRunner

from diffusion_rl import RolloutParams, RolloutPipeline
from diffusion_rl.cli import app, options
from diffusion_rl.config import EngineConfig
from diffusion_rl.verify import (
    ORDERS,
    Difference,
    Place,
    Record,
    compare,
    default_requests,
    digest,
    environment_of,
    record,
)
from engine_control.errors import EngineUnavailableError, InvalidRequestError

SMALL: dict[str, Any] = {"size": (32, 48), "steps": 3}
ODD_REQUESTS: list[dict[str, Any]] = [
    {"prompt": "a dog", "rollout": False},
    {"prompt": "a dog", "seeds": [7, 2**63], "num_outputs_per_prompt": 2, "output_dtype": "uint8"},
    {
        "prompt": "a dog",
        "num_outputs_per_prompt": 3,
        "init_same_noise": True,
        "rollout_sde_step_indices": [1],
        "rollout_return_step_indices": [1, 2],
    },
    {
        "prompt": "a cat",
        "rollout_sde_type": "affine",
        "affine_coefficients": [[1.0, -0.3, 0.0, 0.5], [0.9, -0.2, 0.1, 0.4]],
        "rollout_log_prob_no_const": True,
        "rollout_latents_dtype": "bfloat16",
        "rollout_debug_mode": False,
    },
]
for _request in ODD_REQUESTS:
    _request |= {"width": 32, "height": 32, "num_inference_steps": 2, "guidance_scale": 2.5}


def run(*arguments: object):
    return CliRunner().invoke(app, ["verify", *(str(argument) for argument in arguments)])


def with_other_bit(pipeline: RolloutPipeline, module: str, parameter: str) -> RolloutPipeline:
    """The same model, but for the last bit of one weight, the largest of that parameter."""
    other = copy.deepcopy(pipeline.engine.family.pipeline)
    weight = dict(getattr(other, module).named_parameters())[parameter]
    with torch.no_grad():
        weight.view(torch.int32).view(-1)[weight.abs().argmax()] ^= 1
    return RolloutPipeline(other)


@pytest.fixture(scope="module")
def pipeline() -> RolloutPipeline:
    return RolloutPipeline(sd3_pipeline())


@pytest.fixture(scope="module")
def requests(pipeline: RolloutPipeline) -> list[RolloutParams]:
    return default_requests(pipeline.engine.family.size_multiple, prompts=["a cat"], **SMALL)


@pytest.fixture(scope="module")
def full(pipeline: RolloutPipeline, requests: list[RolloutParams]) -> Record:
    return record(pipeline, requests, full=True)


@pytest.fixture(scope="module")
def recorded_file(tiny_sd3_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made by the command, with digests alone."""
    out = tmp_path_factory.mktemp("verify") / "record.safetensors"
    result = run("record", out, tiny_sd3_folder, "--prompt", "a cat", "--sde-type", "sde", "--sde-type", "ode",
                 "--size", "32x48", "--steps", 3)  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "4 requests, 8 samples" in result.output
    return out


@pytest.fixture(scope="module")
def other_folder(tiny_sd3_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny SD3 with another last bit in the largest weight of its last layer."""
    folder = tmp_path_factory.mktemp("other") / "sd3"
    shutil.copytree(tiny_sd3_folder, folder)
    weights = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(weights)
    weight = tensors["proj_out.weight"]
    weight.view(torch.int32).view(-1)[weight.abs().argmax()] ^= 1
    save_file(tensors, weights, metadata={"format": "pt"})
    return folder


class TestWhatMustNotMatter:
    def test_the_default_set_is_every_kind_guided_and_not(self, requests):
        kinds = [(r.rollout_sde_type, r.true_cfg_scale, r.num_outputs_per_prompt) for r in requests]
        assert kinds == [(kind, scale, 2) for kind in ("sde", "cps", "dance", "ode") for scale in (3.0, 1.0)]
        assert len({r.seed for r in requests}) == len(requests)
        assert default_requests(24)[0].width == 72

    @pytest.mark.parametrize("order", ORDERS)
    @pytest.mark.parametrize("one_by_one", [False, True])
    def test_orders_and_company(self, pipeline, full, order, one_by_one):
        found = compare(full, pipeline, order=order, one_by_one=one_by_one)
        assert (found.equal, found.first, found.environment) == (True, None, ())
        assert found.compared > 400

    @pytest.mark.parametrize("size", [1, 3])
    def test_batch_sizes(self, full, size):
        assert compare(full, RolloutPipeline(sd3_pipeline(), config=EngineConfig(max_batch_size=size))).equal

    def test_another_family(self):
        qwen = rollout_pipeline(qwen_image_pipeline())
        made = record(qwen, default_requests(16, prompts=["a cat", "two dogs"], kinds=["sde"], size=(32, 32), steps=2))
        guided, unguided = (request.samples[0].values["guidance_scale"] for request in made.requests[:2])
        assert (guided, unguided) == (3.0, 1.0)
        found = compare(made, qwen, order="reverse", replay_by=qwen)
        assert found.equal
        assert len(found.ratios or ()) == 4 * 2 * 2

    @pytest.mark.parametrize("wire", ["json", "msgpack", "safetensors"])
    def test_a_service_and_its_wires(self, service: Service, tiny_sd3_folder, requests, wire):
        local = RolloutPipeline.from_pretrained(str(tiny_sd3_folder))
        made = record(local, [*requests[:2], *ODD_REQUESTS])
        with service.client(wire) as client:
            found = compare(made, client, order="shuffle", one_by_one=wire == "json", replay_by=local)
        assert found.equal, found.first
        assert found.found.weights is None

    def test_a_record_of_a_service_in_this_process(self, service: Service, pipeline):
        with service.client() as client:
            made = record(client, ODD_REQUESTS, full=True)
        assert compare(made, pipeline).equal


class TestWhatIsRecorded:
    def test_everything_is_returned_unless_the_request_says_otherwise(self, full, pipeline):
        names = [str(item.place) for item in full.requests[0].samples[1].prints]
        start = ["positive.encoder_hidden_states", "positive.pooled_projections"]
        start += [name.replace("positive", "negative") for name in start]
        steps = [
            f"{name} of step {step + (name == 'state')}"
            for step in range(3)
            for name in ("model_output", "mean", "noise", "state", "log_prob")
        ]
        clocks = ["sigmas", "timesteps", "noise_stds", "state of step 0"]
        assert names == [*start, *clocks, *steps, "final_latents", "picture"]
        odd = record(pipeline, ODD_REQUESTS[:1]).requests[0]
        assert [str(item.place) for item in odd.samples[0].prints] == ["final_latents", "picture"]
        assert odd.samples[0].log_probs == ()
        assert odd.params.seed == 42

    def test_log_probs_and_digests_are_those_of_the_samples(self, full, pipeline, requests):
        sample = pipeline(**{**vars(requests[0]), "output_type": "image"})[1]
        kept = full.requests[0].samples[1]
        assert torch.equal(torch.tensor(kept.log_probs), sample.rollout_log_probs)
        prints = {item.place: item.sha256 for item in kept.prints}
        assert prints[Place("picture")] == digest(sample.generated_output)
        assert prints[Place("state", 2)] == digest(sample.dit_trajectory.latents[2])
        assert torch.equal(
            full.tensors[prints[Place("mean", 1)]], sample.rollout_debug_tensors.rollout_prev_sample_means[1]
        )

    def test_a_digest_knows_dtype_shape_and_the_sign_of_zero(self):
        zeros = torch.zeros(2, 3)
        others = [zeros.view(3, 2), zeros.to(torch.int32), -zeros, zeros[None], torch.zeros(2, 2)]
        assert len({digest(t) for t in [zeros, *others]}) == len(others) + 1
        assert digest(torch.arange(6).view(2, 3).T) == digest(torch.tensor([[0, 3], [1, 4], [2, 5]]))

    def test_a_saved_record_comes_back(self, full, tmp_path):
        path = full.save(tmp_path / "new" / "r.safetensors")
        loaded = Record.load(path)
        assert loaded == full
        assert loaded.tensors.keys() == full.tensors.keys()
        assert [p.name for p in path.parent.iterdir()] == ["r.safetensors"]
        (tmp_path / "like").touch()
        assert path.stat().st_mode == (tmp_path / "like").stat().st_mode

    def test_without_tensors_the_file_is_small(self, recorded_file):
        assert recorded_file.stat().st_size < 40_000
        assert not Record.load(recorded_file).full

    def test_the_environment_says_under_what(self, full, pipeline):
        about = full.environment
        assert about.versions["torch"] == torch.__version__
        assert about.exact
        assert about.deterministic["certified"] is True
        assert set(about.weights) == {"text_encoder", "text_encoder_2", "transformer", "vae"}
        assert environment_of(pipeline) == about
        assert not environment_of(RolloutPipeline(sd3_pipeline(), config=EngineConfig(deterministic="off"))).exact


class TestDifferences:
    @pytest.mark.parametrize(
        ("module", "parameter", "first"),
        [
            ("transformer", "proj_out.weight", Place("model_output", 0)),
            ("text_encoder", "text_model.final_layer_norm.weight", Place("positive.pooled_projections")),
            ("vae", "decoder.conv_out.weight", Place("picture")),
        ],
    )
    def test_one_other_bit_of_one_weight_is_found_where_it_first_shows(self, pipeline, full, module, parameter, first):
        found = compare(full, with_other_bit(pipeline, module, parameter))
        assert not found.equal
        assert found.first is not None
        assert found.first.place == first
        assert 0 < found.first.max_abs_diff < 1e-4
        assert [item.name for item in found.environment] == [f"weights of {module}"]
        if module == "vae":
            assert {d.place for request in found.requests for d in request.differences} == {first}

    def test_it_is_measured_as_the_tensors_differ(self, pipeline, full):
        other = with_other_bit(pipeline, "transformer", "proj_out.weight")
        found = compare(full, other).requests[0]
        ours, theirs = (p(**vars(found.params)) for p in (pipeline, other))
        by_place = {(d.sample, d.place): d.max_abs_diff for d in found.differences}
        for sample, (one, two) in enumerate(zip(ours, theirs, strict=True)):
            latents = (one.dit_trajectory.latents[3] - two.dit_trajectory.latents[3]).abs().max()
            assert by_place[sample, Place("state", 3)] == latents.item()

    def test_digests_alone_find_but_measure_only_log_probs(self, pipeline, full):
        other = with_other_bit(pipeline, "transformer", "proj_out.weight")
        found = compare(dataclasses.replace(full, tensors={}), other)
        assert found.first == Difference(0, 0, Place("model_output", 0))
        assert all(
            (d.max_abs_diff is not None) == (d.place.tensor == "log_prob")
            for request in found.requests
            for d in request.differences
        )

    def test_values_and_what_is_missing_differ_too(self, pipeline, full):
        request = full.requests[0]
        sample = request.samples[0]
        changed = dataclasses.replace(sample, values={**sample.values, "seed": 1}, prints=sample.prints[:-1])
        record_of_two = dataclasses.replace(full, requests=(dataclasses.replace(request, samples=(changed,)),))
        found = compare(record_of_two, pipeline)
        told = {str(difference) for difference in found.requests[0].differences}
        assert told == {
            "request 0, sample 0: samples (2 samples instead of 1)",
            "request 0, sample 0: seed (42 instead of 1)",
            "request 0, sample 0: picture (was not recorded)",
        }

    def test_a_record_of_nothing_is_equal_to_nothing(self, pipeline, full):
        assert not compare(dataclasses.replace(full, requests=()), pipeline).equal

    def test_ratios_under_other_weights_are_reported(self, pipeline, full):
        other = RolloutPipeline(copy.deepcopy(sd3_pipeline()))
        with torch.no_grad():
            other.transformer.proj_out.weight.mul_(1.1)
        found = compare(full, pipeline, replay_by=other)
        assert (found.equal, found.first) == (False, None)
        assert found.wrong_ratios[0].ratio != 1.0
        assert len(found.ratios or ()) == sum(
            kind != "ode" for r in full.requests for s in r.samples for kind in s.values["step_kinds"]
        )


class TestBadFiles:
    @pytest.fixture(scope="class")
    def content(self, pipeline, tmp_path_factory) -> bytes:
        """A full record, and small: one sample and one step."""
        small = default_requests(16, prompts=["a cat"], kinds=["sde"], size=(16, 16), steps=1)[:1]
        made = record(pipeline, [dataclasses.replace(small[0], num_outputs_per_prompt=1)], full=True)
        return made.save(tmp_path_factory.mktemp("bad") / "r.safetensors").read_bytes()

    def test_any_changed_byte_is_noticed(self, content, tmp_path):
        path, dice = tmp_path / "r.safetensors", random.Random(0)
        path.write_bytes(content)
        whole = Record.load(path)
        header = 8 + int.from_bytes(content[:8], "little")
        refused = 0
        positions = [*range(64), *dice.sample(range(header), 300), *dice.sample(range(header, len(content)), 100)]
        for position in positions:
            damaged = bytearray(content)
            damaged[position] ^= dice.randrange(1, 256)
            path.write_bytes(damaged)
            try:
                same = Record.load(path) == whole
            except InvalidRequestError as error:
                same = (error.field, error.value) == ("file", str(path))
                refused += 1
            assert same, position
        assert refused >= len(positions) - 5  # a blank of the header's padding may become another blank

    def test_a_truncated_file_is_refused(self, content, tmp_path):
        path = tmp_path / "r.safetensors"
        for length in [0, 1, 7, 8, 100, len(content) // 2, len(content) - 1]:
            path.write_bytes(content[:length])
            with pytest.raises(InvalidRequestError, match="truncated"):
                Record.load(path)

    def test_a_file_of_another_version_says_so(self, content, tmp_path):
        path = tmp_path / "r.safetensors"
        path.write_bytes(content.replace(b'"format_version":"1"', b'"format_version":"2"'))
        with pytest.raises(InvalidRequestError, match=r"format version '2', and this program reads version '1'"):
            Record.load(path)

    def test_foreign_files_are_refused(self, tiny_sd3_folder, tmp_path):
        with pytest.raises(InvalidRequestError, match="but no record"):
            Record.load(tiny_sd3_folder / "transformer" / "diffusion_pytorch_model.safetensors")
        with pytest.raises(InvalidRequestError, match="it is no safetensors file"):
            Record.load(tiny_sd3_folder / "model_index.json")
        for missing in (tmp_path / "none.safetensors", tmp_path):
            with pytest.raises(InvalidRequestError, match="there is no such file"):
                Record.load(missing)

    def test_what_cannot_be_written_is_told(self, full, tmp_path):
        (tmp_path / "file").touch()
        with pytest.raises(InvalidRequestError, match="can't be written"):
            full.save(tmp_path / "file" / "r.safetensors")
        with pytest.raises(InvalidRequestError, match="a record is a safetensors file"):
            full.save(tmp_path / "r.json")

    def test_what_cannot_be_recorded_is_told(self, pipeline):
        for requests, field in ([], "requests"), (["a cat"], "requests"), ([{"promt": "a"}], "promt"):
            with pytest.raises(InvalidRequestError) as caught:
                record(pipeline, requests)
            assert caught.value.field == field


class TestCommands:
    @pytest.fixture(autouse=True)
    def _wide(self, monkeypatch):
        monkeypatch.setenv("COLUMNS", "200")

    def test_equal_bits_exit_with_0_and_one_row_a_request(self, recorded_file):
        result = run("compare", recorded_file, "--batch-order", "reverse", "--max-batch-size", 3, "--replay")
        assert result.exit_code == 0, result.output
        rows = [" ".join(line.split()) for line in result.output.splitlines() if "K = 2" in line]
        assert rows[0] == f"0: sde, guidance 3, 32 x 48, K = 2 all 3 sde{' equal' * 5}"
        assert rows[3] == f"3: ode, guidance 1, 32 x 48, K = 2 all 3 ode{' equal' * 5}"
        assert len(rows) == 4
        assert "12 of 12 ratios are exactly 1.0" in result.output
        assert "equal: 4 requests" in result.output
        assert "(together, reverse, batches of at most 3)" in result.output
        assert "NOT THE SAME" not in result.output

    def test_another_number_of_ranks_has_equal_bits(self, recorded_file):
        result = run("compare", recorded_file, "--enable-cfg-parallel")
        assert result.exit_code == 0, result.output
        assert "2 ranks, tokens over 1, guidance parallel" in " ".join(result.output.split())

    def test_one_other_bit_exits_with_1_and_names_the_place(self, recorded_file, other_folder):
        result = run("compare", recorded_file, other_folder, "--one-by-one")
        assert result.exit_code == 1, result.output
        assert isinstance(result.exception, SystemExit)
        assert "first: request 0, sample 0: model_output of step 0" in result.output
        assert "NOT THE SAME as when it was recorded" in result.output
        assert "weights of transformer: " in result.output
        lines = [line.split() for line in result.output.splitlines()]
        first = next(i for i, line in enumerate(lines) if line[:1] == ["0:"])
        assert lines[first][-6:] == ["start", *["-"] * 4, "equal"]
        step_0 = lines[first + 1]
        assert step_0[:4] == ["0", "sde", "equal", "differs"]
        assert lines[first + 4][0] == "end"
        assert "final_latents differs, picture differs" in " ".join(lines[first + 4])

    def test_the_findings_as_json(self, recorded_file, other_folder):
        result = run("compare", recorded_file, other_folder, "--json")
        assert result.exit_code == 1
        findings = json.loads(result.stdout)
        assert findings["equal"] is False
        assert findings["first"] == "request 0, sample 0: model_output of step 0"
        assert findings["requests"][0]["differences"][0]["place"] == {"tensor": "model_output", "step": 0}
        assert [item["name"] for item in findings["environment"]] == ["weights of transformer"]

    def test_another_version_is_said_and_compared_all_the_same(self, recorded_file, tmp_path):
        made = Record.load(recorded_file)
        versions = {**made.environment.versions, "torch": "1.0"}
        inexact = {**made.environment.deterministic, "enabled": False}
        environment = dataclasses.replace(made.environment, versions=versions, deterministic=inexact)
        path = dataclasses.replace(made, environment=environment).save(tmp_path / "old.safetensors")
        result = run("compare", path)
        assert result.exit_code == 0, result.output
        assert f"version of torch: 1.0 -> {torch.__version__}" in result.output
        assert "the record is without exact mode" in result.output

    def test_a_service_with_requests_of_ones_own(self, service: Service, tiny_sd3_folder, tmp_path):
        (tmp_path / "requests.json").write_text(json.dumps(ODD_REQUESTS))
        out = tmp_path / "r.safetensors"
        made = run("record", out, "--url", service.base_url, "--requests", tmp_path / "requests.json", "--full")
        assert made.exit_code == 0, made.output
        assert "4 requests, 7 samples" in made.output
        result = run("compare", out, "--url", service.base_url, "--wire", "json", "--batch-order", "shuffle")
        assert result.exit_code == 0, result.output
        assert "(together, shuffle, over HTTP as json)" in result.output
        result = run("compare", out, tiny_sd3_folder, "--one-by-one")
        assert result.exit_code == 0, result.output

    @pytest.mark.parametrize(
        ("arguments", "what", "way_out"),
        [
            (["record", "r.json"], "a record is a safetensors file", "Name it like r.safetensors."),
            (["record", "r.safetensors", "--size", "64x"], "must be pixels", "96x64"),
            (["record", "r.safetensors", "--requests", "none.json"], "the requests can't be read", "JSON file"),
            (["record", "r.safetensors", "--requests", "a.json", "--steps", "4"], "the file says all", "Leave out"),
            (["record", "r.safetensors", "embedded", "--url", "http://x"], "a model of its own", "Leave out MODEL"),
            (["record", "r.safetensors", "--url", "http://127.0.0.1:9"], "no service was reached", "serve"),
            (["compare", "none.safetensors"], "there is no such file", "verify record"),
        ],
    )
    def test_errors_exit_with_2_and_a_way_out(self, arguments, what, way_out, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        result = run(*arguments)
        assert result.exit_code == 2, result.output
        assert what in result.stderr
        assert way_out in result.stderr
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize(
        ("arguments", "what"),
        [
            (["--wire", "json"], "there is no wire within this process"),
            (["--url", "http://x", "--max-batch-size", "2"], "a service has the batch size"),
            (["--url", "http://x", "--sp-degree", "2"], "a service has the ranks"),
            (["--url", "http://127.0.0.1:9"], "no service was reached"),
        ],
    )
    def test_options_without_effect_are_refused(self, recorded_file, arguments, what):
        result = run("compare", recorded_file, *arguments)
        assert result.exit_code == 2
        assert what in result.stderr

    def test_the_library_and_the_command_know_the_same_orders(self, pipeline, full):
        assert get_args(options.BatchOrders) == ORDERS
        with pytest.raises(InvalidRequestError, match="unknown order 'sorted'"):
            compare(full, pipeline, order="sorted")  # type: ignore[arg-type]

    def test_a_service_that_is_gone_is_an_engine_error(self, full):
        from diffusion_rl import RolloutClient

        with pytest.raises(EngineUnavailableError), RolloutClient("http://127.0.0.1:9") as client:
            compare(full, client)
