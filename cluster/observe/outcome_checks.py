"""What must come of an iteration, whatever is trained: a line where it did not, an error where all would be void."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ...core.errors import NumericsError

UNCHANGED, FIRST_LOG_RATIO = "learner/unchanged_weights", "learner/first_log_ratio"
RATIO_OFF = "learner/first_ratio_off"
_LIMITS = {True: (1e-3, 0.1, 1), False: (0.05, 0.5, 5)}
"""By whether both compute in float32, and invariantly: nats a token that rounding may explain, and that nothing does;
versions with one checksum before it is an error, since in bfloat16 a small step may round away."""
_CUT_RUNNING, _EQUAL_FIRST = 3, 5
"Iterations."
_SHOWN = 6
_NOT_MERGED = "see whether trainer.lora learns what cannot be merged, else report the model"


class Outcomes:
    """Of one run, or of what is left of it where it goes on."""

    def __init__(self, *, is_exact: bool, ends: str = "none") -> None:
        """`is_exact`: both forwards compute in float32, and invariantly; `ends`: the end tokens, for a person."""
        self._explained, self._void, self._patience = _LIMITS[is_exact]
        self._ends, self._num_cut, self._has_named = ends, 0, False
        self._unchanged: list[float] = []
        self._rewards: list[float] = []
        self.unmoved: Sequence[str] = ()
        "see `UpdateReport`"

    def judged(self, row: Mapping[str, float]) -> dict[str, float]:
        """An iteration's metrics, and whether its first ratios are off; of stale samples they may be."""
        is_fresh = row.get("mismatch/lag_max", 0.0) == 0.0
        return {**row, RATIO_OFF: float(is_fresh and row.get(FIRST_LOG_RATIO, 0.0) > self._explained)}

    def lines(self, iteration: int, row: Mapping[str, float]) -> Iterator[str]:
        """What a person is told of an iteration (counted from 0) with metrics of `judged`.

        Raises NumericsError, once all lines are taken, where training is void.
        """
        who, void = f"iteration {iteration + 1}", list[str]()
        self._unchanged += [row[UNCHANGED]] if UNCHANGED in row else []
        if row.get(UNCHANGED):
            yield f"{who}: {_unchanged(row)}"
            if all(self._unchanged) and len(self._unchanged) >= self._patience:
                void.append(f"every version has one checksum: {_unchanged(row)}")
        if row.get(RATIO_OFF):
            yield f"{who}: {self._off(row)}"
            if row[FIRST_LOG_RATIO] > self._void:
                void.append(self._off(row))
        self._num_cut = self._num_cut + 1 if row.get("rollout/length_cut_share") == 1.0 else 0
        if self._num_cut == _CUT_RUNNING:
            yield (
                f"{who}: no response of {_CUT_RUNNING} iterations ended; expected one of the end tokens {self._ends}, "
                "which must be those that end a turn in the model's chat template; set sampling.end_token_ids, or "
                "raise sampling.max_new_tokens"
            )
        # a teacher teaches whatever rewards are
        by_rewards = "learner/distill_loss" not in row
        self._rewards += [row[name] for name in ("reward/min", "reward/max") if by_rewards and name in row]
        if len(self._rewards) == 2 * _EQUAL_FIRST and len(set(self._rewards)) == 1:
            yield (
                f"{who}: every reward of the {_EQUAL_FIRST} iterations so far is {self._rewards[0]:g}: nothing can be "
                "learned from it; see in samples/ what it was given, and try the reward on a right and a wrong answer"
            )
        if self.unmoved and not self._has_named:
            self._has_named = True
            yield f"{who}: {unmoved_line(self.unmoved)}"
        if void:
            raise NumericsError(f"{who}: nothing can come of this training: {'; '.join(void)}")

    def _off(self, row: Mapping[str, float]) -> str:
        return (
            f"before any step the trainer's log-probabilities are {row[FIRST_LOG_RATIO]:.3g} nats a token from the "
            f"sampler's, where rounding explains {self._explained:g} (ratio furthest from 1: "
            f"{row.get('learner/ratio_at_first_minibatch', 1.0):.3g}): instances do not decode what is trained; "
            f"{_NOT_MERGED}"
        )


def _unchanged(row: Mapping[str, float]) -> str:
    return (
        f"the new weights have the old ones' checksum after {row.get('learner/num_optimizer_steps', 0.0):g} steps "
        f"(gradient norm {row.get('learner/grad_norm', 0.0):.3g}, learning rate {row.get('learner/lr', 0.0):.3g}): "
        f"nothing learned was published; raise trainer.learning_rate where steps round away, {_NOT_MERGED}"
    )


def unmoved_line(unmoved: Sequence[str]) -> str:
    """What a person is told of tensors that no gradient reached."""
    more = f" and {len(unmoved) - _SHOWN} more" if len(unmoved) > _SHOWN else ""
    return (
        f"{len(unmoved)} tensors ought to learn and have had no gradient: {', '.join(unmoved[:_SHOWN])}{more}; see "
        "whether the model's code freezes them or its forward leaves them out (an expert may have had no token yet)"
    )


def faults(rows: Sequence[Mapping[str, float]]) -> list[str]:
    """What makes a run's other figures no good news, from its metrics alone."""
    unchanged = [row[UNCHANGED] for row in rows if UNCHANGED in row]
    off = [row[FIRST_LOG_RATIO] for row in rows if row.get(RATIO_OFF)]
    same = "every weight version has one checksum: nothing learned was published"
    return ([same] if unchanged and all(unchanged) else []) + [
        f"first ratios are off in {len(off)} of {len(rows)} iterations, by up to {most:.3g} nats a token: instances do "
        "not decode what is trained"
        for most in sorted(off)[-1:]
    ]
