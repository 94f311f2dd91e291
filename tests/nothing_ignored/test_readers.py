"""Whoever reads JSON, YAML, TOML or GGUF says here how unknown keys of it are accounted for: a new reader fails."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhfspec.core.surfaces.surface import surfaces

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("core", "profiles", "policies", "engine", "learning", "actors", "cluster")
PARSERS = {
    ("json", "load"),
    ("json", "loads"),
    ("tomllib", "load"),
    ("tomllib", "loads"),
    ("yaml", "load"),
    ("yaml", "safe_load"),
    ("yaml", "safe_load_all"),
}
METHODS = {"model_validate", "model_validate_json", "validate_json", "validate_python", "GGUFReader"}

SURFACE = "surface"
"Somebody else's keys: the names behind it are tables of `core/surfaces`."
STRICT = "strict"
"Every key is known, or it is an error or a whole other file."
VERSIONED = "versioned"
"Our own file with a number of its form."
OURS = "ours"
"Our own file, whose keys one function here writes and another reads; what is no such file is said or made anew."
PACKAGE = "package"
"A table that is part of the package, or text that this process has just made."

READERS: dict[str, tuple[str, ...]] = {
    "core/checkpoint_manifest.py": (VERSIONED,),
    "core/config_io.py": (STRICT, "pydantic, extra=forbid"),
    "core/metrics.py": (PACKAGE, OURS, "metrics.jsonl: any name, a finite number"),
    "core/surfaces/surface.py": (PACKAGE,),
    "core/yaml_text.py": (STRICT, "the text of core/config_io.py"),
    "profiles/profile.py": (VERSIONED,),
    "profiles/step_log.py": (VERSIONED,),
    "policies/simulate/described_cluster.py": (PACKAGE,),
    "policies/simulate/model_dimensions.py": (SURFACE, "simulated.config"),
    "profiles/gpu_sheets.py": (PACKAGE,),
    "policies/simulate/sweep.py": (STRICT, "pydantic, extra=forbid"),
    "engine/drafters/head/head_weights.py": (STRICT, "origin: a dataclass"),
    "engine/drafters/head/published_head.py": (PACKAGE, "a config that we wrote"),
    "engine/group/dealing.py": (PACKAGE, "the model's config"),
    "engine/group/group_probe.py": (PACKAGE, "the model's config"),
    "engine/model/invariance_probe.py": (STRICT, "facts are compared whole, by digest"),
    "engine/weights/config_json.py": (PACKAGE, "a config that we wrote"),
    "engine/weights/llama_config.py": (PACKAGE, "the model's config"),
    "engine/weights/loading.py": (PACKAGE, "the model's config"),
    "engine/weights/weight_files.py": (STRICT, "index: every name is a tensor"),
    "learning/rewards/judge.py": (
        OURS,
        "a line is a key and a score; of a completion its first choice is read",
    ),
    "learning/rewards/code_reward.py": (OURS, "SandboxFusion's answer, of which what a program did is read"),
    "learning/sandbox/code_tests.py": (STRICT, "a key of a row's tests that nothing reads is refused"),
    "learning/sandbox/sandbox.py": (OURS, "what sandbox_server.py sends"),
    "learning/sandbox/sandbox_server.py": (OURS, "what sandbox.py sends"),
    "learning/data/prompt_tokens.py": (SURFACE,),
    "learning/training/adapter.py": (SURFACE, "adapter_config"),
    "learning/data/chat/messages.py": (PACKAGE, "a call's arguments, which the template gets whole"),
    "learning/data/verifiers_package.py": (PACKAGE, "options that load_environment takes or refuses"),
    "learning/data/packed_prompts.py": (PACKAGE, "columns that it made"),
    "learning/data/record.py": (PACKAGE, "a copy of plain values"),
    "learning/data/text_records.py": (SURFACE,),
    "learning/drafts/draft_learner.py": (VERSIONED, "by the state's manifest"),
    "learning/models/gguf_folder.py": (SURFACE,),
    "learning/models/get.py": (OURS, "where a model came from"),
    "learning/training/finished_model.py": (PACKAGE, "the model's config"),
    "learning/training/supervised_job.py": (STRICT, "every key is compared"),
    "actors/reward_server/reward_deployment.py": (STRICT, "pydantic, extra=forbid"),
    "actors/reward_server/score_schema.py": (SURFACE, "reward.answer", "reward.answer.rewards"),
    "cluster/folder/iteration_logs.py": (OURS, "lines of checksums, moves, histograms"),
    "cluster/folder/leftovers.py": (OURS, "who owns a temporary folder"),
    "cluster/folder/owner.py": (OURS, "who owns a run"),
    "cluster/folder/remote_copy.py": (OURS, "what was sent"),
    "cluster/folder/rollouts.py": (OURS, "of lengths one named column is read"),
    "cluster/folder/run_status.py": (VERSIONED,),
    "cluster/jobs/reward_server.py": (STRICT, "pydantic, extra=forbid"),
    "cluster/observe/live_page.py": (STRICT, "dataclasses"),
    "cluster/observe/monitoring.py": (PACKAGE,),
    "cluster/observe/run_record.py": (OURS, "`compare`"),
    "cluster/observe/timeline.py": (OURS, "timelines"),
    "cluster/ray_start/forked_workers.py": (OURS, "a command that its own other half sent"),
    "cluster/ray_start/origin.py": (PACKAGE, "pyproject.toml"),
    "cluster/plan/model_files.py": (OURS, "whether a second template is there"),
    "cluster/resume/rewind.py": (OURS, "lines that are kept whole"),
    "cluster/resume/run_state.py": (VERSIONED,),
    "cluster/resume/forked_run.py": (OURS, "a state that was read whole just before"),
    "cluster/resume/in_flight_files.py": (STRICT, "pairs of numbers"),
    "cluster/serving/request_bodies.py": (SURFACE, "request.completion", "request.chat"),
    "cluster/serving/served_weights.py": (STRICT, "a dataclass"),
    "cluster/serving/server_notes.py": (OURS, "lines alone"),
    "cluster/verify/kept_weights.py": (VERSIONED, "core/checkpoint_manifest.py reads it whole"),
}


def readers() -> Iterator[str]:
    for folder in FOLDERS:
        for file in sorted((ROOT / folder).rglob("*.py")):
            calls = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)]
            if any(_reads(call.func) for call in calls):
                yield file.relative_to(ROOT).as_posix()


def _reads(called: ast.expr) -> bool:
    if isinstance(called, ast.Name):
        return called.id in METHODS
    if not isinstance(called, ast.Attribute):
        return False
    of = called.value.id if isinstance(called.value, ast.Name) else ""
    return called.attr in METHODS or (of, called.attr) in PARSERS


def test_every_reader_says_how_unknown_keys_are_accounted_for() -> None:
    found = set(readers())
    assert found - set(READERS) == set(), (
        "a reader without an entry: give it a table, or say why it needs none"
    )
    assert set(READERS) - found == set(), "these read nothing any more"


@pytest.mark.parametrize("path", [path for path, (how, *_) in READERS.items() if how == SURFACE])
def test_a_reader_of_others_keys_names_tables_that_there_are(path: str) -> None:
    assert [name for name in READERS[path][1:] if name not in surfaces()] == []


@pytest.mark.parametrize("path", [path for path, (how, *_) in READERS.items() if how == VERSIONED])
def test_a_reader_of_a_versioned_file_looks_at_its_number(path: str) -> None:
    text = (ROOT / path).read_text()
    assert "SCHEMA_VERSION" in text or "_VERSION_KEY" in text or len(READERS[path]) > 1
