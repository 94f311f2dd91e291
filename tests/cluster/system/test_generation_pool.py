"""The generation pool tells of every instance that is lost, and replaces it beside the run. No Ray."""

from dataclasses import replace

import pytest
import ray
from ray.exceptions import RayActorError
from scripted_pool import LOST, ScriptedPool, weights

from rlhfspec.actors.remote.restart_budget import WINDOW_S
from rlhfspec.cluster.system.replacement_and_resizing import INCIDENT_S, IncidentBudget
from rlhfspec.core.errors import InstanceLost, RlhfSpecError, WaitTimeout


@pytest.fixture
def world(monkeypatch) -> ScriptedPool:
    return ScriptedPool(monkeypatch)


def test_the_first_instances_come_up_together_in_their_order(world):
    assert world.scheduler.joined == ["gen-0", "gen-1"] and not world.notes
    assert [row.node for row in world.table.values()] == ["node-0", "node-1"]


def test_a_first_instance_that_cannot_start_ends_the_start_with_its_reason(monkeypatch):
    world = ScriptedPool(monkeypatch, up=False)
    world.dead = {"gen-1"}
    world.pool.make_all()
    with pytest.raises(InstanceLost, match="gen-1 died"):
        world.pool.bring_up(world.weights)


def test_an_instance_that_died_between_rollouts_is_found_at_the_publication_and_nobody_waits(world):
    world.dead, world.slow = {"gen-0"}, {"gen-0-r1"}
    world.pool.publish(weights(1))
    assert world.notes == ["instance gen-0 was lost (gen-0 died: SIGKILL); gen-0-r1 takes its place"]
    assert world.serving == ["gen-1"] and world.scheduler.lost == ["gen-0"]
    world.look()
    assert world.serving == ["gen-1"], "it still loads"
    # what is published meanwhile is sent after it: it never samples from an older version
    world.pool.publish(weights(2))
    world.slow.clear()
    world.look()
    assert world.serving == ["gen-0-r1", "gen-1"] and world.actors["gen-0-r1"].loaded == [1, 2]
    assert world.counted == {("lost_actors", "generation"): 1, ("replaced_actors", "generation"): 1}


def test_a_publication_tells_the_cause_that_the_scheduler_saw(world):
    world.dead, world.slow = {"gen-0"}, {"gen-0-r1"}
    world.scheduler.seen = {"gen-0": "died: its process vanished"}
    world.pool.publish(weights(1))
    assert world.notes == ["instance gen-0 was lost (died: its process vanished); gen-0-r1 takes its place"]


def test_numerics_that_promise_less_than_bits_are_reported_once(world):
    assert world.pool.is_invariant
    world.numerics = replace(world.numerics, promise="fast: the distribution (engine.num_threads is 2)")
    for name in ("gen-0", "gen-1"):
        world.lose(name)
        world.look()
    assert not world.pool.is_invariant
    assert world.said("numerics") == [
        "numerics on gen-0-r1: fast: the distribution (engine.num_threads is 2)"
    ]


def test_an_instance_that_rounds_by_other_code_is_named_and_bits_are_promised_no_more(world):
    world.numerics = replace(world.numerics, rounds_by="torch 2.13.0 on a processor")
    world.lose("gen-1")
    world.look()
    assert not world.pool.is_invariant
    (told,) = world.said("numerics")
    assert told.startswith(
        "numerics on gen-1-r1: it rounds by torch 2.13.0 on a processor, the first instance by "
    )


def test_a_replacement_is_reported_once_with_the_number_of_requeued_samples(world):
    assert world.lose("gen-1", num_requeued=3) == "gen-1-r1" and world.lose("gen-1") is None
    assert world.notes == [
        f"instance gen-1 was lost ({LOST}); 3 samples were queued again; gen-1-r1 takes its place"
    ]


def test_an_instance_that_is_lost_again_and_again_is_replaced_until_the_restarts_are_used_up(world):
    for number, name in enumerate(("gen-0", "gen-0-r1"), start=1):
        assert world.lose(name) == f"gen-0-r{number}"
        world.look()
    with pytest.raises(InstanceLost, match="all 2 replacements within an hour are used up"):
        world.lose("gen-0-r2")


def test_the_instances_of_a_node_that_dies_are_one_restart():
    now_s = 0.0
    budget = IncidentBudget(1, clock=lambda: now_s)
    for place in ("gen-0", "gen-1", "gen-2"):
        budget.spend(place=place, node="node-0", what="a machine died")
    with pytest.raises(InstanceLost, match=r"^a machine died and all 1 replacements .* used up"):
        budget.spend(place="gen-1", node="node-0", what="a machine died")


@pytest.mark.parametrize(("node", "after_s"), [("", 0.0), ("node-1", 0.0), ("node-0", INCIDENT_S + 1.0)])
def test_what_is_lost_elsewhere_or_later_counts_for_itself(node, after_s):
    now_s = 0.0
    budget = IncidentBudget(1, clock=lambda: now_s)
    budget.spend(place="gen-0", node=node and "node-0", what="died")
    now_s = after_s
    with pytest.raises(InstanceLost):
        budget.spend(place="gen-1", node=node, what="died")


def test_incidents_of_a_week_are_all_made_good():
    now_s = 0.0
    budget = IncidentBudget(1, clock=lambda: now_s)
    for _ in range(20):
        budget.spend(place="gen-0", node="node-0", what="died")
        now_s += WINDOW_S


def test_a_replacement_that_cannot_start_gives_its_place_back_and_is_tried_again_there(world):
    world.dead.add("gen-0-r1")
    world.lose("gen-0")
    world.look()
    (said,) = world.said("gen-0-r1 could not start")
    assert "the run goes on with 1 instances, and none is started for 30 s" in said
    assert len(world.actors) == 3, "not at once"
    world.look(after_s=31.0)
    world.look()
    assert world.serving == ["gen-1", "gen-2"] and world.actors["gen-2"].place.bundle == 0
    assert not world.own and world.counted["replaced_actors", "generation"] == 1


def test_a_lost_node_is_waited_for_beside_the_run_and_what_is_missing_is_said_within_a_minute(world):
    world.nodes.remove("node-0")
    world.lose("gen-0", num_requeued=2)
    for _ in range(20):
        world.look(after_s=3.0)
    assert world.serving == ["gen-1"] and not world.actors["gen-0-r1"].loaded
    (said,) = world.said("no place")
    assert said.startswith("gen-0-r1 has had no place for 2") and "the run goes on with 1 instances" in said
    # the time without a place is none of its start
    world.look(after_s=100000.0)
    world.put_first(0, "node-9")
    world.look()
    assert world.serving == ["gen-0-r1", "gen-1"] and world.table["gen-0-r1"].node == "node-9"


def test_a_place_that_goes_with_its_node_while_one_starts_there_is_waited_for_again(world):
    world.slow.add("gen-0-r1")
    world.lose("gen-0")
    world.look()
    world.nodes.remove("node-0")
    world.look(after_s=1000.0)
    assert not world.said("could not start")
    world.slow.clear()
    world.put_first(0, "node-9")
    world.look()
    assert world.serving == ["gen-0-r1", "gen-1"]


def test_one_that_dies_with_its_place_while_it_starts_is_no_failed_start(world):
    # Ray did not know yet that the node is dead, and has started it there
    world.slow.add("gen-0-r1")
    world.lose("gen-0")
    world.look()
    world.nodes.remove("node-0")
    world.dead.add("gen-0-r1")
    world.look()
    (said,) = world.said("lost its place before it had joined")
    assert said.endswith("gen-2 starts there when there is room") and not world.said("none is started")
    world.put_first(0, "node-9")
    world.look()
    assert world.serving == ["gen-1", "gen-2"]


def test_without_any_instance_the_run_waits_for_one_and_goes_on(world):
    world.nodes.clear()
    for name in ("gen-0", "gen-1"):
        world.lose(name)
    world.look()
    (said,) = world.said("no generation instance is left")
    assert "waits up to 600 s for gen-0-r1, gen-1-r2" in said
    world.look(after_s=590.0)
    world.put_first(1, "node-9")
    world.look(after_s=30.0)
    assert world.serving == ["gen-1-r2"]
    world.look(after_s=1000.0)
    assert len(world.said("no generation instance is left")) == 1


def test_without_any_instance_for_too_long_the_run_ends_and_says_what_it_waited_for(world):
    world.nodes.clear()
    for name in ("gen-0", "gen-1"):
        world.lose(name)
    world.look()
    with pytest.raises(WaitTimeout) as caught:
        world.look(after_s=601.0)
    said = str(caught.value)
    assert "waited 601 s for gen-0-r1, gen-1-r2 to answer 'start and load the weights'" in said
    assert "gen-0-r1 has had no place for 60" in said and "cluster.no_instance_timeout_s" in said


def test_with_nobody_left_a_start_that_fails_is_tried_again_soon(world):
    world.dead |= {"gen-0-r1", "gen-1-r2", *(f"gen-{number}" for number in range(2, 20))}
    for name in ("gen-0", "gen-1"):
        world.lose(name)
    for _ in range(9):
        world.look(after_s=31.0)
    assert len(world.actors) >= 20, "every half minute, both"


def test_what_an_instance_could_not_be_told_of_finished_responses_is_said_once(world, monkeypatch):
    errors: list[Exception] = []

    def get(ref, *, timeout):
        if errors:
            raise errors[-1]

    monkeypatch.setattr(ray, "put", lambda texts: texts)
    monkeypatch.setattr(ray, "get", get)
    world.slow.add("gen-1")
    world.pool.remember([])
    errors.append(RayActorError())
    world.pool.remember([])
    assert not world.notes, "a death is told by whoever replaces it"
    errors.append(RlhfSpecError("the decode loop of gen-1 stood still"))
    world.slow.clear()
    for _ in range(3):
        world.pool.remember([])
    (said,) = world.notes
    assert "the decode loop of gen-1 stood still; the run goes on" in said
