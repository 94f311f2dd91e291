"""`rlhfspec.Engine`: a model that answers in this process, without Ray, with the tokens of `rlhfspec serve engine`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..cluster.jobs.engine_server import plan_server
from ..cluster.plan.drafts import what_drafts
from ..cluster.serving.api_error import ApiError
from ..cluster.serving.engine_requests import RequestReader, usual_sampling
from ..cluster.serving.request_bodies import ChatBody, CompletionBody, read_body
from ..core.errors import ConfigError
from ..core.surfaces.surface import note_once
from ..engine.build import build_engine
from ..engine.model.invariance_probe import KeptVerdicts
from ..engine.numerics import on_threads
from ..engine.weights.loading import load_causal_lm, num_token_ids
from ..learning.data.chat.chat_format import plain_note
from ..learning.data.chat.end_tokens import stop_strings
from ..learning.data.chat.written_text import response_text
from .trainer_classes import PathLike, as_set, reporter
from .trl_names import name_of_model

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"Text, token ids, or a conversation of {role, content}."
_SAMPLING = frozenset(("temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "ignore_eos"))

_CALLED = {
    "max_new_tokens": "here max_tokens",
    "num_return_sequences": "here n",
    "do_sample": "here temperature=0",
}


@dataclass(frozen=True)
class Response:
    """One response; `logprobs` are its tokens' at the temperature, before top-k and top-p."""

    text: str
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str


class Engine:
    """One engine with its weights; `args` are keys of a config, such as {"models.draft": ..., "engine.num_threads": 2}.

    Raises InputError as `rlhfspec serve engine`: no such model, a context that it has not.
    """

    def __init__(
        self, model: PathLike, args: Mapping[str, Any] | None = None, *, max_total_tokens: int | None = None
    ) -> None:
        """`max_total_tokens`: of prompt and response together; None: 2048, or the model's context where it is less."""
        with reporter() as report:
            plan = plan_server(
                {},
                report,
                model=name_of_model(model, "model"),
                context_tokens=max_total_tokens,
                overrides=as_set(args or {}),
                by="rlhfspec.Engine",
            )
        config, tokenizer, drafts = plan.config, plan.inputs.tokenizer, what_drafts(plan.config)
        models = config.models
        self._tokenizer, self._num_threads = tokenizer, config.engine.num_threads
        self._reader = RequestReader(
            tokenizer,
            model=models.target,
            served_name="",
            max_total_tokens=plan.inputs.max_total_tokens,
            usual=usual_sampling(models.target),
        )
        with on_threads(self._num_threads):
            self._engine = build_engine(
                load_causal_lm(models.target, models.dtype, trust_remote_code=models.trust_remote_code),
                None if drafts is None else drafts.read(),
                engine=config.engine,
                speculation=config.speculation,
                max_total_tokens=plan.inputs.max_total_tokens,
                vocab_size=num_token_ids(tokenizer),
                verdicts=KeptVerdicts(Path(config.run.cache_dir).expanduser() / "probes"),
            )

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        n: int = 1,
        seed: int = 0,
        max_tokens: int = 256,
        **sampling: Any,
    ) -> list[list[Response]]:
        """`n` responses to each prompt, by [prompt][number]; the same seed gives the same tokens, alone or in company.

        `prompts` may be one; seed -1 is drawn, and told nowhere. `sampling`: temperature, top_p, top_k, min_p, stop,
        stop_token_ids, ignore_eos as in request bodies, by default as the model's generation_config.json says.

        Raises ConfigError: a key or value that is refused, a prompt too long.
        """
        places: dict[str, list[int]] = {}
        given: list[Any] = [prompts] if isinstance(prompts, str) else [*prompts]
        if given and isinstance(given[0], Mapping | int):
            given = [given]
        for place, prompt in enumerate(given):
            places.setdefault(json.dumps(prompt), []).append(place)
        if unread := sampling.keys() - _SAMPLING:
            named = [f"{name} ({_CALLED.get(name, 'not known')})" for name in sorted(unread)]
            raise ConfigError(
                f"generate does not read {', '.join(named)}; it reads n, seed, max_tokens, "
                f"{', '.join(sorted(_SAMPLING))}"
            )
        requests = []
        for prompt, equal in places.items():
            is_chat = prompt.startswith("[{")
            body = {"n": n * len(equal), "seed": seed, "max_tokens": max_tokens, **sampling}
            body["messages" if is_chat else "prompt"] = json.loads(prompt)
            try:
                read = read_body(json.dumps(body).encode(), ChatBody if is_chat else CompletionBody)
                found = self._reader.read(read).requests
            except ApiError as error:
                raise ConfigError(str(error)) from None
            requests += found
            if prompt.startswith('"') and (plain := plain_note(self._tokenizer, found[0].prompt.token_ids)):
                note_once(plain)
        if sampling.get("stop"):
            self._engine.stop_strings = stop_strings(self._tokenizer)
        with torch.no_grad(), on_threads(self._num_threads):
            done = iter(self._engine.generate(requests))
        answers = {
            place: [self._response(next(done)) for _ in range(n)]
            for equal in places.values()
            for place in equal
        }
        return [answers[place] for place in sorted(answers)]

    def _response(self, one: Any) -> Response:
        text = response_text(self._tokenizer, one)
        return Response(text, one.token_ids.tolist(), one.policy_logprobs.tolist(), str(one.finish_reason))
