"""At start-up: does this model, on this device, give a token the same logits in any batch and chunk? By name, what
doesn't?

Each operation of a forward is probed by itself (`rl_kernels.certify`), which finds the fastest implementation that
passes; then the whole model, with those: a sequence at once, in chunks, token by token, and beside others.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from engine_control.errors import NotExactError
from llm_runtime.engine.batches import ForwardBatch, joined
from llm_runtime.engine.decode_steps import DecodeRow
from llm_runtime.engine.kv_cache import KVCache
from llm_runtime.engine.model_runner import ModelRunner
from llm_runtime.layers.moe import groupable_shapes
from rl_kernels import exact_mode
from rl_kernels.certify import Certificate, Exactness, OperationClass, Recorded, Verdict, certify, record
from rl_kernels.certify_grouped import certify_grouped
from rl_kernels.certify_paged import UNIFORM, certify_paged_attention
from rl_kernels.linear import FEW
from rl_kernels.mode import LIBRARY

logger = logging.getLogger(__name__)

LENGTHS = (37, 5, 90, 1)  # of the sequences that the whole model is tried with, in tokens
CHUNKS = (1, 16, 7, 29)  # how the first of them is cut, besides token by token
STEPS = 3  # of decoding behind them; their pages have room for as many
GRAPHED = (1, 3, 4)  # how many of them decode together, for graphs: one of these is padded
TRIED = ("chosen operations",)


def make_exact(runner: ModelRunner, wanted: str, *, graphs_up_to: int = 0, rows: int = 0) -> Exactness:
    """Certifies the model on its device and sets how the runner computes: on a GPU, by replaying graphs for up to
    `graphs_up_to` sequences, unless a replay has other bits than what was captured.

    rows: the tokens of the largest step. wanted: `auto` is exact where certified, `on` insists, `off` leaves the
    libraries as they are.

    Raises:
        NotExactError: `on`, and some operation depends on the batch whatever is tried; the message names it.
    """
    one_gpu = runner.device.type == "cuda" and runner.model.tensor_parallel.size == 1
    graphs_up_to = graphs_up_to if one_gpu and runner.reads_on_device else 0
    if wanted == "off":
        return _inexact(runner, graphs_up_to, None)
    certificate = certify_model(runner, rows=rows)
    if certificate.exact:
        runner.choices = certificate.choices
        return Exactness(True, _with_graphs(runner, certificate, graphs_up_to))
    refused = "; ".join(certificate.refused)
    if wanted == "on":
        raise NotExactError(
            f"not exact on {certificate.device}: {refused}",
            field="deterministic",
            value=wanted,
            hint="Use another dtype or device, or --disable-deterministic-inference.",
        )
    logger.warning("a token's bits may depend on its batch on %s, because of: %s", certificate.device, refused)
    return _inexact(runner, graphs_up_to, certificate)


def _inexact(runner: ModelRunner, graphs_up_to: int, certificate: Certificate | None) -> Exactness:
    """The libraries as they are, experts as one product if there is a kernel, and graphs of those."""
    runner.choices = replace(LIBRARY, grouped_experts=True)
    runner.use_graphs(graphs_up_to if runner.model.capturable else 0)
    return Exactness(False, certificate)


def _with_graphs(runner: ModelRunner, certificate: Certificate, up_to: int) -> Certificate:
    """Turns graphs on where they keep their bits; with a verdict that says so."""
    if up_to < 1 or not runner.model.capturable:
        return certificate
    cache, runner.cache = runner.cache, _small_cache(runner)
    try:
        wanted = [_logits(runner, _last_tokens(runner, count)) for count in GRAPHED]
        drawn = _decoded(runner)
        runner.use_graphs(up_to)
        found = [_logits(runner, _last_tokens(runner, count)) for count in GRAPHED]
        wrong = [f"{n} sequences" for n, a, b in zip(GRAPHED, found, wanted, strict=True) if not torch.equal(a, b)]
        if _decoded(runner) != drawn:
            wrong.append("whole steps")
    finally:
        runner.cache = cache
    runner.use_graphs(0 if wrong else up_to)  # without what was captured over the small cache
    verdict = Verdict(
        f"CUDA graphs of {type(runner.model).__name__}",
        "eager" if wrong else "graphs",
        ("graphs", "eager"),
        f"graphs: {wrong[0]}" if wrong else None,
    )
    return Certificate(certificate.device, (*certificate.verdicts, verdict), certificate.choices)


def _decoded(runner: ModelRunner) -> list[tuple[list[int], list[float]]]:
    """Tokens and log-probs of some steps behind the probe's sequences, those of them that the context has room for, as
    `DecodeSteps` makes them."""
    batch = _last_tokens(runner, len(LENGTHS))
    tokens = zip(batch.input_ids, batch.context_lengths, batch.page_tables, strict=True)
    rows = [
        DecodeRow(token, length - 1, table, seed=i, temperature=0.7, greedy=i == 1)
        for i, (token, length, table) in enumerate(tokens)
        if length + STEPS <= runner.model.context_length
    ]
    if not rows:
        return []
    run = runner.steps.begin(rows)
    for _ in range(STEPS):
        run.launch()
    return [run.collect() for _ in range(STEPS)]


def _last_tokens(runner: ModelRunner, count: int) -> ForwardBatch:
    """The last token of the first `count` of the probe's sequences, decoded together; their prompts are computed."""
    runner.forward(_whole(runner, LENGTHS))
    return joined([_part(runner, index, length - 1, length) for index, length in enumerate(LENGTHS[:count])])


def certify_model(runner: ModelRunner, *, rows: int = 0) -> Certificate:
    """The verdicts on each operation of a forward, and on the whole. The KV cache's contents are lost. rows: on a GPU,
    linear layers are probed up to so many."""
    before, runner.choices = runner.choices, LIBRARY
    cache, runner.cache = runner.cache, _small_cache(runner)
    try:
        recorded = record(lambda: _in_exact_mode(runner))
        if runner.device.type == "cuda":
            recorded = {kind: _up_to(kind, call, rows, runner) for kind, call in recorded.items()}
        certificate = certify(recorded, runner.device)
        attention = _attention(runner)
        experts = tuple(certify_grouped(shape, runner.device) for shape in groupable_shapes(runner.model))
        verdicts: tuple[Verdict, ...] = (*certificate.verdicts, attention, *experts)
        choices = replace(
            certificate.choices,
            uniform_blocks=attention.implementation == UNIFORM,
            grouped_experts=all(verdict.implementation == "triton" for verdict in experts),
        )
        certificate = Certificate(certificate.device, verdicts, choices)
        if not certificate.exact and runner.model.tensor_parallel.size == 1:
            return certificate
        runner.choices = certificate.choices  # ranks compute the whole together, whatever each has found by itself
        verdicts = (*verdicts, _whole_model(runner))
        return Certificate(certificate.device, verdicts, certificate.choices)
    finally:
        runner.choices, runner.cache = before, cache


def _up_to(kind: OperationClass, call: Recorded, rows: int, runner: ModelRunner) -> Recorded:
    """A linear layer with the rows that it is probed at: a step's, those of halves, quarters and eighths of it, and
    those that few are padded to. Logits are computed of few rows at a time."""
    if kind.operation != "linear":
        return call
    config, ranks = runner.model.config, runner.model.tensor_parallel.size
    if kind.shape == (config.hidden_size, config.vocab_size // ranks):
        return replace(call, tokens=(*call.tokens, *FEW))
    return replace(call, tokens=(*call.tokens, *FEW, -(-max(rows, 1) // 2)))  # and of twice as many


def _attention(runner: ModelRunner) -> Verdict:
    """This rank's heads over pages: in prefill, chunks and decode."""
    config = runner.model.config
    return certify_paged_attention(
        runner.device,
        heads=config.num_attention_heads // runner.model.tensor_parallel.size,
        kv_heads=runner.model.local_kv_heads,
        head_dim=config.head_dim,
        dtype=config.dtype,
        page_size=runner.cache.page_size,
    )


def _in_exact_mode(runner: ModelRunner) -> None:
    """A forward whose every operation an observer sees."""
    with exact_mode():
        _logits(runner, _whole(runner, LENGTHS))


def _whole_model(runner: ModelRunner) -> Verdict:
    """All sequences at once against each by itself, and the first one in chunks and token by token."""
    name = f"model {type(runner.model).__name__}"
    together = _logits(runner, _whole(runner, LENGTHS))
    first = 0
    for index, length in enumerate(LENGTHS):
        alone = _logits(runner, _whole(runner, LENGTHS, only=index))
        if not torch.equal(alone, together[first : first + length]):
            return Verdict(name, None, TRIED, f"a sequence of {length} tokens beside others")
        first += length
    length = LENGTHS[0]
    for cuts, what in ((CHUNKS, "in chunks"), ((1,) * length, "token by token")):
        pieces, done = [], 0
        for size in cuts:
            end = min(done + size, length)
            if end > done:
                pieces.append(_logits(runner, _part(runner, 0, done, end)))
            done = end
        found = torch.cat(pieces)
        if not torch.equal(found, together[: len(found)]):
            return Verdict(name, None, TRIED, f"a sequence of {length} tokens {what}")
    return Verdict(name, *TRIED, TRIED)


def _small_cache(runner: ModelRunner) -> KVCache:
    """Room for the probe, on the side."""
    model, page_size = runner.model, runner.cache.page_size
    pages = 1 + sum(_pages(length, page_size) for length in LENGTHS)
    return KVCache(
        pages,
        page_size,
        layers=model.config.num_hidden_layers,
        kv_heads=model.local_kv_heads,
        head_dim=model.config.head_dim,
        dtype=model.config.dtype,
        device=runner.device,
    )


def _pages(length: int, page_size: int) -> int:
    """That a probe's sequence has: room for the steps behind it too."""
    return -(-(length + STEPS) // page_size)


def _whole(runner: ModelRunner, lengths: tuple[int, ...], *, only: int | None = None) -> ForwardBatch:
    return joined([_part(runner, i, 0, length) for i, length in enumerate(lengths) if only is None or i == only])


def _part(runner: ModelRunner, index: int, start: int, end: int) -> ForwardBatch:
    """Tokens [start, end) of a probe's sequence, in pages of its own."""
    page_size, vocab = runner.cache.page_size, runner.model.config.vocab_size
    first = 1 + sum(_pages(length, page_size) for length in LENGTHS[:index])
    pages = list(range(first, first + _pages(LENGTHS[index], page_size)))
    slots = [pages[p // page_size] * page_size + p % page_size for p in range(start, end)]
    tokens = [(7919 * index + 104729 * p + 13) % vocab for p in range(start, end)]
    positions = [p % runner.model.context_length for p in range(start, end)]  # what a token is turned by, no more
    return ForwardBatch(tokens, positions, slots, [pages], [end - start], [end], list(range(end - start)), [])


def _logits(runner: ModelRunner, batch: ForwardBatch) -> torch.Tensor:
    hidden, _ = runner.forward(batch)
    return torch.cat(list(runner.logits(hidden)))
