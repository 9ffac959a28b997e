"""The steps of the exercise: the curve, twenty faults, the speed; how each is found.

No fault is found by reading the learner's file. The program runs three times, in processes of
its own: on the CPU, where files, workers and compilations are counted; on lab 07's toy, a
device that counts launches, copies and waits of the host, and so shows on a CPU what would
cost time on a GPU; and, timed and untouched, beside the slow program and the finished one.
"""

import contextlib
import gc
import importlib.util
import json
import os
import sys
import tempfile
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch._dynamo  # once here, not in every process
from graders.runner import Bench, Lesson, Trial, Wrong
from torch import nn
from torch.optim import optimizer as optimizers
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, dataloader

# What is wrong, and where to look. `MORE` says how to mend it.
HINTS = {
    "steps": "A step is one update from 64 samples, and every sample of an epoch counts. What "
    "else changes the number of updates changes the training.",
    "first": "Before the first update nothing but data, order, normalisation and the model's "
    "first weights can differ. Compare your first batch with that of the slow program.",
    "later": "The first loss is right, so the forward pass is. Look at what comes after it: "
    "gradients that add up, clipping, the optimizer's settings, the order of the next batch.",
    "unseen": "Training is right, the mean over the validation samples is not. Did every "
    "sample count once, and equally?",
    "log": "log.csv is for those who come after you: one line for each step, with its loss.",
    "elsewhere": "On an accelerator, something is not where its neighbour is.",
    "device_curve": "The losses are right on the CPU and wrong on the device. A copy that was "
    "not waited for, or a precision that is too low?",
    "read": "How often does your program open the file? Put a print into the line that reads.",
    "lists": "How many Python objects is a batch, on its way from the file to a tensor?",
    "workers": "Look at the processes (top, or print the pids) when an epoch begins.",
    "micro": "How many samples does one forward pass take, and how many would fit?",
    "float64": "Print the dtype of what goes into a convolution. Who asked for it?",
    "no_autocast": "In which precision do convolutions run on an accelerator?",
    "converted": "The parameters themselves are in 16 bits: small updates are lost in them.",
    "scaler": "For which number format was loss scaling invented, and is it in use here?",
    "pageable": "A copy to the device may run beside the host's work. Here the host waits for "
    "each. What must be true of the memory that is copied from?",
    "constants": "Some tensors that cross to the device are the same in every step.",
    "asks": "The host asks the device for a number in every step, and waits until it is there.",
    "synchronize": "The host stops for the device in every step. Who needs that?",
    "clip": "Between backward and the update the host asks for one number per parameter.",
    "launches": "Count the operators of one forward pass. A kernel on few numbers costs its "
    "launch, and a launch costs the same for few numbers as for many.",
    "optimizer": "How many kernels does one update take, and how many parameters are there?",
    "format": "Convolutions of images have a favourite order of the numbers in memory. Print "
    "stride() of what goes in.",
    "histograms": "Something large goes from the device to the host in every step.",
    "log_opened": "Files are opened for writing in every step.",
    "garbage": "Something walks over all objects of the process, again and again.",
    "anomaly": "A switch for debugging is on. It notes a stack trace for every operator.",
    "recompiles": "TORCH_LOGS=recompiles says how often the model is compiled, and why.",
    "debug_backend": "Which backend does torch.compile use, and what does it make faster?",
    "replicas": "The model is wrapped for several devices, in one process.",
    "eval_graph": "Evaluation has no backward pass. Does it know?",
    "slow": "Mend first what the steps above name. If nothing is left there: profile it "
    "(chapter \"Memory and performance\"), and look at what train does beside its steps.",
}  # fmt: skip
MORE = {
    "steps": "Keep BATCH samples to an update, and `order` as it is.",
    "first": "torch.manual_seed(0), then Net(); the samples order(n, epoch) gives; pixels "
    "divided by 255, then mean and std.",
    "later": "Without micro-batches there is nothing to divide by; zero_grad after each step; "
    "a norm of CLIP over all gradients together; AdamW with RATE; order(n, epoch).",
    "unseen": "A mean of means is right only for batches of one size: weigh by their samples.",
    "log": "Write f\"{step},{loss}\\n\" for all steps, at the end of an epoch or of training.",
    "elsewhere": "Constants made in forward need device=x.device, or register_buffer.",
    "device_curve": "Keep parameters, losses and sums in fp32; autocast in bf16; an event "
    "before a pinned buffer is filled again.",
    "read": "Read the file once, in __init__ or before the first epoch. What does not fit into "
    "memory: torch.load(path, mmap=True), once.",
    "lists": "Keep tensors: index the tensor of all images with a tensor of indices, and a "
    "batch is one operator. tolist() is for the eye.",
    "workers": "One DataLoader, made once, with persistent_workers=True; or no workers, where "
    "a batch takes less than a process costs.",
    "micro": "Accumulation is for batches that do not fit. 64 images do: one pass, no PARTS.",
    "float64": "torch.float32 in what makes the batch, and no .double() on the model.",
    "no_autocast": "torch.autocast(device.type, dtype=torch.bfloat16) around forward and loss.",
    "converted": "Leave parameters in fp32; autocast casts what an operator takes.",
    "scaler": "fp16 needs it, for its small exponent. fp32 and bf16 do not: take GradScaler "
    "out. Its step asks the device each time whether there was an inf.",
    "pageable": "pin_memory=True and to(device, non_blocking=True); or, where the data are "
    "small, all of them on the device before the first step.",
    "constants": "register_buffer for mean and std: they move with the model, once.",
    "asks": "losses.append(loss.detach()); one tolist() at the end of an epoch.",
    "synchronize": "Drop it. To measure, synchronize before the first and after the last step.",
    "clip": "nn.utils.clip_grad_norm_ computes norm and factor on the device.",
    "launches": "The loop over groups is nn.GroupNorm.",
    "optimizer": "fused=True, or at least the default: foreach=False asks for a loop.",
    "format": "The file has the channels last already: images.permute(0, 3, 1, 2) without "
    "contiguous() keeps them there; and model.to(memory_format=torch.channels_last).",
    "histograms": "Histograms once an epoch are enough, or none.",
    "log_opened": "Collect lines; write them once an epoch.",
    "garbage": "Drop gc.collect(). Memory that grows has an owner: find what keeps losses with "
    "their graphs.",
    "anomaly": "Drop set_detect_anomaly(True); use it on the step that makes the NaN.",
    "recompiles": "An int attribute that changes in forward is a constant for the compiler: "
    "drop self.calls, or count outside.",
    "debug_backend": "backend=\"eager\" and \"aot_eager\" are for finding bugs. Take the "
    "default where training is long; here, where it is short, no torch.compile.",
    "replicas": "Drop nn.DataParallel. For several GPUs: DistributedDataParallel.",
    "eval_graph": "with torch.no_grad(): around it, or torch.inference_mode().",
    "slow": "torch.profiler.profile() around train, sorted by cpu_time_total. A compilation "
    "counts, and takes longer than this training.",
}  # fmt: skip

ASSESSMENT = Path(__file__).resolve().parents[1]
EPOCHS, TRAIN, UNSEEN = 2, 128, 64  # of the run on the CPU; on the toy it is one epoch
ON_TOY_SAMPLES = 192, 64
# how far a loss may be off: on the CPU; in bf16 on the toy; in bf16 after more steps on a GPU
SAME, ALIKE, LATER = 0.003, 0.006, 0.03
LONG = 240.0  # seconds that a slow program may take on a busy machine
FASTER, BEHIND = 4.0, 10.0  # at least so many times the slow, at most so many the finished


def wrong(what: str, name: str) -> Wrong:
    """A finding with both of its hints."""
    return Wrong(what, HINTS[name], MORE[name])


def load(name: str) -> ModuleType:
    """A program of the assessment, under a name that is not __main__."""
    spec = importlib.util.spec_from_file_location(f"our_{name}", ASSESSMENT / f"{name}.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- on the CPU ---------------------------------------------------------------------------


def floats(tree: Any) -> int:
    """How many floats a nest of lists holds."""
    if isinstance(tree, (list, tuple)) and tree:
        if isinstance(tree[0], (list, tuple)):
            return sum(map(floats, tree))
        return len(tree) if isinstance(tree[0], float) else 0
    return 0


class Notes:
    """Counts that processes forked later add to, too: a byte in a file for each event."""

    def __init__(self, path: Path):
        self.path = path
        self.file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)

    def add(self, letter: str) -> None:
        os.write(self.file, letter.encode())

    def counts(self) -> dict[str, int]:
        text = self.path.read_text()
        return {letter: text.count(letter) for letter in "rlw"}


def watch_host(folder: Path) -> tuple[Notes, dict[str, Any]]:
    """From now on, count what the host does."""
    seen: dict[str, Any] = {
        "workers": [], "garbage": 0, "backwards": 0, "anomaly": 0, "updates": 0,
        "backends": [], "replicas": 0, "scaled": 0,
    }  # fmt: skip
    notes = Notes(folder.parent / f"notes-{os.getpid()}")

    def opened(event: str, arguments: tuple) -> None:
        if event == "open" and isinstance(arguments[0], (str, os.PathLike)):
            path, mode = os.fspath(arguments[0]), arguments[1] or ""
            if path.endswith(".pt"):
                notes.add("r")
            elif path.startswith(str(folder)) and set(mode) & set("wa+x"):
                notes.add("w")

    sys.addaudithook(opened)
    real_tensor = torch.tensor

    def tensor(data: Any, **options: Any) -> torch.Tensor:
        if not torch.compiler.is_compiling() and floats(data) > 256:
            notes.add("l")
        return real_tensor(data, **options)

    torch.tensor = tensor

    def before(owner: Any, name: str, note: Callable) -> None:
        real = getattr(owner, name)

        def noted(*args: Any, **kwargs: Any) -> Any:
            note(*args, **kwargs)
            return real(*args, **kwargs)

        setattr(owner, name, noted)

    def add(name: str, value: Any = 1) -> None:
        seen[name] += value

    def described(source: DataLoader) -> list[int]:
        with contextlib.suppress(TypeError):
            return [source.num_workers, len(source.dataset)]
        return [source.num_workers, 0]

    def backward(*_: Any, **__: Any) -> None:
        add("backwards")
        add("anomaly", int(torch.is_anomaly_enabled()))

    def compiled(*_: Any, backend: Any = "inductor", **__: Any) -> None:
        add("backends", [str(backend)])

    workers = dataloader._MultiProcessingDataLoaderIter
    before(workers, "__init__", lambda _, source: add("workers", [described(source)]))
    before(gc, "collect", lambda *_: add("garbage"))
    before(torch.autograd, "backward", backward)
    before(torch, "compile", compiled)
    before(nn.DataParallel, "__init__", lambda *_, **__: add("replicas"))
    before(torch.amp.GradScaler, "scale", lambda self, _: add("scaled", int(self._enabled)))
    optimizers.register_optimizer_step_post_hook(lambda *_: add("updates"))
    return notes, seen


def data_in(folder: Path, train: int = TRAIN, unseen: int = UNSEEN) -> Path:
    """What `train` reads, written by the finished program's `write_data`."""
    folder.mkdir()
    load("exercise").write_data(folder, train, unseen)
    return folder


def numbers(result: Any) -> list[list[float]]:
    """What `train` returned: losses of steps, losses of epochs."""
    losses, validation = result
    return [list(map(float, losses)), list(map(float, validation))]


def count_on_host(lesson: Lesson) -> None:
    """Train on the CPU; report the curve, the truth, and what the host did."""
    cpu = torch.device("cpu")
    with tempfile.TemporaryDirectory() as outer:
        folder = data_in(Path(outer, "data"))
        lesson.fact("truth", numbers(load("exercise").train(folder, cpu, EPOCHS)))
        (folder / "log.csv").unlink()
        torch._dynamo.reset()
        torch._dynamo.utils.clear_compilation_metrics()
        notes, seen = watch_host(folder)
        lesson.fact("curve", numbers(lesson.module.train(folder, cpu, EPOCHS)))
        metrics = torch._dynamo.utils.get_compilation_metrics()
        again = [metric for metric in metrics if getattr(metric, "recompile_reason", None)]
        lesson.fact("seen", seen | notes.counts() | {"recompiled": len(again)})
        log = folder / "log.csv"
        lines = log.read_text().splitlines() if log.exists() else []
        lesson.fact("logged", [line for line in lines if line[:1].isdigit()])


# --- on the toy ---------------------------------------------------------------------------


class Watch:
    """What the toy was asked to do, from the first convolution on."""

    def __init__(self, ours: ModuleType):
        self.ours, self.toy = ours, torch.toy
        self.begun, self.depth, self.phase = False, 0, ""
        self.convolutions: list[list] = []  # grad, samples, dtype, channels last
        self.backwards = 0
        self.launches = {"forward": 0, "update": 0}
        self.asked = {"": 0, "clipping": 0}  # numbers asked for
        self.pending = 0  # numbers asked for since a backward pass
        self.stops = 0  # waits for events, streams, the device
        self.to_host, self.constants, self.blocked = 0, 0, 0  # large copies; small; waited for
        self.parameters: dict[int, str] = {}

    def place(self) -> str:
        return "update" if self.phase == "update" else "forward" if self.depth else ""

    def operator(self, real: Callable) -> Callable:
        aten = torch.ops.aten

        def run(func, args, kwargs):
            if torch.is_inference_mode_enabled():  # no autograd took it apart before
                result = func.decompose(*args, **kwargs)
                if result is not NotImplemented:
                    return result
            if func is aten.convolution.default:
                if not self.begun:
                    self.begun = True
                    self.toy.start_counting()
                x = args[0]
                last = x.raw.is_contiguous(memory_format=torch.channels_last)
                note = [torch.is_grad_enabled(), len(x), str(x.dtype), last]
                self.convolutions.append(note)
            elif func is aten.convolution_backward.default:
                self.backwards += 1
                wanted, args = args[-1], (*args[:-1], [True] * 3)  # the toy has no None
            place, before = self.place(), self.toy.launches
            result = real(func, args, kwargs)
            if self.begun and place:
                self.launches[place] += self.toy.launches - before
            if func is aten.convolution_backward.default:
                result = tuple(r if w else None for r, w in zip(result, wanted, strict=True))
            return result

        return run

    def copy(self, real: Callable) -> Callable:
        def run(func, args, kwargs):
            source = args[1] if func is torch.ops.aten.copy_.default else args[0]
            waits = self.toy.waits
            before = (
                waits["copy to the device"],
                waits["copy to the host"],
                len(self.toy.copies),
            )
            result = real(func, args, kwargs)
            if not self.begun:
                return result
            if len(self.toy.copies) > before[2]:
                if source.is_floating_point() and source.numel() <= 64:
                    self.constants += 1
                else:
                    self.blocked += waits["copy to the device"] - before[0]
            elif waits["copy to the host"] > before[1]:
                if source.numel() > 1:
                    self.to_host += 1
                else:
                    self.ask()
            return result

        return run

    def wait(self, real: Callable) -> Callable:
        def run(why: str, *args: Any) -> None:
            if self.begun and why in ("item", "torch.equal"):
                self.ask()
            elif self.begun and why in ("synchronize", "event"):
                self.stops += 1
            return real(why, *args)

        return run

    def ask(self) -> None:
        """The host asks for a number: for clipping, if an update follows and no backward."""
        self.pending += 1

    def settle(self, what: str) -> None:
        """What was asked for till now was for this."""
        self.asked[what] += self.pending
        self.pending = 0

    def synchronize(self, real: Callable) -> Callable:
        def run(*args: Any) -> None:
            self.stops += self.begun
            return real(*args)

        return run

    def install(self) -> None:
        """Watch the toy, modules, backward and optimizers of this process."""
        ours, toy = self.ours, self.toy
        ours.run_on_toy, ours.copy = self.operator(ours.run_on_toy), self.copy(ours.copy)
        toy.wait = self.wait(toy.wait)
        torch.accelerator.synchronize = self.synchronize(toy.synchronize)
        cast_for_convolutions(toy)
        # as on a GPU: what an optimizer does by default is one kernel for many tensors
        optimizers._foreach_supported_types.append(ours.ToyTensor)

        def enter(*_: Any) -> None:
            self.depth += 1

        def leave(*_: Any) -> None:
            self.depth -= 1

        nn.modules.module.register_module_forward_pre_hook(enter)
        nn.modules.module.register_module_forward_hook(leave)
        backward = torch.autograd.backward

        def after(*args: Any, **kwargs: Any) -> None:
            self.settle("")
            backward(*args, **kwargs)

        torch.autograd.backward = after

        def begin(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            self.settle("clipping")
            self.phase = "update"
            for group in optimizer.param_groups:
                self.parameters |= {id(p): str(p.dtype) for p in group["params"]}

        def end(*_: Any) -> None:
            self.settle("")
            self.phase = ""

        optimizers.register_optimizer_step_pre_hook(begin)
        optimizers.register_optimizer_step_post_hook(end)


def cast_for_convolutions(toy: Any) -> None:
    """What autocast does to these operators on a GPU, for the toy."""
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
    library = torch.library.Library("aten", "IMPL")

    def cast(operator: Callable, dtype: torch.dtype | None) -> Callable:
        def run(*args: Any, **kwargs: Any) -> Any:
            to = dtype or torch.get_autocast_dtype("toy")
            args = [
                a.to(to)
                if isinstance(a, torch.Tensor) and a.dtype in (torch.float32, torch.bfloat16)
                else a
                for a in args
            ]
            with torch._C._ExcludeDispatchKeyGuard(key):
                return operator(*args, **kwargs)

        return run

    conv2d, group_norm = torch.ops.aten.conv2d.default, torch.ops.aten.group_norm.default
    library.impl("conv2d", cast(conv2d, None), "AutocastPrivateUse1")
    library.impl("group_norm", cast(group_norm, torch.float32), "AutocastPrivateUse1")
    toy.for_convolutions = library  # lasts as long as something holds it


def quiet_host() -> None:
    """What was counted on the CPU is only in the way here."""
    torch.compile = lambda model=None, **_: model if model else lambda function: function
    torch.autograd.set_detect_anomaly = lambda *_, **__: contextlib.nullcontext()
    gc.collect = lambda *_: 0
    scaler, loader = torch.amp.GradScaler.__init__, DataLoader.__init__

    def no_scaler(self, device="cuda", *args: Any, **options: Any) -> None:
        scaler(self, device, enabled=False)

    def no_workers(self, *args: Any, **options: Any) -> None:
        for name in ("num_workers", "persistent_workers", "prefetch_factor"):
            options.pop(name, None)
        loader(self, *args, **options)

    def no_replicas(self, module: nn.Module, *_: Any, **__: Any) -> None:
        nn.Module.__init__(self)
        self.module = module

    torch.amp.GradScaler.__init__, DataLoader.__init__ = no_scaler, no_workers
    nn.DataParallel.__init__ = no_replicas
    nn.DataParallel.forward = lambda self, *args, **kwargs: self.module(*args, **kwargs)


def count_on_toy(lesson: Lesson) -> None:
    """Train on the toy; report the curve, the truth, and what the device was asked to do."""
    from graders.lab07_pytorch_gpu import finished  # no other process has the toy

    with tempfile.TemporaryDirectory() as outer:
        folder = data_in(Path(outer, "data"), *ON_TOY_SAMPLES)
        truth = numbers(load("exercise").train(folder, torch.device("cpu"), 1))
        lesson.fact("truth", truth)
        watch = Watch(finished())
        quiet_host()
        watch.install()
        curve = numbers(lesson.module.train(folder, torch.device("toy"), 1))
        watch.settle("")
        lesson.fact("curve", curve)
    names = "convolutions backwards launches asked stops to_host constants blocked parameters"
    lesson.fact("seen", {name: getattr(watch, name) for name in names.split()})


# --- untouched, timed ---------------------------------------------------------------------


def time_it(lesson: Lesson) -> None:
    """Seconds of one epoch: the slow program once, of the others the best of four."""
    cpu, times = torch.device("cpu"), {}
    with tempfile.TemporaryDirectory() as outer:
        folder = data_in(Path(outer, "data"), 128, 64)

        def timed(name: str, module: ModuleType) -> None:
            begin = time.perf_counter()
            module.train(folder, cpu, 1)
            times.setdefault(name, []).append(time.perf_counter() - begin)
            torch.autograd.set_detect_anomaly(False)  # what one switches on is its own

        finished, slow = load("exercise"), load("exercise_slow")
        # what a process does once, importing above all, is nobody's
        slow.train(data_in(Path(outer, "little"), 16, 16), cpu, 1)
        torch.autograd.set_detect_anomaly(False)
        torch._dynamo.reset()
        for _ in range(4):  # in turn: what disturbs one disturbs the other
            timed("finished", finished)
            if not times.get("yours") or times["yours"][0] < 20 * times["finished"][-1]:
                timed("yours", lesson.module)
        torch._dynamo.reset()
        timed("slow", slow)
    lesson.fact("seconds", {name: min(t) for name, t in times.items()})


CLOCK = """
import importlib.util, json, sys, tempfile, time, torch
from pathlib import Path
def load(path):
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
finished, slow, yours = map(load, sys.argv[1:])
device, times = torch.device("cpu"), {}
if torch.accelerator.is_available():
    device = torch.accelerator.current_accelerator()
with tempfile.TemporaryDirectory() as folder:
    folder = Path(folder)
    finished.write_data(folder)
    curves = {}
    modules = {"finished": finished, "yours": yours, "slow": slow}
    for name, module in modules.items():
        for _ in range(1 if name == "slow" else 4):
            begin = time.perf_counter()
            losses, validation = module.train(folder, device, 2)
            if device.type != "cpu":
                torch.accelerator.synchronize()
            times.setdefault(name, []).append(time.perf_counter() - begin)
        curves[name] = list(map(float, losses)), list(map(float, validation))
seconds = {name: min(t) for name, t in times.items()}
print(json.dumps({"device": device.type, "seconds": seconds, "curves": curves}))
"""


# --- judging ------------------------------------------------------------------------------

PROBES = {"host": count_on_host, "toy": count_on_toy, "time": time_it}
SEEN: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def probe(lesson: Lesson) -> None:
    PROBES[lesson.scene["what"]](lesson)


def facts(bench: Bench, what: str) -> dict[str, Any]:
    """What one run of the learner's program came to; each runs once for all steps."""
    known = SEEN.setdefault(bench.runner, {})
    if (bench.path, what) not in known:
        limit, bench.runner.limit = bench.runner.limit, max(bench.runner.limit, LONG)
        try:
            group = bench.group(1, what=what)
        finally:
            bench.runner.limit = limit
        known[bench.path, what] = group.ranks[0].facts
    return known[bench.path, what]


Right = Callable[[str], None]


def compare(curve: list, truth: list, share: float) -> str:
    """What is wrong with a curve, by the name of its hint; "" if nothing is."""

    def off(ours: list[float], theirs: list[float]) -> float:
        pairs = zip(ours, theirs, strict=True)
        gaps = [abs(a - b) / b if a == a else float("inf") for a, b in pairs]
        return max(gaps, default=0.0)

    (losses, unseen), (true_losses, true_unseen) = curve, truth
    if len(losses) != len(true_losses):
        return "steps"
    if off(losses[:1], true_losses[:1]) > share:
        return "first"
    if off(losses, true_losses) > share:
        return "later"
    if len(unseen) != len(true_unseen) or off(unseen, true_unseen) > share:
        return "unseen"
    return ""


def in_words(curve: list) -> str:
    """A curve, short."""
    losses, unseen = ([f"{loss:.4f}" for loss in part] for part in curve)
    return f"{len(losses)} losses {', '.join(losses[:4])} …, validation {', '.join(unseen)}"


def judge_curve(bench: Bench, right: Right) -> None:
    found = facts(bench, "host")
    curve, truth = found["curve"], found["truth"]
    if name := compare(curve, truth, SAME):
        what = f"{in_words(curve)}; the slow program has {in_words(truth)}"
        raise wrong(what, name)
    right(f"{len(curve[0])} losses and {len(curve[1])} validation losses, to {SAME:.1%}")
    steps, logged = len(truth[0]), found["logged"]
    written = [float(line.split(",")[1]) for line in logged if "," in line]
    if compare([written, []], [truth[0], []], SAME):
        raise wrong(f"of {steps} steps {len(written)} stand in log.csv", "log")


def judge_device(bench: Bench, right: Right) -> None:
    found = facts(bench, "toy")
    if compare(found["curve"], found["truth"], ALIKE):
        what = f"{in_words(found['curve'])}; on the CPU {in_words(found['truth'])}"
        raise wrong(what, "device_curve")


def host(name: str) -> Callable:
    """A judge of what the host was seen to do."""

    def decorate(judge: Callable[[dict, int], str | None]) -> Callable:
        def judged(bench: Bench, right: Right) -> None:
            found = facts(bench, "host")
            if what := judge(found["seen"], len(found["truth"][0])):
                raise wrong(what, name)

        return judged

    return decorate


@host("read")
def judge_read(seen: dict, steps: int) -> str | None:
    if seen["r"] > 2 * EPOCHS:
        samples = EPOCHS * (TRAIN + UNSEEN)
        return f"{EPOCHS} epochs of {samples} samples in all open the data {seen['r']} times"


@host("lists")
def judge_lists(seen: dict, steps: int) -> str | None:
    if seen["l"]:
        return f"{seen['l']} tensors of pixels were made from lists of Python numbers"


@host("workers")
def judge_workers(seen: dict, steps: int) -> str | None:
    of = [samples for _, samples in seen["workers"]]
    if len(set(of)) < len(of):  # again for the same data
        count = sum(number for number, _ in seen["workers"])
        return f"{count} worker processes were started in {EPOCHS} epochs"


@host("scaler")
def judge_scaler(seen: dict, steps: int) -> str | None:
    if seen["scaled"]:
        return f"losses were scaled {seen['scaled']} times, in {steps} steps without fp16"


@host("log_opened")
def judge_opened(seen: dict, steps: int) -> str | None:
    if seen["w"] >= steps:
        return f"files were opened for writing {seen['w']} times in {steps} steps"


@host("garbage")
def judge_garbage(seen: dict, steps: int) -> str | None:
    if seen["garbage"] > EPOCHS:
        return f"the garbage was collected {seen['garbage']} times in {steps} steps"


@host("anomaly")
def judge_anomaly(seen: dict, steps: int) -> str | None:
    if seen["anomaly"]:
        return f"{seen['anomaly']} of {seen['backwards']} backward passes looked for anomalies"


@host("recompiles")
def judge_recompiles(seen: dict, steps: int) -> str | None:
    if seen["recompiled"] > 3:
        return f"what was compiled had to be compiled again {seen['recompiled']} times"


@host("debug_backend")
def judge_backend(seen: dict, steps: int) -> str | None:
    debugging = {"eager", "aot_eager", "aot_eager_decomp_partition"} & set(seen["backends"])
    if debugging:
        return f"torch.compile was called with backend {', '.join(sorted(debugging))}"


@host("replicas")
def judge_replicas(seen: dict, steps: int) -> str | None:
    if seen["replicas"]:
        return "the model is within nn.DataParallel"


def device(name: str) -> Callable:
    """A judge of what the toy was asked to do."""

    def decorate(judge: Callable[[dict, int], str | None]) -> Callable:
        def judged(bench: Bench, right: Right) -> None:
            found = facts(bench, "toy")
            if what := judge(found["seen"], len(found["truth"][0])):
                raise wrong(what, name)

        return judged

    return decorate


def training(seen: dict) -> list[list]:
    """The convolutions of training: the first ones of the run."""
    return [note for note in seen["convolutions"] if note[0]] or seen["convolutions"]


@device("micro")
def judge_micro(seen: dict, steps: int) -> str | None:
    samples = min(note[1] for note in training(seen))
    if samples < 64:
        return f"a convolution gets {samples} samples at a time, an update is made of 64"


@device("float64")
def judge_float64(seen: dict, steps: int) -> str | None:
    wide = sum(note[2] == "torch.float64" for note in seen["convolutions"])
    if wide:
        return f"{wide} of {len(seen['convolutions'])} convolutions computed in float64"


@device("no_autocast")
def judge_autocast(seen: dict, steps: int) -> str | None:
    kinds = sorted({note[2] for note in training(seen)})
    if kinds != ["torch.bfloat16"]:
        return f"convolutions on the device computed in {', '.join(kinds)}"


@device("converted")
def judge_converted(seen: dict, steps: int) -> str | None:
    kinds = sorted(set(seen["parameters"].values()))
    if set(kinds) & {"torch.bfloat16", "torch.float16"}:
        return f"the optimizer updates parameters of {', '.join(kinds)}"


@device("pageable")
def judge_pageable(seen: dict, steps: int) -> str | None:
    if seen["blocked"] >= 2 * (steps - 1):
        return f"in {steps} steps the host waited for {seen['blocked']} copies to the device"


@device("constants")
def judge_constants(seen: dict, steps: int) -> str | None:
    if seen["constants"] >= steps - 1:
        return f"in {steps} steps {seen['constants']} small tensors crossed to the device"


def for_clipping(seen: dict) -> int:
    """Numbers asked for between backward and update, if they are one per parameter."""
    count = seen["asked"]["clipping"]
    return count if count >= 2 * len(seen["parameters"]) else 0


@device("asks")
def judge_asks(seen: dict, steps: int) -> str | None:
    asked = sum(seen["asked"].values()) - for_clipping(seen)
    if asked >= steps:
        return f"in {steps} steps the host asked the device for {asked} numbers"


@device("synchronize")
def judge_synchronize(seen: dict, steps: int) -> str | None:
    if seen["stops"] >= steps:
        return f"in {steps} steps the host stopped for the device {seen['stops']} times"


@device("clip")
def judge_clip(seen: dict, steps: int) -> str | None:
    if asked := for_clipping(seen):
        return f"in {steps} steps the host asked for {asked} numbers before updates"


@device("launches")
def judge_launches(seen: dict, steps: int) -> str | None:
    each = seen["launches"]["forward"] / len(seen["convolutions"])
    if each > 20:
        return f"{each:.0f} kernels are launched in a forward pass for each convolution"


@device("optimizer")
def judge_optimizer(seen: dict, steps: int) -> str | None:
    each, count = seen["launches"]["update"] / steps, len(seen["parameters"])
    if each > 4 * count:
        return f"an update of {count} parameters launches {each:.0f} kernels"


@device("format")
def judge_format(seen: dict, steps: int) -> str | None:
    notes = seen["convolutions"]
    if plain := sum(not note[3] for note in notes):
        return f"the inputs of {plain} of {len(notes)} convolutions are not channels last"


@device("histograms")
def judge_histograms(seen: dict, steps: int) -> str | None:
    if seen["to_host"] > 2 * steps:
        return f"in {steps} steps {seen['to_host']} tensors were copied to the host"


@device("eval_graph")
def judge_eval(seen: dict, steps: int) -> str | None:
    kept = sum(note[0] for note in seen["convolutions"]) - seen["backwards"]
    if kept > 0:
        return f"{kept} convolutions were made for a backward pass that never came"


def judge_speed(bench: Bench, right: Right) -> None:
    where = "CPU"
    if bench.gpus:
        ours = (ASSESSMENT / "exercise.py", ASSESSMENT / "exercise_slow.py", bench.path)
        done = bench.run("python", "-c", CLOCK, *ours, limit=LONG)
        if done.stopped:
            raise wrong(f"all three programs together took more than {LONG:.0f} s", "slow")
        if done.status:
            last = (done.stderr.strip().splitlines() or ["no output"])[-1]
            raise wrong(f"on this machine's accelerator it failed: {last}", "elsewhere")
        found = json.loads(done.stdout.splitlines()[-1])
        where, curves = found["device"], found["curves"]
        if compare(curves["yours"], curves["slow"], LATER):
            what = f"{in_words(curves['yours'])}; slow: {in_words(curves['slow'])}"
            raise wrong(what, "device_curve")
    else:
        found = facts(bench, "time")
    seconds = found["seconds"]
    gain = seconds["slow"] / seconds["yours"]
    best = seconds["slow"] / seconds["finished"]
    what = f"on the {where} ≈{gain:.1f} times as fast as the slow program"
    if gain < FASTER or gain * BEHIND < best:
        raise wrong(f"{what}; the finished one ≈{best:.1f} times", "slow")
    right(f"{what}, the finished one ≈{best:.1f} times")


def both(*judges: Callable) -> Callable:
    """One judge after the other."""

    def judged(bench: Bench, right: Right) -> None:
        for judge in judges:
            judge(bench, right)

    return judged


AREAS = [
    ("the curve", "the losses are those of the slow program", judge_curve),
    ("the curve on a device", "it trains on an accelerator as on the CPU", judge_device),
    ("reading", "the data are read once", judge_read),
    ("from file to tensor", "pixels stay in tensors", judge_lists),
    ("workers", "no process is started twice", judge_workers),
    ("batch size", "a batch is one pass", judge_micro),
    ("precision", "nothing computes in 64 bits", judge_float64),
    (
        "precision on a device",
        "products in bf16, parameters in fp32",
        both(judge_converted, judge_autocast),
    ),
    ("loss scaling", "what needs no scaling is not scaled", judge_scaler),
    ("batches to the device", "the host waits for no copy of a batch", judge_pageable),
    ("constants", "what stays the same crosses once", judge_constants),
    (
        "asking the device",
        "the host asks for nothing within an epoch",
        both(judge_synchronize, judge_asks),
    ),
    ("clipping", "the device decides whether to clip", judge_clip),
    ("kernel launches", "few, large operators", judge_launches),
    ("the optimizer", "one update for all parameters", judge_optimizer),
    ("memory format", "channels last, for every convolution", judge_format),
    ("logging", "written seldom, and little", both(judge_histograms, judge_opened)),
    ("garbage", "nobody collects it by hand", judge_garbage),
    ("debugging aids", "they are off", judge_anomaly),
    (
        "compilation",
        "what is compiled is compiled once, for speed",
        both(judge_recompiles, judge_backend),
    ),
    ("replicas", "one process, one device, one model", judge_replicas),
    ("evaluation", "no graph for what has no backward", judge_eval),
    ("before and after", "the speed is there", judge_speed),
]
ON_TOY = {2, 6, 7, 8, 10, 11, 12, 13, 14, 15, 16, 17, 22}
STEPS = [
    Trial(
        number,
        title,
        proves,
        probe,
        judge,
        uses=("train",),
        worlds=(1,),
        needs=() if number == 1 else (1, 2) if number in ON_TOY - {2} else (1,),
        joins=False,
        symmetric=False,
        crashes=(("on the same device", HINTS["elsewhere"]),),
    )
    for number, (title, proves, judge) in enumerate(AREAS, start=1)
]
assert len(tree_leaves(HINTS)) == len(tree_leaves(MORE)) and set(HINTS) == set(MORE)
