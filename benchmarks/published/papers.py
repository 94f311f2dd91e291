"""Published speed-ups beside simulated ones; every figure and range is in `papers.toml`.

Of NeMo-RL's tables steps follow from published seconds or from the other projection; rollouts lack what they depend on
most. What TLT's engine adds to a speculative step is not published as such: once it is ours (vLLM's chains), once it is
taken from the published rows of other depths at batch 1.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from ...core.settings.simulated_cluster import SimulatedClusterConfig
from ...policies.simulate.analytic_instance import AnalyticInstance
from ...policies.simulate.cluster_simulation import ClusterResult, bound, simulate_cluster
from ...policies.simulate.described_cluster import describe

PAPERS = tomllib.loads(Path(__file__).with_name("papers.toml").read_text())
MODELS, TLT = PAPERS["models"], PAPERS["tlt"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A speed-up as published and as simulated."""

    name: str
    published: float
    simulated: float
    "with every unknown input at a value that was set beforehand"
    low: float
    high: float
    "over the range of what is not published"
    known: bool
    "whether every input that matters is published"
    matters: str
    "what is published, and what is not: its range"

    @property
    def deviation(self) -> float:
        """Simulated over published, less one."""
        return self.simulated / self.published - 1.0

    @property
    def outside(self) -> float:
        """How far the published figure lies outside the range, as a share of it; 0 within."""
        return max(self.low / self.published - 1.0, 1.0 - self.high / self.published, 0.0)

    def tree(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"deviation": self.deviation, "outside": self.outside}


def ranged(
    name: str,
    published: float,
    simulated: float,
    others: Sequence[float],
    matters: str,
    *,
    known: bool = False,
) -> Row:
    """A row whose range is that of all these values."""
    return Row(
        name=name,
        published=published,
        simulated=simulated,
        low=min((simulated, *others)),
        high=max((simulated, *others)),
        known=known,
        matters=matters,
    )


def simulated(model: str, device: dict[str, Any], **sections: dict[str, Any]) -> ClusterResult:
    """One step of a paper's model on its devices; `precision` and shares stand in `device`."""
    tree = {
        "model": {"dimensions": MODELS[model], "precision": device.pop("precision", "bf16")},
        "device": device,
        "step": {"steps": 1},
    }
    return simulate_cluster(describe(SimulatedClusterConfig.model_validate(tree | sections)))


def tlt_rows() -> Iterator[Row]:
    """Twelve figures, with the engine's share from other depths; the range holds our own share too."""
    cases = list(product(TLT["contexts"], TLT["compute"]))
    instances = {share: tlt_instance(share) for share in TLT["compute"]}
    fitted = {case: engine_share(instances[case[1]], case[0]) for case in cases}
    ours = (0.0, SimulatedClusterConfig().drafter.step_s)
    for verified, figures in TLT["published"].items():
        for batch, published in zip(TLT["batches"], figures, strict=True):
            others = [
                tlt_speedup(instances[share], batch, int(verified), context, engine)
                for context, share in cases
                for engine in (fitted[context, share], ours)
            ]
            middle = tlt_speedup(instances[0.6], batch, int(verified), 2000, fitted[2000, 0.6])
            yield ranged(f"tlt_{verified}_b{batch}", published, middle, others, TLT["matters"])


def tlt_instance(compute_share: float) -> AnalyticInstance:
    """Four H100 that share the model and its one-layer draft model with the target's vocabulary."""
    model = MODELS["qwen25_32b"]
    config = {
        "model": {"dimensions": model},
        "device": {"name": "H100", "compute_share": compute_share},
        "pools": {"tensor_parallel": 4},
        "drafter": {
            "policy": "fixed",
            "depth": TLT["compared_depth"],
            "nodes": 63,
            "width": TLT["width"],
            "acceptance_length": 8.21,
            "vocab_size": model["vocab_size"],
            "step_s": 0.0,
        },
    }
    return describe(SimulatedClusterConfig.model_validate(config)).instance


def engine_share(made: AnalyticInstance, context: int) -> tuple[float, float]:
    """Seconds that the engine adds to a level and to a step: least squares at batch 1, over all other depths."""
    terms, left = [], []
    for (row, depth), (column, verified) in product(enumerate(TLT["depths"]), enumerate(TLT["verified"])):
        if depth == TLT["compared_depth"]:
            continue
        took_s = TLT["acceptance"][row][column] / TLT["speedup"][row][column] * made.plain_s(1, context)
        modelled_s = made.speculative_s(1, context, nodes=verified - 1, levels=depth, width=TLT["width"])
        # relative errors count alike
        terms.append([depth / took_s, 1.0 / took_s])
        left.append((took_s - modelled_s) / took_s)
    level_s, step_s = np.linalg.lstsq(np.array(terms), np.array(left), rcond=None)[0]
    return float(level_s), float(step_s)


def tlt_speedup(
    made: AnalyticInstance, batch: int, verified: int, context: int, engine: tuple[float, float]
) -> float:
    """Speed-up of steady decoding with a tree of the compared depth."""
    depth, held = TLT["compared_depth"], batch * context
    length = TLT["acceptance"][TLT["depths"].index(depth)][TLT["verified"].index(verified)]
    step_s = made.speculative_s(batch, held, nodes=verified - 1, levels=depth, width=TLT["width"])
    level_s, fixed_s = engine
    return length * made.plain_s(batch, held) / (step_s + depth * level_s + fixed_s)


def rlhfspec_rows() -> Iterator[Row]:
    """Generation and the whole."""
    paper = PAPERS["rlhfspec"]

    def generation(acceptance: float, samples: int, device: str) -> float:
        """Seconds of a rollout with plain decoding and no moves, over those with adaptive drafts and moves."""
        plain, ours = (
            simulated(
                "llama_8b",
                {"name": device},
                pools={"instances": 8, "trainer_gpus": 8, "colocated": True},
                lengths={"samples": 8 * samples, "max_new_tokens": 1024, "prompt_tokens": 64},
                drafter={"kind": kind, "depth": 5, "acceptance_length": acceptance},
                reallocation={"policy": policy},
            ).speculative.rollout_s
            for kind, policy in (("none", "static"), ("head", "finish_time"))
        )
        return plain / ours

    published, least = paper["generation"], paper["least_share"]
    yield ranged(
        "rlhfspec_generation",
        published,
        generation(3.5, 24, "L40S"),
        [generation(*case) for case in product(paper["acceptance"], paper["samples"], paper["devices"])],
        paper["generation_matters"],
    )
    yield ranged(
        "rlhfspec_whole",
        paper["whole"],
        bound((least + 1.0) / 2.0, published),
        [bound(least, published), published],
        paper["whole_matters"],
    )


def nemo_8b_rows() -> Iterator[Row]:
    """The four figures of NeMo-RL's measured table."""
    paper = PAPERS["nemo_8b"]

    def rollout(acceptance: float, samples: int, limit: int, engine_s: float | None = None) -> float:
        engine = {} if engine_s is None else {"step_s": engine_s}
        return simulated(
            "qwen3_8b",
            {"name": "GB200"},
            pools={"instances": 32, "trainer_gpus": 32, "colocated": True},
            lengths={"samples": 32 * samples, "max_new_tokens": limit},
            drafter={"policy": "fixed", "depth": 3, "acceptance_length": acceptance} | engine,
            reallocation={"policy": "static"},
        ).rollout_speedup

    least, middle, most = paper["acceptance"]
    grid = product((least, most), paper["samples_per_gpu"], paper["limits"], paper["engine_s"])
    others, central = [rollout(*case) for case in grid], rollout(middle, 32, 8192)
    for name in ("zero", "think"):
        plain_s, step_s, faster, step_faster = paper[name]
        yield ranged(f"nemo_8b_{name}_rollout", faster, central, others, paper["rollout_matters"])
        followed = step_speedup(plain_s, step_s - plain_s, faster)
        yield ranged(f"nemo_8b_{name}_step", step_faster, followed, [], paper["step_matters"], known=True)


def step_speedup(rollout_s: float, rest_s: float, faster: float) -> float:
    """What a faster rollout makes of a step whose parts take turns."""
    return (rollout_s + rest_s) / (rollout_s / faster + rest_s)


def share_of(rollout_speedup: float, step_speedup: float) -> float:
    """Share of rollout in a step with which the bound's formula gives this pair."""
    return (1.0 - 1.0 / step_speedup) / (1.0 - 1.0 / rollout_speedup)


def nemo_235b_rows() -> Iterator[Row]:
    """The four projected figures, and the two with asynchrony."""
    paper = PAPERS["nemo_235b"]
    projected = {int(levels): tuple(row) for levels, row in paper["projected"].items()}
    at_2048: list[float] = []
    for levels, (length, faster, step_faster) in projected.items():
        grid = product(
            paper["gpus"], paper["layouts"], (paper["lengths"][0], paper["lengths"][2]), (False, True)
        )
        found = [(case, _projected(levels, length, *case)) for case in grid]
        central = _projected(levels, length, 1024, paper["layouts"][0], paper["lengths"][1], False)
        others = [value for _, value in found]
        at_2048 += [value for case, value in found if case[0] == 2048]
        yield ranged(f"nemo_235b_k{levels}_rollout", faster, central, others, paper["rollout_matters"])
        [(_, their_rollout, their_step)] = [projected[other] for other in projected if other != levels]
        share = share_of(their_rollout, their_step)
        matters = paper["step_matters"].format(share=share)
        yield ranged(f"nemo_235b_k{levels}_step", step_faster, bound(share, faster), [], matters, known=True)
    rollout, step = paper["asynchronous"]
    middle = sum(at_2048) / len(at_2048)
    yield ranged("nemo_235b_async_rollout", rollout, middle, at_2048, paper["asynchronous_rollout_matters"])
    # pools split so that neither waits: generation and training are both always busy
    shares = (
        min(share_of(faster, step_faster) for _, faster, step_faster in projected.values()),
        paper["most_share"],
    )
    yield ranged(
        "nemo_235b_async_step",
        step,
        bound(sum(shares) / 2, middle),
        [bound(share, value) for share in shares for value in at_2048],
        paper["asynchronous_step_matters"].format(share=shares[0]),
    )


def _projected(
    levels: int, length: float, gpus: int, layout: Sequence[Any], lengths: Sequence[Any], ideal: bool
) -> float:
    """`ideal`: kernels start at once, the engine adds nothing, and all samples are accepted alike."""
    (split, per_instance), (draw, limit) = layout, lengths
    return simulated(
        "qwen3_235b",
        {"name": "GB200", "precision": "fp8"} | ({"layer_s": 0.0, "collective_s": 0.0} if ideal else {}),
        pools={
            "instances": gpus // per_instance,
            "split": split,
            "tensor_parallel": per_instance,
            "trainer_gpus": gpus,
            "colocated": True,
        },
        lengths={"samples": 4096, "draw": draw, "max_new_tokens": limit}
        | ({"speed_sigma": 0.0} if ideal else {}),
        drafter={"policy": "fixed", "depth": levels, "acceptance_length": length}
        | ({"step_s": 0.0} if ideal else {}),
        reallocation={"policy": "static"},
    ).rollout_speedup
