"""How fast does the LLM runtime generate: against transformers, against its own inexact mode, and at its limits?

    python -m benchmarks.bench_llm                                        # the embedded model, on this machine's device
    python -m benchmarks.bench_llm --shape qwen3-0.6b --workload nano     # random weights; for a GPU
    python -m benchmarks.bench_llm --shape qwen3-4b --workload nano --tp-size 2  # and two GPUs beside one
    python -m benchmarks.bench_llm --shape qwen3-30b-a3b --workload single --workload nano --exact-only  # with experts

`batch` is `--batch` prompts of equal length with as many new tokens each, log-probs returned: one round of each arm in
turn. transformers' own `generate` (its default cache, sampling, scores kept) does the same work, on the same threads.
`nano` is nano-vllm's public workload: `--requests` prompts of random length in 100..1024 with outputs in 100..1024,
seed 0, all at once. `single` is one sequence: its limit is reading all weights once a token, of experts those that the
token goes to.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from benchmarks import measure
from benchmarks.measure import Report, Series
from llm_runtime import LLM, LLMConfig
from llm_runtime.assets import embedded_model_path
from llm_runtime.layers.moe import Experts

QUESTION = "How many tokens a second, beside transformers' generate, without exactness, and at the limit of memory?"
QWEN3_30B_A3B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": QWEN3_30B_A3B,
    "qwen3-30b-a3b-8-layers": {**QWEN3_30B_A3B, "num_hidden_layers": 8},
    "qwen3-0.6b": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "qwen3-4b": {
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "tiny": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "vocab_size": 10_240,
        "eos_token_id": 0,
    },
}
COMMON = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "eos_token_id": 151_645,
    "torch_dtype": "bfloat16",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the workloads and writes the report."""
    parser = measure.command_line("llm", QUESTION, repeats=5)
    parser.add_argument("--shape", choices=["embedded", *SHAPES], default="embedded")
    parser.add_argument("--workload", action="append", choices=["batch", "nano", "single"], help="default: batch")
    parser.add_argument("--batch", type=int, default=16, help="sequences of `batch`")
    parser.add_argument("--prompt", type=int, default=20, help="tokens of each prompt of `batch` and `single`")
    parser.add_argument("--new", type=int, default=100, help="new tokens of each")
    parser.add_argument("--requests", type=int, default=256, help="of `nano`")
    parser.add_argument("--longest", type=int, default=1024, help="prompt and output of `nano`, from 100 tokens on")
    parser.add_argument("--exact-only", action="store_true", help="no inexact engine beside it: two may not fit")
    parser.add_argument("--tp-size", type=int, default=1, help="`nano` on so many ranks, too, that share the weights")
    parser.add_argument("--device", default="auto")
    arguments = parser.parse_args(argv)
    report = Report("llm", QUESTION, measure.settings_of(arguments))
    with tempfile.TemporaryDirectory() as temporary:
        folder = (
            embedded_model_path() if arguments.shape == "embedded" else shape_folder(Path(temporary), arguments.shape)
        )
        for workload in arguments.workload or ["batch"]:
            {"batch": _batch, "nano": _nano, "single": _single}[workload](report, folder, arguments)
    rows = [[r["name"], r["tokens_per_second"], r["median_s"]] for r in report.results]
    measure.print_table(f"{arguments.shape}, {report.hardware['gpu'] or 'CPU'}", ["arm", "tokens/s", "s"], rows)
    for name, value in report.ratios.items():
        print(f"{name}: {value}")
    report.write(arguments.out)
    return 0


def _batch(report: Report, folder: Path, arguments: Any) -> None:
    prompts = [[(7 * i + 3 * j) % 250 for j in range(arguments.prompt)] for i in range(arguments.batch)]
    params = {"max_new_tokens": arguments.new, "ignore_eos": True, "temperature": 1.0, "sampling_seed": 1}
    room = arguments.batch * (arguments.prompt + arguments.new + 32)
    exact, inexact = _llm(folder, arguments, room), _llm(folder, arguments, room, deterministic="off")
    arms = {
        "exact": lambda: exact.generate(prompts, params, return_logprob=True),
        "inexact": lambda: inexact.generate(prompts, params, return_logprob=True),
        "transformers": _transformers(folder, prompts, arguments.new, exact.engine.runner.device),
    }
    series = measure.alternate(arms, arguments.repeats)
    tokens = arguments.batch * arguments.new
    for name, taken in series.items():
        _note(report, f"batch of {arguments.batch}, {name}", taken, tokens)
    report.ratios["batch: transformers / exact, seconds"] = _paired(series["transformers"], series["exact"])
    report.ratios["batch: exact / inexact, seconds"] = _paired(series["exact"], series["inexact"])
    steps = _bound(report, exact, arguments.batch) * arguments.batch
    report.ratios["batch: share of the bandwidth bound"] = tokens / series["exact"].median / steps


def _nano(report: Report, folder: Path, arguments: Any) -> None:
    dice, most = random.Random(0), arguments.longest
    prompts = [[dice.randint(0, 10_000) for _ in range(dice.randint(100, most))] for _ in range(arguments.requests)]
    params = [
        {"max_new_tokens": dice.randint(100, most), "ignore_eos": True, "temperature": 0.6, "sampling_seed": i}
        for i in range(arguments.requests)
    ]
    tokens = sum(int(p["max_new_tokens"]) for p in params)
    room = tokens + sum(map(len, prompts)) + 64 * arguments.requests
    exact = _llm(folder, arguments, room)
    arms = {"exact, log-probs": lambda: _fresh(exact).generate(prompts, params, return_logprob=True)}
    if not arguments.exact_only:
        inexact = _llm(folder, arguments, room, deterministic="off")
        arms["inexact, log-probs"] = lambda: _fresh(inexact).generate(prompts, params, return_logprob=True)
    with ExitStack() as closing:  # the other ranks end with it
        if arguments.tp_size > 1:
            ranks = closing.enter_context(_llm(folder, arguments, room, tp_size=arguments.tp_size))
            name = f"exact, log-probs, {arguments.tp_size} ranks"
            arms[name] = lambda: _fresh(ranks).generate(prompts, params, return_logprob=True)
        series = measure.alternate(arms, arguments.repeats)
    for name, taken in series.items():
        _note(report, f"nano, {name}", taken, tokens)
    first, *others = series.values()
    if not arguments.exact_only:
        report.ratios["nano: exact / inexact, seconds"] = _paired(first, others.pop(0))
    for over_ranks in others:
        report.ratios[f"nano: exact on 1 rank / on {arguments.tp_size}, seconds"] = _paired(first, over_ranks)
    _bound(report, exact, arguments.requests)
    report.settings["nano_output_tokens"] = tokens


def _single(report: Report, folder: Path, arguments: Any) -> None:
    llm = _llm(folder, arguments, arguments.prompt + arguments.new + 64)
    prompt = [[(3 * j) % 250 for j in range(arguments.prompt)]]
    params = {"max_new_tokens": arguments.new, "ignore_eos": True, "temperature": 0.0}
    arms = {"single": lambda: llm.generate(prompt, params, return_logprob=True)}
    taken = measure.alternate(arms, arguments.repeats)["single"]
    _note(report, "single, exact", taken, arguments.new)
    report.ratios["single: share of the bandwidth bound"] = arguments.new / taken.median / _bound(report, llm, 1)


def _paired(numerator: Series, denominator: Series) -> float:
    return measure.paired_ratios(numerator, denominator)["median"]


def _bound(report: Report, llm: LLM, rows: int) -> float:
    """Steps a second if a step of so many rows only read the weights, at the rate at which the device copies."""
    read = _read(llm.engine.model, rows)
    copied = _copy_rate(llm.engine.runner.device)
    report.limit = (
        f"A step of {rows} sequences reads {read / 1e9:.4f} GB of weights. At the {copied / 1e9:.0f} GB/s at which the "
        f"device copies (read and write together), that is {copied / read:.0f} steps/s; keys and values come on top."
    )
    return copied / read


def _read(model: torch.nn.Module, rows: int) -> float:
    """Bytes of weights that a step of so many rows reads: all of them, but of an embedding that is nothing else some
    rows, and of experts those that a router without preferences chooses."""
    read = float(sum(p.nbytes for p in {id(p): p for p in model.parameters()}.values()))
    embedding = model.model.embed_tokens.weight
    if embedding is not model.lm_head.weight:
        read -= embedding.nbytes
    for experts in (module for module in model.modules() if isinstance(module, Experts)):
        shape = experts.shape
        missed = (1 - shape.each / shape.experts) ** rows
        read -= missed * sum(p.nbytes for p in experts.parameters())
    return read


def _fresh(llm: LLM) -> LLM:
    """With nothing cached, so that every round computes every prompt."""
    llm.flush_cache()
    return llm


def _llm(folder: Path, arguments: Any, tokens: int, **fields: Any) -> LLM:
    """With room in the KV cache for so many tokens."""
    dummy = "auto" if arguments.shape == "embedded" else "dummy"
    skip = arguments.shape != "embedded"
    settings = {"device": arguments.device, "load_format": dummy, "skip_tokenizer_init": skip, "random_seed": 0}
    return LLM(config=LLMConfig(str(folder), max_total_tokens=tokens, **settings, **fields))


def _transformers(folder: Path, prompts: list[list[int]], new: int, device: torch.device) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    if (folder / "model.safetensors").exists():
        model = AutoModelForCausalLM.from_pretrained(folder).to(device).eval()
    else:
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    ids = torch.tensor(prompts, device=device)
    mask = torch.ones_like(ids)
    kept = {"output_scores": True, "return_dict_in_generate": True, "attention_mask": mask, "do_sample": True}
    return lambda: model.generate(ids, max_new_tokens=new, min_new_tokens=new, **kept)


def _note(report: Report, arm: str, taken: Series, tokens: int) -> None:
    row = taken.row(output_tokens=tokens, tokens_per_second=tokens / taken.median)
    report.results.append({**row, "name": arm})


def _copy_rate(device: torch.device) -> float:
    """Bytes a second at which the device reads: half of what a large copy moves."""
    size = 2**30 if device.type == "cuda" else 2**28
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(8):
        measure.synchronise()
        began = time.perf_counter()
        target.copy_(source)
        measure.synchronise()
        best = min(best, time.perf_counter() - began)
    return 2 * size / best  # what is read and what is written


def shape_folder(folder: Path, name: str) -> Path:
    """A folder with the config of that shape, without weights."""
    (folder / "config.json").write_text(json.dumps({**COMMON, **SHAPES[name]}))
    return folder


if __name__ == "__main__":
    main()
