"""This program builds a wheel with a C++ operator and tests it in a new process.

The wheel uses the limited API of Python and the stable ABI of libtorch. One file therefore
works with later versions of Python and torch: look at its name. With a GPU and nvcc, the
wheel also contains a CUDA kernel. The test compares the operator and its gradient with torch.
"""

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PYPROJECT = """\
[build-system]
requires = ["setuptools", "torch"]
build-backend = "setuptools.build_meta"

[project]
name = "hinge"
version = "0.1"
"""
SETUP = """\
# --8<-- [start:setup]
import torch
from setuptools import setup
from torch.utils.cpp_extension import CUDA_HOME, BuildExtension, CppExtension, CUDAExtension

with_cuda = torch.cuda.is_available() and CUDA_HOME is not None
target = "-DTORCH_TARGET_VERSION=0x020b000000000000"  # works with torch 2.11 and later
python = "-DPy_LIMITED_API=0x030a0000"  # works with Python 3.10 and later
extension = (CUDAExtension if with_cuda else CppExtension)(
    "hinge._C",
    ["csrc/hinge.cpp"] + ["csrc/hinge_cuda.cu"] * with_cuda,
    extra_compile_args={"cxx": ["-O2", target, python], "nvcc": ["-O3", target, "-DUSE_CUDA"]},
    py_limited_api=True,
)
setup(
    packages=["hinge"],
    ext_modules=[extension],
    cmdclass={"build_ext": BuildExtension},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
# --8<-- [end:setup]
"""
CPP = r"""
#include <Python.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <algorithm>

// The wheel promises Python 3.10 and torch 2.11 (11 is 0x0b). A missing macro counts as 0.
#if Py_LIMITED_API != 0x030a0000 || TORCH_TARGET_VERSION >> 48 != 0x020b
#error "setup.py must set both limits, or the wheel does not work with every version"
#endif

using torch::stable::Tensor;

// Computes max(0, 1 - x) for each element
Tensor hinge_cpu(const Tensor& input) {
  STD_TORCH_CHECK(input.scalar_type() == torch::headeronly::ScalarType::Float, "float32 only");
  Tensor x = torch::stable::contiguous(input), y = torch::stable::empty_like(x);
  const float* from = x.const_data_ptr<float>();
  float* to = y.mutable_data_ptr<float>();
  torch::stable::parallel_for(0, x.numel(), 4096, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) to[i] = std::max(0.0f, 1 - from[i]);
  });
  return y;
}

STABLE_TORCH_LIBRARY(hinge, m) { m.def("hinge(Tensor input) -> Tensor"); }
STABLE_TORCH_LIBRARY_IMPL(hinge, CPU, m) { m.impl("hinge", TORCH_BOX(&hinge_cpu)); }

// An empty Python module: importing hinge._C loads the library, which registers the operator
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr};
PyMODINIT_FUNC PyInit__C() { return PyModule_Create(&module); }
"""
CUDA = r"""
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <cuda_runtime.h>

#if TORCH_TARGET_VERSION >> 48 != 0x020b
#error "setup.py must set TORCH_TARGET_VERSION for nvcc, too"
#endif

using torch::stable::Tensor;

__global__ void hinge_kernel(const float* from, float* to, int64_t n) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < n) to[i] = fmaxf(0.0f, 1 - from[i]);
}

// --8<-- [start:cuda]
Tensor hinge_cuda(const Tensor& input) {
  STD_TORCH_CHECK(input.scalar_type() == torch::headeronly::ScalarType::Float, "float32 only");
  const torch::stable::accelerator::DeviceGuard guard(input.get_device_index());
  Tensor x = torch::stable::contiguous(input), y = torch::stable::empty_like(x);
  void* stream = nullptr;  // will be torch's current stream, not CUDA's default stream
  const auto status = aoti_torch_get_current_cuda_stream(x.get_device_index(), &stream);
  STD_TORCH_CHECK(status == 0, "no current stream");
  const int64_t n = x.numel(), blocks = (n + 255) / 256;
  if (n > 0)
    hinge_kernel<<<blocks, 256, 0, static_cast<cudaStream_t>(stream)>>>(
        x.const_data_ptr<float>(), y.mutable_data_ptr<float>(), n);
  const cudaError_t error = cudaGetLastError();
  STD_TORCH_CHECK(error == cudaSuccess, cudaGetErrorString(error));
  return y;
}

STABLE_TORCH_LIBRARY_IMPL(hinge, CUDA, m) { m.impl("hinge", TORCH_BOX(&hinge_cuda)); }
// --8<-- [end:cuda]
"""
INIT = '''\
"""The hinge, max(0, 1 - x), as an operator of torch."""

import torch

# --8<-- [start:init]
from . import _C  # noqa: F401  registers torch.ops.hinge.hinge

hinge = torch.ops.hinge.hinge.default


@torch.library.register_fake("hinge::hinge")
def _(x):
    return x.new_empty(x.shape)


def _backward(ctx, grad):
    (x,) = ctx.saved_tensors
    return torch.where(x < 1, -grad, 0)


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


torch.library.register_autograd("hinge::hinge", _backward, setup_context=_save)
# --8<-- [end:init]
'''
TEST = """\
import torch, hinge
device = torch.accelerator.current_accelerator() if torch.cuda.is_available() else "cpu"
for shape in [(0,), (1,), (31,), (33, 1000)]:
    x = torch.randn(shape, device=device, requires_grad=True)
    above = torch.randn_like(x)  # a different incoming gradient for each element
    hinge.hinge(x).backward(above)
    reference = x.detach().clone().requires_grad_()
    (1 - reference).clamp(min=0).backward(above)
    torch.testing.assert_close(hinge.hinge(x), (1 - reference).clamp(min=0))
    torch.testing.assert_close(x.grad, reference.grad)
strided = torch.randn(4, 3, device=device).T
torch.testing.assert_close(hinge.hinge(strided), (1 - strided).clamp(min=0))
for trained in (False, True):  # True: opcheck also compiles the backward
    torch.library.opcheck(hinge.hinge, (strided.detach().requires_grad_(trained),))
edge = torch.tensor([1.0, float("nan")], device=device, requires_grad=True)
hinge.hinge(edge).sum().backward()  # torch.clamp gives [0, nan], and a gradient of -1 at 1
assert hinge.hinge(edge).tolist() == [0, 0] and edge.grad.tolist() == [0, 0]
try:
    hinge.hinge(strided.double())
except RuntimeError as error:
    assert "float32 only" in str(error)
else:
    raise AssertionError("float64 was read as float32")
print("imported in a fresh process: equal to torch's, forward and backward")
"""


def write(root: Path) -> None:
    """Write the files of the package below `root`."""
    files = {
        "pyproject.toml": PYPROJECT,
        "setup.py": SETUP,
        "csrc/hinge.cpp": CPP,
        "csrc/hinge_cuda.cu": CUDA,
        "hinge/__init__.py": INIT,
    }
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        print(f"wrote {name}")


def main() -> int:
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        write(root)
        command = [sys.executable, "setup.py", "bdist_wheel"]  # builds the wheel without pip
        done = subprocess.run(command, cwd=root, capture_output=True, text=True)
        if done.returncode:
            print(done.stdout, done.stderr, file=sys.stderr)
            print("the extension was not built: see above", file=sys.stderr)
            return 1
        (wheel,) = (root / "dist").glob("*.whl")
        print("built", "-".join(wheel.name.split("-")[:4]))
        with zipfile.ZipFile(wheel) as archive:
            print("in it:", ", ".join(n for n in archive.namelist() if n.startswith("hinge/")))
            archive.extractall(root / "site")
        environment = os.environ | {"PYTHONPATH": str(root / "site")}
        return subprocess.run([sys.executable, "-c", TEST], env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
