"""Generation two versions ahead of learning, on real actors: the run of one process that follows the same plan.

An instance is lost in the midst of it, rewards come after the version that they could have delayed, and the run is cut
off and resumed from a state with samples in flight.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import ray
import yaml
from loop_hooks import before_updates, beside_updates

from rlhfspec.actors.workers.reward_actors import RewardPool
from rlhfspec.cluster.cli import main
from rlhfspec.cluster.folder.layout import RunDir
from rlhfspec.cluster.run.stream import Collected, RolloutStream
from rlhfspec.cluster.run.update import Update
from rlhfspec.cluster.system.system import System
from rlhfspec.cluster.verify.verify_run import verify_run
from rlhfspec.core.checkpoint_manifest import state_folders
from rlhfspec.core.config import Config
from rlhfspec.core.config_io import config_from_dict
from rlhfspec.core.errors import RewardServerLost
from rlhfspec.core.metrics import read_metrics
from rlhfspec.core.records import Rollout
from rlhfspec.engine.build import build_engine
from rlhfspec.engine.weights.chunks import model_checksum, pack_weights, unpack_weights
from rlhfspec.engine.weights.loading import load_causal_lm, load_tokenizer
from rlhfspec.learning.data.chat.written_text import response_text
from rlhfspec.learning.data.cursor import PromptCursor
from rlhfspec.learning.data.prompts import load_prompts, sampling_params
from rlhfspec.learning.rewards.reward_function import build_reward
from rlhfspec.learning.training.learner import Learner
from rlhfspec.policies.staleness.recorded import PhasePlan, Recorded
from tests.conftest import TinyPair

pytestmark = [pytest.mark.ray, pytest.mark.slow]

SAMPLES, ITERATIONS, STALENESS, TOKENS = 6, 4, 2, 30


def tree(pair: TinyPair, folder: Path) -> dict:
    return {
        "run": {
            "iterations": ITERATIONS,
            "seed": 5,
            "name": "ahead",
            "output_dir": str(folder / "runs"),
            "cache_dir": str(folder / "cache"),
            "state_every": 1,
            "keep_states": ITERATIONS,
            "checkpoint_every": 1,
        },
        "models": {"target": str(pair.target), "draft": str(pair.draft)},
        "data": {"task": "chain", "limit": 40},
        "reward": {"kind": "sample_rewards:vowel_share"},
        "sampling": {"max_new_tokens": TOKENS},
        "speculation": {"policy": "fixed", "num_nodes": 6, "depth": 3, "branching": 2},
        "rollout": {"prompts_per_iteration": SAMPLES, "max_staleness": STALENESS},
        "engine": {"max_running_samples": 4},
        "algorithm": {"correction": {"kind": "tis"}},
        "trainer": {"minibatch_size": 3, "learning_rate": 1e-3, "num_threads": 1},
        "drafter_training": {"budget_share": 1.0, "max_passes": 1},
        "cluster": {"dashboard": False},
    }


def in_one_process(config: Config) -> tuple[list[list[Rollout]], str]:
    """The same phases without Ray, without speculation, one after the other."""
    tokenizer = load_tokenizer(config.models.target)
    served, learned = (load_causal_lm(config.models.target, "float32") for _ in range(2))
    engine = build_engine(
        served,
        None,
        engine=config.engine.model_copy(update={"max_running_samples": 7}),
        speculation=config.speculation.model_copy(update={"policy": "off"}),
        max_total_tokens=128,
    )
    learner = Learner(
        learned,
        algorithm=config.algorithm,
        trainer=config.trainer,
        temperature=config.sampling.temperature,
        seed=config.run.seed,
        pad_token_id=tokenizer.pad_token_id,
    )
    cursor = PromptCursor(
        load_prompts(config.data, tokenizer, seed=config.run.seed), run_seed=config.run.seed, shuffle=True
    )
    reward, sampling = build_reward(config.reward), sampling_params(config.sampling, tokenizer)
    plan = PhasePlan(
        max_staleness=STALENESS,
        weight_load="reprefill",
        max_new_tokens=TOKENS,
        num_iterations=config.run.iterations,
    )
    schedule = Recorded(plan, lambda: cursor.next_requests(SAMPLES, 1, sampling))
    batches = []
    for phase in range(-1, config.run.iterations):
        if phase >= 0:
            batches.append(schedule.take(phase))
        for completion in engine.generate(schedule.begin(phase)):
            if (one := schedule.whole(completion)) is not None:
                request, done = one
                text = response_text(tokenizer, done)
                (value,) = reward.score([request.prompt], [text])
                rollout = Rollout(prompt=request.prompt, completion=done, response_text=text, reward=value)
                schedule.ended(done.key, rollout)
        if phase >= 0:
            learner.update(batches[-1], recompute_old=True)
            manifest, chunks = pack_weights(
                learner.model, name="target", weight_version=learner.weight_version
            )
            engine.load_weights(manifest, unpack_weights(manifest, chunks))
    return batches, model_checksum(learner.model)


def train(config: dict, folder: Path) -> RunDir:
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(config))
    assert main(["train", "--config", str(file)]) == 0
    (path,) = (folder / "runs").iterdir()
    return RunDir.open(path)


def kill_an_instance(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Kill gen-1 once it decodes from version 1; who was killed."""
    killed, before = list[str](), dict[Update, int]()

    def look(update: Update, system: System) -> None:
        emitted = system.scheduler.stats.num_emitted_tokens
        has_begun = emitted > before.setdefault(update, emitted)
        if system.target.manifest.weight_version == 1 and has_begun and not killed:
            killed.append("gen-1")
            ray.kill(system.generation.instances["gen-1"])

    beside_updates(monkeypatch, look)
    return killed


def delay_rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let rewards come only while an update waits for them: every version comes before those of its phase."""
    really, waiting = RolloutStream.phase, [lambda: False]

    def phase(stream: RolloutStream, schedule, number=0, *, beside=None, **more) -> Collected:
        rewards = stream._system.rewards
        receive, waiting[0] = type(rewards).collect, waiting[0] if beside is None else beside.awaits_rewards
        rewards.collect = lambda *, wait_s: receive(rewards, wait_s=wait_s) if waiting[0]() else []
        return really(stream, schedule, number, beside=beside, **more)

    monkeypatch.setattr(RolloutStream, "phase", phase)


@pytest.mark.long
def test_rewards_that_are_lost_beside_an_update_cost_no_iteration(
    local_ray: None, tiny_pair: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    receive, learning = RewardPool.collect, list[System]()

    def receive_or_lose(rewards: RewardPool, *, wait_s: float):
        if learning and learning[0].is_learning and learning[0].target.manifest.weight_version == 1:
            raise RewardServerLost("the reward server does not answer")
        return receive(rewards, wait_s=wait_s)

    before_updates(monkeypatch, lambda system: learning.insert(0, system))
    monkeypatch.setattr(RewardPool, "collect", receive_or_lose)
    config = tree(tiny_pair, tmp_path)
    config["run"]["state_every"] = 10
    config["evaluation"] = {"every": 1, "at_start": False, "data": {"task": "chain", "limit": 2}}
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(config))
    assert main(["train", "--config", str(file)]) == 1
    said = capsys.readouterr()
    assert "no evaluation" in said.out + said.err
    assert (
        "2 iterations are finished; go on with `rlhfspec train --resume" in said.err.strip().splitlines()[-1]
    )
    (path,) = (tmp_path / "runs").iterdir()
    assert [folder.name for folder in state_folders(path / "checkpoints")] == ["state_0002"]
    assert main(["train", "--resume", str(path)]) == 0
    _, checksum = in_one_process(config_from_dict(config))
    assert f"parameter checksum {checksum} (weight version {ITERATIONS})" in capsys.readouterr().out


def test_a_run_ahead_that_loses_an_instance_is_that_of_one_process(
    local_ray: None, tiny_pair: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    delay_rewards(monkeypatch)
    killed = kill_an_instance(monkeypatch)
    run = train(tree(tiny_pair, tmp_path), tmp_path)
    assert killed
    batches, checksum = in_one_process(config_from_dict(tree(tiny_pair, tmp_path)))
    switched = 0
    for iteration, batch in enumerate(batches):
        rows = pq.read_table(run.rollouts_file(iteration)).to_pylist()
        assert [row["sample_index"] for row in rows] == [r.completion.key.sample_index for r in batch]
        for row, rollout in zip(rows, batch, strict=True):
            done = rollout.completion
            assert row["response_token_ids"] == done.token_ids.tolist()
            assert np.float32(row["policy_logprobs"]).tobytes() == done.policy_logprobs.tobytes()
            assert row["reward"] == rollout.reward.value
            spans = [(span.weight_version, span.first_position) for span in done.weight_spans]
            assert spans[-1][0] == row["weight_version"]
            if len(spans) > 1:
                switched += 1
                assert list(zip(row["span_versions"], row["span_positions"], strict=True)) == spans
    assert switched, "some responses are of two versions"
    assert f"parameter checksum {checksum} (weight version {ITERATIONS})" in capsys.readouterr().out
    verification = verify_run(run.path, share=1.0)
    assert verification.holds and verification.num_regenerated == ITERATIONS * SAMPLES
    assert all("time/update_hidden_s" in row for row in read_metrics(run.metrics_file))

    cut = shutil.copytree(run.path, tmp_path / "cut")
    for folder in state_folders(cut / "checkpoints"):
        if folder.name > "state_0001":
            shutil.rmtree(folder)
    in_flight = cut / "checkpoints" / "state_0001" / "in_flight"
    assert list(in_flight.glob("*_open.parquet")) and list(in_flight.glob("*_unscored.parquet"))
    RunDir(path=cut).set_status("interrupted", "killed")
    assert main(["train", "--resume", str(cut)]) == 0
    assert f"parameter checksum {checksum} (weight version {ITERATIONS})" in capsys.readouterr().out
