"""Reads the ECC counters and the row remapper of each GPU, and says what they require.

Four questions decide, the strictest first. Did a remapping fail? Did the driver ask for a
reset? Did an uncorrectable error happen since the driver was loaded? Does a remapping wait for
a reset? On a machine with a GPU the program reads NVML. Elsewhere it reads SYNTHETIC records
through the same function: they were written for this program, and no GPU has counted them.

https://docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt/
"""

from dataclasses import dataclass

try:
    import pynvml
except ImportError:  # then the synthetic records are shown
    pynvml = None

CORRECTED, UNCORRECTED = 0, 1  # nvmlMemoryErrorType_t
VOLATILE, AGGREGATE = 0, 1  # nvmlEccCounterType_t: since the driver was loaded, in its life
PENDING_PAGES = 31  # NVML_FI_DEV_RETIRED_PENDING
RECOVERY_ACTION = 230  # NVML_FI_DEV_GET_GPU_RECOVERY_ACTION
ACTIONS = ["none", "reset the GPU", "reboot the node", "drain P2P", "drain and reset"]


@dataclass
class Memory:
    """What one GPU reports about its memory; None where it does not support the question."""

    ecc: int | None  # 1: on
    volatile_corrected: int | None
    volatile_uncorrected: int | None
    aggregate_corrected: int | None
    aggregate_uncorrected: int | None
    remapped_corrected: int | None  # rows, since the GPU was made
    remapped_uncorrected: int | None
    remapping_pending: int | None
    remapping_failed: int | None
    pages_pending: int | None  # page retirement, before Ampere
    recovery_action: int | None  # index in ACTIONS


def read(nvml, handle) -> Memory:
    """The memory report of one GPU through `nvml`, which is pynvml or a simulation of it."""

    def ask(name: str, *arguments):
        try:
            return getattr(nvml, name)(handle, *arguments)
        except nvml.NVMLError:  # this GPU or driver does not support it
            return None

    def field(number: int) -> int | None:
        value = (ask("nvmlDeviceGetFieldValues", [number]) or [None])[0]
        return value.value.uiVal if value is not None and value.nvmlReturn == 0 else None

    ecc = ask("nvmlDeviceGetEccMode")
    rows = ask("nvmlDeviceGetRemappedRows") or (None,) * 4
    return Memory(
        None if ecc is None else ecc[0],
        ask("nvmlDeviceGetTotalEccErrors", CORRECTED, VOLATILE),
        ask("nvmlDeviceGetTotalEccErrors", UNCORRECTED, VOLATILE),
        ask("nvmlDeviceGetTotalEccErrors", CORRECTED, AGGREGATE),
        ask("nvmlDeviceGetTotalEccErrors", UNCORRECTED, AGGREGATE),
        *rows,
        field(PENDING_PAGES),
        field(RECOVERY_ACTION),
    )


def decide(memory: Memory) -> str:
    if memory.remapping_failed:
        return "drain the node, run the field diagnostic: it decides about a replacement"
    if memory.recovery_action:
        return f"the driver requires: {ACTIONS[memory.recovery_action]}"
    if memory.volatile_uncorrected:
        waits = memory.remapping_pending or memory.pages_pending
        then = ", then reset the GPU" if waits else ""
        return f"restart the application that was hit{then}"
    if memory.remapping_pending or memory.pages_pending:
        return "reset the GPU at the next break; the job may go on until then"
    if memory.ecc == 0:
        return "turn ECC on: zeros mean nothing while it is off"
    return "nothing"


class Synthetic:
    """As much of pynvml as `read` needs, over records that were written for this program."""

    class NVMLError(Exception):
        pass

    def __init__(self, records: list[dict]) -> None:
        self.records = records

    def nvmlDeviceGetEccMode(self, index: int) -> list[int]:  # current, after a reboot
        return [self.records[index].get("ecc", 1), 1]

    def nvmlDeviceGetTotalEccErrors(self, index: int, kind: int, counter: int) -> int:
        names = {(0, 0): "corrected now", (1, 0): "uncorrected now"}
        names |= {(0, 1): "corrected ever", (1, 1): "uncorrected ever"}
        return self.records[index].get(names[kind, counter], 0)

    def nvmlDeviceGetRemappedRows(self, index: int) -> tuple[int, int, int, int]:
        if "old" in self.records[index]:
            raise self.NVMLError("Not Supported")
        return self.records[index].get("rows", (0, 0, 0, 0))

    def nvmlDeviceGetFieldValues(self, index: int, numbers: list[int]) -> list:
        class Value:
            nvmlReturn = 0

            class value:
                uiVal = self.records[index].get(numbers[0], 0)

        return [Value]


RECORDS = [  # name, counters, what NVIDIA's documents require, read by hand
    ("healthy", {}, "nothing"),
    ("history", {"uncorrected ever": 2, "rows": (0, 2, 0, 0)}, "nothing"),
    ("corrected", {"corrected now": 310, "corrected ever": 9_000}, "nothing"),
    (
        "contained",
        {"uncorrected now": 1, "uncorrected ever": 1, "rows": (0, 1, 1, 0)},
        "restart the application that was hit, then reset the GPU",
    ),
    (
        "pending",
        {"uncorrected ever": 1, "rows": (1, 1, 1, 0)},
        "reset the GPU at the next break; the job may go on until then",
    ),
    (
        "exhausted",
        {"uncorrected now": 1, "uncorrected ever": 9, "rows": (0, 9, 0, 1)},
        "drain the node, run the field diagnostic: it decides about a replacement",
    ),
    (
        "driver",
        {"uncorrected now": 1, "uncorrected ever": 1, RECOVERY_ACTION: 4},
        "the driver requires: drain and reset",
    ),
    (
        "old GPU",
        {"old": True, "uncorrected ever": 1, PENDING_PAGES: 1},
        "reset the GPU at the next break; the job may go on until then",
    ),
    ("ECC off", {"ecc": 0}, "turn ECC on: zeros mean nothing while it is off"),
]


def show(name: str, memory: Memory) -> None:
    def pair(*numbers: int | None) -> str:
        return "/".join("-" if number is None else str(number) for number in numbers)

    now = pair(memory.volatile_corrected, memory.volatile_uncorrected)
    ever = pair(memory.aggregate_corrected, memory.aggregate_uncorrected)
    rows = pair(memory.remapped_corrected, memory.remapped_uncorrected)
    flags = {
        "ECC off": memory.ecc == 0,
        "remapping pending": memory.remapping_pending,
        "remapping FAILED": memory.remapping_failed,
        "pages pending": memory.pages_pending,
        "driver's request": memory.recovery_action,
    }
    words = ", ".join(flag for flag, on in flags.items() if on) or "-"
    print(f"{name:10} {now:>8} {ever:>9} {rows:>4}  {words}")
    print(f"           -> {decide(memory)}")


def read_machine() -> list[tuple[str, Memory]]:
    """The memory reports of this machine's GPUs; none without a driver."""
    if pynvml is None:
        return []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    indices = range(pynvml.nvmlDeviceGetCount())
    found = [(f"GPU {i}", read(pynvml, pynvml.nvmlDeviceGetHandleByIndex(i))) for i in indices]
    pynvml.nvmlShutdown()
    return found


def main() -> None:
    real = read_machine()
    simulation = Synthetic([record for _, record, _ in RECORDS])
    synthetic = [(name, read(simulation, i)) for i, (name, _, _) in enumerate(RECORDS)]
    for (name, memory), (_, _, expected) in zip(synthetic, RECORDS, strict=True):
        assert decide(memory) == expected, name
    print("GPUs of this machine" if real else "SYNTHETIC records, as NVML found no GPU")
    print("each pair of numbers: because of corrected/uncorrected errors")
    print("GPU        volatile aggregate rows  flags")
    for name, memory in real or synthetic:
        show(name, memory)


if __name__ == "__main__":
    main()
