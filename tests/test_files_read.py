"""No module of ours reads a file in a way that runs what stands in it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.test_layers import LAYERS, ROOT, modules

UNPICKLERS = {
    "pickle.load",
    "pickle.loads",
    "pickle.Unpickler",
    "cloudpickle.load",
    "cloudpickle.loads",
    "joblib.load",
}
MENTIONED = re.compile(r"pickle|joblib|yaml|torch\.load|\b(eval|exec)\b")
"What stands in a text that has any of them: most have not, and reading their syntax would take most of the time."
RESTRICTED = "learning/training/learner_state.py"
ORDERS = "engine/group/ranks.py"
PROGRAMS = "learning/sandbox/sandbox_server.py"


def unsafe_reads(source: str) -> list[str]:
    """Calls and base classes that would run code of a file."""
    found = []
    if not MENTIONED.search(source):
        return found
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            found += [ast.unparse(base) for base in node.bases if ast.unparse(base) in UNPICKLERS]
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        keywords = {each.arg: ast.unparse(each.value) for each in node.keywords}
        if name in UNPICKLERS or (
            name in ("yaml.load", "yaml.unsafe_load") and "_Loader" not in ast.unparse(node)
        ):
            found.append(name)
        if name == "torch.load" and keywords.get("weights_only") != "True":
            found.append(name)
        if keywords.get("allow_pickle", "False") != "False" or name in ("eval", "exec"):
            found.append(name)
    return found


@pytest.mark.parametrize("folder", LAYERS)
def test_nothing_is_unpickled_from_a_file(folder: str) -> None:
    found = {
        str(path.relative_to(ROOT)): reads
        for path in modules(folder)
        if (reads := unsafe_reads(path.read_text()))
    }
    # that one looks up the classes of a table and nothing else
    assert found.pop(RESTRICTED, None) == (["pickle.Unpickler"] if folder == "learning" else None)
    # no file: what the leader of a group has sent to its other ranks, as Ray's own messages are
    assert found.pop(ORDERS, None) == (["pickle.loads"] if folder == "engine" else None)
    # the sandbox's own process, which is there to run a program that was sent
    assert found.pop(PROGRAMS, None) == (["exec"] if folder == "learning" else None)
    assert not found


def test_the_rule_catches_planted_faults() -> None:
    planted = "import torch, pickle\n{}\n"
    for line in (
        "torch.load(p)",
        "pickle.load(f)",
        "np.load(p, allow_pickle=True)",
        "eval(text)",
        "yaml.load(t)",
    ):
        assert unsafe_reads(planted.format(line)), line
    assert not unsafe_reads(planted.format("torch.load(p, weights_only=True)"))
    assert Path(ROOT / RESTRICTED).is_file()
