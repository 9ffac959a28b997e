"""Shows what is in the memory of one GPU while training and sampling take turns on it.

Llama 3 8B on 8 GPUs of 80 GiB. Each part is a real tensor, but one MiB stands for one GiB. The
memory in use is the sum of the tensors that are still alive. In the right order one step fits.
Four mistakes at the switch between the phases run out of memory, and the last table compares
taking turns with separate GPUs. Draws phases_memory.svg.
"""

import weakref

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import torch

GIB = 2**30
LAYERS, HIDDEN, HEADS, KV, FFN, VOCABULARY = 32, 4096, 32, 1024, 14336, 128256
LAYER = HIDDEN * (2 * HIDDEN + 2 * KV + 3 * FFN + 2)  # parameters of one layer
PARAMETERS = LAYERS * LAYER + 2 * VOCABULARY * HIDDEN + HIDDEN
SEQUENCE = 8192  # tokens of prompt and answer, one sequence in a micro-batch
LIMIT = 76.0  # of 80 GiB; the rest is for CUDA, NCCL and fragments
ENGINE = 0.85 * 80  # GiB that the engine may use: gpu_memory_utilization = 0.85
BUCKET = 1.0  # GiB of weights that are gathered at a time
STATE = ("parameters", "gradients", "optimizer", "reference")


# --8<-- [start:parts]
def parts_of(ranks: int) -> dict[str, float]:
    """Return the GiB of each part on one GPU. `ranks` GPUs share the training state (FSDP)."""
    tokens = SEQUENCE
    inputs = 2 * tokens * HIDDEN * LAYERS  # layers are recomputed, so only inputs are kept
    layer = tokens * (2 * (4 * HIDDEN + 2 * HIDDEN + 2 * KV + 4 * FFN) + 4 * HEADS + 8)
    logits = 8 * tokens * VOCABULARY  # twice in fp32
    weights = 2 * PARAMETERS / GIB  # the sampler has all weights, without tensor parallelism
    return {
        "parameters": 2 * PARAMETERS / ranks / GIB,
        "gradients": 4 * PARAMETERS / ranks / GIB,
        "optimizer": 12 * PARAMETERS / ranks / GIB,
        "reference": 2 * PARAMETERS / ranks / GIB,
        "activations": (inputs + layer + logits + 2 * 2 * LAYER) / GIB,  # and gathered layers
        "sampler weights": weights,
        "cache": ENGINE - weights,
        "gathered weights": weights,
    }


# --8<-- [end:parts]


class OutOfMemory(RuntimeError):
    """Raised if a new tensor does not fit."""


# --8<-- [start:Gpu]
class Gpu:
    """Count the bytes of all tensors that are still alive. A part of 1 GiB has 1 MiB here."""

    def __init__(self, limit: float) -> None:
        self.limit, self.owned = limit, {}
        self.alive: list[tuple[str, weakref.ref]] = []
        self.peak = 0.0  # since the last note
        self.steps: list[tuple[str, dict[str, float], float]] = []

    def used(self) -> dict[str, float]:
        sizes: dict[str, float] = {}
        for name, reference in self.alive:
            if (tensor := reference()) is not None:
                sizes[name] = sizes.get(name, 0) + tensor.nbytes / 2**20
        return sizes

    def new(self, name: str, size: float) -> torch.Tensor:
        """Return a new tensor, which lives as long as the caller refers to it."""
        if (total := sum(self.used().values()) + size) > self.limit:
            self.steps.append(("out of memory", self.used() | {name: size}, total))
            raise OutOfMemory(f"{name}: {total:.1f} GiB needed, {self.limit:.1f} GiB available")
        tensor = torch.empty(round(size * 2**20), dtype=torch.uint8)
        self.alive.append((name, weakref.ref(tensor)))
        self.peak = max(self.peak, total)
        return tensor

    def load(self, **sizes: float) -> None:
        for name, size in sizes.items():
            name = name.replace("_", " ")
            self.owned[name] = self.new(name, size)

    def free(self, *names: str) -> None:
        for name in names:
            del self.owned[name]

    def note(self, label: str) -> None:
        self.steps.append((label, self.used(), self.peak))
        self.peak = sum(self.used().values())


# --8<-- [end:Gpu]


# --8<-- [start:step]
def one_step(gpu: Gpu, part: dict[str, float], mistake: str = "") -> None:
    """Sample, train, and switch back to sampling. Offloaded tensors are in host memory."""
    state = {name: part[name] for name in ("parameters", "optimizer", "reference")}
    gpu.load(sampler_weights=part["sampler weights"], cache=part["cache"])
    gpu.note("sample")
    if mistake != "the engine does not sleep":
        gpu.free("sampler weights", "cache")  # sleep
        gpu.note("engine sleeps")
    gpu.load(**state)
    gpu.load(gradients=part["gradients"], activations=part["activations"])
    gpu.note("train")
    gpu.free("activations", "gradients")
    if mistake != "the optimizer stays":
        gpu.free("optimizer", "reference")  # offload
        gpu.note("state offloaded")
    if mistake == "the cache wakes first":
        gpu.load(sampler_weights=part["sampler weights"], cache=part["cache"])
        gathered = gpu.new("gathered weights", part["gathered weights"])
    elif mistake == "all weights are gathered at once":
        gathered = gpu.new("gathered weights", part["gathered weights"])
        gpu.load(sampler_weights=part["sampler weights"])
        # `gathered` still refers to the weights when the cache wakes
        gpu.load(cache=part["cache"])
        gathered = None
    else:
        gpu.load(sampler_weights=part["sampler weights"])
        for _ in range(int(part["gathered weights"] // BUCKET) + 1):
            gathered = None  # otherwise two buckets are alive at the same time
            gathered = gpu.new("gathered weights", BUCKET)
        gpu.note("copy weights")
        gathered = None
        gpu.free("parameters")  # offload
        gpu.load(cache=part["cache"])
    gpu.note("cache wakes")
    del gathered


# --8<-- [end:step]


def attempt(part: dict[str, float], mistake: str = "") -> tuple[Gpu, str]:
    gpu = Gpu(LIMIT)
    try:
        one_step(gpu, part, mistake)
    except OutOfMemory as error:
        return gpu, str(error)
    return gpu, ""


COLOURS = {
    "sampler weights": "#0b6e99",
    "cache": "#7dd3fc",
    "parameters": "#15803d",
    "gradients": "#a16207",
    "optimizer": "#7c3aed",
    "reference": "#71717a",
    "activations": "#fbbf24",
    "gathered weights": "#c2410c",
}


def draw(right: Gpu, wrong: Gpu) -> None:
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "phases", "font.size": 12}
    figure, both = plt.subplots(
        1, 2, figsize=(9, 5), sharey=True, width_ratios=(len(right.steps), len(wrong.steps))
    )
    titles = "the right order", "the cache wakes first"
    for axes, gpu, title in zip(both, (right, wrong), titles, strict=True):
        for at, (_, sizes, _) in enumerate(gpu.steps):
            bottom = 0.0
            for name, colour in COLOURS.items():
                if size := sizes.get(name, 0):
                    axes.bar(at, size, 0.8, bottom, color=colour, edgecolor="white", lw=0.5)
                    bottom += size
        axes.axhline(LIMIT, color="#c2410c", ls="--", lw=1.5)
        labels = [label for label, _, _ in gpu.steps]
        axes.set_xticks(range(len(labels)), labels, rotation=40, ha="right")
        axes.set_title(title, fontsize=12)
        axes.spines[["top", "right"]].set_visible(False)
    both[0].set(ylabel="GiB on one GPU", ylim=(0, 92))
    both[0].text(-0.4, LIMIT + 2, f"limit {LIMIT:.0f} GiB", color="#c2410c")
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in COLOURS.values()]
    figure.legend(handles, COLOURS, frameon=False, ncol=4, loc="lower center", fontsize=11)
    figure.tight_layout(rect=(0, 0.1, 1, 1))
    figure.savefig("phases_memory.svg", transparent=True, metadata={"Date": None})


def bytes_of_training(elements: int) -> list[int]:
    """Return the bytes of a bf16 copy, a gradient, and an fp32 copy with Adam's moments."""
    master = torch.nn.Parameter(torch.ones(elements))
    master.grad = torch.ones(elements)
    optimizer = torch.optim.AdamW([master], fused=False)
    optimizer.step()
    moments = [v for v in optimizer.state[master].values() if v.numel() == elements]
    adam = master.nbytes + sum(each.nbytes for each in moments)
    return [master.bfloat16().nbytes, master.grad.nbytes, adam]


def main() -> None:
    assert PARAMETERS == 8_030_261_248  # as published for Llama 3 8B
    assert bytes_of_training(1000) == [2000, 4000, 12000]
    part = parts_of(8)
    print(f"GiB on each of 8 GPUs, of which {LIMIT:.0f} GiB may be used:")
    print(", ".join(f"{name} {size:.1f}" for name, size in part.items()))
    print()
    right, error = attempt(part)
    assert not error
    for label, sizes, peak in right.steps:
        total = sum(sizes.values())
        print(f"{label:16} peak {peak:4.1f}, then {total:4.1f} = ", end="")
        print(", ".join(f"{name} {size:.1f}" for name, size in sizes.items()) or "nothing")
    kept = sum(size for name, size in part.items() if name in STATE)
    totals = {label: sum(sizes.values()) for label, sizes, _ in right.steps}
    peaks = {label: peak for label, _, peak in right.steps}
    assert abs(totals["sample"] - ENGINE) < 1e-4 and totals["engine sleeps"] == 0
    assert abs(totals["train"] - kept - part["activations"]) < 1e-4
    copied = part["sampler weights"] + part["parameters"] + BUCKET
    for numbers in (totals, peaks):
        assert abs(numbers["copy weights"] - copied) < 1e-4
    assert max(peaks.values()) == peaks["cache wakes"] < LIMIT
    buckets = sum(name == "gathered weights" for name, _ in right.alive)
    assert buckets * BUCKET >= part["sampler weights"] > (buckets - 1) * BUCKET  # all weights
    print()
    expected = {  # the part that does not fit, and the GiB that would be needed
        "the engine does not sleep": ("activations", ENGINE + kept + part["activations"]),
        "the optimizer stays": ("cache", ENGINE + part["optimizer"] + part["reference"]),
        "the cache wakes first": (
            "gathered weights", ENGINE + part["parameters"] + part["gathered weights"]
        ),
        "all weights are gathered at once": (
            "cache", ENGINE + part["parameters"] + part["gathered weights"]
        ),
    }  # fmt: skip
    for mistake, (name, needed) in expected.items():
        _, error = attempt(part, mistake)
        print(f"{mistake}: OutOfMemory: {error}")
        if name != "activations":  # the optimizer is already too large there
            assert error.startswith(f"{name}: {needed:.1f} GiB")
        assert error and needed > LIMIT
    print()
    print("GiB at the fullest moment of a GPU; ! does not fit")
    print(f"{'':37}sampling  training    switch")
    rows = {}
    for critic in (False, True):
        for layout, ranks in (("in turn, 8 GPUs", 8), ("4 train, 4 sample", 4)):
            part = parts_of(ranks)
            state = (1 + critic) * sum(part[name] for name in STATE if name != "reference")
            train = state + part["reference"] + part["activations"]
            switch = part["sampler weights"] + part["parameters"] + BUCKET
            assert ranks == 4 or abs(switch - peaks["copy weights"]) < 1e-4
            if ranks == 4:  # the trainer does not sleep, and the sampler gets only the buckets
                switch = ENGINE + BUCKET
            rows[layout, critic] = ENGINE, train, max(switch, ENGINE)
            name = layout + (", with a critic" if critic else "")
            cells = "".join(
                f"{size:8.1f}{'!' if size > LIMIT else ' '} " for size in rows[layout, critic]
            )
            print(f"{name:37}{cells.rstrip()}")
    assert rows["in turn, 8 GPUs", True][1] < LIMIT < rows["4 train, 4 sample", True][1]
    tokens = {n: n * parts_of(n)["cache"] * GIB / (2 * 2 * LAYERS * KV) for n in (8, 4)}
    print(
        f"the cache of 8 GPUs has room for {tokens[8] / 1e6:.2f} M tokens, but only during the"
    )
    print(
        f"sampling phase; the cache of 4 GPUs for {tokens[4] / 1e6:.2f} M tokens, all the time"
    )
    assert tokens[8] == 2 * tokens[4]
    draw(right, attempt(parts_of(8), "the cache wakes first")[0])


if __name__ == "__main__":
    main()
