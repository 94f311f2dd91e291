"""Config files: unknown keys, overrides, refused combinations, and every file we ship."""

from pathlib import Path

import pytest

from core.config import Config
from core.config_io import config_from_dict, dump_config, load_config
from core.errors import ConfigError

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
SMALLEST = {"data": {"task": "chain"}, "models": {"draft": "demo"}}


def test_an_unknown_key_is_refused_with_a_suggestion() -> None:
    tree = SMALLEST | {"sampling": {"temprature": 0.7}}
    with pytest.raises(ConfigError, match=r"unknown key sampling\.temprature; did you mean 'temperature'\?"):
        config_from_dict(tree)


def test_an_unknown_section_lists_what_is_known() -> None:
    with pytest.raises(ConfigError, match=r"unknown key zzz; known keys here: run, models"):
        config_from_dict(SMALLEST | {"zzz": {}})


def test_overrides_win_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("data: {task: chain}\nmodels: {draft: demo}\nrun: {iterations: 3}\n")
    config = load_config(file, ["run.iterations=7", "sampling.stop_token_ids=[1, 2]", "data.shuffle=false"])
    assert config.run.iterations == 7
    assert config.sampling.stop_token_ids == (1, 2)
    assert config.data.shuffle is False


@pytest.mark.parametrize("override", ["run.iterations", "=3", "run.iterations.deep=1"])
def test_a_malformed_override_is_refused(tmp_path: Path, override: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("data: {task: chain}\nmodels: {draft: demo}\nrun: {iterations: 3}\n")
    with pytest.raises(ConfigError, match="--set"):
        load_config(file, [override])


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        ("sampling", {"temperature": 0.0}, "temperature must be above 0"),
        ("models", {"draft": None}, "models.draft is null"),
        ("data", {"task": "chain", "path": "a.jsonl"}, "exactly one of"),
        ("algorithm", {"kind": "grpo"}, "samples_per_prompt >= 2"),
        ("speculation", {"ngram_min": 5}, "ngram_min must not exceed"),
        ("reward", {"kind": "model"}, "reward.model names none"),
        ("run", {"iterations": 0}, "run.iterations"),
    ],
)
def test_combinations_that_cannot_run_are_refused(section: str, values: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_from_dict(SMALLEST | {section: values})


@pytest.mark.parametrize("text", ["run: [", "- a\n- b\n", ""])
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"c\.yaml"):
        load_config(file)


def test_the_resolved_config_loads_to_the_same_config(tmp_path: Path) -> None:
    config = config_from_dict(SMALLEST)
    dump_config(config, tmp_path / "resolved.yaml")
    assert load_config(tmp_path / "resolved.yaml") == config


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.yaml")), ids=lambda file: file.stem)
def test_every_shipped_config_loads(file: Path) -> None:
    assert isinstance(load_config(file), Config)


def test_the_promised_configs_are_shipped() -> None:
    assert {"demo", "gsm8k_ppo"} <= {file.stem for file in CONFIGS.glob("*.yaml")}


def test_off_is_a_word_and_false_a_truth_value(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("data: {task: chain}\nmodels: {draft: demo}\nspeculation: {policy: off}\n")
    assert load_config(path).speculation.policy == "off"
    overridden = load_config(path, ["speculation.policy=off", "cluster.dashboard=false", "data.shuffle=true"])
    assert overridden.speculation.policy == "off"
    assert overridden.cluster.dashboard is False
    assert overridden.data.shuffle is True
