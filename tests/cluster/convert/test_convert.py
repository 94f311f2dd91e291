"""Configs of TRL, verl and OpenRLHF become ours: every key is accounted for, and `check` takes the result."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhfspec.cluster.cli import main
from rlhfspec.cluster.convert.read import TRAINERS, convert_files
from rlhfspec.cluster.convert.rules import Converted, read_kinds
from rlhfspec.core.config_io import load_config_of
from rlhfspec.core.errors import ConfigError
from rlhfspec.core.settings.section import Section
from tests.conftest import TinyPair

CONFIGS = Path(__file__).with_name("configs")
"Theirs, from their repositories; each says in its first line where it stands there."
NEEDS_KIND = {"rloo_config.yaml": "rloo", "example_config.yaml": "sft"}
EXAMPLES = [
    (folder.name, file.name)
    for folder in sorted(CONFIGS.iterdir())
    for file in sorted(folder.iterdir())
    if file.name != "deepspeed_zero3.yaml"
]
MIXED = ("HuggingFaceH4/Polaris-Dataset-53K", "trl-lib/DeepMath-103K")
BEHIND_PROGRAM = re.compile(r"(?:grpo|gspo|ppo|ppo_tldr|dpo|rloo|sft)\.py|openrlhf\.cli\.train_\w+|-m verl\.")


def convert_example(trainer: str, name: str) -> Converted:
    files = [CONFIGS / trainer / name]
    if name == "example_config.yaml":
        files.append(CONFIGS / "trl" / "deepspeed_zero3.yaml")
    return convert_files(trainer, files, NEEDS_KIND.get(name))


def keys_of(trainer: str, text: str) -> set[str]:
    """Their keys, found by looks alone."""
    text = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    if trainer == "verl":
        return set(re.findall(r"(?m)(?:^|[\s(\"+])([a-z_]\w*(?:\.\w+)+)=", text))
    if trainer == "openrlhf":
        return set(re.findall(r"(?m)^\s*--([a-z]\w*\.[\w.]+)", text))
    if "--" in text:
        return set(re.findall(r"--(\w+)", text[text.index(".py") :]))
    return set(re.findall(r"(?m)^(\w+):", text))


def test_there_are_five_examples_of_each() -> None:
    assert all(sum(trainer == one for one, _ in EXAMPLES) >= 5 for trainer in TRAINERS)
    assert all("Apache-2.0" in (CONFIGS / t / name).read_text().splitlines()[0] for t, name in EXAMPLES)


@pytest.mark.parametrize(("trainer", "name"), EXAMPLES)
def test_every_key_of_an_example_is_accounted_for_by_name(trainer: str, name: str) -> None:
    converted = convert_example(trainer, name)
    keys = keys_of(trainer, (CONFIGS / trainer / name).read_text())
    if name == "example_config.yaml":
        keys |= keys_of("trl", (CONFIGS / "trl" / "deepspeed_zero3.yaml").read_text()) - {"deepspeed_config"}
    account = (*converted.taken, *converted.unmatched, *converted.branched)
    named = {re.split(r"[ =]", line.lstrip("+"))[0].removeprefix("launcher.") for line in account}
    assert len(keys) >= 3
    assert keys - named == set()
    text = converted.text()
    assert all(f"#   {line}" in text for line in account)
    assert not any("not a key that this command knows" in why for why in converted.unmatched.values())


@pytest.mark.parametrize(("trainer", "name"), EXAMPLES)
def test_an_example_becomes_a_config_that_its_command_takes(
    trainer: str, name: str, tmp_path: Path, tiny_pair: TinyPair, capsys: pytest.CaptureFixture[str]
) -> None:
    converted = convert_example(trainer, name)
    file = tmp_path / "run.yaml"
    file.write_text(converted.text())
    assert load_config_of(converted.kind.schema, file)
    if converted.kind.command != "train":
        return
    rows = [{"question": f"0{i}:a+1=", "answer": "b"} for i in range(1, 5)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    here = {
        # what this machine has not: their models, data, GPUs, services
        "models.target": tiny_pair.target,
        "data.path": tmp_path / "rows.jsonl",
        "data.sources": "[]",
        "data.prompt_field": "question",
        "data.prompt_template": "'{prompt}'",
        "data.reference_field": "answer",
        "data.reward_fields": "[]",
        "data.chat": "false",
        "reward.kind": "chain",
        "reward.model": "null",
        "evaluation.every": 0,
        "evaluation.data": "null",
        "tracking": "{}",
        "sampling.max_new_tokens": 32,
        "reward.shaping": "{}",
        "run.output_dir": tmp_path / "runs",
        "run.cache_dir": tmp_path / "cache",
        "cluster": "{}",
    }
    argv = ["check", "--config", str(file)]
    assert main([*argv, *(word for key, value in here.items() for word in ("--set", f"{key}={value}"))]) == 0
    assert "check passed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("trainer", "name", "expected"),
    [
        (
            "verl",
            "grpo.sh",
            {
                "algorithm.kind": "grpo",
                "algorithm.kl_coef": 0.001,
                "algorithm.kl_estimator": "k3",
                "algorithm.loss_aggregation": "token_mean",
                "data.sources": [{"path": f"~/data/{one}/train.parquet"} for one in ("gsm8k", "math")],
                "rollout.prompts_per_iteration": 1024,
                "rollout.samples_per_prompt": 5,
                "run.name": "qwen3_8b_grpo_vllm_fsdp",
                "sampling.max_new_tokens": 2048,
                "trainer.minibatch_size": 256 * 5,
                "trainer.weight_decay": 0.01,
            },
        ),
        (
            "verl",
            "gspo.sh",
            {
                "algorithm.ratio_level": "sequence_mean",
                "algorithm.loss_aggregation": "sequence_mean",
                "algorithm.clip_ratio": 3e-4,
                "algorithm.clip_ratio_high": 4e-4,
                "algorithm.dual_clip": None,  # verl's gspo reads none
                "rollout.prompts_per_iteration": 512,
            },
        ),
        (
            "verl",
            "grpo_megatron.sh",
            {
                # 96 prompts in minibatches of 32: the schedule of verl goes on once where ours does three times
                "trainer.warmup_steps": 30,
                "trainer.minibatch_size": 32 * 8,
                "reward.shaping.overlong": {"buffer_tokens": 4096, "factor": 1.0},
                "algorithm.clip_ratio_high": 0.28,
                "evaluation.temperature": 1.0,
                "evaluation.top_p": 0.7,
            },
        ),
        ("verl", "grpo_lora.sh", {"trainer.lora": {"rank": 64, "alpha": 32.0}, "evaluation.at_start": False}),
        ("verl", "skypilot.yaml", {"algorithm.kind": "ppo", "algorithm.gae_lambda": 1.0, "algorithm.kl_coef": 0.0}),
        (
            "trl",
            "gspo.sh",
            {
                # 8 samples x 8 steps a generation, 8 of a prompt; 8 x 2 an optimizer step
                "rollout.prompts_per_iteration": 8,
                "rollout.samples_per_prompt": 8,
                "trainer.minibatch_size": 16,
                "algorithm.ratio_level": "sequence_mean",
                "algorithm.clip_ratio_high": 4e-4,
                "trainer.lora": {"rank": 16, "alpha": 32.0, "targets": ["q_proj", "v_proj"]},
            },
        ),
        (
            "trl",
            "ppo_tldr.sh",
            {
                "reward.kind": "model",
                "rollout.prompts_per_iteration": 64,
                "run.iterations": 15_625,
                "trainer.epochs": 4,
                "algorithm.kl_placement": "reward",
                "reward.shaping.missing_eos_penalty": 1.0,
            },
        ),
        ("trl", "grpo_mixture.yaml", {"data.sources": [{"path": one} for one in MIXED]}),
        ("trl", "rloo_config.yaml", {"algorithm.kind": "rloo", "algorithm.kl_coef": 0.05}),
        (
            "trl",
            "example_config.yaml",
            {"trainer.strategy": "fsdp2", "cluster.trainer.num_actors": 8, "trainer.batch_size": 64},
        ),
        (
            "openrlhf",
            "train_dapo_ray_hybrid_engine.sh",
            {
                "algorithm.dynamic_sampling": True,
                "algorithm.clip_ratio_high": 0.27,
                "algorithm.correction": {"kind": "tis", "weight_cap": 5.0},
                "reward.kind": "/openrlhf/examples/python/reward_func.py:reward_func",
                "cluster.generation.num_actors": 4,
                "trainer.minibatch_size": 128,
            },
        ),
        (
            "openrlhf",
            "train_ppo_ray_slurm.sh",
            {"algorithm.kind": "ppo", "algorithm.clip_value": 0.5, "algorithm.gae_lambda": 1.0, "reward.kind": "model"},
        ),
        (
            "openrlhf",
            "train_reinforce_baseline_ray_agent_async.sh",
            {"algorithm.dynamic_sampling": True, "rollout.max_staleness": None},
        ),
        ("openrlhf", "train_sft.sh", {"data.reference_field": "response", "trainer.batch_size": 256}),
    ],
)  # fmt: skip
def test_what_an_example_says_is_what_comes_out(trainer: str, name: str, expected: dict[str, Any]) -> None:
    values = convert_example(trainer, name).values
    assert {key: values.get(key) for key in expected} == expected


def has_key(schema: type[Section], dotted: str) -> bool:
    node: Any = schema
    for part in dotted.split("."):
        fields = getattr(node, "model_fields", {})
        if part not in fields:
            return False
        kinds = [fields[part].annotation, *getattr(fields[part].annotation, "__args__", ())]
        node = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)), None)
    return True


@pytest.mark.parametrize("trainer", TRAINERS)
def test_the_keys_that_a_table_names_are_ours(trainer: str) -> None:
    for kind in read_kinds(trainer, TRAINERS[trainer].DECISIONS).values():
        named = {rule["to"] for rule in kind.rules.values() if "to" in rule} | set(kind.base)
        assert {key for key in named if not has_key(kind.schema, key)} == set(), kind.name


def file_of(tmp_path: Path, text: str, name: str = "theirs.yaml") -> Path:
    (tmp_path / name).write_text(text)
    return tmp_path / name


def test_a_key_that_no_table_knows_and_a_value_that_has_no_counterpart_are_named(tmp_path: Path) -> None:
    text = "model_name_or_path: m\ndataset_name: d\nreward_funcs: [a.b.score]\n"
    text += "learning_rte: 1\nloss_type: sapo\nlr_scheduler_type: polynomial\nmin_p: 0.1\nmax_steps: 40\n"
    converted = convert_files("trl", [file_of(tmp_path, text)], "grpo")
    assert "not a key that this command knows" in converted.unmatched["learning_rte 1"]
    assert "no loss sapo here" in converted.unmatched["loss_type sapo"]
    assert "trainer.schedule here is one of" in converted.unmatched["lr_scheduler_type polynomial"]
    assert "sampling.top_p" in converted.unmatched["min_p 0.1"]
    assert converted.values["reward.kind"] == "a.b:score"
    assert converted.values["run.iterations"] == 40
    text += "num_iterations: 4\nwarmup_steps: 0.1\n"
    converted = convert_files("trl", [file_of(tmp_path, text)], "grpo")
    assert (converted.values["trainer.epochs"], converted.values["run.iterations"]) == (4, 10)
    assert "a share of the run's steps is meant" in converted.unmatched["warmup_steps 0.1"]


def test_several_rewards_keep_their_weights(tmp_path: Path) -> None:
    given = {
        "model_name_or_path": "m",
        "dataset_name": "d",
        "reward_funcs": ["think_format_reward", "mine.score", "get_soft_overlong_punishment"],
        "reward_weights": [0.5, 2.0, 1.0],
    }
    converted = convert_files("trl", [file_of(tmp_path, json.dumps(given), "grpo.json")])
    kinds = {part["kind"]: part["weight"] for part in converted.values["reward.parts"]}
    assert kinds == {"trl.rewards:think_format_reward": 0.5, "mine:score": 2.0}
    assert converted.values["reward.shaping.overlong"]["buffer_tokens"] == 256


def test_the_yaml_that_hydra_prints_is_read_too(tmp_path: Path) -> None:
    tree = {
        "actor_rollout_ref": {
            "model": {"path": "m", "_target_": "x"},
            "rollout": {"n": 4, "temperature": 0.8},
        },
        "data": {"train_files": "rows.parquet", "train_batch_size": 16},
        "algorithm": {"adv_estimator": "rloo", "use_kl_in_reward": True, "kl_ctrl": {"kl_coef": 0.02}},
        "custom_reward_function": {"path": "mine.py", "name": "score"},
    }
    values = convert_files("verl", [file_of(tmp_path, yaml.safe_dump(tree))]).values
    assert (values["algorithm.kind"], values["algorithm.kl_coef"]) == ("rloo", 0.02)
    assert values["reward.kind"] == "mine.py:score"
    assert (values["sampling.temperature"], values["rollout.samples_per_prompt"]) == (0.8, 4)


@pytest.mark.parametrize(
    ("trainer", "text", "words"),
    [
        (
            "trl",
            "learning_rate: 1",
            "does not say which trainer it is of; name it with --kind, one of sft, reward",
        ),
        ("trl", "- a", "holds no keys"),
        ("verl", "a: [", "neither YAML"),
        (
            "openrlhf",
            "python -m openrlhf.cli.train_kd --a.b 1",
            "no counterpart to openrlhf's kd; expected one of",
        ),
    ],
)
def test_a_file_of_no_known_kind_is_refused(trainer: str, text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        convert_files(trainer, [file_of(tmp_path, text)])


def test_the_command_writes_the_config_and_says_what_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run.yaml"
    assert main(["convert", "verl", str(CONFIGS / "verl" / "ppo.sh"), "--out", str(out)]) == 0
    assert load_config_of(convert_example("verl", "ppo.sh").kind.schema, out)
    assert main(["convert", "openrlhf", str(CONFIGS / "openrlhf" / "train_rm.sh")]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["data"]["chosen_field"] == "chosen"
    greedy = file_of(
        tmp_path, "reward_funcs: [a.b]\ntemperature: 0.0\nmodel_name_or_path: m\ndataset_name: d\n"
    )
    assert main(["convert", "trl", str(greedy)]) == 2
    assert "sampling.temperature must be above 0" in capsys.readouterr().err
    assert main(["convert", "trl", str(tmp_path / "nowhere")]) == 2
    assert "cannot read" in capsys.readouterr().err


def test_what_is_not_decided_here_and_changes_learning_is_to_be_done(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=remax algorithm.use_kl_in_reward=True "
        "actor_rollout_ref.actor.use_kl_loss=True\n"
    )
    to_do = "\n".join(convert_files("verl", [script]).to_do)
    assert "algorithm.kind: theirs is none of ours" in to_do
    assert "algorithm.kl_coef: theirs is none of ours" in to_do
    script.write_text("python3 -m openrlhf.cli.train_ppo_ray --algo.advantage.estimator gae\n")
    to_do = "\n".join(convert_files("openrlhf", [script]).to_do)
    assert "actor.lr_warmup_ratio 0.03, their default: trainer.warmup_steps counts" in to_do


def values_of(tmp_path: Path, trainer: str, text: str, kind: str | None = None) -> dict[str, Any]:
    return convert_files(trainer, [file_of(tmp_path, text)], kind).values


def test_trl_counts_optimizer_steps_and_evaluates_as_it_samples(tmp_path: Path) -> None:
    text = "reward_funcs: [a.b]\nper_device_train_batch_size: 4\ngradient_accumulation_steps: 2\n"
    text += "steps_per_generation: 8\nnum_iterations: 2\nnum_generations: 4\nsave_steps: 80\n"
    values = values_of(tmp_path, "trl", text)
    # 32 samples are generated and learned from in 2 x 4 steps of 8
    assert values["run.checkpoint_every"] == 10
    assert "evaluation.every" not in values
    values = values_of(tmp_path, "trl", text + "eval_strategy: steps\neval_steps: 16\ntemperature: 0.7\n")
    assert (values["evaluation.every"], values["evaluation.samples_per_prompt"]) == (2, 4)
    assert (values["evaluation.temperature"], values["evaluation.at_start"]) == (0.7, False)
    values = values_of(tmp_path, "trl", text + "save_strategy: epoch\neval_strategy: epoch\n")
    assert {"run.checkpoint_every", "evaluation.every"}.isdisjoint(values)
    assert values_of(tmp_path, "trl", "save_steps: 80\n", "ppo")["run.checkpoint_every"] == 80


def test_what_verl_does_with_keys_that_are_left_out(tmp_path: Path) -> None:
    start = "python3 -m verl.trainer.main_ppo "
    values = values_of(tmp_path, "verl", f"{start}algorithm.adv_estimator=gae\n")
    assert (values["algorithm.clip_value"], values["algorithm.clip_ratio_high"]) == (0.5, 0.2)
    assert (values["data.max_prompt_tokens"], values["models.target"]) == (512, "MODEL")
    grpo = f"{start}algorithm.adv_estimator=grpo algorithm.norm_adv_by_std_in_grpo=False "
    actor = "actor_rollout_ref.actor."
    values = values_of(tmp_path, "verl", f"{grpo}{actor}clip_ratio_low=0.1 {actor}clip_ratio=0.3\n")
    assert values["algorithm.advantage"] == "group_mean"
    assert (values["algorithm.clip_ratio"], values["algorithm.clip_ratio_high"]) == (0.1, 0.2)
    assert "algorithm.clip_value" not in values
    values = values_of(
        tmp_path, "verl", f"{grpo}trainer.test_freq=1 actor_rollout_ref.rollout.val_kwargs.n=16\n"
    )
    assert (values["evaluation.temperature"], values["evaluation.samples_per_prompt"]) == (0.0, 1)
    text = f"{grpo}+data.apply_chat_template_kwargs.enable_thinking=False\n"
    assert values_of(tmp_path, "verl", text)["data.chat_template_kwargs.enable_thinking"] is False


def test_supervised_rows_are_held_out_only_where_theirs_are(tmp_path: Path) -> None:
    for trainer, text in (
        ("trl", "trl sft --model_name_or_path m --dataset_name d\n"),
        ("verl", "torchrun -m verl.trainer.sft_trainer data.train_files=d model.path=m\n"),
        ("openrlhf", "python -m openrlhf.cli.train_sft --data.dataset d --model.model_name_or_path m\n"),
    ):
        assert values_of(tmp_path, trainer, text)["data.eval_share"] == 0.0
    values = values_of(tmp_path, "openrlhf", "python -m openrlhf.cli.train_sft --data.dataset d\n")
    assert (values["trainer.learning_rate"], values["data.prompt_template"]) == (
        5e-6,
        "User: {prompt}\nAssistant: ",
    )


def test_of_two_adapters_without_alpha_each_has_its_trainers_own(tmp_path: Path) -> None:
    text = "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.lora_rank=8\n"
    assert values_of(tmp_path, "verl", text)["trainer.lora"]["alpha"] == 16.0
    text = "python -m openrlhf.cli.train_ppo_ray --ds.lora.rank 8\n"
    assert values_of(tmp_path, "openrlhf", text)["trainer.lora"]["alpha"] == 16.0


SCRIPT = """
import argparse
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import think_format_reward

parser = argparse.ArgumentParser()
options, steps = parser.parse_args(), 4
rate = 2e-6
model = AutoModelForCausalLM.from_pretrained("me/model", dtype=torch.bfloat16)
config = GRPOConfig(learning_rate=rate, output_dir=options.out, gradient_accumulation_steps=2, num_iterations=n, **more)
trainer = GRPOTrainer(
    model=model,
    args=config,
    reward_funcs=[think_format_reward, is_short],
    train_dataset=load_dataset("me/rows", "easy", split=["train[:1%]", "test"])[0].map(as_chat),
    peft_config=LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj"]),
)
trainer.train()
"""


def test_a_python_script_is_read_and_not_run(tmp_path: Path) -> None:
    converted = convert_files("trl", [file_of(tmp_path, SCRIPT, "train.py")])
    expected = {
        "models.target": "me/model",
        "models.dtype": "bfloat16",
        "data.path": "me/rows:easy",
        "data.split": "train[:1%]",
        "trainer.learning_rate": 2e-6,
        "trainer.lora": {"rank": 8, "alpha": 16.0, "targets": ["q_proj"]},
        "trainer.minibatch_size": 16,
        "rollout.samples_per_prompt": 8,
    }
    assert {key: converted.values.get(key) for key in expected} == expected
    kinds = [part["kind"] for part in converted.values["reward.parts"]]
    assert kinds == ["trl.rewards:think_format_reward", "reward.py:is_short"]
    to_do = "\n".join(converted.to_do)
    assert "reward.kind reward.py:is_short: write that function into reward.py" in to_do
    assert "run.output_dir $(options.out): the script leaves it" in to_do
    assert "num_iterations $(n): the script leaves it" in to_do
    assert "the script changes its rows" in to_do
    assert "not a key that this command knows" in converted.unmatched["**more $(more)"]
    with pytest.raises(ConfigError, match="holds no keys"):
        convert_files("trl", [file_of(tmp_path, "print('no config')\nx = [\n", "other.py")])


def test_a_loss_or_a_batch_that_is_none_of_ours_is_to_be_done(tmp_path: Path) -> None:
    text = "reward_funcs: [a.b]\nloss_type: sapo\nnum_generations: 16\nscale_rewards: none\n"
    converted = convert_files("trl", [file_of(tmp_path, text)])
    to_do = "\n".join(converted.to_do)
    assert "algorithm.kind: theirs is none of ours, see below; grpo is taken" in to_do
    assert "8 samples an iteration are no whole number of groups of 16" in to_do
    assert "rollout.prompts_per_iteration: theirs is none of ours" in to_do
    assert converted.values["rollout.samples_per_prompt"] == 16
    assert converted.values["algorithm.advantage"] == "group_mean"
    converted = convert_files("trl", [file_of(tmp_path, "loss_type: cispo\nscale_rewards: batch\n")])
    assert converted.values["algorithm.kind"] == "cispo"
    assert "by group or not at all" in converted.unmatched["scale_rewards batch"]
