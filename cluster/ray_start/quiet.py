"""Keeps libraries from drawing over our own bars and from waiting at full speed, here and in the actors.

torch, transformers, the hub client, `datasets` and Ray read these variables when they are imported. The command line
imports none of them before `quiet_libraries`; actors get the variables with their runtime environment.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings

_DEFAULTS = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    # of libraries that ask none of these, such as transformers' reader of GGUF
    "TQDM_DISABLE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    # Ray prints these in the driver whatever it is told; the loop says the same in its own words
    "RAY_DEDUP_LOGS_SKIP_REGEX": "A worker died or was killed|Raylet is terminated|marked dead because the detector",
    # of a thread that waits for its team; by default milliseconds, taken from whoever else has work for the core.
    # 1000 made a step of two threads with both cores to themselves 1.17 times as long, 3000 1.04
    "GOMP_SPINCOUNT": "3000",
}
"What the caller's environment says goes first."


def quiet_environment() -> dict[str, str]:
    """Variables that switch bars and chatter off and let threads sleep, unless the caller set them otherwise."""
    return {name: os.environ.get(name, value) for name, value in _DEFAULTS.items()}


def quiet_libraries() -> None:
    """Silence libraries in this process, imported or not."""
    os.environ.update(quiet_environment())
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    # in a notebook both ask for widgets, and nothing here would draw them
    logging.getLogger("ray.widgets.util").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", "IProgress not found")
    # Imported before (a notebook, a test): its switch has been read already. Never imported for this alone.
    imported = sys.modules.get("transformers.utils.logging")
    if imported is not None and os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] == "1":
        imported.disable_progress_bar()
