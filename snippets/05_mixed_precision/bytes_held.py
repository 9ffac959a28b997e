"""fp32, autocast and model.bfloat16() need different memory for state and activations.

Parameters, gradients and Adam's moments are counted from their tensors. Activations are the
distinct storages that autograd saves for backward, without the parameters. Autocast's bf16
copies of the weights are counted in their own column. They live until backward has used them.

Compare the rows: autocast has the state of fp32, and only its activations are smaller.
"""

import contextlib

import torch
from torch import nn

TOKENS, H, BLOCKS = 384, 128, 4
LOW = torch.bfloat16


class NormedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(H)
        self.up, self.down = nn.Linear(H, 4 * H), nn.Linear(4 * H, H)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def measure(low_model: bool, autocast: bool) -> tuple[list[float], list[str]]:
    """Make one step of Adam; return the bytes of each kind, and four types."""
    torch.manual_seed(0)
    model = nn.Sequential(*(NormedBlock() for _ in range(BLOCKS)))
    model = model.bfloat16() if low_model else model
    psi = sum(p.numel() for p in model.parameters())
    shapes = {p.shape for p in model.parameters() if p.dim() == 2}
    shapes |= {shape[::-1] for shape in shapes}  # a linear layer saves wᵀ
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, tuple[int, bool]] = {}

    def record(t: torch.Tensor) -> torch.Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = (storage.nbytes(), t.shape in shapes)
        return t

    x = torch.randn(TOKENS, H, dtype=LOW if low_model else torch.float32)
    region = torch.autocast("cpu", LOW) if autocast else contextlib.nullcontext()
    with torch.autograd.graph.saved_tensors_hooks(record, lambda t: t), region:
        output = model(x)
    output.float().square().mean().backward()
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.step()
    weight = model[0].up.weight
    states = [s for state in optimizer.state.values() for s in state.values() if s.dim()]
    sizes = [
        sum(p.nbytes for p in model.parameters()) / psi,
        sum(p.grad.nbytes for p in model.parameters()) / psi,
        sum(s.nbytes for s in states) / psi,
        sum(size for size, copy in saved.values() if copy) / psi,
        sum(size for size, copy in saved.values() if not copy) / TOKENS / H / BLOCKS,
    ]
    tensors = (weight, weight.grad, optimizer.state[weight]["exp_avg"], output)
    return sizes, [{LOW: "bf16", torch.float32: "fp32"}[t.dtype] for t in tensors]


def main() -> None:
    print(
        "bytes per parameter, and of activations per element of the residual stream and block"
    )
    print("                  weights  grads  moments  casts  activations  types but for casts")
    for name, low_model, autocast in (
        ("fp32", False, False),
        ("autocast", False, True),
        ("model.bfloat16()", True, False),
    ):
        sizes, types = measure(low_model, autocast)
        predicted = 20 if low_model else 22 if autocast else 40  # 1 + 1 + 4 + 4 elements
        assert predicted < sizes[4] < predicted + 0.1
        assert sizes[:3] == ([2, 2, 4] if low_model else [4, 4, 8])
        print(
            f"{name:16}  {sizes[0]:7.2f}  {sizes[1]:5.2f}  {sizes[2]:7.2f}  {sizes[3]:5.2f}"
            f"  {sizes[4]:11.2f}  {' '.join(types)}"
        )


if __name__ == "__main__":
    main()
