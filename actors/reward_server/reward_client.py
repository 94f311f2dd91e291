"""Asks a reward server, by URL or by handle of a Serve application; what is down for a while is asked again."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

import requests as http
from pydantic import ValidationError
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from ...core.errors import RewardError, RewardServerLost, one_line
from ...core.records import Reward, Unscored
from ...core.settings.reward import RewardServerConfig, Scorer
from ...learning.rewards.score_request import ScoreRequest
from .score_schema import read_answer, to_body

_LONGEST_BACKOFF_S = 30.0
_CONNECT_S = 10.0
_TRY_AGAIN = (408, 425, 429, 500, 502, 503, 504)
"HTTP answers that another try may change"


class ServedReward:
    """Sends whole batches to a server and waits for their rewards.

    Scoring is a pure function of what is sent, so a batch whose replica died is simply sent again.
    """

    def __init__(
        self,
        scorer: Scorer,
        server: RewardServerConfig,
        *,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Ask once whether the server is there. Raises as `outcomes`."""
        self._name = scorer.url or f"application {scorer.app}"
        self._server = server
        self._sleep = sleep
        self._ask = _by_url(scorer.url) if scorer.url is not None else _by_handle(str(scorer.app))
        self.outcomes([])

    def outcomes(self, requests: Sequence[ScoreRequest]) -> list[Reward | Unscored]:
        """One answer a request, in order.

        Raises RewardServerLost when no try was answered, RewardError when the server refuses what it is sent.
        """
        fault, began_s = "", time.monotonic()
        for attempt in range(self._server.retries + 1):
            if attempt:
                wait_s = min(self._server.backoff_s * 2 ** (attempt - 1), _LONGEST_BACKOFF_S)
                # several actors that lost one replica do not come back in step
                self._sleep(wait_s * random.uniform(0.75, 1.25))
            try:
                rewards = self._ask(requests, self._server.timeout_s)
            except _TryAgain as error:
                fault = one_line(str(error))
                continue
            if len(rewards) != len(requests):
                raise RewardError(
                    f"the reward server {self._name} was given {len(requests)} samples and returned {len(rewards)} "
                    "rewards; it must return one for each"
                )
            return rewards
        raise RewardServerLost(
            f"the reward server {self._name} did not answer in {self._server.retries + 1} tries over "
            f"{time.monotonic() - began_s:.0f} s; the last one: {fault}; start it (`rlhfspec serve reward`), "
            "look at its log, or fix reward.url; reward.server says how often and how long it is asked"
        )


class _TryAgain(Exception):
    """Another try may succeed."""


_Ask = Callable[[Sequence[ScoreRequest], float], list[Reward | Unscored]]


def _by_url(url: str) -> _Ask:
    if urlsplit(url).path in ("", "/"):
        url = url.rstrip("/") + "/score"
    session = http.Session()
    was_answered = False

    def ask(requests: Sequence[ScoreRequest], timeout_s: float) -> list[Reward | Unscored]:
        nonlocal was_answered
        try:
            answer = session.post(
                url, json=to_body(requests).model_dump(mode="json"), timeout=(_CONNECT_S, timeout_s)
            )
        except (http.exceptions.InvalidURL, http.exceptions.InvalidSchema) as error:
            raise RewardError(f"reward.url '{url}' is no address: {error}") from None
        except http.exceptions.RequestException as error:
            raise _TryAgain(f"{error}{_through_proxy(url)}") from error
        # Serve takes the route away before it ends, and has none before its application is there
        if answer.status_code in _TRY_AGAIN or (answer.status_code == 404 and was_answered):
            raise _TryAgain(f"HTTP {answer.status_code}: {answer.text[:200]}{_through_proxy(url)}")
        if answer.status_code != 200:
            raise RewardError(
                f"the reward server {url} refused with HTTP {answer.status_code}: {answer.text[:300]}"
                f"{_through_proxy(url)}; expected the answer of POST /score; fix reward.url"
            )
        try:
            found = read_answer(answer.content, f"the reward server {url}")
        except ValidationError as error:
            raise RewardError(
                f"the reward server {url} answered '{answer.text[:200]}'; expected an object with rewards "
                f"({error.errors()[0]['msg']}); fix reward.url"
            ) from None
        was_answered = True
        return found

    return ask


def _through_proxy(url: str) -> str:
    """Names the proxy that the environment puts between, without its password; empty where there is none."""
    proxy = http.utils.select_proxy(url, http.utils.get_environ_proxies(url))
    if not proxy:
        return ""
    place = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    return f" (asked through the proxy {place.hostname}, as the environment says; NO_PROXY names who is asked directly)"


def _by_handle(app: str) -> _Ask:
    def ask(requests: Sequence[ScoreRequest], timeout_s: float) -> list[Reward | Unscored]:
        prompts, responses = [r.prompt for r in requests], [r.response for r in requests]
        known = [r.facts for r in requests if r.facts is not None]
        facts = known if len(known) == len(requests) else None
        try:
            handle = serve.get_app_handle(app)
            time = requests[0].template_time if requests else None
            return handle.score.remote(prompts, responses, facts, time).result(timeout_s=timeout_s)
        except (RayError, RayServeException, TimeoutError) as error:
            raise _TryAgain(f"{type(error).__name__}: {error}") from error

    return ask
