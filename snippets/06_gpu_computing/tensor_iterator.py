"""A small TensorIterator broadcasts, reorders and merges dimensions to get few, long loops.

ATen's TensorIterator does this for elementwise operators. Look at the column `loops`: it counts
the inner loops that x + y needs. If all dimensions merge into one, a single loop is enough. The
program compares the sums and the strides of the results with torch.
"""

import functools
import math

import torch


def order(strides: list[list[int]], sizes: list[int]) -> list[int]:
    """Return the dimensions, innermost first, sorted by the strides of the operands.

    The first operand decides. If it is broadcast in one of the two compared dimensions, it has
    stride 0 there, and the next operand decides instead.
    """

    def compare(d: int, e: int) -> int:
        for s in strides:
            if s[d] and s[e] and s[d] != s[e]:
                return s[d] - s[e]
            if s[d] and s[e] and sizes[d] != sizes[e]:
                return sizes[d] - sizes[e]
        return 0

    return sorted(range(len(sizes) - 1, -1, -1), key=functools.cmp_to_key(compare))


def allocate(shape: torch.Size, inputs: list[torch.Tensor]) -> torch.Tensor:
    """Return an empty dense tensor whose dimensions have the order of the inputs' strides."""
    strides, step = [0] * len(shape), 1
    for d in order([list(x.expand(shape).stride()) for x in inputs], list(shape)):
        strides[d] = step
        step *= shape[d]
    return torch.empty_strided(shape, strides, dtype=inputs[0].dtype)


def plan(*operands: torch.Tensor) -> tuple[list[int], list[list[int]]]:
    """Return the merged sizes, innermost first, and the strides of each operand in elements."""
    shape = operands[0].shape
    strides = [list(x.expand(shape).stride()) for x in operands]  # 0 where broadcast
    merged, walks = [], [[] for _ in operands]
    for d in order(strides, list(shape)):
        if shape[d] == 1:
            continue
        jumps = [
            s[d] - w[-1] * merged[-1] if w else 1 for s, w in zip(strides, walks, strict=True)
        ]
        if not any(jumps):  # no operand jumps, so this dimension continues the last one
            merged[-1] *= shape[d]
            continue
        merged.append(shape[d])
        for s, w in zip(strides, walks, strict=True):
            w.append(s[d])
    return merged or [1], [w or [1] for w in walks]


def add(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return x + y and the number of inner loops that the plan needed."""
    out = allocate(torch.broadcast_shapes(x.shape, y.shape), [x, y])
    sizes, walks = plan(out, x, y)
    outer = sizes[1:]
    for flat in range(math.prod(outer)):
        offsets = [t.storage_offset() for t in (out, x, y)]
        for d, size in enumerate(outer, start=1):
            flat, index = divmod(flat, size)
            offsets = [o + index * w[d] for o, w in zip(offsets, walks, strict=True)]
        to, a, b = (  # the inner loop has one size, and one stride for each operand
            t.as_strided((sizes[0],), (w[0],), o)
            for t, w, o in zip((out, x, y), walks, offsets, strict=True)
        )
        torch.add(a, b, out=to)
    return out, math.prod(outer)


def main() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(8, 16, 32), torch.randn(8, 16, 32)
    c, d = a.view(8, 1, 512), b.view(8, 1, 512)  # a dimension of size 1 has an equal stride
    cases = {  # x, y, and the number of inner loops that the plan should need
        "contiguous + contiguous": (c, d, 1),
        "both transposed alike": (a.transpose(0, 2), b.transpose(0, 2), 1),
        "3×4 + transposed 4×3": (torch.randn(3, 4), torch.randn(4, 3).T, 3),
        "one transposed": (a, torch.randn(32, 16, 8).transpose(0, 2), 128),
        "matrix + row (bias)": (a, torch.randn(32), 128),
        # the row is broadcast, so the strides of the matrix decide the order of the dimensions
        "row + matrix": (torch.randn(32), torch.randn(16, 8, 32).transpose(0, 1), 128),
        "+ tensor of one element": (a, torch.tensor(2.0), 1),
        "+ column": (a, torch.randn(8, 16, 1), 128),
        "every other column": (c[..., 1::2].transpose(0, 1), d[..., 1::2].transpose(0, 1), 1),
        "channels last": (
            torch.randn(2, 3, 8, 8).to(torch.bfloat16, memory_format=torch.channels_last),
            torch.randn(2, 3, 8, 8).to(torch.bfloat16, memory_format=torch.channels_last),
            1,
        ),
    }
    print(f"{'x + y':25} {'sizes':14} {'strides of out, x, y':28} loops")
    for name, (x, y, expected) in cases.items():
        out, loops = add(x, y)
        torch.testing.assert_close(out, x + y, rtol=0, atol=0)
        assert out.stride() == (x + y).stride(), name
        assert loops == expected, (name, loops)
        sizes, walks = plan(out, x, y)
        walk = " ".join(str(tuple(w)).replace(",)", ")").replace(" ", "") for w in walks)
        print(f"{name:25} {'×'.join(map(str, sizes)):14} {walk:28} {loops}")
    print("all sums, and the strides of the results, equal those of torch")


if __name__ == "__main__":
    main()
