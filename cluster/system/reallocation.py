"""The policies that move samples and size the pool: their cost models from the profile and the models' shapes."""

from __future__ import annotations

from dataclasses import replace

from rlhfspec.core.config import Config, ReallocationConfig
from rlhfspec.engine.cache.kv_pool import KVShape
from rlhfspec.engine.weights.loading import load_hf_config
from rlhfspec.policies.reallocation.by_name import make_reallocation_policy
from rlhfspec.policies.reallocation.gate import Gate
from rlhfspec.policies.reallocation.pool_records import ReallocationPolicy
from rlhfspec.policies.reallocation.rate_curve import RateCurve, rate_curve_from_profile
from rlhfspec.policies.scaling.scaling_policy import ScalingPolicy
from rlhfspec.policies.scaling.scaling_records import Limits
from rlhfspec.profiles.profile import Profile

MOVING_POLICIES = ("finish_time", "paper_rule")
_GUESSED_SAMPLES = (1, 4, 64)
_GUESSED_RATES = (1.0, 3.0, 6.0)
"Without a profile: what processors deliver over samples, in units the run corrects by one factor."
_UNIT_TOKENS_PER_S = 100.0


def reallocation_policy(config: Config, profile: Profile | None) -> ReallocationPolicy | None:
    """Make the configured policy; None where no sample ever moves. Model names must be resolved."""
    wanted = config.reallocation
    if wanted.policy not in MOVING_POLICIES:
        return None
    gate = Gate(kv_bytes_per_token=_kv_bytes_per_token(config), mode=wanted.mode)
    return make_reallocation_policy(
        wanted.policy, curve=_curve(config, profile), gate=gate, seed=config.run.seed
    )


def scaling_policy(config: Config, profile: Profile | None) -> ScalingPolicy | None:
    """Make the policy of the pool's size; None where it is fixed."""
    pool = config.cluster.generation
    if not pool.is_elastic:
        return None
    limits = Limits(least=pool.least, most=pool.most, idle_timeout_s=pool.idle_timeout_s)
    can_move = config.reallocation.policy in MOVING_POLICIES
    return ScalingPolicy(_curve(config, profile), limits, can_move=can_move)


def migration_settings(config: Config) -> ReallocationConfig | None:
    """What an instance needs to move samples; None where none ever moves."""
    wanted = config.reallocation
    if wanted.policy not in MOVING_POLICIES or config.cluster.generation.most == 1:
        return None
    return wanted


def _curve(config: Config, profile: Profile | None) -> RateCurve:
    if profile is None:
        return RateCurve(_GUESSED_SAMPLES, [rate * _UNIT_TOKENS_PER_S for rate in _GUESSED_RATES])
    speculation = config.speculation
    return rate_curve_from_profile(profile, max_nodes=speculation.max_nodes, max_depth=speculation.max_depth)


def _kv_bytes_per_token(config: Config) -> float:
    """Target and draft cache together, float32 as on CPU: an upper bound on devices that keep bfloat16."""
    names = [config.models.target]
    if config.speculation.drafter in ("model", "head") and config.models.draft is not None:
        # the config of a head is one of a model with one layer
        names.append(config.models.draft)
    shapes = [KVShape.of(_read(name, config)) for name in names]
    if config.speculation.drafter == "mtp":
        # an MTP layer has the sizes of the target's own
        shapes.append(replace(shapes[0], num_layers=1))
    return float(sum(shape.token_bytes for shape in shapes))


def _read(name: str, config: Config):
    return load_hf_config(name, trust_remote_code=config.models.trust_remote_code)
