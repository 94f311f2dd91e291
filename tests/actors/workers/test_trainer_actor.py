"""The trainer's duties around the learner: weights in, weights out. No Ray here: the class inside the actor."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from rlhfspec.actors.actor_messages import TrainerSpec
from rlhfspec.actors.generation.engine_host import received
from rlhfspec.actors.transport.broadcast import join_broadcast
from rlhfspec.actors.workers.trainer_actor import TrainerActor
from rlhfspec.core.config import (
    AlgorithmConfig,
    DrafterTrainingConfig,
    EngineConfig,
    SpeculationConfig,
    TrainerConfig,
)
from rlhfspec.core.errors import ConfigError, RlhfSpecError, WeightsError
from rlhfspec.core.records import (
    Completion,
    FinishReason,
    Prompt,
    Reward,
    Rollout,
    SampleKey,
    SampleRequest,
    SamplingParams,
    WeightSpan,
)
from rlhfspec.engine.build import build_engine
from rlhfspec.engine.weights.chunks import (
    load_into,
    model_checksum,
    pack_weights,
    unique_tensors,
    unpack_weights,
)
from rlhfspec.engine.weights.digests import Digest
from rlhfspec.engine.weights.loading import build_causal_lm, load_causal_lm
from tests.helpers.windows import without_a_gpu

Trainer = TrainerActor.__ray_metadata__.modified_class


def rollout(index: int, reward: float) -> Rollout:
    tokens = np.array([4 + index, 5, 6])
    logprobs = np.full(3, -2.0, dtype=np.float32)
    return Rollout(
        prompt=Prompt(prompt_id=index, token_ids=np.array([3, 4])),
        completion=Completion(
            key=SampleKey(run_seed=0, sample_index=index),
            prompt_id=index,
            group_id=0,
            epoch=0,
            token_ids=tokens,
            policy_logprobs=logprobs,
            sampling_logprobs=logprobs,
            finish_reason=FinishReason.LENGTH,
            weight_spans=(WeightSpan(weight_version=0, first_position=0),),
            instance="gen-0",
            num_decode_steps=3,
            num_accepted_tokens=0,
        ),
        response_text="",
        reward=Reward(value=reward),
    )


ROLLOUTS = [rollout(0, 0.0), rollout(1, 1.0)]


@pytest.fixture
def first(tiny_pair):
    """Manifest and chunks of the first weights, in several chunks."""
    model = load_causal_lm(str(tiny_pair.target), "float32")
    return pack_weights(model, name="target", weight_version=0, chunk_bytes=20_000)


@pytest.fixture
def first_draft(tiny_pair):
    return pack_weights(load_causal_lm(str(tiny_pair.draft), "float32"), name="draft", weight_version=4)


def new_trainer(
    dtype: str = "float32",
    engine: EngineConfig | None = None,
    drafter_training: DrafterTrainingConfig | None = None,
    **trainer,
):
    return Trainer(
        TrainerSpec(
            algorithm=AlgorithmConfig(kind="grpo"),
            trainer=TrainerConfig(**({"learning_rate": 1e-2, "num_threads": 1} | trainer)),
            drafter_training=drafter_training or DrafterTrainingConfig(learning_rate=1e-2, max_passes=4),
            dtype=dtype,
            temperature=1.0,
            seed=0,
            pad_token_id=0,
            vocab_size=30,
            engine=engine,
            max_total_tokens=40,
        )
    )


@pytest.fixture
def empty():
    return new_trainer()


@pytest.fixture
def trainer(empty, first):
    manifest, chunks = first
    empty.load_weights(manifest, *chunks)
    return empty


def published(trainer, model="target"):
    """Manifest and chunks, each taken before the next is packed over it."""
    *chunks, manifest = [
        part.copy() if isinstance(part, np.ndarray) else part for part in trainer.packed(model)
    ]
    return manifest, chunks


def model_of(manifest, chunks, dtype="float32"):
    model = build_causal_lm(manifest.hf_config_json, dtype)
    load_into(model, unpack_weights(manifest, chunks))
    return model


@pytest.mark.parametrize("wish", ["packed", "checksum"])
def test_a_trainer_without_weights_refuses_every_order(empty, wish):
    with pytest.raises(RlhfSpecError, match="before it had weights"):
        list(getattr(empty, wish)())
    with pytest.raises(RlhfSpecError, match="before it had weights"):
        empty.update(ROLLOUTS)


def test_loading_answers_with_version_and_checksum(empty, first):
    manifest, chunks = first
    assert len(chunks) > 1
    answer = empty.load_weights(manifest, *chunks)
    assert (answer.instance, answer.model) == ("trainer", "target")
    assert (answer.weight_version, answer.checksum) == (0, manifest.checksum)


def test_a_damaged_chunk_is_refused_and_nothing_is_built_from_it(empty, first):
    manifest, chunks = first
    damaged = chunks[1].copy()
    damaged[7] ^= 1
    with pytest.raises(WeightsError, match="chunk 1 of"):
        empty.load_weights(manifest, chunks[0], damaged, *chunks[2:])
    with pytest.raises(RlhfSpecError, match="before it had weights"):
        empty.checksum()


def test_packed_weights_are_those_after_the_update(trainer, first):
    report = trainer.update(ROLLOUTS)
    manifest, chunks = published(trainer)
    assert (report.weight_version, manifest.weight_version, manifest.model) == (1, 1, "target")
    assert manifest.checksum == trainer.checksum() != first[0].checksum
    assert model_checksum(model_of(manifest, chunks)) == manifest.checksum


def test_packed_weights_are_frozen_while_the_learner_goes_on(trainer):
    manifest, chunks = published(trainer)
    trainer.update(ROLLOUTS)
    assert trainer.checksum() != manifest.checksum
    assert model_checksum(model_of(manifest, chunks)) == manifest.checksum


def test_new_first_weights_start_the_learner_anew(trainer, first):
    trainer.update(ROLLOUTS)
    manifest, chunks = first
    assert trainer.load_weights(manifest, *chunks).checksum == manifest.checksum
    assert published(trainer)[0].weight_version == 0


def test_a_refit_gives_the_draft_a_new_version_and_leaves_the_policy_alone(trainer, first_draft):
    manifest, chunks = first_draft
    answer = trainer.load_draft(manifest, *chunks)
    assert (answer.model, answer.weight_version, answer.checksum) == ("draft", 4, manifest.checksum)
    trainer.update(ROLLOUTS)
    policy = trainer.checksum()
    report = trainer.refit(ROLLOUTS, 60.0)
    assert report.outcome == "taken" and report.weight_version == 5
    assert trainer.checksum() == policy
    packed, chunks = published(trainer, "draft")
    assert (packed.model, packed.weight_version) == ("draft", 5)
    assert packed.checksum != manifest.checksum
    assert model_checksum(model_of(packed, chunks)) == packed.checksum
    assert published(trainer)[0].checksum == policy, "and the policy is packed by default"


def test_the_policy_learns_the_same_with_refits_and_without(trainer, first, first_draft):
    trainer.update(ROLLOUTS)
    trainer.update(ROLLOUTS)
    frozen = trainer.checksum()
    manifest, chunks = first
    trainer.load_weights(manifest, *chunks)
    trainer.load_draft(first_draft[0], *first_draft[1])
    for _ in range(2):
        trainer.update(ROLLOUTS)
        assert trainer.refit(ROLLOUTS, 60.0).num_steps > 0
    assert trainer.checksum() == frozen


def test_the_policy_learns_the_same_beside_a_draft_model_that_learns_with_it(
    trainer, first, first_draft, tmp_path
):
    trainer.update(ROLLOUTS)
    frozen = trainer.checksum()
    together = new_trainer(drafter_training=DrafterTrainingConfig(mode="cotrain", learning_rate=1e-2))
    together.load_weights(first[0], *first[1])
    assert together.load_draft(first_draft[0], *first_draft[1]).checksum == first_draft[0].checksum
    metrics = together.update(ROLLOUTS).metrics
    assert together.checksum() == frozen and metrics["draft/cotrain_kl"] > 0.0
    report = together.refit(ROLLOUTS, 0.0)
    assert (report.outcome, report.weight_version) == ("taken", 5)
    packed, chunks = published(together, "draft")
    assert packed.weight_version == 5 and packed.checksum != first_draft[0].checksum
    assert model_checksum(model_of(packed, chunks)) == packed.checksum
    together.save_state(str(tmp_path))
    resumed = new_trainer(drafter_training=DrafterTrainingConfig(mode="cotrain", learning_rate=1e-2))
    resumed.load_weights(first[0], *first[1])
    resumed.load_draft(first_draft[0], *first_draft[1])
    resumed.load_state(str(tmp_path))
    for one in (together, resumed):
        one.update(ROLLOUTS)
    assert published(resumed, "draft")[0].checksum == published(together, "draft")[0].checksum


def test_a_bfloat16_run_publishes_bfloat16_and_learns_what_is_too_small_for_it(tiny_pair):
    first, chunks = pack_weights(
        load_causal_lm(str(tiny_pair.target), "bfloat16"), name="target", weight_version=0
    )
    trainer = new_trainer("bfloat16", learning_rate=1e-6)
    assert trainer.load_weights(first, *chunks).checksum == first.checksum
    packed = []
    for _ in range(2):
        trainer.update(ROLLOUTS)
        packed.append(published(trainer))
    for manifest, chunks in packed:
        assert {spec.dtype for spec in manifest.tensors} == {"bfloat16"}
        assert manifest.hf_config_json == first.hf_config_json
        assert model_checksum(model_of(manifest, chunks, "bfloat16")) == manifest.checksum
    assert len({first.checksum, *(manifest.checksum for manifest, _ in packed)}) == 3


def test_a_bfloat16_draft_model_is_refit_and_published_in_bfloat16(tiny_pair, first):
    draft, chunks = pack_weights(
        load_causal_lm(str(tiny_pair.draft), "bfloat16"), name="draft", weight_version=0
    )
    trainer = new_trainer("bfloat16")
    trainer.load_weights(first[0], *first[1])
    assert trainer.load_draft(draft, *chunks).checksum == draft.checksum
    assert trainer.refit(ROLLOUTS, 60.0).outcome == "taken"
    manifest, _ = published(trainer, "draft")
    assert {spec.dtype for spec in manifest.tensors} == {"bfloat16"}
    assert manifest.checksum != draft.checksum


def test_a_trainer_without_draft_model_refuses_to_refit_and_to_pack_it(trainer):
    for wish in (lambda: trainer.refit(ROLLOUTS, 1.0), lambda: published(trainer, "draft")):
        with pytest.raises(RlhfSpecError, match="before it had a draft model"):
            wish()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scored_by_the_engine_log_probabilities_are_the_samplers(tiny_pair, dtype):
    config = EngineConfig(device="cpu", max_running_samples=4)
    model = load_causal_lm(str(tiny_pair.target), dtype)
    manifest, chunks = pack_weights(model, name="target", weight_version=0)
    trainer = new_trainer(dtype, engine=config, scoring="engine")
    trainer.load_weights(manifest, *chunks)
    speculation = SpeculationConfig(policy="fixed", drafter="suffix", num_nodes=3)
    engine = build_engine(
        model, None, engine=config, speculation=speculation, max_total_tokens=40, vocab_size=30
    )
    for version in (0, 1):
        requests = [
            SampleRequest(
                key=SampleKey(run_seed=0, sample_index=4 * version + index),
                prompt=Prompt(prompt_id=0, token_ids=np.array([3, 4, 5])),
                sampling=SamplingParams(max_new_tokens=20),
            )
            for index in range(4)
        ]
        rollouts = [
            Rollout(
                prompt=request.prompt, completion=completion, response_text="", reward=Reward(value=index % 2)
            )
            for index, (request, completion) in enumerate(
                zip(requests, engine.generate(requests), strict=True)
            )
        ]
        metrics = trainer.update(rollouts).metrics
        assert metrics["mismatch/bit_equal_share"] == 1.0
        assert metrics["ratio_at_first_minibatch"] == 1.0
        manifest, chunks = published(trainer)
        engine.load_weights(manifest, unpack_weights(manifest, chunks))


def test_a_trainer_that_is_to_score_by_the_engine_must_know_which(first):
    manifest, chunks = first
    with pytest.raises(ConfigError, match=r"give TrainerSpec\.engine"):
        new_trainer(scoring="engine").load_weights(manifest, *chunks)


@pytest.mark.parametrize("bucket_bytes", [1 << 20, 100], ids=["one bucket", "rows larger than a bucket"])
@pytest.mark.parametrize("form", ["gloo", "gloo_on_device"])
def test_what_is_broadcast_is_the_version_that_is_told(trainer, monkeypatch, form, bucket_bytes):
    """On devices Gloo stands in NCCL's place; buckets come in two buffers in turn, each whole before it is sent."""
    monkeypatch.setattr(
        "rlhfspec.actors.workers.trainer_actor.ray.util.get_node_ip_address", lambda: "127.0.0.1"
    )
    trainer.update(ROLLOUTS)
    whole, _ = published(trainer)
    layout = whole.in_chunks_of(bucket_bytes)
    assert (max(layout.chunk_num_bytes) > bucket_bytes) == (bucket_bytes == 100)
    ticket = trainer.open_broadcast(("gen-0",), form)
    taken, whole_sum = {}, Digest("xxh3")

    def member():
        end = join_broadcast(
            ticket, rank=1, me="gen-0", host="127.0.0.1", timeout_s=20.0, device=torch.device("cpu")
        )
        for views in received(layout, end, whole_sum, "gen-0"):
            taken.update({name: view.clone() for name, view in views.items()})

    with ThreadPoolExecutor(1) as pool:
        receiving = pool.submit(member)
        trainer.join_broadcast(20.0)
        sent = trainer.broadcast(layout, bucket_bytes)
        receiving.result(timeout=60)
    assert sent.manifest.describes_what(whole) and sent.manifest.chunk_num_bytes == layout.chunk_num_bytes
    assert whole.checksum == trainer.checksum() and sent.pack_s > 0.0
    assert whole_sum.text() == sent.manifest.checksum
    model = trainer._learner.model
    assert taken.keys() == dict(unique_tensors(model)).keys()
    assert all(torch.equal(taken[name], tensor) for name, tensor in unique_tensors(model))
    trainer.close_broadcast()


def test_a_window_stays_until_its_members_are_in_another_group(trainer, monkeypatch):
    """torch counts one reader of it, and there may be several."""
    monkeypatch.setattr(
        "rlhfspec.actors.workers.trainer_actor.ray.util.get_node_ip_address", lambda: "127.0.0.1"
    )
    without_a_gpu(monkeypatch)

    windows = []
    for _ in range(2):
        ticket = trainer.open_broadcast(("gen-0",), "shared", 1024)
        windows.append(trainer._broadcast_host._window)
        kept = [one._window for one in (trainer._former_host, trainer._broadcast_host) if one is not None]
        assert [id(one) for one in kept] == [id(one) for one in windows]
        with ThreadPoolExecutor(1) as pool:
            how = {"rank": 1, "me": "gen-0", "host": "127.0.0.1", "timeout_s": 20.0}
            joining = pool.submit(join_broadcast, ticket, **how, device=torch.device("cpu"))
            trainer.join_broadcast(20.0)
            joining.result(timeout=60).close()
        assert trainer._former_host is None
        trainer.close_broadcast()
        # a member that has not heard yet may read it
        assert trainer._broadcast_host._window is windows[-1]
