"""RLHF on Ray with lossless tree speculative decoding: the package `rlhfspec`, whose rooms lie beside this file.

In Python: `GRPO`, `PPO`, `Distill`, `SFT`, `DPO` train, `resume` goes on, `Run` reads a run folder, `Engine` generates
(docs/how-to/python.md). They are loaded when first asked for.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .integrations.engine_in_process import Engine
    from .integrations.finished_run import Run
    from .integrations.trainer_classes import DPO, GRPO, PPO, SFT, Distill, resume

__all__ = ["DPO", "GRPO", "PPO", "SFT", "Distill", "Engine", "Run", "resume"]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from .cluster.ray_start.origin import version

        return version()
    if name not in __all__:
        raise AttributeError(f"module 'rlhfspec' has no attribute '{name}'; it has {', '.join(__all__)}")
    if name == "Engine":
        from .integrations import engine_in_process as module
    elif name == "Run":
        from .integrations import finished_run as module
    else:
        from .integrations import trainer_classes as module
    return getattr(module, name)


def __dir__() -> list[str]:
    return __all__
