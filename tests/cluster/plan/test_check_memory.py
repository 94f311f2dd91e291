"""The memory plan is arithmetic: checked on hand-made sizes."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from transformers import AutoConfig

from rlhfspec.actors.remote.assigned_device import CUDA_CONTEXT_BYTES
from rlhfspec.cluster.plan.gpu_room import require_gpu_room
from rlhfspec.cluster.plan.memory_plan import (
    MIB,
    PLAIN_PROCESS_BYTES,
    RAY_PROCESSES_BYTES,
    TORCH_PROCESS_BYTES,
    MemoryNeeds,
    MemoryPlan,
    gib,
)
from rlhfspec.cluster.plan.model_files import model_shape
from rlhfspec.cluster.plan.model_sizes import DTYPE_BYTES, ModelShape, ModelShapes
from rlhfspec.core.config import Config
from rlhfspec.core.config_io import config_from_dict
from rlhfspec.core.errors import PlacementError
from rlhfspec.engine.cache.kv_pool import KVShape
from rlhfspec.engine.model.runner import LOGITS_TOGETHER
from rlhfspec.engine.weights.loading import load_hf_config
from tests.conftest import TinyPair

TARGET = ModelShape(
    num_params=1000,
    kv=KVShape(num_layers=3, num_kv_heads=2, num_heads=4, head_size=8),
    hidden_size=32,
    vocab_size=100,
    mlp_size=64,
)
DRAFT = ModelShape(
    num_params=100,
    kv=KVShape(num_layers=1, num_kv_heads=1, num_heads=1, head_size=8),
    hidden_size=8,
    vocab_size=100,
)


def config(**sections: dict) -> Config:
    tree = {"data": {"task": "chain"}, "models": {"draft": "demo"}}
    return config_from_dict(tree | sections)


def plan(settings: Config, reward_params: int | None = None) -> MemoryPlan:
    shapes = ModelShapes(target=TARGET, draft=DRAFT, reward_params=reward_params)
    return MemoryNeeds(settings, shapes, max_total_tokens=50).plan(object_store_bytes=7)


def test_the_kv_pool_holds_prompt_response_and_tree_of_every_slot() -> None:
    settings = config(engine={"max_running_samples": 4}, speculation={"policy": "fixed", "num_nodes": 6})
    # 50 tokens, 6 nodes and the root, rounded up to views of 32; keys and values of 8; float32
    target, draft = 3 * 2 * (8 + 8) * 4, 1 * 1 * (8 + 8) * 4
    assert plan(settings).kv_pool_bytes == 4 * 64 * (target + draft)


def test_what_a_suffix_drafter_looks_up_in_is_counted() -> None:
    kept = [
        plan(config(speculation={"drafter": "suffix", "suffix_memory_mb": mb})).generation_bytes
        for mb in (1.0, 101.0)
    ]
    assert kept[1] - kept[0] == 100 * 10**6


def test_bfloat16_halves_the_kv_pool_on_a_gpu_only() -> None:
    models = {"draft": "demo", "dtype": "bfloat16"}
    assert plan(config(models=models)).kv_pool_bytes == plan(config()).kv_pool_bytes
    full = plan(config(engine={"device": "cuda"})).kv_pool_bytes
    half = plan(config(engine={"device": "cuda"}, models=models)).kv_pool_bytes
    assert full == 2 * half


def test_the_total_counts_every_actor_once() -> None:
    settings = config(cluster={"generation": {"num_actors": 3}, "reward": {"num_actors": 2}})
    made = plan(settings)
    assert made.reward_bytes == PLAIN_PROCESS_BYTES
    assert made.generation_bytes > TORCH_PROCESS_BYTES + made.kv_pool_bytes
    assert made.ray_bytes > RAY_PROCESSES_BYTES
    expected = 3 * made.generation_bytes + made.trainer_bytes + 2 * made.reward_bytes + 7 + made.ray_bytes
    assert made.total_bytes == expected


def test_a_reward_model_is_held_once_and_loaded_once_more() -> None:
    assert plan(config(), reward_params=100).reward_bytes == TORCH_PROCESS_BYTES + 2 * 100 * 4


def test_without_a_kl_penalty_no_reference_model_is_held() -> None:
    with_reference = plan(config(algorithm={"kl_coef": 0.1})).trainer_bytes
    without = plan(config(algorithm={"kl_coef": 0.0})).trainer_bytes
    assert with_reference - without == 1000 * 4


def test_a_critic_needs_the_states_of_every_response_token() -> None:
    groups = {"samples_per_prompt": 2}
    grpo, ppo = (config(algorithm={"kind": kind}, rollout=groups) for kind in ("grpo", "ppo"))
    samples = ppo.rollout.prompts_per_iteration * ppo.rollout.samples_per_prompt
    states = samples * ppo.sampling.max_new_tokens * 32 * 4
    assert plan(ppo).trainer_bytes - plan(grpo).trainer_bytes == states


def test_several_trainers_divide_the_critic_s_states() -> None:
    one, three = (
        config(trainer={"strategy": "ddp"}, cluster={"trainer": {"num_actors": number}}) for number in (1, 3)
    )
    states = one.rollout.prompts_per_iteration * one.sampling.max_new_tokens * 32 * 4
    assert plan(one).trainer_bytes - plan(three).trainer_bytes == states - -(-states // 3)


def test_sharded_trainers_divide_what_the_optimizer_needs() -> None:
    two = {"cluster": {"trainer": {"num_actors": 2}}}
    shards = plan(config(**two)).trainer_bytes
    copies = plan(config(trainer={"strategy": "ddp"}, **two)).trainer_bytes
    assert copies - shards == 1000 * 4 * (4 + 1) // 2, "weights, gradient, two moments, and the reference"


def test_each_kept_checkpoint_costs_disk() -> None:
    rare = plan(config(run={"iterations": 10})).disk_bytes
    often = plan(config(run={"iterations": 10, "checkpoint_every": 2})).disk_bytes
    assert often - rare == 5 * (1000 + 100) * 4


def test_shapes_are_read_from_a_hugging_face_config(tiny_pair: TinyPair) -> None:
    shape = model_shape(load_hf_config(str(tiny_pair.target)))
    assert shape.kv == KVShape(num_layers=2, num_kv_heads=1, num_heads=2, head_size=16)
    assert shape.hidden_size == 32
    weights = (tiny_pair.target / "model.safetensors").stat().st_size
    assert abs(shape.weight_bytes("float32") - weights) < 16384


def test_amounts_read_well() -> None:
    assert gib(1536 * MIB) == "1.50 GiB"


def test_an_instance_lays_its_weights_out_again_on_cpu_and_holds_the_logits_of_one_decode_step() -> None:
    section = {"max_running_samples": 4}
    made = plan(config(engine=section, speculation={"policy": "fixed", "num_nodes": 6}))
    # 4 samples x (6 nodes + the root) x 100 tokens x 4 bytes, three times
    weights, logits = (1000 + 100) * 4, 4 * 7 * 100 * 4 * 3
    assert made.generation_bytes == TORCH_PROCESS_BYTES + made.kv_pool_bytes + weights * 5 // 2 + logits
    on_gpu = plan(
        config(engine=section | {"device": "cuda"}, speculation={"policy": "fixed", "num_nodes": 6})
    )
    assert on_gpu.gpu_parts["weights and logits"] == weights * 2 + logits, "no layout beside the module's"
    assert on_gpu.generation_bytes == TORCH_PROCESS_BYTES + weights, "a module, until it has gone to its GPU"
    ours = ModelShapes(target=replace(TARGET, is_ours=True))
    settings = config(engine=section | {"device": "cuda"}, cluster={"generation": {"num_gpus": 1}})
    filled = MemoryNeeds(settings, ours, max_total_tokens=50).plan(object_store_bytes=0)
    assert filled.generation_bytes == TORCH_PROCESS_BYTES, "our own is filled where it lies"


def test_the_trainer_holds_weights_moments_reference_activations_and_logits() -> None:
    trainer = {"max_tokens_per_forward": 256}
    grpo = {"algorithm": {"kind": "grpo"}, "rollout": {"samples_per_prompt": 2}}
    # weights, gradient, two moments; reference; the packed copy
    copies = 4 + 1 + 1
    unit = 256 * 32 * 4
    # a layer: two norms, queries three times and keys and values of half the size twice, four times the MLP's width
    layer = (6 + 3 + 2 * 0.5 + 4 * 2) * unit
    # every row of a minibatch once: keys and values of 2 heads of 8, of each layer
    paths = 32 * 50 * 2 * 2 * 8 * 4
    # a chunk and 8 copies beside what is kept, all at this size; gradients of head and embedding
    logits, head = 256 * 100 * 4 * (2 + 8), 2 * 100 * 32 * 4
    frozen = {"refit": False}
    made = plan(config(trainer=trainer, drafter_training=frozen, **grpo))
    kept = made.trainer_bytes
    each = layer + 24 * unit + paths
    assert kept == TORCH_PROCESS_BYTES + copies * 4000 + 3 * each + 4 * unit + logits + head
    assert kept == sum(made.trainer_host_parts.values())
    assert made.trainer_parts["gradient, moments"] == 3 * made.trainer_parts["weights"] == 3 * 4000
    settings = config(trainer=trainer | {"gradient_checkpointing": True}, drafter_training=frozen, **grpo)
    thrifty = plan(settings).trainer_bytes
    assert kept - thrifty == 2 * (layer + paths) - 3 * unit, (
        "layers' inputs and what the allocator keeps stay"
    )


def test_logits_are_planned_by_the_chunk_unless_something_comes_behind_the_head_or_reads_them() -> None:
    def logits(*, vocab_size: int = 262_144, caps: bool = False, refit: bool = False) -> int:
        target = replace(TARGET, vocab_size=vocab_size, has_whole_logits=caps)
        settings = config(trainer={"max_tokens_per_forward": 4096}, drafter_training={"refit": refit})
        needs = MemoryNeeds(settings, ModelShapes(target=target, draft=DRAFT), max_total_tokens=4096)
        found = needs.plan(object_store_bytes=0).trainer_parts["logits"]
        return found - 2 * vocab_size * 32 * 4

    assert logits() == 4 * (2**26 + 2**23 + 8 * 2**18)
    assert logits(caps=True) == 4 * (4096 * 262_144 * 2 + 8 * 2**18)
    assert logits(refit=True) == 4 * (4096 * 262_144 * 3 + 8 * 2**18)
    assert logits(vocab_size=100) == 4 * (4096 * 100 * 2 + 8 * 2**18)


def test_scoring_by_the_engine_takes_a_second_model_and_the_caches_of_some_samples() -> None:
    own = plan(config(trainer={"scoring": "model"}))
    engines = plan(config(trainer={"scoring": "engine"}, engine={"max_running_samples": 3}))
    few_more = plan(config(trainer={"scoring": "engine"}, engine={"max_running_samples": 4}))
    one_sample = few_more.trainer_bytes - engines.trainer_bytes
    assert one_sample > 0
    assert engines.trainer_bytes - own.trainer_bytes == 1000 * 4 * 5 // 2 + 3 * one_sample


def test_the_optimizer_steps_float32_weights_whatever_is_published() -> None:
    models = {"draft": "demo", "dtype": "bfloat16"}
    frozen = {"refit": False}
    full = plan(config(drafter_training=frozen)).trainer_bytes
    half = plan(config(models=models, drafter_training=frozen)).trainer_bytes
    # the packed copy alone is smaller
    assert full - half == 1000 * 2


def test_a_trainer_that_refits_holds_the_draft_its_moments_and_the_targets_it_learns_from() -> None:
    refit = {"max_tokens_per_step": 64, "num_target_tokens": 10}
    sections = {"rollout": {"prompts_per_iteration": 8}, "sampling": {"max_new_tokens": 50}}
    following = plan(config(drafter_training=refit, **sections)).trainer_bytes
    frozen = plan(config(drafter_training={"refit": False}, **sections)).trainer_bytes
    # weights, gradient, two moments; the weights before the refit; the packed copy
    copies = 4 + 1 + 1
    layer, logits = 64 * 8 * 4 * 24, 64 * 100 * 4 * 4
    # logits that it sees, beside those that become their gradient
    seen = 8 * 50 * 100 * 4
    assert following - frozen == copies * 400 + layer + logits + seen + 8 * 50 * 10 * 8
    cotrain = plan(
        config(drafter_training={"mode": "cotrain"}, trainer={"max_tokens_per_forward": 64}, **sections)
    )
    alone = plan(
        config(drafter_training={"refit": False}, trainer={"max_tokens_per_forward": 64}, **sections)
    )
    softmax, seen = 64 * 100 * 4, 64 * 100 * 4
    assert cotrain.trainer_bytes - alone.trainer_bytes == copies * 400 + layer + logits + softmax + seen
    off = config(drafter_training=refit, speculation={"policy": "off"}, **sections)
    assert plan(off).trainer_bytes == frozen


def test_rollouts_cost_disk_by_their_longest_possible_response() -> None:
    rollout = {"prompts_per_iteration": 8, "samples_per_prompt": 2}
    run = {"iterations": 10, "state_every": 0}
    made = plan(config(run=run, rollout=rollout, sampling={"max_new_tokens": 50}))
    assert made.disk_bytes == 10 * 16 * 50 * 40 + (1000 + 100) * 4


def test_kept_states_and_the_one_being_written_cost_disk() -> None:
    none, some = (plan(config(run={"iterations": 10, "state_every": every})).disk_bytes for every in (0, 2))
    # weights, two moments and the reference of the target; weights and moments of the draft
    assert some - none == 3 * (4 * 1000 + 3 * 100) * 4


def test_a_trainer_with_a_gpu_plans_what_it_learns_with_on_it() -> None:
    on_gpu = plan(config(cluster={"trainer": {"num_gpus": 1}}))
    assert on_gpu.trainer_gpu_bytes == sum(on_gpu.trainer_parts.values()) > 0
    assert plan(config()).trainer_gpu_bytes == 0
    assert (
        plan(config(cluster={"trainer": {"num_gpus": 1}}, trainer={"device": "cpu"})).trainer_gpu_bytes == 0
    )


def test_the_host_holds_of_a_gpus_trainer_what_passes_through_it() -> None:
    def host(num_params: int = 1 << 30, **trainer: object) -> dict[str, int]:
        pools = {"trainer": {"num_gpus": 1, "num_actors": 2}, "generation": {"num_gpus": 1}}
        settings = config(cluster=pools, trainer=trainer, drafter_training={"refit": False})
        shapes = ModelShapes(target=replace(TARGET, num_params=num_params), teacher=TARGET)
        made = MemoryNeeds(settings, shapes, max_total_tokens=50).plan(object_store_bytes=0)
        assert made.trainer_bytes == sum(made.trainer_host_parts.values())
        return {name: size for name, size in made.trainer_host_parts.items() if size}

    through = {"process": TORCH_PROCESS_BYTES, "publication": 32 * MIB}
    assert host(strategy="fsdp2") == through, "each trainer copies its rows from the published chunks"
    assert host(strategy="ddp") == through | {"model on its way": 4 << 30}, "read whole, in float32"
    assert host(10, strategy="ddp") == through | {"model on its way": 4000}, "the teacher is larger"


@pytest.mark.parametrize(
    ("staleness", "states", "teacher", "beside"),
    [(0, 10, 0, 0), (1, 10, 0, 4000), (0, 0, 0, 4000), (0, 10, 700, 2800), (1, 10, 700, 4000)],
)
def test_the_store_holds_the_next_version_or_a_teacher_beside_the_target(
    staleness, states, teacher, beside
) -> None:
    def store(shapes: ModelShapes, states: int = 10, **rollout: int) -> int:
        run, algorithm = {"state_every": states}, {"correction": {"kind": "decoupled"}}
        settings = config(rollout=rollout, run=run, algorithm=algorithm)
        return MemoryNeeds(settings, shapes, max_total_tokens=50).object_store()

    shapes = ModelShapes(target=TARGET, teacher=replace(TARGET, num_params=teacher) if teacher else None)
    alone = store(ModelShapes(target=TARGET))
    assert store(shapes, states, max_staleness=staleness) - alone == beside


@pytest.mark.parametrize("num_gpus", [0, 1])
def test_ranks_hold_processes_and_what_they_receive_where_they_compute(num_gpus: int) -> None:
    def made(ranks: int, policy: str = "pull") -> MemoryPlan:
        generation = {"tensor_parallel": ranks, "num_gpus": num_gpus, "num_actors": 2}
        settings = config(
            cluster={"generation": generation},
            models={"target": "demo", "draft": None},
            speculation={"drafter": "none", "policy": "off"},
            reallocation={"policy": policy},
        )
        shapes = ModelShapes(target=replace(TARGET, is_ours=True))
        return MemoryNeeds(settings, shapes, max_total_tokens=50).plan(object_store_bytes=0)

    alone, two, moving = made(1), made(2), made(2, "finish_time")
    assert moving.generation_bytes - two.generation_bytes == two.kv_pool_bytes, "caches that leave are joined"
    assert made(1, "finish_time") == alone
    tokens = {0: 512, 1: 8192}[num_gpus]
    received = 2 * 4 * max(tokens * 32, LOGITS_TOGETHER) * 2 + 1000 * DTYPE_BYTES["float32"]
    on_host = two.generation_bytes - alone.generation_bytes - TORCH_PROCESS_BYTES
    if num_gpus:
        assert on_host == 0
        name = "prefill and bucket"
        assert two.gpu_parts[name] - alone.gpu_parts[name] == received
    else:
        # the other rank's embeddings
        assert on_host == 100 * 32 * 4 + 2 * received


def test_what_is_printed_adds_up_to_the_total() -> None:
    made = MemoryPlan(
        generation_bytes=2 << 30,
        kv_pool_bytes=1 << 30,
        longest_sample_bytes=1 << 20,
        trainer_bytes=3 << 30,
        reward_bytes=1 << 29,
        object_store_bytes=1 << 28,
        ray_bytes=1 << 30,
        gpu_bytes=0,
        trainer_gpu_bytes=0,
        num_generation=2,
        num_trainer=1,
        num_reward=4,
        disk_bytes=0,
        trainer_host_parts={"weights": 1 << 30, "reference": 0, "activations": 2 << 30},
    )
    assert dict(made.rows()) == {
        "generation": "2 x 2.00 GiB (of which KV pool 1.00 GiB)",
        "trainer": "1 x 3.00 GiB (weights 1.00, activations 2.00)",
        "reward": "4 x 0.50 GiB",
        "object store": "0.25 GiB",
        "ray and driver": "1.00 GiB",
        "total": "10.25 GiB",
    }


def test_a_limit_on_the_caches_bounds_the_plan_and_never_enlarges_it() -> None:
    speculation = {"policy": "fixed", "num_nodes": 6}
    # a page of 4 KiB for each layer and head, keys and values
    one = 4096 * 2 * (3 * 2 + 1 * 1)
    for limit_mb, expected in ((3 * one / 1e6, 3 * one), (1000.0, 8 * one)):
        settings = config(engine={"max_running_samples": 8, "kv_cache_mb": limit_mb}, speculation=speculation)
        made = plan(settings)
        assert abs(made.kv_pool_bytes - expected) <= 1
        assert made.longest_sample_bytes == one


def test_instances_must_fit_on_the_gpu_that_they_share() -> None:
    made = plan(config(cluster={"generation": {"num_actors": 2, "num_gpus": 0.5}}))
    assert made.gpu_bytes > made.kv_pool_bytes + 3 * 1024 * 10**6, "pool, weights, and recordings"
    each = made.gpu_bytes + CUDA_CONTEXT_BYTES
    require_gpu_room(made, num_gpus=0.5, device_bytes=2 * each)
    require_gpu_room(made, num_gpus=1, device_bytes=each)
    with pytest.raises(
        PlacementError, match=r"^an instance .*cluster\.generation\.num_gpus 0\.5.*engine\.kv_cache_mb"
    ):
        require_gpu_room(made, num_gpus=0.5, device_bytes=2 * each - 2)
    with pytest.raises(PlacementError, match=r"^an instance"):
        require_gpu_room(made, num_gpus=1, device_bytes=each - 1)


def test_a_refusal_says_which_share_or_which_limit_of_the_caches_would_do() -> None:
    made = plan(config(cluster={"generation": {"num_gpus": 0.5}}))
    others = made.gpu_bytes - made.kv_pool_bytes + CUDA_CONTEXT_BYTES
    pooled = replace(
        made,
        gpu_bytes=made.gpu_bytes - made.kv_pool_bytes + 1000 * MIB,
        kv_pool_bytes=1000 * MIB,
        least_cache_bytes=100 * MIB,
    )

    def said(num_gpus: float, device_bytes: int) -> str:
        with pytest.raises(PlacementError) as refused:
            require_gpu_room(pooled, num_gpus=num_gpus, device_bytes=device_bytes)
        found = re.search(r"; (.*) would do; ", str(refused.value))
        return found[1] if found else ""

    assert said(1, others + 200 * MIB) == f"engine.kv_cache_mb {200 * MIB // 10**6}"
    whole = f"cluster.generation.num_gpus 1 with engine.kv_cache_mb {200 * MIB // 10**6}"
    assert said(0.5, others + 200 * MIB) == whole
    assert said(1, others + 50 * MIB) == "", "not one sample"
    assert said(0.5, (others + 1000 * MIB) * 5 // 4) == "cluster.generation.num_gpus 0.8"
    both = f"cluster.generation.num_gpus 0.9 or engine.kv_cache_mb {200 * MIB // 10**6}"
    device = (others + 1000 * MIB) * 10 // 9 + 10
    assert said((others + 200 * MIB) / device + 1e-12, device) == both


def test_a_prefill_and_a_publications_buckets_are_planned_on_a_gpu() -> None:
    def made(tokens: int = 10_000, *, decodes_on_gpu: bool = True) -> MemoryPlan:
        pools = {"generation": {"num_gpus": int(decodes_on_gpu)}, "trainer": {"num_gpus": 1}}
        shapes = ModelShapes(target=replace(TARGET, num_params=1 << 30), draft=DRAFT)
        settings = config(cluster=pools, engine={"max_prefill_tokens": tokens})
        return MemoryNeeds(settings, shapes, max_total_tokens=50).plan(object_store_bytes=7)

    # a token: 24 values of each of 32, and what 2 rows of queries see of 50 positions, twice, in float32
    assert made(20_000).gpu_bytes - made().gpu_bytes == 10_000 * (24 * 32 * 4 + 2 * 50 * (4 + 4))
    buckets = made().trainer_gpu_bytes - made(decodes_on_gpu=False).trainer_gpu_bytes
    assert buckets == 2 * (256 - 32) << 20, "two rooms of a window"


def test_a_bucket_has_room_for_all_experts_of_a_layer() -> None:
    """Which are one tensor, 7 times the embedding: Mixtral 8x7B's sizes, two layers of it."""
    described = AutoConfig.for_model(
        "mixtral",
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=2,
        num_attention_heads=32,
        num_key_value_heads=8,
        num_local_experts=8,
        vocab_size=32000,
    )
    experts, shape = 8 * 2 * 14336 * 4096, model_shape(described)
    assert shape.largest_product == experts > 7 * shape.table
    models = {"target": "demo", "draft": "demo", "dtype": "bfloat16"}
    for num_gpus in (0, 1):
        pools = {name: {"num_gpus": num_gpus} for name in ("trainer", "generation")}
        needs = MemoryNeeds(
            config(cluster=pools, models=models), ModelShapes(target=shape), max_total_tokens=50
        )
        assert needs.plan(object_store_bytes=0).trainer_parts["publication"] == (2 - num_gpus) * 2 * experts


def test_an_instance_beside_a_trainer_has_no_more_than_its_share() -> None:
    # two on a GPU that would hold both: a trainer has the rest of it
    made = plan(
        config(cluster={"generation": {"num_actors": 2, "num_gpus": 0.25}, "trainer": {"num_gpus": 0.5}})
    )
    each = made.gpu_bytes + CUDA_CONTEXT_BYTES
    require_gpu_room(made, num_gpus=0.25, device_bytes=4 * each)
    with pytest.raises(PlacementError, match=r"its share \(cluster\.generation\.num_gpus 0\.25\)"):
        require_gpu_room(made, num_gpus=0.25, device_bytes=3 * each)


def test_recordings_of_whole_steps_and_of_each_models_forwards_have_a_budget_each() -> None:
    def recorded(**speculation: object) -> int:
        sections = {"cluster": {"generation": {"num_gpus": 1}}, "speculation": speculation}
        with_none = plan(config(**sections, engine={"graph_memory_mb": 0})).gpu_bytes
        return plan(config(**sections, engine={"graph_memory_mb": 100})).gpu_bytes - with_none

    assert recorded(drafter="model", policy="fixed") == 3 * 100 * 10**6
    assert recorded(drafter="head", policy="fixed") == 2 * 100 * 10**6, "a head's are not recorded"


def test_instances_on_a_cpu_take_no_memory_of_a_gpu() -> None:
    made = plan(config())
    assert made.gpu_bytes == 0
    require_gpu_room(made, num_gpus=0, device_bytes=0)


def test_a_head_that_instances_train_takes_its_optimizer_and_hidden_states() -> None:
    settings = {"drafter": "head", "policy": "fixed"}
    frozen, trained, more = (
        plan(config(speculation=settings, drafter_training=training))
        for training in ({"spot": "off"}, {"buffer_mb": 16.0}, {"buffer_mb": 32.0})
    )
    # what is held out and what is being recorded comes on top of the buffer
    assert more.generation_bytes - trained.generation_bytes == round(16e6 * 2.125)
    assert trained.generation_bytes - frozen.generation_bytes > round(16e6 * 2.125) + 8 * 4 * DRAFT.num_params
    # no trainer refits a head
    assert trained.trainer_bytes == frozen.trainer_bytes


def test_a_trainer_beside_instances_has_no_more_than_its_share() -> None:
    made = plan(config(cluster={"trainer": {"num_gpus": 0.5}}))
    each = made.trainer_gpu_bytes + CUDA_CONTEXT_BYTES
    require_gpu_room(made, num_gpus=0, device_bytes=2 * each, trainer_gpus=0.5)
    with pytest.raises(PlacementError, match=r"^a trainer needs .*cluster\.trainer\.num_gpus 0\.5"):
        require_gpu_room(made, num_gpus=0, device_bytes=2 * each - 2, trainer_gpus=0.5)
