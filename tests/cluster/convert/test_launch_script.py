"""A launch script is read as a shell would read it, without being run."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from rlhfspec.cluster.convert.launch_script import Launch, flags, read_launch, scalar

SCRIPTS = {
    "continuation": "prog a=1 \\\n  b='x y' \\\n  'd'=\"q \\\" r\"\n",
    "variables": 'A=1\nB=${A:-2} C=${Z:-"d e"}\nexport D=$A$B\nprog a=$A b="$B" c="${C}" d=${D} e=${E:-${A}}\n',
    "arrays": 'X=(a=1 \'b=2 3\'\n  # no\n  c=4)\nY=()\nX+=(d=5)\nprog "${X[@]}" "${Y[@]}" e=6 "$@"\n',
    "arithmetic": "n=3\nprog a=$((2 * n + 1024)) b=$(( n*4 ))\n",
    "branches": 'k=\nif [ "$k" = 1 ]; then\n  k=5\nelse\n  k=7\nfi\nm=${m:-8}\nprog m=$m; prog x=9\n',
    "comments": "#!/bin/bash\nprog a=b#c # tail\n",
    "bare variables": 'A="x=1 \\\n  y=2"\nC=\nA+=" z=3"\nprog $A b=$C $C c=${A}d "e=\\$A \\q"\n',
    "arrays as texts": 'A=(a=1 b=2)\nB="${A[@]}"\nprog $B c="${A[@]}"\n',
    "more arithmetic": "n=7\nprog a=$(((n + 2) * 3)) b=$((n / 2 - 1))\n",
    "redirections": "L=$((1))\nprog a=1 b=2>&1 | cat\n",
    "semicolons": "set -x; A=4; prog a=$A && echo done\n",
}
SHELL = shutil.which("bash")


def launch_of(text: str) -> Launch:
    launch = read_launch(text, lambda word: word == "prog")
    assert launch is not None
    return launch


@pytest.mark.skipif(SHELL is None, reason="no bash here to compare with")
@pytest.mark.parametrize("name", SCRIPTS)
def test_words_are_those_of_bash(name: str) -> None:
    code = 'prog() { if [ -z "$once" ]; then printf "%s\\n" "$@"; once=1; fi; }\n'
    said = subprocess.run(
        [SHELL or "bash", "-c", code + SCRIPTS[name]], capture_output=True, text=True, check=True
    )
    assert launch_of(SCRIPTS[name]).words == said.stdout.replace("done\n", "").splitlines()


def test_what_only_a_shell_knows_stays_as_it_stands() -> None:
    words = launch_of('prog a=$1 b=$(date +%Y) c="$UNSET/x" d=$HOME/data e=$((4 ** 3)) f=$((4 / 0))\n').words
    assert words == ["a=$1", "b=$(date +%Y)", "c=$UNSET/x", "d=~/data", "e=$((4 ** 3))", "f=$((4 / 0))"]


def test_what_branches_append_is_named_and_not_taken() -> None:
    launch = launch_of(
        'E=()\nif [ "$D" = npu ]; then\n  E+=(x.y=1 word)\nfi\n'
        'case $D in\n gpu | npu) E+=(z=2) ;;\nesac\nprog "${E[@]}" a=1\n'
    )
    assert (launch.words, launch.branched) == (["a=1"], ["x.y=1", "z=2"])


def test_what_a_branch_assigns_anew_is_named_and_not_taken() -> None:
    launch = launch_of('N=4\nif [ "$1" = b ]; then\n  N=8\n  M=2\nelse\n  N=4\n  M=3\nfi\nprog n=$N m=$M\n')
    assert (launch.words, launch.branched) == (["n=4", "m=2"], ["N=8", "M=3"])


def test_a_command_within_quotes_is_read() -> None:
    launch = launch_of(
        "X=3\nsrun bash -c \"pip install . \\\n && torchrun --n 2 prog \\\n --a $X --b 'c d'\" &>> log\n"
    )
    assert (launch.launcher, launch.words) == (["--n", "2"], ["--a", "3", "--b", "c d"])
    assert read_launch("echo $(echo prog x)\n", lambda word: word == "prog") is None


def test_a_text_that_a_script_holds_is_a_command_too() -> None:
    text = "read -r -d '' commands <<EOF\nprog \\\n  --a 1 \\\n  --b\nEOF\n"
    text += "if [[ ${1} != slurm ]]; then\n  deepspeed $commands\nfi\n"
    assert launch_of(text).words == ["--a", "1", "--b"]


def test_flags_before_the_program_are_the_launchers() -> None:
    launch = launch_of("X=1 torchrun --nnodes=2 prog --a.b 1e-6 --on --pair 0.2 0.27 --names 'q', v --c=d\n")
    assert launch.launcher == ["--nnodes=2"]
    assert flags(launch.words) == {
        "a.b": 1e-6, "on": True, "pair": [0.2, 0.27], "names": ["q", "v"], "c": "d",
    }  # fmt: skip


@pytest.mark.parametrize(
    "text",
    ["", "echo prog-like\n", "prog'", '"', "a=(1 2", "$(", "${", "case x in", "\\", "))((", "fi\nfi\n"],
)
def test_a_text_that_starts_nothing_has_no_launch(text: str) -> None:
    assert read_launch(text, lambda word: word == "prog") is None


def test_words_become_values() -> None:
    assert [scalar(word) for word in ("3", "1e-6", "True", "null", "[a, 2]", "x", "['b']", "[", "1.5")] == [
        3, 1e-6, True, None, ["a", 2], "x", ["b"], "[", 1.5,
    ]  # fmt: skip


def test_a_script_is_never_run(tmp_path: Path) -> None:
    launch_of(f"A=$(touch {tmp_path}/made)\nprog a=$A b=`touch {tmp_path}/made`\n")
    assert not (tmp_path / "made").exists()
