"""Read a GPU through NVML: load, memory, power, clocks, and why the clocks are low.

The program needs nvidia-ml-py (the module is called pynvml) and a driver. With the arguments
`decode 0x24` it needs no driver, and explains a mask of clock event reasons. If torch can use
the GPU, it multiplies matrices during the reading.
"""

import sys
import time

try:
    import pynvml
except ModuleNotFoundError:
    sys.exit("pynvml is missing: pip install nvidia-ml-py")

# --8<-- [start:reasons]
REASONS = {
    pynvml.nvmlClocksEventReasonGpuIdle: "idle: nothing runs",
    pynvml.nvmlClocksEventReasonApplicationsClocksSetting: "somebody set application clocks",
    pynvml.nvmlClocksEventReasonSwPowerCap: "power limit reached",
    pynvml.nvmlClocksThrottleReasonHwSlowdown: "hardware slowdown: heat, or power brake",
    pynvml.nvmlClocksEventReasonSyncBoost: "held to the slowest GPU of a sync boost group",
    pynvml.nvmlClocksEventReasonSwThermalSlowdown: "too hot: software slowdown",
    pynvml.nvmlClocksThrottleReasonHwThermalSlowdown: "too hot: hardware slowdown",
    pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown: "power brake from outside",
    pynvml.nvmlClocksEventReasonDisplayClockSetting: "display clock setting",
}


def decode(mask: int) -> list[str]:
    """The reasons in a mask, in words. Unknown bits are printed as a number."""
    words = [text for bit, text in REASONS.items() if mask & bit]
    unknown = mask & ~sum(REASONS)
    return words + ([f"unknown bits {unknown:#x}"] if unknown else []) or ["none: full clock"]


# --8<-- [end:reasons]


# --8<-- [start:report]
def report(index: int) -> None:
    gpu = pynvml.nvmlDeviceGetHandleByIndex(index)
    rates = pynvml.nvmlDeviceGetUtilizationRates(gpu)
    memory = pynvml.nvmlDeviceGetMemoryInfo(gpu)
    watts = pynvml.nvmlDeviceGetPowerUsage(gpu) / 1000  # NVML returns milliwatts
    limit = pynvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1000
    clock = pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM)
    most = pynvml.nvmlDeviceGetMaxClockInfo(gpu, pynvml.NVML_CLOCK_SM)
    degrees = pynvml.nvmlDeviceGetTemperature(gpu, pynvml.NVML_TEMPERATURE_GPU)
    print(f"GPU {index}: some kernel ran ≈{rates.gpu} % of the time, memory ≈{rates.memory} %")
    print(f"  memory in use ≈{memory.used / 2**30:.1f} GiB of ≈{memory.total / 2**30:.1f} GiB")
    print(f"  power ≈{watts:.0f} W of ≈{limit:.0f} W, SM clock ≈{clock} MHz of ≈{most} MHz")
    print(f"  temperature ≈{degrees} °C")
    mask = pynvml.nvmlDeviceGetCurrentClocksEventReasons(gpu)
    print(f"  clocks: {'; '.join(decode(mask))}")


# --8<-- [end:report]


def work() -> None:
    """Products for two seconds, the last of them queued: NVML's sample takes up to one."""
    import torch  # here, as decoding needs none

    if torch.cuda.is_available():
        a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
        end = time.monotonic() + 2
        while time.monotonic() < end:
            torch.cuda.synchronize()
            for _ in range(100):
                a @ a


def main() -> None:
    if len(sys.argv) == 3 and sys.argv[1] == "decode":
        try:
            mask = int(sys.argv[2], 16)
        except ValueError:
            sys.exit(f"a mask is a hexadecimal number such as 0x24, not {sys.argv[2]}")
        print(f"{sys.argv[2]}: {'; '.join(decode(mask))}")
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        sys.exit(f"no NVIDIA driver to ask: {type(error).__name__}: {error}")
    work()
    for index in range(pynvml.nvmlDeviceGetCount()):
        report(index)
    pynvml.nvmlShutdown()


if __name__ == "__main__":
    main()
