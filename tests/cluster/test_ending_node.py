"""Three raylets on one machine: one announces its end, its instance is emptied by moves, another starts elsewhere."""

from pathlib import Path

import pytest
from kustomized import kustomized

from tests.helpers.ray_script import answer_of

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.long]

SCRIPT = """
import json, os, shlex, subprocess, sys, time
sys.path[:0] = ["tests/helpers"]
os.environ["PYTHONPATH"] = os.pathsep.join([os.getcwd(), os.path.join(os.getcwd(), "tests", "helpers")])
os.environ["RAY_AUTH_MODE"] = "disabled"
os.environ["RAY_TMPDIR"] = {folder!r}
import ray
from ray.cluster_utils import Cluster
from steered_pool import SteeredPool, bits, bits_alone, tiny_config

# the second instance finds no room beside the first
small = dict(object_store_memory=80 << 20)
nodes = Cluster(initialize_head=True, head_node_args=dict(num_cpus=2, include_dashboard=False, **small))
try:
    second = nodes.add_node(num_cpus=2, **small)
    ray.init(address=nodes.address, log_to_driver=False)
    config = tiny_config({target!r}, {draft!r}, num_actors=2, num_cpus=1.5)
    config = config.model_copy(update=dict(reallocation=config.reallocation.model_copy(update=dict(interval_s=0.05))))
    with SteeredPool(config).running() as pool:
        rows = pool.system.generation._instances
        (there,) = [name for name, row in rows.items() if row.node == second.node_id]
        asked, done_at = pool.requests(160), []

        def at(done):
            if done >= 6 and not done_at:
                done_at.append(time.monotonic())
                nodes.add_node(num_cpus=2, wait=False, **small)
                # as a pod's hook does, which has a node and a cluster of its own
                subprocess.run([sys.executable, "-m", "ray.scripts.scripts", *shlex.split({notice!r}),
                    "--node-id", second.node_id], check=True, capture_output=True,
                    env=os.environ | dict(RAY_ADDRESS=nodes.address))

        rollouts = pool.collect(asked, at)
        pool.wait_for(lambda: pool.has_said(there + " has left") and len(pool.serving) == 2)
        nodes.remove_node(second, allow_graceful=True)
        again = pool.requests(8)
        further = pool.collect(again)
        said = json.dumps(dict(
            there=there, serving=pool.serving, notes=pool.notes,
            by=sorted(set(r.completion.instance for r in rollouts)),
            equal=bits(rollouts) == bits_alone(config, asked) and bits(further) == bits_alone(config, again),
            nodes=[row.node == second.node_id for name, row in rows.items() if name in pool.serving],
            recomputed=sum(r.completion.epoch > 1 for r in rollouts)))
finally:
    ray.shutdown()
    nodes.shutdown()
print(said)
"""


def test_a_node_that_announces_its_end_is_emptied_and_its_instance_replaced(tiny_pair, tmp_path_factory):
    folder = tmp_path_factory.mktemp("r")
    (job,) = kustomized(Path("deploy/kubernetes/base/job"))[1:]
    generation = job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["template"]["spec"]
    before_the_end = generation["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][-1]
    script = SCRIPT.format(
        target=str(tiny_pair.target),
        draft=str(tiny_pair.draft),
        folder=str(folder),
        notice=before_the_end.partition(" && ")[0].removeprefix("timeout 20 ray "),
    )
    said = answer_of(script, timeout_s=900.0)
    assert said["equal"], said["notes"]
    assert said["there"] not in said["serving"] and len(said["serving"]) == 2 and not any(said["nodes"])
    assert any("is emptied, another starts elsewhere" in note for note in said["notes"])
    assert not any("lost" in note for note in said["notes"])
