"""The engine server as users run it: its responses are the engine's, its speed beside the engine's, many clients.

While clients ask, an instance is killed and a weight version published; every answer must come. OUT/served.log has what
the server said.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import requests

from benchmarks.faulty.injection import serving_actors
from benchmarks.soak import growth, private_mib
from benchmarks.support.harness import Bench
from benchmarks.support.processes import descendants, start_command
from benchmarks.support.result import ROOT
from benchmarks.support.timing import interleaved, ratios
from benchmarks.support.workload import Workload, demo_workload, real_workload
from rlhfspec.cluster.placement.ray_session import TERMINATED, free_port
from rlhfspec.cluster.serving.engine_requests import sample_key
from rlhfspec.core.config import SpeculationConfig
from rlhfspec.core.errors import RlhfSpecError
from rlhfspec.core.records import Completion, SampleRequest, SamplingParams

BATCH = 8
NEW_TOKENS = 128
RESPONSES = {"quick": 80, "default": 500, "full": 500}
CLIENTS, CLIENT_TOKENS = 200, 16
CLIENT_SECONDS = {"quick": 45.0, "default": 600.0, "full": 600.0}
EVERY_S = 1.0
START_S = 300.0
SPECULATION = SpeculationConfig(policy="fixed", num_nodes=4, depth=4)


def run(bench: Bench) -> int:
    """Run the benchmark; returns 0, or 1 when a response differs, a request is lost or something is left behind."""
    workload = _workload(bench)
    if workload is None:
        return 0
    port = free_port()
    words = [
        *("serve", "engine", "--model", str(workload.paths.target), "--served-name", "served"),
        *("--port", str(port), "--context", "512", "--drain", "60"),
    ]
    for setting in (
        f"models.draft={workload.paths.draft}", "speculation.drafter=model", "speculation.policy=fixed",
        f"speculation.num_nodes={SPECULATION.num_nodes}", f"speculation.depth={SPECULATION.depth}",
        f"engine.max_running_samples={BATCH}", "cluster.generation.num_actors=1",
    ):  # fmt: skip
        words += ["--set", setting]
    server = start_command(words, folder=ROOT, log=bench.out / "served.log")
    try:
        url = _wait_until_up(port, server.poll, bench.out / "served.log")
        wrong = _compare(bench, workload, url) + _many_clients(bench, workload, url, server.pid)
        below = descendants(server.pid)
        server.send_signal(signal.SIGTERM)
        code = server.wait(timeout=START_S)
    finally:
        server.kill()
    left = [pid for pid in below if Path(f"/proc/{pid}").exists()]
    bench.figures.values |= {"exit_code": float(code), "processes_left": float(len(left))}
    bench.write()
    if code != TERMINATED or left:
        wrong.append(f"after SIGTERM it ended with {code}, {len(left)} processes were left")
    for line in wrong:
        bench.console.print(f"not met: {line}", style="red", soft_wrap=True)
    return 1 if wrong else 0


def _workload(bench: Bench) -> Workload | None:
    if not bench.is_real:
        return demo_workload(BATCH)
    return real_workload(BATCH, data=bench.data, max_new_tokens=NEW_TOKENS, console=bench.console)


def _wait_until_up(port: int, poll: Any, log: Path) -> str:
    ends_s = time.monotonic() + START_S
    while not re.search("engine server ready", log.read_text(errors="replace")):
        if poll() is not None or time.monotonic() > ends_s:
            raise RlhfSpecError(f"the server did not come up; see {log}")
        time.sleep(0.5)
    return f"http://127.0.0.1:{port}"


def _compare(bench: Bench, workload: Workload, url: str) -> list[str]:
    """Equal responses by both ways in turns, and their speeds."""
    engine = workload.engine(
        SPECULATION, workload.draft("float32"), max_total_tokens=512, max_running_samples=BATCH
    )
    prompts = [prompt.token_ids.tolist() for prompt in workload.prompts]
    sampling = SamplingParams(max_new_tokens=NEW_TOKENS)
    served: list[Any] = []
    alone: list[tuple[list[int], list[float]]] = []

    def by_engine() -> float:
        seed = len(alone)
        asked = [
            SampleRequest(
                key=sample_key(seed, prompt.token_ids.tolist(), 0), prompt=prompt, sampling=sampling
            )
            for prompt in workload.prompts
        ]
        began_s = time.perf_counter()
        made = engine.generate(asked)
        seconds = time.perf_counter() - began_s
        alone.extend(map(_bits, made))
        return sum(one.num_tokens for one in made) / seconds

    def by_server() -> float:
        body = {"prompt": prompts, "seed": len(served), "max_tokens": NEW_TOKENS, "ignore_eos": True}
        began_s = time.perf_counter()
        answer = requests.post(
            f"{url}/v1/completions", json=body | {"logprobs": 0, "return_token_ids": True}, timeout=START_S
        ).json()
        seconds = time.perf_counter() - began_s
        served.extend((one["token_ids"], one["logprobs"]["token_logprobs"]) for one in answer["choices"])
        return answer["usage"]["completion_tokens"] / seconds

    taken = interleaved({"server": by_server, "engine": by_engine}, -(-RESPONSES[bench.mode] // BATCH))
    for name, values in taken.items():
        bench.figures.keep(f"{name}_tokens_per_s", values)
    bench.figures.keep("server_over_engine", ratios(taken, "server", "engine"))
    differ = sum(a != b for a, b in zip(served, alone, strict=True))
    bench.figures.values |= {"responses_compared": float(len(served)), "responses_that_differ": float(differ)}
    return [f"{differ} of {len(served)} responses differ from the engine's"] if differ else []


def _bits(completion: Completion) -> tuple[list[int], list[float]]:
    return completion.token_ids.tolist(), completion.sampling_logprobs.astype("float64").tolist()


def _many_clients(bench: Bench, workload: Workload, url: str, server: int) -> list[str]:
    """Clients ask until the time is over; what they were answered, and what memory did meanwhile."""
    is_over, answers = threading.Event(), Counter[str]()
    body = {"prompt": workload.prompts[0].token_ids.tolist(), "max_tokens": CLIENT_TOKENS}

    def ask() -> None:
        with requests.Session() as session:
            while not is_over.is_set():
                try:
                    status = session.post(f"{url}/v1/completions", json=body, timeout=START_S).status_code
                except requests.RequestException as error:
                    answers[type(error).__name__] += 1
                else:
                    answers[str(status)] += 1

    with ThreadPoolExecutor(CLIENTS) as threads:
        for _ in range(CLIENTS):
            threads.submit(ask)
        samples = _watch(bench, workload, url, server, answers)
        is_over.set()
    grown = growth(samples)
    lost = sum(number for status, number in answers.items() if status != "200")
    bench.figures.values |= grown | {
        "clients": float(CLIENTS),
        "client_seconds": CLIENT_SECONDS[bench.mode],
        "client_answers": float(answers["200"]),
        "client_requests_lost": float(lost),
        "all_mib": samples[-1]["all_mib"],
    }
    return [f"{lost} requests were not answered: {dict(answers)}"] if lost else []


def _watch(
    bench: Bench, workload: Workload, url: str, server: int, answers: Counter[str]
) -> Sequence[dict[str, float]]:
    """Memory over the time; a third of it on an instance is killed, two thirds on a version is published."""
    seconds, samples = CLIENT_SECONDS[bench.mode], list[dict[str, float]]()
    began_s = time.monotonic()
    blows = [
        (seconds / 3, lambda: os.kill(next(iter(serving_actors(server)["generation"])), signal.SIGKILL)),
        (seconds * 2 / 3, lambda: _publish(url, workload, answers)),
    ]
    while (now_s := time.monotonic() - began_s) < seconds:
        if blows and now_s >= blows[0][0]:
            blows.pop(0)[1]()
        samples.append({"all_mib": sum(map(private_mib, {server, *descendants(server)}))})
        time.sleep(EVERY_S)
    return samples


def _publish(url: str, workload: Workload, answers: Counter[str]) -> None:
    info = {"update_info": {"path": str(workload.paths.target)}}
    answers[str(requests.post(f"{url}/update_weights", json=info, timeout=START_S).status_code)] += 1
