"""The loop on real actors with a tiny random pair, against the same samples made in one process.

One system is started for the whole file: it trains three iterations with evaluations, then loses an instance.
"""

import json
import math
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import ray
from browser import require_good_page
from loop_hooks import Turns, watch_turns
from transformers import AutoModelForCausalLM, AutoTokenizer
from unhurried_refits import give_refits_time

from rlhfspec.cluster.cli import main
from rlhfspec.cluster.folder.layout import RunDir
from rlhfspec.cluster.observe.console import Reporter
from rlhfspec.cluster.observe.summary import STEP_PARTS, UPDATE_PARTS
from rlhfspec.cluster.plan.run_check import check_run
from rlhfspec.cluster.ray_start.ray_session import RaySession
from rlhfspec.cluster.run.evaluate import by_key, evaluate, evaluation_requests
from rlhfspec.cluster.run.loop import train
from rlhfspec.cluster.run.recorder import Recorder
from rlhfspec.cluster.run.stream import RolloutStream
from rlhfspec.cluster.system.system import System, running_system
from rlhfspec.cluster.verify.verify_run import verify_run
from rlhfspec.core.checkpoint_manifest import verify_checkpoint
from rlhfspec.core.config import Config
from rlhfspec.core.config_io import config_from_dict
from rlhfspec.core.metrics import read_metrics
from rlhfspec.core.records import Completion, Rollout, SampleRequest
from rlhfspec.engine.build import build_engine
from rlhfspec.engine.engine import Engine
from rlhfspec.engine.weights.chunks import model_checksum, pack_weights, unpack_weights
from rlhfspec.engine.weights.loading import load_causal_lm, load_tokenizer
from rlhfspec.learning.data.chat.written_text import response_text
from rlhfspec.learning.data.cursor import PromptCursor
from rlhfspec.learning.data.prompts import load_prompts, sampling_params
from rlhfspec.learning.rewards.reward_function import build_reward
from rlhfspec.learning.training.learner import Learner
from rlhfspec.profiles.step_log import read_step_log

pytestmark = [pytest.mark.ray, pytest.mark.slow]

SAMPLES = 12
ITERATIONS = 3
LATE_SAMPLES = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A system after its iterations, and what was noted on the way."""

    system: System
    run_dir: RunDir
    turns: Turns
    notes: list[str]


class Notes(Reporter):
    def __init__(self) -> None:
        super().__init__()
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture(scope="module")
def config(tiny_pair) -> Config:
    return config_from_dict(
        {
            "run": {
                "iterations": ITERATIONS,
                "seed": 5,
                "step_log": True,
                "checkpoint_every": 1,
                "keep_checkpoints": 2,
            },
            "models": {"target": str(tiny_pair.target), "draft": str(tiny_pair.draft)},
            "data": {"task": "chain", "limit": 64},
            "reward": {"kind": "sample_rewards:vowel_share", "batch_size": 4},
            "sampling": {"max_new_tokens": 60},
            "speculation": {"policy": "fixed", "num_nodes": 8, "depth": 4, "branching": 2},
            "rollout": {"prompts_per_iteration": SAMPLES},
            "engine": {"max_running_samples": 4},
            # replacements and checkpoints then ask the trainer for what was broadcast
            "cluster": {"publication": {"transport": "broadcast"}},
            # a fast machine generates an iteration in less than the default between two plans
            "reallocation": {"interval_s": 0.01},
            "trainer": {
                "minibatch_size": 6,
                "learning_rate": 1e-3,
                "num_threads": 1,
                "block_samples": 2,
            },
            # passes end a refit here and not the clock, so that its outcome does not depend on the machine
            "drafter_training": {"budget_share": 1.0, "max_passes": 3, "learning_rate": 3e-3},
            "evaluation": {
                "every": 2,
                "data": {"task": "chain", "limit": 5},
                "samples_per_prompt": 2,
                "temperature": 0.7,
                "max_new_tokens": 30,
            },
        }
    )


@pytest.fixture(scope="module")
def trained(local_ray, config, tmp_path_factory) -> Iterator[Trained]:
    run_dir = RunDir.create(config, tmp_path_factory.mktemp("runs") / "run")
    session = RaySession(namespace="test-loop", is_local=False, dashboard_url=None)
    notes, report = [], Notes()
    with running_system(check_run(config, output_dir=Path.cwd()), session, note=notes.append) as system:
        # on a busy machine publishing the first one takes so long that the second would have no seconds
        give_refits_time(system)
        with pytest.MonkeyPatch.context() as monkeypatch:
            turns = watch_turns(monkeypatch)
            train(system, run_dir, report)
            Recorder(run_dir, Reporter()).pass_over(system.generation.instances)
        assert not any("broadcast failed" in note for note in notes), notes
        assert system.target.fetch is None, "its checkpoint brought what was broadcast into the object store"
        yield Trained(system=system, run_dir=run_dir, turns=turns, notes=report.notes)


def plain_engine(config: Config, target) -> Engine:
    """Plain decoding, another batch size."""
    return build_engine(
        target,
        None,
        engine=config.engine.model_copy(update={"max_running_samples": 7}),
        speculation=config.speculation.model_copy(update={"policy": "off"}),
        max_total_tokens=128,
    )


def train_in_one_process(config: Config) -> tuple[list[list[Rollout]], str]:
    """The same run without Ray, without speculation, without refits, without evaluations."""
    tokenizer = load_tokenizer(config.models.target)
    served, learned = (load_causal_lm(config.models.target, "float32") for _ in range(2))
    engine = plain_engine(config, served)
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
    reward = build_reward(config.reward)
    iterations = []
    for _ in range(config.run.iterations):
        requests = cursor.next_requests(SAMPLES, 1, sampling_params(config.sampling, tokenizer))
        done = engine.generate(requests)
        texts = [response_text(tokenizer, completion) for completion in done]
        prompts = [request.prompt for request in requests]
        rollouts = [
            Rollout(prompt=prompt, completion=completion, response_text=text, reward=value)
            for prompt, completion, text, value in zip(
                prompts, done, texts, reward.score(prompts, texts), strict=True
            )
        ]
        learner.update(rollouts)
        engine.load_weights(*_published(learner))
        iterations.append(rollouts)
    return iterations, model_checksum(learner.model)


def _published(learner: Learner):
    manifest, chunks = pack_weights(learner.model, name="target", weight_version=learner.weight_version)
    return manifest, unpack_weights(manifest, chunks)


def fingerprints(completions: Sequence[Completion]) -> list[tuple]:
    return [
        (
            c.key,
            c.finish_reason,
            c.token_ids.tobytes(),
            c.policy_logprobs.tobytes(),
            c.sampling_logprobs.tobytes(),
        )
        for c in completions
    ]


def rows_of(path: Path) -> list[dict]:
    return pq.read_table(path).to_pylist()


def test_speculation_with_refits_and_evaluations_on_two_instances_changes_neither_tokens_rewards_nor_parameters(
    trained, config
):
    iterations, checksum = train_in_one_process(config)
    for iteration, rollouts in enumerate(iterations):
        rows = rows_of(trained.run_dir.rollouts_file(iteration))
        assert {row["instance"] for row in rows} == {"gen-0", "gen-1"}
        assert [row["sample_index"] for row in rows] == [r.completion.key.sample_index for r in rollouts]
        for row, rollout in zip(rows, rollouts, strict=True):
            done = rollout.completion
            assert row["response_token_ids"] == done.token_ids.tolist()
            assert np.float32(row["policy_logprobs"]).tobytes() == done.policy_logprobs.tobytes()
            assert np.float32(row["sampling_logprobs"]).tobytes() == done.sampling_logprobs.tobytes()
            assert row["reward"] == rollout.reward.value
    manifest = trained.system.target.manifest
    assert (manifest.weight_version, manifest.checksum) == (ITERATIONS, checksum)


def test_the_metrics_say_what_happened(trained):
    first, *_, last = read_metrics(trained.run_dir.metrics_file)
    assert first["rollout/mean_acceptance_length"] > 1.0 and first["rollout/num_samples"] == SAMPLES
    assert first["reward/std"] > 0.0 and first["learner/grad_norm"] > 0.0
    assert abs(last["learner/ratio_at_first_minibatch"] - 1.0) < 1e-4
    parts = sum(first[f"time/{name}_s"] for name in STEP_PARTS)
    assert 0.0 < parts <= first["time/iteration_s"]
    publication = [first[f"time/publish_{name}_s"] for name in ("pack", "send", "load")]
    assert min(publication) >= 0.0 and 0.0 < sum(publication) <= first["time/publish_s"] + 1e-3


def test_instances_and_trainers_take_turns(trained: Trained) -> None:
    turns = trained.turns
    assert len(turns.updates) == len(turns.forwards) == ITERATIONS
    for began_s, over_s in turns.updates:
        assert [step for step in turns.steps if step.end_s > began_s and step.begin_s < over_s] == []
        assert [step for step in turns.steps if step.end_s <= began_s], "steps were counted"
    for at_phase, at_begin, at_end in turns.forwards:
        assert at_phase == at_begin < at_end, "a trainer computes beside no decode step"


def test_the_parts_of_a_publication_add_up(trained: Trained) -> None:
    rows = read_metrics(trained.run_dir.metrics_file)
    parts = [sum(row[f"time/publish_{name}_s"] for name in ("pack", "send", "load")) for row in rows]
    wholes = [row["time/publish_s"] for row in rows]
    assert all(part <= whole + 1e-3 for part, whole in zip(parts, wholes, strict=True))
    # what is left is the loop's own, notes and the weights log; a busy machine may stop it once, not every time
    close = [part == pytest.approx(w, rel=0.05, abs=0.05) for part, w in zip(parts, wholes, strict=True)]
    assert any(close), (parts, wholes)


def test_the_parts_of_an_update_add_up(trained: Trained) -> None:
    for row in read_metrics(trained.run_dir.metrics_file):
        parts = [row[f"update/{part}_s"] for part in UPDATE_PARTS if f"update/{part}_s" in row]
        assert min(parts) >= 0.0 and len(parts) == len(UPDATE_PARTS) - 2, "no engine scores, no teacher"
        assert sum(parts) == pytest.approx(row["time/update_s"], rel=0.05)


def test_the_last_iteration_leaves_a_trace_of_what_each_instance_did(trained):
    events = json.loads(trained.run_dir.timeline_file.read_text())["traceEvents"]
    processes = {e["args"]["name"]: e["pid"] for e in events if e["name"] == "process_name"}
    assert list(processes) == ["gen-0", "gen-1"]
    steps = [e for e in events if e.get("cat") == "step"]
    assert {e["pid"] for e in steps} == set(processes.values())
    # of four slots; on a busy machine the first have ended before the last are there
    assert 1 < max(e["args"]["samples"] for e in steps) <= 4
    rows = rows_of(trained.run_dir.rollouts_file(ITERATIONS - 1))
    assert sum(e["args"]["tokens"] for e in steps) == sum(len(row["response_token_ids"]) for row in rows)
    # not a step of the first iteration: a trace covers less than the generation of the last one took
    last = read_metrics(trained.run_dir.metrics_file)[-1]
    assert max(e["ts"] + e["dur"] for e in steps) / 1e6 <= last["time/iteration_s"]


def test_every_instances_step_log_holds_every_decode_step_and_replays(trained, capsys):
    for name in trained.system.generation.instances:
        folder = trained.run_dir.steps_file(name, 0).parent
        assert len(list(folder.iterdir())) == ITERATIONS
        assert main(["replay", str(folder)]) == 0
        assert "decode steps of policy fixed: every decision comes out again" in capsys.readouterr().out
    folders = (trained.run_dir.path / "steps").iterdir()
    logged = sum(record.num_emitted_tokens for folder in folders for record in read_step_log(folder)[0])
    # those of the last evaluation would be written with the next iteration
    late = sum(len(row["response_token_ids"]) for row in rows_of(trained.run_dir.evaluated_file(ITERATIONS)))
    assert logged + late == trained.system.scheduler.stats.num_emitted_tokens


def evaluations(trained: Trained) -> list[dict]:
    return [json.loads(line) for line in trained.run_dir.evaluations_file.read_text().splitlines()]


def test_the_same_weights_give_the_same_samples_and_the_samples_differ_among_themselves(trained):
    system, before = trained.system, rows_of(trained.run_dir.evaluated_file(ITERATIONS))
    asked = evaluation_requests(system.evaluation, round_number=900)
    again = evaluate(RolloutStream(system, Reporter()), asked)
    earlier = by_key(again.collected.rollouts)
    asked = evaluation_requests(system.evaluation, round_number=901, earlier=earlier)
    drafted = evaluate(RolloutStream(system, Reporter()), asked, earlier)
    assert drafted.metrics["eval/responses_equal"] == 1.0
    assert drafted.collected.stats.num_decode_steps < again.collected.stats.num_decode_steps
    assert drafted.collected.stats.num_accepted_looked_up > 10
    assert [row["response_token_ids"] for row in before] == [
        rollout.completion.token_ids.tolist() for rollout in again.collected.rollouts
    ]
    assert {row["stream"] for row in before} == {"eval"}
    assert len({tuple(row["response_token_ids"]) for row in before}) == len(before) == 10


def test_the_first_weights_every_second_and_the_last_are_evaluated_and_said(trained):
    told = evaluations(trained)
    assert [one["num_iterations"] for one in told] == [0, 2, 3]
    assert [one["weight_version"] for one in told] == [0, 2, 3]
    metrics = read_metrics(trained.run_dir.metrics_file)
    assert ["eval/reward_mean" in row for row in metrics] == [False, True, True]
    assert ["eval/reward_change" in one for one in told] == [False, True, True]
    assert metrics[1]["eval/reward_mean"] == told[1]["eval/reward_mean"]
    assert metrics[1]["time/iteration_s"] > metrics[1]["time/evaluate_s"] > 0.0
    # a share of vowels is neither right nor wrong
    assert "eval/accuracy" not in metrics[1] and "eval/pass_at_k" not in metrics[1]
    assert sum(note.startswith(("evaluation after", "evaluation before")) for note in trained.notes) == 3
    assert any(note.startswith("evaluation of 5 prompts with 2 samples each") for note in trained.notes)


def test_the_best_evaluated_weights_are_kept_and_the_newest_of_the_others(trained):
    told = evaluations(trained)
    best = [one for one in told if one["is_best"]]
    folder = trained.run_dir.checkpoint_dir("best")
    assert folder.is_dir() == bool(best)
    if best:
        verify_checkpoint(folder)
        assert best[-1]["eval/reward_mean"] == max(one["eval/reward_mean"] for one in told)
        manifest = json.loads((folder / "rlhfspec-manifest.json").read_text())
        assert manifest["weight_version"] == best[-1]["weight_version"]
    kept = sorted(path.name for path in folder.parent.iterdir() if path.name != "best")
    assert kept == ["draft", "draft_0001", "draft_0002", "target", "target_0001", "target_0002"]


def test_every_move_that_the_metrics_count_is_on_disk_with_its_reasons(trained):
    rows = read_metrics(trained.run_dir.metrics_file)
    # a slow machine may see no move that pays: then nothing is written
    file = trained.run_dir.moves_file
    moves = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    for row in rows:
        ended = [move for move in moves if move["iteration"] == row["iteration"]]
        counted = [row[f"moves/num_{name}"] for name in ("moved", "kept", "taken_back", "lost")]
        assert sum(counted) == len(ended) and counted[0] == sum(move["outcome"] == "moved" for move in ended)
        # on a busy machine planning may wait for longer than samples are decoded
        assert row["moves/planning_s"] > 0.0 and 0.0 < row["moves/overhead_share"] < math.inf
    assert all(move["why_ordered"] and move["why_ended"] for move in moves)


def test_its_page_shows_what_it_did(trained, tmp_path):
    page = tmp_path / "page.html"
    assert main(["report", str(trained.run_dir.path), "--out", str(page)]) == 0
    html = page.read_text()
    assert 'class="missing"' not in html and "What could not be read" not in html
    assert "<mark>" in html and "After: iteration 3" in html and "held-out mean" in html
    require_good_page(page, tmp_path, ["outcome", "timeline", "acceptance", "samples", "time"])


def test_checkpoints_are_plain_hugging_face_ones_of_what_was_published(trained, config):
    folder = trained.run_dir.checkpoint_dir("target")
    policy = AutoModelForCausalLM.from_pretrained(folder)
    assert model_checksum(policy) == trained.system.target.manifest.checksum
    assert model_checksum(policy) != model_checksum(load_causal_lm(config.models.target, "float32"))
    draft = AutoModelForCausalLM.from_pretrained(trained.run_dir.checkpoint_dir("draft"))
    assert model_checksum(draft) == trained.system.draft.manifest.checksum
    assert model_checksum(draft) != model_checksum(load_causal_lm(str(config.models.draft), "float32"))
    assert AutoTokenizer.from_pretrained(folder).get_vocab() == trained.system.tokenizer.get_vocab()


def test_the_draft_follows_with_a_version_of_its_own_that_every_instance_runs(trained):
    rows = read_metrics(trained.run_dir.metrics_file)
    assert [row["draft/weight_version"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert row["draft/refit_taken"] == 1 and row["draft/refit_steps"] >= 3
        assert row["draft/kl_after"] < row["draft/kl_before"]
        assert 0.0 < row["draft/learn_s"] < row["time/refit_s"]
    assert trained.system.draft.manifest.weight_version == ITERATIONS
    assert drafter_versions(trained.system) == {"gen-0": ITERATIONS, "gen-1": ITERATIONS}


def drafter_versions(system: System) -> dict[str, int]:
    replies = {name: handle.poll.remote(0, 0.0) for name, handle in system.generation.instances.items()}
    return {name: ray.get(reply, timeout=60).load.drafter_version for name, reply in replies.items()}


def kill_when_busy(system: System) -> threading.Thread:
    """Kill the first instance as soon as it owns samples."""

    def watch() -> None:
        handle = system.generation.instances["gen-0"]
        while not ray.get(system.scheduler.handle.instances.remote()).get("gen-0"):
            time.sleep(0.002)
        ray.kill(handle)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def alone(config: Config, folder: Path, requests: list[SampleRequest]) -> list[Completion]:
    """The same samples from the saved checkpoint, in this process and the other way round."""
    return plain_engine(config, load_causal_lm(str(folder), "float32")).generate(requests[::-1])[::-1]


def test_an_instance_killed_mid_iteration_loses_no_sample_and_changes_none(trained, config):
    system = trained.system
    requests = system.cursor.next_requests(LATE_SAMPLES, 1, system.sampling)
    killer = kill_when_busy(system)
    disturbed = RolloutStream(system, Reporter()).collect(requests)
    killer.join(timeout=60)
    deadline_s = time.monotonic() + 300.0
    while sorted(system.generation.instances) != ["gen-0-r1", "gen-1"]:
        # the replacement starts beside the run, which may be done before
        assert time.monotonic() < deadline_s
        RolloutStream(system, Reporter()).collect([])
        time.sleep(0.1)
    assert any(rollout.completion.epoch > 0 for rollout in disturbed.rollouts)
    undisturbed = alone(config, trained.run_dir.checkpoint_dir("target"), requests)
    assert fingerprints([r.completion for r in disturbed.rollouts]) == fingerprints(undisturbed)


def test_a_replacement_runs_the_current_weights_and_takes_part_in_the_next_publication(trained):
    system = trained.system
    system.generation.publish(system.target)
    loads = ray.get(
        [handle.poll.remote(0, 0.0) for handle in system.generation.instances.values()], timeout=60
    )
    assert {reply.load.weight_version for reply in loads} == {ITERATIONS}


def test_a_replacement_gets_the_newest_draft(trained):
    # it has confirmed the checksum of what it was given, or it would not take part
    assert drafter_versions(trained.system) == {"gen-0-r1": ITERATIONS, "gen-1": ITERATIONS}


def test_the_run_folder_proves_itself(trained):
    """By `rlhfspec verify`: what moved between instances, was drafted and broadcast comes out again."""
    verification = verify_run(trained.run_dir.path, share=1.0, num_engines=1)
    assert verification.holds, verification.differences
    # those of the first versions are the files that the config names, and of the others the newest are kept
    assert verification.num_regenerated == verification.num_rewards == (ITERATIONS - 1) * SAMPLES
    assert sum(verification.unverified.values()) == SAMPLES


class SchedulerKiller(Notes):
    """Kills the scheduler once, when the loop has some of the samples and not all."""

    def __init__(self, system: System) -> None:
        super().__init__()
        self.system = system
        self.killed_at: int | None = None

    def progress(self, phase: str, done: int, total: int) -> None:
        if self.killed_at is None and 0 < done < total:
            self.killed_at = done
            ray.kill(self.system.scheduler.handle)


def test_a_scheduler_killed_mid_iteration_is_replaced_and_changes_no_sample(trained, config):
    system = trained.system
    requests = system.cursor.next_requests(LATE_SAMPLES, 1, system.sampling)
    killer = SchedulerKiller(system)
    before = system.scheduler.stats
    disturbed = RolloutStream(system, killer).collect(requests)
    assert killer.killed_at is not None
    (note,) = killer.notes
    assert note.startswith("scheduler died") and "scheduler-r1 takes its place" in note
    undisturbed = alone(config, trained.run_dir.checkpoint_dir("target"), requests)
    assert fingerprints([r.completion for r in disturbed.rollouts]) == fingerprints(undisturbed)
    # an instance that is idle by then answers within a second
    deadline_s = time.monotonic() + 30.0
    while (system.scheduler.stats - before).num_emitted_tokens < sum(c.num_tokens for c in undisturbed):
        assert time.monotonic() < deadline_s, "statistics were lost with the scheduler"
        system.scheduler.take(0.2)
