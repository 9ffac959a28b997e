"""The two descriptors of blackwell.cu have the bits that the PTX ISA asks for.

    python blackwell_descriptors.py blackwell.cu hopper.cu

The program reads the C++ expressions of the descriptors and evaluates them in Python. It packs
the same descriptors from tables of the PTX ISA 9.0 and compares all bits. Then it plays the
part of the hardware: TMA writes a tile with its swizzle, and the tensor cores find each element
by the descriptor. Look at the last lines: one bit differs from Hopper's descriptor.
"""

import re
import sys
from pathlib import Path

Field = tuple[str, int, int, int, str]  # name, first bit, number of bits, value, meaning
CUTLASS_FP16 = 138412048  # the constant that CuTe DSL compiles into its tutorial fp16_gemm_0


def matrix(address: int, stride: int) -> list[Field]:
    """Describe a factor with k along its rows: PTX ISA 9.0, section 9.7.16.4.1, table 40."""
    return [
        ("start address", 0, 14, (address & 0x3FFFF) >> 4, "in units of 16 bytes"),
        ("leading dimension", 16, 14, 1, "not used with a swizzle, so 1"),
        ("stride dimension", 32, 14, (stride & 0x3FFFF) >> 4, "1,024 bytes to the next 8 rows"),
        ("fixed constant", 46, 3, 0b001, "required by tcgen05"),
        ("base offset", 49, 3, 0, "the tile begins at a multiple of 1,024 bytes"),
        ("swizzle mode", 61, 3, 2, "128 bytes"),
    ]


def instruction(m: int, n: int, factors: int = 1) -> list[Field]:
    """Describe a product of kind::f16: PTX ISA 9.0, section 9.7.16.4.2, table 42."""
    return [
        ("sparsity", 2, 1, 0, "dense"),
        ("type of D", 4, 2, 1, "fp32"),
        ("type of A", 7, 3, factors, "bf16"),
        ("type of B", 10, 3, factors, "bf16"),
        ("negate A, B", 13, 2, 0, "no"),
        ("transpose A, B", 15, 2, 0, "k along the rows"),
        ("N / 8", 17, 6, n >> 3, f"N = {n}"),
        ("M / 16", 24, 5, m >> 4, f"M = {m}"),
    ]


# --8<-- [start:pack]
def packed(fields: list[Field]) -> int:
    """Return the descriptor with these fields. Every value must fit into its bits."""
    descriptor = 0
    for name, first, bits, value, _ in fields:
        assert 0 <= value < 1 << bits, name
        descriptor |= value << first
    return descriptor


def evaluated(expression: str, names: dict[str, int]) -> int:
    """Return the value of a C++ expression of integers, read as Python."""
    for cpp, python in (("address(tile)", "address"), ("uint64_t(", "("), ("/", "//")):
        expression = expression.replace(cpp, python)
    return eval(f"({expression})", names)


# --8<-- [end:pack]


# --8<-- [start:elements]
def written_by_tma(rows: int) -> dict[int, tuple[int, int]]:
    """Return which element (row, k) TMA writes to each byte offset: rows of 64 bf16 factors.

    The swizzle exchanges pieces of 16 bytes: piece j of row r goes to place j xor r mod 8.
    """
    place = {}
    for row in range(rows):
        for k in range(64):
            piece, within = divmod(2 * k, 16)
            place[128 * row + 16 * (piece ^ row % 8) + within] = row, k
    return place


def read_by_descriptor(descriptor: int, row: int, k: int) -> int:
    """Return the address at which tensor cores look for element (row, k) of a factor.

    Eight rows of 128 bytes follow each other, then the stride. Bits 7 to 9 of the address are
    added (xor) to bits 4 to 6.
    """
    start, stride = (descriptor & 0x3FFF) << 4, (descriptor >> 32 & 0x3FFF) << 4
    address = start + row // 8 * stride + row % 8 * 128 + 2 * k
    return address ^ (address >> 7 & 7) << 4


# --8<-- [end:elements]


def show(fields: list[Field]) -> None:
    for name, first, bits, value, meaning in fields:
        last = f"{first} to {first + bits - 1}" if bits > 1 else f"{first}"
        print(f"  {name:18} bits {last:9} {value:6}   {meaning}")


def main() -> None:
    if len(sys.argv) != 3 or not all(Path(name).is_file() for name in sys.argv[1:]):
        sys.exit("start it as: python blackwell_descriptors.py blackwell.cu hopper.cu")
    blackwell, hopper = (Path(name).read_text("utf-8") for name in sys.argv[1:])
    sizes = {name: int(re.search(rf"\b{name} = (\d+)", blackwell)[1]) for name in ("BM", "BN")}
    of_factor = r"descriptor\(const Factor \*tile\) \{\s*return (.*?);"
    ours, theirs = (re.search(of_factor, source, re.S)[1] for source in (blackwell, hopper))

    for address in range(0, 232448, 32):  # every place in shared memory where k can begin
        tile = packed(matrix(address, 1024))
        assert evaluated(ours, {"address": address}) == tile, hex(address)
        assert evaluated(theirs, {"address": address}) == tile - (1 << 46), hex(address)
    example = 5 * 16384
    print(
        f"A tile at address {example} of shared memory: {packed(matrix(example, 1024)):#018x}"
    )
    show(matrix(example, 1024))

    value = evaluated(re.search(r"PRODUCT = (.*?);", blackwell)[1], sizes)
    product = instruction(sizes["BM"], sizes["BN"])
    assert value == packed(product), (hex(value), hex(packed(product)))
    fp16 = packed(instruction(128, 256, factors=0))
    assert fp16 == CUTLASS_FP16, fp16  # a value that NVIDIA's compiler chose
    print(f"\nThe product: {value:#010x}")
    show(product)

    checked = 0
    for start in (0, 16384, 5 * 16384):
        # the next 16 factors of a row begin 32 bytes further on
        steps = [evaluated(ours, {"address": start + 32 * step}) for step in range(4)]
        for offset, (row, k) in written_by_tma(sizes["BN"]).items():
            found = read_by_descriptor(steps[k // 16], row, k % 16)
            assert found == start + offset, (row, k)
            checked += 1
    print(f"\nTensor cores find all {checked:,} elements of three tiles where TMA wrote them.")
    wrong = packed(matrix(0, 512))  # 512 bytes from eight rows to the next eight
    missed = sum(
        read_by_descriptor(wrong + 2 * (k // 16), row, k % 16) != offset
        for offset, (row, k) in written_by_tma(sizes["BN"]).items()
    )
    assert missed == (sizes["BN"] - 8) * 64  # only the first eight rows are found
    print(f"With a stride of 512 bytes they would miss {missed:,} of {sizes['BN'] * 64:,}.")

    print("Hopper's descriptor has the same bits, except bit 46.")


if __name__ == "__main__":
    main()
