"""Builds the peers' environments: `python -m rlhfspec.benchmarks.peers.build [--only NAME]`, `make bench-peers`.

TRL, OpenAI's client and a notebook's kernel are no engines: a release of them is a folder for the path of our own
environment. A peer that cannot be built is named with the reason and the others go on; the exit status is 1 only when
none is there at the end.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
from pathlib import Path

from .client import BUILT, PEER_NAMES, SERVERS, available_peers, default_peers_dir

IMPORTS = {
    "llama_cpp": "import xllamacpp, gguf, safetensors.numpy",
    "openvino": "import openvino_genai, optimum.intel",
    "ctranslate2": "import ctranslate2.converters, transformers",
    "vllm": "import vllm._custom_ops; from vllm import LLM",
}
TRL_RELEASES = ("1.0.0", "1.11.0", "1.16.0")
"The first whose trainer calls a rollout function on every rank, one in between, and the newest that was tried."
LIBRARIES = {
    # all that it depends on we have
    **{f"trl-{release}": (f"trl=={release}", "--no-deps") for release in TRL_RELEASES},
    "openai": ("openai==3.57.0",),
    # a kernel and who runs a notebook's cells in it
    "notebook": ("ipykernel==7.4.0", "nbclient==0.11.0"),
    # environments that others wrote; what else verifiers depends on we have, in other versions
    "gymnasium": ("gymnasium==1.4.0", "--no-deps", "cloudpickle", "farama-notifications"),
    "verifiers": ("verifiers==0.3.1", "--no-deps", "-r", str(SERVERS / "requirements-verifiers.txt")),
}
"What pip is asked for, by name."
UNUSED = ("torchvision", "torchaudio", "torchcodec")
"Come as dependencies, are not needed for text, and fail to import when their torch was built another way."


class BuildError(Exception):
    """A step of a build failed; the message is the last line the step printed."""


def main(names: list[str], folder: Path) -> int:
    """Build each named peer; returns the exit status."""
    for name in names:
        try:
            made = get_library(name, folder) if name in LIBRARIES else build(name, folder)
            print(f"peer {name}: {made}", flush=True)
        except (BuildError, OSError) as error:
            print(f"peer {name}: NOT built: {error} (log: {folder / name / 'build.log'})", flush=True)
    there = [*available_peers(folder), *(one for one in LIBRARIES if library_folder(one, folder))]
    print(f"peers available in {folder}: {', '.join(there) or 'none'}")
    return 0 if there else 1


def build(name: str, folder: Path) -> str:
    """Make one environment and import its engine; returns what was done. Nothing when it is already built."""
    environment, requirements = folder / name, SERVERS / f"requirements-{name}.txt"
    stamp, key = environment / BUILT, hashlib.sha256(requirements.read_bytes()).hexdigest()
    if stamp.is_file() and stamp.read_text() == key:
        return "already built"
    stamp.unlink(missing_ok=True)
    environment.mkdir(parents=True, exist_ok=True)
    log = environment / "build.log"
    log.write_text("")
    run([sys.executable, "-m", "venv", str(environment)], log)
    python = str(environment / "bin" / "python")
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    run([*pip, "install", "--progress-bar", "off", "-r", str(requirements)], log)
    run([*pip, "uninstall", "--yes", *UNUSED], log)
    run([python, "-c", IMPORTS[name]], log)
    stamp.write_text(key)
    return "built"


def trl_folder(release: str, folder: Path | None = None) -> Path | None:
    """What to put on the path for a release of TRL; None: it was not got."""
    return library_folder(f"trl-{release}", folder)


def library_folder(name: str, folder: Path | None = None) -> Path | None:
    """What to put on the path for one of LIBRARIES; None: it was not got."""
    there = (folder or default_peers_dir()) / name
    return there if (there / BUILT).is_file() else None


def get_library(name: str, folder: Path) -> str:
    """Get one of LIBRARIES; returns what was done."""
    there = folder / name
    if library_folder(name, folder):
        return "already there"
    there.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    run([*pip, "install", "-q", "--upgrade", "--target", str(there), *LIBRARIES[name]], there / "build.log")
    (there / BUILT).touch()
    return "got"


def run(command: list[str], log: Path) -> None:
    """Run one step, appending what it prints to the log. Raises BuildError with the last line of it."""
    with log.open("ab") as stream:
        status = subprocess.run(command, stdout=stream, stderr=subprocess.STDOUT).returncode
    if status != 0:
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
        last = lines[-1] if lines else "it printed nothing"
        raise BuildError(f"{' '.join(command[1:4])} ... exited with {status}: {last}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    names = [*PEER_NAMES, "trl", *(name for name in LIBRARIES if not name.startswith("trl-"))]
    parser.add_argument("--only", choices=names, help="build this peer alone")
    only = parser.parse_args().only
    releases = [f"trl-{release}" for release in TRL_RELEASES]
    chosen = {None: [*PEER_NAMES, *LIBRARIES], "trl": releases}.get(only, [only])
    sys.exit(main(chosen, default_peers_dir()))
