"""Raylets on one machine: the one under an instance is killed, and all it had started; the other goes on alone, and a
new node brings one.

Nothing announces it: Ray itself takes a while to hold the node for dead, and reserves the run's bundle again when
there is room. In a fixed pool and in an elastic one.
"""

import pytest

from tests.helpers.ray_script import answer_of

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.long]

SCRIPT = """
import json, os, signal, sys
sys.path[:0] = ["tests/helpers"]
os.environ["PYTHONPATH"] = os.pathsep.join([os.getcwd(), os.path.join(os.getcwd(), "tests", "helpers")])
os.environ["RAY_AUTH_MODE"] = "disabled"
os.environ["RAY_TMPDIR"] = {folder!r}
import ray
from ray.cluster_utils import Cluster
from steered_pool import SteeredPool, bits, bits_alone, tiny_config
import rlhfspec.cluster.system.starting_and_leaving
rlhfspec.cluster.system.starting_and_leaving.LOGGED_AFTER_S = 5.0

# an instance fills its node: scheduler and reward are on the head
small = dict(object_store_memory=80 << 20)
nodes = Cluster(initialize_head=True, head_node_args=dict(num_cpus=1, include_dashboard=False, **small))
try:
    nodes.add_node(num_cpus=2, **small)
    second = nodes.add_node(num_cpus=2, **small)
    ray.init(address=nodes.address, log_to_driver=False)
    config = tiny_config({target!r}, {draft!r}, num_actors=2, num_cpus=2.0, **{elastic!r})
    with SteeredPool(config).running() as pool:
        rows = pool.system.generation._instances
        (there,) = [name for name, row in rows.items() if row.node == second.node_id]
        (other,) = set(pool.serving) - {{there}}
        asked, killed_at = pool.requests(160), []

        def at(done):
            if done >= 6 and not killed_at:
                killed_at.append(done)
                # as when a machine loses power: what Ray has started there ends with it
                raylet = second.all_processes["raylet"][0].process.pid
                with open(f"/proc/{{raylet}}/task/{{raylet}}/children") as children:
                    started = children.read().split()
                for process in (raylet, *map(int, started)):
                    os.kill(process, signal.SIGKILL)

        rollouts = pool.collect(asked, at)
        pool.wait_for(lambda: pool.has_said("has had no place"))
        alone = list(pool.serving)
        # without a second instance the next samples are made all the same
        again = pool.requests(8)
        further = pool.collect(again)
        nodes.add_node(num_cpus=2, wait=False, **small)
        pool.wait_for(lambda: len(pool.serving) == 2)
        last = pool.requests(24)
        rest = pool.collect(last)
        made = [(rollouts, asked), (further, again), (rest, last)]
        said = json.dumps(dict(
            there=there, other=other, alone=alone, serving=pool.serving, notes=pool.notes, killed_at=killed_at,
            by=sorted(set(r.completion.instance for r in rest)), counts=[len(one) for one, _ in made],
            equal=[bits(one) == bits_alone(config, wish) for one, wish in made],
            recomputed=sum(r.completion.epoch > 0 for r in rollouts), bundles=[row.place.bundle for name, row in
                rows.items() if name in pool.serving]))
finally:
    ray.shutdown()
    nodes.shutdown()
print(said)
"""


@pytest.mark.parametrize("elastic", [{}, {"min_actors": 2, "max_actors": 3}], ids=["fixed", "elastic"])
def test_a_generation_node_that_dies_at_once_costs_no_sample_and_no_pause(
    tiny_pair, tmp_path_factory, elastic
):
    folder = tmp_path_factory.mktemp("n")
    script = SCRIPT.format(
        target=str(tiny_pair.target), draft=str(tiny_pair.draft), folder=str(folder), elastic=elastic
    )
    said = answer_of(script, timeout_s=900.0)
    there, notes = said["there"], said["notes"]
    assert said["counts"] == [160, 8, 24] and all(said["equal"]), notes
    assert said["killed_at"] and said["recomputed"] > 0, "it held samples when it died"
    assert said["alone"] == [said["other"]], "nobody waited for a node"
    (lost,) = [note for note in notes if "was lost" in note]
    assert f"instance {there} was lost" in lost and f"{there}-r1 takes its place" in lost
    assert any("has had no place" in note and "missing: " in note for note in notes)
    assert not any("no generation instance is left" in note for note in notes)
    # where Ray took a while to hold the node for dead, the first replacement went with it
    (newcomer,) = set(said["serving"]) - {said["other"]}
    assert newcomer in said["by"] and sorted(said["bundles"]) == [0, 1], notes
