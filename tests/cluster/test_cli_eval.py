"""`rlhfspec eval`: a model's figures without a trainer, the same as an engine of one process gives."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import rlhfspec.cluster.jobs.evaluate_models
from rlhfspec.cluster.cli import main
from rlhfspec.cluster.jobs.evaluate_models import evaluation_config, prompts_of
from rlhfspec.cluster.ray_start import machine
from rlhfspec.core.errors import ConfigError, InputError
from rlhfspec.learning.data.prompts import load_prompts
from rlhfspec.learning.models.tokenization import character_tokenizer

SMALL = ["--set", "cluster.generation.num_actors=1", "--set", "engine.max_running_samples=4"]


def write(path: Path, prompts: list[str]) -> str:
    path.write_text("".join(json.dumps({"question": one, "answer": "a"}) + "\n" for one in prompts))
    return str(path)


@pytest.mark.ray
@pytest.mark.slow
def test_two_models_are_compared_and_equal_ones_give_equal_samples(local_ray, tiny_pair, tmp_path, capsys):
    data = write(tmp_path / "test.jsonl", ["03:c+5=", "04:a+1=", "02:b+2="])
    out = tmp_path / "results"
    models = ["--model", str(tiny_pair.target), str(tiny_pair.target), "--data", data]
    rest = ["--reward", "sample_rewards:vowel_share", "--max-new-tokens", "12", "--out", str(out)]
    k = ["--samples-per-prompt", "2", "--temperature", "1.0"]
    assert main(["eval", *models, *rest, *k, *SMALL]) == 0
    assert "reward_mean" in capsys.readouterr().out
    first, second = json.loads((out / "results.json").read_text())["models"]
    change = {name: second["figures"].pop(f"eval/{name}") for name in ("reward_change", "responses_equal")}
    assert change == {"reward_change": 0.0, "responses_equal": 1.0}
    assert first["figures"].items() <= second["figures"].items() and first["figures"]["eval/num_samples"] == 6
    one, other = (pq.read_table(out / f"samples-{number}.parquet").to_pylist() for number in (0, 1))
    assert [row["response_token_ids"] for row in one] == [row["response_token_ids"] for row in other]
    steps = [sum(row["num_decode_steps"] for row in rows) for rows in (one, other)]
    assert steps[1] < 0.5 * steps[0], "the second drafts from the first"
    assert max(len(row["response_token_ids"]) for row in one) <= 12
    assert "## Sample" in (out / "samples-0.md").read_text()


@pytest.mark.ray
@pytest.mark.slow
def test_a_model_is_evaluated_by_its_episodes(local_ray, tiny_pair, tmp_path):
    data = write(tmp_path / "test.jsonl", ["03:c+5=", "04:a+1="])
    (tmp_path / "c.yaml").write_text(
        "environment: {kind: 'sample_environments:Parrot', max_turns: 3, max_turn_tokens: 8,"
        " max_observation_tokens: 8}\n"
        "reward: {kind: environment}\n"
    )
    given = ["--data", data, "--config", str(tmp_path / "c.yaml"), "--max-new-tokens", "40"]
    assert (
        main(["eval", "--model", str(tiny_pair.target), *given, "--out", str(tmp_path / "out"), *SMALL]) == 0
    )
    (model,) = json.loads((tmp_path / "out" / "results.json").read_text())["models"]
    assert model["figures"]["eval/num_samples"] == 2


def made(tree: dict, **given):
    return evaluation_config(
        tree,
        **{"model": "m", "data": None, "overrides": [], "sampling": {}, **given},  # type: ignore[arg-type]
    )


def test_without_a_config_the_model_decodes_plainly_and_greedily():
    config = made({}, data="test.jsonl")
    assert (config.models.target, config.models.draft, config.data.path) == ("m", None, "test.jsonl")
    assert config.speculation.policy == "off" and config.evaluation.temperature == 0.0


def test_a_runs_config_keeps_templates_reward_and_draft_and_needs_no_profile():
    tree = {
        "models": {"target": "t", "draft": "d"},
        "data": {"path": "train.jsonl", "prompt_template": "Q: {prompt}", "limit": 3},
        "reward": {"kind": "gsm8k"},
        "evaluation": {"every": 5, "samples_per_prompt": 4, "temperature": 0.7},
    }
    config = made(tree, data="test.jsonl", sampling={"samples_per_prompt": 2})
    assert (config.data.path, config.data.prompt_template, config.data.limit) == (
        "test.jsonl",
        "Q: {prompt}",
        None,
    )
    assert (config.models.draft, config.speculation.policy, config.reward.kind) == ("d", "fixed", "gsm8k")
    assert (config.evaluation.samples_per_prompt, config.evaluation.temperature) == (2, 0.7)
    assert tree["evaluation"]["every"] == 5, "what was given stays"


def test_the_evaluation_data_of_a_config_goes_before_its_training_data():
    tree = {"data": {"path": "train.jsonl"}, "evaluation": {"data": {"path": "held.jsonl"}}}
    assert made(tree).data.path == "held.jsonl" and made(tree, data="x.jsonl").data.path == "x.jsonl"


def test_data_of_its_own_is_read_whole_whatever_rows_the_run_left_out():
    rows = {"skip_rows": 500, "limit": 3, "filter": "m:f", "deduplicate": "exact", "chat": True}
    for origin in (
        {"path": "train.jsonl"},
        {"sources": [{"path": "a.jsonl"}, {"path": "b.jsonl", "weight": 2}]},
    ):
        data = made({"data": {**rows, **origin}}, data="test.jsonl").data
        assert (data.path, data.sources, data.chat) == ("test.jsonl", (), True)
        assert (data.skip_rows, data.limit, data.filter, data.deduplicate) == (0, None, None, "none")


@pytest.mark.parametrize(
    ("evaluation", "evaluated", "said"),
    [
        ({"every": 5, "holdout": 2}, "ef", "held out"),
        ({"holdout": 2}, "abcdef", "all 6 prompts of data"),
        ({}, "abcdef", "all 6 prompts of data"),
    ],
)
def test_without_data_of_its_own_a_run_s_holdout_is_evaluated_where_it_has_one(
    tmp_path, evaluation, evaluated, said
):
    tokenizer = character_tokenizer("abcdef")
    config = made({"data": {"path": write(tmp_path / "a.jsonl", list("abcdef"))}, "evaluation": evaluation})
    once, prompts = prompts_of(config, load_prompts(config.data, tokenizer, seed=0), tokenizer)
    assert "".join(prompt.text for prompt in prompts.prompts) == evaluated
    assert once.evaluation.every == 0 and said in prompts.lines[1]


def test_a_setting_goes_before_all_else():
    config = made({}, data="a.jsonl", overrides=["data.path=b.jsonl", "run.seed=3"])
    assert (config.data.path, config.run.seed) == ("b.jsonl", 3)


@pytest.mark.parametrize(
    "key",
    ["sampling.temperature=0.7", "evaluation.metric=eval/accuracy", "models.target=x", "trainer.epochs=2"],
)
def test_a_key_that_an_evaluation_does_not_read_is_refused(key):
    name = key.partition("=")[0]
    with pytest.raises(
        ConfigError, match=f"{name} has no effect on the evaluation, which reads speculation, "
    ):
        made({}, data="a.jsonl", overrides=[key])


def test_what_drafts_may_be_set_without_a_config():
    config = made({}, data="a.jsonl", overrides=["models.draft=d"])
    assert (config.models.draft, config.speculation.drafter, config.speculation.policy) == (
        "d",
        "model",
        "fixed",
    )


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({}, "nothing says which prompts"),
        ({"data": "a.jsonl", "sampling": {"samples_per_prompt": 4096, "temperature": 1.0}}, "1024"),
        ({"data": "a.jsonl", "sampling": {"samples_per_prompt": 8}}, "greedy samples"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(given, what):
    with pytest.raises(ConfigError, match=what):
        made({}, **given)


@pytest.mark.parametrize("text", ["", "{"])
def test_data_that_is_empty_or_damaged_ends_with_exit_code_2(tiny_pair, tmp_path, capsys, text):
    (tmp_path / "bad.jsonl").write_text(text)
    command = ["eval", "--model", str(tiny_pair.target), "--data", str(tmp_path / "bad.jsonl")]
    assert main(command) == InputError.exit_code
    assert "bad.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"quantization_config": {"quant_method": "awq"}}, "are quantized"),
        ({"attention_chunk_size": 8}, "chunked attention"),
        ({"intermediate_size": 96}, "do not fit its config.json"),
    ],
)
def test_a_model_that_a_run_would_refuse_is_refused_before_ray_starts(
    change, said, tiny_pair, tmp_path, capsys, monkeypatch
):
    started = []
    monkeypatch.setattr(
        rlhfspec.cluster.jobs.evaluate_models, "ray_session", lambda *_, **__: started.append("Ray")
    )
    model = Path(shutil.copytree(tiny_pair.target, tmp_path / "model"))
    held = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(held | change))
    data = write(tmp_path / "test.jsonl", ["03:c+5="])
    given = ["--model", str(model), "--data", data, "--reward", "chain", "--max-new-tokens", "12"]
    assert main(["eval", *given]) == 2
    assert said in capsys.readouterr().err
    assert not started


def test_models_without_room_are_refused_before_the_first_is_loaded(tiny_pair, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(machine, "memory_bytes", lambda: 1 << 30)
    data = write(tmp_path / "test.jsonl", ["03:c+5="])
    # of a run on a larger machine, whose trainers have more threads than this one has cores
    (tmp_path / "run.yaml").write_text("trainer: {num_threads: 256}\n")
    models = ["--model", str(tiny_pair.target), str(tiny_pair.target), "--config", str(tmp_path / "run.yaml")]
    assert main(["eval", *models, "--data", data, "--max-new-tokens", "12"]) == 2
    said = capsys.readouterr()
    assert re.search(
        r"the evaluation needs .* of memory but 1\.00 GiB are available here \(generation 2 x .*, ray and driver",
        said.err,
    )
    assert "engine.kv_cache_mb, --max-new-tokens" in said.err and "starting Ray" not in said.out
