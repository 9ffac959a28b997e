"""What Triton makes of one matrix product for three kinds of GPUs, on a machine without a GPU.

The compiler needs only the name of a GPU. The first table shows which instructions it chooses
and how many tiles it keeps in shared memory. Compare the lines of sm_90: if Triton does not
know that pointers and strides are multiples of 16, it copies single elements and loads no tile
ahead. The second table shows what tl.dot does with fp32 inputs. After it comes an error that
Triton's interpreter does not raise.

The program also draws triton_compiled.svg. The layout of threads, the number of buffers and
the instruction in this picture are read from what the compiler returned for an H100.
"""

import os
import re
from itertools import pairwise

os.environ.pop("TRITON_INTERPRET", None)  # the compiler, not the interpreter
import torch
import triton
import triton.language as tl
from triton._C.libtriton import native_specialize_impl
from triton.backends.compiler import BaseBackend, GPUTarget
from triton.compiler import ASTSource
from triton.runtime.interpreter import InterpretedFunction


# --8<-- [start:kernel]
@triton.jit
def matmul_kernel(
    a_ptr, b_ptr, c_ptr, a_stride, b_stride, c_stride, K: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute one tile of C per program, for sizes that are multiples of the tiles."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    a_at = a_ptr + m[:, None] * a_stride + k[None, :]
    b_at = b_ptr + k[:, None] * b_stride + n[None, :]
    total = tl.full((BM, BN), 0, dtype=tl.float32)
    for _ in range(0, K, BK):
        total = tl.dot(tl.load(a_at), tl.load(b_at), total, input_precision=PRECISION)
        a_at += BK
        b_at += BK * b_stride
    tl.store(c_ptr + m[:, None] * c_stride + n[None, :], total)


# --8<-- [end:kernel]


TILES = {"BM": 128, "BN": 128, "BK": 64, "PRECISION": None}
SMALL_TILES = {"BM": 64, "BN": 64, "BK": 32}
DEPTH = 4096  # K of the compiled kernels
WARPS = 8
BLOCK_LIMIT = 99 * 1024  # bytes of shared memory that a block may use on sm_89


# --8<-- [start:compile]
def compile_product(capability: int, inputs: str, aligned: bool, stages: int, **sizes):
    """The kernel for one compute capability.

    `inputs` is "bf16" or "fp32". With `aligned`, the compiler knows that all pointers and all
    strides are multiples of 16.
    """
    pointers = {"a_ptr": f"*{inputs}", "b_ptr": f"*{inputs}", "c_ptr": "*fp32"}
    strides = dict.fromkeys(("a_stride", "b_stride", "c_stride"), "i32")
    constants = {"K": DEPTH} | sizes
    signature = pointers | strides | dict.fromkeys(constants, "constexpr")
    attributes = {(i,): [["tt.divisibility", 16]] for i in range(6)} if aligned else {}
    source = ASTSource(matmul_kernel, signature, constexprs=constants, attrs=attributes)
    target = GPUTarget("cuda", capability, 32)
    options = {"num_warps": WARPS, "num_stages": stages}
    return triton.compile(source, target=target, options=options)


# --8<-- [end:compile]


def instructions(kernel) -> tuple[str, str, int]:
    """The multiplication, the copies, and the number of tiles of A in shared memory."""
    ptx = kernel.asm["ptx"]
    (product,) = set(re.findall(r"\b(wgmma\.mma_async|mma\.sync)\.", ptx))
    if re.search(r"cp\.async\.cg\S+ \[[^;]*, 0x10", ptx):
        copies = "cp.async, 16 B"
    else:
        (width,) = set(re.findall(r"ld\.global\.b(\d+)", ptx))
        copies = f"ld.global, {int(width) // 8} B"
    # a buffer for the tiles of A: "128x64xbf16" for one, "3x128x64xbf16" for three
    buffer = re.search(r"local_alloc.*memdesc<(?:(\d+)x)?128x64xbf16", kernel.asm["ttgir"])
    return product, copies, int(buffer[1] or 1)


def is_multiple_for_triton(number: int) -> bool:
    """Whether Triton adds "multiple of 16" to the signature when it sees this argument."""
    return native_specialize_impl(BaseBackend, number, False, True, True)[1] == "D"


INK, MUTED, BLUE, ORANGE, GREEN = "#1f2937", "#52525b", "#0b6e99", "#c2410c", "#15803d"


def words(x: float, y: float, text: str, colour: str = INK, anchor: str = "middle") -> str:
    return f'<text x="{x:g}" y="{y:g}" fill="{colour}" text-anchor="{anchor}">{text}</text>'


def line_at(x: float, y: float, text: str, colour: str = INK) -> str:
    return words(x, y, text, colour, "start")


def svg_title(x: float, words: str) -> str:
    return f'<text x="{x:g}" y="18" fill="{INK}" font-weight="600">{words}</text>'


def svg_box(
    x: float, y: float, w: float, h: float, colour: str, fill: float = 0.15, more: str = ""
) -> str:
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" fill="{colour}" '
        f'fill-opacity="{fill}" stroke="{colour}" {more}/>'
    )


def stated() -> list[str]:
    """The left half: one program computes one tile, and a mask cuts the tiles at the edge."""
    parts = [svg_title(4, "You state"), line_at(4, 40, "which tile, in which steps", MUTED)]
    left, top, side, step = 142, 168, 52, 26  # the corner of C, a tile, a step along K
    for row in range(3):
        for column in range(3):
            x, y = left + column * side, top + row * side
            mine = (row, column) == (1, 1)
            parts.append(
                svg_box(x, y, side, side, GREEN if mine else MUTED, 0.45 if mine else 0)
            )
    for i in range(4):
        now = 0.7 if i == 2 else 0.15
        parts.append(svg_box(left - 8 - (4 - i) * step, top + side, step, side, BLUE, now))
        parts.append(svg_box(left + side, top - 8 - (4 - i) * step, side, step, ORANGE, now))
    edge = f'stroke="{INK}" stroke-width="1.6" stroke-dasharray="5 4" fill="none"'
    parts.append(f'<path d="M{left - 4} {top + 132} H{left + 132} V{top - 4}" {edge}/>')
    parts += [
        words(left - 60, top + side - 6, "A", BLUE),
        line_at(left + 2 * side + 10, top - 60, "B", ORANGE),
        words(left + 1.5 * side, top + 1.5 * side + 5, "C", INK),
        line_at(4, 348, "tl.program_id chooses the green tile of C."),
        line_at(4, 369, "tl.load and tl.dot run once per step."),
        line_at(4, 390, "A mask says what exists (dashed line)."),
        line_at(4, 411, f"You also set num_warps={WARPS}, num_stages=3."),
    ]
    return parts


def buffer_times(buffers: int, steps: int) -> list[tuple[int, float, float, float, float]]:
    """For each step along K: its buffer, then when it is copied, and when it is multiplied.

    The unit is the time of one multiplication. All buffers but one are filled before the loop.
    In the loop, each multiplication starts at the same time as the copy into the buffer that
    the previous multiplication has read.
    """
    ahead = buffers - 1
    times: list[tuple[int, float, float, float, float]] = []
    for step in range(steps):
        if buffers == 1:
            copy = times[-1][4] if times else 0.0
        else:
            copy = times[step - ahead][3] if step >= ahead else 0.0
        arrival = copy + 1.6
        start = max(arrival, times[-1][4] if times else 0)
        times.append((step % buffers, copy, arrival, start, start + 1))
    return times


def chosen(kernel) -> list[str]:
    """The right half: what the compiler reports about the kernel for the H100."""
    layout = re.search(
        r"nvidia_mma<\{.*?warpsPerCTA = \[(\d+), (\d+)\], instrShape = \[(\d+), ",
        kernel.asm["ttgir"],
    )
    down, across, rows = map(int, layout.groups())
    assert down * across == WARPS and down * rows == TILES["BM"]
    sums = TILES["BM"] * TILES["BN"] // (32 * WARPS)
    shape = re.search(r"wgmma\.mma_async\.\S*?\.(m\d+n\d+k\d+)\.", kernel.asm["ptx"])[1]
    _, _, buffers = instructions(kernel)
    kib = kernel.metadata.shared / 1024
    assert kib == buffers * (TILES["BM"] + TILES["BN"]) * TILES["BK"] * 2 / 1024

    left = 356
    parts = [svg_title(left, "The compiler decides"), line_at(left, 40, "for an H100", MUTED)]
    for warp in range(down):
        parts.append(svg_box(left, 54 + 13 * warp, 104, 13, GREEN, 0.15 + 0.25 * (warp % 2)))
    parts += [
        line_at(left + 116, 74, f"threads: {down} warps,"),
        line_at(left + 116, 95, f"{rows} rows of the tile each"),
        line_at(left + 116, 124, f"registers: {sums} sums per thread"),
        line_at(left + 116, 150, f"instruction: wgmma {shape}"),
        line_at(left, 192, f"shared memory: {buffers} + {buffers} tiles, {kib:g} KiB"),
        line_at(left, 213, "pipelining: copy ahead, then multiply", MUTED),
    ]
    times = buffer_times(buffers, 6)
    scale, first = 37, 420
    for buffer in range(buffers):
        parts.append(line_at(left, 244 + 40 * buffer, f"buffer {buffer}"))
    for step, (buffer, copy, arrival, start, _) in enumerate(times):
        y = 226 + 40 * buffer
        x, width = first + scale * copy, scale * (arrival - copy)
        parts.append(svg_box(x, y, width, 28, BLUE, 0.12))
        parts.append(words(x + width / 2, y + 19, f"copy {step}", BLUE))
        parts.append(svg_box(first + scale * start, y, scale, 28, GREEN, 0.45))
        parts.append(words(first + scale * (start + 0.5), y + 19, f"× {step}", INK))
    right = first + scale * times[-1][4] + 8
    parts.append(f'<path d="M{first} 354 H{right:g} m-7 -4 l7 4 l-7 4" fill="none" '
                 f'stroke="{MUTED}"/>')  # fmt: skip
    parts.append(line_at(left, 358, "time", MUTED))
    parts.append(line_at(left, 390, "It also places every barrier and every address."))
    return parts


def check_buffers() -> None:
    """With one buffer nothing overlaps; with three, only the first multiplication waits."""
    for buffers in (1, 2, 3):
        times = buffer_times(buffers, 6)
        for before, after in pairwise(times):
            assert before[4] <= after[3]  # one multiplication after the other
        for before, after in zip(times, times[buffers:], strict=False):
            assert before[0] == after[0]  # the same buffer, which must have been read
            assert before[4] <= after[1]
        pauses = [b[3] - a[4] for a, b in pairwise(times)]
        assert all(pause > 1.5 for pause in pauses) == (buffers == 1)
        assert all(pause < 1e-9 for pause in pauses) == (buffers == 3)


def draw(kernel) -> str:
    return "\n".join(
        [
            '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 424" '
            'font-family="system-ui, sans-serif" font-size="14">',
            *stated(),
            f'<path d="M336 8 V416" stroke="{MUTED}" stroke-dasharray="2 4"/>',
            *chosen(kernel),
            "</svg>",
            "",
        ]
    )


def main() -> None:
    a, b = torch.randn(256, 128).half(), torch.randn(128, 256).half()
    c = torch.empty(256, 256)
    interpreted = InterpretedFunction(matmul_kernel.fn)  # does the kernel multiply at all?
    interpreted[(2, 2)](a, b, c, 128, 256, 256, K=128, **TILES)
    torch.testing.assert_close(c, a.float() @ b.float(), rtol=1e-3, atol=1e-2)

    print("a product of bf16 matrices")
    print("target  stages  multiples of 16  instruction      copies          A + B  shared")
    for capability, stages, aligned, expected in (
        (80, 3, True, ("mma.sync", "cp.async, 16 B", 2)),
        (90, 3, True, ("wgmma.mma_async", "cp.async, 16 B", 3)),
        (90, 3, False, ("wgmma.mma_async", "ld.global, 2 B", 1)),
        (89, 4, True, ("mma.sync", "cp.async, 16 B", 3)),
        (89, 5, True, ("mma.sync", "cp.async, 16 B", 4)),
    ):
        kernel = compile_product(capability, "bf16", aligned, stages, **TILES)
        found = instructions(kernel)
        assert found == expected, found
        used = kernel.metadata
        assert (used.target.arch, used.num_stages) == (capability, stages)
        assert used.num_warps == WARPS
        product, copies, tiles = found
        shared = kernel.metadata.shared
        if capability == 89:
            assert (shared <= BLOCK_LIMIT) == (stages == 4)
        if (capability, aligned) == (90, True):
            check_buffers()
            with open("triton_compiled.svg", "w", encoding="utf-8") as file:
                file.write(draw(kernel))
        print(
            f"sm_{capability}   {stages:6}  {'known' if aligned else 'unknown':15}  "
            f"{product:15}  {copies:14}  {tiles} + {tiles}  {shared:6} bytes"
        )
    numbers = (4096, 4097, 4104, 4112)
    known = [number for number in numbers if is_multiple_for_triton(number)]
    assert known == [number for number in numbers if number % 16 == 0]
    print(f"of the row lengths {numbers}, Triton treats {known} as multiples of 16")

    print("\na product of fp32 matrices for sm_90")
    for precision, expected in ((None, "wgmma, tf32"), ("ieee", "fma.rn.f32")):
        kernel = compile_product(90, "fp32", True, 3, **SMALL_TILES, PRECISION=precision)
        ptx = kernel.asm["ptx"]
        wide, single = "wgmma.mma_async" in ptx, "fma.rn.f32" in ptx
        assert (wide, single) == (expected != "fma.rn.f32", expected == "fma.rn.f32")
        assert not wide or re.search(r"wgmma\.mma_async\S*\.f32\.tf32\.tf32", ptx)
        print(f"input_precision={precision!s:6} {expected}")

    tiny = {"BM": 32, "BN": 32, "BK": 8, "PRECISION": None}
    c = torch.empty(256, 256)
    interpreted[(8, 8)](a, b, c, 128, 256, 256, K=128, **tiny)
    torch.testing.assert_close(c, a.float() @ b.float(), rtol=1e-3, atol=1e-2)
    try:
        compile_product(90, "bf16", True, 3, **tiny)
        raise AssertionError("the compiler accepted a step of 8 along K")
    except triton.CompilationError as error:
        print(f"steps of 8: the interpreter multiplies, the compiler raises: {error.__cause__}")
    try:
        triton.runtime.driver.active.get_current_device()
        print("this machine could run the kernels")
    except RuntimeError as error:
        print(f"a launch on this machine: RuntimeError: {error}")


if __name__ == "__main__":
    main()
