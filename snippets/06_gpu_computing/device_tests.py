"""A small copy of PyTorch's operator tests makes one test for each device and each dtype.

An OpInfo describes an operator: its sample inputs, its dtypes and a reference. Each template
becomes one test for each operator, device and dtype. The second operator ignores strides. Look
at its failures: only sample inputs that are not contiguous find the mistake.
"""

import dataclasses
import io
import itertools
import unittest
from collections.abc import Callable, Iterator

import torch
from torch import Tensor


@dataclasses.dataclass
class OpInfo:
    name: str
    op: Callable
    reference: Callable  # computes in float64
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float64, torch.bfloat16)

    def samples(self, device: str, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Yield inputs with different shapes and strides, which may reveal a mistake."""
        generator = torch.Generator().manual_seed(0)
        base = torch.randn(33, 31, generator=generator).to(device, dtype)
        yield "matrix", base
        yield "empty", base[:0]
        yield "scalar", base[0, 0]
        yield "transposed", base.T
        yield "every other column", base[:, ::2]
        yield "broadcast", base[:1].expand(5, 31)


class Template:
    """Tests without a device and dtype. `instantiate` makes runnable tests of them."""

    def test_reference(self, device: str, dtype: torch.dtype, info: OpInfo) -> None:
        for what, x in info.samples(device, dtype):
            with self.subTest(what):
                expected = info.reference(x.double()).to(dtype)
                torch.testing.assert_close(info.op(x), expected)

    def test_input_unchanged(self, device: str, dtype: torch.dtype, info: OpInfo) -> None:
        for _, x in info.samples(device, dtype):
            before = x.clone()
            info.op(x)
            torch.testing.assert_close(x, before, rtol=0, atol=0)

    def test_gradcheck(self, device: str, dtype: torch.dtype, info: OpInfo) -> None:
        if dtype is not torch.float64:
            self.skipTest("finite differences need float64")
        x = torch.linspace(-2.05, 2.05, 6, dtype=dtype, device=device, requires_grad=True)
        self.assertTrue(torch.autograd.gradcheck(info.op, (x,)))


def instantiate(infos: list[OpInfo], devices: list[str]) -> type[unittest.TestCase]:
    """Return a class with one test for each template, operator, device and dtype."""
    methods = {}
    for name, template in vars(Template).items():
        if not name.startswith("test_"):
            continue
        for info, device in itertools.product(infos, devices):
            for dtype in info.dtypes:

                def test(self, template=template, arguments=(device, dtype, info)) -> None:
                    template(self, *arguments)

                dtype_name = str(dtype).removeprefix("torch.")
                methods[f"{name}_{info.name}_{device}_{dtype_name}"] = test
    return type("TestOps", (unittest.TestCase,), methods)


def hinge(x: Tensor) -> Tensor:
    return torch.where(x < 1, 1 - x, 0)


def hinge_wrong(x: Tensor) -> Tensor:
    """Read the input from its pointer on, like a kernel that ignores strides."""
    flat = x.as_strided((x.numel(),), (1,), x.storage_offset())
    return torch.where(flat < 1, 1 - flat, 0).view(x.shape)


def reference(x: Tensor) -> Tensor:
    assert x.dtype is torch.float64
    return (1 - x).clamp(min=0)


def main() -> None:
    writes = OpInfo("writes", Tensor.zero_, torch.zeros_like)  # changes its input
    blind = OpInfo("blind", lambda x: hinge(x.detach()) + 0 * x, reference)  # no gradient
    tests = instantiate([OpInfo("hinge", hinge, reference), writes, blind], ["cpu"])
    assert sum(name.startswith("test_") for name in vars(tests)) == 3 * 3 * 3
    with unittest.TestCase().assertRaises(AssertionError):
        tests("test_input_unchanged_writes_cpu_float32").debug()
    with unittest.TestCase().assertRaises(RuntimeError):  # the error of gradcheck
        tests("test_gradcheck_blind_cpu_float64").debug()
    devices = ["cpu"]
    if torch.accelerator.is_available():
        devices.append(torch.accelerator.current_accelerator().type)
    for op in (hinge, hinge_wrong):
        info = OpInfo(op.__name__, op, reference)
        shapes = [tuple(x.shape) for _, x in info.samples("cpu", torch.float32)]
        assert shapes == [(33, 31), (0, 31), (), (31, 33), (33, 16), (5, 31)]
        suite = unittest.defaultTestLoader.loadTestsFromTestCase(instantiate([info], devices))
        result = unittest.TextTestRunner(stream=io.StringIO()).run(suite)
        assert not result.errors, result.errors[0][1]
        print(f"{op.__name__}: {result.testsRun // len(devices)} tests per device", end=", ")
        print(f"{len(result.skipped) // len(devices)} skipped", end=", ")
        if op is hinge:
            assert result.wasSuccessful(), result.failures[0][1]
            print("all passed")
            continue
        # in every dtype, exactly the samples that are not contiguous find the mistake
        found = {test._message for test, _ in result.failures}
        assert found == {"transposed", "every other column", "broadcast"}, found
        assert len(result.failures) == 3 * len(info.dtypes) * len(devices)
        print("failed:")
        for test, _ in result.failures:
            if "_cpu_" in test.id():
                case = getattr(test, "test_case", test)  # a subtest refers to its test
                print(f"  {case._testMethodName} [{test._message}]")


if __name__ == "__main__":
    main()
