"""GRPO of the embedded language model against a real service: `python -m examples.grpo_arithmetic --help`."""

import os

# Before torch is imported: trainer and engine take turns on the same cores, and who waits must not spin there.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
