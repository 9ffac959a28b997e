"""The steps of assignment 5: a kernel, an operator, a transform, and a sparse product."""

import ctypes
import tempfile

import torch
import torch._dynamo  # imported here once, because torch.library would import it in every rank
from torch.utils._python_dispatch import TorchDispatchMode

from graders.dsl import Condition, Lab, OperatorRecorder, import_late_parts, require_equal
from graders.protocol import Wrong

import_late_parts()
LAB = Lab()
BACKWARD = "incorrect number of gradients|expected Variable|invalid gradient"
CRASHES = {"NoneType": "none", BACKWARD: "grad_count"}
CRASHES |= {"values to unpack": "saved", r"\(signal \d+\)": "cpp_index"}
OLD_VALUE = 64.0  # the value of every element of y before the kernel runs


def truth_of(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Return the causal convolution of the last dimension of x with the taps w."""
    y = torch.zeros_like(x)
    for j in range(min(len(w), x.shape[-1])):
        y[..., j:] += w[j] * x[..., : x.shape[-1] - j]
    return y


def between_nan(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor, with NaN before and after it in memory."""
    memory = torch.full((tensor.numel() + 128,), torch.nan, dtype=torch.float64)
    inside = memory[64:-64].view(tensor.shape)
    return inside.copy_(tensor)


def impulse_hint(place: str) -> str:
    """Return the hint for a wrong response to an impulse at 4, if only the third tap is 1.

    `place` is the index at which y is 1. It is "" if there is no such index.
    """
    if place in ("", "5"):
        return "reversed_taps" if place else "taps"
    return "flipped" if place in "01234" else "other"


def kernel_hint(found: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> str:
    """Return the hint for a wrong result of a kernel."""
    wanted, begin = truth_of(x, w), len(w) - 1

    def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
        return torch.allclose(a, b, 1e-10, 1e-12)

    if torch.allclose(found, wanted, 1e-4, 1e-4):
        return "single"
    if found[:, begin:].isnan().any():
        return "outside"
    if equal(found - OLD_VALUE, wanted):
        return "adds_to_y"
    if equal(found[:, begin:], wanted[:, begin:]):
        leaks = truth_of(x.reshape(1, -1), w).view_as(x)
        return "leak" if equal(found[1:], leaks[1:]) else "begin"
    if equal(found[0, begin:], wanted[0, begin:]):
        return "first_rows"
    fewer = [truth_of(x, w.index_fill(0, torch.tensor(j), 0.0)) for j in range(len(w))]
    fewer.append(truth_of(x.index_fill(1, torch.tensor(0), 0.0), w))
    return "taps" if any(equal(found, each) for each in fewer) else "other"


@LAB.alone(1, "the kernel", "each row is filtered separately, with short and long filters",
           "build", own="build source",
           crashes={r"'g\+\+'": "compiler", ": error: ": "cpp"} | CRASHES,
           )  # fmt: skip
def kernel(submission, reference, lesson):
    with tempfile.TemporaryDirectory() as folder:
        run = submission.build(folder)

    def filtered(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        x, w, y = between_nan(x), between_nan(w), torch.full_like(x, OLD_VALUE)
        run(x.data_ptr(), w.data_ptr(), y.data_ptr(), *x.shape, len(w))
        return y

    impulse = torch.zeros(1, 8, dtype=torch.float64)
    impulse[0, 4] = 1.0
    y = filtered(impulse, torch.tensor([0.0, 0.0, 1.0, 0.0], dtype=torch.float64))
    places = ", ".join(map(str, (y == 1).nonzero()[:, 1].tolist()))
    fact = "x is 1 only at t = 4, and w is 0, 0, 1, 0; the t at which y is 1"
    if not y.isnan().any() and not (y >= OLD_VALUE / 2).any():
        require_equal(fact, places or "no place", "6", impulse_hint(places))
    generator = torch.Generator().manual_seed(0)
    w = torch.tensor([1.0, -2.0, 0.5, 3.0, -1.5], dtype=torch.float64)
    for n, k in ((11, 4), (3, 5)):
        x = torch.randn(3, n, dtype=torch.float64, generator=generator)
        found, wanted = filtered(x, w[:k]), truth_of(x, w[:k])
        right = torch.isclose(found, wanted, 1e-10, 1e-12)
        fact = f"how many of the {3 * n} numbers of y are right, for 3 rows of {n} numbers and "
        fact += f"{k} taps"
        hint = kernel_hint(found, x, w[:k]) if k < n else "long_filter"
        require_equal(fact, int(right.sum()), 3 * n, hint)


class Kernel:
    """The kernel of step 1 in Python, which also checks its arguments."""

    x = w = torch.zeros(0, dtype=torch.float64)  # the tensors that the operator must pass to it
    is_forward = False  # forward is running, and not backward

    def __call__(self, x: object, w: object, y: object, rows: int, n: int, k: int) -> None:
        x, w, y = map(self.address, "xwy", (x, w, y))
        rows, n, k = (getattr(each, "value", each) for each in (rows, n, k))
        if self.x.is_meta:
            raise Wrong("with meta tensors, the operator called the kernel", "fake")
        if self.is_forward:
            sizes = self.x.numel(), self.x.shape[-1], len(self.w)
            what = (
                f"x has {sizes[0]} numbers in rows of {sizes[1]}, and w has {sizes[2]}; "
                f"the kernel was called with rows = {rows}, n = {n}, k = {k}"
            )
            if (n, k) != sizes[1:]:
                raise Wrong(what, "arguments")
            if rows * n > sizes[0]:
                raise Wrong(what, "rows")
        signal, taps = self.read(x, rows * n), self.read(w, k)
        if self.is_forward:
            reads = [("w", w, taps, self.w)]
            reads += [("x", x, signal, self.x)] * (rows * n == self.x.numel())
            for name, address, found, tensor in reads:
                if not torch.equal(found, tensor.double().flatten()):
                    raise Wrong(*self.explain_misread(name, address, found, tensor))
        result = truth_of(signal.view(rows, n), taps)
        ctypes.memmove(y, result.data_ptr(), result.nbytes)

    @staticmethod
    def address(name: str, argument: object) -> int:
        """Return an address that was passed as a number or as a pointer of ctypes."""
        try:
            return ctypes.cast(argument, ctypes.c_void_p).value or 0
        except (ctypes.ArgumentError, TypeError):
            kind = type(argument).__name__
            raise TypeError(f"the kernel needs the address of {name}, not a {kind}") from None

    @staticmethod
    def read(address: int, count: int) -> torch.Tensor:
        """Return this number of fp64 numbers that are stored at an address."""
        result = torch.empty(count, dtype=torch.float64)
        ctypes.memmove(result.data_ptr(), address, result.nbytes)
        return result

    @staticmethod
    def explain_misread(
        name: str, address: int, found: torch.Tensor, tensor: torch.Tensor
    ) -> tuple[str, str]:
        """Return a sentence and a hint for a kernel that reads wrong numbers for a tensor."""
        if name == "w" and torch.equal(found, tensor.double().flip(0)):
            return "the kernel receives the numbers of w in the reverse order", "reversed_taps"
        if address != tensor.data_ptr():
            return f"the address of {name} does not contain the numbers of {name}", "pointer"
        if tensor.dtype != torch.float64:
            return f"{name} is {tensor.dtype}, and the kernel reads it as fp64", "dtype"
        strides = tensor.stride()
        return f"{name} has the strides {strides}, and the kernel does not use them", "strided"


@LAB.alone(2, "the operator", "strides, dtypes, the fake kernel and the gradients are right",
           "register", crashes={"no autograd formula": "no_autograd"} | CRASHES,
           )  # fmt: skip
def operator(submission, reference, lesson):
    kernel = Kernel()
    operator = submission.register(kernel, "graded::causal")
    is_registered = callable(operator) and hasattr(torch.ops.graded, "causal")
    fact = "register has registered and returned graded::causal"
    require_equal(fact, is_registered, True, "not_registered")
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    def call(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        kernel.x, kernel.w, kernel.is_forward = x.detach(), w.detach(), True
        y = operator(x, w)
        kernel.is_forward = False
        return y

    def right(x: torch.Tensor, w: torch.Tensor) -> bool:
        y = call(x, w)
        has_form = y.shape == x.shape and y.dtype == x.dtype
        tolerance = 1e-10 if x.dtype == torch.float64 else 1e-4
        return has_form and torch.allclose(y, truth_of(x, w), tolerance, tolerance)

    x, w, strided = draw(2, 9), draw(3), draw(9, 2).t()
    # the memory of such a small y is large enough for fp64 numbers even if y is wrongly in fp32
    small = draw(1, 3), draw(2)
    first, true = call(*small), truth_of(*small)
    read_as_fp32 = true.view(torch.float32).flatten()[:3].tolist() == first.flatten().tolist()
    hint = "dtype" if read_as_fp32 else "other"
    require_equal(
        "the numbers are right if x is [1, 3] and w has 2 taps", right(*small), True, hint
    )
    require_equal("the numbers are right", right(x, w), True, "other")
    unchanged = right(0 * small[0], small[1]) and torch.allclose(first, true)
    fact = "a result does not change when the operator is called again"
    require_equal(fact, unchanged, True, "state")
    small = draw(1, 3).float(), draw(2).float()
    require_equal(
        "dtype of the result for fp32", str(call(*small).dtype), "torch.float32", "dtype"
    )
    require_equal("the numbers are right for fp32", right(*small), True, "dtype")
    is_right = "the numbers are right if"
    require_equal(f"{is_right} x is transposed", right(strided, w), True, "strided")
    fact = f"{is_right} w consists of every second of six numbers"
    require_equal(fact, right(x, draw(6)[::2]), True, "strided")
    for shape in ((2, 2, 9), (5, 9), (9,), (0, 9)):
        require_equal(f"{is_right} x is {list(shape)}", right(draw(*shape), w), True, "rows")
    good = right(draw(2, 3), draw(5))
    require_equal(f"{is_right} x is [2, 3] and w has 5 taps", good, True, "long_filter")

    for argument in (strided, strided.float()):
        kernel.x = argument.to("meta")
        try:
            fake = operator(kernel.x, w.to("meta", argument.dtype))
        except (NotImplementedError, RuntimeError) as error:  # there is no fake kernel
            raise Wrong(f"with meta tensors: {str(error)[:60]}", "fake") from error
        found = f"{list(fake.shape)}, {fake.dtype}, {fake.device}"
        require_equal("shape, dtype and device of the fake result", found,
              f"[2, 9], {argument.dtype}, meta",
              "fake_result")  # fmt: skip
    kernel.x = x
    strides = operator(strided.float(), w.float()).stride()
    fact = "strides of the fake result for a transposed x"
    require_equal(fact, fake.stride(), strides, "fake_strides")

    cases = [("[2, 9]", draw(2, 9), draw(3), None), ("[9]", draw(9), draw(3), "grad_rows")]
    cases += [("[2, 2, 4]", draw(2, 2, 4), draw(3), "grad_rows")]
    cases += [("[2, 3] and w has 5 taps", draw(2, 3), draw(5), "long_filter")]
    cases += [("[2, 9] and its gradient is expanded", x, w, "grad_strided")]
    for case, x, w, hint in cases:
        x.requires_grad_(), w.requires_grad_()
        # the gradient of a sum is expanded, unless a product comes before the sum
        is_expanded = hint == "grad_strided"
        weights = draw(*x.shape)
        truth = truth_of(x, w) if is_expanded else truth_of(x, w) * weights
        truth = torch.autograd.grad(truth.sum(), (x, w))
        kernel.x = x.detach()
        found = operator(x, w)
        require_equal("the result requires gradients", found.requires_grad, True, "no_autograd")
        try:
            found = found if is_expanded else found * weights
            grads = torch.autograd.grad(found.sum(), (x, w), allow_unused=True)
        except (IndexError, RuntimeError) as error:
            if hint is None:
                raise
            raise Wrong(f"backward if x is {case}: {error}", hint) from error
        for name, grad, true in zip("xw", grads, truth, strict=True):
            good = grad is not None and grad.shape == true.shape and torch.allclose(grad, true)
            fact = f"the gradient of {name} is right if x is {case}"
            require_equal(fact, good, True, hint or f"grad_{name}")


class Transforms(TorchDispatchMode):
    """Records the sizes of the Fourier transforms that run."""

    def __init__(self) -> None:
        super().__init__()
        self.forward: list[int] = []
        self.inverse: list[int] = []
        self.complex = 0  # the number of complex transforms

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name == "_fft_r2c":
            self.forward.append(args[0].shape[args[1][-1]])
            self.complex += not args[3]  # not one-sided
        elif name == "_fft_c2r":
            self.inverse.append(args[3])
        elif name == "_fft_c2c":
            self.forward.append(args[0].shape[args[1][-1]])
            self.complex += 1
        return func(*args, **(kwargs or {}))


@LAB.alone(3, "by FFT", "the numbers equal the sums, at fast sizes", "fast_size fft_causal",
           crashes=CRASHES)  # fmt: skip
def fft(submission, reference, lesson):
    sizes = [submission.fast_size(n) for n in (1, 7, 11, 13, 97, 121, 1009)]
    require_equal("fast_size returned None", None in sizes, False, "none")
    wanted = [1, 7, 12, 14, 98, 125, 1024]
    fact = "fast_size for 1, 7, 11, 13, 97, 121 and 1009"
    require_equal(fact, sizes, wanted, "slow_size")
    submission.fast_size = reference.fast_size
    for n, k in ((16, 5), (20, 9), (8, 8), (27, 19), (30, 8), (18, 9), (5, 12)):
        x = torch.randn(2, n, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
        w = torch.linspace(1, 2, k, dtype=torch.float64)
        with Transforms() as transforms:
            y = submission.fft_causal(x, w)
        wanted, case = truth_of(x, w), f"n = {n} and k = {k}"
        hint = "complex" if y.is_complex() else "fft_dtype"
        require_equal(f"dtype for {case}", str(y.dtype), "torch.float64", hint)
        full = truth_of(torch.nn.functional.pad(x, (0, k - 1)), w)
        is_end = y.shape == x.shape and torch.allclose(y, full[..., k - 1 :])
        require_equal(f"the shape of the result for {case}", list(y.shape), [2, n], "cut")
        fact, good = f"the numbers are right for {case}", torch.allclose(y, wanted)
        hint = "cut" if is_end and not good else fft_hint(y, x, w, transforms)
        require_equal(fact, good, True, hint)
        some = Condition("at least 1", lambda count: count > 0)
        require_equal(f"transforms for {case}", len(transforms.forward), some, "no_fft")
        require_equal(f"complex transforms for {case}", transforms.complex, 0, "complex")
        slow = [size for size in transforms.forward if reference.fast_size(size) != size]
        require_equal(f"slow sizes of transforms for {case}", slow, [], "not_fast")
    single = submission.fft_causal(x.float(), w.float())
    require_equal("dtype for fp32", str(single.dtype), "torch.float32", "fft_dtype")
    for shape in ((5,), (2, 3, 5)):
        x = torch.ones(shape, dtype=torch.float64)
        try:
            y = submission.fft_causal(x, w)
        except (IndexError, RuntimeError) as error:
            raise Wrong(f"for an x of shape {list(shape)}: {error}", "fft_rows") from error
        good = y.shape == x.shape and torch.allclose(y, truth_of(x, w))
        require_equal(
            f"the numbers are right for an x of shape {list(shape)}", good, True, "fft_rows"
        )


def fft_hint(y: torch.Tensor, x: torch.Tensor, w: torch.Tensor, transforms: Transforms) -> str:
    """Return the hint for a wrong result y of these transforms."""
    if torch.allclose(y, truth_of(x.flip(-1), w).flip(-1)):
        return "correlation"
    if transforms.forward and min(transforms.forward) < x.shape[-1] + len(w) - 1:
        return "circular"
    sizes, inverse_sizes = set(transforms.forward), set(transforms.inverse)
    return "inverse_size" if inverse_sizes and inverse_sizes != sizes else "other"


def sum_hint(
    indices: torch.Tensor, found: torch.Tensor, wanted: torch.Tensor, unscaled: torch.Tensor,
    hint: str,
) -> str:  # fmt: skip
    """Return the hint for wrong sums of rows.

    `indices` contains for each entry the index of its sum. `unscaled` are the sums without the
    values of the entries. `hint` is the hint for all other mistakes.
    """
    once = torch.bincount(indices, minlength=len(wanted)) == 1
    if torch.allclose(found[once], wanted[once]):
        return "repeated"
    return "scale" if torch.allclose(found, unscaled) else hint


@LAB.alone(4, "a sparse product", "only entries have gradients, and no dense matrix is made",
           "SparseProduct", crashes={"invalid gradient at index 0": "values",
           "invalid gradient at index 3": "transposed", "index .* out of": "index"} | CRASHES,
           )  # fmt: skip
def sparse(submission, reference, lesson):
    draw = torch.Generator().manual_seed(3)
    m, n, entries = 50, 60, 200
    rows = torch.randint(0, m - 3, (entries,), generator=draw)  # the last rows are empty
    cols = torch.randint(0, n, (entries,), generator=draw)
    values, dense, weights = (
        torch.randn(shape, generator=draw, dtype=torch.float64)
        for shape in ((entries,), (n, 3), (m, 3))
    )
    values.requires_grad_(), dense.requires_grad_()
    copies = values.clone(), dense.clone()
    matrix = torch.zeros(m, n).double().index_put((rows, cols), values, accumulate=True)
    pattern = torch.zeros(m, n).double().index_put((rows, cols), torch.ones_like(values),
                                                   accumulate=True)  # fmt: skip
    wanted = matrix @ dense
    truth = torch.autograd.grad((wanted * weights).sum(), (values, dense))
    apply = submission.SparseProduct.apply
    with OperatorRecorder() as recorder:
        found = apply(values, rows, cols, dense, m)
    unchanged = torch.equal(values, copies[0]) and torch.equal(dense, copies[1])
    require_equal("forward changed values or dense", not unchanged, False, "in_place")
    shape = f"{list(found.shape)}, {found.dtype}"
    require_equal("shape and dtype of the product", shape, f"[{m}, 3], torch.float64", "shape")
    good = torch.allclose(found, wanted)
    hint = sum_hint(rows, found, wanted, pattern @ dense, "product")
    require_equal("the product is right", good, True, hint)
    # a second call before the gradients of the first one are computed
    apply(2 * values, rows.flip(0), cols.flip(0), 3 * dense, m)
    with recorder:
        grads = torch.autograd.grad((found * weights).sum(), (values, dense), allow_unused=True)
    require_equal(
        "gradients that are None", sum(grad is None for grad in grads), 0, "grad_count"
    )
    hints = "values", sum_hint(cols, grads[1], truth[1], pattern.t() @ weights, "transposed")
    # the gradients of a call after which there was no second call
    single_call = torch.autograd.grad(
        (apply(values, rows, cols, dense, m) * weights).sum(), (values, dense)
    )
    for name, grad, alone, true, hint in zip(
        ("values", "dense"), grads, single_call, truth, hints, strict=True
    ):
        good = grad.shape == true.shape and torch.allclose(grad, true)
        if not good and torch.allclose(alone, true):
            hint = "state"
        require_equal(f"the gradient of {name} is right", good, True, hint)
    fewer = Condition(f"fewer than {m} times {n}", lambda most: most < m * n)
    fact = "the number of elements of the largest new tensor"
    require_equal(fact, recorder.largest, fewer, "dense")
