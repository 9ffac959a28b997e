"""Counts the bytes of an all-reduce and of its two halves in a ring and in a switch that adds.

Each GPU is connected to one switch by a port, and a port has two directions. In a ring, a GPU
forwards partial sums that another GPU will add to. A switch that can add (NVIDIA's SHARP) reads
a chunk from all ports and returns one sum to the GPU that asked. It also copies a chunk that
is stored once to all ports. The program moves all bytes through ports that count them, and
compares the counts with formulas. Then it compares the formulas with all-reduces that a user
measured, and evaluates them for nodes of 8 and of 72 GPUs.
"""

import math

import torch

KIB = 1024


class Switch:
    """The ports of n GPUs. Each port counts the bytes to the switch and from the switch."""

    def __init__(self, n: int) -> None:
        self.up, self.down = [0] * n, [0] * n

    def send(self, tensor: torch.Tensor, source: int, target: int) -> torch.Tensor:
        self.up[source] += tensor.nbytes
        self.down[target] += tensor.nbytes
        return tensor.clone()

    def load_sum(self, parts: list[torch.Tensor], target: int) -> torch.Tensor:
        """`target` reads a sum: all ports send, and the switch adds and returns one sum."""
        for port, part in enumerate(parts):
            self.up[port] += part.nbytes
        self.down[target] += parts[0].nbytes
        return torch.stack(parts).sum(dim=0)

    def store_all(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """`source` writes a tensor, and the switch copies it to every port."""
        self.up[source] += tensor.nbytes
        self.down = [port + tensor.nbytes for port in self.down]
        return tensor


def ring(switch: Switch, tensors: list[torch.Tensor], halves: str) -> list[torch.Tensor]:
    """Reduce-scatter, all-gather or both, in place, of one tensor per GPU."""
    n = len(tensors)
    chunks = [tensor.chunk(n) for tensor in tensors]
    for step in range((n - 1) * len(halves.split("+"))):
        adds = "reduce" in halves and step < n - 1
        begin = 0 if adds else 1  # GPU r has the finished chunk r + 1 before an all-gather
        moved = {
            r: switch.send(chunks[r][(r + begin - step % (n - 1)) % n], r, (r + 1) % n)
            for r in range(n)
        }
        for r, chunk in moved.items():
            target = chunks[(r + 1) % n][(r + begin - step % (n - 1)) % n]
            target.copy_(target + chunk if adds else chunk)
    return tensors


def in_switch(switch: Switch, tensors: list[torch.Tensor], halves: str) -> list[torch.Tensor]:
    """Do the same through a switch, whose loads add and whose stores copy.

    GPU r owns chunk r + 1, as in `ring`.
    """
    n = len(tensors)
    chunks = [tensor.chunk(n) for tensor in tensors]
    for r in range(n):
        mine = (r + 1) % n
        if "reduce" in halves:
            chunks[r][mine].copy_(switch.load_sum([chunk[mine] for chunk in chunks], r))
        if "gather" in halves:
            whole = switch.store_all(chunks[r][mine], r)
            for chunk in chunks:
                chunk[mine].copy_(whole)
    return tensors


def formula(n: int, adds: bool, halves: str) -> float:
    """Bytes in the busier direction of the busiest port, per byte of the tensor."""
    if not adds:
        return len(halves.split("+")) * (n - 1) / n
    return 1 + 1 / n if halves == "reduce+gather" else 1


def count(n: int) -> None:
    words = "bytes that the busiest port sends up and receives down, per byte of S"
    print(f"{n} GPUs: {words}")
    for halves in ("reduce+gather", "reduce", "gather"):
        for name, algorithm in (("ring", ring), ("in switch", in_switch)):
            torch.manual_seed(0)
            tensors = [torch.randint(9, (72 * 32,)).float() for _ in range(n)]
            total, before = torch.stack(tensors).sum(dim=0), [t.clone() for t in tensors]
            size, switch = tensors[0].nbytes, Switch(n)
            for r, got in enumerate(algorithm(switch, tensors, halves)):
                mine = (r + 1) % n
                if halves == "reduce+gather":
                    assert torch.equal(got, total)
                elif halves == "reduce":
                    assert torch.equal(got.chunk(n)[mine], total.chunk(n)[mine])
                else:
                    owners = [before[(c - 1) % n].chunk(n)[c] for c in range(n)]
                    assert torch.equal(got, torch.cat(owners))
            up, down = max(switch.up) / size, max(switch.down) / size
            predicted = formula(n, name != "ring", halves)
            assert math.isclose(max(up, down), predicted), (name, halves)
            print(
                f"  {halves:14} {name:10} {up:.3f} up, {down:.3f} down; formula {predicted:.3f}"
            )


def main() -> None:
    for n in (8, 72):
        count(n)

    reported = {5: 420, 6: 440, 7: 460, 8: 480}  # GB/s of bus bandwidth, NCCL issue 1455
    ratio = {  # bytes that bus bandwidth assumes, for each byte that a port moves
        n: formula(n, False, "reduce+gather") / formula(n, True, "reduce+gather")
        for n in reported
    }
    rate = reported[8] / ratio[8]  # fitted to 8 GPUs, and predicts the other three
    print(
        f"all-reduce of H100s: with 8 GPUs, 480 GB/s of bus bandwidth are {rate:.0f} on a port"
    )
    for n in (5, 6, 7):
        predicted = rate * ratio[n]
        print(f"  {n} GPUs at this rate: {predicted:.0f} predicted, {reported[n]} reported")
        assert abs(predicted / reported[n] - 1) < 0.025
        assert abs(rate * ratio[8] / reported[n] - 1) > 0.04  # a constant would predict worse

    print("nodes of 8 H100 and of 72 GB200, at 40% of their FLOP/s; cards of 50 GB/s")
    rows: dict[str, list[str]] = {}  # FLOP/s and links from NVIDIA's datasheets
    for gpus, flops, link in ((8, 989e12, 450e9), (72, 2500e12, 900e9)):
        p, card, total = 0.4 * flops, 50e9, 1152  # 144 nodes of 8 GPUs, or 16 of 72 GPUs
        nodes, size = total // gpus, 1e9
        inside = 2 * (gpus - 1) / gpus * size / link
        inside_adds = (1 + 1 / gpus) * size / link
        across = 2 * (nodes - 1) / nodes * size / gpus / card
        across_adds = size / gpus / card  # sent up and down once
        halves_add = 2 * size / link  # one before and one after the cards' part
        experts = math.ceil(p / card), math.ceil(p / link)
        for name, value in (
            ("all-reduce of 1 GB in a node, ring", f"{1e3 * inside:.2f} ms"),
            ("  in switch", f"{1e3 * inside_adds:.2f} ms"),
            (f"all-reduce of 1 GB over {total:,} GPUs", f"{1e3 * (inside + across):.2f} ms"),
            ("  of that, over the cards", f"{1e3 * across:.2f} ms"),
            ("  if all switches add", f"{1e3 * (halves_add + across_adds):.2f} ms"),
            ("TP 8, h = 16,384: waits / computes", f"{2 * 7 / (9 * 16384) * p / link:.0%}"),
            ("TP of a node, the same", f"{2 * (gpus - 1) / (9 * 16384) * p / link:.0%}"),
            (
                "expert width that hides EP, network / NVLink",
                f"{experts[0]:,} / {experts[1]:,}",
            ),
            ("EP 64: choices that cross the network", f"{1 - min(gpus, 64) / 64:.0%}"),
        ):
            rows.setdefault(name, []).append(value)
    for name, values in rows.items():
        print(f"  {name:46} " + "  ".join(f"{value:>14}" for value in values))
    for name, by_hand in {
        # 7/4 GB at 450 GB/s and 143/576 GB at 50; 71/36 GB at 900 and 15/576 GB at 50 GB/s
        "all-reduce of 1 GB over 1,152 GPUs": ["8.85 ms", "2.71 ms"],
        # 2 GB at 450 GB/s and 1/8 GB at 50; 2 GB at 900 and 1/72 GB at 50 GB/s
        "  if all switches add": ["6.94 ms", "2.50 ms"],
        # 14 and 142, divided by 9 · 16,384, times 879 and 1,111 FLOPs per byte
        "TP of a node, the same": ["8%", "107%"],
        "EP 64: choices that cross the network": ["88%", "0%"],  # 7 of 8 nodes, 0 of 1 node
    }.items():
        assert rows[name] == by_hand, (name, rows[name])


if __name__ == "__main__":
    main()
