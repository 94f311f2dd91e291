"""A rank that follows: it makes what the leader has, and computes its share of each forward as the orders say."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch

from ..model.llama_model import LlamaModel
from ..model.runner import ModelRunner
from ..model.sent_plans import as_planned
from ..model.support import not_held
from ..numerics import choose_backend
from ..weights.causal_lm import DTYPES
from ..weights.llama_config import LlamaConfig
from .ranks import EndedEarly, GroupError, GroupRanks
from .split_answers import Wanted, split_answers


class Follower:
    """Model and forward of one rank. Used by one thread, whose number of torch threads is one."""

    def __init__(self, ranks: GroupRanks) -> None:
        self._ranks = ranks
        self._model: LlamaModel | None = None
        self._runner: ModelRunner | None = None

    def follow(self) -> None:
        """Carry out orders until the leader says stop. Raises GroupError: it is gone, or sent what is unknown."""
        torch.set_num_threads(1)
        while True:
            kind, what = self._ranks.next_order()
            if kind == "stop":
                self._ranks.close()
                return
            self._carry_out(kind, what)

    def _carry_out(self, kind: str, what: dict[str, Any]) -> None:
        if kind == "model":
            self._runner, config = None, LlamaConfig.of(what["hf_config_json"])
            self._model = LlamaModel(
                config,
                DTYPES[what["dtype"]],
                choose_backend(torch.device("cpu")),
                ranks=self._ranks,
                vocab_size=what["vocab_size"],
            )
        elif kind == "load" and self._model is not None:
            self._load(what["names"])
        elif kind == "runner" and self._model is not None:
            self._runner = ModelRunner(
                self._model, backend=self._model.backend, cells=self._ranks.given(), **what["sizes"]
            )
        elif self._runner is not None:
            self._forward(self._runner, kind, what)
        else:
            raise GroupError(f"the leader of a group asked for '{kind}' before there was a model")

    def _load(self, names: list[str]) -> None:
        assert self._model is not None
        # a version that the leader cannot load is one that nobody decodes from: the next one may be whole
        with suppress(EndedEarly):
            if self._runner is not None:
                self._runner.load_parts(names, self._ranks.buckets())
            elif (altered := self._model.load(names, self._ranks.buckets())) is not None:
                raise not_held(f"weights of rank {self._ranks.share.rank}", altered)

    def _forward(self, runner: ModelRunner, kind: str, what: dict[str, Any]) -> None:
        ids, positions = torch.from_numpy(what["ids"]), torch.from_numpy(what["positions"])
        plan = as_planned(what["plan"], runner.pool, runner.attention)
        if kind == "fill":
            runner.fill(ids, positions, plan)
        elif kind == "logits":
            runner.logits(ids, positions, plan)
        elif kind == "answers":
            with torch.inference_mode():
                split_answers(runner, ids, positions, plan, Wanted(**what["wanted"]))
        else:
            raise GroupError(f"the leader of a group asked for '{kind}', which this version does not know")
