"""Where instances start that come during a run: a first place that is vacant before a bundle of their own. No Ray."""

import pytest
from scripted_pool import ScriptedPool

from rlhfspec.policies.scaling.scaling_records import Resize


def elastic(monkeypatch, **generation) -> ScriptedPool:
    return ScriptedPool(monkeypatch, **{"num_actors": 2, "min_actors": 2, "max_actors": 4} | generation)


@pytest.fixture
def drained(monkeypatch) -> ScriptedPool:
    """A fixed pool whose first node has announced its end; its instance has left, its successor has no place."""
    world = ScriptedPool(monkeypatch)
    world.ends = {"node-0": 110.0}
    world.look()
    assert world.table["gen-0"].leaves_because == "its node node-0 ends in 110 s"
    world.leave("gen-0")
    return world


def test_on_a_node_that_ends_no_place_is_vacant(drained):
    drained.look(after_s=30.0)
    assert drained.own == ["gen-2"] and drained.serving == ["gen-1"], (
        "its successor waits for a bundle elsewhere"
    )


def test_a_successor_without_a_place_takes_the_first_place_that_is_vacant_when_the_node_has_gone(drained):
    drained.nodes.remove("node-0")
    drained.look()
    # one wish for one room: Ray reserves the run's own bundle again by itself
    assert not drained.own and drained.serving == ["gen-1"]
    assert drained.said("gen-3 starts there in the stead of gen-2")
    drained.put_first(0, "node-7")
    drained.look()
    assert drained.serving == ["gen-1", "gen-3"] and drained.actors["gen-3"].place.bundle == 0
    assert not drained.counted, "nobody was lost"


def test_a_successor_that_has_a_place_stays_there_and_the_next_one_takes_the_vacant_first_place(monkeypatch):
    world = elastic(monkeypatch)
    world.ends = {"node-0": None}
    world.look()
    world.put("gen-2", "node-5")
    world.look()
    world.leave("gen-0")
    world.nodes.remove("node-0")
    world.put_first(0, "node-7")
    world.look()
    assert world.serving == ["gen-1", "gen-2"] and world.own == ["gen-2"]
    world.look(resized=Resize(target=3, reason="it pays"))
    assert world.serving == ["gen-1", "gen-2", "gen-3"] and world.own == ["gen-2"]
    assert world.table["gen-3"].node == "node-7"


def test_an_instance_lost_while_it_is_emptied_gives_its_first_place_back(monkeypatch):
    world = ScriptedPool(monkeypatch)
    world.ends = {"node-0": 20.0}
    world.look()
    world.nodes.remove("node-0")
    assert world.lose("gen-0", num_requeued=4) is None
    assert world.said("gen-0 was lost while it was emptied") and world.said("4 samples were queued again")
    world.put_first(0, "node-7")
    world.look()
    assert world.serving == ["gen-1", "gen-3"] and not world.own
    assert world.counted == {("lost_actors", "generation"): 1}, "its successor was started before"


def test_an_added_instance_that_is_lost_is_counted_and_so_is_the_next_one(monkeypatch):
    world = elastic(monkeypatch)
    world.look(resized=Resize(target=3, reason="it pays"))
    world.put("gen-2", "node-5")
    world.look()
    assert world.lose("gen-2") is None and not world.own
    assert world.counted == {("lost_actors", "generation"): 1}
    world.look(after_s=31.0, resized=Resize(target=3, reason="it pays"))
    world.put("gen-3", "node-5")
    world.look()
    assert world.serving == ["gen-0", "gen-1", "gen-3"]
    assert world.counted["replaced_actors", "generation"] == 1


def test_added_instances_that_are_lost_together_block_growth_once(monkeypatch):
    world = elastic(monkeypatch, max_actors=6)
    world.look(resized=Resize(target=6, reason="it pays"))
    for number in range(2, 6):
        world.put(f"gen-{number}", "node-5")
    world.look()
    assert len(world.serving) == 6
    for number in range(2, 6):
        world.lose(f"gen-{number}")
    assert len(world.said("none is started for 30 s")) == 4


def test_a_pool_that_shrinks_gives_up_a_start_without_a_bundle_and_none_in_a_first_place(monkeypatch):
    world = elastic(monkeypatch)
    world.nodes.remove("node-0")
    world.lose("gen-0")
    world.look(resized=Resize(target=3, reason="it pays"))
    assert world.own == ["gen-2"]
    world.look(resized=Resize(target=1, reason="it does not"))
    assert not world.own and "gen-0-r1" not in world.dead


@pytest.fixture(params=["fixed", "elastic"])
def relieving(request, monkeypatch) -> ScriptedPool:
    """A successor serves in a bundle of its own; Ray has reserved the vacant first place again; the run goes on."""
    world = ScriptedPool(monkeypatch) if request.param == "fixed" else elastic(monkeypatch)
    world.pool.rollouts_ahead(5)
    world.ends = {"node-0": None}
    world.look()
    world.put("gen-2", "node-5")
    world.look()
    world.leave("gen-0")
    assert world.serving == ["gen-1", "gen-2"] and world.own == ["gen-2"]
    world.nodes.remove("node-0")
    world.slow.add("gen-3")
    world.put_first(0, "node-7")
    world.look()
    assert world.actors["gen-3"].place.bundle == 0 and world.own == ["gen-2"]
    return world


def test_a_vacant_first_place_is_used_and_the_successor_s_own_bundle_is_given_back(relieving):
    """Ray gives back no single bundle of the run's group: both would be held to the end."""
    world = relieving
    assert world.said("gen-3 starts there in the stead of gen-2") and world.serving == ["gen-1", "gen-2"]
    world.slow.clear()
    world.look()
    assert world.serving == ["gen-1", "gen-3"]
    assert world.table["gen-2"].leaves_because == "gen-3 stands in a place of the run's own in its stead"
    world.leave("gen-2")
    world.look(after_s=60.0)
    assert not world.own and set(world.actors) == {"gen-0", "gen-1", "gen-2", "gen-3"}
    assert not world.counted, "nobody was lost"


def test_a_successor_lost_meanwhile_is_followed_by_the_one_that_was_to_relieve_it(relieving):
    world = relieving
    assert world.lose("gen-2") is None
    world.look(after_s=60.0)
    assert set(world.actors) == {"gen-0", "gen-1", "gen-2", "gen-3"}, "no third one starts"
    world.slow.clear()
    world.look()
    assert world.serving == ["gen-1", "gen-3"] and not world.own


def test_where_the_successor_s_node_ends_too_the_relief_is_enough(relieving):
    world = relieving
    world.ends = {"node-5": 60.0}
    world.look()
    assert world.table["gen-2"].leaves_because.startswith("its node node-5 ends")
    world.slow.clear()
    world.look()
    world.leave("gen-2")
    assert world.serving == ["gen-1", "gen-3"] and not world.own
    assert set(world.actors) == {"gen-0", "gen-1", "gen-2", "gen-3"}


def test_where_the_pool_grows_meanwhile_nobody_is_relieved(relieving):
    world = relieving
    world.look(resized=Resize(target=3, reason="it pays"))
    assert world.own == ["gen-2"] and "gen-4" not in world.actors, "the one that comes is the third"
    world.slow.clear()
    world.look()
    assert world.serving == ["gen-1", "gen-2", "gen-3"]


def test_where_the_one_to_be_relieved_leaves_as_the_pool_shrinks_no_other_comes(monkeypatch):
    world = elastic(monkeypatch, num_actors=3)
    world.pool.rollouts_ahead(5)
    world.put("gen-2", "node-5")
    world.look()
    world.ends = {"node-0": None}
    world.look()
    world.put("gen-3", "node-6")
    world.look()
    world.leave("gen-0")
    world.nodes.remove("node-0")
    world.slow.add("gen-4")
    world.put_first(0, "node-7")
    world.look()
    assert world.serving == ["gen-1", "gen-2", "gen-3"] and world.said(
        "gen-4 starts there in the stead of gen-2"
    )
    world.slow.add("gen-5")
    world.look(resized=Resize(target=2, leave=("gen-2",), reason="it does not pay"))
    assert "gen-4" in world.dead
    world.leave("gen-2")
    assert world.serving == ["gen-1", "gen-3"] and world.said("gen-5 starts there in the stead of gen-3")
    world.slow.clear()
    world.look()
    world.leave("gen-3")
    assert world.serving == ["gen-1", "gen-5"] and not world.own


def test_a_relief_whose_place_goes_again_leaves_the_successor_where_it_is(relieving):
    world = relieving
    world.nodes.remove("node-7")
    world.dead.add("gen-3")
    world.look()
    assert world.serving == ["gen-1", "gen-2"] and world.own == ["gen-2"]
    assert world.said("gen-3 lost its place before it had joined") and world.said("gen-2 stays where it is")
    assert not world.said("none is started")
    world.put_first(0, "node-8")
    world.look()
    assert world.serving == ["gen-1", "gen-4"], "tried again"


def test_in_its_last_rollout_a_run_moves_nobody(monkeypatch):
    world = ScriptedPool(monkeypatch)
    world.ends = {"node-0": None}
    world.look()
    world.put("gen-2", "node-5")
    world.look()
    world.leave("gen-0")
    world.nodes.remove("node-0")
    world.put_first(0, "node-7")
    world.look()
    assert world.serving == ["gen-1", "gen-2"] and "gen-3" not in world.actors
