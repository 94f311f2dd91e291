"""How the policy is measured on prompts that it never learns from."""

from __future__ import annotations

from pydantic import Field, model_validator

from ..ranges import LEAST_TEMPERATURE
from .data import DataConfig
from .reward import RewardConfig
from .section import Name, Section

MAX_SAMPLES_PER_PROMPT = 1024
BEST_METRICS = ("eval/reward_mean", "eval/accuracy", "eval/mean_at_k", "eval/pass_at_k", "eval/best_at_k")
"What a best checkpoint may be chosen by: more is better."


class EvaluationConfig(Section):
    """Every few iterations, by the generation pool itself; the samples train nothing. Greedy by default."""

    every: int = Field(default=0, ge=0)
    "iterations between evaluations, one at the end among them; 0: none"
    at_start: bool = True
    "the first weights too"
    data: DataConfig | None = None
    "prompts of their own; null: the last `holdout` prompts of the training data, each source's share, never trained on"
    holdout: int = Field(default=64, ge=1)
    limit: int | None = Field(default=None, ge=1)
    "use only the first prompts"
    samples_per_prompt: int = Field(default=1, ge=1, le=MAX_SAMPLES_PER_PROMPT)
    "k of mean@k and pass@k"
    temperature: float = Field(default=0.0, ge=0.0)
    "0: greedy"
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    fresh_keys: bool = False
    """every evaluation draws noise of its own; else all draw the same: changes show best, and the last one's responses
    are drafts"""
    max_new_tokens: int | None = Field(default=None, ge=1)
    "null: sampling.max_new_tokens"
    keep_best: bool = True
    "keep `checkpoints/best`, of the trained weights whose `metric` was highest"
    metric: Name = "eval/reward_mean"
    "where rewards turn out to have no part `correct` for it, eval/reward_mean"
    early_stopping_patience: int | None = Field(default=None, ge=1)
    "the run ends after so many evaluations in a row that are not above the best; null: after run.iterations"

    @model_validator(mode="after")
    def _consistent(self) -> EvaluationConfig:
        if self.samples_per_prompt > 1 and self.temperature == 0.0:
            raise ValueError(
                f"evaluation.samples_per_prompt is {self.samples_per_prompt} at temperature 0, and greedy samples of "
                "one prompt are all equal; set evaluation.temperature above 0, or samples_per_prompt to 1"
            )
        if 0.0 < self.temperature < LEAST_TEMPERATURE:
            raise ValueError(
                f"evaluation.temperature must be 0 or at least {LEAST_TEMPERATURE}, got {self.temperature}; use 0"
            )
        if self.metric not in BEST_METRICS:
            raise ValueError(
                f"evaluation.metric must be one of {', '.join(BEST_METRICS)}, got '{self.metric}'; more of it must be "
                "better"
            )
        return self


def require_metric(evaluation: EvaluationConfig, reward: RewardConfig) -> None:
    """Raise ValueError for a metric that is made of a part which the reward has not."""
    silent = all(part.kind in ("model", "format") for part in reward.scorers)
    metric = evaluation.metric
    if evaluation.every and silent and metric not in ("eval/reward_mean", "eval/best_at_k"):
        raise ValueError(
            f"evaluation.metric is {metric}, which is made of a part 'correct', and rewards of kind {reward.title} "
            "have none; set it to eval/reward_mean or eval/best_at_k"
        )
