"""The LLM service over HTTP: `/generate` and vLLM's route, what stands beside them, and requests that end early."""

from __future__ import annotations

import http.client
import json
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from conftest import Service
from tiny_llms import TURN_END
from typer.testing import CliRunner

from engine_control.errors import InvalidRequestError
from llm_runtime.cli import app
from llm_runtime.client import LLMClient, generated
from llm_runtime.llm import LLM
from llm_runtime.output import FinishReason, GenerateOutput
from llm_runtime.params import GenerateRequest, SamplingParams
from llm_runtime.server.generate_fields import read_generate
from llm_runtime.server.generate_reply import GenerateChunks, generate_row
from llm_runtime.server.token_fields import read_tokens
from llm_runtime.text import Tokenizer

GREEDY = {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True}
ENDLESS = {"text": "on and on", "sampling_params": {"max_new_tokens": 490, "ignore_eos": True}}
ALWAYS = {
    "id",
    "finish_reason",
    "prompt_tokens",
    "completion_tokens",
    "cached_tokens",
    "reasoning_tokens",
    "num_retractions",
    "weight_version",
    "weight_versions",
    "e2e_latency",
}


@pytest.fixture(scope="module")
def client(llm_service: Service) -> LLMClient:
    return LLMClient(llm_service.base_url, timeout=120)


@pytest.fixture(scope="module")
def tokenizer(tiny_llm_folder: Path) -> Tokenizer:
    return Tokenizer(tiny_llm_folder)


def generate(service: Service, **body: Any) -> Any:
    reply = service.http.post("/generate", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def events(service: Service, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream, which must end with `[DONE]`."""
    with service.http.stream("POST", path, json={**body, "stream": True}) as reply:
        assert reply.status_code == 200, reply.read()
        assert reply.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def in_flight(service: Service) -> int:
    load = service.http.get("/v1/loads?include=core").json()["loads"][0]
    return int(load["num_running_reqs"] + load["num_waiting_reqs"])


def test_a_reply_is_what_the_engine_generates_in_ones_own_process(client: LLMClient, tiny_llm_folder: Path) -> None:
    asked: dict[str, Any] = {"return_logprob": True, "logprob_start_len": 1, "top_logprobs_num": 2}
    asked["token_ids_logprob"] = [3, 5]
    sampling = [{**GREEDY, "n": 2}, {"max_new_tokens": 9, "sampling_seed": 7, "n": 2, "top_k": 5}]
    with LLM(str(tiny_llm_folder)) as llm:
        expected = llm.generate(["hello", "x"], sampling, **asked)
    for got, want in zip(client.generate(["hello", "x"], sampling, **asked), expected, strict=True):
        assert got.text == want.text
        for name in GenerateOutput.__dataclass_fields__:
            if name not in ("request_id", "e2e_latency", "cached_tokens"):
                plain = msgspec.to_builtins(getattr(want.output, name))
                assert msgspec.to_builtins(getattr(got.output, name)) == plain, name


def test_a_reply_has_all_that_trainers_read(llm_service: Service) -> None:
    row = generate(
        llm_service,
        text="abc",
        sampling_params=GREEDY,
        return_logprob=True,
        logprob_start_len=0,
        return_text_in_logprobs=True,
        return_prompt_token_ids=True,
        rid="mine",
        model=None,
        unknown_to_us=5,
        image_data=None,
        lora_path=None,
        return_hidden_states=False,
    )
    info = row["meta_info"]
    assert set(row) == {"text", "output_ids", "meta_info", "prompt_token_ids"}
    assert set(info) == ALWAYS | {f"{s}_token_logprobs{e}" for s in ("input", "output") for e in ("", "_length")}
    assert (info["id"], info["prompt_tokens"], info["completion_tokens"], info["reasoning_tokens"]) == (
        "mine",
        3,
        12,
        0,
    )
    assert info["finish_reason"] == {"type": "length", "length": 12}
    assert info["weight_versions"] == [{"version": "default", "start": 0, "end": 12}]
    assert [entry[1] for entry in info["output_token_logprobs"]] == row["output_ids"]
    assert [entry[1:] for entry in info["input_token_logprobs"]] == [[97, "a"], [98, "b"], [99, "c"]]
    assert info["input_token_logprobs"][0][0] is None
    assert info["input_token_logprobs_length"] == 3
    assert row["prompt_token_ids"] == [97, 98, 99]
    scored = generate(llm_service, text="abc", sampling_params={"max_new_tokens": 0}, return_logprob=True)
    assert (scored["output_ids"], scored["meta_info"]["input_token_logprobs"]) == ([], [])
    assert scored["meta_info"]["weight_versions"] == [{"version": "default", "start": 0, "end": 0}]


def test_a_list_of_prompts_and_n_samples_are_the_requests_one_by_one(llm_service: Service) -> None:
    params = [{**GREEDY, "temperature": 1.0, "sampling_seed": 5, "n": 2}, {**GREEDY, "max_new_tokens": 3}]
    rows = generate(
        llm_service,
        input_ids=[[1, 2, 3], [4]],
        sampling_params=params,
        rid="batch",
        return_logprob=[True, False],
        top_logprobs_num=[1, 0],
        token_ids_logprob=[[9], None],
    )
    assert [row["meta_info"]["id"] for row in rows] == ["batch_0", "batch_1", "batch_2"]
    for sample in (0, 1):
        alone = {**GREEDY, "temperature": 1.0, "sampling_seed": 5 + sample}
        row = generate(llm_service, input_ids=[1, 2, 3], sampling_params=alone, return_logprob=True)
        assert row["output_ids"] == rows[sample]["output_ids"]
        assert row["meta_info"]["output_token_logprobs"] == rows[sample]["meta_info"]["output_token_logprobs"]
        assert [len(entry) for entry in rows[sample]["meta_info"]["output_top_logprobs"]] == [1] * 12
        assert rows[sample]["meta_info"]["output_token_ids_logprobs"][0][0][1] == 9
    assert "output_token_logprobs" not in rows[2]["meta_info"]
    assert len(rows[2]["output_ids"]) == 3
    named = generate(llm_service, text=["a", "b"], sampling_params={**GREEDY, "n": 2}, rid=["x", "y"])
    assert [row["meta_info"]["id"] for row in named] == ["x_0", "x_1", "y_0", "y_1"]
    assert isinstance(generate(llm_service, text=["a"], sampling_params=GREEDY), list)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "text"),
        ({"text": "a", "input_ids": [1]}, "text"),
        ({"text": 5}, "text"),
        ({"text": []}, "text"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [1, True]}, "input_ids"),
        ({"input_ids": [1, [2]]}, "input_ids"),
        ({"input_ids": [320]}, "input_ids"),
        ({"input_ids": [1] * 600}, "input_ids"),
        ({"text": "a", "sampling_params": {"temperature": "hot"}}, "sampling_params.temperature"),
        ({"text": "a", "sampling_params": {"ignore_eos": 1}}, "sampling_params.ignore_eos"),
        ({"text": "a", "sampling_params": {"json_schema": "{}"}}, "sampling_params.json_schema"),
        ({"text": "a", "return_logprob": 1}, "return_logprob"),
        ({"text": "a", "logprob_start_len": 2, "return_logprob": True}, "logprob_start_len"),
        ({"text": "a", "top_logprobs_num": -1}, "top_logprobs_num"),
        ({"text": ["a", "b"], "return_logprob": [True]}, "return_logprob"),
        ({"text": ["a", "b"], "rid": ["x"]}, "rid"),
        ({"text": "a", "image_data": "x.png"}, "image_data"),
        ({"text": "a", "return_hidden_states": True}, "return_hidden_states"),
        ({"text": "a", "lora_path": "adapter"}, "lora_path"),
        ({"text": "a", "custom_logit_processor": "code"}, "custom_logit_processor"),
        ({"text": "a", "session_params": {"id": 1}}, "session_params"),
        ({"text": "a", "return_logprob": True, "token_ids_logprob": [5] * 50_000}, "token_ids_logprob"),
        (
            {
                "text": "a",
                "return_logprob": True,
                "token_ids_logprob": [5] * 30_000,
                "sampling_params": {"max_new_tokens": None},
            },
            "token_ids_logprob",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_request_is_refused_by_the_name_of_its_field(
    llm_service: Service, body: dict[str, Any], field: str, stream: bool
) -> None:
    reply = llm_service.http.post("/generate", json={**body, "stream": stream})
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["message"]
    assert error["param"] == field


def test_an_unknown_sampling_parameter_is_refused_with_a_text(llm_service: Service) -> None:
    reply = llm_service.http.post("/generate", json={"text": "a", "sampling_params": {"top_q": 1}})
    assert reply.status_code == 400
    assert "top_q" in reply.json()["error"]
    for content in (b"{", b"[1]"):
        reply = llm_service.http.post("/generate", content=content, headers={"content-type": "application/json"})
        assert (reply.status_code, reply.json()["error"]["type"]) == (400, "invalid_json")
    assert llm_service.http.get("/nowhere").json()["error"]["code"] == 404
    assert llm_service.http.put("/generate", json={"text": "a", "sampling_params": GREEDY}).status_code == 200


def test_one_prompt_that_fails_takes_its_siblings_out_of_the_batch(llm_service: Service) -> None:
    body = {"input_ids": [[1], [2], [320]], "sampling_params": ENDLESS["sampling_params"]}
    assert llm_service.http.post("/generate", json=body).status_code == 400
    llm_service.wait_until(lambda: in_flight(llm_service) == 0, timeout_s=5)


def test_a_stream_comes_to_what_is_said_at_once(llm_service: Service) -> None:
    body = {"text": "stream", "sampling_params": {**GREEDY, "temperature": 1.0, "sampling_seed": 3}}
    whole = generate(llm_service, **body, return_logprob=True)
    chunks = events(llm_service, "/generate", {**body, "return_logprob": True})
    for chunk in chunks[:-1]:
        assert whole["text"].startswith(chunk["text"])
        count = len(chunk["output_ids"])
        assert chunk["output_ids"] == whole["output_ids"][:count]
        assert chunk["meta_info"]["output_token_logprobs"] == whole["meta_info"]["output_token_logprobs"][:count]
        assert chunk["meta_info"]["finish_reason"] is None
        assert "weight_versions" not in chunk["meta_info"]
    assert (chunks[-1]["text"], chunks[-1]["output_ids"]) == (whole["text"], whole["output_ids"])
    assert chunks[-1]["meta_info"]["finish_reason"] == whole["meta_info"]["finish_reason"]
    several = events(llm_service, "/generate", {**body, "sampling_params": {**GREEDY, "n": 2}})
    assert {chunk["index"] for chunk in several} == {0, 1}
    assert "index" not in chunks[0]


def test_chunks_of_an_incremental_stream_add_up(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("naïve 日本語, stop")
    request = GenerateRequest(input_ids=(1, 2), sampling=SamplingParams(stop=("stop",)))
    pairs = [(-0.5 - i, token) for i, token in enumerate(ids)]

    def output(count: int) -> GenerateOutput:
        reason = FinishReason("stop", matched="stop") if count == len(ids) else None
        given = {"output_token_logprobs": pairs[:count], "input_token_logprobs": [(None, 1), (-1.0, 2)]}
        return GenerateOutput("r", ids[:count], reason, 2, 0, "v", **given)  # type: ignore[arg-type]

    stream = GenerateChunks(request, tokenizer, incremental=True)
    chunks = [stream.chunk(output(count)) for count in (1, 3, 4, 8, 15, len(ids))]
    whole = generate_row(output(len(ids)), request, tokenizer)
    assert "".join(chunk["text"] for chunk in chunks) == whole["text"] == "naïve 日本語, "
    assert [token for chunk in chunks for token in chunk["output_ids"]] == ids
    for name in ("output_token_logprobs", "input_token_logprobs"):
        assert [entry for chunk in chunks for entry in chunk["meta_info"][name]] == whole["meta_info"][name]
    assert chunks[2]["meta_info"]["completion_tokens"] == 4


def test_a_stop_string_ends_the_output_and_is_cut_off(llm_service: Service) -> None:
    row = generate(llm_service, text="hello", sampling_params={**GREEDY, "max_new_tokens": 60})
    stop = next(c for c in row["text"][1:] if c.isascii())
    cut = row["text"].index(stop)
    sampling = {**GREEDY, "max_new_tokens": 60, "stop": [stop]}
    stopped = generate(llm_service, text="hello", sampling_params=sampling)
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert (stopped["text"], stopped["output_ids"][-1]) == (row["text"][:cut], ord(stop))
    kept = generate(llm_service, text="hello", sampling_params={**sampling, "no_stop_trim": True})
    assert kept["text"] == row["text"][: cut + 1]
    by_token = generate(
        llm_service, text="hello", sampling_params={**GREEDY, "max_new_tokens": 60, "stop_token_ids": [ord(stop)]}
    )
    assert by_token["meta_info"]["finish_reason"] == {"type": "stop", "matched": ord(stop)}
    assert (by_token["text"], by_token["output_ids"]) == (stopped["text"], stopped["output_ids"])


def test_an_aborted_request_is_answered_with_what_there_is_of_it(llm_service: Service, client: LLMClient) -> None:
    replies: list[Any] = []
    body = {**ENDLESS, "rid": "doomed", "sampling_params": {**ENDLESS["sampling_params"], "n": 2}}  # type: ignore[dict-item]
    thread = threading.Thread(target=lambda: replies.append(generate(llm_service, **body)))
    thread.start()
    llm_service.wait_until(lambda: in_flight(llm_service) == 2)
    client.abort_request("doom")
    thread.join(20)
    for index, row in enumerate(replies[0]):
        assert row["meta_info"]["id"] == f"doomed_{index}"
        reason = row["meta_info"]["finish_reason"]
        assert (reason["type"], reason["status_code"], reason["err_type"]) == ("abort", None, None)
        assert row["meta_info"]["completion_tokens"] == len(row["output_ids"]) < 490
        assert generated(row).output.finish_reason == FinishReason("abort", message=reason["message"])


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_sequences(llm_service: Service, stream: bool) -> None:
    before = llm_service.stats()["requests_aborted"]
    connection = http.client.HTTPConnection(llm_service.base_url.removeprefix("http://"), timeout=60)
    body = {**ENDLESS, "stream": stream, "sampling_params": {**ENDLESS["sampling_params"], "n": 2}}  # type: ignore[dict-item]
    connection.request("POST", "/generate", json.dumps(body), {"content-type": "application/json"})
    llm_service.wait_until(lambda: in_flight(llm_service) == 2)
    if stream:
        assert connection.getresponse().readline().startswith(b"data: ")
    connection.close()
    llm_service.wait_until(lambda: llm_service.stats()["requests_aborted"] == before + 2, timeout_s=5)
    assert in_flight(llm_service) == 0


def test_in_a_pause_the_service_is_well_and_new_requests_wait_or_are_refused(
    llm_service: Service, client: LLMClient
) -> None:
    client.pause_generation("retract")
    assert client.health()
    assert llm_service.http.get("/ping").status_code == 200
    assert not client.ready()
    replies: list[Any] = []
    thread = threading.Thread(target=lambda: replies.append(client.generate("a", GREEDY)))
    thread.start()
    llm_service.wait_until(lambda: in_flight(llm_service) == 1)
    client.continue_generation()
    thread.join(20)
    assert len(replies[0][0].output_ids) == 12
    assert client.ready()
    assert llm_service.http.post("/pause?mode=wait").status_code == 200
    for path, body in (
        ("/generate", {"text": "a"}),
        ("/generate", {"text": "a", "stream": True}),
        ("/inference/v1/generate", {"token_ids": [1]}),
        ("/v1/completions", {"prompt": "a"}),
    ):
        reply = llm_service.http.post(path, json=body)
        assert (reply.status_code, reply.json()["error"]["type"]) == (503, "engine_paused")
        assert reply.headers["retry-after"] == "1"
    assert llm_service.http.post("/resume").json() == {"status": "resumed"}


def test_a_refit_shows_in_every_reply_and_leaves_the_models_name(
    llm_service: Service, client: LLMClient, tiny_llm_folder: Path
) -> None:
    client.update_weights_from_disk(str(tiny_llm_folder), weight_version="7")
    try:
        assert client.model_info()["weight_version"] == "7"
        assert client.model_info()["served_model_name"] == "tiny-llm"
        info = generate(llm_service, text="a", sampling_params=GREEDY)["meta_info"]
        assert (info["weight_version"], info["weight_versions"]) == ("7", [{"version": "7", "start": 0, "end": 12}])
        body = {"token_ids": [1], "sampling_params": {"ignore_eos": True}}
        [choice] = llm_service.http.post("/inference/v1/generate", json=body).json()["choices"]
        assert choice["weight_versions"] == [{"version": "7", "start": 0, "end": 16}]
    finally:
        client.update_weight_version("default")


def test_health_generate_does_not_wait_behind_a_queue_that_moves(llm_service: Service, client: LLMClient) -> None:
    body = {**ENDLESS, "rid": "queue", "sampling_params": {**ENDLESS["sampling_params"], "n": 12}}  # type: ignore[dict-item]
    thread = threading.Thread(target=lambda: generate(llm_service, **body))
    thread.start()
    llm_service.wait_until(lambda: in_flight(llm_service) == 12)
    assert llm_service.http.get("/health_generate").status_code == 200
    assert in_flight(llm_service) > 4  # the queue is still there, and the probe behind it
    client.abort_request(abort_all=True)
    thread.join(20)
    llm_service.wait_until(lambda: in_flight(llm_service) == 0, timeout_s=5)


def test_health_generate_really_generates_and_routers_find_what_they_ask_for(llm_service: Service) -> None:
    before = llm_service.stats()["requests_finished"]
    assert llm_service.http.get("/health_generate").status_code == 200
    assert llm_service.stats()["requests_finished"] == before + 1
    for path, keys in {
        "/model_info": {"model_path", "served_model_name", "weight_version", "model_type", "architectures"},
        "/get_model_info": {"is_generation"},
        "/server_info": {"tp_size", "dp_size", "pp_size", "ep_size", "disaggregation_mode", "model_path", "version"},
        "/get_server_info": {"served_model_name", "max_total_num_tokens", "internal_states"},
        "/version": {"version"},
        "/get_weight_version": {"weight_version"},
        "/v1/loads": {"loads"},
    }.items():
        assert keys <= set(llm_service.http.get(path).json()), path
    assert llm_service.http.get("/get_load").json()[0]["num_tokens"] == 0
    page = llm_service.http.get("/metrics").text
    assert "llm_runtime_engine_up 1.0" in page
    assert "llm_runtime_requests_in_flight 0.0" in page


def test_tokens_in_and_out_as_vllm_has_them(llm_service: Service) -> None:
    sampling = {
        "max_tokens": 3,
        "temperature": 0,
        "logprobs": 2,
        "prompt_logprobs": 1,
        "n": 2,
        "top_k": 0,
        "stop": None,
    }
    body = {"token_ids": [5, 6, 7], "sampling_params": sampling, "request_id": "r", "model": "tiny-llm"}
    reply = llm_service.http.post("/inference/v1/generate", json={**body, "cache_salt": "7"}).json()
    native = generate(
        llm_service,
        input_ids=[5, 6, 7],
        sampling_params={"max_new_tokens": 3, "temperature": 0},
        return_logprob=True,
        top_logprobs_num=2,
        logprob_start_len=0,
    )
    assert reply["request_id"] == "r"
    assert [choice["index"] for choice in reply["choices"]] == [0, 1]
    for choice in reply["choices"]:
        assert choice["token_ids"] == native["output_ids"]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)
        content = choice["logprobs"]["content"]
        assert [[e["logprob"], e["token_id"], None] for e in content] == native["meta_info"]["output_token_logprobs"]
        assert [e["rank"] for e in content] == [1, 1, 1]
        assert [len(e["top_logprobs"]) for e in content] == [2, 2, 2]
    first, second, _ = reply["prompt_logprobs"]
    assert first is None
    assert second["6"]["logprob"] == native["meta_info"]["input_token_logprobs"][1][0]
    last = native["output_ids"][-1]
    for sampling, reason in (
        ({"stop_token_ids": [last]}, last),
        ({"logit_bias": {str(TURN_END): 1000}}, None),  # the model's own end is nothing that was asked for
    ):
        body["sampling_params"] = {"temperature": 0, **sampling}
        [choice] = llm_service.http.post("/inference/v1/generate", json=body).json()["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", reason)
    for bad in ({"bad_words": ["x"]}, {"max_tokens": "5"}):
        refused = llm_service.http.post("/inference/v1/generate", json={**body, "sampling_params": bad})
        assert refused.status_code == 400, bad
    assert llm_service.http.post("/inference/v1/generate", json={**body, "model": "other"}).status_code == 404


def test_without_a_tokenizer_token_ids_alone_are_taken_and_given() -> None:
    with pytest.raises(InvalidRequestError, match="no tokenizer"):
        read_generate(b'{"text": "a"}', None)
    job = read_generate(b'{"input_ids": [1], "sampling_params": {"max_new_tokens": null}}', None)
    assert job.prompts[0].sampling.max_new_tokens is None
    row = generate_row(GenerateOutput("r", [4], FinishReason("length", length=1), 1, 0, "v"), job.prompts[0], None)
    assert set(row) == {"output_ids", "meta_info"}
    assert read_tokens(b'{"token_ids": [1]}').prompt.sampling.max_new_tokens == 16


def test_the_client_streams_and_raises_what_the_service_raised(client: LLMClient, llm_service: Service) -> None:
    pieces = list(client.stream("hi", GREEDY, return_logprob=True))
    assert pieces[-1].output.finish_reason == FinishReason("length", length=12)
    assert pieces[-1].text == client.generate("hi", GREEDY)[0].text
    with pytest.raises(InvalidRequestError, match="no token 999"):
        client.generate([[999]], GREEDY)
    with pytest.raises(InvalidRequestError, match="no token 999"):
        list(client.stream([999], GREEDY))
    stream = client.stream("hi", SamplingParams(max_new_tokens=480, ignore_eos=True))
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    llm_service.wait_until(lambda: in_flight(llm_service) == 0, timeout_s=5)


def test_a_body_that_is_too_long_is_refused_in_the_same_form(llm_service: Service) -> None:
    connection = http.client.HTTPConnection(llm_service.base_url.removeprefix("http://"), timeout=20)
    connection.putrequest("POST", "/generate")
    connection.putheader("content-length", str(2**40))
    connection.endheaders()
    reply = connection.getresponse()
    assert (reply.status, json.loads(reply.read())["error"]["type"]) == (413, "payload_too_large")
    connection.close()


def test_the_command_line_says_the_same_of_a_service_and_of_a_model_of_its_own(
    llm_service: Service, tiny_llm_folder: Path
) -> None:
    command = [
        "generate",
        "hi",
        "x",
        "-n",
        "2",
        "--seed",
        "3",
        "--temperature",
        "1",
        "--max-new-tokens",
        "5",
        "--logprobs",
    ]
    asked = CliRunner().invoke(app, [*command, "--url", llm_service.base_url])
    assert asked.exit_code == 0, asked.output
    assert asked.output.count(" tokens, ") == asked.output.count(", log-prob -") == 4
    assert CliRunner().invoke(app, [*command, "--model", str(tiny_llm_folder)]).output == asked.output
    refused = CliRunner().invoke(app, ["generate", "hi", "--model", "/nowhere"])
    assert (refused.exit_code, "what to do" in refused.output) == (2, True)
    assert CliRunner().invoke(app, ["serve", "one", "--model-path", "two"]).exit_code == 2
