"""`rlhfspec gpu-selftest` on the CPU: its parts pass on a sound engine and fail on a broken one."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

import rlhfspec.engine.decoding.answers
from rlhfspec.benchmarks.selftest.command import (
    PartFailed,
    Subject,
    bandwidth,
    device_tests,
    distribution,
    logprobs,
    pooled,
    run_parts,
    speed,
    write_report,
)
from rlhfspec.cluster.cli import main
from rlhfspec.engine.weights.causal_lm import DTYPES
from rlhfspec.engine.weights.loading import freeze
from tests.helpers.tiny_llama import tiny_llama

CPU = torch.device("cpu")


def target(dtype: str) -> PreTrainedModel:
    return freeze(tiny_llama(1, initializer_range=0.1).to(DTYPES[dtype]))


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def subject() -> Subject:
    """Drafts by the target itself, so that some are accepted."""
    return Subject(
        target=target, draft=target, prompts=[np.array([3, 5]), np.array([7])], vocab_size=19, device=CPU
    )


def test_every_part_passes_and_the_report_says_so(subject: Subject, tmp_path: Path) -> None:
    said: list[str] = []
    results = run_parts(subject, dtype="float32", quick=True, say=said.append)
    assert [one.state for one in results] == ["passed"] * 4, [one.message for one in results]
    assert said == [one.name for one in results]
    report = write_report(results, tmp_path, device=CPU, what={"model": "tiny"})
    figures = json.loads((tmp_path / "gpu_selftest.json").read_text())["figures"]
    # on one thread numerics are invariant
    assert figures["equal_token_share_tree"] == 1.0
    assert all(np.isfinite(list(figures.values())))
    assert f"| `plain_over_hf_b8` | {figures['plain_over_hf_b8']:.4g} |" in report.read_text()


def test_wrong_log_probabilities_fail(monkeypatch: pytest.MonkeyPatch, subject: Subject) -> None:
    right = rlhfspec.engine.decoding.answers.emitted_logprobs

    def wrong(*args: object) -> tuple[torch.Tensor, torch.Tensor]:
        policy, sampling = right(*args)  # type: ignore[arg-type]
        return policy - 0.01, sampling

    monkeypatch.setattr(rlhfspec.engine.decoding.answers, "emitted_logprobs", wrong)
    with pytest.raises(
        PartFailed, match=r"plan plain: expected Hugging Face's within .* difference of 0\.01"
    ):
        logprobs(subject)


def test_a_wrong_distribution_fails(monkeypatch: pytest.MonkeyPatch, subject: Subject) -> None:
    right = rlhfspec.engine.decoding.answers.choose

    def colder(logits: torch.Tensor, *args: object) -> torch.Tensor:
        return right(logits * 1.5, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(rlhfspec.engine.decoding.answers, "choose", colder)
    with pytest.raises(PartFailed, match=r"expected the model's distribution, got .* p = "):
        distribution(subject, num_samples=1024)


def test_no_sample_is_left_out_of_the_bins() -> None:
    """A token that is all but impossible and comes often shows."""
    seen, expected = np.array([40.0, 30.0, 10.0]), np.array([60.0, 30.0, 9.5])
    counts, wanted = pooled(seen, expected, 100)
    assert counts.tolist() == [40.0, 30.0, 30.0] and wanted.tolist() == [60.0, 30.0, 10.0]
    counts, wanted = pooled(seen, expected - 3.0, 100)
    assert counts.tolist() == [40.0, 30.0, 10.0, 20.0] and wanted.tolist() == [57.0, 27.0, 6.5, 9.5]


def test_a_part_that_raises_does_not_keep_the_others_from_running(
    monkeypatch: pytest.MonkeyPatch, subject: Subject, tmp_path: Path
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access")

    monkeypatch.setattr("rlhfspec.benchmarks.selftest.command.distribution", broken)
    results = run_parts(subject, dtype="float32", quick=True, say=lambda _: None)
    assert [one.state for one in results] == ["passed", "failed", "passed", "passed"]
    report = write_report(results, tmp_path, device=CPU, what={}).read_text()
    assert "illegal memory access" in report


def test_bfloat16_is_timed_too(subject: Subject) -> None:
    figures = speed(subject, "bfloat16", batch_size=2, new_tokens=8, rounds=1)
    assert figures["plain_tokens_per_s_b2"] > 0 and figures["tree_over_hf_b2"] > 0
    assert bandwidth(subject, "bfloat16", new_tokens=8, copy_bytes=1 << 22)["bandwidth_share_b1"] > 0


def test_device_tests_are_run_and_their_failure_is_told(tmp_path: Path) -> None:
    assert device_tests(root=tmp_path).state == "skipped"
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_it.py").write_text(
        "import pytest\n@pytest.mark.gpu\ndef test_it():\n    assert 1 == 2\ndef test_other(): pass\n"
    )
    failed = device_tests(root=tmp_path)
    assert failed.state == "failed" and "assert 1 == 2" in failed.message
    (tmp_path / "tests" / "test_it.py").write_text("import pytest\n@pytest.mark.gpu\ndef test_it(): pass\n")
    assert device_tests(root=tmp_path).state == "passed"
    # pytest alone takes longer to start
    late = device_tests(root=tmp_path, timeout_s=0.01)
    assert (late.state, late.message) == ("failed", "no end within 0.01 s")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a torch without a CUDA device")
def test_without_a_device_the_command_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["gpu-selftest", "--out", str(tmp_path / "report")]) == 2
    assert not (tmp_path / "report").exists()
    assert "gpu-selftest needs a CUDA device, and torch" in capsys.readouterr().err
