"""Rewards of turns and of tokens: from what gives them to the advantages, through files and servers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from made_rollouts import rollout

from rlhfspec.actors.reward_server.score_schema import read_answer, to_answer
from rlhfspec.cluster.folder.rollouts import SCHEMA, locations_in, read_recorded, write_rollouts
from rlhfspec.cluster.verify.verification import reward_differences
from rlhfspec.core.config import AlgorithmConfig, RewardConfig, TrainerConfig
from rlhfspec.core.errors import NumericsError, RewardError
from rlhfspec.core.records import (
    FinishReason,
    Prompt,
    ResponseFacts,
    Reward,
    Rollout,
    SampleKey,
    SampleRequest,
    SamplingParams,
    Unscored,
)
from rlhfspec.learning.environments.episode import Episode, EpisodeLimits
from rlhfspec.learning.rewards.reward_function import build_reward
from rlhfspec.learning.training.experience import collate
from rlhfspec.learning.training.learner import Learner
from rlhfspec.learning.training.objectives.advantages import normalized_sum, token_rewards

PAYS = {"kind": "odd_rewards:pays_tokens"}


def paid(*tokens: float, value: float | None = None, **settings: int) -> Rollout:
    made = rollout(num_tokens=len(tokens), **settings)
    return replace(made, reward=Reward(value=sum(tokens) if value is None else value, tokens=tokens))


def score(reward: RewardConfig, response: str = "abc", num_tokens: int = 3) -> Reward | Unscored:
    facts = ResponseFacts(sample_index=5, num_tokens=num_tokens, finish_reason=FinishReason.STOP)
    prompt = Prompt(prompt_id=0, token_ids=np.array([1]), text="q", reference="#### 7")
    return build_reward(reward).score_each([prompt], [response], [facts])[0]


def test_a_function_pays_each_sampled_token_and_one_number_too_many_is_refused() -> None:
    assert score(RewardConfig(**PAYS)) == Reward(value=0.2, tokens=(0.1, 0.1, 0.0), parts={"why": 1.0})
    refused = score(RewardConfig(**PAYS, on_error="skip"), "bad")
    assert isinstance(refused, Unscored)
    assert refused.reason.startswith(
        "sample 5 (prompt 0) has 3 sampled tokens (num_tokens, the end token counts), "
    )
    assert "its reward 4 numbers under 'tokens'" in refused.reason
    with pytest.raises(RewardError, match="4 numbers under 'tokens'"):
        score(RewardConfig(**PAYS), "bad")


def test_a_mixture_weighs_tokens_and_scaling_and_shaping_leave_the_rest_to_the_last_one() -> None:
    part = {**PAYS, "name": "a", "weight": 2.0, "std": 0.5, "mean": 1.0}
    parts = [part, {"kind": "odd_rewards:fine", "name": "b"}, {**PAYS, "name": "c", "weight": 0.5}]
    found = score(RewardConfig.model_validate({"parts": parts, "shaping": {"length_penalty": 1.0}}))
    assert isinstance(found, Reward)
    assert found.tokens == pytest.approx((2 * 0.1 / 0.5 + 0.05, 2 * 0.1 / 0.5 + 0.05, 0.0))
    assert found.value == pytest.approx(2 * (0.2 - 1.0) / 0.5 + 3.0 + 0.1 - 3.0)


def test_a_turn_is_paid_on_its_last_sampled_token_and_one_reward_at_the_end_stays_what_it_was() -> None:
    def tokens_of(*rewards: float) -> tuple[float, ...]:
        asked = SampleRequest(
            key=SampleKey(run_seed=0, sample_index=0),
            prompt=Prompt(prompt_id=0, token_ids=np.array([1])),
            sampling=SamplingParams(max_new_tokens=1),
        )
        episode = Episode(asked, EpisodeLimits(max_turns=1, max_turn_tokens=None))
        for size, reward in zip((3, 4, 7), rewards, strict=True):
            completion = rollout(num_tokens=size + 2).completion
            # two of them were given by the environment
            sampled = np.arange(size + 2) >= 2
            episode.goes_on(
                replace(completion, sampled=sampled), np.zeros(0, dtype=np.int64), reward=reward, done=True
            )
        return episode.token_rewards(7)

    assert tokens_of(1.0, 0.5, 2.0) == (0.0, 0.0, 1.0, 0.5, 0.0, 0.0, 2.0)
    assert tokens_of(0.0, 0.0, 2.0) == ()


def test_what_a_token_is_not_paid_the_last_one_is() -> None:
    made = [paid(0.5, 0.0, -1.0, 0.0, index=0, value=2.0), rollout(1, reward=3.0, num_tokens=2)]
    experience = collate(made, pad_token_id=0)
    assert experience.rewards.tolist() == [2.0, 3.0]
    none = torch.zeros(experience.mask.shape)
    assert token_rewards(experience, none).tolist() == [[0.5, 0.0, -1.0, 2.5], [0.0, 3.0, 0.0, 0.0]]
    short = replace(made[1], reward=Reward(value=1.0, tokens=(1.0,)))
    with pytest.raises(NumericsError, match="has 1 numbers for tokens, expected one for each of the 2"):
        collate([made[0], short], pad_token_id=0)


@pytest.mark.parametrize("kind", ["reinforce_pp", "grpo", "ppo"])
def test_estimators_of_tokens_read_them_and_those_of_groups_their_sum(
    kind: str, make_model: Callable, make_rollouts: Callable
) -> None:
    def learned(place: int | None) -> tuple[float, ...]:
        algorithm = AlgorithmConfig.model_validate(
            {"kind": kind, "gamma": 0.5} if kind != "grpo" else {"kind": kind}
        )
        model = make_model()
        learner = Learner(
            model, algorithm=algorithm, trainer=TrainerConfig(), temperature=1.0, seed=5, pad_token_id=0
        )
        made = make_rollouts(model, reward=lambda tokens: float(len(tokens)))
        for at, one in enumerate(made):
            tokens = [0.0] * one.completion.num_tokens
            tokens[place or 0] = one.reward.value
            reward = one.reward if place is None else replace(one.reward, tokens=tuple(tokens))
            made[at] = replace(one, reward=reward)
        return learner.update(made).sample_advantages or ()

    at_the_end, on_the_last, on_the_first = learned(None), learned(-1), learned(0)
    assert at_the_end == on_the_last and len(at_the_end) > 1
    assert (on_the_first == at_the_end) is (kind == "grpo")


def test_parts_are_compared_by_themselves_where_the_config_says_so(
    make_model: Callable, make_rollouts: Callable
) -> None:
    algorithm = {"kind": "grpo", "advantage": "batch_std", "combine": "normalize_then_sum", "kl_coef": 0.0}
    weights = {"a": 1.0, "b": 0.25}
    learner = Learner(
        make_model(),
        algorithm=AlgorithmConfig.model_validate(algorithm),
        trainer=TrainerConfig(),
        temperature=1.0,
        seed=5,
        pad_token_id=0,
        part_weights=weights,
    )
    made = make_rollouts(learner.model, reward=lambda tokens: 0.0)
    numbers = torch.randn((len(made), 2), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for at, one in enumerate(made):
        parts = dict(zip(weights, numbers[at].tolist(), strict=True))
        made[at] = replace(one, reward=Reward(value=0.0, parts=parts))
    groups = torch.tensor([one.completion.group_id for one in made])
    summed = normalized_sum(numbers, [*weights.values()], groups)
    expected = summed / (summed.std() + 1e-4)
    assert learner.update(made).sample_advantages == pytest.approx(expected.tolist(), rel=1e-5)


def test_files_keep_them_and_are_otherwise_what_they_were(tmp_path: Path) -> None:
    one, other = paid(0.5, 0.1, 0.0, index=0, value=2.0), rollout(1, reward=3.0)
    for name, made in (("plain", [other]), ("paid", [one, other])):
        file = tmp_path / f"{name}_000001.parquet"
        write_rollouts(file, made)
        again = read_recorded(locations_in(file))
        assert [r.rollout.reward for r in again] == [r.reward for r in made]
        assert (pq.read_schema(file).names == SCHEMA.names) is (name == "plain")
    changed = replace(one.reward, tokens=(0.5, 0.2, 0.0))
    assert [(d.what, d.expected, d.got) for d in reward_differences("f", 0, one.reward, changed)] == [
        ("reward of token 1", "0.2", "0.1")
    ]


def test_a_reward_server_gives_them() -> None:
    sent = to_answer([Reward(value=2.0, tokens=(0.5, 1.5)), Reward(value=1.0)])
    assert read_answer(sent.model_dump_json().encode(), "server") == [
        Reward(value=2.0, tokens=(0.5, 1.5)),
        Reward(value=1.0),
    ]
