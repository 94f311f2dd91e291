"""The hub is asked once and for seconds, and what lies in its cache is read whatever it answers."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

from rlhfspec.core.errors import ModelError
from rlhfspec.engine.weights import loading
from rlhfspec.engine.weights.loading import load_causal_lm, load_hf_config, load_tokenizer
from tests.conftest import TinyPair


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What a hub that is out of order was asked."""
    paths: list[str] = []

    class Broken(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            # huggingface_hub itself asks for a register once a day; only what asks for a model counts.
            if self.path.startswith("/api/models/") or "resolve" in self.path:
                paths.append(f"{self.command} {self.path}")
            self.send_error(503)

        do_HEAD = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    hub = ThreadingHTTPServer(("127.0.0.1", 0), Broken)
    threading.Thread(target=hub.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{hub.server_port}"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", address)
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.partition("/{repo_id}")
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "".join(template[1:]))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    loading._hub_fault.cache_clear()
    yield paths
    loading._hub_fault.cache_clear()
    hub.shutdown()
    hub.server_close()


def test_a_model_that_the_hub_does_not_give_is_refused_after_one_attempt(asked: list[str]) -> None:
    for load in (load_hf_config, load_tokenizer, lambda name: load_causal_lm(name, "float32")):
        with pytest.raises(
            ModelError, match=r"'some/model' .*the hub does not give it \(HfHubHTTPError: .*503"
        ):
            load("some/model")
    assert asked == ["GET /api/models/some/model"]


def test_a_model_in_the_hubs_cache_is_read_without_it(
    asked: list[str], tiny_pair: TinyPair, tmp_path: Path
) -> None:
    kept = tmp_path / "hub" / "models--some--model"
    shutil.copytree(tiny_pair.target, kept / "snapshots" / ("0" * 40))
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text("0" * 40)
    assert load_hf_config("some/model").vocab_size == load_hf_config(str(tiny_pair.target)).vocab_size
    assert len(load_tokenizer("some/model")) > 0
    assert load_causal_lm("some/model", "float32").num_parameters() > 0
    assert asked == ["GET /api/models/some/model"] and not constants.HF_HUB_OFFLINE
