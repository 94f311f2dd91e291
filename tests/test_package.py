"""The package `rlhfspec` is the same from a checkout, from a job's working directory and from an installed wheel."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

from tests.test_layers import LAYERS, ROOT

WHERE = (
    "import rlhfspec.core.records as records, rlhfspec.cluster.ray_start.origin as origin, rlhfspec.integrations; "
    "print(records.__file__, rlhfspec.integrations.__file__, origin.shadowed_packages())"
)


def where(package: Path) -> list[str]:
    """What `WHERE` prints of one that is whole."""
    return [str(package / "core" / "records.py"), str(package / "integrations" / "__init__.py"), "[]"]


BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"
EDITABLE = "import site, sys; site.addsitedir(sys.argv.pop(1)); "
"What Python does with site-packages as it starts: an editable install is a line of code there."


def copy_of_the_tree(folder: Path) -> Path:
    """What `--working-dir .` sends: the checkout without what stands in `.gitignore`."""
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in (*LAYERS, "configs"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for name in ("__init__.py", "rlhfspec.py", "setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / name)
    return folder


def run(argv: list[str], *, cwd: Path, path: str) -> str:
    done = subprocess.run(
        [sys.executable, *argv],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def built(how: str, tree: Path, wheels: Path, site: Path) -> list[str]:
    """Install a tree as pip does, without it: the names of what stands in `site` then."""
    name = run(["-c", BUILD, how, str(wheels)], cwd=tree, path="").split()[-1]
    with zipfile.ZipFile(wheels / name) as wheel:
        wheel.extractall(site)
        return wheel.namelist()


def imports_of_the_docs() -> list[str]:
    """Every line of a page or an example that imports something of ours."""
    files = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *(ROOT / "docs").rglob("*.py")]
    found = [
        re.findall(r"^(?:from|import) rlhfspec\S*(?: import [\w, ]+)?$", one.read_text(), re.M)
        for one in files
    ]
    return sorted({line for lines in found for line in lines})


def test_an_editable_install_imports_all_that_pages_and_examples_do_from_any_folder(tmp_path: Path) -> None:
    tree, wheels, site, elsewhere = (tmp_path / name for name in ("tree", "wheels", "site", "elsewhere"))
    for folder in (tree, elsewhere):
        folder.mkdir()
    built("build_editable", copy_of_the_tree(tree), wheels, site)
    # without -S the test's own environment would bring an install of this project
    started = ["-S", "-c", EDITABLE + "; ".join([WHERE, *imports_of_the_docs()]), str(site)]
    path = f"{site}{os.pathsep}{sysconfig.get_path('purelib')}"
    assert run(started, cwd=elsewhere, path=path).split() == where(tree)
    assert "from rlhfspec.integrations.trl import rollout_func" in imports_of_the_docs()


def test_a_job_runs_what_its_working_directory_holds(tmp_path: Path) -> None:
    tree = copy_of_the_tree(tmp_path)
    # as Ray starts an entry point: in the folder, which is on the path
    assert run(["-c", WHERE], cwd=tree, path=str(tree)).split() == where(tree)
    for command in (["--version"], ["check", "--config", "configs/demo.yaml"]):
        assert run(["-m", "rlhfspec.cluster.cli", *command], cwd=tree, path=str(tree))


def test_a_wheel_puts_one_name_into_site_packages_and_runs(tmp_path: Path) -> None:
    tree, wheels, site, elsewhere = (tmp_path / name for name in ("tree", "wheels", "site", "elsewhere"))
    for folder in (tree, elsewhere):
        folder.mkdir()
    names = built("build_wheel", copy_of_the_tree(tree), wheels, site)
    assert {each.split("/")[0] for each in names if ".dist-info/" not in each} == {"rlhfspec"}
    data = ["configs/demo.yaml", "configs/algorithms/grpo.yaml", "integrations/python.yaml"]
    assert {f"rlhfspec/{each}" for each in data} <= set(names)
    files = {str(path.relative_to(ROOT)) for layer in LAYERS for path in (ROOT / layer).rglob("*.py")}
    assert {each for each in names if re.fullmatch(r"rlhfspec/[^/]*", each)} == {"rlhfspec/__init__.py"}
    modules = {name for name in names if name.endswith(".py")}
    assert modules == {"rlhfspec/__init__.py", *(f"rlhfspec/{each}" for each in files)}
    assert run(["-c", WHERE], cwd=elsewhere, path=str(site)).split() == where(site / "rlhfspec")
    assert "rlhfspec" in run(["-m", "rlhfspec.cluster.cli", "--version"], cwd=elsewhere, path=str(site))
    # the classes and a command in one process, which imports torch once
    started = (
        "import sys, rlhfspec; from rlhfspec.cluster.cli import main; "
        "print(*(getattr(rlhfspec, name).__module__ for name in ('GRPO', 'Engine', 'Run'))); "
        "sys.exit(main(sys.argv[1:]))"
    )
    config = str(site / "rlhfspec" / "configs" / "demo.yaml")
    named, *checked = run(
        ["-c", started, "check", "--config", config], cwd=elsewhere, path=str(site)
    ).splitlines()
    assert set(named.split()) == {
        f"rlhfspec.integrations.{name}" for name in ("trainer_classes", "engine_in_process", "finished_run")
    }
    assert checked
