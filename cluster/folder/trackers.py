"""Other trackers behind one protocol. One that fails is told once and left out from then on: it is not worth a run."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from rlhfspec.cluster.folder.layout import RunDir
from rlhfspec.cluster.folder.sample_table import SampleRow
from rlhfspec.core.config_io import read_tree
from rlhfspec.core.errors import ConfigError, describe_error
from rlhfspec.core.settings.tracking import TrackingConfig, WandbConfig

Chosen = Sequence[tuple[str, SampleRow]]


class Tracker(Protocol):
    """One tool. `step` is the number of finished iterations: 0 for what the first weights gave."""

    name: str

    def figures(self, step: int, figures: Mapping[str, float]) -> None:
        """Take scalars."""
        ...

    def histograms(self, step: int, values: Mapping[str, Sequence[float]]) -> None:
        """Take raw values by name."""
        ...

    def samples(self, step: int, chosen: Chosen) -> None:
        """Take samples that people read."""
        ...

    def close(self) -> None:
        """Write out what is held."""
        ...


def require_trackers(tracking: TrackingConfig) -> None:
    """Raise ConfigError where a tracker is asked for whose library is not installed."""
    for wanted, package, key in (
        (tracking.tensorboard, "tensorboard", "tracking.tensorboard"),
        (tracking.wandb is not None, "wandb", "tracking.wandb"),
    ):
        if wanted and importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"{key} is set, but the package {package} is not installed; expected it here: pip install "
                f"'rlhfspec[{package}]' (or pip install {package}), or take {key} out; metrics.jsonl is written anyway"
            )


class Trackers:
    """Those that a run asked for, made when first needed."""

    def __init__(self, makers: Mapping[str, Callable[[], Tracker]], note: Callable[[str], None]) -> None:
        self._note = note
        self._trackers: list[Tracker] = []
        for name, make in makers.items():
            self._guarded(name, "start", lambda make=make: self._trackers.append(make()))

    @classmethod
    def of(
        cls, tracking: TrackingConfig, run_dir: RunDir, note: Callable[[str], None], *, num_done: int = 0
    ) -> Trackers:
        """Start the trackers of a run, or of one that goes on after so many iterations: later steps are told anew."""
        makers: dict[str, Callable[[], Tracker]] = {}
        if tracking.tensorboard:
            makers["TensorBoard"] = lambda: _tensorboard(run_dir, num_done)
        if (wandb := tracking.wandb) is not None:
            makers["Weights & Biases"] = lambda: _wandb(wandb, run_dir)
        return cls(makers, note)

    def __bool__(self) -> bool:
        return bool(self._trackers)

    def figures(self, step: int, figures: Mapping[str, float]) -> None:
        """Hand scalars on."""
        self._each("take figures", lambda tracker: tracker.figures(step, figures))

    def histograms(self, step: int, values: Mapping[str, Sequence[float]]) -> None:
        """Hand raw values on."""
        self._each("take histograms", lambda tracker: tracker.histograms(step, values))

    def samples(self, step: int, chosen: Chosen) -> None:
        """Hand samples on."""
        self._each("take samples", lambda tracker: tracker.samples(step, chosen))

    def close(self) -> None:
        """End all of them."""
        self._each("close", lambda tracker: tracker.close())
        self._trackers = []

    def _each(self, what: str, call: Callable[[Tracker], None]) -> None:
        for tracker in list(self._trackers):
            if not self._guarded(tracker.name, what, lambda tracker=tracker: call(tracker)):
                self._trackers.remove(tracker)

    def _guarded(self, name: str, what: str, call: Callable[[], None]) -> bool:
        try:
            call()
        except Exception as error:
            self._note(
                f"{name} could not {what} and is left out from here on; the run and metrics.jsonl go on: "
                f"{describe_error(error)}"
            )
            return False
        return True


def _tensorboard(run_dir: RunDir, num_done: int) -> Tracker:
    from rlhfspec.cluster.folder.tensorboard_tracker import TensorBoardTracker

    return TensorBoardTracker(run_dir.path / "tensorboard", num_done=num_done)


def _wandb(settings: WandbConfig, run_dir: RunDir) -> Tracker:
    from rlhfspec.cluster.folder.wandb_tracker import WandbTracker

    return WandbTracker(settings, run_dir.path, read_tree(run_dir.config_file))
