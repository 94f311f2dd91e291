"""Speaks to a peer engine that runs as a subprocess in an environment of its own (protocol: `serving.py`).

for name in available_peers():
with Peer(name, model, max_batch=8, max_total_tokens=256) as peer:
result = peer.generate(prompts, max_new_tokens=128, temperature=0.0)
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...core.config import RunConfig
from ...core.errors import RlhfSpecError, WaitTimeout

PEER_NAMES = ("llama_cpp", "openvino", "ctranslate2", "vllm")
SERVERS = Path(__file__).parent
BUILT = ".built"
"File that `build.py` leaves in an environment once the engine in it could be imported."

_CLOSE_S = 10.0
_TAIL_CHARACTERS = 2000


class PeerError(RlhfSpecError):
    """A peer's process died or answered with something else than what it was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerResult:
    """One call of `generate`: seconds as the peer's process measured them, and the new tokens."""

    seconds: float
    num_tokens: int
    token_ids: list[list[int]]


def default_peers_dir() -> Path:
    """Where `make bench-peers` puts the environments."""
    return Path(RunConfig().cache_dir).expanduser() / "peers"


def available_peers(cache_dir: Path | None = None) -> list[str]:
    """Names of the peers whose environments are built."""
    folder = cache_dir or default_peers_dir()
    return [name for name in PEER_NAMES if (folder / name / BUILT).is_file()]


class Peer:
    """A running peer with one model loaded; a context manager."""

    version: str
    "the engine's release, known once the peer is entered"

    def __init__(
        self,
        name: str,
        model: Path,
        *,
        max_batch: int,
        max_total_tokens: int,
        dtype: str = "float32",
        threads: int = 1,
        draft: Path | None = None,
        cache_dir: Path | None = None,
        load_timeout_s: float = 600.0,
        generate_timeout_s: float = 600.0,
        command: Sequence[str] | None = None,
    ) -> None:
        """`command` starts another server than the named peer's own."""
        python = (cache_dir or default_peers_dir()) / name / "bin" / "python"
        self.name = name
        self._command = list(command or (str(python), str(SERVERS / f"{name}_server.py")))
        self._order = {
            "model": str(model),
            "dtype": dtype,
            "threads": threads,
            "max_batch": max_batch,
            "max_total_tokens": max_total_tokens,
            "draft": str(draft) if draft else None,
        }
        self._load_timeout_s = load_timeout_s
        self._generate_timeout_s = generate_timeout_s

    def __enter__(self) -> Peer:
        """Start the process and load the model; a first load converts it. Raises PeerError, WaitTimeout."""
        if not Path(self._command[0]).is_file():
            raise PeerError(f"peer {self.name} is not built: no {self._command[0]}; run make bench-peers")
        self._stderr = tempfile.TemporaryFile()
        # A session of its own, so that helpers the peer starts are ended with it.
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=_environment(),
            start_new_session=True,
            text=True,
        )
        try:
            self.version = str(self._ask("load", self._order, self._load_timeout_s)["version"])
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """End the process: it stops by itself when its input ends, and is killed when it does not."""
        try:
            self._process.communicate(timeout=_CLOSE_S)
        except (subprocess.TimeoutExpired, BrokenPipeError):
            self._kill()
            self._process.wait()
        self._stderr.close()

    def generate(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, temperature: float
    ) -> PeerResult:
        """Decode `max_new_tokens` tokens for each prompt, stop tokens ignored. Raises PeerError, WaitTimeout."""
        order = {
            "prompts": [list(map(int, prompt)) for prompt in prompts],
            "max_new_tokens": max_new_tokens,
            "ignore_eos": True,
            "temperature": temperature,
        }
        result = PeerResult(**self._ask("generate", order, self._generate_timeout_s))
        lengths = [len(tokens) for tokens in result.token_ids]
        if lengths != [max_new_tokens] * len(prompts):
            raise PeerError(
                f"peer {self.name} decoded {lengths} tokens; "
                f"expected {max_new_tokens} for each of {len(prompts)} prompts"
            )
        return result

    def _ask(self, order: str, tree: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Send one line and read one; the process does not outlive a time-out."""
        late = threading.Event()
        timer = threading.Timer(timeout_s, lambda: (late.set(), self._kill()))
        timer.daemon = True
        timer.start()
        try:
            line = self._exchange(json.dumps(tree))
        finally:
            timer.cancel()
        if late.is_set():
            raise WaitTimeout(
                waiter="the benchmark",
                waited_for=f"peer {self.name}",
                order=order,
                waited_s=timeout_s,
                advice=f"its process was killed; the end of its stderr: {self._tail()}",
            )
        if not line:
            status = self._process.wait()
            raise PeerError(
                f"peer {self.name} died with status {status} while it was asked to {order}; "
                f"the end of its stderr: {self._tail()}"
            )
        try:
            return json.loads(line)
        except ValueError as error:
            raise PeerError(
                f"peer {self.name} answered {line[:80]!r} to {order}; expected a line of JSON"
            ) from error

    def _exchange(self, line: str) -> str:
        assert self._process.stdin and self._process.stdout
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return ""
        return self._process.stdout.readline()

    def _kill(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)

    def _tail(self) -> str:
        self._stderr.seek(0)
        return self._stderr.read().decode(errors="replace")[-_TAIL_CHARACTERS:].strip() or "(empty)"


def _environment() -> dict[str, str]:
    """Ours, less what would lead the peer's interpreter to our packages; no look-ups on a hub."""
    ours = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return ours | {"HF_HUB_OFFLINE": "1", "PYTHONNOUSERSITE": "1"}
