"""Faults planted in a training are told before it ends: a line, a metric, and an error where nothing can come of it.

Of the faults that other folders' tests plant, `ELSEWHERE` names the test.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from made_rollouts import rollout
from tiny_llama import tiny_llama

from rlhfspec.cluster.cli import main
from rlhfspec.cluster.folder.iteration_logs import read_weights_log
from rlhfspec.cluster.folder.layout import RunDir
from rlhfspec.cluster.observe.console import PipeConsole, Reporter
from rlhfspec.cluster.observe.outcome_checks import FIRST_LOG_RATIO, RATIO_OFF, UNCHANGED, Outcomes
from rlhfspec.cluster.observe.summary import as_text, summarise
from rlhfspec.cluster.plan.run_check import check_run
from rlhfspec.cluster.ray_start.ray_session import RaySession
from rlhfspec.cluster.run.loop import train
from rlhfspec.cluster.system.system import running_system
from rlhfspec.core.config import AlgorithmConfig, TrainerConfig
from rlhfspec.core.config_io import config_from_dict
from rlhfspec.core.errors import NumericsError, WeightsError
from rlhfspec.core.metrics import read_metrics, require_declared
from rlhfspec.core.records import Prompt, Rollout, SampleRequest, SamplingParams
from rlhfspec.core.settings.trainer import LoraConfig
from rlhfspec.engine.decoding.logprobs import token_logprobs
from rlhfspec.engine.weights.chunks import checksum_of
from rlhfspec.learning.training.learner import Learner
from rlhfspec.policies.staleness.in_turns import InTurns

ELSEWHERE = {
    "a truncated shard, wrong rope in the saved config": (
        "learning/training/test_reloaded.py",
        "test_a_fault_of_writing_is_told_and_the_model_before_stays",
    ),
    "an adapter of which a part is not merged": (
        "learning/training/test_reloaded.py",
        "test_a_merge_that_leaves_something_out_ends_a_job_whose_adapter_is_whole",
    ),
    "swapped end tokens": ("learning/training/test_reloaded.py", "test_swapped_end_tokens_are_told"),
    "a template without the system turn": (
        "learning/data/test_whole_turns.py",
        "test_a_system_prompt_that_the_template_leaves_out_is_refused",
    ),
}
"What is planted: the test's file and name."

LORA = LoraConfig(rank=4, alpha=64.0)
HUGE, NOTHING_MOVES = 1e-1, 1e-30


def learner_of(*, lora: LoraConfig | None = None) -> Learner:
    return Learner(
        tiny_llama(0, initializer_range=0.3).eval(),
        algorithm=AlgorithmConfig(kind="grpo", kl_coef=0.0),
        trainer=TrainerConfig(learning_rate=HUGE, minibatch_size=4, lora=lora),
        temperature=1.0,
        seed=0,
        pad_token_id=0,
    )


def sampled(model: Any, version: int) -> list[Rollout]:
    """Responses with log-probabilities of a model, as an instance that decodes it gives them."""
    made = []
    for index in range(4):
        tokens = np.random.default_rng(index).integers(2, 19, size=6)
        ids = torch.from_numpy(np.append([1, 2], tokens))[None]
        with torch.no_grad():
            logprobs = token_logprobs(model(ids).logits[0, 1:-1], ids[0, 2:], 1.0).numpy()
        one = rollout(index, group=index // 2, reward=float(index % 2), num_tokens=6)
        spans = (replace(one.completion.weight_spans[0], weight_version=version),)
        arrays = {"token_ids": tokens, "policy_logprobs": logprobs, "sampling_logprobs": logprobs}
        made.append(replace(one, completion=replace(one.completion, weight_spans=spans, **arrays)))
    return made


class Iterations:
    """Updates of a learner, and what a run makes of them: `decodes` is the model that the instances have."""

    def __init__(self, learner: Learner, decodes: Any) -> None:
        self.learner, self.decodes = learner, decodes
        self.outcomes = Outcomes(is_exact=True)
        self.rows: list[dict[str, float]] = []

    def lines(self) -> Iterator[str]:
        before = self._checksum()
        update = self.learner.update(sampled(self.decodes, self.learner.weight_version))
        row = {name if "/" in name else f"learner/{name}": value for name, value in update.metrics.items()}
        row[UNCHANGED] = float(self._checksum() == before)
        row["learner/num_optimizer_steps"] = float(update.num_optimizer_steps)
        self.rows.append(self.outcomes.judged(row))
        require_declared(self.rows[-1])
        self.outcomes.unmoved = update.unmoved
        return self.outcomes.lines(len(self.rows) - 1, self.rows[-1])

    def _checksum(self) -> str:
        return checksum_of(tensor for _, tensor in self.learner.weights())


@pytest.mark.parametrize("fault", ELSEWHERE)
def test_every_other_fault_is_planted_where_it_is_said(fault: str) -> None:
    file, name = ELSEWHERE[fault]
    assert f"def {name}(" in (Path(__file__).parents[1] / file).read_text()


@pytest.mark.parametrize("lora", [None, LORA], ids=["all weights", "LoRA"])
def test_an_honest_training_says_nothing(lora: LoraConfig | None) -> None:
    learner = learner_of(lora=lora)
    run = Iterations(learner, learner.model)
    for _ in range(3):
        assert list(run.lines()) == []
    assert all(row[FIRST_LOG_RATIO] < 1e-5 and not row[RATIO_OFF] for row in run.rows)
    assert run.rows[-1]["learner/num_unmoved_tensors"] == 0.0


def test_an_adapter_that_is_not_merged_ends_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    learner = learner_of(lora=LORA)
    assert learner.adapter is not None
    monkeypatch.setattr(learner.adapter, "merged_tensors", learner.adapter.base_tensors)
    run = Iterations(learner, tiny_llama(0, initializer_range=0.3).eval())
    lines = run.lines()
    assert "iteration 1: the new weights have the old ones' checksum after 1 steps" in next(lines)
    with pytest.raises(
        NumericsError, match=r"nothing can come of this training: every version has one checksum"
    ):
        next(lines)
    *said, _ = told = list(_until_the_error(run))
    assert any("nats a token from the sampler's" in line for line in said), told
    assert "instances do not decode what is trained" in told[-1]
    assert run.rows[-1][RATIO_OFF] == 1.0


def _until_the_error(run: Iterations) -> Iterator[str]:
    try:
        yield from run.lines()
    except NumericsError as error:
        yield str(error)


def test_weights_of_another_model_end_the_training_by_their_first_ratios() -> None:
    run = Iterations(learner_of(), tiny_llama(1, initializer_range=0.3).eval())
    with pytest.raises(
        NumericsError, match=r"nats a token from the sampler's, where rounding explains 0\.001"
    ):
        list(run.lines())


def test_tensors_that_no_gradient_reaches_are_named() -> None:
    learner = learner_of()
    mlp = learner.model.model.layers[0].mlp
    forward = mlp.forward
    mlp.forward = lambda states: forward(states).detach()
    run = Iterations(learner, learner.model)
    assert list(run.lines()) == [], "the first step does not tell yet"
    (line,) = run.lines()
    assert line.startswith("iteration 2: 4 tensors ought to learn and have had no gradient")
    assert "model.layers.0.mlp.down_proj.weight" in line
    assert run.rows[-1]["learner/num_unmoved_tensors"] == 4.0
    assert list(run.lines()) == [], "once"


def test_a_sample_of_a_stale_version_ends_the_training() -> None:
    (one,) = sampled(tiny_llama(0), 0)[:1]
    number = iter(range(9))

    def requests() -> list[SampleRequest]:
        key = replace(one.completion.key, sample_index=next(number))
        prompt = Prompt(prompt_id=0, token_ids=np.array([1, 2]))
        return [SampleRequest(key=key, prompt=prompt, sampling=SamplingParams(), group_id=0)]

    schedule = InTurns(requests, num_iterations=2)
    for batch in range(2):
        (asked,) = schedule.begin(batch)
        done = replace(one, completion=replace(one.completion, key=asked.key))
        assert schedule.whole(done.completion) is not None
        schedule.ended(asked.key, done)
        if batch == 0:
            assert schedule.take(0) == [done]
    with pytest.raises(
        WeightsError, match=r"weight version 0 from gen-0; the trainer is at 1.*missed a publication"
    ):
        schedule.take(1)


@pytest.mark.ray
@pytest.mark.slow
def test_a_run_whose_versions_have_one_checksum_ends_with_its_state_and_is_no_good_news(
    local_ray: None, tiny_pair: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Steps so small that every one rounds away: gradients are there, and nothing that is decoded ever changes."""
    config = config_from_dict(
        {
            "run": {"iterations": 3, "seed": 5, "checkpoint_every": 1},
            "models": {"target": str(tiny_pair.target)},
            "data": {"task": "chain", "limit": 16},
            "reward": {"kind": "sample_rewards:vowel_share"},
            "sampling": {"max_new_tokens": 12},
            "speculation": {"drafter": "none"},
            "rollout": {"prompts_per_iteration": 4},
            "engine": {"max_running_samples": 4},
            "trainer": {"learning_rate": NOTHING_MOVES, "num_threads": 1},
            "cluster": {"generation": {"num_actors": 1}},
        }
    )
    run_dir, printed = RunDir.create(config, tmp_path / "run"), io.StringIO()
    report = Reporter(PipeConsole(file=printed, width=200))
    session = RaySession(namespace="test-planted", is_local=False, dashboard_url=None)
    with (
        running_system(check_run(config, output_dir=tmp_path), session) as system,
        pytest.raises(NumericsError, match="every version has one checksum") as failed,
    ):
        train(system, run_dir, report)
    assert "go on with `rlhfspec train --resume" in " ".join(failed.value.__notes__)
    assert "iteration 1: the new weights have the old ones' checksum" in printed.getvalue()
    (row,) = read_metrics(run_dir.metrics_file)
    assert row[UNCHANGED] == 1.0 and row["learner/grad_norm"] > 0.0 and not row[RATIO_OFF]
    assert len(set(read_weights_log(run_dir.weights_file).values())) == 1

    summary = summarise([row])
    assert summary is not None and "every weight version has one checksum" in as_text(summary.rows())
    assert "tokens reproduce" not in as_text(summary.rows())
    assert main(["verify", str(run_dir.path), "--share", "1", "--engines", "1"]) == 1
    said = capsys.readouterr().out
    assert "FAULT: every weight version has one checksum" in said and said.endswith("0 differences\n")
