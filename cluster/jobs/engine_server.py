"""Serves a model by a pool of instances until it is told to stop: OpenAI's API, and vLLM's for trainers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from ...core.config_io import section_keys
from ...core.errors import ConfigError
from ...engine.admission import MB
from ...learning.data.prompts import PromptDataset
from ..observe.console import Reporter
from ..plan.inputs import Inputs, require_cores
from ..plan.memory_plan import TORCH_PROCESS_BYTES, MemoryNeeds
from ..plan.model_check import check_models
from ..plan.names import resolve_models
from ..plan.run_check import plan_untrained, require_room_for
from ..plan.run_plan import RunPlan
from ..plan.topology import plan_topology
from ..ray_start.forked_workers import is_local
from .evaluate_models import untrained_config
from .ray_serve import ServerAddress, serve_application

USUAL_CONTEXT_TOKENS = 2048
"Of prompt and response, where a model's context holds more."
USUAL_CACHE_MB, LEAST_FULL_LENGTH = 640.0, 4
"Of keys and values of an instance on a CPU, and responses of full length for which there is room in any case."


def plan_server(
    tree: dict[str, Any],
    report: Reporter,
    *,
    model: str,
    context_tokens: int | None = None,
    overrides: Sequence[str] = (),
    by: str = "the server",
) -> RunPlan:
    """The plan of a pool that takes any prompt.

    Args:
        tree: a run's config as nested mappings, or an empty one; of it come draft model, engine and cluster.
        report: is told of models that are fetched.
        model: to be served, in the place of the run's target.
        context_tokens: of prompt and response together.
        overrides: `section.key=value`, which go before all else.
        by: who asks, of `core.idle.READ`.

    Raises InputError for a model that cannot be served, ConfigError for more context than it has, an idle override.
    """
    made = {name: section_keys("the server", name, section) for name, section in tree.items()}
    # no prompts, no rewards: requests bring the one, nobody asks for the other
    made |= {"data": {"task": "chain"}, "reward": {}, "environment": {}, "evaluation": {}}
    made["cluster"] = {"dashboard": False} | made.get("cluster", {})
    config = untrained_config(made, model=model, overrides=overrides, by=by)
    config = resolve_models(config, report)
    require_cores(config.cluster, engine=config.engine.num_threads)
    frozen = config.trainer.model_copy(update={"lora": None})
    models = check_models(config.model_copy(update={"trainer": frozen}))
    has, ranks = models.context_tokens, config.cluster.generation.tensor_parallel
    usual = min(USUAL_CONTEXT_TOKENS, has or USUAL_CONTEXT_TOKENS)
    most = usual if context_tokens is None else context_tokens
    if has is not None and most > has:
        raise ConfigError(f"--context {most} is more than the models' context of {has} tokens; lower it")
    models.require_served(config.speculation, max_total_tokens=most, ranks=ranks)
    # as where environments give rewards: no actor scores
    config = config.model_copy(update={"reward": config.reward.model_copy(update={"kind": "environment"})})
    needs = MemoryNeeds(config, models.shapes(None), max_total_tokens=most)
    if config.engine.kv_cache_mb is None and not config.decodes_on_gpu:
        # memory that comes as responses grow lies on pages, and a sample takes more of it
        full_mb = LEAST_FULL_LENGTH * needs.plan(object_store_bytes=0).least_cache_bytes / MB
        paged = config.engine.model_copy(update={"kv_cache_mb": math.ceil(max(USUAL_CACHE_MB, full_mb))})
        config = config.model_copy(update={"engine": paged})
        needs = MemoryNeeds(config, models.shapes(None), max_total_tokens=most)
    return RunPlan(
        config=config,
        topology=plan_topology(config),
        models=models,
        inputs=Inputs(tokenizer=models.tokenizer, dataset=PromptDataset(), max_total_tokens=most),
        # the replica too
        memory=plan_untrained(needs, config.cluster, beside=TORCH_PROCESS_BYTES),
        takes_any_stop=True,
    )


def serve_engine(
    plan: RunPlan,
    place: ServerAddress,
    limits: Any,
    *,
    served_name: str,
    drain_s: float,
    note: Callable[[str], None],
    is_over: Callable[[], bool] = lambda: False,
) -> None:
    """Deploy, say so, and wait, see `serve_application`; then open requests have `drain_s` to end.

    `limits`: `cluster.serving.engine_deployment.ServerLimits`.
    Raises PlacementError: no room in memory, the port is taken, no place, the pool does not come up.
    """
    # imported here: Ray Serve takes a second
    from ..serving.engine_deployment import build

    cluster = plan.config.cluster.model_copy(update={"address": place.address or plan.config.cluster.address})
    require_room_for("the server", plan.memory, cluster, advice="engine.kv_cache_mb, --context")
    if is_local(cluster.address):
        place.require_free()

    serve_application(
        lambda session: build(plan, session, limits, served_name),
        place,
        cluster=cluster,
        store_bytes=plan.memory.object_store_bytes,
        ready=lambda url: f"engine server ready: {url}/v1 serves {served_name}",
        advice="expected a pool of instances; look at the log of its replica, or lower cluster.generation.num_actors",
        note=note,
        before_end=lambda handle: handle.drain.remote(drain_s).result(timeout_s=drain_s + 30.0),
        is_over=is_over,
    )
