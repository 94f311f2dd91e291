"""`rlhfspec compare`: the last batch comes again plainly and statically, bit for bit, or it is said why not."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from made_run import AHEAD, SAMPLES, change_row, make_run, run_config

from rlhfspec.cluster.cli import main
from rlhfspec.cluster.folder.layout import RunDir
from rlhfspec.cluster.observe.run_record import Comparison

HERE = {"cluster": {"generation": {"num_actors": 2, "num_cpus": 0.5}, "reward": {"num_cpus": 0.2}}}


@pytest.mark.ray
@pytest.mark.slow
def test_the_last_batch_comes_again_and_a_changed_token_is_an_error(
    local_ray: None, tiny_pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = make_run(run_config(tiny_pair, tmp_path, **HERE), tmp_path / "run")
    changed = shutil.copytree(made, tmp_path / "changed")
    assert main(["compare", str(made)]) == 0
    assert "iteration 2 plain and static" in capsys.readouterr().out
    done = Comparison.read(RunDir(path=made).comparison_file)
    assert done is not None and (done.iteration, done.num_samples) == (1, SAMPLES)
    assert (done.rollout_s, done.step_s) == (10.0, 20.0)
    # as the made run's metrics say, less its rollout, and the rollout that was measured here
    assert 0.0 < done.plain_rollout_s == pytest.approx(done.plain_step_s - 10.0)
    assert main(["explain", str(made)]) == 0
    assert done.text in capsys.readouterr().out

    change_row(changed, 1, 3, lambda row: row["response_token_ids"].__setitem__(2, 1))
    assert main(["compare", str(changed)]) == 1
    said = capsys.readouterr().err
    assert "iteration_0001.parquet: sample" in said and "token id of response token 2" in said
    assert Comparison.read(RunDir(path=changed).comparison_file) is None


def test_a_run_without_batches_of_their_own_is_refused(tiny_pair, tmp_path: Path, capsys) -> None:
    ahead = make_run(run_config(tiny_pair, tmp_path, **AHEAD), tmp_path / "ahead")
    assert main(["compare", str(ahead)]) == 2
    assert "sampled beside updates (rollout.max_staleness)" in capsys.readouterr().err


def test_without_kept_weights_the_advice_is_to_keep_them(tiny_pair, tmp_path: Path, capsys) -> None:
    pair = type(tiny_pair)(
        target=Path(shutil.copytree(tiny_pair.target, tmp_path / "pair" / "target")), draft=tiny_pair.draft
    )
    made = make_run(run_config(pair, tmp_path), tmp_path / "run")
    shutil.rmtree(RunDir(path=made).checkpoints_folder)
    # neither is version 0 what it was
    for file in sorted((made / "rollouts").glob("*.parquet"))[:1]:
        file.unlink()
    assert main(["compare", str(made)]) == 2
    assert "run.checkpoint_every=1 with run.keep_checkpoints=2" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"iteration": "x"}', "\xff"])
def test_a_damaged_comparison_is_none(text: str, tmp_path: Path) -> None:
    file = tmp_path / "comparison.json"
    file.write_bytes(text.encode("latin-1"))
    assert Comparison.read(file) is None


def test_gains_are_ratios_of_seconds(tmp_path: Path) -> None:
    done = Comparison(
        iteration=4,
        num_samples=8,
        num_tokens=1234,
        rollout_s=2.0,
        step_s=5.0,
        plain_rollout_s=4.0,
        plain_step_s=6.5,
    )
    assert (done.rollout_gain, done.step_gain) == (2.0, 1.3)
    assert done.text == (
        "iteration 5 plain and static: rollout 4.0 s, here 2.0 (2.00 times as fast); step 6.5 s, here 5.0 (1.30); "
        "all 1,234 tokens equal"
    )
    done.write(tmp_path / "comparison.json")
    assert Comparison.read(tmp_path / "comparison.json") == done
