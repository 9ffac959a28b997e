"""The planner held to your own GPU: a Llama trains in a plain loop, predicted beside measured.

The loop has the planner's state: parameters in bf16, gradients added up in fp32, masters and
Adam's moments in fp32. One GPU has no link and no bubble: what is missed is products, memory
and launches. Without a GPU only the counts are compared, on a small shape.
"""

import statistics
import sys
import time

import torch
from memory import RECOMPUTED, Layout, mlp_activation_bytes, replay, with_unseen
from plan import CONSTANTS, mfu, the_gpu
from step_time import layer_flops, step_time
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode
from transformer import Shape, parameters

SEQUENCE, MICRO_BATCHES, STEPS = 4096, 2, 5
WIDE = Shape(8, 4096, 32, 8, 14336, 32768)  # eight layers of Llama 3 8B
SMALL = Shape(16, 2048, 16, 8, 8192, 32768)
HALF = Shape(8, 2048, 16, 8, 8192, 32768)  # 16 GiB, for a GPU of 24
CASES = [
    (HALF, Layout(micro_batch=1, zero=0)),
    (HALF, Layout(micro_batch=4, zero=0, recompute="layer")),
    (SMALL, Layout(micro_batch=1, zero=0)),
    (SMALL, Layout(micro_batch=4, zero=0)),
    (SMALL, Layout(micro_batch=4, zero=0, recompute="mlp")),
    (SMALL, Layout(micro_batch=4, zero=0, recompute="layer")),
    (WIDE, Layout(micro_batch=1, zero=0)),
    (WIDE, Layout(micro_batch=4, zero=0)),
    (WIDE, Layout(micro_batch=4, zero=0, recompute="layer")),
]


# --8<-- [start:model]
class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.cut = shape.attention_width, shape.kv_width, shape.kv_width
        self.d = shape.attention_width // shape.heads
        self.norms = nn.ModuleList(nn.RMSNorm(shape.hidden) for _ in range(2))
        self.qkv = nn.Linear(shape.hidden, sum(self.cut), bias=False)
        self.out = nn.Linear(shape.attention_width, shape.hidden, bias=False)
        self.wide = nn.Linear(shape.hidden, 2 * shape.ffn, bias=False)
        self.down = nn.Linear(shape.ffn, shape.hidden, bias=False)

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.wide(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, recompute: str = ""
    ) -> torch.Tensor:
        parts = self.qkv(self.norms[0](x)).split(self.cut, -1)  # [b, s, h]
        q, k, v = (part.unflatten(-1, (-1, self.d)).transpose(1, 2) for part in parts)
        q, k = (y * cos + torch.cat(y.chunk(2, -1)[::-1], -1) * sin for y in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        y = self.norms[1](x)
        if recompute == "mlp":
            return x + checkpoint(self.mlp, y, use_reentrant=False)
        return x + self.mlp(y)


class Llama(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)

    def forward(self, ids: torch.Tensor, recompute: str) -> torch.Tensor:
        x, d = self.embedding(ids), self.layers[0].d
        turn = torch.arange(0, d, 2, device=ids.device) / d
        turn = torch.arange(ids.shape[1], device=ids.device)[:, None] / 5e5**turn  # [s, d/2]
        cos, sin = (torch.cat([f(turn)] * 2, -1).to(x.dtype) for f in (torch.cos, torch.sin))
        sin[:, : d // 2] *= -1
        for layer in self.layers:
            if recompute == "layer":
                x = checkpoint(layer, x, cos, sin, use_reentrant=False)
            else:
                x = layer(x, cos, sin, recompute)
        return self.head(self.norm(x))


def loss_of(model: Llama, ids: torch.Tensor, recompute: str) -> torch.Tensor:
    logits = model(ids[:, :-1], recompute).float()
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


# --8<-- [end:model]


# --8<-- [start:measure]
def measured(shape: Shape, layout: Layout, device: torch.device) -> tuple[float, float]:
    """Seconds of a step, the median of all but two, and the most bytes allocated."""
    torch.cuda.reset_peak_memory_stats()
    with device:
        model = Llama(shape).to(torch.bfloat16)
        ids = torch.randint(shape.vocabulary, (layout.micro_batch, SEQUENCE + 1))
    held = list(model.parameters())
    masters = [p.detach().float() for p in held]
    for master in masters:
        master.grad = torch.zeros_like(master)
    optimizer = torch.optim.AdamW(masters, fused=True)
    times = []
    for _ in range(STEPS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(MICRO_BATCHES):
            loss_of(model, ids, layout.recompute).backward()
            for p, master in zip(held, masters, strict=True):
                master.grad.add_(p.grad)
                p.grad = None
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        torch._foreach_copy_([p.detach() for p in held], masters)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[2:]), torch.cuda.max_memory_allocated()


# --8<-- [end:measure]


def counts() -> None:
    """The model is the one that the planner counts: parameters, FLOPs of products, and what an
    MLP that runs again does not keep.
    """
    shape, ids = Shape(3, 64, 4, 2, 96, 128), torch.randint(128, (2, 17))
    model, tokens, kept, losses = Llama(shape), 2 * 16, {}, []
    weights = {p.data_ptr(): p.numel() for p in model.parameters()}
    assert sum(weights.values()) == parameters(shape)
    print(f"parameters {parameters(shape):,}, as the planner counts them")
    changed = ids.clone()
    changed[:, 8] = (ids[:, 8] + 1) % 128
    with torch.no_grad():
        moved = (model(ids, "") - model(changed, "")).abs().amax((0, 2)) > 0
    # the planner counts only causal attention: no token sees a later one
    assert not moved[:8].any() and moved[8:].all()

    for recompute in RECOMPUTED:
        found: dict[int, int] = {}

        def pack(tensor: torch.Tensor, found: dict[int, int] = found) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                found[storage.data_ptr()] = storage.nbytes() // 4
            return tensor

        with FlopCounterMode(display=False) as counter, set_checkpoint_early_stop(False):
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                losses.append(loss_of(model, ids, recompute))
            kept[recompute] = sum(found.values())
            losses[-1].backward()
        counted = counter.get_flop_counts()["Global"][torch.ops.aten.mm]
        products, _ = layer_flops(shape, tokens, 16, Layout(recompute=recompute))
        print(f"{recompute or 'nothing'} recomputed: FLOPs of products {counted:,}, ", end="")
        print(f"elements kept {kept[recompute]:,}")
        assert counted == shape.layers * products + 6 * tokens * shape.vocabulary * shape.hidden
    assert losses[0] == losses[1] == losses[2]  # recomputation changes no bit
    inside = mlp_activation_bytes(shape, tokens, 1) / 2
    print(f"inside an MLP {inside:,.0f} elements, as the planner counts them")
    assert kept[""] - kept["mlp"] == shape.layers * inside


def main() -> None:
    torch.manual_seed(0)
    counts()
    if not torch.cuda.is_available():
        print("its seconds and bytes take a GPU, and there is none here")
        return
    device = torch.device("cuda", 0)
    name = torch.cuda.get_device_name(device).lower()
    known = [each for each in ("h100", "h200", "b200", "a100", "4090", "5090") if each in name]
    if not known:
        sys.exit(f"hardware.toml has no {name}: add it there, and its name here")
    gpu = the_gpu(("rtx" if known[0].isdigit() else "") + known[0])
    print("                                  seconds               GiB")
    print("layers     h  b  recomputed  predicted  measured  predicted  measured    MFU")
    for shape, each in CASES:
        layout = Layout(**{**vars(each), "micro_batches": MICRO_BATCHES})
        seconds = step_time(shape, layout, SEQUENCE, gpu, CONSTANTS["time"]).seconds
        size = with_unseen(replay(shape, layout, SEQUENCE, 0)[1], CONSTANTS["memory"])
        print(f"{shape.layers:6} {shape.hidden:5} {layout.micro_batch:2}", end="  ")
        print(f"{layout.recompute or 'nothing':10} {seconds:10.3f}", end="  ")
        try:
            found, peak = measured(shape, layout, device)
        except torch.OutOfMemoryError:
            print(f"{'':8} {size / 2**30:10.1f}   out of memory")
        else:
            tokens = MICRO_BATCHES * layout.micro_batch * SEQUENCE
            used = mfu(shape, tokens, SEQUENCE, found, layout, gpu)
            print(f"≈{found:7.3f} {size / 2**30:10.1f}   ≈{peak / 2**30:6.1f}  ≈{used:.0%}")
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
