"""Record the clock rates of the GPUs while commands run, and the reasons for low rates.

A GPU lowers the clock of its SMs when it reaches its power limit or becomes too hot. The same
kernel is then slower, so numbers that are measured on a GPU are recorded together with the
clock rate. NVML reports the clock rate. Its Python module is called pynvml (package
nvidia-ml-py). Without pynvml or without a driver, nothing is recorded.
"""

from __future__ import annotations

import threading
from types import ModuleType, TracebackType

from worldsize.model.transcript import Clocks

INTERVAL = 0.1  # seconds between two samples
IDLE = "nvmlClocksEventReasonGpuIdle"
REASONS = {  # names of bits in NVML: words for a transcript
    "nvmlClocksEventReasonSwPowerCap": "power limit",
    "nvmlClocksEventReasonSwThermalSlowdown": "heat (software)",
    "nvmlClocksThrottleReasonHwThermalSlowdown": "heat (hardware)",
    "nvmlClocksThrottleReasonHwPowerBrakeSlowdown": "power brake",
    "nvmlClocksThrottleReasonHwSlowdown": "hardware slowdown",
    "nvmlClocksEventReasonApplicationsClocksSetting": "clock setting",
    "nvmlClocksEventReasonSyncBoost": "sync boost",
    "nvmlClocksEventReasonDisplayClockSetting": "display clock setting",
}


def reasons(mask: int, nvml: ModuleType) -> tuple[str, ...]:
    """Return the reasons in a bit mask of NVML as words, and unknown bits as a number."""
    words = {getattr(nvml, name): text for name, text in REASONS.items()}
    unknown = mask & ~sum(words) & ~getattr(nvml, IDLE)
    found = [text for bit, text in words.items() if mask & bit]
    return (*found, *([f"reason {unknown:#x}"] if unknown else []))


class Recorder:
    """A context manager that samples the SM clocks of all GPUs of this machine.

    A GPU that NVML reports as idle is left out. Its first sample after an idle period is left
    out too, because its clock may still be rising. A kernel that is shorter than ``interval``
    seconds can be missed.
    """

    def __init__(self, nvml: ModuleType | None = None, interval: float = INTERVAL) -> None:
        self.nvml, self.interval = nvml or _nvml(), interval
        self.samples: list[tuple[int, int, int]] = []  # (MHz, maximum MHz, mask of reasons)
        self._idle: set[int] = set()  # the GPUs that were idle at the last sample
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Recorder:
        if self.nvml:
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        if self.nvml:
            self._thread.join()

    def _run(self) -> None:
        nvml = self.nvml
        try:
            nvml.nvmlInit()
            while not self._stop.wait(self.interval):
                self.sample()
            nvml.nvmlShutdown()
        except nvml.NVMLError:
            return  # no driver, or a GPU that does not report its clock

    def sample(self) -> None:
        """Add a sample for each GPU that is busy."""
        nvml = self.nvml
        for index in range(nvml.nvmlDeviceGetCount()):
            gpu = nvml.nvmlDeviceGetHandleByIndex(index)
            mask = nvml.nvmlDeviceGetCurrentClocksEventReasons(gpu)
            clock = nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM)
            maximum = nvml.nvmlDeviceGetMaxClockInfo(gpu, nvml.NVML_CLOCK_SM)
            if mask & getattr(nvml, IDLE):
                self._idle.add(index)
            elif index in self._idle:
                self._idle.discard(index)
            else:
                self.samples.append((clock, maximum, mask))

    def result(self) -> Clocks | None:
        """Return the range of the clock rate over all samples; None if no GPU was busy."""
        if not self.samples:
            return None
        clocks, maxima, masks = zip(*self.samples, strict=True)
        mask = 0
        for each in masks:
            mask |= each
        return Clocks(min(clocks), max(clocks), max(maxima), reasons(mask, self.nvml))


def _nvml() -> ModuleType | None:
    try:
        import pynvml
    except ModuleNotFoundError:
        return None
    return pynvml
