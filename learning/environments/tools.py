"""Tools: plain Python functions that the policy calls between its turns (`environment.kind: tools`).

Their schemas are transformers' `get_json_schema` of signature and docstring; the calls of a turn are found by
`data.chat.tool_calls`, and results go back as the chat template's tool turns. Whatever goes wrong with a call is an
observation that begins with `Error:`, as in TRL's tool loop: the policy learns from it.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import get_json_schema

from ...core.config import DataConfig, EnvironmentConfig
from ...core.errors import ConfigError
from ...core.named_code import describe, named_code
from ...core.records import Prompt
from ..data import verifiers_package
from ..data.chat.messages import Tools
from ..data.chat.tool_calls import CallParser, ToolCall
from ..data.prompt_tokens import read_template
from .environment_protocol import COUNTED, Step
from .observations import ObservationRenderer

Function = Callable[..., Any]
_EXAMPLE = "my_tools.py for all its public functions, or my_tools.py:add,search"
_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}
UNREAD = "unknown"
"The name of the tool turn that answers a call which does not parse."


class ToolEnvironment:
    """Runs the calls of each turn; a turn without one ends the episode. Only tools of a class keep anything."""

    def __init__(
        self, functions: Mapping[str, Function], schemas: Tools, parser: CallParser | None, timeout_s: float
    ) -> None:
        self._functions, self._parser, self._timeout_s = functions, parser, timeout_s
        self.replays = bool(_holders(functions))
        self._schemas = {one["function"]["name"]: one["function"] for one in schemas}
        self._prompt: Prompt | None = None

    def reset(self, prompt: Prompt) -> str | None:
        """Begin; what a class's own reset returns, of several one behind the other, is added to the prompt."""
        self._prompt = prompt
        texts = [_reset(one, prompt) for one in _holders(self._functions) if hasattr(one, "reset")]
        return "".join(text for text in texts if text) or None

    def step(self, response: str) -> Step:
        """Answer the calls of a turn, in their order, those that do not parse too."""
        assert self._parser is not None and self._prompt is not None
        prompt = self._prompt
        events = self._parser.of_episode(response, prefill=prompt.prefill, tools=prompt.tools)
        calls = [one.call for one in events if one.kind in ("call", "unparsed")]
        if not calls:
            return Step(done=True, counts=_counts(0, 0, 0))
        until_s = time.monotonic() + self._timeout_s
        wrong = "Error: the call does not parse: expected the format of the tools, a name and an object of arguments"
        said = [
            (UNREAD, wrong, False) if one is None else (one.name, *self._called(one, until_s))
            for one in calls
        ]
        messages = [_result(number, name, text) for number, (name, text, _) in enumerate(said)]
        num_unparsed = calls.count(None)
        num_failed = sum(not is_right for *_, is_right in said) - num_unparsed
        return Step(messages, counts=_counts(len(said), num_unparsed, num_failed))

    def _called(self, call: ToolCall, until_s: float) -> tuple[str, bool]:
        """What a call comes to, and whether that is a result."""
        function = self._functions.get(call.name)
        if function is None:
            return f"Error: there is no tool {call.name}; expected one of {', '.join(self._functions)}", False
        if fault := _fault(function, self._schemas[call.name], call.arguments):
            return f"Error: {call.name}: {fault}", False
        if time.monotonic() >= until_s:
            return (
                f"Error: {call.name} was not called: the calls before took all of {self._timeout_s:g} s",
                False,
            )
        answers: list[tuple[str, bool]] = []

        def run() -> None:
            try:
                result = function(**call.arguments)
                if inspect.isawaitable(result):
                    result = asyncio.run(_awaited(result))
                answers.append((result if isinstance(result, str) else _as_json(result), True))
            except BaseException as error:  # the user's code may raise anything, sys.exit included
                answers.append((f"Error: {type(error).__name__}: {describe(error)}", False))

        # a thread that hangs cannot be ended: it is left behind, and ends with the process
        thread = threading.Thread(target=run, daemon=True, name=f"tool-{call.name}")
        thread.start()
        thread.join(max(0.0, until_s - time.monotonic()))
        return (
            answers[0] if answers else (f"Error: {call.name} gave no answer in {self._timeout_s:g} s", False)
        )


def tool_functions(config: EnvironmentConfig) -> dict[str, Function]:
    """The functions that `environment.tools` names, by their names; none for another kind.

    Raises ConfigError: no such file, module or function, or two of one name.
    """
    if config.kind != "tools":
        return {}
    found: dict[str, Function] = {}
    for path in [config.tools] if isinstance(config.tools, str) else config.tools or ():
        module, _, names = path.partition(":")
        held = named_code(f"{module}:__dict__", key="environment.tools", kind="module", example=_EXAMPLE)
        public = [name for name, one in held.items() if _is_own(one, held["__name__"]) and name[0] != "_"]
        for name in [one.strip() for one in names.split(",")] if names else public:
            function = held.get(name)
            if not callable(function):
                raise ConfigError(
                    f"environment.tools {path}: expected a function {name} in {module}, got {function!r}; "
                    f"it has {', '.join(public) or 'no public function'}"
                )
            # of a class one instance an episode, as TRL's environment_factory
            tools = _methods(function, path) if inspect.isclass(function) else {name: function}
            if twice := found.keys() & tools.keys():
                raise ConfigError(
                    f"environment.tools names {', '.join(twice)} twice; expected each tool once; rename one"
                )
            found |= tools
        if not public and not names:
            raise ConfigError(
                f"environment.tools {path}: expected public functions in it, got none; write one"
            )
    return found


def tool_schemas(config: EnvironmentConfig) -> Tools:
    """What the chat template is told of the tools. Raises ConfigError: a function that does not say what it takes."""
    if (config.kind or "").startswith(verifiers_package.SCHEME):
        return verifiers_package.schemas(verifiers_package.of(config).tool_defs)
    schemas = []
    for name, function in tool_functions(config).items():
        try:
            schema = get_json_schema(function)
        except Exception as error:  # of several types, for a docstring or a type hint
            raise ConfigError(
                f"environment.tools {name}: {describe(error)}; give every argument a type hint and a line `name: what "
                "it is` under `Args:` of the docstring"
            ) from error
        kinds = {one.kind for one in inspect.signature(function).parameters.values()}
        if kinds - {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}:
            raise ConfigError(
                f"environment.tools {name}: expected arguments that have names, as calls give them, got "
                f"{name}{inspect.signature(function)}; write each one out"
            )
        schemas.append({**schema, "function": {**schema["function"], "name": name}})
    return tuple(schemas)


def tools_maker(config: EnvironmentConfig, parser: CallParser | None) -> Callable[[], ToolEnvironment]:
    """What makes one environment an episode. Raises ConfigError as the two above."""
    schemas = tool_schemas(config)
    return lambda: ToolEnvironment(tool_functions(config), schemas, parser, config.timeout_s)


def call_parser(
    config: EnvironmentConfig, data: DataConfig, tokenizer: PreTrainedTokenizerBase
) -> CallParser | None:
    """What reads the calls in what a model of this tokenizer writes; None where there are no tools.

    Raises ConfigError: the format is not known; DataError: no such chat template.
    """
    if not tool_schemas(config):
        return None
    return CallParser(tokenizer, chat_template=read_template(data.chat_template, tokenizer))


def require_tools(config: EnvironmentConfig, data: DataConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ConfigError where calls cannot be read, or tools not be shown, by what renders the prompts."""
    if call_parser(config, data, tokenizer) is None:
        return
    renderer = ObservationRenderer(
        tokenizer,
        max_tokens=config.max_observation_tokens,
        chat_template=read_template(data.chat_template, tokenizer),
        chat_template_kwargs=data.chat_template_kwargs,
    )
    renderer.require_tools(tool_schemas(config))


def _methods(kind: type, path: str) -> dict[str, Function]:
    """The public methods of a new instance, `reset` aside."""
    try:
        made = kind()
    except (Exception, SystemExit) as error:  # of the user's
        raise ConfigError(
            f"environment.tools {path}: making {kind.__name__} raised {type(error).__name__}: {describe(error)}; "
            "expected a class that is made without arguments; fix it"
        ) from error
    names = [name for name, _ in inspect.getmembers(kind, inspect.isfunction) if name[0] != "_"]
    if not set(names) - {"reset"}:
        raise ConfigError(
            f"environment.tools {path}: expected public methods in {kind.__name__}, got none; write one"
        )
    return {name: getattr(made, name) for name in names if name != "reset"}


def _holders(functions: Mapping[str, Function]) -> list[Any]:
    """The instances whose methods are among the tools, each once."""
    return list(
        {
            id(one): one
            for one in (getattr(f, "__self__", None) for f in functions.values())
            if one is not None
        }.values()
    )


def _reset(instance: Any, prompt: Prompt) -> Any:
    """Tell an instance of the episode's prompt and its row's further columns, those that its reset names."""
    given, taken = {**prompt.fields, "prompt": prompt}, inspect.signature(instance.reset).parameters.values()
    takes_all = any(one.kind is one.VAR_KEYWORD for one in taken)
    return instance.reset(
        **{name: held for name, held in given.items() if takes_all or name in {one.name for one in taken}}
    )


def ended_process() -> Step:
    """What answers a turn whose tools ended their process, twice: which call it was is not known."""
    text = "Error: a tool ended its process"
    return Step([_result(0, UNREAD, text)], counts=_counts(1, 0, 1))


def _result(number: int, name: str, text: str) -> dict[str, str]:
    # an id of nine letters and digits, as Mistral's templates ask for; half characters are no text
    name, text = (one.encode(errors="replace").decode() for one in (name, text))
    return {"role": "tool", "name": name, "tool_call_id": f"call{number:05d}", "content": text}


async def _awaited(result: Any) -> Any:
    return await result


def _is_own(one: Any, module: str) -> bool:
    # functools.cache makes an object of it
    return inspect.isfunction(inspect.unwrap(one) if callable(one) else one) and one.__module__ == module


def _counts(num_calls: int, num_unparsed: int, num_failed: int) -> dict[str, float]:
    return dict(zip(COUNTED, map(float, (num_calls, num_unparsed, num_failed)), strict=True))


def _as_json(result: Any) -> str:
    try:
        return json.dumps(result, ensure_ascii=False)
    except (TypeError, ValueError):
        text = str(result)
    if " at 0x" in text:  # another text in every process
        raise TypeError(f"the tool returned a {type(result).__name__}; expected a text, or what JSON holds")
    return text


def _fault(function: Function, schema: Mapping[str, Any], arguments: Mapping[str, Any]) -> str:
    """What is wrong with a call's arguments; empty for nothing."""
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        return str(error)
    properties = schema.get("parameters", {}).get("properties", {})
    wrong = [name for name, given in arguments.items() if not _fits(given, properties.get(name, {}))]
    return "; ".join(
        f"{name}: expected {json.dumps(_wanted(properties[name]))}, got {json.dumps(arguments[name])[:80]}"
        for name in wrong
    )


def _wanted(schema: Mapping[str, Any]) -> Any:
    return schema.get("enum") or schema.get("type") or [_wanted(one) for one in schema.get("anyOf", ())]


def _fits(given: Any, schema: Mapping[str, Any]) -> bool:
    """Whether a value is of a schema's types, those of what it holds too."""
    if given is None and schema.get("nullable"):
        return True
    if any_of := schema.get("anyOf"):
        return any(_fits(given, one) for one in any_of)
    if "enum" in schema and given not in schema["enum"]:
        return False
    said = schema.get("type", ())
    types: Sequence[str] = [said] if isinstance(said, str) else said
    if types and not any(
        isinstance(given, _TYPES.get(one, (object,))) and (one == "boolean" or not isinstance(given, bool))
        for one in types
    ):
        return False
    if isinstance(given, list):
        return all(_fits(one, schema.get("items", {})) for one in given)
    if isinstance(given, dict):
        inner, more = schema.get("properties", {}), schema.get("additionalProperties", {})
        more = more if isinstance(more, dict) else {}
        return all(_fits(one, inner.get(key, more)) for key, one in given.items())
    return True
