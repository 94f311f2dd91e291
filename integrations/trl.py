"""TRL's `GRPOTrainer(rollout_func=rollout_func())`: the script stays, our engine generates its responses.

A response is a function of weights, prompt and key alone, and its log-probabilities are those that TRL's own forward
gives, up to float32 rounding: TRL corrects for an engine's mismatch only with `use_vllm`. TRL 1.x, whose contract is:
`f(prompts, trainer)` on every rank, prompts repeated and not templated, one entry of each list returned a prompt.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import TrainingArguments

from ..core.config import EngineConfig, EnvironmentConfig, SpeculationConfig
from ..core.errors import ConfigError, DataError, RlhfSpecError
from ..core.records import Completion, Prompt, SampleKey, SampleRequest, SamplingParams, Stream
from ..core.settings.run import CACHE_DIR
from ..core.surfaces.surface import note_once, surface
from ..core.weight_records import TensorSpec, WeightManifest
from ..engine.build import backend_for, build_engine, published_model
from ..engine.calibration.engine_provenance import provenance_of
from ..engine.calibration.measured_profile import measured_profile
from ..engine.calibration.profiler import MadeProfile
from ..engine.drafters.head.head_weights import HeadWeights, is_head_folder, load_head
from ..engine.engine import Engine
from ..engine.numerics import on_threads
from ..engine.weights.causal_lm import DTYPES, CausalLM, max_context_tokens
from ..engine.weights.chunks import checksum_of
from ..engine.weights.generation_settings import as_ids
from ..engine.weights.loading import load_causal_lm, load_tokenizer, num_token_ids
from ..engine.weights.shared_ids import fit_draft, foreign_ids
from ..learning.data.chat.chat_format import own_template
from ..learning.data.chat.messages import pairs_of, parse_turns, readable
from ..learning.data.chat.template_variables import require_variables
from ..profiles.profile import Profile
from .engine_episodes import EngineEpisodes
from .measured_once import (
    NotedVerdicts,
    kept_profile,
    named_profile,
    said_now_and_then,
)
from .whole_weights import whole_weights

logger = logging.getLogger(__name__)
OLDEST = (1, 0)
"Release of TRL; earlier ones call a rollout function with other arguments."
MAX_PROMPT_TOKENS = 512
"Room that an engine has at least; a longer prompt gets one with more."
PROFILE_S = 20.0
"What measuring a profile may take."
_WORDS = {
    "or set models.tokenizer to where it is": "in the folder of the draft",
    "sampling.max_new_tokens": "max_completion_length",
    "data.max_prompt_tokens": "rollout_func's max_prompt_tokens",
    "data.chat_template_kwargs": "GRPOConfig.chat_template_kwargs",
    "sampling.": "GRPOConfig.",
}
"What a user of TRL reads in the place of our keys."
_INDICES_A_STEP = 1 << 32
"Sample indices from one `global_step` to the next."
_INDICES_A_RANK = 1 << 20
"Of them, from one rank to the next: ranks may have batches of unequal size."


def rollout_func(
    draft: str | Path | None = None,
    *,
    speculation: SpeculationConfig | None = None,
    engine: EngineConfig | None = None,
    environment: EnvironmentConfig | None = None,
    max_prompt_tokens: int | None = None,
) -> TrlRollouts:
    """What `GRPOTrainer(rollout_func=...)` takes; sampling is that of the trainer's `GRPOConfig`.

    Args:
        draft: folder or hub name of a draft model, or the folder of a draft head where `speculation.drafter` is head.
        speculation: what drafts and how much; by default the draft model, without one a look-up, and as much as
            pays by a profile of this machine (on a GPU by trying, `policy="bandit"`). The first call measures it
            and keeps it in the cache; `profile` names one that `rlhfspec profile` made.
        engine: slots, threads, numerics.
        environment: what answers between turns; its tokens are marked in `env_mask`, and the sum of its rewards reaches
            reward functions as `environment_reward`.
        max_prompt_tokens: of the longest prompt, templated; None: what the model's context leaves beside
            `max_completion_length`. The engine has room for 512, and is built anew where a prompt has more.

    Raises:
        ConfigError: TRL is not installed, or older than 1.0; settings that do not go together.
    """
    _require_trl()
    if speculation is not None and speculation.names_draft and draft is None and speculation.policy != "off":
        raise ConfigError(
            f"rollout_func: speculation.drafter is '{speculation.drafter}' and draft was not given; name its folder, "
            "or set drafter to 'suffix' or 'none'"
        )
    return TrlRollouts(
        draft, speculation, engine or EngineConfig(), environment or EnvironmentConfig(), max_prompt_tokens
    )


class TrlRollouts:
    """Called by the trainer for each batch; holds one engine, which gets the trainer's weights once a step."""

    def __init__(
        self,
        draft: str | Path | None,
        speculation: SpeculationConfig | None,
        engine: EngineConfig,
        environment: EnvironmentConfig,
        max_prompt_tokens: int | None,
    ) -> None:
        self.engine: Engine | None = None
        "built at the first call; `engine.stats` has counters"
        self._draft = None if draft is None else str(draft)
        self._speculation, self._settings, self._environment = speculation, engine, environment
        self._max_prompt_tokens = max_prompt_tokens
        self._trainer: Any = None
        self._published: int | None = None
        "the step of training whose weights the engine has; outside training anybody may change them at any time"
        self._room = 0
        "prompt tokens that the engine has room for"
        self._profile: Profile | None = None
        self._used: dict[tuple[int, Stream], int] = {}
        "sample indices that a step has given out on this rank"

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        """Generate a response for each prompt, on this rank.

        Args:
            prompts: texts or conversations, each as often as responses are wanted.
            trainer: a GRPOTrainer.

        Returns:
            `prompt_ids`, `completion_ids` and `logprobs` (at the sampling temperature, before top-k and top-p),
            a list of numbers a prompt each; with an environment also `env_mask` and `environment_reward`.

        Raises:
            ConfigError: sampling, or a trainer, that this engine does not serve.
            DataError: a prompt that is too long, or holds images.
        """
        with _in_trls_words():
            sampling = sampling_of(trainer)
            if prompts:
                return self._generated(prompts, tokenized(prompts, trainer), sampling, trainer)
        more = () if self._environment.kind is None else ("env_mask", "environment_reward")
        return {name: [] for name in ("prompt_ids", "completion_ids", "logprobs", *more)}

    def _generated(
        self, prompts: list[Any], prompt_ids: list[list[int]], sampling: SamplingParams, trainer: Any
    ) -> dict[str, list[Any]]:
        room = self._room_for(prompt_ids, trainer)
        with torch.no_grad(), on_threads(self._settings.num_threads):
            before = self._used
            requests = self._requests(prompts, prompt_ids, sampling, trainer)
            try:
                engine = self._with_weights_of(trainer, requests, room)
            except BaseException:
                # no response has been made: the next call has these keys
                self._used = before
                raise
            if self._environment.kind is None:
                return {"prompt_ids": prompt_ids, **_lists(engine.generate(requests))}
            prompts_read, done, rewards = zip(*self._episodes(trainer).run(engine, requests), strict=True)
        return {
            "prompt_ids": [ids.tolist() for ids in prompts_read],
            **_lists(done),
            "env_mask": [one.is_sampled.astype(int).tolist() for one in done],
            "environment_reward": list(rewards),
        }

    def _episodes(self, trainer: Any) -> EngineEpisodes:
        return EngineEpisodes(
            self._environment,
            trainer.processing_class,
            chat_template=getattr(trainer, "chat_template", None),
            chat_template_kwargs=getattr(trainer, "chat_template_kwargs", None),
        )

    def _requests(
        self, prompts: list[Any], prompt_ids: list[list[int]], sampling: SamplingParams, trainer: Any
    ) -> list[SampleRequest]:
        """Key each sample by run seed, step, rank and its number there within the step."""
        step = int(trainer.state.global_step)
        stream = Stream.TRAIN if trainer.model.training else Stream.EVAL
        used = self._used.get((step, stream), 0)
        self._used = {(step, stream): used + len(prompt_ids)} | {
            key: count for key, count in self._used.items() if key[0] == step and key[1] != stream
        }
        first = step * _INDICES_A_STEP + trainer.accelerator.process_index * _INDICES_A_RANK + used
        return [
            SampleRequest(
                key=SampleKey(run_seed=trainer.args.seed, stream=stream, sample_index=first + number),
                prompt=_prompt(number, prompt, ids),
                sampling=sampling,
            )
            for number, (prompt, ids) in enumerate(zip(prompts, prompt_ids, strict=True))
        ]

    def _room_for(self, prompt_ids: list[list[int]], trainer: Any) -> int:
        """Prompt tokens that the engine must have room for, the same on all ranks. Collective. Raises DataError."""
        here = torch.tensor([max(map(len, prompt_ids))], device=trainer.accelerator.device)
        longest, new = int(trainer.accelerator.gather(here).max()), trainer.args.max_completion_length
        if (most := self._max_prompt_tokens) is not None:
            if longest > most:
                raise DataError(
                    f"rollout_func: a prompt has {longest} tokens, expected at most {most}; shorten it, or give "
                    f"rollout_func max_prompt_tokens={longest}"
                )
            return most
        room = max(MAX_PROMPT_TOKENS, 1 << (longest - 1).bit_length())
        context = max_context_tokens(trainer.model.config) or room + new
        if longest + new > context:
            raise DataError(
                f"rollout_func: a prompt has {longest} tokens and max_completion_length is {new}, expected at most the "
                f"{context} of the model's context together; shorten the prompt, or lower max_completion_length"
            )
        return min(room, context - new)

    def _with_weights_of(self, trainer: Any, requests: Sequence[SampleRequest], room: int) -> Engine:
        """The engine, with the trainer's weights of this step. Collective where they are sharded."""
        step = int(trainer.state.global_step)
        now = step if trainer.is_in_train else None
        if self.engine is None or self._trainer is not trainer or room > self._room:
            # two would not have room
            self.engine = None
            self.engine = self._build(trainer, step, requests, room)
            self._trainer, self._room = trainer, room
        elif now is None or self._published != now:
            tensors = whole_weights(trainer)
            self.engine.load_weights(_manifest(trainer, tensors, step), tensors)
        self._published = now
        return self.engine

    def _build(self, trainer: Any, step: int, requests: Sequence[SampleRequest], room: int) -> Engine:
        tensors = whole_weights(trainer)
        dtype = dtype_of(trainer, tensors)
        settings = self._settings
        if settings.device == "auto":
            settings = settings.model_copy(update={"device": trainer.accelerator.device.type})
        speculation = self._drafting(settings)
        backend = backend_for(settings)
        target = published_model(
            _manifest(trainer, tensors, step),
            [tensors],
            dtype,
            backend=backend,
            who="weights of TRL's trainer",
            stock=settings.forward == "stock",
        )
        draft = self._read_draft(speculation, trainer, dtype)
        longest = room + trainer.args.max_completion_length
        cache = _cache()
        verdicts = None if cache is None else NotedVerdicts(cache / "probes")
        if speculation.needs_profile and (self._profile is None or self._trainer is not trainer):
            # of batches and lengths as they come, not of all that may
            most = max(len(one.prompt.token_ids) for one in requests)
            slots = min(settings.max_running_samples, len(requests))
            measured = settings.model_copy(update={"max_running_samples": slots})
            described = provenance_of(
                target,
                draft,
                engine=measured,
                dtype=dtype,
                sampling=requests[0].sampling,
                max_total_tokens=min((1 << most.bit_length()) + trainer.args.max_completion_length, longest),
            )

            def measure() -> MadeProfile:
                return measured_profile(
                    target,
                    draft,
                    [replace(one, key=replace(one.key, stream=Stream.BENCH)) for one in requests],
                    described,
                    engine=measured,
                    speculation=speculation,
                    vocab_size=None,
                    budget_s=PROFILE_S,
                    progress=said_now_and_then(),
                    backend=backend,
                    verdicts=verdicts,
                )

            if speculation.profile != "auto":
                self._profile = named_profile(Path(speculation.profile).expanduser(), described)
            else:
                if draft is not None:
                    # what is accepted depends on the weights
                    described = replace(described, target_weights=checksum_of(tensors.values()))
                self._profile = kept_profile(cache, described, measure, PROFILE_S)
        if speculation.needs_profile and self._profile is None:
            speculation = speculation.model_copy(update={"policy": "bandit"})
        return build_engine(
            target,
            draft,
            engine=settings,
            speculation=speculation,
            max_total_tokens=longest,
            instance="TRL",
            weight_version=step,
            profile=self._profile if speculation.needs_profile else None,
            backend=backend,
            verdicts=verdicts,
        )

    def _drafting(self, settings: EngineConfig) -> SpeculationConfig:
        """What drafts where nothing else is said: a head in a folder of one, and by trying on GPUs."""
        chosen = self._speculation or SpeculationConfig(drafter="suffix" if self._draft is None else "model")
        if self._draft and chosen.drafter == "model" and is_head_folder(Path(self._draft).expanduser()):
            chosen = chosen.model_copy(update={"drafter": "head"})
        if chosen.needs_profile and chosen.profile == "auto" and settings.device != "cpu":
            # nothing is measured on GPUs yet
            chosen = chosen.model_copy(update={"policy": "bandit"})
        return chosen

    def _read_draft(
        self, speculation: SpeculationConfig, trainer: Any, dtype: str
    ) -> CausalLM | HeadWeights | None:
        """What drafts with weights of its own. Raises ModelError: it cannot be loaded, or does not fit."""
        if self._draft is None or not speculation.has_draft:
            return None
        if speculation.drafter != "model":
            num_layers = trainer.model.config.get_text_config().num_hidden_layers
            return load_head(Path(self._draft).expanduser(), num_target_layers=num_layers)
        tokenizer = trainer.processing_class
        foreign = foreign_ids(tokenizer, load_tokenizer(self._draft))
        return fit_draft(load_causal_lm(self._draft, dtype), foreign, num_ids=num_token_ids(tokenizer))


def _cache() -> Path | None:
    """Where what is measured is kept; None: this user has no home folder."""
    with suppress(RuntimeError):
        return Path(CACHE_DIR).expanduser()


@contextmanager
def _in_trls_words() -> Iterator[None]:
    """Let errors name what a script of TRL can change."""
    try:
        yield
    except RlhfSpecError as error:
        text = str(error)
        for ours, theirs in _WORDS.items():
            text = text.replace(ours, theirs)
        error.args = (text,)
        raise


def _lists(done: Sequence[Completion]) -> dict[str, list[Any]]:
    return {
        "completion_ids": [one.token_ids.tolist() for one in done],
        "logprobs": [one.policy_logprobs.tolist() for one in done],
    }


def _prompt(number: int, prompt: Any, ids: list[int]) -> Prompt:
    """A text or a conversation, as environments read it. Raises DataError for messages that are no messages."""
    token_ids = np.array(ids, dtype=np.int64)
    if isinstance(prompt, str):
        return Prompt(prompt_id=number, token_ids=token_ids, text=prompt)
    turns = tuple(parse_turns(prompt, f"prompt {number}", roles=None))
    messages = pairs_of(turns)
    return Prompt(
        prompt_id=number, token_ids=token_ids, text=readable(messages), messages=messages, turns=turns
    )


def sampling_of(trainer: Any) -> SamplingParams:
    """How TRL's own generation would sample. Raises ConfigError naming what our engine does not serve."""
    args = trainer.args
    # whoever trains reads those of transformers' own
    trains = TrainingArguments.__dataclass_fields__.keys() - {"fp16_full_eval"}
    names = [name for name in getattr(args, "__dataclass_fields__", vars(args)) if name not in trains]
    given = {name: getattr(args, name) for name in names}
    surface("trl_config").require(given, "rollout_func: GRPOConfig", error=ConfigError)
    if getattr(trainer, "tools", None):
        raise ConfigError(
            "rollout_func: GRPOTrainer has tools, whose further turns TRL generates by itself; leave them out"
        )
    if args.max_completion_length is None:
        raise ConfigError(
            "rollout_func: max_completion_length is None, expected the most tokens that a response may have; set it"
        )
    stops = getattr(trainer, "eos_token_ids", None)
    if not stops:
        stops = [trainer.processing_class.eos_token_id]
        ends = as_ids(getattr(getattr(trainer.model, "generation_config", None), "eos_token_id", None))
        if unread := [token for token in ends if token not in stops]:
            note_once(
                f"rollout_func: the model's generation_config ends responses at {unread} too, and this release of TRL, "
                f"so its responses here, at the tokenizer's {stops[0]} alone; a later TRL (1.16) reads them"
            )
    return SamplingParams(
        temperature=args.temperature,
        top_k=args.top_k or 0,
        top_p=args.top_p,
        min_p=args.min_p or 0.0,
        max_new_tokens=args.max_completion_length,
        stop_token_ids=tuple(token for token in stops if token is not None),
    )


def tokenized(prompts: Sequence[Any], trainer: Any) -> list[list[int]]:
    """Token ids of texts, or of conversations as TRL's chat template renders them.

    Raises DataError for images, and for a variable that the template does not read.
    """
    tokenizer = trainer.processing_class
    if hasattr(tokenizer, "image_processor"):
        raise DataError(
            f"rollout_func: {type(tokenizer).__name__} reads images, which this engine does not; "
            "give GRPOTrainer a tokenizer as processing_class"
        )
    template, variables = (getattr(trainer, f"chat_template{name}", None) for name in ("", "_kwargs"))
    is_text = isinstance(prompts[0], str)
    if variables or not is_text:
        require_variables(
            template or own_template(tokenizer) or "",
            variables or {},
            known=tokenizer.special_tokens_map,
            advice="GRPOConfig.chat_template_kwargs gives variables",
        )
    if is_text:
        return tokenizer(text=list(prompts))["input_ids"]
    return tokenizer.apply_chat_template(
        conversation=list(prompts),
        chat_template=template,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        **(variables or {}),
    )["input_ids"]


def dtype_of(trainer: Any, tensors: dict[str, Tensor]) -> str:
    """What to decode in: bfloat16 where TRL computes in it, which is warned of. Raises ConfigError for float16."""
    held = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
    if trainer.args.fp16 or not held <= set(DTYPES.values()):
        names = ", ".join(sorted(str(one).removeprefix("torch.") for one in held))
        raise ConfigError(
            f"rollout_func: weights are {names} and fp16 is {trainer.args.fp16}; this engine decodes in float32 or "
            "bfloat16: load the model in one of them and set fp16=False"
        )
    if not trainer.args.bf16 and torch.bfloat16 not in held:
        return "float32"
    logger.warning(
        "TRL computes in bfloat16 (%s), which rounds otherwise than any engine, and corrects for it with "
        "use_vllm only; a model loaded in float32 with bf16=False makes log-probabilities equal",
        "GRPOConfig.bf16" if trainer.args.bf16 else "the model was loaded in it",
    )
    return "bfloat16"


def _manifest(trainer: Any, tensors: dict[str, Tensor], step: int) -> WeightManifest:
    """Describe weights that stay in this process: names and shapes, no checksum and no chunks."""
    specs = [
        TensorSpec(
            name=name,
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tuple(tensor.shape),
            offset_bytes=0,
            num_bytes=tensor.nbytes,
        )
        for name, tensor in tensors.items()
    ]
    return WeightManifest(
        model="target",
        weight_version=step,
        checksum="",
        num_bytes=sum(spec.num_bytes for spec in specs),
        chunk_num_bytes=(),
        chunk_checksums=(),
        tensors=tuple(specs),
        hf_config_json=trainer.model.config.to_json_string(use_diff=False),
    )


def _require_trl() -> None:
    """Raise ConfigError unless TRL is installed in a release whose contract this knows."""
    wanted = ".".join(map(str, OLDEST))
    try:
        found = version("trl")
    except PackageNotFoundError:
        raise ConfigError(
            f"rollout_func is called by TRL's GRPOTrainer, and the package trl is not installed; pip install "
            f"'trl>={wanted}'"
        ) from None
    if tuple(int(part) for part in found.split(".")[:2]) < OLDEST:
        raise ConfigError(
            f"rollout_func needs TRL {wanted} or later, whose trainer calls it on every rank with raw prompts; "
            f"TRL {found} is installed: pip install 'trl>={wanted}'"
        )
