"""Plays the rollouts of a described cluster: the pool that its config stands for, under the policy that it names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from rlhfspec.core.errors import ConfigError
from rlhfspec.policies.reallocation.by_name import make_reallocation_policy
from rlhfspec.policies.reallocation.pool_records import ReallocationPolicy
from rlhfspec.policies.reallocation.rate_curve import RateCurve, rate_curve_from_profile
from rlhfspec.policies.simulate.analytic_instance import Speculation, last_step_tokens, prompt_cost
from rlhfspec.policies.simulate.described_cluster import DescribedCluster
from rlhfspec.policies.simulate.perfect import least_finish_s
from rlhfspec.policies.simulate.simulation import simulate
from rlhfspec.policies.simulate.simulation_records import Binding, PoolSetup, Samples, SimulationResult
from rlhfspec.profiles.profile import Profile

POLLS = 200
"Of a rollout, where no interval is given."
MOST_POLLS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutPlayer:
    """Of one way to decode."""

    cluster: DescribedCluster
    curve: RateCurve
    slots: int
    speculation: Speculation
    earlier: np.ndarray
    "lengths that policies have seen before"
    profile: Profile | None = None

    @classmethod
    def of(
        cls,
        cluster: DescribedCluster,
        profile: Profile | None,
        speculation: Speculation,
        *,
        slots: int,
        mean_tokens: float,
        earlier: np.ndarray,
    ) -> RolloutPlayer:
        """Put one together; `mean_tokens` are of a sample at its end, its prompt included."""
        prompt = cluster.config.lengths.prompt_tokens
        # on its way a sample has half of its response
        context = max(int(prompt + (mean_tokens - prompt) / 2), 1)
        if profile is not None:
            curve = rate_curve_from_profile(profile, context_tokens=context, speculation=speculation != "off")
        else:
            curve = cluster.instance.rate_curve(
                context_tokens=context, max_samples=slots, speculation=speculation
            )
        machine = cluster.machine
        if machine is not None:
            # a profile is of an instance that is alone
            curve.factor /= machine.factor(cluster.config.pools.instances)
        return cls(
            cluster=cluster,
            curve=curve,
            slots=slots,
            speculation=speculation,
            earlier=earlier,
            profile=profile,
        )

    def play(
        self,
        samples: Samples,
        *,
        learner_s: float = 0.0,
        progress: Callable[[int], None] | None = None,
    ) -> SimulationResult:
        """Play one rollout, with an update beside it on the same machine or elsewhere.

        Raises ConfigError where polls are absurdly many.
        """
        setup = replace(self.setup(samples), learner_s=learner_s)
        return simulate(self.own(samples), setup, self.policy(), binding=self.binding, progress=progress)

    @property
    def trainer_stretch(self) -> float:
        """How many times as long an update takes with no instance beside it as with nothing else busy."""
        machine = self.cluster.machine
        return 1.0 if machine is None else machine.factor(0, trainer=True)

    @property
    def binding(self) -> Binding:
        """Of samples to instances."""
        return "static" if self.cluster.config.reallocation.policy == "static" else "pull"

    def own(self, samples: Samples) -> Samples:
        """The samples as they decode here: without drafts none is faster than another."""
        if self.speculation != "off":
            return samples
        return replace(samples, speed=np.ones(len(samples)))

    def setup(self, samples: Samples) -> PoolSetup:
        """The pool for these samples. Raises ConfigError where polls are absurdly many."""
        config, profile = self.cluster.config, self.profile
        pools, machine = config.pools, self.cluster.machine
        prompt_s, token_s = 0.0, self.cluster.instance.target.prefill_token_s()
        wasted = 0.0
        if profile is not None:
            prompt_s, token_s = prompt_cost(profile.cost, round(float(samples.prompt_tokens.mean())))
            if machine is not None:
                slower = machine.factor(pools.instances)
                prompt_s, token_s = slower * prompt_s, slower * token_s
            if self.speculation != "off":
                context = round(float(_context(samples).mean()))
                wasted = last_step_tokens(profile, samples=self.slots, context_tokens=context)
        setup = PoolSetup(
            num_instances=pools.instances,
            num_slots=self.slots,
            curve=self.curve,
            max_new_tokens=int(samples.response_tokens.max()),
            moves=self.cluster.moves(prompt_s=prompt_s, prompt_token_s=token_s),
            prompt_s=prompt_s,
            prompt_token_s=token_s,
            last_step_tokens=wasted,
            report_interval_s=pools.report_s,
            message_s=pools.message_s,
            machine=machine,
            poll_interval_s=config.reallocation.poll_interval_s or 1.0,
        )
        least_s = least_finish_s(samples, setup)
        if config.reallocation.poll_interval_s is None:
            setup = replace(setup, poll_interval_s=max(least_s / POLLS, 1e-3))
        require_few_polls(setup.poll_interval_s, least_s)
        return setup

    def policy(self) -> ReallocationPolicy:
        """What moves samples; it starts afresh, and knows what moves take."""
        return make_reallocation_policy(
            self.cluster.config.reallocation.policy,
            curve=self.curve.copy(),
            gate=self.cluster.moves().gate(),
            earlier_lengths=self.earlier.tolist(),
        )


def _context(samples: Samples) -> np.ndarray:
    """[n] tokens of each sample at its end."""
    return samples.prompt_tokens + samples.response_tokens


def require_few_polls(poll_interval_s: float, least_s: float) -> None:
    """Raise ConfigError where a rollout that takes at least `least_s` would be looked at absurdly often."""
    if least_s / poll_interval_s > MOST_POLLS:
        raise ConfigError(
            f"reallocation.poll_interval_s {poll_interval_s:g} would look {least_s / poll_interval_s:,.0f} times at a "
            f"rollout of {least_s:.0f} s; expected at most {MOST_POLLS:,} looks: leave it out for {POLLS} of them"
        )
