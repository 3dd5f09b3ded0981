"""The norms of VAE decoders: kernels against their twins, and whole decoders with them in place.

Kernels run on a GPU, or in Triton's interpreter in a process of its own; without Triton that is skipped. Decoders run
everywhere: without kernels their fused norms are computed by the twins.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from compiled_kernels import compiled_for_hopper
from diffusers import AutoencoderKL
from diffusers.models.resnet import ResnetBlock2D
from interpreter import passed_in_interpreter
from tiny_models import qwen_image_pipeline, sd3_pipeline, wan_pipeline

from diffusion_rl import RolloutPipeline
from diffusion_rl.models.decoder import Decoding, fused_decoder, norms_of, wrong_norm
from rl_kernels import reference
from rl_kernels.channel_norm import channel_norm
from rl_kernels.channels import laid_out
from rl_kernels.fused import interpreted_kernels, triton_is_installed, warps_for
from rl_kernels.group_norm import group_norm
from rl_kernels.replacing import replaced_forwards

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
RUNNABLE = triton_is_installed() and (INTERPRETED or torch.cuda.is_available())
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
DTYPES = [torch.float32, torch.bfloat16] if DEVICE == "cpu" else [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}
# (shape, groups): odd planes, channels that are no power of two, one frame, many frames, tokens, several pieces.
SMALL = [((3, 32, 5, 7), 8), ((2, 12, 1, 3, 5), 4), ((2, 8, 3, 4, 4), 2), ((2, 24, 10), 8), ((2, 4, 52, 51), 2)]
LARGE = [((2, 512, 64, 64), 32), ((2, 256, 250, 130), 32), ((2, 128, 512, 512), 32), ((2, 384, 1, 64, 64), 32)]
SHAPES = SMALL if DEVICE == "cpu" else [*SMALL, *LARGE]

runs = pytest.mark.skipif(not RUNNABLE, reason="needs Triton, and a GPU or TRITON_INTERPRET=1")
outside = pytest.mark.skipif(INTERPRETED, reason="the process outside of the interpreter does that")
shapes = pytest.mark.parametrize(("shape", "groups"), SHAPES, ids=str)
orders = pytest.mark.parametrize("last", [False, True], ids=["channels in front", "channels innermost"])
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)

Norm = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(autouse=True)
def _on_triton() -> Iterator[None]:
    torch.manual_seed(0)
    with interpreted_kernels() if INTERPRETED else nullcontext():
        yield


def random(*shape: int, last: bool, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    x = (torch.randn(shape) * 2 + 1).to(DEVICE, dtype)
    return x.movedim(1, -1).contiguous().movedim(-1, 1) if last else x


def norms(channels: int, groups: int, dtype: torch.dtype = torch.float32) -> dict[str, tuple[Norm, Norm]]:
    """Every operation, each with its twin."""
    weight, bias = ((1 + 0.5 * torch.randn(channels)).to(DEVICE, dtype) for _ in range(2))

    def of_groups(norm: Callable[..., torch.Tensor], *affine: torch.Tensor, silu: bool) -> Norm:
        return lambda x: norm(x, groups, *affine, eps=1e-6, silu=silu)

    def of_channels(norm: Callable[..., torch.Tensor], *affine: torch.Tensor, silu: bool) -> Norm:
        return lambda x: norm(x, *affine, silu=silu)

    found: dict[str, tuple[Norm, Norm]] = {}
    for silu in (False, True):
        found[f"group_norm, silu {silu}"] = (
            of_groups(group_norm, weight, bias, silu=silu),
            of_groups(reference.group_norm, weight, bias, silu=silu),
        )
        found[f"channel_norm, silu {silu}"] = (
            of_channels(channel_norm, weight, silu=silu),
            of_channels(reference.channel_norm, weight, silu=silu),
        )
    found["group_norm alone"] = of_groups(group_norm, silu=True), of_groups(reference.group_norm, silu=True)
    found["channel_norm with a bias"] = (
        of_channels(channel_norm, weight, bias, silu=True),
        of_channels(reference.channel_norm, weight, bias, silu=True),
    )
    return found


# --- kernels --------------------------------------------------------------------------------------------------------


@runs
@shapes
@orders
@dtypes
def test_a_kernel_computes_what_its_twin_says_and_keeps_the_memory_order(
    shape: tuple[int, ...], groups: int, last: bool, dtype: torch.dtype
) -> None:
    x = random(*shape, last=last, dtype=dtype)
    for name, (fused, twin) in norms(shape[1], groups, dtype).items():
        ours, meant = fused(x), twin(x)
        assert ours.stride() == x.stride(), name
        torch.testing.assert_close(ours, meant, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype], msg=name)


@runs
@shapes
@orders
def test_a_sample_has_the_same_bits_in_every_batch_and_at_every_address(
    shape: tuple[int, ...], groups: int, last: bool
) -> None:
    x = random(*shape, last=last)
    misaligned = torch.as_strided(x.new_zeros(x.numel() + 1), x.shape, x.stride(), storage_offset=1).copy_(x)
    assert misaligned.data_ptr() % 16 != 0
    assert laid_out(misaligned).x.data_ptr() % 16 == 0
    for name, (fused, _) in norms(shape[1], groups).items():
        whole = fused(x)
        assert torch.equal(fused(misaligned), whole), name
        assert torch.equal(fused(x[1:2]), whole[1:2]), name
        turned = torch.empty_like(x).copy_(x.flip(0))
        assert torch.equal(fused(turned).flip(0), whole), name


@runs
@orders
def test_a_group_norm_of_large_numbers_keeps_their_differences(last: bool) -> None:
    x = random(1, 8, 30, 30, last=last) + 300
    meant = torch.nn.functional.group_norm(x.double(), 4, eps=1e-6)
    torch.testing.assert_close(group_norm(x, 4, eps=1e-6).double(), meant, atol=2e-4, rtol=0)


@runs
def test_a_piece_of_several_tiles_is_a_piece() -> None:
    x = random(1, 1024, 290, last=True)
    meant = reference.group_norm(x, 1)
    torch.testing.assert_close(group_norm(x, 1), meant, atol=TOLERANCE[x.dtype], rtol=TOLERANCE[x.dtype])


@runs
def test_a_forward_under_autograd_has_the_bits_of_one_without_and_its_twins_gradients() -> None:
    x = random(2, 8, 3, 5, last=False)
    for name, (fused, twin) in norms(8, 4).items():
        leaf = x.clone().requires_grad_()
        outputs = fused(leaf)
        assert torch.equal(outputs, fused(x)), name
        (ours,) = torch.autograd.grad(outputs.square().sum(), leaf)
        (meant,) = torch.autograd.grad(twin(leaf).square().sum(), leaf)
        torch.testing.assert_close(ours, meant, atol=1e-3, rtol=1e-3, msg=name)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, w: group_norm(x, 3), "divides the channels, got 3 of 8"),
        (lambda x, w: group_norm(x, 4, w), "together, got only weight"),
        (lambda x, w: group_norm(x, 4, w[:4], w), r"weight of shape \(8,\), got \(4,\)"),
        (lambda x, w: group_norm(x.bfloat16(), 4, w, w), "of one dtype"),
        (lambda x, w: group_norm(x[0, :, 0, 0], 4), r"x of shape \[B, C, ...\], got \(8,\)"),
        (lambda x, w: channel_norm(x, w[:4]), r"gamma of shape \(8,\), got \(4,\)"),
        (lambda x, w: channel_norm(x, w, w[:4]), r"bias of shape \(8,\), got \(4,\)"),
        (lambda x, w: channel_norm(x.double(), w.double()), "of one dtype out of"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(call: Callable[..., object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(torch.ones(2, 8, 3, 3), torch.ones(8))


@outside
@pytest.mark.skipif(not triton_is_installed(), reason="needs Triton")
def test_all_of_this_holds_in_the_interpreter() -> None:
    assert passed_in_interpreter(__file__) >= len(SMALL) * 6


def configurations() -> Iterator[tuple[str, str, dict[str, Any], int]]:
    """Every kernel at shapes of the decoders of SD3 and Qwen-Image: file, name, constants, elements of a program."""
    for channels, plane, last in ((128, 64, True), (512, 64, False), (384, 64, True), (96, 64, False)):
        x = torch.empty(1, channels, plane, plane)
        given = laid_out(x.contiguous(memory_format=torch.channels_last) if last else x)
        shape = {"CHANNELS": channels, "UNIT": given.unit, "LAST": last}
        if channels in (128, 512):
            for name, elements, more in (("channel_moments", 8192, {}), ("scaled_channels", 4096, {"SILU": True})):
                block = dict(zip(("BLOCK_C", "BLOCK_P"), given.tile(elements), strict=True))
                yield "group_norm", name, {**shape, **block, **more}, elements
        else:
            elements = 4096 if last else 16384
            block = dict(zip(("BLOCK_C", "BLOCK_P"), given.tile(elements, whole=True), strict=True))
            flags = {"EPS": 1e-12, "SCALE": channels**0.5, "BIAS": False, "SILU": True}
            yield "channel_norm", "channel_norm", {**shape, **block, **flags}, elements


@outside
@pytest.mark.skipif(not triton_is_installed(), reason="needs Triton")
@pytest.mark.parametrize(("file", "name", "constants", "elements"), configurations())
def test_a_kernel_compiles_to_whole_vector_accesses_of_pictures_without_spills_or_fused_multiply_adds(
    file: str, name: str, constants: dict[str, Any], elements: int
) -> None:
    def kind_of(argument: str) -> str:
        return "*bf16" if argument in ("x", "out", "gamma", "bias") else "*fp32"

    found = compiled_for_hopper(file, name, kind_of, constants, num_warps=warps_for(elements))
    assembly = found.asm["ptx"]
    a_thread = elements // (32 * warps_for(elements)) // 8  # vectors of eight
    assert assembly.count("ld.global.v4.b32") >= a_thread
    if "out" in found.src.signature:
        assert assembly.count("st.global.v4.b32") == a_thread
    assert not re.search(r"\bfma\.", assembly)
    assert ".local" not in assembly


# --- decoders -------------------------------------------------------------------------------------------------------


def tiny_vae() -> AutoencoderKL:
    return AutoencoderKL(
        block_out_channels=(16, 16),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=4,
    ).eval()


def vae_and_latents(name: str, dtype: torch.dtype) -> tuple[Any, torch.Tensor]:
    """A tiny VAE of its own, and latents of a picture, or of a video of five frames."""
    build, shape = {
        "sd3": (tiny_vae, (1, 4, 3, 5)),
        "qwen_image": (lambda: qwen_image_pipeline().vae, (1, 16, 1, 2, 3)),
        "wan": (lambda: wan_pipeline().vae, (1, 16, 2, 2, 2)),
    }[name]
    with torch.random.fork_rng():
        torch.manual_seed(1)
        vae = build()
    if name != "sd3":
        fresh = type(vae).from_config(vae.config)
        fresh.load_state_dict(vae.state_dict())
        vae = fresh.eval()
    return vae.to(DEVICE, dtype), torch.randn(shape).to(DEVICE, dtype)


vaes = pytest.mark.parametrize("name", ["sd3", "qwen_image", "wan"])


@torch.no_grad()
@vaes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_decoder_with_fused_norms_is_the_stock_one_but_for_rounding(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # it makes much of a last bit's difference
    vae, latents = vae_and_latents(name, dtype)
    stock = vae.decode(latents, return_dict=False)[0]
    names = {n: id(p) for n, p in vae.state_dict(keep_vars=True).items()}
    forwards = fused_decoder(vae)
    norm_modules = [m for m in vae.decoder.modules() if "norm" in type(m).__name__.lower() and list(m.parameters())]
    assert {id(n.module) for n in norms_of(vae.decoder)} == {id(m) for m in norm_modules}
    with replaced_forwards(forwards):
        fused = vae.decode(latents, return_dict=False)[0]
        assert {n: id(p) for n, p in vae.state_dict(keep_vars=True).items()} == names
    assert fused.is_contiguous() == stock.is_contiguous()
    off = (fused.float() - stock.float()).abs()
    assert float(off.max()) < (1e-4 if dtype == torch.float32 else 0.06)
    assert float(off.mean()) < (1e-5 if dtype == torch.float32 else 0.01)
    assert torch.equal(vae.decode(latents, return_dict=False)[0], stock)
    assert dtype == torch.float32 or not torch.equal(fused, stock)  # it did run something else


@runs
@torch.no_grad()
@vaes
def test_what_is_wrong_with_a_norm_is_found_in_a_real_decode(name: str) -> None:
    vae, latents = vae_and_latents(name, torch.float32)
    assert wrong_norm(vae, lambda: vae.decode(latents)) is None
    norm = norms_of(vae.decoder)[-1]
    next(norm.module.parameters()).fill_(float("nan"))
    found = wrong_norm(vae, lambda: vae.decode(latents))
    assert found is not None
    assert found.startswith(f"{norm.name}: nan off its twin")


@torch.no_grad()
def test_a_norm_takes_no_activation_that_others_call_as_well() -> None:
    block = ResnetBlock2D(in_channels=16, temb_channels=8, groups=4).eval()
    assert [norm.activation for norm in norms_of(block)] == [None, None]
    with torch.random.fork_rng():
        own = ResnetBlock2D(in_channels=16, temb_channels=None, groups=4).eval()
    assert [norm.activation for norm in norms_of(own)] == [own.nonlinearity] * 2
    own.nonlinearity.forward = lambda x: x * 0  # somebody's own
    assert [norm.activation for norm in norms_of(own)] == [None, None]


@pytest.mark.skipif(DEVICE != "cpu", reason="on a GPU the module itself takes one dtype only")
def test_a_norm_whose_weights_have_another_dtype_computes_as_the_module_does() -> None:
    vae, _ = vae_and_latents("sd3", torch.float32)
    norm = next(n for n in norms_of(vae.decoder) if n.activation is not None)
    x = random(1, norm.module.num_channels, 3, 3, last=False, dtype=torch.bfloat16)
    stock = type(norm.module).forward(norm.module, x)
    assert torch.equal(norm.forward(norm.module, x), torch.nn.functional.silu(stock))


@outside
def test_a_refit_of_the_vae_reaches_a_decoder_with_fused_norms() -> None:
    fields: dict[str, Any] = {"height": 64, "width": 64, "num_inference_steps": 2, "seed": 3}
    source = sd3_pipeline()
    parts = {**source.components, "vae": type(source.vae).from_config(source.vae.config)}
    parts["vae"].load_state_dict(source.vae.state_dict())
    with RolloutPipeline(type(source)(**parts)) as pipeline:
        family = pipeline.engine.family
        assert family.decoding == Decoding()  # on a CPU it decodes as diffusers does
        family.decoding = Decoding(fused_decoder(family.pipeline.vae))
        before = pipeline("a red ball", **fields)[0].generated_output
        weights = {n: t.clone() for n, t in family.pipeline.vae.state_dict().items()}
        weights["decoder.up_blocks.0.resnets.0.norm1.weight"].mul_(-2)
        pipeline.refit(weights, module="vae", weight_version="two")
        after = pipeline("a red ball", **fields)[0].generated_output
        family.decoding = Decoding()
        stock = pipeline("a red ball", **fields)[0].generated_output
    assert before is not None
    assert after is not None
    assert stock is not None
    assert float((before - after).abs().mean()) > 1e-3
    torch.testing.assert_close(after, stock, atol=1e-5, rtol=0)


@outside
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("build", [sd3_pipeline, qwen_image_pipeline, wan_pipeline])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_on_a_gpu_fused_norms_decode_a_picture_alone_and_in_a_group_alike(build: Any, dtype: torch.dtype) -> None:
    fields: dict[str, Any] = {"height": 64, "width": 64, "num_inference_steps": 2}
    fields |= {"num_frames": 5, "max_sequence_length": 24} if build is wan_pipeline else {}
    with RolloutPipeline(copy.deepcopy(build(dtype)).to("cuda")) as pipeline:
        family = pipeline.engine.family
        exactness = pipeline.engine.exactness
        if not exactness.enabled or exactness.certificate is None:
            pytest.skip(f"not certified here: {exactness.describe()['refused']}")
        verdicts = [v for v in exactness.certificate.verdicts if "decoder" in v.operation]
        chosen = {v.operation.partition("decoder")[0]: (v.implementation, v.failed_at) for v in verdicts}
        captured = {} if build is wan_pipeline else {"launches of the ": ("CUDA graph", None)}
        assert chosen == {"": ("fused", None), **captured}

        def pictures(seed: int, count: int = 1) -> list[torch.Tensor]:
            samples = pipeline("a red ball", seed=seed, num_outputs_per_prompt=count, **fields)
            return [sample.generated_output for sample in samples if sample.generated_output is not None]

        group, alone = pictures(3, 4), pictures(5)[0]
        assert torch.equal(alone, group[2])
        assert build is wan_pipeline or (family.decoding.graphs is not None and family.decoding.graphs.replayed >= 2)
        name = next(n for n, _ in family.pipeline.vae.named_parameters() if n.startswith("decoder") and "norm1" in n)
        weights = {n: t.clone() for n, t in family.pipeline.vae.state_dict().items()}
        weights[name].mul_(-2)
        pipeline.refit(weights, module="vae", weight_version="two")  # a graph reads weights where they lie
        after = pictures(5)[0]
        family.decoding = Decoding()
        stock = pictures(5)[0]
    assert float((after - alone).abs().mean()) > 1e-3
    assert float((after - stock).abs().mean()) < 4 / 255
