"""A fake engine and a fake instance: responses are a pure function of the key, no torch, quick to start."""

import contextlib
import os
import threading
import time
from collections.abc import Collection

import numpy as np
import ray

from rlhfspec.actors.actor_messages import LoadedWeights
from rlhfspec.actors.generation.decode_loop import DecodeLoop
from rlhfspec.actors.generation.loop_orders import HoldOrder, SubmitOrder
from rlhfspec.core.decode_records import GenerationStats, InstanceLoad, StepRecord
from rlhfspec.core.errors import DataError, InstanceLost
from rlhfspec.core.progress import Progress
from rlhfspec.core.records import (
    Completion,
    FinishReason,
    Prompt,
    SampleKey,
    SampleRequest,
    SamplingParams,
    WeightSpan,
)

POISON = 13
"The sample index at which a poisoned engine fails."


def make_request(index: int, *, prompt_tokens: int = 2) -> SampleRequest:
    prompt = Prompt(prompt_id=index, token_ids=np.arange(prompt_tokens))
    return SampleRequest(
        key=SampleKey(run_seed=0, sample_index=index), prompt=prompt, sampling=SamplingParams()
    )


def response_of(index: int) -> np.ndarray:
    return np.arange(index, index + index % 7 + 1, dtype=np.int64)


class FakeEngine:
    """Emits one token a sample and step."""

    def __init__(self, name: str, *, step_s: float = 0.0, poisoned: bool = False) -> None:
        self.name = name
        self.step_s = step_s
        self.poisoned = poisoned
        self.running: dict[SampleKey, tuple[SampleRequest, int]] = {}
        self.step_log: list[StepRecord] | None = None
        self.num_steps = 0
        self.num_emitted_tokens = 0

    @property
    def has_work(self) -> bool:
        return bool(self.running)

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def num_context_tokens(self) -> int:
        return sum(len(request.prompt.token_ids) + length for request, length in self.running.values())

    def submit(self, request: SampleRequest) -> None:
        if len(request.prompt.token_ids) > 100:
            raise DataError(f"prompt {request.prompt.prompt_id} does not fit the context")
        self.running[request.key] = (request, 0)

    def step(self) -> list[Completion]:
        if self.step_s:
            time.sleep(self.step_s)
        self.num_steps += 1
        done = []
        for key, (request, length) in list(self.running.items()):
            if self.poisoned and key.sample_index == POISON:
                raise ZeroDivisionError("planted")
            self.num_emitted_tokens += 1
            self.running[key] = (request, length + 1)
            if length + 1 == len(response_of(key.sample_index)):
                del self.running[key]
                done.append(self.completion(request))
        return done

    def end_attempts(self) -> list[Completion]:
        return []

    def cut(self, keys: Collection[SampleKey]) -> list[Completion]:
        ended = [self.running.pop(key) for key in list(self.running) if key in keys]
        return [self.completion(request, cut_at=length) for request, length in ended]

    def completion(self, request: SampleRequest, *, cut_at: int | None = None) -> Completion:
        tokens = response_of(request.key.sample_index)[:cut_at]
        logprobs = np.full(len(tokens), -1.0, dtype=np.float32)
        return Completion(
            key=request.key,
            prompt_id=request.prompt.prompt_id,
            group_id=request.group_id,
            epoch=request.epoch,
            token_ids=tokens,
            policy_logprobs=logprobs,
            sampling_logprobs=logprobs,
            finish_reason=FinishReason.STOP if cut_at is None else FinishReason.CUT,
            weight_spans=(WeightSpan(weight_version=0, first_position=0),),
            instance=self.name,
            num_decode_steps=len(tokens),
            num_accepted_tokens=0,
        )

    def progress(self) -> Progress:
        return Progress(list(self.running), [count for _, count in self.running.values()])

    def load(self) -> InstanceLoad:
        return InstanceLoad(
            instance=self.name,
            num_running=len(self.running),
            num_waiting=0,
            num_free_slots=0,
            context_tokens=0,
            weight_version=0,
            drafter_version=0,
            decode_step=self.num_steps,
            goodput_tokens_per_s=0.0,
            stats=GenerationStats(
                num_decode_steps=self.num_steps, num_emitted_tokens=self.num_emitted_tokens
            ),
        )


class FakeHost:
    """Has its engine from the start; remembers what was loaded."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self.spot_trainer = None
        self.loaded: list[int] = []

    def remember(self, responses) -> None:
        pass

    def load_weights(self, manifest, chunks) -> LoadedWeights:
        self.loaded.append(manifest.weight_version)
        return LoadedWeights(
            instance=self.engine.name,
            model=manifest.model,
            weight_version=manifest.weight_version,
            checksum=manifest.checksum,
        )


@ray.remote(max_restarts=0, concurrency_groups={"control": 3, "poll": 1})
class FakeInstance:
    """What the scheduler actor sees of a generation actor, without torch."""

    def __init__(self, name: str, step_s: float, poisoned: bool = False) -> None:
        engine = FakeEngine(name, step_s=step_s, poisoned=poisoned)
        self.loop = DecodeLoop(name, FakeHost(engine), report_interval_s=0.02)
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with contextlib.suppress(ZeroDivisionError):
            self.loop.run()

    @ray.method(concurrency_group="poll")
    def poll(self, acknowledged: int, wait_s: float):
        return self.loop.poll(acknowledged=acknowledged, wait_s=wait_s)

    @ray.method(concurrency_group="control")
    def submit(self, requests, timeout_s: float, term: int = 0) -> None:
        self.loop.order(SubmitOrder(requests=requests, term=term)).result(timeout=timeout_s)

    @ray.method(concurrency_group="control")
    def hold(self, term: int, timeout_s: float):
        return self.loop.order(HoldOrder(term=term)).result(timeout=timeout_s)

    def lose(self, why: str) -> None:
        """As the leader of ranks does whose group is lost."""
        self.loop.lose(InstanceLost(why))

    def pid(self) -> int:
        return os.getpid()
