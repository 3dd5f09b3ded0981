"""How tokens are dealt out: nothing is lost, nothing is twice, and padding never reaches an attention."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from diffusion_rl.parallel.sequence import Shards

SHARDS = st.builds(Shards, st.integers(1, 70), st.integers(1, 70), st.booleans(), st.sampled_from([1, 2, 3, 4, 8]))


@given(SHARDS)
def test_shares_laid_end_to_end_hold_every_token_once_in_the_order_of_one_device(shards: Shards) -> None:
    image = torch.arange(1, shards.image_tokens + 1)[None, :, None]
    text = -torch.arange(1, shards.text_tokens + 1)[None, :, None]
    streams = ("text", "image") if shards.text_first else ("image", "text")
    tensors = {"image": image, "text": text}
    shares = [
        torch.cat([shards.cut(tensors[s], s, rank, dim=1) for s in streams], dim=1) for rank in range(shards.degree)
    ]
    assert len({share.shape for share in shares}) == 1
    canonical = torch.cat([tensors[s] for s in streams], dim=1)
    assert torch.equal(shards.joined(torch.stack(shares), streams), canonical)
    assert torch.equal(shards.dealt(canonical, streams), torch.stack(shares))


@given(SHARDS, st.sampled_from([1, 3, 4, 8]), st.sampled_from([torch.bfloat16, torch.float32, torch.float64]))
def test_an_attention_over_the_image_alone_has_its_own_order(shards: Shards, width: int, dtype: torch.dtype) -> None:
    image = torch.randn(2, shards.image_tokens, width).to(dtype)
    shares = torch.stack([shards.cut(image, "image", rank, dim=1) for rank in range(shards.degree)])
    assert torch.equal(shards.joined(shares, ("image",)), image)
    strided = image.transpose(0, 1).contiguous().transpose(0, 1)  # as an attention may leave it
    assert torch.equal(shards.dealt(strided, ("image",)), shares)


@given(SHARDS)
def test_no_rank_holds_more_than_its_share(shards: Shards) -> None:
    for stream, tokens in (("image", shards.image_tokens), ("text", shards.text_tokens)):
        share = shards.share(stream)
        assert share * shards.degree >= tokens > (share - 1) * shards.degree
