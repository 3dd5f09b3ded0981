"""The fields of a request that say its prompts, in three forms. Imports no torch, as `params`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass

from engine_control.errors import InvalidRequestError


@dataclass(frozen=True)
class PromptFields:
    """The names of the fields that say one prompt: as text, as token ids, or as embeddings."""

    text: str
    ids: str
    ids_mask: str
    extra_ids: str
    embeds: str
    embeds_mask: str
    pooled: str

    @property
    def forms(self) -> tuple[tuple[str, ...], ...]:
        """The fields that say the prompt, by form. The others belong to one of them."""
        return (self.text,), (self.ids, self.extra_ids), (self.embeds,)

    @property
    def belongs_to(self) -> Mapping[str, str]:
        """Fields that mean nothing without another one, with that one."""
        return {self.ids_mask: self.ids, self.embeds_mask: self.embeds, self.pooled: self.embeds}


PROMPTS: Mapping[str, PromptFields] = {
    "prompt": PromptFields(
        text="prompt",
        ids="prompt_ids",
        ids_mask="prompt_mask",
        extra_ids="extra_prompt_ids",
        embeds="prompt_embeds",
        embeds_mask="prompt_embeds_mask",
        pooled="pooled_prompt_embeds",
    ),
    "negative_prompt": PromptFields(
        text="negative_prompt",
        ids="negative_prompt_ids",
        ids_mask="negative_prompt_mask",
        extra_ids="negative_extra_prompt_ids",
        embeds="negative_prompt_embeds",
        embeds_mask="negative_prompt_embeds_mask",
        pooled="negative_pooled_prompt_embeds",
    ),
}
"""The request's two prompts, by the name of each one's text."""


def check_forms(params: object) -> None:
    """Each prompt of a request in one form, and that one whole. What ids and embeddings hold, whoever has the model
    checks.

    Raises:
        InvalidRequestError: there is no prompt, one is there twice, or a field lacks the one that it belongs to.
    """
    for fields in PROMPTS.values():
        there = {name for name in astuple(fields) if getattr(params, name) is not None}
        said = [[name for name in form if name in there] for form in fields.forms]
        forms = [names[0] for names in said if names]
        if len(forms) > 1:
            raise InvalidRequestError(
                f"the prompt is there twice: {forms[0]} says it too",
                field=forms[1],
                hint=f"Send one of {fields.text}, {fields.ids} and {fields.embeds}.",
            )
        for name, needed in fields.belongs_to.items():
            if name in there and needed not in there:
                raise InvalidRequestError(
                    f"belongs to {needed}, which is not there", field=name, hint=f"Send {needed} too, or leave it out."
                )
    if not any(getattr(params, name) is not None for form in PROMPTS["prompt"].forms for name in form):
        raise InvalidRequestError(
            "a request needs a prompt", field="prompt", hint="Send some text (or prompt_ids, or prompt_embeds)."
        )
