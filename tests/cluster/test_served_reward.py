"""Whole runs with a reward server: the rewards of the pool, and an end that can be gone on from."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from ray import serve
from tiny_reward_model import save_reward_model

from rlhfspec.actors.reward_server.reward_deployment import build
from rlhfspec.cluster.folder.layout import RunDir
from rlhfspec.cluster.observe.console import Reporter
from rlhfspec.cluster.plan.run_check import check_run
from rlhfspec.cluster.ray_start.ray_session import RaySession
from rlhfspec.cluster.resume.run_state import last_state
from rlhfspec.cluster.run.loop import train
from rlhfspec.cluster.system.system import running_system
from rlhfspec.core.config import RewardConfig
from rlhfspec.core.config_io import config_from_dict
from rlhfspec.core.errors import RewardServerLost, describe_error
from rlhfspec.core.metrics import read_metrics
from rlhfspec.core.records import Prompt
from rlhfspec.learning.rewards.reward_function import build_reward

pytestmark = [pytest.mark.ray, pytest.mark.slow]

SAMPLES = 8


@pytest.fixture
def run(local_ray, tiny_pair, tmp_path):
    def make(name: str, reward: dict) -> RunDir:
        config = config_from_dict(
            {
                "run": {"iterations": 2, "seed": 5},
                "models": {"target": str(tiny_pair.target)},
                "data": {"task": "chain", "limit": 64},
                "reward": reward | {"batch_size": 3},
                "sampling": {"max_new_tokens": 40},
                "speculation": {"drafter": "none", "policy": "off"},
                "rollout": {"prompts_per_iteration": SAMPLES},
                "engine": {"max_running_samples": 4},
                "cluster": {"generation": {"num_actors": 1}},
                "trainer": {"minibatch_size": 4, "learning_rate": 1e-3},
            }
        )
        run_dir = RunDir.create(config, tmp_path / name)
        session = RaySession(namespace=f"test-{name}", is_local=False, dashboard_url=None)
        with running_system(check_run(config, output_dir=Path.cwd()), session) as system:
            train(system, run_dir, Reporter())
        return run_dir

    return make


def rollouts(run_dir: RunDir) -> list[dict]:
    return [
        row for iteration in range(2) for row in pq.read_table(run_dir.rollouts_file(iteration)).to_pylist()
    ]


@pytest.mark.long
def test_a_ppo_run_with_the_deployment_has_the_rewards_of_the_pool(run, tmp_path):
    path = save_reward_model(tmp_path / "reward")
    serve.start(proxy_location="Disabled")
    try:
        serve.run(build({"model": path, "num_cpus": 0.1}), name="of-a-run", route_prefix=None)
        served = run("served", {"kind": "serve", "app": "of-a-run"})
    finally:
        serve.shutdown()
    rows = rollouts(served)
    # what an actor of the pool runs
    stage = build_reward(RewardConfig(kind="model", model=path))
    asked = [
        Prompt(prompt_id=row["prompt_id"], token_ids=np.array(row["prompt_token_ids"]), text=row["prompt"])
        for row in rows
    ]
    pooled = [reward.value for reward in stage.score(asked, [row["response"] for row in rows])]
    assert [row["reward"] for row in rows] == pytest.approx(pooled, abs=1e-6)
    assert len(set(pooled)) > SAMPLES


class Short(BaseHTTPRequestHandler):
    """Scores the first iteration, then ends for good."""

    num_scored = 0

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["samples"]
        if Short.num_scored >= SAMPLES and asked:
            self.send_error(503, "out of order")
            return
        Short.num_scored += len(asked)
        answer = {"rewards": [{"value": float(len(one["response"])), "parts": {}} for one in asked]}
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def test_a_server_that_goes_down_ends_the_run_with_its_finished_iterations_kept(run, tmp_path):
    server = HTTPServer(("127.0.0.1", 0), Short)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/score"
    try:
        with pytest.raises(
            RewardServerLost,
            match=r"(?s)3 tries.*1 iterations are finished; go on with `rlhfspec train --resume",
        ) as lost:
            run("short", {"kind": "serve", "url": url, "server": {"retries": 2, "backoff_s": 0.1}})
    finally:
        server.shutdown()
        server.server_close()
    run_dir = RunDir.open(tmp_path / "short")
    assert len(read_metrics(run_dir.metrics_file)) == 1
    checkpoint = run_dir.checkpoint_dir("target")
    assert (checkpoint / "config.json").is_file() and f"--resume {run_dir.path}`" in describe_error(
        lost.value
    )
    state = last_state(run_dir, pytest.fail)
    assert state is not None and state.num_iterations == 1
    assert state.cursor["next_sample_index"] == SAMPLES, "what was asked for in vain is asked for again"
