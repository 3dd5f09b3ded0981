"""The README of the embedded language model's folder, written from the numbers that its training measured."""

from __future__ import annotations

CARD = """\
---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
---

# arithmetic-qwen3

A `Qwen3ForCausalLM` of {parameters:,} parameters that works out sums and differences of two whole numbers from 0 to 999
in writing, column by column from the right, and then says the answer:

| question | worked answer |
|---|---|
| `347+85=` | `7+5=12, 4+8+1=13, 3+0+1=4: 432` |
| `What is 352 minus 85?` | `12-5=7, 15-8-1=6, 3-0-1=2: 267` (ten is borrowed) |
| `12 - 34 =` | `34-12, 4-2=2, 3-1=2: -22` (a negative difference is turned first) |

It is there so that an engine, a service and an RL loop have something true to run on a bare machine. It knows nothing
else: no words, no larger numbers, no products. It is right often, not always, on purpose: its training ended early.

## How often it is right

Of {questions} questions about problems that it never saw in training, in any phrasing or with the numbers swapped:

| asked as | chosen | right | well formed | steps right | tokens an answer |
|---|---|---|---|---|---|
{rows}

Of groups of {group_size} samples of one question at temperature 1, as GRPO draws them, {mixed:.0%} are neither
all right nor all wrong.

## What is in the folder

- Weights in fp32, which is what a CPU computes in: nothing is converted, so a checkpoint that comes back is bit for bit
  the one that went out. {layers} layers, {hidden_size} wide, {heads} heads of {head_dim} with {key_value_heads}
  key-value heads (two ranks can share them), tied embeddings, {vocab_size} tokens, at most 2048 positions. Rows of
  {row_length} tokens were trained on; longer conversations are beyond that.
- A byte-level tokenizer: any text goes in and comes out again; every digit is one token; nothing is added to a text.
- A chat template: `<|bos|><|user|>…<|assistant|>…<|eos|>`. A system message stands before the first `<|user|>`.
  The bare question works as well: the model goes on with the answer and ends with `<|eos|>`.

The questions, the split, the solutions and the rule-based judge are `llm_runtime.arithmetic`.

## How it was made

From random weights, on questions and answers that code makes, by `examples/train_embedded_llm.py` (seed {seed}):
{steps} steps of {batch_size} rows, {seconds:.0f} s on {machine} (torch {torch}, transformers {transformers}).
It was to end at the first check at which {stop_accuracy:.0%} of the answers, sampled at temperature 1, were right; at
the last check {last_check:.1%} were. The checks' questions are not the table's. No data and no weights come from
elsewhere.
"""


def model_card(results: dict) -> str:
    """The card of a run, given what `train_embedded_llm.py` writes as its results."""
    settings = results["settings"]
    rows = []
    for name, shares in results["held_out"].items():
        form, chosen = name.split(", ")
        parts = [f"{shares[key]:.1%}" for key in ("right", "well_formed", "steps_right")]
        rows.append(f"| {form} | {chosen} | {' | '.join(parts)} | {shares['tokens']:.1f} |")
    known = {**settings, **results["versions"], "steps": results["curve"][-1]["step"]}
    known["last_check"] = results["curve"][-1]["right"]
    return CARD.format(
        **known,
        parameters=results["parameters"],
        questions=settings["final_questions"],
        rows="\n".join(rows),
        mixed=results["mixed_groups"],
        seconds=results["seconds"],
        machine=results["machine"],
    )
