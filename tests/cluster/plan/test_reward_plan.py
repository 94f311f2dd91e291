"""What a reward asks of prompts is said before the run, and how long a batch of rewards may take."""

from __future__ import annotations

import numpy as np
import pytest

from rlhfspec.cluster.plan.reward_plan import require_references, scoring_timeout_s
from rlhfspec.core.errors import DataError, RewardError
from rlhfspec.core.records import Prompt
from rlhfspec.core.settings.environment import EnvironmentConfig
from rlhfspec.core.settings.reward import RewardConfig
from rlhfspec.learning.environments.calculator import Calculator

GOOD = ("so #### 72", "7", "-1,000.5")


def asks(
    environment: dict | None = None, reward: dict | None = None
) -> tuple[RewardConfig, EnvironmentConfig]:
    return RewardConfig(**(reward or {})), EnvironmentConfig(**(environment or {}))


def prompts(*references: str) -> list[Prompt]:
    return [
        Prompt(prompt_id=number, token_ids=np.arange(3), text="q", reference=reference)
        for number, reference in enumerate(references)
    ]


def test_a_calculator_wants_numbers_or_nothing() -> None:
    calculates = asks({"kind": "calculator"})
    require_references(*calculates, Calculator(), prompts(*GOOD, ""))
    with pytest.raises(RewardError, match=r"prompt 3: .*got 'Paris'.*\(and 1 more prompts like it\)"):
        require_references(*calculates, Calculator(), prompts(*GOOD, "Paris", "Rome"))
    for choice in ("end", "skip"):
        require_references(*asks({"kind": "calculator", "on_error": choice}), Calculator(), prompts("Paris"))


def test_the_gsm8k_rule_wants_a_number_of_every_prompt() -> None:
    rule = asks(reward={"kind": "gsm8k"})
    require_references(*rule, None, prompts(*GOOD))
    with pytest.raises(RewardError, match="prompt 1: the reference must be a plain number"):
        require_references(*rule, None, prompts("7", ""))
    require_references(*asks(reward={"kind": "gsm8k", "on_error": "skip"}), None, prompts(""))
    require_references(*asks(reward={"kind": "chain"}), None, prompts(""))


class Whole:
    """An environment of a user's."""

    def reset(self, prompt: Prompt) -> None: ...
    def step(self, response: str) -> None: ...
    def require_prompt(self, prompt: Prompt) -> None:
        int(prompt.reference)


def test_what_a_users_class_raises_is_said_with_its_name() -> None:
    played = asks({"kind": "my_tools:Whole"})
    require_references(*played, Whole(), prompts("1"))  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"environment my_tools:Whole: ValueError: .*'x'.*fix the data"):
        require_references(*played, Whole(), prompts("1", "x"))  # type: ignore[arg-type]


def limit(**reward) -> float:
    return scoring_timeout_s(RewardConfig(**reward), 100.0)


def test_rules_have_an_orders_time():
    assert limit(kind="chain") == 100.0


def test_functions_may_hang_together_and_then_one_by_one():
    assert limit(kind="package.module:function", batch_size=8, timeout_s=5.0) == 100.0 + 9 * 5.0


def test_a_server_is_asked_again_and_again():
    server = {"retries": 2, "timeout_s": 10.0, "backoff_s": 1.0}
    assert (
        limit(kind="serve", url="http://127.0.0.1:8000/score", server=server) >= 100.0 + 3 * 10.0 + 1.0 + 2.0
    )
