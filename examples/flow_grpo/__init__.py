"""FlowGRPO of the embedded model against a real rollout service: `python -m examples.flow_grpo --help`."""
