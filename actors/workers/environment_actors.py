"""Environment pool: actors that run episodes' environments, and the client that asks them.

An episode stays with one actor while that lives. Every call names all turns so far, so an actor that does not know the
episode (it took a dead one's place) plays them again. Each call runs on a thread of its own and has a limit of time: a
slow step holds up nothing but its episode.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import ray

from ...core.config import EnvironmentConfig
from ...core.errors import EpisodeError, InputError, one_line
from ...core.named_code import import_from_too
from ...core.records import Prompt, SampleKey
from ...learning.data.chat.tool_calls import CallParser
from ...learning.environments.environment_protocol import (
    Environment,
    Step,
    begun,
    checked_step,
    closed,
    environment_maker,
)
from ...learning.environments.tools import ended_process
from ..remote.actor_start import begin_actor
from ..remote.remote import Handle, remote
from ..remote.stateless_pool import HEARTBEAT_S, PoolKind, Replace, StatelessPool
from ..remote.waiting import ActorDied

T = TypeVar("T")
_TO_ANSWER_S = 5.0
Answer = Step | str | None
"Of a step, or of a reset."


@dataclass(slots=True)
class _Running:
    environment: Environment
    num_steps: int = 0


@remote(concurrency_groups={"control": 1})
class EnvironmentActor:
    """Runs the environments of some episodes, several at once."""

    def __init__(
        self,
        name: str,
        config: EnvironmentConfig,
        caller_dir: str | None = None,
        parser: CallParser | None = None,
    ) -> None:
        """`caller_dir`: the driver's folder, for code of the user's; `parser`: of calls, for kind tools."""
        begin_actor(name)
        import_from_too(caller_dir)
        self._name = name
        self._config, self._parser = config, parser
        # tools have the limit of a step themselves, and answer by then
        self._timeout_s = config.timeout_s + (_TO_ANSWER_S if config.kind == "tools" else 0.0)
        self._make: Callable[[], Environment] | None = None
        self._running: dict[SampleKey, _Running] = {}

    def __repr__(self) -> str:
        return f"EnvironmentActor({vars(self).get('_name', 'not made')})"

    @ray.method(concurrency_group="control")
    def alive(self) -> None:
        """Answer at once, whatever the environments are at."""

    def check(self) -> None:
        """Make one environment. Raises ConfigError."""
        closed(self._maker()())

    def answer(
        self, key: SampleKey, prompt: Prompt, responses: tuple[str, ...], is_cut: bool = False
    ) -> Answer:
        """Answer an episode's last turn, or begin it where there is none; `is_cut`: score what ends behind that turn.

        Raises EpisodeError, naming environment, sample and turn, for what raises, returns no step, or takes too long.
        """
        answers: list[Any] = []

        def run() -> None:
            try:
                answers.append(self._answer(key, prompt, responses, is_cut))
            except BaseException as error:  # the user's code may raise anything, sys.exit included
                answers.append(error)

        # a thread that hangs cannot be ended: it is left behind, and ends with the process
        thread = threading.Thread(target=run, daemon=True, name=f"episode-{key.sample_index}")
        thread.start()
        thread.join(self._timeout_s)
        where = describe(self._config, key, len(responses))
        if not answers:
            self._drop(key)
            raise EpisodeError(
                f"{where} has not answered for {self._config.timeout_s:.0f} s (environment.timeout_s); fix it, or "
                f"raise the limit{self._advice}"
            )
        answer = answers[0]
        if isinstance(answer, BaseException):
            self._drop(key)
        if isinstance(answer, EpisodeError):
            raise EpisodeError(f"{where}: {answer}; fix the environment{self._advice}")
        if isinstance(answer, InputError):
            raise answer
        if isinstance(answer, BaseException):
            raise EpisodeError(
                f"{where} raised {type(answer).__name__}: {one_line(str(answer))[:200]}; fix the environment"
                + self._advice
            )
        return answer

    def forget(self, keys: Sequence[SampleKey]) -> None:
        """Drop episodes that end without being done."""
        for key in keys:
            self._drop(key)

    def _drop(self, key: SampleKey) -> None:
        if (known := self._running.pop(key, None)) is not None:
            # on a thread of its own: whoever hangs in a step may hang there too
            threading.Thread(target=closed, args=(known.environment,), daemon=True).start()

    def _answer(self, key: SampleKey, prompt: Prompt, responses: tuple[str, ...], is_cut: bool) -> Answer:
        known, earlier = self._running.get(key), responses if is_cut else responses[:-1]
        if not responses or known is None or known.num_steps != len(earlier):
            self._drop(key)
            known = self._running[key] = _Running(self._maker()())
            first = begun(known.environment, prompt, key)
            if not responses:
                return first
            for response in earlier if getattr(known.environment, "replays", True) else ():
                known.environment.step(response)
        ending: Any = known.environment
        step = checked_step(ending.score_cut() if is_cut else ending.step(responses[-1]))
        known.num_steps = len(responses)
        if step.done or is_cut:
            self._drop(key)
        return step

    @property
    def _advice(self) -> str:
        """What else helps, where it is not done already."""
        goes_on = self._config.on_error != "fail"
        return "" if goes_on else "; environment.on_error: end or skip lets the run go on"

    def _maker(self) -> Callable[[], Environment]:
        # not in the constructor, so that its error arrives as itself
        if self._make is None:
            self._make = environment_maker(self._config, self._parser)
        return self._make


def describe(config: EnvironmentConfig, key: SampleKey, num_responses: int) -> str:
    """Name environment, sample and turn."""
    what = f"turn {num_responses - 1}" if num_responses else "reset"
    return f"environment {config.kind}, sample {key.sample_index} (seed {key.run_seed}), {what}"


@dataclass(frozen=True, slots=True)
class _Asked(Generic[T]):
    item: T
    key: SampleKey
    prompt: Prompt
    responses: tuple[str, ...]
    is_cut: bool = False


class EnvironmentPool(Generic[T]):
    """Asks the actors; `items` come back beside their answers. One episode is with one actor."""

    def __init__(
        self,
        actors: Sequence[Handle],
        config: EnvironmentConfig,
        *,
        order_timeout_s: float,
        heartbeat_timeout_s: float = HEARTBEAT_S,
        make: Replace | None = None,
        max_restarts: int = 0,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        """A pool around living actors: `environment-0`, `environment-1`, ... in this order.

        Args:
            actors: each an `EnvironmentActor`.
            config: of their environments.
            order_timeout_s: how long an actor may go without an answer beyond a step's own limit.
            heartbeat_timeout_s: how long one that is asked may give no sign of life.
            make: makes the n-th replacement (from 1) of the i-th actor; None replaces none.
            max_restarts: replacements of each actor within an hour.
            note: told of every replacement, one line.
        """
        self._config = config
        pool_kind: PoolKind[_Asked[T]] = PoolKind(
            stem="environment",
            call=lambda actor, asked: actor.answer.remote(
                asked.key, asked.prompt, asked.responses, asked.is_cut
            ),
            order=lambda asked: f"answer for {describe(config, asked.key, len(asked.responses))}",
            timeout_s=config.timeout_s + order_timeout_s,
            heartbeat_timeout_s=heartbeat_timeout_s,
            again=lambda _: "plays its episodes again",
            culprit="the environment",
            late_advice="look at its stack in the Ray dashboard",
            gives_up=None if config.on_error == "fail" and config.kind != "tools" else self._gives_up,
        )
        self._actors = StatelessPool(actors, pool_kind, make=make, max_restarts=max_restarts, note=note)

    @property
    def num_asked(self) -> int:
        """Questions without an answer."""
        return self._actors.num_open

    def check(self, *, timeout_s: float) -> None:
        """Let every actor make an environment. Raises what that raises."""
        order = f"make an environment {self._config.kind}"
        self._actors.check(lambda actor: actor.check.remote(), order=order, timeout_s=timeout_s)

    def ask(
        self, item: T, key: SampleKey, prompt: Prompt, responses: tuple[str, ...], *, is_cut: bool = False
    ) -> None:
        """Let an episode's last turn be answered, begin the episode, or score one that is cut; the caller goes on."""
        self._actors.ask(self._actor_of(key), _Asked(item, key, prompt, responses, is_cut))

    def collect(self, *, wait_s: float) -> list[tuple[T, Answer | EpisodeError]]:
        """Return what has been answered, waiting up to `wait_s` for the first; an error of a step is an answer too.

        Raises WaitTimeout when an actor takes too long, ActorDied when one died or froze more often than it may be
        replaced.
        """
        answers = self._actors.answers(wait_s=wait_s, errors=(EpisodeError,))
        return [(asked.item, answer) for asked, answer in answers]

    def forget(self, key: SampleKey) -> None:
        """Let an episode's environment go."""
        self._actors.send(self._actor_of(key), lambda actor: actor.forget.remote([key]))

    def _gives_up(self, asked: _Asked[T], death: ActorDied) -> Step | EpisodeError:
        if self._config.kind == "tools":
            return ended_process()
        where = describe(self._config, asked.key, len(asked.responses))
        return EpisodeError(f"{where} has ended its process twice ({one_line(str(death))[:200]}); fix it")

    def _actor_of(self, key: SampleKey) -> int:
        return key.sample_index % len(self._actors)
