"""gloo reports "unsupported gloo device" if the wheel lacks the transport that gloo looks up.

PyTorch's gloo looks up a transport by a name: a variable contains the name, or the operating
system determines it. Linux wheels contain the transport TCP but not UV, so on Linux the name UV
reproduces the error of those Windows wheels that were built without UV.
"""

import os
import sys
from multiprocessing import get_context

import torch
import torch.distributed as dist


def try_gloo(name: str | None, interface: str | None, pipe) -> None:
    """Create a gloo group of one rank in this process, and send the sum or the error."""
    if name is not None:
        os.environ["GLOO_DEVICE_TRANSPORT"] = name  # torch reads the variable only once
    if interface is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    try:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        total = torch.full((), 3.0)
        dist.all_reduce(total)
        pipe.send(f"all_reduce: {total.item()}")
        dist.destroy_process_group()
    except RuntimeError as error:
        pipe.send(str(error).splitlines()[0])


def outcome(name: str | None, interface: str | None = None) -> str:
    """What gloo does with a transport of this name, in a process of its own."""
    ours, theirs = get_context("fork").Pipe()
    child = get_context("fork").Process(target=try_gloo, args=(name, interface, theirs))
    child.start()
    result = ours.recv()
    child.join()
    return result


def main() -> None:
    if sys.platform != "linux":
        sys.exit("This program needs Linux, because each system has different transports.")
    os.environ.pop("GLOO_DEVICE_TRANSPORT", None)
    by_name = {name: outcome(name) for name in (None, "TCP", "UV", "tcp")}
    for name, result in by_name.items():
        print(f"GLOO_DEVICE_TRANSPORT={'(not set)' if name is None else name}: {result}")
    missing = "makeDeviceForHostname(): unsupported gloo device"
    assert by_name[None] == by_name["TCP"] == "all_reduce: 3.0"
    assert by_name["UV"] == by_name["tcp"] == missing  # the names are upper case

    result = outcome("UV", interface="lo")
    print(f"UV, with GLOO_SOCKET_IFNAME=lo: {result}")
    assert result == "makeDeviceForInterface(): unsupported gloo device"
    assert outcome("TCP", interface="lo") == "all_reduce: 3.0"


if __name__ == "__main__":
    main()
