"""Workers of a private Ray as forks of one process that has imported what every actor imports.

An actor is a process of its own, and most of its start is imports. A raylet starts workers by a file that prepares them
(`setup_worker_path`): here this one, which sends its words, its environment and its files to a process that was started
with the run, and that one forks. Ray itself, whose core reads the environment when it is imported, it imports with the
first worker's; one of another, or one for which more is to be prepared, starts as Ray would start it.

Run by its path with the standard library alone, as every worker passes through it.
"""

import gc
import json
import os
import resource
import runpy
import select
import signal
import socket
import struct
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module

TYPE_CHECKING = False
if TYPE_CHECKING:
    from subprocess import Popen

_ROOM = 1 << 21
"Bytes of a command with its environment, above what Linux lets one have."
_OOM_SCORE = "/proc/self/oom_score_adj"
"Ray adds to it of what it starts as a worker: the kernel then ends that one first where memory is short."
_IMPORTED = (
    "torch",
    "transformers.models.llama.modeling_llama",
    "rlhfspec.engine.build",
    "rlhfspec.learning.drafts.cotraining",
    "rlhfspec.learning.drafts.refit",
    "rlhfspec.learning.environments.tools",
    "rlhfspec.learning.rewards.reward_function",
    "rlhfspec.learning.training.learner",
)
"Before there is a Ray."
_IMPORTED_WITH_RAY = (
    "ray._private.workers.default_worker",
    "rlhfspec.actors.generation.decode_loop",
    "rlhfspec.actors.remote.actor_start",
)
"No class of an actor: Ray draws a name for it, and forks would draw the same ones from then on."
KNOWN_RAY = "2.60."
"Versions begin so whose private functions are known: another starts itself and its workers as it would."
FORK_S = 120.0
"What a worker waits for its fork, less than Ray waits for the worker; then it starts by itself."
_NAME = "RLHFSPEC_WORKERS"
"Of the variable with the name of a socket without a file: nothing is left of it."
_FORKABLE = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"Neither numpy nor torch may have threads when it forks, and no import that asks for GPUs may begin CUDA."
_CONTEXT, _LANGUAGE = "--serialized-runtime-env-context=", "--language="


class _Forking:
    """The process that forks, kept as long as this one or its Ray lives."""

    process: "Popen[bytes] | None" = None
    name = ""
    began_in: Mapping[str, str] = {}


def joined_address(said: str | None) -> str | None:
    """The address of the running cluster that a run is to join whose config has said this; None: it starts one."""
    return said or os.environ.get("RAY_ADDRESS") or None


def is_local(said: str | None) -> bool:
    """Whether the run of such a config starts a Ray of its own on this machine."""
    ray = sys.modules.get("ray")
    return not (joined_address(said) or (ray is not None and ray.is_initialized()))


def worker_environment() -> dict[str, str]:
    """Workers import this tree. Not the caller's folder: it would go before the standard library (`code.py`)."""
    from .origin import IS_CHECKOUT, ROOT

    tree = [str(ROOT)] if IS_CHECKOUT else []
    folders = [*tree, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return {"PYTHONPATH": os.pathsep.join(dict.fromkeys(filter(None, folders)))}


def raylet_environment() -> dict[str, str]:
    """For a raylet that starts workers by this file; none before it is wanted, as a fork is there at once."""
    _Forking.name = _Forking.name or f"rlhfspec-workers-{os.urandom(12).hex()}"
    return {_NAME: _Forking.name, "RAY_prestart_worker_first_driver": "0"}


def begin_workers(said: str | None) -> None:
    """Begin to fork for a run that starts a Ray of its own; `said` is its config's cluster.address."""
    if is_local(said):
        if _Forking.process is not None and _Forking.began_in != os.environ:
            # of a run that was refused: what it has imported has read another environment
            _end(_Forking.process)
        begin_forking()


def begin_forking() -> "Popen[bytes] | None":
    """Start the process that forks, where it does not run; workers wait while it imports. None: for another Ray."""
    from importlib.metadata import version
    from subprocess import DEVNULL, PIPE, Popen

    from ...core.named_code import IMPORT_FOLDER
    from .quiet import quiet_environment

    knows_ray, process = version("ray").startswith(KNOWN_RAY), _Forking.process
    if not knows_ray or (process is not None and process.poll() is None):
        return _Forking.process
    _Forking.began_in = dict(os.environ)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as commands:
        commands.bind("\0" + raylet_environment()[_NAME])
        commands.listen(64)
        _Forking.process = Popen(
            [sys.executable, "-m", __name__, str(commands.fileno())],
            cwd=IMPORT_FOLDER,
            env=os.environ | quiet_environment() | worker_environment() | _FORKABLE,
            pass_fds=[commands.fileno()],
            # until this process ends
            stdin=PIPE,
            stdout=DEVNULL,
            stderr=DEVNULL,
            start_new_session=True,
        )
    return _Forking.process


@contextmanager
def forking(note: Callable[[str], None]) -> Iterator[None]:
    """Fork workers of the Ray of this block, by a process of its own; `note` is told at once where that ends before."""
    from threading import Thread

    if (process := begin_forking()) is not None:
        Thread(target=_note_end, args=[process, note], name="forks-watch", daemon=True).start()
    try:
        yield
    finally:
        _end(process)


def _note_end(process: "Popen[bytes]", note: Callable[[str], None]) -> None:
    states = os.WSTOPPED | os.WEXITED | os.WNOWAIT
    with suppress(ChildProcessError):
        while (seen := os.waitid(os.P_PID, process.pid, states)) and seen.si_code == os.CLD_STOPPED:
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOHANG)
            note(
                f"the process that actors are forks of (pid {process.pid}) was stopped: each actor that starts waits "
                f"{FORK_S:.0f} s for it, then imports torch and transformers by itself; let it go on: kill -CONT"
            )
    code = process.wait()
    if _Forking.process is process:
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        note(
            f"the process that actors are forks of ended ({how}): the run goes on, and actors that start from now on "
            "import torch and transformers by themselves, which takes seconds; look at the machine's memory"
        )


def _end(process: "Popen[bytes] | None") -> None:
    """Kill it, which nothing puts off, so that the wait for its end is short."""
    _Forking.process, _Forking.name = None, ""
    if process is not None:
        with process:
            process.kill()


def _hand_over(words: list[str]) -> None:
    """Let the process that forks run a worker, and last as long as the worker does."""
    given = next((word.removeprefix(_CONTEXT) for word in words if word.startswith(_CONTEXT)), "{}")
    context = json.loads(given)
    variables = context.pop("env_vars", {})
    # another executable or a container; another tree, settings of Ray's core, what Ray puts together
    is_for_ray = any(value and value != sys.executable for value in context.values()) or any(
        name == "PYTHONPATH" or "$" in value or (name.startswith("RAY_") and not name.isupper())
        for name, value in variables.items()
    )
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as worker, suppress(OSError):
        if not is_for_ray:
            worker.connect("\0" + os.environ[_NAME])
            command = [word for word in words if not word.startswith((_CONTEXT, _LANGUAGE))]
            with open(_OOM_SCORE) as score:
                limits = resource.getrlimit(resource.RLIMIT_NOFILE), score.read()
            message = json.dumps([command, dict(os.environ), variables, os.getcwd(), *limits])
            socket.send_fds(worker, [message.encode()], [0, 1, 2])
            worker.settimeout(FORK_S)
            if worker.recv(1):
                worker.settimeout(None)
                worker.recv(1)
                return
    usual = os.path.join(os.path.dirname(words[0]), "setup_worker.py")
    os.execv(sys.executable, [sys.executable, usual, *words])


def _is_over(commands: socket.socket | None = None) -> bool:
    """Whether nobody wants workers any more; with `commands`, once there is one or nobody does."""
    readable, *_ = select.select([sys.stdin, *filter(None, [commands])], [], [], None if commands else 0)
    return sys.stdin in readable


def _next_worker(commands: socket.socket) -> tuple[list[str], str]:
    """Fork for every command of one Ray until standard input ends; return in the child, with its own and its folder."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    ray: dict[str, str] | None = None
    while not _is_over(commands):
        worker, _ = commands.accept()
        _, user, _ = struct.unpack("3i", worker.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        message, files, *_ = socket.recv_fds(worker, _ROOM, 3) if user == os.getuid() else (b"", [])
        if not message:
            # it has ended, or is somebody else
            worker.close()
            continue
        command, environment, variables, folder, open_files, oom_score = json.loads(message)
        reads = {name: value for name, value in environment.items() if name.startswith("RAY_")}
        if ray is None:
            ray = reads
            _take(environment)
            _import(_IMPORTED_WITH_RAY)
        is_fork = False
        # Ray may have ended it meanwhile
        with suppress(BrokenPipeError):
            is_fork = ray == reads and worker.send(b"1") == 1 and not os.fork()
        if not is_fork:
            for file in (*files, worker.detach()):
                os.close(file)
            continue
        commands.close()
        # Ray ends a worker with its process group
        os.setsid()
        # open until this process ends
        worker.detach()
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        # this was forked of what began before Ray raised its limits; Ray, too, goes on where it may not
        resource.setrlimit(resource.RLIMIT_NOFILE, open_files)
        with suppress(OSError), open(_OOM_SCORE, "w") as score:
            score.write(oom_score)
        _take(environment | variables)
        return command, folder
    sys.exit()


def _import(modules: tuple[str, ...]) -> None:
    """Import for all forks to come."""
    for module in modules:
        import_module(module)
        if _is_over():
            sys.exit()
    gc.freeze()


def _take(environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)


def _fork() -> None:
    """Import, fork when told to, and be the worker in the child."""
    gc.disable()
    _import(_IMPORTED)
    sys.argv, folder = _next_worker(socket.socket(fileno=int(sys.argv[1])))
    gc.enable()
    os.chdir(folder)
    # numpy draws its seed, torch reads its threads, when it is imported
    sys.modules["numpy"].random.seed()
    torch = sys.modules["torch"]
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or torch.get_num_threads()))
    sys.path[0] = os.path.dirname(sys.argv[0])
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    if __package__:
        _fork()
    else:
        _hand_over(sys.argv[1:])
