"""What a reward server is asked and answers over HTTP, as JSON: POST /score. FastAPI shows it at /docs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Literal, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

from ...core.errors import RewardError
from ...core.records import FinishReason, Prompt, ResponseFacts, Reward, Unscored
from ...core.surfaces.surface import surface
from ...learning.rewards.score_request import ScoreRequest


class Message(BaseModel):
    """One turn of a chat."""

    model_config = ConfigDict(extra="forbid")

    role: str
    content: str
    more: dict[str, JsonValue] = {}
    "tool_calls, reasoning_content, name and what else it holds"


class Sample(BaseModel):
    """One response to score.

    A reward model reads `messages` where it has a chat template, else `rendered_prompt`, the text that the policy read,
    else `prompt`; functions are given `prompt`, and `fields` as further columns.
    """

    model_config = ConfigDict(extra="forbid")

    response: str
    prompt: str = ""
    rendered_prompt: str = ""
    prefill: str = ""
    messages: list[Message] = []
    tools: list[dict[str, JsonValue]] = []
    reference: str = ""
    prompt_id: int = 0
    fields: dict[str, JsonValue] = {}
    sample_index: int | None = None
    num_tokens: int | None = Field(default=None, ge=0)
    finish_reason: Literal["stop", "length"] | None = None
    turns: list[Message] = []
    "of an episode since the prompt, the assistant's last"
    num_given_tokens: int = Field(default=0, ge=0)
    token_ids: list[int] = []
    "of the response"
    weight_version: int = 0

    @model_validator(mode="after")
    def _require_whole_facts(self) -> Self:
        """What is known of a response is known together: a part of it would be dropped."""
        facts = (self.sample_index, self.num_tokens, self.finish_reason)
        if None in facts and (any(one is not None for one in facts) or self.turns or self.num_given_tokens):
            raise ValueError(
                "sample_index, num_tokens and finish_reason come together, and turns and num_given_tokens with them"
            )
        return self


class ScoreBody(BaseModel):
    """The body of POST /score. No sample at all is a way to ask whether the server is there."""

    model_config = ConfigDict(extra="forbid")

    samples: list[Sample]
    template_time: datetime | None = None
    "what chat templates are told when they ask the time; null: the server's clock"


class ScoredSample(BaseModel):
    """The reward of one sample, or in `error` why it has none."""

    value: float | None = None
    parts: dict[str, float] = {}
    tokens: tuple[float, ...] = ()
    error: str | None = None
    is_none: bool = False


class ScoreAnswer(BaseModel):
    """One reward a sample, in order."""

    rewards: list[ScoredSample]


def to_body(requests: Sequence[ScoreRequest]) -> ScoreBody:
    """What is sent. A prompt's token ids are not: the server has a tokenizer of its own."""
    return ScoreBody(
        template_time=requests[0].template_time if requests else None,
        samples=[
            Sample(
                response=request.response,
                prompt=request.prompt.text,
                rendered_prompt=request.prompt.rendered,
                prefill=request.prompt.prefill,
                messages=[_message(turn) for turn in request.prompt.conversation],
                tools=[dict(tool) for tool in request.prompt.tools],
                reference=request.prompt.reference,
                prompt_id=request.prompt.prompt_id,
                fields=request.prompt.fields,
                sample_index=request.facts.sample_index if request.facts else None,
                num_tokens=request.facts.num_tokens if request.facts else None,
                finish_reason=_reason(request.facts) if request.facts else None,
                num_given_tokens=request.facts.num_given_tokens if request.facts else 0,
                token_ids=list(request.facts.token_ids) if request.facts else [],
                weight_version=request.facts.weight_version if request.facts else 0,
                turns=[Message(role=role, content=text) for role, text in request.facts.turns]
                if request.facts
                else [],
            )
            for request in requests
        ],
    )


def from_body(body: ScoreBody) -> list[ScoreRequest]:
    """What is scored."""
    return [
        ScoreRequest(
            prompt=Prompt(
                prompt_id=sample.prompt_id,
                token_ids=np.empty(0, dtype=np.int64),
                text=sample.prompt,
                rendered=sample.rendered_prompt,
                prefill=sample.prefill,
                fields=dict(sample.fields),
                reference=sample.reference,
                messages=tuple((message.role, message.content) for message in sample.messages),
                turns=_whole(sample.messages),
                tools=tuple(sample.tools),
            ),
            response=sample.response,
            facts=_facts(sample),
            place=place,
            template_time=body.template_time,
        )
        for place, sample in enumerate(body.samples)
    ]


def _message(turn: Mapping[str, Any]) -> Message:
    more = {key: held for key, held in turn.items() if key not in ("role", "content")}
    return Message(role=turn["role"], content=turn["content"], more=more)


def _whole(messages: Sequence[Message]) -> tuple[dict[str, Any], ...]:
    """The turns, where they hold more than role and content."""
    if not any(message.more for message in messages):
        return ()
    return tuple({"role": one.role, "content": one.content, **one.more} for one in messages)


def _reason(facts: ResponseFacts) -> Literal["stop", "length"]:
    """What is cut to go on later is not scored."""
    return "stop" if facts.finish_reason is FinishReason.STOP else "length"


def _facts(sample: Sample) -> ResponseFacts | None:
    if sample.sample_index is None or sample.num_tokens is None or sample.finish_reason is None:
        return None
    return ResponseFacts(
        sample_index=sample.sample_index,
        num_tokens=sample.num_tokens,
        finish_reason=FinishReason(sample.finish_reason),
        num_given_tokens=sample.num_given_tokens,
        token_ids=tuple(sample.token_ids),
        weight_version=sample.weight_version,
        turns=tuple((turn.role, turn.content) for turn in sample.turns),
    )


def to_answer(outcomes: Sequence[Reward | Unscored]) -> ScoreAnswer:
    """What is answered."""
    return ScoreAnswer(
        rewards=[
            ScoredSample(value=outcome.value, parts=outcome.parts, tokens=outcome.tokens)
            if isinstance(outcome, Reward)
            else ScoredSample(error=outcome.reason, is_none=outcome.is_none)
            for outcome in outcomes
        ]
    )


def read_answer(content: bytes, whose: str) -> list[Reward | Unscored]:
    """The same, of bytes. Raises ValidationError for no answer, RewardError for one with what nothing here reads."""
    given = ScoreAnswer.model_validate_json(content)
    raw = json.loads(content)
    surface("reward.answer").require(raw, f"the answer of {whose}", error=RewardError)
    for number, entry in enumerate(raw["rewards"]):
        surface("reward.answer.rewards").require(entry, f"reward {number} of {whose}", error=RewardError)
    return from_answer(given)


def from_answer(answer: ScoreAnswer) -> list[Reward | Unscored]:
    """What the asking side goes on with."""
    return [
        Reward(value=scored.value, parts=scored.parts, tokens=scored.tokens)
        if scored.value is not None
        else Unscored(
            reason=scored.error or "the reward server gave neither a value nor an error",
            is_none=scored.is_none,
        )
        for scored in answer.rewards
    ]
