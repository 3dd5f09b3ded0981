"""A row's bits don't depend on the rows beside it: the CPU form of the row-invariant operations."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F

from rl_kernels import (
    AttentionPlan,
    attention,
    copies,
    exact_mode,
    exact_mode_is_on,
    linear,
    patch_conv,
    row_mean,
    row_sum,
)
from rl_kernels.attention import Padding
from rl_kernels.fused import empty_rows
from rl_kernels.linear import IMPLEMENTATIONS, padded_rows, padded_to, quick_sizes
from rl_kernels.mode import Choices, observing

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("k", "n"), [(64, 64), (64, 256), (256, 64), (128, 1), (384, 1536)])
def test_a_row_of_a_linear_layer_has_the_same_bits_at_every_row_count(dtype: torch.dtype, k: int, n: int) -> None:
    x, w, b = torch.randn(300, k).to(dtype), torch.randn(n, k).to(dtype), torch.randn(n).to(dtype)
    whole = linear(x, w, b)
    for rows in (1, 2, 3, 5, 7, 11, 15, 16, 17, 33, 64, 200):
        for start in (0, 13):
            assert torch.equal(linear(x[start : start + rows], w, b), whole[start : start + rows]), (rows, start)


def test_a_plain_linear_layer_is_not_row_invariant_here_so_the_padding_is_needed() -> None:
    x, w = torch.randn(64, 256), torch.randn(256, 256)
    whole = F.linear(x, w)
    if all(torch.equal(F.linear(x[:m], w), whole[:m]) for m in range(1, 16)):
        pytest.skip("this machine's library is row-invariant by itself")
    assert all(torch.equal(linear(x[:m], w), linear(x, w)[:m]) for m in range(1, 16))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_linear_layer_reads_a_strided_view_as_it_reads_its_copy(dtype: torch.dtype) -> None:
    x = torch.randn(4, 9, 64).to(dtype)[:, 2:7]
    w, b = torch.randn(64, 64).to(dtype), torch.randn(64).to(dtype)
    assert torch.equal(linear(x, w, b), linear(x.contiguous(), w, b))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_patch_embedding_equals_the_convolution_and_ignores_the_batch(dtype: torch.dtype) -> None:
    x, w, b = torch.randn(5, 16, 8, 8).to(dtype), torch.randn(64, 16, 2, 2).to(dtype), torch.randn(64).to(dtype)
    whole = patch_conv(x, w, b)
    tolerance = 1e-4 if dtype == torch.float32 else 0.2
    torch.testing.assert_close(whole, F.conv2d(x, w, b, stride=2), atol=tolerance, rtol=tolerance)
    assert torch.equal(patch_conv(x[3:4], w, b), whole[3:4])


def test_a_patch_embedding_of_a_video_equals_the_convolution_and_is_reached_by_exact_mode() -> None:
    layer, x = torch.nn.Conv3d(16, 64, kernel_size=(1, 2, 2), stride=(1, 2, 2)), torch.randn(3, 16, 2, 8, 6)
    with exact_mode(), torch.no_grad():
        whole = layer(x)
        assert torch.equal(whole, patch_conv(x, layer.weight, layer.bias))
        assert torch.equal(layer(x[1:2]), whole[1:2])
    torch.testing.assert_close(whole, layer(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dims", [2, 3])
def test_a_patch_embedding_is_the_linear_layer_that_was_chosen_for_its_shape_however_deep_the_mode(
    dims: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def chosen(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        called.append(tuple(weight.shape))
        return F.linear(x, weight, bias)

    called: list[tuple[int, ...]] = []
    monkeypatch.setitem(IMPLEMENTATIONS, "fixed_tiles", chosen)
    layer = (torch.nn.Conv2d, torch.nn.Conv3d)[dims - 2](4, 32, 2, stride=2)
    x, columns = torch.randn(2, 4, *[8] * dims), 4 * 2**dims
    choices = Choices(linear={(columns, 32, torch.float32): "fixed_tiles"})
    with exact_mode(choices=choices):
        once = layer(x)
        assert called == [(32, columns)]
        with exact_mode(choices=choices):  # as in an engine, whose whole step is inside
            assert torch.equal(layer(x), once)


@pytest.mark.parametrize("text_first", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_over_mixed_lengths_equals_each_row_attended_alone_whatever_is_in_the_padding(
    text_first: bool, dtype: torch.dtype
) -> None:
    lengths, padded, image = (1, 13, 47, 13), 47, 64
    plan = AttentionPlan(lengths, padded, image, text_first)
    real = [[torch.randn(1, 4, n + image, 16).to(dtype) for _ in range(3)] for n in lengths]
    q, k, v = (
        torch.cat([_pad(plan.joint, row[i], end) for row, end in zip(real, plan.joint.ends, strict=True)])
        for i in range(3)
    )
    out = attention(q, k, v, plan=plan)
    for row, alone in enumerate(real):
        end = plan.joint.ends[row]
        assert torch.equal(plan.joint.keep(out[row : row + 1], end), F.scaled_dot_product_attention(*alone))


def _pad(padding: Padding, x: torch.Tensor, end: int) -> torch.Tensor:
    padded = padding.restore(x, end)
    garbage = torch.full_like(padded, 1e4)
    kept = padding.restore(torch.ones_like(x), end) == 1
    return torch.where(kept, padded, garbage)


def test_image_tokens_attend_to_the_true_text_of_their_row_alone() -> None:
    lengths, image, longest = (7, 3, 7), 12, 9
    q, (k, v) = torch.randn(3, 4, image, 64), torch.randn(2, 3, 4, longest, 64)
    plan = AttentionPlan(lengths, longest, image, text_first=False)
    together = attention(q, k, v, plan=plan)
    for row, length in enumerate(lengths):
        own = attention(q[row : row + 1], k[row : row + 1, :, :length], v[row : row + 1, :, :length])
        assert torch.equal(together[row : row + 1], own)
    assert torch.equal(attention(q[:2], q[:2], q[:2], plan=plan), attention(q[:2], q[:2], q[:2]))


def test_one_length_for_all_rows_shorter_than_the_padding_needs_one_call() -> None:
    plan = AttentionPlan((3, 3), 5, 8, text_first=True)
    q = torch.randn(2, 4, 13, 16)
    out = attention(q, q, q, plan=plan)
    kept = plan.joint.keep(q, 3)
    assert torch.equal(plan.joint.keep(out, 3), F.scaled_dot_product_attention(kept, kept, kept))
    assert out[..., 3:5, :].abs().sum() == 0


def test_a_sequence_that_the_plan_does_not_speak_of_is_left_alone() -> None:
    plan = AttentionPlan((1, 5), 5, 8, text_first=False)
    image_only = torch.randn(2, 4, 8, 16)
    expected = F.scaled_dot_product_attention(image_only, image_only, image_only)
    assert torch.equal(attention(image_only, image_only, image_only, plan=plan), expected)


@pytest.mark.parametrize("planned", [True, False])
@pytest.mark.parametrize("image", [64, 0], ids=["joint", "text"])
def test_a_mask_over_padding_at_the_end_keeps_each_rows_bits_and_the_plain_kernel(planned: bool, image: int) -> None:
    lengths = (96, 32, 64, 32)
    plan = AttentionPlan(lengths, 96, 64, text_first=False) if planned else None
    ends = [image + n for n in lengths]
    mask = torch.arange(96 + image) < torch.tensor(ends)[:, None]
    q, k, v = torch.randn(3, 4, 2, 96 + image, 16)
    out = attention(q, k, v, plan=plan, attn_mask=mask[:, None, None])
    for row, end in enumerate(ends):
        alone = (x[row : row + 1, :, :end] for x in (q, k, v))
        assert torch.equal(out[row : row + 1, :, :end], F.scaled_dot_product_attention(*alone))
        assert not out[row, :, end:].any()
    with exact_mode(plan):
        assert torch.equal(F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None]), out)


def test_any_other_mask_is_the_librarys() -> None:
    q = torch.randn(2, 4, 8, 16)
    holes, nothing = torch.ones(2, 1, 1, 8, dtype=torch.bool), torch.ones(2, 1, 1, 8, dtype=torch.bool)
    holes[0, ..., 3], nothing[0] = False, False
    causal = torch.ones(8, 8, dtype=torch.bool).tril()
    for mask in (holes, nothing, causal, torch.where(causal, 0.0, -1e4)):
        out, expected = (f(q, q, q, attn_mask=mask) for f in (attention, F.scaled_dot_product_attention))
        torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("elements", [1, 64, 100, 1024, 65536, 70001, 5_000_000])
def test_a_row_sum_is_the_same_alone_in_any_batch_and_on_any_number_of_threads(elements: int) -> None:
    x = torch.randn(3 if elements > 10**6 else 7, elements)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = row_sum(x)
        torch.set_num_threads(2)
        assert torch.equal(row_sum(x), one)
        assert torch.equal(row_sum(x[2:3]), one[2:3])
    finally:
        torch.set_num_threads(threads)
    torch.testing.assert_close(one.double(), x.double().sum(-1), rtol=1e-5, atol=1e-3)
    torch.testing.assert_close(row_mean(x), one / elements, rtol=0, atol=0)


def test_exact_mode_reaches_modules_and_ends_with_its_block_even_after_an_error() -> None:
    layer, x = torch.nn.Linear(256, 256), torch.randn(1, 256)
    with exact_mode():
        assert exact_mode_is_on()
        assert torch.equal(layer(x), linear(x, layer.weight, layer.bias))
        with exact_mode(AttentionPlan((1,), 2, 2, True)):
            assert exact_mode_is_on()
        assert exact_mode_is_on()
    with pytest.raises(RuntimeError), exact_mode():
        layer(torch.randn(1, 7))
    assert not exact_mode_is_on()


def test_exact_mode_holds_for_the_calling_thread_only() -> None:
    seen: list[bool] = []
    with exact_mode():
        other = threading.Thread(target=lambda: seen.append(exact_mode_is_on()))
        other.start()
        other.join()
    assert seen == [False]


def test_exact_mode_leaves_ordinary_convolutions_alone() -> None:
    conv, x = torch.nn.Conv2d(4, 8, 3, padding=1), torch.randn(1, 4, 8, 8)
    with exact_mode():
        inside = conv(x)
    assert torch.equal(inside, conv(x))


def test_gradients_flow_through_the_exact_operations() -> None:
    x, layer = torch.randn(3, 5, 64, requires_grad=True), torch.nn.Linear(64, 64)
    with exact_mode():
        layer(x).square().sum().backward()
    assert x.grad is not None
    exact = x.grad.clone()
    x.grad = None
    layer(x).square().sum().backward()
    torch.testing.assert_close(exact, x.grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64], ids=str)
@pytest.mark.parametrize("first", [0, 1, 8])
@pytest.mark.parametrize("width", [48, 52])
def test_copies_in_wide_pieces_copy_every_byte(dtype: torch.dtype, first: int, width: int) -> None:
    pool = torch.arange(6 * 9 * 64).to(dtype).view(6, 9, 64)
    pieces = pool[1:5, 2:7, first : first + width]
    wide = all(number * dtype.itemsize % 16 == 0 for number in (first, width))
    assert copies._in_wide_pieces(pieces) is wide
    copied = copies.contiguous(pieces)
    assert copied.is_contiguous()
    assert torch.equal(copied, pieces)
    target = pool.new_zeros(6, 9, 64)
    assert copies.copy_(target[1:5, 2:7, first : first + width], pieces) is not pieces
    expected = torch.zeros_like(target)
    expected[1:5, 2:7, first : first + width] = pieces
    assert torch.equal(target, expected)
    assert copies.contiguous(copied) is copied


def test_a_copy_keeps_its_place_in_autograd() -> None:
    x = torch.randn(3, 4, 8, requires_grad=True)
    copies.contiguous(x[:, 1:3]).sum().backward()
    assert x.grad is not None
    assert x.grad.sum() == 3 * 2 * 8


def test_attention_dropout_is_refused_in_exact_mode() -> None:
    q = torch.randn(1, 2, 4, 16)
    with exact_mode(), pytest.raises(ValueError, match=r"dropout_p=0.1; call model.eval"):
        F.scaled_dot_product_attention(q, q, q, dropout_p=0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_that_are_padded_to_other_numbers_keep_their_bits(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(shape).to(dtype) for shape in ((200, 128), (192, 128), (192,)))
    product = padded_to((32, 80))
    whole = padded_rows(x, weight, bias)
    for rows in (1, 16, 32, 33, 80, 81, 200):
        assert torch.equal(product(x[:rows], weight, bias), whole[:rows]), rows
    assert product(x[:6].view(2, 3, 128), weight).shape == (2, 3, 192)
    assert quick_sizes(128, 192, dtype, x.device) == ()  # there is nothing to choose on a CPU


def test_rows_with_room_behind_them_are_padded_where_they_are() -> None:
    torch.manual_seed(0)
    weight, rows = torch.randn(192, 128), torch.randn(6, 128)
    expected = padded_rows(rows, weight)
    multiplied: list[torch.Tensor] = []

    def observe(function: object, args: tuple[torch.Tensor, ...], kwargs: object) -> None:
        if function is F.linear:
            multiplied.append(args[0])

    with observing(observe), exact_mode():
        for x in (empty_rows(rows, 6, 128), empty_rows(rows, 6, 2, 64).flatten(1)):
            x.untyped_storage().fill_(255)  # NaN
            x.copy_(rows)
            assert torch.equal(padded_to((80,))(x, weight), expected)
            assert multiplied[-1].shape == (80, 128)
            assert multiplied[-1].data_ptr() == x.data_ptr()
        for x in (rows, rows.t().contiguous().t(), empty_rows(rows, 6, 256)[:, :128].copy_(rows)):
            assert torch.equal(padded_to((80,))(x, weight), expected)
            assert multiplied[-1].shape == (80, 128)
            assert multiplied[-1].data_ptr() != x.data_ptr()
