"""A pool that grows and shrinks while samples run makes the tokens of one process; nobody is lost, no place is kept.

On real actors with a tiny random pair. Sizes are forced: what pays on a busy machine is not for a test to say.
"""

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import ray
from steered_pool import SteeredPool, bits, bits_alone, own_bundles, tiny_config

pytestmark = [pytest.mark.ray, pytest.mark.long]


@pytest.fixture(scope="module")
def pool(local_ray, tiny_pair) -> Iterator[SteeredPool]:
    config = tiny_config(
        tiny_pair.target, tiny_pair.draft, num_actors=1, max_actors=3, num_cpus=0.5, idle_timeout_s=3600
    )
    with SteeredPool(config).running() as pool:
        yield pool


def test_a_pool_that_grows_and_shrinks_in_mid_iteration_makes_the_same_rollouts(pool):
    pool.resize(2)
    pool.wait_for(lambda: len(pool.serving) == 2)
    assert own_bundles() == 1
    asked, steps = pool.requests(64), [(0, lambda: pool.resize(3)), (6, lambda: leave("gen-1"))]

    def leave(name: str) -> None:
        pool.system.scheduler.leave(name, "the test says so")

    def at(done: int) -> None:
        while steps and done >= steps[0][0]:
            # a third comes while the second is emptied
            steps.pop(0)[1]()

    rollouts = pool.collect(asked, at)
    assert bits(rollouts) == bits_alone(pool.config, asked)
    assert [r.completion.key.sample_index for r in rollouts] == [r.key.sample_index for r in asked]
    pool.wait_for(lambda: pool.serving == ["gen-0", "gen-2"] and own_bundles() == 1)
    assert pool.system.generation.final_reports()["gen-1"].spans and pool.has_said("gen-1 has left")
    assert not pool.has_said("lost")


def test_what_has_no_place_is_said_with_what_is_missing_and_the_run_goes_on(pool, monkeypatch):
    monkeypatch.setattr("rlhfspec.cluster.system.starting_and_leaving.LOGGED_AFTER_S", 0.0)
    changes = pool.system.generation._changes
    greedy = SimpleNamespace(added=lambda n, added=changes._topology.added: replace(added(n), num_cpus=64.0))
    with monkeypatch.context() as wish:
        wish.setattr(changes, "_topology", greedy)
        pool.resize(3)
    asked = pool.requests(8)
    assert len(pool.collect(asked)) == 8
    pool.wait_for(lambda: pool.has_said("has had no place"))
    (said,) = [note for note in pool.notes if "has had no place" in note]
    assert "it wants 64 CPU, the cluster has 4 CPU" in said and "missing: 6" in said
    assert "the run goes on with 2 instances" in said
    pool.resize(2)
    assert len(changes._starting) == 0


def test_a_start_that_fails_is_said_and_not_tried_again_at_once(pool):
    changes = pool.system.generation._changes
    pool.resize(3)
    (joiner,) = changes._starting._coming
    ray.kill(joiner.handle)
    pool.wait_for(lambda: pool.has_said(f"{joiner.name} could not start"))
    count = len(pool.notes)
    pool.resize(3)
    assert len(pool.notes) == count and len(changes._starting) == 0 and len(pool.serving) == 2
