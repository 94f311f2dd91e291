"""Episodes of several turns, with a calculator and with tools: drafted and moved, the same bits as alone.

The calculator task and calls of tools by models that have learned nothing, compared with one instance without
speculation or kept caches: samples are moved, an instance and an environment actor are killed, a run is resumed.
Beside it: what a turn costs beside its tool, and how much of the time instances decode while tools take half a second.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from ..actors.workers.environment_actors import EnvironmentActor, EnvironmentPool
from ..cluster.folder.layout import RunDir
from ..cluster.system.episodes import Episodes
from ..cluster.verify.verify_run import verify_run
from ..core.config import Config, EngineConfig, ReallocationConfig, RewardConfig
from ..core.config_io import config_from_dict, dump_config
from ..core.errors import RewardError, WaitTimeout
from ..core.records import Completion, Prompt, SampleKey, SampleRequest, SamplingParams
from ..engine.engine import Engine
from ..integrations.engine_episodes import EngineEpisodes
from ..learning.data.chat.written_text import written_text
from ..learning.environments.environment_protocol import Environment, environment_maker, stop_texts
from ..learning.environments.episode import Episode, EpisodeLimits
from ..learning.environments.observations import ObservationRenderer, ending_with
from ..learning.environments.tools import call_parser
from ..learning.models.make import PairPaths
from ..learning.models.tokenization import character_tokenizer
from ..learning.rewards.reward_function import build_reward
from ..policies.migration.move_messages import MoveOutcome
from ..policies.reallocation.pool_records import ReallocationPolicy
from ..policies.scheduling.events import Alarm, MoveRecord
from .faults import after_first_state
from .faulty.outcome import compare_runs
from .moving.exact import SPECULATION
from .moving.forced import ForcedMoves
from .support.actor_pool import ActorPool, ask, bench_ray
from .support.harness import Bench
from .support.processes import run_command, start_command
from .support.reference import count_mismatches
from .support.result import ROOT
from .support.runs import train, train_words
from .support.tool_episodes import (
    busy_share,
    num_turns,
    save_often_right_pair,
    sign_of,
    tools_workload,
    turn_overhead_ms,
)
from .support.workload import BENCH_SEED, Workload

ALPHABET = "0123456789+-*/=<>#. abcdefghijklmnopqrstuvwxyz"
MAX_TURNS = 24


def calculator_workload(folder: Path, num_episodes: int, *, max_new_tokens: int) -> Workload:
    """Write a random pair into `folder`, a draft that is often right; prompts are sums in words."""
    tokenizer = character_tokenizer(ALPHABET)
    paths = PairPaths(target=folder / "target", draft=folder / "draft")
    model = _random_model(len(tokenizer))
    save_often_right_pair(model, tokenizer, paths)
    random = np.random.default_rng(BENCH_SEED)
    texts = [f"{a}+{b} is <<{a}+{b}=" for a, b in random.integers(1, 1000, (num_episodes, 2))]
    return Workload(
        name="calculator",
        paths=paths,
        known_tokenizer=tokenizer,
        prompts=[
            Prompt(prompt_id=number, token_ids=np.array(tokenizer.encode(text)), text=text)
            for number, text in enumerate(texts)
        ],
        # no end token: `=` alone ends a turn
        sampling=SamplingParams(max_new_tokens=max_new_tokens),
    )


def calculator_config(workload: Workload, **environment: object) -> Config:
    """The config of its environment."""
    return config_from_dict(
        {
            "data": {"task": "chain"},
            "models": {"target": str(workload.paths.target), "draft": str(workload.paths.draft)},
            "reward": {"kind": "environment"},
            "environment": {
                "kind": "calculator",
                "options": {"answer_all": True, "turn_reward": 0.1},
                "max_turns": MAX_TURNS,
            }
            | environment,
        }
    )


def play_alone(
    engine: Engine,
    requests: Sequence[SampleRequest],
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
) -> dict[SampleKey, Completion]:
    """Play every episode on one engine, each answer at once: what a pool must equal bit by bit."""
    make = environment_maker(config.environment)
    renderer = ObservationRenderer(tokenizer, max_tokens=config.environment.max_observation_tokens)
    limits = EpisodeLimits(
        max_turns=config.environment.max_turns,
        max_turn_tokens=config.environment.max_turn_tokens,
        stop_token_ids=ending_with(tokenizer, stop_texts(make())),
    )
    playing: dict[SampleKey, tuple[Episode, Environment]] = {}
    done: dict[SampleKey, Completion] = {}
    for request in requests:
        episode, environment = playing[request.key] = (Episode(request, limits), make())
        environment.reset(request.prompt)
        engine.submit(episode.first())
    while engine.has_work:
        for completion in engine.step():
            episode, environment = playing[completion.key.sample]
            text = written_text(tokenizer, episode.new_tokens(completion), stopped=True)
            episode.responses.append(text)
            step = environment.step(text)
            given = renderer.give(
                step.observation, prompt=episode.request.prompt, last_token=int(completion.token_ids[-1])
            ).token_ids
            then = episode.goes_on(completion, given, reward=step.reward, done=step.done)
            if isinstance(then, SampleRequest):
                engine.submit(then)
            else:
                done[then.key] = then
    return done


def _random_model(vocab_size: int) -> LlamaForCausalLM:
    torch.manual_seed(BENCH_SEED)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.1,
        # a character token ends nothing
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


LIMIT_S = 400.0
ENVIRONMENT_ACTORS = 2


@dataclass(slots=True, kw_only=True)
class Played:
    """What came of the episodes."""

    completions: dict[SampleKey, Completion] = field(default_factory=dict)
    moves: list[MoveRecord] = field(default_factory=list)
    alarms: list[Alarm] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)
    num_prefill_tokens: int = 0
    num_kept_tokens: int = 0
    seconds: float = 0.0
    steady: list[tuple[float, float]] = field(default_factory=list)
    "(clock, seconds that all instances have prefilled and decoded) of each look while all that may be open are"


def play_over(
    pool: ActorPool,
    workload: Workload,
    config: Config,
    requests: Sequence[SampleRequest],
    *,
    reallocation: ReallocationPolicy | None,
    strike: Callable[[Played], bool] = lambda played: True,
    most_open: int | None = None,
) -> Played:
    """Play all episodes, so many at once. Raises WaitTimeout.

    `strike` is called after each look until it says that it has struck.
    """
    parser = call_parser(config.environment, config.data, workload.tokenizer)
    actors: list[Any] = []

    def make(actor: int, number: int) -> Any:
        own = EnvironmentActor.options(num_cpus=0.1, max_concurrency=config.environment.concurrency)
        actors.append(own.remote(f"env-{actor}-{number}", config.environment, None, parser))
        return actors[-1]

    episodes = Episodes(
        config.environment,
        workload.tokenizer,
        EnvironmentPool(
            [make(number, 0) for number in range(ENVIRONMENT_ACTORS)],
            config.environment,
            order_timeout_s=LIMIT_S,
            make=make,
            max_restarts=1,
        ),
        config.data,
    )
    scheduler = pool.new_scheduler(reallocation, interval_s=0.02)
    played, struck = Played(), False
    for actor in actors:  # their start is no part of an episode
        ask(actor.__ray_ready__.remote(), "start")
    began_s = time.perf_counter()
    num_begun = most_open or len(requests)
    episodes.begin(requests[:num_begun])
    try:
        while len(played.completions) < len(requests):
            if time.perf_counter() - began_s > LIMIT_S:
                raise WaitTimeout(
                    waiter="the benchmark",
                    waited_for="the instances",
                    order=f"end {len(requests) - len(played.completions)} more episodes",
                    waited_s=LIMIT_S,
                    advice="look at the actors' logs",
                )
            taken = ask(scheduler.take.remote(0.02), "take")
            ended = episodes.advance(
                taken.completions, lambda requests: ask(scheduler.enqueue.remote(requests), "enqueue")
            )
            played.completions.update((completion.key, completion) for _, completion, _ in ended)
            episodes.add(requests[num_begun : num_begun + len(ended)])
            num_begun += len(ended)
            # once a turn has ended, as long as as many are open as may be
            if num_begun <= len(requests) and (played.steady or taken.completions):
                played.steady.append((time.perf_counter(), sum(one.busy_s for one in taken.stats.values())))
            played.moves += taken.moves
            played.alarms += taken.alarms
            played.lost += [lost.instance for lost in taken.lost]
            played.num_prefill_tokens = sum(one.num_prefill_tokens for one in taken.stats.values())
            played.num_kept_tokens = sum(one.num_kept_tokens for one in taken.stats.values())
            struck = struck or strike(played)
    finally:
        for actor in (*actors, scheduler):
            ray.kill(actor)
    played.seconds = time.perf_counter() - began_s
    played.figures = episodes.metrics()
    return played


PROGRAMS = {"quick": 400, "default": 2000, "full": 10_000}
"Of `sandboxed_rewards_per_s`: trivial ones, each against one test."


def sandboxed_rewards_per_s(count: int) -> float:
    """Rewards of kind code a second, of one reward actor's threads and sandbox on all cores; its start is left out."""
    reward = build_reward(RewardConfig.model_validate({"kind": "code"}))
    prompt = Prompt(
        prompt_id=0, token_ids=np.array([0]), reference='[{"input": "3 4", "output": "7"}]', text="sum"
    )
    response = "```python\nprint(sum(map(int, input().split())))\n```"
    for size in (32, count):
        began_s = time.perf_counter()
        scored = reward.score([prompt] * size, [response] * size)
        seconds = time.perf_counter() - began_s
        if any(one.value != 1.0 for one in scored):
            raise RewardError(f"{size} right programs in a sandbox got {scored[:3]}; expected 1.0 each")
    return count / seconds


CONVERSATIONS = {"quick": 24, "default": 480, "full": 1500}
"With tools."
OPEN, TOOL_S = 32, 0.5
"Conversations at once, and what each call takes there."
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
LARGER = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 8}
"Whose turns take about as long as a tool."


def tool_conversations(folder: Path, count: int) -> dict[str, float]:
    """How many conversations with tools differ from those alone: drafted and moved; an instance and an actor killed."""
    workload, config = tools_workload(folder, count, tool_s=0.0, shape=SMALL, max_turn_tokens=20)
    requests = workload.requests()
    settings: dict[str, Any] = ENGINE.model_dump() | {"turn_cache_mb": 0.0}
    alone = workload.engine(**settings)
    ended = EngineEpisodes(config.environment, workload.tokenizer).run(alone, requests)
    expected = {completion.key: completion for _, completion, _ in ended}
    policy, sign = ForcedMoves(rate=0.3, seed=0, recompute_share=0.1), sign_of(folder)
    struck: list[str] = []
    with ActorPool(
        workload,
        engine=ENGINE,
        speculation=SPECULATION,
        migration=ReallocationConfig(transfer_share=1.0),
    ) as pool:

        def strike(played: Played) -> bool:
            if not struck and len(played.completions) >= count // 8:
                sign.touch()
                struck.append("environment")
            if struck == ["environment"] and not sign.exists():
                ray.kill(pool.handles["gen-1"])
                struck.append("instance")
            return len(struck) == 2

        moved = play_over(pool, workload, config, requests, reallocation=policy)
        killed = play_over(pool, workload, config, requests, reallocation=policy, strike=strike)
    turns = [num_turns(one) for one in expected.values()]
    differing = [count_mismatches(one.completions, expected) for one in (moved, killed)]
    return {
        "conversations_of_2_to_6_turns": float(
            sum(2 <= one <= config.environment.max_turns for one in turns)
        ),
        "tool_calls": moved.figures["rollout/tool_calls"],
        "moved_differ": float(differing[0]),
        "killed_differ": float(differing[1]),
        "missing": float(2 * len(expected) - len(moved.completions) - len(killed.completions)),
        "moves": float(sum(move.outcome == MoveOutcome.MOVED for move in moved.moves)),
        "instances_killed": float(len(killed.lost)),
        "environments_killed": float("environment" in struck and not sign.exists()),
        "turn_overhead_ms": turn_overhead_ms(workload.tokenizer, config, 200),
    }


def decoding_share(folder: Path, count: int) -> dict[str, float]:
    """The share of the time that instances prefill and decode while so many conversations are open, with slow tools."""
    workload, config = tools_workload(folder, count, tool_s=TOOL_S, shape=LARGER, max_turn_tokens=64)
    with ActorPool(workload, engine=ENGINE, speculation=SPECULATION) as pool:
        played = play_over(pool, workload, config, workload.requests(), reallocation=None, most_open=OPEN)
    first_s, last_s = played.steady[0][0], played.steady[-1][0]
    return {
        "decoding_share": busy_share(played.steady, num_instances=2),
        "decoding_share_s": last_s - first_s,
        "decoding_share_calls": played.figures["rollout/tool_calls"],
        "load": os.getloadavg()[0],
    }


def resumed_conversations(folder: Path) -> dict[str, float]:
    """What of a run with tools differs where its driver is killed and it is resumed; and what `verify` finds in it."""
    _, config = tools_workload(folder, 192, tool_s=0.0, shape=SMALL, max_turn_tokens=20)
    file = folder / "config.yaml"
    dump_config(config, file)
    whole = train(file, folder, "whole", ())
    words, log = train_words(file, folder, "cut", ()), folder / "cut.log"
    driver = start_command(words, folder=ROOT, log=log)
    try:
        run = after_first_state(folder, "cut", driver, set())
    finally:
        driver.send_signal(signal.SIGKILL)
        driver.wait()
    was_cut = RunDir.open(run).status()["state"] != "finished"
    run_command(["train", "--resume", str(run)], folder=ROOT, log=folder / "resumed.log")
    found, verified = compare_runs(whole.folder, run), verify_run(run, share=1.0, num_engines=1)
    return {
        "resumed_conversations": float(found.num_samples if was_cut else 0),
        "resumed_differ": float(found.num_different + found.num_lost + found.num_duplicated),
        "resumed_weights_differ": float(not found.weights_equal),
        "verified": float(verified.num_regenerated),
        "verify_differences": float(len(verified.differences)),
    }


_NONE = ("mismatches", "missing", "alarms", "_differ", "_differences")
EPISODES = {"quick": 24, "default": 100, "full": 400}
NEW_TOKENS = 320
ENGINE = EngineConfig(device="cpu", max_running_samples=64, probe=False)


def run(bench: Bench) -> int:
    """Run the benchmark; returns 0, or 1 when a bit changed or an episode was lost."""
    mode = bench.mode
    with tempfile.TemporaryDirectory() as folder, bench_ray("bench-episodes"):
        workload = calculator_workload(Path(folder), EPISODES[mode], max_new_tokens=NEW_TOKENS)
        config, requests = calculator_config(workload), workload.requests()
        settings: dict[str, Any] = ENGINE.model_dump() | {"turn_cache_mb": 0.0}
        engine = workload.engine(**settings)
        expected = play_alone(engine, requests, config, workload.tokenizer)
        with ActorPool(
            workload,
            engine=ENGINE,
            speculation=SPECULATION,
            migration=ReallocationConfig(transfer_share=1.0),
        ) as pool:
            policy = ForcedMoves(rate=0.3, seed=0, recompute_share=0.1)
            played = play_over(pool, workload, config, requests, reallocation=policy)
    figures = bench.figures.values = {
        "episodes": float(len(expected)),
        "mismatches": float(count_mismatches(played.completions, expected)),
        "missing": float(len(expected.keys() - played.completions.keys())),
        "moves": float(sum(move.outcome == MoveOutcome.MOVED for move in played.moves)),
        "alarms": float(len(played.alarms)),
        "tokens": float(sum(one.num_tokens for one in expected.values())),
        "prefill_tokens": float(played.num_prefill_tokens),
        "prefill_tokens_nothing_kept": float(engine.stats.num_prefill_tokens),
        "kept_tokens": float(played.num_kept_tokens),
        "seconds": played.seconds,
        "sandboxed_rewards_per_s": sandboxed_rewards_per_s(PROGRAMS[mode]),
    } | {name.replace("environment/", ""): value for name, value in played.figures.items()}
    with tempfile.TemporaryDirectory() as folder:
        with bench_ray("bench-episodes-tools"):
            tools = tool_conversations(Path(folder), CONVERSATIONS[mode])
            tools |= decoding_share(Path(folder), 2 * OPEN if mode == "quick" else 4 * OPEN)
        tools |= resumed_conversations(Path(folder))
    figures |= {f"tools_{name}": value for name, value in tools.items()}
    bench.console.print(f"written {bench.write()}")
    wrong = [name for name in figures if name.endswith(_NONE) and figures[name]]
    bench.console.print(f"{sum(figures[name] for name in wrong):.0f} differences {', '.join(wrong)}")
    return 1 if wrong else 0
