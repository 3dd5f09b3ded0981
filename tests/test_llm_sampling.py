"""Every sampling parameter, by what it must do to any row of logits."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_control.errors import InvalidRequestError
from llm_runtime.engine.sampler import adjust, draw, noise_keys, restrict
from llm_runtime.engine.sequence import Sequence
from llm_runtime.params import GenerateRequest, SamplingParams, sampling_params
from rl_kernels.gumbel_argmax import gumbel_noise

VOCAB = 50


def gumbel(seeds: Iterable[int], positions: Iterable[int], width: int) -> torch.Tensor:
    return gumbel_noise(noise_keys(list(seeds), list(positions)), width)


rows = st.lists(st.floats(-20, 20, width=32), min_size=VOCAB, max_size=VOCAB).map(torch.tensor)
some_tokens = st.lists(st.integers(0, VOCAB - 1), max_size=12)


def sequence(
    prompt: list[int], output: list[int], stops: tuple[int, ...] = (), seed: int = 0, **fields: object
) -> Sequence:
    request = GenerateRequest(input_ids=tuple(prompt), sampling=SamplingParams(**fields), seed=seed)  # type: ignore[arg-type]
    made = Sequence("r", request, 0, 100, frozenset(stops))
    made.tokens += output
    return made


def kept(row: torch.Tensor, **fields: object) -> set[int]:
    log_probs = row.log_softmax(-1)
    restrict(log_probs, SamplingParams(**fields))  # type: ignore[arg-type]
    return {token for token, value in enumerate(log_probs.tolist()) if value > -math.inf}


@settings(max_examples=60, deadline=None)
@given(rows, st.integers(1, VOCAB + 3))
def test_top_k_keeps_the_k_likeliest(row: torch.Tensor, k: int) -> None:
    found = kept(row, top_k=k)
    assert len(found) == min(k, VOCAB)
    log_probs = row.log_softmax(-1)
    assert min(log_probs[t] for t in found) >= max((log_probs[t] for t in set(range(VOCAB)) - found), default=-math.inf)


@settings(max_examples=60, deadline=None)
@given(rows, st.floats(0.01, 0.99))
def test_top_p_keeps_the_fewest_that_reach_p(row: torch.Tensor, p: float) -> None:
    found = kept(row, top_p=p)
    probabilities = row.double().softmax(-1)
    weights = sorted((float(probabilities[t]) for t in found), reverse=True)
    assert sum(weights) >= p - 1e-6
    assert sum(weights[:-1]) < p + 1e-6
    assert min(weights) >= max((float(probabilities[t]) for t in set(range(VOCAB)) - found), default=0.0) - 1e-6


@settings(max_examples=60, deadline=None)
@given(rows, st.floats(0.01, 1.0))
def test_min_p_keeps_what_is_likely_beside_the_likeliest(row: torch.Tensor, p: float) -> None:
    found = kept(row, min_p=p)
    ratio = (row.double() - row.double().max()).exp()
    for token in range(VOCAB):
        if abs(float(ratio[token]) - p) > 1e-5:
            assert (token in found) == (float(ratio[token]) > p) or token == int(row.argmax())


@settings(max_examples=40, deadline=None)
@given(rows, some_tokens, some_tokens, st.floats(-2, 2), st.floats(-2, 2), st.floats(0.1, 2))
def test_penalties_follow_their_formulas_token_by_token(
    row: torch.Tensor, prompt: list[int], output: list[int], frequency: float, presence: float, repetition: float
) -> None:
    made = sequence(
        [1, *prompt],
        output,
        frequency_penalty=frequency,
        presence_penalty=presence,
        repetition_penalty=repetition,
        logit_bias={3: 1.5},
    )
    wanted = row.tolist()
    for token in {1, *prompt, *output}:
        wanted[token] = wanted[token] / repetition if wanted[token] > 0 else wanted[token] * repetition
    for token, times in Counter(output).items():
        wanted[token] -= frequency * times + presence
    wanted[3] += 1.5
    found = row.clone()
    adjust(found, made)
    torch.testing.assert_close(found, torch.tensor(wanted), rtol=1e-5, atol=1e-4)


@settings(max_examples=30, deadline=None)
@given(rows, st.integers(0, 4))
def test_no_end_before_the_minimal_length(row: torch.Tensor, length: int) -> None:
    made = sequence([1], [2] * length, (7, 9), min_new_tokens=3)
    found = row.clone()
    adjust(found, made)
    assert (found[[7, 9]] == -math.inf).all() == (length < 3)


@settings(max_examples=30, deadline=None)
@given(
    rows,
    st.integers(0, 2**63 - 1),
    st.integers(0, 30),
    st.sampled_from([{}, {"top_k": 5}, {"top_p": 0.7, "min_p": 0.1}]),
)
def test_a_draw_depends_on_nothing_beside_it(
    row: torch.Tensor, seed: int, length: int, limits: dict[str, float]
) -> None:
    made = sequence([1], [2] * length, seed=seed, temperature=0.7, **limits)
    others = [sequence([4, 5], [6], seed=seed, temperature=0), sequence([1], [2] * length, seed=seed + 1, top_k=3)]
    alone = draw(row[None].clone(), [made])
    batch = torch.stack([row.flip(0), row, row])
    beside = draw(batch, [others[0], made, others[1]])
    assert beside.tokens[1] == alone.tokens[0]
    assert beside.log_probs[1] == alone.log_probs[0] == float(alone.distribution([0])[0, alone.tokens[0]])
    assert torch.equal(beside.distribution([1]), alone.distribution([0]))
    assert beside.tokens[0] == int(row.flip(0).argmax())


def test_draws_follow_the_softmax() -> None:
    row = torch.tensor([2.0, 1.0, 0.0, -1.0, -2.0])
    draws = 40_000
    noisy = row.log_softmax(-1) + gumbel(range(draws), [3] * draws, 5)
    counts = torch.bincount(noisy.argmax(-1), minlength=5).double()
    expected = row.double().softmax(-1) * draws
    assert float(((counts - expected) ** 2 / expected).sum()) < 18.5  # chi-square, 4 degrees of freedom, p = 0.001


def test_noise_has_gumbels_mean_and_no_two_keys_share_it() -> None:
    noise = gumbel([0, 0, 1, 2**32, 2**63 - 1], [0, 1, 0, 0, 0], 20_000)
    assert abs(float(noise.mean()) - 0.5772) < 0.02
    assert abs(float(noise.var()) - math.pi**2 / 6) < 0.06
    correlations = torch.corrcoef(noise) - torch.eye(5)
    assert float(correlations.abs().max()) < 0.03
    assert torch.equal(noise[:, :7], gumbel([0, 0, 1, 2**32, 2**63 - 1], [0, 1, 0, 0, 0], 7))


@pytest.mark.parametrize("vocab", [5, 320, 1001, 40_003])
def test_a_rows_noise_is_its_own_on_any_number_of_threads(vocab: int) -> None:
    seeds, positions = list(range(37)), [3 * i for i in range(37)]
    whole = gumbel(seeds, positions, vocab)
    assert whole.isfinite().all()
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for rows in (slice(0, 1), slice(4, 9), slice(0, 37)):
                assert torch.equal(gumbel(seeds[rows], positions[rows], vocab), whole[rows])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("row", [torch.full((VOCAB,), math.nan), torch.tensor([math.inf] + [0.0] * (VOCAB - 1))])
def test_a_row_that_is_no_number_is_told_from_the_others(row: torch.Tensor) -> None:
    good = torch.arange(VOCAB, dtype=torch.float32)
    drawn = draw(torch.stack([row, good]), [sequence([1], []), sequence([1], [])])
    assert [math.isnan(found) for found in drawn.log_probs] == [True, False]


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": -1},
        {"temperature": "hot"},
        {"temperature": True},
        {"temperature": math.nan},
        {"top_k": 1.5},
        {"top_p": 1.5},
        {"min_p": 2},
        {"repetition_penalty": 0},
        {"frequency_penalty": 3},
        {"max_new_tokens": -1},
        {"n": 0},
        {"stop": [1]},
        {"stop": ""},
        {"stop_token_ids": "12"},
        {"ignore_eos": 1},
        {"logit_bias": {"a": 1}},
        {"logit_bias": {"1": 1e300}},
        {"logit_bias": {"1": math.nan}},
        {"sampling_seed": -1},
        {"json_schema": "{}"},
    ],
    ids=str,
)
def test_what_is_out_of_bounds_is_refused_by_name(fields: dict[str, object]) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        sampling_params(fields)
    assert next(iter(fields)) in str(refused.value.field)
