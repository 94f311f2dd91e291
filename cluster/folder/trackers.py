"""Other trackers behind one protocol. One that fails is told once and left out from then on: it is not worth a run."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ...core.config_io import read_tree
from ...core.errors import ConfigError, describe_error
from ...core.files import write_whole
from ...core.settings.tracking import TrackingConfig, WandbConfig
from .layout import RunDir
from .sample_table import SampleRow, as_markdown

Chosen = Sequence[tuple[str, SampleRow]]


class Tracker(Protocol):
    """One tool. `step` is the number of finished iterations: 0 for what the first weights gave."""

    name: str

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
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
            makers["TensorBoard"] = lambda: TensorBoardTracker(
                run_dir.path / "tensorboard", num_done=num_done
            )
        if (wandb := tracking.wandb) is not None:
            makers["Weights & Biases"] = lambda: WandbTracker(
                wandb, run_dir.path, read_tree(run_dir.config_file)
            )
        return cls(makers, note)

    def __bool__(self) -> bool:
        return bool(self._trackers)

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hand scalars on."""
        self._each("take figures", lambda tracker: tracker.log_metrics(step, metrics))

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


class TensorBoardTracker:
    """Scalars, histograms, and samples as text."""

    name = "TensorBoard"

    def __init__(self, folder: Path, *, num_done: int = 0) -> None:
        """Steps after `num_done` are taken again. Raises ImportError without the package `tensorboard`."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=num_done + 1 if num_done else None)

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take scalars."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def histograms(self, step: int, values: Mapping[str, Sequence[float]]) -> None:
        """Take raw values by name."""
        for name, those in values.items():
            self._writer.add_histogram(f"histogram/{name}", np.asarray(those), step)

    def samples(self, step: int, chosen: Chosen) -> None:
        """Take samples that people read."""
        self._writer.add_text("samples", as_markdown(f"After iteration {step}", chosen), step)

    def close(self) -> None:
        """Write out what is held."""
        self._writer.close()


_ID_FILE = "rlhfspec-run-id.txt"
_COLUMNS = (
    "why",
    "sample_index",
    "prompt",
    "response",
    "reference",
    "reward",
    "parts",
    "advantage",
    "finish_reason",
    "tokens",
)


class WandbTracker:
    """Scalars, histograms and sample tables of one run, which is called like its folder."""

    name = "Weights & Biases"

    def __init__(self, settings: WandbConfig, folder: Path, config: Mapping[str, Any]) -> None:
        """Raises ImportError without the package, and what the library raises where it cannot begin."""
        # by name: type checkers need not have it
        self._wandb: Any = importlib.import_module("wandb")
        # a run that goes on is the same run there; steps that it has are not taken twice
        kept = folder / "wandb" / _ID_FILE
        self._run = self._wandb.init(
            id=kept.read_text() if kept.is_file() else None,
            resume="allow",
            project=settings.project,
            entity=settings.entity,
            mode=settings.mode,
            name=folder.name,
            dir=str(folder),
            config=dict(config),
            settings=self._wandb.Settings(console="off", silent=True),
        )
        kept.parent.mkdir(exist_ok=True)
        write_whole(kept, self._run.id)

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take scalars."""
        self._run.log(dict(metrics), step=step)

    def histograms(self, step: int, values: Mapping[str, Sequence[float]]) -> None:
        """Take raw values by name."""
        self._run.log(
            {f"histogram/{name}": self._wandb.Histogram(list(those)) for name, those in values.items()},
            step=step,
        )

    def samples(self, step: int, chosen: Chosen) -> None:
        """Take samples that people read."""
        table = self._wandb.Table(columns=list(_COLUMNS))
        for why, row in chosen:
            parts = ", ".join(f"{name} {value:.4g}" for name, value in row.parts.items())
            table.add_data(
                why,
                row.sample_index,
                row.prompt,
                row.response,
                row.reference,
                row.reward,
                parts,
                row.advantage,
                row.finish_reason,
                row.num_tokens,
            )
        self._run.log({"samples": table}, step=step)

    def close(self) -> None:
        """Hand over what is held; `wandb sync` does the rest of an offline run."""
        self._run.finish()
