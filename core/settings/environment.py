"""Episodes of several turns: what answers the policy, how long it may take, when an episode ends."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from .section import Name, Seconds, Section


class EnvironmentConfig(Section):
    """What answers between turns. `sampling.max_new_tokens` counts all turns and all answers."""

    kind: Name | None = None
    """`calculator`, `tools` (Python functions that the model calls), a Python class as `package.module:Class` or
    `file.py:Class` (Gymnasium's too), `gymnasium:ENV_ID`, or `verifiers:NAME` (its load_environment gets `options`);
    null: every response is one turn"""
    tools: Name | list[Name] | None = None
    """kind tools: files or modules, `my_tools.py` for all public functions, `my_tools.py:add,search`, or a class whose
    methods are the tools, one instance an episode; signatures and docstrings are their schemas (get_json_schema)"""
    options: dict[str, bool | int | float | str] = Field(default_factory=dict)
    "keyword arguments of the class"
    max_turns: int = Field(default=8, ge=1)
    "an episode that is not done by then ends as one cut by its length"
    max_turn_tokens: int | None = Field(default=None, ge=1)
    "most tokens sampled in one turn; null: what sampling.max_new_tokens leaves"
    max_observation_tokens: int = Field(default=256, ge=1)
    "more of one answer is cut off"
    timeout_s: Seconds = 60.0
    "for each reset and each step"
    on_error: Literal["fail", "end", "skip"] = "fail"
    """a step that raises, or takes too long: fail the run, end that episode as it is, or leave the sample out of the
    batch; the latter two are counted"""
    concurrency: int = Field(default=16, ge=1, le=256)
    "steps at once in one actor (cluster.environment): most environments wait for others"

    @model_validator(mode="after")
    def _tools_have_an_effect(self) -> Any:
        if (self.kind == "tools") != bool(self.tools):
            raise ValueError(
                f"environment.kind tools and environment.tools go together, got kind {self.kind} and tools "
                f"{self.tools}; set both, tools such as my_tools.py"
            )
        if self.kind == "tools" and self.options:
            raise ValueError("environment.options are of a class, and kind tools has none; take them out")
        return self
