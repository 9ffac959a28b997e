"""Run a program with four ranks on NCCL, with stand-ins for the GPU and for NCCL.

    python tests/nccl_stand_in.py PROGRAM CASE ...

A case is a list of words. With the word `old`, wait() returns after an abort, as the backend of
torch up to 2.14 does. With `new`, wait() raises an error, as the backend of torch 2.15 does. With
`barrier`, destroying a communicator waits for the other ranks of the node, as ncclCommDestroy of
NCCL 2.31 does. Words that contain -- are arguments of the program. The output of all ranks and
their exit statuses are printed as JSON for each case.

The functions shrink_group, destroy_process_group and _abort_process_group are those of torch. A
collective sends its data through a store. A tensor on the stand-in for the GPU has the type
`OnGpu`.
"""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import pickle
import runpy
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

RANKS = 4
GPU = torch.device("cuda", 0)
# Seconds. These two replace the values of the program. The machine may be busy, so they are long.
ALL_REDUCE_LIMIT, LAST_CALL = 4.0, 3.0
LIMIT = 60.0  # seconds after which a rank prints the line in which it waits, and ends
BARRIER = 6.0  # the same limit while a rank destroys a communicator; one case exceeds it
DUMP = faulthandler.dump_traceback_later
FACTORIES = [torch.zeros, torch.ones, torch.randn, torch.tensor, torch.empty]


class OnGpu(torch.Tensor):
    """A tensor on the stand-in. An operation with a tensor on the CPU raises an error."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if any(type(tensor) is torch.Tensor and tensor.dim() for tensor in tensors):
            raise RuntimeError("Expected all tensors to be on the same device")
        if function is torch.Tensor.cpu:
            return args[0].as_subclass(torch.Tensor)
        return super().__torch_function__(function, types, args, kwargs or {})


class Gpu(TorchFunctionMode):
    """The functions that create or move a tensor, with a stand-in for the GPU."""

    default: torch.device | None = None

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function is torch.Tensor.to and args[1] == GPU:
            return args[0].as_subclass(OnGpu)
        device = kwargs.get("device") or self.default or "cpu"
        if function in FACTORIES and torch.device(device) == GPU:
            if kwargs.get("generator") is not None:
                raise RuntimeError("Expected a 'cuda' device type for generator")
            return function(*args, **kwargs | {"device": "cpu"}).as_subclass(OnGpu)
        return function(*args, **kwargs)


class Communicator:
    """The stand-in for the NCCL communicator of a process group."""

    def __init__(self, group: dist.ProcessGroup, store: dist.Store, case: list[str]) -> None:
        self.rank, self.size, self.case = group.rank(), group.size(), case
        self.store = dist.PrefixStore(f"communicator {group.group_name} {self.size}", store)
        self.pending: list[Collective] = []
        self.calls, self.aborted, self.destroyed = 0, False, False

    def wait_for(self, what: str, ranks: list[int]) -> None:
        """Report that this rank has arrived, and wait until these ranks have arrived."""
        self.store.set(f"{what} {self.rank}", "")
        self.store.wait([f"{what} {rank}" for rank in ranks], timedelta(seconds=LIMIT + 60))

    def interrupt(self) -> None:
        """End all pending operations. Their outputs are wrong."""
        for operation in self.pending:
            operation.ended = "interrupted"
            for tensor in operation.outputs:
                tensor.fill_(torch.nan if tensor.is_floating_point() else -1)
        self.pending = []


class Collective:
    """A collective of the stand-in: every rank stores its tensor, and reads the others."""

    def __init__(self, communicator: Communicator, outputs: list, tensor: torch.Tensor) -> None:
        assert all(type(t) is OnGpu for t in [tensor, *outputs]), "No backend type for cpu"
        if communicator.aborted:
            raise dist.DistBackendError("NCCL communicator was aborted")
        self.communicator, self.outputs, self.ended = communicator, outputs, ""
        communicator.calls += 1
        self.keys = [f"{communicator.calls} {rank}" for rank in range(communicator.size)]
        data = pickle.dumps(tensor.as_subclass(torch.Tensor).clone())
        communicator.store.set(self.keys[communicator.rank], data)
        communicator.pending.append(self)

    def is_completed(self) -> bool:
        store = self.communicator.store
        if not self.ended and store.check(self.keys):
            self.finish([pickle.loads(store.get(key)).as_subclass(OnGpu) for key in self.keys])
            self.communicator.pending.remove(self)
            self.ended = "completed"
        return bool(self.ended)

    def finish(self, tensors: list[torch.Tensor]) -> None:
        for output, tensor in zip(self.outputs, tensors, strict=True):
            output.copy_(tensor)

    def wait(self) -> bool:
        while not self.is_completed():
            time.sleep(0.005)
        raises = self.communicator.aborted and "new" in self.communicator.case
        if self.ended == "interrupted" and raises:
            raise dist.DistBackendError("NCCL operation failed")
        return True


class Sum(Collective):
    def finish(self, tensors: list[torch.Tensor]) -> None:
        self.outputs[0].copy_(sum(tensors))


class Nccl:
    """Replaces the functions of torch.distributed that NCCL implements."""

    def __init__(self, case: list[str]) -> None:
        self.case, self.communicators, self.shrink_calls = case, {}, []
        self.store = dist.TCPStore(
            os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False
        )
        self.init = dist.init_process_group
        self.limit = mock.Mock(side_effect=lambda _, exit: DUMP(LIMIT, exit=exit))

    def communicator(self, group: dist.ProcessGroup | None) -> Communicator:
        group = dist.group.WORLD if group is None else group
        if group not in self.communicators:
            self.communicators[group] = Communicator(group, self.store, self.case)
        return self.communicators[group]

    def init_process_group(self, *, device_id: torch.device, **options: Any) -> None:
        assert device_id == GPU and "backend" not in options
        self.init("gloo", **options)
        self.communicator(None)

    def all_reduce(self, tensor, group=None, async_op=False) -> Collective | None:
        work = Sum(self.communicator(group), [tensor], tensor)
        return work if async_op else work.wait() and None

    def all_gather(self, tensors, tensor, group=None) -> None:
        Collective(self.communicator(group), tensors, tensor).wait()

    def abort(self, group: dist.ProcessGroup) -> None:
        communicator = self.communicator(group)
        communicator.aborted = True
        communicator.interrupt()

    def shutdown(self, group: dist.ProcessGroup) -> None:
        communicator = self.communicator(group)
        communicator.destroyed = True
        if communicator.aborted:
            return
        for operation in list(communicator.pending):
            operation.wait()  # ncclCommFinalize waits for all operations
        if "barrier" in self.case:
            assert self.limit.called  # the program has a limit
            DUMP(BARRIER, exit=True)
            communicator.wait_for("destroyed", list(range(communicator.size)))
            DUMP(LIMIT, exit=True)

    def shrink(self, backend, excluded: list[int], flags: int, options: None) -> Any:
        communicator = self.communicator(None)
        assert (backend.rank(), backend.size()) == (communicator.rank, communicator.size)
        assert not communicator.aborted, "NCCL communicator was aborted"
        if flags == c10d.SHRINK_DEFAULT and communicator.pending:
            raise RuntimeError("NCCL communicator cannot shrink while work is pending")
        self.shrink_calls.append((excluded, flags, len(communicator.pending)))
        communicator.interrupt()
        stay = [rank for rank in range(communicator.size) if rank not in excluded]
        communicator.wait_for(f"shrink without {excluded}", stay)
        keys = dist.PrefixStore(f"shrunk {excluded}", communicator.store)
        number = stay.index(communicator.rank)
        return c10d.ProcessGroupGloo(keys, number, len(stay), timeout=timedelta(seconds=LIMIT))


def run_rank(rank: int, port: int, program: str, case: list[str]) -> None:
    """Run the program as this rank. The last line of the output lists the calls of `shrink`."""
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "MASTER_PORT": port}
    variables |= {"LOCAL_WORLD_SIZE": RANKS, "MASTER_ADDR": "127.0.0.1"}
    variables |= {"TORCHELASTIC_USE_AGENT_STORE": True, "NCCL_MULTI_RANK_GPU_ENABLE": 1}
    os.environ.update({name: str(value) for name, value in variables.items()})
    nccl, gpu = Nccl(case), Gpu()
    main = runpy.run_path(program, run_name="stand-in")["main"]
    main.__globals__["ALL_REDUCE_LIMIT"] = ALL_REDUCE_LIMIT
    main.__globals__["members"].__defaults__ = (LAST_CALL,)
    c10d.ProcessGroupGloo.supports_shrinking = True
    c10d.ProcessGroupGloo.shrink = lambda *arguments: nccl.shrink(*arguments)
    dist.ProcessGroup.abort = lambda group: nccl.abort(group)
    dist.ProcessGroup.shutdown = lambda group: nccl.shutdown(group)
    with (
        mock.patch.multiple(
            dist,
            init_process_group=nccl.init_process_group,
            all_reduce=nccl.all_reduce,
            all_gather=nccl.all_gather,
        ),
        mock.patch.multiple(
            torch.accelerator,
            device_count=lambda: 1,
            current_accelerator=lambda: torch.device("cuda"),
            set_device_index=mock.Mock(),
        ),
        mock.patch.object(
            torch, "set_default_device", lambda device: setattr(gpu, "default", device)
        ),
        mock.patch.object(faulthandler, "dump_traceback_later", nccl.limit),
        mock.patch.object(sys, "argv", [program, *[word for word in case if "--" in word]]),
        gpu,
    ):
        main()
    for communicator in nccl.communicators.values():
        ended = communicator.aborted or communicator.destroyed
        assert ended, "the program neither aborts nor destroys one of its communicators"
    print(f"rank {rank}: {nccl.shrink_calls}")


def run(program: str, case: list[str]) -> dict:
    """Run four forked ranks, and return their output and their exit statuses."""
    receive, send = os.pipe()
    pids = []
    with tempfile.TemporaryDirectory() as name:
        for rank in range(RANKS):
            if pid := os.fork():
                pids.append(pid)
                continue
            status = 1
            try:
                output = os.open(Path(name, str(rank)), os.O_WRONLY | os.O_CREAT)
                os.dup2(output, 1)
                os.dup2(output, 2)
                os.close(send)
                run_rank(rank, int(os.read(receive, 8)), program, case)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(status)
        # the store has a thread, so it starts after the forks
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for _ in range(RANKS):
            os.write(send, f"{store.port:8}".encode())
        statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        outputs = [Path(name, str(rank)).read_text() for rank in range(RANKS)]
    return {"statuses": statuses, "outputs": outputs}


def main() -> None:
    torch.set_num_threads(1)
    program, *cases = sys.argv[1:]
    # two cases at a time, because a case mostly waits; the pool forks before it starts threads
    with multiprocessing.get_context("fork").Pool(2) as pool:
        results = pool.starmap(run, [(program, case.split()) for case in cases], chunksize=1)
    print(json.dumps(dict(zip(cases, results, strict=True))))


if __name__ == "__main__":
    main()
