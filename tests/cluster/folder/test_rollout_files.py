"""Order and age of rollouts, Parquet files and iteration figures, on hand-made rollouts."""

from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest

from rlhfspec.actors.actor_messages import LoadedWeights
from rlhfspec.cluster.folder.rollouts import locations_in, read_recorded, write_rollouts
from rlhfspec.cluster.observe.iteration_metrics import iteration_metrics
from rlhfspec.cluster.weights.publish import confirm
from rlhfspec.core.decode_records import GenerationStats
from rlhfspec.core.errors import WeightsError
from rlhfspec.core.records import (
    Completion,
    FinishReason,
    Prompt,
    Reward,
    Rollout,
    SampleKey,
    UpdateReport,
    WeightSpan,
)
from rlhfspec.core.weight_records import WeightManifest
from rlhfspec.policies.staleness.rollout_schedule import in_order, require_fresh


def rollout(index: int, *, reward: float = 1.0, tokens: int = 2, version: int = 3, **parts: float) -> Rollout:
    completion = Completion(
        key=SampleKey(run_seed=2**63 - 1, sample_index=index),
        prompt_id=index,
        group_id=0,
        epoch=0,
        token_ids=np.arange(tokens),
        policy_logprobs=np.full(tokens, -0.5, dtype=np.float32),
        sampling_logprobs=np.full(tokens, -0.25, dtype=np.float32),
        finish_reason=FinishReason.LENGTH,
        weight_spans=(WeightSpan(weight_version=version, first_position=0),),
        instance="gen-0",
        num_decode_steps=1,
        num_accepted_tokens=1,
    )
    prompt = Prompt(prompt_id=index, token_ids=np.array([7]), text="q", reference="r")
    return Rollout(
        prompt=prompt,
        completion=completion,
        response_text="ab",
        reward=Reward(value=reward, parts=parts),
    )


def test_rollouts_are_put_in_order_by_sample_index():
    ordered = in_order([rollout(index) for index in (5, 1, 3)])
    assert [r.completion.key.sample_index for r in ordered] == [1, 3, 5]


@pytest.mark.parametrize("trainer_version", [2, 4])
def test_what_other_weights_have_sampled_is_refused(trainer_version):
    with pytest.raises(WeightsError, match="sample 1 holds tokens of weight version 3 from gen-0"):
        require_fresh(rollout(1), weight_version=trainer_version, max_staleness=0)


def test_rollouts_read_back_from_parquet_as_they_were(tmp_path):
    path = tmp_path / "iteration_0000.parquet"
    write_rollouts(path, [rollout(1, reward=0.5, correct=1.0), rollout(2, tokens=0)])
    table = pq.read_table(path)
    first, second = table.to_pylist()
    assert first["run_seed"] == 2**63 - 1 and first["response_token_ids"] == [0, 1]
    assert first["policy_logprobs"] == [-0.5, -0.5] and first["sampling_logprobs"] == [-0.25, -0.25]
    assert first["reward"] == 0.5 and first["reward_parts"] == [("correct", 1.0)]
    assert first["weight_version"] == 3 and first["finish_reason"] == "length"
    assert second["response_token_ids"] == []
    assert table.schema.metadata[b"schema_version"] == b"5"
    assert [p.name for p in tmp_path.iterdir()] == ["iteration_0000.parquet"]


def test_depths_in_the_draft_come_back_where_they_are_known(tmp_path):
    path = tmp_path / "iteration_0000.parquet"
    known = rollout(1, tokens=4)
    depths = np.array([0, 1, 2, 0], dtype=np.uint8)
    known = replace(known, completion=replace(known.completion, draft_depths=depths))
    write_rollouts(path, [known, rollout(2)])
    first, second = (one.rollout.completion.draft_depths for one in read_recorded(locations_in(path)))
    assert first is not None and first.tolist() == [0, 1, 2, 0] and second is None


def test_metrics_on_hand_made_numbers():
    rollouts = [rollout(0, reward=1.0, tokens=4, correct=1.0), rollout(1, reward=0.0, tokens=2, correct=0.0)]
    stats = GenerationStats(
        num_sample_steps=3, num_emitted_tokens=6, num_draft_tokens=12, num_accepted_tokens=3
    )
    update = UpdateReport(
        weight_version=1,
        num_samples=2,
        num_tokens=6,
        num_optimizer_steps=1,
        metrics={"policy_loss": -0.5},
    )
    seconds = {"generate": 2.0, "score": 0.5, "update": 1.0, "publish": 0.25, "iteration": 4.0}
    metrics = iteration_metrics(rollouts, stats, update, seconds)
    assert metrics["reward/mean"] == 0.5 and metrics["reward/std"] == 0.5
    assert metrics["reward/accuracy"] == 0.5
    assert metrics["rollout/mean_acceptance_length"] == 2.0 and metrics["rollout/acceptance_rate"] == 0.25
    assert metrics["rollout/goodput_tokens_per_s"] == 3.0
    assert metrics["rollout/response_tokens_mean"] == 3.0 and metrics["rollout/response_tokens_max"] == 4.0
    assert metrics["time/publish_s"] == 0.25 and metrics["learner/policy_loss"] == -0.5


def test_accuracy_is_left_out_where_the_task_has_none():
    update = UpdateReport(weight_version=1, num_samples=1, num_tokens=2, num_optimizer_steps=1, metrics={})
    assert "reward/accuracy" not in iteration_metrics(
        [rollout(0)], GenerationStats(), update, {"generate": 1.0}
    )


@pytest.mark.parametrize(("version", "checksum"), [(4, "aa"), (3, "bb")])
def test_a_confirmation_of_other_weights_stops_the_run(version, checksum):
    manifest = WeightManifest(
        model="target",
        weight_version=3,
        checksum="aa",
        num_bytes=0,
        chunk_num_bytes=(),
        chunk_checksums=(),
        tensors=(),
        hf_config_json="{}",
    )
    answer = LoadedWeights(instance="gen-1", model="target", weight_version=version, checksum=checksum)
    with pytest.raises(
        WeightsError, match=f"gen-1 confirmed target version {version} with checksum {checksum}"
    ):
        confirm(answer, manifest)
