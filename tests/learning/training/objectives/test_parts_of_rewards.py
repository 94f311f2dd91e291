"""Rewards of several parts, and of a whole batch: the numbers of TRL's own lines, which are run here as they are."""

from __future__ import annotations

import ast
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhfspec.benchmarks.peers.build import trl_folder
from rlhfspec.core.config import Config
from rlhfspec.core.config_io import config_from_dict
from rlhfspec.core.errors import ConfigError
from rlhfspec.learning.training.objectives.advantages import batch_std_advantages, normalized_sum

WEIGHTS = [1.0, 0.25, 2.0]
GROUPS = torch.arange(6).repeat_interleave(4)


def parts() -> Tensor:
    """Six groups of four: the second is equal in the first part, the third part does not apply to some."""
    generator = torch.Generator().manual_seed(3)
    made = torch.randn((24, 3), generator=generator) * torch.tensor([1.0, 40.0, 0.01])
    made[4:8, 0] = 0.5
    made[[0, 1, 9], 2] = torch.nan
    return made


def of_trl(rewards_per_func: Tensor, weights: list[float], **settings: str) -> Tensor:
    """What `GRPOTrainer` computes between the rewards and the slice of its process."""
    folder = trl_folder("1.16.0")
    if folder is None:
        pytest.skip("TRL 1.16.0 was not got (benchmarks/peers)")
    (trainer,) = folder.rglob("trl/trainer/grpo_trainer.py")
    text = trainer.read_text()
    named = "self.multi_objective_aggregation == 'sum_then_normalize'"
    (lines,) = [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.If) and ast.unparse(node.test) == named
    ]
    utils = ast.parse((Path(trainer).parent / "utils.py").read_text())
    (nanstd,) = [n for n in utils.body if isinstance(n, ast.FunctionDef) and n.name == "nanstd"]
    names: dict[str, Any] = {
        "torch": torch,
        "self": SimpleNamespace(
            **{"multi_objective_aggregation": "sum_then_normalize", "scale_rewards": "group", **settings},
            reward_weights=torch.tensor(weights),
            reward_funcs=weights,
        ),
        "rewards_per_func": rewards_per_func,
        "num_generations": 4,
        "device": torch.device("cpu"),
        "unscorable_mask": torch.isnan(rewards_per_func).all(dim=1),
    }
    exec(ast.unparse(nanstd), names)
    exec(textwrap.dedent(ast.unparse(lines)), names)
    return torch.nan_to_num(names["advantages"], nan=0.0)


def test_the_deviation_of_the_batch_is_trls() -> None:
    rewards = parts()[:, 1]
    theirs = of_trl(rewards[:, None].double(), [1.0], scale_rewards="batch")
    torch.testing.assert_close(
        batch_std_advantages(rewards, GROUPS), theirs.float(), rtol=1e-6, atol=1e-6, check_dtype=False
    )
    assert torch.equal(
        batch_std_advantages(torch.full((4,), 0.1), torch.zeros(4, dtype=torch.int64)), torch.zeros(4)
    )
    assert torch.equal(batch_std_advantages(torch.ones(1), torch.zeros(1, dtype=torch.int64)), torch.zeros(1))


def test_parts_that_are_compared_before_they_are_summed_are_trls() -> None:
    summed = normalized_sum(parts(), WEIGHTS, GROUPS)
    theirs = of_trl(parts().double(), WEIGHTS, multi_objective_aggregation="normalize_then_sum")
    torch.testing.assert_close(
        batch_std_advantages(summed, GROUPS), theirs.float(), rtol=1e-6, atol=1e-6, check_dtype=False
    )
    # by their sum, the second part, forty times as wide, decides alone
    assert summed[4:8].any() and float(summed.view(6, 4).sum(dim=1).abs().max()) < 1e-6


def config(**algorithm: object) -> dict[str, Any]:
    part = {"kind": "gsm8k", "name": "a"}
    return {
        "models": {"target": "t", "draft": "d"},
        "data": {"task": "chain"},
        "rollout": {"samples_per_prompt": 2},
        "reward": {"parts": [part, {**part, "name": "b"}]},
        "algorithm": {"kind": "grpo", "advantage": "batch_std", "combine": "normalize_then_sum", **algorithm},
    }


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"reward": {"kind": "gsm8k"}}, "reward.parts is empty"),
        ({"reward": {**config()["reward"], "shaping": {"length_penalty": 0.1}}}, "reward.shaping is no part"),
        (
            {"algorithm": {"kind": "ppo", "combine": "normalize_then_sum"}},
            "combine is of advantages that compare",
        ),
    ],
)
def test_what_is_not_compared_by_itself_is_refused(change: dict[str, Any], words: str) -> None:
    assert isinstance(config_from_dict(config()), Config)
    with pytest.raises(ConfigError, match=words):
        config_from_dict({**config(), **change})
