"""Each fused operation is certified by name; one that fails costs the model its fused blocks, never its certificate.

On a CPU the twins stand in for the kernels. The real ones run in Triton's interpreter, in a process of its own, and
compiled on a GPU, where there is Triton, or a GPU.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from interpreter import passed_in_interpreter
from tiny_models import qwen_image_pipeline, sd3_pipeline

from diffusion_rl.models import ModelFamily, family_for
from diffusion_rl.rollout import certification
from diffusion_rl.rollout.certification import certify_family, make_exact
from rl_kernels.attention import attention
from rl_kernels.certify_fused import FUSED, FusedCall, FusedClass, certify_fused, record_fused
from rl_kernels.fused import differentiable, interpreted_kernels, triton_is_installed
from rl_kernels.gelu_linear import activated_linear
from rl_kernels.joint_qkv import Stream, joint_qkv
from rl_kernels.linear import linear
from rl_kernels.mode import Choices, exact_mode
from rl_kernels.modulated_norm import modulated_norm
from rl_kernels.verdict_cache import Verdict, VerdictCache, forget

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CPU = torch.device("cpu")
FP32 = torch.float32
KERNELS = ("modulated_norm", "gated_residual", "joint_qkv", "gelu_linear")
MODULES = {n: importlib.import_module(f"rl_kernels.{n}") for n in KERNELS}
# Where each operation is launched, and with how many tensors.
LAUNCHES = {
    "modulated_norm": ("modulated_norm", 3),
    "modulated_norm_pair": ("modulated_norm", 5),
    "gated_residual": ("gated_residual", 3),
    "gated_residual_norm": ("gated_residual", 5),
    "joint_qkv": ("joint_qkv", 12),
    "activated_linear": ("gelu_linear", 3),
}
ATTENTION = FusedClass("attention", 64, FP32, 16)

Outputs = tuple[torch.Tensor, ...]
operations = pytest.mark.parametrize("operation", LAUNCHES)


@pytest.fixture(autouse=True)
def _nothing_remembered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("DIFFUSION_RL_VERDICT_CACHE", "off")
    torch.manual_seed(0)
    forget()
    yield
    forget()


def one_call(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor]:
    return (F.gelu(linear(x, weight, bias), approximate="tanh"),)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels that run anywhere: where Triton's would be launched, their twins compute."""
    monkeypatch.setattr("rl_kernels.fused.triton_is_installed", lambda: True)
    monkeypatch.setattr("rl_kernels.gelu_linear.in_one_call", lambda x: True)
    for module in MODULES.values():
        monkeypatch.setattr(module, "_launch", vars(module)["_twin"])
    monkeypatch.setattr("rl_kernels.gelu_linear._launch", one_call)
    with interpreted_kernels():
        yield


@pytest.fixture
def fusing(kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Families may fuse on this machine."""
    monkeypatch.setattr(certification, "_can_fuse", lambda family: True)


def classes(
    width: int = 64,
    head_dim: int = 16,
    dtype: torch.dtype = FP32,
    tokens: tuple[int, int] = (5, 12),
    *,
    activated: bool = False,
) -> dict[FusedClass, FusedCall]:
    """Every operation at those shapes; tokens of the first stream and of the second. activated: the linear layer too
    that only a GPU has."""
    each = tuple((n,) for n in sorted(tokens))
    found = {
        FusedClass(name, width, dtype): FusedCall(function, each)
        for function, name in FUSED.items()
        if name not in ("joint_qkv", "activated_linear")
    }
    if activated:
        found[FusedClass("activated_linear", width, dtype, outputs=2 * width)] = FusedCall(activated_linear, each)
    for streams in ((("norm",), ("norm",)), (("norm", "rope"), ("norm", "rope")), ((), ()), (("rope",), ("norm",))):
        kind = FusedClass("joint_qkv", width, dtype, head_dim, streams)
        found[kind] = FusedCall(joint_qkv, (tokens, tokens[::-1]))
    found[FusedClass("joint_qkv", width, dtype, head_dim, (("norm",),))] = FusedCall(joint_qkv, each)
    found[FusedClass("attention", width, dtype, head_dim)] = FusedCall(F.scaled_dot_product_attention, each)
    return found


def by_name(verdicts: tuple[Verdict, ...]) -> dict[str, Verdict]:
    return {v.operation: v for v in verdicts}


def refused(verdicts: tuple[Verdict, ...]) -> set[str]:
    return {v.operation.split()[0] for v in verdicts if v.implementation == "torch"}


def break_kernel(
    monkeypatch: pytest.MonkeyPatch, operation: str, change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Changes what the operation's kernel, and no other's, computes; `change` gets `[B, tokens, ...]`."""
    name, tensors = LAUNCHES[operation]
    launch = vars(MODULES[name])["_launch"]

    def broken(*inputs: torch.Tensor | None, **options: Any) -> Outputs:
        outputs: Outputs = launch(*inputs, **options)
        return tuple(map(change, outputs)) if len(inputs) == tensors else outputs

    monkeypatch.setattr(MODULES[name], "_launch", broken)


def beside_others(x: torch.Tensor) -> torch.Tensor:
    return x + x.shape[0] * 1e-6


def last_token_apart(x: torch.Tensor) -> torch.Tensor:
    x[:, -1] += 1e-6
    return x


def miscompiled(x: torch.Tensor) -> torch.Tensor:
    return x * (1 + 2**-10)


def not_a_number(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x > 2, torch.nan, x)


# --- what passes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tokens", [(5, 12), (3, 1), (40, 17)], ids=str)
def test_operations_without_a_kernel_are_served_by_their_twins_and_pass(
    dtype: torch.dtype, tokens: tuple[int, int]
) -> None:
    verdicts = certify_fused(classes(dtype=dtype, tokens=tokens), CPU)
    assert not refused(verdicts), verdicts
    assert {v.implementation for v in verdicts} == {"twin", "library"}
    assert len(by_name(verdicts)) == len(verdicts)


def test_operations_with_a_kernel_are_certified_under_its_name(kernels: None) -> None:
    verdicts = by_name(certify_fused(classes(), CPU))
    assert verdicts["modulated_norm 64 float32"] == Verdict("modulated_norm 64 float32", "triton", ("triton", "torch"))
    rotated = verdicts["joint_qkv 4x16 float32 (norm rope + norm rope)"]
    assert (rotated.implementation, rotated.failed_at) == ("triton", None)
    assert verdicts["attention 4x16 float32 of [B, T, H, D]"].tried == ("library", "torch")


def test_rows_that_no_kernel_serves_are_not_said_to_run_on_one(kernels: None) -> None:
    verdicts = certify_fused(classes(width=2 * 48, head_dim=48), CPU)
    assert {v.operation.split()[0] for v in verdicts if v.implementation == "twin"} == {"joint_qkv"}
    verdicts = certify_fused(classes(width=40, head_dim=20), CPU)
    assert {v.implementation for v in verdicts} == {"twin", "library"}


def test_probing_touches_nobodys_random_state() -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    certify_fused(classes(), CPU)
    assert torch.equal(torch.rand(1), expected)


# --- what is refused ------------------------------------------------------------------------------------------------


@operations
@pytest.mark.parametrize(
    ("change", "failed_at"),
    [
        (beside_others, r"(triton|library): samples 0 to 0 of 8 \(5( \+ 12)? tokens\)"),
        (last_token_apart, r"(triton|library): the tokens of rank 0 of 2 \(5( \+ 12)? tokens\)"),
        (miscompiled, r"(triton|library): 0\.000\d+ off its twin \(5( \+ 12)? tokens\)"),
        (not_a_number, r"(triton|library): samples \d to \d of 8 \(5( \+ 12)? tokens\)"),
    ],
)
def test_a_broken_kernel_is_refused_by_its_operations_name_and_by_no_other(
    operation: str,
    change: Callable[[torch.Tensor], torch.Tensor],
    failed_at: str,
    kernels: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    break_kernel(monkeypatch, operation, change)
    verdicts = certify_fused(classes(activated=True), CPU)
    assert refused(verdicts) == {operation}
    for verdict in verdicts:
        if verdict.implementation == "torch":
            assert verdict.exact
            assert re.fullmatch(failed_at, verdict.failed_at or "")


@operations
def test_a_kernel_that_computes_something_else_under_autograd_is_refused(
    operation: str, kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, tensors = LAUNCHES[operation]

    def otherwise(launch: Any, twin: Any, inputs: tuple[torch.Tensor | None, ...]) -> Outputs:
        outputs = differentiable(launch, twin, inputs)
        apart = torch.is_grad_enabled() and len(inputs) == tensors
        return tuple(x + 1e-6 for x in outputs) if apart else outputs

    monkeypatch.setattr(MODULES[name], "differentiable", otherwise)
    verdicts = certify_fused(classes(activated=True), CPU)
    assert refused(verdicts) == {operation}
    failures = {v.failed_at for v in verdicts} - {None}
    assert all(": the forward under autograd" in str(f) for f in failures)


@pytest.mark.parametrize("operation", ["modulated_norm", "modulated_norm_pair", "gated_residual_norm"])
def test_a_kernel_that_reads_chunks_of_a_projection_as_if_they_were_dense_is_refused(
    operation: str, kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, tensors = LAUNCHES[operation]
    launch = vars(MODULES[name])["_launch"]

    def dense(x: torch.Tensor) -> torch.Tensor:
        return x.as_strided(x.shape, (x.shape[1], 1)) if x.dim() == 2 else x

    def misread(*inputs: torch.Tensor, **options: Any) -> Outputs:
        return launch(*(map(dense, inputs) if len(inputs) == tensors else inputs), **options)  # type: ignore[no-any-return]

    monkeypatch.setattr(MODULES[name], "_launch", misread)
    assert refused(certify_fused(classes(), CPU)) == {operation}


def test_a_kernel_that_mistakes_where_the_second_stream_starts_is_refused(
    kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_kernel(monkeypatch, "joint_qkv", lambda x: x.roll(1, dims=1))
    failed = [v for v in certify_fused(classes(), CPU) if v.implementation == "torch"]
    assert len(failed) == 4  # all with two streams


def test_a_rank_that_has_no_tokens_of_a_stream_left_is_probed_too(
    kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = vars(MODULES["joint_qkv"])["_launch"]

    def wrong_without_text(*inputs: torch.Tensor, **options: Any) -> Outputs:
        outputs: Outputs = launch(*inputs, **options)
        return tuple(x + 1e-6 for x in outputs) if inputs[6].shape[1] == 0 else outputs

    monkeypatch.setattr(MODULES["joint_qkv"], "_launch", wrong_without_text)
    kind = FusedClass("joint_qkv", 64, FP32, 16, ((), ()))
    (verdict,) = certify_fused({kind: FusedCall(joint_qkv, ((12, 3),))}, CPU)
    assert verdict.failed_at == "triton: the tokens of rank 3 of 4 (12 + 3 tokens)"


# --- attention ------------------------------------------------------------------------------------------------------


def attention_verdict(function: Callable[..., torch.Tensor], choices: Choices | None = None) -> Verdict:
    call = FusedCall(function, ((1,), (12,)))
    (verdict,) = certify_fused({ATTENTION: call}, CPU, choices=choices or Choices())
    return verdict


def test_attention_is_probed_on_the_memory_that_fused_blocks_hand_it() -> None:
    def depends_on_memory(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attention(q, k, v) * (1 + q.is_contiguous() * 2**-20)

    def depends_on_the_batch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        assert q.transpose(1, 2).is_contiguous()
        return attention(q, k, v) * (1 + len(q) * 2**-20)

    def depends_on_autograd(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attention(q, k, v) * (1 + q.requires_grad * 2**-20)

    assert attention_verdict(attention).implementation == "library"
    found = attention_verdict(depends_on_memory)
    assert found.failed_at == "library: other bits than of [B, H, T, D] (12 tokens)"
    assert attention_verdict(depends_on_the_batch).failed_at == "library: samples 0 to 0 of 8 (1 tokens)"
    assert attention_verdict(depends_on_autograd).failed_at == "library: the forward under autograd (1 tokens)"
    assert found.implementation == "torch"


@pytest.mark.parametrize("text_first", [False, True])
def test_attention_is_probed_beside_longer_texts(text_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong_beside_padding(*qkv: torch.Tensor, plan: Any = None, **options: Any) -> torch.Tensor:
        out = attention(*qkv, plan=plan, **options)
        return out * (1 + 2**-20) if plan is not None and plan.text_first == text_first else out

    monkeypatch.setattr("rl_kernels.mode.attention", wrong_beside_padding)
    found = attention_verdict(F.scaled_dot_product_attention)
    place = "before" if text_first else "behind"
    assert found.failed_at == f"library: 3 of 3 text tokens {place} the others (12 tokens)"


def test_attention_is_probed_as_it_was_chosen_for_stock_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    def depends_on_the_batch(q: torch.Tensor, *kv: torch.Tensor, per_sample: bool, **options: Any) -> torch.Tensor:
        return attention(q, *kv, per_sample=per_sample, **options) * (1 + (0 if per_sample else len(q)) * 2**-20)

    monkeypatch.setattr("rl_kernels.mode.attention", depends_on_the_batch)
    assert attention_verdict(F.scaled_dot_product_attention).implementation == "torch"
    chosen = Choices(attention_per_sample=frozenset({(4, 16, FP32)}))
    assert attention_verdict(F.scaled_dot_product_attention, chosen).implementation == "per_sample"


# --- what is recorded, and remembered -------------------------------------------------------------------------------


def test_a_class_is_recorded_with_every_number_of_tokens_and_with_its_own_eps() -> None:
    def forward() -> None:
        for tokens, eps in ((7, 1e-6), (3, 1e-6), (3, 1e-5)):
            modulated_norm(torch.randn(2, tokens, 64), torch.randn(2, 64), shift=torch.randn(2, 64), eps=eps)
        first = Stream(*torch.randn(3, 2, 5, 32), rope=torch.ones(5, 8, dtype=torch.complex64))
        joint = joint_qkv(first, Stream(*torch.randn(3, 2, 4, 32)), head_dim=16)
        F.scaled_dot_product_attention(*joint)
        F.scaled_dot_product_attention(*(x[:, :, :8].contiguous() for x in joint))

    def in_exact_mode() -> None:
        with exact_mode():
            forward()

    recorded = record_fused(in_exact_mode)
    assert {str(kind): call.tokens for kind, call in recorded.items()} == {
        "modulated_norm 64 float32": ((3,), (7,)),
        "modulated_norm 64 float32 eps 1e-05": ((3,),),
        "joint_qkv 2x16 float32 (rope + plain)": ((5, 4),),
        "attention 2x16 float32 of [B, T, H, D]": ((9,),),
    }
    assert record_fused(forward) == {}  # outside exact mode nothing is seen


def test_verdicts_on_fused_operations_outlive_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, recorded = VerdictCache(tmp_path), classes()
    first = certify_fused(recorded, CPU, cache=cache)
    forget()
    monkeypatch.setattr("rl_kernels.certify_fused._certify", lambda *_, **__: pytest.fail("probed again"))
    again = certify_fused(recorded, CPU, cache=cache)
    assert all(v.cached for v in again)
    assert [(v.operation, v.implementation) for v in again] == [(v.operation, v.implementation) for v in first]
    longer = {
        kind: FusedCall(call.function, (*call.tokens, (9,) * len(kind.streams))) for kind, call in recorded.items()
    }
    with pytest.raises(pytest.fail.Exception, match="probed again"):
        certify_fused(longer, CPU, cache=cache)


# --- whole families -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "build",
    [sd3_pipeline, partial(sd3_pipeline, dual_attention=True), qwen_image_pipeline],
    ids=["sd3", "dual", "qwen"],
)
def test_a_family_whose_fused_operations_pass_is_fused_and_its_table_lists_them(
    build: Callable[..., Any], fusing: None
) -> None:
    certificate = certify_family(family_for(build()))
    assert certificate.exact
    assert certificate.choices.fused
    on_kernels = {v.operation.split()[0] for v in certificate.verdicts if v.implementation in ("triton", "library")}
    assert on_kernels >= set(LAUNCHES) - {"modulated_norm_pair"}
    assert certificate.verdicts[-1].implementation == "fused"
    assert len(by_name(certificate.verdicts)) == len(certificate.verdicts)


@operations
def test_a_family_with_a_broken_fused_operation_stays_certified_on_stock_blocks(
    operation: str, fusing: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_kernel(monkeypatch, operation, miscompiled)  # no comparison of batches would find it
    certificate = certify_family(family_for(sd3_pipeline(dual_attention=True)))
    assert certificate.exact
    assert certificate.refused == ()
    assert not certificate.choices.fused
    assert refused(certificate.verdicts) == {operation}
    last = certificate.verdicts[-1]
    assert (last.operation, last.implementation) == ("blocks of SD3Transformer2DModel", "stock")
    assert (last.failed_at or "").startswith(f"fused: {operation} ")


def test_an_engine_of_such_a_family_is_exact_and_says_why_it_is_not_fused(
    fusing: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_kernel(monkeypatch, "gated_residual", beside_others)
    family: ModelFamily = family_for(sd3_pipeline())
    exactness = make_exact(family, "on")
    assert exactness.enabled
    assert not family.choices.fused
    table: Any = exactness.describe()["table"]
    (row,) = (row for row in table if row["operation"] == "gated_residual 128 float32")
    assert row["implementation"] == "torch"
    assert row["failed_at"].startswith("triton: samples 0 to 0 of 8")


# --- the real kernels -----------------------------------------------------------------------------------------------


@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
def test_the_interpreted_kernels_pass() -> None:
    with interpreted_kernels():
        verdicts = certify_fused(classes(48, 16, tokens=(2, 3)), CPU)
    assert not refused(verdicts), verdicts
    assert [v.operation for v in verdicts if v.implementation != "triton"] == ["attention 3x16 float32 of [B, T, H, D]"]


@pytest.mark.skipif(INTERPRETED or not triton_is_installed(), reason="starts the interpreter: needs Triton")
def test_the_kernels_pass_in_the_interpreter() -> None:
    assert passed_in_interpreter(f"{__file__}::test_the_interpreted_kernels_pass") == 1


@pytest.mark.skipif(not torch.cuda.is_available() or not triton_is_installed(), reason="needs a GPU and Triton")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("width", "head_dim"), [(1536, 64), (3072, 128)])
def test_the_compiled_kernels_pass(width: int, head_dim: int, dtype: torch.dtype) -> None:
    half = dtype != torch.float32
    every = classes(width, head_dim, dtype, (333, 70), activated=half)
    recorded = {kind: call for kind, call in every.items() if kind.operation != "attention"}
    verdicts = certify_fused(recorded, torch.device("cuda"))
    assert {v.implementation for v in verdicts} == ({"triton", "library"} if half else {"triton"}), verdicts
