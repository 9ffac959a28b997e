"""A cross-entropy with fp32 logits for one chunk of tokens at a time needs little memory.

The hidden states and the weights of the head are bf16. The logits should be fp32, but the fp32
logits of all tokens are often the largest tensor of a training step. So the program computes
the loss chunk by chunk, and it also computes the gradients of a chunk while its logits exist.
The gradient of the weights is a sum over all chunks. Look at the column "weight gradient": this
sum needs an fp32 accumulator, too.
"""

import weakref

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

TOKENS, H, VOCABULARY, CHUNK = 2048, 32, 1024, 32


class ChunkedCrossEntropy(torch.autograd.Function):
    """Mean cross-entropy of (hidden @ weight.T), with fp32 logits for one chunk at a time."""

    @staticmethod
    def forward(ctx, hidden, weight, labels, accumulator):  # [tokens, h], [vocabulary, h]
        loss = torch.zeros((), dtype=torch.float32)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros(weight.shape, dtype=accumulator)
        for rows in torch.arange(len(hidden)).split(CHUNK):
            logits = (hidden[rows] @ weight.T).float()  # [chunk, vocabulary]
            log_p = logits.log_softmax(-1)
            loss += F.nll_loss(log_p, labels[rows], reduction="sum")
            grad = log_p.exp_()  # softmax - one-hot
            grad[torch.arange(len(rows)), labels[rows]] -= 1
            grad = (grad / len(hidden)).to(weight.dtype)
            grad_hidden[rows] = grad @ weight
            grad_weight += grad.T @ hidden[rows]
        ctx.save_for_backward(grad_hidden, grad_weight.to(weight.dtype))
        return loss / len(hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss):
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_loss * grad_hidden, grad_loss * grad_weight, None, None


class LargestTensor(TorchDispatchMode):
    """Note the bytes of the largest new tensor, and the peak of all tensors in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}  # of the storages that are in memory now
        self.nbytes = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.nbytes = max(self.nbytes, result.nbytes)
            storage = result.untyped_storage()
            if storage._cdata not in self.sizes:
                self.sizes[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.sizes.pop, storage._cdata).atexit = False
            self.peak = max(self.peak, sum(self.sizes.values()))
        return result


def whole(hidden, weight, labels, logits_dtype: torch.dtype) -> torch.Tensor:
    return F.cross_entropy((hidden @ weight.T).to(logits_dtype), labels)


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, H).bfloat16()
    weight = (torch.randn(VOCABULARY, H) / H**0.5).bfloat16()
    labels = torch.randint(VOCABULARY, (TOKENS,))

    exact = [t.double().requires_grad_() for t in (hidden, weight)]
    true_loss = whole(*exact, labels, torch.float64)
    true_loss.backward()
    ways = {
        "bf16 logits, all tokens": lambda h, w: whole(h, w, labels, torch.bfloat16),
        "fp32 logits, all tokens": lambda h, w: whole(h, w, labels, torch.float32),
        "fp32, chunks, bf16 sum": lambda h, w: ChunkedCrossEntropy.apply(
            h, w, labels, torch.bfloat16
        ),
        "fp32, chunks, fp32 sum": lambda h, w: ChunkedCrossEntropy.apply(
            h, w, labels, torch.float32
        ),
    }
    print("relative error             loss      hidden's gradient   weight gradient   largest")
    errors, sizes, peaks = {}, {}, {}
    for name, way in ways.items():
        leaves = [t.clone().requires_grad_() for t in (hidden, weight)]
        with LargestTensor() as largest:
            loss = way(*leaves)
            (3 * loss).backward()  # backward must use the gradient of the loss
        off = [abs(loss.item() / true_loss.item() - 1)]
        for ours, true in zip(leaves, exact, strict=True):
            off.append(((ours.grad.double() / 3 - true.grad).norm() / true.grad.norm()).item())
        errors[name], sizes[name], peaks[name] = off, largest.nbytes, largest.peak
        print(
            f"{name:25}  ≈{off[0]:.0e}   ≈{off[1]:<16.4f}   ≈{off[2]:<14.4f}"
            f"   {largest.nbytes / 2**20:.2f} MiB"
        )
    low, full, coarse, ours = errors.values()
    assert full[0] < 2e-3 and abs(ours[0] - full[0]) < 1e-6  # the chunks change only rounding
    assert max(ours[1:]) < 2**-8 and coarse[2] > 2 * ours[2] and low[0] > 50 * full[0]
    assert sizes["fp32 logits, all tokens"] == TOKENS * VOCABULARY * 4
    assert sizes["fp32, chunks, fp32 sum"] <= max(CHUNK, H) * VOCABULARY * 4
    # the logits of a chunk are freed before the next chunk
    assert 8 * peaks["fp32, chunks, fp32 sum"] < peaks["fp32 logits, all tokens"]
    if hasattr(F, "linear_cross_entropy"):  # torch 2.13 has such a loss
        leaves = [t.clone().requires_grad_() for t in (hidden, weight)]
        options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=CHUNK)
        with LargestTensor() as largest:
            F.linear_cross_entropy(*leaves, labels, options=options).backward()
        for theirs, true in zip(leaves, exact, strict=True):
            assert (theirs.grad.double() - true.grad).norm() < 0.02 * true.grad.norm()
        assert largest.nbytes <= max(CHUNK, H) * VOCABULARY * 4


if __name__ == "__main__":
    main()
