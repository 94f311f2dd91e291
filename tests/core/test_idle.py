"""Keys that change nothing are told with the reason; what is at its default, or works, is not."""

from pytest import mark

from rlhfspec.core.config_io import config_from_dict
from rlhfspec.core.idle import _RUN, idle_keys
from rlhfspec.core.settings.supervised import SftConfig

ONE_STEP = {"rollout": {"prompts_per_iteration": 4, "samples_per_prompt": 8}, "run": {"iterations": 1}}


def of(**sections):
    return {"rollout": {"samples_per_prompt": 8}, **sections}


def drafting(**keys):
    return of(speculation=keys)


def idle(tree, kind="grpo"):
    algorithm = {"algorithm": {"kind": kind, **tree.pop("algorithm", {})}}
    config = config_from_dict({"data": {"task": "chain"}, "models": {"draft": "demo"}, **algorithm, **tree})
    return [key for key, _ in idle_keys(config)]


@mark.parametrize(
    ("tree", "keys"),
    [
        ({**ONE_STEP, "algorithm": {"kl_coef": 0.3}}, ["algorithm.kl_coef"]),
        ({**ONE_STEP, "algorithm": {"kl_coef": 0.0}}, []),
        ({**ONE_STEP, "run": {"iterations": 2}, "algorithm": {"kl_coef": 0.3}}, []),
        (
            {**ONE_STEP, "trainer": {"minibatch_size": 16}, "algorithm": {"kl_coef": 0.3, "clip_ratio": 0.1}},
            [],
        ),
        ({**ONE_STEP, "algorithm": {"clip_ratio": 0.1}}, ["algorithm.clip_ratio"]),
        (
            {"rollout": {"samples_per_prompt": 8}, "algorithm": {"kl_coef": 0.0, "kl_estimator": "k2"}},
            ["algorithm.kl_estimator"],
        ),
        ({"rollout": {"samples_per_prompt": 8}, "evaluation": {"top_p": 0.5}}, ["evaluation.top_p"]),
        (
            {"rollout": {"samples_per_prompt": 8}, "evaluation": {"top_p": 0.5, "every": 2}},
            ["evaluation.top_p"],
        ),
        (
            {
                "rollout": {"samples_per_prompt": 8},
                "evaluation": {"top_p": 0.5, "every": 2, "temperature": 1.0},
            },
            [],
        ),
        ({"rollout": {"samples_per_prompt": 8}, "environment": {"max_turns": 3}}, ["environment.max_turns"]),
        (drafting(drafter="none", policy="bandit"), ["models.draft", "speculation.policy"]),
        (drafting(drafter="none", policy="off"), ["models.draft"]),
        (drafting(drafter="head", policy="off"), ["models.draft", "speculation.drafter"]),
        (drafting(drafter="mtp", policy="fixed"), []),
        (drafting(num_nodes=4), ["speculation.num_nodes"]),
        (drafting(policy="fixed", num_nodes=4, max_nodes=4), ["speculation.max_nodes"]),
        (
            of(engine={"turn_cache_mb": 9.0, "graph_memory_mb": 5}),
            ["engine.graph_memory_mb", "engine.turn_cache_mb"],
        ),
        (of(reallocation={"policy": "pull", "mode": "always_migrate"}), ["reallocation.mode"]),
        (
            of(reallocation={"interval_s": 0.5}, cluster={"generation": {"num_actors": 1}}),
            ["reallocation.interval_s"],
        ),
        (of(reallocation={"interval_s": 0.5}), []),
        (of(reward={"kind": "gsm8k", "timeout_s": 3.0, "cache": "x"}), ["reward.cache", "reward.timeout_s"]),
        (
            of(reward={"kind": "gsm8k", "dtype": "float32", "server": {"retries": 1}}),
            ["reward.dtype", "reward.server"],
        ),
        (of(reward={"kind": "m:f", "timeout_s": 3.0}), []),
        (
            of(cluster={"environment": {"num_actors": 4}, "dashboard": False, "dashboard_port": 9999}),
            ["cluster.dashboard_port", "cluster.environment"],
        ),
        (of(data={"task": "chain", "weight_of": "source"}), ["data.weight_of"]),
        (of(drafter_training={"buffer_mb": 9.0}), ["drafter_training.buffer_mb"]),
        (of(drafter_training={"mode": "cotrain", "max_passes": 2}), ["drafter_training.max_passes"]),
        # they bound drafts of the last evaluation, too
        ({**drafting(policy="fixed", max_nodes=4), "evaluation": {"every": 2}}, []),
        # nobody said so: it is the default on GPUs
        ({**drafting(drafter="none"), "cluster": {"generation": {"num_gpus": 1}}}, ["models.draft"]),
    ],
)
def test_keys_without_effect_are_told(tree, keys):
    assert idle(dict(tree)) == keys


def test_the_defaults_of_every_algorithm_are_not_told():
    assert not idle({"rollout": {"samples_per_prompt": 8}}) and not idle({}, "ppo")
    sections = config_from_dict({"data": {"task": "chain"}, "models": {"draft": "demo"}})
    for keys, *_ in _RUN:
        section, _, names = keys.partition(".")
        assert all(name == "*" or hasattr(getattr(sections, section), name) for name in names.split())


def test_of_supervised_training_too():
    tree = {"model": {"name": "x"}, "data": {"path": "x", "eval_share": 0.0}, "trainer": {"eval_every": 7}}
    assert idle_keys(SftConfig.model_validate(tree)) == [("trainer.eval_every", "nothing is held out")]
    tree["data"]["eval_path"] = "y"
    assert idle_keys(SftConfig.model_validate(tree)) == [
        ("data.eval_share", "data.eval_path names the held-out rows")
    ]
