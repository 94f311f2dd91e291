"""Text of models, data and run folders is seen and never obeyed: no command hands an escape sequence to a terminal."""

from __future__ import annotations

import argparse
import ast
import io
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from live_pages import NOW, PAGE
from made_rollouts import rollout
from made_run import make_run, run_config
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rlhfspec.cluster.cli import build_parser, main
from rlhfspec.cluster.folder.iteration_logs import write_histograms
from rlhfspec.cluster.folder.layout import RunDir
from rlhfspec.cluster.folder.rollouts import write_rollouts
from rlhfspec.cluster.folder.sample_table import SampleRow, as_markdown
from rlhfspec.cluster.observe.console import PipeConsole, Reporter
from rlhfspec.cluster.observe.visible_stream import VisibleStream
from rlhfspec.core.config_io import config_from_dict
from rlhfspec.core.outside import visible
from tests.conftest import TinyPair

EVIL = "a\x1b]0;owned\x07\x1b[2J\x1b]52;c;aGk=\x1b\\\x9b31m\u202eb\u2066\r\x08\x00\x7f[red]c[/] :fire: [/x]"
NAME = EVIL.replace("\0", "").replace("/", "")
"As a file may be called."
ROOT = Path(__file__).parents[2]

FAILING = {
    "demo": ["demo", "--config", NAME],
    "train": ["train", "--config", NAME],
    "sft": ["sft", "--config", NAME],
    "train-reward": ["train-reward", "--config", NAME],
    "dpo": ["dpo", "--config", NAME],
    "eval": ["eval", "--model", NAME, "--data", NAME],
    "profile": ["profile", "--config", NAME, "--out", NAME],
    "bench": ["bench", NAME, "--out", NAME],
    "gpu-selftest": ["gpu-selftest", "--out", f"{NAME}/{NAME}"],
    "simulate cluster": ["simulate", "cluster", "--config", NAME],
    "check": ["check", "--config", NAME],
    "data check": ["data", "check", f"./{NAME}"],
    "models make": ["models", "make", "--data", f"./{NAME}", "--out", NAME],
    "models get": ["models", "get", NAME],
    "models from-gguf": ["models", "from-gguf", f"./{NAME}", "--out", NAME],
    "drafter make": ["drafter", "make", "--target", f"./{NAME}", "--data", NAME, "--out", NAME],
    "drafter eval": ["drafter", "eval", "--target", f"./{NAME}", "--data", NAME, "--drafter", NAME],
    "serve reward": ["serve", "reward", "--config", NAME],
    "serve engine": ["serve", "engine", "--model", f"./{NAME}"],
    "show": ["show", NAME],
    "verify": ["verify", NAME],
    "rescore": ["rescore", NAME, "--set", "reward.mean=1"],
    "pairs": ["pairs", NAME, "--out", "pairs.jsonl"],
    "fork": ["fork", NAME, "--at", "0"],
    "replay": ["replay", NAME],
    "status": ["status", NAME],
    "trace": ["trace", NAME],
    "report": ["report", NAME],
    "explain": ["explain", NAME],
    "compare": ["compare", NAME],
    "monitoring": ["monitoring", "--out", NAME],
}
"Each command on a name that it refuses, or prints."


def commands(parser: argparse.ArgumentParser, name: str = "") -> Iterator[str]:
    below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not below:
        yield name.strip()
    for word, one in below[0].choices.items() if below else ():
        yield from commands(one, f"{name} {word}")


def require_visible(text: str) -> None:
    assert text == visible(text)


def output(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    try:
        code = main([str(word) for word in argv])
    except SystemExit as ending:
        code = ending.code
    captured = capsys.readouterr()
    assert captured.out + captured.err, code
    require_visible(captured.out)
    require_visible(captured.err)
    return captured.out + captured.err


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    config = config_from_dict({"models": {"target": "a", "draft": "b"}, "data": {"task": "chain"}})
    run = RunDir.create(config, tmp_path / NAME)
    rows = [
        {"iteration": i, "reward/mean": 0.5, f"reward/{EVIL}": 1.0, "time/iteration_s": 1.0} for i in range(3)
    ]
    run.metrics_file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_rollouts(run.rollouts_file(0), [rollout(0, reward=1.0, response=EVIL)], [0.25])
    write_histograms(run.histograms_file, 2, {EVIL: [0.0, 1.0]})
    page = replace(
        PAGE,
        run=EVIL,
        host=EVIL,
        phase=EVIL,
        told_at=NOW,
        events=tuple(replace(event, text=EVIL) for event in PAGE.events),
        waits=tuple(replace(wait, waited_for=EVIL, order=EVIL) for wait in PAGE.waits),
        instances=tuple(replace(one, name=EVIL, drafter_alarm=EVIL) for one in PAGE.instances),
    )
    run.live_file.write_bytes(page.encode())
    run.set_status("failed", EVIL)
    return run


def test_what_is_obeyed_is_written_out_and_every_letter_stays():
    assert visible("\x1b[2J\r\x07\x9b\u202e") == "\\x1b[2J\\x0d\\x07\\u009b\\u202e"
    for text in (
        "a\tb\n",
        "é ß 漢字\u3000x",
        "\U0001f468\u200d\U0001f469\u200d\U0001f467",
        "\u0646\u200c\u0645",
        "a\u00a0b",
    ):
        assert visible(text) == text
    shown = json.loads(visible(json.dumps({"a": EVIL}, ensure_ascii=False)))
    assert shown == {"a": EVIL}


def test_every_command_is_tried():
    assert set(commands(build_parser())) == set(FAILING)


@pytest.mark.parametrize("command", FAILING)
def test_no_error_hands_on_what_it_quotes(command, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    output(capsys, *FAILING[command])


@pytest.mark.parametrize("arguments", [(), ("--samples",), ("--json",), ("--metric", "reward/*")])
def test_show(run_dir, capsys, tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    text = output(capsys, "show", run_dir.path, *arguments)
    assert "[red]c[/]" in text or "--json" in arguments
    output(capsys, "show", run_dir.path, run_dir.path, *arguments)


@pytest.mark.parametrize("command", ["status", "trace", "verify", "replay"])
def test_commands_that_read_a_run(run_dir, capsys, command):
    text = output(capsys, command, run_dir.path)
    assert "owned" in text or command == "verify"
    if command == "status":
        found = json.loads(output(capsys, command, run_dir.path, "--json"))
        assert (
            EVIL in json.dumps(found, ensure_ascii=False).encode().decode("unicode_escape", "ignore") or found
        )


@pytest.mark.parametrize("form", ["jsonl", "csv"])
def test_data_check(tmp_path, capsys, form):
    file = tmp_path / f"{NAME}.{form}"
    if form == "jsonl":
        file.write_text(json.dumps({"question": EVIL, "answer": EVIL, EVIL: 1}))
    else:
        quoted = EVIL.replace("\r", "").replace("\0", "")
        file.write_text(f'question,answer,"{quoted}"\n"{quoted}","{quoted}",x\n', encoding="utf-8")
    assert "]0;owned" in output(capsys, "data", "check", file)
    output(capsys, "data", "check", file, "--json")
    output(capsys, "data", "check", file, "--set", "data.prompt_field=none")


def test_replay_of_a_sample(tiny_pair: TinyPair, tmp_path, capsys):
    config = run_config(tiny_pair, tmp_path)
    folder = make_run(config, tmp_path / "run")
    file = RunDir.open(folder).rollouts_file(0)
    table = pq.read_table(file)
    for column in ("prompt", "response"):
        place = table.schema.get_field_index(column)
        table = table.set_column(place, table.schema.field(column), pa.array([EVIL] * len(table)))
    pq.write_table(table, file)
    assert "]0;owned" in output(capsys, "replay", folder, "--sample", table["sample_index"][0].as_py())


def test_markdown_of_samples():
    row = SampleRow(
        sample_index=0, prompt=EVIL, response=EVIL, reference=EVIL, reward=0.0, parts={EVIL: 1.0},
        finish_reason=EVIL, num_tokens=1,
    )  # fmt: skip
    require_visible(as_markdown(EVIL, [("best", row)]))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_run_on_a_terminal_draws_what_is_its_own_and_nothing_else(monkeypatch):
    """Bars, tables and colours stay; no text brings a sequence, markup, emoji or link of its own."""
    text = Terminal()
    monkeypatch.setattr(sys, "stdout", VisibleStream(text))
    console = PipeConsole(force_terminal=True, width=200, legacy_windows=False)
    report = Reporter(console)
    report.stage(EVIL)
    with report.job(EVIL) as tick:
        tick(EVIL, 0.5)
        print(EVIL + "\x1b]8;;http://evil\x1b\\link\x1b]8;;\x1b\\")
    report.start(2)
    report.progress(EVIL, 1, 2)
    report.iteration(0, {"reward/mean": 1.0})
    report.note(EVIL)
    report.stop()
    table = Table(title=EVIL)
    table.add_column(EVIL)
    table.add_row(EVIL)
    table.add_row(Text(EVIL, style="link http://evil"))
    with Live(table, console=console):
        console.print(Text("own", style="red"))
    written = text.getvalue()
    assert "\x1b[31mown" in written
    assert "[red]c[/] :fire: [/x]" in written
    for sequence in ("\x1b]", "\x9b", "\u202e", "\x07", "\x1b[2J", "\x08"):
        assert sequence not in written


def test_what_python_prints_of_an_unexpected_error_is_visible(capsys, monkeypatch):
    def fail(*_: object) -> None:
        raise RuntimeError(EVIL)

    monkeypatch.setattr("rlhfspec.cluster.observe.run_record.RunRecord.read", fail)
    with pytest.raises(RuntimeError) as raised:
        main(["show", "x"])
    sys.excepthook(raised.type, raised.value, raised.tb)
    require_visible(capsys.readouterr().err)


def test_every_console_is_the_one_that_shows_text_as_it_stands():
    for path in (
        path
        for folder in ("cluster", "learning", "actors", "engine", "benchmarks")
        for path in (ROOT / folder).rglob("*.py")
    ):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id != "Console", path
                if node.func.id == "TextColumn":
                    assert "markup" in {keyword.arg for keyword in node.keywords}, path
            assert not (isinstance(node, ast.Attribute) and node.attr in ("__stdout__", "__stderr__")), path
