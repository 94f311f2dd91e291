"""A run folder's config names files by absolute paths, so that the run goes on from any folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
import yaml
from pydantic import BaseModel

from rlhfspec.cluster.folder.layout import RunDir
from rlhfspec.cluster.plan.names import FILES, PLACES, with_absolute_paths
from rlhfspec.cluster.resume.resumed_run import newest_run, open_run
from rlhfspec.core.config import Config
from rlhfspec.core.config_io import config_from_dict
from rlhfspec.core.errors import ConfigError
from rlhfspec.core.settings import section
from rlhfspec.core.settings.supervised import SftConfig, TrainRewardConfig

TREE = {
    "run": {"output_dir": "out", "cache_dir": "~/.cache/x", "copy_to": "s3://bucket/runs"},
    "models": {"target": "pair/target", "draft": "org/draft", "tokenizer": "pair/target"},
    "data": {
        "sources": [
            {"path": "a.jsonl"},
            {"path": "parts/*.jsonl"},
            {"path": "openai/gsm8k:main"},
            {"path": "parts:s"},
        ]
    },
    "reward": {"parts": [{"name": "m", "kind": "model", "model": "pair/target"}]},
    "evaluation": {"every": 1, "metric": "eval/reward_mean", "data": {"path": "./a.jsonl"}},
}


@pytest.fixture
def here(tmp_path: Path) -> Path:
    folder = tmp_path / "here"
    for file in ("pair/target/config.json", "parts/1.jsonl", "a.jsonl", "demo/x", "auto/x"):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).touch()
    return folder


def test_paths_are_absolute_and_names_stay(here: Path) -> None:
    made = with_absolute_paths(config_from_dict(TREE), here)
    assert (made.run.output_dir, made.run.cache_dir, made.run.copy_to) == (
        f"{here}/out",
        "~/.cache/x",
        "s3://bucket/runs",
    )
    assert (made.models.target, made.models.draft) == (f"{here}/pair/target", "org/draft")
    assert [source.path for source in made.data.sources] == [
        f"{here}/a.jsonl",
        f"{here}/parts/*.jsonl",
        "openai/gsm8k:main",
        f"{here}/parts:s",
    ]
    assert made.reward.parts[0].model == f"{here}/pair/target"
    assert made.evaluation.data is not None and made.evaluation.data.path == f"{here}/a.jsonl"
    assert with_absolute_paths(made, here / "pair") == made


def test_words_that_are_no_paths_stay_though_a_folder_is_called_so(here: Path) -> None:
    tree = {"models": {"target": "demo", "draft": "demo"}, "data": {"task": "chain"}}
    made = with_absolute_paths(config_from_dict(tree), here)
    assert (made.models.target, made.models.draft, made.speculation.profile) == ("demo", "demo", "auto")


def test_in_a_folder_that_ray_deletes_with_the_job_nothing_is_fixed(here: Path) -> None:
    job = here / "session_1" / "runtime_resources" / "working_dir_files" / "pkg"
    job.mkdir(parents=True)
    (job / "a.jsonl").touch()
    config = config_from_dict(TREE)
    assert with_absolute_paths(config, job) == config


def keys(model: type[BaseModel], path: tuple[str, ...] = ()) -> Iterator[tuple[str, object]]:
    for name, field in model.model_fields.items():
        inner = [field.annotation, *get_args(field.annotation)]
        kind = next((one for one in inner if isinstance(one, type) and issubclass(one, BaseModel)), None)
        if kind is not None:
            yield from keys(kind, (*path, name))
        else:
            yield ".".join((*path, name)), [field.annotation, field.metadata]


def test_every_path_of_every_config_is_known() -> None:
    marks = [key for kind in (Config, SftConfig, TrainRewardConfig) for key, told in keys(kind)
             if section._known_home.__name__ in repr(told)]  # fmt: skip
    assert {"data.path", "run.output_dir", "model.chat_template", "evaluation.data.sources.path"} <= set(
        marks
    )
    assert set(marks) <= PLACES | FILES
    known = {key for kind in (Config, SftConfig, TrainRewardConfig) for key, _ in keys(kind)}
    assert known >= PLACES | FILES, "no key that there is not"


def test_a_run_is_the_same_from_another_folder(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that an earlier version began, from the folder that it was begun in."""
    monkeypatch.chdir(here)
    old = config_from_dict(TREE)
    run_dir = RunDir.create(with_absolute_paths(old, here), here / "out" / "run-20260101-120000")
    run_dir.set_status("interrupted")
    monkeypatch.chdir(here / "pair")
    with pytest.raises(ConfigError, match="expected a whole state"):
        open_run(run_dir.path, [f"models.target={here}/pair/target"], print)
    monkeypatch.chdir(here)
    with pytest.raises(ConfigError, match="expected a whole state"):
        open_run(run_dir.path, ["models.target=pair/target"], print)
    run_dir.config_file.write_text(yaml.safe_dump(old.model_dump(mode="json")))
    notes: list[str] = []
    assert newest_run(with_absolute_paths(old, here), here / "out", notes.append) is None
    assert "has no state to go on from" in notes[0]
