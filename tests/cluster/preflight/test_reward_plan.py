"""How long one batch of rewards may take: whatever its functions and its server are allowed."""

from cluster.preflight.reward_plan import scoring_timeout_s
from core.config import Config
from core.config_io import config_from_dict


def config(**reward) -> Config:
    tree = {"models": {"target": "demo"}, "data": {"task": "chain"}, "speculation": {"drafter": "none"}}
    return config_from_dict(tree | {"reward": reward, "cluster": {"order_timeout_s": 100.0}})


def test_rules_have_an_orders_time():
    assert scoring_timeout_s(config(kind="chain")) == 100.0


def test_functions_may_hang_together_and_then_one_by_one():
    made = config(kind="package.module:function", batch_size=8, timeout_s=5.0)
    assert scoring_timeout_s(made) == 100.0 + 9 * 5.0


def test_a_server_is_asked_again_and_again():
    server = {"retries": 2, "timeout_s": 10.0, "backoff_s": 1.0}
    made = config(kind="serve", url="http://127.0.0.1:8000/score", server=server)
    assert scoring_timeout_s(made) >= 100.0 + 3 * 10.0 + 1.0 + 2.0
