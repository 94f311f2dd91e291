"""The reward stage as a Ray Serve deployment: replicas that batch what many runs send, scaled by their load.

`rlhfspec serve reward` runs it; `serve run` takes `rlhfspec.actors.reward_server.reward_deployment:build`.
"""

# no `annotations` from the future: FastAPI reads them in replicas, where this module's names are not at hand
import asyncio
import time
from collections.abc import Sequence
from datetime import datetime
from typing import Any, Self

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from ray import serve

from ...core.config import RewardConfig
from ...core.errors import ConfigError
from ...core.named_code import import_from_too
from ...core.records import Prompt, ResponseFacts, Reward, Unscored
from ...learning.rewards.reward_function import build_reward
from ...learning.rewards.score_request import ScoreRequest, score_requests
from ..remote.assigned_device import reward_device
from ..remote.loopback import spare_loopback
from .score_schema import ScoreAnswer, ScoreBody, from_body, to_answer

_STUCK_S = 600.0
"A batch that takes so long, beside what its functions may take, is stuck: Serve replaces the replica."
_MAX_ONGOING_REQUESTS = 64
"Of one replica; each is a batch of one run."

http = FastAPI(title="rlhfspec rewards", description="POST /score: rewards of responses, in their order.")


@http.exception_handler(RequestValidationError)
async def wrong_body(_: Request, error: RequestValidationError) -> JSONResponse:
    """What is wrong where, without the input: it may be long, and Infinity is no JSON."""
    faults = [{key: fault[key] for key in ("type", "loc", "msg")} for fault in error.errors()]
    return JSONResponse({"detail": faults}, status_code=422)


class ServerArguments(BaseModel):
    """What `build` takes: of `serve run` as KEY=VALUE, of a Serve config file under `args`."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    "a sequence-classification model; short for reward: {kind: model, model: ...}"
    reward: dict[str, Any] = {}
    "a section `reward` of a run's config, without shaping, which is the run's"
    min_replicas: int = Field(default=1, ge=0)
    max_replicas: int = Field(default=1, ge=1)
    target_ongoing_requests: float = Field(default=2.0, gt=0.0)
    "of one replica: more, and another is started"
    upscale_delay_s: float = Field(default=10.0, ge=0.0)
    downscale_delay_s: float = Field(default=120.0, ge=0.0)
    num_cpus: float = Field(default=1.0, ge=0.0)
    num_gpus: float = Field(default=0.0, ge=0.0)
    batch_wait_s: float = Field(default=0.005, ge=0.0)
    "how long a batch that is not full waits for samples of other requests"
    import_dir: str | None = None
    "a folder that reward functions may be imported from"

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_replicas > self.max_replicas:
            raise ValueError(
                f"min_replicas {self.min_replicas} is above max_replicas {self.max_replicas}; swap them"
            )
        return self

    def reward_config(self) -> RewardConfig:
        """The reward that is served. Raises ConfigError."""
        section = self.reward | ({"kind": "model", "model": self.model} if self.model is not None else {})
        try:
            config = RewardConfig.model_validate(section)
        except ValidationError as error:
            raise ConfigError(f"the served reward: {_faults(error)}") from None
        if config.shaping.is_on:
            raise ConfigError("reward.shaping belongs to the config of the run; take it out of the server's")
        if any(scorer.kind == "serve" for scorer in config.scorers):
            raise ConfigError("a reward server cannot ask another one; name what it serves itself")
        if any(scorer.scope == "group" for scorer in config.scorers):
            raise ConfigError("a reward server scores samples one by one; take reward.scope: group out")
        # samples of all who ask are mixed: nobody's group is whole
        alone = {"scope": "sample"}
        parts = [part.model_copy(update=alone if ":" in part.kind else {}) for part in config.parts]
        # one bad sample is no fault of the others in its batch; the run decides what it comes to
        own = {"on_error": "skip", "parts": tuple(parts)} | (alone if ":" in config.kind else {})
        return config.model_copy(update=own)


def build(args: dict[str, Any]) -> serve.Application:
    """The application of one reward server. Raises ConfigError for arguments that say nothing usable."""
    try:
        arguments = ServerArguments.model_validate(args)
    except ValidationError as error:
        raise ConfigError(f"arguments of the reward server: {_faults(error)}") from None
    scaling: dict[str, Any] = {"num_replicas": arguments.max_replicas}
    if arguments.min_replicas < arguments.max_replicas:
        look_s = max(1.0, min(10.0, arguments.upscale_delay_s))
        scaling = {
            "autoscaling_config": {
                "min_replicas": arguments.min_replicas,
                "max_replicas": arguments.max_replicas,
                "target_ongoing_requests": arguments.target_ongoing_requests,
                "upscale_delay_s": arguments.upscale_delay_s,
                "downscale_delay_s": arguments.downscale_delay_s,
                # Ray wants more than one look in a period
                "metrics_interval_s": look_s / 2,
                "look_back_period_s": look_s,
            }
        }
    deployment: Any = serve.deployment(RewardServer)
    return deployment.options(
        name="RewardServer",
        ray_actor_options={"num_cpus": arguments.num_cpus, "num_gpus": arguments.num_gpus},
        max_ongoing_requests=_MAX_ONGOING_REQUESTS,
        health_check_period_s=10.0,
        health_check_timeout_s=30.0,
        **scaling,
    ).bind(arguments.reward_config().model_dump(mode="json"), arguments.batch_wait_s, arguments.import_dir)


def _faults(error: ValidationError) -> str:
    """Every fault with its key, separated by bars."""
    return " | ".join(
        ": ".join(filter(None, (".".join(map(str, item["loc"])), item["msg"]))) for item in error.errors()
    )


@serve.ingress(http)
class RewardServer:
    """One replica: scores what arrives, in batches that mix the samples of all who ask."""

    def __init__(self, reward: dict[str, Any], batch_wait_s: float, import_dir: str | None) -> None:
        """Build the reward. Raises what building it raises, which `serve status` shows."""
        spare_loopback()
        import_from_too(import_dir)
        config = RewardConfig.model_validate(reward)
        self._stage = build_reward(config, device=reward_device(), fields=None)
        self._stuck_s = _STUCK_S + config.batch_size * config.timeout_s
        self._began_s: float | None = None
        batch: Any = self._score_batch
        batch.set_max_batch_size(config.batch_size)
        batch.set_batch_wait_timeout_s(batch_wait_s)

    @http.post("/score")
    async def score_body(self, body: ScoreBody) -> ScoreAnswer:
        """Score the samples of one request."""
        return to_answer(await self._score_all(from_body(body)))

    async def score(
        self,
        prompts: Sequence[Prompt],
        responses: Sequence[str],
        facts: Sequence[ResponseFacts] | None = None,
        template_time: datetime | None = None,
    ) -> list[Reward | Unscored]:
        """The same by handle."""
        return await self._score_all(score_requests(prompts, responses, facts, template_time))

    async def check_health(self) -> None:
        """Raise when the batch at work has been there far too long."""
        began_s = self._began_s
        if began_s is not None and time.monotonic() - began_s > self._stuck_s:
            raise RuntimeError(f"a batch of rewards has taken more than {self._stuck_s:.0f} s")

    async def _score_all(self, requests: Sequence[ScoreRequest]) -> list[Reward | Unscored]:
        score_one: Any = self._score_batch
        return list(await asyncio.gather(*(score_one(request) for request in requests)))

    @serve.batch
    async def _score_batch(self, requests: list[ScoreRequest]) -> list[Reward | Unscored]:
        self._began_s = time.monotonic()
        try:
            # on a thread: requests and health checks are answered meanwhile
            return await asyncio.to_thread(self._stage.outcomes, requests)
        finally:
            self._began_s = None
