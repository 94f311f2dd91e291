"""Gymnasium's classes as they lie: texts as actions, observations as texts, info's numbers as parts, a seed each."""

import json
import subprocess
import sys

import numpy as np
import pytest
from sample_environments import CountDown, Parrot

from rlhfspec.benchmarks.peers.build import library_folder
from rlhfspec.core.config import EnvironmentConfig
from rlhfspec.core.errors import ConfigError, EpisodeError
from rlhfspec.core.records import Prompt, SampleKey
from rlhfspec.learning.environments.environment_protocol import (
    Step,
    begun,
    checked_step,
    closed,
    environment_maker,
)
from rlhfspec.learning.environments.gym_classes import GymEpisode, is_gym

PROMPT = Prompt(prompt_id=0, token_ids=np.arange(2), text="count down", fields={"from": 3})


def key(index: int) -> SampleKey:
    return SampleKey(run_seed=3, sample_index=index)


def made(kind: str = "sample_environments:CountDown", **options):
    return environment_maker(EnvironmentConfig(kind=kind, options=options))()


def test_a_class_whose_reset_takes_no_prompt_is_gymnasiums_and_ours_stay():
    assert is_gym(CountDown) and not is_gym(Parrot)
    assert isinstance(made(), GymEpisode) and isinstance(made("sample_environments:Parrot"), Parrot)

    class AnyNames(Parrot):
        def reset(self, *whatever): ...

    class Before026(Parrot):
        def reset(self, seed=None): ...

    assert not is_gym(AnyNames) and is_gym(Before026)


@pytest.mark.parametrize("old", [False, True])
def test_an_episode_is_played_in_texts_in_either_api(old):
    episode = made(old=old)
    assert begun(episode, PROMPT, key(0)) == "\n[3 0]", "on a line of its own, from the row's fields"
    assert checked_step(episode.step("jump")) == Step(
        "not an action: 'jump', expected a whole number from 1 to 2", parts={"invalid_actions": 1.0}
    )
    assert checked_step(episode.step("7")).parts == {"invalid_actions": 1.0}
    assert checked_step(episode.step(" 1\n")) == Step(
        "[2 1]", reward=0.5, parts={"invalid_actions": 0.0, "left": 2.0, "near": 0.0}
    )
    last = checked_step(episode.step("2"))
    assert last.done and last.reward == 0.5 and last.parts["near"] == 1.0


def test_the_seed_is_the_samples_own_and_the_same_again():
    seeds = []
    for index in (0, 1, 0):
        episode = made()
        begun(episode, PROMPT, key(index))
        seeds.append(episode._environment.seed)
    assert seeds[0] == seeds[2] != seeds[1]


def test_what_holds_something_is_closed():
    episode = made()
    closed(episode)
    assert episode._environment.closed


def test_a_space_that_no_text_spells_and_a_step_that_is_none_are_refused():
    with pytest.raises(ConfigError, match="action_space is Box; expected Discrete"):
        made(space="Box")
    episode = made(space="")
    begun(episode, PROMPT, key(0))
    with pytest.raises(EpisodeError, match=r"expected step to return \(observation, reward, terminated"):
        episode.step("three")
    with pytest.raises(
        ConfigError, match=r"gymnasium:Blackjack-v1: Gymnasium cannot be imported .*install gymnasium"
    ):
        made("gymnasium:Blackjack-v1")


def test_an_environment_of_gymnasiums_by_its_name():
    folder = library_folder("gymnasium")
    if folder is None:
        pytest.skip("Gymnasium is not there: python -m rlhfspec.benchmarks.peers.build --only gymnasium")
    code = f"""
import json, sys
sys.path.insert(0, {str(folder)!r})
from rlhfspec.core.config import EnvironmentConfig
from rlhfspec.core.records import Prompt, SampleKey
from rlhfspec.learning.environments.environment_protocol import begun, environment_maker
make = environment_maker(EnvironmentConfig(kind="gymnasium:Taxi-v4"))
episodes = [make(), make()]
asked = Prompt(prompt_id=0, token_ids=()), SampleKey(run_seed=1, sample_index=2)
first, again = (begun(one, *asked) for one in episodes)
steps = [episodes[0].step(text) for text in ("north", "1", "1")]
print(json.dumps([first, again, *[[step.observation, step.reward] for step in steps]]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    first, again, refused, *moved = json.loads(done.stdout.splitlines()[-1])
    assert first == again and first.strip().isdigit()
    assert refused == ["not an action: 'north', expected a whole number from 0 to 5", 0.0]
    assert [reward for _, reward in moved] == [-1.0, -1.0] and moved[0][0].isdigit()
