"""What people try first works, and the page that says so names tests that exist."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from rlhfspec.cluster.cli import main
from rlhfspec.core.config import RewardConfig
from rlhfspec.core.records import Prompt
from rlhfspec.learning.rewards.reward_function import build_reward

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "what-people-try.md"
PROMPT = Prompt(prompt_id=0, token_ids=[1], text="hi", reference="me")


def test_the_page_names_tests_that_exist() -> None:
    named = re.findall(r"`(tests/\S+\.py)::(test_\w+)`", PAGE.read_text())
    assert len(named) >= 15
    for file, name in named:
        functions = {
            node.name
            for node in ast.walk(ast.parse((ROOT / file).read_text()))
            if isinstance(node, ast.FunctionDef)
        }
        assert name in functions, f"{file}::{name}"


@pytest.mark.parametrize(
    ("signature", "value"),
    [
        ("response", "len(response)"),
        ("*, response", "len(response)"),
        ("*, response, reference", "len(response + reference)"),
        ("response, **more", "len(response)"),
    ],
)
def test_a_reward_takes_the_response_alone_or_by_keyword(tmp_path, monkeypatch, signature, value):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my reward.py").write_text(f"def score({signature}):\n    return {value}\n")
    (reward,) = build_reward(RewardConfig(kind="my reward.py:score")).score([PROMPT], ["fine"])
    assert reward.value == (6.0 if "reference" in signature else 4.0)


class Judge(BaseHTTPRequestHandler):
    """Pays for the length of what is sent."""

    def do_POST(self) -> None:
        text = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(str(len(text)).encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


ASKS = """
import urllib.request

def score(response):
    with urllib.request.urlopen("http://127.0.0.1:{port}/", data=response.encode()) as answer:
        return float(answer.read())
"""


def test_a_reward_function_asks_a_service_on_this_machine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with HTTPServer(("127.0.0.1", 0), Judge) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        (tmp_path / "asks.py").write_text(ASKS.format(port=server.server_port))
        rewards = build_reward(RewardConfig(kind="asks.py:score")).score([PROMPT] * 2, ["fine", "good one"])
        server.shutdown()
    assert [one.value for one in rewards] == [4.0, 8.0]


LOADS = """
from rlhfspec.engine.weights.loading import load_causal_lm, load_tokenizer
print(load_tokenizer("org/name").vocab_size, load_causal_lm("org/name", "float32").config.model_type)
"""


def test_a_model_by_its_hub_name_comes_from_an_offline_cache(tmp_path, tiny_pair):
    hub = tmp_path / "hub" / "models--org--name"
    shutil.copytree(tiny_pair.target, hub / "snapshots" / "0123")
    (hub / "refs").mkdir()
    (hub / "refs" / "main").write_text("0123")
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    environment |= {"PYTHONPATH": str(ROOT)}
    for name in ("HF_HUB_CACHE", "TRANSFORMERS_CACHE"):
        environment.pop(name, None)
    done = subprocess.run([sys.executable, "-c", LOADS], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[1] == "llama"


def test_a_gguf_file_of_ones_own_becomes_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("gguf")
    from tiny_gguf import write_tiny_gguf

    from rlhfspec.engine.weights.loading import load_causal_lm

    file, out = write_tiny_gguf(tmp_path / "own.gguf").file, tmp_path / "model"
    assert main(["models", "from-gguf", str(file), "--out", str(out)]) == 0
    assert str(out) in capsys.readouterr().out.replace("\n", "")
    assert load_causal_lm(str(out), "float32").num_parameters() > 0
    assert main(["models", "from-gguf", str(file), "--out", str(out)]) == 2
    assert "is not empty" in capsys.readouterr().err
    assert main(["models", "from-gguf", str(tmp_path / "none.gguf"), "--out", str(tmp_path / "new")]) == 2
    assert "none.gguf does not exist" in capsys.readouterr().err
