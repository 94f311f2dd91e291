"""The ways to decode: chains and trees of every drafter, mixtures, and the adaptive policy."""

from __future__ import annotations

from dataclasses import dataclass

from rlhfspec.core.config import SpeculationConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One way to decode."""

    name: str
    batch_size: int
    speculation: SpeculationConfig


PLANS = (
    Plan(name="plain", batch_size=5, speculation=SpeculationConfig(policy="off")),
    Plan(name="plain, other batch", batch_size=16, speculation=SpeculationConfig(policy="off")),
    Plan(name="chain n=4", batch_size=3, speculation=SpeculationConfig(policy="fixed", num_nodes=4)),
    Plan(
        name="tree n=8 b=2",
        batch_size=8,
        speculation=SpeculationConfig(policy="fixed", num_nodes=8, depth=5, branching=2),
    ),
    Plan(
        name="tree n=16 b=3",
        batch_size=12,
        speculation=SpeculationConfig(policy="fixed", num_nodes=16, depth=6, branching=3),
    ),
    Plan(
        name="suffix",
        batch_size=6,
        speculation=SpeculationConfig(policy="fixed", drafter="suffix", num_nodes=6),
    ),
    Plan(
        name="head, tree n=8 b=3",
        batch_size=7,
        speculation=SpeculationConfig(policy="fixed", drafter="head", num_nodes=8, depth=4, branching=3),
    ),
    Plan(
        name="head beside look-ups",
        batch_size=8,
        speculation=SpeculationConfig(
            policy="fixed", drafter="head", look_up="suffix", num_nodes=8, depth=4, branching=2
        ),
    ),
)
ADAPTIVE = (
    Plan(name="goodput, draft exchanged", batch_size=9, speculation=SpeculationConfig(policy="goodput")),
    Plan(
        name="goodput beside look-ups, draft exchanged",
        batch_size=6,
        speculation=SpeculationConfig(policy="goodput", look_up="suffix"),
    ),
    Plan(
        name="goodput, head beside look-ups, head exchanged",
        batch_size=7,
        speculation=SpeculationConfig(policy="goodput", drafter="head", look_up="suffix"),
    ),
    Plan(
        name="goodput, look-ups alone",
        batch_size=8,
        speculation=SpeculationConfig(policy="goodput", drafter="suffix"),
    ),
)
"By a measured profile."
ACTOR_PLAN = PLANS[3]
