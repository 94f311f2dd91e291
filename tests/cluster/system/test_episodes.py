"""Episodes: environments are reset with the data set's prompt, failed ones leave the batch, parts are kept."""

from typing import Any

import numpy as np
import pytest

from rlhfspec.cluster.system.episodes import Episodes
from rlhfspec.core.config import Config
from rlhfspec.core.config_io import config_from_dict
from rlhfspec.core.errors import EpisodeError
from rlhfspec.core.records import (
    Completion,
    FinishReason,
    Prompt,
    SampleKey,
    SampleRequest,
    SamplingParams,
    WeightSpan,
)
from rlhfspec.learning.environments.environment_protocol import Step, misspelt_attributes
from rlhfspec.learning.models.tokenization import character_tokenizer

TOKENIZER = character_tokenizer("abcdefghijklmnopqrstuvwxyz")


class Pool:
    """Answers the last question with what the test says."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, Prompt]] = []
        self.answers: list[Any] = []
        self.forgotten: list[SampleKey] = []
        self.cut = 0

    def ask(
        self, item: Any, key: SampleKey, prompt: Prompt, responses: tuple[str, ...], is_cut: bool = False
    ) -> None:
        self.asked.append((item, prompt))
        self.cut += is_cut

    def collect(self, *, wait_s: float) -> list:
        answers, self.answers = self.answers, []
        return [(self.asked[-1][0], answer) for answer in answers]

    def forget(self, key: SampleKey) -> None:
        self.forgotten.append(key)


def config(on_error: str, kind: str = "Parrot") -> Config:
    return config_from_dict(
        {
            "data": {"task": "chain"},
            "models": {"draft": "demo"},
            "environment": {
                "kind": f"sample_environments:{kind}",
                "on_error": on_error,
                "max_turns": 2 if kind == "Scoring" else 8,
            },
        }
    )


def request(text: str = "ask") -> SampleRequest:
    prompt = Prompt(prompt_id=0, token_ids=np.array(TOKENIZER.encode(text)), text=text)
    key = SampleKey(run_seed=0, sample_index=0)
    return SampleRequest(key=key, prompt=prompt, sampling=SamplingParams(max_new_tokens=40))


def completion(text: str, key: SampleKey) -> Completion:
    ids = np.array(TOKENIZER.encode(text))
    zeros = np.zeros(len(ids), dtype=np.float32)
    return Completion(
        key=key,
        prompt_id=0,
        group_id=0,
        epoch=0,
        token_ids=ids,
        policy_logprobs=zeros,
        sampling_logprobs=zeros,
        finish_reason=FinishReason.STOP,
        weight_spans=(WeightSpan(weight_version=0, first_position=0),),
        instance="i",
        num_decode_steps=1,
        num_accepted_tokens=0,
    )


def begun(on_error: str = "fail", kind: str = "Parrot") -> tuple[Episodes, Pool, list[SampleRequest]]:
    pool, queued = Pool(), []
    settings = config(on_error, kind)
    episodes = Episodes(settings.environment, TOKENIZER, pool, settings.data)  # type: ignore[arg-type]
    episodes.begin([request()])
    return episodes, pool, queued


def test_an_environment_is_always_reset_with_the_data_sets_prompt():
    episodes, pool, queued = begun()
    pool.answers = ["more"]
    episodes.advance([], queued.extend)
    assert queued[0].prompt.text == "askmore"
    episodes.advance([completion("a", queued[0].key)], queued.extend)
    assert [prompt.text for _, prompt in pool.asked] == ["ask", "ask"]


@pytest.mark.parametrize("at", ["reset", "step"])
def test_a_failed_episode_may_leave_the_batch_and_is_counted(at):
    episodes, pool, queued = begun("skip")
    ended: list[Completion] = []
    if at == "step":
        pool.answers = [None]
        episodes.advance([], queued.extend)
        ended = [completion("a", queued[0].key)]
    pool.answers = [EpisodeError("broke")]
    assert episodes.advance(ended, queued.extend) == []
    ((skipped, unscored),) = episodes.skipped()
    assert skipped.key == request().key and unscored.reason == "broke" and episodes.skipped() == []
    assert pool.forgotten == [skipped.key] and episodes.metrics()["environment/num_failed"] == 1.0


@pytest.mark.parametrize("fault", [None, EpisodeError("broke")])
def test_what_the_limits_cut_has_a_last_score_where_the_environment_gives_one(fault):
    episodes, pool, queued = begun("end", "Scoring")
    pool.answers = [None]
    episodes.advance([], queued.extend)
    pool.answers = [Step("b", reward=0.5, parts={"calls": 1.0})]
    episodes.advance([completion("a", queued[0].key)], queued.extend)
    pool.answers = [Step("b", parts={"calls": 1.0})]
    assert episodes.advance([completion("abc", queued[1].key)], queued.extend) == [] and pool.cut == 1
    pool.answers = [fault or Step(reward=2.0, parts={"cut": 1.0})]
    ((_, whole, _),) = episodes.advance([], queued.extend)
    reward = episodes.reward(whole.key)
    assert whole.finish_reason is FinishReason.LENGTH and episodes.metrics()[
        "environment/num_failed"
    ] == bool(fault)
    assert reward.value == (0.5 if fault else 2.5)
    assert reward.parts == {"calls": 2.0, "num_turns": 2.0} | ({} if fault else {"cut": 1.0})


def test_parts_of_the_steps_are_summed_and_kept_with_the_reward():
    episodes, pool, queued = begun()
    pool.answers = [None]
    episodes.advance([], queued.extend)
    pool.answers = [Step("b", reward=0.5, parts={"correct": 0.0, "calls": 1.0})]
    episodes.advance([completion("a", queued[0].key)], queued.extend)
    pool.answers = [Step(reward=1.0, done=True, parts={"correct": 1.0, "calls": 1.0})]
    ((asked, whole, _),) = episodes.advance([completion("abc", queued[1].key)], queued.extend)
    assert asked.key == whole.key
    reward = episodes.reward(whole.key)
    assert reward.value == 1.5 and reward.parts == {"correct": 1.0, "calls": 2.0, "num_turns": 2.0}
    assert episodes.spoken(whole.key)[0] == "a\nc"


def test_rewards_of_steps_that_nobody_takes_are_told_once():
    pool, queued, notes = Pool(), [], []
    settings = config("fail")
    episodes = Episodes(
        settings.environment, TOKENIZER, pool, settings.data, note=notes.append, gives_rewards=False
    )  # type: ignore[arg-type]
    episodes.begin([request()])
    for answer in (None, Step("b"), Step("b", reward=0.5), Step(parts={"correct": 1.0}, done=True)):
        assert not notes or answer.done
        pool.answers = [answer]
        episodes.advance([completion("a" * len(queued), queued[-1].key)] if queued else [], queued.extend)
    assert len(notes) == 1 and "set reward.kind: environment" in notes[0]


def test_attributes_that_are_near_to_those_that_are_read_are_told():
    class Own:
        stop_text, max_turn, raw, turns = ("a",), 3, True, 4

        def require_prompts(self, prompt: Prompt) -> None: ...

    said = misspelt_attributes(Own())  # type: ignore[arg-type]
    assert [line.split("'")[1] for line in said] == ["stop_text", "max_turn", "require_prompts"]
    assert "is it environment.max_turns of the config?" in said[1]
