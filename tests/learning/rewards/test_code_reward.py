"""Programs against tests: forms of tests, what a response's program is, credit, and a SandboxFusion server."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest
from transformers.utils.chat_template_utils import get_json_schema

from rlhfspec.cluster.plan.reward_plan import check_reward, require_references, scoring_timeout_s
from rlhfspec.core.config import RewardConfig
from rlhfspec.core.errors import ConfigError, RewardError, RewardServerLost
from rlhfspec.core.records import Prompt, Reward
from rlhfspec.core.settings.environment import EnvironmentConfig
from rlhfspec.learning.rewards.reward_function import build_reward
from rlhfspec.learning.rewards.reward_stage import RewardStage
from rlhfspec.learning.sandbox.code_tests import program_of, read_tests
from rlhfspec.learning.sandbox.python_tool import MAX_CHARS, python

ADD = "def add(a, b):\n    return a + b"
READS = "print(sum(map(int, input().split())))"
PAIRS = [
    {"input": "1 2\n", "output": "3 \n\n"},
    {"input": "2 5", "output": "7"},
    {"input": "0 0", "output": "1"},
]
ENTRY = {"test": "def check(candidate):\n    assert candidate(1, 2) == 3", "entry_point": "add"}


def code(**settings: Any) -> RewardConfig:
    own = {
        name: settings.pop(name) for name in ("partial", "tests_from", "max_concurrent") if name in settings
    }
    return RewardConfig.model_validate({"kind": "code", "code": own, **settings})


@pytest.fixture(scope="module")
def stages() -> dict[bool, RewardStage]:
    return {partial: build_reward(code(partial=partial)) for partial in (False, True)}


def prompt(reference: Any, **fields: Any) -> Prompt:
    text = reference if isinstance(reference, str) else json.dumps(reference)
    return Prompt(prompt_id=7, token_ids=np.array([1]), text="q", reference=text, fields=fields)


def score(stage: RewardStage, reference: Any, *responses: str, **fields: Any) -> list[Reward]:
    return stage.score([prompt(reference, **fields)] * len(responses), list(responses))


def test_a_program_is_the_last_block_of_python_or_all() -> None:
    assert program_of(f"No:\n```python\n1\n```\nbut\n```py\n{ADD}\n```\nbye\n```sh\nls\n```") == f"{ADD}\n"
    assert program_of(f"```Python3\n{ADD}") == ADD  # cut at the end
    assert program_of(ADD) == ADD
    assert program_of("```python\nx = '```'\n```") == "x = '```'\n"
    assert program_of("so:\n```\nx = 1\n```\nthen") == "x = 1\n"
    assert program_of('1.\n    ```python title="x.py"\n    x = 1\n    ```') == "x = 1\n"


@pytest.mark.parametrize(
    ("reference", "program"),
    [
        (PAIRS[:2], READS),
        ({"inputs": ["1 2", "3 4"], "outputs": ["3", "7\n"]}, READS),
        ({"inputs": [["1 2", "9"]], "outputs": [["3", "9"]]}, f"{READS}\nprint(input())"),
        ({"inputs": [[1, 2], "3\n4"], "outputs": [3, [7]], "fn_name": "add"}, ADD),
        ({"inputs": ["1\n2"], "outputs": ["3"], "fn_name": "add"}, ADD),
        (
            {"inputs": [[1, 2]], "outputs": [3], "fn_name": "add"},
            "class Solution:\n    def add(self, a, b):\n        return a + b",
        ),
        ("assert add(1, 2) == 3\nassert add(0, 0) == 0", ADD),
        (["assert add(1, 2) == 3", "assert add(0, 0) == 0"], ADD),
        (ENTRY, ADD),
        (ENTRY["test"] + "\ncheck(add)", ADD),
    ],
)
def test_each_form_of_tests_is_passed_by_what_is_right_alone(
    stages: dict[bool, RewardStage], reference: Any, program: str
) -> None:
    wrong = program.replace("a + b", "a - b").replace("sum(", "max(")
    unfinished = "import sys\nsys.exit(0)"
    right, *others = score(
        stages[False], reference, f"So:\n```python\n{program}\n```", wrong, unfinished, "?"
    )
    assert right == Reward(value=1.0, parts={"passed": 1.0, "timeout": 0.0, "error": 0.0, "correct": 1.0})
    assert [other.value for other in others] == [0.0] * 3
    assert others[2].parts["error"] > 0.0


def test_partial_credit_is_the_share_and_failures_have_names(stages: dict[bool, RewardStage]) -> None:
    [whole], [share] = (score(stages[partial], PAIRS, READS) for partial in (False, True))
    assert whole.value == 0.0 and share.value == pytest.approx(2 / 3) == share.parts["passed"]
    assert share.parts["error"] == share.parts["timeout"] == share.parts["correct"] == 0.0
    tests = "assert add(1, 2) == 3\nassert add(0, 0) == 1\nassert add(1, '') == 1"
    [named] = score(stages[True], tests, ADD)
    assert named.parts == pytest.approx({"passed": 1 / 3, "timeout": 0.0, "error": 1 / 3, "correct": 0.0})
    brief = build_reward(code(partial=True, timeout_s=0.2))
    [late] = score(brief, PAIRS, "while True: pass")
    assert late.parts["timeout"] == 1.0 and late.value == 0.0


def test_tests_come_from_a_column(stages: dict[bool, RewardStage]) -> None:
    stage = build_reward(code(tests_from="tests"))
    assert score(stage, "", ADD, tests=ENTRY["test"], entry_point="add")[0].value == 1.0
    with pytest.raises(RewardError, match=r"prompt 7: column tests .* entry_point"):
        score(stage, "", ADD, tests=ENTRY["test"])
    check_reward(code(tests_from="tests"), ("tests",))
    with pytest.raises(ConfigError, match=r"tests_from tests .* data\.reward_fields"):
        check_reward(code(tests_from="tests"), ("other",))


@pytest.mark.parametrize(
    ("reference", "why"),
    [
        ("", "holds no assert"),
        ("[]", "no test"),
        ("[1", "no JSON"),
        ("assert add(", "SyntaxError"),
        ("42 is the answer", "SyntaxError"),
        ([{"input": "1"}], "output"),
        ([{"input": "1", "output": "1", "testtype": "functional"}], "nothing reads .'testtype'"),
        ([{"input": 1, "output": "1"}], "texts"),
        ({"inputs": ["1"], "outputs": []}, "shorter"),
        ({"inputs": [3], "outputs": [3], "fn_name": "add"}, "a list, got 3"),
        ("146733", "holds no assert"),
        ("x = 1", "holds no assert"),
        ([1, 2], "no object"),
        (ENTRY["test"], "entry_point"),
    ],
)
def test_a_row_whose_tests_cannot_be_read_is_refused_before_the_run(reference: Any, why: str) -> None:
    with pytest.raises(RewardError, match=f"prompt 7: the reference .*{why}.* 1 more prompts"):
        rows = [prompt(PAIRS), prompt(reference), prompt("[")]
        require_references(code(), EnvironmentConfig(), None, rows)


def test_what_a_program_cannot_forge_and_what_is_read_of_a_column() -> None:
    assert read_tests([{"input": "1", "output": "2"}])[0].expected == "2"
    [test] = read_tests("assert add(1, 2) == 3")
    assert test.program("x", "MARK").startswith("x\nassert add(1, 2) == 3\n")
    assert not test.is_passed("", "MARK") and test.is_passed("a MARK", "MARK")
    [call] = read_tests({"inputs": [[1]], "outputs": [1], "fn_name": "f"})
    assert call.is_passed("MARK1", "MARK") and not call.is_passed("MARK" + "[" * 100_000, "MARK")


def test_settings_of_another_kind_are_refused_and_what_holds_is_told() -> None:
    with pytest.raises(ValueError, match=r"reward\.code is of kind code"):
        RewardConfig.model_validate({"kind": "gsm8k", "code": {"partial": True}})
    [line] = check_reward(code(max_concurrent=3)).functions
    assert line.startswith("code: tests from the reference, 3 programs at once; sandbox: ")
    assert "512 MB" in line and "10 s" in line
    assert scoring_timeout_s(code(), 10.0) > scoring_timeout_s(RewardConfig(kind="gsm8k"), 10.0)


class Fusion(ThreadingHTTPServer):
    """SandboxFusion's form: answers what it was told to answer next."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.bodies: list[dict[str, Any]] = []
        self.answers: list[Any] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Fusion

    def do_POST(self) -> None:
        self.server.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        answer = self.server.answers.pop(0)
        if isinstance(answer, int):
            self.send_error(answer)
            return
        self.send_response(200 if self.path == "/run_code" else 404)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


def ran(stdout: str = "", code: int = 0, status: str = "Finished") -> dict[str, Any]:
    result = {"status": status, "execution_time": 0.1, "return_code": code, "stdout": stdout, "stderr": ""}
    whole = "Success" if code == 0 and status == "Finished" else "Failed"
    return {"status": whole, "message": "", "compile_result": None, "run_result": result, "files": {}}


@pytest.fixture
def fusion() -> Iterator[Fusion]:
    server = Fusion()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_server_runs_what_it_is_sent_and_its_answers_are_read(fusion: Fusion) -> None:
    settings = {"retries": 1, "backoff_s": 0.001}
    stage = build_reward(code(partial=True, url=fusion.url, server=settings))
    assert fusion.url + "/run_code" in stage.described[0]
    fusion.answers = [ran("3\n"), ran("", 1), ran("", -9, "TimeLimitExceeded")]
    [reward] = score(stage, PAIRS, READS)
    assert reward.parts == pytest.approx({"passed": 1 / 3, "timeout": 1 / 3, "error": 1 / 3, "correct": 0.0})
    first = fusion.bodies[0]
    assert (first["code"], first["stdin"], first["language"]) == (READS, "1 2\n", "python")
    assert first["run_timeout"] == first["compile_timeout"] == 10.0 and first["memory_limit_MB"] == 512
    assert fusion.bodies[1]["run_timeout"] == pytest.approx(9.9)  # all tests of a response together
    fusion.answers = [500, ran("3")]
    assert score(stage, PAIRS[:1], READS)[0].value == 1.0


def test_faults_of_a_server_name_it(fusion: Fusion) -> None:
    settings = {"retries": 1, "backoff_s": 0.001, "timeout_s": 5.0}
    stage = build_reward(code(url=fusion.url, server=settings))
    broken = {"status": "SandboxError", "message": "no runner", "run_result": None}
    for answers, why in (
        ([500, 500], "2 tries.*HTTP 500"),
        ([broken, broken], "SandboxError: no runner"),
        ([404], "HTTP 404"),
        ([{"detail": "what"}], "none of SandboxFusion's"),
        ([[]], "none of SandboxFusion's"),
    ):
        fusion.answers = list(answers)
        with pytest.raises(RewardServerLost, match=f"the sandbox at {fusion.url}/run_code .*{why}"):
            score(stage, PAIRS[:1], READS)
        assert not fusion.answers
    dead = build_reward(code(url="http://127.0.0.1:9", server=settings))
    with pytest.raises(RewardServerLost, match=r"http://127.0.0.1:9/run_code did not answer in 2 tries"):
        score(dead, PAIRS[:1], READS)


def test_a_check_has_the_server_run_a_first_program(fusion: Fusion) -> None:
    prompt = Prompt(prompt_id=0, token_ids=np.array([1]), text="p", reference="assert f()")
    reward = code(url=fusion.url, server={"retries": 0, "backoff_s": 0.001})
    fusion.answers = [ran("42\n")]
    assert check_reward(reward, first=prompt).functions[1].endswith("ran a first program in 0.1 s")
    fusion.answers = [ran("", 1)]
    with pytest.raises(RewardServerLost, match=r"expected 42, got '' \(error"):
        check_reward(reward, first=prompt)


def test_the_tool_answers_what_was_printed_and_has_a_schema() -> None:
    schema = get_json_schema(python)["function"]
    assert schema["name"] == "python" and schema["parameters"]["required"] == ["code"]
    assert python("print(6 * 7)") == "42"
    assert python("print(1)\n1 / 0") == "1\nZeroDivisionError: division by zero"
    assert python("x = 1") == "(nothing was printed)"
    long = python("print('x' * 100_000)")
    assert "characters left out" in long and len(long) < MAX_CHARS + 50


@pytest.mark.parametrize("source", ["if 0: \\", "x = (1,", 'x = """'])
def test_what_is_open_at_a_programs_end_takes_no_test_with_it(source):
    [test] = read_tests("assert f(1) == 2")
    assert test.program(source, "MARK") == source


def test_a_first_element_is_no_whole_result():
    [test] = read_tests({"inputs": [[1]], "outputs": [[1, 2, 3]], "fn_name": "f"})
    assert test.is_passed("MARK[1, 2, 3]", "MARK") and not test.is_passed("MARK1", "MARK")
