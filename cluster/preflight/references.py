"""What rules and environments ask of every prompt, told before the run instead of at the first sample of a bad one."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from rlhfspec.core.errors import DataError, InputError, one_line
from rlhfspec.core.records import Prompt
from rlhfspec.core.settings.environment import EnvironmentConfig
from rlhfspec.core.settings.reward import RewardConfig
from rlhfspec.learning.environments.environment_protocol import Environment, prompt_check
from rlhfspec.learning.tasks.gsm8k import reference_number


def require_references(
    reward: RewardConfig,
    settings: EnvironmentConfig,
    environment: Environment | None,
    prompts: Iterable[Prompt],
) -> None:
    """Raise InputError for the first prompt that would end the run, saying how many there are.

    Where `reward.on_error` or `environment.on_error` lets the run go on, such prompts are nobody's fault.
    """
    checks: list[Callable[[Prompt], object]] = []
    if environment is not None and settings.on_error == "fail":
        found = prompt_check(environment)
        checks += [] if found is None else [found]
    if reward.on_error == "fail" and any(part.kind == "gsm8k" for part in reward.scorers):
        checks.append(reference_number)
    faults = [fault for prompt in prompts if (fault := _fault(checks, prompt))] if checks else []
    if not faults:
        return
    first, others = faults[0], len(faults) - 1
    said = str(first)
    if not isinstance(first, InputError):
        said = f"environment {settings.kind}: {type(first).__name__}: {one_line(said)[:200]}; mend the data"
    kind = type(first) if isinstance(first, InputError) else DataError
    raise kind(said + (f" (and {others} more prompts like it)" if others else "")) from first


def _fault(checks: Iterable[Callable[[Prompt], object]], prompt: Prompt) -> Exception | None:
    for check in checks:
        try:
            check(prompt)
        except Exception as error:  # the user's code may raise anything
            return error
    return None
