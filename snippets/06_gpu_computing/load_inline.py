"""This program compiles an operator in C++ while it runs, and checks it against float64.

The C++ code uses the stable ABI of libtorch. Three registrations make it an operator: a schema,
a kernel for each device, and a fake kernel, which computes only the shape, strides and dtype. A
second operator ignores the strides of its input: look at the line about a transposed input. If
torch sees an NVIDIA GPU and nvcc is installed, the program also compiles a kernel in CUDA C++.
"""

import os
import shutil
import sys
import tempfile

import torch
from torch._subclasses.fake_tensor import FakeTensorMode, UnsupportedOperatorException
from torch.utils.cpp_extension import CUDA_HOME, load_inline

SOURCE = r"""
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <cmath>

using torch::stable::Tensor;

static void rows(const float* x, float* y, int64_t count, int64_t width, double eps) {
  torch::stable::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
      double squares = 0;
      const float* from = x + row * width;
      for (int64_t i = 0; i < width; i++) squares += double(from[i]) * from[i];
      const float scale = 1 / std::sqrt(squares / width + eps);
      for (int64_t i = 0; i < width; i++) y[row * width + i] = from[i] * scale;
    }
  });
}

// --8<-- [start:kernel]
// Divides each row by its root mean square: [..., width] -> [..., width]
Tensor rms_norm(const Tensor& input, double eps) {
  STD_TORCH_CHECK(input.is_cpu(), "rms_norm: input must be a CPU tensor");
  STD_TORCH_CHECK(input.scalar_type() == torch::headeronly::ScalarType::Float,
                  "rms_norm: input must be float32");
  STD_TORCH_CHECK(input.dim() > 0, "rms_norm: input must have a last dimension");
  Tensor x = torch::stable::contiguous(input);
  Tensor y = torch::stable::empty_like(x);
  const int64_t width = x.size(x.dim() - 1);
  if (x.numel() > 0)
    rows(x.const_data_ptr<float>(), y.mutable_data_ptr<float>(), x.numel() / width, width, eps);
  return y;
}
// --8<-- [end:kernel]

// --8<-- [start:wrong]
// A wrong version without contiguous(): it reads from the pointer on and ignores the strides
Tensor rms_norm_wrong(const Tensor& x, double eps) {
  Tensor y = torch::stable::new_empty(x, x.sizes());
  const int64_t width = x.size(x.dim() - 1);
  rows(x.const_data_ptr<float>(), y.mutable_data_ptr<float>(), x.numel() / width, width, eps);
  return y;
}
// --8<-- [end:wrong]

// --8<-- [start:register]
STABLE_TORCH_LIBRARY(inline_demo, m) {
  m.def("rms_norm(Tensor input, float eps) -> Tensor");
  m.def("rms_norm_wrong(Tensor input, float eps) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(inline_demo, CPU, m) {
  m.impl("rms_norm", TORCH_BOX(&rms_norm));
  m.impl("rms_norm_wrong", TORCH_BOX(&rms_norm_wrong));
}
// --8<-- [end:register]
"""
CUDA = r"""
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <cuda_runtime.h>

using torch::stable::Tensor;

// --8<-- [start:cuda_kernel]
// One warp processes one row
__global__ void rows(const float* x, float* y, int64_t width, float eps) {
  const float* from = x + blockIdx.x * width;
  float squares = 0;
  for (int64_t i = threadIdx.x; i < width; i += 32) squares += from[i] * from[i];
  for (int step = 16; step > 0; step /= 2) squares += __shfl_xor_sync(~0u, squares, step);
  const float scale = rsqrtf(squares / width + eps);
  for (int64_t i = threadIdx.x; i < width; i += 32) y[blockIdx.x * width + i] = from[i] * scale;
}
// --8<-- [end:cuda_kernel]

// --8<-- [start:cuda]
Tensor rms_norm_cuda(const Tensor& input, double eps) {
  STD_TORCH_CHECK(input.scalar_type() == torch::headeronly::ScalarType::Float,
                  "rms_norm: input must be float32");
  STD_TORCH_CHECK(input.dim() > 0, "rms_norm: input must have a last dimension");
  const torch::stable::accelerator::DeviceGuard guard(input.get_device_index());
  Tensor x = torch::stable::contiguous(input), y = torch::stable::empty_like(x);
  void* stream = nullptr;  // will be torch's current stream, not CUDA's default stream
  const auto found = aoti_torch_get_current_cuda_stream(x.get_device_index(), &stream);
  STD_TORCH_CHECK(found == 0, "rms_norm: no current stream");
  const int64_t width = x.size(x.dim() - 1);
  if (x.numel() > 0)
    rows<<<x.numel() / width, 32, 0, static_cast<cudaStream_t>(stream)>>>(
        x.const_data_ptr<float>(), y.mutable_data_ptr<float>(), width, eps);
  const cudaError_t error = cudaGetLastError();
  STD_TORCH_CHECK(error == cudaSuccess, cudaGetErrorString(error));
  return y;
}

STABLE_TORCH_LIBRARY_IMPL(inline_demo, CUDA, m) {
  m.impl("rms_norm", TORCH_BOX(&rms_norm_cuda));
}
// --8<-- [end:cuda]
"""
TARGET = "-DTORCH_TARGET_VERSION=0x020b000000000000"  # the library loads in 2.11 and later
WITH_CUDA = torch.version.cuda and torch.cuda.is_available() and CUDA_HOME is not None


def build() -> None:
    """Compile and load the sources, which registers the operators in torch.ops.inline_demo."""
    needs = {"ninja": "pip install ninja", os.environ.get("CXX", "c++"): "a C++ compiler"}
    for tool, what in needs.items():
        if not shutil.which(tool):
            sys.exit(f"load_inline.py needs {tool} on the PATH: {what}")
    with tempfile.TemporaryDirectory() as directory:
        load_inline(
            "inline_demo",
            SOURCE,
            CUDA if WITH_CUDA else None,  # load_inline writes it to a .cu file for nvcc
            build_directory=directory,
            is_python_module=False,  # no pybind: loading the library runs the registrations
            no_implicit_headers=True,  # without torch/extension.h, which is slow to compile
            extra_cflags=["-O2", TARGET],
            extra_cuda_cflags=["-O3", TARGET, "-DUSE_CUDA"],
        )


def reference(x: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm without a weight, computed in float64."""
    x = x.double()
    return (x / (x.square().mean(-1, keepdim=True) + eps).sqrt()).float()


def main() -> None:
    build()
    rms_norm = torch.ops.inline_demo.rms_norm
    torch.manual_seed(0)
    for shape in [(1,), (7, 31), (3, 5, 33), (4, 0), (2, 1000)]:
        for x in (torch.randn(shape), torch.randn(shape) / 1000):  # small, so eps matters
            torch.testing.assert_close(rms_norm(x, 1e-6), reference(x, 1e-6))
    print("schema:", rms_norm.default._schema)
    print("equal to the float64 reference on five shapes, an empty one among them")

    x = torch.randn(64, 48).T  # [48, 64], strides (1, 48)
    torch.testing.assert_close(rms_norm(x, 1e-6), reference(x, 1e-6))
    wrong = torch.ops.inline_demo.rms_norm_wrong(x, 1e-6)
    memory = x.T.reshape(48, 64)  # the elements in the order in which memory stores them
    torch.testing.assert_close(wrong, reference(memory, 1e-6))
    share = (wrong - reference(x, 1e-6)).abs().gt(1e-3).float().mean().item()
    assert share > 0.9
    print(f"a transposed input: right with contiguous(); {share:.0%} of elements wrong without")

    for bad in (x.double(), torch.tensor(1.0)):
        try:
            rms_norm(bad, 1e-6)
        except RuntimeError as error:  # the message begins with the file and the line
            print("RuntimeError:", str(error).splitlines()[0].split(", ")[-1])

    with FakeTensorMode() as mode:
        try:
            rms_norm(mode.from_tensor(x), 1e-6)
        except UnsupportedOperatorException as error:
            print(f"without a fake kernel: {type(error).__name__}: {error}")
        torch.library.register_fake("inline_demo::rms_norm", fake_rms_norm)
        like = rms_norm(mode.from_tensor(x), 1e-6)
    real = rms_norm(x, 1e-6)
    assert (like.shape, like.stride(), like.dtype) == (real.shape, real.stride(), real.dtype)
    print(f"with one: shape {tuple(like.shape)}, strides {like.stride()}, as the real kernel's")

    if WITH_CUDA:
        for x in (torch.randn(7, 31), torch.randn(0, 4), torch.randn(1000, 2).T / 1000):
            y = rms_norm(x.cuda(), 1e-6)
            torch.testing.assert_close(y.cpu(), reference(x, 1e-6))
        print("the same with the kernel in CUDA C++, on the GPU, on three shapes")
    else:
        print("the kernel in CUDA C++ is left out: it needs nvcc, and a GPU that torch sees")


def fake_rms_norm(x: torch.Tensor, eps: float) -> torch.Tensor:
    return x.new_empty(x.shape)  # contiguous; empty_like(x) would keep the strides of x


if __name__ == "__main__":
    main()
