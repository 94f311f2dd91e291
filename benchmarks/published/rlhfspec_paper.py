"""RLHFSpec's own figures (arXiv 2512.04752): 3.01 for generation, 2.32 for the whole.

Of the paper's set-up only this is known here: generation takes more than 68.4% of the time.
"""

from __future__ import annotations

import itertools

from benchmarks.published.dimensions import LLAMA_8B
from benchmarks.published.row import Row, ranged
from rlhfspec.core.settings.simulated_cluster import SimulatedClusterConfig
from rlhfspec.policies.simulate.cluster_simulation import bound, simulate_cluster
from rlhfspec.policies.simulate.described_cluster import describe

GENERATION, WHOLE = 3.01, 2.32
LEAST_SHARE = 0.684
ACCEPTANCE = (2.5, 3.5, 4.5)
DEPTH = 5
SAMPLES = (8, 64)
DEVICES = ("L40S", "H100")


def rows() -> list[Row]:
    """Both figures."""
    central = generation(ACCEPTANCE[1], 24, "L40S")
    others = [generation(*case) for case in itertools.product(ACCEPTANCE, SAMPLES, DEVICES)]
    steps = [bound(LEAST_SHARE, GENERATION), GENERATION]
    return [
        ranged(
            "rlhfspec_generation",
            GENERATION,
            central,
            others,
            matters="adaptive chains and reallocation over plain decoding without moves. Not known: model (Llama 8B "
            "taken), devices (8 L40S or H100, middle L40S), samples each (8 to 64, middle 24), acceptance length at 5 "
            "levels (2.5 to 4.5, middle 3.5), lengths (long tail), baseline",
        ),
        ranged(
            "rlhfspec_whole",
            WHOLE,
            bound((LEAST_SHARE + 1.0) / 2.0, GENERATION),
            steps,
            matters="known: generation's published speed-up, and that its share is above 0.684. Not known: the share "
            "(0.684 to 1, middle 0.842)",
        ),
    ]


def generation(acceptance: float, samples: int, device: str) -> float:
    """Seconds of a rollout with plain decoding and no moves, over those with adaptive drafts and moves."""
    seconds = []
    for kind, policy in (("none", "static"), ("head", "finish_time")):
        config = SimulatedClusterConfig.model_validate(
            {
                "model": {"dimensions": LLAMA_8B},
                "device": {"name": device},
                "pools": {"instances": 8, "trainer_gpus": 8, "colocated": True},
                "lengths": {"samples": 8 * samples, "max_new_tokens": 1024, "prompt_tokens": 64},
                "drafter": {"kind": kind, "depth": DEPTH, "acceptance_length": acceptance},
                "reallocation": {"policy": policy},
                "step": {"steps": 1},
            }
        )
        seconds.append(simulate_cluster(describe(config)).speculative.rollout_s)
    return seconds[0] / seconds[1]
