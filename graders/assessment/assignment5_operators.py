"""The steps of assignment 5: a kernel, an operator, a transform, a sparse product."""

import ctypes
import tempfile

import torch
import torch._dynamo  # torch.library imports it: once here, not in every process
from torch.utils._python_dispatch import TorchDispatchMode

from graders.dsl import Lab, Passes, Watch, import_late_parts, require_equal
from graders.runner import Wrong

HINTS = {
    "cpp": "g++ cannot compile the C++ code, and its message is quoted. The first number "
    "after causal.cpp is the line in the text that source() returns.",
    "cpp_index": "The process ended because it used memory that it does not have. C++ does "
    "not check indices or addresses. Look for an index of x or w that can be negative or too "
    "large, and for a wrong address.",
    "flipped": "An output comes too early, so the kernel reads x at later times than t. In a "
    "causal filter, y[t] must only use x[t] and earlier numbers. Look at the index of x: it "
    "must become smaller when j grows.",
    "reversed_taps": "The taps are used from the last to the first. w[0] must be multiplied "
    "by x[t], and w[1] must be multiplied by x[t - 1]. Look at the index of w.",
    "outside": "The checker has put NaN before and behind x and w in memory, and some of "
    "these NaN are in y. The kernel must read k taps only. Look at the condition that ends "
    "the loop over j.",
    "adds_to_y": "The kernel adds its sums to the old content of y. The memory of y may "
    "contain any numbers at first, so the kernel must overwrite them.",
    "leak": "At the beginning of a row, the sums contain the end of the row before. The row "
    "must count as zero before its first number. Look at the condition that ends the loop: "
    "for which j is t - j still inside the row?",
    "begin": "The first k - 1 numbers of each row are wrong, and the others are right. Before "
    "its first number, a row counts as zero. So the terms with t - j < 0 are left out there, "
    "and all other terms are added.",
    "first_rows": "Row 0 is right and the others are not. The rows of x follow each other in "
    "memory, and each has n numbers. Look at the place at which row r begins.",
    "taps": "Not all products are in the sums. Each of the k taps must be used, from w[0] on, "
    "and x[0] must be used too. Look at the first and the last value of j.",
    "single": "The numbers have only the precision of a float. The sum must be a double, as "
    "x, w and y are.",
    "long_filter": "The result is wrong if the filter has more taps than the signal has "
    "numbers. Taps that are multiplied only by zeros must add nothing. Look at loops and "
    "slices that depend on n - j or n - k.",
    "not_registered": "`register` must register an operator under the name that it is given, "
    "and return it. Look at the decorator torch.library.custom_op, and at the last line.",
    "none": "A function returned None where a result is needed. Look for a `return` that is "
    "missing, or for one that is not reached.",
    "arguments": "The kernel takes the number of rows, then the length of a row, and then the "
    "number of taps. Compare the order of your arguments with the kernel's.",
    "pointer": "An address that the kernel received does not contain the numbers of the "
    "tensor. The addresses must be passed in the order x, w, y. Python frees a tensor "
    "immediately if no variable refers to it, so keep each converted copy in a variable until "
    "the kernel has returned.",
    "strided": "The numbers of a transposed tensor or of a slice do not lie next to each "
    "other in memory, but the kernel expects that they do. Convert the tensor before you take "
    "its address.",
    "rows": "x may have any number of dimensions before the last one, or none. All of them "
    "together are the rows of the kernel, and the result has the shape of x.",
    "dtype": "The kernel reads and writes only fp64 numbers, and the result must have the "
    "dtype of x. Look at the dtypes of the three tensors whose addresses you pass, and at "
    "what you return.",
    "fake": "The operator cannot be called with a tensor that has no data. A compiler calls "
    "it with tensors that have a shape but no memory. Register a function that returns an "
    "empty tensor for this case.",
    "fake_result": "The fake returns a tensor that does not fit the result of the operator. "
    "Shape, dtype and device must all follow from x.",
    "fake_strides": "The fake returns other strides than the operator itself. A compiler "
    "relies on the strides of the fake, also for a transposed x.",
    "no_autograd": "The result has no gradient. Register a backward for the operator.",
    "saved": "The number of tensors that backward unpacks differs from the number that was "
    "saved. The function that you pass as setup_context must save what backward needs.",
    "grad_count": "backward must return one value for each argument of forward, in the same "
    "order. A tensor that needs a gradient gets its gradient, a tensor of the same shape. "
    "Every other argument gets None.",
    "grad_x": "The gradient of x is wrong. x[t] is multiplied by w[j] and added to y[t + j]. "
    "So the gradient of x[t] is a sum over later times: look at the direction of time.",
    "grad_w": "The gradient of w is wrong. The tap w[j] is multiplied by x[t - j] for each t "
    "in each row, so its gradient is a sum over all t and all rows.",
    "grad_rows": "The gradients are right for an x of two dimensions, but not for others. x "
    "may have any number of dimensions. Look for indices or sums that count from the first.",
    "grad_strided": "The gradients are wrong if the gradient of y is an expanded tensor, "
    "whose numbers all lie at one address. Look at what backward passes to the kernel.",
    "circular": "The transforms are too short, so the end of the signal is added to its "
    "beginning. The result of a convolution is longer than its input. Look at the length that "
    "the full result of n numbers and k taps has.",
    "cut": "The result does not have n numbers, or it does not begin with y[0]. The inverse "
    "transform returns more than n numbers. Look at the slice that you take of them.",
    "inverse_size": "The inverse transform has another size than the transforms. irfft cannot "
    "know whether the size was even or odd, and assumes an even one. Look at the size that "
    "you pass to it.",
    "correlation": "The result is a correlation, because each tap is multiplied by later "
    "numbers of x. Look at the product of the two spectra.",
    "slow_size": "fast_size must return the smallest number from n on, n itself included, "
    "that has no prime factors other than 2, 3, 5 and 7. A number may have the same factor "
    "several times.",
    "not_fast": "The result is right, but a transform has a size with a large prime factor. "
    "Use the function that you wrote for this.",
    "no_fft": "The result is right, but no transform was computed. This step asks for the "
    "convolution by FFT.",
    "complex": "The transforms or the result are complex. x and w are real, so the transforms "
    "for real numbers are enough, and need half the work.",
    "fft_dtype": "The result must have the dtype of x.",
    "fft_rows": "The function fails for an x of one dimension or of three. Look for an index "
    "that assumes two dimensions.",
    "dense": "Your code created a tensor as large as the whole m × n matrix. Select only the "
    "rows that the entries need, by their indices.",
    "product": "The product is wrong. The entry e adds values[e] times the row cols[e] of "
    "dense to the row rows[e] of the result.",
    "shape": "The result must have m rows and the columns and the dtype of dense, also if the "
    "last rows have no entry.",
    "repeated": "The result is right where an index occurs once, and wrong where several "
    "entries share an index. Assigning to tensor[index] keeps only one of them. Use an "
    "operation that adds all of them.",
    "scale": "The entries have been added without their factors, `values`.",
    "values": "The gradient of values is wrong. For each entry it is one number: the inner "
    "product of a row of grad and a row of dense. Look at which rows belong to the entry.",
    "transposed": "The gradient of dense is wrong. It is the product of the transposed matrix "
    "and grad, so rows and cols change places.",
    "index": "An index is larger than the tensor allows. `rows` are rows of the result and of "
    "its gradient, and `cols` are rows of dense. Look for a place where they are exchanged.",
    "state": "A result became wrong when the function was called again, so each call needs "
    "its own memory. Keep everything in ctx or in local variables, and nothing on the class "
    "or in a global variable.",
    "in_place": "The function changed a tensor that it received. It must leave its inputs as "
    "they are. Look for functions whose names end in _, and for augmented assignments.",
    "compiler": "The checker compiles your kernel by g++, and g++ is not installed. Install "
    "it.",
    "other": "No known mistake gives these numbers. Compare with a case that you compute by "
    "hand, for example n = 3 and k = 2.",
}  # fmt: skip
import_late_parts()
LAB = Lab(HINTS)
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
        some = Passes("at least 1", lambda count: count > 0)
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
    with Watch() as watch:
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
    fewer = Passes(f"fewer than {m} times {n}", lambda most: most < m * n)
    require_equal("the most numbers in one tensor", watch.largest, fewer, "dense")
