"""The search for moves against its plain form: pair by pair and sample by sample, with sums over cells written out."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from pool_views import after, cpu_curve, pool_view

from rlhfspec.core.records import SampleKey
from rlhfspec.policies.reallocation.finish_time import SURE, Outlook, outlook
from rlhfspec.policies.reallocation.finish_time_policy import FinishTimePolicy
from rlhfspec.policies.reallocation.gate import Gate
from rlhfspec.policies.reallocation.move_search import (
    MAX_PAIRS,
    MAX_ROUNDS,
    MIN_CANDIDATES,
    ROUND_CANDIDATES,
    ROUND_PAIRS,
    Hurdle,
)
from rlhfspec.policies.reallocation.pool_records import MoveMode, PoolView
from rlhfspec.policies.reallocation.rate_curve import RateCurve
from rlhfspec.policies.reallocation.survival import LengthHistory
from rlhfspec.profiles.transfer import PrefillModel, TransferModel

SAMPLE_COOLDOWN_S, PAIR_COOLDOWN_S = 0.25, 0.15
LIMIT = 256
Sample = tuple[SampleKey, int, int]
"key, response and context tokens"


def some_gate() -> Gate:
    """Short samples are computed anew, long ones shipped; opening a channel costs what a small gain is worth."""
    return Gate(
        kv_bytes_per_token=1e3,
        transfer=TransferModel(latency_s=2e-3, bytes_per_s=1e9, open_s=1e-3),
        prefill=PrefillModel(fixed_s=1e-3, token_s=2e-5),
    )


def reading_curve() -> RateCurve:
    """Contexts slow decoding."""
    return RateCurve(
        [1, 8, 32], [440.0, 1250.0, 1570.0], context_tokens=[100, 800, 3200], context_token_s=[1e-6] * 3
    )


@dataclass
class PlainForm:
    """`FinishTimePolicy` written out."""

    curve: RateCurve
    history: LengthHistory = field(default_factory=LengthHistory)
    gate: Gate = field(default_factory=some_gate)
    hurdle: Hurdle = field(default_factory=Hurdle)
    moved: dict[SampleKey, float] = field(default_factory=dict)
    ways: dict[tuple[int, int], float] = field(default_factory=dict)
    began_s: float = np.inf

    def plan(self, view: PoolView) -> list[tuple[SampleKey, str, str, MoveMode]]:
        """Moves in order: key, source, destination, mode."""
        self.began_s = min(self.began_s, view.now_s)
        held = [
            [(k, int(r), int(c)) for k, r, c in zip(i.keys, i.response_tokens, i.context_tokens, strict=True)]
            for i in view.instances
        ]
        samples = [sample for own in held for sample in own]
        free = [i.num_free_slots for i in view.instances]
        sizes = [len(own) for own in held]
        if not samples or not any(free) or not self.may_pay(max(sizes), min(sizes)):
            return []
        lengths = np.array([response for _, response, _ in samples])
        expected = outlook(
            self.history.survival(view.max_new_tokens, lengths),
            prompt_tokens=float(np.mean([context - response for _, response, context in samples])),
        )
        loads = [[response for _, response, _ in own] for own in held]
        done = [self.done_s(expected, load) for load in loads]
        whole_s = view.now_s - self.began_s + max(done)
        left, used, found, pairs_left = list(sizes), set[SampleKey](), [], ROUND_PAIRS
        for number in range(MAX_ROUNDS):
            order = sorted(range(len(held)), key=lambda k: -done[k])
            sources = [k for k in order if left[k] > 0]
            destinations = [k for k in reversed(order) if free[k] > 0]
            pairs = [
                (s, d)
                for s, d in list(zip(sources, destinations, strict=False))[:MAX_PAIRS]
                if done[s] > done[d]
            ]
            if number == 0:
                pairs = [
                    (s, d) for s, d in pairs if self.is_worth_a_look(expected, loads, sizes, s, d, whole_s)
                ]
                left = [n if any(k == s for s, _ in pairs) else 0 for k, n in enumerate(left)]
            if not pairs or pairs_left <= 0:
                break
            pairs_left -= len(pairs)
            most = max(MIN_CANDIDATES, ROUND_CANDIDATES // len(pairs))
            columns = min(most, max(sizes[s] for s, _ in pairs))
            best = [
                self.best_of(expected, loads[s], loads[d], candidates(expected, held[s], columns), used)
                for s, d in pairs
            ]
            used |= {chosen[1][0] for chosen in best if chosen is not None}
            for (s, d), chosen in zip(pairs, best, strict=True):
                if chosen is None or not self.may_move(view.now_s, chosen[1][0], s, d):
                    continue
                _, (key, response, _), mode = chosen
                found.append((key, s, d, mode))
                loads[s].remove(response)
                loads[d].append(response)
                free[d] -= 1
                left[s] -= 1
            for k in {k for _, s, d, _ in found for k in (s, d)}:
                done[k] = self.done_s(expected, loads[k])
            if not any(chosen is not None for chosen in best):
                break
        names = [i.instance for i in view.instances]
        for key, s, d, _ in found:
            self.moved[key] = self.ways[s, d] = view.now_s
        return [(key, names[s], names[d], mode) for key, s, d, mode in found]

    def may_pay(self, more: int, fewer: int) -> bool:
        return more - fewer > self.hurdle.chance * np.sqrt(more + fewer)

    def may_move(self, now_s: float, key: SampleKey, source: int, destination: int) -> bool:
        rested = now_s - self.ways.get((destination, source), -np.inf) >= PAIR_COOLDOWN_S
        return rested and now_s - self.moved.get(key, -np.inf) >= SAMPLE_COOLDOWN_S

    def sums(self, expected: Outlook, lengths: list[int]) -> np.ndarray:
        """[3, X] alive, log of the probability that none is, context: cell after cell."""
        cells = sorted(int(expected.cell(np.array(length))) for length in lengths)
        return sum((expected.terms[:, cell] for cell in cells), np.zeros_like(expected.terms[:, 0]))

    def course(self, expected: Outlook, sums: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """[X] probability that a sample is left, and seconds of each cell."""
        alive, log_done, context = sums
        any_left = 1.0 - np.exp(log_done)
        given = np.maximum(any_left, SURE)
        token_s = self.curve.seconds_per_token(np.maximum(alive, any_left) / given, context / given)
        return any_left, expected.cell_tokens * token_s

    def done_s(self, expected: Outlook, lengths: list[int]) -> float:
        any_left, cell_s = self.course(expected, self.sums(expected, lengths))
        return float((any_left * cell_s).sum())

    def both_done_s(self, expected: Outlook, one: np.ndarray, other: np.ndarray) -> float:
        """The later time is both times less the earlier one, over which both still run."""
        (left, left_s), (right, right_s) = self.course(expected, one), self.course(expected, other)
        ends, knots = left_s.cumsum()[:, None], right_s.cumsum()
        overlap_s = np.minimum(ends, knots) - np.maximum(ends - left_s[:, None], knots - right_s)
        earlier_s = left @ np.maximum(overlap_s, 0.0) @ right
        return float(left @ left_s + right @ right_s - earlier_s)

    def is_worth_a_look(
        self, expected: Outlook, loads: list[list[int]], sizes: list[int], s: int, d: int, whole_s: float
    ) -> bool:
        sums = [self.sums(expected, load) for load in loads]
        share = np.mean(sums, axis=0)
        gain = self.both_done_s(expected, sums[s], sums[d]) - self.both_done_s(expected, share, share)
        return self.may_pay(sizes[s], sizes[d]) and gain >= self.hurdle.start_share * whole_s

    def best_of(
        self,
        expected: Outlook,
        source: list[int],
        destination: list[int],
        samples: list[Sample],
        used: set[SampleKey],
    ) -> tuple[float, Sample, MoveMode] | None:
        """What is gained by the best of these, which, and how; None where nothing is."""
        before = self.both_done_s(expected, self.sums(expected, source), self.sums(expected, destination))
        best = None
        for sample in samples:
            key, response, context = sample
            less = list(source)
            if key in used:
                continue
            less.remove(response)
            moved = self.both_done_s(
                expected, self.sums(expected, less), self.sums(expected, [*destination, response])
            )
            costs = self.gate.costs(context, cold=True)
            worth = {
                mode: (before - moved) * (1.0 - ready_s / before) - self.hurdle.cost_margin * lost_s
                for mode, ready_s, lost_s in (
                    (MoveMode.MIGRATE, costs.migrate_s, costs.migrate_lost_s),
                    (MoveMode.RECOMPUTE, costs.recompute_s, costs.recompute_lost_s),
                )
                if ready_s < before
            }
            for mode, gain in worth.items():
                if gain > (0.0 if best is None else best[0]):
                    best = (gain, sample, mode)
        return best


def candidates(expected: Outlook, held: list[Sample], columns: int) -> list[Sample]:
    """Spread from the longest expected remainder to the shortest."""
    remaining = expected.mean_remaining
    line = sorted(held, key=lambda sample: (-remaining[expected.cell(np.array(sample[1]))], sample[2]))
    return [line[round(share * (len(line) - 1))] for share in np.linspace(0.0, 1.0, columns)]


@pytest.mark.parametrize("curve", [cpu_curve, reading_curve])
def test_moves_are_those_of_the_plain_form(curve) -> None:
    num_moves = 0
    modes = set()
    for seed in range(8):
        random = np.random.default_rng(seed)
        policy = FinishTimePolicy(
            curve(), some_gate(), sample_cooldown_s=SAMPLE_COOLDOWN_S, pair_cooldown_s=PAIR_COOLDOWN_S
        )
        plain = PlainForm(curve())
        for length in random.integers(1, LIMIT, int(random.integers(0, 40))).tolist():
            policy.note_finished(length)
            plain.history.note(length)
        sizes = random.choice([0, 1, 3, 6, 16, 20], int(random.integers(2, 7)))
        lengths = [random.integers(0, LIMIT, size).tolist() for size in sizes]
        view = pool_view(*lengths, num_slots=20, max_new_tokens=LIMIT)
        for poll in range(1, 4):
            moves = policy.plan(view)
            assert [(m.key, m.source, m.destination, m.mode) for m in moves] == plain.plan(view)
            num_moves += len(moves)
            modes |= {move.mode for move in moves}
            view = after(view, moves, now_s=0.1 * poll, extra_tokens=int(random.integers(0, 3)))
    assert num_moves > 25 and modes == set(MoveMode)
