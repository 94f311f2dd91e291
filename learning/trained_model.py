"""A model that learns, as others take it: its weights, adapters merged, and the adapter's files."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing

from torch import Tensor, nn
from transformers import PreTrainedModel

from core.errors import RlhfSpecError
from learning.adapter import Adapter
from learning.parallel.one_trainer import OneTrainer


class TrainedModel:
    """What a learner from rollouts and one from given items have in common."""

    model: PreTrainedModel
    trainers: OneTrainer
    adapter: Adapter | None

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

    def _learned(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]
