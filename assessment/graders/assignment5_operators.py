"""The steps of assignment 5: a kernel, an operator, a transform, a sparse product."""

import functools
import tempfile

import torch
import torch._dynamo  # torch.library imports it: once here, not in every process
from graders._compare import Watch, alone, below, borrow, finished, import_late_parts, that
from graders.runner import Lesson

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
OURS = finished("assignment5_operators")
import_late_parts()
SOLVED = "source register fast_size fft_causal"


@functools.lru_cache
def kernel():
    with tempfile.TemporaryDirectory() as folder:
        return OURS.build(folder)


def truth_of(x: torch.Tensor, w: torch.Tensor, begin: int = 0) -> torch.Tensor:
    y = torch.zeros_like(x)
    for j in range(begin, min(len(w), x.shape[-1])):
        y[..., j:] += w[j] * x[..., : x.shape[-1] - j]
    return y


def probe_kernel(lesson: Lesson) -> None:
    x = torch.randn(3, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    w = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)
    with tempfile.TemporaryDirectory() as folder:
        run = lesson.module.build(folder)
    y = torch.empty_like(x)
    run(x.data_ptr(), w.data_ptr(), y.data_ptr(), 3, 11, 4)
    right = torch.isclose(y, truth_of(x, w))
    lesson.fact("one tap alone", _one_tap(run))
    lesson.fact("rows that are right from t = 3 on", right[:, 3:].all(1).tolist())
    lesson.fact("rows that are right", right.all(1).tolist())


def _one_tap(run) -> str:
    """Where an impulse at 2 goes by a filter of one late tap."""
    x, y = torch.zeros(1, 8, dtype=torch.float64), torch.zeros(1, 8, dtype=torch.float64)
    x[0, 4], w = 1.0, torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64)
    run(x.data_ptr(), w.data_ptr(), y.data_ptr(), 1, 8, 3)
    return ", ".join(str(i) for i in y[0].nonzero().flatten().tolist())


def probe_operator(lesson: Lesson) -> None:
    module = lesson.module
    operator = module.register(kernel(), "graded::causal")
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(2, 9, dtype=torch.float64, generator=draw)
    w = torch.randn(3, dtype=torch.float64, generator=draw)
    strided = torch.randn(9, 2, dtype=torch.float64, generator=draw).t()
    lesson.fact("numbers", torch.allclose(operator(x, w), truth_of(x, w)))
    lesson.fact("numbers if x is transposed",
                torch.allclose(operator(strided, w), truth_of(strided, w)))  # fmt: skip
    second = torch.randn(6, dtype=torch.float64, generator=draw)[::2]
    lesson.fact("numbers if w is every second of six",
                torch.allclose(operator(x, second), truth_of(x, second)))  # fmt: skip
    right = []
    for shape in ((2, 2, 9), (5, 9), (9,), (0, 9)):  # more rows first: too many would crash
        other = torch.randn(shape, dtype=torch.float64, generator=draw)
        y = operator(other, w)
        right.append(y.shape == other.shape and torch.allclose(y, truth_of(other, w)))
        lesson.fact("numbers if x is [2, 2, 9], [5, 9], [9], [0, 9]", right)
        if not right[-1]:
            break
    single = operator(x.float(), w.float())
    lesson.fact("dtype for fp32", str(single.dtype))
    right = torch.allclose(single.double(), truth_of(x, w), 1e-3, 1e-4)
    lesson.fact("numbers for fp32", right)
    try:
        meta = strided.to("meta")
        fake = operator(meta, w.to("meta"))
        lesson.fact("shape of the fake", list(fake.shape))
        same = fake.stride() == operator(strided, w).stride()
        lesson.fact("strides of the fake are those of the result", same)
    except (NotImplementedError, RuntimeError) as error:  # there is no fake
        lesson.fact("shape of the fake", str(error)[:40])
    x.requires_grad_(), w.requires_grad_()
    found, wanted = operator(x, w), truth_of(x, w)
    lesson.fact("the result requires gradients", found.requires_grad)
    weights = torch.randn(2, 9, dtype=torch.float64, generator=draw)
    truth = torch.autograd.grad((wanted * weights).sum(), (x, w))
    try:
        grads = torch.autograd.grad((found * weights).sum(), (x, w), allow_unused=True)
    except RuntimeError as error:
        lesson.fact("the result requires gradients", str(error)[:60])
        return
    for name, grad, true in zip("xw", grads, truth, strict=True):
        right = grad is not None and grad.shape == true.shape and torch.allclose(grad, true)
        lesson.fact(f"the gradient of {name} is right", right)


def probe_fft(lesson: Lesson) -> None:
    module = lesson.module
    sizes = [module.fast_size(n) for n in (1, 7, 11, 13, 97, 121, 1009)]
    lesson.fact("fast sizes from 1, 7, 11, 13, 97, 121, 1009 on", sizes)
    borrow(module, OURS, SOLVED, "fft_causal")
    used = []
    real = torch.fft.rfft, torch.fft.fft

    def watch(function):
        def watched(x, n=None, *args, **kwargs):
            used.append(n or x.shape[-1])
            return function(x, n, *args, **kwargs)

        return watched

    torch.fft.rfft, torch.fft.fft = map(watch, real)
    wrong, cut = {"even": [], "odd": []}, []
    for n, k in ((16, 5), (20, 9), (8, 8), (27, 19), (30, 8), (18, 9)):
        x = torch.randn(2, n, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
        w = torch.linspace(1, 2, k, dtype=torch.float64)
        y = module.fft_causal(x, w)
        kind = "odd" if OURS.fast_size(n + k - 1) % 2 else "even"
        lesson.fact("dtype", str(y.dtype))
        late = truth_of(torch.nn.functional.pad(x, (0, k)), w)[..., k - 1 : k - 1 + n]
        late = y.shape == late.shape and torch.allclose(y.real, late)
        cut.append(y.shape[-1] == n and not late)
        if y.is_complex() or y.shape != x.shape or not torch.allclose(y, truth_of(x, w)):
            wrong[kind].append(n + k - 1)
    lesson.fact("the result begins at y[0] and has n numbers", all(cut))
    lesson.fact("wrong where the fast size is even", wrong["even"])
    lesson.fact("wrong where it is odd", wrong["odd"])
    lesson.fact("transforms at a slow size", sum(OURS.fast_size(n) != n for n in used))


def probe_sparse(lesson: Lesson) -> None:
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
        found = lesson.module.SparseProduct.apply(values, rows, cols, dense, m)
        grads = torch.autograd.grad((found * weights).sum(), (values, dense))
    lesson.fact("the most numbers in one tensor", watch.largest)
    lesson.fact("the product is right", torch.allclose(found, wanted, 1e-4, 1e-4))
    for name, grad, true in zip(("values", "dense"), grads, truth, strict=True):
        right = grad.shape == true.shape and torch.allclose(grad, true, 1e-4, 1e-4)
        lesson.fact(f"the gradient of {name} is right", right)


ALL = [True] * 3
NO_COMPILER = (r"'g\+\+'", HINTS["compiler"])
step = functools.partial(alone, HINTS)
STEPS = [
    step(
        1, "the kernel", "each row's sum, and nothing from before its begin", probe_kernel,
        "build",
        ("one tap alone", that("6, two after the impulse", lambda at: at != "2"), "flipped"),
        ("rows that are right from t = 3 on",
         that("all", lambda rows: rows in (ALL, [False] * 3)), "first_rows"),
        ("rows that are right from t = 3 on", ALL, "taps"),
        ("rows that are right", ALL, "leak"),
        crashes=(NO_COMPILER,),
    ),
    step(
        2, "the operator", "any strides, two dtypes, shapes without numbers, gradients",
        probe_operator, "register",
        ("dtype for fp32", "torch.float32", "dtype"),
        ("numbers", True, "other"),
        ("numbers for fp32", True, "dtype"),
        ("numbers if x is transposed", True, "strided"),
        ("numbers if w is every second of six", True, "strided"),
        ("numbers if x is [2, 2, 9], [5, 9], [9], [0, 9]", [True] * 4, "rows"),
        ("shape of the fake", [2, 9], "fake"),
        ("strides of the fake are those of the result", True, "fake_strides"),
        ("the result requires gradients", True, "no_autograd"),
        ("the gradient of x is right", True, "grad_x"),
        ("the gradient of w is right", True, "grad_w"),
        crashes=(NO_COMPILER, ("autograd|gradient|grad", HINTS["no_autograd"])),
    ),
    step(
        3, "by FFT", "six lengths equal the sum, at fast sizes", probe_fft,
        "fast_size fft_causal",
        ("fast sizes from 1, 7, 11, 13, 97, 121, 1009 on", [1, 7, 12, 14, 98, 125, 1024],
         "slow_size"),
        ("dtype", "torch.float64", "complex"),
        ("the result begins at y[0] and has n numbers", True, "cut"),
        ("wrong where the fast size is even", [], "circular"),
        ("wrong where it is odd", [], "odd"),
        ("transforms at a slow size", 0, "not_fast"),
    ),
    step(
        4, "a sparse product", "gradients at the entries alone, and nothing dense",
        probe_sparse, "SparseProduct",
        ("the product is right", True, "repeated"),
        ("the gradient of values is right", True, "values"),
        ("the gradient of dense is right", True, "transposed"),
        ("the most numbers in one tensor", below(50 * 60 - 1), "dense"),
    ),
]  # fmt: skip
