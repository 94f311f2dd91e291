"""What each process of a group of trainers does in the tests of scoring by the engine."""

from engine_scored import learner_of, sampled, scorer_of, target
from trainer_group import trainers_of

from rlhfspec.core.records import SamplingParams
from rlhfspec.core.settings.trainer import LoraConfig

CASES = {"grpo": ("grpo", None), "ppo": ("ppo", None), "lora": ("grpo", LoraConfig(rank=4))}
RUNS = [(strategy, case) for strategy in ("ddp", "fsdp2") for case in CASES]


def learn_scored(case, trainers=None):
    """Two updates, the second of rollouts of what the first published; weights, and the figures of each."""
    kind, lora = CASES[case]
    published = target()
    learner = learner_of(
        published,
        scorer_of(published),
        kind=kind,
        lora=lora,
        trainers=trainers,
        learning_rate=1e-3,
        block_samples=3,
        max_tokens_per_forward=200,
    )
    metrics = []
    for version in range(2):
        sampling = SamplingParams(max_new_tokens=16)
        rollouts = sampled(published, sampling=sampling, batch=4, version=version, seed=version)
        metrics.append(learner.update(rollouts).metrics)
        published.load_state_dict(dict(learner.weights()))
    return {name: tensor.numpy() for name, tensor in published.state_dict().items()}, metrics


def learn_scored_in_group(rank):
    """Every run, by this trainer of several."""
    return {(strategy, case): learn_scored(case, trainers_of(strategy)) for strategy, case in RUNS}
