"""What programs repeat, since each must survive being copied, is the same in all of them."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Collection, Iterator
from difflib import SequenceMatcher
from fnmatch import fnmatchcase
from functools import cache
from itertools import combinations
from pathlib import Path

from worldsize.model import page

ROOT = Path(__file__).resolve().parent.parent
INPUTS = ["assessment", "CONTRIBUTING.md", "src/worldsize/model", "labs", "snippets"]  # fmt: skip
ALIKE = 0.8  # two definitions of one name that share more of their tokens were one
# PROGRAM:NAME of definitions that may be like others or differ in one folder, and why
DIFFER = {
    "labs/lab02_ddp.py:start": "it is the exercise",
    "labs/lab03_fsdp.py:load": "over the group of a mesh, from a folder that is named",
    "labs/*:mean_loss": "each lab has a task of its own",
    "labs/*:train_alone": "each lab's truth, by the build_optimizer that its learner writes",
    "labs/*:build_model": "each lab's model, from a seed of its own",
    "labs/*:make_batches": "each lab's batches, likewise",
    "labs/*:Block": "each lab's model has its own sizes; those of the chapters are alike",
    "*:MLP": "by constants or arguments, with biases or without: a layer of three models",
    "*:build": "each program's own model and what it is trained with",
    "*:make_model": "each program's own model",
    "*:SumOverRanks": "Megatron's g: in the two programs that count what it sends, with a helper",
    "*:_": "a name for what is registered and never called",
    "assessment/assignment1_allocator.py:segment_size": "the chapter's constants are PyTorch's",
}
Shapes = dict[str, list[Path]]  # a definition without docstrings, and the programs that have it


def definitions(text: str) -> Iterator[tuple[str, str]]:
    """Name and source of a program's functions and classes but main, without comments."""
    kinds = (ast.FunctionDef, ast.ClassDef)
    for node in ast.parse(text).body:
        if isinstance(node, kinds) and node.name != "main":
            for inner in ast.walk(node):
                if isinstance(inner, kinds) and ast.get_docstring(inner) is not None:
                    inner.body = inner.body[1:] or [ast.Pass()]
            yield node.name, ast.unparse(node)


def programs() -> list[Path]:
    folders = (ROOT / name for name in ("snippets", "labs", "assessment"))
    return [path for folder in folders for path in sorted(folder.rglob("*.py"))]


@cache
def shapes_by_name() -> dict[str, Shapes]:
    found: dict[str, Shapes] = defaultdict(lambda: defaultdict(list))
    for path in programs():
        for name, source in definitions(path.read_text("utf-8")):
            found[name][source].append(path)
    return found


@cache
def tokens(source: str) -> list[str]:
    """The tokens of a definition; ast.unparse has set all line ends and indents alike."""
    return [token.string for token in tokenize.generate_tokens(io.StringIO(source).readline)]


@cache
def alike(a: str, b: str) -> bool:
    both = SequenceMatcher(None, tokens(a), tokens(b), autojunk=False)
    return (
        both.real_quick_ratio() > ALIKE and both.quick_ratio() > ALIKE and both.ratio() > ALIKE
    )


def drifted(shapes: Shapes) -> Iterator[tuple[list[Path], list[Path]]]:
    """Programs with one shape, and programs with another which should have the same.

    Two shapes that are alike should, wherever they are; and in a folder where two programs
    have the same shape, all that use its name.
    """
    for (a, some), (b, others) in combinations(shapes.items(), 2):
        if alike(a, b):
            yield some, others
            continue
        for folder in {path.parent for path in some} & {path.parent for path in others}:
            here = [[path for path in part if path.parent == folder] for part in (some, others)]
            if max(map(len, here)) > 1:
                yield here[0], here[1]


def place(path: Path) -> str:
    return str(path.relative_to(ROOT))


def compared(name: str, differ: Collection[str]) -> Shapes:
    """The shapes of a name, without the programs that have one of their own for a reason."""
    shapes: Shapes = {}
    for source, paths in shapes_by_name()[name].items():
        kept = [
            path
            for path in paths
            if not any(fnmatchcase(f"{place(path)}:{name}", pattern) for pattern in differ)
        ]
        if kept:
            shapes[source] = kept
    return shapes


def test_what_programs_repeat_is_the_same_in_all() -> None:
    wrong = []
    for name in shapes_by_name():
        for parts in drifted(compared(name, DIFFER)):
            some, others = (", ".join(map(place, part)) for part in parts)
            wrong.append(f"{name} of {some}\n  and {name} of {others}")
    rule = "same name, another shape: copy it or rename it"
    assert not wrong, "\n".join([rule, *wrong])


def test_names_that_may_differ_do() -> None:
    """Without any one of them, the test above would fail."""
    idle = []
    for pattern in DIFFER:
        shapes = compared(pattern.partition(":")[2], DIFFER.keys() - {pattern})
        if not any(drifted(shapes)):
            idle.append(pattern)
    assert idle == []


def test_a_short_function_that_drifted_is_found() -> None:
    """One line of four differs, and by one token."""
    count = "def sent(n: int) -> int:\n    if n < 2:\n        return {}\n    return 2 * (n - 1)"
    assert alike(count.format("0"), count.format("None"))
    assert not alike(count.format("0"), "def sent(chunks):\n    return sum(map(len, chunks))")


def test_every_start_is_the_same() -> None:
    """One function joins the process group in all programs, and in the one that shows how."""
    start = dict(definitions((ROOT / "snippets/02_ddp/naive.py").read_text("utf-8")))["start"]
    exercise = ROOT / "labs/lab02_ddp.py"
    assert set(shapes_by_name()["start"]) - {start} <= {
        source for name, source in definitions(exercise.read_text("utf-8")) if name == "start"
    }
    fences = page.read(ROOT / "CONTRIBUTING.md").fences
    example = next(each for each in fences if "title" in each.options)
    assert dict(definitions("\n".join(example.lines)))["start"] == start


def test_a_blank_ends_a_program_kindly() -> None:
    """What has stop_at_blank installs it, before main; what has blanks has one of these ways."""
    for path in sorted((ROOT / "assessment").glob("*.py")):
        text = path.read_text("utf-8")
        if "def stop_at_blank" in text:
            assert text.endswith("    sys.excepthook = stop_at_blank\n    main()\n"), path.name
        elif ">>> solution" in text:
            assert "except NotImplementedError as" in text, path.name


LATE = re.compile(
    r"destroy_process_group\(\)\s+sys\.exit\(f?\"|"
    r"if [^\n]*get_world_size\(\)[^\n]*:\s+sys\.exit\(f?\""
)


def test_no_program_refuses_after_it_has_joined() -> None:
    """A rank that leaves breaks the connections of those which still join: a traceback of
    theirs beside its sentence. What WORLD_SIZE or a file says can be asked before."""
    late = [
        f"{place(path)}:{text[: match.start()].count(chr(10)) + 1}: ask before joining the group"
        for path in programs()
        for text in [path.read_text("utf-8")]
        for match in LATE.finditer(text)
    ]
    assert not late, "\n".join(late)


DEVICE_OF = {"fully_shard": "mesh", "FullyShardedDataParallel": "device_id"}
DEVICE_OF |= {"FSDP": "device_id", "init_process_group": "device_id"}


def picks_a_device(text: str) -> Iterator[int]:
    """The lines of calls that take the accelerator which they see, wherever the ranks are."""
    told = "DS_ACCELERATOR" in text.partition("import deepspeed")[0]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func).rpartition(".")[2]
            named = {keyword.arg for keyword in node.keywords}
            group = name == "init_process_group" and node.args  # of a backend
            if name in DEVICE_OF and DEVICE_OF[name] not in named and not group:
                yield node.lineno
        elif isinstance(node, ast.Import) and node.names[0].name == "deepspeed" and not told:
            yield node.lineno


def test_no_library_picks_the_device() -> None:
    """With fewer GPUs than ranks start() takes the CPU, and libraries must be told so."""
    wrong = [
        f"{place(path)}:{line}: says nothing of the device that start() took"
        for path in programs()
        for line in picks_a_device(path.read_text("utf-8"))
    ]
    assert not wrong, "\n".join(wrong)


def test_a_library_that_picks_the_device_is_found() -> None:
    ours = (
        'os.environ["DS_ACCELERATOR"] = "cpu"\nimport deepspeed\nfully_shard(a, mesh=mesh)\n'
        'dist.init_process_group("gloo")\ndist.init_process_group(device_id=device)\n'
    )
    assert not list(picks_a_device(ours))
    theirs = "import deepspeed\nfsdp.fully_shard(a)\ndist.init_process_group()\nFSDP(a)\n"
    assert sorted(picks_a_device(theirs)) == [1, 2, 3, 4]
