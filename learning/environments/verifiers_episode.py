"""Environments of the package `verifiers`: its rollout asks the policy turn by turn, its rubric scores the end.

The rollout is the package's own (`Environment.run_rollout`), so setup, stop conditions, tools, cleanup and state are
as there; the client that it asks is ours, and each question is a turn. The reward is the rubric's sum, its functions
are parts. Turns are never encoded anew, so a question must go on from what was said.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import queue
import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from ...core.config import EnvironmentConfig
from ...core.errors import ConfigError, DataError, EpisodeError
from ...core.records import Prompt
from ..data.chat.tool_calls import CallParser, as_turn
from ..data.verifiers_package import of, schemas
from .environment_protocol import Step

_READ = frozenset(("prompt", "answer", "example_id"))
"Columns of its data set that a prompt holds anyway."
_IS_HUNG_S = 2.0


def maker(config: EnvironmentConfig, parser: CallParser | None) -> Callable[..., VerifiersEpisode]:
    """What makes an episode of `environment.options`. Raises ConfigError: it cannot be one of ours."""
    environment, where = of(config), f"environment.kind {config.kind}"
    if environment.requires_group_rollouts:
        raise ConfigError(
            f"{where}: its rubric scores groups, and an episode is scored alone; give those functions to reward.kind "
            "with reward.scope: group, and take them out of the rubric"
        )
    if config.max_turn_tokens is not None or getattr(environment, "max_total_completion_tokens", 0) > 0:
        raise ConfigError(
            f"{where}: expected no environment.max_turn_tokens and no max_total_completion_tokens, as the package "
            "would not learn of turns that are cut, nor of their tokens; set sampling.max_new_tokens"
        )
    return lambda **_: VerifiersEpisode(environment, parser)


class VerifiersEpisode:
    """One rollout of such an environment."""

    def __init__(self, environment: Any, parser: CallParser | None = None) -> None:
        """`parser`: of calls, where the environment has tools."""
        self._environment, self._parser = environment, parser
        self._questions: queue.SimpleQueue[tuple[list, Any, Any, asyncio.Future] | None] = queue.SimpleQueue()
        self._known: list[tuple[str, str]] = []
        "role and text of what was said"
        self._names: dict[str, str] = {}
        "of the tools that were called last, by the ids of their calls"

    def require_prompt(self, prompt: Prompt) -> None:
        """Raise DataError for one that is no conversation, or lacks a column of the environment's data set."""
        if not prompt.messages:
            raise DataError(
                "expected a conversation, which verifiers asks with; set data.messages_field: prompt"
            )
        held = self._environment.dataset or self._environment.eval_dataset
        missing = (
            [one for one in held.column_names if one not in _READ | prompt.fields.keys()] if held else []
        )
        if missing:
            raise DataError(
                f"the environment's rows have {', '.join(missing)}, which its functions may read; set "
                f"data.reward_fields: [{', '.join(missing)}]"
            )

    def reset(self, prompt: Prompt) -> str:
        """Begin the rollout; returns what the environment adds to the prompt's last message."""
        if prompt.tools and self._parser is None:
            raise EpisodeError("tools need a parser of their calls, which a run has")
        self._prompt = prompt
        said = [dict(one) for one in prompt.conversation]
        row = {"example_id": prompt.prompt_id, "prompt": said, "answer": prompt.reference, **prompt.fields}
        rollout = self._environment.run_rollout(row, _client(self._ask), "policy", {})
        self._loop = _loop()
        self._rollout = asyncio.run_coroutine_threadsafe(rollout, self._loop)
        self._rollout.add_done_callback(lambda _: self._questions.put(None))
        self._known = [_plain(one) for one in said[:-1]]
        first = self._further()
        if first is None:
            raise EpisodeError(f"the rollout ended before its first question: {self._end().parts}")
        role, text = _plain(said[-1])
        if len(first) != 1 or first[0]["role"] != role or not first[0]["content"].startswith(text):
            raise EpisodeError(
                "the environment's first question is not its row's prompt; data.path: verifiers:NAME reads its rows"
            )
        return first[0]["content"].removeprefix(text)

    def step(self, response: str) -> Step:
        """Answer the rollout's question; the next one's further messages are the observation."""
        message: dict[str, Any] = {"content": response, "finish_reason": "stop", "is_truncated": False}
        if self._parser is not None:
            prompt = self._prompt
            turn = as_turn(self._parser.of_episode(response, prefill=prompt.prefill, tools=prompt.tools))
            calls = [
                # nine letters and digits, as Mistral's templates ask for
                {"id": f"call{number:05d}", "name": one.name, "arguments": json.dumps(one.arguments)}
                for number, one in enumerate(turn.calls)
            ]
            self._names = {one["id"]: one["name"] for one in calls}
            message |= {"content": "".join((turn.content, *turn.unparsed))}
            message |= {"reasoning_content": turn.reasoning or None, "tool_calls": calls or None}
            message |= {"finish_reason": "tool_calls" if calls else "stop"}
        self._known.append(("assistant", message["content"]))
        response_type = importlib.import_module("verifiers.types").Response
        self._reply(response_type(id="turn", created=0, model="policy", message=message))
        further = self._further()
        return self._end() if further is None else Step(further)

    def score_cut(self) -> Step:
        """Score what there is, as the package does where a prompt has become too long."""
        self._reply(importlib.import_module("verifiers.errors").OverlongPromptError())
        if self._further() is not None:
            raise EpisodeError("the environment asks on behind an answer that has no room; let it end there")
        return self._end()

    def close(self) -> None:
        """End a rollout that is not over."""
        self._rollout.cancel()
        try:
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self._loop).result(_IS_HUNG_S)
        except TimeoutError:
            _loop.cache_clear()  # a step blocks it, maybe for ever: later episodes have another

    async def _ask(self, prompt: Any, sampling: Any, tools: Any) -> Any:
        reply = self._loop.create_future()
        self._questions.put((prompt, sampling, tools, reply))
        return await reply

    def _reply(self, answer: Any) -> None:
        give = self._open.set_exception if isinstance(answer, Exception) else self._open.set_result
        # by then the package may have ended the rollout, for its own limit of time
        self._loop.call_soon_threadsafe(lambda reply=self._open: reply.done() or give(answer))

    def _further(self) -> list[dict[str, Any]] | None:
        """Wait for the next question; what it adds to what was said, None: the rollout has ended.

        Raises EpisodeError for a question that does not go on from there, or asks for what no turn has.
        """
        question = self._questions.get()
        if question is None:
            return None
        messages, sampling, tools, self._open = question
        shown = schemas(tools)
        if sampling or [*shown] != [*self._prompt.tools]:
            raise EpisodeError(
                f"the environment asks with sampling {sampling or 'as ours'} and the tools {_names(shown)}, expected "
                f"sampling as the config says and {_names(self._prompt.tools)}; let it ask for nothing else"
            )
        said, known = [_plain(one) for one in messages], self._known
        if said[: len(known)] != known:
            place = next(
                (i for i, pair in enumerate(zip(said, known, strict=False)) if pair[0] != pair[1]), -1
            )
            raise EpisodeError(
                f"the environment's question does not go on from what was said before (message {place} differs, or is "
                "missing); turns of one sample are one conversation: let it keep that, and ask one thing at a time"
            )
        self._known = said
        return [self._shown(role, text, one) for (role, text), one in zip(said, messages, strict=True)][
            len(known) :
        ]

    def _shown(self, role: str, text: str, message: Any) -> dict[str, Any]:
        call = _field(message, "tool_call_id")
        named = {"name": self._names.get(call, call), "tool_call_id": call} if call else {}
        return {"role": role, "content": text, **named}

    def _end(self) -> Step:
        """The score. Raises EpisodeError for a rollout that failed."""
        state = self._rollout.result()
        if error := state.get("error"):
            raise EpisodeError(f"the rollout failed: {error}")
        parts = {name: float(value) for name, value in (state.get("metrics") or {}).items()}
        return Step(reward=float(state["reward"]), done=True, parts=parts)


def _client(ask: Callable[..., Any]) -> Any:
    """A client of the package's whose answers are `ask`'s."""
    base = importlib.import_module("verifiers.clients").Client
    unused = dict.fromkeys(getattr(base, "__abstractmethods__", ()))

    def get_response(
        _: Any, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **state: Any
    ) -> Any:
        return ask(prompt, sampling_args, tools)

    own = {"get_response": get_response, "__init__": lambda _: None, "_config": None, "_client": None}
    return type("PolicyClient", (base,), unused | own)()


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """Of all episodes of a process: the clients and locks of an environment belong to one loop."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True, name="verifiers-rollouts").start()
    return loop


def _field(message: Any, name: str) -> Any:
    return message.get(name) if isinstance(message, dict) else getattr(message, name, None)


def _plain(message: Any) -> tuple[str, str]:
    """Role and text of a message. Raises EpisodeError for pictures and sound."""
    content = _field(message, "content") or ""
    if not isinstance(content, str):
        if any(_field(part, "type") != "text" for part in content):
            raise EpisodeError(
                "the environment shows pictures or sound, which are not read; let it show text"
            )
        content = "".join(_field(part, "text") for part in content)
    return _field(message, "role"), content


def _names(tools: Sequence[Any]) -> str:
    return ", ".join(str(one["function"]["name"]) for one in tools) or "none"
