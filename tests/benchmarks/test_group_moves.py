"""Samples that move between groups of one and two ranks, faults at stages of their moves, are those of one rank."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rlhfspec.benchmarks.faulty.group_moves import QUICK_CARDS, moves_under_faults
from rlhfspec.benchmarks.support.workload import Workload
from rlhfspec.core.records import Prompt, SamplingParams
from rlhfspec.learning.models.make import PairPaths


def workload(folder: Path) -> Workload:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    random = np.random.default_rng(1)
    return Workload(
        name="p",
        paths=PairPaths(target=folder, draft=folder),
        known_tokenizer=None,
        prompts=[Prompt(prompt_id=index, token_ids=random.integers(1, 4096, 9)) for index in range(12)],
        sampling=SamplingParams(max_new_tokens=300),
    )


@pytest.mark.ray
@pytest.mark.slow
def test_moves_between_groups_under_faults_lose_and_change_nothing(local_ray: None, tmp_path: Path) -> None:
    found = moves_under_faults(workload(tmp_path), (1, 2), QUICK_CARDS, at_least=10)
    assert found["differing_samples"] == found["missing_samples"] == found["alarms"] == 0
    assert found["migrations"] >= 10 and found["samples"] >= 12
    assert found["kill_follower"] == found["freeze_leader"] == found["lose"] == 1
