"""A patch of one line lets Inductor fuse a function, so that three GPU kernels become one.

Inductor cannot write `ndtri`, the inverse of the normal distribution function, in Triton. On a
GPU it therefore launches a Triton kernel, then PyTorch's kernel, then a second Triton kernel.
libdevice has the function under a different name. The program applies the patch to a copy of
the installed file. It generates the kernels without running them, so it needs no GPU.
"""

import difflib
import importlib.util
import io
import math
import pathlib
import re
import sys
import tempfile
import unittest
from types import ModuleType

try:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
except ImportError:
    sys.exit("this program needs triton, which exists for Linux")

import torch
import torch._inductor.config as config
import torch._inductor.lowering as lowering
from torch._inductor.codegen import common
from torch._inductor.codegen.triton import TritonOverrides
from torch._inductor.graph import GraphLowering

OLD = """\
        cpp=lambda x: f"calc_ndtri({x})",
"""
NEW = """\
        cpp=lambda x: f"calc_ndtri({x})",
        triton=lambda x: f"libdevice.normcdfinv({x})",
"""
HOPPER = GPUTarget("cuda", 90, 32)


class NoGPU:
    """The part of Triton's driver that Inductor calls while it generates code."""

    def get_current_target(self) -> GPUTarget:
        return HOPPER

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def is_active(self) -> bool:
        return True


def chain(x: torch.Tensor) -> torch.Tensor:
    return torch.special.ndtri(x * 0.5 + 0.25) + 1


# --8<-- [start:generated]
def generated(x: torch.Tensor) -> str:
    """Return the source that Inductor generates for `chain(x)`, although `x` is on the CPU."""

    found: list[str] = []

    def stop(graph: GraphLowering) -> None:
        found.append(graph.codegen()[0].value)
        raise RuntimeError("the code is complete, so do not compile it")

    original, GraphLowering.compile_to_module = GraphLowering.compile_to_module, stop
    torch._dynamo.reset()
    try:
        with config.patch(cpu_backend="triton", fx_graph_cache=False):
            torch.compile(chain)(x)
    except Exception:
        if not found:
            raise
    finally:
        GraphLowering.compile_to_module = original
    return found[0]


# --8<-- [end:generated]


def launches(source: str) -> tuple[int, int]:
    """Count the launches of Triton kernels, and the calls of PyTorch's operators."""
    called = source.split("def call(")[1]
    return len(re.findall(r"triton_\w+\.run\(", called)), len(
        re.findall(r"= torch\.ops\.aten\.", called)
    )


# --8<-- [start:tests]
class TestNdtri(unittest.TestCase):
    """Tests that count kernels. In PyTorch: test/inductor/test_torchinductor.py."""

    def test_fused(self) -> None:
        self.assertEqual(launches(generated(torch.rand(1000))), (1, 0))

    def test_double(self) -> None:
        source = generated(torch.rand(1000, dtype=torch.float64))
        self.assertEqual(launches(source), (1, 0))
        self.assertIn("*fp64", source)  # the kernel reads and writes float64

    def test_half_is_computed_in_fp32(self) -> None:  # libdevice has only fp32 and fp64
        source = generated(torch.rand(1000, dtype=torch.bfloat16))
        self.assertEqual(launches(source), (1, 0))
        loaded = re.search(r"(tmp\d+) = tl\.load\(.*\)\.to\(tl\.float32\)", source)
        self.assertTrue(loaded, "libdevice gets bf16, which it does not have")

    def test_others_stay(self) -> None:
        self.assertIs(common.pointwise_overrides_data["digamma"].triton, None)
        self.assertIn("libdevice.erfcx", common.pointwise_overrides_data["erfcx"].triton("x"))


# --8<-- [end:tests]


def failing(what: str) -> set[str]:
    """Run the tests, print which tests fail, and return their names."""
    suite = unittest.defaultTestLoader.loadTestsFromTestCase(TestNdtri)
    result = unittest.TextTestRunner(stream=io.StringIO()).run(suite)
    failed = [test.id().rsplit(".", 1)[-1] for test, _ in result.failures + result.errors]
    print(f"{what}: {result.testsRun - len(failed)} of {result.testsRun} tests pass")
    for name in failed:
        print(f"  FAIL {name}")
    return set(failed)


# --8<-- [start:apply]
def load(source: str, folder: str) -> ModuleType:
    path = pathlib.Path(folder) / "patched_common.py"
    path.write_text(source)
    name = "torch._inductor.codegen.patched_common"  # does not replace the installed module
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def apply(patched: ModuleType) -> None:
    """Register one entry of the table. At import, two modules do this for all entries."""
    entry = patched.pointwise_overrides_data["ndtri"]
    common.pointwise_overrides_data["ndtri"] = entry
    TritonOverrides.ndtri = staticmethod(entry.triton)
    lowering.register_pointwise(
        torch.ops.aten.special_ndtri.default,
        name="ndtri",
        type_promotion_kind=entry.type_promotion_kind,
        triton_fallback=None,
    )


# --8<-- [end:apply]


def ptx(source: str, folder: str) -> str:
    """Compile the kernel of `source` for an H100 without a GPU, and return its PTX."""
    kernel = re.search(r"@triton\.jit\n(def (triton_\w+).*?)\n'''", source, re.S)
    path = pathlib.Path(folder) / "kernel.py"
    path.write_text(
        "import triton\nimport triton.language as tl\n"
        "from triton.language.extra.cuda import libdevice\n@triton.jit\n" + kernel[1]
    )
    spec = importlib.util.spec_from_file_location("kernel", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    signature = {
        "in_ptr0": "*fp32",
        "out_ptr0": "*fp32",
        "xnumel": "i32",
        "XBLOCK": "constexpr",
    }
    unit = triton.compiler.ASTSource(
        getattr(module, kernel[2]), signature=signature, constexprs={"XBLOCK": 1024}
    )
    return triton.compile(unit, target=HOPPER).asm["ptx"]


# --8<-- [start:benchmark]
def benchmark(what: str) -> None:
    """Compare the result with float64, also in the tail, and measure the time on a GPU."""
    torch._dynamo.reset()
    compiled = torch.compile(chain)
    x = torch.rand(2**24, device="cuda")
    torch.testing.assert_close(compiled(x), chain(x.double()).float(), rtol=1e-5, atol=1e-5)
    tail, ndtri = torch.logspace(-30, -1, 2**16, device="cuda"), torch.special.ndtri
    right = ndtri(tail.double()).float()
    torch.testing.assert_close(torch.compile(ndtri)(tail), right, rtol=1e-5, atol=1e-5)
    ms = triton.testing.do_bench(lambda: compiled(x))
    rate = 2 * x.nbytes / ms / 1e6
    print(f"{what}: 2²⁴ numbers in ≈{ms:.3f} ms, ≈{rate:.0f} GB/s of what must be moved")


# --8<-- [end:benchmark]


def main() -> int:
    installed = pathlib.Path(common.__file__).read_text()
    if installed.count(OLD) != 1 or "normcdfinv" in installed:
        print("the patch does not fit the table of this torch", file=sys.stderr)
        return 1
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        benchmark("before")
    else:
        driver.set_active(NoGPU())
    new = {"test_fused", "test_double", "test_half_is_computed_in_fp32"}
    assert failing("before") == new  # a new test that passes now would prove nothing
    counts = "Triton kernels: {}, calls of PyTorch's operators: {}"
    print(counts.format(*launches(generated(torch.rand(9)))))

    # a tempting patch: compute the function from erfinv, which Triton has
    tail = torch.tensor([0.3, 1e-4, 1e-9])
    composed = math.sqrt(2) * torch.erfinv(2 * tail - 1)
    true = torch.special.ndtri(tail.double())
    print("     x   √2 erfinv(2x - 1)     ndtri")
    for row in zip(tail.tolist(), composed.tolist(), true.tolist(), strict=True):
        print("{:6.0e} {:19.5f} {:9.5f}".format(*row))
    assert composed[0].isclose(true[0].float()) and composed[2].isinf() and true[2] > -6

    patched = installed.replace(OLD, NEW)
    name = "torch/_inductor/codegen/common.py"
    for line in difflib.unified_diff(
        installed.splitlines(), patched.splitlines(), f"a/{name}", f"b/{name}", lineterm="", n=1
    ):
        print("@@" if line.startswith("@@") else line)  # versions differ in line numbers
    with tempfile.TemporaryDirectory() as folder:
        apply(load(patched, folder))
        assert not failing("after")
        source = generated(torch.rand(1000))
        print(counts.format(*launches(source)))
        code = ptx(source, folder)
        assert (
            not re.search(r"\bcall\b", code) and "lg2.approx" in code
        )  # the tail needs a logarithm
        print("compiled for an H100: one kernel in PTX, with libdevice's function inlined")
    if on_gpu:
        benchmark("after")
    return 0


if __name__ == "__main__":
    sys.exit(main())
