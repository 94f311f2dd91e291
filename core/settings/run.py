"""What a run is called, and which models it takes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from .section import Moment, Name, Section, UserPath, folder_name

CACHE_DIR = "~/.cache/rlhfspec"


class RunConfig(Section):
    """What the run is called, how long it is, where it writes."""

    name: Annotated[str, AfterValidator(folder_name)] = "run"
    "run folders are called NAME-DATE-TIME"
    seed: int = Field(default=0, ge=0, lt=2**63)
    template_time: Moment | None = None
    "what chat templates are told when they ask the time (strftime_now), ISO 8601, in resumes, proofs and evaluations "
    "too; null: when the run begins, which its config.yaml keeps"
    iterations: int = Field(default=20, ge=1)
    epochs: float | None = Field(default=None, gt=0.0, le=1e6)
    """passes over the prompts (TRL's num_train_epochs) in place of iterations, rounded up to whole ones of those, which
    are what the run's config.yaml keeps; null: iterations say it"""
    output_dir: UserPath = "runs"
    "run folders are made under it; made absolute against the caller's folder"
    cache_dir: UserPath = CACHE_DIR
    "the only thing kept in the home folder: model pairs the project made itself, models it got by name, profiles"
    checkpoint_every: int = Field(default=0, ge=0)
    "iterations between checkpoints; 0 writes only the last"
    keep_checkpoints: int | None = Field(default=None, ge=1)
    "how many of those between are kept, the newest; the last and the best stay beside them. null: all"
    state_every: int = Field(default=10, ge=0)
    "iterations between states of the whole run, which `train --resume` goes on from; 0: none"
    keep_states: int = Field(default=2, ge=1)
    "how many states are kept, the newest: where one is damaged, the one before it serves"
    copy_to: str | None = Field(default=None, min_length=1)
    "a folder or an fsspec URL such as s3://bucket/runs that gets a copy of the run folder with every new state, for "
    "machines whose disk goes with them; `train --resume URL` brings one back"
    step_log: bool = False
    "true: write what every decode step saw, decided and did, for `rlhfspec replay`"

    @model_validator(mode="before")
    @classmethod
    def _one_length(cls, given: Any) -> Any:
        """Of `iterations` and `epochs` one; null takes the other's place in a file out."""
        if not isinstance(given, dict) or given.get("epochs") is None:
            return given
        if given.get("iterations") is not None:
            raise ValueError(
                f"epochs {given['epochs']} and iterations {given['iterations']} both say how long the run is; take one "
                "out (--set run.iterations=null), or where a run is resumed, whose config has iterations, set those"
            )
        return {key: value for key, value in given.items() if key != "iterations"}


class ModelsConfig(Section):
    """The pair. `demo` makes the embedded pair (and caches it); a known real model is fetched by its name."""

    target: Name = "demo"
    "path or hub name of a Hugging Face causal LM, `demo`, or a name that `rlhfspec models get` knows"
    draft: Name | None = None
    """a smaller causal LM with an equal tokenizer; with drafter head a folder with a head made for this target, with
    mtp a checkpoint with the layer where the target's has none; null with drafter suffix or none; `demo` with `demo`"""
    teacher: Name | None = None
    """path or hub name of a causal LM of the target's tokenizer, whose distribution the target learns
    (algorithm.distill_coef); with data.teacher_prompt_template it may be the target itself, as the run begins"""
    tokenizer: Name | None = None
    "path or hub name; the target's by default"
    dtype: Literal["float32", "bfloat16"] = "float32"
    trust_remote_code: bool = False
