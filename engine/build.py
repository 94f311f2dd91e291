"""Puts an engine together from models and config sections."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from torch import Tensor, nn

from ..core.config import EngineConfig, SpeculationConfig
from ..core.errors import ConfigError, ModelError, NotInvariantError, NumericsError
from ..core.weight_records import WeightManifest
from ..policies.drafting.draft_policy import DraftPolicy
from ..profiles.profile import Profile
from .admission import MB
from .cache.kv_pool import KVPool
from .decode_step import DecodeStep, decode_step
from .draft_policies import build_policy
from .drafters.drafter import Drafter, part_of
from .drafters.drafter_list import DrafterList
from .drafters.head.head_drafter import HeadDrafter
from .drafters.head.head_forward import HeadForward, MtpForward
from .drafters.head.head_weights import HeadWeights, require_fit
from .drafters.head.mtp_weights import MtpConfig
from .drafters.head.published_head import head_checksum
from .drafters.head.tapping import tap_for_head
from .drafters.level_drafter import LevelDrafter
from .drafters.look_up_drafter import LookUpDrafter
from .drafters.model_drafter import ModelDrafter
from .drafters.refinement import Scorer
from .drafters.suffix_drafter import SuffixDrafter
from .engine import Engine
from .group.dealing import require_dealt
from .group.group_probe import require_bits_of_one_rank
from .model.compute_backend import ComputeBackend, PoolAttention
from .model.cuda_graphs import CudaRecorder
from .model.invariance_probe import KeptVerdicts, Verdict, check_invariance, facts_of
from .model.llama_model import LlamaModel, known_config
from .model.runner import ModelRunner
from .model.support import not_held
from .numerics import (
    Numerics,
    attention_for,
    choose_backend,
    describe_numerics,
    kernels_for,
    resolve_device,
    resolve_numerics,
    use_threads,
)
from .parts import Ranks
from .recorded_step import StepRecordings
from .weights.causal_lm import DTYPES, CausalLM, max_context_tokens
from .weights.chunks import model_checksum
from .weights.shared_weights import SharedWeights

logger = logging.getLogger(__name__)


def published_model(
    manifest: WeightManifest,
    parts: Iterable[Mapping[str, Tensor]],
    dtype: str,
    *,
    backend: ComputeBackend,
    who: str,
    stock: bool = False,
    keeps_head: bool = False,
    ranks: Ranks | None = None,
    vocab_size: int | None = None,
    shared: SharedWeights | None = None,
) -> CausalLM:
    """Return the model that a manifest describes, with its weights: ours, or transformers' for other families.

    Args:
        manifest: of the version.
        parts: its tensors.
        dtype: that it is published in.
        backend: what computes.
        who: in errors.
        stock: take transformers' whatever the family.
        keeps_head: as of `LlamaModel`.
        ranks: the group whose leader this is, to which the model is dealt.
        vocab_size: as of `LlamaModel`.
        shared: memory for weights that are laid out on a CPU; None: this process's own.

    Raises:
        ModelError: transformers knows no such model, or it is none that can be dealt to ranks.
        WeightsError: what was loaded is not, bit for bit, what came.
        NumericsError: the ranks of a group do not give the bits of one.
    """
    shapes = {spec.name: tuple(spec.shape) for spec in manifest.tensors}
    config = None if stock else known_config(manifest.hf_config_json, shapes)
    if ranks is not None:
        require_dealt(manifest.hf_config_json, config, ranks.share.ranks, vocab_size)
        # library products have no parts: what they add up depends on the ranks
        if isinstance(backend.attention, PoolAttention):
            require_bits_of_one_rank(manifest.hf_config_json, dtype, backend=backend, ranks=ranks)
    if config is not None:
        own = LlamaModel(
            config, DTYPES[dtype], backend, keeps_head=keeps_head, ranks=ranks, vocab_size=vocab_size
        )
        if shared is not None:
            own.share(shared)
        altered, own.checksum = own.load(shapes, parts), manifest.checksum
        model: CausalLM = own
    else:
        # takes as long as all the rest of a start
        from .model.stock_forward import load_module
        from .weights.loading import build_causal_lm

        module = build_causal_lm(manifest.hf_config_json, dtype).to(backend.device)  # type: ignore[arg-type]
        altered, model = load_module(module, shapes, parts), module
    if altered is not None:
        raise not_held(who, altered)
    return model


def backend_for(engine: EngineConfig) -> ComputeBackend:
    """Return what computes, and set torch's number of threads on a CPU. Raises ConfigError."""
    device = resolve_device(engine.device)
    if device.type == "cpu":
        use_threads(engine.num_threads)
    return choose_backend(device, kernels=kernels_for(engine, resolve_numerics(engine, device)))


def build_engine(
    target: CausalLM,
    draft: CausalLM | HeadWeights | None,
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
    drafter: Drafter | None = None,
    profile: Profile | None = None,
    backend: ComputeBackend | None = None,
    verdicts: KeptVerdicts | None = None,
    takes_drafts: bool = False,
) -> Engine:
    """Build an engine.

    On CPU `backend_for` sets torch's threads to `engine.num_threads`, here and in threads that start later; whoever
    gives `backend` or a `LlamaModel` has set them. The thread that decodes must be one of these, or set it itself.

    Args:
        target: the target model, in eval mode.
        draft: for drafter `model` the draft model, for `head` the draft head, for `mtp` the MTP layer; else unused.
        engine: numerics, attention, slots, threads.
        speculation: drafter and draft policy.
        max_total_tokens: the longest prompt plus the longest response.
        vocab_size: number of real token ids; padded ids above it are never sampled. All of the target's by default.
        instance: name in completions and loads.
        weight_version: version of the target's weights.
        drafter_version: version of the draft model's weights.
        clock: seconds, for step records.
        policy: instead of the one that `speculation` describes.
        drafter: likewise.
        profile: what the policy `goodput` and every refined budget go by.
        backend: what computes, instead of the one that device and threads ask for.
        verdicts: where the probe's verdict is looked for and kept; None: the probe runs at every start.
        takes_drafts: requests may bring some (`SampleRequest.draft`), which stand beside the drafter's.

    Raises:
        ModelError: the architecture is not served, the context is longer than a model's positions, or the draft's
            vocabulary is too small.
        ConfigError: what the settings ask for does not go together, or the caches have no room for one sample.
        NotFiniteError, NumericsError: weights or logits are not finite, or invariant numerics not invariant.
    """
    _check_contexts(target, draft, max_total_tokens)
    policy = policy or build_policy(speculation, profile, takes_drafts=takes_drafts)
    runners = _Runners(
        engine,
        backend or (target.backend if isinstance(target, LlamaModel) else backend_for(engine)),
        max_total_tokens=max_total_tokens,
        max_nodes=policy.max_nodes,
        vocab_size=_vocab_size(target, vocab_size),
        instance=instance,
    )
    runner, refused = runners.checked(target, verdicts)
    if drafter is None and policy.max_nodes:
        drafter = _drafter(speculation, policy, draft, runner, runners, takes_drafts=takes_drafts)
    made = Engine(
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
        max_kept_bytes=int(engine.turn_cache_mb * MB),
        numerics=runners.numerics,
        promise=describe_numerics(engine, runner.device, refused=refused),
        decode=_decode(engine, runner),
    )
    made.drafter_checksum = _checksum(draft) if part_of(drafter, LevelDrafter) else ""
    return made


def _checksum(draft: CausalLM | HeadWeights | None) -> str:
    """Of what drafts, as its manifest has it."""
    if isinstance(draft, HeadWeights):
        return head_checksum(draft)
    if isinstance(draft, LlamaModel):
        return draft.checksum
    return model_checksum(draft) if isinstance(draft, nn.Module) else ""


def _decode(engine: EngineConfig, runner: ModelRunner) -> DecodeStep:
    graph_bytes = engine.graph_memory_mb * MB
    # the ranks of a group replay forwards, and are told of each
    if runner.device.type != "cuda" or not graph_bytes or runner.ranks is not None:
        return decode_step
    return StepRecordings(CudaRecorder(runner.device), max_bytes=graph_bytes)


def build_scoring_runner(
    target: CausalLM,
    *,
    engine: EngineConfig,
    num_slots: int,
    max_total_tokens: int,
    vocab_size: int | None = None,
    max_nodes: int = 16,
) -> ModelRunner:
    """Build the forward of an engine alone, to be fed with finished samples; arguments and errors as `build_engine`.

    Its caches take memory as `pool.memory.hold` asks for it.
    """
    # a limit makes the pool paged; the caller holds no more than its samples take
    paged = engine.model_copy(update={"max_running_samples": num_slots, "kv_cache_mb": 1.0})
    runners = _Runners(
        paged,
        target.backend if isinstance(target, LlamaModel) else backend_for(engine),
        max_total_tokens=max_total_tokens,
        max_nodes=max_nodes,
        vocab_size=_vocab_size(target, vocab_size),
        instance="the trainer",
    )
    runner = runners.of(target, "scoring")
    if runners.numerics == "invariant" and engine.probe:
        _check_invariance(runner, max_nodes, None)
    return runner


class _Runners:
    """Makes an engine's runners, which share numerics, back end and sizes."""

    def __init__(
        self,
        engine: EngineConfig,
        backend: ComputeBackend,
        *,
        max_total_tokens: int,
        max_nodes: int,
        vocab_size: int,
        instance: str,
    ) -> None:
        self.engine, self.backend, self.instance = engine, backend, instance
        self.numerics: Numerics = resolve_numerics(engine, backend.device)
        self.max_total_tokens, self.max_nodes, self.vocab_size = max_total_tokens, max_nodes, vocab_size

    def of(self, model: CausalLM, role: str) -> ModelRunner:
        """A model with its cache. Raises as `build_engine`."""
        engine, device = self.engine, self.backend.device
        graph_bytes = engine.graph_memory_mb * MB
        runner = ModelRunner(
            model.to(device) if isinstance(model, nn.Module) else model,  # type: ignore[arg-type]
            num_slots=engine.max_running_samples,
            capacity=self.max_total_tokens + self.max_nodes + 1,
            backend=self.backend,
            vocab_size=self.vocab_size,
            attention=attention_for(engine, self.numerics, self.backend, model),
            reach=None if engine.kv_cache_mb is None else self.max_nodes + 1,
            stock=engine.forward == "stock",
            recorder=CudaRecorder(device) if device.type == "cuda" and graph_bytes else None,
            graph_bytes=graph_bytes,
            who=f"{role} weights of {self.instance}",
        )
        if runner.ranks is not None and self.numerics == "invariant" and not runner.is_fused:
            raise ConfigError(
                "cluster.generation.tensor_parallel gives the bits of one rank by forwards of our own on CPUs, one "
                "thread each: engine.forward and engine.attention auto, engine.num_threads 1, llvmlite installed (pip "
                f"install 'rlhfspec[cpu]'); {runner.who} run otherwise; set engine.numerics=fast to do without"
            )
        return runner

    def checked(self, target: CausalLM, verdicts: KeptVerdicts | None) -> tuple[ModelRunner, str]:
        """The target's runner, whose numerics hold, and why `auto` promises less than it would, if it does."""
        runner = self.of(target, "target")
        if self.numerics != "invariant" or not self.engine.probe:
            return runner, ""
        try:
            _check_invariance(runner, self.max_nodes, verdicts)
        except NotInvariantError as error:
            # library products round by their company on some processors: no reason for `auto` to give up
            if self.engine.numerics != "auto" or self.backend.name != ComputeBackend.name:
                raise
            logger.warning("numerics: fast instead of invariant: %s", error)
            self.numerics = "fast"
            return self.of(target, "target"), str(error)
        return runner, ""


def _check_invariance(runner: ModelRunner, max_nodes: int, verdicts: KeptVerdicts | None) -> None:
    """Prove that tokens round alike in any company, with plain products where prepacked ones do not."""
    if verdicts is None:
        _probe(runner, max_nodes)
        return
    facts = facts_of(runner, max_nodes=max_nodes)
    verdict = verdicts.read(facts)
    if verdict is None:
        verdicts.keep(facts, _probe(runner, max_nodes))
    elif verdict == "holds_unpacked":
        runner.stop_prepacking()


def _probe(runner: ModelRunner, max_nodes: int) -> Verdict:
    try:
        check_invariance(runner, max_nodes=max_nodes)
        return "holds"
    except NumericsError:
        # the other ranks of a group would keep theirs
        if not runner.prepacked or runner.ranks is not None:
            raise
        logger.warning("prepacked weights do not round alike on this machine: plain products serve instead")
        runner.stop_prepacking()
        check_invariance(runner, max_nodes=max_nodes)
        return "holds_unpacked"


def _drafter(
    speculation: SpeculationConfig,
    policy: DraftPolicy,
    draft: CausalLM | HeadWeights | None,
    runner: ModelRunner,
    runners: _Runners,
    *,
    takes_drafts: bool,
) -> Drafter | None:
    """What the settings name; a look-up beside what computes, where they or the requests ask for one."""
    if not speculation.drafts and takes_drafts:
        return LookUpDrafter(runners.vocab_size)
    drafter = _one_drafter(speculation, policy, draft, runner, runners)
    if isinstance(drafter, LevelDrafter) and speculation.look_up != "none":
        return DrafterList(_suffix(speculation, runners.vocab_size), drafter)
    if isinstance(drafter, LevelDrafter) and takes_drafts:
        return DrafterList(LookUpDrafter(runners.vocab_size), drafter)
    return drafter


def _one_drafter(
    speculation: SpeculationConfig,
    policy: DraftPolicy,
    draft: CausalLM | HeadWeights | None,
    runner: ModelRunner,
    runners: _Runners,
) -> Drafter | None:
    engine = runners.engine
    if speculation.drafter in ("head", "mtp"):
        is_mtp = isinstance(draft, HeadWeights) and isinstance(draft.config, MtpConfig)
        if not isinstance(draft, HeadWeights) or is_mtp != (speculation.drafter == "mtp"):
            raise ConfigError(
                "speculation.drafter is 'mtp' but no MTP layer was given; read the target's with `load_mtp`"
                if speculation.drafter == "mtp"
                else "speculation.drafter is 'head' but no draft head was given; set models.draft to a folder that "
                "`rlhfspec drafter make` has written"
            )
        return head_drafter(draft, engine, policy, runner, runners.max_total_tokens, runners.vocab_size)
    if speculation.drafter == "model":
        if draft is None or isinstance(draft, HeadWeights):
            raise ConfigError("speculation.drafter is 'model' but no draft model was given; set models.draft")
        _check_draft_vocabulary(draft, runners.vocab_size)
        return ModelDrafter(runners.of(draft, "draft"), max_prefill_tokens=engine.max_prefill_tokens)
    return None if speculation.drafter == "none" else _suffix(speculation, runners.vocab_size)


def _suffix(speculation: SpeculationConfig, vocab_size: int) -> SuffixDrafter:
    return SuffixDrafter(vocab_size, memory_mb=speculation.suffix_memory_mb, min_match=speculation.suffix_min)


def head_drafter(
    head: HeadWeights,
    engine: EngineConfig,
    policy: DraftPolicy,
    runner: ModelRunner,
    max_total_tokens: int,
    vocab_size: int,
) -> HeadDrafter:
    """Return the drafter of a head or MTP layer on this runner, whose hidden states are tapped. Raises ModelError."""
    require_fit(head.config, runner.model.config)
    pool = runner.pool
    taps = tap_for_head(
        runner,
        head.config.tapped_layers,
        max_prefill_tokens=engine.max_prefill_tokens,
        max_total_tokens=max_total_tokens,
    )
    kind = (
        partial(MtpForward, output=runner.output_logits)
        if isinstance(head.config, MtpConfig)
        else HeadForward
    )
    forward = kind(head, embedding=runner.embedding, capacity=pool.capacity, backend=runner.backend)
    drafter = HeadDrafter(
        forward,
        KVPool(
            forward.kv_shape,
            num_slots=pool.num_slots,
            capacity=pool.capacity,
            dtype=pool.cells.dtype,
            device=runner.device,
            reach=None if engine.kv_cache_mb is None else policy.max_nodes + 1,
        ),
        attention=runner.attention,
        max_depth=policy.max_nodes,
        vocab_size=vocab_size,
    )
    taps.followers.append(drafter)
    return drafter


def _check_contexts(target: CausalLM, draft: CausalLM | HeadWeights | None, max_total_tokens: int) -> None:
    for model, role in ((target, "target"), (draft, "draft")):
        if model is None or isinstance(model, HeadWeights):
            continue
        limit = max_context_tokens(model.config)
        if limit is not None and max_total_tokens > limit:
            raise ModelError(
                f"the longest prompt and response take {max_total_tokens} tokens, the {role} model's context is "
                f"{limit}; lower data.max_prompt_tokens or sampling.max_new_tokens"
            )


def _vocab_size(target: CausalLM, wanted: int | None) -> int:
    have = int(target.config.get_text_config().vocab_size)
    if wanted is not None and not 1 <= wanted <= have:
        raise ConfigError(f"expected a vocab_size from 1 to {have}, the target's, got {wanted!r}")
    return wanted or have


def _check_draft_vocabulary(draft: CausalLM, vocab_size: int) -> None:
    have = int(draft.config.get_text_config().vocab_size)
    if have < vocab_size:
        raise ModelError(
            f"the draft model has {have} token ids, the tokenizer {vocab_size}; take a draft of the same family"
        )
