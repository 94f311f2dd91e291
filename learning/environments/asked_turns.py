"""A program that asks a model over OpenAI's API, turned inside out: each of its questions is a turn of ours.

The program runs beside, on an event loop that a process's episodes share, and asks an address of this process; its
question waits there until the policy has spoken. So whatever drives a client by itself has turns whose tokens are
sampled by the engine, with the sample's key, and never encoded anew: a question must hold the conversation so far,
answered as it was answered, and go on from there.
"""

from __future__ import annotations

import asyncio
import json
import queue
import secrets
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from ...core.errors import EpisodeError
from ...core.surfaces.surface import surface

_NO_ROOM = "This model's maximum context length is used up"
"What servers say where a response has no room: programs end there and score what there is."
_programs: dict[str, ClientProgram] = {}


class ClientProgram:
    """One running program and what it asks."""

    def __init__(
        self, run: Callable[[str], Coroutine[Any, Any, Any]], known: Sequence[Mapping[str, Any]]
    ) -> None:
        """Start `run`, given the address to ask; its first question is to hold the messages `known`."""
        self._key = secrets.token_hex(8)
        self._events: queue.SimpleQueue[dict | None] = queue.SimpleQueue()
        self._replies: queue.SimpleQueue[dict | None] = queue.SimpleQueue()
        self._known = [_plain(one) for one in known]
        self._is_waiting = False
        _programs[self._key] = self
        address = f"http://127.0.0.1:{_server().server_address[1]}/{self._key}/v1"
        self._done = asyncio.run_coroutine_threadsafe(run(address), _loop())
        self._done.add_done_callback(lambda _: self._events.put(None))

    def asked(self, tools: Sequence[Mapping[str, Any]] = ()) -> list[dict[str, Any]] | None:
        """Wait for the next question; returns the messages that it adds, None: the program has ended.

        Raises EpisodeError for a question that does not go on from the one before, or asks for what no turn has.
        """
        question = self._events.get()
        if question is None:
            return None
        self._is_waiting = True
        surface("environment.asked").require(question, "the environment's question", error=EpisodeError)
        if list(question.get("tools") or ()) != list(tools):
            raise EpisodeError(
                f"the environment asks with the tools {_names(question.get('tools') or ())}, the prompt has "
                f"{_names(tools)}; give data.tools_field the column that holds them"
            )
        messages = [_plain(one) for one in question["messages"]]
        if messages[: len(self._known)] != self._known:
            place = next(
                (i for i, pair in enumerate(zip(messages, self._known, strict=False)) if pair[0] != pair[1]),
                -1,
            )
            raise EpisodeError(
                f"the environment's question does not go on from what was said before (message {place} differs, or is "
                "missing); turns of one sample are one conversation: let the environment keep it, and ask one thing "
                "at a time"
            )
        more = messages[len(self._known) :]
        self._known = messages
        return more

    def reply(self, message: dict[str, Any] | None) -> None:
        """Answer the open question; None: there is no room for an answer."""
        self._is_waiting = False
        if message is not None:
            self._known.append(_plain(message))
        self._replies.put(message)

    def result(self) -> Any:
        """What the program came to. Raises what it raised."""
        _programs.pop(self._key, None)
        return self._done.result()

    def close(self) -> None:
        """End the program where it stands."""
        _programs.pop(self._key, None)
        self._done.cancel()
        if self._is_waiting:
            self.reply(None)

    def take(self, question: dict[str, Any]) -> dict[str, Any] | None:
        """Hand a question on and wait for its answer, on the thread of its connection."""
        self._events.put(question)
        return self._replies.get()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        _, key, *route = self.path.split("/")
        program = _programs.get(key)
        if program is None or route != ["v1", "chat", "completions"]:
            return self._send(
                404, {"error": {"message": f"no episode answers {self.path}", "type": "not_found"}}
            )
        message = program.take(json.loads(body))
        if message is None:
            error = {"message": _NO_ROOM, "type": "invalid_request_error", "code": "context_length_exceeded"}
            return self._send(400, {"error": error})
        reason = "tool_calls" if message.get("tool_calls") else "stop"
        choice = {"index": 0, "message": message, "finish_reason": reason, "logprobs": None}
        whole = {"id": key, "object": "chat.completion", "created": 0, "model": "policy", "choices": [choice]}
        return self._send(200, whole)

    def _send(self, status: int, answer: dict[str, Any]) -> None:
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing of a request."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a program that has hung up."""


@cache
def _server() -> ThreadingHTTPServer:
    server = _Server(("127.0.0.1", 0), _Handler)
    threading.Thread(target=server.serve_forever, daemon=True, name="asked-turns").start()
    return server


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """Of all episodes of a process: the clients and locks of an environment belong to one loop."""
    loop = asyncio.new_event_loop()
    # a program may ask from a thread, which waits as long as the policy speaks: by default there are few
    loop.set_default_executor(ThreadPoolExecutor(1024))
    threading.Thread(target=loop.run_forever, daemon=True, name="asking-programs").start()
    return loop


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message with its text as one string. Raises EpisodeError for pictures and sound."""
    content = message.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        if any(part.get("type") != "text" for part in content):
            raise EpisodeError(
                "the environment shows pictures or sound, which are not read; let it show text"
            )
        content = "".join(part["text"] for part in content)
    rest = {name: value for name, value in message.items() if name not in ("role", "content") and value}
    return {"role": message["role"], "content": content or "", **rest}


def _names(tools: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(str(one.get("function", one).get("name")) for one in tools) or "none"
