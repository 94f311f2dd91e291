"""A rollout of long-tailed limits on two instances: with a head, and plain."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.contestants.contestants import Contestants
from benchmarks.moving.rollouts import requests_of
from benchmarks.support.actor_pool import ActorPool, bench_ray
from benchmarks.support.workload import Workload
from rlhfspec.core.config import EngineConfig, ReallocationConfig, SpeculationConfig
from rlhfspec.engine.drafters.head.head_weights import HeadWeights
from rlhfspec.policies.simulate.workloads import drawn_lengths

INSTANCES = 2
SAMPLES = {"default": 32, "full": 64}
MAX_TOKENS = {"default": 128, "full": 256}
ROUNDS = {"default": 2, "full": 3}
PROFILE_S = 40.0


def head_rollouts(workload: Workload, head: HeadWeights, mode: str) -> tuple[list[float], int]:
    """Return plain decoding's seconds over the head's, round by round, and how many samples' tokens differ."""
    samples, most = SAMPLES[mode], MAX_TOKENS[mode]
    prompts = [workload.prompts[index % len(workload.prompts)] for index in range(samples)]
    sampling = replace(workload.sampling, max_new_tokens=most)
    workload = replace(workload, prompts=prompts, sampling=sampling)
    lengths = drawn_lengths("long_tail", samples, INSTANCES, max_new_tokens=most, seed=0)
    engine = EngineConfig(max_running_samples=samples // INSTANCES, probe=False)
    profile = Contestants(workload, head, num_slots=samples // INSTANCES, profile_s=PROFILE_S).profile("head")
    ways = {
        "plain": (SpeculationConfig(policy="off", drafter="none"), None),
        "head": (SpeculationConfig(policy="goodput", drafter="head"), head),
    }
    taken: list[float] = []
    expected: dict[int, list[int]] = {}
    differing = 0
    with bench_ray("bench-drafters"):
        pools = {
            name: ActorPool(
                workload,
                engine=engine,
                speculation=speculation,
                migration=ReallocationConfig(),
                head=drafts,
                profile=None if drafts is None else profile,
                num_cpus=0.4,
            )
            for name, (speculation, drafts) in ways.items()
        }
        try:
            for number in range(ROUNDS[mode] + 1):
                seconds = {}
                for name in ways if number % 2 == 0 else reversed(ways):
                    outcome = pools[name].rollout(requests_of(workload, lengths))
                    seconds[name] = outcome.seconds
                    for completion in outcome.completions.values():
                        tokens = completion.token_ids.tolist()
                        known = expected.setdefault(completion.key.sample_index, tokens)
                        differing += known != tokens
                # the first round warms up
                if number:
                    taken.append(seconds["plain"] / seconds["head"])
        finally:
            for pool in pools.values():
                pool.close()
    return taken, differing
