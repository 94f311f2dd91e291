"""A reward from the user's own Python function, `package.module:function`, each call within a time limit.

Signature: `f(prompt: str, response: str, reference: str) -> float | dict` with the reward under "value" and any
further finite numbers as parts. By name it may ask for more (`call_forms.EXTRAS`) and for
the columns of `data.reward_fields`. Functions of TRL, verl and OpenRLHF are called as these do (`call_forms.FOREIGN`).
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import IO, Any

from ...core.errors import ConfigError
from ...core.named_code import user_folders
from ...core.records import Reward, Unscored
from .call_forms import BAD, NONE, PARTS, Answer
from .function_child import READY, late
from .score_request import ScoreRequest, groups

logger = logging.getLogger(__name__)
_START_S = 120.0
"what importing the user's module may take"
_GRACE_S = 5.0
"An async call has its limit in the child, which needs a moment to say so."
_MAIN = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[3]); "
    "from rlhfspec.learning.rewards.function_child import main; main(int(sys.argv[1]), int(sys.argv[2]))"
)


class UserReward:
    """Calls the user's function once a response, in a child process that is replaced when a call hangs.

    One that takes lists is called once for all responses of a group, in the order of the sample index.
    """

    def __init__(
        self,
        path: str,
        *,
        timeout_s: float,
        pattern: str | None = None,
        fields: Sequence[str] | None = (),
        scope: str = "auto",
    ) -> None:
        """`pattern`: of kind format, whose function is our own. `fields`: columns that it may ask for, None for any.

        Raises ConfigError when the function cannot be imported or called.
        """
        self.path = path
        self._timeout_s = timeout_s
        self._order = (
            ("format", pattern, (), scope) if pattern is not None else ("import", path, fields, scope)
        )
        self._child = _Child(self._order, path)

    @property
    def described(self) -> str:
        """The file that was imported and how the function in it is called; empty of kind format."""
        return self._child.described

    @property
    def in_groups(self) -> bool:
        """Whether it is called with all responses of a prompt."""
        return bool(self._child.in_groups)

    def outcomes(self, requests: Sequence[ScoreRequest]) -> Iterator[Reward | Unscored]:
        """One answer a request, in order, as they come; a call that hangs or crashes is one of them.

        Calls of an async function wait beside one another; where one of them takes the process with it, those that
        have no answer are made again one by one, so that the fault is told of the sample it is of. A reader that
        stops early ends the process, since answers to come belong to nobody.
        """
        found: dict[int, Answer] = {}
        calls = list(groups(requests)) if self.in_groups else [[place] for place in range(len(requests))]
        answers = self._answers([[requests[place] for place in places] for places in calls])
        try:
            for place, request in enumerate(requests):
                while place not in found:
                    answered, of_call = next(answers)
                    found |= zip(calls[answered], of_call, strict=True)
                kind, said = found.pop(place)
                if kind == PARTS:
                    yield Reward(value=said.pop("value"), tokens=said.pop("tokens", ()), parts=said)
                    continue
                yield Unscored(
                    reason=f"reward function {self.path}, {request.where} {said}; expected a finite number; "
                    f"{request.shown}; fix the function",
                    is_none=kind == NONE,
                )
        finally:
            answers.close()

    def _answers(
        self, calls: Sequence[Sequence[ScoreRequest]]
    ) -> Generator[tuple[int, list[Answer]], None, None]:
        left = dict.fromkeys(range(len(calls)))
        together = len(left) > 1
        try:
            while left:
                # after a hang or a crash, a new child goes on behind the sample
                if not self._child.is_alive:
                    self._child = _Child(self._order, self.path)
                together = together and self._child.is_async
                asked = [*left]
                columns = [[_columns(request) for request in calls[place]] for place in asked]
                self._child.parent_end.send((self._timeout_s if together else None, columns))
                for place in asked:
                    size = max(map(len, columns)) if together else len(calls[place])
                    number, answers = self._child.answer(self._timeout_s, size, _GRACE_S if together else 0.0)
                    if number is None and together:
                        break
                    answered = place if number is None else asked[number]
                    del left[answered]
                    yield answered, answers
                    if number is None:
                        break
                together = False
        finally:
            if left:
                self._child.kill()

    def close(self) -> None:
        """End the child process."""
        self._child.kill()


class _Child:
    """One child process with the function in it."""

    def __init__(self, order: tuple[str, str, Sequence[str] | None, str], path: str) -> None:
        self.parent_end, child_end = multiprocessing.Pipe()
        descriptor, folders = child_end.fileno(), user_folders()
        arguments = [str(descriptor), str(os.getpid()), json.dumps([entry for entry in sys.path if entry])]
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-u", "-c", _MAIN, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,  # what it prints is not what a command prints
            pass_fds=[descriptor],
            cwd=next((folder for folder in folders if os.path.isdir(folder)), None),
            start_new_session=True,  # what it starts ends with it
        )
        child_end.close()
        threading.Thread(target=_log_printed, args=(self._process.stdout, path), daemon=True).start()
        self._is_killed = False
        self._end = weakref.finalize(self, _end, self._process, self.parent_end)
        try:
            self.parent_end.send((*order, folders))
            state, fault = (
                self.parent_end.recv() if self.parent_end.poll(_START_S) else (None, "takes too long")
            )
        except (EOFError, BrokenPipeError, ConnectionResetError):
            state, fault = None, f"ended its process ({self._exit()})"
        self.is_async, self.in_groups, self.described = fault if state == READY else (False, False, "")
        if state != READY:
            self.kill()
            if state is None:
                fault = f"reward.kind {path}: importing it {fault}; fix the module"
            raise ConfigError(str(fault))

    @property
    def is_alive(self) -> bool:
        """Whether it can be asked."""
        return not self._is_killed and self._process.poll() is None

    def answer(self, timeout_s: float, count: int, grace_s: float) -> tuple[int | None, list[Answer]]:
        """The answers of the next call, and its place; when none comes no place, and the child is gone.

        `timeout_s` is for each of the `count` responses of a call.
        """
        try:
            if self.parent_end.poll(timeout_s * count + grace_s):
                return self.parent_end.recv()
        except (EOFError, ConnectionResetError):
            fault = f"ended its process ({self._exit()})"
        else:
            fault = late(timeout_s, count)
        self.kill()
        return None, [(BAD, fault)] * count

    def kill(self) -> None:
        """End the process, whatever it is doing."""
        self._is_killed = True
        self._end()

    def _exit(self) -> str:
        try:
            code = self._process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            return "still ending"
        return f"exit code {code}" if code >= 0 else f"signal {-code}"


def _log_printed(printed: IO[bytes], path: str) -> None:
    """Each line into the log of this process, which a run keeps in `logs`, and on its stderr."""
    name = path.rpartition(":")[2]
    with printed, suppress(OSError):
        for line in printed:
            logger.info("%s prints: %s", name, line.decode(errors="replace").rstrip("\n"))
            os.write(2, line)


def _end(process: subprocess.Popen[bytes], parent_end: Connection) -> None:
    # until it is waited for, nobody else has its number
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    parent_end.close()


def _columns(request: ScoreRequest) -> dict[str, Any]:
    """What a function may be given; plain values, so that the child needs nothing of ours."""
    prompt, facts = request.prompt, request.facts
    turns = facts.turns if facts and facts.turns else (("assistant", request.response),)
    return {
        # a column of the user's that has this name goes before ours
        "prefill": prompt.prefill,
        "token_ids": list(facts.token_ids) if facts else None,
        "iteration": facts.weight_version if facts else None,
        **prompt.fields,
        "prompt": prompt.text,
        "response": request.response,
        "reference": prompt.reference,
        "messages": [dict(turn) for turn in request.turns],
        "response_turns": [{"role": role, "content": text} for role, text in turns],
        "prompt_id": prompt.prompt_id,
        "sample_index": facts.sample_index if facts else None,
        "num_tokens": facts.num_tokens if facts else None,
        "finish_reason": str(facts.finish_reason) if facts else None,
    }
