"""Every metric that a run may set: name, unit, how it adds up over iterations, what it says.

Names read `area/name_unit`. A `*` stands for a name that the run's own parts have (a reward's part). Whatever sets,
draws or compares metrics goes by this table; `core.metrics.MetricsLog` refuses a name that is not in it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from rlhfspec.core.errors import RlhfSpecError

Kind = Literal["mean", "sum", "last"]
"Over iterations: averaged, added up, or only the latest counts."


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One declared metric, or a family of them."""

    name: str
    unit: str
    kind: Kind
    help: str


def _of(area: str, *rows: tuple[str, str, Kind, str]) -> list[Metric]:
    return [Metric(name=f"{area}/{name}", unit=unit, kind=kind, help=text) for name, unit, kind, text in rows]


_DECLARED = [
    *_of(
        "reward",
        ("mean", "reward", "mean", "mean reward of the iteration's samples"),
        ("std", "reward", "mean", "their standard deviation"),
        ("accuracy", "share", "mean", "mean of the part `correct` of those that have it"),
        ("min", "reward", "mean", "least reward"),
        ("max", "reward", "mean", "highest reward"),
        ("p10", "reward", "mean", "10th percentile of the rewards"),
        ("p50", "reward", "mean", "median of the rewards"),
        ("p90", "reward", "mean", "90th percentile of the rewards"),
        ("num_skipped", "samples", "sum", "samples left out because they could not be scored"),
        ("*", "reward", "mean", "mean of the part of that name, of the rewards that have it"),
    ),
    *_of(
        "rollout",
        ("mean_acceptance_length", "tokens", "mean", "tokens emitted a decode step and sample"),
        ("acceptance_rate", "share", "mean", "accepted draft tokens over drafted ones"),
        ("goodput_tokens_per_s", "tokens/s", "mean", "response tokens over the seconds of generation"),
        ("response_tokens_mean", "tokens", "mean", "mean length of a response"),
        ("response_tokens_max", "tokens", "mean", "the longest response"),
        ("response_tokens_p10", "tokens", "mean", "10th percentile of the lengths"),
        ("response_tokens_p50", "tokens", "mean", "median of the lengths"),
        ("response_tokens_p90", "tokens", "mean", "90th percentile of the lengths"),
        ("response_tokens_p99", "tokens", "mean", "99th percentile of the lengths"),
        ("length_cut_share", "share", "mean", "samples that ended at sampling.max_new_tokens"),
        ("num_samples", "samples", "sum", "samples that were scored"),
        ("num_recomputed", "samples", "sum", "samples whose instance was lost on the way"),
        ("num_preemptions", "samples", "sum", "times a sample had to wait because caches were full"),
        (
            "num_cut_samples",
            "samples",
            "last",
            "responses that wait for the next weights (rollout.max_staleness)",
        ),
        (
            "num_unscored_samples",
            "samples",
            "last",
            "whole responses whose rewards are still computed (rollout.max_staleness)",
        ),
        ("num_groups_sampled", "groups", "sum", "groups that dynamic sampling asked for"),
        ("num_groups_useful", "groups", "sum", "of these, groups whose rewards differ"),
        ("invariant", "flag", "mean", "1: tokens are promised to the bit"),
    ),
    *_of(
        "data",
        ("epoch", "passes", "last", "passes over the training prompts so far"),
    ),
    *_of(
        "time",
        ("generate_s", "s", "sum", "until the last completion"),
        ("score_s", "s", "sum", "from the last completion to the last reward that was waited for"),
        ("update_s", "s", "sum", "the learner's update"),
        ("publish_s", "s", "sum", "new weights to every instance"),
        (
            "publish_pack_s",
            "s",
            "sum",
            "of it, rounding and packing by the trainer (into the object store, too)",
        ),
        ("publish_send_s", "s", "sum", "of it, on the way to the instances, waits included"),
        ("publish_load_s", "s", "sum", "of it, the slowest instance's loading of what was there"),
        ("publish_confirm_s", "s", "sum", "of it, the slowest instance's reading back of what decodes"),
        ("refit_s", "s", "sum", "refit of the draft model and its publication"),
        ("evaluate_s", "s", "sum", "evaluation after the iteration, the best checkpoint included"),
        ("iteration_s", "s", "sum", "the whole iteration"),
        ("step_s", "s", "mean", "one optimizer step of supervised training"),
        (
            "update_hidden_s",
            "s",
            "sum",
            "of the update, behind the sampling of later batches (rollout.max_staleness)",
        ),
        ("batch_wait_s", "s", "sum", "the update waited for its batch (rollout.max_staleness)"),
        (
            "amdahl_bound",
            "ratio",
            "mean",
            "how many times faster the iteration were if generation took no time",
        ),
    ),
    *_of(
        "learner",
        ("policy_loss", "1", "mean", "loss of the policy, mean over minibatches"),
        ("value_loss", "1", "mean", "loss of the critic"),
        ("explained_variance", "share", "mean", "of the returns by the critic's values"),
        ("entropy", "nats", "mean", "of the policy, a token"),
        ("approx_kl", "nats", "mean", "KL(old || new), k3, a token"),
        ("reference_kl", "nats", "mean", "KL to the reference, a token"),
        ("clip_fraction", "share", "mean", "tokens whose ratio the loss clips"),
        ("grad_norm", "1", "mean", "norm of the gradient before it is clipped"),
        (
            "ratio_at_first_minibatch",
            "ratio",
            "mean",
            "policy ratio furthest from 1 before any step; 1 up to rounding",
        ),
        ("advantage_mean", "1", "mean", "mean over samples of their tokens' mean advantage"),
        ("advantage_std", "1", "mean", "its standard deviation over samples"),
        ("advantage_min", "1", "mean", "the least"),
        ("advantage_max", "1", "mean", "the highest"),
        ("clip_fraction_low", "share", "mean", "tokens whose ratio is clipped from below"),
        ("clip_fraction_high", "share", "mean", "tokens whose ratio is clipped from above"),
        ("ratio_min", "ratio", "mean", "least policy ratio of any minibatch"),
        ("ratio_max", "ratio", "mean", "highest policy ratio of any minibatch"),
        ("kl_loss", "nats", "mean", "KL term of the loss, before its coefficient"),
        ("kl_coef", "1", "last", "coefficient of the KL"),
        ("entropy_coef", "1", "last", "coefficient of the entropy"),
        ("truncated_share", "share", "mean", "samples that were cut at the limit of their length"),
        ("grad_clipped_share", "share", "mean", "optimizer steps whose gradient was clipped"),
        ("lr", "1", "last", "learning rate of the last optimizer step"),
        ("num_optimizer_steps", "steps", "sum", "optimizer steps of the update"),
        ("no_signal", "flag", "mean", "1: the iteration's rewards could teach nothing; the run says why"),
        (
            "num_skipped_minibatches",
            "minibatches",
            "sum",
            "of which no optimizer step was taken: their gradient is 0",
        ),
        ("num_groups", "groups", "sum", "groups of samples of one prompt"),
        ("num_zero_advantage_groups", "groups", "sum", "those with equal rewards"),
        ("num_skipped_samples", "samples", "sum", "samples without a gradient"),
    ),
    *_of(
        "mismatch",
        ("kl", "nats", "mean", "KL(sampler || trainer), k3, a token"),
        ("max_logprob_difference", "nats", "mean", "between sampler and trainer, of any token"),
        ("lag_mean", "versions", "mean", "trainer's weights over those that a token came from"),
        ("lag_max", "versions", "mean", "the same of the oldest token"),
        ("ratio_mean", "ratio", "mean", "trainer over sampler, of a token, nothing cut"),
        ("ratio_max", "ratio", "mean", "the same of the token where it is highest"),
        ("importance_mean", "ratio", "mean", "weight of a token against the sampler"),
        ("effective_share", "share", "mean", "tokens of weight 1 that these weights are worth"),
        ("clipped_share", "share", "mean", "tokens whose weight was cut at the cap"),
        ("masked_share", "share", "mean", "tokens that a mask took out"),
        ("masked_response_share", "share", "mean", "responses of which no token is left"),
        ("bit_equal_share", "share", "mean", "log-probabilities that equal the sampler's to the bit"),
    ),
    *_of(
        "draft",
        ("weight_version", "version", "last", "of the draft model"),
        (
            "refit_taken",
            "flag",
            "mean",
            "1: the refit's weights were taken, or the head that instances trained",
        ),
        ("refit_steps", "steps", "sum", "optimizer steps of the refit"),
        ("refit_tokens", "tokens", "sum", "tokens it learned from"),
        ("learn_s", "s", "sum", "seconds of learning in it"),
        ("kl_before", "nats", "mean", "KL(target || draft) on held-out responses before the refit"),
        ("kl_after", "nats", "mean", "the same after it"),
        ("cotrain_s", "s", "sum", "seconds of the update that the draft model's co-training took"),
        (
            "cotrain_kl",
            "nats",
            "mean",
            "KL(target || draft), a token, of minibatches before they were learned from",
        ),
        ("spot_s", "s", "sum", "seconds that instances without samples trained the draft head"),
        ("spot_steps", "steps", "sum", "optimizer steps in them"),
        ("spot_tokens", "tokens", "sum", "positions learned from in them"),
        ("spot_instances", "instances", "mean", "that had trained the head since it was last published"),
    ),
    *_of(
        "moves",
        (
            "num_*",
            "moves",
            "sum",
            "moves of samples between instances, by how they ended or what they shipped",
        ),
        ("stage1_bytes", "bytes", "sum", "shipped while the source decodes"),
        ("stage2_bytes", "bytes", "sum", "shipped with the hand-over"),
        ("stage1_bytes_share", "share", "mean", "of all bytes"),
        ("*_s_median", "s", "mean", "median over the iteration's moves of one stage"),
        ("downtime_s_max", "s", "mean", "longest time that a sample stood still"),
        ("transfer_s", "s", "sum", "seconds of transfers"),
        ("transfer_hidden_share", "share", "mean", "of them, while the pool was in a decode step"),
        ("transfer_hidden_own_share", "share", "mean", "of them, while the same instance was"),
        ("decode_thread_s", "s", "sum", "of the decode threads for moves"),
        ("planning_s", "s", "sum", "of the scheduler for moves"),
        ("overhead_share", "share", "mean", "both over the seconds of generation"),
    ),
    *_of(
        "pool",
        ("instances", "instances", "last", "that take samples"),
        ("num_joined", "instances", "sum", "that joined during the run"),
        ("num_left", "instances", "sum", "that were emptied and left"),
        ("num_failed_starts", "instances", "sum", "starts that failed, extra instances that were lost"),
        ("start_up_s", "s", "last", "from the decision to join of the last one that did"),
    ),
    *_of(
        "environment",
        ("turns_mean", "turns", "mean", "turns of an episode"),
        ("given_token_share", "share", "mean", "response tokens that environments gave"),
        ("num_cut_observations", "answers", "sum", "cut at environment.max_observation_tokens"),
        ("num_failed", "episodes", "sum", "of which a reset or a step failed"),
    ),
    *_of(
        "train",
        ("loss", "nats", "mean", "loss of supervised training, or of a reward model's pairs"),
        ("accuracy", "share", "mean", "pairs that are ordered rightly"),
        ("margin", "reward", "mean", "reward of the chosen less that of the rejected"),
        ("mean_reward", "reward", "mean", "mean over both of each pair"),
        ("learning_rate", "1", "last", "of the last optimizer step"),
        ("grad_norm", "1", "mean", "norm of the gradient before it is clipped"),
        ("epoch", "passes", "last", "passes over the data so far"),
        ("tokens_per_s", "tokens/s", "mean", "trained tokens over the seconds of the step"),
    ),
    *_of(
        "eval",
        ("loss", "nats", "last", "loss on held-out data of supervised training"),
        ("margin", "reward", "last", "reward of the chosen less that of the rejected, on held-out pairs"),
        ("mean_reward", "reward", "last", "mean over both of each held-out pair"),
        ("reward_mean", "reward", "last", "mean reward of the evaluation's samples"),
        ("reward_std", "reward", "last", "their standard deviation"),
        ("best_at_k", "reward", "last", "mean over prompts of the best reward of k samples"),
        ("accuracy", "share", "last", "mean of the part `correct`"),
        ("mean_at_k", "share", "last", "the same by verl's name"),
        ("pass_at_*", "share", "last", "prompts with a right sample among k (Chen et al. 2021)"),
        ("response_tokens_mean", "tokens", "last", "mean length of a response"),
        ("length_cut_share", "share", "last", "samples that ended at the limit"),
        ("num_prompts", "prompts", "last", "prompts of the evaluation"),
        ("num_samples", "samples", "last", "samples of the evaluation"),
        ("num_skipped", "samples", "last", "of these without a reward, which count as wrong"),
    ),
]
_BY_NAME = {metric.name: metric for metric in _DECLARED if "*" not in metric.name}
_FAMILIES = [metric for metric in _DECLARED if "*" in metric.name]


def declared() -> tuple[Metric, ...]:
    """All metrics and families, by area."""
    return tuple(_DECLARED)


def find_metric(name: str) -> Metric | None:
    """The metric of that name, or the first family that it belongs to."""
    found = _BY_NAME.get(name)
    return found or next((family for family in _FAMILIES if fnmatchcase(name, family.name)), None)


def is_of_family(name: str) -> bool:
    """Whether the name is declared as one of a family and is no metric of its own."""
    return name not in _BY_NAME and find_metric(name) is not None


def require_declared(names: Iterable[str]) -> None:
    """Raise RlhfSpecError naming the first metric that is not declared."""
    for name in names:
        if find_metric(name) is None:
            raise RlhfSpecError(
                f"metric {name} is not declared; expected a name of core/metric_registry.py: declare it there, with "
                "unit and meaning, before anything sets it"
            )
