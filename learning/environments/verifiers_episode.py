"""Environments of the package `verifiers`: its rollout asks the policy turn by turn, its rubric scores the end.

The rollout is the package's own (`Environment.run_rollout`), so setup, stop conditions, tools, cleanup and state are
as there; what it asks a model are our turns (`asked_turns`). The reward is the rubric's sum, its functions are parts.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from ...core.errors import ConfigError, DataError, EpisodeError
from ...core.records import Prompt
from ..data.verifiers_package import load
from .asked_turns import ClientProgram
from .environment_protocol import Observation, Step

_READ = frozenset(("prompt", "answer", "example_id", "tools"))
"Columns of its data set that a prompt holds anyway."


def maker(name: str) -> Callable[..., VerifiersEpisode]:
    """What makes an episode of `environment.options`. Raises ConfigError when called, as `load`."""
    return lambda **options: VerifiersEpisode(load(name, key="environment.kind", **options))


class VerifiersEpisode:
    """One rollout of such an environment."""

    def __init__(self, environment: Any) -> None:
        """Raises ConfigError: its rubric compares the samples of a prompt."""
        self._environment = environment
        self._program: ClientProgram | None = None
        self._tools: tuple[Any, ...] = ()
        if getattr(environment, "requires_group_rollouts", False):
            raise ConfigError(
                "the environment's rubric scores groups, and an episode is scored alone; give those functions to "
                "reward.kind with lists as arguments, and take them out of the rubric"
            )

    def require_prompt(self, prompt: Prompt) -> None:
        """Raise DataError for one that is no conversation, or lacks a column of the environment's data set."""
        if not prompt.messages:
            raise DataError(
                "expected a conversation, which verifiers asks with; set data.messages_field: prompt"
            )
        held = self._environment.dataset or self._environment.eval_dataset
        missing = [
            one for one in (held.column_names if held else ()) if one not in _READ | prompt.fields.keys()
        ]
        if missing:
            raise DataError(
                f"the environment's rows have {', '.join(missing)}, which its functions may read; set "
                f"data.reward_fields: [{', '.join(missing)}]"
            )

    def reset(self, prompt: Prompt) -> str:
        """Begin the rollout; returns what the environment adds to the prompt's last message."""
        messages = [dict(one) for one in prompt.conversation]
        row = {
            "example_id": prompt.prompt_id,
            "prompt": messages,
            "answer": prompt.reference,
            **prompt.fields,
        }
        config = importlib.import_module("verifiers.types").ClientConfig

        async def rollout(address: str) -> Any:
            client = config(api_base_url=address, api_key_var="RLHFSPEC_NO_KEY", max_retries=0)
            return await self._environment.run_rollout(row, client, "policy", {})

        self._tools = prompt.tools
        self._program = ClientProgram(rollout, messages[:-1])
        first = self._program.asked(self._tools)
        if first is None:
            raise EpisodeError(f"the rollout ended before its first question: {self._end().parts}")
        last = messages[-1]["content"]
        if (
            len(first) != 1
            or first[0]["role"] != messages[-1]["role"]
            or not first[0]["content"].startswith(last)
        ):
            raise EpisodeError(
                "the environment's first question is not its row's prompt; data.path: verifiers:NAME reads its rows"
            )
        return first[0]["content"].removeprefix(last)

    def step(self, response: str) -> Step:
        """Answer the rollout's question; the next one's further messages are the observation."""
        assert self._program is not None
        self._program.reply({"role": "assistant", "content": response})
        further = self._program.asked(self._tools)
        if further is None:
            return self._end()
        observation: Observation = further  # type: ignore[assignment]
        return Step(observation)

    def score_cut(self) -> Step:
        """Score what there is, as the package does where a prompt has become too long."""
        assert self._program is not None
        self._program.reply(None)
        if self._program.asked(self._tools) is not None:
            raise EpisodeError("the environment asks on behind an answer that has no room; let it end there")
        return self._end()

    def close(self) -> None:
        """End a rollout that is not over."""
        if self._program is not None:
            self._program.close()

    def _end(self) -> Step:
        """The score. Raises EpisodeError for a rollout that failed."""
        assert self._program is not None
        state = self._program.result()
        if error := state.get("error"):
            raise EpisodeError(f"the rollout failed: {error}")
        parts = {name: float(value) for name, value in (state.get("metrics") or {}).items()}
        return Step(reward=float(state["reward"]), done=True, parts=parts)
