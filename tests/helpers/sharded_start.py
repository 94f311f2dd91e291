"""What each of several sharded trainers does in the test of how they start: as before, and from the meta device."""

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from trainer_group import trainers_of

from rlhfspec.core.config import AlgorithmConfig, TrainerConfig
from rlhfspec.core.settings.trainer import LoraConfig
from rlhfspec.engine.weights.chunks import load_into, weight_views
from rlhfspec.engine.weights.loading import build_causal_lm
from rlhfspec.learning.training.learner import Learner
from rlhfspec.learning.training.sharded import fill_later
from rlhfspec.learning.training.training_forward import hold_linears_in

STARTS = {
    # algorithm, adapters, what products are computed in
    "with a reference": ("grpo", None, torch.float32),
    "taught": ("distill", None, torch.float32),
    "adapters": ("grpo", LoraConfig(rank=4), torch.bfloat16),
}


class HostBytes(TorchDispatchMode):
    """The most bytes at once of what is made inside, on the host; small tensors are left out."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._there: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        before = {one.untyped_storage()._cdata for one in tree_leaves((args, kwargs)) if torch.is_tensor(one)}
        result = func(*args, **(kwargs or {}))
        for one in tree_leaves(result):
            # a DTensor says that it has the whole
            is_plain = torch.is_tensor(one) and not isinstance(one, DTensor)
            if is_plain and one.device.type == "cpu" and one.nbytes > 4096:
                storage = one.untyped_storage()
                if storage._cdata not in before | self._there.keys():
                    self._there[storage._cdata] = StorageWeakRef(storage)
                    self.most = max(self.most, self._now())
        return result

    def _now(self) -> int:
        self._there = {key: one for key, one in self._there.items() if not one.expired()}
        # gathered weights are given back by making their storage empty
        return sum(
            torch.UntypedStorage._new_with_weak_ptr(one.cdata).nbytes() for one in self._there.values()
        )


def start(case, trainers, manifest, chunks, *, from_meta):
    """A learner of published weights, as a trainer actor makes it."""
    kind, lora, dtype = STARTS[case]

    def built():
        model = build_causal_lm(manifest.hf_config_json, "float32", on_meta=from_meta)
        (fill_later if from_meta else load_into)(model, weight_views(manifest, chunks))
        return model

    model = built()
    if lora is not None:
        hold_linears_in(model, dtype)
    learner = Learner(
        model,
        algorithm=AlgorithmConfig(kind=kind, kl_coef=0.0 if kind == "distill" else 0.1),
        trainer=TrainerConfig(learning_rate=1e-2, max_tokens_per_forward=24, lora=lora),
        temperature=1.0,
        seed=5,
        pad_token_id=0,
        compute_dtype=dtype,
        trainers=trainers,
    )
    if kind == "distill":
        learner.take_teacher(built())
    return learner


def start_both_ways(rank, rollouts, manifest, chunks):
    """By case and way: the most bytes of the start, the weights after it, and after an update."""
    found = {}
    for case in STARTS:
        for from_meta in (False, True):
            trainers = trainers_of("fsdp2")
            with HostBytes() as host:
                learner = start(case, trainers, manifest, chunks, from_meta=from_meta)
            held = sum(one.nbytes for _, one in trainers.held(learner.model))
            before = [tensor.clone().numpy() for _, tensor in learner.weights()]
            learner.update(rollouts)
            after = [tensor.clone().numpy() for _, tensor in learner.weights()]
            found[case, from_meta] = (host.most, held, before, after)
    return found
