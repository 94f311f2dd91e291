"""The panels of the Grafana dashboard: titles, units, queries over `core.exported_metrics`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Form = Literal["lines", "stacked", "number"]


@dataclass(frozen=True, slots=True)
class Target:
    """One query of a panel (`cluster.monitoring.queries`) and what its lines are called."""

    query: str
    legend: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One picture."""

    title: str
    targets: tuple[Target, ...]
    unit: str = "short"
    "as Grafana calls it"
    form: Form = "lines"
    help: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under one heading."""

    title: str
    panels: tuple[Panel, ...]


def _panel(
    title: str, *targets: tuple[str, str], unit: str = "short", form: Form = "lines", text: str = ""
) -> Panel:
    made = tuple(Target(query, legend) for query, legend in targets)
    return Panel(title=title, targets=made, unit=unit, form=form, help=text)


def _figures(title: str, *figures: tuple[str, str], unit: str = "short", form: Form = "lines") -> Panel:
    """Figures of the last iteration."""
    made = tuple((f"max by (run) ({{{figure}}})", f"{legend} {{{{run}}}}") for figure, legend in figures)
    return _panel(title, *made, unit=unit, form=form, text="Of the last iteration.")


def _or_zero(query: str) -> str:
    """A counter that nothing has been added to has no series yet: draw 0."""
    return f"{query} or 0 * sum by (run) ({{run_up}})"


def _by_actor(query: str) -> tuple[str, str]:
    return query, "{{actor}} {{run}}"


ROWS = (
    Row(
        "Progress",
        (
            _panel("Runs that are up", ("sum by (run) ({run_up})", "{{run}}"), form="number"),
            _panel(
                "Iteration",
                ("max by (run) ({iteration})", "{{run}}"),
                ("max by (run) ({iterations_planned})", "planned {{run}}"),
                form="number",
            ),
            _panel(
                "Samples of the phase",
                ("max by (run) ({samples_done})", "done {{run}}"),
                ("max by (run) ({samples_planned})", "planned {{run}}"),
            ),
            _panel(
                "Seconds without progress",
                (
                    "(time() - max by (run) ({progress_timestamp_seconds})) and on (run) max by (run) ({run_up}) == 1",
                    "{{run}}",
                ),
                unit="s",
                text="Since iteration, phase, samples or tokens last moved on.",
            ),
            _panel(
                "Where the time goes",
                ("sum by (run, phase) (rate({phase_seconds}[rate]))", "{{phase}} {{run}}"),
                unit="percentunit",
                form="stacked",
            ),
            _figures(
                "Seconds of an iteration's stages",
                ("time/generate_s", "generate"),
                ("time/score_s", "score"),
                ("time/update_s", "update"),
                ("time/publish_s", "publish"),
                ("time/refit_s", "refit"),
                ("time/evaluate_s", "evaluate"),
                unit="s",
                form="stacked",
            ),
        ),
    ),
    Row(
        "Generation",
        (
            _panel(
                "Response tokens a second",
                _by_actor("sum by (run, actor) (rate({emitted_tokens}[rate]))"),
                unit="tokens/s",
                form="stacked",
            ),
            _panel(
                "Tokens a sample and decode step (acceptance length)",
                _by_actor(
                    "sum by (run, actor) (rate({emitted_tokens}[rate])) / sum by (run, actor) "
                    "(rate({sample_steps}[rate]) > 0)"
                ),
            ),
            _panel(
                "Share of draft tokens that are accepted",
                _by_actor(
                    "sum by (run, actor) (rate({accepted_tokens}[rate])) / sum by (run, actor) "
                    "(rate({draft_tokens}[rate]) > 0)"
                ),
                unit="percentunit",
            ),
            _panel(
                "Share of accepted tokens that were looked up",
                _by_actor(
                    "sum by (run, actor) (rate({accepted_looked_up_tokens}[rate])) / sum by (run, actor) "
                    "(rate({accepted_tokens}[rate]) > 0)"
                ),
                unit="percentunit",
                text="Beside a drafter that computes (speculation.look_up).",
            ),
            _panel(
                "Samples running and waiting",
                ("sum by (run) ({instance_running_samples})", "running {{run}}"),
                ("sum by (run) ({instance_waiting_samples})", "waiting {{run}}"),
            ),
            _panel("Tokens in the caches", _by_actor("max by (run, actor) ({instance_context_tokens})")),
            _panel(
                "Samples that waited for room in the caches",
                _by_actor(_or_zero("sum by (run, actor) (increase({preemptions}[rate]))")),
            ),
            _panel(
                "Drafter alarm",
                _by_actor("max by (run, actor) ({instance_drafter_alarm})"),
                text="1: drafting was suspended, because it was accepted too seldom.",
            ),
            _panel(
                "Training the draft head in idle time",
                _by_actor("sum by (run, actor) (rate({spot_seconds}[rate]))"),
                unit="percentunit",
                text="Share of time that an instance's thread computed on it.",
            ),
            _panel(
                "What the draft head learned from",
                ("sum by (run) (rate({spot_tokens}[rate]))", "tokens/s {{run}}"),
                ("sum by (run) (rate({spot_steps}[rate]))", "steps/s {{run}}"),
            ),
        ),
    ),
    Row(
        "Waiting",
        (
            _panel("Longest open wait", ("max by (run) ({wait_seconds})", "{{run}}"), unit="s"),
            _panel(
                "Time spent waiting",
                ("sum by (run, waited_for) (rate({waited_seconds}[rate]))", "for {{waited_for}} {{run}}"),
                unit="percentunit",
            ),
            _panel(
                "Answers that took unusually long",
                (
                    _or_zero("sum by (run, waited_for) (increase({late_answers}[rate]))"),
                    "{{waited_for}} {{run}}",
                ),
            ),
            _panel(
                "Seconds since the scheduler answered",
                ("max by (run) ({scheduler_silent_seconds})", "{{run}}"),
                unit="s",
            ),
        ),
    ),
    Row(
        "Moves of samples",
        (
            _panel(
                "Moves",
                ("sum by (run, outcome) (increase({moves}[rate]))", "{{outcome}} {{run}}"),
                form="stacked",
            ),
            _panel(
                "Bytes a second",
                ("sum by (run, stage) (rate({moved_bytes}[rate]))", "{{stage}} {{run}}"),
                unit="Bps",
            ),
            _panel(
                "Time that a moved sample stands still",
                *(
                    (
                        f"histogram_quantile({quantile}, sum by (run, le) "
                        "(rate({move_downtime_seconds_bucket}[rate])))",
                        f"{name} {{{{run}}}}",
                    )
                    for quantile, name in ((0.5, "median"), (0.99, "99th percentile"))
                ),
                unit="s",
            ),
            _panel(
                "Decode threads' time for moves",
                _by_actor("sum by (run, actor) (rate({move_seconds}[rate]))"),
                unit="percentunit",
            ),
        ),
    ),
    Row(
        "Learning",
        (
            _figures(
                "Reward",
                ("reward/mean", "mean"),
                ("reward/p10", "10th percentile"),
                ("reward/p90", "90th percentile"),
            ),
            _figures("Samples without a reward", ("reward/num_skipped", "skipped")),
            _figures(
                "Response length",
                ("rollout/response_tokens_mean", "mean"),
                ("rollout/response_tokens_p90", "90th percentile"),
            ),
            _figures("KL", ("learner/approx_kl", "old to new"), ("learner/reference_kl", "to the reference")),
            _figures("KL of sampler to trainer", ("mismatch/kl", "a token")),
            _figures(
                "Versions that samples are behind",
                ("mismatch/lag_mean", "mean of their tokens"),
                ("mismatch/lag_max", "the oldest token"),
            ),
            _figures(
                "Tokens after correction",
                ("mismatch/effective_share", "worth"),
                ("mismatch/clipped_share", "cut"),
                ("mismatch/masked_share", "masked"),
            ),
            _figures("Entropy", ("learner/entropy", "entropy")),
            _figures("Gradient norm", ("learner/grad_norm", "before it is clipped")),
            _figures("Loss", ("learner/policy_loss", "policy")),
        ),
    ),
    Row(
        "Weights and faults",
        (
            _panel(
                "Version of the weights",
                ("max by (run) ({policy_weight_version})", "published {{run}}"),
                _by_actor("max by (run, actor) ({instance_weight_version})"),
            ),
            _panel(
                "Versions that instances are behind",
                (
                    "max by (run) ({policy_weight_version}) - on (run) min by (run) ({instance_weight_version} and on "
                    "(run, actor) {instance_serving} > 0)",
                    "{{run}}",
                ),
            ),
            _panel("Instances that serve", ("sum by (run) ({instance_serving})", "{{run}}")),
            _panel(
                "Actors lost and replaced",
                (_or_zero("sum by (run, pool) ({lost_actors})"), "lost {{pool}} {{run}}"),
                (_or_zero("sum by (run, pool) ({replaced_actors})"), "replaced {{pool}} {{run}}"),
            ),
            _panel("Integrity alarms", (_or_zero("sum by (run) ({integrity_alarms})"), "{{run}}")),
            _panel(
                "Log lines and pages that could not be written",
                (_or_zero("sum by (run, file) ({dropped_writes})"), "{{file}} {{run}}"),
            ),
        ),
    ),
    Row(
        "Memory",
        (
            _panel(
                "Memory of each process",
                _by_actor("max by (run, actor) ({process_resident_bytes} - {process_shared_bytes})"),
                unit="bytes",
                text="Without what it shares with others.",
            ),
            _panel(
                "GPU memory of each process",
                _by_actor("max by (run, actor) ({process_gpu_bytes})"),
                unit="bytes",
            ),
            _panel(
                "Object stores",
                ("sum by (Location) ({ray_object_store_memory})", "{{Location}}"),
                unit="bytes",
            ),
            _panel(
                "Memory of the nodes",
                ("sum ({ray_node_mem_used})", "used"),
                ("sum ({ray_node_mem_total})", "total"),
                unit="bytes",
            ),
        ),
    ),
)
