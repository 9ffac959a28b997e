"""The steps of the exercise: the loss curve, the faults of the slow program, and the speed.

The grader does not search the learner's file for faults. It runs the program in three separate
processes and measures what the program does:

- The first run is on the CPU. It counts opened files, workers and compilations.
- The second run is on the toy, which is the device of lab 07. This device counts launches,
  copies and waits of the host. It shows on a CPU what would cost time on a GPU.
- The third run measures the time, without any recorder, and compares it with the times of the
  slow program and of the finished program.
"""

import contextlib
import functools
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
import torch._dynamo  # imported here once, so that the ranks do not have to import it
from torch import nn
from torch.optim import optimizer as optimizers
from torch.utils.data import DataLoader, dataloader

from graders import supervisor
from graders.dsl import ROOT, Lab, call_before, require, show
from graders.protocol import Judge, Wrong
from graders.rank import Lesson, load
from graders.supervisor import Workspace

LAB = Lab(isolate_steps=False)
EPOCHS, TRAINING, VALIDATION = 2, 128, 64  # epochs and samples of the run on the CPU
TOY_SAMPLES = 192, 64  # training and validation samples of the run on the toy, of one epoch
# the largest relative errors of a loss: on the CPU, in bf16 on the toy, and in bf16 on a GPU,
# where the run has more steps
CPU_ERROR, TOY_ERROR, GPU_ERROR = 0.003, 0.006, 0.03
LONG_LIMIT = 240.0  # processor seconds that a slow program may use
MIN_SPEEDUP = 4.0  # the least speedup over the slow program
MAX_SLOWDOWN = 10.0  # the largest slowdown compared with the finished program


@contextlib.contextmanager
def data_folder(training: int = TRAINING, validation: int = VALIDATION) -> Iterator[Path]:
    """Yield a temporary folder with the data that `train` reads."""
    with tempfile.TemporaryDirectory() as outer:
        folder = Path(outer, "data")
        folder.mkdir()
        LAB.finished.write_data(folder, training, validation)
        yield folder


def curve_of(result: Any) -> list[list[float]]:
    """Return the two lists that `train` returned: losses of steps, validation losses of epochs.

    Raises `Wrong` if the result does not have this form.
    """
    try:
        losses, validation = result
        return [list(map(float, losses)), list(map(float, validation))]
    except (TypeError, ValueError):
        found = "None" if result is None else f"a {type(result).__name__}"
        what = f"train returns {found}, and should return two lists of numbers"
        raise Wrong(what, "returned") from None


def report(lesson: Lesson, curve: tuple, truth: list, **found: Any) -> None:
    """Report the facts in `found`, the learner's curve, and that of the finished program."""
    found |= {"curve": curve_of(curve), "truth": truth, "steps": len(truth[0])}
    for name, value in found.items():
        lesson.fact(name, value)


# --- on the CPU ---------------------------------------------------------------------------


# the backends of torch.compile for debugging
DEBUG_BACKENDS = "aot_eager", "aot_eager_decomp_partition", "eager"
LOG_LINE = re.compile(r"\s*(\d+)\s*,\s*([-+.\deinfa]+)\s*")


def count_numbers(tree: Any) -> int:
    """Return how many Python numbers nested lists contain."""
    if isinstance(tree, (list, tuple)) and tree:
        if isinstance(tree[0], (list, tuple)):
            return sum(map(count_numbers, tree))
        return len(tree) if isinstance(tree[0], (int, float)) else 0
    return 0


def record_host(folder: Path) -> Path:
    """Start to record the actions of the host, and return the file of these records.

    Each action is one line of the file. Processes that are forked later are recorded too.
    """
    path = folder.parent / "records"
    file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)

    def record(*words: Any) -> None:
        os.write(file, f"{' '.join(map(str, words))}\n".encode())

    def record_open(event: str, arguments: tuple) -> None:
        if event == "open" and isinstance(arguments[0], (str, os.PathLike)):
            path, mode = os.fspath(arguments[0]), arguments[1] or ""
            if path.endswith(".pt"):
                record("reads")
            elif path.startswith(str(folder)) and set(mode) & set("wa+x"):
                record("writes")

    def record_tensor(data: Any, **_: Any) -> None:
        many = EPOCHS * (TRAINING + VALIDATION)
        if not torch.compiler.is_compiling() and count_numbers(data) > many:
            record("lists")

    def record_workers(_: Any, source: DataLoader) -> None:
        samples = 0
        with contextlib.suppress(TypeError):
            samples = len(source.dataset)
        record("workers", source.num_workers, samples)

    def record_backward(*_: Any, **__: Any) -> None:
        record("backwards")
        if torch.is_anomaly_enabled():
            record("anomaly")

    def record_compile(*_: Any, backend: Any = "inductor", **__: Any) -> None:
        record(f"backend:{backend}")

    sys.addaudithook(record_open)
    call_before(torch, "tensor", record_tensor)
    call_before(dataloader._MultiProcessingDataLoaderIter, "__init__", record_workers)
    call_before(gc, "collect", lambda *_: record("garbage"))
    call_before(torch.autograd, "backward", record_backward)
    call_before(torch, "compile", record_compile)
    call_before(nn.DataParallel, "__init__", lambda *_, **__: record("replicas"))
    call_before(
        torch.amp.GradScaler, "scale", lambda self, _: self._enabled and record("scaled")
    )
    return path


def show_setting(value: Any) -> str:
    """Return a setting of an optimizer, which is a number or several numbers, as a text."""
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(show_setting, value))})"
    return f"{float(value):.4g}" if isinstance(value, (int, float, torch.Tensor)) else "none"


def count_on_host(submission: ModuleType, reference: ModuleType, lesson: Lesson) -> None:
    """Train on the CPU. Report the curve, the true curve, and the actions of the host."""
    cpu = torch.device("cpu")
    with data_folder() as folder:
        truth = curve_of(reference.train(folder, cpu, EPOCHS))
        log = folder / "log.csv"
        log.unlink()
        torch._dynamo.reset()
        torch._dynamo.utils.clear_compilation_metrics()
        path, updates = record_host(folder), set()

        def record_update(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            for group in optimizer.param_groups:
                is_decoupled = group.get("decoupled_weight_decay", False)
                kind = "AdamW" if is_decoupled else type(optimizer).__name__
                names = ("lr", "betas", "eps", "weight_decay")
                settings = (f"{name}={show_setting(group.get(name))}" for name in names)
                updates.add(f"{kind} with {', '.join(settings)}")

        optimizers.register_optimizer_step_pre_hook(record_update)
        curve = submission.train(folder, cpu, EPOCHS)
        metrics = torch._dynamo.utils.get_compilation_metrics()
        records = [line.split() for line in path.read_text().splitlines()]
        lines = log.read_text().splitlines() if log.exists() else []
    counts = Counter(kind for kind, *_ in records)
    loaders = [rest for kind, *rest in records if kind == "workers"]
    debug_backends = [name for name in DEBUG_BACKENDS if counts[f"backend:{name}"]]
    matches = map(LOG_LINE.fullmatch, lines)
    names = "reads", "writes", "lists", "garbage", "backwards", "anomaly", "replicas", "scaled"
    report(
        lesson, curve, truth, epochs=EPOCHS, samples=EPOCHS * (TRAINING + VALIDATION),
        **{name: counts[name] for name in names},
        workers=sum(int(number) for number, _ in loaders),
        # how often workers were started again for the same data
        restarts=len(loaders) - len({samples for _, samples in loaders}),
        recompiled=sum(bool(getattr(each, "recompile_reason", None)) for each in metrics),
        debug_backends=", ".join(debug_backends),
        log_lines=[[int(match[1]), float(match[2])] if match else None for match in matches],
        updates=sorted(updates),
    )  # fmt: skip


# --- on the toy ---------------------------------------------------------------------------


class ToyRecorder:
    """Counts the operators, copies and waits of the toy, from the first convolution on."""

    def __init__(self, reference: ModuleType):
        self.reference, self.toy = reference, torch.toy
        self.has_begun = False  # the first convolution has run
        self.phases = ["else"]  # the phases that have begun: "forward" or "update" is the last
        self.convolutions: list[list] = []  # grad, samples, dtype, channels last
        self.parameters: dict[int, str] = {}  # the dtypes of the updated parameters, by id
        # The keys are:
        # "forward", "update", "else": launches in this phase
        # "pending": single numbers that the host has read for a purpose which is not known yet
        # "clipping", "reads", "after": such numbers, with their purpose
        # "stops": waits for events, streams or the device
        # "to_host": copies of several numbers to the host
        # "constants": copies of few numbers to the device
        # "blocked": waits for other copies to the device
        # "backwards": backward passes of convolutions
        self.counts: Counter[str] = Counter()

    def record_operators(self, real: Callable) -> Callable:
        """Return `real`, the function of the toy that runs operators, with a recorder."""
        aten = torch.ops.aten

        def run(func, args, kwargs):
            if torch.is_inference_mode_enabled():  # autograd has not decomposed the operator
                result = func.decompose(*args, **kwargs)
                if result is not NotImplemented:
                    return result
            if func is aten.convolution.default:
                if not self.has_begun:
                    self.has_begun = True
                    self.toy.start_counting()
                x = args[0]
                channels_last = x.raw.is_contiguous(memory_format=torch.channels_last)
                record = [torch.is_grad_enabled(), len(x), str(x.dtype), channels_last]
                self.convolutions.append(record)
            elif func is aten.convolution_backward.default:
                self.counts["backwards"] += 1
                # the toy cannot return None, so it computes all three gradients
                mask, args = args[-1], (*args[:-1], [True] * 3)
            launches = self.toy.launches
            result = real(func, args, kwargs)
            if self.has_begun:
                self.counts[self.phases[-1]] += self.toy.launches - launches
            if func is aten.convolution_backward.default:
                result = tuple(
                    r if used else None for r, used in zip(result, mask, strict=True)
                )
            return result

        return run

    def record_copies(self, real: Callable) -> Callable:
        """Return `real`, the function of the toy that copies tensors, with a recorder."""

        def run(func, args, kwargs):
            source = args[1] if func is torch.ops.aten.copy_.default else args[0]
            copies, waits = len(self.toy.copies), self.toy.waits.copy()
            result = real(func, args, kwargs)
            waits = self.toy.waits - waits
            if not self.has_begun:
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

    def record_wait(self, reason: str, *_: Any) -> None:
        """Count a wait of the host."""
        self.counts["pending"] += self.has_begun and reason in ("item", "torch.equal")
        self.counts["stops"] += self.has_begun and reason in ("synchronize", "event")

    def assign_reads(self, purpose: str = "reads") -> None:
        """Count the pending reads under this purpose."""
        self.counts[purpose] += self.counts.pop("pending", 0)

    def begin_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.assign_reads("clipping")
        self.phases.append("update")
        for group in optimizer.param_groups:
            self.parameters |= {id(p): str(p.dtype) for p in group["params"]}

    def end_update(self, *_: Any) -> None:
        self.assign_reads()
        self.phases.pop()

    def facts(self, steps: int) -> dict[str, Any]:
        """Return the facts about a run with this number of steps."""
        self.assign_reads("after")  # the reads after the last update
        counts, records, parameters = self.counts, self.convolutions, len(self.parameters)
        # in training, gradients are recorded
        training = [record for record in records if record[0]] or records
        # the reads before updates belong to clipping if there is one for each parameter
        clip = counts["clipping"] if counts["clipping"] >= 2 * parameters else 0
        found = {name: counts[name] for name in ("constants", "blocked", "to_host", "stops")}
        return found | {
            "convolutions": len(records), "parameters": parameters, "clip": clip,
            "numbers_read": counts["reads"] + counts["clipping"] - clip,
            "batch": min((record[1] for record in training), default=0),
            "fp64_convolutions": sum(record[2] == "torch.float64" for record in records),
            "product_dtypes": ", ".join(sorted({record[2] for record in training})),
            "parameter_dtypes": ", ".join(sorted(set(self.parameters.values()))),
            "forward": counts["forward"] / max(1, len(records)),
            "update": counts["update"] / steps,
            "strided": sum(not record[3] for record in records),
            "without_backward": sum(record[0] for record in records) - counts["backwards"],
        }  # fmt: skip

    def install(self) -> None:
        """Install recorders for the toy, modules, backward passes and optimizers."""
        reference, toy = self.reference, self.toy
        reference.run_on_toy = self.record_operators(reference.run_on_toy)
        reference.copy = self.record_copies(reference.copy)
        call_before(toy, "wait", self.record_wait)
        torch.accelerator.synchronize = toy.synchronize
        synchronize = functools.partial(self.record_wait, "synchronize")
        call_before(torch.accelerator, "synchronize", synchronize)
        call_before(torch.autograd, "backward", lambda *_, **__: self.assign_reads())
        cast_for_convolutions(toy)
        # as on a GPU, an optimizer uses by default one kernel for many tensors
        optimizers._foreach_supported_types.append(reference.ToyTensor)
        modules = nn.modules.module
        modules.register_module_forward_pre_hook(lambda *_: self.phases.append("forward"))
        modules.register_module_forward_hook(lambda *_: self.phases.remove("forward"))
        optimizers.register_optimizer_step_pre_hook(self.begin_update)
        optimizers.register_optimizer_step_post_hook(self.end_update)


def cast_for_convolutions(toy: Any) -> None:
    """Let autocast convert the inputs of convolutions and group norms on the toy.

    The dtypes are the same as those of autocast on a GPU.
    """
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
    library = torch.library.Library("aten", "IMPL")

    def cast(operator: Callable, dtype: torch.dtype | None) -> Callable:
        def run(*args: Any, **kwargs: Any) -> Any:
            target = dtype or torch.get_autocast_dtype("toy")
            args = [
                a.to(target)
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
    toy.for_convolutions = library  # the registration ends with the last reference to it


def disable_host_features() -> None:
    """Disable compilation, workers and the other features that the run on the CPU counted."""
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
    """Train on the toy. Report the curve, the true curve, and the facts about the device."""
    from graders.labs.lab07_pytorch_gpu import LAB as LAB07  # makes the toy of this process

    # this comes before the first backward pass, in which torch counts the devices
    recorder = ToyRecorder(LAB07.finished)
    with data_folder(*TOY_SAMPLES) as folder:
        truth = curve_of(reference.train(folder, torch.device("cpu"), 1))
        disable_host_features()
        recorder.install()
        curve = submission.train(folder, torch.device("toy"), 1)
    report(lesson, curve, truth, **recorder.facts(len(truth[0])))


# --- the time, without a recorder ---------------------------------------------------------


def measure(submission: ModuleType, device: torch.device, epochs: int, *samples: int) -> dict:
    """Return the device, the curves of the three programs, and their seconds.

    The slow program runs once. The time of the other programs is the best of up to four runs.
    """
    slow = load(ROOT / "assessment/exercise_slow.py", "slow")
    times: dict[str, list[float]] = {}
    curves: dict[str, list] = {}

    def run(name: str, module: ModuleType, folder: Path) -> None:
        begin = time.perf_counter()
        curve = module.train(folder, device, epochs)
        if device.type != "cpu":
            torch.accelerator.synchronize()
        times.setdefault(name, []).append(time.perf_counter() - begin)
        curves[name] = curve_of(curve)
        torch.autograd.set_detect_anomaly(False)  # it must not slow down the next program

    with data_folder(*samples) as folder, data_folder(16, 16) as small_folder:
        # this run does the work that a process does only once, such as late imports
        run("once", slow, small_folder)
        torch._dynamo.reset()
        for _ in range(4):  # the programs alternate, so a disturbance affects both of them
            run("finished", LAB.finished, folder)
            if not times.get("yours") or times["yours"][0] < 20 * times["finished"][-1]:
                run("yours", submission, folder)
        torch._dynamo.reset()
        run("slow", slow, folder)
    seconds = {name: min(t) for name, t in times.items()}
    return {"device": device.type, "seconds": seconds, "curves": curves}


def measure_on_cpu(submission: ModuleType, reference: ModuleType, lesson: Lesson) -> None:
    """Report the seconds of one epoch on the CPU."""
    lesson.fact("seconds", measure(submission, torch.device("cpu"), 1)["seconds"])


# this runs in a new process, because a forked process cannot use a GPU
MEASURE_ON_GPU = """
import json, sys, torch
sys.path.append(sys.argv[1])
from graders.assessment.exercise import load, measure
device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
print(json.dumps(measure(load(sys.argv[2]), device, 2, 256, 128)))
"""


# --- verdicts -----------------------------------------------------------------------------

PROBES = {"host": count_on_host, "toy": count_on_toy, "time": measure_on_cpu}
# for each supervisor, the facts about the runs of each program
CACHE: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def probe(submission: ModuleType, reference: ModuleType, lesson: Lesson) -> None:
    PROBES[lesson.arguments["kind"]](submission, reference, lesson)


def facts(workspace: Workspace, kind: str) -> dict[str, Any]:
    """Return the facts about a run of the learner's program: "host", "toy" or "time".

    Each kind of run takes place only once, and all steps use its facts.
    """
    cache = CACHE.setdefault(workspace.supervisor, {})
    if (workspace.path, kind) not in cache:
        limit = max(workspace.limit, LONG_LIMIT)
        with (  # the rank itself uses the processor time, and not one of its children
            mock.patch.object(workspace.supervisor, "limit", limit),
            mock.patch.object(supervisor, "OWN_FRACTION", 1.0),
        ):
            cache[workspace.path, kind] = workspace.group(1, kind=kind).ranks[0].facts
    return cache[workspace.path, kind]


def trial(number: int, title: str, proves: str, *needs: int) -> Callable[[Callable], Any]:
    """Return a decorator for a step that judges facts about runs of the learner's program."""
    step = LAB.trial(
        number, title, proves, "train", world_sizes=(1,), joins=False, symmetric=False,
        needs=needs,
        crashes={"on the same device": "elsewhere"},
    )  # fmt: skip
    return lambda judge: step(judge).probe(probe)


def compare(curve: list, truth: list, tolerance: float) -> str:
    """Return the hint for the first mistake in a curve, or "" if the curve is right.

    `tolerance` is the largest relative error of a loss.
    """

    def error(found: list[float], true: list[float]) -> float:
        errors = [
            abs(a - b) / b if a == a else float("inf") for a, b in zip(found, true, strict=True)
        ]
        return max(errors, default=0.0)

    (losses, validation), (true_losses, true_validation) = curve, truth
    if len(losses) != len(true_losses):
        return "steps"
    if error(losses[:1], true_losses[:1]) > tolerance:
        return "first"
    if error(losses, true_losses) > tolerance:
        return "later"
    if len(validation) != len(true_validation):
        return "unseen"
    if error(validation, true_validation) > tolerance:
        # small errors of the training losses can explain this error
        return "later" if error(losses, true_losses) > tolerance / 10 else "unseen"
    return ""


def in_words(curve: list) -> str:
    """Return a short text with the first losses and all validation losses of a curve."""
    losses, validation = ([f"{loss:.4f}" for loss in part] for part in curve)
    return f"{len(losses)} losses {', '.join(losses[:4])} …, validation {', '.join(validation)}"


@trial(1, "the curve", "the losses are those of the slow program")
def curve(workspace):
    run = SimpleNamespace(**facts(workspace, "host"))
    hint = compare(run.curve, run.truth, CPU_ERROR)
    require(
        not hint, f"{in_words(run.curve)}; the slow program has {in_words(run.truth)}", hint
    )
    losses, validation = map(len, run.curve)
    yield f"{losses} losses and {validation} validation losses, to {CPU_ERROR:.1%}"
    lines = [line for line in run.log_lines if line is not None]
    count = len(run.log_lines)
    what = f"log.csv has {count} lines, and {len(lines)} of them are a step and a loss"
    require(count == len(lines) == run.steps, f"{what}; there were {run.steps} steps", "log")
    found = [number for number, _ in lines]
    what = f"the steps in log.csv are {show(found)}; they should be 1 to {run.steps}"
    require(found == list(range(1, run.steps + 1)), what, "log")
    wrong = compare([[loss for _, loss in lines], []], [run.truth[0], []], CPU_ERROR)
    require(not wrong, "the losses in log.csv are not those of the steps", "log")
    wanted = f"AdamW with lr={show_setting(LAB.finished.RATE)}, betas=(0.9, 0.999), eps=1e-08, "
    wanted += "weight_decay=0.01"
    wrong = [each for each in run.updates if each != wanted]
    require(not wrong, f"parameters are updated by {' and '.join(wrong)}", "settings")


@trial(2, "the curve on a device", "it trains on an accelerator as on the CPU", 1)
def on_a_device(workspace):
    run = SimpleNamespace(**facts(workspace, "toy"))
    what = f"{in_words(run.curve)}; on the CPU {in_words(run.truth)}"
    require(not compare(run.curve, run.truth, TOY_ERROR), what, "device_curve")
    yield from ()


def area(number: int, title: str, proves: str, *checks: tuple[str, str, Callable, str]) -> None:
    """Add a step that checks facts about runs.

    Each check contains the kind of the run, a hint, a function that returns whether the facts
    are right, and a sentence about a mistake. The sentence is formatted with the facts.
    """
    kinds = {check[0] for check in checks}

    @trial(number, title, proves, *((1, 2) if "toy" in kinds else (1,)))
    def judge(workspace: Workspace) -> Judge:
        for kind, hint, is_right, sentence in checks:
            run = facts(workspace, kind)
            require(is_right(SimpleNamespace(**run)), sentence.format(**run), hint)
        yield from ()


# fmt: off
area(3, "reading", "the data are read once",
     ("host", "read", lambda run: run.reads <= 2 * run.epochs,
      "{epochs} epochs of {samples} samples in all open the data {reads} times"))
area(4, "from file to tensor", "pixels stay in tensors",
     ("host", "lists", lambda run: not run.lists,
      "{lists} tensors of pixels were made from lists of Python numbers"))
area(5, "workers", "no process is started twice",
     ("host", "workers", lambda run: not run.restarts,
      "{workers} worker processes were started in {epochs} epochs"))
area(6, "batch size", "a batch is one pass",
     ("toy", "micro", lambda run: run.batch >= 64,
      "a convolution gets {batch} samples at a time, an update is made of 64"))
area(7, "precision", "nothing computes in 64 bits",
     ("toy", "float64", lambda run: not run.fp64_convolutions,
      "{fp64_convolutions} of {convolutions} convolutions computed in float64"))
area(8, "precision on a device", "products in bf16, parameters in fp32",
     ("toy", "converted", lambda run: "float16" not in run.parameter_dtypes,  # nor bfloat16
      "the optimizer updates parameters of {parameter_dtypes}"),
     ("toy", "no_autocast", lambda run: run.product_dtypes == "torch.bfloat16",
      "convolutions on the device computed in {product_dtypes}"))
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
     ("toy", "asks", lambda run: run.numbers_read < run.steps - 1,
      "in {steps} steps the host asked the device for {numbers_read} numbers"))
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
     ("host", "debug_backend", lambda run: not run.debug_backends,
      "torch.compile was called with backend {debug_backends}"))
area(21, "replicas", "one process, one device, one model",
     ("host", "replicas", lambda run: not run.replicas,
      "the model is within nn.DataParallel"))
area(22, "evaluation", "no graph for what has no backward",
     ("toy", "eval_graph", lambda run: run.without_backward <= 0,
      "{without_backward} convolutions were made for a backward pass that never came"))
# fmt: on


@trial(23, "before and after", "the speed is there", 1)
def speed(workspace):
    where = "CPU"
    if workspace.has_gpus:
        command = ("python", "-B", "-c", MEASURE_ON_GPU, ROOT, workspace.path)
        result = workspace.run(*command, limit=LONG_LIMIT)
        what = f"all three programs together took more than {LONG_LIMIT:.0f} s"
        require(not result.stopped, what, "slow")
        last_line = (result.stderr.strip().splitlines() or ["no output"])[-1]
        what = f"on this machine's accelerator it failed: {last_line}"
        require(not result.status, what, "elsewhere")
        found = json.loads(result.stdout.splitlines()[-1])
        where, curves = found["device"], found["curves"]
        what = f"{in_words(curves['yours'])}; slow: {in_words(curves['slow'])}"
        wrong = compare(curves["yours"], curves["slow"], GPU_ERROR)
        require(not wrong, what, "device_curve")
    else:
        found = facts(workspace, "time")
    seconds = found["seconds"]
    speedup, best = (seconds["slow"] / seconds[name] for name in ("yours", "finished"))
    what = f"on the {where} ≈{speedup:.1f} times as fast as the slow program"
    is_fast = speedup >= MIN_SPEEDUP and speedup * MAX_SLOWDOWN >= best
    require(is_fast, f"{what}; the finished one ≈{best:.1f} times", "slow")
    yield f"{what}, the finished one ≈{best:.1f} times"
