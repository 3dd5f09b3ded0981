"""The next token of each row of logits, and its log-probability: what a decoding step does with its logits.

The token is a Gumbel-max draw from the tempered distribution (see `gumbel_argmax`), or the likeliest one; its
log-probability is `row_log_softmax(logits / temperature)` there, bit for bit. A row depends on nothing but itself.
"""

from __future__ import annotations

import torch

from rl_kernels.fused import UNIT, block_of, check_dtypes, check_shape, launch, runs_on_triton, seen_by_modes
from rl_kernels.gumbel_argmax import gumbel_noise
from rl_kernels.log_softmax_gather import BLOCK, row_log_softmax


@seen_by_modes
def draw_tokens(
    logits: torch.Tensor, temperatures: torch.Tensor, keys: torch.Tensor, greedy: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens `[N]` int64 and log-probs `[N]` fp32 of logits `[N, V]` (-inf: never drawn), which count as fp32.

    temperatures `[N]` fp32, positive; keys `[N]` int64, the noise's; greedy `[N]` bool: rows without noise. Of equally
    large sums the lower token is taken. A row with a NaN, or without any number, has the log-prob NaN.

    Raises:
        ValueError: logits that aren't a matrix in bf16, fp16 or fp32, or others that aren't one number a row
            (temperatures in fp32).
    """
    check_dtypes("draw_tokens", logits=logits)
    if logits.dim() != 2:
        raise ValueError(f"draw_tokens takes logits [N, V], got {tuple(logits.shape)}")
    if temperatures.dtype != torch.float32:
        raise ValueError(f"draw_tokens takes temperatures in torch.float32, got {temperatures.dtype}")
    for name, numbers in (("temperatures", temperatures), ("keys", keys), ("greedy", greedy)):
        check_shape("draw_tokens", name, numbers, (len(logits),))
    if not logits.numel() or not runs_on_triton(logits, UNIT):
        return _twin(logits, temperatures, keys, greedy)
    return _launch(logits.contiguous(), temperatures.contiguous(), keys.contiguous(), greedy.contiguous())


def _twin(
    logits: torch.Tensor, temperatures: torch.Tensor, keys: torch.Tensor, greedy: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    scores = logits.float() / temperatures[:, None]
    log_probs = row_log_softmax(scores)
    noisy = (~greedy).nonzero()[:, 0]
    if len(noisy):  # a greedy batch is spared the noise
        scores[noisy] += gumbel_noise(keys[noisy], logits.shape[1])
    tokens = scores.argmax(-1)
    return tokens, log_probs.gather(1, tokens[:, None])[:, 0]


def _launch(
    logits: torch.Tensor, temperatures: torch.Tensor, keys: torch.Tensor, greedy: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    from rl_kernels.jit import draw_tokens as jit

    rows, width = logits.shape
    block = min(block_of(width), BLOCK)
    blocks = -(-width // block)
    tops, bounds, totals = (temperatures.new_empty(rows, blocks) for _ in range(3))
    drawn, log_probs = torch.empty_like(keys), torch.empty_like(temperatures)
    sizes = {"WIDTH": width, "BLOCK": block}
    held = {"BLOCKS": block_of(blocks)}
    noise = keys, greedy.view(torch.uint8)
    launch(jit.bounds_of_blocks, (rows, blocks), logits, temperatures, *noise, tops, bounds, **sizes, block=block)
    launch(jit.totals_of_blocks, (rows, blocks), logits, temperatures, tops, totals, **sizes, **held, block=block)
    results = (tops, bounds, totals, drawn, log_probs)
    # A row waits for its only program: with twice the warps.
    launch(jit.draw_tokens, (rows,), logits, temperatures, *noise, *results, blocks, **sizes, **held, block=2 * block)
    return drawn, log_probs
