"""This program is the forward pass of flash attention in Triton, compared with float64.

The kernel supports a causal mask, grouped heads, sequences of different lengths and bf16. The
tensors are packed: all sequences follow one another in q [tokens, heads, d] and in k and v
[tokens, kv_heads, d], and `starts` [sequences + 1] contains the first token of each sequence.
One program of the grid computes one tile of queries of one head of one sequence. Without a GPU
the kernel runs in Triton's interpreter. The output compares the kernel's error with the error
of plain attention in bf16.
"""

import os

import torch

if not torch.accelerator.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
import triton
import triton.language as tl

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


# --8<-- [start:kernel]
@triton.jit
def product(a, b, acc):
    if INTERPRETED:  # the interpreter would multiply bf16 bit patterns as whole numbers
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc)


@triton.jit
def visit(
    q, m, total, acc, k_at, v_at, scale, i, start, n, shift,
    BN: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """Score one tile of keys, rescale the old sums, and add the new ones."""
    j = start + tl.arange(0, BN)
    inside = j[:, None] < n
    k = tl.load(k_at, mask=inside, other=0.0) if MASK else tl.load(k_at)
    z = product(q, tl.trans(k), tl.zeros((q.shape[0], BN), tl.float32))
    if MASK:
        z = tl.where((j[None, :] < n) & (j[None, :] <= i[:, None] + shift), z, -float("inf"))
    new = tl.maximum(m, tl.max(z, 1) * scale)
    safe = tl.where(new == -float("inf"), 0.0, new)
    p = tl.exp2(z * scale - safe[:, None])  # one multiply-add, one exp2
    shrink = tl.exp2(m - safe)
    total = total * shrink + tl.sum(p, 1)
    v = tl.load(v_at, mask=inside, other=0.0) if MASK else tl.load(v_at)
    acc = product(p.to(v.dtype), v, acc * shrink[:, None])
    return new, total, acc


@triton.jit
def forward_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, q_starts, k_starts, scale, tokens,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    head, sequence = tl.program_id(1), tl.program_id(2)
    kv_head = head // (HEADS // KV_HEADS)  # grouped heads need an index, not a copy
    q0, k0 = tl.load(q_starts + sequence), tl.load(k_starts + sequence)
    m_q = tl.load(q_starts + sequence + 1) - q0
    n = tl.load(k_starts + sequence + 1) - k0
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM  # longest rows first if causal
    if first < m_q:  # the grid has enough programs for the longest sequence
        i = first + tl.arange(0, BM)
        c = tl.arange(0, D)
        # a tile begins at a scalar; a tile of 64-bit pointers would need many registers
        own = ((q0 + first).to(tl.int64) * HEADS + head) * D
        row = tl.arange(0, BM)[:, None] * (HEADS * D) + c[None, :]
        q = tl.load(q_ptr + own + row, mask=i[:, None] < m_q, other=0.0)
        scale *= 1.4426950408889634  # e^x = 2^(x / ln 2), and 2^x is one instruction
        m = tl.full((BM,), -float("inf"), tl.float32)
        total = tl.zeros((BM,), tl.float32)
        acc = tl.zeros((BM, D), tl.float32)

        if CAUSAL:
            shift = n - m_q  # the last query sees the last key
            end = tl.minimum(n, tl.maximum(0, first + BM + shift))
            whole = tl.minimum(n, tl.maximum(0, first + shift + 1)) // BN * BN
        else:
            shift = n
            end, whole = n, n // BN * BN
        # --8<-- [start:loops]
        tile = (k0.to(tl.int64) * KV_HEADS + kv_head) * D
        k_tile, v_tile = k_ptr + tile, v_ptr + tile
        at = tl.arange(0, BN)[:, None] * (KV_HEADS * D) + c[None, :]
        for start in range(0, whole, BN):  # most tiles need no mask
            m, total, acc = visit(
                q, m, total, acc, k_tile + at, v_tile + at, scale, i, start, n, shift, BN, False
            )  # fmt: skip
            k_tile += BN * KV_HEADS * D
            v_tile += BN * KV_HEADS * D
        for start in range(whole, end, BN):  # the diagonal and the end of the sequence
            m, total, acc = visit(
                q, m, total, acc, k_tile + at, v_tile + at, scale, i, start, n, shift, BN, True
            )  # fmt: skip
            k_tile += BN * KV_HEADS * D
            v_tile += BN * KV_HEADS * D
        # --8<-- [end:loops]

        o = acc / tl.where(total == 0.0, 1.0, total)[:, None]  # zero without keys, not NaN
        tl.store(o_ptr + own + row, o.to(o_ptr.dtype.element_ty), mask=i[:, None] < m_q)
        log2 = tl.log2(tl.where(total == 0.0, 1.0, total))
        lse = (m + log2) * 0.6931471805599453  # natural logarithm, as readers of lse expect
        tl.store(lse_ptr + head * tokens + q0 + i, lse, mask=i < m_q)


# --8<-- [end:kernel]
# --8<-- [start:launch]
# --8<-- [start:configs]
CONFIGS = [
    triton.Config({"BM": bm, "BN": bn}, num_warps=warps, num_stages=stages)
    for bm, bn, warps in ((128, 128, 8), (128, 64, 8), (64, 64, 4))
    for stages in (2, 3)
]
autotuned = triton.autotune(CONFIGS, key=["HEADS", "KV_HEADS", "D", "CAUSAL"])(forward_kernel)
# --8<-- [end:configs]


def attention(q, k, v, starts, causal=False, k_starts=None, block=None, longest=None):
    """Output [tokens, heads, d] and log-sum-exp [heads, tokens]; autotuned if `block` is None.

    d must be a power of two and at least 16, in fp32 or 16 bits, and kv_heads must divide
    heads. With `causal`, the last query of a sequence sees its last key. On NVIDIA GPUs, the
    products of fp32 inputs are rounded to TF32, because that is the default of tl.dot.
    """
    tokens, heads, d = q.shape
    if d & (d - 1) or d < 16 or not all(t.is_contiguous() for t in (q, k, v)):
        raise ValueError("attention takes contiguous tensors with d a power of two, 16 or more")
    if k.shape != v.shape or k.shape[2] != d or heads % k.shape[1] or q.itemsize > 4:
        raise ValueError("attention takes k, v as wide as q, kv_heads dividing heads, no fp64")
    k_starts = starts if k_starts is None else k_starts
    longest = longest or int((starts[1:] - starts[:-1]).max())  # this waits for the GPU
    o, lse = torch.empty_like(q), q.new_empty(heads, tokens, dtype=torch.float32)
    tensors = (q, k, v, o, lse, starts, k_starts)
    numbers = (d**-0.5, tokens, heads, k.shape[1], d, causal)
    grid = lambda meta: (triton.cdiv(longest, meta["BM"]), heads, len(starts) - 1)  # noqa: E731
    if block is None:
        autotuned[grid](*tensors, *numbers)
    else:
        forward_kernel[grid](*tensors, *numbers, BM=block[0], BN=block[1])
    return o, lse


# --8<-- [end:launch]


def reference(q, k, v, starts, causal, k_starts, dtype):
    """Attention by its definition, one sequence at a time, with every step in `dtype`."""
    outs, lses = [], []
    for (a, b), (c, e) in zip(pairs(starts), pairs(k_starts), strict=True):
        group = q.shape[1] // k.shape[1]
        x = q[a:b].to(dtype).transpose(0, 1)
        y, w = (t[c:e].to(dtype).repeat_interleave(group, 1).transpose(0, 1) for t in (k, v))
        z = x @ y.mT * q.shape[-1] ** -0.5
        if causal:
            hidden = ~torch.ones(b - a, e - c, dtype=torch.bool, device=q.device).tril(
                e - c - b + a
            )
            z = z.masked_fill(hidden, -torch.inf)
        outs.append((z.softmax(-1).nan_to_num(0.0) @ w).transpose(0, 1))
        lses.append(z.logsumexp(-1))
    return torch.cat(outs), torch.cat(lses, 1)


def pairs(starts: torch.Tensor) -> list[tuple[int, int]]:
    return list(zip(starts.tolist(), starts.tolist()[1:], strict=False))


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    on_gpu = torch.accelerator.is_available()
    device = torch.accelerator.current_accelerator() if on_gpu else torch.device("cpu")
    print("queries       keys          heads  d   causal  error / that of plain bf16 attention")
    for lengths, k_lengths, heads, kv_heads, d, causal, block in (
        ((33,), (33,), 2, 2, 16, False, (16, 32)),
        ((1, 40, 17), (1, 40, 17), 4, 2, 32, True, (16, 16)),
        ((5, 20), (37, 20), 4, 1, 16, True, (32, 16)),  # fewer queries than keys
        ((20, 16), (7, 33), 2, 1, 64, True, (16, 16)),  # 13 queries see no key
    ):
        starts, k_starts = (
            torch.tensor([0, *x], device=device).cumsum(0).int() for x in (lengths, k_lengths)
        )
        q = torch.randn(sum(lengths), heads, d, device=device, dtype=torch.bfloat16)
        k, v = (
            torch.randn(sum(k_lengths), kv_heads, d, device=device).bfloat16() for _ in "kv"
        )
        o, lse = attention(q, k, v, starts, causal, k_starts, block)
        truth, exact_lse = reference(q, k, v, starts, causal, k_starts, torch.float64)
        plain, _ = reference(q, k, v, starts, causal, k_starts, torch.bfloat16)
        error, yardstick = ((x - truth).abs().max().item() for x in (o, plain))
        assert error <= 2 * yardstick + 1e-3, (error, yardstick)
        torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-4, atol=1e-4)  # fp32
        print(
            f"{'+'.join(map(str, lengths)):13} {'+'.join(map(str, k_lengths)):13} "
            f"{heads}/{kv_heads}    {d:2}  {causal!s:6}  ≈{error:.4f} / ≈{yardstick:.4f}"
        )


if __name__ == "__main__":
    main()
