"""The reward pool: batches come back beside their rewards, and a bad reward function is named."""

import os
import signal
import time

import numpy as np
import pytest
import ray

from rlhfspec.actors.workers.reward_actors import RewardActor, RewardPool
from rlhfspec.core.config import RewardConfig
from rlhfspec.core.errors import ConfigError, InstanceLost, RewardError, WaitTimeout
from rlhfspec.core.records import Prompt

pytestmark = pytest.mark.ray


@pytest.fixture
def make_pool(local_ray):
    def make(kind: str, num_actors: int = 1, timeout_s: float = 60.0) -> RewardPool[int]:
        config = RewardConfig(kind=kind)
        actors = [RewardActor.options(num_cpus=0).remote(f"reward-{i}", config) for i in range(num_actors)]
        return RewardPool(actors, timeout_s=timeout_s, kind=kind)

    return make


def prompts(count: int) -> list[Prompt]:
    return [Prompt(prompt_id=i, token_ids=np.arange(2), text="p") for i in range(count)]


def test_a_reward_function_in_the_drivers_folder_is_found_where_workers_have_another(local_ray, tmp_path):
    """As in a joined cluster, whose workers know nothing of the folder that the run was started in."""
    (tmp_path / "only_here.py").write_text(
        "def score(prompt, response, reference):\n    return len(response)\n"
    )
    config = RewardConfig(kind="only_here:score")
    actor = RewardActor.options(num_cpus=0).remote("reward-0", config, str(tmp_path))
    pool = RewardPool([actor], timeout_s=60.0)
    pool.submit([0], prompts(1), ["abc"])
    assert pool.collect(wait_s=60.0)[0][1].value == 3.0


def test_items_come_back_with_their_own_rewards_from_every_actor(make_pool):
    pool = make_pool("sample_rewards:vowel_share", num_actors=2)
    pool.check(timeout_s=60)
    assert pool.num_idle
    pool.submit([0, 1], prompts(2), ["aaaa", "xyzt"])
    assert pool.num_idle
    pool.submit([2], prompts(1), ["ae--"])
    assert not pool.num_idle
    scored = []
    while len(scored) < 3:
        scored += pool.collect(wait_s=5.0)
    assert {item: reward.value for item, reward in scored} == {0: 1.0, 1: 0.0, 2: 0.5}


def test_a_reward_that_is_not_finite_surfaces_as_itself_naming_the_sample(make_pool):
    pool = make_pool("sample_rewards:broken")
    pool.submit([0], prompts(1), ["abc"])
    with pytest.raises(RewardError, match=r"sample_rewards:broken, sample 0 .*nan") as caught:
        pool.collect(wait_s=60.0)
    assert type(caught.value) is RewardError and "\n" not in str(caught.value)


def test_a_reward_function_that_cannot_be_imported_is_an_error_before_the_run(make_pool):
    with pytest.raises(ConfigError) as caught:
        make_pool("sample_rewards:no_such_function").check(timeout_s=60.0)
    assert "no_such_function" in str(caught.value)


def test_a_reward_function_that_leaves_the_process_is_an_error_of_its_own(make_pool):
    pool = make_pool("sample_rewards:leaving")
    pool.submit([0], prompts(1), ["a"])
    with pytest.raises(RewardError, match=r"sample_rewards:leaving, sample 0 .* raised SystemExit: 3"):
        pool.collect(wait_s=60.0)


def test_a_reward_function_that_hangs_is_named_with_what_to_do(make_pool):
    pool = make_pool("sample_rewards:hanging", timeout_s=0.5)
    pool.submit([0], prompts(1), ["a"])
    with pytest.raises(
        WaitTimeout, match=r"'score 1 responses with sample_rewards:hanging'.*fix the function"
    ):
        for _ in range(20):
            pool.collect(wait_s=0.2)


def killed(actor) -> None:
    """Kill an actor's process from outside, and wait until it is gone."""
    pid = ray.get(actor.__ray_call__.remote(lambda self: os.getpid()), timeout=60)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(actor.score.remote([], []), timeout=60)


def test_samples_of_a_dead_reward_actor_are_scored_again_and_reported_in_one_line(local_ray):
    config, made, actors, notes = RewardConfig(kind="sample_rewards:vowel_share"), [], [], []

    def make(actor: int, number: int):
        made.append((actor, number))
        actors.append(RewardActor.options(num_cpus=0).remote(f"reward-{actor}-r{number}", config))
        return actors[-1]

    first = make(0, 0)
    pool = RewardPool([first], timeout_s=60.0, make=make, max_restarts=1, note=notes.append)
    killed(first)
    pool.submit([0, 1], prompts(2), ["aaaa", "xyzt"])
    pool.submit([2], prompts(1), ["ae--"])
    scored = []
    while len(scored) < 3:
        scored += pool.collect(wait_s=5.0)
    assert {item: reward.value for item, reward in scored} == {0: 1.0, 1: 0.0, 2: 0.5} and len(scored) == 3
    assert made == [(0, 0), (0, 1)]
    (note,) = notes
    assert note.startswith("reward-0 died while the loop waited for 'score 2 responses with")
    assert note.endswith("reward-0-r1 takes its place and scores 3 samples again")

    killed(actors[-1])
    pool.submit([3], prompts(1), ["aaaa"])
    with pytest.raises(
        InstanceLost,
        match=r"all 1 replacements of reward-0 within an hour are used up.*max_instance_restarts",
    ):
        pool.collect(wait_s=60.0)


def test_a_slow_reward_actor_that_lives_is_missed_and_neither_killed_nor_asked_again(local_ray):
    first = RewardActor.options(num_cpus=0).remote("reward-0", RewardConfig(kind="sample_rewards:hanging"))
    pool = RewardPool(
        [first],
        timeout_s=8.0,
        heartbeat_timeout_s=4.0,
        make=lambda actor, number: pytest.fail("replaced"),
        max_restarts=3,
        note=lambda text: None,
    )
    pool.check(timeout_s=60.0)
    pool.submit([0], prompts(1), ["a"])
    ends_s = time.monotonic() + 60.0
    with pytest.raises(WaitTimeout, match=r"the loop waited 8 s for reward-0 .*it takes too long"):
        while time.monotonic() < ends_s:
            pool.collect(wait_s=0.2)
    ray.get(first.alive.remote(), timeout=60)


def test_a_frozen_reward_actor_is_replaced_and_its_samples_are_scored_again(local_ray):
    config, notes = RewardConfig(kind="sample_rewards:vowel_share"), []
    first = RewardActor.options(num_cpus=0).remote("reward-0", config)
    other = RewardActor.options(num_cpus=0).remote("reward-0-r1", config)
    pool = RewardPool(
        [first],
        timeout_s=600.0,
        heartbeat_timeout_s=2.0,
        make=lambda actor, number: other,
        max_restarts=1,
        note=notes.append,
    )
    pool.check(timeout_s=60.0)
    pid = ray.get(first.__ray_call__.remote(lambda self: os.getpid()), timeout=60)
    ray.get(other.score.remote([], []), timeout=60)
    os.kill(pid, signal.SIGSTOP)
    pool.submit([0, 1], prompts(2), ["aaaa", "xyzt"])
    pool.submit([2], prompts(1), ["ae--"])
    scored = []
    while len(scored) < 3:
        scored += pool.collect(wait_s=0.2)
    assert {item: reward.value for item, reward in scored} == {0: 1.0, 1: 0.0, 2: 0.5} and len(scored) == 3
    (note,) = notes
    assert note.startswith("reward-0 gave no sign of life for ")
    assert note.endswith("takes its place and scores 3 samples again")
