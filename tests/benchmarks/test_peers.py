"""Peers: what the client promises of any server, and that each real one agrees with Hugging Face."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rlhfspec.benchmarks.peers import build, serving
from rlhfspec.benchmarks.peers.client import BUILT, PEER_NAMES, Peer, PeerError, available_peers
from rlhfspec.core.errors import WaitTimeout

FAKE = """
import os, sys, time
sys.path.insert(0, {servers!r})
from serving import serve

def load(order):
    print("chatter on stdout")
    os.system("echo chatter of a child")
    if order.dtype == "unknown":
        raise ValueError("no such dtype here")

    def generate(prompts, max_new_tokens, temperature):
        if temperature == 1.0:
            time.sleep(60)
        if prompts[0] == [13]:
            print("last words", file=sys.stderr, flush=True)
            os._exit(7)
        missing = prompts[0] == [14]
        return [[prompt[-1] + order.max_batch] * (max_new_tokens - missing) for prompt in prompts]

    return os.environ["OMP_NUM_THREADS"] + os.environ.get("PYTHONPATH", ""), generate

serve(load)
"""


def fake(tmp_path: Path, source: str = FAKE, *, dtype: str = "float32", timeout_s: float = 60.0) -> Peer:
    script = tmp_path / "fake_server.py"
    script.write_text(source.replace("{servers!r}", repr(str(Path(serving.__file__).parent))))
    return Peer(
        "fake",
        tmp_path,
        max_batch=100,
        max_total_tokens=64,
        dtype=dtype,
        threads=3,
        load_timeout_s=60.0,
        generate_timeout_s=timeout_s,
        command=[sys.executable, str(script)],
    )


def is_running(peer: Peer) -> bool:
    return peer._process.poll() is None


def test_orders_and_answers_pass_whatever_the_engine_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "not-for-peers")
    with fake(tmp_path) as peer:
        assert peer.version == "3"
        first = peer.generate([[1, 2], [3]], 2, 0.0)
        second = peer.generate([[5] * 40_000], 1, 0.0)
    assert first.token_ids == [[102, 102], [103, 103]]
    assert first.num_tokens == 4
    assert first.seconds >= 0.0
    assert second.token_ids == [[105]]
    assert not is_running(peer)


def test_a_late_answer_names_the_peer_and_ends_its_process(tmp_path: Path) -> None:
    with fake(tmp_path, timeout_s=0.5) as peer:
        with pytest.raises(WaitTimeout, match="for peer fake to answer 'generate'"):
            peer.generate([[1]], 1, 1.0)
        peer._process.wait(timeout=10)
        assert not is_running(peer)


def test_a_server_that_stops_reading_cannot_block_the_sender(tmp_path: Path) -> None:
    source = """import time; print('{"ready": true, "version": "1"}', flush=True); time.sleep(120)"""
    more_than_a_pipe_holds = [[5] * 100_000]
    with fake(tmp_path, source, timeout_s=0.5) as peer, pytest.raises(WaitTimeout, match="peer fake"):
        peer.generate(more_than_a_pipe_holds, 1, 0.0)


def test_a_death_is_told_with_status_and_the_end_of_stderr(tmp_path: Path) -> None:
    with (
        fake(tmp_path) as peer,
        pytest.raises(PeerError, match=r"peer fake died with status 7 .* to generate; (.|\n)*last words"),
    ):
        peer.generate([[13]], 1, 0.0)
    with (
        pytest.raises(PeerError, match=r"to load; (.|\n)*no such dtype here"),
        fake(tmp_path, dtype="unknown"),
    ):
        pass


def test_orders_after_a_death_fail_too(tmp_path: Path) -> None:
    with fake(tmp_path) as peer:
        for _ in range(2):
            with pytest.raises(PeerError, match="died with status 7"):
                peer.generate([[13]], 1, 0.0)


def test_an_answer_of_the_wrong_length_or_form_is_refused(tmp_path: Path) -> None:
    with fake(tmp_path) as peer, pytest.raises(PeerError, match=r"decoded \[4\] tokens; expected 5"):
        peer.generate([[14]], 5, 0.0)
    # one that ended by itself might be told as dead first
    stays = "import time; print('hello', flush=True); time.sleep(60)"
    with pytest.raises(PeerError, match="answered 'hello"), fake(tmp_path, stays):
        pass


def test_a_peer_that_is_not_built_says_what_to_run(tmp_path: Path) -> None:
    peer = Peer("vllm", tmp_path, max_batch=1, max_total_tokens=8, cache_dir=tmp_path)
    with pytest.raises(PeerError, match=r"peer vllm is not built.*make bench-peers"), peer:
        pass


def test_only_finished_environments_are_available(tmp_path: Path) -> None:
    for name in ("vllm", "openvino"):
        (tmp_path / name / "bin").mkdir(parents=True)
    (tmp_path / "openvino" / BUILT).touch()
    assert available_peers(tmp_path) == ["openvino"]


def test_a_failing_build_is_told_and_the_next_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[Sequence[str]] = []

    def run(command: list[str], log: Path) -> None:
        ran.append(command)
        if "install" in command and "openvino" in command[0]:
            raise build.BuildError("pip said no")

    monkeypatch.setattr(build, "run", run)
    assert build.main(["openvino", "vllm"], tmp_path) == 0
    told = capsys.readouterr().out
    assert "peer openvino: NOT built: pip said no" in told and "peer vllm: built" in told
    assert available_peers(tmp_path) == ["vllm"]
    num_steps = len(ran)
    assert build.main(["vllm"], tmp_path) == 0
    assert len(ran) == num_steps, "a built environment is left as it is"


def test_a_failed_step_tells_the_last_line_it_printed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with pytest.raises(build.BuildError, match=r"exited with 3: the reason$"):
        build.run([sys.executable, "-c", "print('x'); print('the reason\\n'); raise SystemExit(3)"], log)


def test_a_conversion_is_kept_for_the_same_weights_only(tmp_path: Path) -> None:
    model, made = tmp_path / "model", []
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"one")

    def convert(folder: Path) -> None:
        made.append(folder)
        (folder / "weights").write_bytes((model / "model.safetensors").read_bytes())

    root = tmp_path / "converted"
    first = serving.converted(model, "fake-1", convert, root)
    assert serving.converted(model, "fake-1", convert, root) == first and len(made) == 1
    (model / "model.safetensors").write_bytes(b"two")
    second = serving.converted(model, "fake-1", convert, root)
    assert [(folder / "weights").read_bytes() for folder in (first, second)] == [b"one", b"two"]


def test_a_failed_conversion_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")

    def convert(folder: Path) -> None:
        (folder / "half").touch()
        raise RuntimeError("out of disk")

    with pytest.raises(RuntimeError, match="out of disk"):
        serving.converted(tmp_path, "fake-1", convert, tmp_path / "converted")
    assert not list((tmp_path / "converted").iterdir())


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LlamaForCausalLM]:
    """A random Llama without a tokenizer; a rope base of its own, so that a lost config value shows."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.2,
        rope_parameters={"rope_type": "default", "rope_theta": 300.0},
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config).eval()
    folder = tmp_path_factory.mktemp("tiny")
    model.save_pretrained(folder)
    return folder, model


@pytest.mark.slow
@pytest.mark.parametrize("name", PEER_NAMES)
def test_greedy_tokens_are_those_of_hugging_face(name: str, tiny: tuple[Path, LlamaForCausalLM]) -> None:
    if name not in available_peers():
        pytest.skip(f"the environment of peer {name} is not built (make bench-peers)")
    folder, model = tiny
    random = torch.Generator().manual_seed(1)
    prompts = [torch.randint(512, (1, length), generator=random) for length in (5, 17, 33, 50)]
    expected = [
        model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=32, pad_token_id=0
        )[0, ids.shape[1] :]
        for ids in prompts
    ]
    with Peer(name, folder, max_batch=4, max_total_tokens=96) as peer:
        result = peer.generate([ids[0].tolist() for ids in prompts], 32, 0.0)
        sampled = peer.generate([prompts[0][0].tolist()] * 4, 32, 1.0)
    same = [
        (torch.tensor(ours) == theirs).float().mean()
        for ours, theirs in zip(result.token_ids, expected, strict=True)
    ]
    assert min(same) > 0.9, f"share of equal tokens in each response: {same}"
    assert len(set(map(tuple, sampled.token_ids))) > 1, "temperature 1 samples"
