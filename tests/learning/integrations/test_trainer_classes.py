"""`rlhfspec.GRPO` and its kin plan as the command line does, in its words, and give the run back."""

from __future__ import annotations

import inspect
import json
import os
import shutil
import subprocess
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from byte_chat import save_byte_pair
from transformers import LlamaForCausalLM

import rlhfspec
from rlhfspec.benchmarks.peers.build import library_folder
from rlhfspec.cluster.cli import main
from rlhfspec.cluster.jobs import supervised_run
from rlhfspec.core.config import EnvironmentConfig
from rlhfspec.core.errors import ConfigError
from rlhfspec.integrations import trainer_classes
from rlhfspec.integrations.finished_run import Table
from rlhfspec.integrations.given_inputs import tool_keys
from rlhfspec.learning.environments.tools import tool_functions
from tests.conftest import TinyPair

ROOT = Path(__file__).resolve().parents[3]
ROWS = [{"prompt": f"0{i}:a+1=", "wish": "b"} for i in range(1, 9)]
SMALL = {
    "run.iterations": 3,
    "run.state_every": 1,
    "run.checkpoint_every": 1,
    "sampling.max_new_tokens": 24,
    "rollout.prompts_per_iteration": 4,
    "rollout.samples_per_prompt": 2,
    "cluster.generation.num_actors": 1,
    "cluster.dashboard": False,
}


def brevity(completions: list[str], wish: list[str], **_: Any) -> list[float]:
    return [1.0 / (1 + len(text)) + (word in text) for text, word in zip(completions, wish, strict=True)]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """What would have been run."""
    seen: list[Any] = []

    class Folder:
        path = tmp_path

    def run_prepared(prepared: Any, report: Any) -> type[Folder]:
        seen.append(prepared)
        (tmp_path / "config.yaml").write_text("")
        return Folder

    monkeypatch.setattr(trainer_classes, "run_prepared", run_prepared)
    return seen


@pytest.mark.slow
def test_the_plan_is_the_command_line_s(planned: list[Any], tiny_pair: TinyPair, tmp_path: Path) -> None:
    args = {**SMALL, "trainer.learning_rate": 1e-6, "reward_weights": [2.0, 0.5]}
    run = rlhfspec.GRPO(
        tiny_pair.target,
        train_dataset=ROWS,
        eval_dataset=ROWS[:2],
        reward_funcs=[brevity, "chain"],
        args=args,
    ).train()
    (prepared,) = planned
    config = prepared.plan.config
    assert run.path == tmp_path
    assert (config.models.target, config.algorithm.kind) == (str(tiny_pair.target), "grpo")
    assert (config.trainer.learning_rate, config.run.iterations, config.evaluation.every) == (1e-6, 3, 10)
    assert [(part.name, part.weight) for part in config.reward.parts] == [("brevity", 2.0), ("chain", 0.5)]
    assert len(prepared.plan.inputs.dataset) == 8 and len(prepared.plan.inputs.evaluation.prompts) == 2
    assert config.data.reward_fields == config.evaluation.data.reward_fields == ("wish",)
    assert not any("no effect" in note for note in prepared.plan.notes), prepared.plan.notes


def test_tools_go_by_value_as_rewards_do(tmp_path: Path) -> None:
    seven = 7

    def add_seven(a: int) -> int:
        """Add seven.

        Args:
            a: a number
        """
        return a + seven

    Path("more_tools.py").write_text("def one(): pass\n")
    keys = tool_keys([add_seven, "more_tools.py"], tmp_path / "inputs")
    settings = EnvironmentConfig(kind=keys["environment.kind"], tools=keys["environment.tools"])
    found = tool_functions(settings)
    assert list(found) == ["add_seven", "one"] and found["add_seven"](1) == 8
    twice = [add_seven, add_seven]
    for wrong in ([], [lambda a: a], twice):
        with pytest.raises(ConfigError, match="tools: expected functions by names of their own"):
            tool_keys(wrong, tmp_path)


@pytest.mark.slow
def test_a_file_says_what_nothing_else_does(planned: list[Any], tiny_pair: TinyPair, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        f"models: {{target: {tiny_pair.target}}}\ndata: {{task: chain, limit: 6}}\nreward: {{kind: chain}}\n"
        "sampling: {max_new_tokens: 24}\nspeculation: {drafter: none}\nalgorithm: {kl_coef: 0.5}\n"
    )
    rlhfspec.PPO(train_dataset=ROWS, reward_funcs=brevity, args=file).train()
    config = planned[0].plan.config
    assert (config.algorithm.kind, config.algorithm.kl_coef, config.speculation.drafter) == (
        "ppo",
        0.5,
        "none",
    )
    assert config.data.task is None and config.data.limit == 6 and config.reward.kind.endswith(":brevity")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"args": {"trainer.lerning_rate": 1}},
            "^args: unknown key trainer.lerning_rate; did you mean 'learning_rate'",
        ),
        ({"args": {"models.target": "x"}}, "args has 'models.target', which a parameter of GRPO sets too"),
        ({"args": {"reward": {"kind": "chain"}}}, "args has 'reward', which a parameter"),
        ({"args": {"reward_weights": [1, 2]}}, "reward_weights as many"),
        ({"reward_funcs": None}, "expected reward_funcs, got none"),
        ({"reward_funcs": lambda prompt, respons: 1.0, "args": SMALL}, "lambda_0' cannot be called"),
        ({"train_dataset": None}, "GRPO: expected train_dataset (a datasets.Dataset"),
        ({"args": "no.yaml"}, "expected a YAML file, no.yaml does not exist"),
    ],
)
def test_errors_are_the_command_line_s(given: dict[str, Any], words: str, tiny_pair: TinyPair) -> None:
    whole = {"model": tiny_pair.target, "train_dataset": ROWS, "reward_funcs": [brevity]} | given
    with pytest.raises(ConfigError, match=words.replace("(", r"\(")):
        rlhfspec.GRPO(**whole).train()
    assert not list(Path().glob("runs/[!.]*"))


def test_a_fault_of_a_key_has_the_same_text_as_from_the_shell(
    tiny_pair: TinyPair, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        rlhfspec.SFT(tiny_pair.target, train_dataset="rows.jsonl", args={"trainer.epochs": 0}).train()
    assert main(["sft", "--model", "x", "--data", "rows.jsonl", "--set", "trainer.epochs=0"]) == 2
    assert capsys.readouterr().err == f"error: {caught.value}\n"


@dataclass
class GRPOConfig:
    """As TRL's, which need not be there."""

    learning_rate: float = 1.0
    vllm_mode: str = "server"
    beta: float = 0.0


@pytest.mark.parametrize(
    ("made", "given", "words"),
    [
        (
            rlhfspec.GRPO,
            {"args": {"learning_rate": 1e-6, "beta": 0.1, "odd": 1, "trainer.epochs": 2}},
            r"got 3 others: learning_rate is trainer\.learning_rate \| beta is algorithm\.kl_coef \| odd is no key of",
        ),
        (rlhfspec.Distill, {"args": {"beta": 0.5}}, r"beta is algorithm\.distill_beta - no coefficient"),
        (rlhfspec.SFT, {"args": {"dataset_text_field": "a"}}, r"dataset_text_field is data\.text_field"),
        (
            rlhfspec.GRPO,
            {"args": GRPOConfig(2.0, "colocate")},
            r"got GRPOConfig: learning_rate is trainer.learning_rate \| vllm_mode is no key here - the engine",
        ),
        (rlhfspec.GRPO, {"args": GRPOConfig()}, "got GRPOConfig$"),
        (rlhfspec.DPO, {"args": 5}, "expected a dict of dotted keys .* got int$"),
        (rlhfspec.GRPO, {"model": GRPOConfig()}, "model: expected a path or a name of a model, got a GRPO"),
        (
            rlhfspec.GRPO,
            {"processing_class": 1, "peft_config": 2},
            r"GRPO takes keys in args: processing_class is models\.tokenizer \| peft_config is trainer\.lora",
        ),
        (rlhfspec.DPO, {"ref_model": 1}, "DPO takes keys in args: ref_model is no key here - always the"),
    ],
)
def test_what_trl_takes_is_answered_with_our_names(made: type, given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        made(**{"model": "m", "train_dataset": ROWS} | given).train()


def test_an_argument_of_nobody_is_python_s_error_and_the_signature_stays() -> None:
    with pytest.raises(TypeError, match=r"GRPO.__init__\(\) got an unexpected keyword argument 'modle'"):
        rlhfspec.GRPO(modle="x")  # type: ignore[call-arg]
    assert next(iter(inspect.signature(rlhfspec.Distill).parameters)) == "model"


def test_supervised_tuning_says_how_it_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"SFT looks for no run .* use rlhfspec\.resume\('runs/NAME'\)"):
        rlhfspec.SFT("m", train_dataset=ROWS).train(resume=True)
    save_byte_pair(tmp_path / "pair")

    def steps(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(supervised_run, "run", steps)
    rows = [{"prompt": f"say {i}", "completion": f"it is {i}"} for i in range(12)]
    with pytest.raises(
        KeyboardInterrupt, match="stopped by Ctrl-C; no state to go on from is kept yet"
    ) as caught:
        rlhfspec.SFT(tmp_path / "pair" / "target", train_dataset=rows, out="tuned").train()
    assert len(traceback.format_exception(caught.value)) < 10
    with pytest.raises(ConfigError, match="it keeps no state to go on from; train anew"):
        _ = rlhfspec.Run("tuned").checkpoint
    (tmp_path / "tuned" / "checkpoints" / "state_0003").mkdir()
    with pytest.raises(ConfigError, match=r"go on with rlhfspec\.resume\('.*/tuned'\)"):
        _ = rlhfspec.Run("tuned").checkpoint


@pytest.fixture
def tuned(tmp_path: Path) -> rlhfspec.Run:
    save_byte_pair(tmp_path / "pair")
    rows = [{"prompt": f"say {i}", "completion": f"it is {i}"} for i in range(12)]
    args = {
        "trainer.learning_rate": 1e-3,
        "trainer.batch_size": 4,
        "trainer.num_threads": 1,
        "trainer.checkpoint_every": 1,
    }
    return rlhfspec.SFT(
        tmp_path / "pair" / "target", train_dataset=rows, eval_dataset=rows[:3], args=args, out="tuned"
    ).train()


def test_supervised_tuning_gives_a_run_and_its_weights(tuned: rlhfspec.Run, tmp_path: Path) -> None:
    assert repr(tuned) == f"Run('{tmp_path / 'tuned'}'), finished"
    assert tuned.metrics["iteration"] == [0, 1, 2, 3] and None in tuned.metrics["train/loss"]
    assert tuned.metrics.to_pandas().shape == (len(tuned.metrics), len(tuned.metrics.columns))
    assert (
        isinstance(tuned.model(), LlamaForCausalLM)
        and tuned.checkpoint == tuned.path / "checkpoints" / "model"
    )
    with pytest.raises(ConfigError, match="has no samples; it has those of none: only runs of RL"):
        tuned.samples()
    page = tuned.report()
    assert page.path == tmp_path / "tuned-report.html" and "srcdoc=" in page._repr_html_()
    with pytest.raises(ConfigError, match="is not a run folder"):
        rlhfspec.resume(tmp_path)
    # a state that is kept is gone on from: the last step again
    shutil.rmtree(tuned.path / "checkpoints" / "state_0003")
    before = tuned.metrics.rows[-1]["train/loss"]
    assert rlhfspec.resume(tuned.path).metrics.rows[-1]["train/loss"] == before


def test_preferences_are_learned_from_rows(tmp_path: Path) -> None:
    save_byte_pair(tmp_path / "pair")
    rows = [{"prompt": f"say {i}", "chosen": f"it is {i}", "rejected": f"never {i}"} for i in range(8)]
    args = {"trainer.learning_rate": 1e-3, "trainer.batch_size": 4, "trainer.num_threads": 1}
    run = rlhfspec.DPO(
        tmp_path / "pair" / "target", train_dataset=rows, eval_dataset=rows[:2], args=args, out="preferred"
    ).train()
    margins = [value for value in run.metrics["eval/margin"] if value is not None]
    assert abs(margins[0]) < 1e-5 < margins[-1] and run.model() is not None


def test_a_teacher_goes_with_a_plan_of_its_own(tmp_path: Path) -> None:
    distill = rlhfspec.Distill("student", train_dataset=[{"prompt": "2 + 2?"}], teacher="teacher")
    keys = distill._keys({}, tmp_path, None)
    assert (keys["models.target"], keys["models.teacher"]) == ("student", "teacher")
    with pytest.raises(ConfigError, match=r"models\.teacher is null and algorithm.distill_coef 1"):
        rlhfspec.Distill("student", train_dataset=[{"prompt": "2 + 2?"}]).train()


def test_a_table_escapes_what_it_shows() -> None:
    table = Table([{"a": "<b>", "n": 1.0}, {"a": None}])
    assert (
        table["n"] == [1.0, None] and "&lt;b&gt;" in table._repr_html_() and "<b>" not in table._repr_html_()
    )
    with pytest.raises(KeyError, match="absent"):
        table["absent"]
    assert repr(table) == "2 rows of a, n"


def test_metrics_as_text_are_the_usual_ones_with_their_values() -> None:
    rows = [{"iteration": i, "reward/mean": i / 10, "odd/name": 1.0} for i in range(1, 9)]
    rows[-1] |= {"learner/grad_norm": 0.123456}
    first, *lines = repr(Table(rows)).splitlines()
    assert first == "8 rows, 4 columns (.columns); of the last 6:"
    assert [line.split() for line in lines] == [
        ["iteration", "3", "4", "5", "6", "7", "8"],
        ["reward/mean", "0.3", "0.4", "0.5", "0.6", "0.7", "0.8"],
        ["learner/grad_norm", "0.1235"],
    ]


def test_the_version_is_the_command_line_s(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out.split()[1] == rlhfspec.__version__


def test_names_come_when_they_are_asked_for(tmp_path: Path) -> None:
    code = (
        "import sys, rlhfspec; heavy = {'torch', 'ray', 'transformers', 'pydantic', 'numpy'}\n"
        "print(sorted(heavy & sys.modules.keys()), dir(rlhfspec)); rlhfspec.GRPO; rlhfspec.resume\n"
        "print('torch' in sys.modules); rlhfspec.Nothing"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    first, second = done.stdout.splitlines()
    assert first == f"[] {sorted(rlhfspec.__all__)}" and second == "False"
    assert "module 'rlhfspec' has no attribute 'Nothing'; it has DPO, GRPO" in done.stderr


FIVE_LINES = f"""
import rlhfspec
def brevity(completions, wish, **columns):
    return [bonus / (1 + len(text)) + (word in text) for text, word in zip(completions, wish)]
bonus, dataset, args = 3.0, {ROWS}, {SMALL}
run = rlhfspec.GRPO(model="TARGET", train_dataset=dataset, reward_funcs=[brevity], out="runs/mine", args=args).train()
"""


def environment(*folders: Path) -> dict[str, str]:
    """Of a process that starts a Ray of its own, whatever Ray the tests have."""
    mine = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return mine | {"PYTHONPATH": os.pathsep.join(map(str, [*folders, ROOT])), "CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.ray
@pytest.mark.slow
def test_the_five_lines_run_under_python_c_from_another_folder(tmp_path: Path, tiny_pair: TinyPair) -> None:
    more = "print(run.metrics['iteration'], len(run.samples()), run.samples(1)['reward'] == run.samples()['reward'])"
    done = subprocess.run(
        [sys.executable, "-c", FIVE_LINES.replace("TARGET", str(tiny_pair.target)) + more],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "[1, 2, 3] 8 False"
    assert main(["verify", str(tmp_path / "runs" / "mine"), "--share", "1"]) == 0


@pytest.mark.ray
@pytest.mark.slow
def test_a_notebook_s_cells_train_are_stopped_and_go_on(tmp_path: Path, tiny_pair: TinyPair) -> None:
    folder = library_folder("notebook")
    if folder is None:
        pytest.skip("no kernel is there: python -m rlhfspec.benchmarks.peers.build --only notebook")
    cells = [
        (FIVE_LINES.replace("TARGET", str(tiny_pair.target)), "iteration 2/3"),
        ("run = rlhfspec.resume('runs/mine')\nrun", None),
        *(
            (code, None)
            for code in ("run.metrics", "run.samples(2)", "run.report()", "type(run.model()).__name__")
        ),
    ]
    (tmp_path / "cells.json").write_text(json.dumps(cells))
    done = subprocess.run(
        [sys.executable, ROOT / "tests" / "helpers" / "notebook_run.py", tmp_path / "cells.json"],
        cwd=tmp_path,
        env=environment(folder),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    stopped, resumed, *shown = map(json.loads, done.stdout.splitlines())
    assert (
        stopped["error"].startswith("KeyboardInterrupt")
        and "interrupted: stopped by Ctrl-C" in stopped["printed"]
    )
    assert resumed["error"] is None and "iteration 3/3" in resumed["printed"]
    assert resumed["shown"][0]["text/plain"] == f"Run('{tmp_path / 'runs' / 'mine'}'), finished"
    for cell in (stopped, resumed):
        # lines and no bars, no widgets that are not there
        assert not {"\x1b", "\r"} & set(cell["printed"]) and "idgets" not in cell["printed"], cell["printed"]
    assert [one["error"] for one in shown] == [None] * 4
    kinds = ["<table>", "<table>", "<iframe", ""]
    assert all(
        one["shown"][0].get("text/html", "").startswith(kind) for one, kind in zip(shown, kinds, strict=True)
    )
    assert shown[3]["shown"][0]["text/plain"] == "'LlamaForCausalLM'"
