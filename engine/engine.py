"""The engine: continuous admission, prefill, decode steps, completions. No Ray in it.

A sample's way: `submit` -> waiting -> slot and prefill -> decode steps -> `Completion`. Its tokens are a pure
function of weights, prompt and key (design 3.1): not of the batch it shares, the plan, or the order of admission.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace

import numpy as np
from torch import Tensor

from ..core.decode_records import PLAIN, Budget, DecodeState, GenerationStats, InstanceLoad, StepRecord
from ..core.errors import ConfigError, WeightsError
from ..core.progress import Progress
from ..core.records import Completion, SampleKey, SampleRequest, as_asked
from ..core.sample_state import SampleState
from ..core.weight_records import WeightManifest
from ..policies.drafting.draft_policy import DraftLaw, DraftPolicy
from .counters import Tally
from .decode_step import DecodeStep, decode_step
from .decoding.running_batch import RunningBatch
from .decoding.stop_strings import StopStrings
from .drafters.drafter import Drafter, part_of
from .drafters.level_drafter import LevelDrafter
from .drafters.refinement import Refinement, Scorer
from .exchange import SampleExchange
from .model.prefill import fill_committed
from .model.prefill_plan import PrefillPiece
from .model.runner import ModelRunner
from .numerics import Numerics
from .outcomes import completion_of, not_finite_error, where_not_finite
from .requests import require_can_go_on, require_distinct
from .scores import score
from .weights.chunks import require_loadable

logger = logging.getLogger(__name__)
STEP_LOG_LENGTH = 4096
GOODPUT_WINDOW = 16
"Decode steps over which goodput is told."


class Engine:
    """Generates responses for many samples at once on one device, with one writer: its caller's thread."""

    def __init__(
        self,
        runner: ModelRunner,
        *,
        drafter: Drafter | None,
        policy: DraftPolicy,
        max_total_tokens: int,
        max_prefill_tokens: int,
        instance: str = "local",
        weight_version: int = 0,
        drafter_version: int = 0,
        clock: Callable[[], float] = time.perf_counter,
        scorer: Scorer | None = None,
        max_cache_bytes: int | None = None,
        max_kept_bytes: int = 0,
        numerics: Numerics = "fast",
        promise: str = "",
        decode: DecodeStep = decode_step,
    ) -> None:
        self.runner = runner
        self.numerics = numerics
        self.promise = promise  # of tokens, in one line
        self.drafter = drafter
        self.policy = policy
        self.scorer = scorer
        "estimates acceptance for refined budgets"
        self.instance = instance
        self.weight_version, self.drafter_version = weight_version, drafter_version
        self.drafter_checksum = ""
        "of the drafter's weights, as its manifest has it; empty where it has none"
        self.max_total_tokens = max_total_tokens
        self._tally = Tally()
        self.step_records: deque[StepRecord] = deque(maxlen=STEP_LOG_LENGTH)
        self.step_log: list[StepRecord] | None = None
        "all of them, where it is set to a list; who takes them sets it to a new one"
        self.max_prefill_tokens = max_prefill_tokens
        self._clock, self._decode = clock, decode
        self._observe_s, self.drafter_alarm = 0.0, ""
        self._has_next = False
        "whether a step is under way behind the last that was read"
        self._waiting: deque[SampleState] = deque()
        self._attempts: deque[SampleState] = deque()
        "of the waiting ones those that are made ahead: they have slots that nobody else wants"
        self._unclaimed: list[Completion] = []
        "of a step that raised: the next one returns them"
        self._batch = RunningBatch(
            num_slots=runner.pool.num_slots,
            max_total_tokens=max_total_tokens,
            device=runner.device,
            noise=runner.backend.noise,
        )
        self.exchange = SampleExchange(
            runner,
            drafter,
            self._batch,
            self._waiting,
            max_prefill_tokens=max_prefill_tokens,
            max_cache_bytes=max_cache_bytes,
            max_kept_bytes=max_kept_bytes,
        )

    def submit(self, request: SampleRequest) -> None:
        """Queue a sample. Raises DataError for what cannot be sampled (`engine.requests`)."""
        self.resume(SampleState.fresh(request, weight_version=self.weight_version))

    def resume(self, state: SampleState) -> None:
        """Queue a sample of which something may have been generated; its caches are computed from its tokens.

        Raises DataError for what cannot be sampled; WeightsError when other weights than ours chose its tokens;
        ConfigError for stop strings without `stop_strings`.
        """
        require_can_go_on(state, vocab_size=self.runner.vocab_size, max_total_tokens=self.max_total_tokens)
        if state.request.sampling.stop and self.stop_strings is None:
            raise ConfigError(
                "sampling.stop was given and this engine knows no texts; set engine.stop_strings to "
                "stop_strings(tokenizer) of rlhfspec.learning.data.chat.end_tokens"
            )
        self.require_version(state)
        if state.request.is_attempt:
            self._attempts.append(state)
            return
        self.supersede(state.request.key)
        self._waiting.append(state)

    def require_version(self, state: SampleState) -> None:
        """Raise WeightsError when other weights than ours chose a sample's tokens."""
        if len(state.token_ids) and state.weight_version != self.weight_version:
            raise WeightsError(
                f"sample {state.request.key.sample_index} has {len(state.token_ids)} tokens of weight version "
                f"{state.weight_version}, instance {self.instance} runs version {self.weight_version}; generate "
                "it again from its prompt"
            )

    def generate(self, requests: Iterable[SampleRequest]) -> list[Completion]:
        """Generate all responses and return them in the order of the requests.

        Raises as `submit` and `step`; nothing of the requests is left in the engine then.
        """
        requests = list(requests)
        waiting = (state.request for state in self._waiting)
        keys = require_distinct(requests, (*self._batch.requests, *waiting))
        done: dict[SampleKey, Completion] = {}
        try:
            for request in requests:
                self.submit(request)
            while self.has_work:
                done.update((completion.key, completion) for completion in self.step())
        except BaseException:
            for key in keys:
                self.exchange.drop(key)
            raise
        finally:
            # samples that were submitted before: the next step returns them
            self._unclaimed = [c for c in (*self._unclaimed, *done.values()) if c.key not in keys]
        return [done[request.key] for request in requests]

    @property
    def stop_strings(self) -> StopStrings | None:
        """What finds `sampling.stop` in responses; None: no request may have any."""
        return self._batch.stop_strings

    @stop_strings.setter
    def stop_strings(self, found_by: StopStrings | None) -> None:
        self._batch.stop_strings = found_by

    @property
    def policy(self) -> DraftPolicy:
        """What decides how much to draft and verify."""
        return self._policy

    @policy.setter
    def policy(self, policy: DraftPolicy) -> None:
        self._policy = policy
        self._law = policy if isinstance(policy, DraftLaw) else None

    def step(self) -> list[Completion]:
        """Admit what fits, prefill it, decode one step; return the samples that finished.

        Raises NotFiniteError for a sample whose logits are not finite. That sample is gone then, the others go on with
        the next step, which also returns those that finished beside it.
        """
        self.give_way()
        self._preempt()
        self._admit()
        unclaimed, self._unclaimed = self._unclaimed, []
        if not len(self._batch):
            return unclaimed
        started = self._clock()
        remaining = self._batch.remaining_tokens
        # what a draft policy may use
        state = DecodeState(
            decode_step=self._tally["num_decode_steps"],
            num_samples=len(self._batch),
            context_tokens=self._batch.context_tokens,
            max_remaining_tokens=int(remaining.max()),
            num_waiting=len(self._waiting),
            weight_version=self.weight_version,
            drafter_version=self.drafter_version,
            num_brought=0 if self.drafter is None else self.drafter.num_brought,
        )
        budget = self.policy.plan(state) if self.drafter is not None else PLAIN
        # a law is asked over all drafters, whatever they have
        drafter = self.drafter if self._law or self.drafter is None else self.drafter.working()
        refinement = self._refinement(budget, remaining)
        planned = self._clock()
        may_go_on = self._next_in_line() is None
        output = self._decode(self.runner, drafter, self._batch, budget, self._clock, refinement, may_go_on)
        self._has_next = output.has_next
        emitted, finished, broken = self._batch.append(
            output.token_ids, output.policy_logprobs, output.sampling_logprobs, output.num_accepted
        )
        completions, failures = self._leave(finished.tolist(), broken.tolist())
        timed = output.draft_s + output.verify_s + output.accept_s + output.recording_s
        record = StepRecord(
            state=state,
            budget=budget,
            num_draft_tokens=output.num_draft_tokens,
            num_accepted_tokens=int(output.num_accepted.sum()),
            num_accepted_rank2_plus=output.num_accepted_rank2_plus,
            num_accepted_looked_up=output.num_accepted_looked_up,
            num_emitted_tokens=emitted,
            draft_s=output.draft_s,
            verify_s=output.verify_s,
            accept_s=output.accept_s,
            # a device's seconds may have begun before the step was asked for
            other_s=max(self._clock() - started - timed, 0.0),
            select_s=planned - started + (refinement.seconds if refinement else 0.0) + self._observe_s,
            draft=refinement.log(output.num_accepted) if refinement else None,
        )
        self._note(record, len(completions))
        if failures:
            self._unclaimed = unclaimed + completions
            raise not_finite_error(failures[::-1], instance=self.instance, weight_version=self.weight_version)
        return unclaimed + completions

    def _leave(self, finished: list[int], broken: list[int]) -> tuple[list[Completion], list[str]]:
        """Take samples out of their slots: what finished, and which failed."""
        completions, failures = [], []
        # from the back: the last sample moves into a slot that is left
        for slot in sorted({*finished, *broken}, reverse=True):
            if slot in broken:
                request, failure = self._batch.requests[slot], self._break(slot)
                if request.is_attempt:
                    # nobody has asked for it: weights that are to come may be sound
                    completions.append(as_asked(request))
                else:
                    failures.append(failure)
            else:
                completions.append(self._finish(slot))
        return completions, failures

    def _break(self, slot: int) -> str:
        """Take out a sample whose logits are not finite; return which it was."""
        state = self._batch.state(slot, weight_version=self.weight_version)
        self.exchange.scrub(slot)
        self.exchange.vacate(slot)
        return where_not_finite(state)

    def _refinement(self, budget: Budget, remaining: np.ndarray) -> Refinement | None:
        """Return what carries the law's further decisions of a refined budget."""
        if not budget.refined or self.scorer is None or self._law is None:
            return None
        return Refinement(self._law, self.scorer, budget, remaining, self._clock)

    @property
    def has_work(self) -> bool:
        """True while a sample is waiting or running, or a completion has not been returned yet."""
        return bool(self._waiting or self._attempts or self._unclaimed) or len(self._batch) > 0

    @property
    def num_running(self) -> int:
        """Samples in slots."""
        return len(self._batch)

    @property
    def stats(self) -> GenerationStats:
        """Sums over what has been done so far."""
        return self._tally.stats

    @property
    def num_emitted_tokens(self) -> int:
        """Of all decode steps so far."""
        return self._tally["num_emitted_tokens"]

    @property
    def num_context_tokens(self) -> int:
        """Committed tokens of the samples in slots."""
        return self._batch.context_tokens

    @property
    def num_waiting(self) -> int:
        """Samples without a slot."""
        return len(self._waiting)

    def load(self) -> InstanceLoad:
        """Return the workload as the scheduler polls it."""
        recent = list(itertools.islice(reversed(self.step_records), GOODPUT_WINDOW))
        seconds = sum(record.step_s for record in recent)
        emitted = sum(record.num_emitted_tokens for record in recent)
        return InstanceLoad(
            instance=self.instance,
            num_running=len(self._batch),
            num_waiting=len(self._waiting),
            num_free_slots=max(self.num_free_slots, 0),
            context_tokens=self._batch.context_tokens,
            weight_version=self.weight_version,
            drafter_version=self.drafter_version,
            decode_step=self._tally["num_decode_steps"],
            goodput_tokens_per_s=emitted / seconds if seconds > 0 else 0.0,
            goodput_samples=sum(r.num_samples * r.step_s for r in recent) / seconds if seconds > 0 else 0.0,
            stats=self.stats,
            num_slots=self.exchange.kv_admission.num_slots,
            drafter_alarm=self.drafter_alarm,
            num_ranks=1 if self.runner.ranks is None else self.runner.ranks.share.ranks,
        )

    def progress(self) -> Progress:
        """Return the number of response tokens so far of every running sample."""
        batch, live = self._batch, len(self._batch)
        num_tokens = batch.lengths[:live] - batch.prompt_lengths[:live]
        return Progress([request.key for request in batch.requests], num_tokens.tolist())

    def cut(self, keys: Collection[SampleKey]) -> list[Completion]:
        """End these samples where they are, those that are open here; return what there is of each."""
        slots = [slot for slot, request in enumerate(self._batch.requests) if request.key in keys]
        ended = [self._finish(slot, is_cut=True) for slot in slots[::-1]]
        waiting = [state for state in self._waiting if state.request.key in keys]
        for state in waiting:
            self.exchange.drop(state.request.key)
        return ended + [completion_of(one, instance=self.instance, is_cut=True) for one in waiting]

    def end_attempts(self, keys: Collection[SampleKey] | None = None) -> list[Completion]:
        """End what is made ahead, of these samples or all; return what no step has returned yet."""
        self._attempts = deque(s for s in self._attempts if keys is not None and s.request.key not in keys)
        for slot in self._attempt_slots()[::-1]:
            if keys is None or self._batch.requests[slot].key in keys:
                self._unclaimed.append(self._finish(slot, is_cut=True))
        unclaimed, self._unclaimed = self._unclaimed, []
        return unclaimed

    def supersede(self, key: SampleKey) -> None:
        """The sample itself comes: what is made ahead of it is too late, and a key stands for one sample here."""
        self._unclaimed = self.end_attempts({key})

    def give_way(self) -> None:
        """End attempts, the shortest first, until who waits or is on its way here has a slot and memory."""
        room = self.exchange.kv_admission
        while slots := self._attempt_slots():
            waits = bool(self._waiting) and not room.admits(self._waiting[0].num_committed_tokens)
            if not waits and self.exchange.num_free_slots >= 0 and room.one_too_many() is None:
                return
            shortest = min(slots, key=lambda slot: int(self._batch.lengths[slot]))
            self._unclaimed.append(self._finish(shortest, is_cut=True))

    @property
    def num_free_slots(self) -> int:
        """Slots that a sample may have: attempts give way."""
        return self.exchange.num_free_slots + len(self._attempt_slots())

    def _attempt_slots(self) -> list[int]:
        return [slot for slot, request in enumerate(self._batch.requests) if request.is_attempt]

    def so_far(self, keys: Collection[SampleKey]) -> list[Completion]:
        """Return what there is of these samples, of those in slots here; they go on."""
        slots = [slot for slot, request in enumerate(self._batch.requests) if request.key in keys]
        states = [self._batch.state(slot, weight_version=self.weight_version) for slot in slots]
        return [completion_of(one, instance=self.instance, is_cut=True) for one in states]

    def cancel_all(self) -> list[SampleRequest]:
        """Drop every open sample and return their requests."""
        cancelled = [*self._batch.requests, *(s.request for s in (*self._waiting, *self._attempts))]
        self._waiting.clear()
        self._attempts.clear()
        self._unclaimed.clear()
        while len(self._batch):
            self.exchange.vacate(len(self._batch) - 1)
        return cancelled

    def load_weights(self, manifest: WeightManifest, tensors: dict[str, Tensor]) -> None:
        """Load a published version of the target or the draft model.

        Raises WeightsError when target weights come while samples are open, or there is no draft model, and
        NotFiniteError for weights that are NaN or infinite; the weights before them stay then.
        """
        require_loadable(manifest, tensors)
        self.load_parts(manifest, [tensors])

    def load_parts(self, manifest: WeightManifest, parts: Iterable[Mapping[str, Tensor]]) -> None:
        """Load a version part by part as it comes, of numbers known to be finite, see `ModelRunner.load_parts`.

        Raises WeightsError, before the first part is asked for, as `load_weights`.
        """
        require_loadable(manifest, {})
        if manifest.model == "draft":
            drafter = part_of(self.drafter, LevelDrafter)
            if drafter is None:
                raise WeightsError(f"instance {self.instance} has no draft model to load weights into")
            self.exchange.kept.clear()
            drafter.load({name: tensor for part in parts for name, tensor in part.items()})
            self.drafter_version, self.drafter_checksum = manifest.weight_version, manifest.checksum
            return
        if self.has_work:
            raise WeightsError(
                f"instance {self.instance} got target weights version {manifest.weight_version} with "
                f"{len(self._batch)} running and {len(self._waiting)} waiting samples; drain it first"
            )
        self.exchange.kept.clear()
        self.runner.load_parts([spec.name for spec in manifest.tensors], parts)
        self.weight_version = manifest.weight_version

    def _preempt(self) -> None:
        """Let the shortest samples wait until the others have room to go on."""
        room = self.exchange.kv_admission
        while (slot := room.one_too_many()) is not None:
            self.exchange.preempt(slot, weight_version=self.weight_version)
            self._tally.add(num_preemptions=1)

    def _next_in_line(self) -> deque[SampleState] | None:
        """The line whose first sample may come in now; None: there is none, or no room."""
        line, free = self._waiting or self._attempts, self.runner.pool.num_slots - len(self._batch)
        if not line or free <= self.exchange.num_reserved:
            return None
        return line if self.exchange.kv_admission.admits(line[0].num_committed_tokens) else None

    def _admit(self) -> None:
        first, kept = len(self._batch), []
        # a step under way is read first
        while not (first and self._has_next) and (line := self._next_in_line()):
            if line[0].request.num_top is not None:
                self._score(line.popleft())
                continue
            kept.append(self.exchange.take_kept(self._batch.add(line.popleft())))
        self.exchange.kv_admission.hold()
        if len(self._batch) == first:
            return
        started = self._clock()
        slots, cached = range(first, len(self._batch)), self._batch.lengths[: len(self._batch)] - 1
        if self.drafter is not None:
            self.drafter.admit(slots, self._batch)
        missing = cached[first:].tolist()
        restore, version = self.exchange.restore, self.weight_version
        cached[first:] = [restore(slot, pieces, version) for slot, pieces in zip(slots, kept, strict=True)]
        pieces = [
            PrefillPiece(slot=slot, start=int(cached[slot]), length=length - int(cached[slot]))
            for slot, length in zip(slots, missing, strict=True)
        ]
        computed = fill_committed(
            self.runner, self._batch.tokens, pieces, self.max_prefill_tokens, cached=cached
        )
        seconds, num_kept = self._clock() - started, int(cached[first:].sum())
        self._tally.add(num_prefill_tokens=computed, num_kept_tokens=num_kept, prefill_s=seconds)

    def _score(self, state: SampleState) -> None:
        """Score a sample's tokens in the next slot, which is free again then; nothing of it is decoded."""
        slot = self._batch.add(state)
        self.exchange.kv_admission.hold()
        scores = score(self.runner, state, slot, max_tokens=self.max_prefill_tokens)
        self._batch.remove(slot)
        self._unclaimed.append(replace(completion_of(state, instance=self.instance), scores=scores))

    def _finish(self, slot: int, *, is_cut: bool = False) -> Completion:
        """Take a finished sample out of its slot; the last one moves in."""
        state = self._batch.state(slot, weight_version=self.weight_version)
        stopped = self._batch.has_stopped(slot)
        completion = completion_of(state, instance=self.instance, has_stopped=stopped, is_cut=is_cut)
        if state.request.keeps_caches:
            self.exchange.keep(slot)
        self.exchange.vacate(slot)
        return completion

    def _note(self, record: StepRecord, num_completions: int) -> None:
        started = self._clock()
        self.policy.observe(record)
        # counted with the next step: this record is complete
        self._observe_s = self._clock() - started
        alarm = self._law.take_alarm() if self._law is not None else None
        if alarm is not None:
            self.drafter_alarm = alarm.text(checksum=self.drafter_checksum, version=self.drafter_version)
            logger.warning("%s: drafting suspended; %s", self.instance, self.drafter_alarm)
        self.step_records.append(record)
        if self.step_log is not None:
            self.step_log.append(record)
        self._tally.add_step(record, num_completions)
