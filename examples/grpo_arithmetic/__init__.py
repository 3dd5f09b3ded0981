"""GRPO of the embedded language model against a real service: `python -m examples.grpo_arithmetic --help`."""
