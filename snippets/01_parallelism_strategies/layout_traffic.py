"""Computes how much each dimension of one layout sends in a step, and the time on its link.

The layout is the first row of Table 4 in the Llama 3 paper: 405B parameters on 8,192 H100, with
TP 8 × PP 16 × DP 64. Each data-parallel replica has 32 sequences of 8,192 tokens. Context
parallelism is that of the third row of the table, with 16 sequences of 131,072 tokens over
CP 16. The model is dense. The line of EP shows how much it would send if it had experts. The
rates are from datasheets: NVLink sends 450 GB/s one way, and the 400 Gb/s network card of each
GPU sends 50 GB/s.
"""

from unittest import mock

PARAMETERS, LAYERS, HIDDEN, SEQUENCE = 405e9, 126, 16384, 8192
TP, PP, DP, MICRO_BATCHES = 8, 16, 64, 32  # micro-batches of one sequence
ACHIEVED = 430e12  # FLOP/s per GPU, as the table reports
NVLINK, NETWORK = 450e9, 50e9  # bytes/s one way
NODE = 8  # GPUs in a node, and also network cards in a node


def tensor_parallel() -> float:
    """Bytes of four all-reduces of [1, s, h] in 16 bits per layer, two of them in backward.

    With sequence parallelism, each all-reduce becomes a reduce-scatter and an all-gather with
    the same bytes. Backward also repeats one gather of each pair, which adds 25%.
    """
    all_reduce = 2 * (TP - 1) / TP * (2 * SEQUENCE * HIDDEN)
    return 4 * all_reduce * LAYERS / PP * MICRO_BATCHES


def pipeline_parallel() -> float:
    """Bytes sent to the next stage (activations) and to the previous stage (gradients).

    Both tensors are split over the TP ranks, so each rank sends only its part.
    """
    return 2 * (2 * SEQUENCE * HIDDEN / TP) * MICRO_BATCHES


def context_parallel(ranks: int = 16, sequence: int = 131072, micro_batches: int = 16) -> float:
    """Bytes of the keys and values, gathered in forward and backward, and of their gradients.

    The 128 heads share 8 heads of keys and values. Each TP rank has one of these 8 heads.
    """
    keys_and_values = 2 * (2 * sequence * HIDDEN) * (8 / 128) / TP
    return 3 * (ranks - 1) / ranks * keys_and_values * LAYERS / PP * micro_batches


def expert_parallel(ranks: int = 8, chosen: int = 2) -> float:
    """Bytes of four all-to-alls: tokens to their experts and back, in forward and backward."""
    all_to_all = (ranks - 1) / ranks * chosen * (2 * SEQUENCE * HIDDEN / TP)
    return 4 * all_to_all * LAYERS / PP * MICRO_BATCHES


def data_parallel() -> float:
    """Bytes of a reduce-scatter of gradients in fp32 and a gather of 16-bit parameters."""
    held = PARAMETERS / (TP * PP)
    return (DP - 1) / DP * (4 + 2) * held


def fully_sharded_alone() -> float:
    """Bytes without TP and PP: parameters are gathered twice, gradients reduced in fp32."""
    return (2 + 2 + 4) * PARAMETERS


def whole_step() -> tuple[int, float]:
    """The tokens of a step, and its seconds: 6 FLOP for each parameter and token."""
    tokens = DP * MICRO_BATCHES * SEQUENCE
    return tokens, 6 * PARAMETERS * tokens / (TP * PP * DP * ACHIEVED)


def check() -> None:
    """Compare the formulas with a count by hand, for a layout whose sizes are all different."""
    sizes = {"PARAMETERS": 3000, "LAYERS": 6, "HIDDEN": 256, "SEQUENCE": 10}
    sizes |= {"TP": 2, "PP": 3, "DP": 4, "MICRO_BATCHES": 7}
    with mock.patch.dict(globals(), sizes):  # 2 layers on a stage, 5,120 bytes for [1, s, h]
        assert tensor_parallel() == 4 * 2 * 7 * 5120
        assert pipeline_parallel() == 2 * 7 * 2560
        assert context_parallel(ranks=8, sequence=20, micro_batches=9) == 3 * 2 * 9 * 560
        assert expert_parallel(ranks=8, chosen=3) == 4 * 2 * 7 * 6720
        assert data_parallel() == 3 * 125 * 6  # three of four shards of 125 parameters
        assert fully_sharded_alone() == 8 * 3000
        assert whole_step() == (280, 6 * 125 * 280 / ACHIEVED)


def main() -> None:
    check()
    tokens, step = whole_step()
    print(
        f"{tokens:,} tokens per step; at {ACHIEVED / 1e12:.0f} TFLOP/s a step is {step:.1f} s"
    )
    print("per rank and step         GB sent  over NVLink  over the network")
    for name, sent in {
        "TP 8": tensor_parallel(),
        "PP 16": pipeline_parallel(),
        "DP 64, sharded states": data_parallel(),
        "CP 16 in the third row": context_parallel(),
        "EP 8, if it had experts": expert_parallel(),
    }.items():
        print(f"{name:24} {sent / 1e9:8.1f}  {sent / NVLINK:9.3f} s  {sent / NETWORK:14.3f} s")
    ratio = tensor_parallel() / pipeline_parallel()
    print(f"TP sends {ratio:.0f} times as much as PP for the same micro-batches")
    alone = fully_sharded_alone()
    print(f"FSDP over all 8,192: {alone / 1e9:,.0f} GB,", end=" ")
    print(f"{alone / NETWORK:.0f} s on the network if each GPU fetches by its own card alone,")
    print(f"{alone / (NODE * NETWORK):.0f} s if a node's {NODE} cards share the work,")
    share = tokens / (TP * PP * DP)
    print(f"for {share:,.0f} tokens per GPU, a quarter of one sequence of {SEQUENCE:,}")
    assert share == SEQUENCE / 4


if __name__ == "__main__":
    main()
