"""Tests that a function which several programs contain is the same in all of them.

Programs repeat functions, so that a reader can copy each program alone.
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
INPUTS = [
    "code of assessment",
    "CONTRIBUTING.md",
    "src/worldsize/model",
    "code of labs",
    "code of snippets",
]
# definitions of the same name must be equal if they share more than this fraction of tokens
SIMILARITY = 0.8
# PROGRAM:NAME of a definition that may differ from similar definitions → the reason
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
    "*:SumOverRanks": "two programs also count the bytes that this function sends",
    "*:_": "a placeholder name of registered functions that are never called",
    "assessment/assignment1_allocator.py:segment_size": "it has PyTorch's constants",
}
Shapes = dict[str, list[Path]]  # source of a definition without docstrings → its programs


def definitions(text: str) -> Iterator[tuple[str, str]]:
    """Yield the name and the source of each function and class of a program, except `main`.

    The source contains no comments and no docstrings.
    """
    kinds = (ast.FunctionDef, ast.ClassDef)
    for node in ast.parse(text).body:
        if isinstance(node, kinds) and node.name != "main":
            for inner in ast.walk(node):
                if isinstance(inner, kinds) and ast.get_docstring(inner) is not None:
                    inner.body = inner.body[1:] or [ast.Pass()]
            yield node.name, ast.unparse(node)


def programs() -> list[Path]:
    """Return the Python programs of the book."""
    folders = (ROOT / name for name in ("snippets", "labs", "assessment"))
    return [path for folder in folders for path in sorted(folder.rglob("*.py"))]


@cache
def shapes_by_name() -> dict[str, Shapes]:
    """Return the different definitions of each name in all programs."""
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
    """Return whether two definitions share more than `SIMILARITY` of their tokens."""
    matcher = SequenceMatcher(None, tokens(a), tokens(b), autojunk=False)
    return (  # the quick ratios are upper bounds of the ratio
        matcher.real_quick_ratio() > SIMILARITY
        and matcher.quick_ratio() > SIMILARITY
        and matcher.ratio() > SIMILARITY
    )


def diverging(shapes: Shapes) -> Iterator[tuple[list[Path], list[Path]]]:
    """Yield the programs of two different definitions of a name that should be equal.

    Two definitions should be equal if they are similar. Two definitions in one folder should
    also be equal if two programs of this folder contain one of them.
    """
    for (a, first), (b, second) in combinations(shapes.items(), 2):
        if similar(a, b):
            yield first, second
            continue
        for folder in {path.parent for path in first} & {path.parent for path in second}:
            pair = [
                [path for path in paths if path.parent == folder] for paths in (first, second)
            ]
            if max(map(len, pair)) > 1:
                yield pair[0], pair[1]


def program_name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def without_exceptions(name: str, exceptions: Collection[str]) -> Shapes:
    """Return the definitions of a name, without the programs that are exceptions."""
    shapes: Shapes = {}
    for source, paths in shapes_by_name()[name].items():
        remaining = [
            path
            for path in paths
            if not any(fnmatchcase(f"{program_name(path)}:{name}", each) for each in exceptions)
        ]
        if remaining:
            shapes[source] = remaining
    return shapes


def test_repeated_definitions_are_the_same_in_all_programs() -> None:
    wrong = []
    for name in shapes_by_name():
        for pair in diverging(without_exceptions(name, EXCEPTIONS)):
            first, second = (", ".join(map(program_name, paths)) for paths in pair)
            wrong.append(f"{name} of {first}\n  and {name} of {second}")
    rule = "these definitions have the same name but differ: copy one of them or rename it"
    assert not wrong, "\n".join([rule, *wrong])


def test_every_exception_is_needed() -> None:
    """The test above would fail if one of the exceptions was removed."""
    unneeded = []
    for pattern in EXCEPTIONS:
        shapes = without_exceptions(pattern.partition(":")[2], EXCEPTIONS.keys() - {pattern})
        if not any(diverging(shapes)):
            unneeded.append(pattern)
    assert unneeded == []


def test_a_small_difference_in_a_short_function_is_found() -> None:
    """The first two functions differ in one token."""
    function = (
        "def sent(n: int) -> int:\n    if n < 2:\n        return {}\n    return 2 * (n - 1)"
    )
    assert similar(function.format("0"), function.format("None"))
    different = "def sent(chunks):\n    return sum(map(len, chunks))"
    assert not similar(function.format("0"), different)


def test_all_programs_join_the_process_group_with_the_same_function() -> None:
    """The function may be different only in the lab in which the learner writes it."""
    naive = (ROOT / "snippets/02_ddp/naive.py").read_text("utf-8")
    expected = dict(definitions(naive))["init_distributed"]
    exercise = dict(definitions((ROOT / "labs/lab02_ddp.py").read_text("utf-8")))
    found = set(shapes_by_name()["init_distributed"])
    assert found - {expected} <= {exercise["init_distributed"]}
    fences = page.read(ROOT / "CONTRIBUTING.md").fences
    example = next(each for each in fences if "title" in each.options)
    assert dict(definitions("\n".join(example.lines)))["init_distributed"] == expected


def test_a_program_with_blanks_handles_the_error_of_a_blank() -> None:
    """It installs stop_at_blank before it calls main, or it catches NotImplementedError."""
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
    """A program must check WORLD_SIZE and its files before it joins the group.

    A rank that exits breaks the connections of the ranks that are still joining. These ranks
    then print a traceback next to the message.
    """
    late = [
        f"{program_name(path)}:{text[: match.start()].count(chr(10)) + 1}: check this before "
        "the program joins the process group"
        for path in programs()
        for text in [path.read_text("utf-8")]
        for match in EXIT_AFTER_JOINING.finditer(text)
    ]
    assert not late, "\n".join(late)


COMMUNICATES = re.compile(
    r"all_|broadcast|reduce|scatter|gather|barrier|send|recv|schedule\.step|Trainer|Engine|"
    r"DistributedDataParallel|fully_shard|FullyShardedDataParallel|parallelize|distribute|full_tensor|"
    r"deepspeed\.initialize"
)


def joins_without_communicating(text: str) -> bool:
    """Return whether a program joins a process group and never calls what communicates."""
    nodes = ast.walk(ast.parse(text))
    calls = [ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call)]
    joins = any(call.endswith("init_process_group") for call in calls)
    return joins and not any(COMMUNICATES.search(call) for call in calls)


def test_no_rank_leaves_the_group_before_the_others_have_joined() -> None:
    """gloo connects each rank to all others, and a rank is ready before the others are.

    If it leaves at once, another rank fails in init_process_group with "Connection closed by
    peer": this happened in 6 of 60 runs with 3 ranks on a busy machine. A barrier prevents it.
    """
    wrong = [
        f"{program_name(path)}: call dist.barrier() before a rank leaves the process group"
        for path in programs()
        if joins_without_communicating(path.read_text("utf-8"))
    ]
    assert not wrong, "\n".join(wrong)


def test_a_program_without_communication_is_found() -> None:
    leaves = 'dist.init_process_group("gloo")\ndist.destroy_process_group()\n'
    assert joins_without_communicating(leaves)
    assert not joins_without_communicating(leaves.replace("\n", "\ndist.barrier()\n", 1))
    assert not joins_without_communicating("print(1)")


DEVICE_ARGUMENTS = {  # function → the keyword argument that selects the device
    "fully_shard": "mesh",
    "FullyShardedDataParallel": "device_id",
    "FSDP": "device_id",
    "init_process_group": "device_id",
}


def lines_without_device(text: str) -> Iterator[int]:
    """Yield the lines in which a library selects the device because the program does not."""
    uses_cpu = "DS_ACCELERATOR" in text.partition("import deepspeed")[0]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func).rpartition(".")[2]
            keywords = {keyword.arg for keyword in node.keywords}
            has_backend = name == "init_process_group" and node.args
            is_missing = name in DEVICE_ARGUMENTS and DEVICE_ARGUMENTS[name] not in keywords
            if is_missing and not has_backend:
                yield node.lineno
        elif (
            isinstance(node, ast.Import) and node.names[0].name == "deepspeed" and not uses_cpu
        ):
            yield node.lineno


def test_no_library_selects_the_device() -> None:
    """With fewer GPUs than ranks, start() uses the CPU, and libraries must also use the CPU."""
    wrong = [
        f"{program_name(path)}:{line}: pass the device that start() returned"
        for path in programs()
        for line in lines_without_device(path.read_text("utf-8"))
    ]
    assert not wrong, "\n".join(wrong)


def test_a_library_that_selects_the_device_is_found() -> None:
    right = (
        'os.environ["DS_ACCELERATOR"] = "cpu"\nimport deepspeed\nfully_shard(a, mesh=mesh)\n'
        'dist.init_process_group("gloo")\ndist.init_process_group(device_id=device)\n'
    )
    assert not list(lines_without_device(right))
    wrong = "import deepspeed\nfsdp.fully_shard(a)\ndist.init_process_group()\nFSDP(a)\n"
    assert sorted(lines_without_device(wrong)) == [1, 2, 3, 4]
