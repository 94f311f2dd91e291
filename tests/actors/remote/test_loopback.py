"""A server on the loopback is asked directly, by every client, whatever proxy the environment names."""

import asyncio
import errno
import importlib.util
import socket
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import requests
from pytest import fixture, importorskip, mark, raises, skip

from rlhfspec.actors.remote.loopback import spare_loopback
from rlhfspec.actors.reward_server.reward_client import ServedReward
from rlhfspec.core.errors import RewardServerLost
from rlhfspec.core.settings.reward import RewardServerConfig, Scorer

PROXIES = ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")


class IPv6Server(ThreadingHTTPServer):
    """On `::1`."""

    address_family = socket.AF_INET6


class Answer(BaseHTTPRequestHandler):
    """Says what a reward server says to no samples."""

    def do_GET(self) -> None:
        body = b'{"rewards": []}'
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@fixture
def proxied(monkeypatch) -> None:
    """An environment whose proxy refuses everything, and that spares the loopback."""
    for name in PROXIES:
        monkeypatch.setenv(name, "http://user:secret@127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "example.org")
    monkeypatch.setenv("no_proxy", "")
    spare_loopback()


@fixture
def port(proxied) -> Iterator[int]:
    """Of a server on 127.0.0.1."""
    with serving(ThreadingHTTPServer, "127.0.0.1") as port:
        yield port


@contextmanager
def serving(kind: type[ThreadingHTTPServer], host: str) -> Iterator[int]:
    with kind((host, 0), Answer) as server:
        threading.Thread(target=server.serve_forever).start()
        yield server.server_port
        server.shutdown()


def by_aiohttp(url: str) -> str:
    aiohttp = importorskip("aiohttp")

    async def ask() -> str:
        async with aiohttp.ClientSession(trust_env=True) as session, session.get(url) as answer:
            return await answer.text()

    return asyncio.run(ask())


def by_httpx(url: str) -> str:
    name = next((name for name in ("httpx", "httpx2") if importlib.util.find_spec(name)), "httpx")
    return importorskip(name).get(url).text


CLIENTS = {
    "requests": lambda url: requests.get(url).text,
    "urllib": lambda url: urllib.request.urlopen(url).read().decode(),
    "aiohttp": by_aiohttp,
    "httpx": by_httpx,
}


@mark.parametrize("client", CLIENTS)
def test_every_client_asks_the_loopback_directly(client, port):
    assert "rewards" in CLIENTS[client](f"http://127.0.0.1:{port}/")
    assert "rewards" in CLIENTS[client](f"http://localhost:{port}/")


@mark.parametrize("client", sorted(set(CLIENTS) - {"urllib"}))
def test_every_client_but_urllib_asks_the_ipv6_loopback_directly(client, proxied):
    """No value serves all: urllib does not take `::1` for `[::1]`, and httpx up to 0.28 raises at `[::1]`."""
    try:
        with serving(IPv6Server, "::1") as port:
            assert "rewards" in CLIENTS[client](f"http://[::1]:{port}/")
            ServedReward(Scorer(kind="serve", url=f"http://[::1]:{port}"), RewardServerConfig(retries=0))
    except OSError as error:
        if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
            skip("this machine has no ::1")
        raise


def test_a_reward_server_on_the_loopback_is_asked_directly_and_another_by_the_proxy_that_is_named(port):
    server = RewardServerConfig(retries=0)
    ServedReward(Scorer(kind="serve", url=f"http://localhost:{port}"), server)
    with raises(RewardServerLost, match=r"asked through the proxy 127\.0\.0\.1, as the environment") as fault:
        ServedReward(Scorer(kind="serve", url="http://rewards.invalid:8000"), server)
    assert "secret" not in str(fault.value)


def test_what_was_excepted_before_stays():
    environment = {"NO_PROXY": "a.example, .b.example", "no_proxy": "c.example"}
    spare_loopback(environment)
    spare_loopback(environment)
    kept = "c.example,a.example,.b.example,127.0.0.1,localhost,::1,127.0.0.0/8"
    assert environment == {"NO_PROXY": kept, "no_proxy": kept}
    everybody = {"NO_PROXY": "*"}
    spare_loopback(everybody)
    assert everybody == {"NO_PROXY": "*", "no_proxy": "*"}
