"""Puts an engine together from models and config sections."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch
from transformers.modeling_utils import PreTrainedModel

from core.config import EngineConfig, SpeculationConfig
from core.errors import ConfigError, ModelError, NumericsError
from engine.admission import MB
from engine.attention.backends import ATTENTION, Attention
from engine.attention.xformers import require_xformers, xformers_attention
from engine.cpu.serving import serves_thread
from engine.drafters.drafter import Drafter
from engine.drafters.model_drafter import ModelDrafter
from engine.drafters.ngram_drafter import NgramDrafter
from engine.drafters.refinement import Scorer
from engine.engine import Engine, Numerics
from engine.model.cuda_graphs import CudaRecorder
from engine.model.invariance_probe import prove_invariance
from engine.model.runner import ModelRunner
from engine.weights.loading import max_context_tokens
from policies.drafting.baselines.bandit import BanditPolicy
from policies.drafting.baselines.batch_table import BatchTablePolicy
from policies.drafting.baselines.capacity import CapacityPolicy
from policies.drafting.baselines.fixed import FixedPolicy, OffPolicy
from policies.drafting.cadence import Cadence
from policies.drafting.draft_policy import DraftPolicy, RefiningPolicy
from policies.drafting.goodput import GoodputPolicy
from profiles.profile import Profile

logger = logging.getLogger(__name__)


def build_engine(
    target: PreTrainedModel,
    draft: PreTrainedModel | None,
    *,
    engine: EngineConfig,
    speculation: SpeculationConfig,
    max_total_tokens: int,
    vocab_size: int | None = None,
    instance: str = "local",
    weight_version: int = 0,
    drafter_version: int = 0,
    clock: Callable[[], float] = time.perf_counter,
    policy: DraftPolicy | None = None,
    profile: Profile | None = None,
) -> Engine:
    """Build an engine.

    On CPU torch's number of threads is set to `engine.num_threads`, for this thread and those that start later: the
    thread that decodes must be one of them, or set it itself.

    Args:
        target: the target model, in eval mode.
        draft: the draft model, for drafter `model`.
        engine: numerics, attention, slots, threads.
        speculation: drafter and draft policy.
        max_total_tokens: the longest prompt plus the longest response.
        vocab_size: number of real token ids; padded ids above it are never sampled. All of the target's by default.
        instance: name in completions and loads.
        weight_version: version of the target's weights.
        drafter_version: version of the draft model's weights.
        clock: seconds, for step records.
        policy: instead of the one that `speculation` describes.
        profile: what the policy `goodput` and every refined budget go by.

    Raises:
        ModelError: the architecture is not served, the context is longer than a model's positions, or the draft's
            vocabulary is too small.
        NotFiniteError: weights or logits of a model are not finite.
        ConfigError: what the settings ask for does not go together, or the caches have no room for one sample.
        NumericsError: invariant numerics are asked for and the probe finds a difference.
    """
    for model, role in ((target, "target"), (draft, "draft")):
        if model is not None:
            _check_context(model, role, max_total_tokens)
    device = resolve_device(engine)
    if device.type == "cpu":
        use_threads(engine.num_threads)
    numerics = resolve_numerics(engine, device)
    vocab_size = _vocab_size(target, vocab_size)
    policy = policy or build_policy(speculation, profile)
    attention = attention_for(engine, numerics, device)
    graph_bytes = engine.graph_memory_mb * 10**6

    def runner_of(model: PreTrainedModel) -> ModelRunner:
        return ModelRunner(
            model.to(device),  # type: ignore[arg-type]
            num_slots=engine.max_running_samples,
            capacity=max_total_tokens + policy.max_nodes + 1,
            attention=attention,
            vocab_size=vocab_size,
            reach=None if engine.kv_cache_mb is None else policy.max_nodes + 1,
            stock=engine.forward == "stock",
            recorder=CudaRecorder(device) if device.type == "cuda" and graph_bytes else None,
            graph_bytes=graph_bytes,
        )

    runner = runner_of(target)
    if numerics == "invariant" and engine.probe:
        try:
            prove_invariance(runner, max_nodes=policy.max_nodes)
        except NumericsError:
            if not runner.prepacked:
                raise
            logger.warning(
                "prepacked weights do not round alike on this machine: plain products serve instead"
            )
            runner.stop_prepacking()
            prove_invariance(runner, max_nodes=policy.max_nodes)
    drafter: Drafter | None = None
    if speculation.drafter == "model" and policy.max_nodes > 0:
        if draft is None:
            raise ConfigError("speculation.drafter is 'model' but no draft model was given; set models.draft")
        _check_draft_vocabulary(draft, vocab_size)
        drafter = ModelDrafter(runner_of(draft), max_prefill_tokens=engine.max_prefill_tokens)
    elif speculation.drafter == "ngram" and policy.max_nodes > 0:
        if isinstance(policy, RefiningPolicy):
            raise ConfigError(
                "a policy that refines drafts (goodput) goes by a draft model's scores, and drafter ngram has none; "
                "use bandit, batch_table, capacity or fixed"
            )
        drafter = NgramDrafter(ngram_max=speculation.ngram_max, ngram_min=speculation.ngram_min)
    return Engine(
        runner,
        drafter=drafter,
        policy=policy,
        max_total_tokens=max_total_tokens,
        max_prefill_tokens=engine.max_prefill_tokens,
        instance=instance,
        weight_version=weight_version,
        drafter_version=drafter_version,
        clock=clock,
        scorer=Scorer(profile.acceptance) if profile is not None else None,
        max_cache_bytes=None if engine.kv_cache_mb is None else int(engine.kv_cache_mb * MB),
        numerics=numerics,
    )


def build_policy(speculation: SpeculationConfig, profile: Profile | None = None) -> DraftPolicy:
    """Return the draft policy a config asks for. Raises ConfigError for `goodput` without a profile."""
    if speculation.policy == "off" or speculation.drafter == "none":
        return OffPolicy()
    if speculation.policy == "fixed":
        return FixedPolicy(
            num_nodes=speculation.num_nodes, depth=speculation.depth, branching=speculation.branching
        )
    if speculation.policy == "goodput":
        if profile is None:
            raise ConfigError(
                "speculation.policy goodput needs a profile of this pair on this machine and got none; "
                "set speculation.profile to auto or to a folder that `rlhfspec profile` made"
            )
        return Cadence(
            GoodputPolicy(profile, max_nodes=speculation.max_nodes, max_depth=speculation.max_depth)
        )
    if speculation.policy == "batch_table":
        return BatchTablePolicy(max_nodes=speculation.max_nodes, max_depth=speculation.max_depth)
    if speculation.policy == "bandit":
        return BanditPolicy(max_nodes=speculation.max_nodes, max_depth=speculation.max_depth, seed=0)
    return CapacityPolicy(
        capacity_tokens=speculation.capacity_tokens,
        max_nodes=speculation.num_nodes,
        depth=speculation.depth,
        branching=speculation.branching,
    )


def most_nodes(speculation: SpeculationConfig) -> int:
    """Return the most draft nodes per sample that a config's policy verifies: what the KV pool reserves."""
    if speculation.policy == "off" or speculation.drafter == "none":
        return 0
    if speculation.policy in ("goodput", "batch_table", "bandit"):
        return speculation.max_nodes
    return build_policy(speculation).max_nodes


def resolve_device(engine: EngineConfig) -> torch.device:
    """Return the device to decode on. Raises ConfigError when CUDA is asked for and absent."""
    if engine.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if engine.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("engine.device is cuda but torch sees no CUDA device; use cpu or auto")
    return torch.device(engine.device)


def resolve_numerics(engine: EngineConfig, device: torch.device) -> Numerics:
    """Return invariant or fast; `auto` is invariant on CPU with one thread, where the probe has been seen to hold.

    Raises ConfigError for invariant numerics with several threads: they cut elementwise work anywhere, and a value
    at a cut rounds as scalar code does.
    """
    several = device.type == "cpu" and engine.num_threads > 1
    if engine.numerics == "auto":
        return "invariant" if device.type == "cpu" and not several else "fast"
    if engine.numerics == "invariant" and several:
        raise ConfigError(
            f"engine.numerics invariant needs engine.num_threads 1, got {engine.num_threads}: several threads round "
            "by where they cut the work; use more generation actors, or engine.numerics fast"
        )
    return engine.numerics


def attention_for(engine: EngineConfig, numerics: Numerics, device: torch.device) -> Attention:
    """Return the attention back end. Raises ConfigError when it cannot serve these numerics or this machine."""
    if engine.attention == "auto":
        # our own code is the fastest where it serves, and ordered besides
        return ATTENTION["ordered" if numerics == "invariant" or serves_thread(device) else "sdpa"]
    if numerics == "invariant" and engine.attention in ("sdpa", "xformers"):
        raise ConfigError(
            f"engine.attention {engine.attention} is not invariant: its row sums depend on neighbours; "
            "use ordered (or auto), or engine.numerics fast"
        )
    if engine.attention == "xformers":
        require_xformers(device)
        return xformers_attention
    return ATTENTION[engine.attention]


def describe_numerics(engine: EngineConfig, device: torch.device) -> str:
    """Return in one line what is promised of tokens, and why where `auto` promises less than every bit."""
    numerics = resolve_numerics(engine, device)
    if numerics == "invariant":
        return "invariant: tokens and log-probabilities are equal bit for bit, whatever is drafted, batched or moved"
    if engine.numerics == "fast":
        why = "engine.numerics says so"
    elif device.type == "cpu":
        why = f"engine.num_threads is {engine.num_threads}, and several threads round by where they cut the work"
    else:
        why = "on CUDA library products round by the batch"
    return f"fast: tokens follow the model's distribution, their bits may depend on the batch ({why})"


def use_threads(num_threads: int) -> None:
    """Set torch's thread count for this thread: one a generation actor is the honest default on CPU."""
    if torch.get_num_threads() != num_threads:
        logger.info("torch threads: %d, as engine.num_threads says", num_threads)
        torch.set_num_threads(num_threads)


def _check_context(model: PreTrainedModel, role: str, max_total_tokens: int) -> None:
    limit = max_context_tokens(model.config)
    if limit is not None and max_total_tokens > limit:
        raise ModelError(
            f"the longest prompt and response take {max_total_tokens} tokens, the {role} model's context is "
            f"{limit}; lower data.max_prompt_tokens or sampling.max_new_tokens"
        )


def _vocab_size(target: PreTrainedModel, wanted: int | None) -> int:
    have = int(target.config.get_text_config().vocab_size)
    if wanted is not None and not 1 <= wanted <= have:
        raise ConfigError(f"expected a vocab_size from 1 to {have}, the target's, got {wanted!r}")
    return wanted or have


def _check_draft_vocabulary(draft: PreTrainedModel, vocab_size: int) -> None:
    have = int(draft.config.get_text_config().vocab_size)
    if have < vocab_size:
        raise ModelError(
            f"the draft model has {have} token ids, the tokenizer {vocab_size}; take a draft of the same family"
        )
