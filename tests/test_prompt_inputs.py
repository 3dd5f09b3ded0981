"""Prompts as token ids and as embeddings: the bits of their text, whatever is beside them, and errors that help."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Service
from diffusers import StableDiffusion3Pipeline
from equality import assert_same_bits
from tiny_models import (
    flux_pipeline,
    qwen_image_pipeline,
    rollout_pipeline,
    save,
    sd3_pipeline,
    t5_tokenizer,
    wan_pipeline,
    z_image_pipeline,
)
from transformers import T5Config, T5EncoderModel

from diffusion_rl import RolloutPipeline
from diffusion_rl.batch import TokenIds
from diffusion_rl.config import EngineConfig, ParallelConfig
from diffusion_rl.models import families, family_for, load_family
from diffusion_rl.params import params_from_mapping
from diffusion_rl.prompt_fields import PROMPTS
from diffusion_rl.rollout.engine import RolloutEngine
from diffusion_rl.sample import RolloutSample
from engine_control.errors import InvalidRequestError
from rl_kernels import exact_mode

Fields = dict[str, Any]
TEXT, OTHER, NEGATIVE = "a red ball on a green table", "cat", "blurry"
FULL: Fields = {
    "height": 32,
    "width": 32,
    "num_inference_steps": 3,
    "output_type": "both",
    "rollout_return_dit_trajectory": True,
    "rollout_return_denoising_env": True,
}


@dataclass(frozen=True)
class Case:
    """A family: its pipeline, the fields that a trainer with the tokenizers sends for a text, and what the stock
    pipeline's `encode_prompt` returns for it, without batch axis: embeddings, and a pooled vector or None."""

    name: str
    build: Callable[[torch.dtype], Any]
    ids: Callable[[Any, str], Fields]
    encode: Callable[[Any, str, int], tuple[torch.Tensor, torch.Tensor | None]]
    guided: Fields = field(default_factory=lambda: {"guidance_scale": 3.5, "true_cfg_scale": 3.5})
    own: Fields = field(default_factory=dict)
    pooled: bool = False

    @property
    def fields(self) -> Fields:
        return {**FULL, **self.guided, **self.own}


def clip_ids(pipeline: Any, text: str) -> list[int]:
    ids: list[int] = pipeline.tokenizer(text, truncation=True).input_ids
    return ids


def stock_sd3(stock: Any, text: str, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    embeds, _, pooled, _ = stock.encode_prompt(
        text, None, None, do_classifier_free_guidance=False, max_sequence_length=length
    )
    return embeds[0], pooled[0]


def stock_flux(stock: Any, text: str, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    embeds, pooled, _ = stock.encode_prompt(text, max_sequence_length=length)
    return embeds[0], pooled[0]


def qwen_ids(stock: Any, text: str) -> Fields:
    """As a batch has them: padded in front, with a mask."""
    ids = stock.tokenizer(stock.prompt_template_encode.format(text)).input_ids
    return {"prompt_ids": [7, 7, 7, *ids], "prompt_mask": [0, 0, 0, *([1] * len(ids))]}


def z_image_ids(stock: Any, text: str) -> Fields:
    templated = stock.tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True, enable_thinking=True
    )
    ids = torch.tensor(stock.tokenizer(templated).input_ids)
    padded = torch.nn.functional.pad(ids, (0, 4))
    return {"prompt_ids": padded[None], "prompt_mask": (torch.arange(len(padded)) < len(ids))[None]}


@cache
def sd3_with_t5(dtype: torch.dtype = torch.float32) -> StableDiffusion3Pipeline:
    torch.manual_seed(6)
    config = T5Config(vocab_size=128, d_model=128, d_kv=16, d_ff=128, num_layers=2, num_heads=4)
    parts = {"text_encoder_3": T5EncoderModel(config).eval().to(dtype), "tokenizer_3": t5_tokenizer()}
    made = StableDiffusion3Pipeline(**{**sd3_pipeline(dtype).components, **parts})
    made.set_progress_bar_config(disable=True)
    return made


CASES = [
    Case(
        "stable_diffusion3",
        sd3_pipeline,
        lambda stock, text: {"extra_prompt_ids": {"clip": clip_ids(stock, text)}},
        stock_sd3,
        pooled=True,
    ),
    Case(
        "stable_diffusion3-t5",
        sd3_with_t5,
        # As verl-omni sends them: `prompt_ids` are another template's, and each encoder's own go before them.
        lambda stock, text: {
            "prompt_ids": [5],
            "extra_prompt_ids": {"clip": clip_ids(stock, text), "t5": stock.tokenizer_3(text).input_ids},
        },
        stock_sd3,
        own={"max_sequence_length": 40},
        pooled=True,
    ),
    Case(
        "stable_diffusion3-embedded",
        lambda dtype: load_family("embedded", dtype=dtype).pipeline,
        lambda stock, text: {"prompt_ids": clip_ids(stock, text)},
        stock_sd3,
        own={"max_sequence_length": 9},
        pooled=True,
    ),
    Case(
        "flux",
        flux_pipeline,
        lambda stock, text: {
            "prompt_ids": clip_ids(stock, text),
            "extra_prompt_ids": {"t5": stock.tokenizer_2(text).input_ids},
        },
        stock_flux,
        own={"max_sequence_length": 48},
        pooled=True,
    ),
    Case(
        "qwen_image",
        qwen_image_pipeline,
        qwen_ids,
        lambda stock, text, length: (stock.encode_prompt(text, max_sequence_length=length)[0][0], None),
    ),
    Case(
        "z_image",
        z_image_pipeline,
        z_image_ids,
        lambda stock, text, length: (
            stock.encode_prompt(text, do_classifier_free_guidance=False, max_sequence_length=length)[0][0],
            None,
        ),
        own={"max_sequence_length": 96},
    ),
    Case(
        "wan",
        wan_pipeline,
        lambda stock, text: {"prompt_ids": stock.tokenizer(text).input_ids},
        lambda stock, text, length: (
            stock.encode_prompt(text, do_classifier_free_guidance=False, max_sequence_length=length)[0][0],
            None,
        ),
        own={"max_sequence_length": 40, "num_frames": 5},
    ),
]
case = pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)


def test_the_example_of_the_documentation_runs() -> None:
    page = (Path(__file__).parents[1] / "docs" / "prompts.md").read_text()
    (source,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(compile(source, "docs/prompts.md", "exec"), {})
    named = {name for fields in PROMPTS.values() for name in vars(fields).values()}
    assert named == {name for name in named if f"`{name}`" in page}


def negative(fields: Fields) -> Fields:
    """The fields of a prompt as those of the negative prompt."""
    names = dict(zip(vars(PROMPTS["prompt"]).values(), vars(PROMPTS["negative_prompt"]).values(), strict=True))
    return {names[name]: value for name, value in fields.items()}


def embeds_of(case: Case, stock: Any, text: str, length: int) -> Fields:
    with exact_mode(), torch.no_grad():
        embeds, pooled = case.encode(stock, text, length)
    return {"prompt_embeds": embeds} if pooled is None else {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled}


def together(engine: RolloutEngine, *requests: Fields) -> list[RolloutSample]:
    """The first sample of each request, all of them in the engine at once."""
    for number, request in enumerate(requests):
        engine.add_request(str(number), params_from_mapping(request))
    done: dict[str, RolloutSample] = {}
    while engine.has_unfinished_requests():
        for finished in engine.step():
            assert finished.result is not None, finished.error
            done[finished.request_id] = finished.result[0]
    return [done[str(number)] for number in range(len(requests))]


def test_every_family_is_under_test() -> None:
    editing = {name for name in families.names() if families.get(name).most_pictures}  # see `test_picture_editing`
    assert set(families.names()) - editing == {c.name.split("-")[0] for c in CASES}


@case
def test_a_prompt_has_one_set_of_bits_in_every_form_and_beside_any_other(case: Case) -> None:
    stock = case.build(torch.float32)
    pipeline = rollout_pipeline(stock)
    family = pipeline.engine.family
    length = case.own.get("max_sequence_length", family.defaults.max_sequence_length)
    assert family.pooled_width is not None or not case.pooled
    text, other = ({**case.fields, "prompt": p, "negative_prompt": NEGATIVE, "seed": 5} for p in (TEXT, OTHER))
    alone, beside = pipeline(**text)[0], pipeline(**other)[0]
    assert alone.denoising_env is not None
    positive, minus = ({n: v for n, v in text.items() if n != name} for name in ("prompt", "negative_prompt"))
    neither = {name: value for name, value in positive.items() if name != "negative_prompt"}
    returned = alone.denoising_env.prompt_fields()
    forms = [
        {**positive, **case.ids(stock, TEXT)},
        {**positive, **embeds_of(case, stock, TEXT, length)},
        {**minus, **negative(case.ids(stock, NEGATIVE))},
        {**minus, **negative(embeds_of(case, stock, NEGATIVE, length))},
        {**neither, **returned},
    ]
    assert ("negative_prompt_embeds" in returned, "pooled_prompt_embeds" in returned) == (True, case.pooled)
    for made in (together(pipeline.engine, text, other, *forms), [pipeline(**request)[0] for request in forms]):
        for sample in made:
            assert_same_bits(sample, beside if sample.prompt == OTHER else alone)
    last = pipeline(**forms[-1])[0]
    assert (last.prompt, last.denoising_env is None) == ("", False)
    assert torch.equal(pipeline.replay([last]).detach(), last.rollout_log_probs[None])  # type: ignore[index]
    again = last.denoising_env.prompt_fields()  # type: ignore[union-attr]
    assert again.keys() == returned.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in returned.items())


@case
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_text_has_the_embeddings_of_the_stock_pipeline(case: Case, dtype: torch.dtype) -> None:
    stock = case.build(dtype)
    family = family_for(stock)
    length = case.own.get("max_sequence_length", 512)
    for text in (TEXT, ""):
        with exact_mode(), torch.no_grad():
            embeds, pooled = case.encode(stock, text, length)
            ours = family.encode_prompt(text, length)
        assert (ours.prompt_embeds.dtype, ours.prompt_embeds.shape[1]) == (embeds.dtype, family.text_width)
        assert torch.equal(ours.prompt_embeds, embeds)
        assert (ours.pooled is None) == (pooled is None)
        assert pooled is None or torch.equal(ours.pooled, pooled)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def sd3() -> RolloutPipeline:
    return RolloutPipeline(sd3_pipeline())


@pytest.fixture(scope="module")
def qwen() -> RolloutPipeline:
    return RolloutPipeline(qwen_image_pipeline())


def test_embeddings_of_another_dtype_leave_those_beside_them_alone(qwen: RolloutPipeline) -> None:
    generator = torch.Generator().manual_seed(0)
    fields = {**FULL, "seed": 1}
    coarse = {**fields, "prompt_embeds": torch.randn(7, 64, generator=generator).bfloat16()}
    fine = {**fields, "prompt_embeds": torch.randn(1, 9, 64, generator=generator)}
    for one, other in ((coarse, fine), (fine, coarse)):
        for sample, request in zip(together(qwen.engine, one, other), (one, other), strict=True):
            assert_same_bits(sample, qwen(**request)[0])
    rounded = {**fields, "prompt_embeds": fine["prompt_embeds"].bfloat16()}
    assert not torch.equal(qwen(**fine)[0].generated_latents, qwen(**rounded)[0].generated_latents)  # type: ignore[arg-type]


def test_padding_behind_a_mask_is_no_part_of_a_prompt(qwen: RolloutPipeline) -> None:
    embeds = torch.randn(9, 64, generator=torch.Generator().manual_seed(0))
    fields = {**FULL, "seed": 1}
    alone = qwen(prompt_embeds=embeds[:6], **fields)[0]
    for mask in ([1] * 6 + [0] * 3, torch.arange(9)[None] < 6):
        assert_same_bits(qwen(prompt_embeds=embeds, prompt_embeds_mask=mask, **fields)[0], alone)


def test_a_request_that_is_put_back_or_resumed_has_its_embeddings_still(sd3: RolloutPipeline) -> None:
    family = sd3.engine.family
    text = {**FULL, "guidance_scale": 3.0, "seed": 3, "rollout_return_partial": True}
    expected = sd3(TEXT, **text)[0]
    fields = {**text, **expected.denoising_env.prompt_fields()}  # type: ignore[union-attr]
    engine = RolloutEngine(family, exactness=sd3.engine.exactness)
    engine.add_request("a", params_from_mapping(fields))
    for tensor in fields.values():  # what the caller does with it from now on is the caller's affair
        if isinstance(tensor, torch.Tensor):
            tensor.zero_()
    engine.step()
    assert engine.retract_requests() == 1
    engine.step()
    engine.step()
    (partial,) = engine.partial_result("a") or []
    engine.abort_request("a")
    assert partial.num_steps_done == 2
    again = {**text, **partial.denoising_env.prompt_fields(), "resume_from": (partial.resume_state,), "seeds": (3,)}  # type: ignore[union-attr]
    (resumed,) = together(engine, again)
    assert torch.equal(resumed.generated_latents, expected.generated_latents)  # type: ignore[arg-type]
    assert torch.equal(resumed.generated_output, expected.generated_output)  # type: ignore[arg-type]


def test_a_text_encoders_refit_is_for_ids_and_not_for_embeddings() -> None:
    stock = sd3_pipeline()
    pipeline = RolloutPipeline(stock)
    fields = {**FULL, "guidance_scale": 1.0, "seed": 3}
    ids, embeds = {"prompt_ids": clip_ids(stock, TEXT)}, embeds_of(CASES[0], stock, TEXT, 256)
    before = pipeline(TEXT, **fields)[0]
    name = "text_model.encoder.layers.0.mlp.fc1.weight"
    weight = stock.text_encoder.state_dict()[name].clone()
    try:
        pipeline.refit({name: weight * 1.5}, partial=True, module="text_encoder", weight_version="other")
        assert_same_bits(pipeline(**embeds, **fields)[0], before)
        (after,) = pipeline(**ids, **fields)
        assert_same_bits(after, pipeline(TEXT, **fields)[0])
        assert not torch.equal(after.generated_latents, before.generated_latents)  # type: ignore[arg-type]
    finally:
        pipeline.refit({name: weight}, partial=True, module="text_encoder", weight_version="default")


def test_prompts_are_kept_by_their_content(sd3: RolloutPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text that looks like ids is another prompt; ids are encoded once; embeddings take no room among them."""
    family, encoded = sd3.engine.family, []
    encode = family.encode_ids
    monkeypatch.setattr(family, "encode_ids", lambda ids, n: encoded.append(ids["clip"]) or encode(ids, n))
    ids = clip_ids(family.pipeline, "cached")
    fields = {**FULL, "guidance_scale": 1.0, "seed": 3, "rollout_return_dit_trajectory": False}
    said = repr(TokenIds(tuple(ids)))[:20]
    for prompt in ({"prompt_ids": ids}, {"prompt_ids": ids}, {"prompt_ids": [*ids[:-1], 5, ids[-1]]}, {"prompt": said}):
        sd3(**prompt, **fields)
    assert len(encoded) == 3
    assert encoded[0] == tuple(ids)
    entries = len(sd3.engine._prompts._prompts.entries)
    sd3(**embeds_of(CASES[0], family.pipeline, "cached", 256), **fields)
    assert len(sd3.engine._prompts._prompts.entries) == entries


E = torch.zeros(80, 128)  # as sd3 takes them
P = torch.zeros(128)
NAN = torch.full((80, 128), float("nan"))
REFUSED: list[tuple[str, Fields, str, str]] = [
    ("sd3", {}, "prompt", "needs a prompt"),
    ("sd3", {"prompt": "x", "prompt_embeds": E, "pooled_prompt_embeds": P}, "prompt_embeds", "there twice: prompt"),
    ("sd3", {"prompt": "x", "prompt_ids": [512, 513]}, "prompt_ids", "there twice: prompt"),
    ("sd3", {"extra_prompt_ids": {"clip": [1]}, "prompt_embeds": E}, "prompt_embeds", "there twice: extra_prompt_ids"),
    ("sd3", {"negative_prompt": "x", "negative_prompt_ids": [513]}, "negative_prompt_ids", "twice: negative_prompt"),
    ("sd3", {"prompt": "x", "prompt_mask": [1]}, "prompt_mask", "belongs to prompt_ids"),
    ("sd3", {"prompt": "x", "pooled_prompt_embeds": P}, "pooled_prompt_embeds", "belongs to prompt_embeds"),
    ("sd3", {"prompt_ids": "513"}, "prompt_ids", "must be a list"),
    ("sd3", {"prompt_ids": [513.0]}, "prompt_ids", "list of token ids"),
    ("sd3", {"prompt_ids": [True, 513]}, "prompt_ids", "list of token ids"),
    ("sd3", {"prompt_ids": [-1, 513]}, "prompt_ids", "list of token ids"),
    ("sd3", {"prompt_ids": []}, "prompt_ids", "no ids"),
    ("sd3", {"prompt_ids": torch.ones(2, 3, dtype=torch.int64)}, "prompt_ids", "tensor .L. of integers"),
    ("sd3", {"prompt_ids": torch.ones(3)}, "prompt_ids", "tensor .L. of integers"),
    ("sd3", {"prompt_ids": [512, 514, 513]}, "prompt_ids", "no such token.*0 to 513"),
    ("sd3", {"prompt_ids": [512, 7]}, "prompt_ids", "ends a text is missing"),
    ("sd3", {"prompt_ids": [1] * 24 + [513]}, "prompt_ids", "25 tokens.*at most 24"),
    ("sd3", {"prompt_ids": [512, 513], "prompt_mask": [1]}, "prompt_mask", "no mask of 2 tokens"),
    ("sd3", {"prompt_ids": [512, 513], "prompt_mask": [0, 0]}, "prompt_mask", "no mask of 2 tokens"),
    ("sd3", {"prompt_ids": [512, 513], "prompt_mask": [2, 1]}, "prompt_mask", "no mask of 2 tokens"),
    ("sd3", {"prompt_ids": [512, 1, 513], "prompt_mask": [1, 0, 1]}, "prompt_mask", "has gaps"),
    ("sd3", {"extra_prompt_ids": [513]}, "extra_prompt_ids", "must be an object"),
    ("sd3", {"extra_prompt_ids": {"clip": 5}}, "extra_prompt_ids", "must be a list"),
    ("sd3", {"extra_prompt_ids": {"clip": [513], "t5": [1]}}, "extra_prompt_ids", "no text encoder 't5'.*clip, clip_2"),
    ("sd3", {"extra_prompt_ids": {"clip_2": [513]}}, "extra_prompt_ids", "for the text encoder clip are missing"),
    ("sd3", {"prompt_embeds": E}, "pooled_prompt_embeds", r"must be \[128\]"),
    ("sd3", {"prompt_embeds": E, "pooled_prompt_embeds": P[:64]}, "pooled_prompt_embeds", r"must be \[128\]"),
    ("sd3", {"prompt_embeds": E, "pooled_prompt_embeds": P * NAN[0]}, "pooled_prompt_embeds", "NaN or infinite"),
    ("sd3", {"prompt_embeds": E.int(), "pooled_prompt_embeds": P}, "prompt_embeds", "must be floating-point"),
    ("sd3", {"prompt_embeds": E.double(), "pooled_prompt_embeds": P}, "prompt_embeds", "must be floating-point"),
    ("sd3", {"prompt_embeds": E.tolist(), "pooled_prompt_embeds": P}, "prompt_embeds", "must be a tensor"),
    ("sd3", {"prompt_embeds": E[:, :64], "pooled_prompt_embeds": P}, "prompt_embeds", r"must be \[L, 128\]"),
    ("sd3", {"prompt_embeds": E[0], "pooled_prompt_embeds": P}, "prompt_embeds", r"must be \[L, D\]"),
    ("sd3", {"prompt_embeds": E[:0], "pooled_prompt_embeds": P}, "prompt_embeds", r"must be \[L, D\]"),
    ("sd3", {"prompt_embeds": torch.stack([E, E]), "pooled_prompt_embeds": P}, "prompt_embeds", r"must be \[L, D\]"),
    ("sd3", {"prompt_embeds": NAN, "pooled_prompt_embeds": P}, "prompt_embeds", "NaN or infinite"),
    (
        "sd3",
        {"prompt_embeds": E, "pooled_prompt_embeds": P, "max_sequence_length": 40},
        "prompt_embeds",
        "80 tokens.*at most 64",
    ),
    (
        "sd3",
        {"prompt_embeds": E, "pooled_prompt_embeds": P, "prompt_embeds_mask": [1] * 79 + [0]},
        "prompt_embeds_mask",
        "reads padding as it reads text",
    ),
    ("sd3", {"prompt": "x", "negative_prompt_embeds": E}, "negative_pooled_prompt_embeds", r"must be \[128\]"),
    ("sd3", {"prompt": "x", "negative_prompt_ids": [512, 7]}, "negative_prompt_ids", "ends a text is missing"),
    ("qwen", {"prompt_ids": [1] * 34}, "prompt_ids", "34 ids, of which the model skips 34"),
    ("qwen", {"prompt_embeds": E[:, :64], "pooled_prompt_embeds": P}, "pooled_prompt_embeds", "no use for pooled"),
    ("qwen", {"prompt_embeds": E[:2, :64], "prompt_embeds_mask": [0, 1]}, "prompt_embeds_mask", "padding is in front"),
]


@pytest.mark.parametrize(
    ("model", "fields", "name", "message"), REFUSED, ids=[f"{i}-{row[2]}" for i, row in enumerate(REFUSED)]
)
def test_what_is_no_prompt_is_refused_with_its_field_and_a_way_out(
    model: str, fields: Fields, name: str, message: str, request: pytest.FixtureRequest
) -> None:
    pipeline: RolloutPipeline = request.getfixturevalue(model)
    before = pipeline.engine.stats()
    with pytest.raises(InvalidRequestError, match=f"(?s){message}") as caught:
        pipeline(seed=1, guidance_scale=3.0, **{**FULL, **fields})
    assert (caught.value.field, bool(caught.value.hint), caught.value.status) == (name, True, 400)
    assert pipeline.engine.stats() == before


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, RolloutPipeline]]:
    stock = qwen_image_pipeline()
    folder = save(stock, tmp_path_factory.mktemp("model"))
    config = EngineConfig(str(folder), device="cpu", parallel=ParallelConfig(enable_cfg_parallel=True))
    with RolloutPipeline.from_config(config) as ranks:
        yield stock, ranks


def test_ranks_that_follow_get_ids_and_embeddings_too(
    qwen: RolloutPipeline, two_ranks: tuple[Any, RolloutPipeline]
) -> None:
    """What they computed is compared with rank 0's before a sample is handed out."""
    stock, ranks = two_ranks
    fields = {**FULL, "true_cfg_scale": 3.5, "seed": 5}
    expected = qwen(TEXT, negative_prompt=NEGATIVE, **fields)[0]
    with_ids = {**fields, **qwen_ids(stock, TEXT), "negative_prompt": NEGATIVE}
    with_embeds = {**fields, **expected.denoising_env.prompt_fields()}  # type: ignore[union-attr]
    for sample in together(ranks.engine, with_ids, with_embeds):
        assert_same_bits(sample, expected)


@pytest.mark.parametrize("wire", ["json", "safetensors"])
def test_over_http_what_went_out_comes_back_in(service: Service, sd3: RolloutPipeline, wire: str) -> None:
    client, stock = service.client(wire), sd3_pipeline()
    fields = {**FULL, "guidance_scale": 3.0, "seed": 11, "output_dtype": "uint8"}
    (text,) = client.generate(TEXT, negative_prompt=NEGATIVE, **fields)
    assert_same_bits(text, sd3(TEXT, negative_prompt=NEGATIVE, **fields)[0])
    assert (text.generated_output.dtype, text.generated_latents.dtype) == (torch.uint8, torch.float32)  # type: ignore[union-attr]
    (embeds,) = client.generate(**fields, **text.denoising_env.prompt_fields())  # type: ignore[union-attr]
    ids = {"prompt_ids": clip_ids(stock, TEXT), "negative_extra_prompt_ids": {"clip": clip_ids(stock, NEGATIVE)}}
    (tokens,) = client.generate(**fields, **ids)
    for sample in (embeds, tokens):
        assert sample.prompt == ""
        assert_same_bits(sample, text)
    masked = {
        "prompt_ids": torch.tensor([*ids["prompt_ids"], 0]),
        "prompt_mask": [True] * len(ids["prompt_ids"]) + [False],
    }
    (padded,) = client.generate(**fields, **masked, negative_prompt=NEGATIVE)
    assert_same_bits(padded, text)


def test_over_http_a_prompt_that_is_none_is_refused_by_name(service: Service) -> None:
    tensor = {"__tensor__": True, "data": "AAAA"}
    for fields, name in (
        ({"prompt_embeds": tensor}, "prompt_embeds"),
        ({"prompt_embeds": {"a": 1}}, "prompt_embeds"),
        ({"prompt_embeds": [[1.0]]}, "prompt_embeds"),
        ({"prompt_ids": ["a"]}, "prompt_ids"),
        ({"prompt_ids": [512, 2**70]}, "prompt_ids"),
        ({"prompt_ids": [512, 10**6]}, "prompt_ids"),
        ({"extra_prompt_ids": {str(i): 0 for i in range(5000)}}, "extra_prompt_ids"),
        ({"prompt_token_ids": [1]}, "prompt_token_ids"),
    ):
        reply = service.generate({**fields, "num_inference_steps": 2, "seed": 1})
        problem = reply.json()
        assert (reply.status_code, problem["field"]) == (400, name), problem
        assert problem["hint"]
    assert "prompt_ids" in problem["hint"]
