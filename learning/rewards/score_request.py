"""One response on its way to its reward, and what each part of a reward answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol, runtime_checkable

from ...core.errors import RewardError
from ...core.records import Prompt, ResponseFacts, Reward, Unscored


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRequest:
    """One response to score."""

    prompt: Prompt
    response: str
    "what the policy said; an episode's turns joined, without what the environment said"
    facts: ResponseFacts | None = None
    place: int = 0
    "in the batch"
    template_time: datetime | None = None
    "what a reward model's chat template is told; None: the clock's"

    @property
    def messages(self) -> tuple[tuple[str, str], ...]:
        """(role, content) of what was said before `last_turn`; empty for plain text."""
        return self.prompt.messages + (self.facts.turns[:-1] if self.facts else ())

    @property
    def turns(self) -> tuple[Mapping[str, Any], ...]:
        """The same whole: with tool calls, reasoning and names, where the row has them."""
        since = self.facts.turns[:-1] if self.facts else ()
        return self.prompt.conversation + tuple({"role": role, "content": content} for role, content in since)

    @property
    def last_turn(self) -> str:
        """What the assistant said last; of plain text all behind the prompt, what an environment said too."""
        return self.facts.turns[-1][1] if self.facts and self.facts.turns else self.response

    @property
    def whole_turn(self) -> str:
        """The same behind what the prompt began the assistant's turn with, where there are messages."""
        return (self.prompt.prefill if self.messages else "") + self.last_turn

    @property
    def where(self) -> str:
        """Names the sample in messages."""
        index = f"{self.place} of the batch" if self.facts is None else str(self.facts.sample_index)
        return f"sample {index} (prompt {self.prompt.prompt_id})"

    @property
    def shown(self) -> str:
        """How prompt, reference and response begin, for messages: a prompt's number is no line of a file."""
        texts = {"prompt": self.prompt.text, "reference": self.prompt.reference, "response": self.response}
        return ", ".join(
            f"{name} began '{text[:60]}'" for name, text in texts.items() if text or name == "response"
        )


def score_requests(
    prompts: Sequence[Prompt],
    responses: Sequence[str],
    facts: Sequence[ResponseFacts] | None = None,
    template_time: datetime | None = None,
) -> list[ScoreRequest]:
    """One request a response."""
    return [
        ScoreRequest(
            prompt=prompt,
            response=text,
            place=place,
            facts=facts[place] if facts else None,
            template_time=template_time,
        )
        for place, (prompt, text) in enumerate(zip(prompts, responses, strict=True))
    ]


def groups(requests: Sequence[ScoreRequest]) -> Iterator[list[int]]:
    """The places of each prompt's samples, in the order of the sample index; whose group nobody knows is alone."""
    found: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for place, request in enumerate(requests):
        facts, name, index = request.facts, ("alone", place), place
        if facts is not None and facts.group_id is not None:
            name, index = ("group", facts.group_id), facts.sample_index
        found.setdefault(name, []).append((index, place))
    for members in found.values():
        yield [place for _, place in sorted(members)]


@runtime_checkable
class RewardSource(Protocol):
    """One kind of reward, for many responses at once."""

    def outcomes(self, requests: Sequence[ScoreRequest]) -> Iterable[Reward | Unscored]:
        """One answer a request, in order; whoever has read enough may stop reading.

        Raises what is no sample's fault, such as a server that is down.
        """
        ...


class RuleSource:
    """A rule, response by response: what it cannot score does not take others with it."""

    def __init__(self, rule: Callable[[Prompt, str], Reward]) -> None:
        """`rule` needs prompt and response only (`learning.tasks`); it raises RewardError naming the prompt."""
        self._rule = rule

    def outcomes(self, requests: Sequence[ScoreRequest]) -> Iterable[Reward | Unscored]:
        """As the protocol says."""
        for request in requests:
            try:
                yield self._rule(request.prompt, request.response)
            except RewardError as error:
                yield Unscored(reason=f"{error} ({request.where})")
