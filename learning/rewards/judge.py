"""A language model as judge (`reward.kind: judge`), asked through OpenAI's chat API, one response or a pair at a time.

It is asked greedily, so a score is a function of judge and text: scores are kept in a file by the hash of both, and
what was asked once is not asked again, by no run. Source: Zheng et al. 2023 (arXiv 2306.05685), sections 3.1 (rubrics,
pairs) and 3.4 (both orders of a pair are asked, against the bias for a place).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ...core.errors import ConfigError, RewardServerLost, one_line
from ...core.files import append_whole, storage_errors
from ...core.records import Prompt, Reward, Unscored
from ...core.settings.reward import RewardServerConfig, Scorer
from .asked_server import Refused, ask
from .score_request import ScoreRequest, groups

MOST_AT_ONCE = 32
"Questions that one actor has open."
_TRIED_S, _SHOWN = 10.0, 80
"What the first question may take; characters of an answer in a line."
SCORE = r"Score:\s*(-?\d+(?:\.\d+)?)"
"What is read of an answer to one of the two templates below."
_RUBRIC = (
    "Judge an answer by this rubric.\n\n[Rubric]\n{rubric}\n\n[Question]\n{prompt}\n\n[Answer]\n{response}\n\n"
    "Explain in a few sentences, then end with a line 'Score: NUMBER'."
)
_PAIR = (
    "Compare two answers by this rubric.\n\n[Rubric]\n{rubric}\n\n[Question]\n{prompt}\n\n[Answer 1]\n{response}\n\n"
    "[Answer 2]\n{other}\n\nExplain in a few sentences, then end with a line 'Score: NUMBER', 1 where answer 1 is "
    "better, 0 where answer 2 is, 0.5 where neither is."
)
_ALONE = (
    "has nothing to compare: it is alone with its prompt (reward.scope group); set rollout.samples_per_prompt and "
    "evaluation.samples_per_prompt to 2 or more"
)


class Judge:
    """Of one scorer. A response's value is the number that the judge says; with scope group its share of wins."""

    def __init__(self, scorer: Scorer, server: RewardServerConfig, cache: Path) -> None:
        """`cache`: the file of the scores; it need not be there. Raises ConfigError: no key in `key_env`."""
        self._scorer, self._server = scorer, server
        self.in_groups = scorer.scope == "group"
        rubric = (_PAIR if self.in_groups else _RUBRIC).replace("{rubric}", scorer.rubric or "")
        self._template = scorer.template or rubric
        self._pattern = re.compile(scorer.pattern or SCORE, re.DOTALL)
        base = str(scorer.url).rstrip("/")
        self._url = (base if "/" in base.partition("://")[2] else f"{base}/v1") + "/chat/completions"
        self._headers: dict[str, str] = {}
        if scorer.key_env is not None:
            if not (key := os.environ.get(scorer.key_env)):
                raise ConfigError(f"reward.key_env {scorer.key_env} is no environment variable here; set it")
            self._headers["Authorization"] = f"Bearer {key}"
        self._cache = cache.expanduser()
        with storage_errors(self._cache):
            self._cache.parent.mkdir(parents=True, exist_ok=True)
        self._known = dict(_kept(self._cache))
        self._said = ""  # last

    @property
    def described(self) -> str:
        """What is asked whom."""
        what = "pairs of a prompt's responses, in both orders" if self.in_groups else "each response"
        return (
            f"judge {self._scorer.model} at {self._url}, asked for {what}; scores are kept in {self._cache}"
        )

    def tried(self, prompt: Prompt) -> str:
        """What it says of a stand-in for a response. Raises RewardServerLost: it is not there, or refuses."""
        text = prompt.reference or "I do not know."
        request = ScoreRequest(prompt=prompt, response=text)
        asked, server = self._text(request, request if self.in_groups else None), self._server
        limits = {"timeout_s": min(server.timeout_s, _TRIED_S), "retries": 0}
        self._server = server.model_copy(update=limits)
        try:
            score = self._answers([asked])[asked]
        except RewardServerLost as error:
            if not re.search(r"timed out|HTTP (408|425|429|5\d\d)", str(error)):
                raise  # one that is slow, or busy, may be asked again
            return f"judge {self._scorer.model} gave no answer to a first question: {error}"
        finally:
            self._server = server
        shown = f"none ({score})" if isinstance(score, str) else f"{score:g}"
        said = f"; it said '{one_line(self._said)[-_SHOWN:]}'" if self._said else "; kept from before"
        return f"judge {self._scorer.model} of '{one_line(text)[:_SHOWN]}', a stand-in: score {shown}{said}"

    def outcomes(self, requests: Sequence[ScoreRequest]) -> Iterator[Reward | Unscored]:
        """One answer a request, in order. Raises RewardServerLost: the judge does not answer, or refuses."""
        asked: list[list[tuple[str, bool]]] = [[] for _ in requests]
        "of each request its questions, and whether it is the second of the pair"
        for places in groups(requests) if self.in_groups else ():
            for first in places:
                for second in (place for place in places if place != first):
                    text = self._text(requests[first], requests[second])
                    asked[first].append((text, False))
                    asked[second].append((text, True))
        if not self.in_groups:
            asked = [[(self._text(request), False)] for request in requests]
        answers = self._answers(text for questions in asked for text, _ in questions)
        for request, questions in zip(requests, asked, strict=True):
            found = [(answers[text], second) for text, second in questions]
            faults = [score for score, _ in found if isinstance(score, str)] or [_ALONE] * (not found)
            if not found or (faults and self._scorer.default is None):
                advice = "; fix the template or what is read of the answer, or declare reward.default"
                where = f"judge {self._scorer.model} for {request.where}"
                yield Unscored(reason=f"{where} {faults[0]}; {request.shown}{advice if found else ''}")
                continue
            default = self._scorer.default or 0.0
            numbers = [(default if isinstance(score, str) else score, second) for score, second in found]
            total = math.fsum(1.0 - score if second else score for score, second in numbers)
            parts = {} if self._scorer.default is None else {"unread": len(faults) / len(found)}
            yield Reward(value=total / len(found), parts=parts, unread=faults[0] if faults else "")

    def _text(self, request: ScoreRequest, other: ScoreRequest | None = None) -> str:
        prompt = request.prompt
        values = {"prompt": prompt.text, "response": request.response, "reference": prompt.reference}
        values |= {} if other is None else {"other": other.response}
        # in one pass: what a response says of braces stays
        return re.sub(r"\{(\w+)\}", lambda found: values.get(found[1], found[0]), self._template)

    def _answers(self, texts: Iterable[str]) -> Mapping[str, float | str]:
        """The score of each text, or why there is none; what is not kept is asked, several at a time."""
        bodies = {text: self._body(text) for text in dict.fromkeys(texts)}
        keys = {text: _key(self._scorer, body) for text, body in bodies.items()}
        new = [text for text, key in keys.items() if key not in self._known]
        with ThreadPoolExecutor(MOST_AT_ONCE) as threads:
            answers = threads.map(self._ask, [bodies[text] for text in new])
            for text, score in zip(new, answers, strict=True):
                self._known[keys[text]] = score
                append_whole(self._cache, json.dumps([keys[text], score]) + "\n")
        return {text: self._known[key] for text, key in keys.items()}

    def _body(self, text: str) -> dict[str, Any]:
        messages = [{"role": "user", "content": text}]
        reads_one = {"max_tokens": 1, "logprobs": True, "top_logprobs": 20}
        limit = reads_one if self._scorer.choice else {"max_tokens": self._scorer.answer_tokens}
        return {"model": self._scorer.model, "messages": messages, "temperature": 0.0, **limit}

    def _ask(self, body: Mapping[str, Any]) -> float | str:
        """The score, or why the answer has none."""
        try:
            return ask(self._url, body, self._read, self._server, called="the judge", headers=self._headers)
        except Refused as error:
            raise RewardServerLost(
                f"the judge {self._scorer.model} at {self._url} refused a question with {error}; fix reward.url, "
                "reward.model or what is asked; reward.default is for answers alone"
            ) from None

    def _read(self, answer: bytes) -> float | str:
        try:
            said = json.loads(answer)["choices"][0]
            if self._scorer.choice:
                return self._chosen(said["logprobs"]["content"][0]["top_logprobs"])
            self._said = text = str(said["message"]["content"])
        except (ValueError, LookupError, TypeError, AttributeError):
            shown = one_line(answer.decode(errors="replace"))[:200]
            lacks = " with top_logprobs, which reward.choice reads" if self._scorer.choice else ""
            raise Refused(f"HTTP 200: '{shown}', which is no chat completion of OpenAI's{lacks}") from None
        found = [*self._pattern.finditer(text)]
        try:
            score = float(found[-1][1]) if found else math.nan
        except (TypeError, ValueError):
            score = math.nan
        if not math.isfinite(score) or (self.in_groups and not 0.0 <= score <= 1.0):
            wanted = "number from 0 to 1 (1: answer 1 wins)" if self.in_groups else "number"
            said = one_line(text)[-200:]
            return f"answered '{said}', in which '{self._pattern.pattern}' finds no {wanted}"
        return score

    def _chosen(self, top: Sequence[Mapping[str, Any]]) -> float | str:
        """The mean of the choices' scores by their probabilities, other tokens left out."""
        choice = self._scorer.choice or {}
        words = [(one["token"].strip(), math.exp(one["logprob"])) for one in top]
        self._said = ", ".join(f"{word} {share:.2f}" for word, share in words[:5])
        total = math.fsum(share for word, share in words if word in choice)
        if not total:
            return f"begins with {[word for word, _ in words][:5]}, and none is of reward.choice {[*choice]}"
        return math.fsum(share * choice[word] for word, share in words if word in choice) / total


def _key(scorer: Scorer, body: Mapping[str, Any]) -> str:
    """Of judge and text; by address, too: what two servers call by one name may be two models."""
    read = [scorer.url, scorer.pattern or SCORE, scorer.choice, scorer.scope == "group"]
    return hashlib.sha256(json.dumps([body, read], sort_keys=True).encode()).hexdigest()


def _kept(file: Path) -> Iterator[tuple[str, float | str]]:
    """Scores and faults by their keys. Raises ConfigError: a line is none of ours."""
    for number, line in enumerate(file.read_text().splitlines() if file.is_file() else ()):
        try:
            key, score = json.loads(line)
        except (ValueError, TypeError):
            raise ConfigError(
                f"line {number + 1} of {file} is no judge's [key, score]: {line[:60]}; remove the file (its scores are "
                "asked for again), or name another one as reward.cache"
            ) from None
        yield key, score
