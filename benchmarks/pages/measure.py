"""`python -m rlhfspec.benchmarks.pages.measure [--quick]`, `make bench-readme`: every figure of the README anew.

Runs the benchmarks of the README's rows one after the other, each in a process of its own, into
`build/bench-readme/COMMIT/`; a result that lies there already is not made again. When all have ended it files them
under `benchmarks/results/MACHINE/` and writes the README, the pages and the pictures. `--quick` tries every part in its
small size, prints the rows and files nothing.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from ...core.errors import InputError, RlhfSpecError
from ..peers.client import PEER_NAMES, available_peers
from ..support.processes import run_command
from ..support.result import checked_out_commit, machine_name
from . import __main__ as pages
from .readme import ROWS, SHOWN, Row, shown, shown_commit
from .tables import RESULTS, ROOT


def measured_rows() -> dict[str, Row]:
    """One row of every result that a command of ours makes, by the result's name."""
    return {row.result: row for row in reversed(ROWS) if row.arguments}


def measure(out: Path, *, quick: bool) -> dict[str, Path]:
    """Return the result files by name, made where they are missing. Raises RlhfSpecError when a benchmark fails."""
    out.mkdir(parents=True, exist_ok=True)
    made = {name: out / f"{name}.json" for name in measured_rows()}
    for name, row in measured_rows().items():
        if made[name].exists():
            print(f"{row.command}: made already ({made[name]})", flush=True)
            continue
        print(f"{row.command}: began at {time.strftime('%H:%M:%S')}, log {out / name}.log", flush=True)
        arguments = ["bench", *row.arguments, "--out", str(out), *(["--quick"] if quick else [])]
        seconds = run_command(arguments, folder=ROOT, log=out / f"{name}.log")
        print(f"{row.command}: {seconds:.0f} s", flush=True)
    return made


def show(made: Mapping[str, Path]) -> list[str]:
    """Print every row as its new result has it; returns the figures that are missing."""
    lacking = list[str]()
    for row in ROWS:
        if row.result in made:
            figures = json.loads(made[row.result].read_text())["figures"]
            missing = [name for name in row.figures if name not in figures]
            said = f"no {', '.join(missing)}" if missing else row.text.format_map(figures)
            print(f"{row.what}: {said}", flush=True)
            lacking += missing
    return lacking


def file_results(made: Mapping[str, Path]) -> None:
    """Copy the results to their machine's folder, and show these; what was said of their forerunners goes."""
    machines = shown()["machines"]
    for name, path in made.items():
        folder = RESULTS / machine_name(json.loads(path.read_text())["provenance"])
        folder.mkdir(exist_ok=True)
        shutil.copyfile(path, folder / f"{name}.json")
        machines[name] = folder.name
    commits = {shown_commit(name, machine) for name, machine in machines.items()}
    before = {commit: change for commit, change in shown()["before"].items() if commit in commits}
    SHOWN.write_text(json.dumps({"machines": machines, "before": before}, indent=2) + "\n")


def main(arguments: Sequence[str]) -> int:
    """Measure, file, write. Raises InputError where no commit holds what is measured, and where a peer is missing."""
    quick = "--quick" in arguments
    commit = checked_out_commit()
    if not quick:
        if commit is None or commit.endswith("dirty"):
            raise InputError(
                "the README's figures name the commit that was measured, expected a checkout without changes, got "
                f"{commit}; commit them first, or try the parts with --quick"
            )
        missing = {*PEER_NAMES} - {*available_peers()}
        if missing:
            raise InputError(
                f"a row of the README compares with other engines, expected all of {', '.join(PEER_NAMES)}, got none "
                f"of {', '.join(sorted(missing))}; run: make bench-peers"
            )
    made = measure(ROOT / "build" / "bench-readme" / f"{'quick-' if quick else ''}{commit}", quick=quick)
    lacking = show(made)
    if quick:
        return 0
    if lacking:
        raise RlhfSpecError(f"the README shows {', '.join(lacking)}; the new results have none of it")
    file_results(made)
    pages.main()
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except RlhfSpecError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
