"""`rlhfspec convert`: the config of another trainer as one of ours, with an account of every key."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from rlhfspec.cluster.commands.declare import Arg

ABOUT = """Turn a config of TRL, verl or OpenRLHF into one of ours (convert trl, convert verl, convert openrlhf).

Read another trainer's config or launch script and write the config that does the same here. Every key of theirs is
named in the comments above it: taken over, or without counterpart, with what to set instead. Nothing is run.

  rlhfspec convert verl run_qwen3_8b_fsdp.sh --out run.yaml
  rlhfspec check --config run.yaml
"""

Files = Annotated[Sequence[Path], Arg("FILE", "config or launch script; later ones add to the first")]
Out = Annotated[Path, Arg("FILE", "where the config goes (the terminal)")]


def convert_trl(
    files: Files,
    *,
    kind: Annotated[
        Literal["sft", "reward", "dpo", "grpo", "rloo", "ppo"],
        Arg(help="of what, where the file does not say it"),
    ]
    | None = None,
    out: Out | None = None,
) -> int:
    """A config of TRL's.

    Read the YAML of TRL's command line (or JSON of the same keys), a script that starts one of its trainers with flags,
    Python that makes a GRPOConfig or the like, and accelerate's YAML beside them.

      rlhfspec convert trl --kind grpo grpo.yaml --out run.yaml
      rlhfspec convert trl train.sh deepspeed_zero3.yaml
    """
    return _write("trl", files, out, kind)


def convert_verl(files: Files, *, out: Out | None = None) -> int:
    """A config of verl's.

    Read a script that starts verl.trainer.main_ppo or its SFT trainer with Hydra overrides, or the YAML that
    `--cfg job --resolve` prints of such a run.

      rlhfspec convert verl run_qwen3_8b_fsdp.sh --out run.yaml
    """
    return _write("verl", files, out)


def convert_openrlhf(files: Files, *, out: Out | None = None) -> int:
    """A config of OpenRLHF's.

    Read a script that starts one of openrlhf.cli.train_ppo_ray, train_sft, train_rm and train_dpo.

      rlhfspec convert openrlhf train_ppo_ray_hybrid_engine.sh --out run.yaml
    """
    return _write("openrlhf", files, out)


def _write(trainer: str, files: Sequence[Path], out: Path | None, kind: str | None = None) -> int:
    from rlhfspec.cluster.convert.read import convert_files
    from rlhfspec.core.config_io import load_config_of
    from rlhfspec.core.files import write_whole

    converted = convert_files(trainer, files, kind)
    text = converted.text()
    if out is None:
        print(text, end="")
    else:
        write_whole(out, text)
    load_config_of(converted.kind.schema, None, given=converted.tree())  # what it refuses is said
    return 0
