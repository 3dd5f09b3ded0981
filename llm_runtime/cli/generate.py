"""`llm-runtime generate`: prompts in, what comes of them on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from llm_runtime.cli import options

if TYPE_CHECKING:
    from llm_runtime.output import Generated


def generate(
    prompts: options.Prompts,
    max_new_tokens: options.MaxNewTokens = 64,
    temperature: options.Temperature = 0.0,
    top_p: options.TopP = 1.0,
    top_k: options.TopK = -1,
    n: options.Samples = 1,
    seed: options.Seed = None,
    stop: options.Stop = None,
    logprobs: options.Logprobs = False,
    model: options.Model = options.EMBEDDED,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    url: options.Url = None,
) -> None:
    """Go on from prompts and print what came out, each sample with its tokens and the sum of their log-probs."""
    sampling = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "n": n,
        "sampling_seed": seed,
        "stop": stop or [],
    }
    samples = _samples(prompts, sampling, url=url, model=model, dtype=dtype, device=device)
    console = Console()
    for number, sample in enumerate(samples):
        if number % n == 0:
            console.print(Text(prompts[number // n], "bold"), soft_wrap=True)
        _show(console, sample, logprobs=logprobs)


def _samples(
    prompts: Sequence[str], sampling: dict[str, Any], *, url: str | None, model: str, dtype: str, device: str
) -> list[Generated]:
    if url is not None:
        from llm_runtime.client import LLMClient

        with LLMClient(url) as client:
            return client.generate(prompts, sampling, return_logprob=True)
    from llm_runtime.llm import LLM

    with LLM(model, dtype=dtype, device=device) as llm:
        return llm.generate(prompts, sampling, return_logprob=True)


def _show(console: Console, sample: Generated, *, logprobs: bool) -> None:
    output = sample.output
    entries = output.output_token_logprobs or []
    total = sum(log_prob for log_prob, _ in entries if log_prob is not None)
    reason = output.finish_reason.type if output.finish_reason is not None else "?"
    console.print(Text(f"  {sample.text}"), soft_wrap=True)
    console.print(Text(f"  {len(output.output_ids)} tokens, {reason}, log-prob {total:.4f}", "dim"))
    if logprobs:
        shown = " ".join(f"{token}:{log_prob:.3f}" for log_prob, token in entries)
        console.print(Text(f"  {shown}", "dim"), soft_wrap=True)
