"""Assignment 5: a causal convolution in C++, by FFT, and a sparse product with its gradients.

    python assessment/assignment5_operators.py

State space models and audio convolve long signals with long filters: y[t] = Σ w[j]·x[t-j]. The
kernel in C++ becomes an operator of torch, with a fake for compilers and gradients. The FFT
computes the same in n·log n. And a sparse weight learns without ever becoming dense. g++ is all
that is needed: the kernel gets pointers, by ctypes.
"""

import ctypes
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch


def source() -> str:
    """The kernel: rows × n numbers x, a filter w of k numbers, rows × n numbers y."""
    return r"""
extern "C" void causal(const double* x, const double* w, double* y, long rows, long n, long k) {
  for (long r = 0; r < rows; r++)
    for (long t = 0; t < n; t++) {
      double sum = 0;
      // >>> solution 1: y[t] = Σ w[j]·x[t-j] within row r; before a row begins it is zero
      for (long j = 0; j < k && j <= t; j++) sum += w[j] * x[r * n + t - j];
      // <<< solution
      y[r * n + t] = sum;
    }
}
"""


def build(folder: str) -> Callable:
    """Compile the kernel; the function takes what `causal` takes."""
    cpp, library = Path(folder, "causal.cpp"), Path(folder, "causal.so")
    cpp.write_text(source())
    command = ["g++", "-O2", "-shared", "-fPIC", str(cpp), "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        blank = done.stderr.partition('#error "')[2].partition('"')[0]
        lines = [line for line in done.stderr.splitlines() if ": error: " in line]
        error = (lines or [done.stderr])[0].removeprefix(f"{folder}/")
        raise NotImplementedError(blank) if blank else SyntaxError(error)
    kernel = ctypes.CDLL(str(library)).causal
    kernel.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_long] * 3
    kernel.restype = None
    return kernel


def register(kernel: Callable, name: str = "assignment5::causal") -> Callable:
    """Register the operator y = causal(x, w) under this name, and return it.

    x is [..., n] and w is [k], both in fp32 or both in fp64, with any strides. k may be larger
    than n. y has the shape and the dtype of x. The kernel computes in fp64. The operator has a
    fake, for compilers, and gradients for x and w.
    """

    # >>> solution 2: custom_op, register_fake, register_autograd with setup_context
    # hint: the gradient of x is a causal convolution too, in which time runs backwards
    @torch.library.custom_op(name, mutates_args=())
    def causal(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        signal, taps = x.double().contiguous(), w.double().contiguous()
        y = torch.empty_like(signal)
        n, k = x.shape[-1], len(w)
        rows = signal.numel() // n if n else 0
        kernel(signal.data_ptr(), taps.data_ptr(), y.data_ptr(), rows, n, k)
        return y.to(x.dtype)

    @causal.register_fake
    def _(x, w):
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    def save(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        n = x.shape[-1]
        grad_x = causal(grad.flip(-1), w).flip(-1)
        taps = [
            (grad[..., j:] * x[..., : n - j]).sum() if j < n else grad.new_zeros(())
            for j in range(len(w))
        ]
        return grad_x, torch.stack(taps).to(w.dtype)

    causal.register_autograd(backward, setup_context=save)
    return causal
    # <<< solution


def fast_size(n: int) -> int:
    """Return the smallest fast size from n on: its prime factors are only 2, 3, 5 and 7."""
    # >>> solution 3: divide by each prime as often as possible; a fast size leaves 1
    while True:
        rest = n
        for prime in (2, 3, 5, 7):
            while rest % prime == 0:
                rest //= prime
        if rest == 1:
            return n
        n += 1
    # <<< solution


def fft_causal(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Compute the same convolution, of x [..., n] and w [k], by FFTs of a fast size.

    All numbers are real, so the transforms are those for real numbers.
    """
    # >>> solution 3: transforms so long that the end is not added to the beginning
    size = fast_size(x.shape[-1] + len(w) - 1)
    spectrum = torch.fft.rfft(x, size) * torch.fft.rfft(w, size)
    return torch.fft.irfft(spectrum, size)[..., : x.shape[-1]]
    # <<< solution


class SparseProduct(torch.autograd.Function):
    """A sparse [m, n] times a dense [n, b]. The entry e has the number values[e], in row
    rows[e] and column cols[e]. Entries at the same place are added.

    Neither forward nor backward makes a tensor of m × n numbers.
    """

    @staticmethod
    def forward(ctx, values, rows, cols, dense, m: int):
        # >>> solution 4: take the rows of dense that the entries need, scale and add them
        ctx.save_for_backward(values, rows, cols, dense)
        out = dense.new_zeros(m, dense.shape[1])
        return out.index_add_(0, rows, values[:, None] * dense[cols])
        # <<< solution

    @staticmethod
    def backward(ctx, grad):
        """Compute the gradients of values (only at the entries) and of dense."""
        # >>> solution 4: an inner product for each entry, and the transposed product
        values, rows, cols, dense = ctx.saved_tensors
        grad_values = (grad[rows] * dense[cols]).sum(1)
        grad_dense = torch.zeros_like(dense).index_add_(0, cols, values[:, None] * grad[rows])
        return grad_values, None, None, grad_dense, None
        # <<< solution


# --8<-- [start:main]
def main() -> None:
    if shutil.which("g++") is None:
        sys.exit("g++ compiles the kernel, and is not there")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        causal = register(build(folder))
    x = torch.randn(3, 50, dtype=torch.float64, requires_grad=True)
    w = torch.randn(7, dtype=torch.float64, requires_grad=True)
    padded = torch.nn.functional.pad(x[:, None], (6, 0))
    truth = torch.nn.functional.conv1d(padded, w.flip(0)[None, None])[:, 0]
    torch.testing.assert_close(causal(x, w), truth)
    assert torch.autograd.gradcheck(causal, (x[:, :9].detach().requires_grad_(), w))
    print("the operator: conv1d's numbers, gradients checked")
    torch.testing.assert_close(fft_causal(x, w), truth)
    print(f"by FFT: the same; 50 + 7 - 1 = 56 is a fast size, 1009 grows to {fast_size(1009)}")
    entries = torch.randint(0, 1000, (2, 5000))
    values = torch.randn(5000, dtype=torch.float64, requires_grad=True)
    dense = torch.randn(1000, 4, dtype=torch.float64, requires_grad=True)
    whole = torch.zeros(1000, 1000).double().index_put(tuple(entries), values, accumulate=True)
    products = SparseProduct.apply(values, *entries, dense, 1000), whole @ dense
    ours, truth = (torch.autograd.grad(y.square().sum(), (values, dense)) for y in products)
    torch.testing.assert_close((products[0], *ours), (products[1], *truth))
    print(f"sparse: {len(ours[0])} gradients for 5000 entries, none of 1000²")


# --8<-- [end:main]


def stop_at_blank(kind, error, trace) -> None:
    if kind is not NotImplementedError:
        return sys.__excepthook__(kind, error, trace)
    sys.exit(f"a blank: {error}")


if __name__ == "__main__":
    sys.excepthook = stop_at_blank
    main()
