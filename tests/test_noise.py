"""Noise is a function of (seed, stream, step), and a good one."""

from __future__ import annotations

import math

import pytest
import torch

from diffusion_rl.rollout.noise import NoiseStream, normal_noise, philox, random_words, uniform_integer

STEP = NoiseStream.STEP


@pytest.mark.parametrize(
    ("key", "counter", "expected"),
    [
        ([0, 0], [0, 0, 0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 2, [0xFFFFFFFF] * 4, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0xA4093822, 0x299F31D0],
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_gives_the_published_known_answers(key: list[int], counter: list[int], expected: list[int]) -> None:
    assert philox(torch.tensor([key]), torch.tensor([counter]))[0].tolist() == expected


@pytest.mark.parametrize("shape", [(3,), (16, 8, 8), (5, 7, 3), (64, 64)])
def test_a_sample_draws_the_same_noise_alone_and_in_any_batch(shape: tuple[int, ...]) -> None:
    seeds, steps = [7, 2**40 + 1, 7, 0, 123456789], [0, 3, 4, 0, 9]
    batch = normal_noise(seeds, STEP, steps, shape)
    for row, (seed, step) in enumerate(zip(seeds, steps, strict=True)):
        assert torch.equal(normal_noise([seed], STEP, [step], shape)[0], batch[row])


def test_the_thread_count_does_not_change_the_noise() -> None:
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = normal_noise(range(9), STEP, [1] * 9, (16, 32, 32))
        torch.set_num_threads(2)
        assert torch.equal(normal_noise(range(9), STEP, [1] * 9, (16, 32, 32)), one)
    finally:
        torch.set_num_threads(threads)


def test_a_larger_latent_begins_with_the_smaller_ones_noise() -> None:
    assert torch.equal(normal_noise([5], STEP, [2], (100,))[0], normal_noise([5], STEP, [2], (5000,))[0, :100])


def test_all_64_bits_of_a_seed_count() -> None:
    seeds = [1, 1 + 2**32, 1 + 2**63, 2**64 - 1]
    rows = normal_noise(seeds, STEP, [0] * 4, (256,))
    for a in range(4):
        for b in range(a):
            assert (rows[a] == rows[b]).sum() < 3


def test_streams_and_steps_of_one_seed_share_nothing() -> None:
    rows = [normal_noise([3], stream, [step], (256,))[0] for stream in NoiseStream for step in range(4)]
    for a in range(len(rows)):
        for b in range(a):
            assert (rows[a] == rows[b]).sum() < 3


def test_a_million_keys_give_a_million_different_blocks() -> None:
    seeds = list(range(100_000)) + [2**32 + i for i in range(100_000)]
    words = [random_words(seeds, STEP, [step] * len(seeds), 4) for step in range(5)]
    joined = torch.cat(words)
    assert len(torch.unique(joined[:, 0] * 2**31 + (joined[:, 1] >> 1))) == 1_000_000


def test_the_noise_is_standard_normal() -> None:
    x = normal_noise(range(64), STEP, [0] * 64, (16, 32, 32)).double().flatten()
    n = x.numel()
    assert abs(x.mean()) < 5 / math.sqrt(n)
    assert abs(x.var() - 1) < 5 * math.sqrt(2 / n)
    assert abs((x**4).mean() - 3) < 5 * math.sqrt(96 / n)
    quantiles = torch.quantile(x[:1_000_000], torch.tensor([0.0228, 0.1587, 0.5, 0.8413, 0.9772]).double())
    torch.testing.assert_close(quantiles, torch.tensor([-2.0, -1, 0, 1, 2]).double(), atol=0.02, rtol=0)
    assert x.isfinite().all()


def test_neighbouring_elements_seeds_and_steps_are_uncorrelated() -> None:
    a = normal_noise(range(1000), STEP, [0] * 1000, (256,))
    n = a.numel()
    pairs = [(a[:, :-1], a[:, 1:]), (a[:-1], a[1:]), (a, normal_noise(range(1000), STEP, [1] * 1000, (256,)))]
    for x, y in pairs:
        assert abs((x * y).mean()) < 5 / math.sqrt(n)


def test_a_whole_number_is_drawn_evenly_from_its_range() -> None:
    drawn = torch.tensor([uniform_integer(seed, NoiseStream.WINDOW, 0, 7) for seed in range(2000)])
    counts = torch.bincount(drawn, minlength=7)
    assert len(counts) == 7
    assert counts.min() > 200
