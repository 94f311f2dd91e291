"""How long one batch of rewards may take: whatever its functions and its server are allowed."""

from rlhfspec.cluster.plan.reward_plan import scoring_timeout_s
from rlhfspec.core.settings.reward import RewardConfig


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
