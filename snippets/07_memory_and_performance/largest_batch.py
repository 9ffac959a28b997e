"""The largest batch that fits, predicted from two small measurements and found by bisection.

The model is on the meta device, where every operator runs and no memory is used. A laptop can
therefore find out how many sequences fit into 40 GB. The counter that measures the bytes also
raises the error when the limit is exceeded; on a GPU it would be torch.OutOfMemoryError.

The two measured batches must be large enough: with few sequences the peak of a real step is in
the optimizer, and it does not depend on the batch.

Look at the two results at the end: the prediction and the bisection find the same batch.
"""

import weakref

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

S, H, A, LAYERS, VOCABULARY = 1024, 2048, 16, 8, 32768
LIMIT = 40 * 10**9


class Limited(TorchDispatchMode):
    """Counts the bytes of live storages, and raises MemoryError above the limit."""

    def __init__(self, limit: float) -> None:
        super().__init__()
        self.limit, self.sizes, self.now, self.peak = limit, {}, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if (key := storage._cdata) not in self.sizes:
                    self.sizes[key] = storage.nbytes()
                    self.now += storage.nbytes()
                    weakref.finalize(storage, self.forget, key).atexit = False
        self.peak = max(self.peak, self.now)
        if self.now > self.limit:
            raise MemoryError(f"{self.now / 1e9:.1f} GB in use")
        return result

    def forget(self, key: int) -> None:
        size = self.sizes.pop(key)  # first: other threads may free storages too
        self.now -= size


class Layer(nn.Module):
    def __init__(self, h: int, a: int) -> None:
        super().__init__()
        self.a = a
        self.norm1, self.norm2 = nn.LayerNorm(h), nn.LayerNorm(h)
        self.qkv, self.out = nn.Linear(h, 3 * h), nn.Linear(h, h)
        self.up, self.down = nn.Linear(h, 4 * h), nn.Linear(4 * h, h)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, h = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, s, 3, self.a, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(2, 3) / (h // self.a) ** 0.5  # [b, a, s, s]
        mixed = scores.softmax(dim=-1) @ v
        x = x + self.out(mixed.transpose(1, 2).reshape(b, s, h))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def check_layer(layer: nn.Module, a: int, x: torch.Tensor, *more: object) -> None:
    """Compare with torch's layer on x [b, s, h]. The weights of its norms come last."""
    h = x.shape[-1]
    library = nn.TransformerEncoderLayer(
        h, a, 4 * h, 0, "gelu", batch_first=True, norm_first=True
    )
    weights = list(layer.parameters())
    for theirs, ours in zip(library.parameters(), weights[4:] + weights[:4], strict=True):
        theirs.data.copy_(ours)
    torch.testing.assert_close(layer(x, *more), library(x))


def build() -> nn.Sequential:
    body = [Layer(H, A) for _ in range(LAYERS)]
    head = nn.Linear(H, VOCABULARY, bias=False)
    return nn.Sequential(nn.Embedding(VOCABULARY, H), *body, nn.LayerNorm(H), head)


def peak(batch: int, limit: float = float("inf")) -> int:
    """Peak bytes of forward and backward, when the states of Adam already exist."""
    with Limited(limit) as memory, torch.device("meta"):
        model = build()
        states = [torch.zeros_like(p) for p in model.parameters() for _ in range(2)]
        tokens = torch.zeros(batch, S, dtype=torch.int64)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        assert states
    return memory.peak


def fits(batch: int) -> bool:
    try:
        peak(batch, LIMIT)
    except MemoryError:
        return False  # the traceback, and the tensors in its frames, end with this block
    return True


def largest() -> tuple[int, int]:
    """The largest batch that fits, and the number of trials: double until it fails, bisect."""
    trials, high = 1, 1
    while fits(high):
        high *= 2
        trials += 1
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        trials += 1
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low, trials


def main() -> None:
    check_layer(Layer(16, 4), 4, torch.randn(2, 5, 16))
    four, eight = peak(4), peak(8)
    each = (eight - four) // 4
    fixed = four - 4 * each
    predicted = (LIMIT - fixed) // each
    psi = LAYERS * (12 * H * H + 13 * H) + 2 * VOCABULARY * H + 2 * H
    with torch.device("meta"):
        assert psi == sum(p.numel() for p in build().parameters())
    sequence = LAYERS * (64 * S * H + 4 * A * S * S) + 4 * (2 * S * H + S * VOCABULARY)
    sequence += 8 * S * VOCABULARY  # gradients of log-softmax and logits
    print(f"Ψ = {psi / 1e9:.2f} billion, fp32; a limit of {LIMIT // 10**9} GB")
    print(f"fixed ≈{fixed / 1e9:.2f} GB, 12Ψ = {12 * psi / 1e9:.2f} GB")
    print(f"for each sequence ≈{each / 1e9:.2f} GB, formula {sequence / 1e9:.2f} GB")
    assert abs(fixed - 12 * psi) < 0.01 * fixed and abs(each - sequence) < 0.01 * each
    found, trials = largest()
    optimizer = 20 * psi  # parameters, moments, gradients and the temporaries of foreach
    print(f"peak with 4 sequences ≈{four / 1e9:.2f} GB; in Adam's step at most 20Ψ", end=" ")
    print(f"= {optimizer / 1e9:.2f} GB")
    assert peak(2) < optimizer < four  # a batch of 2 is too small to measure this line
    print(f"predicted from batches 4 and 8: {predicted}")
    print(f"found by bisection: {found}, in {trials} trials; peak ≈{peak(found) / 1e9:.1f} GB")
    assert found == predicted
    assert peak(found) <= LIMIT < peak(found + 1)


if __name__ == "__main__":
    main()
