"""Step kinds: equal to the published step functions and to diffusers' own step, finite, independent of the batch."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from diffusion_rl.schedulers import RolloutSchedulerMixin, step_kinds
from diffusion_rl.schedulers.base import StepTerms, exact_sqrt, log_prob
from engine_control.errors import InvalidRequestError

GOLDEN = Path(__file__).parent / "golden"
# The vectors were computed on a CPU whose vector library rounds the square root of these cases to the wrong neighbour.
WRONGLY_ROUNDED_ROOT = {"sde": {"case038", "case043", "case048", "case053"}, "cps": {"case017", "case020"}}


def golden(kind: str) -> list[tuple[dict[str, object], dict[str, torch.Tensor]]]:
    cases = json.loads((GOLDEN / f"flow_{kind}.json").read_text())
    tensors = load_file(GOLDEN / f"flow_{kind}.safetensors")
    prefix = "{}."
    return [
        (c, {k.removeprefix(prefix.format(c["key"])): v for k, v in tensors.items() if k.startswith(c["key"] + ".")})
        for c in cases
    ]


def golden_terms(case: dict, rows: int) -> StepTerms:  # type: ignore[type-arg]
    kind = step_kinds.get(case["sde_type"])
    grid = torch.tensor([1.0, case["sigma_1"], case["sigma"], case["sigma_next"]])
    whole = kind.schedule_terms(grid, noise_level=case["noise_level"]).columns()
    return StepTerms.from_columns(whole[2].expand(rows, -1))


@pytest.mark.parametrize("kind", ["sde", "cps"])
def test_the_published_step_is_reproduced_bit_for_bit(kind: str) -> None:
    compared = 0
    for case, t in golden(kind):
        terms = golden_terms(case, len(t["sample"]))
        if case["key"] in WRONGLY_ROUNDED_ROOT[kind]:
            continue
        mean, noise_std = step_kinds.get(kind).transition(t["sample"], t["model_output"], terms)
        prev_sample = mean + noise_std * t["noise"]
        assert torch.equal(mean, t["prev_sample_mean"]), case
        assert torch.equal(prev_sample, t["prev_sample"]), case
        score = log_prob(prev_sample, mean, terms, no_const=kind == "cps")
        torch.testing.assert_close(score, t["log_prob"], atol=2e-6, rtol=0)
        compared += 1
    assert compared == {"sde": 52, "cps": 42}[kind]


def test_the_six_other_vectors_differ_by_the_last_bit_of_one_square_root() -> None:
    for case, t in golden("sde"):
        if case["key"] in WRONGLY_ROUNDED_ROOT["sde"]:
            terms = golden_terms(case, len(t["sample"]))
            sigma, sigma_next = terms.sigma[0], terms.sigma_next[0]
            above = torch.nextafter(exact_sqrt(sigma / (1 - sigma)), torch.tensor(9.0))
            std = (above * case["noise_level"]).expand(len(t["sample"]))
            theirs = replace(terms, std_dev_t=std, noise_std=std * exact_sqrt(-1 * (sigma_next - sigma)))
            mean, noise_std = step_kinds.get("sde").transition(t["sample"], t["model_output"], theirs)
            assert std[0].item() == case["std_dev_t"]
            assert torch.equal(mean, t["prev_sample_mean"])
            assert torch.equal(mean + noise_std * t["noise"], t["prev_sample"])
    for case, t in golden("cps"):
        if case["key"] in WRONGLY_ROUNDED_ROOT["cps"]:
            x, v, terms = t["sample"], t["model_output"].float(), golden_terms(case, len(t["sample"])).over(t["sample"])
            right = exact_sqrt(terms.sigma_next**2 - terms.std_dev_t**2)
            means = [
                (x - terms.sigma * v) * (1 - terms.sigma_next)
                + (x + v * (1 - terms.sigma)) * torch.nextafter(right, end)
                for end in (torch.tensor(0.0), torch.tensor(9.0))
            ]
            assert any(torch.equal(mean, t["prev_sample_mean"]) for mean in means)


def test_a_square_root_is_correctly_rounded() -> None:
    x = torch.rand(200_000, generator=torch.Generator().manual_seed(0)) * 3
    below, above = (torch.nextafter(exact_sqrt(x), torch.tensor(end)).double() for end in (0.0, 9.0))
    root, exact = exact_sqrt(x).double(), x.double().sqrt()
    assert ((root - exact).abs() <= (below - exact).abs()).all()
    assert ((root - exact).abs() <= (above - exact).abs()).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_an_ode_step_is_diffusers_own_step_bit_for_bit_also_in_a_batch_of_different_steps(
    dtype: torch.dtype, shift: float
) -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    scheduler.set_timesteps(10)
    torch.manual_seed(1)
    x, v = torch.randn(10, 16, 8, 8).to(dtype), torch.randn(10, 16, 8, 8).to(dtype)
    ode = step_kinds.get("ode")
    terms = ode.schedule_terms(scheduler.sigmas, noise_level=0.0)
    mean, noise_std = ode.transition(x, v, terms)
    for step, timestep in enumerate(scheduler.timesteps):
        theirs = scheduler.step(v[step : step + 1], timestep, x[step : step + 1]).prev_sample
        assert torch.equal(mean[step : step + 1].to(dtype), theirs), step
    assert noise_std.abs().sum() == 0


def own_step(kind: type[RolloutSchedulerMixin], x: torch.Tensor, v: torch.Tensor, terms: StepTerms) -> torch.Tensor:
    previous = torch.zeros_like(x) if kind.needs_previous_x0 else None
    return kind.transition(x, v, terms, previous)[0]


@pytest.mark.parametrize("name", ["sde", "cps", "dance", "ode", "affine"])
def test_samples_at_different_steps_in_one_batch_get_what_they_get_alone(name: str) -> None:
    kind, steps = step_kinds.get(name), 9
    sigmas = torch.linspace(1, 0, steps + 1)
    rows = torch.rand(steps, 4) if name == "affine" else None
    terms = kind.schedule_terms(sigmas, noise_level=0.7, coefficients=rows)
    torch.manual_seed(2)
    x, v, noise = (torch.randn(steps, 4, 6, 10) for _ in range(3))
    mean = own_step(kind, x, v, terms)
    stored = mean + terms.over(x).noise_std * noise
    scores = log_prob(stored, mean, terms, no_const=False)
    for row in range(steps):
        alone = StepTerms.from_columns(terms.columns()[row : row + 1])
        own = own_step(kind, x[row : row + 1], v[row : row + 1], alone)
        assert torch.equal(own[0], mean[row])
        assert torch.equal(log_prob(stored[row : row + 1], own, alone, no_const=False)[0], scores[row])


@settings(max_examples=150, deadline=None)
@given(
    name=st.sampled_from(["sde", "cps", "dance"]),
    inner=st.lists(st.floats(0.0011, 0.9999), min_size=0, max_size=12, unique_by=lambda s: round(s, 3)),
    first=st.sampled_from([1.0, 0.999999, 0.99999]),
    noise_level=st.floats(0.0, 1.0),
)
def test_nothing_is_ever_nan(name: str, inner: list[float], first: float, noise_level: float) -> None:
    grid = sorted({first, *(s for s in inner if s < 0.9999 * first)}, reverse=True)
    sigmas = torch.tensor([*grid, 0.0], dtype=torch.float32)
    kind = step_kinds.get(name)
    terms = kind.schedule_terms(sigmas, noise_level=noise_level)
    assert terms.columns().isfinite().all()
    x = torch.ones(len(grid), 8)
    mean, noise_std = kind.transition(x, x, terms)
    stored = mean + noise_std
    assert stored.isfinite().all()
    for no_const in (True, False):
        assert log_prob(stored, mean, terms, no_const=no_const).isfinite().all()


@given(sigma=st.floats(0.05, 0.95), ratio=st.floats(0.05, 0.95), eta=st.floats(0.05, 1.5))
@settings(max_examples=50, deadline=None)
def test_every_kind_is_its_affine_form_in_float64(sigma: float, ratio: float, eta: float) -> None:
    sigma_next = sigma * ratio
    dt = sigma_next - sigma
    q = eta * math.sqrt(sigma / (1 - sigma))
    s = sigma_next * math.sin(min(eta, 1.0) * math.pi / 2)
    k = math.sqrt(max(sigma_next**2 - s**2, 0))
    forms = {
        "ode": (1.0, dt, 0.0),
        "sde": (1 + q * q * dt / (2 * sigma), dt * (1 + q * q * (1 - sigma) / (2 * sigma)), q * math.sqrt(-dt)),
        "dance": (
            1 + eta * eta * dt / (2 * sigma),
            dt * (1 + eta * eta * (1 - sigma) / (2 * sigma)),
            eta * math.sqrt(-dt),
        ),
        "cps": (1 - sigma_next + k, -sigma * (1 - sigma_next) + (1 - sigma) * k, s),
    }
    x, v = torch.tensor([[0.3, -1.2]]), torch.tensor([[0.8, 0.1]])
    for name, (a, b, std) in forms.items():
        kind = step_kinds.get(name)
        level = min(eta, 1.0) if name == "cps" else eta
        terms = kind.schedule_terms(torch.tensor([1.0, sigma, sigma_next]), noise_level=level)
        mean, noise_std = kind.transition(x, v, StepTerms.from_columns(terms.columns()[1:2]))
        torch.testing.assert_close(mean.double(), a * x.double() + b * v.double(), atol=2e-5, rtol=2e-5)
        assert noise_std.item() == pytest.approx(std, rel=1e-4, abs=1e-6)


def test_dance_is_sde_wherever_their_deviations_agree() -> None:
    sigmas = torch.tensor([0.8, 0.5, 0.2])
    sde, dance = (step_kinds.get(n) for n in ("sde", "dance"))
    x, v = torch.randn(1, 4), torch.randn(1, 4)
    eta = sde.schedule_terms(sigmas, noise_level=0.7).std_dev_t[1].item()
    rows = [
        StepTerms.from_columns(k.schedule_terms(sigmas, noise_level=n).columns()[1:2])
        for k, n in ((sde, 0.7), (dance, eta))
    ]
    assert torch.equal(sde.transition(x, v, rows[0])[0], dance.transition(x, v, rows[1])[0])


def test_a_log_prob_is_the_mean_log_density_of_the_stored_state() -> None:
    terms = step_kinds.get("sde").schedule_terms(torch.tensor([0.9, 0.6, 0.3, 0.0]), noise_level=0.7)
    torch.manual_seed(3)
    mean = torch.randn(3, 16, 8, 8)
    stored = mean + terms.over(mean).noise_std * torch.randn_like(mean)
    density = torch.distributions.Normal(mean.double(), terms.over(mean).noise_std.double())
    expected = density.log_prob(stored.double()).flatten(1).mean(1)
    torch.testing.assert_close(log_prob(stored, mean, terms, no_const=False).double(), expected, atol=2e-6, rtol=0)
    residual = -((stored - mean).double() ** 2).flatten(1).mean(1)
    torch.testing.assert_close(log_prob(stored, mean, terms, no_const=True).double(), residual, atol=2e-6, rtol=0)


def test_the_mixed_in_scheduler_samples_and_scores_inside_a_plain_diffusers_loop() -> None:
    mixed = type("SDEScheduler", (step_kinds.get("sde"), FlowMatchEulerDiscreteScheduler), {})
    scheduler = mixed(shift=3.0)
    scheduler.set_timesteps(4)
    torch.manual_seed(4)
    x, v, noise = (torch.randn(2, 4, 4, 4) for _ in range(3))
    taken = scheduler.step_with_log_prob(v, 1, x, noise=noise)
    velocity = v.clone().requires_grad_()
    scored = scheduler.step_with_log_prob(velocity, 1, x, prev_sample=taken.prev_sample)
    assert torch.equal(scored.log_prob.detach(), taken.log_prob)
    scored.log_prob.sum().backward()
    assert velocity.grad is not None
    with pytest.raises(ValueError, match="either `noise`"):
        scheduler.step_with_log_prob(v, 1, x)


def test_an_unknown_kind_is_refused_with_the_nearest_one() -> None:
    assert step_kinds.names() == ["affine", "cps", "dance", "ode", "sde"]
    with pytest.raises(InvalidRequestError, match="Did you mean 'dance'"):
        step_kinds.get("dance_sde")
