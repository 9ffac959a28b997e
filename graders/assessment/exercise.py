"""The steps of the exercise: the curve, twenty faults, the speed; how each is found.

No fault is found by reading the learner's file. The program runs three times, in processes of
its own: on the CPU, where files, workers and compilations are counted; on lab 07's toy, a
device that counts launches, copies and waits of the host, and so shows on a CPU what would
cost time on a GPU; and, timed and untouched, beside the slow program and the finished one.
"""

import contextlib
import gc
import json
import os
import re
import sys
import tempfile
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch._dynamo  # once here, not in every process
from torch import nn
from torch.optim import optimizer as optimizers
from torch.utils.data import DataLoader, dataloader

from graders import supervisor
from graders.dsl import ROOT, Lab, call_before, require, show
from graders.protocol import Judge, Wrong
from graders.rank import Lesson, load
from graders.supervisor import Workspace

LAB = Lab(isolate_steps=False)
EPOCHS, TRAIN, UNSEEN = 2, 128, 64  # of the run on the CPU; on the toy it is one epoch
ON_TOY_SAMPLES = 192, 64
# how far a loss may be off: on the CPU; in bf16 on the toy; in bf16 after more steps on a GPU
SAME, ALIKE, LATER = 0.003, 0.006, 0.03
LONG = 240.0  # processor seconds that a slow program may take
FASTER, BEHIND = 4.0, 10.0  # at least so many times the slow, at most so many the finished


@contextlib.contextmanager
def data(train: int = TRAIN, unseen: int = UNSEEN) -> Iterator[Path]:
    """A folder with what `train` reads, written by the finished program."""
    with tempfile.TemporaryDirectory() as outer:
        folder = Path(outer, "data")
        folder.mkdir()
        LAB.finished.write_data(folder, train, unseen)
        yield folder


def numbers(result: Any) -> list[list[float]]:
    """What `train` returned: losses of steps, losses of epochs."""
    try:
        losses, validation = result
        return [list(map(float, losses)), list(map(float, validation))]
    except (TypeError, ValueError):
        found = "None" if result is None else f"a {type(result).__name__}"
        what = f"train returns {found}, and should return two lists of numbers"
        raise Wrong(what, "returned") from None


def report(lesson: Lesson, curve: tuple, truth: list, **found: Any) -> None:
    """Report what the learner's run came to, and the curve of the finished program."""
    found |= {"curve": numbers(curve), "truth": truth, "steps": len(truth[0])}
    for name, value in found.items():
        lesson.fact(name, value)


# --- on the CPU ---------------------------------------------------------------------------


DEBUGGING = "aot_eager", "aot_eager_decomp_partition", "eager"  # backends to find faults
LOGGED = re.compile(r"\s*(\d+)\s*,\s*([-+.\deinfa]+)\s*")


def listed(tree: Any) -> int:
    """How many Python numbers a nest of lists holds."""
    if isinstance(tree, (list, tuple)) and tree:
        if isinstance(tree[0], (list, tuple)):
            return sum(map(listed, tree))
        return len(tree) if isinstance(tree[0], (int, float)) else 0
    return 0


def watch_host(folder: Path) -> Path:
    """From now on, note what the host does: one line each, of processes forked later, too."""
    path = folder.parent / "notes"
    file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)

    def note(*words: Any) -> None:
        os.write(file, f"{' '.join(map(str, words))}\n".encode())

    def opened(event: str, arguments: tuple) -> None:
        if event == "open" and isinstance(arguments[0], (str, os.PathLike)):
            path, mode = os.fspath(arguments[0]), arguments[1] or ""
            if path.endswith(".pt"):
                note("reads")
            elif path.startswith(str(folder)) and set(mode) & set("wa+x"):
                note("writes")

    def tensor(data: Any, **_: Any) -> None:
        if not torch.compiler.is_compiling() and listed(data) > EPOCHS * (TRAIN + UNSEEN):
            note("lists")

    def workers(_: Any, source: DataLoader) -> None:
        samples = 0
        with contextlib.suppress(TypeError):
            samples = len(source.dataset)
        note("workers", source.num_workers, samples)

    def backward(*_: Any, **__: Any) -> None:
        note("backwards")
        if torch.is_anomaly_enabled():
            note("anomaly")

    def compiled(*_: Any, backend: Any = "inductor", **__: Any) -> None:
        note(f"backend:{backend}")

    sys.addaudithook(opened)
    call_before(torch, "tensor", tensor)
    call_before(dataloader._MultiProcessingDataLoaderIter, "__init__", workers)
    call_before(gc, "collect", lambda *_: note("garbage"))
    call_before(torch.autograd, "backward", backward)
    call_before(torch, "compile", compiled)
    call_before(nn.DataParallel, "__init__", lambda *_, **__: note("replicas"))
    call_before(torch.amp.GradScaler, "scale", lambda self, _: self._enabled and note("scaled"))
    return path


def show_number(value: Any) -> str:
    """A setting of an optimizer: a number, or several."""
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(show_number, value))})"
    return f"{float(value):.4g}" if isinstance(value, (int, float, torch.Tensor)) else "none"


def count_on_host(submission: ModuleType, reference: ModuleType, lesson: Lesson) -> None:
    """Train on the CPU; report the curve, the truth, and what the host did."""
    cpu = torch.device("cpu")
    with data() as folder:
        truth = numbers(reference.train(folder, cpu, EPOCHS))
        log = folder / "log.csv"
        log.unlink()
        torch._dynamo.reset()
        torch._dynamo.utils.clear_compilation_metrics()
        path, updates = watch_host(folder), set()

        def update(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            for group in optimizer.param_groups:
                decoupled = group.get("decoupled_weight_decay", False)
                kind = "AdamW" if decoupled else type(optimizer).__name__
                settings = ("lr", "betas", "eps", "weight_decay")
                found = (f"{name}={show_number(group.get(name))}" for name in settings)
                updates.add(f"{kind} with {', '.join(found)}")

        optimizers.register_optimizer_step_pre_hook(update)
        curve = submission.train(folder, cpu, EPOCHS)
        metrics = torch._dynamo.utils.get_compilation_metrics()
        notes = [line.split() for line in path.read_text().splitlines()]
        lines = log.read_text().splitlines() if log.exists() else []
    counts = Counter(kind for kind, *_ in notes)
    started = [rest for kind, *rest in notes if kind == "workers"]
    debugging = [name for name in DEBUGGING if counts[f"backend:{name}"]]
    names = "reads", "writes", "lists", "garbage", "backwards", "anomaly", "replicas", "scaled"
    report(
        lesson, curve, truth, epochs=EPOCHS, samples=EPOCHS * (TRAIN + UNSEEN),
        **{name: counts[name] for name in names},
        workers=sum(int(number) for number, _ in started),
        again=len(started) - len({samples for _, samples in started}),  # for the same data
        recompiled=sum(bool(getattr(each, "recompile_reason", None)) for each in metrics),
        debugging=", ".join(debugging),
        logged=[[int(m[1]), float(m[2])] if m else None for m in map(LOGGED.fullmatch, lines)],
        updates=sorted(updates),
    )  # fmt: skip


# --- on the toy ---------------------------------------------------------------------------


class Watch:
    """What the toy was asked to do, from the first convolution on."""

    def __init__(self, reference: ModuleType):
        self.reference, self.toy = reference, torch.toy
        self.begun, self.places = False, ["else"]  # where it is: in a forward pass, an update
        self.convolutions: list[list] = []  # grad, samples, dtype, channels last
        self.parameters: dict[int, str] = {}  # the dtypes of what is updated
        # launches by place; numbers asked for by purpose, and those whose is not known yet;
        # waits for events, streams, the device; copies to the host of more than one number,
        # of few numbers to the device, and those to the device which were waited for
        self.counts: Counter[str] = Counter()

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
                self.counts["backwards"] += 1
                wanted, args = args[-1], (*args[:-1], [True] * 3)  # the toy has no None
            launched = self.toy.launches
            result = real(func, args, kwargs)
            if self.begun:
                self.counts[self.places[-1]] += self.toy.launches - launched
            if func is aten.convolution_backward.default:
                result = tuple(r if w else None for r, w in zip(result, wanted, strict=True))
            return result

        return run

    def copy(self, real: Callable) -> Callable:
        def run(func, args, kwargs):
            source = args[1] if func is torch.ops.aten.copy_.default else args[0]
            copies, waits = len(self.toy.copies), self.toy.waits.copy()
            result = real(func, args, kwargs)
            waits = self.toy.waits - waits
            if not self.begun:
                return result
            if len(self.toy.copies) > copies:
                if source.is_floating_point() and source.numel() <= 64:
                    self.counts["constants"] += 1
                else:
                    self.counts["blocked"] += waits["copy to the device"]
            elif waits["copy to the host"]:
                self.counts["to_host" if source.numel() > 1 else "pending"] += 1
            return result

        return run

    def wait(self, why: str, *_: Any) -> None:
        self.counts["pending"] += self.begun and why in ("item", "torch.equal")
        self.counts["stops"] += self.begun and why in ("synchronize", "event")

    def settle(self, what: str = "asked") -> None:
        """What was asked for since the last time was for this."""
        self.counts[what] += self.counts.pop("pending", 0)

    def update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """An update begins."""
        self.settle("clipping")
        self.places.append("update")
        for group in optimizer.param_groups:
            self.parameters |= {id(p): str(p.dtype) for p in group["params"]}

    def updated(self, *_: Any) -> None:
        self.settle()
        self.places.pop()

    def found(self, steps: int) -> dict[str, Any]:
        """What so many steps come to."""
        self.settle("after")  # what was asked for after the last update
        counts, notes, parameters = self.counts, self.convolutions, len(self.parameters)
        training = [note for note in notes if note[0]] or notes  # the first ones of the run
        # of numbers that were asked for before updates: it is clipping if each has one
        clip = counts["clipping"] if counts["clipping"] >= 2 * parameters else 0
        found = {name: counts[name] for name in ("constants", "blocked", "to_host", "stops")}
        return found | {
            "convolutions": len(notes), "parameters": parameters, "clip": clip,
            "asked": counts["asked"] + counts["clipping"] - clip,
            "together": min((note[1] for note in training), default=0),
            "wide": sum(note[2] == "torch.float64" for note in notes),
            "products": ", ".join(sorted({note[2] for note in training})),
            "updated": ", ".join(sorted(set(self.parameters.values()))),
            "forward": counts["forward"] / max(1, len(notes)),
            "update": counts["update"] / steps,
            "strided": sum(not note[3] for note in notes),
            "kept": sum(note[0] for note in notes) - counts["backwards"],
        }  # fmt: skip

    def install(self) -> None:
        """Watch the toy, modules, backward and optimizers of this process."""
        reference, toy = self.reference, self.toy
        reference.run_on_toy, reference.copy = (
            self.operator(reference.run_on_toy),
            self.copy(reference.copy),
        )
        call_before(toy, "wait", self.wait)
        torch.accelerator.synchronize = toy.synchronize
        call_before(torch.accelerator, "synchronize", lambda *_: self.wait("synchronize"))
        call_before(torch.autograd, "backward", lambda *_, **__: self.settle())
        cast_for_convolutions(toy)
        # as on a GPU: what an optimizer does by default is one kernel for many tensors
        optimizers._foreach_supported_types.append(reference.ToyTensor)
        modules = nn.modules.module
        modules.register_module_forward_pre_hook(lambda *_: self.places.append("forward"))
        modules.register_module_forward_hook(lambda *_: self.places.remove("forward"))
        optimizers.register_optimizer_step_pre_hook(self.update)
        optimizers.register_optimizer_step_post_hook(self.updated)


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

    def no_scaler(self, *args: Any, **options: Any) -> None:
        scaler(self, *args, **options | {"enabled": False})

    def no_workers(self, *args: Any, **options: Any) -> None:
        several = ("num_workers", "persistent_workers", "prefetch_factor")
        loader(self, *args, **{name: options[name] for name in {*options} - {*several}})

    def no_replicas(self, module: nn.Module, *_: Any, **__: Any) -> None:
        nn.Module.__init__(self)
        self.module = module

    torch.amp.GradScaler.__init__, DataLoader.__init__ = no_scaler, no_workers
    nn.DataParallel.__init__ = no_replicas
    nn.DataParallel.forward = lambda self, *args, **kwargs: self.module(*args, **kwargs)


def count_on_toy(submission: ModuleType, reference: ModuleType, lesson: Lesson) -> None:
    """Train on the toy; report the curve, the truth, and what the device was asked to do."""
    from graders.labs.lab07_pytorch_gpu import LAB as toys  # no other process has the toy

    watch = Watch(toys.finished)  # before the first backward, which counts the devices
    with data(*ON_TOY_SAMPLES) as folder:
        truth = numbers(reference.train(folder, torch.device("cpu"), 1))
        quiet_host()
        watch.install()
        curve = submission.train(folder, torch.device("toy"), 1)
    report(lesson, curve, truth, **watch.found(len(truth[0])))


# --- untouched, timed ---------------------------------------------------------------------


def clock(submission: ModuleType, device: torch.device, epochs: int, *samples: int) -> dict:
    """Curves, and seconds: of the slow program once, of the others the best of four."""
    slow = load(ROOT / "assessment/exercise_slow.py", "slow")
    times: dict[str, list[float]] = {}
    curves: dict[str, list] = {}

    def timed(name: str, module: ModuleType, folder: Path) -> None:
        begin = time.perf_counter()
        curve = module.train(folder, device, epochs)
        if device.type != "cpu":
            torch.accelerator.synchronize()
        times.setdefault(name, []).append(time.perf_counter() - begin)
        curves[name] = numbers(curve)
        torch.autograd.set_detect_anomaly(False)  # what one switches on is its own

    with data(*samples) as folder, data(16, 16) as little:
        # what a process does once, importing above all, is nobody's
        timed("once", slow, little)
        torch._dynamo.reset()
        for _ in range(4):  # in turn: what disturbs one disturbs the other
            timed("finished", LAB.finished, folder)
            if not times.get("yours") or times["yours"][0] < 20 * times["finished"][-1]:
                timed("yours", submission, folder)
        torch._dynamo.reset()
        timed("slow", slow, folder)
    seconds = {name: min(t) for name, t in times.items()}
    return {"device": device.type, "seconds": seconds, "curves": curves}


def time_it(submission: ModuleType, reference: ModuleType, lesson: Lesson) -> None:
    """Report the seconds of one epoch on the CPU."""
    lesson.fact("seconds", clock(submission, torch.device("cpu"), 1)["seconds"])


# in a process of its own: a forked one has no GPU
CLOCK = """
import json, sys, torch
sys.path.append(sys.argv[1])
from graders.assessment.exercise import clock, load
device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
print(json.dumps(clock(load(sys.argv[2]), device, 2, 256, 128)))
"""


# --- judging ------------------------------------------------------------------------------

PROBES = {"host": count_on_host, "toy": count_on_toy, "time": time_it}
SEEN: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def probe(submission: ModuleType, reference: ModuleType, lesson: Lesson) -> None:
    PROBES[lesson.arguments["what"]](submission, reference, lesson)


def facts(workspace: Workspace, what: str) -> dict[str, Any]:
    """What one run of the learner's program came to; each runs once for all steps."""
    known = SEEN.setdefault(workspace.supervisor, {})
    if (workspace.path, what) not in known:
        longer = max(workspace.limit, LONG)
        with (  # the slow program runs in the rank itself
            mock.patch.object(workspace.supervisor, "limit", longer),
            mock.patch.object(supervisor, "OWN_FRACTION", 1.0),
        ):
            known[workspace.path, what] = workspace.group(1, what=what).ranks[0].facts
    return known[workspace.path, what]


def trial(number: int, title: str, proves: str, *needs: int) -> Callable[[Callable], Any]:
    """A step that judges what runs of the learner's program came to."""
    step = LAB.trial(
        number, title, proves, "train", world_sizes=(1,), joins=False, symmetric=False,
        needs=needs,
        crashes={"on the same device": "elsewhere"},
    )  # fmt: skip
    return lambda judge: step(judge).probe(probe)


def compare(curve: list, truth: list, share: float) -> str:
    """What is wrong with a curve, by the name of its hint; "" if nothing is."""

    def off(reference: list[float], submission: list[float]) -> float:
        pairs = zip(reference, submission, strict=True)
        gaps = [abs(a - b) / b if a == a else float("inf") for a, b in pairs]
        return max(gaps, default=0.0)

    (losses, unseen), (true_losses, true_unseen) = curve, truth
    if len(losses) != len(true_losses):
        return "steps"
    if off(losses[:1], true_losses[:1]) > share:
        return "first"
    if off(losses, true_losses) > share:
        return "later"
    if len(unseen) != len(true_unseen):
        return "unseen"
    if off(unseen, true_unseen) > share:  # the losses may be a little wrong, too
        return "later" if off(losses, true_losses) > share / 10 else "unseen"
    return ""


def in_words(curve: list) -> str:
    """A curve, short."""
    losses, unseen = ([f"{loss:.4f}" for loss in part] for part in curve)
    return f"{len(losses)} losses {', '.join(losses[:4])} …, validation {', '.join(unseen)}"


@trial(1, "the curve", "the losses are those of the slow program")
def curve(workspace):
    run = SimpleNamespace(**facts(workspace, "host"))
    hint = compare(run.curve, run.truth, SAME)
    require(
        not hint, f"{in_words(run.curve)}; the slow program has {in_words(run.truth)}", hint
    )
    losses, unseen = map(len, run.curve)
    yield f"{losses} losses and {unseen} validation losses, to {SAME:.1%}"
    lines = [line for line in run.logged if line is not None]
    what = (
        f"log.csv has {len(run.logged)} lines, and {len(lines)} of them are a step and a loss"
    )
    require(
        len(run.logged) == len(lines) == run.steps,
        f"{what}; there were {run.steps} steps",
        "log",
    )
    found = [number for number, _ in lines]
    what = f"the steps in log.csv are {show(found)}; they should be 1 to {run.steps}"
    require(found == list(range(1, run.steps + 1)), what, "log")
    wrong = compare([[loss for _, loss in lines], []], [run.truth[0], []], SAME)
    require(not wrong, "the losses in log.csv are not those of the steps", "log")
    wanted = f"AdamW with lr={show_number(LAB.finished.RATE)}, betas=(0.9, 0.999), eps=1e-08, "
    wanted += "weight_decay=0.01"
    wrong = [each for each in run.updates if each != wanted]
    require(not wrong, f"parameters are updated by {' and '.join(wrong)}", "settings")


@trial(2, "the curve on a device", "it trains on an accelerator as on the CPU", 1)
def on_a_device(workspace):
    run = SimpleNamespace(**facts(workspace, "toy"))
    what = f"{in_words(run.curve)}; on the CPU {in_words(run.truth)}"
    require(not compare(run.curve, run.truth, ALIKE), what, "device_curve")
    yield from ()


def area(number: int, title: str, proves: str, *signs: tuple[str, str, Callable, str]) -> None:
    """A step about signs of faults: (where it shows, hint, what is right, what is said)."""
    where = {sign[0] for sign in signs}

    @trial(number, title, proves, *((1, 2) if "toy" in where else (1,)))
    def judge(workspace: Workspace) -> Judge:
        for where, hint, right, words in signs:
            run = facts(workspace, where)
            require(right(SimpleNamespace(**run)), words.format(**run), hint)
        yield from ()


# fmt: off
area(3, "reading", "the data are read once",
     ("host", "read", lambda run: run.reads <= 2 * run.epochs,
      "{epochs} epochs of {samples} samples in all open the data {reads} times"))
area(4, "from file to tensor", "pixels stay in tensors",
     ("host", "lists", lambda run: not run.lists,
      "{lists} tensors of pixels were made from lists of Python numbers"))
area(5, "workers", "no process is started twice",
     ("host", "workers", lambda run: not run.again,
      "{workers} worker processes were started in {epochs} epochs"))
area(6, "batch size", "a batch is one pass",
     ("toy", "micro", lambda run: run.together >= 64,
      "a convolution gets {together} samples at a time, an update is made of 64"))
area(7, "precision", "nothing computes in 64 bits",
     ("toy", "float64", lambda run: not run.wide,
      "{wide} of {convolutions} convolutions computed in float64"))
area(8, "precision on a device", "products in bf16, parameters in fp32",
     ("toy", "converted", lambda run: "float16" not in run.updated,  # nor bfloat16
      "the optimizer updates parameters of {updated}"),
     ("toy", "no_autocast", lambda run: run.products == "torch.bfloat16",
      "convolutions on the device computed in {products}"))
area(9, "loss scaling", "what needs no scaling is not scaled",
     ("host", "scaler", lambda run: not run.scaled,
      "losses were scaled {scaled} times, in {steps} steps without fp16"))
area(10, "batches to the device", "the host waits for no copy of a batch",
     ("toy", "pageable", lambda run: run.blocked < 2 * (run.steps - 1),
      "in {steps} steps the host waited for {blocked} copies to the device"))
area(11, "constants", "what stays the same crosses once",
     ("toy", "constants", lambda run: run.constants < run.steps - 1,
      "in {steps} steps {constants} small tensors crossed to the device"))
area(12, "asking the device", "the host asks for nothing within an epoch",
     ("toy", "synchronize", lambda run: run.stops < run.steps,
      "in {steps} steps the host stopped for the device {stops} times"),
     ("toy", "asks", lambda run: run.asked < run.steps - 1,
      "in {steps} steps the host asked the device for {asked} numbers"))
area(13, "clipping", "the device decides whether to clip",
     ("toy", "clip", lambda run: not run.clip,
      "in {steps} steps the host asked for {clip} numbers before updates"))
area(14, "kernel launches", "few, large operators",
     ("toy", "launches", lambda run: run.forward <= 20,
      "{forward:.0f} kernels are launched in a forward pass for each convolution"))
area(15, "the optimizer", "one update for all parameters",
     ("toy", "optimizer", lambda run: run.update <= 4 * run.parameters,
      "an update of {parameters} parameters launches {update:.0f} kernels"))
area(16, "memory format", "channels last, for every convolution",
     ("toy", "format", lambda run: not run.strided,
      "the inputs of {strided} of {convolutions} convolutions are not channels last"))
area(17, "logging", "written seldom, and little",
     ("toy", "histograms", lambda run: run.to_host <= 2 * run.steps,
      "in {steps} steps {to_host} tensors were copied to the host"),
     ("host", "log_opened", lambda run: run.writes < run.steps,
      "files were opened for writing {writes} times in {steps} steps"))
area(18, "garbage", "nobody collects it by hand",
     ("host", "garbage", lambda run: run.garbage <= run.epochs,
      "the garbage was collected {garbage} times in {steps} steps"))
area(19, "debugging aids", "they are off",
     ("host", "anomaly", lambda run: not run.anomaly,
      "{anomaly} of {backwards} backward passes looked for anomalies"))
area(20, "compilation", "what is compiled is compiled once, for speed",
     ("host", "recompiles", lambda run: run.recompiled <= 3,
      "what was compiled had to be compiled again {recompiled} times"),
     ("host", "debug_backend", lambda run: not run.debugging,
      "torch.compile was called with backend {debugging}"))
area(21, "replicas", "one process, one device, one model",
     ("host", "replicas", lambda run: not run.replicas,
      "the model is within nn.DataParallel"))
area(22, "evaluation", "no graph for what has no backward",
     ("toy", "eval_graph", lambda run: run.kept <= 0,
      "{kept} convolutions were made for a backward pass that never came"))
# fmt: on


@trial(23, "before and after", "the speed is there", 1)
def speed(workspace):
    where = "CPU"
    if workspace.has_gpus:
        done = workspace.run("python", "-B", "-c", CLOCK, ROOT, workspace.path, limit=LONG)
        what = f"all three programs together took more than {LONG:.0f} s"
        require(not done.stopped, what, "slow")
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        what = f"on this machine's accelerator it failed: {last}"
        require(not done.status, what, "elsewhere")
        found = json.loads(done.stdout.splitlines()[-1])
        where, curves = found["device"], found["curves"]
        what = f"{in_words(curves['yours'])}; slow: {in_words(curves['slow'])}"
        wrong = compare(curves["yours"], curves["slow"], LATER)
        require(not wrong, what, "device_curve")
    else:
        found = facts(workspace, "time")
    seconds = found["seconds"]
    gain, best = (seconds["slow"] / seconds[name] for name in ("yours", "finished"))
    what = f"on the {where} ≈{gain:.1f} times as fast as the slow program"
    fast = gain >= FASTER and gain * BEHIND >= best
    require(fast, f"{what}; the finished one ≈{best:.1f} times", "slow")
    yield f"{what}, the finished one ≈{best:.1f} times"
