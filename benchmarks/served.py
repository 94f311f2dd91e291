"""The engine server as users run it: its responses beside the engine's own, its speed, many clients, bad requests.

While 200 clients ask, the one instance is killed and a weight version is published; every answer must come, and that to
a seed must stay what it was. OUT/served.log has what the server said.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import requests

from ..cluster.ray_start.ray_init import free_ports
from ..cluster.ray_start.ray_session import TERMINATED
from ..cluster.serving.engine_requests import sample_key
from ..core.config import SpeculationConfig
from ..core.errors import RlhfSpecError
from ..core.records import Completion, SampleRequest, SamplingParams
from .faulty.injection import serving_actors
from .soak import MEMORY_LIMIT, growth
from .support.harness import Bench
from .support.malformed import malformed
from .support.processes import (
    command_line,
    descendants,
    left_of,
    private_mib,
    setting_words,
    start_command,
)
from .support.result import ROOT
from .support.timing import interleaved, rate_rows, ratios
from .support.workload import Workload, demo_workload, real_workload

BATCH = 8
CONTEXT = 512
RESPONSES = {"quick": 80, "default": 500, "full": 500}
NEW_TOKENS, NEW_TOKENS_REAL = 128, 32
MALFORMED = 1000
CLIENTS, CLIENT_TOKENS = 200, 16
MINUTES = {"quick": 0.75, "default": 10.0, "full": 10.0}
JUDGED_FROM_MINUTES = 10.0
"Memory of a shorter time is still growing to what 200 requests at once take."
EVERY_S = 1.0
TIMEOUT_S = 300.0
MAX_OPEN = 256
SPECULATION = SpeculationConfig(policy="fixed", num_nodes=4, depth=4)
SPEED_BAR = 0.95

Bits = tuple[list[int], list[float]]
"Tokens of a response and their log-probabilities."


def run(bench: Bench) -> int:
    """Run the benchmark; returns 0, or 1 when a bar is not met, in a line each; 0 without a model."""
    workload = _workload(bench)
    if workload is None:
        return 0
    with _server(bench, workload) as (server, url):
        wrong = _compare(bench, workload, url)
        bench.write()
        wrong += _bad_requests(bench, workload, url)
        wrong += _many_clients(bench, workload, url, server.pid)
        below = descendants(server.pid)
        server.send_signal(signal.SIGTERM)
        code = server.wait(timeout=TIMEOUT_S)
    left = left_of(below, TIMEOUT_S)
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
    return real_workload(BATCH, data=bench.data, max_new_tokens=NEW_TOKENS_REAL, console=bench.console)


@contextmanager
def _server(bench: Bench, workload: Workload) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """One instance behind the server, as the command starts it, and its URL. Raises RlhfSpecError where it fails."""
    port = free_ports(1)[0]
    words = [
        *("serve", "engine", "--model", str(workload.paths.target), "--served-name", "served"),
        *("--port", str(port), "--context", str(CONTEXT), "--max-open", str(MAX_OPEN)),
    ]
    settings = (
        f"models.draft={workload.paths.draft}",
        "speculation.drafter=model",
        f"speculation.policy={SPECULATION.policy}",
        f"speculation.num_nodes={SPECULATION.num_nodes}",
        f"speculation.depth={SPECULATION.depth}",
        f"engine.max_running_samples={BATCH}",
        "cluster.generation.num_actors=1",
    )
    with serving([*words, *setting_words(settings)], bench.out / "served.log") as server:
        yield server, f"http://127.0.0.1:{port}"


@contextmanager
def serving(words: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """An engine server by these arguments of `rlhfspec`, once it is ready. Raises RlhfSpecError where it fails."""
    server = start_command(words, folder=ROOT, log=log)
    try:
        ends_s = time.monotonic() + TIMEOUT_S
        while "engine server ready" not in log.read_text(errors="replace"):
            if server.poll() is not None or time.monotonic() > ends_s:
                raise RlhfSpecError(f"the server did not come up; see {log}")
            time.sleep(0.5)
        yield server
    finally:
        server.terminate()
        with suppress(subprocess.TimeoutExpired):
            server.wait(timeout=60.0)
        server.kill()


def _compare(bench: Bench, workload: Workload, url: str) -> list[str]:
    """The same requests by both ways in turns: equal bits, and tokens a second of each."""
    engine = workload.engine(
        SPECULATION, workload.draft("float32"), max_total_tokens=CONTEXT, max_running_samples=BATCH
    )
    sampling = SamplingParams(max_new_tokens=NEW_TOKENS_REAL if bench.is_real else NEW_TOKENS)
    prompts = [prompt.token_ids.tolist() for prompt in workload.prompts]
    by_server: list[Bits] = []
    by_engine: list[Bits] = []
    seeds_of_server, seeds_of_engine = count(), count()

    def served() -> float:
        body = {
            "prompt": prompts,
            "seed": next(seeds_of_server),
            "max_tokens": sampling.max_new_tokens,
            "ignore_eos": True,
            "temperature": 1.0,
            "logprobs": 0,
            "return_token_ids": True,
        }
        began_s = time.perf_counter()
        answer = _ask(url, body).json()
        seconds = time.perf_counter() - began_s
        by_server.extend((one["token_ids"], one["logprobs"]["token_logprobs"]) for one in answer["choices"])
        return answer["usage"]["completion_tokens"] / seconds

    def alone() -> float:
        seed = next(seeds_of_engine)
        asked = [
            SampleRequest(key=sample_key(seed, ids, 0), prompt=prompt, sampling=sampling)
            for ids, prompt in zip(prompts, workload.prompts, strict=True)
        ]
        began_s = time.perf_counter()
        made = engine.generate(asked)
        seconds = time.perf_counter() - began_s
        by_engine.extend(map(_bits, made))
        return sum(one.num_tokens for one in made) / seconds

    # each round asks twice, and once before the first
    taken = interleaved({"server": served, "engine": alone}, -(-(RESPONSES[bench.mode] // BATCH) // 2))
    bench.rows += rate_rows(taken, batch=BATCH)
    for name, values in taken.items():
        bench.figures.keep(f"{name}_tokens_per_s", values)
    speed = bench.figures.keep("server_over_engine", ratios(taken, "server", "engine"))
    differ = sum(a != b for a, b in zip(by_server, by_engine, strict=True))
    bench.figures.values |= {
        "responses_compared": float(len(by_server)),
        "responses_that_differ": float(differ),
    }
    wrong = [f"{differ} of {len(by_server)} responses differ from the engine's"] if differ else []
    if speed < SPEED_BAR:
        wrong.append(f"the server makes {speed:.3f} of the engine's tokens a second; expected {SPEED_BAR}")
    return wrong


def _bits(completion: Completion) -> Bits:
    return completion.token_ids.tolist(), completion.sampling_logprobs.astype(np.float64).tolist()


def _ask(url: str, body: Any, session: Any = requests) -> requests.Response:
    return session.post(f"{url}/v1/completions", json=body, timeout=TIMEOUT_S)


def _bad_requests(bench: Bench, workload: Workload, url: str) -> list[str]:
    """Requests that no server can take: each must get a 4xx with a reason."""
    bad = malformed(
        MALFORMED, seed=1, vocab_size=workload.vocab_size, context_tokens=CONTEXT, max_open=MAX_OPEN
    )

    def is_refused(route: str, body: bytes) -> bool:
        try:
            answer = requests.post(f"{url}/v1/{route}", data=body, timeout=TIMEOUT_S)
            return 400 <= answer.status_code < 500 and bool(answer.json()["error"]["message"])
        except (requests.RequestException, ValueError, KeyError):
            return False

    with ThreadPoolExecutor(BATCH) as threads:
        refused = list(threads.map(lambda one: is_refused(*one), bad))
    bench.figures.values |= {
        "malformed": float(len(bad)),
        "malformed_not_refused": float(refused.count(False)),
    }
    if all(refused):
        return []
    first = bad[refused.index(False)]
    return [
        f"{refused.count(False)} of {len(bad)} malformed requests got no 4xx with a reason, first {first}"
    ]


def _many_clients(bench: Bench, workload: Workload, url: str, server: int) -> list[str]:
    """Clients ask until the time is over, each the same; what they were answered, and what memory did meanwhile."""
    minutes, is_over = bench.minutes(MINUTES), threading.Event()
    statuses, changed = Counter[str](), []

    def ask(client: int) -> None:
        ids = workload.prompts[client % BATCH].token_ids.tolist()
        body = {"prompt": ids, "seed": client, "max_tokens": CLIENT_TOKENS, "return_token_ids": True}
        first = None
        with requests.Session() as session:
            while not is_over.is_set():
                try:
                    answer = _ask(url, body, session)
                except requests.RequestException as error:
                    statuses[type(error).__name__] += 1
                    continue
                statuses[str(answer.status_code)] += 1
                if answer.status_code == 200:
                    got = answer.json()["choices"][0]["token_ids"]
                    first = first or got
                    if got != first:
                        changed.append(client)

    with ThreadPoolExecutor(CLIENTS) as threads:
        asking = [threads.submit(ask, client) for client in range(CLIENTS)]
        try:
            samples = _watch(60.0 * minutes, workload, url, server)
        finally:
            is_over.set()
    for client in asking:
        client.result()
    lost = sum(number for status, number in statuses.items() if status != "200")
    bench.figures.values |= {
        "clients": float(CLIENTS),
        "client_minutes": minutes,
        "client_answers": float(statuses["200"]),
        "client_requests_lost": float(lost),
        "client_answers_changed": float(len(changed)),
        **_memory_figures(samples),
    }
    grew = bench.figures.values["server_mib_late_over_early"]
    if minutes < JUDGED_FROM_MINUTES:
        bench.console.print(f"memory is judged from {JUDGED_FROM_MINUTES:.0f} minutes on")
    wrong = [f"{lost} requests were not answered: {dict(statuses)}"] if lost else []
    if changed:
        wrong.append(f"{len(changed)} answers were not what the same request got before")
    if minutes >= JUDGED_FROM_MINUTES and grew > MEMORY_LIMIT:
        wrong.append(f"the server's memory grew to {grew:.3f} of what it was; expected {MEMORY_LIMIT:g}")
    return wrong


def _watch(seconds: float, workload: Workload, url: str, server: int) -> Sequence[dict[str, float]]:
    """Memory over the time; a third of it on the instance is killed, two thirds on a version is published."""
    samples = list[dict[str, float]]()
    began_s = time.monotonic()
    blows = [
        (seconds / 3, lambda: os.kill(next(iter(serving_actors(server)["generation"])), signal.SIGKILL)),
        (seconds * 2 / 3, lambda: _publish(url, workload.paths.target)),
    ]
    while (now_s := time.monotonic() - began_s) < seconds:
        if blows and now_s >= blows[0][0]:
            blows.pop(0)[1]()
        samples.append(_memory(server))
        time.sleep(EVERY_S)
    return samples


def _publish(url: str, folder: Path) -> None:
    info = {"update_info": {"path": str(folder)}}
    answer = requests.post(f"{url}/update_weights", json=info, timeout=TIMEOUT_S)
    if answer.status_code != 200:
        raise RlhfSpecError(f"the update of weights got {answer.status_code}: {answer.text[:300]}")


def _memory(server: int) -> dict[str, float]:
    below = descendants(server)
    replicas = [pid for pid in below if "EngineServer" in command_line(pid)]
    return {
        "server_mib": sum(map(private_mib, replicas)),
        "all_mib": sum(map(private_mib, {server, *below})),
    }


def _memory_figures(samples: Sequence[dict[str, float]]) -> dict[str, float]:
    moments = {"start": 0, "middle": len(samples) // 2, "end": -1}
    return growth(samples) | {
        f"{name}_{moment}": samples[place][name] for name in samples[0] for moment, place in moments.items()
    }
