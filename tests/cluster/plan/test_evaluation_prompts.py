"""What is held out is not trained on, and what overlaps is told."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest

from rlhfspec.cluster.jobs.evaluate_models import prompts_of
from rlhfspec.cluster.plan.evaluation_prompts import EvaluationPrompts, split_evaluation
from rlhfspec.core.config import Config
from rlhfspec.core.config_io import config_from_dict
from rlhfspec.core.errors import ConfigError, DataError
from rlhfspec.learning.data.prompts import PromptDataset, load_prompts
from rlhfspec.learning.models.tokenization import character_tokenizer

TOKENIZER = character_tokenizer("abcdefghij")


def write(path: Path, prompts: Iterable[str]) -> str:
    path.write_text("".join(json.dumps({"question": one, "answer": ""}) + "\n" for one in prompts))
    return str(path)


def config(folder: Path, prompts: str, **evaluation) -> Config:
    tree = {
        "data": {"path": write(folder / "train.jsonl", prompts)},
        "evaluation": {"every": 1, **evaluation},
    }
    return config_from_dict({"models": {"target": "a", "draft": "b"}, **tree})


def split(made: Config) -> tuple[PromptDataset, EvaluationPrompts | None]:
    return split_evaluation(made, load_prompts(made.data, TOKENIZER, seed=0), TOKENIZER)


def texts(prompts) -> str:
    return "".join(prompt.text for prompt in prompts)


def test_the_last_prompts_are_held_out_and_none_that_equals_one_is_left(tmp_path):
    trained, held = split(config(tmp_path, "abcadea", holdout=2))
    assert held is not None and texts(held.prompts) == "ea" and texts(trained.prompts) == "bcd"
    assert "2 prompts are held out" in held.lines[1] and "2 training prompts that equal" in held.lines[1]


def test_every_source_gives_its_share_of_the_holdout(tmp_path):
    sources = [{"path": write(tmp_path / f"{prompts}.jsonl", prompts)} for prompts in ("abcdef", "g", "hij")]
    tree = {"data": {"sources": sources}, "evaluation": {"every": 1, "holdout": 3}}
    trained, held = split(config_from_dict({"models": {"target": "a", "draft": "b"}, **tree}))
    assert held is not None and texts(held.prompts) == "efj" and texts(trained.prompts) == "abcdghi"
    assert [source.num_prompts for source in trained.sources] == [4, 1, 2]


def test_a_limit_evaluates_fewer_and_holds_out_as_many(tmp_path):
    trained, held = split(config(tmp_path, "abcdef", holdout=3, limit=1))
    assert held is not None and texts(held.prompts) == "d" and texts(trained.prompts) == "abc"


def test_nothing_is_held_out_where_nothing_is_evaluated(tmp_path):
    trained, held = split(config(tmp_path, "abc", every=0))
    assert held is None and texts(trained.prompts) == "abc"


@pytest.mark.parametrize(("prompts", "holdout"), [("abc", 3), ("abc", 64), ("aaa", 1)])
def test_a_holdout_that_leaves_nothing_to_train_on_is_refused(tmp_path, prompts, holdout):
    with pytest.raises(DataError, match=r"evaluation\.holdout"):
        split(config(tmp_path, prompts, holdout=holdout))


def test_prompts_of_their_own_leave_the_training_data_alone_and_overlaps_are_told(tmp_path):
    own = {"path": write(tmp_path / "eval.jsonl", "cxd".replace("x", "j"))}
    trained, held = split(config(tmp_path, "abcd", data=own))
    assert held is not None and texts(held.prompts) == "cjd" and texts(trained.prompts) == "abcd"
    assert "2 of 3 evaluation prompts are training prompts too, the first 'c'" in held.lines[1]


def test_prompts_too_long_are_counted_beside_those_that_are_evaluated(tmp_path):
    own = write(tmp_path / "eval.jsonl", [*"abc", "abcdefgh"])
    data = {"path": own, "max_prompt_tokens": 4, "on_long_prompt": "skip"}
    made = config(tmp_path, "hij", data=data)
    _, held = split(made)
    assert held is not None and held.lines[1] == "  prompts left out: 1 too long"
    alone = config_from_dict({"models": {"target": "a", "draft": "b"}, "data": data})
    _, prompts = prompts_of(alone, load_prompts(alone.data, TOKENIZER, seed=0), TOKENIZER)
    assert "all 3 prompts" in prompts.lines[1] and prompts.lines[2] == held.lines[1]


def test_empty_evaluation_data_is_named(tmp_path):
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(DataError, match=r"evaluation\.data: .*empty"):
        split(config(tmp_path, "abc", data={"path": str(tmp_path / "empty.jsonl")}))


def test_a_generated_task_draws_other_problems_for_evaluations(tiny_pair):
    from rlhfspec.engine.weights.loading import load_tokenizer

    tokenizer = load_tokenizer(str(tiny_pair.target))
    tree = {"data": {"task": "chain"}, "evaluation": {"every": 1, "data": {"task": "chain"}}}
    made = config_from_dict({"models": {"target": "a", "draft": "b"}, **tree})
    trained = load_prompts(made.data, tokenizer, seed=0)
    _, held = split_evaluation(made, trained, tokenizer)
    assert held is not None and texts(held.prompts) != texts(trained.prompts)


@pytest.mark.parametrize(
    ("evaluation", "what"),
    [
        ({"samples_per_prompt": 4}, "greedy samples"),
        ({"samples_per_prompt": 4096, "temperature": 1.0}, "less than or equal to 1024"),
        ({"metric": "eval/response_tokens_mean"}, "more of it must be better"),
        ({"temperature": 1e-9}, "must be 0 or at least"),
    ],
)
def test_settings_that_measure_nothing_are_refused(tmp_path, evaluation, what):
    with pytest.raises(ConfigError, match=what):
        config(tmp_path, "abc", **evaluation)


@pytest.mark.parametrize("metric", ["eval/accuracy", "eval/pass_at_k", "eval/best_at_k", "eval/reward_mean"])
def test_a_metric_that_the_reward_can_never_have_is_refused_before_the_run(metric):
    tree = {"models": {"target": "a", "draft": "b"}, "data": {"task": "chain"}}
    tree |= {"evaluation": {"every": 1, "metric": metric}, "reward": {"kind": "format", "pattern": "a"}}
    if metric in ("eval/best_at_k", "eval/reward_mean"):
        assert config_from_dict(tree).evaluation.metric == metric
        return
    with pytest.raises(ConfigError, match="made of a part 'correct'"):
        config_from_dict(tree)
    assert config_from_dict(tree | {"reward": {"kind": "my:own"}}).evaluation.metric == metric
