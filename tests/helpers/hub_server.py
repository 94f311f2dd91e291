"""A server that speaks what `huggingface_hub` asks of its hub for one repository of files, git's and LFS's."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

LFS_FROM = 64
"Bytes from which on a file goes by LFS."


@dataclass
class Hub:
    """What it holds, and what was asked."""

    url: str = ""
    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)
    "files by name, of each repository"
    lfs: dict[str, bytes] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    tokens: set[str | None] = field(default_factory=set)
    fault: int | None = None
    "the status of every answer"


def _info(name: str, content: bytes) -> dict[str, Any]:
    info = {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
    if len(content) >= LFS_FROM:
        lfs = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
        info["lfs"] = lfs
    return info


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def log_message(self, format: str, *args: Any) -> None:
        """Silent."""

    def _answer(self, status: int, body: Any = b"", error: str | None = None) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        if error is not None:
            self.send_header("X-Error-Code", error)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _go(self) -> None:
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        hub.asked.append(f"{self.command} {path}")
        hub.tokens.add(self.headers.get("Authorization"))
        if hub.fault is not None:
            return self._answer(hub.fault, {"error": "as the test has it"})
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            hub.repos.setdefault(name, {})
            return self._answer(200, {"url": f"{hub.url}/{name}"})
        if path.startswith("/lfs/"):
            hub.lfs[path.removeprefix("/lfs/")] = body
            return self._answer(200)
        parts = path.removeprefix("/api/models").strip("/").split("/")
        name, rest = f"{parts[0]}/{parts[1].removesuffix('.git')}", parts[2:]
        files = hub.repos.get(name)
        if files is None:
            return self._answer(404, {"error": "Repository not found"}, "RepoNotFound")
        if not rest or rest[0] == "revision":
            return self._answer(200, {"id": name, "sha": "0" * 40, "siblings": [], "tags": []})
        if rest[0] == "info":
            objects = [
                {**one, "actions": {"upload": {"href": f"{hub.url}/lfs/{one['oid']}"}}}
                for one in json.loads(body)["objects"]
            ]
            return self._answer(200, {"transfer": "basic", "objects": objects})
        return getattr(self, f"_{rest[0].replace('-', '_')}")(files, "/".join(rest[2:]), body)

    do_GET = do_POST = do_PUT = do_HEAD = _go

    def _preupload(self, files: dict[str, bytes], at: str, body: bytes) -> None:
        asked = json.loads(body)["files"]
        modes = [
            {
                "path": one["path"],
                "uploadMode": "lfs" if one["size"] >= LFS_FROM else "regular",
                "shouldIgnore": False,
            }
            for one in asked
        ]
        self._answer(200, {"files": modes})

    def _commit(self, files: dict[str, bytes], at: str, body: bytes) -> None:
        for line in body.splitlines():
            one = json.loads(line)
            value = one["value"]
            if one["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif one["key"] == "lfsFile":
                files[value["path"]] = self.hub.lfs[value["oid"]]
            elif one["key"] == "deletedFile":
                del files[value["path"]]
        self._answer(200, {"commitUrl": f"{self.hub.url}/user/repo/commit/{'0' * 40}", "commitOid": "0" * 40})

    def _tree(self, files: dict[str, bytes], at: str, body: bytes) -> None:
        recursive = "recursive=true" in self.path.lower()
        start = f"{at}/" if at else ""
        found = [name for name in sorted(files) if name.startswith(start)]
        if not found and at:
            return self._answer(404, {"error": "no such entry"}, "EntryNotFound")
        entries = [_info(name, files[name]) for name in found if recursive or "/" not in name[len(start) :]]
        below = [name[len(start) :].split("/")[:-1] for name in found]
        depths = (range(1, len(one) + 1) if recursive else range(1, min(len(one), 1) + 1) for one in below)
        folders = {start + "/".join(one[:n]) for one, ns in zip(below, depths, strict=True) for n in ns}
        entries += [
            {"type": "directory", "path": name, "oid": "0" * 40, "size": 0} for name in sorted(folders)
        ]
        return self._answer(200, entries)

    def _paths_info(self, files: dict[str, bytes], at: str, body: bytes) -> None:
        paths = json.loads(body)["paths"]
        self._answer(200, [_info(name, files[name]) for name in paths if name in files])

    def _resolve(self, files: dict[str, bytes], at: str, body: bytes) -> None:
        if at not in files:
            return self._answer(404, b"", "EntryNotFound")
        content, asked = files[at], self.headers.get("Range")
        if asked is None:
            return self._answer(200, content)
        first, _, last = asked.removeprefix("bytes=").partition("-")
        return self._answer(206, content[int(first) : int(last) + 1 if last else None])


@contextmanager
def hub_server() -> Iterator[Hub]:
    """Serve an empty hub while the block runs."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
