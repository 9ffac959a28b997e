"""Tests that functions which programs repeat are the same in all programs.

Programs repeat functions so that a reader can copy each program alone.
"""

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
INPUTS = ["assessment", "CONTRIBUTING.md", "src/worldsize/model", "labs", "snippets"]
SIMILARITY = 0.8  # two definitions of one name must be equal if they share more of their tokens
# PROGRAM:NAME of definitions that may differ from similar ones, and the reason
EXCEPTIONS = {
    "labs/lab02_ddp.py:init_distributed": "the learner writes it",
    "labs/lab03_fsdp.py:load": "it uses the group of a mesh and a given folder",
    "labs/*:mean_loss": "each lab has a different task",
    "labs/*:train_alone": "it calls the build_optimizer that the learner of the lab writes",
    "labs/*:build_model": "each lab has a different model and seed",
    "labs/*:make_batches": "each lab has different batches",
    "labs/*:Block": "each lab has different sizes; the blocks of the chapters are equal",
    "*:MLP": "three models use this layer, with different arguments and biases",
    "*:build": "each program has a different model and training setup",
    "*:make_model": "each program has a different model",
    "*:SumOverRanks": "Megatron's g: two programs also count the bytes that it sends",
    "*:_": "a placeholder name of registered functions that are never called",
    "assessment/assignment1_allocator.py:segment_size": "it has PyTorch's constants",
}
Shapes = dict[str, list[Path]]  # source of a definition without docstrings → its programs


def definitions(text: str) -> Iterator[tuple[str, str]]:
    """Yield name and source of a program's functions and classes, except main and comments."""
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
    """Return the tokens of a definition; ast.unparse has normalized line ends and indents."""
    return [token.string for token in tokenize.generate_tokens(io.StringIO(source).readline)]


@cache
def similar(a: str, b: str) -> bool:
    both = SequenceMatcher(None, tokens(a), tokens(b), autojunk=False)
    return (
        both.real_quick_ratio() > SIMILARITY
        and both.quick_ratio() > SIMILARITY
        and both.ratio() > SIMILARITY
    )


def diverging(shapes: Shapes) -> Iterator[tuple[list[Path], list[Path]]]:
    """Yield the programs of two different definitions that should be the same.

    This is so if the two definitions are similar. It is also so for all definitions of a name
    in one folder if two programs in the folder have the same definition.
    """
    for (a, some), (b, others) in combinations(shapes.items(), 2):
        if similar(a, b):
            yield some, others
            continue
        for folder in {path.parent for path in some} & {path.parent for path in others}:
            here = [[path for path in part if path.parent == folder] for part in (some, others)]
            if max(map(len, here)) > 1:
                yield here[0], here[1]


def place(path: Path) -> str:
    return str(path.relative_to(ROOT))


def compared(name: str, differ: Collection[str]) -> Shapes:
    """Return the definitions of a name, without the programs that are listed as exceptions."""
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


def test_repeated_definitions_are_the_same_in_all_programs() -> None:
    wrong = []
    for name in shapes_by_name():
        for parts in diverging(compared(name, EXCEPTIONS)):
            some, others = (", ".join(map(place, part)) for part in parts)
            wrong.append(f"{name} of {some}\n  and {name} of {others}")
    rule = "these definitions have the same name but differ: copy one of them or rename it"
    assert not wrong, "\n".join([rule, *wrong])


def test_every_exception_is_needed() -> None:
    """Without any one of the exceptions, the test above would fail."""
    unneeded = []
    for pattern in EXCEPTIONS:
        shapes = compared(pattern.partition(":")[2], EXCEPTIONS.keys() - {pattern})
        if not any(diverging(shapes)):
            unneeded.append(pattern)
    assert unneeded == []


def test_a_small_difference_in_a_short_function_is_found() -> None:
    """One of four lines differs, by one token."""
    count = "def sent(n: int) -> int:\n    if n < 2:\n        return {}\n    return 2 * (n - 1)"
    assert similar(count.format("0"), count.format("None"))
    assert not similar(count.format("0"), "def sent(chunks):\n    return sum(map(len, chunks))")


def test_every_init_distributed_is_the_same() -> None:
    """All programs join the process group with one function, which one page explains."""
    naive = (ROOT / "snippets/02_ddp/naive.py").read_text("utf-8")
    expected = dict(definitions(naive))["init_distributed"]
    exercise = dict(definitions((ROOT / "labs/lab02_ddp.py").read_text("utf-8")))
    found = set(shapes_by_name()["init_distributed"])
    assert found - {expected} <= {exercise["init_distributed"]}
    fences = page.read(ROOT / "CONTRIBUTING.md").fences
    example = next(each for each in fences if "title" in each.options)
    assert dict(definitions("\n".join(example.lines)))["init_distributed"] == expected


def test_a_blank_ends_a_program_with_a_message() -> None:
    """A program with blanks installs stop_at_blank before main, or catches the error itself."""
    for path in sorted((ROOT / "assessment").glob("*.py")):
        text = path.read_text("utf-8")
        if "def stop_at_blank" in text:
            assert text.endswith("    sys.excepthook = stop_at_blank\n    main()\n"), path.name
        elif ">>> solution" in text:
            assert "except NotImplementedError as" in text, path.name


EXIT_AFTER_JOINING = re.compile(
    r"destroy_process_group\(\)\s+sys\.exit\(f?\"|"
    r"if [^\n]*get_world_size\(\)[^\n]*:\s+sys\.exit\(f?\""
)


def test_no_program_exits_after_joining_the_group() -> None:
    """An exiting rank breaks the connections of ranks that are still joining.

    They print a traceback next to the message. WORLD_SIZE and files can be checked earlier.
    """
    late = [
        f"{place(path)}:{text[: match.start()].count(chr(10)) + 1}: check this before the "
        "program joins the process group"
        for path in programs()
        for text in [path.read_text("utf-8")]
        for match in EXIT_AFTER_JOINING.finditer(text)
    ]
    assert not late, "\n".join(late)


DEVICE_OF = {"fully_shard": "mesh", "FullyShardedDataParallel": "device_id"}
DEVICE_OF |= {"FSDP": "device_id", "init_process_group": "device_id"}


def selects_a_device(text: str) -> Iterator[int]:
    """Yield the lines of calls that use the visible accelerator, wherever the ranks run."""
    cpu_selected = "DS_ACCELERATOR" in text.partition("import deepspeed")[0]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func).rpartition(".")[2]
            named = {keyword.arg for keyword in node.keywords}
            group = name == "init_process_group" and node.args  # the backend is given
            if name in DEVICE_OF and DEVICE_OF[name] not in named and not group:
                yield node.lineno
        elif (
            isinstance(node, ast.Import)
            and node.names[0].name == "deepspeed"
            and not cpu_selected
        ):
            yield node.lineno


def test_no_library_selects_the_device() -> None:
    """Libraries use the device that init_distributed() returns, which can be the CPU."""
    wrong = [
        f"{place(path)}:{line}: pass the device that init_distributed() returned"
        for path in programs()
        for line in selects_a_device(path.read_text("utf-8"))
    ]
    assert not wrong, "\n".join(wrong)


def test_a_library_that_selects_the_device_is_found() -> None:
    ours = (
        'os.environ["DS_ACCELERATOR"] = "cpu"\nimport deepspeed\nfully_shard(a, mesh=mesh)\n'
        'dist.init_process_group("gloo")\ndist.init_process_group(device_id=device)\n'
    )
    assert not list(selects_a_device(ours))
    theirs = "import deepspeed\nfsdp.fully_shard(a)\ndist.init_process_group()\nFSDP(a)\n"
    assert sorted(selects_a_device(theirs)) == [1, 2, 3, 4]
