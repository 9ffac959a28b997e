"""Fences: the code blocks of a chapter, and what checks each language.

`worldsize.model.page` takes the page apart; pytest-codeblocks says which fences belong
together, by
markers that work as its documentation says::

    <!--pytest-codeblocks:cont-->              this block goes on where the one before it ended
    <!--pytest-codeblocks:expected-output-->   the next fence is what this block prints

Where the two do not see the same blocks, the page is refused. A block is left out only by a
reason, which the page shows, in the fence's header: `bash skip="needs two machines"`.
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
    """One block of a chapter (with the fences that continue it, and that of its output)."""

    root: Path
    page: Path
    fence: Fence
    parts: list[tuple[int, str]] = field(default_factory=list)  # (line in the page, code)
    expected: Fence | None = None

    @property
    def code(self) -> str:
        return "".join(code for _, code in self.parts)

    @property
    def skip(self) -> str | None:
        """Why it is not run, if it is not."""
        return self.fence.options.get("skip")

    @property
    def name(self) -> str:
        """The page's path in the book: ``docs/02_ddp.md``."""
        return self.page.relative_to(self.root).as_posix()

    def error(self, message: str, line: int = 0) -> BookError:
        """A message with its line in the page, by default that of the opening backticks."""
        return BookError(f"{self.name}:{line or self.fence.line}: {message}")

    def invalid(self, what: str, why: object, line: int = 0) -> BookError:
        """The same for the ``line``-th line of a block that is not a valid ``what``."""
        return self.error(f"not a valid {what}: {why}", self.fence.line + line)

    @property
    def runs(self) -> bool:
        """Whether its code is run, by itself and not as part of a program."""
        language = ALIASES.get(self.fence.language, self.fence.language)
        return language in RUNS and not self.fence.has_only_embeds and not self.skip

    def inputs(self, device: str = "cpu") -> tuple[str | Path, ...]:
        """What its outcome depends on; nothing for what is cheap, and so always checked."""
        if self.fence.has_only_embeds or self.fence.language in {"text", "dockerfile"}:
            return ()
        expected = repr(self.expected and self.expected.lines)
        gpus = "" if device == "cpu" else runner.describe_device(device)
        return (gpus, self.fence.header, self.code, expected, *self.named().values())

    def named(self) -> dict[str, Path]:
        """The files of the book that it names: programs, the labs as they stand."""
        folders = "|".join(LABS)
        files = {}
        if re.search(rf"(?<![\w/])({folders})/", self.code):
            files |= lab_files(self.root)
        for name in re.findall(r"(?<![\w/])snippets/[\w./-]+", self.code):
            if is_program(self.root / name, self.root) and (self.root / name).exists():
                files[name] = self.root / name
        return files


# --- finding ---------------------------------------------------------------------------------

_REFUSED = {
    r"\s*(~{3,}|>\s*(`{3,}|~{3,}))": "nothing would run this block: open it with backticks, "
    "outside a block quote",
    r"\s*<!--[-\s]*pytest\.mark\.skip": "skip a block by a reason that the reader sees: "
    '```bash skip="why"',
}


def extract(path: Path, root: Path) -> list[Block]:
    """Every block of a page; raises BookError where one cannot be read or embeds nothing."""
    name, page = path.relative_to(root).as_posix(), read(path)
    for number, line in page.prose():
        for pattern, message in _REFUSED.items():
            if re.match(pattern, line):
                raise BookError(f"{name}:{number}: {message}")
    for embed in page.stray_embeds:
        raise BookError(f"{name}:{embed.line}: an embed stands inside a fence, not by itself")
    check_embeds(path, root)
    seen = _seen_by_codeblocks(page, name)
    blocks: list[Block] = []
    rest = ""  # of the last block's code, still to come from fences that continue it
    for fence in page.fences:
        text, first = _bare("\n".join(fence.lines)), fence.line in seen
        if first:
            found = seen.pop(fence.line)
            rest = _bare(found.code)
            blocks.append(Block(root, path, fence))
        if rest.startswith(text) and (rest or first):
            rest = rest.removeprefix(text)
            text = textwrap.dedent("".join(f"{line}\n" for line in expand_embeds(fence, root)))
            blocks[-1].parts.append((fence.line + 1, text))
        elif blocks and text == _bare(found.expected_output):
            blocks[-1].expected = fence
        else:
            seen[fence.line] = None  # it finds none here, or ends it elsewhere
            break
    if seen:
        raise BookError(f"{name}:{min(seen)}: pytest-codeblocks sees another block here")
    return blocks


def _seen_by_codeblocks(page: Page, name: str) -> dict[int, CodeBlock]:
    """The blocks that pytest-codeblocks finds, by the line that opens them."""
    from pytest_codeblocks import extract_from_buffer  # a machine for programs may lack it

    try:
        text = io.StringIO("\n".join(page.lines))
        found = extract_from_buffer(text, max_num_lines=len(page.lines) + 1)
    except RuntimeError as error:
        line, why = page.fences[-1].line if page.fences else 1, str(error)
        if "no previous code block" in why:
            line, why = page.fences[0].line, "there is no block before this one to go on from"
        raise BookError(f"{name}:{line}: {why}") from None
    return {block.lineno: block for block in found}


def _bare(code: str | None) -> str | None:
    """Code without blanks: pytest-codeblocks drops the empty lines of an indented block."""
    return None if code is None else "".join(code.split())


# --- checking --------------------------------------------------------------------------------


def check(block: Block, options: CheckOptions) -> float:
    """Run, compile or validate a block; return the seconds its commands took.

    Raises BookError with the line of the page. Recording writes the output below a block into
    the page.
    """
    written, embeds = block.fence.language, block.fence.embeds
    language = ALIASES.get(written, written)
    if not language:
        raise block.error("a fence without a language: nothing can check it")
    if language not in CHECKS and language not in RUNS:
        known = ", ".join(sorted([*CHECKS, *RUNS, *ALIASES]))
        raise block.error(f"nothing handles the language {written!r}; known: {known}")
    if block.fence.has_only_embeds:
        paths = [block.root / embed.file for embed in embeds]
        for embed, path in zip(embeds, paths, strict=True):
            if language not in LANGUAGES.get(path.suffix, {language}):
                raise block.error(f"{embed.target} in a fence of language {written!r}")
            if transcript_device(path) and owning_program(path, block.root) is None:
                raise block.error(f"{embed.target} is the transcript of no program")
        if all(transcript_device(path) or is_program(path, block.root) for path in paths):
            return 0.0  # its own test runs it
    if language in RUNS:
        if options.device != "cpu" or language == "bash":  # which takes a shell
            options = replace(options, launcher=None)
        try:
            return RUNS[language](block, options)
        except BookError:
            if not options.launcher:
                raise
        as_typed = replace(options, launcher=None)
        return RUNS[language](block, as_typed)
    CHECKS[language](block)
    return 0.0


# --- what is run -----------------------------------------------------------------------------


def _run(
    block: Block,
    command: str,
    folder: Path,
    options: CheckOptions,
    line: int = 0,
    status: int = 0,
) -> runner.Result:
    """Run a command; raise BookError where it hangs, fails or leaves something running."""
    launcher = options.launcher
    if launcher and not launcher.accepts(command, block.name):
        launcher = None
    limit = min(options.limit, PREFORK_LIMIT) if launcher else options.limit
    result = runner.run(command, folder, limit=limit, device=options.device, launcher=launcher)
    if result.leftovers:
        raise block.error(result.leftovers_message)
    if result.timed_out or result.status != status:
        why = f"{block.fence.language} block failed: {runner.explain(result)}"
        raise block.error(why, line or result.line_in(str(block.page)) or 0)
    return result


def _printed(block: Block, result: runner.Result) -> list[str]:
    try:
        return output_lines(result.stdout)
    except ValueError as error:
        raise block.error(str(error)) from None


def _compare(block: Block, result: runner.Result, options: CheckOptions) -> None:
    """Hold what a block printed to the fence below it."""
    if block.expected is None:
        return
    actual = _printed(block, result)
    expected = output_lines("\n".join(map(block.expected.dedent, block.expected.lines)))
    if diff := difference(expected, actual):
        if options.record:
            _write_expected(block, actual)
            return
        what = f"the block on line {block.fence.line} printed something else"
        hint = f"if that is right: make record WHAT={block.name}"
        raise block.error("\n".join([f"{what}:", *diff, hint]), block.expected.line)


def _write_expected(block: Block, actual: list[str]) -> None:
    """Rewrite the output fence, found again where it moved because an earlier one grew."""
    page, wanted = read(block.page), block.expected
    same = (fence for fence in page.fences if fence.lines == wanted.lines)
    fence = min(same, key=lambda fence: abs(fence.line - wanted.line))
    body = [fence.indent + line if line else "" for line in actual]
    lines = [*page.lines[: fence.line], *body, *page.lines[fence.end - 1 :]]
    atomic_write(block.page, "\n".join(lines))


# Runs the parts of a block, each at its own line of the chapter, in one namespace.
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
        # the block is handed over beside the folder, which stays empty
        parts, bootstrap = folder.parent / "block.json", folder.parent / "block.py"
        parts.write_text(json.dumps([str(block.page), block.parts]), "utf-8")
        bootstrap.write_text(_BOOTSTRAP, "utf-8")
        result = _run(block, f"python {bootstrap} {parts}", folder, options)
    _compare(block, result, options)
    return result.seconds


def _shell(block: Block, options: CheckOptions) -> float:
    if wrong := _shell_error(block.code):
        raise block.error(f"this is not a shell script: {wrong}")
    if block.skip:
        return 0.0
    with runner.empty_folder() as folder:
        stage_files(block.named(), folder)
        result = _run(block, f"set -euo pipefail\n{block.code}", folder, options)
    _compare(block, result, options)
    return result.seconds


def _shell_error(script: str) -> str:
    """What bash says is wrong with a script; nothing for one it can read."""
    done = _said(["bash", "-n"], script)
    return done.stderr.strip() if done.returncode else ""


def _console(block: Block, options: CheckOptions) -> float:
    transcript = Transcript.parse(block.code, block.name, block.fence.line)
    if block.skip:
        return 0.0
    seconds = 0.0
    with runner.empty_folder() as folder:
        stage_files(block.named(), folder)
        for command in transcript.commands:
            line = block.fence.line + command.line
            result = _run(block, command.command_line, folder, options, line, command.status)
            seconds += result.seconds
            if diff := difference(command.output, _printed(block, result)):
                what = f"`{command.command_line}` printed something else:"
                raise block.error("\n".join([what, *diff]), line)
    return seconds


# --- what is compiled, or valid --------------------------------------------------------------

_NVCC = [
    "nvcc", "-c", "-gencode", "arch=compute_80,code=sm_80", "-gencode",
    "arch=compute_90,code=sm_90", "--Werror", "all-warnings",
]  # fmt: skip
_GXX = ["g++", "-c", "-std=c++17", "-Wall", "-Wextra", "-Werror"]


def _compiles(block: Block, compiler: list[str], suffix: str) -> None:
    if shutil.which(compiler[0]) is None:
        pytest.skip(f"{compiler[0]} is not on this machine")
    with runner.empty_folder() as folder:
        source = folder / f"block{suffix}"
        source.write_text(block.code)
        command = [*compiler, str(source), "-o", str(folder / "block.o")]
        done = _said(command)
    if done.returncode:
        message = done.stderr.replace(str(source), "block").strip()
        at = re.search(r"block[:(](\d+)", message)
        line = block.fence.line + int(at[1] if at else 0)
        raise block.error(f"it does not compile:\n{message[:2000]}", line)


def _parsed(block: Block, what: str, parse: Callable[[str], Any]) -> Any:
    """What a block of data says; raises BookError with the line where it cannot be read."""
    try:
        return parse(block.code)
    except Exception as error:  # each library has a class of its own
        lines = re.findall(r"line (\d+)", str(error))
        raise block.invalid(what, error, int(lines[-1]) if lines else 0) from None


def _yaml(block: Block) -> None:
    import yaml

    documents = _parsed(block, "YAML", lambda code: list(yaml.safe_load_all(code)))
    workflow = block.fence.options.get("title", "").startswith(".github/workflows/")
    for document in documents:
        known = document if isinstance(document, dict) else {}
        if workflow and "jobs" not in known:
            raise block.invalid("workflow", "it has no jobs")
        if "apiVersion" in known and not known.get("kind"):
            raise block.invalid("Kubernetes object", "it has no kind")


def _said(command: list[str], given: str = "") -> subprocess.CompletedProcess[str]:
    """What a checker says of a text."""
    return subprocess.run(
        command, input=given, capture_output=True, text=True, check=False, timeout=120
    )


def _text(block: Block) -> None:
    """Plain text is a quotation: each line stands in a transcript, or is a block's output."""
    paths = (path for name in FOLDERS for path in (block.root / name).rglob("*.txt"))
    lines = (line for path in paths for line in path.read_text("utf-8").splitlines())
    known = {" ".join(line.split()) for line in lines}
    for number, line in enumerate(block.code.splitlines(), 1):
        words = " ".join(line.split())
        if words and words not in known and not any(words in other for other in known):
            message = (
                f"no program printed this line: {words!r}; "
                f"a text fence quotes a transcript, or is the expected output of a block"
            )
            raise block.error(message, block.fence.line + number)


def _displayed_only(_block: Block) -> None:
    """Accept any text: the tests neither run nor parse a block of this language."""


def _markdown(block: Block) -> None:
    """An example for authors: a part of a page, in which each callout has a quote."""
    lists = block.code.split('<div class="callouts" markdown>')[1:]
    items = [line for part in lists for line in part.splitlines() if re.match(r"\d+\. ", line)]
    if not block.code.strip() or any("`" not in line for line in items):
        raise block.error("an example without text, or a callout without a quote")


RUNS: dict[str, Callable[[Block, CheckOptions], float]] = {
    "python": _python,
    "bash": _shell,
    "console": _console,
}
CHECKS: dict[str, Callable[[Block], None]] = {
    "cpp": partial(_compiles, compiler=_GXX, suffix=".cpp"),
    "cuda": partial(_compiles, compiler=_NVCC, suffix=".cu"),
    "yaml": _yaml,
    "toml": partial(_parsed, what="TOML", parse=tomllib.loads),
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
LANGUAGES = {  # in which a file may be embedded
    ".py": {"python"},
    ".cu": {"cuda"},
    ".cpp": {"cpp"},
    ".sh": {"bash"},
    ".txt": {"console", "text"},
}
