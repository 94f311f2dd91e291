"""Errors a user can meet, one small tree.

    RlhfSpecError
    |-- InputError            exit code 2: the user can fix it
    |   |-- ConfigError       a key, a value or a combination of values
    |   |-- ModelError        a model path, a tokenizer, an architecture we cannot run
    |   |-- DataError         a file, a record, a field, a prompt
    |   |-- ProfileError      a profile that is missing or describes another run
    |   |-- PlacementError    the cluster or the memory cannot hold what was asked for
    |   |-- RewardError       a reward function raised or returned no finite number
    |   `-- EpisodeError      an environment raised, took too long, or returned what is no step
    |-- WeightsError          a manifest, a chunk or a version that does not match
    |-- NumericsError         the invariance probe failed, or an exactness check found a difference
    |   `-- NotFiniteError    weights or logits that are NaN or infinite
    |-- NotAsLearned          a saved model, read again, is not what was learned
    |-- StorageError          a disk is full, or refuses what is written
    |-- RunTaken              another process goes on with this run
    |-- WaitTimeout           one process waited for another for too long
    |-- TransferError         a channel between two instances failed, or a frame arrived damaged
    |-- NodeDied              Ray itself died under the run, or did not start
    |-- RewardServerLost      a reward server did not answer, however often it was asked
    |-- InstanceLost          a generation instance died or froze
    |-- TrainerLost           a trainer died or froze
    `-- SchedulerLost         the scheduler died more often than it may be restarted

Messages have one order: what failed, what was expected, what was got, what to do.
"""

import re
from copyreg import __newobj__  # type: ignore[attr-defined]

MAX_MESSAGE_CHARS = 2000
_LONG_WORD = re.compile(r"(\S{100})\S{200,}(\S{100})")


def one_line(text: str) -> str:
    """Return `text` as one printable line: white space folded, what cannot be printed escaped.

    Of a text that quotes a book, beginning and end are kept: they say what failed and what to do.
    """
    text = _LONG_WORD.sub(r"\1...\2", " ".join(text.split()))
    if len(text) > MAX_MESSAGE_CHARS:
        text = f"{text[: MAX_MESSAGE_CHARS - 500]} [...] {text[-490:]}"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class RlhfSpecError(Exception):
    """Base of every error this project raises on purpose."""

    exit_code = 1

    def __reduce__(self) -> tuple:
        """Pickle message and attributes: the default would call constructors with the message alone."""
        return __newobj__, (type(self), *self.args), self.__dict__


class InputError(RlhfSpecError):
    """Bad input: the user can fix it. The command line exits with 2.

    The message is one line whatever input it quotes (see `one_line`).
    """

    exit_code = 2

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


class ConfigError(InputError):
    """A config key is unknown, or a value or a combination of values is refused."""


class ModelError(InputError):
    """A model or tokenizer is missing, unreadable, or does not fit its partner."""


class DataError(InputError):
    """A data file, record, field or prompt is missing or malformed."""


class ProfileError(InputError):
    """A profile is missing, unreadable, or was measured with something else than what runs."""


class PlacementError(InputError):
    """The cluster or its memory cannot hold what the config asks for."""


class RewardError(InputError):
    """A reward function raised, or returned something that is not a finite number."""


class EpisodeError(InputError):
    """An environment raised, took too long, or returned what is no step; the message names sample and turn."""


class WeightsError(RlhfSpecError):
    """Published weights do not match their manifest, or arrive out of order."""


class NumericsError(RlhfSpecError):
    """The invariance probe failed, or an exactness check found a difference."""


class NotInvariantError(NumericsError):
    """Logits depend on the company that a token is computed in, by rounding: fast numerics would be right."""


class NotFiniteError(NumericsError):
    """Weights or logits are NaN or infinite; the message names the tensor or the sample."""


class NotAsLearned(RlhfSpecError):
    """A model that was written, read again, is another one than was learned; the state of the run is whole."""


class StorageError(RlhfSpecError):
    """A file or folder could not be written; nothing half-made is left under its name."""


class RunTaken(RlhfSpecError):
    """Another process has resumed the run that this one was taken to have left; nothing may be written any more."""


class WaitTimeout(RlhfSpecError):
    """A wait across processes ran out of time. The message names both sides."""

    def __init__(self, *, waiter: str, waited_for: str, order: str, waited_s: float, advice: str) -> None:
        super().__init__(
            f"{waiter} waited {waited_s:.0f} s for {waited_for} to answer '{order}' and gave up; {advice}"
        )
        self.waited_for = waited_for


class TransferError(RlhfSpecError):
    """A channel that carries caches between instances failed; the channel is dead, the sample is not."""

    def __init__(
        self, *, peer: str, channel: str, awaited: str, got: str, waited_s: float = 0.0, advice: str = ""
    ) -> None:
        waited = f" for {waited_s:.1f} s" if waited_s else ""
        super().__init__(
            f"channel {channel} with {peer} failed: awaited {awaited}{waited}, got {got}; "
            f"{advice or 'open a new channel'}"
        )
        self.peer, self.channel = peer, channel


class NodeDied(RlhfSpecError):
    """The Ray node under the process that runs the loop died, and all its actors with it."""


class RewardServerLost(RlhfSpecError):
    """A reward server is down or refuses; the iterations before are whole, and a run can go on from their weights."""


class InstanceLost(RlhfSpecError):
    """A generation instance died or stopped answering; its samples are re-queued."""


class TrainerLost(RlhfSpecError):
    """A trainer died or froze; a run goes on from its last state while `cluster.max_trainer_restarts` last."""


class PeerLost(RlhfSpecError):
    """A trainer of several could not go on because another one died or fell silent."""


class SchedulerLost(RlhfSpecError):
    """The scheduler died more often than it may be restarted."""


def describe_error(error: BaseException) -> str:
    """One line for a person: of this project's errors the message and its notes, of any other the type too."""
    if isinstance(error, RlhfSpecError):
        return "; ".join([str(error), *getattr(error, "__notes__", ())])
    return f"{type(error).__name__}: {error}".rstrip(": ")
