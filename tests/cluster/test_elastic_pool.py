"""A pool that grows and shrinks while samples run makes the tokens of one process; nobody is lost, no place is kept.

On real actors with a tiny random pair. Sizes are forced: what pays on a busy machine is not for a test to say.
"""

import time
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import ray
from ray.util.placement_group import placement_group_table

from cluster.collect import collect
from cluster.placement.ray_session import RaySession
from cluster.preflight.inputs import read_inputs
from cluster.reporting.console import Reporter
from cluster.system import GeneratingSystem, running_generation
from core.config import Config
from core.config_io import config_from_dict
from core.records import SampleRequest
from engine.build import build_engine
from engine.weights.loading import load_causal_lm
from learning.data.cursor import PromptCursor
from learning.data.prompts import sampling_params
from policies.scaling.scaling_records import Resize
from policies.scheduling.members import InstanceState

pytestmark = [pytest.mark.ray]

SAMPLES = 24
LIMIT_S = 180.0


@pytest.fixture(scope="module")
def config(tiny_pair) -> Config:
    return config_from_dict(
        {
            "run": {"seed": 5},
            "models": {"target": str(tiny_pair.target), "draft": str(tiny_pair.draft)},
            "data": {"task": "chain", "limit": 64},
            "reward": {"kind": "sample_rewards:vowel_share", "batch_size": 4},
            "sampling": {"max_new_tokens": 100},
            "speculation": {"policy": "fixed", "num_nodes": 2, "depth": 2, "branching": 1},
            "engine": {"max_running_samples": 4},
            "cluster": {
                "generation": {"num_actors": 1, "max_actors": 3, "num_cpus": 0.5, "idle_timeout_s": 3600}
            },
            "reallocation": {"interval_s": 0.02},
        }
    )


class Steered(Reporter):
    """Changes the pool's size at given numbers of finished samples, as the scheduler's policy would."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[str] = []
        self.system: GeneratingSystem | None = None
        self.cursor: PromptCursor | None = None
        self.steps: list[tuple[int, str]] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def progress(self, phase: str, done: int, total: int) -> None:
        while self.steps and done >= self.steps[0][0]:
            what = self.steps.pop(0)[1]
            assert self.system is not None
            if what.startswith("grow"):
                change = Resize(target=int(what.split()[1]), reason="the test says so")
                self.system.generation.look(SimpleNamespace(left=(), resized=change))
            else:
                self.system.scheduler.leave(what, "the test says so")


@pytest.fixture(scope="module")
def steered(local_ray, config) -> Iterator[Steered]:
    session = RaySession(namespace="test-elastic", is_local=False, dashboard_url=None)
    report, inputs = Steered(), read_inputs(config)
    report.cursor = PromptCursor(inputs.dataset, run_seed=config.run.seed, shuffle=True)
    with running_generation(config, session, inputs, note=report.notes.append) as system:
        report.system = system
        yield report


def requests(steered: Steered, config: Config, count: int) -> list[SampleRequest]:
    assert steered.system is not None and steered.cursor is not None
    return steered.cursor.next_requests(count, 1, sampling_params(config.sampling, steered.system.tokenizer))


def alone(config: Config, asked: list[SampleRequest]) -> dict[int, tuple]:
    engine = build_engine(
        load_causal_lm(config.models.target, "float32"),
        None,
        engine=config.engine.model_copy(update={"max_running_samples": 7}),
        speculation=config.speculation.model_copy(update={"policy": "off"}),
        max_total_tokens=128,
    )
    return {c.key.sample_index: bits(c) for c in engine.generate(asked)}


def bits(completion) -> tuple:
    return completion.token_ids.tobytes(), completion.policy_logprobs.tobytes()


def own_bundles() -> int:
    """Placement groups of one bundle that are reserved now."""
    return sum(
        group["state"] == "CREATED" and len(group["bundles"]) == 1
        for group in placement_group_table().values()
    )


def serving(system: GeneratingSystem) -> list[str]:
    rows = system.generation._instances
    return sorted(name for name, row in rows.items() if row.state is InstanceState.SERVING)


def wait_for(steered: Steered, ready) -> None:
    """Let the loop look after the pool, without a sample, until `ready()`."""
    ends_s = time.monotonic() + LIMIT_S
    while not ready():
        assert time.monotonic() < ends_s, steered.notes
        steered.system.generation.look(steered.system.scheduler.take(0.05))


def test_a_pool_that_grows_and_shrinks_in_mid_iteration_makes_the_same_rollouts(steered, config):
    system = steered.system
    steered.system.generation.look(
        SimpleNamespace(left=(), resized=Resize(target=2, reason="the test says so"))
    )
    wait_for(steered, lambda: len(serving(system)) == 2)
    assert own_bundles() == 1
    # a third comes while the second is emptied
    steered.steps = [(0, "grow 3"), (6, "gen-1")]
    asked = requests(steered, config, 4 * SAMPLES)
    rollouts = collect(system, asked, steered).rollouts
    assert {r.completion.key.sample_index: bits(r.completion) for r in rollouts} == alone(config, asked)
    assert [r.completion.key.sample_index for r in rollouts] == [r.key.sample_index for r in asked]
    assert "gen-1" in {r.completion.instance for r in rollouts}, "it had taken samples before it left"
    wait_for(steered, lambda: serving(system) == ["gen-0", "gen-2"] and own_bundles() == 1)
    words = system.generation.last_words()
    assert words["gen-1"].spans and any("gen-1 has left" in note for note in steered.notes)
    assert not any("lost" in note for note in steered.notes)


def test_what_has_no_place_is_said_with_what_is_missing_and_the_run_goes_on(steered, config, monkeypatch):
    monkeypatch.setattr("cluster.scheduling.joiners.SAID_AFTER_S", 0.0)
    system, changes = steered.system, steered.system.generation._changes
    whole = changes._topology
    try:
        changes._topology = SimpleNamespace(added=lambda n: replace(whole.added(n), num_cpus=64.0))
        system.generation.look(SimpleNamespace(left=(), resized=Resize(target=3, reason="the test says so")))
        asked = requests(steered, config, 8)
        assert len(collect(system, asked, steered).rollouts) == 8
        wait_for(steered, lambda: any("has had no place" in note for note in steered.notes))
        (said,) = [note for note in steered.notes if "has had no place" in note]
        assert "it wants 64 CPU, the cluster has 4 CPU" in said and "missing: 6" in said
        assert "the run goes on with 2 instances" in said
        system.generation.look(SimpleNamespace(left=(), resized=Resize(target=2, reason="the test says so")))
        assert len(changes._joiners) == 0
    finally:
        changes._topology = whole


def test_a_start_that_fails_is_said_and_not_tried_again_at_once(steered, config):
    system, changes = steered.system, steered.system.generation._changes
    system.generation.look(SimpleNamespace(left=(), resized=Resize(target=3, reason="the test says so")))
    (joiner,) = changes._joiners._coming
    ray.kill(joiner.handle)
    wait_for(steered, lambda: any(f"{joiner.name} could not start" in note for note in steered.notes))
    count = len(steered.notes)
    system.generation.look(SimpleNamespace(left=(), resized=Resize(target=3, reason="the test says so")))
    assert len(steered.notes) == count and len(changes._joiners) == 0 and len(serving(system)) == 2
