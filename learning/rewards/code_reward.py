"""Programs against tests (`reward.kind: code`), in a sandbox of this machine or of a SandboxFusion server.

Source: Le et al. 2022, 'CodeRL' (tests as reward); the server's fields: github.com/bytedance/SandboxFusion, `run_code`.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ...core.config import RewardConfig
from ...core.errors import RewardError, RewardServerLost, one_line
from ...core.records import Prompt, Reward, Unscored
from ...core.settings.reward import Scorer
from ..sandbox.code_tests import CodeTest, new_mark, program_of, read_tests
from ..sandbox.sandbox import Fault, Limits, Outcome, Sandbox
from .asked_server import NotNow, Refused, ask
from .score_request import ScoreRequest

_AT_A_URL = 64
"Programs that a server is given at once, as verl's sandbox_fusion.max_concurrent."


def row_tests(scorer: Scorer, prompt: Prompt) -> list[CodeTest]:
    """The tests of a prompt's row. Raises RewardError: it has none that can be read."""
    name = scorer.code.tests_from
    try:
        given = prompt.reference if name is None else prompt.fields.get(name)
        return read_tests(given, prompt.fields.get("entry_point"))
    except RewardError as error:
        where, field = (
            ("the reference", "data.reference_field") if name is None else (f"column {name}", "reward.code")
        )
        raise RewardError(f"prompt {prompt.prompt_id}: {where} {error}; fix the row or {field}") from None


class CodeReward:
    """The share of tests that a response's program passes (`code.partial`), or 1.0 for all of them.

    `reward.timeout_s` is for all tests of a response; those that it leaves no time for are timeouts. Without partial
    credit the first failure is the last test that is run.
    """

    def __init__(self, scorer: Scorer, config: RewardConfig) -> None:
        """Start the sandbox. Raises ConfigError: it does not start."""
        self._scorer, self._config = scorer, config
        limits = Limits(wall_s=config.timeout_s, memory_mb=scorer.code.memory_mb)
        self._max_concurrent = scorer.code.max_concurrent or len(os.sched_getaffinity(0))
        self._sandbox = None if scorer.url else Sandbox(limits, max_concurrent=self._max_concurrent)
        if scorer.url:
            self._max_concurrent = scorer.code.max_concurrent or _AT_A_URL
            base = scorer.url.rstrip("/")
            self._url = base if "/" in base.partition("://")[2] else f"{base}/run_code"

    @property
    def described(self) -> str:
        """What runs programs, and what holds there."""
        name = self._scorer.code.tests_from
        tests = "the reference" if name is None else f"column {name}"
        where = (
            self._sandbox.described
            if self._sandbox
            else f"run by SandboxFusion at {self._url}, with its limits"
        )
        return f"code: tests from {tests}, {self._max_concurrent} programs at once; {where}"

    def tried(self) -> str:
        """What a server does with a first program. Raises RewardServerLost: it is not there, or runs nothing."""
        found = self._run("print(6 * 7)", "", self._config.timeout_s)
        if found.fault or found.stdout.strip() != "42":
            raise RewardServerLost(
                f"the sandbox at {self._url} ran `print(6 * 7)`: expected 42, got '{one_line(found.stdout)[:80]}' "
                f"({found.fault or 'no fault'}, '{one_line(found.stderr)[-80:]}'); fix the server or reward.url"
            )
        return f"the sandbox at {self._url} ran a first program in {found.seconds:.2g} s"

    def outcomes(self, requests: Sequence[ScoreRequest]) -> Iterator[Reward | Unscored]:
        """One answer a request, in order. Raises RewardServerLost: the server at `url` does not answer."""
        with ThreadPoolExecutor(self._max_concurrent) as threads:
            yield from threads.map(self._score, requests)

    def _score(self, request: ScoreRequest) -> Reward | Unscored:
        try:
            tests = row_tests(self._scorer, request.prompt)
        except RewardError as error:
            return Unscored(reason=f"{error} ({request.where}); {request.shown}")
        source, left_s, found = program_of(request.whole_turn), self._config.timeout_s, Counter[str]()
        for test in tests:
            mark = new_mark()
            outcome = self._run(test.program(source, mark), test.stdin, left_s) if left_s > 0 else None
            passed = outcome is not None and not outcome.fault and test.is_passed(outcome.stdout, mark)
            found["passed" if passed else _said(outcome)] += 1
            left_s -= outcome.seconds if outcome else 0.0
            if not passed and not self._scorer.code.partial:
                break
        parts = {name: found[name] / len(tests) for name in ("passed", "timeout", "error")}
        parts["correct"] = float(found["passed"] == len(tests))
        return Reward(value=parts["passed" if self._scorer.code.partial else "correct"], parts=parts)

    def _run(self, program: str, stdin: str, left_s: float) -> Outcome:
        if self._sandbox is not None:
            return self._sandbox.run(program, stdin, wall_s=left_s)
        body = {
            "code": program,
            "stdin": stdin,
            "language": "python",
            "compile_timeout": left_s,
            "run_timeout": left_s,
            "memory_limit_MB": self._scorer.code.memory_mb,
        }
        try:
            return ask(self._url, body, _read, self._config.server, called="the sandbox")
        except Refused as error:
            raise RewardServerLost(
                f"the sandbox at {self._url} refused a program with {error}; expected SandboxFusion's /run_code; fix "
                "reward.url"
            ) from None


def _said(outcome: Outcome | None) -> str:
    """What a test that is not passed counts as."""
    if outcome is None or outcome.fault == "timeout":
        return "timeout"
    is_wrong = outcome.stderr.rstrip().rpartition("\n")[2].startswith("AssertionError")
    return "error" if outcome.fault and not is_wrong else "wrong"


def _read(answer: bytes) -> Outcome:
    """Of SandboxFusion's answer what a program did."""
    try:
        said: Any = json.loads(answer)
        result = said["run_result"] or {}
        if said["status"] == "SandboxError":
            raise NotNow(f"SandboxError: {one_line(str(said.get('message')))[:200]}")
        code, late = int(result.get("return_code") or 0), result.get("status") == "TimeLimitExceeded"
        failed: Fault = "" if said["status"] == "Success" and code == 0 else "error"
        return Outcome(
            fault="timeout" if late else failed,
            code=code,
            stdout=str(result.get("stdout") or ""),
            stderr=str(result.get("stderr") or ""),
            seconds=float(result.get("execution_time") or 0.0),
        )
    except (ValueError, LookupError, TypeError, AttributeError):
        shown = one_line(answer.decode(errors="replace"))[:200]
        raise Refused(f"the answer '{shown}', which is none of SandboxFusion's") from None
