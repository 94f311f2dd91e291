"""What `check` says of model folders that can be read, and are not what they seem."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file, save_file

from rlhfspec.cluster.cli import main
from rlhfspec.cluster.plan.model_files import TEMPLATE_FILE, other_templates
from rlhfspec.cluster.weights.first_weights import load_and_put
from rlhfspec.core.config import Config
from rlhfspec.core.errors import ModelError
from rlhfspec.learning.models.tokenization import character_tokenizer
from tests.conftest import TinyPair


@pytest.fixture
def folder(tmp_path: Path, tiny_pair: TinyPair) -> Path:
    return Path(shutil.copytree(tiny_pair.target, tmp_path / "model"))


def config_of(folder: Path) -> Path:
    file = folder.parent / "run.yaml"
    tree = {
        "run": {"output_dir": str(folder.parent / "runs")},
        "models": {"target": str(folder)},
        "data": {"task": "chain", "limit": 4},
        "sampling": {"max_new_tokens": 8},
        "engine": {"max_running_samples": 4},
        "speculation": {"drafter": "none", "policy": "off"},
        "trainer": {"num_threads": 1},
        "cluster": {"generation": {"num_actors": 1}, "dashboard": False},
    }
    file.write_text(yaml.safe_dump(tree))
    return file


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_check_refuses_weights_that_are_not_finite_in_the_words_of_a_run(
    value: float, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][3] = value
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    file = config_of(folder)
    assert main(["check", "--config", str(file)]) == 2
    config = Config.model_validate(yaml.safe_load(file.read_text()))
    with pytest.raises(ModelError) as refused:
        load_and_put(config.models.target, "target", config.models)
    assert f"error: {refused.value}\n" in capsys.readouterr().err


def test_check_tells_a_tokenizer_too_small_a_second_template_and_shards_beside(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "--config", str(config_of(folder))]) == 0
    silent = capsys.readouterr().out
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {}}))
    (folder / TEMPLATE_FILE).write_text("{{ messages[0].content }}")
    settings = json.loads((folder / "tokenizer_config.json").read_text()) | {"chat_template": "another"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert main(["check", "--config", str(config_of(folder))]) == 0
    told = " ".join(capsys.readouterr().out.split())
    for words in ("chat templates differ: chat_template.jinja is used", "model.safetensors is read, model"):
        assert words in told and words not in silent


@pytest.mark.parametrize("name", ["tokenizer_config.json", "chat_template.json"])
def test_a_template_in_json_counts_where_it_is_another(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(json.dumps({"chat_template": "{{ a }}\n"}))
    assert other_templates(tmp_path) == []
    (tmp_path / TEMPLATE_FILE).write_text("{{ a }}")
    assert other_templates(tmp_path) == []
    (tmp_path / TEMPLATE_FILE).write_text("{{ b }}")
    assert other_templates(tmp_path) == [name]
    (tmp_path / name).write_text("{")
    assert other_templates(tmp_path) == []


def test_tokens_without_a_row_are_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = character_tokenizer("abcdefghijklmnopqrstuvwxyz0123456789:=+-*/ ABCDEFGHIJKLMNOPQRSTUVWXYZ?!")
    tokenizer.save_pretrained(folder)
    assert main(["check", "--config", str(config_of(folder))]) == 2
    assert "(beyond: " in capsys.readouterr().err
