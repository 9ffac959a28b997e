"""Read the rows of gpu_metrics.py back from the files of TensorBoard and W&B.

A simulated NVML gives known readings. W&B runs offline, without an account or a network.

    pip install -r requirements/tensorboard.txt
"""

import json
import struct
from collections.abc import Iterator
from pathlib import Path

import torch
import wandb
from gpu_metrics import Gpu, StandIn, train
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto.wandb_internal_pb2 import Record

STEPS = 300  # more than a block of W&B's file holds
BLOCK = 32_768  # a .wandb file is a LevelDB log: no header of a record crosses a block's end


def in_board(folder: Path) -> dict[int, dict[str, float | str]]:
    """Rows by step, from TensorBoard's event file: scalars, which are fp32, and texts."""
    events = EventAccumulator(str(folder), {"scalars": 0, "tensors": 0}).Reload()  # 0: all
    rows: dict[int, dict[str, float | str]] = {}
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            rows.setdefault(event.step, {})[name] = event.value
    for name in events.Tags()["tensors"]:
        for event in events.Tensors(name):
            text = event.tensor_proto.string_val[0].decode()
            rows[event.step][name.removesuffix("/text_summary")] = text
    return rows


def in_wandb(file: Path) -> dict[int, dict[str, float | str]]:
    """Rows by step, from a .wandb file, without the columns of W&B, which begin with `_`."""
    rows = {}
    for data in records(file.read_bytes()):
        record = Record.FromString(data)
        if record.WhichOneof("record_type") == "history":
            values = {
                item.key or ".".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }
            rows[values["_step"]] = {k: v for k, v in values.items() if k[0] != "_"}
    return rows


def records(data: bytes) -> Iterator[bytes]:
    at, whole = 7, b""  # behind the file's own header
    while at + 7 <= len(data):
        if (left := BLOCK - at % BLOCK) < 7:
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole record, or its last part
            yield whole
            whole = b""


def check() -> None:
    """Where a block has no room for a header, the next record begins behind it."""
    first, second = b"a" * (BLOCK - 7 - 7 - 5), b"b"
    heads = [struct.pack("<IHB", 0, len(data), 1) for data in (first, second)]
    log = b"".join([bytes(7), heads[0], first, bytes(5), heads[1], second])
    assert list(records(log)) == [first, second]


def main() -> None:
    check()
    rows = train(Path("run"), Gpu(StandIn(), "GPU-b"), torch.device("cpu"), STEPS)
    wandb.teardown()  # its process writes on after `finish`, and ends here
    (file,) = Path("run").glob("wandb/offline-run-*/*.wandb")
    board, kept = in_board(Path("run/board")), in_wandb(file)
    assert len(kept) == STEPS and file.stat().st_size > BLOCK
    for row in rows:
        step = row.pop("step")
        in_fp32 = {
            k: v if isinstance(v, str) else torch.tensor(float(v)).item()
            for k, v in row.items()
        }
        assert kept[step] == row and board[step] == in_fp32, (step, row)
    print(f"{'step 2':16}  {'TensorBoard':13}  W&B")
    for name, value in rows[1].items():
        told = board[2][name]
        print(f"{name:16}  {told if isinstance(told, str) else f'{told:g}':13}  {value}")


if __name__ == "__main__":
    main()
