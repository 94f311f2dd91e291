"""LoRA through the whole loop, by two trainers that share every weight: merged weights are sampled from."""

import peft
import pytest
import ray
import torch

from cluster.loop import train
from cluster.placement.ray_session import RaySession
from cluster.preflight.inputs import read_inputs
from cluster.preflight.run_check import check_run
from cluster.reporting.console import Reporter
from cluster.run_folder.layout import RunDir
from cluster.system import running_system
from core.checkpoint_manifest import verify_checkpoint
from core.config_io import config_from_dict
from core.errors import InstanceLost
from core.metrics import read_metrics
from engine.weights.chunks import model_checksum
from engine.weights.loading import load_causal_lm

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.fixture
def config(tiny_pair):
    return config_from_dict(
        {
            "run": {"iterations": 2, "seed": 5},
            "models": {"target": str(tiny_pair.target), "draft": str(tiny_pair.draft)},
            "data": {"task": "chain", "limit": 64},
            "reward": {"kind": "sample_rewards:vowel_share", "batch_size": 4},
            "sampling": {"max_new_tokens": 24},
            "speculation": {"policy": "fixed", "num_nodes": 4, "depth": 4},
            "rollout": {"prompts_per_iteration": 4, "samples_per_prompt": 3},
            "engine": {"max_running_samples": 4},
            "algorithm": {"kind": "grpo"},
            "trainer": {"minibatch_size": 6, "learning_rate": 1e-2, "num_threads": 1, "lora": {"rank": 4}},
            "cluster": {"trainer": {"num_actors": 2, "num_cpus": 0.25}},
        }
    )


def test_the_check_says_what_share_learns(config, tmp_path):
    report = check_run(config, output_dir=tmp_path)
    assert any("LoRA: 0.0" in line and "parameters learn" in line for line in report.lines())


def test_a_run_with_adapters_leaves_the_merged_model_and_the_adapter_and_names_a_dead_trainer(
    config, local_ray, tiny_pair, tmp_path
):
    run_dir = RunDir.create(config, tmp_path / "lora")
    session = RaySession(namespace="test-loop-lora", is_local=False, dashboard_url=None)
    with running_system(config, session, read_inputs(config)) as system:
        train(system, run_dir, Reporter())
        published = system.target.manifest
        ray.kill(ray.get_actor("trainer-1", namespace=session.namespace))
        with pytest.raises(InstanceLost, match="trainer-1 died while the loop waited"):
            system.trainers.take()
    merged = load_causal_lm(str(run_dir.checkpoint_dir("target")), "float32")
    assert model_checksum(merged) == published.checksum
    adapter = run_dir.checkpoint_dir("adapter")
    assert verify_checkpoint(adapter)["parameter_checksum"] == published.checksum
    base = load_causal_lm(str(tiny_pair.target), "float32")
    ids = torch.arange(2, 22)[None]
    with torch.no_grad():
        plain, expected = base(ids).logits, merged(ids).logits
        adapted = peft.PeftModel.from_pretrained(base, adapter)(ids).logits
    assert torch.allclose(adapted, expected, atol=1e-5)
    assert not torch.allclose(plain, expected, atol=1e-3)
    for figures in read_metrics(run_dir.metrics_file):
        assert abs(figures["learner/ratio_at_first_minibatch"] - 1.0) < 1e-4, "sampled from what was merged"
