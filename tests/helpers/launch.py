"""Real ranks for tests: `run_ranks` starts processes for one call, `RankPool` keeps them warm between calls.

A worker is a module-level function `worker(rank, *args)`, in a test file too: it travels as (module name, file,
function name) and each rank loads the file once. Arguments and results are pickled. Inside a worker torch.distributed
is initialised, torch uses one thread and is seeded with 0 on every rank; `dist.new_group` may be called (by all ranks)
and its groups are destroyed when the worker returns. Failed and overdue calls stop all ranks; the next call starts
fresh ones. The error tells where the ranks stood that had not finished.
"""

import contextlib
import faulthandler
import gc
import importlib.util
import multiprocessing
import os
import pickle
import re
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, Self, TypeVar, TypeVarTuple, cast

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from sonic_ep.symmetric_memory import gpus_are_shared
from tests.helpers.tolerances import limit_tolerances

Args = TypeVarTuple("Args")
Result = TypeVar("Result")

START_TIMEOUT = 120.0
_MOST_GROUPS = 10_000  # that a call makes
# Once a rank has failed, how long to wait for what the others have to say.
GRACE = 0.5
# How long a killed rank may take to end. A driver that does not let go of a GPU would hold up the tests for ever.
END_TIMEOUT = 60.0
# What ranks import at once, and what takes them seconds if this process has imported the package.
_PRELOADED = ("torch.distributed.tensor", "torch.distributed.checkpoint", "sonic_ep.layer")
_PRELOADED_WITH = {
    "transformers": ("transformers.modeling_utils",),
    "megatron.core": ("megatron.core.models.gpt", "megatron.core.dist_checkpointing", "sonic_ep.integrations.megatron"),
    "deepspeed": ("deepspeed",),
    "trl": ("transformers.trainer", "trl.trainer.sft_trainer", "trl.trainer.grpo_trainer"),
    "torchtitan": ("tests.helpers.torchtitan_cpu", "sonic_ep.integrations.torchtitan.moe"),
}
# Asks a rank where it stands, and how long it may take to tell, in C, whatever it waits for.
_ASK, _TELLS = signal.SIGUSR1, 0.2


class RankError(RuntimeError):
    """At least one rank failed. `failures` maps its number to its traceback, the first to fail first. unfinished: the
    stacks of those that neither failed nor finished."""

    def __init__(self, world_size: int, failures: dict[int, str], unfinished: dict[int, str]) -> None:
        self.failures = failures
        (first, text), *others = failures.items()
        lines = [f"rank {first} of {world_size} failed: {_raised_in(text)}", text.rstrip()]
        lines += [f"rank {rank} failed too: {_raised_in(other)}" for rank, other in others]
        if unfinished:
            lines.append(f"stopped before they finished: ranks {[*unfinished]}")
        super().__init__("\n".join([*lines, *_shown(unfinished)]))


class RankTimeoutError(TimeoutError):
    """Some ranks did not finish in time; `unfinished` names them, and their stacks."""

    def __init__(self, world_size: int, unfinished: dict[int, str], timeout: float) -> None:
        self.unfinished = [*unfinished]
        raised = f"ranks {self.unfinished} of {world_size} were still running after {timeout:g} s and were stopped"
        super().__init__("\n".join([raised, *_shown(unfinished)]))


def _raised_in(text: str) -> str:
    """The first line of what a traceback ends in. Logs cut long ones in the middle, and Dynamo adds lines below it."""
    lines = text.rstrip().splitlines()
    return next((line for line in reversed(lines) if re.match(r"[\w.]+(: |$)", line)), lines[-1])[:500]


def _state_of(pid: int | None) -> str:
    """What the kernel says that a process does: "State: D (disk sleep)" is a wait in a driver."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return "gone"
    return next((line.replace("\t", " ") for line in lines if line.startswith("State")), "")


def _shown(stacks: dict[int, str]) -> list[str]:
    return [f"rank {rank} stood here:\n{stack.rstrip()}" for rank, stack in stacks.items()]


class _Address(NamedTuple):
    """Where another process finds a worker."""

    module: str
    file: str
    function: str

    @classmethod
    def of(cls, worker: Callable[..., object]) -> Self:
        module, function = worker.__module__, getattr(worker, "__qualname__", "<unnamed>")
        file = getattr(sys.modules.get(module), "__file__", None)
        if file is None or not function.isidentifier():
            raise ValueError(f"worker {module}.{function} cannot be sent to a rank: make it a module-level function")
        return cls(module, file, function)

    def load(self) -> Callable[..., Any]:
        return getattr(sys.modules.get(self.module) or self._load_module(), self.function)

    def _load_module(self) -> ModuleType:
        spec = importlib.util.spec_from_file_location(self.module, self.file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[self.module] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[self.module]
            raise
        return module


class _Request(NamedTuple):
    worker: _Address
    args: bytes  # pickled apart: they may hold classes of the worker's module, which must be loaded first
    warning_filters: list[Any]
    first_name: int  # of the process groups that the worker makes


class _Answer(NamedTuple):
    ok: bool
    value: Any  # the result, or the traceback as text


def _perform(rank: int, request: _Request) -> object:
    # As strict as the caller: pytest's filterwarnings = error holds on every rank. The call of simplefilter is there
    # only to make the new list count.
    cast(list[Any], warnings.filters)[:] = request.warning_filters
    warnings.simplefilter("default", append=True)
    worker = request.worker.load()
    args = pickle.loads(request.args)
    torch.manual_seed(0)
    # torch names groups by counting those that a rank has made. Ranks that count differently would wait for each other.
    distributed_c10d._world.group_count = request.first_name
    result = worker(rank, *args)
    if not dist.is_initialized():
        raise RuntimeError("the worker destroyed the default process group, which belongs to its pool")
    for group in list(distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    return result, distributed_c10d._world.group_count - request.first_name


def _answer(rank: int, request: bytes) -> bytes:
    try:
        return pickle.dumps(_Answer(True, _perform(rank, pickle.loads(request))))
    except BaseException:  # noqa: BLE001 - pytest.fail and SystemExit must reach the test as well
        return pickle.dumps(_Answer(False, traceback.format_exc()))


def _serve(rank: int, world_size: int, backend: str, port: int, pipe: Connection, stack: Path) -> None:
    """The life of one rank: join the group, then answer requests until it is killed or the parent is gone. It writes
    where it stands to `stack` when it is asked to."""
    faulthandler.register(_ASK, stack.open("w"))
    faulthandler.enable()
    torch.set_num_threads(1)
    limit_tolerances()
    if "nccl" in backend or "cuda" in backend:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    gc.freeze()  # the server's modules stay
    pipe.send_bytes(pickle.dumps(_Answer(True, None)))
    with contextlib.suppress(EOFError):
        while True:
            pipe.send_bytes(_answer(rank, pipe.recv_bytes()))


def fork_server() -> ForkServerContext:
    """The context whose processes are forked from a clean server that has imported what takes seconds: a start takes
    0.3 s instead of 3 to 8 s. The server of a process is made once, with what this one has imported at the first start.
    """
    context = multiprocessing.get_context("forkserver")
    modules = ["torch", "torch.distributed"]
    if not torch.cuda.is_available():  # an import that looks for GPUs would leave CUDA unusable in what is forked
        modules += _PRELOADED
        modules += [name for package, names in _PRELOADED_WITH.items() if package in sys.modules for name in names]
    context.set_forkserver_preload(modules)
    return context


class RankPool:
    """`world_size` processes in one process group, started at the first call of `run`.

    Example:
        with RankPool(2) as pool:
            assert pool.run(add_rank, 10) == [10, 11]   # def add_rank(rank: int, start: int) -> int
    """

    def __init__(self, world_size: int, backend: str = "gloo") -> None:
        self.world_size = world_size
        self.backend = backend
        self._store: dist.TCPStore | None = None
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._stacks: tempfile.TemporaryDirectory[str] | None = None
        self._calls = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, worker: Callable[[int, *Args], Result], *args: *Args, timeout: float = 120.0) -> list[Result]:
        """Call worker(rank, *args) on every rank; the results by rank.

        Raises: RankError when a rank raises or dies, RankTimeoutError after `timeout` seconds, ValueError for a worker
        that is no module-level function, RuntimeError for one that makes more process groups on some ranks.
        """
        __tracebackhide__ = True
        address = _Address.of(worker)
        self._calls += 1
        first_name = _MOST_GROUPS * self._calls
        request = pickle.dumps(_Request(address, pickle.dumps(args), list(warnings.filters), first_name))
        try:
            if not self._processes or not all(process.is_alive() for process in self._processes):
                self.close()
                self._start()
            for pipe in self._pipes:
                pipe.send_bytes(request)
            answers = self._collect(timeout)
        except BaseException:
            self.close()
            raise
        if len({made for _, made in answers}) > 1:
            raise RuntimeError(f"{address.function} made {[made for _, made in answers]} process groups, by rank")
        return [result for result, _ in answers]

    def close(self) -> None:
        """Stop all ranks; a later `run` starts new ones. They are killed: idle ranks have nothing to finish.

        Raises RuntimeError if one does not end.
        """
        for process in self._processes:
            process.kill()
        left = []
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.join(END_TIMEOUT)
            if process.exitcode is None:
                left.append(f"{process.name}, process {process.pid}, {_state_of(process.pid)}")
            else:
                process.close()
            pipe.close()
        if self._stacks is not None:
            self._stacks.cleanup()
        self._processes, self._pipes, self._store, self._stacks = [], [], None, None
        if left:
            raise RuntimeError(f"not ended {END_TIMEOUT:g} s after it was killed: {'; '.join(left)}")

    def _start(self) -> None:
        context = fork_server()
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._stacks = tempfile.TemporaryDirectory()
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            self._stack_of(rank).touch()
            args = (rank, self.world_size, self.backend, self._store.port, theirs, self._stack_of(rank))
            process = context.Process(target=_serve, args=args, name=f"rank-{rank}", daemon=True)
            process.start()
            theirs.close()  # ours must read end-of-file when the rank dies
            self._processes.append(process)
            self._pipes.append(ours)
        self._collect(START_TIMEOUT)

    def _collect(self, timeout: float) -> list[Any]:
        """One answer of every rank, in rank order."""
        __tracebackhide__ = True
        deadline = time.monotonic() + timeout
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        while waiting and (ready := wait(list(waiting), max(0.0, deadline - time.monotonic()))):
            for pipe in (pipe for pipe in self._pipes if pipe in ready):
                rank = waiting.pop(pipe)
                answer = self._receive(rank)
                if answer.ok:
                    results[rank] = answer.value
                else:
                    failures[rank] = answer.value
                    deadline = min(deadline, time.monotonic() + GRACE)
        unfinished = self._where(sorted(waiting.values()))
        if failures:
            raise RankError(self.world_size, failures, unfinished)
        if unfinished:
            raise RankTimeoutError(self.world_size, unfinished, timeout)
        return [results[rank] for rank in range(self.world_size)]

    def _stack_of(self, rank: int) -> Path:
        assert self._stacks is not None
        return Path(self._stacks.name) / str(rank)

    def _where(self, ranks: list[int]) -> dict[int, str]:
        """The stacks of ranks that are still at work."""
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(cast(int, self._processes[rank].pid), _ASK)
        if ranks:
            time.sleep(_TELLS)
        return {rank: self._stack_of(rank).read_text() for rank in ranks}

    def _receive(self, rank: int) -> _Answer:
        try:
            return pickle.loads(self._pipes[rank].recv_bytes())
        except (EOFError, ConnectionError):
            process = self._processes[rank]
            process.join(timeout=1)
            return _Answer(False, f"the process died with exit code {process.exitcode}; see its stderr")


def most_gpus() -> int:
    """How many ranks a test takes that wants as many as there are GPUs: 8, 4 or 2."""
    return next((size for size in (8, 4) if size <= torch.cuda.device_count()), 2)


def backend_of_gpus(world_size: int) -> str:
    """Returns the backend of ranks on GPUs. Skips the test if there are fewer, unless ranks share GPUs.

    With TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 they do, over gloo, because NCCL refuses that. It is slow, because
    GPUs run one process at a time, and what needs NCCL fails.
    """
    if torch.cuda.device_count() >= world_size:
        return "cpu:gloo,cuda:nccl"
    if not (torch.cuda.is_available() and gpus_are_shared()):
        pytest.skip(f"needs {world_size} CUDA devices, there are {torch.cuda.device_count()}")
    return "cpu:gloo,cuda:gloo"


def run_ranks(
    worker: Callable[[int, *Args], Result],
    world_size: int,
    *args: *Args,
    backend: str = "gloo",
    timeout: float = 120.0,
) -> list[Result]:
    """Call worker(rank, *args) in `world_size` processes of its own; the results by rank. See `RankPool.run`."""
    with RankPool(world_size, backend) as pool:
        return pool.run(worker, *args, timeout=timeout)
