"""The state of a run between two iterations: everything that decides what comes next, in one folder.

    RUN/checkpoints/state_0004/state.json   progress: cursor, versions, checksum, marks of the evaluations
    RUN/checkpoints/state_0004/config.yaml  the run's config, which its own file is compared with
    RUN/checkpoints/state_0004/record/      the run's record so far (`cluster.resume.rewind`)
    RUN/checkpoints/state_0004/trainer/     what trainers hold (`learning.training.learner_state`, the draft's refit)
    RUN/checkpoints/state_0004/head/        a draft head, where one drafts
    RUN/checkpoints/state_0004/in_flight/   samples ahead of their update, where generation runs ahead

Between two iterations no sample is being decoded, and tokens follow from weights, prompts and keys: no random
generator, cache or schedule of an instance needs to be kept. The folder appears by one rename, with a manifest of
checksums.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from ...core.checkpoint_manifest import state_folders, state_number, verify_checkpoint, write_manifest
from ...core.errors import ModelError
from ..folder.layout import RunDir

SCHEMA_VERSION = 2
"Of states with responses that wait for a reward: who reads 1 alone would pass over their files and learn from fewer."
WITHOUT_UNSCORED = 1
"Of all others, so that earlier versions of the project can go on from them."


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationMarks:
    """Where the evaluations of a run stand."""

    num_done: int = 0
    best: float | None = None
    metric: str | None = None
    "what the best is chosen by; None: as configured"
    num_not_better: int = 0
    "evaluations since the best"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """What `state.json` holds, and where it lies."""

    folder: Path
    num_iterations: int
    "that are finished"
    weight_version: int
    parameter_checksum: str
    "of the target as it was published"
    draft_version: int | None
    "None: no draft model"
    draft_checksum: str | None
    cursor: dict[str, int | str]
    evaluations: EvaluationMarks = field(default_factory=EvaluationMarks)

    def within(self, run_dir: RunDir) -> RunState:
        """The same state of another run's folder, which has a copy, or of its own."""
        return replace(self, folder=run_dir.checkpoints_folder / self.folder.name)

    def seal(self) -> None:
        """Write the manifest of its folder, which is not visible yet."""
        version, checksum = self.weight_version, self.parameter_checksum
        write_manifest(self.folder, model="state", weight_version=version, parameter_checksum=checksum)

    @property
    def config_file(self) -> Path:
        """The config of the run as it was then; states of earlier versions have none."""
        return self.folder / "config.yaml"

    @property
    def trainer_folder(self) -> Path:
        """What the trainers hold."""
        return self.folder / "trainer"

    @property
    def in_flight_folder(self) -> Path:
        """Samples that the update to come has not learned from (`cluster.run`)."""
        return self.folder / "in_flight"

    @property
    def head_folder(self) -> Path:
        """The draft head as it was published last, where one drafts: trained tensors and its vocabulary."""
        return self.folder / "head"


def last_state(run_dir: RunDir, note: Callable[[str], None]) -> RunState | None:
    """The newest state that is whole, None where there is none; `note` is told of damaged ones."""
    for folder in state_folders(run_dir.checkpoints_folder):
        try:
            return read_state(folder)
        except ModelError as error:
            note(f"{folder.name} is passed over: {error}")
    return None


def read_state(folder: Path) -> RunState:
    """Read one state and compare every file with its manifest. Raises ModelError: damaged, or of another version."""
    verify_checkpoint(folder)
    try:
        tree: dict[str, Any] = json.loads((folder / "state.json").read_text())
        version = tree.pop("schema_version", None)
        if version not in (WITHOUT_UNSCORED, SCHEMA_VERSION):
            raise ValueError(f"expected schema version {SCHEMA_VERSION} at most, got {version}")
        marks = tree.pop("evaluations", {})
        _require_keys(RunState, tree, {"folder", "evaluations"})
        _require_keys(EvaluationMarks, marks, set())
        numbers = tree["num_iterations"], tree["weight_version"]
        if any(type(number) is not int for number in numbers):
            raise ValueError(f"expected numbers of iterations and of the weights' version, got {numbers}")
        if numbers[0] != state_number(folder):
            raise ValueError(f"it is of {numbers[0]} iterations, its folder's name of others")
        return RunState(folder=folder, evaluations=EvaluationMarks(**marks), **tree)
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise ModelError(
            f"state {folder} cannot be read: {error}; it is of another version of this project: resume with that one"
        ) from error


def _require_keys(kind: type[RunState] | type[EvaluationMarks], tree: Any, beside: set[str]) -> None:
    """Raise ValueError where a tree has not the keys that this version writes, but for those `beside`."""
    if not isinstance(tree, dict):
        raise ValueError(f"expected an object of JSON, got {type(tree).__name__}")
    known = {one.name for one in fields(kind)} - beside
    needed = {
        one.name for one in fields(kind) if one.default is MISSING and one.default_factory is MISSING
    } - beside
    if strange := sorted(tree.keys() - known):
        raise ValueError(f"this version does not know its keys {', '.join(map(str, strange))}")
    if missing := sorted(needed - tree.keys()):
        raise ValueError(f"it lacks {', '.join(missing)}")
