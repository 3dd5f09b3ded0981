"""How tokens are dealt out: nothing is lost, nothing is twice, and padding never reaches an attention."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore, ProcessGroupGloo

from diffusion_rl.parallel.exchange import Collectives
from diffusion_rl.parallel.sequence import Stage, _HeadExchange
from diffusion_rl.parallel.shards import IMAGE, Shards, Tokens
from engine_control.groups import RankGroup

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


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("text_first", [True, False])
@torch.no_grad()
def test_ranks_attend_to_all_tokens_and_each_gets_its_own_back(size: int, text_first: bool) -> None:
    shards, store = Shards(19, 5, text_first, size), HashStore()  # padding in the last shares of both streams
    joint = Tokens(("text", "image") if text_first else ("image", "text"), dim=2)
    image = Tokens(IMAGE.streams, dim=2)
    made = torch.Generator().manual_seed(size)
    whole = [torch.randn(2, 8, 24, 4, generator=made, dtype=torch.float64) for _ in range(3)]
    pictures = [x[:, :, :19].transpose(1, 2).contiguous().transpose(1, 2) for x in whole]  # as projections leave them

    def of_rank(rank: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        group = RankGroup(ProcessGroupGloo(store, rank, size, timedelta(seconds=30)), rank, size, through_host=False)
        exchange = _HeadExchange(shards, Collectives(group))
        exchange.stage = Stage()
        both = exchange._attention(*(shards.cut_streams(x, joint, rank) for x in whole))
        alone = exchange._attention(*(shards.cut_streams(x, image, rank) for x in pictures))
        return both, alone, group.traffic.collectives

    with ThreadPoolExecutor(size) as pool:
        both, alone, collectives = zip(*pool.map(of_rank, range(size)), strict=True)
    for given_back, tensors, streams in ((both, whole, joint.streams), (alone, pictures, IMAGE.streams)):
        found = shards.joined(torch.stack(given_back), streams)
        torch.testing.assert_close(found, F.scaled_dot_product_attention(*tensors), rtol=1e-12, atol=1e-14)
    assert set(collectives) == {4}  # one to heads and one back, for each of the two attentions
