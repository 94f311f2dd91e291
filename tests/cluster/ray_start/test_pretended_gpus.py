"""Which GPUs every actor of a run may use, on a Ray that is told of eight: they are on paper.

The actors stand in the places, and get the options, that a run gives its own; here they only tell what they see.
"""

import pytest

from tests.helpers.ray_script import answer_of

SCRIPT = """
import json, os, ray
from rlhfspec.actors.remote.assigned_device import assigned_gpus
from rlhfspec.cluster.plan.topology import PlacementContext, actor_options, place, plan_topology
from rlhfspec.core.config import Config
from ray.util.placement_group import remove_placement_group

class Seer:
    def look(self):
        return os.environ.get("CUDA_VISIBLE_DEVICES", ""), assigned_gpus()

# as beside other frameworks
os.environ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] = "1"
ray.init(address="local", num_cpus=16, num_gpus=8, include_dashboard=False, log_to_driver=False)
seer, seen = ray.remote(Seer), {}
cases = {"one each": (1, 1, 1, 2), "none": (0, 0, 0, 2), "shared": (0.5, 1, 0, 2), "beside": (0.4, 0.6, 0, 8)}
for case, (generation, trainer, reward, number) in cases.items():
    pool = {"num_cpus": 0.01}
    config = Config.model_validate({
        "data": {"task": "chain"},
        "models": {"target": "somewhere", "draft": "elsewhere"},
        "trainer": {"strategy": "ddp"},
        "cluster": {
            "generation": pool | {"num_actors": number, "num_gpus": generation},
            "trainer": pool | {"num_actors": number, "num_gpus": trainer},
            "reward": pool | {"num_actors": 1, "num_gpus": reward},
        },
    })
    topology = plan_topology(config)
    group = place(topology, is_local=True)
    context = PlacementContext(group=group, namespace=ray.get_runtime_context().namespace)
    # of eight, those at both ends: each is a process
    asked = [p for p in topology.places if p.name[-1] in "0127" or p.name == "scheduler"]
    actors = {each.name: seer.options(**actor_options(each, context)).remote() for each in asked}
    seen[case] = {name: ray.get(actor.look.remote(), timeout=120) for name, actor in actors.items()}
    for actor in actors.values():
        ray.kill(actor)
    remove_placement_group(group)
print(json.dumps(seen))
"""
POOLS = {"gen-0", "gen-1", "trainer-0", "trainer-1", "reward-0"}


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.long
def test_every_actor_has_the_gpus_it_asked_for_and_no_other() -> None:
    seen = answer_of(SCRIPT, timeout_s=500)
    for actors in seen.values():
        assert set(actors) >= POOLS | {"scheduler"}
        assert actors["scheduler"][1] == [], "it decides and computes nothing"

    alone = {name: answer for name, answer in seen["one each"].items() if name in POOLS}
    assert all(visible == ",".join(assigned) for visible, assigned in alone.values())
    assert all(len(assigned) == 1 for _, assigned in alone.values())
    assert len({assigned[0] for _, assigned in alone.values()}) == len(POOLS), "no two share one"

    # Ray hides no GPU from an actor that has none: what it was assigned decides
    assert all(assigned == [] for _, assigned in seen["none"].values())

    shared = seen["shared"]
    assert shared["gen-0"][1] == shared["gen-1"][1] and len(shared["gen-0"][1]) == 1
    trainers = [shared[f"trainer-{rank}"][1] for rank in range(2)]
    assert trainers[0] != trainers[1] and shared["gen-0"][1] not in trainers
    assert shared["reward-0"][1] == []

    # on a whole GPU each trainer, and an instance beside it: eight of both have eight GPUs
    beside = seen["beside"]
    pairs = [(beside[f"trainer-{i}"][1], beside[f"gen-{i}"][1]) for i in (0, 1, 2, 7)]
    assert all(trainer == instance and len(trainer) == 1 for trainer, instance in pairs)
    assert len({trainer[0] for trainer, _ in pairs}) == len(pairs)
