"""What training takes: memory of LoRA beside all weights, planned and measured; and whether bfloat16 learns as float32.

python -m benchmarks.training BATCH FOLDER CASE     two updates of one batch, prints the process's peak in bytes
"""

from __future__ import annotations

import importlib
import pickle
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

from benchmarks.support.harness import Bench
from benchmarks.support.processes import measured_in_a_process, peak_bytes
from benchmarks.support.timing import Figures
from benchmarks.support.workload import Workload, demo_workload, job, real_workload
from benchmarks.update import ALGORITHM, MAX_NEW_TOKENS_REAL, TRAINER, Batch, learner_of, sample
from rlhfspec.cluster.plan.memory_plan import MemoryNeeds, ModelShape, ModelShapes
from rlhfspec.cluster.plan.model_files import model_shape
from rlhfspec.core.config import Config, TrainerConfig
from rlhfspec.core.records import Rollout
from rlhfspec.engine.weights.chunks import WeightPacker
from rlhfspec.engine.weights.loading import load_causal_lm, load_hf_config, meta_model
from rlhfspec.learning.trainer.adapter import count_adapter_params

CASES = ("full", "lora", "full_checkpointed", "lora_checkpointed")
"All weights learn, or adapters; every layer's activations are kept, or one's (`trainer.gradient_checkpointing`)."
UPDATES = {"quick": 8, "default": 200, "full": 200}
BATCHES = {"quick": 2, "default": 10, "full": 40}
BATCH_PROMPTS = 8
MEMORY_PROMPTS = 8
LEARNING_RATE = 1e-6


def run(*, out: Path, mode: str, data: Path | None, real: bool = False) -> int:
    """Write OUT/training.json, with `real` OUT/training_real.json; returns 0."""
    bench = Bench("training_real" if real else "training", out=out, mode=mode, data=data if real else None)
    if real:
        workload = real_workload(
            MEMORY_PROMPTS, data=data, max_new_tokens=MAX_NEW_TOKENS_REAL, console=bench.console
        )
        if workload is None:
            return 0
    else:
        workload = demo_workload(MEMORY_PROMPTS)
    suffix = "real" if real else "demo"
    _memory(workload, bench.figures, suffix)
    if not real:
        _precision(demo_workload(BATCH_PROMPTS * BATCHES[mode]), UPDATES[mode], bench.figures)
    bench.write(num_updates=0 if real else UPDATES[mode], learning_rate=LEARNING_RATE)
    return 0


def _memory(workload: Workload, figures: Figures, suffix: str) -> None:
    """Peak of a trainer's process, LoRA's share of it, and what `rlhfspec check` plans for both."""
    folder = workload.paths.target
    with tempfile.NamedTemporaryFile(suffix=".pickle") as file:
        Path(file.name).write_bytes(pickle.dumps(sample(workload)))
        for case in CASES:
            with job(f"training {suffix}, {case}"):
                measured = measured_in_a_process(
                    "training", "benchmarks.training", [file.name, str(folder), case]
                )
            planned = _planned_bytes(folder, case, workload.max_total_tokens)
            figures.values[f"{case}_measured_bytes_{suffix}"] = float(measured)
            figures.values[f"{case}_planned_bytes_{suffix}"] = float(planned)
            figures.values[f"{case}_plan_over_peak_{suffix}"] = planned / measured
    measured = {case: figures.values[f"{case}_measured_bytes_{suffix}"] for case in CASES}
    figures.values[f"lora_memory_share_{suffix}"] = measured["lora"] / measured["full"]
    share = measured["lora_checkpointed"] / measured["full_checkpointed"]
    figures.values[f"lora_memory_share_checkpointed_{suffix}"] = share


def _trainer(case: str) -> TrainerConfig:
    changes: dict[str, object] = {"scoring": "model", "gradient_checkpointing": case.endswith("checkpointed")}
    if case.startswith("lora"):
        changes |= {"lora": {}, "learning_rate": 1e-4}
    return TrainerConfig.model_validate(TRAINER.model_dump() | changes)


def _planned_bytes(folder: Path, case: str, max_total_tokens: int) -> int:
    config = Config.model_validate(
        {
            "models": {"target": str(folder), "draft": None},
            "data": {"task": "chain"},
            "sampling": {"max_new_tokens": 32},
            "rollout": {"samples_per_prompt": 2},
            "algorithm": ALGORITHM.model_dump(),
            "trainer": _trainer(case).model_dump(),
            "speculation": {"policy": "off", "drafter": "none"},
        }
    )
    shape = model_shape(load_hf_config(str(folder)))
    shapes = ModelShapes(target=_with_adapters(shape, folder) if case.startswith("lora") else shape)
    needs = MemoryNeeds(config, shapes, max_total_tokens=max_total_tokens)
    return needs.plan(object_store_bytes=0).trainer_bytes


def _with_adapters(shape: ModelShape, folder: Path) -> ModelShape:
    settings = _trainer("lora").lora
    assert settings is not None
    model = meta_model(str(folder), load_hf_config(str(folder)))
    return replace(shape, num_adapter_params=count_adapter_params(model, settings))


def _train(rollouts: Path, folder: str, case: str) -> None:
    """What a trainer actor does: two updates, each packed for publication, a bucket at a time."""
    torch.set_num_threads(1)
    importlib.import_module("ray")  # a trainer actor has it loaded
    batch: Batch = pickle.loads(rollouts.read_bytes())
    learner = learner_of(batch.workload, _trainer(case), model=load_causal_lm(folder, "float32"))
    for version in (1, 2):
        learner.update(batch.rollouts)
        packer = WeightPacker(name="target", weight_version=version, hf_config_json="{}", rooms=1)
        for _ in packer.chunks(learner.weights()):
            pass
    print(peak_bytes())


def _precision(workload: Workload, updates: int, figures: Figures) -> None:
    """The loss of many small steps: published bfloat16, computed in it, beside float32; another seed is the noise.

    The seed draws the minibatches. `bf16_change` compares how far, and whereto, the weights went.
    """
    batches = _batches(workload)
    trainer = TrainerConfig.model_validate(
        TRAINER.model_dump() | {"scoring": "model", "learning_rate": LEARNING_RATE, "minibatch_size": 4}
    )
    losses: dict[str, list[float]] = {}
    changes: dict[str, torch.Tensor] = {}
    cases = {
        "float32": (torch.float32, 0),
        "other_seed": (torch.float32, 1),
        "bf16": (torch.bfloat16, 0),
    }
    for name, (dtype, seed) in cases.items():
        # all start where a bfloat16 checkpoint starts
        model = workload.target("bfloat16").float()
        learner = learner_of(workload, trainer, model=model, compute_dtype=dtype, seed=seed)
        before = _flat(model)
        with job(f"{updates} updates, {name}"):
            losses[name] = [
                learner.update(batches[number % len(batches)]).figures["policy_loss"]
                for number in range(updates)
            ]
        changes[name] = _flat(model) - before
    curves = {name: torch.tensor(losses[name]) for name in cases}
    noise = (curves["other_seed"] - curves["float32"]).abs()
    differs = (curves["bf16"] - curves["float32"]).abs()
    figures.values["bf16_loss_difference"] = float(differs.mean())
    figures.values["loss_noise"] = float(noise.mean())
    figures.values["bf16_difference_over_noise"] = float(differs.mean() / noise.mean())
    figures.values["bf16_mean_loss_offset"] = statistics.fmean(losses["bf16"]) - statistics.fmean(
        losses["float32"]
    )
    for name in ("bf16", "other_seed"):
        ours, other = changes[name], changes["float32"]
        figures.values[f"{name}_change_cosine"] = float(torch.cosine_similarity(ours, other, dim=0))
        figures.values[f"{name}_change_over_float32"] = float(ours.norm() / other.norm())


def _batches(workload: Workload) -> list[list[Rollout]]:
    """Rollouts of the first weights, some prompts a batch."""
    rollouts = list(sample(workload).rollouts)
    size = len(rollouts) * BATCH_PROMPTS // len(workload.prompts)
    return [rollouts[start : start + size] for start in range(0, len(rollouts), size)]


def _flat(model: PreTrainedModel) -> torch.Tensor:
    return torch.cat([one.detach().reshape(-1) for one in model.parameters()])


if __name__ == "__main__":
    _train(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
