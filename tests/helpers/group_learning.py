"""What each process of a group of trainers does in the tests: learn, save, go on, break down."""

import math
import os
from pathlib import Path

import torch
from tiny_llama import tiny_llama
from torch.distributed.fsdp import FSDPModule
from trainer_group import trainers_of
from transformers import LlamaForCausalLM

from rlhfspec.core.config import AlgorithmConfig, DrafterTrainingConfig, TrainerConfig
from rlhfspec.core.errors import NotFiniteError, PeerLost
from rlhfspec.core.settings.trainer import LoraConfig
from rlhfspec.learning.drafts.cotraining import DraftCotrainer
from rlhfspec.learning.drafts.draft_learner import DraftTerms
from rlhfspec.learning.drafts.soft_targets import SoftTargetStore
from rlhfspec.learning.training.learner import Learner
from rlhfspec.learning.training.training_forward import hold_linears_in

CASES = {
    "ppo": ("ppo", None),
    "grpo": ("grpo", None),
    "lora": ("grpo", LoraConfig(rank=4)),
    "untied": ("grpo", None),
    "taught": ("distill", None),
    "moving": ("grpo", None),
}
MOVING = {"moving": {"sync_ref_model": True, "ref_model_sync_steps": 3, "ref_model_mixup_alpha": 0.5}}
CORRECTED = {"untied": {"weight": "sequence", "mask": "token", "mask_high": 1.1}}
"Corrections against the sampler, whose samples grow older with each update."
STRATEGIES = ("ddp", "fsdp2")
RUNS = [(strategy, case) for strategy in STRATEGIES for case in CASES]
COTRAINED = "grpo"
"The case in which a draft model learns with the target."
UPDATES, SAVED_AFTER = 3, 2


def tied_model() -> LlamaForCausalLM:
    """Tied embeddings: one storage under two names, in the root of the shards."""
    return tiny_llama(tie_word_embeddings=True)


def new_learner(case, trainers=None) -> Learner:
    kind, lora = CASES[case]
    learner = Learner(
        tied_model() if case != "untied" else tiny_llama(),
        algorithm=AlgorithmConfig(kind=kind, correction=CORRECTED.get(case, {}), **MOVING.get(case, {})),
        # minibatches of five rows and four, in packs of a few: shares of unlike numbers of packs
        trainer=TrainerConfig(
            learning_rate=1e-3, minibatch_size=5, epochs=2, max_tokens_per_forward=24, lora=lora
        ),
        temperature=1.0,
        seed=5,
        pad_token_id=0,
        observers=[SoftTargetStore(3)],
        trainers=trainers,
    )
    if case == "taught":
        learner.take_teacher(tiny_llama(4, hidden_size=24))
    if case == COTRAINED:
        terms = DraftTerms(settings=DrafterTrainingConfig(learning_rate=1e-3), temperature=1.0, vocab_size=19)
        learner.observers.append(DraftCotrainer(tiny_llama(2), terms, trainers=trainers))
    return learner


def cotrainers(learner: Learner) -> list[DraftCotrainer]:
    """The draft model that learns beside the target, if one does."""
    return [one for one in learner.observers if isinstance(one, DraftCotrainer)]


def outcome(learner):
    """Weights and what else is to be equal, as a process can send it."""
    weights = {name: tensor.clone().numpy() for name, tensor in learner.weights()}
    for draft in cotrainers(learner):
        weights |= {f"draft {name}": tensor.clone().numpy() for name, tensor in draft.weights()}
    (store,) = [one for one in learner.observers if isinstance(one, SoftTargetStore)]
    return weights, {index: one.logprobs.numpy() for index, one in store.kept.items()}


def learn(learner, rollouts, save_as=None):
    """All updates; the outcome and the last figures."""
    for update in range(learner.weight_version, UPDATES):
        if save_as is not None and update == SAVED_AFTER:
            learner.save(save_as)
            for draft in cotrainers(learner):
                draft.save(save_as / "draft")
        report = learner.update(rollouts, recompute_old=learner.algorithm.correction.compares)
    report.metrics.pop("draft/cotrain_s", None)
    return *outcome(learner), report.metrics


def resume(learner, folder: Path):
    """What `learn` saved, loaded."""
    learner.load(folder)
    for draft in cotrainers(learner):
        draft.load(folder / "draft")
    return learner


def learn_in_group(rank, rollouts, folder: Path):
    """Every run from the start, saved on the way."""
    return {
        (strategy, case): learn(
            new_learner(case, trainers_of(strategy)), rollouts, folder / f"{strategy}-{case}"
        )
        for strategy, case in RUNS
    }


def go_on_in_group(rank, rollouts, folder: Path):
    """Every run, gone on with from what one trainer saved in `folder`."""
    return {
        (strategy, case): learn(resume(new_learner(case, trainers_of(strategy)), folder / case), rollouts)
        for strategy, case in RUNS
    }


def learn_over_bfloat16(rank, rollouts):
    """One update of float32 adapters over bfloat16 linears, each way; and the types in each sharded group."""
    weights = {}
    groups = {}
    for strategy in STRATEGIES:
        # of weights that bfloat16 holds, as a model in it has: others would stay float32
        model = tiny_llama().bfloat16().float()
        hold_linears_in(model, torch.bfloat16)
        learner = Learner(
            model,
            algorithm=AlgorithmConfig(kind="grpo", kl_coef=0.1),
            trainer=TrainerConfig(learning_rate=1e-2, max_tokens_per_forward=24, lora=LoraConfig(rank=4)),
            temperature=1.0,
            seed=5,
            pad_token_id=0,
            compute_dtype=torch.bfloat16,
            trainers=trainers_of(strategy),
        )
        assert math.isfinite(learner.update(rollouts).metrics["grad_norm"])
        weights[strategy] = {name: tensor.float().clone().numpy() for name, tensor in learner.weights()}
        owners = [path for path, module in model.named_modules() if isinstance(module, FSDPModule)]
        for name, parameter in model.named_parameters():
            if owners:
                owner = max((path for path in owners if name.startswith(path)), key=len)
                groups.setdefault(owner, set()).add(str(parameter.dtype))
    return weights, groups


def break_down(rank, rollouts):
    """One trainer's optimizer makes its weights infinite; then it dies while the other waits for it."""
    trainers = trainers_of("ddp")
    learner = new_learner("grpo", trainers)
    if rank == 1:
        for parameter in learner.model.parameters():
            parameter.data.mul_(float("inf"))
    try:
        learner.update(rollouts)
    except NotFiniteError as error:
        said = str(error)
    trainers.gather(None)
    if rank == 1:
        os._exit(9)
    try:
        trainers.gather(None)
    except PeerLost as error:
        return said, str(error)
