"""The command line: help, exit codes, one clear error for each kind of bad input."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import pytest
from refused_command import refused

from rlhfspec.cluster.cli import commands, main
from rlhfspec.cluster.commands.arguments import SECONDS, set_flag
from rlhfspec.cluster.commands.bench import WITH_REAL, benchmark_names
from rlhfspec.cluster.commands.declare import Arg, Group, add_arguments, call
from rlhfspec.cluster.plan.inputs import require_cores
from rlhfspec.cluster.ray_start.origin import PACKAGES, ROOT, shadowed_packages
from rlhfspec.core.errors import ConfigError
from rlhfspec.core.settings.cluster import ClusterConfig
from tests.conftest import TinyPair

COMMANDS = [
    [word, *below]
    for word, entry in commands().items()
    for below in ([()] if not isinstance(entry, Group) else [(), *((one,) for one in entry.commands)])
]


@pytest.fixture
def config_file(tmp_path: Path, tiny_pair: TinyPair) -> Path:
    data = tmp_path / "prompts.jsonl"
    data.write_text(
        "".join(json.dumps({"question": f"0{i}:a+1=", "answer": "b"}) + "\n" for i in range(1, 5))
    )
    file = tmp_path / "run.yaml"
    file.write_text(
        f"""
run: {{output_dir: {tmp_path / "runs"}, cache_dir: {tmp_path / "cache"}}}
models: {{target: {tiny_pair.target}, draft: {tiny_pair.draft}}}
data: {{path: {data}}}
reward: {{kind: chain}}
sampling: {{max_new_tokens: 32}}
engine: {{max_running_samples: 4}}
trainer: {{max_tokens_per_forward: 256}}
"""
    )
    return file


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_explains_itself(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ending:
        main([*command, "--help"])
    assert ending.value.code == 0
    out = capsys.readouterr().out
    assert len(out) > 200 and f"usage: rlhfspec {' '.join(command)} " in out


def sample(
    place: Annotated[Path, Arg("DIR", "where")],
    count: Annotated[int, Arg("N", "how many")] = 2,
    *,
    near: Annotated[Sequence[float], Arg("X", "several")] = (1.0,),
    near_set: Annotated[list[str], set_flag("a key")],
    kind: Annotated[Literal["a", "b"], Arg(help="(%(default)s)")] = "a",
    watch: Annotated[float, Arg("S", "seconds", parse=SECONDS, bare=2.0)] | None = None,
    big: Annotated[bool, Arg(help="more", group="size")] = False,
    small: Annotated[bool, Arg(help="less", group="size")] = False,
    one: Annotated[str, Arg("A", "this", group="what")] | None,
    other: Annotated[str, Arg("B", "or this", group="what")] | None,
) -> int:
    """Try a declaration."""
    SAMPLED.update(locals())
    return 3


SAMPLED: dict[str, object] = {}


@pytest.mark.parametrize(
    ("words", "given"),
    [
        ("~ --one x", {"place": Path.home(), "count": 2, "near": (1.0,), "near_set": [], "kind": "a"}),
        ("d 5 --other y --set a=1 --set b=2", {"count": 5, "other": "y", "near_set": ["a=1", "b=2"]}),
        (
            "d --one x --near 1 2 --kind b --big",
            {"near": [1.0, 2.0], "kind": "b", "big": True, "small": False},
        ),
        ("d --one x --watch", {"watch": 2.0}),
        ("d --one x --watch 3", {"watch": 3.0}),
        ("d", "one of the arguments --one --other is required"),
        ("d --one x --other y", "not allowed with argument --one"),
        ("d --one x --big --small", "not allowed with argument --big"),
        ("d x --one x", "argument N: invalid int value: 'x'"),
        ("d --one x --kind c", "invalid choice: 'c'"),
        ("d --one x --watch 0", "--watch expects seconds above 0, got 0"),
        ("--one x", "required: DIR"),
    ],
)
def test_a_function_is_a_command(
    words: str, given: dict[str, object] | str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser, sample)
    if isinstance(given, dict):
        assert call(parser.parse_args(words.split())) == 3
        assert {name: SAMPLED[name] for name in given} == given
        return
    with pytest.raises((SystemExit, ConfigError)) as ending:
        parser.parse_args(words.split())
    assert given in capsys.readouterr().err + str(ending.value)
    assert ending.type is ConfigError or ending.value.code == 2


def test_the_module_runs_as_a_script_from_the_checkout() -> None:
    answer = subprocess.run(
        [sys.executable, "-m", "rlhfspec.cluster.cli", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert all(command in answer.stdout for command in commands())


def test_an_unknown_command_exits_with_2() -> None:
    with pytest.raises(SystemExit) as ending:
        main(["fly"])
    assert ending.value.code == 2


@pytest.mark.parametrize("command", [["train", "--dry-run"], ["check"]])
def test_a_good_config_passes_and_prints_the_plan(
    command: list[str], config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--config", str(config_file)]) == 0
    out = capsys.readouterr().out
    for part in ("tokenizers equal", "4 prompts, the longest 7 tokens", "KV pool", "total", "placement"):
        assert part in out
    assert not (tmp_path / "runs").exists(), "nothing may be written without running"


def test_a_missing_config_file_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "nowhere.yaml does not exist" in refused(capsys, "train", "--config", "nowhere.yaml")


def test_the_console_script_finds_a_reward_function_in_the_folder_it_is_run_from(
    config_file: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text("def score(prompt, response, reference):\n    return 0.0\n")
    # as the installed script does: the caller's folder is not on the path
    code = f"import sys; sys.path[0] = {str(ROOT)!r}; from rlhfspec.cluster.cli import main; sys.exit(main())"
    argv = ["check", "--config", str(config_file), "--set", "reward.kind=mine:score"]
    answer = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr


def test_a_draft_with_half_the_vocabulary_is_found_by_check(
    config_file: Path, tmp_path: Path, tiny_pair: TinyPair, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    draft = AutoModelForCausalLM.from_pretrained(tiny_pair.draft)
    draft.resize_token_embeddings(draft.config.vocab_size // 2)
    draft.save_pretrained(tmp_path / "half")
    AutoTokenizer.from_pretrained(tiny_pair.draft).save_pretrained(tmp_path / "half")
    message = refused(capsys, "check", "--config", config_file, "--set", f"models.draft={tmp_path / 'half'}")
    assert "half has 17 token ids, the tokenizer 34" in message


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("run.name=../../evil", "run.name: expected a name for one folder"),
        ("run.name=[", "--set run.name=[: the value is not valid YAML"),
        ("trainer.learning_rate=.inf", "trainer.learning_rate: Input should be a finite number, got inf"),
        ("sampling.stop_token_ids=[5000]", "ids of the tokenizer, 0 to 33, got 5000"),
        ("engine.num_threads=500", "engine.num_threads is 500, but this machine has"),
        ("trainer.num_threads=500", "trainer.num_threads is 500, but this machine has"),
        ("run.output_dir=/proc/x", "cannot make a run folder in /proc/x"),
    ],
)
def test_what_check_refuses_before_anything_is_made(
    override: str, message: str, config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(tmp_path.rglob("*"))
    assert message in refused(capsys, "check", "--config", config_file, "--set", override)
    assert sorted(tmp_path.rglob("*")) == before


def test_threads_of_other_machines_are_not_judged_here() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.num_threads is 500"):
        require_cores(ClusterConfig(), engine=1, trainer=500)
    require_cores(ClusterConfig(address="10.0.0.1:6379"), engine=1, trainer=500)


@pytest.mark.parametrize(
    "command",
    [
        ["profile", "--config", "CONFIG", "--out", "CONFIG"],
        ["profile", "--config", "CONFIG", "--out", "out", "--budget", "nan"],
        ["models", "make", "--data", "CONFIG", "--out", "CONFIG"],
        ["models", "make", "--data", "CONFIG", "--out", "out", "--budget", "-1"],
        ["bench", "exactness", "--out", "CONFIG"],
        ["bench", "exactness", "--out", "~no-such-user/x"],
    ],
)
def test_an_output_that_cannot_be_is_refused_before_the_work(
    command: list[str], config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [str(config_file) if word == "CONFIG" else word for word in command]
    message = refused(capsys, *argv)
    assert "--out" in message or "--budget" in message or "home folder" in message


def test_a_run_whose_folder_was_taken_says_where_it_writes(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = tmp_path / "runs" / "r"
    taken.mkdir(parents=True)
    monkeypatch.setattr("rlhfspec.cluster.folder.layout.choose_run_path", lambda *_, **__: taken)
    monkeypatch.setattr("rlhfspec.cluster.run.loop.run_training", lambda *_: None)
    assert main(["train", "--config", str(config_file), "--set", "speculation.policy=fixed"]) == 0
    assert f"run folder {taken}-2 (another run took the first name)" in capsys.readouterr().out
    assert list(taken.iterdir()) == []
    assert (taken.with_name("r-2") / "config.yaml").is_file()


def test_a_demo_model_without_its_partner_is_refused(
    config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message = refused(capsys, "check", "--config", config_file, "--set", "models.target=demo")
    assert "expected both or none to be 'demo'" in message


def test_show_refuses_a_folder_that_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "is not a run folder" in refused(capsys, "show", tmp_path)


def test_an_unknown_benchmark_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no benchmark 'nope'" in refused(capsys, "bench", "nope", "--out", tmp_path)


def test_helpers_are_not_offered_as_benchmarks() -> None:
    assert {"exactness", "engine", "models"} <= set(benchmark_names())
    assert not {"support", "pages", "bench", "__init__"} & set(benchmark_names())


def test_every_package_comes_from_this_tree() -> None:
    assert shadowed_packages() == []


def test_a_package_from_another_tree_is_named_with_its_path(tmp_path: Path) -> None:
    faults = shadowed_packages(tmp_path)
    assert len(faults) == len(PACKAGES)
    assert f"package 'rlhfspec.core' was expected in {tmp_path}, got {ROOT / 'core'}" in faults[0]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("bench", "migration", "--real"), "bench migration has none"),
        (("bench", "engine", "--real", "--profile"), "leave out --real or --profile"),
    ],
)
def test_a_benchmark_without_a_real_model_says_so(
    argv: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refused(capsys, *argv, "--out", tmp_path / "bench")
    assert not (tmp_path / "bench").exists()


def test_a_real_benchmark_without_the_model_is_skipped_and_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # a home without a cache, no hub (as in all tests) and an index without packages: as behind a firewall
    for name, value in (("HOME", tmp_path), ("XDG_CACHE_HOME", tmp_path), ("PIP_FIND_LINKS", tmp_path)):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    for name in WITH_REAL:
        assert main(["bench", name, "--real", "--quick", "--out", str(tmp_path / "bench")]) == 0
        assert "skipped: smollm2-135m-instruct cannot be had" in capsys.readouterr().out, name
    assert not list((tmp_path / "bench").iterdir())


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("engine.numerics=fast", "engine.numerics says so"),
        ("cluster.generation.num_gpus=1", "cluster.generation.num_gpus is 1"),
        ("algorithm.correction.old_logprobs=trainer", "correction.old_logprobs trainer computes anew"),
    ],
)
def test_scoring_by_the_engine_is_refused_where_bits_are_not_promised_or_not_taken(
    setting: str, said: str, config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ("check", "--config", config_file, "--set", "trainer.scoring=engine", "--set", setting)
    message = refused(capsys, *argv)
    assert said in message and (
        "set trainer.scoring: model" in message or "take out one of the two" in message
    )


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--kind", "no_such_module:f"), "cannot import no_such_module"),
        (("--model", "/nowhere"), "does not exist"),
        (("--kind", "chain", "--replicas", "2:1"), "--replicas expects"),
        (("--kind", "chain", "--replicas", "0"), "--replicas expects"),
        (("--kind", "chain", "--set", "batch=1"), "batch"),
        (
            ("--kind", "chain", "--set", "shaping={missing_eos_penalty: 1}"),
            "belongs to the config of the run",
        ),
        (("--kind", "chain", "--replicas", "999"), "lower --replicas"),
    ],
)
def test_a_reward_that_cannot_be_served_is_refused(
    argv: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlhfspec.cluster.jobs.ray_serve.ray_session", None)  # nothing may start
    # other tests of this process may have a Ray that is up
    monkeypatch.setattr("rlhfspec.cluster.jobs.reward_server.is_local", lambda config: True)
    assert words in refused(capsys, "serve", "reward", *argv)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("cluster: 3", "cluster must be a section, got 3"),
        ("cluster: [1]", "cluster must be a section, got [1]"),
        ("cluster: {address: 5}", "cluster.address: Input should be a valid string"),
    ],
)
def test_an_odd_section_is_refused_by_every_command_that_takes_some_of_a_config(
    tmp_path: Path, capsys, text: str, words: str
) -> None:
    (config := tmp_path / "c.yaml").write_text(text + "\n")
    rows = str(tmp_path / "rows.jsonl")
    for command in (
        ["serve", "engine", "--model", "none"],
        ["eval", "--model", "none", "--data", rows],
        ["data", "check", rows],
    ):
        assert words in refused(capsys, *command, "--config", str(config))


CLOSED = """
import os, sys
from rlhfspec.cluster.cli import main
try:
    main(["--version"])
except SystemExit as end:
    facts = [os.readlink(f"/proc/self/fd/{number}") == "/dev/null" for number in range(3)], end.code
open(sys.argv[1], "w").write(repr(facts))
"""


def test_no_file_of_a_command_takes_the_place_of_a_closed_standard_stream(tmp_path: Path) -> None:
    out = tmp_path / "facts"
    closed = f'"{sys.executable}" -c "$0" "{out}" <&- >&- 2>&-'
    subprocess.run(["sh", "-c", closed, CLOSED], cwd=ROOT, check=True)
    assert out.read_text() == "([True, True, True], 0)"
