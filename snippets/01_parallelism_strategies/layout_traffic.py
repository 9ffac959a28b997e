"""What each dimension of one layout sends in a step, and how long the link needs for it.

The layout is the first row of Table 4 in the Llama 3 paper: 405B parameters on 8,192 H100, TP 8
× PP 16 × DP 64, 32 sequences of 8,192 tokens for each data-parallel replica. Context
parallelism is that of the table's third row, 16 sequences of 131,072 tokens over CP 16. The
model is dense; the row of experts says what it would send if it were not. Rates are the
datasheets': NVLink 450 GB/s one way, a 400 Gb/s network card per GPU 50 GB/s.
"""

PARAMETERS, LAYERS, HIDDEN, SEQUENCE = 405e9, 126, 16384, 8192
TP, PP, DP, MICRO_BATCHES = 8, 16, 64, 32  # micro-batches of one sequence
ACHIEVED = 430e12  # FLOP/s per GPU, as the table reports
NVLINK, NETWORK = 450e9, 50e9  # bytes/s one way
NODE = 8  # GPUs, and network cards


def tensor_parallel() -> float:
    """Four all-reduces of [1, s, h] in 16 bits per layer: two forward, two backward.

    With sequence parallelism each becomes a reduce-scatter and an all-gather, the same bytes;
    and backward repeats one of the gathers of each pair, a quarter more.
    """
    all_reduce = 2 * (TP - 1) / TP * (2 * SEQUENCE * HIDDEN)
    return 4 * all_reduce * LAYERS / PP * MICRO_BATCHES


def pipeline_parallel() -> float:
    """An activation to the next stage, a gradient to the one before, cut over the TP ranks."""
    return 2 * (2 * SEQUENCE * HIDDEN / TP) * MICRO_BATCHES


def context_parallel(ranks: int = 16, sequence: int = 131072, micro_batches: int = 16) -> float:
    """Keys and values gathered in forward, again in backward, and their gradients scattered.

    Of 128 heads 8 have keys and values of their own; each TP rank has one of these.
    """
    keys_and_values = 2 * (2 * sequence * HIDDEN) * (8 / 128) / TP
    return 3 * (ranks - 1) / ranks * keys_and_values * LAYERS / PP * micro_batches


def expert_parallel(ranks: int = 8, chosen: int = 2) -> float:
    """Each token to its experts and back, in forward and in backward: four all-to-alls."""
    all_to_all = (ranks - 1) / ranks * chosen * (2 * SEQUENCE * HIDDEN / TP)
    return 4 * all_to_all * LAYERS / PP * MICRO_BATCHES


def data_parallel() -> float:
    """Gradients reduce-scattered in fp32, parameters all-gathered once in 16 bits."""
    held = PARAMETERS / (TP * PP)
    return (DP - 1) / DP * (4 + 2) * held


def fully_sharded_alone() -> float:
    """No TP, no PP: all parameters gathered twice, gradients scattered in fp32."""
    return (2 + 2 + 4) * PARAMETERS


def main() -> None:
    tokens = DP * MICRO_BATCHES * SEQUENCE
    step = 6 * PARAMETERS * tokens / (TP * PP * DP * ACHIEVED)
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
