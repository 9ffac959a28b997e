"""Bytes that one rank sends in a step, by dimension and by link.

An all-reduce of S bytes over n ranks makes each send 2(n-1)/n S, its halves one (n-1)/n S each
(01, "All-reduce from send and recv"). TP with SP: four gathers and four scatters a layer, and
one gather more in backward for each of the two regions (03 Tensor parallelism, "The bill, with
a pencil", "What each rank keeps"). A forward that runs again sends again. PP: an activation
forward and a gradient back for each cut, micro-batch and chunk (03, "What is sent at each
cut"). DP: 2Ψ, 3Ψ, (m+1)Ψ, 3mΨ elements for
ZeRO 0, 1, 2, 3 (04, "What the stages send"; stage 1 all-reduces, as nanotron and DeepSpeed do).
CP: keys and values once round the ring forward, twice backward with their gradients (03 Context
parallelism). EP: all-to-all there and back, forward and backward (03 Experts).

The ranks of a node are TP's first, then CP's, DP's and PP's (01 Layouts, "Ranks as
coordinates").
"""

from dataclasses import dataclass
from functools import cache

from memory import RECOMPUTED, Layout, stage_parameters, stages
from transformer import Shape


@dataclass(frozen=True)
class Sent:
    name: str
    bytes: float  # by one rank, in one step
    ranks: int
    in_node: int  # of its group, those that share a node
    messages: float  # one after the other


# --8<-- [start:traffic]
def in_node(ranks: int, stride: int, node: int) -> int:
    """Of a group whose members are `stride` ranks apart, how many share a node."""
    return max(1, min(ranks, node // stride))


@cache  # fit.py asks for the same layouts again and again
def traffic(shape: Shape, layout: Layout, sequence: int, node: int) -> list[Sent]:
    """What the busiest rank sends: bf16, but gradients in fp32."""
    t, c, d, p, m = layout.tp, layout.cp, layout.dp, layout.pp, layout.micro_batches
    cut = stages(shape, p, layout.cut)
    layers = max(stage.layers for stage in cut)
    whole = 2 * layout.micro_batch * sequence / c * shape.hidden  # a residual stream, in bytes
    again = RECOMPUTED.index(layout.recompute)  # regions of a layer whose forward runs again
    sent = []
    if t > 1:
        # a gather and a scatter for each region forward, as many and a second gather backward
        calls = (4 + 4 + 2 + 2 * again) * layers * m
        sent.append(Sent("TP", calls * (t - 1) / t * whole, t, in_node(t, 1, node), calls))
    if c > 1:
        keys = 2 * 2 * layout.micro_batch * sequence / c * shape.kv_width / t
        rounds = (3 + (again == 2)) * (c - 1)
        sent.append(Sent("CP", rounds * keys * layers * m, c, in_node(c, t, node), layers * m))
    if p > 1:
        cuts = m * layout.virtual
        sent.append(Sent("PP", 2 * whole / t * cuts, p, in_node(p, t * c * d, node), 2 * cuts))
    held = max(sum(stage_parameters(shape, stage, t, layout.ep)) for stage in cut)
    n = d * c
    if n > 1:
        share = (n - 1) / n * held
        local = in_node(n, t, node)
        if layout.zero == 3:  # gathered forward and backward, scattered, for every micro-batch
            sent.append(Sent("DP", 8 * share * m, n, local, 3 * layers * m))
        elif layout.zero == 2:  # scattered for every micro-batch, gathered once; one is late
            sent.append(Sent("DP", (4 * m + 2) * share, n, local, 2))
        elif layout.zero:
            sent.append(Sent("DP", (8 + 2) * share, n, local, 3))
        else:
            sent.append(Sent("DP", 8 * share, n, local, 2))
    if layout.ep > 1:
        e = layout.ep
        rows = (e - 1) / e * whole / t * shape.active
        calls = (4 + 2 * (again > 0)) * layers * m
        sent.append(Sent("EP", calls * rows, e, in_node(e, t * c, node), calls))
    return sent


# --8<-- [end:traffic]


def main() -> None:
    # the pencil of chapter 03: 16 (t-1)/t bsh bytes for each layer, and a quarter more with the
    # second gather
    shape = Shape(32, 4096, 32, 32, 14336, 131072)
    [tp] = traffic(shape, Layout(tp=8), 4096, 8)
    pencil = 16 * 7 / 8 * 4096 * 4096 * 32
    print(f"TP 8: {tp.bytes / 2**30:.2f} GiB, the pencil's 16(t-1)/t bshL {pencil / 2**30:.2f}")
    assert tp.bytes == 1.25 * pencil
    # a layer that runs again sends half of the pencil's once more, its MLP a quarter
    for recompute, more in (("mlp", 0.25), ("layer", 0.5)):
        [again] = traffic(shape, Layout(tp=8, recompute=recompute), 4096, 8)
        print(f"with each {recompute} again {again.bytes / 2**30:.2f} GiB")
        assert again.bytes == tp.bytes + more * pencil
    # keys and values pass three neighbours forward and twice backward; two copies of a token go
    # to seven of eight ranks and return
    few = Shape(1, 4096, 32, 8, 14336, 1, experts=8, active=2)
    keys, rows = 3 * 2 * 2 * 1024 * 1024, 7 / 8 * 2 * 2 * 4096 * 4096
    for cut, once, times in (
        ({"cp": 4}, keys, (3, 3, 4)),
        ({"dp": 8, "ep": 8}, rows, (4, 6, 6)),
    ):
        layouts = [Layout(**cut, recompute=recompute) for recompute in RECOMPUTED]
        last = [traffic(few, each, 4096, 8)[-1 if "ep" in cut else 0] for each in layouts]
        found = [each.bytes / once for each in last]
        print(f"{last[0].name}: {', '.join(f'{n:g}' for n in found)} times, as more runs again")
        assert found == list(times)
    # ZeRO's 2Ψ and 3Ψ, in elements of the same size
    held = sum(stage_parameters(shape, stages(shape, 1)[0], 1))
    for zero in range(4):
        once, more = (
            traffic(shape, Layout(dp=64, zero=zero, micro_batches=m), 4096, 8)[0].bytes
            / (63 / 64 * held)
            for m in (1, 8)
        )
        print(
            f"ZeRO {zero}, DP 64: {once:.0f} bytes a parameter, {more:.0f} in 8 micro-batches"
        )
        # 4 + 4, 4 + 4 + 2, 4m + 2, (2 + 2 + 4)m
        assert (round(once), round(more)) == ((8, 8), (10, 10), (6, 34), (8, 64))[zero]
    # four stages: the same cut is crossed 2m times, whatever the layers are
    four = Layout(pp=4, tp=2, micro_batches=16)
    pp = next(each for each in traffic(shape, four, 4096, 8) if each.name == "PP")
    print(f"PP 4, TP 2, 16 micro-batches: {pp.bytes / 2**20:.0f} MiB over each cut")
    assert pp.bytes == 2 * 16 * 2 * 4096 * 4096 / 2 and pp.in_node == 4


if __name__ == "__main__":
    main()
