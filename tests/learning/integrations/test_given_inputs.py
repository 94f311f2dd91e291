"""What Python hands over becomes files that the command line's config names."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from rlhfspec.core.config_io import apply_overrides, config_from_dict
from rlhfspec.core.errors import ConfigError, DataError
from rlhfspec.core.settings.data import DataConfig
from rlhfspec.integrations.given_inputs import reward_keys, source_keys, write_rows
from rlhfspec.integrations.trainer_classes import as_set
from rlhfspec.learning.data.prompt_rows import read_rows
from rlhfspec.learning.rewards.timed_function import UserReward

ROWS = [{"prompt": f"say {i}", "wish": f"w{i}", "extra": {"n": [i]}} for i in range(3)]


def test_a_list_and_a_data_set_are_read_as_the_files_that_they_became(tmp_path: Path) -> None:
    for rows in (ROWS, Dataset.from_list(ROWS)):
        keys = source_keys(rows, {}, tmp_path)
        assert keys["reward_fields"] == ["wish", "extra"] and keys["reference_field"] is None
        read = read_rows(DataConfig.model_validate(keys))
        assert [(row.prompt, row.reference, row.fields) for row in read] == [
            (row["prompt"], "", {"wish": row["wish"], "extra": row["extra"]}) for row in ROWS
        ]
        # the next kernel finds them where these are
        assert source_keys(rows, {}, tmp_path) == keys
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    ("row", "said", "keys"),
    [
        ({"question": "a", "answer": "b", "level": 3}, {}, {"reward_fields": ["level"]}),
        (
            {"prompt": [{"role": "user", "content": "a"}]},
            {},
            {"prompt_field": "prompt", "reward_fields": []},
        ),
        (
            {"prompt": "a", "gold": "b"},
            {"reference_field": "gold"},
            {"prompt_field": "prompt", "reward_fields": []},
        ),
        ({"q": "a", "x": 1}, {"prompt_field": "q", "reward_fields": []}, {"reference_field": None}),
        # a picture is no column for a function: the reader says that it is not read
        (
            {"prompt": "a", "image": "b"},
            {"task": "chain"},
            {"prompt_field": "prompt", "reference_field": None, "reward_fields": [], "task": None},
        ),
    ],
)
def test_columns_are_read_named_or_left_to_be_refused(
    row: dict, said: dict, keys: dict, tmp_path: Path
) -> None:
    assert source_keys([row], said, tmp_path) == {"path": str(next(tmp_path.iterdir())), **keys}


@pytest.mark.parametrize(
    "rows", [{"train": ROWS}, [], 5, ["text"], [{"prompt": {1}}], [{"prompt": float("nan")}]]
)
def test_what_is_no_list_of_rows_is_refused(rows: object, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="expected"):
        write_rows(rows, tmp_path)


def test_a_row_without_a_prompt_is_named_with_what_it_has(tmp_path: Path) -> None:
    for rows in ([{"prompt": "a"}, {"text": "b"}], Dataset.from_list([{"text": "b"}])):
        with pytest.raises(
            DataError, match=r"row \d of train_dataset .* no column prompt or .* columns are text"
        ):
            source_keys(rows, {}, tmp_path)
    assert source_keys([{"text": "b"}], {"prompt_field": "text"}, tmp_path)["reference_field"] is None


FACTOR = 3.0


def test_functions_travel_by_value_with_what_they_hold(tmp_path: Path) -> None:
    offset = 0.5

    def trls(completions: list[str], wish: list[str], **_: object) -> list[float | None]:
        return [None if w == "w0" else FACTOR + offset for w in wish]

    keys = reward_keys([trls, lambda prompt, response, reference: 1.0, "gsm8k"], [2.0, 1.0, 0.5], tmp_path)
    parts = keys["reward.parts"]
    assert [(part["name"], part["weight"], part["optional"]) for part in parts] == [
        ("trls", 2.0, True),
        ("lambda_1", 1.0, False),
        ("gsm8k", 0.5, False),
    ]
    tree = apply_overrides({"data": {"task": "chain"}, "models": {"draft": "x"}}, as_set(keys))
    assert [part.kind for part in config_from_dict(tree).reward.parts] == [part["kind"] for part in parts]
    reward = UserReward(parts[0]["kind"], timeout_s=10.0, fields=("wish",))
    try:
        assert "called as TRL calls it" in reward.described
    finally:
        reward.close()


@pytest.mark.slow
def test_one_function_is_the_reward_and_its_file_is_the_same_in_every_process(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from rlhfspec.integrations.given_inputs import reward_keys\n"
        "names = ['a', 'bc', 'def']\n"
        "sys.path.append(sys.argv[2])\n"
        "def score(prompt, response, reference): return float(len(response) in {1, 2} or helper(response))\n"
        "def helper(text): return text in names\n"
        "print(reward_keys(score, None, Path(sys.argv[1]))['reward.kind'])"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code, str(tmp_path), folder], capture_output=True, text=True, check=True
        ).stdout
        for folder in ("/here", "/there")
    }
    (kind,) = found
    reward = UserReward(kind.strip(), timeout_s=10.0)
    try:
        assert reward.described.startswith(f"{kind.strip()} of {kind.partition(':')[0]}, called with")
    finally:
        reward.close()


def test_a_cell_s_function_has_the_same_file_in_the_next_kernel(tmp_path: Path) -> None:
    kinds = set()
    for number, more in ((7, ""), (1234, ""), (1234, "+ 1")):
        names: dict[str, Any] = {"__name__": "a notebook", "text": "x"}
        cell = (
            "def score(prompt, response, reference):\n    return helper(response)\n"
            f"def helper(it):\n    return len(it + text) {more}"
        )
        exec(compile(cell, f"/tmp/ipykernel_{number}/99.py", "exec"), names)
        kinds.add(reward_keys(names["score"], None, tmp_path)["reward.kind"])
    assert len(kinds) == 2


def test_what_cannot_travel_is_refused_by_its_name(tmp_path: Path) -> None:
    numbers = (number for number in range(3))

    def counted(prompt: str, response: str, reference: str) -> float:
        return float(next(numbers))

    with pytest.raises(
        ConfigError, match=r"reward_funcs counted: cannot be sent .*generator.*load what cannot"
    ):
        reward_keys(counted, None, tmp_path)
    with pytest.raises(ConfigError, match="reward_weights as many, got 1"):
        reward_keys(counted, [1.0, 2.0], tmp_path)
    with pytest.raises(ConfigError, match="expected reward_funcs"):
        reward_keys([], None, tmp_path)


def test_code_of_another_python_is_refused_in_one_line(tmp_path: Path) -> None:
    kind = reward_keys(lambda prompt, response, reference: 1.0, None, tmp_path)["reward.kind"]
    file = Path(kind.partition(":")[0])
    file.write_text(
        file.read_text().replace(f"!= ({sys.version_info[0]}, {sys.version_info[1]})", "!= (3, 9)", 1)
    )
    with pytest.raises(ConfigError, match="ImportError: they are code of Python"):
        UserReward(kind, timeout_s=10.0)


def test_values_are_written_as_the_command_line_reads_them() -> None:
    keys = {"a.b": 1e-6, "a.c": "ä: [x]", "a.d": None, "a.e": [True, {"f": "off"}], "a.f": Path("x/y")}
    assert json.dumps(apply_overrides({}, as_set(keys))["a"]["e"]) == '[true, {"f": "off"}]'
    assert apply_overrides({}, as_set(keys))["a"]["c"] == "ä: [x]"
    assert apply_overrides({}, as_set(keys))["a"]["f"] == "x/y"
    with pytest.raises(ConfigError, match=r"args: .*expected plain values"):
        as_set({"a": {1}})
