"""What one process writes on a GPU another reads there; a tensor of the CPU is not offered."""

import pickle
import subprocess
import sys

import pytest
import torch

from rlhfspec.actors.transport.device_window import offer
from rlhfspec.core.errors import PlacementError
from tests.helpers.devices import NO_GPU

READER = """
import pickle, sys, torch
from rlhfspec.actors.transport.device_window import reach
torch.zeros(1, device="cuda")
window = reach(pickle.loads(bytes.fromhex(sys.stdin.readline())), torch.device("cuda", 0))
for line in sys.stdin:
    print(int(window[int(line)].long().sum()), flush=True)
"""


@pytest.mark.gpu
@NO_GPU
def test_another_process_reads_what_is_written_later() -> None:
    window = torch.zeros(2, 1 << 20, dtype=torch.uint8, device="cuda")
    with subprocess.Popen(
        [sys.executable, "-c", READER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as reader:
        assert reader.stdin is not None and reader.stdout is not None
        reader.stdin.write(pickle.dumps(offer(window)).hex() + "\n")
        for room, value in ((0, 3), (1, 5), (0, 7)):
            window[room].fill_(value)
            torch.cuda.synchronize()
            reader.stdin.write(f"{room}\n")
            reader.stdin.flush()
            assert int(reader.stdout.readline()) == value << 20
        reader.stdin.close()
        assert reader.wait(timeout=60) == 0


def test_memory_of_the_host_is_not_offered() -> None:
    with pytest.raises(PlacementError, match="expected memory of a GPU"):
        offer(torch.zeros(4))
