"""Training on episodes of several turns through the whole loop, on a tiny random pair and two instances."""

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from sample_environments import Parrot

from rlhfspec.cluster.folder.layout import RunDir
from rlhfspec.cluster.observe.console import Reporter
from rlhfspec.cluster.plan.inputs import read_inputs
from rlhfspec.cluster.plan.run_check import check_run
from rlhfspec.cluster.ray_start.ray_session import RaySession
from rlhfspec.cluster.run.loop import train
from rlhfspec.cluster.system.system import running_system
from rlhfspec.cluster.verify.verify_run import verify_run
from rlhfspec.core.config import Config
from rlhfspec.core.config_io import config_from_dict
from rlhfspec.core.metrics import read_metrics
from rlhfspec.core.records import Completion, SampleRequest
from rlhfspec.engine.build import build_engine
from rlhfspec.engine.weights.loading import load_causal_lm
from rlhfspec.learning.data.chat.written_text import written_text
from rlhfspec.learning.data.cursor import PromptCursor
from rlhfspec.learning.data.prompts import sampling_params
from rlhfspec.learning.environments.episode import Episode, EpisodeLimits
from rlhfspec.learning.environments.observations import ObservationRenderer, ending_with

SAMPLES = 8
LIMITS = {"max_turns": 6, "max_turn_tokens": 20}


@pytest.fixture(scope="module")
def config(tiny_pair) -> Config:
    return config_from_dict(
        {
            "run": {"iterations": 2, "seed": 5},
            "models": {"target": str(tiny_pair.target), "draft": str(tiny_pair.draft)},
            "data": {"task": "chain", "limit": 64},
            "reward": {"kind": "environment"},
            "environment": {
                "kind": "sample_environments:Parrot",
                "options": {"turns": 4},
                "max_observation_tokens": 16,
                **LIMITS,
            },
            "sampling": {"max_new_tokens": 60},
            "speculation": {"policy": "fixed", "num_nodes": 8, "depth": 4, "branching": 2},
            "rollout": {"prompts_per_iteration": SAMPLES},
            "engine": {"max_running_samples": 4},
            "reallocation": {"interval_s": 0.01},
            "trainer": {"minibatch_size": 4, "learning_rate": 1e-3, "num_threads": 1},
            "drafter_training": {"budget_share": 1.0, "max_passes": 1},
            "cluster": {"trainer": {"num_cpus": 0.25}},
        }
    )


def played_alone(config: Config) -> dict[int, Completion]:
    """The first iteration's episodes on one engine without speculation."""
    inputs = read_inputs(config)
    tokenizer = inputs.tokenizer
    cursor = PromptCursor(inputs.dataset, run_seed=config.run.seed, shuffle=config.data.shuffle)
    engine = build_engine(
        load_causal_lm(config.models.target, "float32"),
        None,
        engine=config.engine.model_copy(update={"probe": False, "turn_cache_mb": 0.0}),
        speculation=config.speculation.model_copy(update={"policy": "off"}),
        max_total_tokens=inputs.dataset.max_prompt_tokens + config.max_response_tokens,
        vocab_size=len(tokenizer),
    )
    renderer = ObservationRenderer(tokenizer, max_tokens=16)
    limits = EpisodeLimits(**LIMITS, stop_token_ids=ending_with(tokenizer, Parrot.stop_texts))
    done = {}
    for request in cursor.next_requests(SAMPLES, 1, sampling_params(config.sampling, tokenizer)):
        parrot, episode = Parrot(turns=4), Episode(request, limits)
        parrot.reset(request.prompt)
        turn: SampleRequest | Completion = episode.first()
        while isinstance(turn, SampleRequest):
            (completion,) = engine.generate([turn])
            text = written_text(tokenizer, episode.new_tokens(completion), stopped=True)
            episode.responses.append(text)
            step = parrot.step(text)
            given = renderer.give(
                step.observation, prompt=request.prompt, last_token=int(completion.token_ids[-1])
            ).token_ids
            turn = episode.goes_on(completion, given, reward=step.reward, done=step.done)
        done[request.key.sample_index] = turn
    return done


@pytest.fixture(scope="module")
def run_dir(local_ray, config, tmp_path_factory) -> Iterator[RunDir]:
    folder = RunDir.create(config, tmp_path_factory.mktemp("runs") / "turns")
    session = RaySession(namespace="test-loop-turns", is_local=False, dashboard_url=None)
    with running_system(check_run(config, output_dir=Path.cwd()), session) as system:
        train(system, folder, Reporter())
        yield folder


def test_the_check_counts_environments_and_what_they_may_add(config, tmp_path):
    plan = check_run(config, output_dir=tmp_path)
    assert any("environment" in label for label, _ in plan.memory.rows())
    assert any(line.startswith("  environment 1 x") for line in plan.report)


@pytest.mark.ray
@pytest.mark.slow
def test_rollouts_are_those_of_one_engine_without_speculation(config, run_dir):
    rows = pq.read_table(run_dir.rollouts_file(0)).to_pylist()
    expected = played_alone(config)
    assert [row["sample_index"] for row in rows] == sorted(expected)
    for row in rows:
        alone = expected[row["sample_index"]]
        assert row["response_token_ids"] == alone.token_ids.tolist()
        assert row["response_sampled"] == alone.is_sampled.tolist()
        assert np.array_equal(np.float32(row["policy_logprobs"]), alone.policy_logprobs)
        assert row["finish_reason"] == str(alone.finish_reason)
    assert any(not all(row["response_sampled"]) for row in rows)


@pytest.mark.ray
@pytest.mark.slow
def test_the_turns_of_the_run_folder_come_out_again(run_dir):
    verification = verify_run(run_dir.path, share=1.0, num_engines=1)
    assert verification.holds, verification.differences
    assert verification.num_regenerated == SAMPLES and verification.num_rewards == 0


@pytest.mark.ray
@pytest.mark.slow
def test_rewards_are_the_sums_of_the_steps(run_dir):
    for iteration in range(2):
        for row in pq.read_table(run_dir.rollouts_file(iteration)).to_pylist():
            turns = dict(row["reward_parts"])["num_turns"]
            assert row["reward"] == pytest.approx(0.25 * turns)
            # Parrot's turns end with an `a` or the end token, unless they are cut
            assert turns == 4 or row["finish_reason"] == "length"


@pytest.mark.ray
@pytest.mark.slow
def test_every_figure_is_finite_and_only_sampled_tokens_are_learned_from(run_dir):
    metrics = read_metrics(run_dir.metrics_file)
    assert len(metrics) == 2
    for iteration, row in enumerate(metrics):
        assert all(math.isfinite(value) for value in row.values())
        rows = pq.read_table(run_dir.rollouts_file(iteration)).to_pylist()
        num_sampled = sum(sum(row["response_sampled"]) for row in rows)
        assert row["rollout/response_tokens_mean"] == pytest.approx(num_sampled / SAMPLES)
        assert abs(row["learner/ratio_at_first_minibatch"] - 1.0) < 1e-4
        assert row["environment/turns_mean"] > 1.0
        assert 0.0 < row["environment/given_token_share"] < 1.0
        assert row["environment/num_failed"] == 0.0
