"""The steps of assignment 5: a kernel, an operator, a transform, a sparse product."""

import ctypes
import tempfile

import torch
import torch._dynamo  # torch.library imports it: once here, not in every process
from torch.utils._python_dispatch import TorchDispatchMode

from graders.dsl import Condition, Lab, OperatorRecorder, import_late_parts, require_equal
from graders.protocol import Wrong

import_late_parts()
LAB = Lab()
BACKWARD = "incorrect number of gradients|expected Variable|invalid gradient"
CRASHES = {"NoneType": "none", BACKWARD: "grad_count"}
CRASHES |= {"values to unpack": "saved", r"\(signal \d+\)": "cpp_index"}
USED = 64.0  # what lies in y before the kernel writes there


def truth_of(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = torch.zeros_like(x)
    for j in range(min(len(w), x.shape[-1])):
        y[..., j:] += w[j] * x[..., : x.shape[-1] - j]
    return y


def between_nan(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor, with NaN before and behind it in memory."""
    memory = torch.full((tensor.numel() + 128,), torch.nan, dtype=torch.float64)
    inside = memory[64:-64].view(tensor.shape)
    return inside.copy_(tensor)


def early_or_late(place: str) -> str:
    """The hint for where the third of four taps puts an impulse that is at 4."""
    if place in ("", "5"):
        return "reversed_taps" if place else "taps"
    return "flipped" if place in "01234" else "other"


def fault_of(found: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> str:
    """The hint for what a kernel computed, in place of the sums."""
    wanted, begin = truth_of(x, w), len(w) - 1

    def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
        return torch.allclose(a, b, 1e-10, 1e-12)

    if torch.allclose(found, wanted, 1e-4, 1e-4):
        return "single"
    if found[:, begin:].isnan().any():
        return "outside"
    if equal(found - USED, wanted):
        return "adds_to_y"
    if equal(found[:, begin:], wanted[:, begin:]):
        leaks = truth_of(x.reshape(1, -1), w).view_as(x)
        return "leak" if equal(found[1:], leaks[1:]) else "begin"
    if equal(found[0, begin:], wanted[0, begin:]):
        return "first_rows"
    fewer = [truth_of(x, w.index_fill(0, torch.tensor(j), 0.0)) for j in range(len(w))]
    fewer.append(truth_of(x.index_fill(1, torch.tensor(0), 0.0), w))
    return "taps" if any(equal(found, each) for each in fewer) else "other"


@LAB.alone(1, "the kernel", "each row is filtered alone, with short and long filters", "build",
           own="build source",
           crashes={r"'g\+\+'": "compiler", ": error: ": "cpp"} | CRASHES,
           )  # fmt: skip
def kernel(submission, reference, lesson):
    with tempfile.TemporaryDirectory() as folder:
        run = submission.build(folder)

    def filtered(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        x, w, y = between_nan(x), between_nan(w), torch.full_like(x, USED)
        run(x.data_ptr(), w.data_ptr(), y.data_ptr(), *x.shape, len(w))
        return y

    impulse = torch.zeros(1, 8, dtype=torch.float64)
    impulse[0, 4] = 1.0
    y = filtered(impulse, torch.tensor([0.0, 0.0, 1.0, 0.0], dtype=torch.float64))
    places = ", ".join(map(str, (y == 1).nonzero()[:, 1].tolist()))
    fact = "x is 1 at t = 4 only, and w is 0, 0, 1, 0; the t at which y is 1"
    if not y.isnan().any() and not (y >= USED / 2).any():
        require_equal(fact, places or "no place", "6", early_or_late(places))
    generator = torch.Generator().manual_seed(0)
    w = torch.tensor([1.0, -2.0, 0.5, 3.0, -1.5], dtype=torch.float64)
    for n, k in ((11, 4), (3, 5)):
        x = torch.randn(3, n, dtype=torch.float64, generator=generator)
        found, wanted = filtered(x, w[:k]), truth_of(x, w[:k])
        right = torch.isclose(found, wanted, 1e-10, 1e-12)
        fact = f"numbers of y that are right, of {3 * n}, for 3 rows of {n} and {k} taps"
        hint = fault_of(found, x, w[:k]) if k < n else "long_filter"
        require_equal(fact, int(right.sum()), 3 * n, hint)


class Kernel:
    """The kernel of step 1 in Python. It looks at what it is given."""

    x = w = torch.zeros(0, dtype=torch.float64)  # what forward must pass on
    forward = False  # whether forward runs, and not backward

    def __call__(self, x: object, w: object, y: object, rows: int, n: int, k: int) -> None:
        x, w, y = map(self.address, "xwy", (x, w, y))
        rows, n, k = (getattr(each, "value", each) for each in (rows, n, k))
        if self.x.is_meta:
            raise Wrong("without numbers, the operator called the kernel", "fake")
        if self.forward:
            own = self.x.numel(), self.x.shape[-1], len(self.w)
            what = (
                f"x has {own[0]} numbers in rows of {own[1]}, w has {own[2]}; the kernel was "
                f"called with rows = {rows}, n = {n}, k = {k}"
            )
            if (n, k) != own[1:]:
                raise Wrong(what, "arguments")
            if rows * n > own[0]:
                raise Wrong(what, "rows")
        signal, taps = self.read(x, rows * n), self.read(w, k)
        if self.forward:
            given = [("w", w, taps, self.w)]
            given += [("x", x, signal, self.x)] * (rows * n == self.x.numel())
            for name, address, found, tensor in given:
                if not torch.equal(found, tensor.double().flatten()):
                    raise Wrong(*self.misread(name, address, found, tensor))
        result = truth_of(signal.view(rows, n), taps)
        ctypes.memmove(y, result.data_ptr(), result.nbytes)

    @staticmethod
    def address(name: str, given: object) -> int:
        """An address, as a number or as a pointer of ctypes."""
        try:
            return ctypes.cast(given, ctypes.c_void_p).value or 0
        except (ctypes.ArgumentError, TypeError):
            kind = type(given).__name__
            raise TypeError(f"the kernel takes the address of {name}, not a {kind}") from None

    @staticmethod
    def read(address: int, count: int) -> torch.Tensor:
        result = torch.empty(count, dtype=torch.float64)
        ctypes.memmove(result.data_ptr(), address, result.nbytes)
        return result

    @staticmethod
    def misread(
        name: str, address: int, found: torch.Tensor, tensor: torch.Tensor
    ) -> tuple[str, str]:
        """What is wrong if the kernel finds other numbers than the tensor's, and the hint."""
        if name == "w" and torch.equal(found, tensor.double().flip(0)):
            return "the kernel receives the numbers of w in the reverse order", "reversed_taps"
        if address != tensor.data_ptr():
            return f"at the address of {name} are not the numbers of {name} in fp64", "pointer"
        if tensor.dtype != torch.float64:
            return f"{name} is {tensor.dtype}, and the kernel reads it as fp64", "dtype"
        strides = tensor.stride()
        return f"{name} has the strides {strides}, and the kernel does not use them", "strided"


@LAB.alone(2, "the operator", "strides, dtypes, the fake and the gradients are right",
           "register", crashes={"no autograd formula": "no_autograd"} | CRASHES,
           )  # fmt: skip
def operator(submission, reference, lesson):
    kernel = Kernel()
    operator = submission.register(kernel, "graded::causal")
    registered = callable(operator) and hasattr(torch.ops.graded, "causal")
    fact = "register has registered and returned graded::causal"
    require_equal(fact, registered, True, "not_registered")
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    def call(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        kernel.x, kernel.w, kernel.forward = x.detach(), w.detach(), True
        y = operator(x, w)
        kernel.forward = False
        return y

    def right(x: torch.Tensor, w: torch.Tensor) -> bool:
        y = call(x, w)
        fits = y.shape == x.shape and y.dtype == x.dtype
        least = 1e-10 if x.dtype == torch.float64 else 1e-4
        return fits and torch.allclose(y, truth_of(x, w), least, least)

    x, w, strided = draw(2, 9), draw(3), draw(9, 2).t()
    # so small that a y of fp32 has room for what the kernel writes
    small = draw(1, 3), draw(2)
    first, true = call(*small), truth_of(*small)
    read_as_fp32 = true.view(torch.float32).flatten()[:3].tolist() == first.flatten().tolist()
    hint = "dtype" if read_as_fp32 else "other"
    require_equal(
        "the numbers are right if x is [1, 3] and w has 2 taps", right(*small), True, hint
    )
    require_equal("the numbers are right", right(x, w), True, "other")
    again = right(0 * small[0], small[1]) and torch.allclose(first, true)
    require_equal("a result stays when the operator is called again", again, True, "state")
    small = draw(1, 3).float(), draw(2).float()
    require_equal(
        "dtype of the result for fp32", str(call(*small).dtype), "torch.float32", "dtype"
    )
    require_equal("the numbers are right for fp32", right(*small), True, "dtype")
    is_right = "the numbers are right if"
    require_equal(f"{is_right} x is transposed", right(strided, w), True, "strided")
    require_equal(
        f"{is_right} w is every second of six", right(x, draw(6)[::2]), True, "strided"
    )
    for shape in ((2, 2, 9), (5, 9), (9,), (0, 9)):
        require_equal(f"{is_right} x is {list(shape)}", right(draw(*shape), w), True, "rows")
    good = right(draw(2, 3), draw(5))
    require_equal(f"{is_right} x is [2, 3] and w has 5 taps", good, True, "long_filter")

    for given in (strided, strided.float()):
        kernel.x = given.to("meta")
        try:
            fake = operator(kernel.x, w.to("meta", given.dtype))
        except (NotImplementedError, RuntimeError) as error:  # there is no fake
            raise Wrong(f"without numbers: {str(error)[:60]}", "fake") from error
        found = f"{list(fake.shape)}, {fake.dtype}, {fake.device}"
        require_equal("shape, dtype and device of the fake", found,
              f"[2, 9], {given.dtype}, meta",
              "fake_result")  # fmt: skip
    kernel.x = x
    strides = operator(strided.float(), w.float()).stride()
    require_equal(
        "strides of the fake for a transposed x", fake.stride(), strides, "fake_strides"
    )

    cases = [("[2, 9]", draw(2, 9), draw(3), None), ("[9]", draw(9), draw(3), "grad_rows")]
    cases += [("[2, 2, 4]", draw(2, 2, 4), draw(3), "grad_rows")]
    cases += [("[2, 3] and w has 5 taps", draw(2, 3), draw(5), "long_filter")]
    cases += [("[2, 9] and its gradient is expanded", x, w, "grad_strided")]
    for case, x, w, hint in cases:
        x.requires_grad_(), w.requires_grad_()
        expanded = hint == "grad_strided"  # the sum's gradient, which no product copies
        weights = draw(*x.shape)
        truth = truth_of(x, w) if expanded else truth_of(x, w) * weights
        truth = torch.autograd.grad(truth.sum(), (x, w))
        kernel.x = x.detach()
        found = operator(x, w)
        require_equal("the result requires gradients", found.requires_grad, True, "no_autograd")
        try:
            found = found if expanded else found * weights
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
    """The sizes of the transforms that are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.forward: list[int] = []
        self.inverse: list[int] = []
        self.complex = 0

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
    require_equal("fast sizes from 1, 7, 11, 13, 97, 121, 1009 on", sizes, wanted, "slow_size")
    submission.fast_size = reference.fast_size
    for n, k in ((16, 5), (20, 9), (8, 8), (27, 19), (30, 8), (18, 9), (5, 12)):
        x = torch.randn(2, n, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
        w = torch.linspace(1, 2, k, dtype=torch.float64)
        with Transforms() as used:
            y = submission.fft_causal(x, w)
        wanted, case = truth_of(x, w), f"n = {n} and k = {k}"
        hint = "complex" if y.is_complex() else "fft_dtype"
        require_equal(f"dtype for {case}", str(y.dtype), "torch.float64", hint)
        full = truth_of(torch.nn.functional.pad(x, (0, k - 1)), w)
        late = y.shape == x.shape and torch.allclose(y, full[..., k - 1 :])
        require_equal(f"the shape of the result for {case}", list(y.shape), [2, n], "cut")
        fact, good = f"the numbers are right for {case}", torch.allclose(y, wanted)
        hint = "cut" if late and not good else fft_fault(y, x, w, used)
        require_equal(fact, good, True, hint)
        some = Condition("at least 1", lambda count: count > 0)
        require_equal(f"transforms for {case}", len(used.forward), some, "no_fft")
        require_equal(f"complex transforms for {case}", used.complex, 0, "complex")
        slow = [size for size in used.forward if reference.fast_size(size) != size]
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


def fft_fault(y: torch.Tensor, x: torch.Tensor, w: torch.Tensor, used: Transforms) -> str:
    """The hint for a wrong result y of transforms."""
    if torch.allclose(y, truth_of(x.flip(-1), w).flip(-1)):
        return "correlation"
    if used.forward and min(used.forward) < x.shape[-1] + len(w) - 1:
        return "circular"
    sizes = set(used.forward)
    return "inverse_size" if used.inverse and set(used.inverse) != sizes else "other"


def added(entries: torch.Tensor, found: torch.Tensor, wanted: torch.Tensor, plain: torch.Tensor,
          hint: str) -> str:  # fmt: skip
    """The hint for a wrong sum of rows: by the index of each entry, and the unscaled sum."""
    once = torch.bincount(entries, minlength=len(wanted)) == 1
    if torch.allclose(found[once], wanted[once]):
        return "repeated"
    return "scale" if torch.allclose(found, plain) else hint


@LAB.alone(4, "a sparse product", "only the entries have gradients, and nothing dense is made",
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
    with OperatorRecorder() as watch:
        found = apply(values, rows, cols, dense, m)
    same = torch.equal(values, copies[0]) and torch.equal(dense, copies[1])
    require_equal("forward changed values or dense", not same, False, "in_place")
    shape = f"{list(found.shape)}, {found.dtype}"
    require_equal("shape and dtype of the product", shape, f"[{m}, 3], torch.float64", "shape")
    good = torch.allclose(found, wanted)
    hint = added(rows, found, wanted, pattern @ dense, "product")
    require_equal("the product is right", good, True, hint)
    apply(2 * values, rows.flip(0), cols.flip(0), 3 * dense, m)  # before the gradients
    with watch:
        grads = torch.autograd.grad((found * weights).sum(), (values, dense), allow_unused=True)
    require_equal(
        "gradients that are None", sum(grad is None for grad in grads), 0, "grad_count"
    )
    hints = "values", added(cols, grads[1], truth[1], pattern.t() @ weights, "transposed")
    later = torch.autograd.grad(
        (apply(values, rows, cols, dense, m) * weights).sum(), (values, dense)
    )
    for name, grad, alone, true, hint in zip(
        ("values", "dense"), grads, later, truth, hints, strict=True
    ):
        good = grad.shape == true.shape and torch.allclose(grad, true)
        if not good and torch.allclose(alone, true):
            hint = "state"
        require_equal(f"the gradient of {name} is right", good, True, hint)
    fewer = Condition(f"fewer than {m} times {n}", lambda most: most < m * n)
    require_equal("the most numbers in one tensor", watch.largest, fewer, "dense")
