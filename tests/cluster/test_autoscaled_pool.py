"""A pool on a real autoscaler makes a second node appear, uses it, lets it go; nothing is forced, no sample is lost."""

import pytest

from tests.helpers.ray_script import answer_of

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.long]

SCRIPT = """
import json, os, socket, sys, time
from pathlib import Path
sys.path[:0] = ["tests/helpers"]
os.environ["PYTHONPATH"] = os.pathsep.join([os.getcwd(), os.path.join(os.getcwd(), "tests", "helpers")])
os.environ["RAY_AUTH_MODE"] = "disabled"
import ray
from fake_cloud import fake_cloud
from steered_pool import SteeredPool, bits, bits_alone, tiny_config

with socket.socket() as probe:
    probe.bind(("", 0))
    port = probe.getsockname()[1]

def num_nodes():
    return sum(bool(node["Alive"]) for node in ray.nodes())

# one instance fills a node
config = tiny_config({target!r}, {draft!r}, num_actors=1, max_actors=2, num_cpus=1.5, idle_timeout_s=5.0)
with fake_cloud(Path({folder!r}), cpus=2, most=1, idle_s=6.0, port=port) as address:
    ray.init(address=address, log_to_driver=False)
    said = dict(nodes=[num_nodes()])
    with SteeredPool(config).running() as pool:
        # as on a quiet machine with models that take a while: the decision is the policy's own
        pool.system.generation._changes._start_up_s = 1.0
        asked, rollouts, began_s = [], [], time.monotonic()
        for ahead in (2, 1):
            # as in a run with iterations to come
            pool.system.generation.rollouts_ahead(ahead)
            asked.append(pool.requests(200))
            rollouts.append(pool.collect(asked[-1]))
            pool.wait_for(lambda: len(pool.serving) == 2)
            said["nodes"].append(num_nodes())
        pool.system.generation.rollouts_ahead(0)
        pool.wait_for(lambda: pool.serving == ["gen-0"] and num_nodes() == 1)
        said["nodes"].append(num_nodes())
        asked.append(pool.requests(8))
        rollouts.append(pool.collect(asked[-1]))
        said |= dict(
            notes=pool.notes, metrics=pool.system.generation.metrics(), seconds=time.monotonic() - began_s,
            by=[sorted(set(r.completion.instance for r in one)) for one in rollouts],
            counts=[len(one) for one in rollouts],
            equal=[bits(one) == bits_alone(config, wish) for one, wish in zip(rollouts, asked)])
    ray.shutdown()
print()
print(json.dumps(said))
"""


def test_a_pool_makes_a_second_node_appear_uses_it_and_lets_it_go(tiny_pair, tmp_path_factory):
    folder = tmp_path_factory.mktemp("c")
    script = SCRIPT.format(target=str(tiny_pair.target), draft=str(tiny_pair.draft), folder=str(folder))
    said = answer_of(script, timeout_s=500.0)
    assert said["nodes"] == [1, 2, 2, 1], said["notes"]
    assert said["by"][1] == ["gen-0", "gen-1"] and said["by"][2] == ["gen-0"]
    assert said["counts"] == [200, 200, 8] and all(said["equal"])
    assert any("the generation pool grows from 1 to 2" in note for note in said["notes"])
    assert any("gen-1 has left" in note for note in said["notes"]), said["notes"]
    assert not any("lost" in note for note in said["notes"])
