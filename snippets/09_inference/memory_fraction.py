"""One number, two meanings: vLLM's gpu_memory_utilization and SGLang's mem_fraction_static.

Both engines start in the same order: weights, KV cache, CUDA graphs, then requests with their
activations. vLLM's fraction is a fraction of the whole GPU, and all four must fit into it.
SGLang's fraction is a fraction of the memory that is free before loading, and only the weights
and the cache must fit into it. The sizes are invented, and a small allocator raises an error
when the GPU is full. The sweep shows which error you get with a fraction that is too small, and
which one with a fraction that is too large.
"""

from dataclasses import dataclass, field, replace


class GpuIsFull(Exception):
    """The error of CUDA when the GPU is full."""


@dataclass
class Gpu:
    """A GPU that counts the GiB that are in use on it."""

    total: float
    used: dict[str, float] = field(default_factory=dict)

    @property
    def free(self) -> float:
        return self.total - sum(self.used.values())

    def allocate(self, name: str, size: float) -> None:
        if size > self.free + 1e-9:
            raise GpuIsFull(f"CUDA out of memory, for {name}")
        self.used[name] = size


@dataclass(frozen=True)
class Need:
    """GiB that a model needs on one GPU; `request` is the cache of the longest request."""

    weights: float
    activations: float
    graphs: float
    request: float
    others: float = 0.0  # in use by other processes before the engine starts


# --8<-- [start:engines]
def vllm(fraction: float, need: Need, gpu: Gpu) -> None:
    budget = fraction * gpu.total
    if gpu.free < budget:
        raise ValueError("Free memory on device is less than desired GPU memory utilization")
    gpu.allocate("weights", need.weights)
    # a dummy step measures the activations, and a dummy capture estimates the graphs
    cache = budget - need.weights - need.activations - need.graphs
    if cache <= 0:
        raise ValueError("No available memory for the cache blocks")
    if cache < need.request:
        raise ValueError("max seq len needs more than the available KV cache memory")
    gpu.allocate("cache", cache)


def sglang(fraction: float, need: Need, gpu: Gpu) -> None:
    before = gpu.free
    gpu.allocate("weights", need.weights)
    cache = gpu.free - before * (1 - fraction)
    if cache <= 0:
        raise RuntimeError("Not enough memory. Please try to increase --mem-fraction-static")
    gpu.allocate("cache", cache)


# --8<-- [end:engines]


def outcome(engine, fraction: float, need: Need) -> str:
    """What happens at this fraction: the first error, or `serves`."""
    gpu = Gpu(80.0, {"others": need.others})
    try:
        engine(fraction, need, gpu)
        gpu.allocate("the CUDA graphs", need.graphs)
        gpu.allocate("the activations of a step", need.activations)
    except (GpuIsFull, ValueError, RuntimeError) as error:
        return str(error)
    assert len(gpu.used) == 5, "a part was never allocated"
    covered = gpu.used["weights"] + gpu.used["cache"]
    if engine is vllm:
        assert abs(covered + need.graphs + need.activations - fraction * 80) < 1e-9
    else:
        assert abs(covered - fraction * (80 - need.others)) < 1e-9
    return "serves"


def sweep(engine, need: Need) -> list[tuple[str, float, float]]:
    """The outcomes from small fractions to large ones, with the first and the last fraction."""
    runs: list[tuple[str, float, float]] = []
    for percent in range(5, 100):  # two digits, as people write the fraction
        said = outcome(engine, percent / 100, need)
        if runs and runs[-1][0] == said:
            runs[-1] = (said, runs[-1][1], percent / 100)
        else:
            runs.append((said, percent / 100, percent / 100))
    return runs


def works(engine, need: Need) -> list[float]:
    return [p / 100 for p in range(5, 100) if outcome(engine, p / 100, need) == "serves"]


def main() -> None:
    model = Need(weights=40, activations=5, graphs=3, request=4)
    cases = {
        "40 GiB of weights": model,
        "another process holds 20 GiB": replace(model, others=20),
        "68 GiB of weights, 9 GiB of activations": replace(model, weights=68, activations=9),
    }
    for name, need in cases.items():
        print(name)
        for engine in (vllm, sglang):
            print(f"  {engine.__name__}")
            for said, first, last in sweep(engine, need):
                print(f"    {first:.2f} to {last:.2f}  {said}")

    # vLLM's fraction covers everything, so it may be almost 1; SGLang's fraction may not
    assert max(works(vllm, model)) == 0.99 and max(works(sglang, model)) == (80 - 5 - 3) / 80
    assert min(works(vllm, model)) == (40 + 5 + 3 + 4) / 80 > min(works(sglang, model))
    # another process: vLLM's limit falls with the free memory, SGLang's is a share of the rest
    shared = replace(model, others=20)
    assert max(works(vllm, shared)) == 60 / 80 and max(works(sglang, shared)) == 0.86
    # no fraction works: the two errors of SGLang are neighbours, and only smaller needs help
    large = replace(model, weights=68, activations=9, graphs=3)
    assert not works(sglang, large) and not works(vllm, large)
    below, above, *_ = sweep(sglang, large)
    assert "increase" in below[0] and "out of memory" in above[0]
    assert round(above[1] - below[2], 2) == 0.01
    smaller = replace(large, activations=4, graphs=1)  # smaller prefill chunks, fewer graphs
    fractions = works(sglang, smaller)
    print("the same, with 4 GiB of activations and 1 GiB of graphs")
    print(f"  sglang serves from {fractions[0]:.2f} to {fractions[-1]:.2f}")


if __name__ == "__main__":
    main()
