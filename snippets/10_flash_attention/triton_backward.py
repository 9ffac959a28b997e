"""This program is the backward pass of flash attention in Triton, compared with float64.

Two kernels work without atomics, so the same tiles give the same bits in every run. One program
of the first kernel owns a tile of keys. It goes over all queries, and over all heads that share
these keys, and sums dK and dV. One program of the second kernel owns a tile of queries. It goes
over the keys and sums dQ. Both kernels recompute the weights from the log-sum-exp of the
forward pass. The sequences are packed as in the forward kernel. The output compares the errors
of the three gradients with those of plain attention in bf16.
"""

import os

import torch

if not torch.accelerator.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
import triton
import triton.language as tl

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def product(a, b, acc):
    if INTERPRETED:  # the interpreter would multiply bf16 bit patterns as whole numbers
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc)


# --8<-- [start:dkdv]
@triton.jit
def queries(
    k, v, dk, dv, q_at, do_at, lse_at, delta_at, scale, i, j, m_q, n, shift,
    CAUSAL: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """Add the contribution of one tile of queries to dK and dV of one tile of keys."""
    if MASK:
        q = tl.load(q_at, mask=i[:, None] < m_q, other=0.0)
        do = tl.load(do_at, mask=i[:, None] < m_q, other=0.0)
        lse = tl.load(lse_at, mask=i < m_q, other=float("inf"))
        lse = tl.where(lse == -float("inf"), float("inf"), lse)  # no key: all weights are 0
        delta = tl.load(delta_at, mask=i < m_q, other=0.0)
    else:
        q, do, lse, delta = tl.load(q_at), tl.load(do_at), tl.load(lse_at), tl.load(delta_at)
    z = product(k, tl.trans(q), tl.zeros((k.shape[0], q.shape[0]), tl.float32))  # transposed
    if MASK:  # a key behind the end has the score 0, and e^(0 - lse) may overflow
        seen = j[:, None] <= i[None, :] + shift if CAUSAL else j[:, None] < n
        z = tl.where(seen, z, -float("inf"))
    p = tl.exp2(z * (scale * LOG2E) - (lse * LOG2E)[None, :])
    dv = product(p.to(do.dtype), do, dv)
    dp = product(v, tl.trans(do), tl.zeros((k.shape[0], q.shape[0]), tl.float32))
    dz = p * (dp - delta[None, :])
    return product(dz.to(q.dtype), q, dk), dv


@triton.jit
def dkdv_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, q_starts, k_starts,
    scale, tokens, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr,
    CAUSAL: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    kv_head, sequence = tl.program_id(1), tl.program_id(2)
    q0, k0 = tl.load(q_starts + sequence), tl.load(k_starts + sequence)
    m_q = tl.load(q_starts + sequence + 1) - q0
    n = tl.load(k_starts + sequence + 1) - k0
    first = tl.program_id(0) * BN
    if first < n:
        j = first + tl.arange(0, BN)
        own = ((k0 + first).to(tl.int64) * KV_HEADS + kv_head) * D
        c = tl.arange(0, D)
        row = tl.arange(0, BN)[:, None] * (KV_HEADS * D) + c[None, :]
        k = tl.load(k_ptr + own + row, mask=j[:, None] < n, other=0.0)
        v = tl.load(v_ptr + own + row, mask=j[:, None] < n, other=0.0)
        dk = tl.zeros((BN, D), tl.float32)
        dv = tl.zeros((BN, D), tl.float32)
        shift = n - m_q
        begin = tl.maximum(0, first - shift) // BM * BM if CAUSAL else 0  # first visible tile
        # from `whole` to `last` every query of a tile exists and sees all keys of this tile
        last = tl.maximum(begin, m_q // BM * BM)
        if CAUSAL:
            whole = tl.minimum(last, tl.cdiv(tl.maximum(0, first + BN - 1 - shift), BM) * BM)
        else:
            whole = tl.where(first + BN > n, last, begin)
        cut = (whole - begin) // BM  # the diagonal cuts these tiles; then the last one follows
        cut_too = cut + (last < m_q).to(tl.int32)
        i = tl.arange(0, BM)
        at = i[:, None] * (HEADS * D) + c[None, :]
        # --8<-- [start:heads]
        for member in range(HEADS // KV_HEADS):
            head = kv_head * (HEADS // KV_HEADS) + member
            for start in range(whole, last, BM):
                tile = ((q0 + start).to(tl.int64) * HEADS + head) * D
                stat = head * tokens + q0 + start + i
                dk, dv = queries(
                    k, v, dk, dv, q_ptr + tile + at, do_ptr + tile + at, lse_ptr + stat,
                    delta_ptr + stat, scale, start + i, j, m_q, n, shift, CAUSAL, False,
                )  # fmt: skip
            for number in range(0, cut_too):
                start = tl.where(number < cut, begin + number * BM, last)
                tile = ((q0 + start).to(tl.int64) * HEADS + head) * D
                stat = head * tokens + q0 + start + i
                dk, dv = queries(
                    k, v, dk, dv, q_ptr + tile + at, do_ptr + tile + at, lse_ptr + stat,
                    delta_ptr + stat, scale, start + i, j, m_q, n, shift, CAUSAL, True,
                )  # fmt: skip
        # --8<-- [end:heads]
        inside = j[:, None] < n
        tl.store(dk_ptr + own + row, (dk * scale).to(dk_ptr.dtype.element_ty), mask=inside)
        tl.store(dv_ptr + own + row, dv.to(dv_ptr.dtype.element_ty), mask=inside)


# --8<-- [end:dkdv]
# --8<-- [start:dq]
@triton.jit
def keys(
    q, do, lse, delta, dq, k_at, v_at, scale, i, start, n, shift,
    BN: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """Add the contribution of one tile of keys to dQ of one tile of queries."""
    j = start + tl.arange(0, BN)
    inside = j[:, None] < n
    k = tl.load(k_at, mask=inside, other=0.0) if MASK else tl.load(k_at)
    v = tl.load(v_at, mask=inside, other=0.0) if MASK else tl.load(v_at)
    z = product(q, tl.trans(k), tl.zeros((q.shape[0], BN), tl.float32))
    if MASK:
        seen = j[None, :] < n
        if CAUSAL:
            seen = seen & (j[None, :] <= i[:, None] + shift)
        z = tl.where(seen, z, -float("inf"))
    p = tl.exp2(z * (scale * LOG2E) - (lse * LOG2E)[:, None])
    dp = product(do, tl.trans(v), tl.zeros((q.shape[0], BN), tl.float32))
    dz = p * (dp - delta[:, None])
    return product(dz.to(k.dtype), k, dq)


@triton.jit
def dq_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, q_starts, k_starts,
    scale, tokens, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr,
    CAUSAL: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    head, sequence = tl.program_id(1), tl.program_id(2)
    kv_head = head // (HEADS // KV_HEADS)
    q0, k0 = tl.load(q_starts + sequence), tl.load(k_starts + sequence)
    m_q = tl.load(q_starts + sequence + 1) - q0
    n = tl.load(k_starts + sequence + 1) - k0
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM
    if first < m_q:
        i = first + tl.arange(0, BM)
        own = ((q0 + first).to(tl.int64) * HEADS + head) * D
        c = tl.arange(0, D)
        row = tl.arange(0, BM)[:, None] * (HEADS * D) + c[None, :]
        inside = i[:, None] < m_q
        q = tl.load(q_ptr + own + row, mask=inside, other=0.0)
        do = tl.load(do_ptr + own + row, mask=inside, other=0.0)
        stat = head * tokens + q0 + i
        lse = tl.load(lse_ptr + stat, mask=i < m_q, other=float("inf"))
        lse = tl.where(lse == -float("inf"), float("inf"), lse)
        delta = tl.load(delta_ptr + stat, mask=i < m_q, other=0.0)
        dq = tl.zeros((BM, D), tl.float32)
        if CAUSAL:
            shift = n - m_q
            end = tl.minimum(n, tl.maximum(0, first + BM + shift))
            whole = tl.minimum(n, tl.maximum(0, first + shift + 1)) // BN * BN
        else:
            shift = n
            end, whole = n, n // BN * BN
        tile = (k0.to(tl.int64) * KV_HEADS + kv_head) * D
        k_tile, v_tile = k_ptr + tile, v_ptr + tile
        at = tl.arange(0, BN)[:, None] * (KV_HEADS * D) + c[None, :]
        for start in range(0, whole, BN):
            dq = keys(
                q, do, lse, delta, dq, k_tile + at, v_tile + at, scale, i, start, n, shift,
                BN, CAUSAL, False,
            )  # fmt: skip
            k_tile += BN * KV_HEADS * D
            v_tile += BN * KV_HEADS * D
        for start in range(whole, end, BN):
            dq = keys(
                q, do, lse, delta, dq, k_tile + at, v_tile + at, scale, i, start, n, shift,
                BN, CAUSAL, True,
            )  # fmt: skip
            k_tile += BN * KV_HEADS * D
            v_tile += BN * KV_HEADS * D
        dq *= scale
        tl.store(dq_ptr + own + row, dq.to(dq_ptr.dtype.element_ty), mask=inside)


# --8<-- [end:dq]
@triton.jit
def delta_kernel(
    o_ptr, do_ptr, delta_ptr, tokens, HEADS: tl.constexpr, D: tl.constexpr, BM: tl.constexpr
):
    """Compute the sum of dO·O for BM queries of one head and read both tensors once."""
    i, head = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1)
    c = tl.arange(0, D)
    row = i.to(tl.int64)[:, None] * (HEADS * D) + head * D + c[None, :]
    o = tl.load(o_ptr + row, mask=i[:, None] < tokens, other=0.0).to(tl.float32)
    do = tl.load(do_ptr + row, mask=i[:, None] < tokens, other=0.0).to(tl.float32)
    tl.store(delta_ptr + head * tokens + i, tl.sum(o * do, 1), mask=i < tokens)


# --8<-- [start:launch]
TILES = ((128, 64, 8), (128, 32, 8), (64, 32, 4))  # rows owned, rows per step, warps
KEY = ["HEADS", "KV_HEADS", "D", "CAUSAL"]


def tuned(kernel, own: str, passing: str):
    configs = [
        triton.Config({own: a, passing: b}, num_warps=warps, num_stages=stages)
        for a, b, warps in TILES
        for stages in (2, 3)
    ]
    return triton.autotune(configs, key=KEY)(kernel)


tuned_dkdv, tuned_dq = tuned(dkdv_kernel, "BN", "BM"), tuned(dq_kernel, "BM", "BN")


def backward(
    q, k, v, o, lse, do, starts, causal=False, k_starts=None, block=None, longest=None
):
    """Gradients of q, k and v; all tensors must be contiguous, as in the forward kernel."""
    alike = q.shape == o.shape == do.shape and k.shape == v.shape
    if not alike or not all(t.is_contiguous() for t in (q, k, v, o, lse, do)):
        raise ValueError("backward takes forward's tensors, contiguous, the gradient too")
    (tokens, heads, d), kv_heads = q.shape, k.shape[1]
    k_starts = starts if k_starts is None else k_starts
    longest_q, longest_k = (longest or int((x[1:] - x[:-1]).max()) for x in (starts, k_starts))
    delta = torch.empty_like(lse)
    delta_kernel[(triton.cdiv(tokens, 64), heads)](o, do, delta, tokens, heads, d, BM=64)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    inputs = (q, k, v, do, lse, delta)
    rest = (starts, k_starts, d**-0.5, tokens, heads, kv_heads, d, causal)

    def launch(kernel, autotuned, outputs, longest, by, width):
        sequences = len(starts) - 1
        if block is None:
            grid = lambda meta: (triton.cdiv(longest, meta[by]), width, sequences)  # noqa: E731
            autotuned[grid](*inputs, *outputs, *rest)
        else:
            sizes = dict(zip(("BM", "BN"), block, strict=True))
            kernel[(triton.cdiv(longest, sizes[by]), width, sequences)](
                *inputs, *outputs, *rest, **sizes
            )

    launch(dkdv_kernel, tuned_dkdv, (dk, dv), longest_k, "BN", kv_heads)
    launch(dq_kernel, tuned_dq, (dq,), longest_q, "BM", heads)
    return dq, dk, dv


# --8<-- [end:launch]


def plain(q, k, v, starts, causal, k_starts):
    """Attention by its definition, one sequence at a time, in the arguments' precision."""
    outs, lses, group = [], [], q.shape[1] // k.shape[1]
    for (a, b), (c, e) in zip(pairs(starts), pairs(k_starts), strict=True):
        x = q[a:b].transpose(0, 1)
        y, w = (t[c:e].repeat_interleave(group, 1).transpose(0, 1) for t in (k, v))
        z = x @ y.mT * q.shape[-1] ** -0.5
        if causal:
            seen = torch.ones(b - a, e - c, dtype=torch.bool, device=q.device)
            z = z.masked_fill(~seen.tril(e - c - b + a), -torch.inf)
        empty = (z == -torch.inf).all(-1, keepdim=True)  # the softmax of such rows is NaN
        outs.append(
            (z.masked_fill(empty, 0).softmax(-1).masked_fill(empty, 0) @ w).transpose(0, 1)
        )
        lses.append(z.logsumexp(-1))
    return torch.cat(outs), torch.cat(lses, 1)


def pairs(starts: torch.Tensor) -> list[tuple[int, int]]:
    return list(zip(starts.tolist(), starts.tolist()[1:], strict=False))


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    on_gpu = torch.accelerator.is_available()
    device = torch.accelerator.current_accelerator() if on_gpu else torch.device("cpu")
    print("relative errors of dQ, dK, dV: ours, and those of plain bf16 attention")
    print("queries x keys  heads   d mask     ours                 plain")
    for lengths, k_lengths, heads, kv_heads, d, causal, offset, block in (
        ((33,), (33,), 2, 2, 16, False, 0, (16, 32)),
        ((1, 36, 17), (1, 36, 17), 4, 2, 32, True, 0, (16, 16)),
        ((5, 20), (37, 20), 2, 1, 16, True, 0, (32, 16)),  # fewer queries than keys
        ((20, 16), (7, 33), 2, 1, 64, True, 0, (16, 16)),  # 13 queries see no key
        ((20,), (20,), 1, 1, 16, False, 6, (16, 16)),  # scores near -144
    ):
        starts, k_starts = (
            torch.tensor([0, *x], device=device).cumsum(0).int() for x in (lengths, k_lengths)
        )
        q = (torch.randn(sum(lengths), heads, d, device=device) + offset).bfloat16()
        k = (torch.randn(sum(k_lengths), kv_heads, d, device=device) - offset).bfloat16()
        v = torch.randn(k.shape, device=device).bfloat16()
        do = torch.randn_like(q)
        results = []
        for dtype in (torch.float64, torch.bfloat16):
            leaves = [t.to(dtype).requires_grad_() for t in (q, k, v)]
            o, lse = plain(*leaves, starts, causal, k_starts)
            results.append((o, lse, torch.autograd.grad(o, leaves, do.to(dtype))))
        (o, lse, truth), (_, _, rounded) = results
        o, lse = o.detach().bfloat16(), lse.detach().float()  # as forward stores them
        ours, again = (
            backward(q, k, v, o, lse, do, starts, causal, k_starts, block) for _ in range(2)
        )
        assert all(torch.equal(x, y) for x, y in zip(ours, again, strict=True))
        cells = []
        for gradient, exact, plainly in zip(ours, truth, rounded, strict=True):
            error, yardstick = ((x - exact).norm() / exact.norm() for x in (gradient, plainly))
            assert error <= 2 * yardstick + 1e-3, (error, yardstick)
            cells.append((f"≈{error:.3f}", f"≈{yardstick:.3f}"))
        name = "+".join(map(str, lengths)) + " x " + "+".join(map(str, k_lengths))
        mask = "causal" if causal else "full"
        columns = "   ".join(" ".join(column) for column in zip(*cells, strict=True))
        print(f"{name:17} {heads}/{kv_heads}  {d:2} {mask:6}   {columns}")
    print("run twice: the same bits, dQ, dK and dV")

    # in fp32 no rounding hides an error; on a GPU tl.dot rounds its factors to TF32
    q, k, v, do = (torch.randn(40, 1, 16, device=device) for _ in range(4))
    starts = torch.tensor([0, 40], device=device).int()
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    o, lse = plain(*leaves, starts, True, starts)
    truth = torch.autograd.grad(o, leaves, do.double())
    o, lse = o.detach().float(), lse.detach().float()
    ours = backward(q, k, v, o, lse, do, starts, True, block=(32, 16))
    for gradient, exact in zip(ours, truth, strict=True):
        assert (gradient - exact).norm() < (5e-3 if on_gpu else 1e-5) * exact.norm()
    try:  # the gradient of a sum is one number, expanded with strides of 0
        backward(q, k, v, o, lse, torch.ones((), device=device).expand_as(do), starts)
        raise AssertionError("this layout must be rejected")
    except ValueError:
        pass


if __name__ == "__main__":
    main()
