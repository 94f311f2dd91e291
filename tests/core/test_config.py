"""Config files: unknown keys, overrides, refused combinations, and every file we ship."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast, get_args, get_origin

import pytest
from pydantic import BaseModel

from rlhfspec.core.config import (
    ClusterConfig,
    Config,
    DataConfig,
    EngineConfig,
    ModelsConfig,
)
from rlhfspec.core.config_io import config_from_dict, dump_config, load_config, read_sections
from rlhfspec.core.errors import ConfigError

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
SMALLEST = {"data": {"task": "chain"}, "models": {"draft": "demo"}}


def test_an_unknown_key_is_refused_with_a_suggestion() -> None:
    tree = SMALLEST | {"sampling": {"temprature": 0.7}}
    with pytest.raises(ConfigError, match=r"unknown key sampling\.temprature; did you mean 'temperature'\?"):
        config_from_dict(tree)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("sufix", "suffix"),
        ("EAGLE-3", "head"),
        ("eagle", "head"),
        ("nextn", "mtp"),
        ("prompt_lookup", "suffix"),
        ("draft_model", "model"),
        (False, "none"),
    ],
)
def test_a_drafter_by_another_name_is_refused_with_ours(given: object, meant: str) -> None:
    with pytest.raises(ConfigError, match=rf"'suffix' or 'none', got .*; did you mean '{meant}'\?$"):
        config_from_dict(SMALLEST | {"speculation": {"drafter": given}})


def test_a_word_that_nothing_is_near_to_gets_no_hint() -> None:
    with pytest.raises(ConfigError, match=r"got 'zzz'$"):
        config_from_dict(SMALLEST | {"speculation": {"drafter": "zzz"}})


def test_a_removed_key_that_says_what_happens_anyway_is_dropped() -> None:
    """As a run folder of before spells it out."""
    old = SMALLEST | {
        "speculation": {"capacity_tokens": 24, "exit_layers": 0, "ngram_max": 4, "ngram_min": 2},
        "trainer": {"stream_forwards": "auto"},
    }
    assert config_from_dict(old) == config_from_dict(SMALLEST)
    assert "capacity_tokens" in old["speculation"], "the caller's mapping stays"
    with pytest.raises(ConfigError, match="capacity_tokens"):
        config_from_dict(SMALLEST | {"speculation": {"capacity_tokens": 30}})


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
        ("reward", {"kind": "model"}, "reward.model names none"),
        (
            "reward",
            {"kind": "chain", "url": "http://x"},
            "url is of kind serve or judge or code, this is chain",
        ),
        ("reward", {"kind": "chain", "app": "x"}, "reward.app is of kind serve, this is chain"),
        ("reward", {"kind": "gsm8k", "model": "x"}, "reward.model is of kind model or judge, this is gsm8k"),
        ("reward", {"kind": "m:f", "pattern": "x"}, "reward.pattern is of kind format or judge, this is m:f"),
        (
            "reward",
            {"kind": "chain", "code": {"partial": True}},
            "reward.code is of kind code, this is chain",
        ),
        ("reward", {"kind": "environment", "mean": 1.0}, "mean, std and clip would have no effect"),
        ("reward", {"kind": "environment", "std": 2.0}, "mean, std and clip would have no effect"),
        ("reward", {"kind": "environment", "clip": [0.0, 1.0]}, "mean, std and clip would have no effect"),
        ("reward", {"kind": "environment", "on_error": "skip"}, "set environment.on_error"),
        ("reward", {"parts": [{"name": "a", "kind": "environment"}]}, "cannot hold kind environment"),
        ("algorithm", {"importance_sampling": "token_mask"}, "is correction.weight and correction.mask now"),
        ("algorithm", {"correction": {"kind": "tsi"}}, r"algorithm\.correction\.kind"),
        ("drafter_training", {"mode": "cotrain", "refit": False}, "take one of the two out"),
        ("drafter_training", {"spot": "on"}, "speculation.drafter is model, which has none"),
        ("run", {"iterations": 0}, "run.iterations"),
        ("trainer", {"lora": {"dropout": 0.1}}, r"trainer\.lora\.dropout: expected 0, got 0.1"),
        ("trainer", {"lora": {"targets": []}}, "at least one module name"),
        ("trainer", {"lora": {"rnk": 8}}, r"unknown key trainer\.lora\.rnk; did you mean 'rank'"),
        ("trainer", {"device": "cuda"}, "cluster.trainer.num_gpus is 0"),
        ("speculation", {"policy": "fixed", "num_nodes": 64, "depth": 0}, "64 nodes at depth 0"),
        ("speculation", {"drafter": "suffix", "look_up": "suffix"}, "look up alone: drafter suffix"),
        ("speculation", {"drafter": "none", "look_up": "suffix"}, "set look_up to none, or drafter"),
        (
            "data",
            {"path": "a.jsonl", "prompt_template": "x"},
            r"data\.prompt_template: expected \{prompt\}, or \{COLUMN\}",
        ),
        ("data", {"task": "chain", "limit": 10**9}, "more than a generated task draws"),
        ("data", {"path": "a.jsonl", "sources": [{"path": "b.jsonl"}]}, "exactly one of data.task"),
        ("data", {"sources": [{"path": "b.jsonl", "task": "chain"}]}, r"data\.sources\.0: .*exactly one"),
        ("data", {"sources": [{"path": "b.jsonl", "weigth": 2}]}, r"did you mean 'weight'"),
        ("data", {"sources": [{"path": "b.jsonl", "weight": 0}]}, "greater than 0"),
        ("data", {"path": "a.jsonl", "min_prompt_tokens": 600}, "must not exceed data.max_prompt_tokens"),
        ("data", {"path": "a.jsonl", "chat_template_kwargs": {"tokenize": True}}, "names of variables"),
        ("data", {"path": "a.jsonl", "chat_template_kwargs": {"n": 10**30}}, "64 bits"),
        ("sampling", {"stop_token_ids": [5, -1]}, r"stop_token_ids\.1"),
        ("engine", {"num_threads": 5000}, "less than or equal to 1024"),
        ("cluster", {"generation": {"num_actors": 10**9}}, "less than or equal to 4096"),
        ("cluster", {"heartbeat_timeout_s": 1e300}, "less than or equal to 604800"),
        (
            "cluster",
            {"heartbeat_timeout_s": 0.001},
            r"heartbeat_timeout_s: .*greater than or equal to 5, got 0\.001",
        ),
        ("cluster", {"order_timeout_s": 0.001}, "greater than or equal to 1, got"),
        ("cluster", {"start_timeout_s": 0.001}, "greater than or equal to 1, got"),
        (
            "cluster",
            {"poll_interval_s": 30.0},
            "no room for 5 answers of instances that are asked every 30 s",
        ),
        ("rollout", {"prompts_per_iteration": 10**400}, "must fit in 64 bits"),
        ("run", {"output_dir": "a\0b"}, "output_dir holds a NUL"),
        ("run", {"output_dir": "~no-such-user/x"}, "home folder"),
        ("run", {"cache_dir": ""}, "at least 1 character"),
    ],
)
def test_combinations_that_cannot_run_are_refused(section: str, values: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_from_dict(SMALLEST | {section: values})


@pytest.mark.parametrize(
    ("algorithm", "key"),
    [
        ({"kind": "grpo", "gamma": 0.9}, "gamma"),
        ({"kind": "grpo", "gae_lambda": 0.9}, "gae_lambda"),
        ({"kind": "rloo", "clip_value": 0.5}, "clip_value"),
        ({"kind": "dapo", "whiten_advantages": False}, "whiten_advantages"),
        ({"kind": "reinforce_pp", "whiten_advantages": False}, "whiten_advantages"),
        ({"kind": "reinforce_pp_baseline", "gamma": 0.5}, "gamma"),
        ({"kind": "ppo", "entropy_coef_step": 0.1}, "entropy_coef_step"),
        ({"kind": "ppo", "entropy_coef": 0.1, "entropy_coef_max": 0.2}, "entropy_coef_max"),
        ({"kind": "ppo", "kl_horizon": 100}, "kl_horizon"),
        ({"kind": "grpo", "dynamic_sampling_metric": "correct"}, "dynamic_sampling_metric"),
        ({"kind": "dapo", "dynamic_sampling": False, "max_extra_groups": 1}, "max_extra_groups"),
    ],
)
def test_a_key_of_the_algorithm_that_nothing_reads_is_refused_by_name(algorithm: dict, key: str) -> None:
    tree = SMALLEST | {"algorithm": algorithm, "rollout": {"samples_per_prompt": 2}}
    with pytest.raises(ConfigError, match=f"algorithm: {key} is of .* would have no effect; take it out"):
        config_from_dict(tree)


@pytest.mark.parametrize(
    "algorithm",
    [
        {"kind": "reinforce_pp", "gamma": 0.9},
        {"kind": "grpo", "advantage": "gae", "clip_value": 0.5, "whiten_advantages": False},
        {"kind": "ppo", "entropy_target": 1.0, "entropy_coef_step": 0.1, "entropy_coef_max": 0.2},
        {"kind": "ppo", "kl_target": 0.1, "kl_horizon": 100},
        {"kind": "dapo", "dynamic_sampling_metric": "correct", "max_extra_groups": 1},
    ],
)
def test_keys_that_are_read_are_taken_and_a_spelled_out_config_loads_again(
    algorithm: dict, tmp_path: Path
) -> None:
    config = config_from_dict(SMALLEST | {"algorithm": algorithm, "rollout": {"samples_per_prompt": 2}})
    dump_config(config, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"speculation": {"drafter": "mtp"}}, "speculation.drafter is mtp, which has none"),
        ({"speculation": {"drafter": "head", "policy": "off"}}, "speculation.policy is off, so that no head"),
        ({"speculation": {"drafter": "head"}, "engine": {"device": "cuda"}}, "instances decode on GPUs"),
    ],
)
def test_training_in_spare_time_is_refused_where_nothing_would_be_trained(
    changes: dict, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        config_from_dict(SMALLEST | {"drafter_training": {"spot": "on"}} | changes)
    config_from_dict(SMALLEST | {"drafter_training": {"spot": "on"}, "speculation": {"drafter": "head"}})


def test_one_call_of_the_user_s_code_may_keep_an_actor_silent_for_as_long_as_it_may_take() -> None:
    cluster = ClusterConfig(heartbeat_timeout_s=10.0)
    assert cluster.silence_limit_s(2.0) == 10.0
    assert cluster.silence_limit_s(600.0) == 605.0, "its own limit ends it, not the heartbeat's"


def every_number(*kinds: type) -> list[tuple[str, ...]]:
    """Paths of all settings that are of these kinds, from the classes themselves."""

    def below(model: type[BaseModel], path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        for name, field in model.model_fields.items():
            kind = field.annotation
            is_list = get_origin(kind) is tuple
            kind = next((one for one in get_args(kind) if hasattr(one, "model_fields")), kind)
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from below(kind, (*path, name, "0") if is_list else (*path, name))
            elif bool not in get_args(kind) and ({kind, *get_args(kind)} & {*kinds}):
                yield (*path, name)

    return list(below(Config, ()))


@pytest.mark.parametrize("path", every_number(float), ids=".".join)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, "inf", "1e999"])
def test_every_float_is_finite(path: tuple[str, ...], value: object) -> None:
    tree: Any = value
    for name in reversed(path):
        tree = [tree] if name == "0" else {name: tree}
    with pytest.raises(ConfigError, match=rf"{path[-1]}: Input should be"):
        config_from_dict(SMALLEST | tree)


def test_the_floats_of_all_sections_were_found() -> None:
    assert {"learning_rate", "temperature", "kl_coef", "heartbeat_timeout_s", "kv_cache_mb", "num_cpus"} <= {
        path[-1] for path in every_number(float)
    }


def test_no_number_is_a_truth_value() -> None:
    paths = every_number(int, float)
    assert {("rollout", "over_provisioning"), ("run", "seed"), ("rollout", "max_staleness")} <= {*paths}
    for path in paths:
        for value in (True, False):
            tree: Any = value
            for name in reversed(path):
                tree = [tree] if name == "0" else {name: tree}
            with pytest.raises(ConfigError, match=rf"{path[-1]}: expected a number, got {value}".lower()):
                config_from_dict(SMALLEST | tree)
    for section, key, values in (("sampling", "stop_token_ids", [1, True]), ("reward", "clip", [False, 2.0])):
        with pytest.raises(ConfigError, match=rf"{section}\.{key}: expected a number, got"):
            config_from_dict(SMALLEST | {section: {key: values}})
    # where both may stand, both do
    assert config_from_dict(SMALLEST | {"tracking": {"tensorboard": True}}).tracking.tensorboard
    options = config_from_dict(SMALLEST | {"environment": {"options": {"is_hard": True, "level": 2}}})
    assert options.environment.options == {"is_hard": True, "level": 2}


@pytest.mark.parametrize(
    "name",
    [
        "../../evil",
        "a/b",
        "a\\b",
        "a\0b",
        "x" * 101,
        "ü" * 51,
        "..",
        ".",
        ".hidden",
        "-x",
        "",
        "a\nb",
        "\u2028",
    ],
)
def test_a_run_is_named_by_one_folder_name(name: str) -> None:
    with pytest.raises(ConfigError, match=r"run\.name: expected a name for one folder"):
        config_from_dict(SMALLEST | {"run": {"name": name}})


@pytest.mark.parametrize("name", ["run", "lr=1e-5, T=1.0", "x" * 100, "übung 3", "2026-01-02", "a..b"])
def test_names_of_folders_are_names_of_runs(name: str) -> None:
    assert config_from_dict(SMALLEST | {"run": {"name": name}}).run.name == name


def test_all_faults_are_told_in_one_line() -> None:
    with pytest.raises(ConfigError) as caught:
        config_from_dict({"run": {"iterations": 0, "seed": -1}, "x\ny": 1, "data": [0] * 10**5})
    message = str(caught.value)
    assert "\n" not in message and len(message) < 1000
    assert all(part in message for part in ("run.iterations", "run.seed", "unknown key x y", "data:"))


@pytest.mark.parametrize(
    "override", ["run.name=[", "run.name=!!python/object:x {}", "run.seed=" + "9" * 5000]
)
def test_an_override_that_is_no_yaml_is_refused(tmp_path: Path, override: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("data: {task: chain}\nmodels: {draft: demo}\n")
    with pytest.raises(ConfigError, match=r"--set run\..*: the value is not valid YAML: line 1"):
        load_config(file, [override])


def test_an_override_changes_its_own_section_only(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "data: {task: chain}\nmodels: {draft: demo}\n"
        "cluster: {generation: &pool {num_cpus: 1}, reward: *pool}\n"
    )
    cluster = load_config(file, ["cluster.generation.num_cpus=2"]).cluster
    assert (cluster.generation.num_cpus, cluster.reward.num_cpus) == (2.0, 1.0)


def test_a_byte_order_mark_is_read_over(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_bytes(b"\xef\xbb\xbfdata: {task: chain}\nmodels: {draft: demo}\n")
    assert load_config(file).data.task == "chain"


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"\x80\x81", "expected UTF-8 text, got byte 0x80 at position 0"),
        ("run: {}".encode("utf-16"), "expected UTF-8 text, got byte 0xff"),
        (b"data: {}\ndata: {}\n", "the key 'data' stands in line 1 already"),
    ],
)
def test_a_file_that_is_no_yaml_of_ours_is_refused(tmp_path: Path, raw: bytes, message: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_bytes(raw)
    with pytest.raises(ConfigError, match=rf"c\.yaml is .*{message}"):
        load_config(file)


def test_a_config_that_is_a_folder_or_no_name_at_all_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a folder; check --config"):
        load_config(tmp_path)
    with pytest.raises(ConfigError, match="does not exist"):
        load_config("x" * 5000)


@pytest.mark.parametrize("text", ["run: [", "- a\n- b\n", ""])
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"c\.yaml"):
        load_config(file)


@pytest.mark.parametrize("held", ["3", "[1]", "text"])
def test_what_is_no_section_is_refused_where_a_file_gives_sections_to_a_command(
    tmp_path: Path, held: str
) -> None:
    (file := tmp_path / "config.yaml").write_text(f"cluster: {held}\ndata:\n")
    with pytest.raises(ConfigError, match=r"config.yaml: cluster must be a section, got"):
        read_sections(file)
    file.write_text("cluster: {address: auto}\ndata:\n")
    assert read_sections(file) == {"cluster": {"address": "auto"}, "data": {}} and read_sections(None) == {}


def test_the_resolved_config_loads_to_the_same_config(tmp_path: Path) -> None:
    config = config_from_dict(SMALLEST)
    dump_config(config, tmp_path / "resolved.yaml")
    assert load_config(tmp_path / "resolved.yaml") == config


@pytest.mark.parametrize(
    "file", sorted([*CONFIGS.glob("*.yaml"), *CONFIGS.glob("algorithms/*.yaml")]), ids=lambda file: file.stem
)
def test_every_shipped_config_loads(file: Path) -> None:
    assert isinstance(load_config(file), Config)


def test_the_promised_configs_are_shipped() -> None:
    assert {"demo", "gsm8k_ppo"} <= {file.stem for file in CONFIGS.glob("*.yaml")}


def test_off_in_yaml_is_a_string_and_false_a_boolean(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("data: {task: chain}\nmodels: {draft: demo}\nspeculation: {policy: off}\n")
    assert load_config(path).speculation.policy == "off"
    overridden = load_config(path, ["speculation.policy=off", "cluster.dashboard=false", "data.shuffle=true"])
    assert overridden.speculation.policy == "off"
    assert overridden.cluster.dashboard is False
    assert overridden.data.shuffle is True


def test_on_gpus_what_is_left_open_is_simple(tmp_path: Path) -> None:
    gpus = {"cluster": {"generation": {"num_gpus": 1}}}
    open_ = config_from_dict(SMALLEST | gpus)
    assert (open_.speculation.policy, open_.engine.max_prefill_tokens) == ("fixed", 8192)
    assert open_.device_defaults == {"speculation.policy": "fixed", "engine.max_prefill_tokens": 8192}
    assert not config_from_dict(SMALLEST).device_defaults
    assert config_from_dict(SMALLEST).trainer.max_tokens_per_forward == 2048
    learning = config_from_dict(SMALLEST | {"cluster": {"trainer": {"num_gpus": 1}}})
    assert learning.device_defaults == {"trainer.max_tokens_per_forward": 4096}
    chosen = SMALLEST | {"cluster": {"trainer": {"num_gpus": 1}}, "trainer": {"max_tokens_per_forward": 512}}
    assert config_from_dict(chosen).trainer.max_tokens_per_forward == 512
    dump_config(open_, tmp_path / "resolved.yaml")
    assert load_config(tmp_path / "resolved.yaml") == open_
    sections: dict[str, Any] = {"models": ModelsConfig(draft="demo"), "engine": EngineConfig()}
    built = Config(data=DataConfig(task="chain"), **sections, **cast(Any, gpus))
    assert (built.speculation.policy, built.engine.max_prefill_tokens) == ("fixed", 8192)


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        ({"speculation": {"policy": "goodput"}, "engine": {"max_prefill_tokens": 512}}, ("goodput", 512)),
        ({"speculation": {"profile": "measured"}}, ("goodput", 8192)),
        ({"engine": {"device": "cpu"}}, ("goodput", 512)),
    ],
)
def test_what_the_user_says_holds_on_gpus_too(tree: dict, expected: tuple[str, int]) -> None:
    config = config_from_dict(SMALLEST | {"cluster": {"generation": {"num_gpus": 1}}} | tree)
    assert (config.speculation.policy, config.engine.max_prefill_tokens) == expected


def test_sources_take_what_data_says_and_keep_it_through_a_file(tmp_path: Path) -> None:
    source = {"path": "b.jsonl", "chat": False, "reference_field": None}
    config = config_from_dict(
        SMALLEST | {"data": {"chat": True, "prompt_field": "q", "sources": [{"task": "chain"}, source]}}
    )
    first, second = config.data.each_source()
    assert (first.chat, first.prompt_field, first.task, first.path) == (True, "q", "chain", None)
    assert (second.chat, second.prompt_field, second.reference_field) == (False, "q", None)
    dump_config(config, tmp_path / "c.yaml")
    assert load_config(tmp_path / "c.yaml") == config


def test_a_run_lasts_epochs_or_iterations() -> None:
    tree = SMALLEST | {"run": {"epochs": 1.5, "iterations": None}, "rollout": {"prompts_per_iteration": 4}}
    config = config_from_dict(tree)
    # fifteen prompts, four at a time
    lasting = config.lasting(10)
    assert (lasting.run.iterations, lasting.run.epochs) == (4, None)
    assert config_from_dict(lasting.model_dump()) == lasting
    assert config.lasting(0.1).run.iterations == 1
    assert lasting.lasting(1000) is lasting
    with pytest.raises(ConfigError, match=r"run\.epochs|epochs 1\.5 and iterations 7"):
        config_from_dict(tree | {"run": {"epochs": 1.5, "iterations": 7}})
    with pytest.raises(ConfigError, match="iterations"):
        config_from_dict(SMALLEST | {"run": {"iterations": None}})


def test_a_reference_below_adapters_does_not_move() -> None:
    algorithm = {"kind": "grpo", "kl_coef": 0.1, "sync_ref_model": True}
    tree = SMALLEST | {"algorithm": algorithm, "rollout": {"samples_per_prompt": 4}}
    assert config_from_dict(tree).algorithm.sync_ref_model
    with pytest.raises(ConfigError, match=r"sync_ref_model moves the reference"):
        config_from_dict(tree | {"trainer": {"lora": {}}})


@pytest.mark.parametrize("optim", ["muon", "adamw_8bit"])
def test_shards_are_stepped_by_adamw_alone(optim: str) -> None:
    tree = SMALLEST | {"trainer": {"optim": optim}, "cluster": {"trainer": {"num_actors": 2}}}
    with pytest.raises(ConfigError, match=rf"trainer\.optim {optim} steps whole weights"):
        config_from_dict(tree)
    ddp = {"trainer": {"optim": optim, "strategy": "ddp"}}
    assert config_from_dict(tree | ddp).trainer.optim == optim


def test_a_run_begins_with_the_target_s_own_weights() -> None:
    with pytest.raises(ConfigError, match="adapter_path is of sft, dpo and train-reward, got a for a run"):
        config_from_dict(SMALLEST | {"trainer": {"lora": {"adapter_path": "a"}}})


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        ("reward", {"kind": "none"}, "goes with no reward.kind none"),
        (
            "rollout",
            {"look_ahead": "auto"},
            "goes with no rollout.look_ahead, which hands prompts out before",
        ),
        (
            "evaluation",
            {"data": {"task": "chain", "easy_threshold": 0.5}},
            "evaluation.data.easy_threshold has no effect",
        ),
    ],
)
def test_solved_prompts_are_left_out_where_rewards_are_known_in_time(
    section: str, values: dict, message: str
) -> None:
    tree = SMALLEST | {
        "data": {"task": "chain", "easy_threshold": 0.5},
        "models": {**SMALLEST["models"], "teacher": "t"},
        "algorithm": {"kind": "distill"},
        "reward": {"kind": "gsm8k"},
    }
    assert config_from_dict(tree).data.easy_threshold == 0.5
    with pytest.raises(ConfigError, match=message):
        config_from_dict(tree | {section: values})
