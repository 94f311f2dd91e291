"""Other trackers: a callable each. One that fails is told once and left out from then on: it is not worth a run."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ...core.config_io import read_tree
from ...core.errors import ConfigError, describe_error
from ...core.files import write_whole
from ...core.settings.tracking import TrackingConfig, WandbConfig
from .layout import RunDir
from .sample_table import SampleRow, as_markdown

Metrics = Mapping[str, float]
Histograms = Mapping[str, Sequence[float]]
Chosen = Sequence[tuple[str, SampleRow]]
Log = Callable[[int, Metrics, Histograms, Chosen], None]
"Takes scalars, raw values by name, and samples that people read, of a step: the number of finished iterations."
Tracker = Callable[[], AbstractContextManager[Log]]


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
    """Those that a run asked for, by their names."""

    def __init__(self, trackers: Mapping[str, Tracker], note: Callable[[str], None]) -> None:
        self._note = note
        self._open: dict[str, tuple[AbstractContextManager[Log], Log]] = {}
        for name, tracker in trackers.items():
            with self._leaving_out(name, "start"):
                entered = tracker()
                self._open[name] = (entered, entered.__enter__())

    @classmethod
    def of(
        cls, tracking: TrackingConfig, run_dir: RunDir, note: Callable[[str], None], *, num_done: int = 0
    ) -> Trackers:
        """Start the trackers of a run, or of one that goes on after so many iterations: later steps are told anew."""
        trackers: dict[str, Tracker] = {}
        if tracking.tensorboard:
            trackers["TensorBoard"] = lambda: _tensorboard(run_dir.path / "tensorboard", num_done)
        if (settings := tracking.wandb) is not None:
            trackers["Weights & Biases"] = lambda: _wandb(
                settings, run_dir.path, read_tree(run_dir.config_file)
            )
        return cls(trackers, note)

    def log(
        self,
        step: int,
        *,
        metrics: Metrics | None = None,
        histograms: Histograms | None = None,
        samples: Chosen = (),
    ) -> None:
        """Hand on what there is of a step, 0 for what the first weights gave."""
        for name, (_, log) in [*self._open.items()]:
            with self._leaving_out(name, f"take step {step}"):
                log(step, metrics or {}, histograms or {}, samples)

    def close(self) -> None:
        """End all of them."""
        for name, (entered, _) in [*self._open.items()]:
            with self._leaving_out(name, "close"):
                entered.__exit__(None, None, None)
        self._open.clear()

    @contextmanager
    def _leaving_out(self, name: str, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._open.pop(name, None)
            self._note(
                f"{name} could not {what} and is left out from here on; the run and metrics.jsonl go on: "
                f"{describe_error(error)}"
            )


@contextmanager
def _tensorboard(folder: Path, num_done: int) -> Iterator[Log]:
    """Steps after `num_done` are taken again. Raises ImportError without the package `tensorboard`."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder), purge_step=num_done + 1 if num_done else None)

    def log(step: int, metrics: Metrics, histograms: Histograms, samples: Chosen) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)
        for name, values in histograms.items():
            writer.add_histogram(f"histogram/{name}", np.asarray(values), step)
        if samples:
            writer.add_text("samples", as_markdown(f"After iteration {step}", samples), step)
        writer.flush()

    yield log
    writer.close()


@contextmanager
def _wandb(settings: WandbConfig, folder: Path, config: Mapping[str, Any]) -> Iterator[Log]:
    """One run, which is called like its folder. Raises ImportError without the package, and what the library raises."""
    # by name: type checkers need not have it
    wandb: Any = importlib.import_module("wandb")
    # a run that goes on is the same run there; steps that it has are not taken twice
    kept = folder / "wandb" / "rlhfspec-run-id.txt"
    run = wandb.init(
        id=kept.read_text() if kept.is_file() else None,
        resume="allow",
        project=settings.project,
        entity=settings.entity,
        mode=settings.mode,
        name=folder.name,
        dir=str(folder),
        config=dict(config),
        settings=wandb.Settings(console="off", silent=True),
    )
    kept.parent.mkdir(exist_ok=True)
    write_whole(kept, run.id)

    def log(step: int, metrics: Metrics, histograms: Histograms, samples: Chosen) -> None:
        made = {f"histogram/{name}": wandb.Histogram(list(values)) for name, values in histograms.items()}
        if samples:
            rows = [{"why": why} | row.columns for why, row in samples]
            made["samples"] = wandb.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
        run.log(dict(metrics) | made, step=step)

    yield log
    # `wandb sync` does the rest of an offline run
    run.finish()
