"""The reward server on real Ray Serve: the pool's rewards, no sample lost with a replica, many askers, scaling."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import ray
from ray import serve
from tiny_reward_model import save_reward_model

from rlhfspec.actors.reward_server.reward_client import ServedReward
from rlhfspec.actors.reward_server.reward_deployment import build
from rlhfspec.actors.workers.reward_actors import RewardActor, RewardPool
from rlhfspec.cluster.ray_start.ray_init import free_ports
from rlhfspec.core.config import RewardConfig
from rlhfspec.core.errors import ConfigError, RewardServerLost
from rlhfspec.core.records import FinishReason, Prompt, ResponseFacts, Reward
from rlhfspec.learning.rewards.reward_function import build_reward
from rlhfspec.learning.rewards.score_request import score_requests
from rlhfspec.learning.tasks.chain_task import ALPHABET

pytestmark = [pytest.mark.ray, pytest.mark.slow]

WAIT_S = 300.0


@pytest.fixture(scope="module")
def port(local_ray) -> Iterator[int]:
    port = free_ports(1)[0]
    serve.start(http_options={"host": "127.0.0.1", "port": port}, logging_config={"log_level": "WARNING"})
    yield port
    serve.shutdown()


@pytest.fixture
def deploy(port) -> Iterator[Callable[..., str]]:
    """Deploy a server under a name; its URL. Deleted after the test."""
    names = []

    def make(name: str, **arguments) -> str:
        names.append(name)
        serve.run(build({"num_cpus": 0.2, **arguments}), name=name, route_prefix=f"/{name}")
        return f"http://127.0.0.1:{port}/{name}/score"

    yield make
    for name in names:
        serve.delete(name)


@pytest.fixture(scope="module")
def slow_url(port) -> str:
    """Of the application `slow`, for all tests: two replicas, whose rewards are lengths and take their time."""
    reward = {"kind": "odd_rewards:slow", "batch_size": 4}
    app = build({"num_cpus": 0.2, "reward": reward, "min_replicas": 2, "max_replicas": 2})
    serve.run(app, name="slow", route_prefix="/slow")
    return f"http://127.0.0.1:{port}/slow/score"


def pool(num_actors: int = 1, **section) -> RewardPool[int]:
    config = RewardConfig(**section)
    actors = [RewardActor.options(num_cpus=0).remote(f"reward-{i}", config) for i in range(num_actors)]
    return RewardPool(actors, timeout_s=WAIT_S, kind=config.title)


def samples(count: int, seed: int = 0):
    rng = np.random.default_rng(seed)
    prompts = [
        Prompt(prompt_id=i, token_ids=np.arange(2), text="03:c+5=", messages=(("user", "03:c+5="),))
        for i in range(count)
    ]
    responses = ["".join(rng.choice(list(ALPHABET), size=rng.integers(1, 60))) for _ in range(count)]
    facts = [
        ResponseFacts(sample_index=i, num_tokens=len(text), finish_reason=FinishReason.STOP)
        for i, text in enumerate(responses)
    ]
    return prompts, responses, facts


def send(pool: RewardPool[int], count: int, size: int, seed: int = 0) -> None:
    prompts, responses, facts = samples(count, seed)
    for start in range(0, count, size):
        cut = slice(start, start + size)
        pool.submit(range(count)[cut], prompts[cut], responses[cut], facts[cut])


def receive(pool: RewardPool[int], count: int, after: Callable[[list], None] = lambda scored: None):
    """All rewards by item, each of which must come once."""
    scored: list[tuple[int, Reward]] = []
    end_s = time.monotonic() + WAIT_S
    while len(scored) < count and time.monotonic() < end_s:
        scored += pool.collect(wait_s=1.0)
        after(scored)
    assert sorted(item for item, _ in scored) == list(range(count))
    return dict(scored)


def test_by_url_and_by_handle_a_server_gives_the_rewards_of_the_pool(deploy, tmp_path):
    path = save_reward_model(tmp_path, chat=True)
    url = deploy("model", model=path)
    # what an actor of the pool runs
    stage = build_reward(RewardConfig(kind="model", model=path))
    expected = [reward.value for reward in stage.score(*samples(40))]
    for section in ({"url": url}, {"app": "model"}):
        asked = pool(2, kind="serve", **section)
        send(asked, 40, 8)
        found = [reward.value for _, reward in sorted(receive(asked, 40).items())]
        assert found == pytest.approx(expected, abs=1e-6)
    assert len({round(value, 4) for value in expected}) > 30


@pytest.mark.parametrize("way", ["url", "app"])
def test_a_replica_killed_at_work_costs_no_sample(slow_url, way):
    asked = pool(2, kind="serve", **({"url": slow_url} if way == "url" else {"app": "slow"}))
    send(asked, 32, 4)
    killed: list[int] = []

    def kill(scored: list) -> None:
        if scored and not killed:
            killed.append(int(scored[0][1].parts["replica"]))
            os.kill(killed[0], signal.SIGKILL)

    rewards = receive(asked, 32, kill)
    assert killed
    responses = samples(32)[1]
    assert [rewards[i].value for i in range(32)] == [float(len(text)) for text in responses]


def test_two_runs_use_one_server_at_once_and_each_gets_its_own(slow_url):
    pools = [pool(1, kind="serve", url=slow_url), pool(1, kind="serve", app="slow")]
    for seed, one in enumerate(pools):
        send(one, 20, 5, seed)
    for seed, one in enumerate(pools):
        rewards = receive(one, 20)
        assert [rewards[i].value for i in range(20)] == [float(len(text)) for text in samples(20, seed)[1]]


def test_an_application_that_is_not_there_is_an_error_after_retries(port):
    lost = pool(1, kind="serve", app="nobody", server={"retries": 1, "backoff_s": 0.1})
    with pytest.raises(RewardServerLost, match="application nobody did not answer in 2 tries"):
        lost.check(timeout_s=WAIT_S)


def replicas(name: str) -> int:
    deployments = serve.status().applications[name].deployments.values()
    return sum(d.replica_states.get("RUNNING", 0) for d in deployments)


def test_load_starts_a_second_replica_and_its_end_takes_it_away(deploy):
    url = deploy(
        "scaled",
        reward={"kind": "odd_rewards:slow", "batch_size": 2},
        min_replicas=1,
        max_replicas=2,
        upscale_delay_s=1.0,
        downscale_delay_s=1.0,
    )
    assert replicas("scaled") == 1
    scorer = RewardConfig(kind="serve", url=url)
    is_over = threading.Event()
    seen: set[float] = set()

    def load() -> None:
        server = ServedReward(scorer, scorer.server)
        requests = score_requests(*samples(2))
        while not is_over.is_set():
            seen.update(o.parts["replica"] for o in server.outcomes(requests) if isinstance(o, Reward))

    def wait_for(count: int) -> None:
        end_s = time.monotonic() + WAIT_S
        while replicas("scaled") != count and time.monotonic() < end_s:
            time.sleep(0.2)
        assert replicas("scaled") == count

    with ThreadPoolExecutor(8) as threads:
        loads = [threads.submit(load) for _ in range(8)]
        try:
            wait_for(2)
            end_s = time.monotonic() + WAIT_S
            while len(seen) < 2 and time.monotonic() < end_s:
                time.sleep(0.2)
        finally:
            is_over.set()
        for one in loads:
            one.result()
    assert len(seen) == 2, "both replicas worked"
    wait_for(1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, None),
        ({"modl": "x"}, "modl"),
        ({"min_replicas": 3, "max_replicas": 2}, "min_replicas 3 is above max_replicas 2"),
        ({"reward": {"kind": "model"}}, "reward.model names none"),
        (
            {"reward": {"kind": "chain", "shaping": {"missing_eos_penalty": 1.0}}},
            "belongs to the config of the run",
        ),
        ({"reward": {"kind": "serve", "app": "other"}}, "cannot ask another"),
    ],
)
def test_arguments_that_cannot_be_served_are_refused_before_anything_starts(arguments, words):
    if words is None:
        assert isinstance(build(arguments), serve.Application)
        return
    with pytest.raises(ConfigError, match=words):
        build(arguments)


def test_a_dead_pool_actor_asks_the_server_again_for_what_it_had(slow_url):
    config = RewardConfig(kind="serve", url=slow_url)

    def make(actor: int, number: int):
        return RewardActor.options(num_cpus=0).remote(f"reward-{actor}-r{number}", config)

    first = make(0, 0)
    asked = RewardPool([first], timeout_s=WAIT_S, make=make, max_restarts=1)
    asked.check(timeout_s=WAIT_S)
    send(asked, 8, 4)
    ray.kill(first)
    assert [r.value for _, r in sorted(receive(asked, 8).items())] == [float(len(t)) for t in samples(8)[1]]
