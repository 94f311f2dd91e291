"""The server of an engine pool as a Ray Serve deployment: OpenAI's endpoints, and vLLM's for trainers.

One replica owns the pool. Every answer that is none of a response is OpenAI's error object with a reason.
"""

# no `annotations` from the future: FastAPI reads them in replicas, where this module's names are not at hand
import asyncio
import hmac
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, get_args

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from ray import serve

from ...core.errors import InputError, ModelError, WeightsError, describe_error
from ...core.outside import user_path
from ..plan.run_plan import RunPlan
from ..ray_start.ray_session import RaySession
from .api_error import ApiError, refuse
from .engine_answers import AnswerWriter, event
from .engine_pool import EnginePool, PauseMode
from .engine_requests import Asked, RequestReader
from .request_bodies import (
    ChatBody,
    CompletionBody,
    read_body,
    read_object,
    require_known,
)
from .served_weights import LastPublished, forget_published, read_version
from .server_metrics import ServerMetrics
from .server_notes import ServerNotes

http = FastAPI(title="rlhfspec engine", openapi_url=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """What a server takes; more is refused with the limit in the reason."""

    max_open: int = 256
    "responses at once: running and waiting"
    max_body_bytes: int = 8 << 20
    token: str | None = None
    "that clients send as `Authorization: Bearer`; None: anybody may ask"
    usual: Mapping[str, Any] = field(default_factory=dict)
    "of sampling, where a body says nothing: `engine_requests.usual_sampling`"


@http.exception_handler(ApiError)
async def refused(_: Request, error: ApiError) -> JSONResponse:
    """A request that is refused, or to be sent again."""
    return JSONResponse(error.body(), status_code=error.status, headers=error.headers)


@http.exception_handler(404)
@http.exception_handler(405)
async def not_routed(request: Request, error: HTTPException) -> JSONResponse:
    """A path or a method that there is not."""
    return await refused(
        request, ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
    )


@http.exception_handler(Exception)
async def failed(request: Request, error: Exception) -> JSONResponse:
    """A fault of ours."""
    return await refused(request, ApiError(500, f"the server failed: {describe_error(error)}"))


def build(plan: RunPlan, session: RaySession, limits: ServerLimits, served_name: str) -> serve.Application:
    """The application of one engine server."""
    deployment: Any = serve.deployment(EngineServer)
    return deployment.options(
        name="EngineServer",
        ray_actor_options={"num_cpus": 0},
        # its own limit is told in its own words
        max_ongoing_requests=4 * limits.max_open + 100,
        health_check_period_s=5.0,
        health_check_timeout_s=60.0,
        graceful_shutdown_wait_loop_s=0.2,
        graceful_shutdown_timeout_s=10.0,
    ).bind(plan, session, limits, served_name)


@serve.ingress(http)
class EngineServer:
    """The one replica."""

    def __init__(self, plan: RunPlan, session: RaySession, limits: ServerLimits, served_name: str) -> None:
        """Bring the pool up. Raises what it cannot come up by."""
        self._plan, self._limits, self._served_name = plan, limits, served_name
        # a replica that is started again must not meet the names of the actors of the one before
        namespace = f"{session.namespace}-{secrets.token_hex(2)}"
        tell = ServerNotes(session.namespace).tell
        tell(
            f"starting {plan.config.cluster.generation.num_actors} instances of {served_name}: weights, probe"
        )
        self._pool = EnginePool(plan, replace(session, namespace=namespace, is_local=False), tell)
        self._tokenizer = plan.inputs.tokenizer
        self._reader = RequestReader(
            self._tokenizer,
            model=plan.config.models.target,
            served_name=served_name,
            max_total_tokens=plan.inputs.max_total_tokens,
            usual=limits.usual,
        )
        self._metrics = ServerMetrics()
        self._began = int(time.time())
        self._is_draining = False
        self._publishing = asyncio.Lock()
        self._server = session.namespace
        self._last_published = LastPublished.of(self._server)
        self._lost_weights = self._publish_again()

    def _publish_again(self) -> str | None:
        """Give a pool that takes the place of a lost one that one's weights; why it cannot."""
        if self._last_published is None:
            return None
        try:
            weights = self._last_published.read_again(self._plan.config.models, self._pool.target)
            self._pool.publish(weights).result()
        except (InputError, WeightsError, OSError) as error:
            return describe_error(error)
        return None

    async def check_health(self) -> None:
        """Raise when the pool has ended: Serve replaces the replica, and so the pool."""
        if self._pool.failure is not None:
            raise RuntimeError(f"the pool of instances has ended: {self._pool.failure}")

    async def drain(self, patience_s: float) -> None:
        """Take no further requests; end when those that are open are answered, after `patience_s` as retriable."""
        self._is_draining = True
        ends_s = time.monotonic() + patience_s
        while self._pool.num_open and not self._pool.is_paused and time.monotonic() < ends_s:
            await asyncio.sleep(0.05)
        await asyncio.to_thread(self._pool.stop)
        forget_published(self._server)

    @http.get("/health")
    async def health(self) -> Response:
        """200 while the pool generates."""
        self._require_up()
        return PlainTextResponse("")

    @http.get("/metrics")
    async def metrics(self, request: Request) -> Response:
        """Prometheus' text."""
        self._require_token(request)
        return PlainTextResponse(self._metrics.text(self._pool), media_type="text/plain; version=0.0.4")

    @http.get("/v1/models")
    async def models(self, request: Request) -> Response:
        """The one model, as a list."""
        self._require_token(request)
        return JSONResponse({"object": "list", "data": [self._card()]})

    @http.get("/v1/models/{name:path}")
    async def model(self, request: Request, name: str) -> Response:
        """The one model."""
        self._require_token(request)
        self._reader.require_served(name)
        return JSONResponse(self._card())

    def _card(self) -> dict[str, Any]:
        room = self._plan.inputs.max_total_tokens
        card = {"id": self._served_name, "object": "model", "created": self._began, "owned_by": "rlhfspec"}
        return card | {"max_model_len": room}

    @http.get("/server_info")
    async def server_info(self, request: Request) -> Response:
        """What trainers look up in vLLM's settings: log-probabilities are behind temperature, no NCCL, no adapters."""
        self._require_token(request)
        config, room = self._plan.config, self._plan.inputs.max_total_tokens
        model = {"model": self._served_name, "dtype": f"torch.{config.models.dtype}", "max_model_len": room}
        pool = {
            "tensor_parallel_size": config.cluster.generation.tensor_parallel,
            "data_parallel_size": self._pool.num_instances,
        }
        said = {
            "model_config": model | {"logprobs_mode": "processed_logprobs"},
            "parallel_config": pool,
            "weight_transfer_config": None,
            "lora_config": None,
        }
        return JSONResponse({"vllm_config": said})

    @http.post("/v1/completions")
    async def completions(self, request: Request) -> Response:
        """Responses to texts or token ids."""
        return await self._counted("completions", self._answer(request, CompletionBody))

    @http.post("/v1/chat/completions")
    async def chat_completions(self, request: Request) -> Response:
        """Responses to a conversation."""
        return await self._counted("chat/completions", self._answer(request, ChatBody))

    @http.get("/get_world_size")
    async def world_size(self, request: Request) -> Response:
        """The number of instances."""
        self._require_token(request)
        return JSONResponse({"world_size": self._pool.num_instances})

    @http.get("/is_paused")
    async def paused(self, request: Request) -> Response:
        """Whether requests wait for /resume."""
        self._require_token(request)
        return JSONResponse({"is_paused": self._pool.is_paused})

    @http.post("/pause")
    async def pause(self, request: Request) -> Response:
        """Let requests wait; `mode` says what becomes of those that run: abort, wait or keep."""
        self._require_token(request, "request.query.pause")
        mode: Any = request.query_params.get("mode", "abort")
        if mode not in get_args(PauseMode):
            raise refuse(f"mode must be one of {', '.join(get_args(PauseMode))}, got '{mode[:100]}'", "mode")
        await asyncio.wrap_future(self._pool.pause(mode))
        return JSONResponse({"status": "paused"})

    @http.post("/resume")
    async def resume(self, request: Request) -> Response:
        """Go on after /pause."""
        self._require_token(request)
        self._pool.resume()
        return JSONResponse({"status": "resumed"})

    @http.post("/reset_prefix_cache")
    async def reset_prefix_cache(self, request: Request) -> Response:
        """Nothing to do: no cache outlives its response."""
        self._require_token(request)
        return JSONResponse({"status": "ok"})

    @http.post("/init_weight_transfer_engine")
    async def init_weight_transfer(self, request: Request) -> Response:
        """Refused for NCCL; weights come by a path."""
        await self._object(request, "request.init_weights")
        return JSONResponse({"status": "ok"})

    @http.post("/start_weight_update")
    async def start_weight_update(self, request: Request) -> Response:
        """Nothing to do: a version is published whole by /update_weights."""
        await self._object(request, "request.weight_update")
        return JSONResponse({"status": "ok"})

    @http.post("/finish_weight_update")
    async def finish_weight_update(self, request: Request) -> Response:
        """As `start_weight_update`."""
        await self._object(request, "request.weight_update")
        return JSONResponse({"status": "ok", "weight_version": self._pool.weight_version})

    @http.post("/update_weights")
    async def update_weights(self, request: Request) -> Response:
        """Publish the weights at a path of this machine; answered when every instance decodes from them."""
        info = (await self._object(request, "request.update_weights")).get("update_info")
        require_known(info, "request.update_info", "update_info")
        path = info.get("path") if isinstance(info, dict) else None
        if not isinstance(path, str) or not path or "\0" in path:
            raise refuse(
                'update_info must be {"path": a folder or a safetensors file that the server can read}',
                "update_info",
            )
        # a client that leaves ends its request, and the next update would take the same number of version
        version = await asyncio.shield(self._publish(path))
        return JSONResponse({"status": "ok", "weight_version": version})

    async def _publish(self, path: str) -> int:
        async with self._publishing:
            version = 1 + (self._last_published.version if self._last_published else 0)
            read = partial(read_version, path, self._plan.config.models, self._pool.target, version=version)
            try:
                weights = await asyncio.to_thread(read)
            except (InputError, WeightsError, OSError) as error:
                raise refuse(describe_error(error), "update_info") from None
            try:
                await asyncio.wrap_future(self._pool.publish(weights))
            except ModelError as error:
                raise refuse(f"{describe_error(error)}; the weights before are kept", "update_info") from None
            self._last_published = LastPublished(
                path=str(user_path(path).absolute()), version=version, checksum=weights.manifest.checksum
            )
            self._last_published.keep(self._server)
            self._lost_weights = None
        return version

    def _require_token(self, request: Request, query: str = "request.query") -> None:
        """Look at the token first, then at the names of the query. Raises ApiError: 401, 400."""
        expected, given = self._limits.token, request.headers.get("authorization", "")
        if expected is not None and not hmac.compare_digest(given.encode(), f"Bearer {expected}".encode()):
            raise ApiError(
                401,
                "expected the header Authorization: Bearer TOKEN with this server's token",
                code="invalid_api_key",
            )
        require_known(dict(request.query_params), query, "the query")

    def _require_up(self) -> None:
        if self._is_draining or self._pool.failure is not None:
            why = "is stopping" if self._is_draining else "has lost its pool of instances and starts it again"
            raise ApiError(503, f"the server {why}; send the request again", code="unavailable")
        if self._lost_weights is not None and self._last_published is not None:
            raise ApiError(
                503,
                f"the server was started again and cannot read weight version {self._last_published.version}: "
                f"{self._lost_weights}; publish weights by /update_weights",
                code="unavailable",
            )

    async def _body(self, request: Request) -> bytes:
        """What was sent; the token is looked at first. Raises ApiError: 401, 413."""
        self._require_token(request)
        most, read = self._limits.max_body_bytes, bytearray()
        async for chunk in request.stream():
            read += chunk
            if len(read) > most:
                raise ApiError(413, f"the body may have {most} bytes, got more; send less in one request")
        return bytes(read)

    async def _object(self, request: Request, name: str) -> dict[str, Any]:
        return read_object(await self._body(request) or b"{}", name)

    async def _answer(self, request: Request, form: type[CompletionBody] | type[ChatBody]) -> Response:
        raw = await self._body(request)
        self._require_up()
        # a long text takes a while to tokenise
        asked = await asyncio.to_thread(lambda: self._reader.read(read_body(raw, form)))
        self._require_room(len(asked.requests))
        # without an await since there was room: nobody else can take it
        streams = asked.body.stream and not asked.body.comes_whole
        outcomes = self._pool.generate(asked.requests, streams=streams, num_top=asked.body.num_top)
        writer = AnswerWriter(asked, self._tokenizer, self._served_name)
        if asked.body.stream:
            return StreamingResponse(self._events(outcomes, writer), media_type="text/event-stream")
        # long responses with log-probabilities take a while, in which nobody else would be answered
        choices, in_thread = dict[int, Any](), asyncio.get_running_loop().run_in_executor
        async for place, completion, has_ended in outcomes:
            if has_ended:
                self._note_response(asked, place, completion)
                choices[place] = in_thread(None, writer.choice, place, completion)
        whole = writer.whole([await choices[place] for place in range(len(choices))])
        return Response(whole, media_type="application/json")

    def _require_room(self, count: int) -> None:
        most, has = self._limits.max_open, self._pool.num_open
        if count > most:
            raise refuse(
                f"a request may ask for {most} responses (prompts times n), got {count}; split it", "n"
            )
        if has + count > most:
            raise ApiError(
                429,
                f"{has} responses are open and {count} more were asked for, of {most} at once; send it again later",
                code="rate_limit_exceeded",
            )

    def _note_response(self, asked: Asked, place: int, completion: Any) -> None:
        self._metrics.note_response(len(asked.requests[place].prompt.token_ids), completion.num_tokens)

    async def _events(self, outcomes: AsyncGenerator[Any], writer: AnswerWriter) -> AsyncIterator[str]:
        try:
            # a client that leaves closes this, and so gives its responses up
            async with aclosing(outcomes):
                async for place, completion, has_ended in outcomes:
                    if has_ended:
                        self._note_response(writer.asked, place, completion)
                    for part in writer.parts(place, completion, is_last=has_ended):
                        yield part
        except ApiError as error:
            # the status is gone: clients of OpenAI raise what they find in an event
            yield event(error.body())
            return
        for part in writer.end():
            yield part

    async def _counted(self, route: str, answer: Any) -> Response:
        began_s = time.perf_counter()
        status = 500
        try:
            response = await answer
            status = response.status_code
            return response
        except ApiError as error:
            status = error.status
            raise
        except asyncio.CancelledError:
            status = 499  # the client left, as nginx counts it
            raise
        finally:
            self._metrics.note_request(route, status, time.perf_counter() - began_s)
