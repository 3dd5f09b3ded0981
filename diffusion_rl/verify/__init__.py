"""Bit-exactness regression: roll out fixed requests once, keep digests of every step, and compare a later rollout.

record = record(pipeline_or_client, requests)
record.save("golden.safetensors")
comparison = compare(Record.load("golden.safetensors"), pipeline_or_client, order="shuffle")
assert comparison.equal, comparison.first
"""

from diffusion_rl.verify.comparison import Comparison, Difference, RequestComparison, compare
from diffusion_rl.verify.environment import Environment, Mismatch, environment_of
from diffusion_rl.verify.fingerprint import Place, TensorPrint, digest
from diffusion_rl.verify.record import Record, RecordedRequest, RecordedSample, record
from diffusion_rl.verify.replayed import ReplayFinding
from diffusion_rl.verify.requests import RequestFields, default_requests
from diffusion_rl.verify.submission import ORDERS, Order, Source

__all__ = [
    "ORDERS",
    "Comparison",
    "Difference",
    "Environment",
    "Mismatch",
    "Order",
    "Place",
    "Record",
    "RecordedRequest",
    "RecordedSample",
    "ReplayFinding",
    "RequestComparison",
    "RequestFields",
    "Source",
    "TensorPrint",
    "compare",
    "default_requests",
    "digest",
    "environment_of",
    "record",
]
