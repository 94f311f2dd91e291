"""The learner's update beside a bare loop over the same tokens, what scoring by the engine costs, bfloat16 products.

The bare loop is what any trainer must compute: for the same minibatches a library forward and backward over the same
packed tokens, a forward of the reference, and the same AdamW step. Responses are sampled once, by the engine. Products
in bfloat16 (`trainer.compute_dtype`) are timed, and compared with float32's, where the processor has instructions. Of
the real model also what samples that begin alike save: beside the same tokens with another first one in each sample.
"""

from __future__ import annotations

import copy
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ..cluster.plan.memory_plan import MIB
from ..core.config import (
    AlgorithmConfig,
    EngineConfig,
    SpeculationConfig,
    TrainerConfig,
)
from ..core.records import Rollout
from ..engine.decoding.logprobs import token_logprobs
from ..engine.model.linears import has_bfloat16
from ..learning.training.engine_scoring import EngineScorer
from ..learning.training.experience import collate
from ..learning.training.learner import Learner
from ..learning.training.objectives.losses import clipped_policy_loss
from ..learning.training.policy_forward import PolicyForward
from ..learning.training.training_forward import prepare_for_training, response_logits
from .support.harness import Bench
from .support.processes import begin_peak, peak_bytes
from .support.timing import Rate, interleaved, ratios
from .support.workload import (
    Workload,
    alternating_rollouts,
    demo_workload,
    grouped_requests,
    real_workload,
)

ROUNDS = {"quick": 2, "default": 4, "full": 8}
ROUNDS_REAL = {"quick": 1, "default": 2, "full": 4}
NUM_SAMPLES = {"quick": 32, "default": 64, "full": 64}
NUM_SAMPLES_REAL = {"quick": 8, "default": 32, "full": 64}
MAX_NEW_TOKENS_REAL = 32
ENGINE = EngineConfig(device="cpu", max_running_samples=16, probe=False)
ALGORITHM = AlgorithmConfig(kind="grpo", kl_coef=0.01, report_entropy=False)
TRAINER = TrainerConfig(learning_rate=1e-6, minibatch_size=16, max_tokens_per_forward=768, num_threads=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Groups whose samples begin alike."""

    num_prompts: int
    samples: int
    "of each prompt"
    new_tokens: int
    prompt_tokens: int | None = None
    "None: prompts as they are"


SHAPES = {
    "groups": Shape(num_prompts=4, samples=8, new_tokens=128),
    "long": Shape(num_prompts=1, samples=8, new_tokens=128, prompt_tokens=1000),
}
SHAPES_QUICK = {
    "groups": Shape(num_prompts=2, samples=4, new_tokens=32),
    "long": Shape(num_prompts=1, samples=4, new_tokens=32, prompt_tokens=1000),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One batch of rollouts, and what a learner is told about them."""

    workload: Workload
    rollouts: Sequence[Rollout]


def learner_of(
    workload: Workload,
    scoring: str,
    compute_dtype: torch.dtype = torch.float32,
    *,
    algorithm: AlgorithmConfig = ALGORITHM,
    **trainer: Any,
) -> Learner:
    """Return a fresh learner of the workload's target; `engine` scores by an engine of it, `model` by itself."""
    scorer = None
    if scoring == "engine":
        scorer = EngineScorer(
            workload.target("float32"),
            engine=ENGINE,
            max_total_tokens=workload.max_total_tokens,
            vocab_size=workload.vocab_size,
            temperature=1.0,
        )
    return Learner(
        workload.target("float32"),
        algorithm=algorithm,
        trainer=TrainerConfig.model_validate(TRAINER.model_dump() | {"scoring": scoring} | trainer),
        temperature=1.0,
        pad_token_id=workload.pad_token_id,
        vocab_size=workload.vocab_size,
        scorer=scorer,
        compute_dtype=compute_dtype,
        seed=0,
    )


def run(bench: Bench) -> int:
    """Write OUT/update.json, of the real model OUT/update_real.json; returns 0."""
    mode, data, real = bench.mode, bench.data, bench.is_real
    figures, size = bench.figures, (NUM_SAMPLES_REAL if real else NUM_SAMPLES)[mode]
    rounds = (ROUNDS_REAL if real else ROUNDS)[mode]
    if real:
        workload = real_workload(
            size // 2, data=data, max_new_tokens=MAX_NEW_TOKENS_REAL, console=bench.console
        )
        if workload is None:
            return 0
        for name, shape in (SHAPES_QUICK if bench.is_quick else SHAPES).items():
            figures.values |= shared(workload, shape, name)
    else:
        workload = demo_workload(size // 2)
    suffix = "real" if real else "demo"
    batch = sample(workload)
    reports: list[dict[str, float]] = []
    contestants = {
        "bare": bare_loop(batch),
        "model": updates(learner_of(workload, "model"), batch),
        "engine": updates(learner_of(workload, "engine"), batch, reports),
    }
    if has_bfloat16():
        learner = learner_of(workload, "model", torch.bfloat16)
        # as a run has it: its log-probabilities are not the sampler's, so ratios are over its own
        contestants["bfloat16"] = updates(learner, batch, recompute_old=True)
        contestants["bfloat16_sampler"] = updates(learner, batch)
    taken = interleaved(contestants, rounds)
    figures.keep(f"update_over_bare_{suffix}", ratios(taken, "bare", "model"))
    figures.keep(f"scoring_engine_cost_{suffix}", ratios(taken, "model", "engine"))
    if "bfloat16" in taken:
        for name in ("bfloat16", "bfloat16_sampler"):
            figures.keep(f"{name}_over_float32_{suffix}", ratios(taken, name, "model"))
        figures.values |= {f"{name}_{suffix}": value for name, value in bfloat16_errors(batch).items()}
    figures.values[f"bit_equal_share_{suffix}"] = reports[0]["mismatch/bit_equal_share"]
    figures.values[f"first_ratio_{suffix}"] = reports[0]["ratio_at_first_minibatch"]
    for name, rates in taken.items():
        figures.values[f"{name}_tokens_per_s_{suffix}"] = statistics.median(rates)
    bench.write(rounds=rounds, num_samples=len(batch.rollouts), num_tokens=_num_tokens(batch))
    return 0


def sample(workload: Workload) -> Batch:
    """Two responses a prompt with drafts from the text; rewards alternate, so every sample has a gradient."""
    drafts = SpeculationConfig(policy="fixed", drafter="suffix", num_nodes=2)
    engine = workload.engine(drafts, **ENGINE.model_dump())
    requests = grouped_requests(workload)
    return Batch(workload=workload, rollouts=alternating_rollouts(requests, engine.generate(requests)))


def shared(workload: Workload, shape: Shape, name: str, **trainer: Any) -> dict[str, float]:
    """One update of the shape's samples beside one of the same that share nothing: processor seconds, peak memory."""
    batch = sample_shape(workload, shape)
    # a learner of before would count
    gc.collect()
    apart = [
        # no two begin alike, and all are as long
        replace(one, prompt=replace(one.prompt, token_ids=np.append(1000 + index, one.prompt.token_ids[1:])))
        for index, one in enumerate(batch)
    ]
    settings: dict[str, Any] = {"max_tokens_per_forward": TrainerConfig().max_tokens_per_forward} | trainer
    learner, figures = learner_of(workload, "model", **settings), {}
    for what, rollouts in (("shared", batch), ("apart", apart)):
        begin_peak()
        began_s = time.process_time()
        cost = learner.update(rollouts).cost
        figures[f"{name}_{what}_seconds"] = time.process_time() - began_s
        figures[f"{name}_{what}_peak_mib"] = peak_bytes() / MIB
        figures[f"{name}_{what}_tokens"] = cost["num_tokens"]
    for what in ("seconds", "peak_mib"):
        ratio = figures[f"{name}_apart_{what}"] / figures[f"{name}_shared_{what}"]
        figures[f"{name}_{what}_shared_over_apart"] = ratio
    return figures


def sample_shape(workload: Workload, shape: Shape) -> list[Rollout]:
    """Responses of equal length to groups of prompts; a prompt of a given length is made of several."""
    prompts = list(workload.prompts[: shape.num_prompts])
    if shape.prompt_tokens is not None:
        ids = np.concatenate([prompt.token_ids for prompt in workload.prompts])
        prompts = [replace(prompts[0], token_ids=np.resize(ids, shape.prompt_tokens))]
    sampling = replace(workload.sampling, max_new_tokens=shape.new_tokens, stop_token_ids=())
    shaped = replace(workload, prompts=prompts, sampling=sampling)
    requests = grouped_requests(shaped, samples=shape.samples)
    return alternating_rollouts(requests, shaped.engine(**ENGINE.model_dump()).generate(requests))


def updates(
    learner: Learner,
    batch: Batch,
    reports: list[dict[str, float]] | None = None,
    *,
    recompute_old: bool = False,
) -> Rate:
    """Whole updates of a learner, whose figures are kept; tokens per second of processor time."""

    def work() -> None:
        figures = learner.update(batch.rollouts, recompute_old=recompute_old).metrics
        if reports is not None:
            reports.append(figures)

    return _rate(work, batch)


def bare_loop(batch: Batch) -> Rate:
    """Library forward and backward over the same packs, the reference's forward, and AdamW."""
    model = batch.workload.target("float32")
    prepare_for_training(model, gradient_checkpointing=False)
    reference = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=TRAINER.learning_rate, betas=(0.9, 0.95))
    vocab_size = batch.workload.vocab_size
    forward = PolicyForward(
        vocab_size=vocab_size,
        temperature=1.0,
        max_tokens=TRAINER.max_tokens_per_forward,
        compute_dtype=torch.float32,
    )

    def work() -> None:
        experience = collate(batch.rollouts, pad_token_id=batch.workload.pad_token_id)
        order = torch.randperm(len(experience.lengths), generator=torch.Generator().manual_seed(0)).tolist()
        with torch.no_grad():
            for pack in forward.packs(range(len(order)), experience):
                packed = experience.packed(pack.rows)
                logits, _ = response_logits(reference, packed, vocab_size)
                token_logprobs(logits, packed.targets, 1.0)
        for start in range(0, len(order), TRAINER.minibatch_size):
            for pack in forward.packs(sorted(order[start : start + TRAINER.minibatch_size]), experience):
                packed = experience.packed(pack.rows)
                logits, _ = response_logits(model, packed, vocab_size)
                logprobs = token_logprobs(logits, packed.targets, 1.0)
                old = experience.old_logprobs[pack.rows][experience.mask[pack.rows]]
                clipped_policy_loss(
                    logprobs - old, torch.ones_like(old), clip_low=0.2, clip_high=0.2
                ).loss.mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), TRAINER.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return _rate(work, batch)


def bfloat16_errors(batch: Batch) -> dict[str, float]:
    """How far products in bfloat16 are from float32's, of the first minibatch, in one policy gradient.

    Of the loss the relative error; of the log-probabilities, in nats, the mean and the largest distance.
    """
    experience = collate(batch.rollouts, pad_token_id=batch.workload.pad_token_id)
    rows = list(range(min(TRAINER.minibatch_size, len(experience.lengths))))
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        model = batch.workload.target("float32")
        prepare_for_training(model, gradient_checkpointing=False)
        forward = PolicyForward(
            vocab_size=batch.workload.vocab_size,
            temperature=1.0,
            max_tokens=TRAINER.max_tokens_per_forward,
            compute_dtype=dtype,
        )
        losses, logprobs = [], []
        for pack in forward.packs(rows, experience):
            flat = forward.statistics(model, experience.packed(pack.rows), entropy=False).logprobs
            weights = (experience.rewards[pack.rows, None] - 0.5).expand(-1, experience.mask.shape[1])
            loss = -(weights[experience.mask[pack.rows]] * flat).sum()
            loss.backward()
            losses.append(float(loss.detach()))
            logprobs.append(flat.detach())
        gradient = torch.cat([one.grad.flatten() for one in model.parameters() if one.grad is not None])
        found.append((sum(losses), gradient.double(), torch.cat(logprobs)))
    (loss, gradient, logprobs), (rounded, of_rounded, near) = found
    distance = (near - logprobs).abs()
    return {
        "bfloat16_loss_error": abs(rounded - loss) / abs(loss),
        "bfloat16_gradient_cosine": float(torch.nn.functional.cosine_similarity(gradient, of_rounded, dim=0)),
        "bfloat16_logprob_mean_error": float(distance.mean()),
        "bfloat16_logprob_max_error": float(distance.max()),
    }


def _rate(work: Callable[[], Any], batch: Batch) -> Rate:
    num_tokens = _num_tokens(batch)

    def rate() -> float:
        began_s = time.process_time()  # other processes do not count
        work()
        return num_tokens / (time.process_time() - began_s)

    return rate


def _num_tokens(batch: Batch) -> int:
    return sum(len(one.prompt.token_ids) + one.completion.num_tokens for one in batch.rollouts)
