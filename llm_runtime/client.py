"""The client of the service. It imports httpx and torch; neither a web framework nor a model library.

with LLMClient("http://127.0.0.1:30000") as client:
    samples = client.generate("12+34=", {"max_new_tokens": 16, "n": 4}, return_logprob=True)
    client.refit(model.state_dict(), weight_version="1")
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from engine_control.client import BUCKET_BYTES, ControlClient, NamedTensors, checked, error_from
from engine_control.errors import ErrorMessage, InvalidRequestError, from_message
from llm_runtime.output import FinishReason, Generated, GenerateOutput, TokenLogprob, WeightVersionSpan
from llm_runtime.params import SamplingParams

Prompt = str | Sequence[int]
Params = SamplingParams | Mapping[str, Any]
Entries = Iterable[Sequence[Any]]


class LLMClient(ControlClient):
    """Talks to one service: generation, and all that `ControlClient` has. Requests take as long as they take: there is
    no time-out unless one is given."""

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: Params | Sequence[Params] | None = None,
        *,
        rid: str | None = None,
        return_logprob: bool = False,
        logprob_start_len: int = -1,
        top_logprobs_num: int = 0,
        token_ids_logprob: Sequence[int] = (),
    ) -> list[Generated]:
        """Goes on from each prompt (text, or token ids), as `LLM.generate` does in its own process: `n` samples each,
        in the order of the prompts. Those that are aborted meanwhile have what there was of them.

        Raises:
            EngineError: the same class that the service raised.
            httpx.TransportError: the service was not reached, or the connection broke.
        """
        body = _prompt_fields(prompts)
        body |= {
            "sampling_params": _plain(sampling),
            "rid": rid,
            "return_logprob": return_logprob,
            "logprob_start_len": logprob_start_len,
            "top_logprobs_num": top_logprobs_num,
            "token_ids_logprob": list(token_ids_logprob) or None,
        }
        reply = self.generate_rows(body)
        return [generated(row) for row in (reply if isinstance(reply, list) else [reply])]

    def generate_rows(self, body: Mapping[str, Any]) -> dict[str, Any] | list[dict[str, Any]]:
        """The reply of `/generate` as it is, for a request body as it is.

        Raises:
            EngineError: see `generate`; `InvalidRequestError` too for what JSON can't say, such as NaN.
        """
        rows: dict[str, Any] | list[dict[str, Any]] = self._reply("/generate", body).json()
        return rows

    def stream(
        self, prompt: Prompt, sampling: Params | None = None, *, rid: str | None = None, return_logprob: bool = False
    ) -> Iterator[Generated]:
        """One sample of one prompt as it grows: each item has all so far, and the last one a finish reason. Closing the
        iterator aborts the request.

        Raises:
            EngineError: see `generate`. Samples of a server with `--incremental-streaming-output` are pieces.
        """
        fields = {"sampling_params": _plain(sampling), "rid": rid, "return_logprob": return_logprob, "stream": True}
        body = {**_prompt_fields(prompt), **{name: value for name, value in fields.items() if value is not None}}
        with self._client.stream("POST", "/generate", json=body) as response:
            if response.status_code != 200:
                response.read()
                raise error_from(response)
            for line in response.iter_lines():
                data = line.removeprefix("data: ")
                if data and data != "[DONE]":
                    yield generated(_event(json.loads(data)))

    def model_info(self) -> dict[str, Any]:
        """The model, and the version of its weights."""
        info: dict[str, Any] = checked(self._client.get("/model_info")).json()
        return info

    def server_info(self) -> dict[str, Any]:
        """What is loaded and how it is served."""
        info: dict[str, Any] = checked(self._client.get("/server_info")).json()
        return info

    def refit(
        self,
        named_tensors: NamedTensors,
        *,
        module: str = "model",
        weight_version: str | None = None,
        partial: bool = False,
        staged: bool = False,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> dict[str, Any]:
        """As `ControlClient.refit`, of the one module that a language model is."""
        return super().refit(
            named_tensors,
            module=module,
            weight_version=weight_version,
            partial=partial,
            staged=staged,
            bucket_bytes=bucket_bytes,
        )


def generated(row: Mapping[str, Any]) -> Generated:
    """A row of `/generate`'s reply as what `LLM.generate` returns."""
    info = row["meta_info"]
    reason = info["finish_reason"]
    return Generated(
        row.get("text"),
        GenerateOutput(
            request_id=info["id"],
            output_ids=row["output_ids"],
            finish_reason=None if reason is None else _reason(reason),
            prompt_tokens=info["prompt_tokens"],
            cached_tokens=info["cached_tokens"],
            weight_version=info["weight_version"],
            weight_versions=[WeightVersionSpan(**span) for span in info.get("weight_versions", [])],
            num_retractions=info["num_retractions"],
            e2e_latency=info.get("e2e_latency", 0.0),
            output_token_logprobs=_pairs(info.get("output_token_logprobs")),
            input_token_logprobs=_pairs(info.get("input_token_logprobs")),
            output_top_logprobs=_lists(info.get("output_top_logprobs")),
            input_top_logprobs=_lists(info.get("input_top_logprobs")),
            output_token_ids_logprobs=_lists(info.get("output_token_ids_logprobs")),
            input_token_ids_logprobs=_lists(info.get("input_token_ids_logprobs")),
        ),
    )


def _reason(reason: Mapping[str, Any]) -> FinishReason:
    return FinishReason(**{name: reason.get(name) for name in ("type", "matched", "length", "message")})  # type: ignore[arg-type]


def _pairs(triples: Entries | None) -> list[TokenLogprob] | None:
    return None if triples is None else [(log_prob, token) for log_prob, token, _ in triples]


def _lists(positions: Iterable[Entries | None] | None) -> list[Any] | None:
    return None if positions is None else [_pairs(entry) for entry in positions]


def _event(event: dict[str, Any]) -> dict[str, Any]:
    """The event, unless it is the error that ends its stream."""
    if "error" in event:
        error = event["error"]
        raise from_message(ErrorMessage("", error["code"], error["message"]))
    return event


def _prompt_fields(prompts: Prompt | Sequence[Prompt]) -> dict[str, Any]:
    if isinstance(prompts, str):
        return {"text": prompts}
    items = list(prompts)
    if items and all(isinstance(item, str) for item in items):
        return {"text": items}
    if any(isinstance(item, str) for item in items):
        raise InvalidRequestError("texts and tokens can't be mixed in one request", field="prompts")
    return {"input_ids": [item if isinstance(item, int) else list(item) for item in items]}


def _plain(sampling: Params | Sequence[Params] | None) -> Any:
    """As JSON has it: one object for all prompts, or a list of them."""
    if isinstance(sampling, SamplingParams):
        return asdict(sampling)
    if sampling is None or isinstance(sampling, Mapping):
        return dict(sampling or {})
    return [_plain(params) for params in sampling]
