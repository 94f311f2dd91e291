"""What was delivered last: epoch and digest of each sample, to compare late copies with. Bounded."""

from __future__ import annotations

from ...core.records import SampleKey, Stream
from .events import Alarm, Order

KEPT_ACCEPTED = 1 << 15
"Samples; about 12 MB. Copies come late by a move or a heartbeat timeout, not by so many samples."


class Accepted:
    """Of one scheduler."""

    def __init__(self, most: int = KEPT_ACCEPTED) -> None:
        self.num_delivered = 0
        "since it began"
        self._most = most
        self._of: dict[SampleKey, tuple[int, str]] = {}
        "in order of delivery"
        self._forgotten: dict[tuple[int, Stream], int] = {}
        "highest index that is not kept any more"

    def add(self, key: SampleKey, epoch: int, digest: str) -> None:
        """Note a delivery."""
        self.num_delivered += 1
        self._of[key] = (epoch, digest)

    def get(self, key: SampleKey) -> tuple[int, str] | None:
        """Epoch and digest of a delivery that is kept."""
        return self._of.get(key)

    def ask_again(self, key: SampleKey) -> None:
        """A delivered sample is open once more."""
        self._of.pop(key, None)

    def let_go(self) -> None:
        """Keep the last ones only; to be called between the samples of two askings."""
        while len(self._of) > self._most:
            key = next(iter(self._of))
            del self._of[key]
            stream = (key.run_seed, key.stream)
            self._forgotten[stream] = max(self._forgotten.get(stream, -1), key.sample_index)

    def is_forgotten(self, key: SampleKey) -> bool:
        """Whether it may have been delivered so long ago that its digest is not kept: indices only grow."""
        return key.sample_index <= self._forgotten.get((key.run_seed, key.stream), -1)

    def keys(self) -> set[SampleKey]:
        """Of those that are kept."""
        return set(self._of)


def compare(accepted: tuple[int, str], key: SampleKey, instance: str, epoch: int, other: str) -> list[Order]:
    """Return an alarm where a late copy's digest is not that of the copy that was accepted."""
    accepted_epoch, own = accepted
    if other == own or not (other and own):
        # one that was cut says nothing of the other
        return []
    what = f"tokens or log-probabilities differ from those accepted under epoch {accepted_epoch}"
    return [Alarm(key=key, instance=instance, epoch=epoch, what=what)]
