"""Megatron-LM's weak scaling, predicted from three rates and compared with the paper.

Shoeybi et al. (2019) train GPT-2 models of 1.2 to 8.3 billion parameters on one to eight V100s
of a DGX-2H. The predicted time of a step has three parts: the products, divided by t, at the
speed of the paper's run on one GPU; the norms, dropouts and residual sums, which every rank
computes, at the bandwidth of memory; and six all-reduces per layer over NVLink, two of them for
recomputation. Draws megatron_published.svg.
"""

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

BATCH, SEQUENCE, VOCABULARY = 8, 1024, 51200
BASELINE = 39e12  # FLOP/s of the paper's one-GPU run
MEMORY = 900e9  # bytes/s of a V100, datasheet
NVLINK = 0.8 * 150e9  # bytes/s one way: 300 GB/s both ways, and 80% of the rate
NETWORK = 0.8 * 12.5e9  # a GPU's own 100 Gb/s card, at 80%
# Bytes that a layer moves for each element of bsh outside its products: a norm reads and writes
# (4), dropout with residual reads two, writes one, and a mask (7), two of each; forward,
# recomputed, and backward for two.
TOUCHED = 2 * (4 + 7) * 4
MODELS = {  # t: (hidden, layers, published efficiency in %)
    1: (1536, 40, 100),
    2: (1920, 54, 95),
    4: (2304, 64, 82),
    8: (3072, 72, 77),
}


def products(hidden: int, layers: int) -> float:
    """FLOPs of a step with recomputation, Narayanan et al. (2021), equation (3)."""
    tokens = BATCH * SEQUENCE
    correction = 1 + SEQUENCE / (6 * hidden) + VOCABULARY / (16 * layers * hidden)
    return 96 * tokens * layers * hidden**2 * correction


def untouched_by_tp(hidden: int, layers: int) -> float:
    """Seconds for norms, dropouts and residual sums, which do not depend on t."""
    return TOUCHED * BATCH * SEQUENCE * hidden * layers / MEMORY


def all_reduces(t: int, hidden: int, layers: int, bandwidth: float) -> float:
    """Seconds for two all-reduces forward, two recomputed, two backward, in 16 bits."""
    return 6 * layers * 2 * (t - 1) / t * 2 * BATCH * SEQUENCE * hidden / bandwidth


def efficiency(t: int, bandwidth: float = NVLINK, replicated: bool = True) -> float:
    """FLOP/s per GPU divided by those of the run on one GPU."""
    hidden, layers, _ = MODELS[1]
    own = untouched_by_tp(hidden, layers) if replicated else 0.0
    speed = products(hidden, layers) / (products(hidden, layers) / BASELINE - own)
    hidden, layers, _ = MODELS[t]
    seconds = products(hidden, layers) / t / speed + all_reduces(t, hidden, layers, bandwidth)
    if replicated:
        seconds += untouched_by_tp(hidden, layers)
    return products(hidden, layers) / t / seconds / BASELINE


def draw(predictions: dict[str, list[float]]) -> dict[str, list[float]]:
    """Draw the predictions and the published values. Return what the figure shows."""
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "megatron", "font.size": 12}
    figure, axes = plt.subplots(figsize=(7, 3.8))
    ranks = list(MODELS)
    published = [model[2] for model in MODELS.values()]
    colours = {"all-reduces": "#52525b", "and norms": "#c2410c", "over the network": "#7c3aed"}
    shift = {"all-reduces": 9, "and norms": 2}
    for name, values in predictions.items():
        axes.plot(ranks, values, color=colours[name], linewidth=2, label=name)
        axes.text(8.4, values[-1] + shift.get(name, 0), name, color=colours[name], va="center")
    axes.plot(ranks, published, "o", color="#0b6e99", markersize=8, label="published")
    axes.text(8.4, published[-1] - 7, "published", color="#0b6e99", va="center")
    axes.set(xscale="log", xlabel="tensor-parallel ranks t", ylim=(0, 108))
    axes.set_ylabel("FLOP/s per GPU, % of one GPU")
    axes.set_xticks(ranks, [str(t) for t in ranks])
    axes.minorticks_off()
    axes.set_xlim(0.93, 15)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig("megatron_published.svg", transparent=True, metadata={"Date": None})
    return {line.get_label(): list(line.get_ydata()) for line in axes.lines}


def main() -> None:
    predictions = {
        "all-reduces": [100 * efficiency(t, replicated=False) for t in MODELS],
        "and norms": [100 * efficiency(t) for t in MODELS],
        "over the network": [100 * efficiency(t, NETWORK) for t in MODELS],
    }
    print("weak scaling efficiency in %, predicted from")
    print("t  hidden  layers  all-reduces  and norms  published  over the network")
    for row, (t, (hidden, layers, published)) in enumerate(MODELS.items()):
        reduces, norms, network = (values[row] for values in predictions.values())
        print(f"{t}  {hidden:6}  {layers:6}  {reduces:11.0f}  {norms:9.0f}", end="")
        print(f"  {published:9}  {network:16.0f}")
    worst = max(
        abs(value - model[2])
        for value, model in zip(predictions["and norms"], MODELS.values(), strict=True)
    )
    print(f"largest error with norms: {worst:.0f} points")
    published = {"published": [model[2] for model in MODELS.values()]}
    assert draw(predictions) == predictions | published  # not the same curve twice


if __name__ == "__main__":
    main()
