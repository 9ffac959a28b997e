"""Log the readings of a GPU next to the loss, one row per step: JSON, TensorBoard, W&B offline.

The program finds the GPU that torch uses by its UUID, because NVML numbers all GPUs of the
machine, and torch numbers those of CUDA_VISIBLE_DEVICES. If a value cannot be read, its column
contains a text and never a zero. A simulated NVML with known readings checks units and columns.

Optional: pip install nvidia-ml-py tensorboard wandb (read_back.py reads what these two keep)
"""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn

try:
    import pynvml
except ModuleNotFoundError:
    pynvml = None

# bits of nvml.py's mask: power limit; heat in software or hardware, power brake
POWER_CAP, SLOWED = 0x04, 0x08 | 0x20 | 0x40 | 0x80


# --8<-- [start:find]
class Gpu:
    """The readings of one GPU through `nvml`, which is pynvml or a simulation of it."""

    def __init__(self, nvml, uuid: str | None) -> None:
        self.nvml, self.why = nvml, None
        try:
            if nvml is None:
                raise RuntimeError("pip install nvidia-ml-py")
            nvml.nvmlInit()
            if uuid is None:
                raise RuntimeError("torch trains on the CPU")
            self.handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        except Exception as error:  # NVMLError, of which there is none without pynvml
            self.why = f"absent: {error}"

    # --8<-- [end:find]

    # --8<-- [start:read]
    def read(self) -> dict[str, float | str]:
        """A number or a text for each column, in percent, GiB, watts, MHz, and 0 or 1."""
        if self.why:
            return {"gpu": self.why}
        nvml, gpu = self.nvml, self.handle

        def reasons() -> int:
            return nvml.nvmlDeviceGetCurrentClocksEventReasons(gpu)

        columns = {
            "gpu_busy_percent": lambda: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu,
            "gpu_memory_gib": lambda: nvml.nvmlDeviceGetMemoryInfo(gpu).used / 2**30,
            "gpu_watts": lambda: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000,  # it has milliwatts
            "gpu_sm_mhz": lambda: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM),
            "gpu_slowed": lambda: int(reasons() & SLOWED > 0),
            "gpu_power_capped": lambda: int(reasons() & POWER_CAP > 0),
        }
        row: dict[str, float | str] = {}
        for name, ask in columns.items():
            try:
                row[name] = ask()
            except nvml.NVMLError as error:  # a kind of GPU may lack one: Not Supported
                row[name] = str(error)
        return row

    # --8<-- [end:read]


# --8<-- [start:log]
class Log:
    """`log(step, **values)` into a file of JSON lines, and into what is installed."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.file = (folder / "run.jsonl").open("a", buffering=1)
        self.board = self.run = None
        try:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(str(folder / "board"))
        except ImportError:
            pass
        os.environ["WANDB_SILENT"] = "true"
        try:
            from wandb import init

            self.run = init(project="book", mode="offline", dir=str(folder))
        except ImportError:
            pass

    def log(self, step: int, **values: float | str) -> None:
        self.file.write(json.dumps({"step": step, **values}) + "\n")
        if self.board:
            for name, value in values.items():
                if isinstance(value, str):
                    self.board.add_text(name, value, step)
                else:
                    self.board.add_scalar(name, value, step)
        if self.run:
            self.run.log(values, step=step)

    def close(self) -> None:
        self.file.close()
        if self.board:
            self.board.close()
        if self.run:
            self.run.finish()


# --8<-- [end:log]


def train(folder: Path, gpu: Gpu, device: torch.device, steps: int = 3) -> list[dict]:
    """Rows of a small regression on `device`, as they stand in the file."""
    torch.manual_seed(0)
    model = nn.Linear(8, 1).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(64, 8).to(device)
    log = Log(folder)
    for step in range(1, steps + 1):
        loss = nn.functional.mse_loss(model(x), x.sum(-1, keepdim=True))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        log.log(step, loss=round(loss.item(), 4), **gpu.read())
    log.close()
    return [json.loads(line) for line in (folder / "run.jsonl").read_text().splitlines()]


class StandIn:
    """NVML with two GPUs of known readings; the second has no power sensor, and is hot."""

    NVML_CLOCK_SM, NVMLError = 1, RuntimeError
    uuids = ("GPU-a", "GPU-b")
    reads = 0  # in each read the GPU is busier by 1%

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        return self.uuids.index(uuid)

    def nvmlDeviceGetUtilizationRates(self, gpu: int) -> SimpleNamespace:
        self.reads += 1
        return SimpleNamespace(gpu=(95, 97)[gpu] + self.reads, memory=40)

    def nvmlDeviceGetMemoryInfo(self, gpu: int) -> SimpleNamespace:
        return SimpleNamespace(used=(3 << 29, 5 << 30)[gpu], total=80 << 30, free=75 << 30)

    def nvmlDeviceGetPowerUsage(self, gpu: int) -> int:
        if gpu == 1:
            raise RuntimeError("Not Supported")
        return 692_000

    def nvmlDeviceGetClockInfo(self, gpu: int, clock: int) -> int:
        return {1: (1410, 1980)[gpu], 2: 3201}[clock]

    def nvmlDeviceGetCurrentClocksEventReasons(self, gpu: int) -> int:
        return (0x04 | 0x01, 0x20)[gpu]


def main() -> None:
    names = ["gpu_busy_percent", "gpu_memory_gib", "gpu_watts", "gpu_sm_mhz"]
    names += ["gpu_slowed", "gpu_power_capped"]
    known = {
        "GPU-a": [98, 1.5, 692.0, 1410, 0, 1],
        "GPU-b": [100, 5.0, "Not Supported", 1980, 1, 0],
    }
    for uuid, values in known.items():
        rows = train(Path(uuid), Gpu(StandIn(), uuid), torch.device("cpu"))
        assert [row["step"] for row in rows] == [1, 2, 3]
        assert rows[0]["loss"] > rows[1]["loss"] > rows[2]["loss"]
        for row in rows:
            busy = values[0] + row["step"] - 3  # each row has a reading of its own step
            assert [row[name] for name in names] == [busy, *values[1:]]
    print("a stand-in's       GPU-a   GPU-b")
    for name, first, second in zip(names, *known.values(), strict=True):
        print(f"{name:16} {first:>7}   {second}")

    device, uuid = torch.device("cpu"), None
    if torch.cuda.is_available():
        device = torch.device("cuda", 0)
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    row = train(Path("run"), Gpu(pynvml, uuid), device)[-1]
    if uuid is None:
        print(f"here: {json.dumps(row)}")
        assert row["gpu"].startswith("absent: ")
    else:
        assert not [value for value in row.values() if isinstance(value, str)], row
        print(f"here: step 3, loss {row['loss']:.4f}")
        for name in names[:4]:
            print(f"{name:16} ≈{row[name]:.0f}")


if __name__ == "__main__":
    main()
