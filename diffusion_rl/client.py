"""The client of the service. It imports httpx and torch; neither a web framework nor a model library.

client = RolloutClient("http://127.0.0.1:30000")
samples = client.generate("a red square", num_outputs_per_prompt=4, seed=42, rollout_return_dit_trajectory=True)
client.refit(transformer.state_dict(), weight_version="1")
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import httpx

from diffusion_rl.condition_images import load_images
from diffusion_rl.config import Wire
from diffusion_rl.sample import ResumeState, RolloutSample
from diffusion_rl.server.encoding import (
    CONTENT_TYPES,
    Buffer,
    DecodeError,
    decode_json,
    decode_msgpack,
    decode_safetensors,
    json_value,
)
from diffusion_rl.server.rows import resume_state_row, sample_from_plain
from engine_control.client import ControlClient, checked, error_from
from engine_control.errors import InvalidRequestError
from engine_control.wire import uninitialised

__all__ = ["DecodeError", "RolloutClient", "decode_json", "decode_msgpack", "decode_safetensors"]

DECODERS: Mapping[str, Callable[[Buffer], list[dict[str, Any]]]] = {
    CONTENT_TYPES["json"]: decode_json,
    CONTENT_TYPES["msgpack"]: decode_msgpack,
    CONTENT_TYPES["safetensors"]: decode_safetensors,
}


class RolloutClient(ControlClient):
    """Talks to one service: rollouts, and all that `ControlClient` has. Rollouts take as long as they take: there is no
    time-out unless one is given."""

    def __init__(self, base_url: str, *, timeout: float | None = None, wire: Wire = "safetensors") -> None:
        super().__init__(base_url, timeout=timeout)
        self._wire = wire

    def generate(self, prompt: str | None = None, **fields: Any) -> list[RolloutSample]:
        """Rolls out one prompt; `fields` are those of `RolloutParams`, tensors among them: in the place of a text, say,
        what `sample.denoising_env.prompt_fields()` returns; `image` takes PIL images and paths, too. Evaluation samples
        (`rollout=False`) have no log-probs. With the safetensors wire the tensors are views of the one received body.
        `resume_from` takes the `resume_state`s of aborted samples; `diffusion_rl.sample.merge_resumed` puts
        the two parts together.

        Raises:
            EngineError: the same class that the service raised.
            httpx.TransportError: the service was not reached, or the connection broke.
        """
        if fields.get("resume_from") is not None:
            fields["resume_from"] = [
                resume_state_row(state) if isinstance(state, ResumeState) else state for state in fields["resume_from"]
            ]
        if fields.get("image") is not None:
            fields["image"] = load_images(fields["image"], max_pixels=math.inf)
        if prompt is not None:
            fields["prompt"] = prompt
        return [sample_from_plain(row) for row in self.generate_rows(json_value(fields))]

    def generate_rows(self, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The reply's rows as they are, for a request body as it is.

        Raises:
            EngineError: see `generate`; `InvalidRequestError` too for what JSON can't say, such as NaN.
        """
        try:
            content = json.dumps(dict(body), allow_nan=False)
        except (TypeError, ValueError) as error:
            raise InvalidRequestError(f"the request can't be written as JSON: {error}", code="invalid_json") from error
        headers = {"accept": CONTENT_TYPES[self._wire], "content-type": "application/json"}
        with self._client.stream("POST", "/rollout/generate", content=content, headers=headers) as response:
            if response.status_code != 200:
                response.read()
                raise error_from(response)
            data = _read(response)
            return DECODERS[response.headers["content-type"].split(";")[0]](data)

    def abort(self, rid: str) -> bool:
        """Aborts the request that was sent with this `rid`. Says whether it was being computed."""
        return bool(checked(self._client.post("/abort_request", json={"rid": rid})).json()["aborted"])

    def server_info(self) -> dict[str, Any]:
        """What is loaded and how it is served."""
        info: dict[str, Any] = checked(self._client.get("/server_info")).json()
        return info


def _read(response: httpx.Response) -> Buffer:
    """The body in one writable buffer, which is allocated once if the length is known."""
    length = response.headers.get("content-length", "")
    if not length.isdigit() or "content-encoding" in response.headers:
        return bytearray(response.read())
    data, position = uninitialised(int(length)), 0
    for chunk in response.iter_raw():
        data[position : position + len(chunk)] = chunk
        position += len(chunk)
    return data
