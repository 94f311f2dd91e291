"""What each page says above its table: question and set-up."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """What a page says above its table."""

    title: str
    question: str
    how: str
    data: bool = False
    "whether it takes real prompts"
    full: bool = False
    "whether its bars are of the full size"
    picture: str = ""
    "of which benchmark's figures one is shown, where there are any"


CURVE = "learning_curve"
ABOUT = {
    "exactness": About(
        title="Exactness",
        question="Do tokens or log-probabilities depend on what was drafted, batched or moved?",
        how="Plain decoding alone is compared bit for bit with chains and trees of a draft model, look-ups, a "
        "head, mixtures (`accepted_looked_up`: by look-ups beside a drafter that computes) and "
        "the adaptive policy, whose draft model or head is exchanged half way, under other batch sizes and orders of "
        "admission, in float32 and bfloat16, and on two Ray actors; then with a teacher-forced Hugging Face forward "
        "(`reference_mismatches`, `logprob_max_abs_error`). A near tie is a place where rounding could change the "
        "sampled token.",
        data=True,
    ),
    "engine": About(
        title="Engine",
        question="How fast is decoding with fixed plans, beside other engines and beside plain decoding?",
        how="One thread each, float32. `plain_over_X` is our plain decoding over engine X on a random Llama (8 layers "
        "of 512, vocabulary 4,096, greedy, 64 prompt and 128 new tokens). `spec_over_plain` and `spec_over_hf` are "
        "the best fixed plan on the demo pair (8 layers of 256, draft 1 layer of 96, temperature 1, long-tailed "
        "lengths) over our plain decoding and over `generate`; `_weak` and `_useless` name worse drafts, `_bN` the "
        "batch. `break_even_batch` is the least batch where no plan wins, or twice the largest measured. "
        "`paged_*`: 64 long-tailed samples in the memory of 4 full slots.",
    ),
    "drafters": About(
        title="Drafters",
        question="What are drafters worth that need no smaller sibling of the target?",
        how="SmolLM2-135M-Instruct, chat prompts of GSM8K, float32, one thread. `head` is made by the benchmark with "
        "`drafter make`'s recipe from other prompts (`head_make_s`, `head_own_tokens`); `model` is the target's own "
        "first 4 layers as a model of its own; `suffix` looks up, `head_suffix` is both. `early_exit` (the first "
        "10 with the target's last norm) and `ngram` (a sample's own text alone) have been removed since. "
        "The table, one sample at a time at temperature 1, trees of 8 nodes "
        "in 3 levels, look-ups as chains of 8: `X_acceptance_length` counts the bonus token, `X_accepted_at_D` is the"
        " share right at depth D of those right before it, `X_level_share` a level's draft over a plain decode step. "
        "Speeds are rates under `goodput` over plain decoding, rate over rate: `X_bN` at batch N (`_t06`: temperature"
        " 0.6), `X_code_bN` and `X_chat_bN` on prompts of another kind than the head's, `X_repeat_over_plain` where "
        "responses repeat (eight a prompt at temperature 0.6, second time over the same prompts); `worst_over_plain` "
        "is the least of all but the last. `head_rollout_over_plain`: seconds of a rollout with long-tailed limits on"
        " two instances, plain over head. `adapted_over_frozen_acceptance`: acceptance length of the last 3 of 12 "
        "iterations that teach the model to answer in one short sentence (`reward_shift`), a head that instances train "
        "in idle time over one that stays; `adapted_step_time_over_frozen` and `spot_rollout_slowdown` are seconds of "
        "iterations and of their rollouts, adapted over frozen: below 1 is better there. `mismatches` counts samples "
        "whose tokens differ from those first seen, whatever drafted.",
        data=True,
        picture=CURVE,
    ),
    CURVE: About(
        title="Learning curve of a draft head",
        question="What does a draft head gain from more of its target's own tokens?",
        how="SmolLM2-135M-Instruct, temperature 1. Heads made by `drafter make`'s recipe from more and more of the "
        "target's responses to GSM8K prompts (`own_tokens_N`; in passes over them `learned_tokens_N`), counted on "
        "its responses to prompts that none has seen (`unseen_tokens`), under the engine's rule (shared noise): "
        "`tree_length_N` is tokens a step by the best fixed tree of 8 nodes in 4 levels (the best on these very "
        "responses), `chain_length_N` by chains of 4, `accepted_at_1_N` the share of first drafts that are right. "
        "`drafter make` takes 36,000 by itself, in 15 minutes on two cores; the benchmark goes on to 144,000, and "
        "one that is broken off keeps the points that it has.",
        data=True,
        full=True,
        picture=CURVE,
    ),
    "pipeline": About(
        title="Generation ahead of learning",
        question="What is gained by sampling the next batches while one is learned from, and what does it cost?",
        how="The demo's letter chains, every run an `rlhfspec train` in a process of its own. "
        "`async_over_sync_step`: seconds of an iteration, synchronous over one version ahead (`async2`: two; `free`: "
        "the free schedule), GRPO with one instance and one trainer of a thread each, plain decoding in 3 slots so "
        "that generating takes about as long as updating (`generate_over_update`); `X_s_beside_over_alone`: how much "
        "longer generating and updating take beside each other. `replay_mismatches`: of `replayed_samples` that "
        "`rlhfspec verify` generated again from runs ahead, both schedules, `samples_of_several_versions` among them; "
        "`unequal_runs`: of three pairs of recorded runs with one seed; `max_observed_staleness_K` of runs that allow "
        "K. `reward_gap_X`: mean reward of the last 3 of 15 iterations, synchronous less ahead, mean over seeds; "
        "`uncorrected` has no importance weights.",
    ),
    "ablation": About(
        title="Ablation of the CPU back end",
        question="What is each operation of our own worth, beside torch in its place?",
        how="Whole generations on one thread, in processor time, so 1.10 says that the back end without the operation "
        "takes 1.10 times as long. `_demo`: chains of 4 on the demo pair; `_p`: plain decoding of a random Llama (8 "
        "layers of 512, vocabulary 4,096); `_bN`: the batch. `without_chain` runs a level's forward and choice as "
        "calls of their own (in plain decoding nothing changes: that row shows the noise), `without_forward` every "
        "layer's operations, `without_attention` and `without_products` that and torch's attention or products, "
        "`without_noise` and `without_choices` torch's noise or choices, `without_everything` torch alone.",
    ),
    "update": About(
        title="Update",
        question="What does the learner cost beside a bare loop, and what do the sampler's bits cost?",
        how="Seconds of `Learner.update` (GRPO with a reference) over those of a bare loop: for the same minibatches a "
        "Hugging Face forward and backward over the same packed tokens, a forward of the reference, clipping and "
        "AdamW. `update_over_bare` and `scoring_engine_cost` are seconds over seconds, so less is better; the bar of "
        "the first is 1.15. `scoring_engine_cost` is an update with `trainer.scoring: engine` over one without. "
        "`bit_equal_share` and `first_ratio` are of the first update. One thread, processor time; the demo pair's "
        "target.",
    ),
    "publication": About(
        title="Publication and start",
        question="How long does a version of a real model take to two running instances, and a second start?",
        how="SmolLM2-135M-Instruct, 0.54 GB of float32, from the order to pack until both instances have confirmed "
        "what decodes: `publish` by the object store, `broadcast` by a Gloo group; `over_memcpy` over one warm "
        "`numpy.copyto` of the same bytes, `extra_models` the peak of all processes' memory over what was there "
        "before. `start_s_real`: from the command to the first token of a second start, less importing torch and "
        "transformers and starting Ray (`bare_start_s`).",
    ),
    "training_real": About(
        title="Training of a real model",
        question="What memory does LoRA save on SmolLM2-135M-Instruct, and does the plan cover it?",
        how="Peak resident bytes of a process that does two GRPO updates with a reference (768 tokens a forward), "
        "packing each for publication; `planned` is what `rlhfspec check` reckons. `checkpointed`: with "
        "`trainer.gradient_checkpointing`.",
        data=True,
    ),
    "training": About(
        title="Training in bfloat16",
        question="Do 200 small steps in bfloat16, over float32 weights, learn what float32 learns?",
        how="GRPO on the demo pair's target at a learning rate of 1e-6, from a bfloat16 checkpoint: computed and "
        "published in bfloat16, in float32, and in float32 with minibatches drawn by another seed, which is the noise. "
        "`bf16_change_cosine`: of how far, and whereto, all weights went, beside float32's.",
    ),
    "onpolicy": About(
        title="Sampler against trainer",
        question="Are the trainer's log-probabilities those of the sampler, bit for bit?",
        how="Two instances draft trees and move samples all the time (temperature 0.9, top-p 0.95, float32 and "
        "bfloat16); PPO and GRPO learn from version 0 and from version 1, with `trainer.scoring: engine`. "
        "`bit_equal_share`: response tokens whose log-probability at the update's start is the sampler's bit for bit. "
        "`first_ratio_error`: of the ratio furthest from 1 at a first minibatch. `reference_kl`: the largest at "
        "version 0. The demo pair.",
    ),
    "onpolicy_real": About(
        title="Sampler against trainer, a real model",
        question="Are the trainer's log-probabilities those of the sampler on SmolLM2-135M-Instruct?",
        how="As on the page of `bench onpolicy`, with answers of 96 tokens to chat prompts of GSM8K; the draft is the "
        "model's own first four layers, trained for nothing, so few drafts are accepted.",
        data=True,
    ),
    "exactness_real": About(
        title="Exactness of a real model",
        question="Do SmolLM2-135M-Instruct's tokens depend on drafts or moves?",
        how="Plain decoding alone, compared bit for bit with two instances that draft trees while samples move all the "
        "time (temperature 1, and 0.7 with top-p 0.9; chat prompts of the one-sentence task, 128 tokens each), the "
        "first 48 of them once more by each other drafter (`X_accepted_tokens`: of what it drafted); every fourth "
        "sample of plain decoding is compared with a teacher-forced Hugging Face forward.",
    ),
    "update_real": About(
        title="Update of a real model",
        question="The same on SmolLM2-135M-Instruct: what do the learner and the sampler's bits cost?",
        how="As on the page of `bench update`, with answers of up to 32 tokens to the one-sentence task's questions.",
    ),
    "drafting": About(
        title="Adaptive drafting",
        question="How good is the adaptive policy beside every fixed plan, and beside an oracle?",
        how="Constant batches and whole rollouts of 64 long-tailed samples; the demo pair, and `_large` with a target "
        "twice as deep. The best fixed plan is found afterwards. The oracle knows each drafter state's best number of "
        "nodes; the policy gives each sample its own number and may exceed it.",
        data=True,
    ),
    "migration": About(
        title="Migration",
        question="What does moving a running sample cost, and does it change anything?",
        how="Two instances on two cores. Random moves are forced on whole rollouts and their tokens compared with the "
        "run without; then single moves of contexts of some 480 tokens are timed (a target of 29M parameters). "
        "Downtime is counted in decode steps of the destination; `_plain` is without speculation. `gate_*`: whether "
        "shipping or prefilling again was chosen rightly, over 24 cells of contexts, pairs and bandwidths.",
    ),
    "rollout": About(
        title="Reallocation in rollouts",
        question="What do moves win over static placement, over pull, and over the paper's rule?",
        how="A pair with 16 layers, 256 samples of up to 900 tokens, lengths that no policy knows. `skewed`: the "
        "longest half on one instance; `resident`: every sample has a slot. While requests are queued, freed slots "
        "refill at once and moves rarely trigger; on these CPUs an instance with fewer than some 16 samples is no "
        "faster, so little can be won. Single rollouts vary by a tenth.",
    ),
    "profile": About(
        title="Profile",
        question="How good are the fitted cost and acceptance models on data they have not seen?",
        how="Costs are fitted on timed decode steps, acceptance on recorded drafts; errors are on held-out data.",
        data=True,
    ),
    "rlhf": About(
        title="RLHF runs",
        question="What does each algorithm's shipped config reach on the demo's task, and where does a step's time go?",
        how="One run an algorithm of `rlhfspec train` (PPO by `configs/demo.yaml`, others by `configs/algorithms/`); "
        "`reward_gain_*`: mean reward of the last fifth of the iterations less that of the first. "
        "`gold_gain_reward_model`: the least of `bench chain`. `scoring_wait_share`: from the last sample's end to its "
        "reward, of a step, with a reward model of the target's size in two actors on the same two cores; the bar is "
        "0.05. `step_over_plain_static`: seconds of a whole step with plain decoding and no moves over ours, "
        "the first iterations of the demo, whose answers are some 45 tokens long: the draft's refit and publication "
        "cost more there than drafting saves; `amdahl_bound`: what infinitely fast generation could still give. "
        "`trl_max_abs_difference`: of losses and "
        "gradients from those of TRL 1.16's trainers, over the cases in `benchmarks/oracles`.",
    ),
    "cluster_simulation": About(
        title="Cluster simulator",
        question="How far is `rlhfspec simulate cluster` from what papers publish and from runs of this project, and "
        "how long does it take?",
        how="TLT's table of batch sizes, RLHFSpec's two figures, NeMo-RL's 8B table and its projections for 235B "
        "(`benchmarks/published/`). Nothing is fitted to the figure that it is compared with; what a paper does not "
        "say is set beforehand: a middle, which gives the simulated value, and a range. "
        "`simulator_X_error`: largest deviation at the middle of what is unknown; `_known_error`: of figures whose "
        "inputs are all published, these being steps that follow from a published rollout; `_outside`: "
        "how far a published figure lies outside the range, as a share of it. `simulate_1024_s`: processor seconds of "
        "one rollout of 100,000 samples on 1,024 instances with `finish_time`; the bar is 60. "
        "Runs of this machine, with the code of their commit (`benchmarks/simulated_runs/`; docs/simulator.md says "
        "what the simulator is given): `one_core_each`, the runs of `bench pipeline`; `demo`, `wide` (29M parameters), "
        "`smollm2` with two instances; in turns and one version ahead (`_staleness1`). `_rollout_deviation` and "
        "`_step_deviation`: simulated over measured, less one, of medians over iterations; `_others_busy`: cores that "
        "neither instances nor trainer kept busy meanwhile; `PAIR_core_slowdown`: with both cores busy. "
        "`simulator_step_error`: the larger of `one_core_each`, bar 0.10; `simulator_own_median_error` and "
        "`_worst_error`: of all rollouts and steps with two instances, bars 0.10 and 0.20.",
    ),
    "chain": About(
        title="From demonstrations to PPO",
        question="Do `sft`, `train-reward` and `train` from files raise a gold score that PPO never sees?",
        how="A preference task in chat format with a known gold rule, two cores, a model that has learned nothing: "
        "6,000 demonstrations that slip, 4,000 pairs ordered by the rule, 20 iterations of PPO. `gold_*`: mean of the "
        "gold rule over 512 samples at temperature 1 on held-out questions; `reward_model_accuracy`: on 500 held-out "
        "pairs. The bars: accuracy 0.9, gain 0.15 on each seed, 900 seconds.",
    ),
    "chain_real": About(
        title="From demonstrations to PPO, a real model",
        question="Does the same chain run on SmolLM2-135M-Instruct with LoRA?",
        how="A few steps of each command on the one-sentence task's questions. It says that the chain runs and how "
        "long its commands take, start included; nothing of quality.",
    ),
    "episodes": About(
        title="Episodes of several turns",
        question="Do an episode's tokens depend on drafts, moves or kept caches?",
        how="The calculator task by a model that has learned nothing: over two instances that draft and are made to "
        "move samples at any time, compared bit for bit with one instance without speculation or kept caches. "
        "`prefill_tokens`: committed tokens computed again; `_nothing_kept`: of the instance that keeps no cache "
        "between turns.",
    ),
    "faults": About(
        title="Faults",
        question="Does training under faults of every kind end as it would have without them?",
        how="`rlhfspec train` of the demo (two instances, scheduler, reward, trainer) in a process of its own; from "
        "outside a fault every few seconds, in an order drawn by the seed, each after the recovery from the last. "
        "`KIND_POOL` counts them. `kill`: SIGKILL. `freeze`: SIGSTOP for 4 s, which the run sits out. `long_freeze`: "
        "15 s beyond the limit of silence (10 s of instances, 40 s of all others), borne only where the process was "
        "found and replaced. `cut`, `long_cut`: all that arrives on the TCP connections of two processes is dropped "
        "for 4 and 25 s by filters on their sockets; `reset`: the connections are shut down. `fill`: another driver "
        "holds the whole object store for 10 s with objects in use, which Ray cannot spill, so the run's own go to "
        "disk. A full disk is not among them: `tests/cluster/test_train_ending.py` has it. Samples, tokens, "
        "log-probabilities, rewards, metrics that are not of the clock, and the final checksum are compared with an "
        "undisturbed run's. `recovery_s`: until every pool has as many actors at work as before. `resumes`: drivers "
        "killed at a random moment and resumed, PPO and GRPO, with and without LoRA, compared likewise. "
        "`verify_over_generate`: `rlhfspec verify --share 1.0` of an undisturbed run, its start included, over "
        "the seconds of its generation on two instances; `verify_command_over_generate`: the whole command, with "
        "imports and checksums.",
        full=True,
    ),
    "soak": About(
        title="Soak",
        question="Does an hour of training leave memory, files, processes and the object store as they were?",
        how="The demo, looked at every 5 s from outside, then ended by SIGTERM. `X_late_over_early`: mean over the "
        "last ten minutes over that of minutes 10 to 20; memory is what a process has alone (private and dirty), of "
        "each pool, the driver, and all processes with Ray's own; the bars are 1.05 for memory and the object store, "
        "1.02 for open files, 1 for processes. `spilled_peak_mib`: objects that Ray wrote to disk. What is left is "
        "counted after the end. `X_kib_per_iteration`: growth of the run folder in all and by entry, beside "
        "checkpoints and states, of which a fixed number is kept.",
        full=True,
    ),
    "device_ops": About(
        title="Device operations",
        question="What does a decode step ask of a GPU?",
        how="Counted without one: engine, weights and caches on tensors that have shapes and no numbers, 8 samples, a "
        "random Llama with 2 layers, a draft model with 1. One call of an operator that computes or moves something is "
        "one launch, attention and each kernel of ours (`engine/cuda`) too. `launches_a_layer_X`: of the target's "
        "forward, plain and verifying 8 nodes; `_library`: with `engine.kernels: off`. `launches_outside_X`: a whole "
        "step, copies included, where its recordings (`engine/recorded_step.py`) count as one launch each; "
        "`launches_inside_X`: what these replay; `launches_unrecorded_X`: a step that runs as it comes. "
        "`blocking_copies_X` hold the host before the wait that ends a step. With a GPU `step_ms_X` stand beside them: "
        "the demo pair in bfloat16.",
    ),
}
