"""A server of a tiny pair on the test session's Ray, and the engine that its answers must equal."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
import requests
from ray import serve
from ray.util import list_named_actors

from rlhfspec.cluster.jobs.engine_server import plan_server
from rlhfspec.cluster.observe.console import Reporter
from rlhfspec.cluster.plan.run_plan import RunPlan
from rlhfspec.cluster.ray_start.ray_init import free_ports
from rlhfspec.cluster.ray_start.ray_session import RaySession
from rlhfspec.cluster.serving.engine_deployment import ServerLimits, build
from rlhfspec.cluster.serving.engine_requests import RequestReader
from rlhfspec.cluster.serving.request_bodies import ChatBody, CompletionBody, read_body
from rlhfspec.cluster.serving.served_weights import forget_published
from rlhfspec.core.config import EngineConfig, SpeculationConfig
from rlhfspec.core.records import Completion
from rlhfspec.engine.build import build_engine
from rlhfspec.engine.weights.loading import load_causal_lm
from rlhfspec.learning.data.chat.end_tokens import stop_strings

TOKEN = "a-secret"
NAMESPACE = "test-serve-engine"
TIMEOUT_S = 300.0


@dataclass(frozen=True, kw_only=True)
class ServedEngine:
    """A server that is up."""

    url: str
    plan: RunPlan
    reader: RequestReader

    def post(self, path: str, body: Any, *, token: str | None = TOKEN, **options: Any) -> requests.Response:
        """Send a body: an object as JSON, bytes as they are."""
        sent = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        options = {"timeout": TIMEOUT_S} | options
        return requests.post(f"{self.url}{path}", data=sent, headers=headers, **options)

    def get(self, path: str) -> requests.Response:
        """Ask for a page."""
        return requests.get(
            f"{self.url}{path}", headers={"Authorization": f"Bearer {TOKEN}"}, timeout=TIMEOUT_S
        )

    def generate(self, body: dict[str, Any], *, chat: bool = False) -> dict[str, Any]:
        """The whole answer to a body."""
        answer = self.post("/v1/chat/completions" if chat else "/v1/completions", body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def stream(self, body: dict[str, Any], *, chat: bool = False) -> Iterator[dict[str, Any]]:
        """The events of a stream; it must end as such streams do."""
        path = "/v1/chat/completions" if chat else "/v1/completions"
        with self.post(path, body | {"stream": True}, stream=True) as answer:
            assert answer.status_code == 200, answer.text
            for line in answer.iter_lines(chunk_size=1):
                if line == b"data: [DONE]":
                    return
                if line:
                    yield json.loads(line.removeprefix(b"data: "))
        raise AssertionError("the stream broke off")

    def expected(
        self, model: Path, body: dict[str, Any], *, seed: int, chat: bool = False
    ) -> list[Completion]:
        """What the engine makes of it in this process, without drafts."""
        read = read_body(json.dumps(body | {"seed": seed}).encode(), ChatBody if chat else CompletionBody)
        tokenizer = self.plan.inputs.tokenizer
        engine = build_engine(
            load_causal_lm(str(model), "float32"),
            None,
            engine=EngineConfig(device="cpu", probe=False),
            speculation=SpeculationConfig(policy="off"),
            max_total_tokens=self.plan.inputs.max_total_tokens,
            vocab_size=len(tokenizer),
        )
        engine.stop_strings = stop_strings(tokenizer)
        return engine.generate(self.reader.read(read).requests)

    def instances(self) -> dict[str, Any]:
        """Handles of the living instances by name."""
        named = [
            one for one in list_named_actors(all_namespaces=True) if one["namespace"].startswith(NAMESPACE)
        ]
        return {
            one["name"]: ray.get_actor(one["name"], one["namespace"])
            for one in named
            if one["name"].startswith("gen-")
        }

    def kill(self, name: str) -> None:
        """End an instance's process at once."""
        ray.kill(self.instances()[name])

    def kill_replica(self) -> None:
        """End the server's own process at once, and wait until another is in its place."""
        (name,) = _replicas()
        ray.kill(ray.get_actor(name, "serve"), no_restart=True)
        self.wait_for(lambda: bool(_replicas()) and name not in _replicas())
        self.wait_for(lambda: self.get("/get_world_size").status_code == 200)

    def metric(self, name: str) -> float:
        """One of /metrics."""
        (line,) = [one for one in self.get("/metrics").text.splitlines() if one.startswith(f"{name} ")]
        return float(line.split()[1])

    def wait_until_none_is_open(self) -> None:
        """Until every response has ended."""
        self.wait_for(lambda: self.metric("rlhfspec_serve_open_responses") == 0)

    def wait_for_instances(self, count: int) -> None:
        """Until so many live."""
        self.wait_for(lambda: self.get("/get_world_size").json()["world_size"] == count)

    def wait_for(self, holds: Callable[[], bool]) -> None:
        """Until it holds."""
        ends_s = time.monotonic() + TIMEOUT_S
        while not holds():
            assert time.monotonic() < ends_s
            time.sleep(0.1)


def serve_pair(folder: Path, *, max_open: int, num_instances: int = 2) -> Iterator[ServedEngine]:
    """Serve `folder/target` with `folder/draft`."""
    tree = {
        "models": {"draft": str(folder / "draft")},
        "speculation": {"policy": "fixed", "num_nodes": 4, "depth": 4},
        "engine": {"max_running_samples": 8, "probe": False, "device": "cpu"},
        "cluster": {"generation": {"num_actors": num_instances, "num_cpus": 0.3}, "poll_interval_s": 0.05},
    }
    plan = plan_server(tree, Reporter(), model=str(folder / "target"))
    port = free_ports(1)[0]
    session = RaySession(namespace=NAMESPACE, is_local=False, dashboard_url=None)
    limits = ServerLimits(max_open=max_open, max_body_bytes=1 << 20, token=TOKEN)
    serve.start(http_options={"host": "127.0.0.1", "port": port}, logging_config={"log_level": "WARNING"})
    try:
        serve.run(build(plan, session, limits, "tiny"), name="engine", route_prefix="/")
        reader = RequestReader(
            plan.inputs.tokenizer,
            model=plan.config.models.target,
            served_name="tiny",
            max_total_tokens=plan.inputs.max_total_tokens,
        )
        yield ServedEngine(url=f"http://127.0.0.1:{port}", plan=plan, reader=reader)
    finally:
        serve.shutdown()
        forget_published(NAMESPACE)


def _replicas() -> set[str]:
    return {
        one["name"]
        for one in list_named_actors(all_namespaces=True)
        if one["namespace"] == "serve" and one["name"].startswith("SERVE_REPLICA::engine#")
    }


def told(answer: dict[str, Any]) -> list[tuple[list[int], list[float]]]:
    """Token ids and log-probabilities of each choice of a whole answer."""
    return [(one["token_ids"], _logprobs(one["logprobs"])) for one in answer["choices"]]


def bits(completions: list[Completion]) -> list[tuple[list[int], list[float]]]:
    """The same of what the engine made: floats as JSON has them; of greedy responses the model's own."""

    def values(one: Completion) -> np.ndarray:
        return one.sampling_logprobs if one.sampling_logprobs.any() else one.policy_logprobs

    return [(one.token_ids.tolist(), np.float64(values(one)).tolist()) for one in completions]


def _logprobs(given: dict[str, Any]) -> list[float]:
    return (
        given["token_logprobs"] if "token_logprobs" in given else [one["logprob"] for one in given["content"]]
    )
