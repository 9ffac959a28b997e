"""Finds out why torch cannot use an NVIDIA GPU, and prints torch's message for this fault.

Without arguments the program examines this machine. With --invented it examines seven invented
machines, and compares its rule about compute capabilities with the rule of torch.
"""

import contextlib
import ctypes
import os
import sys
from dataclasses import dataclass, field

import torch

Version = tuple[int, int]


@dataclass
class Machine:
    """The facts that decide whether a kernel can run."""

    build: Version | None  # the CUDA version of the build of torch; None: a CPU build
    driver: Version | None  # the newest CUDA version that the driver supports; None: no driver
    gpus: list[Version]  # the compute capability of each GPU
    code: list[int] = field(default_factory=list)  # machine code in torch: 80 means sm_80
    visible: str | None = None  # CUDA_VISIBLE_DEVICES
    ptx: list[int] = field(default_factory=list)  # PTX in torch, which the driver compiles


def runs_on(code: int, gpu: Version) -> bool:
    """Return whether machine code runs: same major version, equal or later minor version."""
    return code // 10 == gpu[0] and code % 10 <= gpu[1]


def why(machine: Machine) -> str:
    """Return torch's message for the first fault, and a fix."""
    if machine.build is None:
        return "Torch not compiled with CUDA enabled: install a CUDA build of torch"
    if machine.driver is None:
        return (
            "Found no NVIDIA driver on your system: install the driver, "
            "or start the container with --gpus all"
        )
    if machine.driver[0] < machine.build[0]:  # the minor version does not matter
        found = 1000 * machine.driver[0] + 10 * machine.driver[1]
        return (
            f"The NVIDIA driver on your system is too old (found version {found}): "
            f"install a newer driver, or a build for CUDA {machine.driver[0]}"
        )
    if machine.visible in ("", "-1") or not machine.gpus:
        return "No CUDA GPUs are available: check CUDA_VISIBLE_DEVICES and nvidia-smi"
    for gpu in machine.gpus:
        compiled = any(10 * gpu[0] + gpu[1] >= code for code in machine.ptx)
        if not compiled and not any(runs_on(code, gpu) for code in machine.code):
            return (
                f"no kernel image is available for execution on the device: "
                f"the GPU needs sm_{gpu[0]}{gpu[1]}, the build has "
                + ", ".join(f"sm_{c}" for c in machine.code)
            )
    return "no fault found"


def this_machine() -> Machine:
    """Return the facts of this machine without initializing CUDA."""
    build = torch.version.cuda and tuple(map(int, torch.version.cuda.split(".")[:2]))
    number = ctypes.c_int(0)
    with contextlib.suppress(OSError):  # the driver installs this library; pip does not
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
    driver = (number.value // 1000, number.value % 1000 // 10) if number.value else None
    gpus = [torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())]
    code: dict[str, list[int]] = {"sm": [], "compute": []}  # machine code, and PTX
    for kind, number_of in (name.split("_") for name in torch.cuda.get_arch_list()):
        code[kind].append(int(number_of.rstrip("af")))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return Machine(build or None, driver, gpus, code["sm"], visible, code["compute"])


CU126 = [50, 60, 70, 75, 80, 86, 90]  # torch/cuda/__init__.py of 2.13, wheels for x86-64
CU130 = [75, 80, 86, 90, 100, 120]
INVENTED = {
    "a CPU build of torch": Machine(None, (13, 0), [(9, 0)]),
    "a container started without --gpus": Machine((13, 0), None, [], CU130),
    "a driver for CUDA 12.4, and a cu130 build": Machine((13, 0), (12, 4), [(8, 0)], CU130),
    "the same driver, and a cu126 build": Machine((12, 6), (12, 4), [(8, 0)], CU126),
    "a V100, and a cu130 build": Machine((13, 0), (13, 0), [(7, 0)], CU130),
    "a GPU that is newer than the code, and a build with PTX": Machine(
        (13, 0), (13, 0), [(12, 1)], code=[75, 80], ptx=[80]),
    "CUDA_VISIBLE_DEVICES is set, but empty": Machine(
        (13, 0), (13, 0), [(9, 0)], CU130, visible=""),
}  # fmt: skip


def main() -> None:
    if sys.argv[1:] != ["--invented"]:
        if torch.version.hip or torch.xpu.is_available() or sys.platform == "darwin":
            sys.exit("why_no_gpu.py examines NVIDIA GPUs, but this torch is for other devices")
        print(why(this_machine()))
        return
    for name, machine in INVENTED.items():
        print(f"{name}\n  {why(machine)}")
    assert [why(m).startswith("no fault") for m in INVENTED.values()].count(True) == 2
    assert why(INVENTED["the same driver, and a cu126 build"]).startswith("no fault")

    for gpus, code, ptx in (([(9, 0), (7, 0)], CU130, []), ([(7, 0)], [80], [80])):
        second = Machine((13, 0), (13, 0), gpus, code, ptx=ptx)
        assert why(second).startswith("no kernel image"), second  # PTX is too new for the GPU
    newer = Machine((13, 0), (13, 0), [(8, 6)], code=[75], ptx=[80])
    assert why(newer).startswith("no fault")  # PTX of the same generation
    for gpus, visible in (([(9, 0)], "-1"), ([], None)):
        assert why(Machine((13, 0), (13, 0), gpus, CU130, visible)).startswith("No CUDA GPUs")
    capabilities = [(5, 0), (6, 0), (6, 1), (7, 0), (7, 5), (8, 0), (8, 6), (8, 9), (9, 0),
                    (10, 0), (10, 3), (12, 0), (12, 1)]  # fmt: skip
    theirs = getattr(torch.cuda, "_code_compatible_with_device", None)  # not in every release
    if theirs is not None:
        for gpu in capabilities:
            for code in {*CU126, *CU130}:
                assert runs_on(code, gpu) == theirs(10 * gpu[0] + gpu[1], code), (code, gpu)
    for name, codes in (("cu126", CU126), ("cu130", CU130)):
        good = [f"{a}.{b}" for a, b in capabilities if any(runs_on(c, (a, b)) for c in codes)]
        print(f"{name} runs on {', '.join(good)}")


if __name__ == "__main__":
    main()
