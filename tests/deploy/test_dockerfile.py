"""The image's Dockerfile: what it copies exists, it installs the pinned versions, and nothing in it runs as root."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

from kustomized import kustomized

from rlhfspec.cluster.ray_start.origin import PACKAGES

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
INSTRUCTIONS = {"FROM", "ARG", "ENV", "RUN", "WORKDIR", "COPY", "USER", "CMD"}


def steps() -> list[tuple[str, str]]:
    """Instruction and argument of each step, continued lines joined."""
    text = re.sub(r"^#.*\n", "", (FOLDER / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = text.replace("\\\n", " ").splitlines()
    return [(line.split()[0], line.split(maxsplit=1)[1].strip()) for line in lines if line.strip()]


def arguments(instruction: str) -> list[str]:
    return [argument for name, argument in steps() if name == instruction]


def install() -> list[str]:
    """The words of the one command of pip."""
    (command,) = [
        part
        for run in arguments("RUN")
        for part in run.split("&&")
        if re.search(r"\bpip\b.*\binstall\b", part)
    ]
    return shlex.split(command)


def test_it_has_only_instructions_that_are_checked_here() -> None:
    assert {name for name, _ in steps()} <= INSTRUCTIONS
    assert steps()[0][0] == "FROM"


def test_the_base_image_is_a_version_that_the_project_takes() -> None:
    (base,) = arguments("FROM")
    version = re.fullmatch(r"python:(\d+)\.(\d+)-slim-\w+", base)
    assert version and (int(version[1]), int(version[2])) >= (3, 11)


def test_what_is_copied_exists_and_is_everything_that_runs() -> None:
    copied = [source for copy in arguments("COPY") for source in copy.split()[:-1]]
    assert not [source for source in copied if source.startswith("--") or not (ROOT / source).exists()]
    assert {*PACKAGES, "configs", "pyproject.toml", "constraints.txt"} <= set(copied)
    allowed = {
        line.removeprefix("!")
        for line in (FOLDER / "Dockerfile.dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    assert allowed == set(copied)
    readme = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["readme"]
    assert readme in copied  # setuptools reads it


def test_it_installs_what_make_setup_installs_but_the_tools() -> None:
    words = install()
    assert words[words.index("-c") + 1] == "constraints.txt"
    (target,) = [word for word in words if word.startswith(".[")]
    assert (
        words[words.index(target) - 1] == "-e"
        and "-c constraints.txt -e '.[dev]'" in (ROOT / "Makefile").read_text()
    )
    extras = dict(argument.split("=") for argument in arguments("ARG") if "=" in argument)["EXTRAS"]
    dev = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["dev"]
    assert target == ".[${EXTRAS}]" and dev[0] == f"rlhfspec[{extras}]"


def test_it_leaves_nothing_behind_and_runs_as_the_pods_do() -> None:
    text = " ".join(arguments("RUN"))
    assert "--no-install-recommends" in text and "rm -rf /var/lib/apt/lists/*" in text
    assert any("PIP_NO_CACHE_DIR=1" in each for each in arguments("ENV"))
    assert "sudo" not in text and "curl" not in text
    user = arguments("USER")[-1]
    (job,) = kustomized(FOLDER / "base" / "job")[1:]
    rights = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["securityContext"]
    assert user == f"{rights['runAsUser']}:{rights['runAsGroup']}"
    names = [name for name, _ in steps()]
    assert max(i for i, name in enumerate(names) if name in ("RUN", "COPY")) < names.index("USER")
    assert not re.search(r"(?i)(token|password|secret)\w*=", "\n".join(f"{a} {b}" for a, b in steps()))
