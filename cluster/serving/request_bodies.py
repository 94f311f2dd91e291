"""Bodies of `/v1/completions` and `/v1/chat/completions`: OpenAI's keys and vLLM's, each taken or refused by name."""

from __future__ import annotations

from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, JsonValue, TypeAdapter, ValidationError

from rlhfspec.cluster.serving.api_error import refuse
from rlhfspec.core.outside import cut

MAX_CHOICES = 1024
"Responses to one prompt (`n`)."

_ONLY_OFF: dict[str, tuple[Any, ...]] = {
    "min_p": (0,),
    "repetition_penalty": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "length_penalty": (1,),
    "min_tokens": (0,),
    "echo": (False,),
    "suffix": ("",),
    "use_beam_search": (False,),
    "logit_bias": ({},),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "structured_outputs": (),
    "response_format": ({"type": "text"},),
    "guided_json": (),
    "guided_regex": (),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "logits_processors": (),
    "truncate_prompt_tokens": (),
    "chat_template": (),
    "continue_final_message": (False,),
    "functions": (),
    "function_call": ("none",),
    "tool_choice": ("none",),
    "reasoning_effort": (),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
}
"What the engine does not do: values, beside null, that ask for nothing of it."
_IGNORED = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "priority",
    "parallel_tool_calls",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "request_id",
    "cache_salt",
)
"What changes no response."


class StreamOptions(BaseModel):
    """What a stream says beside the tokens."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False
    continuous_usage_stats: Literal[False] | None = None


class GenerationBody(BaseModel):
    """What both kinds of bodies have. A key that is null is as one that is not there."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    model: str = ""
    n: int = Field(default=1, ge=1, le=MAX_CHOICES)
    best_of: int | None = None
    temperature: float | None = None
    "None, here and below: as the model's generation_config.json says"
    top_p: float | None = None
    top_k: int | None = Field(default=None, ge=-1)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: str | list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts that end a response."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def wants_logprobs(self) -> bool:
        """Whether the answer has the tokens' log-probabilities."""
        raise NotImplementedError

    @property
    def most_tokens(self) -> int | None:
        """Of a response; None: as many as there is room for."""
        raise NotImplementedError


class CompletionBody(GenerationBody):
    """A body of `/v1/completions`."""

    prompt: str | list[int] | list[str] | list[list[int]]
    max_tokens: int = Field(default=16, ge=1)
    logprobs: Literal[0] | None = None
    "0, the sampled token's own, is what the engine knows"

    @property
    def wants_logprobs(self) -> bool:
        """Whether the answer has the tokens' log-probabilities."""
        return self.logprobs is not None

    @property
    def most_tokens(self) -> int | None:
        """Of a response."""
        return self.max_tokens


class ChatBody(GenerationBody):
    """A body of `/v1/chat/completions`."""

    messages: list[dict[str, JsonValue]]
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool = False
    tools: list[dict[str, JsonValue]] = []
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, JsonValue] = {}

    @property
    def wants_logprobs(self) -> bool:
        """Whether the answer has the tokens' log-probabilities."""
        return self.logprobs

    @property
    def most_tokens(self) -> int | None:
        """Of a response; None: as many as there is room for."""
        return self.max_completion_tokens or self.max_tokens


_OBJECT = TypeAdapter(dict[str, Any])
AnyBody = TypeVar("AnyBody", bound=BaseModel)


def read_body(raw: bytes, form: type[AnyBody]) -> AnyBody:
    """The body that JSON text holds. Raises ApiError naming the key at fault."""
    given = read_object(raw)
    for key in [key for key, value in given.items() if value is None or key in _IGNORED]:
        del given[key]
    for key, harmless in _ONLY_OFF.items():
        if key in given and key not in form.model_fields:
            value = given.pop(key)
            if value not in harmless:
                expected = " or ".join(["none", *(repr(one) for one in harmless)])
                raise refuse(
                    f"this engine does not do {key}: expected {expected}, got {cut(repr(value))}; take it out",
                    key,
                )
    try:
        return form.model_validate(given)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_context=False)[0]
        # a union's faults name its branches, too
        where = ".".join(
            str(part) for part in fault["loc"] if not str(part).startswith(("list[", "str", "int"))
        )
        if fault["type"] == "extra_forbidden":
            known = ", ".join(form.model_fields)
            raise refuse(f"unknown key '{cut(where)}'; known are {known}", cut(where)) from None
        got = "" if fault["type"] == "missing" else f", got {cut(repr(fault['input']))}"
        raise refuse(f"{cut(where)}: {fault['msg']}{got}", cut(where)) from None


def read_object(raw: bytes) -> dict[str, Any]:
    """What JSON text holds. Raises ApiError: it is none, or no object."""
    try:
        return _OBJECT.validate_json(raw)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]["msg"]
        raise refuse(f"the body must be a JSON object: {fault}") from None
