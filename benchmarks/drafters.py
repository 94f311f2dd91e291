"""Every drafter that needs no smaller sibling of the target, on SmolLM2-135M-Instruct with chat prompts.

- acceptance by depth and the cost of a level, one sample at a time, by a tree of at most eight nodes (the table);
- speed under the adaptive policy over plain decoding, by batch size, and on prompts of another kind;
- a head and a look-up side by side, in all of these (`head_suffix`);
- where responses repeat: eight a prompt at temperature 0.6, the second time over the same prompts;
- a rollout of long-tailed limits on two instances;
- runs that change the target's style, with a head that is trained in idle time and with a frozen one.

The head is made by the benchmark from other prompts, once (`benchmarks.contestants`); without --data
there is none: it would have nothing to learn from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.contestants.contestants import (
    CHAT,
    CODE,
    PAIRS,
    PLAIN,
    Contestants,
    adapted_over_frozen,
    bench_head,
    head_folder,
    head_rollouts,
    other_prompts,
)
from benchmarks.support.harness import Bench
from benchmarks.support.timing import interleaved, rate_rows, ratios
from benchmarks.support.workload import Workload, real_workload
from rlhfspec.core.records import SampleRequest
from rlhfspec.engine.drafters.head.head_weights import HeadWeights

BATCH_SIZES = {"quick": (8,), "default": (1, 8), "full": (1, 4, 8, 16)}
MAX_NEW_TOKENS = {"quick": 48, "default": 96, "full": 128}
ROUNDS = {"quick": 1, "default": 2, "full": 3}
PROFILE_S = {"quick": 12.0, "default": 40.0, "full": 60.0}
PROMPTS = {"quick": 2, "default": 8, "full": 16}
"Of the table, and of a batch size at least."
HEAD_PROMPTS = 600
"That the head is made from, at most; the measured ones are not among them."
GROUP = 8
REPEATED_PROMPTS = {"quick": 1, "default": 2, "full": 8}
LOW_TEMPERATURE = 0.6
COOL, OTHERS, REPEATED = 20_000, 30_000, 40_000
"Sample indices begin here where temperature or prompts are others."


def run(*, out: Path, mode: str, data: Path | None) -> int:
    """Write OUT/drafters.json; returns 0, or 1 when a token differs from plain decoding's."""
    bench = Bench("drafters", out=out, mode=mode, data=data)
    largest = max(*BATCH_SIZES[mode], PROMPTS[mode])
    extra = 0 if data is None else HEAD_PROMPTS
    workload = real_workload(
        largest + extra, data=data, max_new_tokens=MAX_NEW_TOKENS[mode], console=bench.console
    )
    if workload is None:
        return 0
    head = None
    if extra:
        head, facts = bench_head(replace(workload, prompts=workload.prompts[largest:]), mode)
        bench.figures.values |= facts
    parts = _Parts(bench, replace(workload, prompts=workload.prompts[:largest]), head)
    todo = [parts.table, parts.speeds, parts.repeats]
    if not bench.is_quick:
        todo += [parts.other_prompts, parts.rollouts, parts.trained]
    for part in todo:
        part()
        bench.figures.values |= parts.verdicts()
        bench.write(rounds=ROUNDS[mode])
    return 1 if parts.verdicts()["mismatches"] else 0


class _Parts:
    """The parts that one process runs."""

    def __init__(self, bench: Bench, workload: Workload, head: HeadWeights | None) -> None:
        self._bench, self._workload, self._head = bench, workload, head
        self._figures, self._mode, self._console = bench.figures, bench.mode, bench.console
        self._has_head = head is not None
        self._worst: list[float] = []
        "of every comparison that may not fall below plain decoding"
        self._differing = 0
        slots = max(*BATCH_SIZES[bench.mode], GROUP)
        self.contestants = Contestants(workload, head, num_slots=slots, profile_s=PROFILE_S[bench.mode])

    def table(self) -> None:
        """Acceptance by depth and cost of a level, at temperature 1; the head's at 0.6 too."""
        requests = self._workload.requests()[: PROMPTS[self._mode]]
        lengths: dict[str, float] = {}
        for name in self.contestants.names:
            found = self.contestants.depths(name, requests)
            lengths[name] = found.mean_length
            self._figures.values |= {
                f"{name}_acceptance_length": found.mean_length,
                f"{name}_level_share": found.level_share,
                **{f"{name}_accepted_at_{d}": share for d, share in enumerate(found.by_depth[:4], start=1)},
            }
            self._console.print(f"{name}: {found}", markup=False)
        if self._has_head:
            cool = self._cool(requests)
            self._figures.values |= {
                "head_acceptance_length_t06": self.contestants.depths("head", cool).mean_length,
                "head_over_model_free": lengths["head"] - lengths["suffix"],
            }

    def verdicts(self) -> dict[str, float]:
        """The least speed over plain decoding so far, and samples whose tokens differ."""
        differing = self.contestants.mismatches + self._differing
        worst = {"worst_over_plain": min(self._worst)} if self._worst else {}
        return {**worst, "mismatches": float(differing)}

    def speeds(self) -> None:
        """Every drafter over plain decoding by batch size."""
        for size in BATCH_SIZES[self._mode]:
            requests = self._workload.requests()[: max(size, min(PROMPTS[self._mode], 4))]
            self._compared(f"b{size}", requests, size, self.contestants.names)
        if self._has_head and 1 in BATCH_SIZES[self._mode]:
            self._figures.values["head_b1_over_plain"] = self._figures.values["head_b1"]
            cool = self._cool(self._workload.requests()[:4])
            self._compared("b1_t06", cool, 1, ["head"])

    def rollouts(self) -> None:
        """Long-tailed limits on two instances."""
        if self._head is not None:
            taken, differing = head_rollouts(self._workload, self._head, self._mode)
            self._worst.append(self._figures.keep("head_rollout_over_plain", taken))
            self._differing += differing

    def trained(self) -> None:
        """A head that follows the target, beside one that stays."""
        if self._head is not None:
            folder = head_folder(self._workload, self._mode)
            self._differing += adapted_over_frozen(self._bench.out, self._mode, folder, self._figures)

    def other_prompts(self) -> None:
        """Code and chat, which no head was made from."""
        names = ["head", *PAIRS, "suffix"] if self._has_head else ["suffix"]
        for number, (kind, questions) in enumerate((("code", CODE), ("chat", CHAT))):
            prompts = other_prompts(self._workload.tokenizer, questions)
            others = replace(self._workload, prompts=prompts)
            requests = others.requests(first_index=OTHERS + 1000 * number)
            self._compared(f"{kind}_b4", requests, 4, names)

    def repeats(self) -> None:
        """Eight responses a prompt, the second time over the same prompts."""
        prompts = self._workload.requests()[: REPEATED_PROMPTS[self._mode]]
        first, second = (_grouped(prompts, REPEATED + number * 5_000) for number in (0, 1))
        names = ["suffix", *PAIRS] if self._has_head else ["suffix"]
        self._compared("repeat", second, GROUP, names, before=[first])
        self._figures.values["suffix_repeat_over_plain"] = self._figures.values["suffix_repeat"]
        self._figures.values["suffix_repeat_acceptance_length"] = self.contestants.acceptance_length["suffix"]

    def _cool(self, requests: Sequence[SampleRequest]) -> list[SampleRequest]:
        return [_at(request, COOL + request.key.sample_index) for request in requests]

    def _compared(
        self,
        part: str,
        requests: Sequence[SampleRequest],
        at_once: int,
        names: Sequence[str],
        before: Sequence[Sequence[SampleRequest]] = (),
    ) -> None:
        """Keep each one's speed over plain decoding as NAME_PART."""
        rates = {
            name: self.contestants.rate(name, [*before, requests], at_once=at_once)
            for name in (PLAIN, *names)
        }
        taken = interleaved(rates, ROUNDS[self._mode])
        self._bench.rows += rate_rows(taken, part=part)
        found = {name: self._figures.keep(f"{name}_{part}", ratios(taken, name, PLAIN)) for name in names}
        self._console.print(f"{part}: { ({n: round(v, 3) for n, v in found.items()}) }", markup=False)
        self._worst += found.values()


def _grouped(requests: Sequence[SampleRequest], first: int) -> list[SampleRequest]:
    """Several responses to each prompt; their keys count from `first`."""
    return [
        _at(request, first + number * GROUP + place)
        for number, request in enumerate(requests)
        for place in range(GROUP)
    ]


def _at(request: SampleRequest, sample_index: int) -> SampleRequest:
    return replace(
        request,
        key=replace(request.key, sample_index=sample_index),
        sampling=replace(request.sampling, temperature=LOW_TEMPERATURE),
    )
