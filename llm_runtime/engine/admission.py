"""What a request must be for this model, and the sequence that it becomes."""

from __future__ import annotations

from engine_control.errors import InvalidRequestError
from llm_runtime.engine.sequence import Sequence
from llm_runtime.models.base import ModelConfig
from llm_runtime.params import GenerateRequest
from llm_runtime.text import StopChecker, Tokenizer


class Admission:
    """Knows the model's tokens and the room there is; queues nothing."""

    def __init__(self, model: ModelConfig, tokenizer: Tokenizer | None, *, room: int) -> None:
        """room: tokens of prompt and output that one sequence may have."""
        self._vocab_size = model.vocab_size
        self._tokenizer = tokenizer
        self.room = room
        named = () if tokenizer is None else tokenizer.eos_token_ids
        self.eos_token_ids = tuple(dict.fromkeys((*model.eos_token_ids, *named)))

    def check(self, request: GenerateRequest) -> None:
        """
        Raises:
            InvalidRequestError: naming the field.
        """
        prompt, params = request.input_ids, request.sampling
        if not prompt:
            raise InvalidRequestError("the prompt has no token", code="empty_prompt", field="input_ids")
        self._check_tokens("input_ids", prompt)
        self._check_tokens("stop_token_ids", params.stop_token_ids)
        self._check_tokens("token_ids_logprob", request.token_ids_logprob)
        self._check_tokens("logit_bias", tuple(params.logit_bias))
        wanted = params.max_new_tokens
        if len(prompt) + (wanted if wanted is not None else 1) > self.room:
            what = "" if not wanted else f" and {wanted} new ones"
            raise InvalidRequestError(
                f"a prompt of {len(prompt)} tokens{what} doesn't fit: there is room for {self.room}",
                code="prompt_too_long",
                field="input_ids",
                value=len(prompt),
                hint="Shorten the prompt, lower max_new_tokens, or raise context_length or max_total_tokens.",
            )
        if request.logprob_start_len > len(prompt):
            raise InvalidRequestError(
                f"logprob_start_len={request.logprob_start_len} is beyond the prompt's {len(prompt)} tokens",
                field="logprob_start_len",
                value=request.logprob_start_len,
            )
        if params.stop and self._tokenizer is None:
            raise InvalidRequestError(
                "stop strings need a tokenizer, and none is loaded",
                field="sampling_params.stop",
                value=list(params.stop),
                hint="Send stop_token_ids, or start without --skip-tokenizer-init.",
            )

    def sequence(self, request_id: str, request: GenerateRequest, arrival: int) -> Sequence:
        """What a request that was checked becomes."""
        params = request.sampling
        ends = () if params.ignore_eos else self.eos_token_ids
        checker = StopChecker(self._tokenizer, params.stop) if params.stop and self._tokenizer is not None else None
        wanted = params.max_new_tokens
        return Sequence(
            request_id=request_id,
            request=request,
            arrival=arrival,
            max_new_tokens=self.room - len(request.input_ids) if wanted is None else wanted,
            stop_token_ids=frozenset((*params.stop_token_ids, *ends)),
            stop_checker=checker,
        )

    def _check_tokens(self, field: str, tokens: tuple[int, ...]) -> None:
        wrong = next((t for t in tokens if not 0 <= t < self._vocab_size), None)
        if wrong is not None:
            raise InvalidRequestError(
                f"there is no token {wrong}", field=field, value=wrong, hint=f"Tokens are 0 to {self._vocab_size - 1}."
            )
