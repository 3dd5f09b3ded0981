"""The command line, run as a user runs it, with real models, services and files."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from diffusion_rl.assets import embedded_model_path
from diffusion_rl.cli import app
from diffusion_rl.cli.demo import Proof
from diffusion_rl.cli.doctor import Check, Examination
from diffusion_rl.cli.exactness import Comparison, compare_bits, replay_ratios
from diffusion_rl.cli.service_process import ServiceProcess, running_service
from diffusion_rl.cli.summary import Verdict, verdict_on
from diffusion_rl.client import RolloutClient
from diffusion_rl.pictures import draw_sheet, false_colour, half_blocks, plot_log_probs, save_png, to_image
from diffusion_rl.pipeline import RolloutPipeline
from diffusion_rl.sample import RolloutSample
from diffusion_rl.server.encoding import CONTENT_TYPES
from diffusion_rl.shapes import draw, held_out_captions, parse
from engine_control.errors import EngineUnavailableError

COMMANDS = ("serve", "rollout", "demo", "doctor", "verify")
CHILD_ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
needs_embedded_model = pytest.mark.skipif(not embedded_model_path().is_dir(), reason="the embedded model is not here")


def run(*arguments: str):
    return CliRunner().invoke(app, arguments)


def process_exists(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture(scope="module")
def pipeline(tiny_sd3_folder: Path) -> RolloutPipeline:
    return RolloutPipeline.from_pretrained(str(tiny_sd3_folder))


@pytest.fixture(scope="module")
def group(pipeline: RolloutPipeline) -> list[RolloutSample]:
    return pipeline(
        "a cat",
        num_outputs_per_prompt=2,
        num_inference_steps=3,
        seed=1,
        rollout_return_dit_trajectory=True,
        rollout_return_denoising_env=True,
    )


@pytest.fixture(scope="module")
def served(tiny_sd3_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    """`diffusion-rl serve` with options that leave traces in its answers."""
    arguments = ["--served-model-name", "toy", "--max-num-outputs-per-prompt", "3", "--lenient-fields"]
    arguments += ["--rollout-wire", "msgpack", "--dit-trajectory-timesteps", "filtered", "--max-body-mb", "1"]
    log = tmp_path_factory.mktemp("served") / "service.log"
    with running_service(str(tiny_sd3_folder), port=0, log=log, arguments=arguments) as service:
        service.wait_ready()
        yield service


class TestHelp:
    def test_the_command_line_is_imported_without_torch_or_a_web_framework(self):
        code = "import sys, diffusion_rl.cli; print([m for m in ('torch', 'diffusers', 'fastapi') if m in sys.modules])"
        done = subprocess.run([sys.executable, "-c", code], env=CHILD_ENVIRONMENT, capture_output=True, text=True)
        assert done.stdout.strip() == "[]", done.stderr

    @pytest.mark.parametrize("command", COMMANDS)
    def test_every_command_explains_itself(self, command):
        result = run(command, "--help")
        assert result.exit_code == 0
        assert len(result.output) > 300

    def test_the_version_is_printed(self):
        assert run("--version").output.strip() == "0.1.0"


class TestRollout:
    @pytest.fixture(scope="class")
    def folder(self, tiny_sd3_folder, tmp_path_factory) -> Path:
        out = tmp_path_factory.mktemp("rollout")
        result = run("rollout", "--model", str(tiny_sd3_folder), "--prompt", "a cat", "--prompt", "a dog", "-k", "2",
                     "--seed", "5", "--steps", "4", "--sde-step-indices", "0,1,2", "--out", str(out))  # fmt: skip
        assert result.exit_code == 0, result.output
        assert out.name in result.output.replace("\n", "")
        return out

    def test_the_summary_holds_the_numbers_that_the_pipeline_returns(self, folder, pipeline):
        samples = pipeline(
            ["a cat", "a dog"],
            num_outputs_per_prompt=2,
            seed=5,
            num_inference_steps=4,
            rollout_sde_step_indices=[0, 1, 2],
        )
        entries = json.loads((folder / "summary.json").read_text())["samples"]
        assert [entry["seed"] for entry in entries] == [5, 6, 7, 8]
        for entry, sample in zip(entries, samples, strict=True):
            assert entry["log_probs"] == sample.rollout_log_probs.tolist()
            assert entry["log_prob_sum"] == sum(entry["log_probs"])
            assert entry["step_kinds"] == ["sde", "sde", "sde", "ode"]
            assert (entry["prompt"], entry["sigma_max"]) == (sample.prompt, sample.sigma_max)
            assert entry["num_elements"] == sample.num_elements
            assert entry["checker"] is None
            shown = np.asarray(Image.open(folder / entry["picture"]))
            assert np.array_equal(shown, np.asarray(to_image(sample.generated_output)))

    def test_every_sample_has_a_filmstrip_and_every_prompt_a_plot(self, folder):
        for entry in json.loads((folder / "summary.json").read_text())["samples"]:
            strip, plot = Image.open(folder / entry["filmstrip"]), Image.open(folder / entry["log_prob_plot"])
            assert strip.width > 5 * 96  # states 0 to 4
            assert strip.height > 2 * 96  # they, and the model's predictions
            assert plot.width > 400
        assert (folder / "contact_sheet.png").is_file()

    def test_what_is_not_asked_for_is_left_to_the_model(self, tiny_sd3_folder, tmp_path, pipeline):
        result = run("rollout", "--model", str(tiny_sd3_folder), "--prompt", "a cat", "-k", "1", "--no-filmstrips",
                     "--out", str(tmp_path))  # fmt: skip
        assert result.exit_code == 0, result.output
        entry = json.loads((tmp_path / "summary.json").read_text())["samples"][0]
        defaults = pipeline.engine.family.defaults
        assert entry["guidance_scale"] == defaults.guidance_scale
        assert len(entry["log_probs"]) == defaults.num_inference_steps
        assert not list(tmp_path.rglob("filmstrip*"))

    def test_without_matplotlib_it_says_so_and_goes_on(self, tiny_sd3_folder, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        result = run("rollout", "--model", str(tiny_sd3_folder), "--prompt", "a cat", "-k", "1", "--steps", "2",
                     "--out", str(tmp_path))  # fmt: skip
        assert result.exit_code == 0, result.output
        assert "diffusion-rl[plots]" in result.output
        assert json.loads((tmp_path / "summary.json").read_text())["samples"][0]["log_prob_plot"] is None

    def test_square_brackets_in_prompts_and_paths_are_shown_as_they_are(self, tiny_sd3_folder, tmp_path):
        prompt, out = "a [/b] [red]c :cat: \\", tmp_path / "out [/bold]"
        result = run("rollout", "--model", str(tiny_sd3_folder), "--prompt", prompt, "-k", "1", "--steps", "2",
                     "--out", str(out))  # fmt: skip
        assert result.exit_code == 0, result.output
        assert f"prompt-00: {prompt}" in result.output
        assert "out [/bold]" in result.output
        assert json.loads((out / "summary.json").read_text())["samples"][0]["prompt"] == prompt

    def test_square_brackets_in_a_model_or_an_address_are_no_markup(self, tmp_path):
        for arguments in (["--model", "/no [/such] folder"], ["--url", "http://127.0.0.1:9/[/such]"]):
            result = run("rollout", "--prompt", "a cat", "--out", str(tmp_path / "out"), *arguments)
            assert result.exit_code == 2, result.exception
            assert "[/such]" in result.stderr

    @pytest.mark.parametrize(
        ("arguments", "what", "way_out"),
        [
            (["--sde-type", "sdee"], "unknown rollout_sde_type 'sdee'", "Did you mean 'sde'?"),
            (["-k", "0"], "must be at least 1", "Send 1 or more."),
            (["--steps", "3", "--sde-step-indices", "3"], "step 3 is outside 0..2", "Indices run from 0 to T - 1."),
            (["--model", "/no/such/folder"], "there is no such folder", "'embedded'"),
            (["--url", "http://127.0.0.1:9"], "no service was reached", "diffusion-rl serve"),
        ],
    )
    def test_what_is_refused_is_told_with_the_way_out_and_no_traceback(self, arguments, what, way_out, tmp_path):
        result = run("rollout", "--prompt", "a cat", "--out", str(tmp_path / "out"), *arguments)
        assert result.exit_code == 2
        assert what in result.stderr
        assert way_out in result.stderr
        assert "Traceback" not in result.output
        assert not (tmp_path / "out").exists()

    def test_steps_that_are_no_numbers_are_refused(self):
        result = run("rollout", "--prompt", "a cat", "--sde-step-indices", "0;1")
        assert result.exit_code == 2
        assert "Write it like 0,1,2." in result.stderr


class TestServe:
    def test_two_different_models_are_refused(self):
        result = run("serve", "one", "--model-path", "another")
        assert result.exit_code == 2
        assert "two models are named" in result.stderr

    def test_a_service_that_cannot_start_says_why(self, tmp_path):
        with (
            running_service("/no/such/folder", port=0, log=tmp_path / "log.txt") as service,
            pytest.raises(EngineUnavailableError, match="there is no such folder"),
        ):
            service.wait_ready()
        text = (tmp_path / "log.txt").read_text()
        assert "error: the engine did not start" in text
        assert not process_exists(service.process_id)

    def test_an_error_in_the_block_stops_the_service(self, tiny_sd3_folder, tmp_path):
        with (
            pytest.raises(RuntimeError, match="ours"),
            running_service(str(tiny_sd3_folder), port=0, log=tmp_path / "log.txt") as service,
        ):
            raise RuntimeError("ours")
        assert not process_exists(service.process_id)

    def test_its_options_reach_the_service(self, served):
        with httpx.Client(base_url=served.url, timeout=60) as http:
            info = http.get("/server_info").json()
            assert info["served_model_name"] == "toy"
            too_many = http.post("/rollout/generate", json={"prompt": "a cat", "num_outputs_per_prompt": 4})
            assert (too_many.status_code, too_many.json()["code"]) == (400, "limit_exceeded")
            large = http.post("/rollout/generate", json={"prompt": "a cat", "negative_prompt": "x" * 2**20})
            assert large.status_code == 413
            odd = http.post("/rollout/generate", json={"prompt": "a cat", "num_inference_steps": 1, "no_field": 1})
            assert odd.status_code == 200
            assert odd.headers["content-type"].startswith(CONTENT_TYPES["msgpack"])

    def test_its_options_never_fill_in_a_request(self, served, pipeline):
        with RolloutClient(served.url) as client:
            sample = client.generate("a cat")[0]
        defaults = pipeline.engine.family.defaults
        assert len(sample.rollout_step_kinds) == defaults.num_inference_steps
        assert (sample.guidance_scale, sample.noise_level, sample.sde_type) == (defaults.guidance_scale, 0.7, "sde")

    def test_a_rollout_through_it_has_the_bits_of_one_in_this_process(self, served, pipeline, tmp_path):
        result = run("rollout", "--url", served.url, "--prompt", "a cat", "--prompt", "a dog", "-k", "2",
                     "--seed", "5", "--steps", "3", "--init-same-noise", "--out", str(tmp_path))  # fmt: skip
        assert result.exit_code == 0, result.output
        samples = pipeline(
            ["a cat", "a dog"], num_outputs_per_prompt=2, seed=5, num_inference_steps=3, init_same_noise=True
        )
        entries = json.loads((tmp_path / "summary.json").read_text())["samples"]
        assert [entry["seed"] for entry in entries] == [5, 6, 7, 8]
        for entry, sample in zip(entries, samples, strict=True):
            assert entry["log_probs"] == sample.rollout_log_probs.tolist()
            shown = np.asarray(Image.open(tmp_path / entry["picture"]))
            assert np.array_equal(shown, np.asarray(to_image(sample.generated_output)))
            assert (tmp_path / entry["filmstrip"]).is_file()


class TestDoctor:
    def test_a_healthy_installation_and_model_pass(self, tiny_sd3_folder):
        result = run("doctor", str(tiny_sd3_folder), "--json")
        assert result.exit_code == 0, result.output
        findings = json.loads(result.stdout)
        assert findings["ok"] is True
        found = {check["name"]: check["status"] for check in findings["checks"]}
        assert {found[name] for name in ("torch", "model loads", "one step", "batch invariance", "replay")} == {"ok"}

    def test_a_broken_model_fails_with_a_way_out(self, tmp_path):
        folder = tmp_path / "a [" / "b]"  # no markup
        folder.mkdir(parents=True)
        result = run("doctor", "--model-path", str(folder))
        assert result.exit_code == 1
        assert isinstance(result.exception, SystemExit)
        assert "model_index.json" in result.output
        assert "->" in result.output

    def test_a_crash_of_one_probe_is_a_finding_and_the_others_go_on(self):
        examination = Examination(report=lambda name: None)
        assert not examination.look("one", lambda: str(1 / 0), way_out="Divide by something else.")
        assert examination.look("two", lambda: "fine", way_out="")
        assert examination.checks == [
            Check("one", "fail", "ZeroDivisionError: division by zero", "Divide by something else."),
            Check("two", "ok", "fine"),
        ]
        assert not examination.healthy


class TestExactness:
    def test_one_flipped_bit_is_found(self, group):
        states = group[0].dit_trajectory.latents.clone()
        states.view(torch.int32)[1, 0, 0, 0] ^= 1
        flipped = dataclasses.replace(
            group[0], dit_trajectory=dataclasses.replace(group[0].dit_trajectory, latents=states)
        )
        assert compare_bits(group[0], group[0]).same_bits
        assert compare_bits(group[0], flipped).different == ("states",)

    def test_ratios_are_one_under_the_same_weights_and_not_under_others(self, group, pipeline, tiny_sd3_folder):
        assert (replay_ratios(pipeline, group) == 1.0).all()
        other = RolloutPipeline.from_pretrained(str(tiny_sd3_folder))
        with torch.no_grad():
            next(iter(other.transformer.parameters())).mul_(1.1)
        assert (replay_ratios(other, group) != 1.0).any()

    def test_one_ratio_that_is_almost_one_breaks_the_promise(self):
        same, different = Comparison(("picture",), ()), Comparison(("picture",), ("picture",))
        assert Proof(same, [1.0, 1.0]).holds
        assert not Proof(same, [1.0, 1.0 + 2**-23]).holds
        assert not Proof(different, [1.0]).holds
        assert not Proof(Comparison((), ()), [1.0]).holds

    def test_the_verdict_names_what_a_picture_gets_wrong(self, group):
        caption = held_out_captions()[0]
        scene = parse(caption)
        picture = torch.from_numpy(draw(scene, np.random.default_rng(0))).permute(2, 0, 1)
        sample = dataclasses.replace(group[0], prompt=caption, generated_output=picture)
        assert str(verdict_on(sample)) == "6/6"
        other = dataclasses.replace(scene, size="large" if scene.size == "small" else "small")
        picture = torch.from_numpy(draw(other, np.random.default_rng(0))).permute(2, 0, 1).float() / 255
        verdict = verdict_on(dataclasses.replace(sample, generated_output=picture))
        assert isinstance(verdict, Verdict)
        assert str(verdict) == "5/6, not size"
        assert verdict_on(group[0]) is None


class TestPictures:
    def test_a_saved_picture_has_the_same_pixels(self, tmp_path):
        picture = torch.randint(0, 256, (3, 5, 7), dtype=torch.uint8)
        shown = np.asarray(Image.open(save_png(picture, tmp_path / "new" / "p.png")))
        assert np.array_equal(shown, picture.permute(1, 2, 0).numpy())

    def test_latents_in_false_colour_span_the_range_in_either_layout(self):
        latent = torch.randn(16, 4, 6)
        grid = false_colour(latent)
        packed = false_colour(latent.flatten(1).T, aspect=4 / 6)
        assert grid.shape == (3, 4, 6)
        assert (float(grid.min()), float(grid.max())) == (0.0, 1.0)
        assert torch.equal(grid, packed)

    def test_a_preview_fits_the_terminal_and_has_the_pictures_colours(self):
        red, blue = torch.zeros(3, 64, 64), torch.zeros(3, 64, 64)
        red[0], blue[2] = 1, 1
        text = half_blocks([red, blue], width=21)
        lines = text.split("\n")
        assert [len(line) for line in lines] == [21] * 5
        styles = {str(span.style) for span in text.spans}
        assert styles == {"#ff0000 on #ff0000", "#0000ff on #0000ff"}

    @pytest.mark.parametrize("title", ["a $\\nosuch$ b", "nul \x00 and half \ud800", "[/b] {x} $"])
    def test_any_prompt_can_be_a_title(self, title, tmp_path):
        assert plot_log_probs({"seed 1": [0.1, 0.2]}, ["sde", "sde"], tmp_path / "p.png", title=title) is not None

    def test_evaluation_samples_have_nothing_to_plot(self, tmp_path):
        assert plot_log_probs({"seed 1": []}, ["ode", "ode"], tmp_path / "p.png") is None
        assert not (tmp_path / "p.png").exists()

    def test_a_sheet_without_pictures_is_still_a_picture(self, tmp_path):
        assert Image.open(draw_sheet([], tmp_path / "sheet.png")).width > 0


@needs_embedded_model
class TestDemo:
    def test_it_does_the_main_job_through_http_and_both_promises_hold(self, tmp_path):
        result = run("demo", "--out", str(tmp_path), "--prompts", "1", "--show")
        assert result.exit_code == 0, result.output
        assert "▀" in result.output
        summary = json.loads((tmp_path / "summary.json").read_text())
        assert summary["same_bits_alone_and_in_group"]["holds"]
        assert summary["same_bits_alone_and_in_group"]["compared"] == ["picture", "log-probs", "states"]
        assert summary["replay"]["exactly_one"] == summary["replay"]["ratios"] == 4 * 10
        assert [sample["evaluation"] for sample in summary["samples"]] == [False] * 4 + [True] * 4
        assert all(sample["checker"] is not None for sample in summary["samples"])
        for name in ("contact_sheet.png", "filmstrip.png", "log_probs.png"):
            assert Image.open(tmp_path / name).width > 400

    def test_ctrl_c_stops_the_service_too(self, tmp_path):
        log = tmp_path / "service.log"
        demo = subprocess.Popen(
            [sys.executable, "-m", "diffusion_rl.cli", "demo", "--out", str(tmp_path)],
            env=CHILD_ENVIRONMENT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # As in a terminal, even where the tests themselves run in the background, which ignores Ctrl-C.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        try:
            deadline = time.monotonic() + 60
            while not (log.exists() and "Application startup complete" in log.read_text()):
                assert time.monotonic() < deadline
                time.sleep(0.05)
            service = int(log.read_text().split("server process [")[1].split("]")[0])
            demo.send_signal(signal.SIGINT)
            # A shell shows 130 for both: an exit by that code, and (where the interrupt came up through code that a C
            # extension runs, as in an import, which CPython remembers to its end) a death by the signal itself.
            assert demo.wait(30) in (130, -signal.SIGINT)
        finally:
            demo.kill()
        assert not process_exists(service)
