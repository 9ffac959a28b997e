"""Bytes per GPU and step of Llama 3 405B for each dimension, and their times on two links.

The layouts are the second and the third row of Table 4 in the Llama 3 paper: 405B parameters on
16,384 H100s, with TP 8 × PP 16 × DP 128 for sequences of 8,192 tokens, and with TP 8 × CP 16 ×
PP 16 × DP 8 for 131,072. Each row is a formula for the bytes that one GPU sends in a step,
divided by 450 GB/s of NVLink in one direction, and by 50 GB/s of a 400 Gb/s card. The column
`alone` is the fraction of a step that it would take if nothing were overlapped. Activations and
parameters have 2 bytes, gradients have 4.
"""

from dataclasses import dataclass

PARAMETERS, LAYERS, HIDDEN, HEADS, KV_HEADS = 405e9, 126, 16384, 128, 8
NVLINK, NETWORK = 450e9, 50e9  # bytes/s, one way


@dataclass
class Layout:
    tp: int
    cp: int
    pp: int
    dp: int
    sequence: int
    batch: int  # sequences of a data-parallel group in a step, one per micro-batch
    flops: float  # FLOP/s per GPU that the paper reports

    @property
    def tokens(self) -> float:
        """Tokens of one micro-batch on one CP rank."""
        return self.sequence / self.cp

    @property
    def layer_passes(self) -> float:
        """Layers of one stage, times micro-batches."""
        return LAYERS / self.pp * self.batch

    def tensor(self) -> float:
        """Four reduce-scatters and four all-gathers per layer. SP repeats two gathers."""
        half = (self.tp - 1) / self.tp * 2 * self.tokens * HIDDEN
        return (4 * 2 + 2) * half * self.layer_passes

    def context(self) -> float:
        """Keys and values gathered in forward and in backward, their gradients scattered."""
        keys_values = 2 * 2 * self.sequence * HIDDEN * KV_HEADS / HEADS / self.tp
        return 3 * (self.cp - 1) / self.cp * keys_values * self.layer_passes

    def pipeline(self) -> float:
        """An activation forward and a gradient back, cut over the TP ranks."""
        return 2 * 2 * self.tokens * HIDDEN / self.tp * self.batch

    def data(self) -> float:
        """Gradients scattered in 4 bytes, parameters gathered in 2, over DP × CP ranks."""
        n = self.dp * self.cp
        return (n - 1) / n * (4 + 2) * PARAMETERS / (self.tp * self.pp)

    def step_seconds(self) -> float:
        """6ΨT and causal attention, at the FLOP/s that the paper reports."""
        tokens = self.dp * self.batch * self.sequence
        attention = 6 * LAYERS * HIDDEN * self.sequence
        gpus = self.tp * self.cp * self.pp * self.dp
        return tokens * (6 * PARAMETERS + attention) / (gpus * self.flops)


def report(layout: Layout, name: str) -> None:
    step = layout.step_seconds()
    sends = {
        f"TP {layout.tp}": (layout.tensor(), "NVLink"),
        f"CP {layout.cp}": (layout.context(), "network"),
        f"PP {layout.pp}": (layout.pipeline(), "network"),
        f"DP {layout.dp}": (layout.data(), "network"),
    }
    print(f"{name}: a step is {step:.1f} s")
    print("           GB sent   NVLink  network    on its link, alone")
    for dimension, (sent, link) in sends.items():
        if not sent:
            continue
        fast, slow = sent / NVLINK, sent / NETWORK
        taken = fast if link == "NVLink" else slow
        print(
            f"  {dimension:7} {sent / 1e9:8.1f} {fast:7.3f}s {slow:7.3f}s"
            f"    {link:7} {taken / step:6.1%}"
        )
    swapped = (layout.tensor() / NETWORK + layout.data() / NVLINK) / step
    print(f"  TP on the network and DP on NVLink instead: {swapped:.0%} of a step")


def main() -> None:
    # Table 4: a global batch of 16M tokens, so 16 sequences of either length to each DP rank
    short = Layout(8, 1, 16, 128, sequence=8192, batch=16, flops=400e12)
    long = Layout(8, 16, 16, 8, sequence=131072, batch=16, flops=380e12)
    for layout in (short, long):
        assert layout.tp * layout.cp * layout.pp * layout.dp == 16384
        assert layout.dp * layout.batch * layout.sequence == 2**24
    report(short, "s = 8,192, TP 8 PP 16 DP 128")
    report(long, "s = 131,072, TP 8 CP 16 PP 16 DP 8")


if __name__ == "__main__":
    main()
