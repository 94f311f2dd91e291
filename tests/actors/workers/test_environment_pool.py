"""The environment pool: answers beside their items, bad steps named, dead actors' episodes played again."""

import numpy as np
import pytest
import ray
from sample_environments import Calls

from rlhfspec.actors.workers.environment_actors import EnvironmentActor, EnvironmentPool
from rlhfspec.core.config import EnvironmentConfig
from rlhfspec.core.errors import ConfigError, EpisodeError
from rlhfspec.core.records import Prompt, SampleKey

pytestmark = pytest.mark.ray
TIMEOUT_S = 120.0


def key(index: int) -> SampleKey:
    return SampleKey(run_seed=3, sample_index=index)


def prompt(text: str = "p") -> Prompt:
    return Prompt(prompt_id=0, token_ids=np.arange(2), text=text)


@pytest.fixture
def make_pool(local_ray):
    pools = []

    def make(kind: str, *, num_actors: int = 1, restarts: int = 0, parser=None, **settings):
        config = EnvironmentConfig(kind=kind, **{"timeout_s": TIMEOUT_S} | settings)

        def start(actor: int, number: int):
            name = f"environment-{actor}-{number}"
            return EnvironmentActor.options(num_cpus=0, max_concurrency=4).remote(name, config, None, parser)

        actors = [start(actor, 0) for actor in range(num_actors)]
        pools.extend(actors)
        notes: list[str] = []
        pool = EnvironmentPool(
            actors,
            config,
            order_timeout_s=TIMEOUT_S,
            make=start,
            max_restarts=restarts,
            note=notes.append,
        )
        return pool, notes

    yield make
    for actor in pools:
        ray.kill(actor)


def answers(pool: EnvironmentPool, count: int) -> dict:
    found: dict = {}
    while len(found) < count:
        found.update(pool.collect(wait_s=1.0))
    return found


def test_answers_come_back_beside_their_items_from_every_actor(make_pool):
    pool, _ = make_pool("sample_environments:Parrot", num_actors=2)
    pool.check(timeout_s=TIMEOUT_S)
    for index in range(4):
        pool.ask(index, key(index), prompt(), ())
    assert answers(pool, 4) == dict.fromkeys(range(4))
    for index in range(4):
        pool.ask(index, key(index), prompt(), (f"x{index}",))
    assert {i: step.observation for i, step in answers(pool, 4).items()} == {i: f"{i}x" for i in range(4)}
    assert pool.num_asked == 0


@pytest.mark.parametrize(
    ("said", "what"),
    [
        ("raise", "raised KeyError: 'no such tool'"),
        ("exit", "raised SystemExit: 3"),
        ("number", "expected a Step with observation, reward, done, got int"),
        ("nan", "expected a finite reward"),
    ],
)
def test_a_bad_step_is_named_with_environment_sample_and_turn(make_pool, said, what):
    pool, _ = make_pool("sample_environments:Wayward")
    pool.ask("item", key(7), prompt(), ("fine", said))
    error = answers(pool, 1)["item"]
    assert isinstance(error, EpisodeError)
    assert "environment sample_environments:Wayward, sample 7 (seed 3), turn 1" in str(error)
    assert what in str(error)
    assert str(error).endswith("fix the environment; environment.on_error: end or skip lets the run go on")


def test_a_step_that_hangs_is_named_and_holds_up_nobody(make_pool):
    pool, _ = make_pool("sample_environments:Wayward", timeout_s=5.0, on_error="skip")
    pool.ask("hung", key(1), prompt(), ("hang",))
    pool.ask("other", key(2), prompt(), ("abc",))
    found = pool.collect(wait_s=TIMEOUT_S)
    assert [item for item, _ in found] == ["other"], "it is answered while the other hangs"
    error = answers(pool, 1)["hung"]
    assert isinstance(error, EpisodeError) and "turn 0 has not answered for 5 s" in str(error)
    assert str(error).endswith("fix it, or raise the limit"), "what is set already is not advised"


def test_a_step_that_ends_its_process_again_and_again_takes_no_other_episode_with_it(make_pool):
    pool, notes = make_pool("sample_environments:Wayward", on_error="end", restarts=1)
    for name, text in (("bad", "segfault"), ("good", "abc"), ("worse", "kill -9"), ("fine", "abcd")):
        pool.ask(name, key(len(name)), prompt(), (text,))
    assert pool.num_asked == 4
    found = answers(pool, 4)
    assert found["good"].observation == "cba" and found["fine"].observation == "dcba"
    for name, number in (("bad", 3), ("worse", 5)):
        assert f"sample {number} (seed 3), turn 0 has ended its process twice" in str(found[name])
    assert pool.num_asked == 0 and 2 <= len(notes) <= 4


def test_a_tool_that_ends_its_process_is_an_observation_and_no_other_call_s(make_pool):
    pool, _ = make_pool("tools", tools="sample_environments:leaves,stays", parser=Calls())
    for number, name in enumerate(("leaves", "stays")):
        pool.ask(name, key(number), prompt(), (name,))
    found = answers(pool, 2)
    said = {name: [one["content"] for one in step.observation] for name, step in found.items()}
    assert said == {"leaves": ["Error: a tool ended its process"], "stays": ["here"]}
    assert [found[name].counts["tool_calls_failed"] for name in said] == [
        1.0 * (name == "leaves") for name in said
    ]


def test_what_is_cut_is_scored_by_an_actor_that_never_saw_it_too(make_pool):
    pool, _ = make_pool("sample_environments:Scoring")
    pool.ask("cut", key(1), prompt(), ("a", "b"), is_cut=True)
    assert (answers(pool, 1)["cut"].reward, pool.num_asked) == (2.0, 0)


def test_a_dead_actors_episodes_are_played_again_by_the_next(make_pool, tmp_path):
    pool, notes = make_pool(
        "sample_environments:Counting", options={"marker": str(tmp_path / "died")}, restarts=1
    )
    for index, text in enumerate(("dies", "lives")):
        pool.ask(index, key(index), prompt(text), ())
    answers(pool, 2)
    said: list[tuple[str, ...]] = [(), ()]
    for turn in range(3):
        for index in range(2):
            said[index] = (*said[index], f"turn {turn}")
            pool.ask(index, key(index), prompt(("dies", "lives")[index]), said[index])
        found = answers(pool, 2)
        assert [found[i].observation for i in range(2)] == [f"{turn + 1}:turn {turn}"] * 2
    (note,) = notes
    assert "environment-0-r1 takes its place" in note


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("sample_environments:Nothing", "has no 'Nothing'"),
        ("no_such_module:Class", "cannot import no_such_module"),
        ("sample_environments:NoSteps", "methods reset and step"),
        ("just words", "names no class"),
        ("sample_environments:Counting", "environment.options"),
    ],
)
def test_a_class_that_cannot_be_made_is_refused_before_anything_runs(make_pool, kind, what):
    pool, _ = make_pool(kind)
    with pytest.raises(ConfigError, match=what):
        pool.check(timeout_s=TIMEOUT_S)
