"""Generates recorded samples again from weights, prompt and key, at the speed of a prefill: the record is the draft.

A response is a pure function of these three (design 3.1), so neither batch nor draft nor instance matters, and what the
engine emits owes nothing to the record: a drafted token is taken only where the target's rule gives it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue

import numpy as np
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from ...core.errors import DataError, ModelError, NotFiniteError, WeightsError
from ...core.records import Completion, FinishReason, History, SampleKey, SampleRequest, SamplingParams
from ...core.sample_state import SampleState
from ...core.weight_records import kind_of
from ...engine.build import build_engine
from ...engine.drafters.head.head_weights import HeadWeights
from ...engine.drafters.look_up_drafter import LookUpDrafter
from ...engine.engine import Engine
from ...engine.model.invariance_probe import KeptVerdicts
from ...engine.numerics import use_threads
from ...engine.requests import require_can_go_on
from ...engine.weights.causal_lm import CausalLM
from ...engine.weights.chunks import pack_weights, weight_views
from ...engine.weights.loading import load_causal_lm, num_token_ids
from ...engine.weights.stored_weights import load_weights
from ...learning.data.chat.end_tokens import stop_strings
from ...policies.drafting.baselines import FixedPolicy
from ...policies.drafting.draft_policy import DraftPolicy
from ..folder.rollouts import Recorded
from .choice import RecordedRun
from .kept_weights import KeptModel

NUM_NODES = 16
"Drafted at a step; more rows a forward are no faster on a CPU thread, and the tails of responses are wasted."


class OtherWeights(WeightsError):
    """Weights that are not those the run published."""

    def __init__(self, name: str, version: int, *, expected: str, got: str) -> None:
        super().__init__(
            f"{name} holds other weights than the run's version {version}: expected parameter checksum {expected}, "
            f"got {got}"
        )
        self.version, self.expected, self.got = version, expected, got


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Samples whose tokens of one version are generated again; the others' stand where they were recorded."""

    weight_version: int
    samples: Sequence[Recorded]


@dataclass(frozen=True, slots=True, kw_only=True)
class NotLoaded:
    """A piece of work whose weights are not the run's, or are none at all."""

    work: Work
    error: WeightsError | ModelError | NotFiniteError


@dataclass(frozen=True, slots=True, kw_only=True)
class Regenerated:
    """What came of one piece of work: completions in the order of its samples, None where a request was refused."""

    work: Work
    completions: Sequence[Completion | None]
    refused: dict[SampleKey, str]


class Regenerator:
    """One engine, which takes the weights of one version after the other."""

    def __init__(
        self,
        run: RecordedRun,
        tokenizer: PreTrainedTokenizerBase,
        sampling: SamplingParams,
        models: dict[int, KeptModel],
        *,
        max_total_tokens: int,
        draft: CausalLM | HeadWeights | None = None,
        policy: DraftPolicy | None = None,
    ) -> None:
        """Build the engine; each piece of work loads its weights.

        Drafts are the record's, or with a `policy` those of the run's own drafter. Raises as `build_engine`.
        """
        config = run.config
        self._config, self._sampling, self._models = config, sampling, models
        self._drafts_record = policy is None
        vocab_size = num_token_ids(tokenizer)
        trust = config.models.trust_remote_code
        some = next(iter(models.values())).name
        device = "cuda" if config.decodes_on_gpu else "cpu"
        self.engine: Engine = build_engine(
            load_causal_lm(some, config.models.dtype, trust_remote_code=trust),
            draft,
            engine=config.engine.model_copy(update={"device": device}),
            speculation=config.speculation,
            max_total_tokens=max_total_tokens,
            vocab_size=vocab_size,
            instance="verify",
            # no version at all: the first work loads its own
            weight_version=-1,
            policy=policy or FixedPolicy(num_nodes=NUM_NODES, depth=NUM_NODES, branching=1),
            drafter=None if policy else LookUpDrafter(vocab_size),
            verdicts=KeptVerdicts(Path(config.run.cache_dir).expanduser() / "probes"),
        )
        self.engine.stop_strings = stop_strings(tokenizer) if sampling.stop else None

    def run(self, work: Work) -> Regenerated:
        """Generate the samples again.

        Raises OtherWeights: the parameters are not those that the run noted; ModelError, NotFiniteError: the weights
        cannot be loaded.
        """
        again = {s.location.key: _Again(s, self._sampling, work.weight_version) for s in work.samples}
        refused: dict[SampleKey, str] = {}
        self._load(work.weight_version)
        self._generate(again, refused)
        found = [again.get(sample.location.key) for sample in work.samples]
        return Regenerated(
            work=work,
            completions=[None if one is None else one.completion() for one in found],
            refused=refused,
        )

    def _generate(self, again: dict[SampleKey, _Again], refused: dict[SampleKey, str]) -> None:
        """Generate everything; what is refused leaves `again`."""
        while requests := [r for one in again.values() if (r := one.next_request()) is not None]:
            requests = self._admissible(requests, refused)
            if not self._drafts_record:
                requests = [replace(request, draft=None) for request in requests]
            for key in refused:
                again.pop(key, None)
            # the longest first: no tail of few
            requests.sort(key=lambda request: -len(again[request.key.sample].recorded.token_ids))
            for completion in self.engine.generate(requests):
                again[completion.key.sample].take(completion)

    def _admissible(
        self, requests: Sequence[SampleRequest], refused: dict[SampleKey, str]
    ) -> list[SampleRequest]:
        """Those that can be sampled; a prompt that was changed may hold what is no token."""
        good = []
        for request in requests:
            try:
                require_can_go_on(
                    SampleState.fresh(request),
                    vocab_size=self.engine.runner.vocab_size,
                    max_total_tokens=self.engine.max_total_tokens,
                )
            except DataError as error:
                refused[request.key.sample] = str(error)
            else:
                good.append(request)
        return good

    def _load(self, version: int) -> None:
        if self.engine.weight_version == version:
            return
        kept, models = self._models[version], self._config.models
        kind = kind_of(kept.checksum or "")
        model = load_weights(kept.name, models.dtype, trust_remote_code=models.trust_remote_code)
        manifest, chunks = pack_weights(model, name="target", weight_version=version, kind=kind)
        if kept.checksum not in (None, manifest.checksum):
            raise OtherWeights(kept.name, version, expected=str(kept.checksum), got=manifest.checksum)
        self.engine.load_weights(manifest, weight_views(manifest, chunks))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """A stretch of a response that one version sampled."""

    weight_version: int
    begin: int
    end: int | None
    "None: to where the response ends"


class _Again:
    """One sample's tokens of a version on their way: a response, an episode's turns, one piece after the other.

    A response ends at its first stop token, in whatever piece that comes. Of an episode the environment's words are
    taken from the record, and so is where a turn ends.
    """

    def __init__(self, sample: Recorded, sampling: SamplingParams, weight_version: int) -> None:
        self.recorded = recorded = sample.rollout.completion
        self._prompt, self._sampling = sample.rollout.prompt, sampling
        self._pieces = [piece for piece in _pieces(recorded) if piece.weight_version == weight_version]
        self._done: list[Completion] = []
        self._is_over = False
        "a stop token came before the record's end"

    def next_request(self) -> SampleRequest | None:
        """What is to be generated next; None: nothing more."""
        recorded, number = self.recorded, len(self._done)
        if self._is_over or number == len(self._pieces):
            return None
        piece = self._pieces[number]
        history = History(
            token_ids=recorded.token_ids[: piece.begin],
            sampled=recorded.is_sampled[: piece.begin],
            policy_logprobs=recorded.policy_logprobs[: piece.begin],
            sampling_logprobs=recorded.sampling_logprobs[: piece.begin],
        )
        sampling = self._sampling
        if piece.end is not None:
            # what ends a turn is the environment's business, too
            sampling = replace(sampling, max_new_tokens=piece.end)
            if recorded.sampled is not None:
                sampling = replace(sampling, stop_token_ids=(), stop=())
        return SampleRequest(
            key=replace(recorded.key, turn=number),
            prompt=self._prompt,
            sampling=sampling,
            group_id=recorded.group_id,
            history=history if piece.begin else None,
            draft=recorded.token_ids,
        )

    def take(self, completion: Completion) -> None:
        """Take what was generated."""
        self._done.append(completion)
        self._is_over = completion.finish_reason is FinishReason.STOP

    def completion(self) -> Completion:
        """All of it: the environment's words and other versions' tokens are the record's."""
        arrays = {name: array.copy() for name, array in _arrays(self.recorded).items()}
        reason = self.recorded.finish_reason
        for piece, done in zip(self._pieces, self._done, strict=not self._is_over):
            found_end = piece.end is None or done.finish_reason is FinishReason.STOP
            for name, array in _arrays(done).items():
                if found_end:
                    arrays[name] = np.concatenate([arrays[name][: piece.begin], array[piece.begin :]])
                    reason = done.finish_reason
                else:
                    arrays[name][piece.begin : piece.end] = array[piece.begin : piece.end]
        spans = self.recorded.weight_spans
        if self._is_over:
            spans = tuple(span for span in spans if span.first_position < len(arrays["token_ids"]))
        return replace(self.recorded, finish_reason=reason, weight_spans=spans, **arrays)


def _arrays(completion: Completion) -> dict[str, np.ndarray]:
    """What a regeneration compares."""
    return {name: getattr(completion, name) for name in ("token_ids", "policy_logprobs", "sampling_logprobs")}


def _pieces(recorded: Completion) -> list[_Piece]:
    """Every stretch that was sampled from one version, in their order."""
    spans, length = recorded.weight_spans, recorded.num_tokens
    ends = [span.first_position for span in spans[1:]] + [length]
    pieces: list[_Piece] = []
    for span, end in zip(spans, ends, strict=True):
        runs: list[tuple[int, int | None]] = [(span.first_position, None if end == length else end)]
        if recorded.sampled is not None:
            cut = ((max(a, span.first_position), min(b, end)) for a, b in _runs(recorded.sampled))
            runs = [(begin, stop) for begin, stop in cut if begin < stop]
        version = span.weight_version
        pieces += [_Piece(weight_version=version, begin=begin, end=stop) for begin, stop in runs]
    return pieces


def _runs(sampled: np.ndarray) -> list[tuple[int, int]]:
    """Begin and end of every stretch of sampled tokens."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], sampled, [False]]).astype(np.int8)))
    return [(int(begin), int(end)) for begin, end in zip(edges[::2], edges[1::2], strict=True)]


def regenerate(
    works: Sequence[Work], engines: Sequence[Regenerator], *, num_threads: int = 1
) -> Iterator[Regenerated | NotLoaded]:
    """Do all work with these engines at once, a thread each (`num_threads` of torch's); yield what comes as it comes.

    Weights that cannot be used are an answer; whatever else an engine raises is raised here.
    """
    idle: SimpleQueue[Regenerator] = SimpleQueue()
    for engine in engines:
        idle.put(engine)

    def do(work: Work) -> Regenerated | NotLoaded:
        engine = idle.get()
        try:
            return engine.run(work)
        except (WeightsError, ModelError, NotFiniteError) as error:
            return NotLoaded(work=work, error=error)
        finally:
            idle.put(engine)

    with ThreadPoolExecutor(len(engines), initializer=use_threads, initargs=(num_threads,)) as pool:
        pending: set[Future[Regenerated | NotLoaded]] = {pool.submit(do, w) for w in works}
        try:
            while pending:
                done, pending = wait(pending, return_when=FIRST_COMPLETED)
                yield from (future.result() for future in done)
        finally:
            for future in pending:
                future.cancel()
