"""Compare the sparse formats COO, CSR, BSR and 2:4: their bytes, and the time of a product.

The bytes of the tensors must equal the formulas. The product is a [1024, 1024] matrix times
[1024, 64] on one CPU core. Compare the density below which a format saves bytes with the
density below which it saves time. Draws sparse_formats.svg.
"""

import statistics
import time
import warnings

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import torch

N, COLUMNS, BLOCK = 1024, 64, 16
DENSITIES = [0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.7]


def matrix(density: float, block: int) -> torch.Tensor:
    """Return a matrix [N, N] in fp32 with random blocks of `block` × `block` nonzeros."""
    keep = (
        torch.rand(N // block, N // block).argsort(-1) < density * N / block
    )  # alike in all rows
    keep = keep.repeat_interleave(block, 0).repeat_interleave(block, 1)
    return torch.where(keep, torch.randn(N, N), 0.0)


def stored_bytes(x: torch.Tensor) -> int:
    """Return the bytes of all parts of a sparse tensor."""
    if x.layout == torch.sparse_coo:
        return x.indices().nbytes + x.values().nbytes
    return x.crow_indices().nbytes + x.col_indices().nbytes + x.values().nbytes


def formula(layout: str, nnz: int) -> int:
    """Return the bytes with int64 indices and fp32 values. `nnz` counts elements."""
    if layout == "COO":
        return nnz * (4 + 2 * 8)  # a row and a column for each value
    if layout == "CSR":
        return nnz * (4 + 8) + (N + 1) * 8  # a column for each value, a start for each row
    blocks = nnz // BLOCK**2
    return blocks * (BLOCK**2 * 4 + 8) + (N // BLOCK + 1) * 8


# --8<-- [start:two_four]
def compress(dense: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the two largest of every four: values [n, k/2], and places of 2 bits each."""
    groups = dense.view(len(dense), -1, 4)
    places = groups.abs().topk(2, -1).indices.sort(-1).values  # [n, k/4, 2], each 0 to 3
    values = groups.gather(-1, places).flatten(1)
    nibbles = (places[..., 0] | places[..., 1] << 2).to(torch.uint8)  # [n, k/4]
    return values, nibbles[:, ::2] | nibbles[:, 1::2] << 4


def product(values: torch.Tensor, packed: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Multiply the compressed matrix by x [k, c], with k/2 terms for each element."""
    nibbles = torch.stack([packed & 15, packed >> 4], -1).flatten(1).long()
    places = torch.stack([nibbles & 3, nibbles >> 2], -1)  # [n, k/4, 2]
    rows = (places + 4 * torch.arange(places.shape[1])[:, None]).flatten(1)  # [n, k/2]
    return torch.einsum("nj,njc->nc", values, x[rows])


# --8<-- [end:two_four]


def microseconds(function) -> float:
    """Return the least time of four runs, after one run to warm up."""
    assert function().shape == (N, COLUMNS)  # the whole product
    times = []
    for _ in range(4):
        begin = time.perf_counter()
        function()
        times.append(time.perf_counter() - begin)
    return min(times) * 1e6


def crossing(times: list[float], dense: float) -> float:
    """Return the interpolated density at which a format takes as long as dense."""
    for i in range(1, len(times)):
        if times[i] > dense:
            low, high = times[i - 1], times[i]
            step = (dense - low) / (high - low)
            return DENSITIES[i - 1] + step * (DENSITIES[i] - DENSITIES[i - 1])
    return DENSITIES[-1]


def draw(times: dict[str, list[float]], dense: float) -> None:
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "sparse", "font.size": 12}
    figure, axes = plt.subplots(figsize=(7, 3.8))
    colours = {"COO": "#c2410c", "CSR": "#0b6e99", "BSR": "#15803d"}
    percent = [100 * density for density in DENSITIES]
    for name, row in sorted(times.items(), key=lambda item: -statistics.median(item[1])):
        axes.plot(percent, row, "o-", color=colours[name], linewidth=2, label=name)
    # a legend, because on a different machine two lines may be on each other
    axes.legend(loc="upper left", frameon=False, labelcolor="linecolor")
    axes.axhline(dense, color="#52525b", linestyle="--")
    axes.text(1, dense * 1.12, "dense", color="#52525b", weight="bold")
    axes.set(xscale="log", yscale="log", ylabel="time of the product, µs", xlim=(0.9, 80))
    axes.set_xlabel("density, %", loc="left")
    axes.set_xticks([1, 2, 5, 10, 20, 40, 70], ["1", "2", "5", "10", "20", "40", "70"])
    axes.minorticks_off()
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig("sparse_formats.svg", transparent=True, metadata={"Date": None})


def main() -> None:
    warnings.filterwarnings("ignore", message="Sparse")  # "… support is in beta state"
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x = torch.randn(N, COLUMNS)
    times = {"COO": [], "CSR": [], "BSR": []}
    size, dense_times = N * N * 4, []
    print("density   COO    CSR    BSR  of the dense bytes")
    for density in DENSITIES:
        single, blocks = matrix(density, 1), matrix(density, BLOCK)
        formats = {
            "COO": (single, single.to_sparse_coo().coalesce()),
            "CSR": (single, single.to_sparse_csr()),
            "BSR": (blocks, blocks.to_sparse_bsr((BLOCK, BLOCK))),
        }
        shares = []
        for name, (full, sparse) in formats.items():
            assert stored_bytes(sparse) == formula(name, int(full.count_nonzero()))
            torch.testing.assert_close(sparse @ x, full @ x, rtol=1e-3, atol=1e-3)
            times[name].append(microseconds(lambda sparse=sparse: sparse @ x))
            shares.append(f"{stored_bytes(sparse) / size:6.1%}")
        print(f"{density:6.0%}  {' '.join(shares)}")
        dense_times.append(microseconds(lambda full=single: full @ x))
    print("the formulas hold; fewer bytes than dense below COO 4/20, CSR 4/12 of the elements")

    weight = torch.randn(N, N)
    values, packed = compress(weight)
    threshold = weight.view(N, -1, 4).abs().topk(2, -1).values[..., 1:]
    masked = torch.where(weight.view(N, -1, 4).abs() >= threshold, weight.view(N, -1, 4), 0)
    torch.testing.assert_close(
        product(values[:64], packed[:64], x), masked.view(N, N)[:64] @ x, rtol=1e-4, atol=1e-4
    )
    for bytes_each in (2, 1):
        share = (values.numel() * bytes_each + packed.nbytes) / (N * N * bytes_each)
        print(
            f"2:4 in {8 * bytes_each} bits: {share:.2%} of dense, half of the multiplications"
        )

    dense = statistics.median(dense_times)
    assert max(times["CSR"][0], times["BSR"][0]) < dense / 2  # 1% of the products
    assert abs(crossing([1, 2, 4, 8, 16, 32, 64], 3) - 0.035) < 1e-9  # half way from 2% to 5%
    # COO is several times slower than CSR, and at 40% also several times slower than dense
    assert sum(times["COO"]) > sum(times["CSR"]) and times["COO"][-2] > dense
    for name, row in times.items():
        print(f"{name} is as fast as dense at a density of ≈{100 * crossing(row, dense):.0f} %")
    draw(times, dense)


if __name__ == "__main__":
    main()
