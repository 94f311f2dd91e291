"""One model that learns, from whatever: its optimizer, schedule, adapters and state; alone, or as one of several.

Equal items give equal parameters on the CPU, by any number of trainers up to the order of additions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from ...core.config import TrainerConfig
from ...core.errors import ConfigError, NotFiniteError, RlhfSpecError
from ...core.settings.supervised import SupervisedTrainerConfig
from ...engine.weights.causal_lm import PreTrainedModel
from .adapter import Adapter, quantise_below_adapters, require_bitsandbytes
from .batching import Pack
from .laps import Laps
from .learner_state import LearnerState
from .parallel import OneTrainer
from .reloaded import Said, said_by
from .sharded import copy_of
from .training_forward import hold_linears_in, require_master_weights, use_fused_rows


@runtime_checkable
class Batch(Protocol):
    """What one optimizer step learns from under an objective: policy, next tokens, preferences, distillation."""

    @property
    def packs(self) -> Sequence[Pack]:
        """Its rows that this trainer computes; as many packs as any other trainer has."""
        ...

    def loss(self, model: PreTrainedModel, pack: Pack) -> Tensor:
        """The pack's part of the loss: all packs of all trainers add up to it. A filler's has no gradient."""
        ...

    def problem(self, losses: Sequence[float]) -> str | None:
        """Why no step may be taken by the losses of all packs. Collective.

        What else it reads on the device is read here, where the host waits anyway: before the optimizer's step, which
        a GPU takes while the host gets the next packs together.
        """


class Trainer:
    """Holds a model, its optimizer and, where one is asked for, a frozen copy of what it was (the reference).

    With `lora` only adapters learn, and the reference is the model with them switched off.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        settings: TrainerConfig | SupervisedTrainerConfig,
        *,
        seed: int,
        rate_factor: Callable[[int], float],
        compute_dtype: torch.dtype = torch.float32,
        trainers: OneTrainer | None = None,
        head: str | None = None,
        has_reference: bool = False,
        moves_reference: bool = False,
        device: torch.device | None = None,
    ) -> None:
        """Take a model of float32 weights that is ready for its forwards, on the device it is to learn on.

        With shards it is on the CPU or the meta device (`sharded.fill_later`); with `trainer.lora.base_bits` it may be
        on the CPU, and moves to `device` in 4 bits.
        `rate_factor` says what the learning rate is multiplied by at the n-th step, from 1. `compute_dtype` is what
        matrix products are computed in. `trainers` is the group that learns together, each with an equal model and
        equal items. `head` names a module that learns whole beside adapters. A reference that is to move is held in
        float32.
        Raises ConfigError: weights that the optimizer cannot step; and as `Adapter`.
        """
        self.model, self.seed = model, seed
        self.trainers = trainers or OneTrainer()
        self.compute_dtype = compute_dtype
        self.weight_version = 0
        self.num_steps = 0
        "of the optimizer"
        self.lately: tuple[tuple[int, ...], ...] = ()
        "the beginnings of some sequences that were learned from last"
        self.learning_rate = settings.learning_rate
        "of the next steps, before the schedule's factor"
        self._settings, self._rate_factor = settings, rate_factor
        self.adapter: Adapter | None = None
        if settings.lora is not None:
            hold_linears_in(model, compute_dtype)
            if head is not None:
                model.get_submodule(head).float()
            self.adapter = Adapter(model, settings.lora, seed=seed, head=head)
            if settings.lora.base_bits is not None:
                quantise_below_adapters(model, compute_dtype, device)
        require_master_weights(model)
        self.reference: PreTrainedModel | None = None
        if has_reference and self.adapter is None:
            self.reference = copy_of(model).eval().requires_grad_(False)
            if not moves_reference:
                hold_linears_in(self.reference, compute_dtype)
        self.trainers.shard(model, self.reference)
        use_fused_rows(model, self.reference)
        self.laps = Laps(model.device)
        self.optimizer = optimizer_of(model, settings, head=head)
        every = self.adapter is None
        self._unmoved = {name: one for name, one in model.named_parameters() if every or one.requires_grad}
        self._reached: dict[str, Tensor] = {}
        self._num_watched = 0

    def learn(self, batch: Batch, when: str) -> float:
        """Take an optimizer step on a batch, unless its gradient is 0; the gradient's norm. Collective.

        Raises NotFiniteError where loss or gradient is not finite, with `when` or the batch's words, and takes no step.
        """
        losses: list[Tensor] = []
        for pack in batch.packs:
            loss = batch.loss(self.model, pack)
            losses.append(loss.detach())
            self.laps.lap("forward")
            backward(loss)
            self.laps.lap("backward")
        self.trainers.sum_gradients(self._learned())
        *read, norm = self._clip(losses)
        self.trainers.agree(batch.problem(read))
        self.laps.lap("checks")
        self._step(norm, when)
        self.laps.lap("optimizer")
        return norm

    def take_step(self, when: str) -> float:
        """Clip the gradients that are there and step by them; their norm before. Collective. See `learn`."""
        (norm,) = self._clip([])
        return self._step(norm, when)

    def _clip(self, losses: Sequence[Tensor]) -> list[float]:
        """Clip the gradients; the losses and the norm before, read at once: a read waits for a GPU."""
        norm = self.trainers.clip(self._learned(), self._settings.max_grad_norm)
        where = losses[0].device if losses else norm.device
        return torch.stack([*losses, norm.to(where)]).cpu().tolist()

    def _step(self, norm: float, when: str) -> float:
        """Not by a gradient that is 0, where momentum and decay alone would move the weights."""
        if not math.isfinite(norm):
            self.optimizer.zero_grad(set_to_none=True)
            raise NotFiniteError(
                f"the gradient norm {when} is {norm}; expected a finite number; lower trainer.learning_rate"
            )
        if norm > 0.0:
            self.num_steps += 1
            self._watch()
            for group in self.optimizer.param_groups:
                group["lr"] = self.rate_at(self.num_steps)
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def say(self) -> Said:
        """What it says, by its weights as they are, of some tokens that it learned from last. Collective."""
        return said_by(
            self.model,
            self.lately,
            compute_dtype=self.compute_dtype,
            keeps_casts=not self.trainers.is_sharded,
            weight_version=self.weight_version,
        )

    def weights(self) -> Generator[tuple[str, Tensor]]:
        """The model's weights to be published, in name order; adapters merged into them.

        Each is valid until the next is asked for. Collective: the other trainers `accompany_weights`; who stops early
        closes it, since they walk on.
        """
        with closing(self.trainers.tensors(self.model)) as tensors:
            yield from tensors if self.adapter is None else self.adapter.merged_tensors(tensors)

    def accompany_weights(self) -> None:
        """Take part while the first of several trainers walks through `weights`, or `adapter_files`. Collective."""
        if self.trainers.is_sharded:
            for _ in self.trainers.tensors(self.model):
                pass

    def adapter_files(self, *, base_model: str) -> dict[str, bytes]:
        """The LoRA adapter as a folder that peft loads: name and content of each file. Collective, as `weights`."""
        if self.adapter is None:
            raise RlhfSpecError("the trainer was asked for an adapter but trainer.lora is null")
        return self.adapter.files(self.trainers.tensors(self.model), base_model=base_model)

    def save(self, folder: Path) -> None:
        """Write everything an interrupted run needs to go on (`LearnerState`). Collective."""
        self._state().save(folder)

    def load(self, folder: Path) -> LearnerState:
        """Go on where `save` was called, with any number of trainers. Raises ConfigError when it does not fit."""
        state = self._state()
        state.load(folder)
        self.weight_version, self.seed = state.weight_version, state.seed
        self.num_steps = state.num_optimizer_steps
        return state

    def rate_at(self, step: int) -> float:
        """The learning rate of the n-th step, from 1."""
        return self.learning_rate * self._rate_factor(step)

    def unmoved(self) -> list[str]:
        """Tensors that ought to learn and had no gradient in any step here, or elsewhere. Collective.

        None before the second step: the first of LoRA's two matrices has none in the first.
        """
        if self._reached:
            for name, has in zip(
                self._reached, torch.stack([*self._reached.values()]).cpu().tolist(), strict=True
            ):
                if has:
                    del self._unmoved[name]
            self._reached.clear()
        own = self.trainers.gather(list(self._unmoved) if self._num_watched > 1 else [])
        return sorted(set(own[0]).intersection(*own))

    def _watch(self) -> None:
        """Take note, on the device, of what a gradient reached; what `unmoved` has read is not looked at again."""
        self._num_watched += 1
        for name, parameter in self._unmoved.items():
            gradient: Any = parameter.grad
            if gradient is not None:
                # of a shard this trainer's part
                has = getattr(gradient, "to_local", lambda own=gradient: own)().any()
                self._reached[name] = has | self._reached[name] if name in self._reached else has

    def _state(self) -> LearnerState:
        return LearnerState(
            model=self.model,
            optimizer=self.optimizer,
            reference=self.reference,
            critic=None,
            weight_version=self.weight_version,
            num_optimizer_steps=self.num_steps,
            seed=self.seed,
            trainers=self.trainers,
        )

    def _learned(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]


def backward(loss: Tensor) -> None:
    """Add a loss's gradients to the parameters', on CPUs in one order.

    Of rows that an indexing takes more than once (a shared prompt's last state, a token's experts) torch adds the
    gradients from threads that race, unless it is told otherwise.
    """
    if loss.device.type != "cpu":
        loss.backward()
        return
    before = torch.get_deterministic_debug_mode()
    fills: Any = torch.utils.deterministic
    filled, fills.fill_uninitialized_memory = fills.fill_uninitialized_memory, False
    torch.set_deterministic_debug_mode("warn")
    try:
        loss.backward()
    finally:
        torch.set_deterministic_debug_mode(before)
        fills.fill_uninitialized_memory = filled


@dataclass(slots=True)
class OneForward:
    """A batch of one forward, by one trainer."""

    compute: Callable[[PreTrainedModel], Tensor]
    "the loss"
    value: float = math.nan
    "of the loss, once `problem` has been asked"
    packs: Sequence[Pack] = (Pack(rows=[]),)

    def loss(self, model: PreTrainedModel, pack: Pack) -> Tensor:
        """See `Batch`."""
        return self.compute(model)

    def problem(self, losses: Sequence[float]) -> str | None:
        """See `Batch`."""
        self.value = losses[0]
        if math.isfinite(self.value):
            return None
        return f"the loss is {self.value}; expected a finite number; lower the learning rate"


def small_trainer(model: PreTrainedModel, *, learning_rate: float, warmup_steps: int = 50) -> Trainer:
    """A trainer of a model that is made or refit here: its rate rises linearly, and is then as it is set."""
    settings = SupervisedTrainerConfig(learning_rate=learning_rate, adam_betas=(0.9, 0.98), weight_decay=0.01)
    return Trainer(model, settings, seed=0, rate_factor=lambda step: min(1.0, step / warmup_steps))


class MuonAndAdamW(torch.optim.Optimizer):
    """Muon for some weights and AdamW for the others, as one optimizer with a group of each."""

    def __init__(self, muon: torch.optim.Muon, adamw: torch.optim.AdamW) -> None:
        """Take over what the two hold; `step` has them step it."""
        self._parts = (muon, adamw)
        super().__init__([*muon.param_groups, *adamw.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Let each step its weights."""
        for part, group in zip(self._parts, self.param_groups, strict=True):
            # a state that was loaded has put others in their place
            part.param_groups, part.state = [group], self.state
            part.step(closure)


def optimizer_of(
    model: PreTrainedModel, trainer: TrainerConfig | SupervisedTrainerConfig, *, head: str | None = None
) -> torch.optim.Optimizer:
    """The optimizer of the weights that learn; `head` names a module that learns whole beside adapters.

    Sources: Loshchilov and Hutter 2019, 'Decoupled weight decay'; Dettmers et al. 2022, '8-bit optimizers via
    block-wise quantization'; Jordan 2024, 'Muon', its steps as long as in Liu et al. 2025, section 2.2.
    Raises ConfigError: adamw_8bit without bitsandbytes, muon for experts in one tensor.
    """
    learned = {name: one for name, one in model.named_parameters() if one.requires_grad}
    given: dict[str, Any] = {"lr": trainer.learning_rate, "weight_decay": trainer.weight_decay}
    of_adam: dict[str, Any] = {"betas": trainer.adam_betas, "eps": trainer.adam_epsilon}
    if trainer.optim == "adamw_8bit":
        library = require_bitsandbytes("trainer.optim adamw_8bit", "take adamw").optim
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                # as transformers: a rare token's moments would round away
                keeping = library.GlobalOptimManager.get_instance().register_module_override
                keeping(module, "weight", {"optim_bits": 32})
        return library.AdamW8bit(learned.values(), **given, **of_adam)
    matrices: list[nn.Parameter] = []
    if trainer.optim == "muon":
        if stacked := [name for name, one in learned.items() if one.ndim > 2]:
            raise ConfigError(
                f"trainer.optim muon steps matrices, and {stacked[0]} has {learned[stacked[0]].ndim} dimensions "
                "(experts are stacked in it): take adamw"
            )
        tables = [one for one in model.modules() if isinstance(one, nn.Embedding)]
        ends = [one for one in (*tables, model.get_output_embeddings()) if one is not None]
        outside = {id(weight) for end in ends for weight in end.parameters()}
        inside = {name: one for name, one in learned.items() if one.ndim == 2 and id(one) not in outside}
        matrices = [one for name, one in inside.items() if head is None or head not in name.split(".")]
    of_muon = {id(one) for one in matrices}
    parameters = [one for one in learned.values() if id(one) not in of_muon]
    on_gpu = bool(learned) and all(one.device.type == "cuda" for one in learned.values())
    # one launch for all; None leaves a CPU's as it is
    fused = True if on_gpu else None
    if not matrices:
        return torch.optim.AdamW(parameters, fused=fused, **given, **of_adam)
    muon = torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw", **given)
    if not parameters:
        return muon
    return MuonAndAdamW(muon, torch.optim.AdamW(parameters, fused=fused, **given, **of_adam))
