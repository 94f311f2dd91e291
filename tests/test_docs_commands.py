"""Every command of the quickstart, the tutorials and the how-to pages is run, or at least read by what would run it.

Blocks of a page are taken in their order, in a folder of its own. A block whose first line is `# NAME.py` or
`# NAME.yaml` is that file. `RUN` names what is run as it stands, on a tiny model in the place of the page's own and
with fewer tokens (`LESS`). `train` and `eval` run on Ray for the first tutorial, the pages in `WITH_A_RUN` use that
run, and elsewhere `train` is checked by `--dry-run`. What needs the network or a cluster (`models get`, `serve`,
`make`, `ray`, `docker`, `kubectl`) is read by its own parser, or its files are looked for.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from rlhfspec.cluster.cli import build_parser, main
from rlhfspec.core.config_io import config_from_dict

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = [DOCS / "quickstart.md", *sorted(DOCS.glob("tutorials/*.md")), *sorted(DOCS.glob("how-to/*.md"))]
FIRST = "model-and-data"
WITH_A_RUN = ("quickstart", "resume", "watch", "verify")
"Pages about a run that is there."
CONTINUED = ("reward-function", "drafter")
"Tutorials that go on in the folder of the first."
MODEL = "smollm2-135m-instruct"
RUN = (
    *("data check", "check", "drafter make", "drafter eval", "profile", "sft", "train-reward"),
    *(
        "monitoring",
        "simulate",
        "simulate cluster",
        "show",
        "verify",
        "replay",
        "status",
        "trace",
    ),
)
ONE_INSTANCE = "--set=cluster.generation.num_actors=1"
LESS = {
    "drafter make": ["--tokens=100", "--draft-vocab=16", "--max-new-tokens=8"],
    "drafter eval": ["--max-new-tokens=8", "--limit=4"],
    "profile": ["--budget=1", "--set=sampling.max_new_tokens=24"],
    "sft": ["--set=trainer.checkpoint_every=1", "--set=trainer.batch_size=4"],
    "train-reward": ["--set=trainer.max_steps=2", "--set=trainer.batch_size=2"],
    "simulate": ["--samples=64", "--max-new-tokens=256"],
    "simulate cluster": ["--set=lengths.samples=32", "--set=lengths.max_new_tokens=256"],
    "train": ["--set=run.iterations=2", "--set=run.state_every=1"],
    "eval": ["--limit=2", "--max-new-tokens=8", "--set=speculation.policy=off", ONE_INSTANCE],
}
TRAINED = [
    ONE_INSTANCE,
    "--set=speculation.policy=bandit",
    "--set=run.checkpoint_every=1",
    "--set=sampling.max_new_tokens=8",
    "--set=run.step_log=true",
]
PROGRAMS = ("make", "python", "rlhfspec", "ray", "docker", "kubectl", "export")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    language: str
    text: str

    @property
    def file(self) -> str | None:
        """The name of the file that it is."""
        named = re.match(r"# ([\w-]+\.(?:py|yaml))\n", self.text)
        return named[1] if named else None

    @property
    def commands(self) -> list[list[str]]:
        """What a shell would run."""
        lines = self.text.replace("\\\n", " ").splitlines() if self.language == "sh" else []
        return [shlex.split(line.removesuffix("&"), comments=True) for line in lines if line.strip()]


def blocks(page: Path) -> list[Block]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    return [Block(language, text) for language, text in found]


def words(parser: argparse.ArgumentParser, argv: list[str]) -> str:
    """The words that name a command: `drafter make` of `drafter make --target ...`."""
    below = choices(parser)
    return f"{argv[0]} {words(below[argv[0]], argv[1:])}".strip() if argv and argv[0] in below else ""


def choices(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The commands of a parser, by their words."""
    found = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return next((dict(action.choices) for action in found), {})


def require_readable(command: list[str]) -> None:
    """Fail where the program that a command names would not understand it."""
    program, *argv = command
    assert program in PROGRAMS, command
    if program == "rlhfspec":
        build_parser().parse_args(argv)
    elif program == "make":
        assert re.search(rf"^\.PHONY:.* {argv[0]}( |$)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    elif program in ("docker", "kubectl"):
        for flag, value in pairwise(argv):
            assert flag not in ("-f", "-k") or value.endswith("job.yaml") or (ROOT / value).exists(), command
    elif program == "ray":
        require_readable_by_ray(argv)


def require_readable_by_ray(argv: list[str]) -> None:
    from ray.scripts.scripts import cli

    below = cli
    while argv[0] in getattr(below, "commands", {}):
        below, argv = below.commands[argv[0]], argv[1:]
    mine = argv[argv.index("--") + 1 :] if "--" in argv else []
    below.make_context("ray", list(argv))
    if mine:
        own = mine[1:] if mine[0] == "rlhfspec" else mine[mine.index("rlhfspec.cluster.cli") + 1 :]
        build_parser().parse_args(own)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_of_a_page_can_be_read(page: Path) -> None:
    for block in blocks(page):
        for command in block.commands:
            require_readable(command)
        if block.language == "python":
            compile(block.text, str(page), "exec")
        if block.language == "json":
            json.loads(block.text)
        if block.language == "yaml" and not block.file:
            given = yaml.safe_load(block.text)
            base = {"data": {"task": "chain"}, "models": {"target": "demo", "draft": "demo"}}
            own = {"data", *(name for name in given if name not in base)}
            config_from_dict({**base, **{k: v if k in own else {**base[k], **v} for k, v in given.items()}})


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: page.stem)
def test_every_command_within_a_sentence_has_the_flags_it_is_given(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for command in re.findall(r"`rlhfspec ([a-z][^`]*)`", text):
        argv = command.replace("|", " ").split()
        parser, named = build_parser(), words(build_parser(), argv)
        assert named, command
        for word in named.split():
            parser = choices(parser)[word]
        known = {flag for action in parser._actions for flag in action.option_strings}
        assert {word.split("=")[0] for word in argv if word.startswith("--")} <= known, command


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a reader has: data of all kinds, a pair of models, the config and the reward of the tutorials."""
    from tests.helpers.byte_chat import save_byte_pair

    folder = tmp_path_factory.mktemp("reader")
    save_byte_pair(folder / "pair")
    (folder / "configs").symlink_to(ROOT / "configs")
    for name in (FIRST, "reward-function"):
        write_files(DOCS / "tutorials" / f"{name}.md", folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run_python(folder, (folder / "make_data.py").read_text())
    rows = (folder / "train.jsonl").read_text().splitlines()[:24]
    (folder / "test.jsonl").write_text("\n".join(rows[:8]))
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    (folder / "talks.jsonl").write_text("\n".join(json.dumps({"messages": talk}) for _ in range(8)))
    pairs = [{"prompt": f"say {i}", "chosen": f"{i}", "rejected": "no"} for i in range(8)]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    return folder


def write_files(page: Path, folder: Path) -> None:
    for block in blocks(page):
        if block.file:
            (folder / block.file).write_text(block.text.replace(MODEL, str(folder / "pair" / "target")))


def run_python(folder: Path, text: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        exec(compile(text, str(folder), "exec"), {"__name__": "__main__"})


def run_page(page: Path, folder: Path, *, with_ray: bool, run: Path | None = None) -> list[str]:
    """Run what can be run of a page; return the words of the commands that were run."""
    done = []
    write_files(page, folder)
    for block in blocks(page):
        waits = "BASE" in block.text or ("runs/" in block.text and not with_ray)
        if block.language == "python" and not block.file and not waits:
            run_python(folder, block.text)
        for program, *argv in block.commands:
            named = words(build_parser(), argv) if program == "rlhfspec" else ""
            if named not in (*RUN, "train", "eval") or {"cluster.address=auto", "auto"} & set(argv):
                continue  # a cluster that is not there; a second run, as the first tutorial's
            needs_run = any("runs/" in word for word in argv) and "--out" not in argv
            if (named == "eval" and not with_ray) or (needs_run and not (with_ray or run)):
                continue
            argv = shorter(named, [replaced(word, folder, run) for word in argv], with_ray=with_ray)
            assert main(argv) == 0, argv
            done.append(named)
    return done


def shorter(named: str, argv: list[str], *, with_ray: bool) -> list[str]:
    """The command with fewer tokens and iterations; without Ray a run is only checked."""
    if "--resume" in argv:
        given = any("run.iterations" in word for word in argv) or named != "train"
        more = [] if given else ["--set=run.iterations=3"]
        return [*(argv if with_ray or named != "train" else ["check", *argv[1:]]), *more]
    more = LESS.get(named, [])
    if named == "train":
        more = more + TRAINED if with_ray else [*more, "--dry-run"] if "--dry-run" not in argv else more
    return [*argv, *more]


def replaced(word: str, folder: Path, run: Path | None) -> str:
    word = word.replace(MODEL, str(folder / "pair" / "target")).replace(
        "base-model", str(folder / "pair" / "target")
    )
    return word.replace("runs/RUN", str(run)) if run else word


@pytest.fixture
def copied(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    shutil.copytree(folder, tmp_path / "page", symlinks=True)
    monkeypatch.chdir(tmp_path / "page")
    monkeypatch.setenv("HOME", str(tmp_path))
    yield tmp_path / "page"


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.stem not in (FIRST, *WITH_A_RUN)], ids=lambda page: page.stem
)
def test_the_commands_of_a_page_run(page: Path, copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_page(page, copied, with_ray=False)


@pytest.mark.ray
@pytest.mark.slow
def test_the_first_tutorial_and_what_is_done_with_its_run(
    local_ray: None, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    done = run_page(DOCS / "tutorials" / f"{FIRST}.md", folder, with_ray=True)
    assert {"data check", "check", "train", "show", "eval"} <= set(done)
    for name in WITH_A_RUN:
        page = next(page for page in PAGES if page.stem == name)
        assert run_page(page, folder, with_ray=name == "resume", run=folder / "runs" / "sums"), name
