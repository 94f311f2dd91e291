"""`rlhfspec verify`: an honest run has no difference; each kind of change is named; what cannot be verified is said."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from made_run import AHEAD, CUT, SAMPLES, change_row, make_run, run_config
from safetensors.torch import load_file, save_file

from rlhfspec.cluster.cli import main
from rlhfspec.cluster.folder.layout import RunDir
from rlhfspec.cluster.verify.choice import RecordedRun
from rlhfspec.cluster.verify.replay_sample import replay_sample
from rlhfspec.cluster.verify.verify_run import verify_run
from rlhfspec.core.checkpoint_manifest import MANIFEST, write_manifest
from rlhfspec.engine.weights.chunks import model_checksum
from rlhfspec.engine.weights.loading import load_causal_lm, load_tokenizer

ALL = ["--share", "1", "--seed", "1", "--engines", "1"]


@pytest.fixture(scope="module")
def made(tiny_pair, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("proof")
    # of its own: a test changes its weights
    shutil.copytree(tiny_pair.target.parent, folder / "pair")
    pair = type(tiny_pair)(target=folder / "pair" / "target", draft=folder / "pair" / "draft")
    return make_run(run_config(pair, folder), folder / "run")


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "run")


def test_an_untouched_run_has_no_difference(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(made), *ALL]) == 0
    said = capsys.readouterr().out
    assert f"{2 * SAMPLES} of {2 * SAMPLES} generated again" in said
    assert f"{2 * SAMPLES} rewards computed again" in said
    assert "checkpoints: 2 compared" in said and said.endswith("\n0 differences\n")


@pytest.fixture(scope="module")
def made_ahead(tiny_pair, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("ahead")
    return make_run(
        run_config(tiny_pair, folder, **AHEAD),
        folder / "run",
    )


def test_responses_of_two_weight_versions_are_generated_again(
    made_ahead: Path, tmp_path: Path, capsys
) -> None:
    rows = pq.read_table(RunDir(path=made_ahead).rollouts_file(1)).to_pylist()
    assert all(row["span_versions"] == [0, 1] and row["span_positions"] == [0, CUT] for row in rows)
    assert main(["verify", str(made_ahead), *ALL]) == 0
    said = capsys.readouterr().out
    assert f"{2 * SAMPLES} of {2 * SAMPLES} generated again" in said
    assert f"{2 * SAMPLES} rewards computed again" in said
    # the first version's tokens, the second's, and where the one ends and the other begins
    for name, token in (("first", 3), ("second", CUT + 2)):
        run = shutil.copytree(made_ahead, tmp_path / name)
        change_row(run, 1, 3, lambda row, at=token: row["response_token_ids"].__setitem__(at, 1))
        assert main(["verify", str(run), *ALL]) == 1
        assert f"token id of response token {token}" in capsys.readouterr().out
    run = shutil.copytree(made_ahead, tmp_path / "span")
    change_row(run, 1, 3, lambda row: row.update(span_positions=[0, CUT + 1]))
    assert main(["verify", str(run), *ALL]) == 1
    assert "log-probability of response token" in capsys.readouterr().out
    shutil.rmtree(RunDir(path=run).checkpoint_dir("target", 0))
    verification = verify_run(run, share=1.0)
    assert verification.num_regenerated == SAMPLES and sum(verification.unverified.values()) == SAMPLES


def test_a_response_that_should_have_ended_in_its_first_stretch_is_named(made_ahead: Path) -> None:
    rows = pq.read_table(RunDir(path=made_ahead).rollouts_file(1)).to_pylist()
    number, row = next(
        (number, row)
        for number, row in enumerate(rows)
        if not {*row["response_token_ids"][: CUT - 1]} <= {*row["response_token_ids"][CUT:]}
    )
    tokens = row["response_token_ids"]
    stop = next(token for token in tokens[: CUT - 1] if token not in tokens[CUT:])
    sample, stops = SAMPLES + number, f"sampling.stop_token_ids=[{stop}]"
    differs = f"number of token ids: expected {tokens.index(stop) + 1}, got {len(tokens)}"
    found = verify_run(made_ahead, share=1.0, overrides=[stops]).differences
    assert any(one.sample == sample and differs in str(one) for one in found)
    replayed = replay_sample(RecordedRun.open(made_ahead, [stops]), sample)
    assert differs in "".join(map(str, replayed.differences))


def test_a_stop_string_that_two_weight_versions_complete_together_ends_a_response(made_ahead: Path) -> None:
    run = RecordedRun.open(made_ahead)
    tokenizer = load_tokenizer(run.config.models.target)
    rows = pq.read_table(RunDir(path=made_ahead).rollouts_file(1)).to_pylist()
    texts = [[tokenizer.decode(row["response_token_ids"][:end]) for end in range(25)] for row in rows]
    number, stop = next(
        (number, stop)
        for number, text in enumerate(texts)
        if (stop := text[CUT + 1][len(text[CUT - 1]) :]) and stop not in text[CUT] and stop in text[CUT + 1]
    )
    found = verify_run(made_ahead, share=1.0, overrides=[f"sampling.stop={json.dumps(stop)}"]).differences
    differs = f"number of token ids: expected {CUT + 1}, got {len(rows[number]['response_token_ids'])}"
    assert any(one.sample == SAMPLES + number and differs in str(one) for one in found)


def test_a_sample_that_is_staler_than_the_run_allows_is_named(
    made_ahead: Path, tmp_path: Path, capsys
) -> None:
    run = RunDir(path=shutil.copytree(made_ahead, tmp_path / "run"))
    run.rollouts_file(1).rename(run.rollouts_file(3))
    assert main(["verify", str(run.path), *ALL]) == 1
    assert "oldest weight version: expected 2 or later, got 0" in capsys.readouterr().out


def test_a_run_that_went_on_with_caches_of_older_weights_is_refused_by_name(
    made_ahead: Path, tmp_path: Path, capsys
) -> None:
    """As versions of before wrote it, with `weight_load: keep_kv`."""
    run = RunDir(path=shutil.copytree(made_ahead, tmp_path / "run"))
    table = pq.read_table(run.rollouts_file(1))
    for kept in ([False, False], [False, True]):
        column = pa.array([kept] * SAMPLES, type=pa.list_(pa.bool_()))
        pq.write_table(table.append_column("span_keeps_caches", column), run.rollouts_file(1))
        assert main(["verify", str(run.path), *ALL]) == (1 if kept[1] else 0)
    assert "went on with caches of older weights (weight_load: keep_kv)" in capsys.readouterr().out


def test_a_share_is_drawn_by_the_seed_and_takes_several_engines(made: Path) -> None:
    verification = verify_run(made, share=0.5, seed=3, num_engines=2)
    assert verification.holds and verification.num_regenerated == SAMPLES
    # each iteration took ten seconds, and half of the samples were verified
    assert verification.generated_s == pytest.approx(10.0)
    assert verify_run(made, share=0.001, seed=3).num_regenerated == 1


def next_float(row: dict[str, Any], name: str) -> None:
    value = np.float32(row[name][4])
    row[name][4] = float(np.nextafter(value, np.float32(0)))


def other_token(row: dict[str, Any]) -> None:
    row["response_token_ids"][2] ^= 1


CHANGES: list[tuple[str, Callable[[dict[str, Any]], object], str]] = [
    ("token", other_token, "token id of response token 2: expected "),
    ("foreign token", lambda row: row["response_token_ids"].__setitem__(2, 9999), "got 9999"),
    (
        "policy",
        lambda row: next_float(row, "policy_logprobs"),
        "policy log-probability of response token 4: ",
    ),
    (
        "sampling",
        lambda row: next_float(row, "sampling_logprobs"),
        "sampling log-probability of response token 4: ",
    ),
    ("reward", lambda row: row.update(reward=row["reward"] + 0.25), "reward: expected "),
    ("finish", lambda row: row.update(finish_reason="stop"), "finish reason: expected length, got stop"),
    ("text", lambda row: row.update(response="yes"), "response text: expected "),
    ("reference", lambda row: row.update(reference="x"), "reference of the data: expected "),
    ("prompt", lambda row: row["prompt_token_ids"].__setitem__(0, 9999), "one that can be sampled"),
    ("seed", lambda row: row.update(run_seed=6), "run seed: expected 5, got 6"),
    ("copy", lambda row: row.update(sample_index=SAMPLES), "copies of the sample: expected 1"),
]


@pytest.mark.parametrize(("change", "said"), [one[1:] for one in CHANGES], ids=[one[0] for one in CHANGES])
def test_a_change_of_a_sample_is_named(run: Path, change, said: str, capsys) -> None:
    change_row(run, 1, 3, change)
    assert main(["verify", str(run), *ALL]) == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("DIFFERS")]
    assert all(line.startswith("DIFFERS rollouts/iteration_0001.parquet: sample ") for line in lines)
    assert any(said in line for line in lines), lines


def nudge(file: Path) -> None:
    """Change one weight."""
    tensors = load_file(file)
    tensors["model.norm.weight"][0] *= 1.01
    save_file(tensors, file, metadata={"format": "pt"})


def test_a_changed_weight_is_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def verified() -> str:
        assert main(["verify", str(run), *ALL]) == 1
        return capsys.readouterr().out

    checkpoint, log = RunDir(path=run).checkpoint_dir("target", 0), RunDir(path=run).weights_file
    nudge(checkpoint / "model.safetensors")
    said = verified()
    assert "DIFFERS checkpoints/target_0000/model.safetensors: content: expected SHA-256 " in said
    assert f"not verified: {SAMPLES} samples: the weights of version 1 are damaged" in said

    # whoever fixes the checksums, one after the other, is found by the next, and at last by the samples
    before = json.loads((checkpoint / MANIFEST).read_text())["parameter_checksum"]
    after = model_checksum(load_causal_lm(str(checkpoint), "float32"))
    write_manifest(checkpoint, model="target", weight_version=1, parameter_checksum=before)
    assert f"expected {before} (as published), got {after}" in verified()
    write_manifest(checkpoint, model="target", weight_version=1, parameter_checksum=after)
    assert f"expected {before} (weights.jsonl), got {after}" in verified()
    log.write_text(log.read_text().replace(before, after))
    said = verified()
    assert "checksum" not in said
    assert "rollouts/iteration_0001.parquet: sample 6: policy log-probability of response token 0" in said
    assert "iteration_0000" not in said


def test_a_changed_first_model_is_named(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = made.parent / "pair" / "target"
    kept = shutil.copytree(folder, tmp_path / "kept")
    try:
        nudge(folder / "model.safetensors")
        assert main(["verify", str(made), *ALL]) == 1
        assert "parameter checksum of weight version 0: expected " in capsys.readouterr().out
        assert main(["verify", str(made), *ALL, "--set", f"models.target={kept}"]) == 0
    finally:
        shutil.copytree(kept, folder, dirs_exist_ok=True)


def test_what_cannot_be_verified_is_counted_and_said(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(RunDir(path=run).checkpoint_dir("target", 0))
    assert main(["verify", str(run), *ALL]) == 0
    said = capsys.readouterr().out
    assert (
        f"not verified: {SAMPLES} samples: weights of version 1 are not kept; run.checkpoint_every=1" in said
    )
    assert f"{SAMPLES} of {2 * SAMPLES} generated again" in said

    config = RunDir(path=run).config_file
    config.write_text(config.read_text().replace("numerics: auto", "numerics: fast"))
    assert main(["verify", str(run), *ALL]) == 1
    said = capsys.readouterr().out
    assert "nothing was verified" in said and "engine.numerics is fast" in said

    assert main(["verify", str(run / "rollouts")]) == 2
    assert "is no run folder" in capsys.readouterr().err
    RunDir(path=run).rollouts_file(1).write_bytes(b"PAR1 nothing")
    assert main(["verify", str(run)]) == 1
    assert "DIFFERS rollouts/iteration_0001.parquet: file: " in capsys.readouterr().out


def test_the_turns_of_an_episode_are_generated_again_one_by_one(
    tiny_pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = run_config(tiny_pair, tmp_path, environment={"kind": "calculator"})
    run = make_run(config, tmp_path / "run")
    assert main(["verify", str(run), *ALL]) == 0
    said = capsys.readouterr().out
    assert f"{2 * SAMPLES} of {2 * SAMPLES} generated again" in said
    assert "rewards are not verified: an environment took part" in said
    change_row(run, 0, 1, lambda row: row["response_token_ids"].__setitem__(-2, 3))
    change_row(run, 0, 1, lambda row: next_float(row, "policy_logprobs"))
    assert main(["verify", str(run), *ALL]) == 1
    said = capsys.readouterr().out
    assert "token id of response token " in said and "policy log-probability of response token 4" in said


def test_a_group_is_scored_again_as_a_group_whatever_share_is_looked_at(tiny_pair, tmp_path: Path) -> None:
    config = run_config(
        tiny_pair,
        tmp_path,
        rollout={"samples_per_prompt": 3},
        reward={"kind": "odd_rewards:against_the_others"},
    )
    run = make_run(config, tmp_path / "run")
    verification = verify_run(run, share=0.2)
    assert verification.num_rewards and not verification.differences
    change_row(run, 0, 0, lambda row: row.update(reward=row["reward"] + 0.5))
    assert [one.what for one in verify_run(run, share=1.0).differences] == ["reward"]
