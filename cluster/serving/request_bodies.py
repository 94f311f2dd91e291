"""Bodies of `/v1/completions` and `/v1/chat/completions`: OpenAI's keys and vLLM's, each taken or refused by name."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, JsonValue, TypeAdapter, ValidationError

from ...core.outside import cut, quote
from ...core.surfaces.surface import note_once, surface
from .api_error import refuse

MAX_CHOICES = 1024
"Responses to one prompt (`n`)."
MOST_TOP = 20
"Of the likeliest tokens at a place, as OpenAI's chat and vLLM."


class StreamOptions(BaseModel):
    """What a stream says beside the tokens."""

    model_config = ConfigDict(strict=True)

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class ResponseFormat(BaseModel):
    """The form of an answer: which there are, `request.toml` says."""

    type: str


class GenerationBody(BaseModel):
    """What both kinds of bodies have, of the right types; which keys there may be, the tables of `request.toml` say.

    A key that is null is as one that is not there.
    """

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    model: str = ""
    n: int = Field(default=1, ge=1, le=MAX_CHOICES)
    best_of: int | None = None
    temperature: float | None = None
    "None, here and below: as the model's generation_config.json says"
    top_p: float | None = None
    top_k: int | None = Field(default=None, ge=-1)
    min_p: float | None = None
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: str | list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    response_format: ResponseFormat | None = None
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
    def num_top(self) -> int | None:
        """How many of the likeliest tokens are told at each place; None: nothing is scored."""
        raise NotImplementedError

    @property
    def echoes(self) -> bool:
        """Whether the answer begins with the prompt."""
        return False

    @property
    def wants_calls(self) -> bool:
        """Whether calls of tools are read out of the response."""
        return False

    @property
    def comes_whole(self) -> bool:
        """Whether even a stream has a response in one part."""
        return self.num_top is not None or self.echoes

    @property
    def most_tokens(self) -> int | None:
        """Of a response; None: as many as there is room for."""
        raise NotImplementedError

    def require_known(self) -> None:
        """Raise ApiError for what an object within the body has that nothing here reads."""


class CompletionBody(GenerationBody):
    """A body of `/v1/completions`."""

    prompt: str | list[int] | list[str] | list[list[int]]
    max_tokens: int = Field(default=16, ge=0)
    logprobs: int | None = Field(default=None, ge=0, le=MOST_TOP)
    echo: bool = False

    @property
    def wants_logprobs(self) -> bool:
        """Whether the answer has the tokens' log-probabilities."""
        return self.logprobs is not None

    @property
    def num_top(self) -> int | None:
        """As `logprobs` says; a prompt without a response is scored whatever it says."""
        if self.echo and (self.wants_logprobs or not self.max_tokens):
            return self.logprobs or 0
        return self.logprobs or None

    @property
    def echoes(self) -> bool:
        """Whether the answer begins with the prompt."""
        return self.echo

    @property
    def most_tokens(self) -> int | None:
        """Of a response."""
        return self.max_tokens

    def require_known(self) -> None:
        """Raise ApiError for a response of no tokens without the prompt."""
        if not self.max_tokens and not self.echo:
            raise refuse("max_tokens must be at least 1, or beside echo 0, got 0", "max_tokens")


class ChatBody(GenerationBody):
    """A body of `/v1/chat/completions`."""

    messages: list[dict[str, JsonValue]]
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=MOST_TOP)
    tools: list[dict[str, JsonValue]] = []
    tool_choice: JsonValue = None
    parallel_tool_calls: bool = True
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, JsonValue] = {}

    @property
    def wants_logprobs(self) -> bool:
        """Whether the answer has the tokens' log-probabilities."""
        return self.logprobs

    @property
    def num_top(self) -> int | None:
        """As `top_logprobs` says."""
        return self.top_logprobs or None

    @property
    def wants_calls(self) -> bool:
        """Where there are tools, unless tool_choice is none."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def forced_tool(self) -> str | None:
        """The tool that must be called."""
        functions = [tool.get("function") for tool in self.tools]
        names = [str(one.get("name")) for one in functions if isinstance(one, dict)]
        return next((name for name in names if self.tool_choice == _choice_of(name)), None)

    def require_known(self) -> None:
        """Raise ApiError for what a message, a tool or a call has that nothing here reads."""
        names: set[str] = set()
        for place, tool in enumerate(self.tools):
            _require_nested(tool, "request.tools", f"tools.{place}")
            function = tool.get("function", tool)
            name = function.get("name") if isinstance(function, dict) else None
            if not isinstance(name, str) or not name or name in names:
                raise refuse(
                    f"tools.{place}: expected a function with a name of its own, got {quote(tool)}", "tools"
                )
            names.add(name)
        if self.top_logprobs and not self.logprobs:
            raise refuse("top_logprobs needs logprobs: true beside it, got none; set it", "top_logprobs")
        for place, message in enumerate(self.messages):
            path = f"messages.{place}"
            require_known(message, "request.message", path)
            for key, kind in (("content", "request.content_part"), ("tool_calls", "request.tool_call")):
                listed = message.get(key)
                for number, one in enumerate(listed if isinstance(listed, list) else ()):
                    _require_nested(one, kind, f"{path}.{key}.{number}")
        known = ("none", "auto", *(["required"] if self.tools else []))
        if self.tool_choice is not None and self.tool_choice not in known and self.forced_tool is None:
            raise refuse(
                f"tool_choice: expected {', '.join(known)} or {_choice_of('one of tools')}, got "
                f"{quote(self.tool_choice)}",
                "tool_choice",
            )

    @property
    def most_tokens(self) -> int | None:
        """Of a response; None: as many as there is room for."""
        return self.max_completion_tokens or self.max_tokens


def _choice_of(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


_OBJECT = TypeAdapter(dict[str, Any])
AnyBody = TypeVar("AnyBody", bound=GenerationBody)


def read_body(raw: bytes, form: type[AnyBody]) -> AnyBody:
    """The body that JSON text holds. Raises ApiError naming the key at fault."""
    given = read_object(raw, "request.chat" if issubclass(form, ChatBody) else "request.completion")
    for key in ("stream_options", "response_format"):
        require_known(given.get(key), f"request.{key}", key)
    try:
        body = form.model_validate({key: value for key, value in given.items() if value is not None})
    except ValidationError as error:
        fault = error.errors(include_url=False, include_context=False)[0]
        # a union's faults name its branches, too
        where = ".".join(
            str(part) for part in fault["loc"] if not str(part).startswith(("list[", "str", "int"))
        )
        got = "" if fault["type"] == "missing" else f", got {cut(repr(fault['input']))}"
        raise refuse(f"{cut(where)}: {fault['msg']}{got}", cut(where)) from None
    body.require_known()
    return body


def require_known(given: Any, name: str, path: str, *, also: Collection[str] = ()) -> None:
    """Raise ApiError for a key of the object at `path` of a request that the surface `name` does not know."""
    if not isinstance(given, dict):
        return  # its type is looked at elsewhere
    for key, fault in surface(name).faults(given, also=also):
        if fault.is_note:
            note_once(f"{path or 'a body'} has {fault.text}")
        else:
            where = f"{path}.{key}" if path else key
            raise refuse(f"{path or 'the body'} has {fault.text}", cut(where))


def _require_nested(given: Any, name: str, path: str) -> None:
    """As `require_known`, and of what stands under `function`."""
    require_known(given, name, path)
    if isinstance(given, dict):
        require_known(given.get("function"), f"{name}.function", f"{path}.function")


def read_object(raw: bytes, name: str) -> dict[str, Any]:
    """What JSON text holds, of the surface `name`. Raises ApiError: it is no object, or has a key that is not known."""
    try:
        found = _OBJECT.validate_json(raw)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]["msg"]
        raise refuse(f"the body must be a JSON object: {fault}") from None
    require_known(found, name, "")
    return found
