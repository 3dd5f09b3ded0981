"""Certification finds what depends on the batch, by name, and refuses exact mode because of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_models import qwen_image_pipeline, save, sd3_pipeline, wan_pipeline, z_image_pipeline

from diffusion_rl.config import EngineConfig
from diffusion_rl.models import family_for
from diffusion_rl.rollout.certification import certify_family, make_exact
from diffusion_rl.rollout.engine import build_engine
from engine_control.errors import NotExactError
from rl_kernels.attention import attention
from rl_kernels.certify import ROWWISE, OperationClass, Recorded, certify, linear_rows, record, shards
from rl_kernels.linear import IMPLEMENTATIONS, fixed_tiles, library_call, padded_rows
from rl_kernels.mode import EXACT, LIBRARY, Choices, exact_mode, observing
from rl_kernels.reduce import folded_mean
from rl_kernels.verdict_cache import forget

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _nothing_remembered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("DIFFUSION_RL_VERDICT_CACHE", "off")
    forget()
    yield
    forget()


def variant_silu(x: torch.Tensor, inplace: bool = False) -> torch.Tensor:
    """SiLU whose bits depend on how many samples stand beside: what certification must find."""
    return x * torch.sigmoid(x) * (1 + len(x) * 2**-20)


def variant_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return padded_rows(x, weight, bias) * (1 + (x.numel() // x.shape[-1] % 2) * 2**-20)


def wan_two(dtype: torch.dtype) -> Any:
    return wan_pipeline(dtype, boundary=0.8)


@pytest.mark.parametrize("build", [sd3_pipeline, qwen_image_pipeline, z_image_pipeline, wan_two])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_families_are_certified_on_this_cpu(build: Callable[..., Any], dtype: torch.dtype) -> None:
    certificate = certify_family(family_for(build(dtype)))
    assert certificate.exact, certificate.refused
    operations = {v.operation.split()[0] for v in certificate.verdicts}
    own = {"cross_attention", "conv3d", "transformer_2"} if build is wan_two else set[str]()
    assert {"linear", "attention", "silu", "transformer"} | own <= operations
    assert len({v.operation for v in certificate.verdicts}) == len(certificate.verdicts)


def test_a_variant_operation_is_found_by_its_name_and_exact_mode_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    family = family_for(sd3_pipeline())
    recorded = record(lambda: _guided(family))
    swapped = {}
    for kind, call in recorded.items():
        is_silu = kind.operation == "silu"
        swapped[kind] = type(call)(variant_silu) if is_silu else call
    certificate = certify(swapped, CPU)
    assert not certificate.exact
    assert certificate.refused == ("silu 128 float32",)
    monkeypatch.setattr("diffusion_rl.rollout.certification.certify_family", lambda f, **_: certificate)
    with pytest.raises(NotExactError, match=r"silu 128 float32.*disable-deterministic-inference"):
        make_exact(family, "on")
    exactness = make_exact(family, "auto")
    assert not exactness.enabled
    assert exactness.describe()["refused"] == ["silu 128 float32"]
    assert family.choices is LIBRARY
    family.choices = EXACT


def test_a_linear_layer_that_fails_gets_the_next_implementation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(IMPLEMENTATIONS, "padded_rows", variant_linear)
    family = family_for(sd3_pipeline())
    certificate = certify(record(lambda: _guided(family)), CPU)
    assert certificate.exact
    linears = [v for v in certificate.verdicts if v.operation.startswith("linear")]
    assert {v.implementation for v in linears} == {"fixed_tiles"}
    assert all(v.failed_at is not None and v.failed_at.startswith("padded_rows: 1 rows") for v in linears)
    assert set(certificate.choices.linear.values()) == {"fixed_tiles"}


def test_a_linear_layer_that_nothing_makes_exact_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("padded_rows", "fixed_tiles"):
        monkeypatch.setitem(IMPLEMENTATIONS, name, variant_linear)
    certificate = certify(record(lambda: _guided(family_for(sd3_pipeline()))), CPU)
    assert all(name.startswith("linear") for name in certificate.refused)
    assert len(certificate.refused) > 3


def _guided(family: Any) -> torch.Tensor:
    from diffusion_rl.rollout.certification import probe_batch

    return family.predict(probe_batch(family))


def probed(operation: str, shape: tuple[int, ...], call: Recorded) -> Any:
    """The certificate of that one class."""
    return certify({OperationClass(operation, shape, torch.float32): call}, CPU)


@pytest.mark.parametrize("rank", range(4))
def test_attention_is_probed_with_the_heads_of_every_rank(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs: list[torch.Tensor] = []  # the rank's first head of the whole batch

    def wrong_on_one_rank(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
        if not theirs:
            theirs.append(q[:, 2 * rank])
        on_that_rank = q.shape[:2] == (8, 2) and torch.equal(q[:, 0], theirs[0])
        assert q.is_contiguous()
        return attention(q, k, v, **options) * (1 + on_that_rank * 2**-20)

    monkeypatch.setattr("rl_kernels.certify.attention", wrong_on_one_rank)
    certificate = probed("attention", (8, 12, 16), Recorded(F.scaled_dot_product_attention))
    assert not certificate.exact
    assert certificate.verdicts[0].failed_at == f"library: heads {2 * rank} to {2 * rank + 1} of 8"


def test_heads_that_ranks_cannot_share_evenly_are_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong_for_two_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
        return attention(q, k, v, **options) * (1 + (q.shape[1] == 2) * 2**-20)

    monkeypatch.setattr("rl_kernels.certify.attention", wrong_for_two_heads)
    assert probed("attention", (3, 12, 16), Recorded(F.scaled_dot_product_attention)).exact


def test_attention_that_must_go_row_by_row_does_so_on_every_rank_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def depends_on_the_batch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, per_sample: bool) -> torch.Tensor:
        return attention(q, k, v, per_sample=per_sample) * (1 + (0 if per_sample else len(q)) * 2**-20)

    monkeypatch.setattr("rl_kernels.certify.attention", depends_on_the_batch)
    certificate = probed("attention", (12, 6, 16), Recorded(F.scaled_dot_product_attention))
    assert certificate.exact
    heads = {heads for heads, _, _ in certificate.choices.attention_per_sample}
    assert heads == {12, 6, 3}


def test_an_operation_that_depends_on_how_many_tokens_stand_beside_is_found() -> None:
    def depends_on_tokens(x: torch.Tensor) -> torch.Tensor:
        return F.silu(x) * (1 + (x.shape[1] == 2) * 2**-20)

    certificate = probed("silu", (10, 64), Recorded(depends_on_tokens))
    assert certificate.verdicts[0].failed_at == "library: tokens 0 to 1 of 10 (axis 1)"
    assert probed("silu", (10, 64), Recorded(F.silu)).exact


def test_an_operation_that_computes_something_else_for_a_trainer_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def trains(x: torch.Tensor, *others: Any, **options: Any) -> float:
        return 1 + x.requires_grad * 2**-10

    for name in ("padded_rows", "fixed_tiles"):
        product = IMPLEMENTATIONS[name]
        monkeypatch.setitem(IMPLEMENTATIONS, name, lambda *xwb, f=product: f(*xwb) * trains(*xwb))
    monkeypatch.setattr("rl_kernels.certify.attention", lambda *qkv, **o: attention(*qkv, **o) * trains(*qkv))
    calls = {
        "linear": ((64, 64), F.linear),
        "attention": ((2, 6, 16), F.scaled_dot_product_attention),
        "silu": ((10, 64), lambda x: F.silu(x) * trains(x)),
    }
    for operation, (shape, function) in calls.items():
        certificate = probed(operation, shape, Recorded(function, tokens=(5,)))
        assert not certificate.exact
        assert str(certificate.verdicts[0].failed_at).endswith(": the forward under autograd")


def test_the_last_and_shorter_shard_is_probed_too() -> None:
    def depends_on_tokens(x: torch.Tensor) -> torch.Tensor:
        return F.silu(x) * (1 + (x.shape[1] == 1) * 2**-20)

    assert probed("silu", (13, 64), Recorded(depends_on_tokens)).verdicts[0].failed_at == (
        "library: tokens 12 to 12 of 13 (axis 1)"
    )


@pytest.mark.parametrize(
    ("operation", "shape", "call"),
    [
        ("softmax", (6, 8), Recorded(F.softmax, (), {"dim": 1})),
        ("softmax", (6, 8), Recorded(F.softmax, (-2,))),
        ("mean", (6, 8), Recorded(torch.Tensor.mean, ((1, 2),))),
        ("mean", (6, 8), Recorded(torch.Tensor.mean, (1,))),
        ("mean", (6, 8), Recorded(torch.Tensor.mean, (-1,))),
        ("norm", (6, 8), Recorded(torch.norm, (), {"dim": -1, "keepdim": True})),
        ("norm", (6, 8), Recorded(torch.norm, (2, 1))),
        ("layer_norm", (6, 8), Recorded(F.layer_norm, ((6, 8),))),
        ("layer_norm", (6, 8), Recorded(F.layer_norm, (), {"normalized_shape": (8,)})),
        ("rms_norm", (4, 6, 8), Recorded(F.rms_norm, ((8,),))),
        ("group_norm", (8, 6), Recorded(F.group_norm, (2,))),
        ("conv2d", (4, 6, 6), Recorded(F.conv2d, (torch.ones(3, 4, 2, 2), None, 2))),
    ],
)
def test_an_axis_that_is_summed_over_is_not_cut_into_shards(
    operation: str, shape: tuple[int, ...], call: Recorded
) -> None:
    certificate = probed(operation, shape, call)
    assert certificate.exact, certificate.verdicts


def test_a_mean_that_depends_on_how_many_rows_there_are_is_folded_instead() -> None:
    def depends_on_rows(x: torch.Tensor, dim: int, keepdim: bool = False) -> torch.Tensor:
        return torch.Tensor.mean(x, dim, keepdim=keepdim) * (1 + (x.shape[0] == 1) * 2**-20)

    certificate = probed("mean", (6, 320), Recorded(depends_on_rows, (-1,), {"keepdim": True}))
    assert certificate.exact
    assert certificate.verdicts[0].implementation == "folded"
    assert certificate.verdicts[0].failed_at == "library: samples 0 to 0 of 8"
    assert certificate.choices.folded_means == {(320, torch.float32)}
    x = torch.randn(3, 5, 320)
    with exact_mode(choices=certificate.choices):
        folded = x.mean(-1, keepdim=True)
        assert torch.equal(x[1:2].mean(dim=-1), folded[1:2, :, 0])
        assert torch.equal(x.mean(1), torch.Tensor.mean(x, 1))
    assert torch.equal(folded, folded_mean(x, keepdim=True))
    assert torch.allclose(folded, x.mean(-1, keepdim=True), atol=1e-6)


def test_a_mean_over_other_axes_has_no_other_way() -> None:
    def depends_on_rows(x: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.Tensor.mean(x, dim) * (1 + (x.shape[0] == 1) * 2**-20)

    assert not probed("mean", (6, 320), Recorded(depends_on_rows, (1,))).exact


def test_shards_cover_every_token_once_and_only_the_last_is_shorter() -> None:
    for length in (1, 5, 8, 333, 4096):
        for ranks in (1, 2, 4, 8):
            parts = shards(length, ranks)
            assert [i for part in parts for i in range(length)[part]] == list(range(length))
            assert len(parts) <= ranks
            assert {len(range(length)[p]) for p in parts[:-1]} <= {-(-length // ranks)}


def test_a_linear_layer_is_probed_at_the_rows_that_shards_bring(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong_at_84_rows(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return padded_rows(x, weight, bias) * (1 + (len(x) == 84) * 2**-20)

    assert {333, 167, 84, 42, 81, 666} <= set(linear_rows([333]))  # 81: the last of four ranks
    monkeypatch.setitem(IMPLEMENTATIONS, "padded_rows", wrong_at_84_rows)
    assert probed("linear", (64, 32), Recorded(F.linear)).choices.linear[64, 32, torch.float32] == "padded_rows"
    certificate = probed("linear", (64, 32), Recorded(F.linear, tokens=(333,)))
    assert certificate.verdicts[0].failed_at == "padded_rows: 84 rows from 0"
    assert certificate.choices.linear[64, 32, torch.float32] == "fixed_tiles"


def test_a_forward_is_recorded_with_the_tokens_of_both_streams_and_its_patch_embedding() -> None:
    recorded = record(lambda: _guided(family_for(sd3_pipeline())))
    by_name = {str(kind): call for kind, call in recorded.items()}
    assert by_name["linear 128x128 float32"].tokens == (1, 64, 280)  # time, image, text
    assert "conv2d 16x16x16 float32" in by_name


def test_choices_decide_which_implementation_runs() -> None:
    x, weight = torch.randn(5, 64), torch.randn(32, 64)
    chosen = Choices({(64, 32, torch.float32): "fixed_tiles"})
    with exact_mode(choices=chosen):
        assert torch.equal(F.linear(x, weight), fixed_tiles(x, weight))
    with exact_mode(choices=LIBRARY):
        assert torch.equal(F.linear(x, weight), library_call(x, weight))


def test_attention_can_be_computed_row_by_row() -> None:
    q = torch.randn(3, 2, 5, 16)
    per_sample = Choices(attention_per_sample=frozenset({(2, 16, torch.float32)}))
    real = torch._C._nn.scaled_dot_product_attention
    with exact_mode(choices=per_sample):
        out = F.scaled_dot_product_attention(q, q, q)
    assert torch.equal(out[1:2], real(q[1:2], q[1:2], q[1:2]))


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("shape", [(5, 64), (2, 3, 128), (300, 640)])
def test_every_implementation_computes_the_same_product(name: str, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(*shape), torch.randn(7, shape[-1]), torch.randn(7)
    expected = x.double() @ weight.double().T + bias.double()
    torch.testing.assert_close(IMPLEMENTATIONS[name](x, weight, bias).double(), expected, atol=1e-4, rtol=1e-4)


def test_fixed_tiles_are_row_invariant_too() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(300, 1024), torch.randn(64, 1024)
    whole = fixed_tiles(x, weight)
    for rows in (1, 3, 127, 128, 129):
        assert torch.equal(fixed_tiles(x[:rows], weight), whole[:rows])


def test_probing_touches_nobodys_random_state() -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    certify_family(family_for(sd3_pipeline()))
    assert torch.equal(torch.rand(1), expected)


def test_the_observer_sees_only_what_runs_inside_its_block() -> None:
    seen: list[Callable[..., Any]] = []
    layer, x = torch.nn.Linear(8, 8), torch.randn(1, 8)
    with observing(lambda function, args, kwargs: seen.append(function)), exact_mode():
        F.silu(layer(x))
    with exact_mode():
        layer(x)
    assert seen.count(F.linear) == 1
    assert F.silu in seen
    assert F.silu in ROWWISE


def test_an_engine_says_what_it_found(tmp_path: Any) -> None:
    folder = str(save(sd3_pipeline(), tmp_path / "sd3"))
    for wanted, enabled, certified in (("auto", True, True), ("on", True, True), ("off", False, None)):
        engine = build_engine(EngineConfig(model_path=folder, device="cpu", deterministic=wanted))  # type: ignore[arg-type]
        about = engine.describe()["deterministic"]
        assert isinstance(about, dict)
        assert (about["enabled"], about["certified"]) == (enabled, certified)
        assert bool(about["table"]) == (wanted != "off")
