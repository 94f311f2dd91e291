"""How responses are scored: one reward or a weighted mixture, shaping, what a failing function does to the run."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from .section import TEMPLATE_NAME, Name, Seconds, Section

PartName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_.-]*$", max_length=60)]

RESERVED_NAMES = (
    "mean", "std", "accuracy", "num_skipped", "unshaped", "overlong", "length", "missing_eos", "turns"
)  # fmt: skip
"names under `reward/` in metrics.jsonl that no part of a mixture may take"


_KINDS_OF: dict[str, tuple[str, ...]] = {
    "model": ("model", "judge"),
    "url": ("serve", "judge", "code"),
    "app": ("serve",),
    "pattern": ("format", "judge"),
    "code": ("code",),
    **dict.fromkeys(("template", "rubric", "choice", "default", "answer_tokens", "key_env"), ("judge",)),
}
"Which kinds read a key; others have no use for it."


class CodeConfig(Section):
    """How programs are tested (kind code)."""

    tests_from: Name | None = None
    """column with a row's tests, of data.reward_fields; null: the reference. Pairs of input and output, `inputs` and
    `outputs` (with `fn_name` a call's), asserts, or `check(candidate)` with the row's `entry_point`"""
    partial: bool = False
    "the reward is the share of tests that are passed, as verl's `continuous`; else 1.0 for all of them"
    memory_mb: int = Field(default=512, ge=64)
    "address space of one process of a program; at `url` its memory"
    max_concurrent: int | None = Field(default=None, ge=1)
    "programs that one reward actor has run at once; null: one a core, at `url` 64"


class Scorer(Section):
    """What one reward is made of."""

    kind: str = "chain"
    """`chain`, `one_sentence`, `gsm8k`, `model`, `serve`, `format`, `judge` (a language model behind OpenAI's API),
    `code` (a response's program against tests, in a sandbox), `environment` (what its steps give), `none` (0, for
    algorithm.kind distill), or a Python function as `package.module:function` or `path/to/file.py:function`"""
    model: Name | None = None
    "kind model: path or hub name of a sequence-classification model; kind judge: what its server calls it"
    url: Name | None = None
    """kind serve: address of a reward server, such as http://127.0.0.1:8000/score; judge: http://127.0.0.1:8000/v1;
    code: of a SandboxFusion server, such as http://127.0.0.1:8080/run_code; null: a sandbox of this machine"""
    app: Name | None = None
    "kind serve: name of a Ray Serve application of the same Ray cluster, called by handle instead of `url`"
    pattern: str | None = None
    """kind format: 1.0 for a response that this regular expression matches as a whole (`.` takes line ends), else 0.0;
    judge: its first group, where it matches last, is the score (of a pair 0 to 1, 1: answer 1, {response}, wins);
    null: of `Score: NUMBER`"""
    template: str | None = None
    "kind judge: what it is asked, with {prompt}, {response}, {reference}, and {other} of a pair (scope group)"
    rubric: str | None = None
    "kind judge: by what it judges, in a template of ours"
    choice: dict[str, float] | None = None
    """kind judge: scores of first words of the answer, such as {Yes: 1.0, No: 0.0}, weighed by their probabilities (the
    server must know `top_logprobs`); takes the place of `pattern`"""
    default: float | None = None
    """kind judge: the score where an answer was given and has none (`reward/unread` is the share); null: as a function
    that fails. A server that refuses, or gives no chat completion, ends the run"""
    answer_tokens: int = Field(default=512, ge=1)
    "kind judge: of an answer, at most"
    key_env: Name | None = None
    "kind judge: the environment variable with the server's API key"
    code: CodeConfig = CodeConfig()
    scope: Literal["auto", "sample", "group"] = "auto"
    """what a Python function is given at once: a response, or all of a prompt (`group`: its arguments are lists,
    `prompts`, `responses`, `references`); auto: a group where it takes lists, as TRL's, verl's and OpenRLHF's may"""
    mean: float = 0.0
    "taken off the value"
    std: float = Field(default=1.0, gt=0.0)
    "the value is divided by it"
    clip: tuple[float, float] | None = None
    "the value, after `mean` and `std`, is kept between these two"

    @model_validator(mode="after")
    def _complete(self) -> Any:
        if self.kind == "model" and self.model is None:
            raise ValueError("reward.kind is 'model' but reward.model names none; give a path or hub name")
        if self.kind == "serve" and (self.url is None) == (self.app is None):
            raise ValueError(
                "reward.kind serve needs exactly one of reward.url (a server) and reward.app (a Ray Serve application)"
            )
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise ValueError(f"reward.url must begin with http:// or https://, got '{self.url}'")
        if self.kind == "format" and self.pattern is None:
            raise ValueError("reward.kind is 'format' but reward.pattern is null; give a regular expression")
        try:
            num_groups = re.compile(self.pattern or "").groups
        except re.error as error:
            raise ValueError(f"reward.pattern is no regular expression: {error}") from None
        if self.kind == "judge" and self.pattern is not None and not num_groups:
            raise ValueError("reward.pattern of a judge needs a group, the score, such as Score: ([0-9]+)")
        if self.scope != "auto" and self.kind != "judge" and ":" not in self.kind:
            raise ValueError(
                f"reward.scope {self.scope} is of Python functions and judges, and with kind {self.kind} it would have "
                "no effect; take it out"
            )
        for name, kinds in _KINDS_OF.items():
            if self.kind not in kinds and getattr(self, name) != Scorer.model_fields[name].default:
                raise ValueError(
                    f"reward.{name} is of kind {' or '.join(kinds)}, this is {self.kind}; take it out"
                )
        if self.kind == "judge":
            self._require_judge()
        if self.kind == "environment" and (self.mean, self.std, self.clip) != (0.0, 1.0, None):
            raise ValueError(
                "reward.kind environment takes what the environment gives; reward.mean, std and clip would have no "
                "effect; take them out, and let the environment scale its rewards"
            )
        if self.clip is not None and self.clip[0] >= self.clip[1]:
            raise ValueError(f"reward.clip must be [low, high] with low below high, got {list(self.clip)}")
        return self

    def _require_judge(self) -> None:
        """Raise ValueError for a judge that lacks something."""
        if self.template is not None and self.rubric is not None:
            raise ValueError("a judge takes reward.template or reward.rubric, not both; take one out")
        if self.url is None or self.model is None or not (self.template or self.rubric):
            raise ValueError(
                "reward.kind judge needs reward.url (its server), reward.model (its name there), and one of "
                "reward.template and reward.rubric"
            )
        text, pair = self.template, self.scope == "group"
        if text is not None and ("{response}" not in text or ("{other}" in text) != pair):
            raise ValueError(
                "reward.template needs {response}, and {other} with reward.scope group alone: it asks for pairs"
            )
        known = ["prompt", "response", "reference", *(["other"] if pair else [])]
        # what a command of LaTeX is given is no name
        named = TEMPLATE_NAME.findall(re.sub(r"\\[A-Za-z]+(\{[^{}]*\})+", "", text or self.rubric or ""))
        if odd := [name for name in named if name.isidentifier() and name not in known]:
            key, fit = "template" if text else "rubric", ", ".join(f"{{{name}}}" for name in known)
            raise ValueError(f"reward.{key} names {{{odd[0]}}}, which nothing fills in; known are {fit}")
        if self.choice is not None and self.pattern is not None:
            raise ValueError("reward.choice and reward.pattern both read the answer; take one out")
        if self.choice is not None and (self.rubric or not self.choice):
            raise ValueError("reward.choice needs words, and reward.template (no rubric) to ask for them")
        scores = (*(self.choice or {}).values(), self.default or 0.0)
        if pair and not all(0.0 <= score <= 1.0 for score in scores):
            raise ValueError("reward.choice and reward.default of pairs (scope group) are from 0 to 1")


class RewardPart(Scorer):
    """One reward of a mixture."""

    name: PartName
    "its mean is `reward/NAME` in metrics.jsonl, its own parts are `reward/NAME/PART`"
    weight: float = 1.0
    "the mixture is the sum of weight times value"
    optional: bool = False
    "None from its function means that it does not apply: it adds nothing, and is no fault"


class OverlongConfig(Section):
    """DAPO's soft overlong punishment: nothing up to max_tokens - buffer_tokens, `factor` at max_tokens."""

    max_tokens: int | None = Field(default=None, ge=1)
    "null: sampling.max_new_tokens"
    buffer_tokens: int = Field(ge=1)
    factor: float = Field(default=1.0, ge=0.0)


class ShapingConfig(Section):
    """What is taken off the reward for how the response ended and how long it is; KL counts in `algorithm`."""

    overlong: OverlongConfig | None = None
    length_penalty: float = 0.0
    "taken off for each response token"
    missing_eos_penalty: float = Field(default=0.0, ge=0.0)
    "taken off a response that was cut at sampling.max_new_tokens"
    turn_penalty: float = 0.0
    "taken off for each turn behind the first"

    @property
    def is_on(self) -> bool:
        """Whether anything is shaped."""
        terms = (self.length_penalty, self.missing_eos_penalty, self.turn_penalty)
        return self.overlong is not None or any(terms)


class RewardServerConfig(Section):
    """How a server is asked (kinds serve, judge, and code with `url`)."""

    timeout_s: Seconds = 120.0
    "for one batch, one question to a judge, or one program"
    retries: int = Field(default=6, ge=0)
    "after the first try, when the server is down, refuses, or loses a replica"
    backoff_s: Seconds = 0.5
    "before the first retry; doubles with each"


class RewardConfig(Scorer):
    """How a response is scored."""

    parts: tuple[RewardPart, ...] = ()
    "a weighted mixture; excludes `kind` and what belongs to one reward alone"
    batch_size: int = Field(default=32, ge=1)
    "samples that an actor takes at once; on a GPU also those of one forward of a reward model"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    "of reward models; auto: bfloat16 on a GPU, float32 on a CPU"
    max_tokens: int | None = Field(default=None, ge=1)
    "of prompt and response in a reward model, null: what it holds; prompts are cut on their left, responses never"
    timeout_s: Seconds = 10.0
    "for each response that a call of a Python function is given; kind code: for all tests of a response"
    on_error: Literal["fail", "skip"] = "fail"
    """a sample whose function raises, hangs, or gives no finite number: ends the run, or leaves the batch; where
    it is given all samples of a prompt, all of them"""
    cache: Name = "~/.cache/rlhfspec/judge.jsonl"
    "file of judges' scores by the hash of judge and text: what is there is not asked again"
    shaping: ShapingConfig = ShapingConfig()
    server: RewardServerConfig = RewardServerConfig()

    @property
    def scorers(self) -> tuple[Scorer, ...]:
        """The parts of the mixture, or the one reward."""
        return self.parts or (self,)

    @property
    def models(self) -> tuple[str, ...]:
        """Reward models that run in the pool."""
        return tuple(part.model for part in self.scorers if part.kind == "model" and part.model is not None)

    @property
    def calls_functions(self) -> bool:
        """Whether Python functions of the user's are called, or programs of responses run."""
        return any(":" in part.kind or part.kind in ("format", "code") for part in self.scorers)

    @property
    def title(self) -> str:
        """For messages: the kind, of a mixture all kinds."""
        return " + ".join(part.kind for part in self.scorers)

    @model_validator(mode="after")
    def _one_form(self) -> RewardConfig:
        if self.kind == "environment" and self.on_error != "fail":
            raise ValueError(
                "reward.kind environment calls no function; reward.on_error would have no effect; take it out, and set "
                "environment.on_error"
            )
        if not self.parts:
            return self
        alone = [
            name
            for name, field in Scorer.model_fields.items()
            if getattr(self, name) != field.default  # a written-out config names all defaults
        ]
        if alone:
            raise ValueError(
                f"reward.parts excludes reward.{alone[0]}: give each part its own, or take reward.parts out"
            )
        if any(part.kind == "environment" for part in self.parts):
            raise ValueError(
                "reward.parts cannot hold kind environment: an environment's reward is the whole reward; set "
                "reward.kind to environment, or take the part out"
            )
        names = [part.name for part in self.parts]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"reward.parts has two parts called '{name}'; rename one")
            if name in RESERVED_NAMES:
                raise ValueError(f"reward.parts: the name '{name}' is a figure of its own; choose another")
        return self


def require_reward(
    reward: RewardConfig,
    *,
    environment: str | None,
    max_new_tokens: int,
    learns_from_it: bool,
    samples_per_prompt: int,
    combine: str,
) -> None:
    """Raise ValueError for shaping that fits no response, or that an environment, which must be there, does itself.

    And for none where it is learned from. `combine`: of `algorithm`; it needs parts, and reads nothing of what is
    taken off their sum.
    """
    if learns_from_it and reward.kind == "none" and not (reward.parts or reward.shaping.is_on):
        raise ValueError(
            "reward.kind is none, and the algorithm learns from rewards, which would all be equal; name a reward, or "
            "set algorithm.kind to distill"
        )
    if combine != "sum" and (not reward.parts or reward.shaping.is_on):
        lacks = "reward.shaping is no part: let a function be it" if reward.parts else "reward.parts is empty"
        raise ValueError(f"algorithm.combine {combine} compares each of reward.parts by itself, and {lacks}")
    if samples_per_prompt < 2 and any(scorer.scope == "group" for scorer in reward.scorers):
        raise ValueError(
            f"reward.scope group compares samples of one prompt: rollout.samples_per_prompt >= 2, got "
            f"{samples_per_prompt}"
        )
    overlong = reward.shaping.overlong
    if overlong is not None:
        longest = overlong.max_tokens or max_new_tokens
        if overlong.buffer_tokens > longest:
            raise ValueError(
                f"reward.shaping.overlong.buffer_tokens is {overlong.buffer_tokens}, more than the {longest} tokens "
                "of the longest response; lower it"
            )
    if reward.shaping.turn_penalty and environment is None:
        raise ValueError(
            "reward.shaping.turn_penalty is for each turn behind the first, and environment.kind is null: every "
            "response is one turn; take it out, or name an environment"
        )
    if reward.kind == "environment" and environment is None:
        raise ValueError(
            "reward.kind is 'environment' but environment.kind is null: nothing answers; name an environment"
        )
    if reward.kind == "environment" and environment == "tools":
        raise ValueError(
            "environment.kind tools gives no rewards; set reward.kind to what scores the responses"
        )
    if reward.kind == "environment" and reward.shaping.is_on:
        raise ValueError(
            "reward.kind environment takes what the environment gives; reward.shaping would have no effect; let the "
            "environment shape its rewards"
        )
