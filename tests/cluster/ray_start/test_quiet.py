"""Libraries draw no bars over ours: in this process, imported already or not, and in the actors."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import ray
from ray.util.placement_group import remove_placement_group
from transformers.utils import logging as transformers_logging

from rlhfspec.cluster.cli import main
from rlhfspec.cluster.plan.topology import PlacementContext, actor_options, place, plan_topology
from rlhfspec.cluster.ray_start.quiet import quiet_environment
from rlhfspec.core.config_io import config_from_dict
from rlhfspec.engine.weights.loading import load_causal_lm


def test_progress_bars_are_off_in_libraries_imported_before_the_command(
    tiny_pair, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(transformers_logging, "_tqdm_active", True)
    load_causal_lm(str(tiny_pair.target), "float32")
    assert "Loading weights" in capsys.readouterr().err, "without a bar to silence this test says nothing"
    assert main(["show", str(tmp_path)]) == 2
    capsys.readouterr()
    load_causal_lm(str(tiny_pair.target), "float32").save_pretrained(tmp_path)
    assert capsys.readouterr().err == ""


def test_environment_variables_of_the_caller_take_precedence(monkeypatch):
    monkeypatch.delenv("TRANSFORMERS_VERBOSITY", raising=False)
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "0")
    monkeypatch.setenv("GOMP_SPINCOUNT", "30000")
    made = quiet_environment()
    assert made["GOMP_SPINCOUNT"] == "30000"
    assert (made["HF_HUB_DISABLE_PROGRESS_BARS"], made["TRANSFORMERS_VERBOSITY"]) == ("0", "error")


def test_bars_of_libraries_that_ask_for_no_switch_are_off():
    # in a process of its own: tqdm reads the variable when it is imported
    program = """
from rlhfspec.cluster.ray_start.quiet import quiet_libraries
quiet_libraries()
from tqdm.auto import tqdm
list(tqdm(range(9)))
"""
    environment = {name: value for name, value in os.environ.items() if name != "TQDM_DISABLE"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_threads_that_wait_for_their_team_sleep_soon():
    # in a process of its own: the library reads the variable when torch is imported, and shows what it made of it
    program = """
from rlhfspec.cluster.ray_start.quiet import quiet_libraries
quiet_libraries()
import torch
print(torch.arange(1 << 20).sum().item())
"""
    environment = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    ended = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env=environment | {"OMP_DISPLAY_ENV": "verbose"},
    )
    assert "GOMP_SPINCOUNT = '3000'" in ended.stderr


SAID_BY_RAYLETS = (
    "A worker died or was killed while executing a task by an unexpected system error. To troubleshoot ...",
    "Raylet is terminated. Termination is unexpected. Possible reasons include: (1) SIGKILL ...\n  its log",
    "The node with node id: 12ab and address: 10.0.0.1 has been marked dead because the detector has missed ...",
    "some other warning",
)


def test_ray_log_lines_that_the_loop_reports_itself_are_suppressed():
    # in a process of its own: Ray reads the variable when it is imported
    program = f"""
from rlhfspec.cluster.ray_start.quiet import quiet_libraries
quiet_libraries()
from ray._private.ray_logging import stdout_deduplicator
batches = stdout_deduplicator.deduplicate({{"lines": list({SAID_BY_RAYLETS!r}), "pid": "raylet"}})
print([line for batch in batches for line in batch["lines"]])
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "['some other warning']"


@pytest.mark.ray
def test_an_actor_prints_no_progress_bars_whatever_its_nodes_environment(local_ray, monkeypatch):
    @ray.remote
    class Probe:
        def draws(self) -> bool:
            from transformers.utils.logging import is_progress_bar_enabled

            return is_progress_bar_enabled()

    monkeypatch.delenv("HF_HUB_DISABLE_PROGRESS_BARS")
    models = {"target": "demo", "draft": "demo"}
    topology = plan_topology(config_from_dict({"models": models, "data": {"task": "chain"}}))
    group = place(topology, is_local=True)
    try:
        options = actor_options(topology.trainer[0], PlacementContext(group=group, namespace="test-quiet"))
        probe = Probe.options(**options).remote()
        assert not ray.get(probe.draws.remote(), timeout=60)
        # a fork has the variables with which its libraries were imported
        own = {"env_vars": {"HF_HUB_DISABLE_PROGRESS_BARS": "", "PYTHONPATH": os.environ["PYTHONPATH"]}}
        noisy = options | {"name": "noisy", "runtime_env": own}
        ray.kill(probe)
        assert ray.get(Probe.options(**noisy).remote().draws.remote(), timeout=60)
    finally:
        remove_placement_group(group)
