"""FlowGRPO of the embedded model against a real rollout service: `python -m examples.flow_grpo --help`."""

import os

# Before torch is imported: threads that wait by spinning slow down a machine that also runs the service, up to thirty
# times where anything else wants its cores.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
