"""The shape of the tree: imports go leftwards only, files stay small, every module says what it is."""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LAYERS = ("core", "profiles", "policies", "engine", "learning", "actors", "cluster", "integrations")
MAX_LINES = 500
MAX_FILES = 20

_TORCH = {"torch", "transformers", "tokenizers", "safetensors", "jaxtyping", "numpy"}
ALLOWED = {
    "core": {"pydantic", "yaml", "numpy"},
    "profiles": {"numpy", "pyarrow", "statsmodels"},
    "policies": {"numpy"},
    "engine": _TORCH | {"huggingface_hub", "xxhash", "xformers", "triton", "llvmlite"},
    "learning": _TORCH
    | {"pyarrow", "datasets", "peft", "huggingface_hub", "filelock", "gguf", "jinja2", "regex"},
    "actors": _TORCH | {"ray", "fastapi", "pydantic", "requests"},
    "cluster": _TORCH
    | {"ray", "pyarrow", "rich", "yaml", "fsspec", "jinja2"}
    | {"fastapi", "pydantic", "prometheus_client"},
    "integrations": _TORCH | {"ray"},
}
"""Third-party packages a folder may import, besides the standard library."""


def modules(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def module_name(path: Path) -> str:
    parts = ("rlhfspec", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def folder_of(path: Path) -> tuple[str, ...]:
    """What a module's relative imports start from."""
    return ("rlhfspec", *path.relative_to(ROOT).parts[:-1])


@dataclass(frozen=True, slots=True)
class Function:
    """A function of a module, nested ones too."""

    name: str
    num_lines: int
    takes_the_whole_config: bool


@dataclass(frozen=True, slots=True)
class Source:
    """What the laws of this page ask of a module; its tree, which is large, is not kept."""

    num_lines: int
    docstring: str | None
    imports: tuple[ast.Import | ast.ImportFrom, ...]
    "in functions too"
    imports_at_load: tuple[ast.Import | ast.ImportFrom, ...]
    "not in functions, not for type checkers only"
    constants: tuple[str, ...]
    "what is assigned at the top, as often as it is"
    functions: tuple[Function, ...]
    names: Mapping[str, int]
    "every identifier, and a line where it stands"


def source_of(text: str) -> Source:
    """Read the source text of a module."""
    tree = ast.parse(text)
    nodes = list(ast.walk(tree))
    assigned = [target for node in tree.body if isinstance(node, ast.Assign) for target in node.targets]
    return Source(
        num_lines=len(text.splitlines()),
        docstring=ast.get_docstring(tree),
        imports=imports_among(nodes),
        imports_at_load=imports_among(n for node in tree.body if runs_at_load(node) for n in ast.walk(node)),
        constants=tuple(map(ast.unparse, assigned)),
        functions=tuple(
            function_of(n) for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)
        ),
        names={name: getattr(node, "lineno", 0) for node in nodes for name in identifiers_of(node)},
    )


@cache
def source(path: Path) -> Source:
    """Read a module, once for all laws."""
    return source_of(path.read_text())


def imports_among(nodes: Iterable[ast.AST]) -> tuple[ast.Import | ast.ImportFrom, ...]:
    return tuple(node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom))


def runs_at_load(node: ast.stmt) -> bool:
    is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    return not is_function and not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))


def function_of(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Function:
    arguments = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
    return Function(
        name=node.name,
        num_lines=(node.end_lineno or node.lineno) - node.lineno + 1,
        takes_the_whole_config=any(
            isinstance(one.annotation, ast.Name) and one.annotation.id == "Config" for one in arguments
        ),
    )


def identifiers_of(node: ast.AST) -> Iterator[str]:
    """Every text in a node that is not a constant's is a name, those of modules with dots."""
    if not isinstance(node, ast.Constant):
        for _, value in ast.iter_fields(node):
            for name in value if isinstance(value, list) else [value]:
                if isinstance(name, str):
                    yield from name.split(".")


def imported_names(
    nodes: Iterable[ast.Import | ast.ImportFrom], folder: tuple[str, ...]
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Imports in a module of `folder`: the module in full and the names taken from it."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((alias.name, ()) for alias in node.names)
        else:
            above = folder[: len(folder) - node.level + 1] if node.level else ()
            yield ".".join((*above, *filter(None, [node.module]))), tuple(alias.name for alias in node.names)


def imports_of(path: Path) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Every import of a module, in functions too."""
    return imported_names(source(path).imports, folder_of(path))


def layer_faults(module: Source, folder: tuple[str, ...]) -> list[str]:
    """What a module of `folder` may not import."""
    faults = []
    layer = folder[1]
    for name, _ in imported_names(module.imports, ("its package", *folder[1:])):
        top, *rest = name.split(".")
        if top == "its package":
            if rest[0] not in LAYERS or LAYERS.index(rest[0]) > LAYERS.index(layer):
                faults.append(f"{layer} imports {rest[0]}, which is to its right")
        elif top in ("rlhfspec", "benchmarks", "tests", *LAYERS):
            faults.append(f"{layer} imports {name}, which is relative inside the package")
        elif top not in sys.stdlib_module_names and top not in ALLOWED[layer]:
            faults.append(f"{layer} imports {name}, which is not on its list")
    return faults


def import_graph() -> dict[str, set[str]]:
    """Module to the modules of ours that it loads."""
    known = {module_name(path): path for path in modules(*LAYERS)}
    graph = {}
    for name, path in known.items():
        targets = set()
        for module, members in imported_names(source(path).imports_at_load, folder_of(path)):
            targets |= {module, *(f"{module}.{member}" for member in members)}
        graph[name] = (targets & set(known)) - {name}
    return graph


def find_cycle(graph: dict[str, set[str]]) -> list[str]:
    """One cycle of the graph as a list of modules; empty when there is none."""
    done: set[str] = set()

    def visit(name: str, trail: list[str]) -> list[str]:
        if name in trail:
            return [*trail[trail.index(name) :], name]
        if name in done:
            return []
        for target in sorted(graph[name]):
            if cycle := visit(target, [*trail, name]):
                return cycle
        done.add(name)
        return []

    return next((cycle for name in sorted(graph) if (cycle := visit(name, []))), [])


@pytest.mark.parametrize("folder", LAYERS)
def test_a_folder_imports_only_from_its_left(folder: str) -> None:
    faults = [
        f"{path.relative_to(ROOT)}: {fault}"
        for path in modules(folder)
        for fault in layer_faults(source(path), folder_of(path))
    ]
    assert not faults, "\n".join(faults)


def test_the_layer_rule_catches_planted_faults() -> None:
    policies, learning = ("rlhfspec", "policies", "scaling"), ("rlhfspec", "learning")
    assert layer_faults(source_of("from ...actors.actor_messages import Order"), policies)
    assert layer_faults(source_of("from rlhfspec.core.records import Prompt"), policies)
    assert layer_faults(source_of("from ..benchmarks.engine import run"), learning)
    assert layer_faults(source_of("def f():\n    import ray"), learning)
    assert layer_faults(source_of("import torch.nn"), policies)
    assert not layer_faults(source_of("import json\nfrom ...core.records import Prompt"), policies)


def test_every_import_of_ours_is_found_by_its_path_alone() -> None:
    """By an editor or a drawing that runs nothing and knows nothing of this project."""
    checked = 0
    for path in modules(*LAYERS, "benchmarks"):
        for node in source(path).imports:
            if isinstance(node, ast.ImportFrom) and node.level:
                found = path.parents[node.level - 1].joinpath(*(node.module or "").split("."))
                for name in node.names:
                    is_module = (found / f"{name.name}.py").is_file()
                    assert (
                        is_module or found.with_suffix(".py").is_file() or (found / "__init__.py").is_file()
                    )
                    checked += 1
            else:
                assert "rlhfspec" not in ast.unparse(node), f"{path}:{node.lineno}"
    assert checked > 3000


def test_no_module_can_reach_itself() -> None:
    assert find_cycle({"a": {"b"}, "b": {"c"}, "c": {"a"}}) == ["a", "b", "c", "a"]
    assert find_cycle(import_graph()) == []


def room_graph(folder: str) -> dict[str, set[str]]:
    """Each package and module at the top of a folder to those that it imports, anywhere and in functions too."""
    graph: dict[str, set[str]] = {}
    for path in modules(folder):
        room = path.relative_to(ROOT / folder).with_suffix("").parts[0]
        targets = graph.setdefault(room, set())
        for name, members in imports_of(path):
            own = name.split(".")[1:] if name.startswith(f"rlhfspec.{folder}") else []
            targets |= set(own[1:2] or members) - {room} if own else set()
    return {room: targets & graph.keys() for room, targets in graph.items() if room != "__init__"}


@pytest.mark.parametrize("folder", LAYERS)
def test_rooms_have_an_order_and_no_two_import_each_other(folder: str) -> None:
    graph = room_graph(folder)
    assert find_cycle(graph) == []
    rooms = {path.parent.name for path in (ROOT / folder).glob("*/__init__.py")}
    said = re.search(r"Rooms \(imports go left\): ([\w\s<-]+)", (ROOT / folder / "__init__.py").read_text())
    order = said[1].replace("<-", "").split() if said else []
    assert set(order) == rooms and len(order) == len(rooms)
    back = [
        (room, one) for room in order for one in graph[room] & rooms if order.index(one) > order.index(room)
    ]
    assert back == []


@pytest.mark.parametrize("own", ["rlhfspec.engine.cpu", "rlhfspec.engine.cuda"])
def test_portable_code_imports_nothing_from_a_back_end(own: str) -> None:
    """But for the choice of a back end, inside a function, where what it needs is installed."""
    reached = [
        f"{module_name(path)} imports {name}"
        for path in modules(*LAYERS)
        if not module_name(path).startswith(own + ".")
        for name, _ in imports_of(path)
        if name.startswith((own + ".", *(("llvmlite",) if own == "rlhfspec.engine.cpu" else ())))
    ]
    assert {line.split()[0] for line in reached} <= {"rlhfspec.engine.numerics"}, "\n".join(reached)


@pytest.mark.parametrize("path", modules(*LAYERS, "benchmarks"), ids=module_name)
def test_modules_are_small_and_say_what_they_are(path: Path) -> None:
    assert source(path).num_lines <= MAX_LINES
    assert source(path).docstring, "the module docstring is missing"


def test_a_folder_has_few_modules() -> None:
    counts = Counter(str(path.parent.relative_to(ROOT)) for path in modules(*LAYERS, "benchmarks"))
    assert {folder: count for folder, count in counts.items() if count > MAX_FILES} == {}


def packages() -> list[Path]:
    return sorted({path.parent for path in modules(*LAYERS)})


@pytest.mark.parametrize("folder", packages(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_package_says_what_lives_there(folder: Path) -> None:
    said = (source(folder / "__init__.py").docstring or "").splitlines()
    assert [line.split(": ")[0] for line in said[2:4]] == ["Lives here", "Must not live here"]


def test_a_file_name_tells_which_file_it_is() -> None:
    named: dict[str, list[str]] = {}
    for path in modules(*LAYERS):
        # a command is named as the user types it
        if path.name != "__init__.py" and path.parent.name != "commands":
            named.setdefault(path.name, []).append(str(path.relative_to(ROOT)))
    assert [paths for paths in named.values() if len(paths) > 1] == []


@pytest.mark.parametrize("folder", LAYERS)
def test_a_module_gives_each_constant_one_value(folder: str) -> None:
    """The later of two would hold for all of the module's functions."""
    for path in modules(folder):
        names = source(path).constants
        twice = {name for name in names if name.isupper() and len(name) > 1 and names.count(name) > 1}
        assert not twice, f"{path.relative_to(ROOT)}: {sorted(twice)}"


# Ratchets: these figures only fall. Whoever makes the tree smaller lowers them; a new ability brings its lines from
# elsewhere, or raises the row of its room in the commit that adds it.
MAX_SOURCE_FILES = 571
MAX_LINES_OF_A_ROOM = {
    "core": 2582,
    "core/settings": 2721,
    "core/surfaces": 177,
    "profiles": 1096,
    "policies": 6,
    "policies/drafting": 2194,
    "policies/migration": 564,
    "policies/reallocation": 1272,
    "policies/scaling": 353,
    "policies/scheduling": 1848,
    "policies/simulate": 3295,
    "policies/staleness": 768,
    "engine": 2504,
    "engine/attention": 530,
    "engine/cache": 1169,
    "engine/calibration": 776,
    "engine/cpu": 2668,
    "engine/cuda": 751,
    "engine/decoding": 1963,
    "engine/drafters": 3169,
    "engine/group": 916,
    "engine/model": 3901,
    "engine/weights": 2165,
    "learning": 6,
    "learning/data": 4912,
    "learning/drafts": 2995,
    "learning/environments": 1394,
    "learning/models": 1423,
    "learning/rewards": 2028,
    "learning/sandbox": 914,
    "learning/tasks": 251,
    "learning/training": 6989,
    "actors": 384,
    "actors/generation": 1985,
    "actors/migration": 874,
    "actors/remote": 1486,
    "actors/reward_server": 542,
    "actors/scheduling": 465,
    "actors/transport": 1713,
    "actors/workers": 879,
    "cluster": 160,
    "cluster/commands": 2697,
    "cluster/folder": 2228,
    "cluster/jobs": 1529,
    "cluster/observe": 2559,
    "cluster/ray_start": 1077,
    "cluster/plan": 2935,
    "cluster/report": 652,
    "cluster/resume": 1323,
    "cluster/run": 2378,
    "cluster/serving": 2014,
    "cluster/system": 2700,
    "cluster/verify": 1721,
    "cluster/weights": 290,
    "integrations": 1611,
}
MAX_FUNCTION_LINES = 80
MAX_FUNCTIONS_OF_THE_WHOLE_CONFIG = 15


def functions() -> Iterator[tuple[str, Function]]:
    """Every function of the source, named `path name`."""
    for path in modules(*LAYERS):
        yield from ((f"{path.relative_to(ROOT)} {one.name}", one) for one in source(path).functions)


def test_the_source_only_shrinks() -> None:
    sources = modules(*LAYERS)
    assert len(sources) <= MAX_SOURCE_FILES
    lines: dict[str, int] = {}
    for path in sources:
        room = "/".join(path.relative_to(ROOT).parts[:-1][:2])
        lines[room] = lines.get(room, 0) + source(path).num_lines
    grown = {room: n for room, n in lines.items() if n > MAX_LINES_OF_A_ROOM.get(room, 0)}
    assert not grown, f"above their rows of MAX_LINES_OF_A_ROOM: {grown}"
    assert lines.keys() == MAX_LINES_OF_A_ROOM.keys(), "a room that is gone keeps no row"


def test_a_function_fits_on_a_page() -> None:
    long = [name for name, function in functions() if function.num_lines > MAX_FUNCTION_LINES]
    assert long == []


def test_few_functions_take_the_whole_config() -> None:
    taking = [name for name, function in functions() if function.takes_the_whole_config]
    assert len(taking) <= MAX_FUNCTIONS_OF_THE_WHOLE_CONFIG, "\n".join(taking)


PRIVATE_WORDS = {
    "news",
    "sight",
    "sights",
    "vitals",
    "proof",
    "reckon",
    "joiner",
    "joiners",
    "departure",
    "departures",
    "figures",
    "told",
    "untold",
    "telling",
    "asking",
    "prove",
    "proven",
    "play",
    "plays",
    "played",
    "player",
    "judges",
}
"That nobody of the field would look for; `docs/developers/glossary.md` has those to use."
KEYS_OF_FILES = {room: {"told_at", "figures"} for room in ("cluster/observe", "cluster/run")}
"Names of fields that stand in files (`live.json`), by folder."


def private_words(name: str) -> set[str]:
    """Those of PRIVATE_WORDS that an identifier is made of."""
    return PRIVATE_WORDS & set(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower().split("_"))


def test_names_are_words_of_the_field() -> None:
    found = set()
    for path in modules(*LAYERS):
        keys = KEYS_OF_FILES.get(str(path.parent.relative_to(ROOT)), ())
        for name, line in source(path).names.items():
            if name not in keys and private_words(name):
                found.add(f"{path.relative_to(ROOT)}:{line} {name}")
        found |= {str(path.relative_to(ROOT)) for part in path.with_suffix("").parts if part in PRIVATE_WORDS}
    assert not found, "\n".join(sorted(found))


def test_every_kind_of_name_is_seen() -> None:
    text = "from a.b import c as d\ndef e(f, *g: h, i=j, **k):\n    global l\n    return m.n(o=lambda p: q)"
    assert source_of(text).names.keys() == set("abcdefghijklmnopq")
    text = "class A(B, c=D):\n    match e:\n        case F(g=h): pass\n        case {1: i, **j} | [*k]: pass"
    text += "\n    try: l\n    except M as n: del o"
    assert source_of(text).names.keys() == set("ABcDeFghijklMno")
