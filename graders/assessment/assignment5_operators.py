"""The steps of assignment 5: a kernel, an operator, a transform, a sparse product."""

import tempfile

import torch
import torch._dynamo  # torch.library imports it: once here, not in every process

from graders.tools import Lab, Passes, Watch, at_most, check, import_late_parts

HINTS = {
    "flipped": "This is a correlation: w[j] belongs to x[t - j], not to x[t + j].",
    "leak": "Row r reads the end of the row before: stop at j = t.",
    "first_rows": "Row 0 is right and the others are not: row r begins at x[r * n].",
    "taps": "Not all taps are used: j goes from 0 to k - 1.",
    "strided": "A transposed or cut tensor gives other numbers: the kernel takes neighbours in "
    "memory. contiguous() first.",
    "rows": "x may have any dimensions before the last, also none: the kernel's rows are "
    "all of them, numel / n.",
    "dtype": "The kernel takes fp64 pointers, and the result has the dtype of x: convert.",
    "fake": "A compiler asks for shapes without numbers: register_fake.",
    "fake_strides": "The fake promises strides that the operator does not give: the result is "
    "contiguous, whatever x is.",
    "no_autograd": "No gradient comes back: register_autograd, with what backward needs saved "
    "in setup_context.",
    "grad_x": "The gradient of x is wrong: x[t] goes into y[t + j] with w[j], so time runs "
    "backwards.",
    "grad_w": "The gradient of w is wrong: w[j] meets x[t - j] at each t, in each row.",
    "circular": "The end of the signal came round to its begin: the size must be at least "
    "n + k - 1.",
    "cut": "The transform gives more than n numbers: y is the first n of them.",
    "odd": "irfft takes an even size unless you name it: irfft(spectrum, size).",
    "slow_size": "There is a smaller size of the factors 2, 3, 5 and 7 from n on, or this one "
    "has another factor.",
    "not_fast": "The transforms are not at a fast size: fast_size(n + k - 1).",
    "complex": "The result is complex: x and w are real, so rfft and irfft do, with half the "
    "work.",
    "dense": "A tensor of m × n numbers was made. Take rows by index.",
    "repeated": "Entries in one row overwrite each other: index_add_ adds up.",
    "values": "The gradient of values: for each entry the inner product of a row of grad and a "
    "row of dense.",
    "transposed": "The gradient of dense: the transposed product, so rows and columns change "
    "places.",
    "compiler": "The checker compiles your kernel by g++, and finds none. Install it.",
    "other": "The numbers fit no common mistake. Try n = 3 and k = 2 by hand.",
}  # fmt: skip
import_late_parts()
LAB = Lab(HINTS)
NO_COMPILER = {r"'g\+\+'": "compiler"}
ALL = [True] * 3


def truth_of(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = torch.zeros_like(x)
    for j in range(min(len(w), x.shape[-1])):
        y[..., j:] += w[j] * x[..., : x.shape[-1] - j]
    return y


@LAB.alone(1, "the kernel", "each row's sum, and nothing from before its begin", "build",
           own="build source", crashes=NO_COMPILER)  # fmt: skip
def kernel(theirs, ours, lesson):
    with tempfile.TemporaryDirectory() as folder:
        run = theirs.build(folder)

    def filtered(x: torch.Tensor, *taps: float) -> torch.Tensor:
        w, y = torch.tensor(taps, dtype=torch.float64), torch.zeros_like(x)
        run(x.data_ptr(), w.data_ptr(), y.data_ptr(), *x.shape, len(w))
        return y

    impulse = torch.zeros(1, 8, dtype=torch.float64)
    impulse[0, 4] = 1.0
    places = filtered(impulse, 0.0, 0.0, 1.0)[0].nonzero().flatten().tolist()
    late = Passes("6, two after the impulse", lambda at: at != "2")
    check("one tap alone", ", ".join(map(str, places)), late, "flipped")
    x = torch.randn(3, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    taps = 1.0, -2.0, 0.5, 3.0
    right = torch.isclose(filtered(x, *taps), truth_of(x, torch.tensor(taps)))
    fact, rows = "rows that are right from t = 3 on", right[:, 3:].all(1).tolist()
    alike = Passes("all", lambda rows: rows in (ALL, [False] * 3))
    check(fact, rows, alike, "first_rows")
    check(fact, rows, ALL, "taps")
    check("rows that are right", right.all(1).tolist(), ALL, "leak")


@LAB.alone(2, "the operator", "any strides, two dtypes, shapes without numbers, gradients",
           "register", crashes=NO_COMPILER | {"autograd|gradient|grad": "no_autograd"},
           )  # fmt: skip
def operator(theirs, ours, lesson):
    with tempfile.TemporaryDirectory() as folder:
        operator = theirs.register(ours.build(folder), "graded::causal")
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    def right(x: torch.Tensor, w: torch.Tensor) -> bool:
        y = operator(x, w)
        return y.shape == x.shape and torch.allclose(y, truth_of(x, w))

    x, w, strided = draw(2, 9), draw(3), draw(9, 2).t()
    single = operator(x.float(), w.float())
    check("dtype for fp32", str(single.dtype), "torch.float32", "dtype")
    check("numbers", right(x, w), True, "other")
    good = torch.allclose(single.double(), truth_of(x, w), 1e-3, 1e-4)
    check("numbers for fp32", good, True, "dtype")
    check("numbers if x is transposed", right(strided, w), True, "strided")
    check("numbers if w is every second of six", right(x, draw(6)[::2]), True, "strided")
    good = []
    for shape in ((2, 2, 9), (5, 9), (9,), (0, 9)):  # more rows first: too many would crash
        good.append(right(draw(*shape), w))
        if not good[-1]:
            break
    check("numbers if x is [2, 2, 9], [5, 9], [9], [0, 9]", good, [True] * 4, "rows")

    try:
        fake = operator(strided.to("meta"), w.to("meta"))
        shape, strides = list(fake.shape), fake.stride()
    except (NotImplementedError, RuntimeError) as error:  # there is no fake
        shape, strides = str(error)[:40], ()
    check("shape of the fake", shape, [2, 9], "fake")
    alike = strides == operator(strided, w).stride()
    check("strides of the fake are those of the result", alike, True, "fake_strides")

    x.requires_grad_(), w.requires_grad_()
    weights, found, wanted = draw(2, 9), operator(x, w), truth_of(x, w)
    truth = torch.autograd.grad((wanted * weights).sum(), (x, w))
    required: bool | str = found.requires_grad
    try:
        grads = torch.autograd.grad((found * weights).sum(), (x, w), allow_unused=True)
    except RuntimeError as error:
        required = str(error)[:60]
    check("the result requires gradients", required, True, "no_autograd")
    for name, grad, true in zip("xw", grads, truth, strict=True):
        good = grad is not None and grad.shape == true.shape and torch.allclose(grad, true)
        check(f"the gradient of {name} is right", good, True, f"grad_{name}")


@LAB.alone(3, "by FFT", "six lengths equal the sum, at fast sizes", "fast_size fft_causal")
def fft(theirs, ours, lesson):
    sizes = [theirs.fast_size(n) for n in (1, 7, 11, 13, 97, 121, 1009)]
    wanted = [1, 7, 12, 14, 98, 125, 1024]
    check("fast sizes from 1, 7, 11, 13, 97, 121, 1009 on", sizes, wanted, "slow_size")
    theirs.fast_size = ours.fast_size
    used = []

    def watch(function):
        def watched(x, n=None, *args, **kwargs):
            used.append(n or x.shape[-1])
            return function(x, n, *args, **kwargs)

        return watched

    torch.fft.rfft, torch.fft.fft = map(watch, (torch.fft.rfft, torch.fft.fft))
    wrong, cut = {"even": [], "odd": []}, []
    for n, k in ((16, 5), (20, 9), (8, 8), (27, 19), (30, 8), (18, 9)):
        x = torch.randn(2, n, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
        w = torch.linspace(1, 2, k, dtype=torch.float64)
        y = theirs.fft_causal(x, w)
        kind = "odd" if ours.fast_size(n + k - 1) % 2 else "even"
        late = truth_of(torch.nn.functional.pad(x, (0, k)), w)[..., k - 1 : k - 1 + n]
        late = y.shape == late.shape and torch.allclose(y.real, late)
        cut.append(y.shape[-1] == n and not late)
        if y.is_complex() or y.shape != x.shape or not torch.allclose(y, truth_of(x, w)):
            wrong[kind].append(n + k - 1)
    check("dtype", str(y.dtype), "torch.float64", "complex")
    check("the result begins at y[0] and has n numbers", all(cut), True, "cut")
    check("wrong where the fast size is even", wrong["even"], [], "circular")
    check("wrong where it is odd", wrong["odd"], [], "odd")
    slow = sum(ours.fast_size(n) != n for n in used)
    check("transforms at a slow size", slow, 0, "not_fast")


@LAB.alone(4, "a sparse product", "gradients at the entries alone, and nothing dense",
           "SparseProduct")  # fmt: skip
def sparse(theirs, ours, lesson):
    draw = torch.Generator().manual_seed(3)
    m, n, entries = 50, 60, 200
    rows = torch.randint(0, m, (entries,), generator=draw)
    cols = torch.randint(0, n, (entries,), generator=draw)
    values = torch.randn(entries, generator=draw, requires_grad=True)
    dense = torch.randn(n, 3, generator=draw, requires_grad=True)
    weights = torch.randn(m, 3, generator=draw)
    matrix = torch.zeros(m, n).index_put((rows, cols), values, accumulate=True)
    wanted = matrix @ dense
    truth = torch.autograd.grad((wanted * weights).sum(), (values, dense))
    with Watch() as watch:
        found = theirs.SparseProduct.apply(values, rows, cols, dense, m)
        grads = torch.autograd.grad((found * weights).sum(), (values, dense))
    good = torch.allclose(found, wanted, 1e-4, 1e-4)
    check("the product is right", good, True, "repeated")
    hints = "values", "transposed"
    for name, grad, true, hint in zip(("values", "dense"), grads, truth, hints, strict=True):
        good = grad.shape == true.shape and torch.allclose(grad, true, 1e-4, 1e-4)
        check(f"the gradient of {name} is right", good, True, hint)
    most = at_most(m * n - 1)
    check("the most numbers in one tensor", watch.largest, most, "dense")
