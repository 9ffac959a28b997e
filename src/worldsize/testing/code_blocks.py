"""Find the code blocks of a page, and check each of them in the way that suits its language.

`worldsize.model.page` parses the page into fences. The library pytest-codeblocks decides which
fences belong to one block. It reads these markers, which its documentation describes::

    <!--pytest-codeblocks:cont-->              this fence continues the block before it
    <!--pytest-codeblocks:expected-output-->   the next fence is the output of this block

If the two parsers find different blocks, `extract` raises an error. To skip a block, write the
reason into the header of its fence. The page shows this reason:
`bash skip="needs two machines"`.
"""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import textwrap
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from worldsize.execution import runner
from worldsize.execution.program_run import PREFORK_LIMIT
from worldsize.execution.staging import LABS, lab_files, stage_files
from worldsize.model import BookError, atomic_write
from worldsize.model.page import Fence, Page, check_embeds, expand_embeds, read
from worldsize.model.program import FOLDERS, is_program, owning_program, transcript_device
from worldsize.model.transcript import Transcript, difference, output_lines
from worldsize.testing.program_check import CheckOptions

if TYPE_CHECKING:
    from pytest_codeblocks import CodeBlock


@dataclass
class Block:
    """A code block of a page, with the fences that continue it and the fence of its output."""

    root: Path
    page: Path
    fence: Fence
    parts: list[tuple[int, str]] = field(default_factory=list)  # (line on the page, code)
    expected: Fence | None = None

    @property
    def code(self) -> str:
        return "".join(code for _, code in self.parts)

    @property
    def skip(self) -> str | None:
        """Return the reason why the block is not run, or None if it is not skipped."""
        return self.fence.options.get("skip")

    @property
    def name(self) -> str:
        """Return the path of the page in the book, for example ``docs/02_ddp.md``."""
        return self.page.relative_to(self.root).as_posix()

    def error(self, message: str, line: int = 0) -> BookError:
        """Return an error at a line of the page, by default at the opening backticks."""
        return BookError(f"{self.name}:{line or self.fence.line}: {message}")

    def invalid(self, language: str, reason: object, line: int = 0) -> BookError:
        """Return the error that line ``line`` of the block is not valid in this language."""
        return self.error(f"not a valid {language}: {reason}", self.fence.line + line)

    @property
    def runs(self) -> bool:
        """Return whether the test of this block runs its code.

        The code of an embedded program runs in the test of the program instead.
        """
        language = ALIASES.get(self.fence.language, self.fence.language)
        return language in RUNS and not self.fence.has_only_embeds and not self.skip

    def inputs(self, device: str = "cpu") -> tuple[str | Path, ...]:
        """Return the texts and files on which the result of `check` depends.

        The result is empty for a block that is cheap to check, so its test always runs.
        """
        if self.fence.has_only_embeds or self.fence.language in {"text", "dockerfile"}:
            return ()
        expected = repr(self.expected and self.expected.lines)
        gpus = "" if device == "cpu" else runner.describe_device(device)
        return (gpus, self.fence.header, self.code, expected, *self.named_files().values())

    def named_files(self) -> dict[str, Path]:
        """Return the programs that the code names, and all `LABS` if it names one of them."""
        folders = "|".join(LABS)
        files = {}
        if re.search(rf"(?<![\w/])({folders})/", self.code):
            files |= lab_files(self.root)
        for name in re.findall(r"(?<![\w/])snippets/[\w./-]+", self.code):
            if is_program(self.root / name, self.root) and (self.root / name).exists():
                files[name] = self.root / name
        return files


# --- find the blocks of a page ---------------------------------------------------------------

_FORBIDDEN_LINES = {  # pattern of a line outside of all fences → error message
    r"\s*(~{3,}|>\s*(`{3,}|~{3,}))": "no test would run this block: open it with backticks, "
    "outside of block quotes",
    r"\s*<!--[-\s]*pytest\.mark\.skip": "the reader would not see why this block is skipped: "
    'write the reason into its header, ```bash skip="reason"',
}


def extract(path: Path, root: Path) -> list[Block]:
    """Return all blocks of a page.

    Raise BookError if a block cannot be parsed, or if an embedded file does not exist.
    """
    name, page = path.relative_to(root).as_posix(), read(path)
    for number, line in page.prose():
        for pattern, message in _FORBIDDEN_LINES.items():
            if re.match(pattern, line):
                raise BookError(f"{name}:{number}: {message}")
    for embed in page.stray_embeds:
        raise BookError(f"{name}:{embed.line}: put this embed into a code block")
    check_embeds(path, root)
    unmatched = _parse_with_codeblocks(page, name)
    blocks: list[Block] = []
    rest = ""  # the code of the last block that the following fences must contain
    for fence in page.fences:
        text, first = _without_spaces("\n".join(fence.lines)), fence.line in unmatched
        if first:
            found = unmatched.pop(fence.line)
            rest = _without_spaces(found.code)
            blocks.append(Block(root, path, fence))
        if rest.startswith(text) and (rest or first):
            rest = rest.removeprefix(text)
            text = textwrap.dedent("".join(f"{line}\n" for line in expand_embeds(fence, root)))
            blocks[-1].parts.append((fence.line + 1, text))
        elif blocks and text == _without_spaces(found.expected_output):
            blocks[-1].expected = fence
        else:
            unmatched[fence.line] = None  # pytest-codeblocks found no block or a different end
            break
    if unmatched:
        line = min(unmatched)
        raise BookError(f"{name}:{line}: pytest-codeblocks finds a different block here")
    return blocks


def _parse_with_codeblocks(page: Page, name: str) -> dict[int, CodeBlock]:
    """Return the blocks that pytest-codeblocks finds, by the line of their first fence."""
    from pytest_codeblocks import extract_from_buffer  # it may be missing on a GPU machine

    try:
        text = io.StringIO("\n".join(page.lines))
        found = extract_from_buffer(text, max_num_lines=len(page.lines) + 1)
    except RuntimeError as error:
        line, reason = page.fences[-1].line if page.fences else 1, str(error)
        if "no previous code block" in reason:
            line, reason = page.fences[0].line, "there is no block that this one can continue"
        raise BookError(f"{name}:{line}: {reason}") from None
    return {block.lineno: block for block in found}


def _without_spaces(code: str | None) -> str | None:
    """Return code without white space.

    pytest-codeblocks removes the empty lines of an indented block, so they are not compared.
    """
    return None if code is None else "".join(code.split())


# --- check a block ---------------------------------------------------------------------------


def check(block: Block, options: CheckOptions) -> float:
    """Run, compile or validate a block; return the duration of its commands in seconds.

    Raise BookError with the line of the page if the block is wrong. With ``options.record``,
    the new output of a block is written into the fence below it.
    """
    name, embeds = block.fence.language, block.fence.embeds
    language = ALIASES.get(name, name)
    if not language:
        raise block.error("this code block has no language: write one after the backticks")
    if language not in CHECKS and language not in RUNS:
        known = ", ".join(sorted([*CHECKS, *RUNS, *ALIASES]))
        raise block.error(f"no test can check the language {name!r}: use one of {known}")
    if block.fence.has_only_embeds:
        paths = [block.root / embed.file for embed in embeds]
        for embed, path in zip(embeds, paths, strict=True):
            if language not in LANGUAGES.get(path.suffix, {language}):
                raise block.error(f"{embed.target} is not a file of the language {name!r}")
            if transcript_device(path) and owning_program(path, block.root) is None:
                raise block.error(f"{embed.target} is a transcript that belongs to no program")
        if all(transcript_device(path) or is_program(path, block.root) for path in paths):
            return 0.0  # the test of the program runs it
    if language in RUNS:
        if options.device != "cpu" or language == "bash":  # a bash block needs a shell
            options = replace(options, launcher=None)
        try:
            return RUNS[language](block, options)
        except BookError:
            if not options.launcher:
                raise
        return RUNS[language](block, replace(options, launcher=None))
    CHECKS[language](block)
    return 0.0


# --- blocks that are run ---------------------------------------------------------------------


def _run(
    block: Block,
    command: str,
    folder: Path,
    options: CheckOptions,
    line: int = 0,
    status: int = 0,
) -> runner.Result:
    """Run a command and return its result.

    Raise BookError if the command hangs, if its exit status is not ``status``, or if it leaves
    processes running.
    """
    launcher = options.launcher
    if launcher and not launcher.accepts(command, block.name):
        launcher = None
    limit = min(options.limit, PREFORK_LIMIT) if launcher else options.limit
    result = runner.run(command, folder, limit=limit, device=options.device, launcher=launcher)
    if result.leftovers:
        raise block.error(result.leftovers_message)
    if result.timed_out or result.status != status:
        message = f"{block.fence.language} block failed: {runner.explain(result)}"
        raise block.error(message, line or result.line_in(str(block.page)) or 0)
    return result


def _output(block: Block, result: runner.Result) -> list[str]:
    """Return the lines that a command of the block printed."""
    try:
        return output_lines(result.stdout)
    except ValueError as error:
        raise block.error(str(error)) from None


def _compare(block: Block, result: runner.Result, options: CheckOptions) -> None:
    """Compare the output of a block with the fence below it, if there is one.

    Raise BookError if they differ. With ``options.record``, write the output into the fence.
    """
    if block.expected is None:
        return
    actual = _output(block, result)
    expected = output_lines("\n".join(map(block.expected.dedent, block.expected.lines)))
    if diff := difference(expected, actual):
        if options.record:
            _write_expected(block, actual)
            return
        problem = f"the block on line {block.fence.line} printed something else:"
        hint = f"if that is right: make record WHAT={block.name}"
        raise block.error("\n".join([problem, *diff, hint]), block.expected.line)


def _write_expected(block: Block, actual: list[str]) -> None:
    """Write the output into the fence below the block.

    The fence may have moved, because an output above it may have become longer. Therefore the
    nearest fence with the old lines is searched.
    """
    page, expected = read(block.page), block.expected
    same = (fence for fence in page.fences if fence.lines == expected.lines)
    fence = min(same, key=lambda fence: abs(fence.line - expected.line))
    body = [fence.indent + line if line else "" for line in actual]
    lines = [*page.lines[: fence.line], *body, *page.lines[fence.end - 1 :]]
    atomic_write(block.page, "\n".join(lines))


# Runs the parts of a block in one namespace, with the line numbers of the page.
_BOOTSTRAP = """\
import json, sys
page, parts = json.loads(open(sys.argv.pop(), encoding="utf-8").read())
scope = {"__name__": "__main__", "__builtins__": __builtins__}
for line, code in parts:
    exec(compile("\\n" * (line - 1) + code, page, "exec"), scope)
"""


def _python(block: Block, options: CheckOptions) -> float:
    for line, code in block.parts:
        try:
            compile("\n" * (line - 1) + code, str(block.page), "exec")
        except SyntaxError as error:
            raise block.error(error.msg, error.lineno or line) from None
    if block.skip:
        return 0.0
    with runner.empty_folder() as folder:
        # these files are next to the folder of the run, because this folder must be empty
        parts, bootstrap = folder.parent / "block.json", folder.parent / "block.py"
        parts.write_text(json.dumps([str(block.page), block.parts]), "utf-8")
        bootstrap.write_text(_BOOTSTRAP, "utf-8")
        result = _run(block, f"python {bootstrap} {parts}", folder, options)
    _compare(block, result, options)
    return result.seconds


def _shell(block: Block, options: CheckOptions) -> float:
    if error := _shell_error(block.code):
        raise block.error(f"this is not a shell script: {error}")
    if block.skip:
        return 0.0
    with runner.empty_folder() as folder:
        stage_files(block.named_files(), folder)
        result = _run(block, f"set -euo pipefail\n{block.code}", folder, options)
    _compare(block, result, options)
    return result.seconds


def _shell_error(script: str) -> str:
    """Return the error message of bash for a script, or "" if the syntax is correct."""
    done = _run_checker(["bash", "-n"], script)
    return done.stderr.strip() if done.returncode else ""


def _console(block: Block, options: CheckOptions) -> float:
    transcript = Transcript.parse(block.code, block.name, block.fence.line)
    if block.skip:
        return 0.0
    seconds = 0.0
    with runner.empty_folder() as folder:
        stage_files(block.named_files(), folder)
        for command in transcript.commands:
            line = block.fence.line + command.line
            result = _run(block, command.command_line, folder, options, line, command.status)
            seconds += result.seconds
            if diff := difference(command.output, _output(block, result)):
                problem = f"`{command.command_line}` printed something else:"
                raise block.error("\n".join([problem, *diff]), line)
    return seconds


# --- blocks that are compiled or validated ---------------------------------------------------

_NVCC = [
    "nvcc", "-c", "-gencode", "arch=compute_80,code=sm_80", "-gencode",
    "arch=compute_90,code=sm_90", "--Werror", "all-warnings",
]  # fmt: skip
_GXX = ["g++", "-c", "-std=c++17", "-Wall", "-Wextra", "-Werror"]


def _compile(block: Block, compiler: list[str], suffix: str) -> None:
    if shutil.which(compiler[0]) is None:
        pytest.skip(f"{compiler[0]} is not on this machine")
    with runner.empty_folder() as folder:
        source = folder / f"block{suffix}"
        source.write_text(block.code)
        command = [*compiler, str(source), "-o", str(folder / "block.o")]
        done = _run_checker(command)
    if done.returncode:
        message = done.stderr.replace(str(source), "block").strip()
        match = re.search(r"block[:(](\d+)", message)
        line = block.fence.line + int(match[1] if match else 0)
        raise block.error(f"it does not compile:\n{message[:2000]}", line)


def _parse(block: Block, language: str, parse: Callable[[str], Any]) -> Any:
    """Return the parsed data of a block; raise BookError with the line of a syntax error."""
    try:
        return parse(block.code)
    except Exception as error:  # each library has its own class of errors
        lines = re.findall(r"line (\d+)", str(error))
        raise block.invalid(language, error, int(lines[-1]) if lines else 0) from None


def _yaml(block: Block) -> None:
    import yaml

    documents = _parse(block, "YAML", lambda code: list(yaml.safe_load_all(code)))
    is_workflow = block.fence.options.get("title", "").startswith(".github/workflows/")
    for document in documents:
        fields = document if isinstance(document, dict) else {}
        if is_workflow and "jobs" not in fields:
            raise block.invalid("workflow", "it has no jobs")
        if "apiVersion" in fields and not fields.get("kind"):
            raise block.invalid("Kubernetes object", "it has no kind")


def _run_checker(command: list[str], text: str = "") -> subprocess.CompletedProcess[str]:
    """Run a compiler or a shell with ``text`` as its standard input."""
    return subprocess.run(
        command, input=text, capture_output=True, text=True, check=False, timeout=120
    )


def _text(block: Block) -> None:
    """Check that each line of a text block is part of a line of some transcript."""
    paths = (path for name in FOLDERS for path in (block.root / name).rglob("*.txt"))
    lines = (line for path in paths for line in path.read_text("utf-8").splitlines())
    known = {" ".join(line.split()) for line in lines}
    for number, line in enumerate(block.code.splitlines(), 1):
        words = " ".join(line.split())
        if words and words not in known and not any(words in other for other in known):
            message = (
                f"no program printed this line: {words!r}. A block of the language `text` must "
                f"quote a transcript or be the expected output of a block"
            )
            raise block.error(message, block.fence.line + number)


def _displayed_only(_block: Block) -> None:
    """Accept any text: the tests neither run nor parse a block of this language."""


def _markdown(block: Block) -> None:
    """Check an example page for authors: it has text, and each of its callouts has a quote."""
    lists = block.code.split('<div class="callouts" markdown>')[1:]
    items = [line for part in lists for line in part.splitlines() if re.match(r"\d+\. ", line)]
    if not block.code.strip() or any("`" not in line for line in items):
        raise block.error("this example has no text, or one of its callouts has no quote")


RUNS: dict[str, Callable[[Block, CheckOptions], float]] = {
    "python": _python,
    "bash": _shell,
    "console": _console,
}
CHECKS: dict[str, Callable[[Block], None]] = {
    "cpp": partial(_compile, compiler=_GXX, suffix=".cpp"),
    "cuda": partial(_compile, compiler=_NVCC, suffix=".cu"),
    "yaml": _yaml,
    "toml": partial(_parse, language="TOML", parse=tomllib.loads),
    "dockerfile": _displayed_only,
    "markdown": _markdown,
    "text": _text,
}
ALIASES = {
    "py": "python",
    "sh": "bash",
    "shell": "bash",
    "c++": "cpp",
    "cu": "cuda",
    "yml": "yaml",
}
LANGUAGES = {  # suffix of a file → languages of the code blocks that may embed it
    ".py": {"python"},
    ".cu": {"cuda"},
    ".cpp": {"cpp"},
    ".sh": {"bash"},
    ".txt": {"console", "text"},
}
