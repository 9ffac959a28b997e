"""Why torch sees no GPU: five facts, and the one sentence that torch says for each mismatch.

Without arguments it judges this machine; with --invented, seven that are made up, and it holds
its rule about compute capabilities to torch's own.
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
    """What decides whether a kernel can run."""

    build: Version | None  # CUDA that torch was built with; None: built for CPUs
    driver: Version | None  # the newest CUDA that the driver knows; None: no driver
    gpus: list[Version]  # the compute capability of each GPU
    code: list[int] = field(default_factory=list)  # what torch has kernels for: 80 is sm_80
    visible: str | None = None  # CUDA_VISIBLE_DEVICES
    ptx: list[int] = field(default_factory=list)  # and PTX, which the driver compiles


def runs_on(code: int, gpu: Version) -> bool:
    """Machine code runs within one major version, on the same minor version or a later one."""
    return code // 10 == gpu[0] and code % 10 <= gpu[1]


def why(machine: Machine) -> str:
    """The first thing in the way, with torch's words for it."""
    if machine.build is None:
        return "Torch not compiled with CUDA enabled: install a build with CUDA"
    if machine.driver is None:
        return "Found no NVIDIA driver on your system: install one, or start with --gpus all"
    if machine.driver[0] < machine.build[0]:  # within a major version, any minor one will do
        found = 1000 * machine.driver[0] + 10 * machine.driver[1]
        return (
            f"The NVIDIA driver on your system is too old (found version {found}): "
            f"a newer driver, or a build for CUDA {machine.driver[0]}"
        )
    if machine.visible in ("", "-1") or not machine.gpus:
        return "No CUDA GPUs are available: look at CUDA_VISIBLE_DEVICES, and at nvidia-smi"
    for gpu in machine.gpus:
        compiled = any(10 * gpu[0] + gpu[1] >= code for code in machine.ptx)
        if not compiled and not any(runs_on(code, gpu) for code in machine.code):
            return (
                f"no kernel image is available for execution on the device: "
                f"it is sm_{gpu[0]}{gpu[1]}, the build has "
                + ", ".join(f"sm_{c}" for c in machine.code)
            )
    return "nothing is in the way"


def this_machine() -> Machine:
    """The facts of the machine that this runs on, without starting CUDA."""
    build = torch.version.cuda and tuple(map(int, torch.version.cuda.split(".")[:2]))
    number = ctypes.c_int(0)
    with contextlib.suppress(OSError):  # the driver brings this library; no pip package does
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
    "a wheel from the index for CPUs": Machine(None, (13, 0), [(9, 0)]),
    "a container started without --gpus": Machine((13, 0), None, [], CU130),
    "a driver for CUDA 12.4, and a cu130 build": Machine((13, 0), (12, 4), [(8, 0)], CU130),
    "the same driver, and a cu126 build": Machine((12, 6), (12, 4), [(8, 0)], CU126),
    "a V100, and a cu130 build": Machine((13, 0), (13, 0), [(7, 0)], CU130),
    "a GPU later than the code, and a build with PTX": Machine(
        (13, 0), (13, 0), [(12, 1)], code=[75, 80], ptx=[80]),
    "the variable is set, and empty": Machine((13, 0), (13, 0), [(9, 0)], CU130, visible=""),
}  # fmt: skip


def main() -> None:
    if sys.argv[1:] != ["--invented"]:
        if torch.version.hip or torch.xpu.is_available() or sys.platform == "darwin":
            sys.exit("why_no_gpu.py is about NVIDIA's GPUs, and this torch is built for others")
        print(why(this_machine()))
        return
    for name, machine in INVENTED.items():
        print(f"{name}\n  {why(machine)}")
    assert [why(m).startswith("nothing") for m in INVENTED.values()].count(True) == 2
    assert why(INVENTED["the same driver, and a cu126 build"]).startswith("nothing")

    for gpus, code, ptx in (([(9, 0), (7, 0)], CU130, []), ([(7, 0)], [80], [80])):
        second = Machine((13, 0), (13, 0), gpus, code, ptx=ptx)
        assert why(second).startswith("no kernel image"), second  # the second one; PTX too new
    newer = Machine((13, 0), (13, 0), [(8, 6)], code=[75], ptx=[80])
    assert why(newer).startswith("nothing")  # PTX of its own generation
    for gpus, visible in (([(9, 0)], "-1"), ([], None)):
        assert why(Machine((13, 0), (13, 0), gpus, CU130, visible)).startswith("No CUDA GPUs")
    capabilities = [(5, 0), (6, 0), (6, 1), (7, 0), (7, 5), (8, 0), (8, 6), (8, 9), (9, 0),
                    (10, 0), (10, 3), (12, 0), (12, 1)]  # fmt: skip
    torchs = getattr(torch.cuda, "_code_compatible_with_device", None)  # not in every release
    if torchs is not None:
        for gpu in capabilities:
            for code in {*CU126, *CU130}:
                assert runs_on(code, gpu) == torchs(10 * gpu[0] + gpu[1], code), (code, gpu)
    for name, codes in (("cu126", CU126), ("cu130", CU130)):
        good = [f"{a}.{b}" for a, b in capabilities if any(runs_on(c, (a, b)) for c in codes)]
        print(f"{name} runs on {', '.join(good)}")


if __name__ == "__main__":
    main()
