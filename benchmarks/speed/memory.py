"""Peak memory of a generation process: what `rlhfspec check` plans for it, and what it takes.

python -m benchmarks.speed.memory FOLDER SLOTS TOKENS     decodes to the full context, prints its peak in bytes
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import torch

from benchmarks.support.processes import measured_in_a_process, peak_bytes
from benchmarks.support.timing import Figures, plain_engine
from benchmarks.support.workload import VOCAB_SIZE, model_p_folder, model_p_requests
from rlhfspec.cluster.plan.memory_plan import MemoryNeeds, ModelShapes
from rlhfspec.cluster.plan.model_files import model_shape
from rlhfspec.core.config import Config
from rlhfspec.engine.weights.loading import load_hf_config

SLOTS, TOKENS = 48, 640
NEW_TOKENS = 8


def memory(cache_dir: Path, figures: Figures) -> None:
    """Keep `memory_plan_relative_error`, `memory_planned_bytes` and `memory_measured_bytes` (model P, plain)."""
    folder = model_p_folder(cache_dir)
    planned = _planned_bytes(folder)
    measured = _measured_bytes(folder)
    figures.values["memory_planned_bytes"] = float(planned)
    figures.values["memory_measured_bytes"] = float(measured)
    figures.values["memory_plan_relative_error"] = abs(planned - measured) / measured


def _planned_bytes(folder: Path) -> int:
    config = Config.model_validate(
        {
            "models": {"target": str(folder), "draft": None},
            "data": {"task": "chain"},
            "engine": {"max_running_samples": SLOTS, "device": "cpu"},
            "speculation": {"policy": "off", "drafter": "none"},
        }
    )
    shapes = ModelShapes(target=model_shape(load_hf_config(str(folder))))
    return MemoryNeeds(config, shapes, max_total_tokens=TOKENS).plan(object_store_bytes=0).generation_bytes


def _measured_bytes(folder: Path) -> int:
    return measured_in_a_process("engine", "benchmarks.speed.memory", [str(folder), str(SLOTS), str(TOKENS)])


def _decode(folder: Path, slots: int, tokens: int) -> None:
    torch.set_num_threads(1)
    importlib.import_module("ray")  # a generation actor has it loaded
    engine = plain_engine(folder, "float32", batch_size=slots, max_total_tokens=tokens, vocab_size=VOCAB_SIZE)
    engine.generate(model_p_requests(slots, prompt_tokens=tokens - NEW_TOKENS, new_tokens=NEW_TOKENS))
    print(peak_bytes())


if __name__ == "__main__":
    _decode(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
