"""The user's code by its path: the file in the user's folder is meant, whatever else has its name."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from pytest import fixture, mark, raises

from rlhfspec.core.config import RewardConfig
from rlhfspec.core.errors import ConfigError
from rlhfspec.learning.rewards.reward_function import build_reward
from tests.learning.rewards.test_timed_function import batch

ROOT = Path(__file__).resolve().parents[2]
SCORE = "def score(prompt, response, reference):\n    return float(len(response))\n"
HELPED = "def score(response):\n    return half(response)\n"
HALF = "def half(text):\n    return len(text) / 2\n"


@fixture
def project(tmp_path, monkeypatch):
    """Writes files into the current folder."""
    monkeypatch.chdir(tmp_path)

    def write(files):
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        return tmp_path

    return write


@mark.parametrize(
    ("files", "path", "value"),
    [
        ({"code.py": SCORE}, "code:score", 4.0),
        ({"code.py": "raise ValueError", "rewards/code.py": SCORE}, "rewards.code:score", 4.0),
        ({"numpy/__init__.py": "", "numpy/mine.py": SCORE}, "numpy.mine:score", 4.0),
        ({"core/__init__.py": "", "core/rewards.py": SCORE}, "core.rewards:score", 4.0),
        ({"core/rewards.py": SCORE}, "core.rewards:score", 4.0),
        ({"learning.py": SCORE}, "learning:score", 4.0),
        (
            {
                "core/__init__.py": "",
                "core/text.py": HALF,
                "core/rewards.py": "from core.text import half\n" + HELPED,
            },
            "core.rewards:score",
            2.0,
        ),
        (
            {
                "engine/__init__.py": "",
                "engine/text.py": HALF,
                "mine.py": "from engine.text import half\n" + HELPED,
            },
            "mine:score",
            2.0,
        ),
        (
            {
                "json/__init__.py": "",
                "json/text.py": HALF,
                "json/rewards.py": "from .text import half\nfrom json import *\n" + HELPED,
            },
            "json.rewards:score",
            2.0,
        ),
        ({"text.py": HALF, "mine.py": "import text\nhalf = text.half\n" + HELPED}, "mine:score", 2.0),
    ],
)
def test_a_module_whose_name_is_taken_is_that_of_the_user_s_folder_and_is_named(project, files, path, value):
    folder = project(files)
    stage = build_reward(RewardConfig(kind=path))
    assert [reward.value for reward in stage.score(*batch("four"))] == [value]
    file = folder.joinpath(*path.partition(":")[0].split(".")).with_suffix(".py")
    assert str(file) in stage.described[0]


def test_a_function_runs_in_the_user_s_folder_and_what_it_prints_is_not_the_command_s(project, capfd):
    project(
        {
            "key.txt": "12345",
            "mine.py": "def score(response):\n    print('x')\n    return len(open('key.txt').read())",
        }
    )
    assert [reward.value for reward in build_reward(RewardConfig(kind="mine:score")).score(*batch("a"))] == [
        5.0
    ]
    assert capfd.readouterr().out == ""


def test_attributes_of_objects_are_found(project):
    project(
        {
            "mine.py": f"class Scorer:\n    def score(self, response):\n        return 7\nscorer = Scorer()\n{SCORE}"
        }
    )
    assert [
        reward.value for reward in build_reward(RewardConfig(kind="mine:scorer.score")).score(*batch("a"))
    ] == [7.0]


@mark.parametrize("path", ["my rewards/json.py", "my rewards/of-length.py", "./mine.py", "{cwd}/mine.py"])
def test_a_file_is_named_as_well_as_a_module(project, path):
    project(
        {
            "mine.py": HALF + HELPED,
            "my rewards/helper.py": HALF,
            "my rewards/json.py": f"from helper import half\n{HELPED}",
            "my rewards/of-length.py": f"from .helper import half\n{HELPED}",
        }
    )
    function = build_reward(RewardConfig(kind=f"{path.format(cwd=os.getcwd())}:score"))
    assert [reward.value for reward in function.score(*batch("abcd"))] == [2.0]


@mark.parametrize(
    ("files", "path", "words"),
    [
        ({"mine.py": ""}, "mine:score", r"mine \(.*mine\.py\) has no 'score'"),
        ({}, "learning.tasks.gsm8k:Gsm8kReward", "has no 'Gsm8kReward'; check the name"),
        ({"a.py": SCORE}, "b/a.py:score", "names no function: expected .*there is no file b/a.py in /"),
        ({"a.py": ""}, "./a.py:score", r"\./a\.py \(.*a\.py\) has no 'score'"),
        (
            {"mine.py": "from datasets.mine import x"},
            "mine:score",
            "No module named 'datasets.mine'; run from",
        ),
        (
            {"json/text.py": HALF, "mine.py": "import json.text"},
            "mine:score",
            "'json' is .* goes before .*another name",
        ),
        (
            {"mine.py": "class Scorer: ..."},
            "mine:Scorer",
            "a class whose objects cannot be called; .*scorer = Scorer",
        ),
        (
            {
                "mine.py": "class Scorer:\n    def __init__(self, k): ...\n    def __call__(self, response): ..."
            },
            "mine:Scorer",
            r"Scorer\(\) raised TypeError.*scorer = Scorer",
        ),
    ],
)
def test_what_cannot_be_imported_is_refused_with_what_to_do(project, files, path, words):
    project(files)
    with raises(ConfigError, match=words):
        build_reward(RewardConfig(kind=path))


def test_a_function_of_ours_is_found_from_a_folder_with_names_of_its_own(project):
    project({"core/__init__.py": "", "code.py": "raise ValueError"})
    code = "from rlhfspec.core.named_code import named_code as find\n" + (
        "print(find('rlhfspec.learning.tasks.gsm8k:gsm8k_reward', key='k', kind='function', example='e').__module__)"
    )
    command = [sys.executable, "-P", "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{code}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "rlhfspec.learning.tasks.gsm8k"


def test_what_is_installed_goes_before_the_user_s_modules_where_the_package_is_installed_too(tmp_path):
    """The folder of installed packages is not the checkout's, whose folders may be named as the user's."""
    site, mine = tmp_path / "site", tmp_path / "mine"
    shutil.copytree(ROOT / "core", site / "rlhfspec" / "core")
    mine.mkdir()
    for folder in (site, mine):
        (folder / "helper.py").write_text("")
    code = (
        "from rlhfspec.core.named_code import give_way\n"
        f"give_way([{str(mine)!r}])\nimport helper\nprint(helper.__file__)"
    )
    command = [sys.executable, "-P", "-c", f"import sys; sys.path.insert(0, {str(site)!r})\n{code}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(site / "helper.py")
