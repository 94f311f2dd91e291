"""`rlhfspec sft` and `rlhfspec train-reward` from files to a run folder, resumed, by one trainer and by two."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
)
from word_chat import WORDS, word_chat

from rlhfspec.cluster.cli import main
from rlhfspec.cluster.folder.layout import RunDir
from rlhfspec.core.checkpoint_manifest import verify_checkpoint
from rlhfspec.core.config import RewardConfig
from rlhfspec.core.metrics import read_metrics
from rlhfspec.core.records import Prompt
from rlhfspec.core.settings.supervised import SftConfig
from rlhfspec.learning.data.chat.scored_text import render
from rlhfspec.learning.rewards.reward_function import build_reward

NUM_ROWS = 40
SMALL = [
    "trainer.num_threads=1",
    "trainer.batch_size=8",
    "trainer.learning_rate=0.01",
    "trainer.eval_every=2",
]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with a chat template, conversations and pairs."""
    folder = tmp_path_factory.mktemp("files")
    tokenizer = word_chat()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    rng = np.random.default_rng(0)
    with (folder / "talks.jsonl").open("w") as talks, (folder / "pairs.jsonl").open("w") as pairs:
        for _ in range(NUM_ROWS):
            question = " ".join(WORDS[i] for i in rng.integers(0, len(WORDS), 3))
            user = {"role": "user", "content": question}
            good, bad = ({"role": "assistant", "content": f"{word} you"} for word in ("good", "bad"))
            talks.write(json.dumps({"messages": [user, good]}) + "\n")
            pairs.write(json.dumps({"prompt": [user], "chosen": [good], "rejected": [bad]}) + "\n")
    return folder


def run(command: str, *args: object, sets: tuple[str, ...] = ()) -> int:
    words = [command, *map(str, args)]
    for item in (*SMALL, *sets) if "--resume" not in words else sets:
        words += ["--set", item]
    return main(words)


def sft(files: Path, out: Path, *sets: str) -> RunDir:
    data = files / "talks.jsonl"
    assert run("sft", "--model", files / "base", "--data", data, "--out", out, sets=sets) == 0
    return RunDir.open(out)


def reward(files: Path, out: Path, *sets: str) -> RunDir:
    data = files / "pairs.jsonl"
    assert run("train-reward", "--model", files / "base", "--data", data, "--out", out, sets=sets) == 0
    return RunDir.open(out)


def weights(folder: Path, auto=AutoModelForCausalLM) -> dict[str, torch.Tensor]:
    return dict(auto.from_pretrained(folder).named_parameters())


def test_sft_leaves_a_complete_folder_and_learns(files: Path, tmp_path: Path, capsys):
    folder = sft(files, tmp_path / "run", "trainer.epochs=6")
    rows = read_metrics(folder.metrics_file)
    steps = 6 * -(-38 // 8)  # 2 of 40 rows are held out
    assert [row["iteration"] for row in rows] == list(range(steps + 1))
    assert [row["iteration"] for row in rows if "eval/loss" in row] == list(range(0, steps + 1, 2))
    assert rows[-1]["eval/loss"] < 0.5 * rows[0]["eval/loss"]
    assert folder.status()["state"] == "finished"
    saved = folder.path / "checkpoints" / "model"
    assert verify_checkpoint(saved)["weight_version"] == steps
    assert (saved / "tokenizer_config.json").is_file() and weights(saved)
    assert yaml.safe_load(folder.config_file.read_text())["data"]["path"] == str(files / "talks.jsonl")
    capsys.readouterr()
    assert main(["show", str(folder.path)]) == 0
    drawn = capsys.readouterr().out
    assert "held-out loss, first to last" in drawn and "train/loss" in drawn and "Amdahl" not in drawn


def test_sources_are_mixed_by_weight_and_gone_on_with(files: Path, tmp_path: Path, capsys):
    (tmp_path / "texts.jsonl").write_text('{"text": "who are you"}\n' * 5)
    sources = [
        {"path": str(files / "talks.jsonl"), "limit": 10},
        {"path": str(tmp_path / "texts.jsonl"), "text_field": "text", "weight": 2},
    ]
    config = {"model": {"name": str(files / "base")}, "data": {"sources": sources, "eval_share": 0}}
    (tmp_path / "sft.yaml").write_text(yaml.safe_dump(config))
    sets = ("trainer.epochs=2", "trainer.checkpoint_every=3", "trainer.schedule=constant")
    given = ("--config", tmp_path / "sft.yaml", "--out")
    assert run("sft", *given, tmp_path / "run", sets=sets) == 0
    said = capsys.readouterr()
    assert "texts.jsonl: 5 examples, each 2 times an epoch, 50.0% of it" in said.out + said.err
    assert run("sft", *given, tmp_path / "cut", sets=(*sets, "trainer.max_steps=3")) == 0
    assert run("sft", "--resume", tmp_path / "cut", sets=("trainer.max_steps=6",)) == 0
    whole = weights(tmp_path / "run/checkpoints/model")
    assert len(read_metrics(tmp_path / "run/metrics.jsonl")) == 2 * 3
    for name, tensor in weights(tmp_path / "cut/checkpoints/model").items():
        assert torch.equal(tensor, whole[name]), name


def test_training_ends_where_the_held_out_loss_no_longer_falls_and_keeps_the_best(
    files: Path, tmp_path: Path, capsys
):
    sets = ("trainer.epochs=20", "trainer.early_stopping_patience=2", "trainer.keep_best=true")
    # a rate that learns at first and then jumps about
    sets = (*sets, "trainer.learning_rate=0.05", "trainer.schedule=constant")
    run_dir = sft(files, tmp_path / "run", *sets)
    said = capsys.readouterr()
    losses = [row["eval/loss"] for row in read_metrics(run_dir.metrics_file) if "eval/loss" in row]
    best = losses.index(min(losses))
    assert 0 < best == len(losses) - 3
    assert f"training ended at step {2 * best + 4} of 100" in " ".join((said.out + said.err).split())
    folder = run_dir.checkpoints_folder
    assert verify_checkpoint(folder / "best")["weight_version"] == 2 * best
    assert verify_checkpoint(folder / "model")["weight_version"] == 2 * best + 4
    # gone on with behind the best, it counts on from what there was before
    at = 2 * best + 2
    more = ("trainer.keep_best=false", f"trainer.max_steps={at}", f"trainer.checkpoint_every={at}")
    cut = sft(files, tmp_path / "cut", *sets, *more)
    assert run("sft", "--resume", cut.path, sets=("trainer.max_steps=100",)) == 0
    assert len(read_metrics(cut.metrics_file)) == 2 * best + 5
    with pytest.raises(ValueError, match="eval_every"):
        SftConfig.model_validate(
            {"model": {"name": "m"}, "data": {"path": "x"}, "trainer": {"keep_best": True, "eval_every": 0}}
        )


def test_a_fine_tuned_model_keeps_all_end_tokens_and_what_it_said_of_sampling(files: Path, tmp_path: Path):
    base = tmp_path / "base"
    shutil.copytree(files / "base", base)
    end = word_chat().eos_token_id
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": [4, end], "temperature": 0.6}))
    given = ("--model", base, "--data", files / "talks.jsonl", "--out", tmp_path / "run")
    assert run("sft", *given, sets=("trainer.max_steps=1",)) == 0
    saved = GenerationConfig.from_pretrained(tmp_path / "run" / "checkpoints" / "model")
    assert (saved.eos_token_id, saved.temperature) == ([4, end], 0.6)


@pytest.mark.parametrize("lora", [(), ("trainer.lora.rank=4",)], ids=["full", "lora"])
def test_a_resumed_run_ends_where_an_unbroken_one_does(
    files: Path, tmp_path: Path, lora: tuple[str, ...], capsys: pytest.CaptureFixture[str]
):
    sets = ("trainer.max_steps=6", "trainer.schedule=constant", *lora)
    whole = sft(files, tmp_path / "whole", *sets)
    saving = ("trainer.checkpoint_every=2", "trainer.schedule=constant", *lora)
    cut = sft(files, tmp_path / "cut", "trainer.max_steps=4", *saving)
    states = sorted((cut.path / "checkpoints").glob("state_*"))
    assert [path.name for path in states] == ["state_0002", "state_0004"]
    # somebody's own copy is none of ours
    shutil.copytree(states[0], states[0].with_name("state_0002.bak"))
    if lora:
        # the newest is damaged: the one before it is gone on from
        shard = next(states[1].glob("*.distcp"))
        shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    # a line of a step that the state knows nothing of
    with cut.metrics_file.open("a") as file:
        file.write('{"iteration": 5, "train/loss": 9.0}\n')
    assert run("sft", "--resume", cut.path, sets=("trainer.max_steps=6",)) == 0
    assert [row["iteration"] for row in read_metrics(cut.metrics_file)] == list(range(7))
    assert cut.status()["state"] == "finished"
    assert ("state_0004 is passed over: state" in capsys.readouterr().out) == bool(lora)
    expected, resumed = (weights(one.path / "checkpoints" / "model") for one in (whole, cut))
    assert all(torch.equal(resumed[name], weight) for name, weight in expected.items())


def test_a_reward_model_scores_in_ppo_what_it_was_trained_on(files: Path, tmp_path: Path):
    folder = reward(files, tmp_path / "run", "trainer.epochs=4")
    last = read_metrics(folder.metrics_file)[-1]
    assert last["eval/accuracy"] == 1.0 and last["eval/margin"] > 0.5
    saved = folder.path / "checkpoints" / "model"
    assert verify_checkpoint(saved)["model"] == "model"
    prompts = [
        Prompt(prompt_id=0, token_ids=np.array([1]), text="who me", messages=(("user", "who me"),))
    ] * 2
    scorer = build_reward(RewardConfig(kind="model", model=str(saved), batch_size=2))
    good, bad = (one.value for one in scorer.score(prompts, ["good you", "bad you"]))
    model = AutoModelForSequenceClassification.from_pretrained(saved)
    tokenizer = word_chat()
    for response, score in (("good you", good), ("bad you", bad)):
        ids = torch.tensor([render(tokenizer, "", prompts[0].messages, response, max_tokens=None)])
        assert model(ids).logits.item() == pytest.approx(score, abs=1e-5)
    assert good - bad > 0.5


def test_steps_that_learn_nothing_are_told_and_counted(files: Path, tmp_path: Path, capsys):
    rows = [json.loads(line) for line in (files / "pairs.jsonl").read_text().splitlines()]
    pairs = tmp_path / "pairs.jsonl"
    # so far below what the scores differ by anyway that the loss is 0
    pairs.write_text("".join(json.dumps(row | {"margin": -1000.0}) + "\n" for row in rows))
    out = tmp_path / "run"
    assert run("train-reward", "--model", files / "base", "--data", pairs, "--out", out) == 0
    num_steps = len([row for row in read_metrics(out / "metrics.jsonl") if "train/loss" in row])
    said = capsys.readouterr().out
    assert said.count("the gradient is 0 and nothing was learned") == 1
    assert f"{num_steps} steps had a gradient of 0 and learned nothing; see whether the rows differ" in said
    assert main(["show", str(out)]) == 0
    assert "steps that learned nothing" in capsys.readouterr().out


def test_a_loss_that_never_changes_is_told(files: Path, tmp_path: Path, capsys):
    """Steps so small that they round away, on rows that are all alike."""
    row = (files / "talks.jsonl").read_text().splitlines()[0]
    (tmp_path / "talks.jsonl").write_text(f"{row}\n" * NUM_ROWS)
    args = ("--model", files / "base", "--data", tmp_path / "talks.jsonl", "--out", tmp_path / "run")
    assert run("sft", *args, sets=("trainer.learning_rate=1e-30",)) == 0
    assert "in every step, to the last bit: nothing was learned" in capsys.readouterr().out


def test_an_adapter_with_its_head_is_what_was_merged(files: Path, tmp_path: Path):
    peft = pytest.importorskip("peft")
    folder = reward(files, tmp_path / "run", "trainer.max_steps=4", "trainer.lora.rank=4")
    checkpoints = folder.path / "checkpoints"
    merged = AutoModelForSequenceClassification.from_pretrained(checkpoints / "model")
    base = AutoModelForSequenceClassification.from_pretrained(files / "base", num_labels=1, pad_token_id=0)
    adapted = peft.PeftModel.from_pretrained(base, checkpoints / "adapter")
    ids = torch.tensor([[4, 6, 7, 8, 1, 5, 11, 1]])
    torch.testing.assert_close(adapted(ids).logits, merged(ids).logits, rtol=1e-4, atol=1e-5)
    assert verify_checkpoint(checkpoints / "adapter")["model"] == "adapter"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--out", "{files}"], "is there already"),
        (["--out", "{new}", "--set", "trainer.learning_rat=1"], "did you mean 'learning_rate'"),
        (["--out", "{new}", "--set", "data.max_tokens=65"], "has 64 positions"),
        (["--out", "{new}", "--set", "data.eval_share=0.99"], "too few to learn from"),
        (["--out", "{new}", "--set", "data.eval_path=/no.jsonl"], "does not exist; check data.eval_path"),
        (["--out", "{new}", "--set", "data.path=x.csv"], "does not|cannot"),
        (["--out", "{new}", "--set", "cluster.trainer.num_actors=40"], "has not one row for each"),
        (["--resume", "{files}"], "expected no --config"),
    ],
)
def test_bad_input_is_one_line_and_leaves_no_folder(files: Path, tmp_path: Path, capsys, args, said):
    import re

    given = [arg.format(files=files, new=tmp_path / "new") for arg in args]
    words = ["sft", "--model", str(files / "base"), "--data", str(files / "talks.jsonl"), *given]
    assert main(words) == 2
    error = capsys.readouterr().err.strip()
    assert re.search(said, error) and len(error.splitlines()) == 1
    assert not (tmp_path / "new").exists()


def test_a_quantized_model_is_refused_before_the_folder_is_made(files: Path, tmp_path: Path, capsys):
    import json
    import shutil

    model = Path(shutil.copytree(files / "base", tmp_path / "base"))
    held = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(held | {"quantization_config": {"quant_method": "awq"}}))
    given = ["--model", str(model), "--data", str(files / "talks.jsonl"), "--out", str(tmp_path / "new")]
    assert main(["sft", *given]) == 2
    assert "are quantized" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("changed", "said"),
    [("run.seed=7", "run.seed was 0, now 7"), ("trainer.batch_size=4", "trainer.batch_size was 8, now 4"),
     ("data.limit=30", "number of examples was 38, now")],
)  # fmt: skip
def test_other_rows_or_another_order_are_not_gone_on_with(files: Path, tmp_path: Path, capsys, changed, said):
    first = sft(files, tmp_path / "run", "trainer.max_steps=2", "trainer.checkpoint_every=2")
    assert run("sft", "--resume", first.path, sets=("trainer.max_steps=3", changed)) == 2
    assert said in capsys.readouterr().err
    assert run("sft", "--resume", first.path, sets=("trainer.max_steps=3",)) == 0
    if changed == "run.seed=7":
        assert (
            run("sft", "--resume", first.path, sets=("trainer.max_steps=4", "trainer.learning_rate=0.5")) == 0
        )
        out = capsys.readouterr().out
        assert "trainer.learning_rate was" in out and "now 0.5: what follows" in out


def test_a_run_that_may_still_be_running_is_left_alone(files: Path, tmp_path: Path, capsys):
    first = sft(files, tmp_path / "run", "trainer.max_steps=2", "trainer.checkpoint_every=2")
    before = first.metrics_file.read_text()
    first.set_status("running")  # by this process, which lives
    assert run("sft", "--resume", first.path, sets=("trainer.max_steps=3",)) == 2
    assert "is not cut off" in capsys.readouterr().err and first.metrics_file.read_text() == before


def test_a_run_without_a_state_cannot_be_gone_on_with(files: Path, tmp_path: Path, capsys):
    sft(files, tmp_path / "run", "trainer.max_steps=1")
    assert run("sft", "--resume", tmp_path / "run") == 2
    assert "holds no whole state to go on from" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "is not a run folder: expected config.yaml in it, found none"),
        (
            "data: {task: chain}",
            "is no run of this command, or one of another version, and cannot be resumed: ",
        ),
    ],
    ids=["empty", "of another command"],
)
def test_of_a_folder_that_is_no_such_run_what_it_lacks_is_said(tmp_path: Path, capsys, text, said):
    if text is not None:
        (tmp_path / "config.yaml").write_text(text)
    assert run("sft", "--resume", tmp_path) == 2
    error = capsys.readouterr().err
    assert f"{tmp_path} {said}" in error and "--config" not in error
    assert run("sft", "--resume", tmp_path / "nowhere") == 2
    assert "nowhere is not a run folder" in capsys.readouterr().err


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.usefixtures("local_ray")
def test_two_actors_learn_what_one_process_does(files: Path, tmp_path: Path):
    strategy = "fsdp2"  # ddp over groups: tests/learning/training/test_supervised_group.py
    one = reward(files, tmp_path / "one", "trainer.max_steps=4")
    two = reward(
        files,
        tmp_path / "two",
        "trainer.max_steps=4",
        "trainer.checkpoint_every=2",
        f"trainer.strategy={strategy}",
        "cluster.trainer.num_actors=2",
    )
    both = [weights(run_dir.path / "checkpoints" / "model", AutoModelForSequenceClassification)
            for run_dir in (one, two)]  # fmt: skip
    for name, weight in both[0].items():
        torch.testing.assert_close(both[1][name], weight, rtol=0, atol=2e-4, msg=name)
    metrics = [read_metrics(run_dir.metrics_file)[-1]["eval/loss"] for run_dir in (one, two)]
    assert metrics[1] == pytest.approx(metrics[0], rel=1e-3)
    # what two saved, one goes on with
    sets = ("trainer.max_steps=5", "cluster.trainer.num_actors=1")
    assert run("train-reward", "--resume", two.path, sets=sets) == 0
    assert read_metrics(two.metrics_file)[-1]["iteration"] == 5


def test_what_was_cut_of_a_run_s_config_or_metrics_is_named_when_it_goes_on(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    cut = sft(files, tmp_path / "cut", "trainer.max_steps=2", "trainer.checkpoint_every=2")
    text = cut.config_file.read_text()
    kept = cut.path / "checkpoints" / "state_0002" / "config.yaml"
    assert kept.read_text() == text
    for damaged, said in (
        (text[: text.index("trainer:")], "trainer is gone"),
        (text[:-1], "ends within a line"),
    ):
        cut.config_file.write_text(damaged)
        assert run("sft", "--resume", cut.path, sets=("trainer.max_steps=3",)) == 2
        error = capsys.readouterr().err
        assert said in error and f"cp {kept} {cut.config_file}" in error
    shutil.copy(kept, cut.config_file)
    lines = cut.metrics_file.read_text().splitlines(keepends=True)
    cut.metrics_file.write_text(lines[0] + lines[1][:9] + "\n" + lines[2])
    assert run("sft", "--resume", cut.path, sets=("trainer.max_steps=3",)) == 0
    assert f"{cut.metrics_file} lacks 1 of 2 lines (iteration 1)" in capsys.readouterr().out
    assert [row["iteration"] for row in read_metrics(cut.metrics_file)] == [0, 2, 3]


def test_a_policy_learns_from_pairs_and_a_resumed_one_keeps_its_reference(files: Path, tmp_path: Path):
    """By KTO, which needs the most of the reference: the batch's KL too."""
    given = ("--model", files / "base", "--data", files / "pairs.jsonl")
    sets = ("loss.type=kto", "trainer.schedule=constant", "trainer.learning_rate=0.003")
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert run("dpo", *given, "--out", whole, sets=(*sets, "trainer.max_steps=6")) == 0
    more = ("trainer.max_steps=4", "trainer.checkpoint_every=2")
    assert run("dpo", *given, "--out", cut, sets=(*sets, *more)) == 0
    assert run("dpo", "--resume", cut, sets=("trainer.max_steps=6",)) == 0
    expected, resumed = (weights(one / "checkpoints" / "model") for one in (whole, cut))
    assert all(torch.equal(resumed[name], weight) for name, weight in expected.items())
    rows = read_metrics(whole / "metrics.jsonl")
    assert rows[0]["eval/loss"] == pytest.approx(0.5) and rows[-1]["eval/loss"] < 0.49
    assert rows[-1]["eval/margin"] > 0.1 and rows[-1]["train/chosen_reward"] > 0.0
    other = tmp_path / "other"
    shutil.copytree(files / "base", other)
    assert run("dpo", "--resume", cut, sets=("trainer.max_steps=8", f"model.name={other}")) == 2
