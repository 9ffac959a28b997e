"""Reports the cores, the memory and the GPUs of this machine, their links, and the network.

The report contains everything on which a launch depends: the number of ranks that fit, whether
two GPUs can access the memory of each other, over NVLink or through the host, and the speed of
the network according to its drivers. Without a GPU, the program prints that there is none.
`--details` lists the network interfaces.
"""

import argparse
import os
import tempfile
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

COMMON_ANCESTOR = {  # nvmlGpuTopologyLevel_t: where the PCIe paths of two GPUs meet
    0: "same board",
    10: "one PCIe switch (PIX)",
    20: "several PCIe switches (PXB)",
    30: "a PCIe host bridge (PHB)",
    40: "one NUMA node (NODE)",
    50: "the link between sockets (SYS)",
}


def host() -> tuple[int, float]:
    """The number of cores that this process may use, and the GiB of memory."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return cores or 1, pages / 2**30


def interfaces(folder: Path = Path("/sys/class/net")) -> dict[str, int]:
    """Network interfaces that are up, with the Mb/s that their drivers report, or 0."""
    found = {}
    for path in sorted(folder.glob("*")):  # empty if this is not Linux
        try:
            up = int((path / "flags").read_text(), 16) & 1  # IFF_UP
        except (OSError, ValueError):
            continue
        if not up or path.name == "lo":
            continue
        try:
            speed = int((path / "speed").read_text())
        except (OSError, ValueError):
            speed = 0
        found[path.name] = max(speed, 0)  # virtual interfaces report -1
    return found


def infiniband(folder: Path = Path("/sys/class/infiniband")) -> list[str]:
    """The ports of RDMA devices, with the rate that the kernel reports."""
    return [
        f"{port.parts[-3]} port {port.name}: {(port / 'rate').read_text().strip()}"
        for port in sorted(folder.glob("*/ports/*"))
    ]


def summary(network: dict[str, int]) -> str:
    fastest = max(network.values(), default=0)
    return f"≈{len(network)} interfaces up, fastest ≈{fastest} Mb/s (0: not stated)"


def nvlinks(pynvml, handle) -> int:
    """The number of NVLink connections of this GPU that are up."""
    up = 0
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        try:
            up += pynvml.nvmlDeviceGetNvLinkState(handle, link)
        except pynvml.NVMLError:  # this GPU has no such link
            break
    return up


def report_nvidia(count: int) -> None:
    try:
        import pynvml
    except ImportError:
        print("  for NVLink and PCIe: pip install nvidia-ml-py")
        return
    pynvml.nvmlInit()
    # NVML lists all GPUs of the machine, and CUDA lists only the visible GPUs: match by UUID
    handles = [
        pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(i).uuid}")
        for i in range(count)
    ]
    for index, handle in enumerate(handles):
        generation = pynvml.nvmlDeviceGetMaxPcieLinkGeneration(handle)  # an idle link is slower
        lanes = pynvml.nvmlDeviceGetCurrPcieLinkWidth(handle)
        possible = pynvml.nvmlDeviceGetMaxPcieLinkWidth(handle)
        print(
            f"  GPU {index}: {nvlinks(pynvml, handle)} NVLinks up, "
            f"PCIe generation {generation}, {lanes} of {possible} lanes"
        )
    for i in range(count):
        for j in range(i + 1, count):
            level = pynvml.nvmlDeviceGetTopologyCommonAncestor(handles[i], handles[j])
            print(f"  GPU {i} and {j} meet at {COMMON_ANCESTOR.get(level, level)}")
    pynvml.nvmlShutdown()


def report_gpus() -> None:
    if not torch.accelerator.is_available():
        print("accelerators: none, so every rank runs on the CPU and talks over gloo")
        return
    count = torch.accelerator.device_count()
    kind = torch.accelerator.current_accelerator().type
    print(f"accelerators: {count} × {kind}; at most {count} ranks on this node with one each")
    if kind != "cuda":
        return
    for index in range(count):
        properties = torch.cuda.get_device_properties(index)
        memory = properties.total_memory / 2**30
        print(f"  GPU {index}: {properties.name}, {memory:.0f} GiB")
    pairs = [(i, j) for i in range(count) for j in range(count) if i != j]
    reach = sum(torch.cuda.can_device_access_peer(i, j) for i, j in pairs)
    if pairs:
        print(f"  peer access: {reach} of {len(pairs)} ordered pairs")
    if torch.version.cuda:
        report_nvidia(count)


def check_host() -> None:
    """Test the functions with 8 GiB of memory, invented interfaces, and one RDMA port."""
    with mock.patch.object(os, "sysconf", {"SC_PHYS_PAGES": 2**21, "SC_PAGE_SIZE": 4096}.get):
        assert host()[1] == 8  # GiB of all memory, and not only of free memory
    if hasattr(os, "sched_setaffinity"):  # the cores of this process, not of the machine
        allowed = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {min(allowed)})
        assert host()[0] == 1
        os.sched_setaffinity(0, allowed)
    with tempfile.TemporaryDirectory() as folder:  # lo reaches only this machine; e1 is down
        folder = Path(folder)
        lines = "e0 0x3 10000", "e1 0x2 50000", "e2 0x3 25000", "lo 0x9 -1", "veth 0x3 -1"
        for name, flags, speed in map(str.split, lines):
            (path := folder / name).mkdir()
            (path / "flags").write_text(flags)
            (path / "speed").write_text(speed)
        assert interfaces(folder) == {"e0": 10000, "e2": 25000, "veth": 0}
        assert summary(interfaces(folder)).startswith("≈3 interfaces up, fastest ≈25000 Mb/s")
        (path := folder / "mlx5_0/ports/1").mkdir(parents=True)
        (path / "rate").write_text("400 Gb/sec (4X NDR)\n")
        assert infiniband(folder) == ["mlx5_0 port 1: 400 Gb/sec (4X NDR)"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--details", action="store_true", help="name each network interface")
    details = parser.parse_args().details

    check_host()
    cores, memory = host()
    print(f"host: ≈{cores} cores, ≈{memory:.0f} GiB of memory")
    report_gpus()
    network = interfaces()
    print(f"network: {summary(network)}")
    print(f"RDMA ports: ≈{len(infiniband())}")
    if details:
        for name, speed in network.items():
            print(f"  {name}: {f'{speed} Mb/s' if speed else 'speed not stated'}")
        for port in infiniband():
            print(f"  {port}")
    backends = {"gloo": dist.is_gloo_available(), "MPI": dist.is_mpi_available()}
    print("; ".join(f"{name}: {'yes' if there else 'no'}" for name, there in backends.items()))


if __name__ == "__main__":
    main()
