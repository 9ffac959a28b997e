"""Fences: the code blocks of a chapter, and what checks each language.

pytest-codeblocks finds the blocks. In front of it stand two things it does not do: the embeds
are resolved, and the header of a fence (`python title="x.py" hl_lines="2"`) is taken apart. Its
own markers work as its documentation says::

    <!--pytest-codeblocks:cont-->              this block goes on where the one before it ended
    <!--pytest-codeblocks:expected-output-->   the next fence is what this block prints

A block is left out only by a reason, which the page shows, in the fence's header:
`bash skip="needs two machines"`.
"""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from book import BookError, runner
from book.embeds import EMBED, expand, target_file
from book.program import FOLDERS, SUFFIXES, Program, copy_labs, is_program, replace
from book.transcript import Transcript, TranscriptError, difference, output_lines

_HEADER = re.compile(r"^\{?\s*\.?(?P<language>[\w+#-]*)(?P<options>.*?)\}?\s*$")
_OPTION = re.compile(r'([\w-]+)=(?:"([^"]*)"|(\S+))')
_CONT = re.compile(r"<!--[-\s]*pytest-codeblocks:\s*cont[-\s]*-->")
_EXPECTED = re.compile(r"<!--[-\s]*pytest-codeblocks:\s*expected-output")


@dataclass
class Fence:
    """One block of a chapter (with the blocks that continue it)."""

    root: Path
    page: Path
    line: int  # of the opening backticks
    language: str
    options: dict[str, str]
    code: str
    expected: str | None = None
    expected_line: int = 0
    embeds: list[str] = field(default_factory=list)  # targets of the embeds it consists of
    segments: list[tuple[int, str]] = field(default_factory=list)  # (line in the page, code)

    @property
    def where(self) -> str:
        """``docs/02_ddp.md:57``."""
        return f"{self.page.relative_to(self.root).as_posix()}:{self.line}"

    @property
    def skip(self) -> str | None:
        """Why it is not run, if it is not."""
        return self.options.get("skip")


def extract(page: Path, root: Path) -> list[Fence]:
    """Every fence of a page; raises BookError where one cannot be read or embeds nothing."""
    from pytest_codeblocks import extract_from_buffer

    name = page.relative_to(root).as_posix()
    written = page.read_text("utf-8").split("\n")
    _refuse_hidden_fences(written, name)
    text, origin = expand("\n".join(written), root, name)
    lines = text.split("\n")

    # `cont` and `expected-output` join blocks; keep them apart, to know each one's own line
    joins, kinds = {}, {"cont": _CONT, "expected": _EXPECTED}
    for number, line in enumerate(lines, 1):
        for kind, pattern in kinds.items():
            if pattern.match(line.strip()):
                joins[number] = kind
                lines[number - 1] = ""
        if re.match(r"<!--[-\s]*pytest\.mark\.skip", line.strip()):
            raise BookError(
                f"{name}:{origin[number - 1]}: skip a block by a reason that the reader sees: "
                f'```bash skip="why"'
            )
    try:
        blocks = extract_from_buffer(io.StringIO("\n".join(lines)), max_num_lines=10**6)
    except RuntimeError as error:
        last = max(
            (n for n, line in enumerate(lines, 1) if line.lstrip().startswith("```")), default=1
        )
        raise BookError(f"{name}:{origin[last - 1]}: {error}") from None

    fences: list[Fence] = []
    ends = 0
    for block in blocks:
        header = _HEADER.match(block.syntax or "")
        options = {
            k: a or b for k, a, b in _OPTION.findall(header["options"] if header else "")
        }
        start = origin[block.lineno - 1]
        between = [joins[n] for n in range(ends, block.lineno) if n in joins]
        ends = block.lineno + block.code.count("\n") + 1
        fence = Fence(
            root,
            page,
            start,
            header["language"] if header else "",
            options,
            block.code,
            segments=[(start + 1, block.code)],
            embeds=_embeds_only(written, start),
        )
        if between and not fences:
            raise BookError(f"{name}:{start}: there is no block before this one to go on from")
        if "cont" in between:
            fences[-1].segments += fence.segments
            fences[-1].code += fence.code
        elif "expected" in between:
            fences[-1].expected, fences[-1].expected_line = fence.code, start
        else:
            fences.append(fence)
    return fences


def _refuse_hidden_fences(lines: list[str], name: str) -> None:
    """Blocks that pytest-codeblocks does not see must not exist."""
    inside: str | None = None
    for number, line in enumerate(lines, 1):
        bare = line.strip()
        ticks = re.match(r"`{3,}", bare)
        if inside is not None:
            if bare.startswith(inside) and not bare.strip("`"):
                inside = None
        elif ticks:
            inside = ticks[0]
        elif re.match(r"(~{3,}|>\s*(`{3,}|~{3,}))", bare):
            raise BookError(
                f"{name}:{number}: nothing would run this block: open it with backticks, "
                f"outside a block quote"
            )
        elif EMBED.match(line):
            raise BookError(f"{name}:{number}: an embed stands inside a fence, not by itself")


def _embeds_only(written: list[str], start: int) -> list[str]:
    """The targets of the fence opened on line ``start``, if it consists of embeds alone."""
    targets = []
    for line in written[start:]:
        if line.strip().startswith("```"):
            break
        if match := EMBED.match(line):
            targets.append(match["target"])
        elif line.strip():
            return []
    return targets


# --- checking --------------------------------------------------------------------------------


def check(fence: Fence, *, limit: float, record: bool = False, warm=None) -> float:
    """Run, compile or validate a fence; return the seconds its commands took.

    Raises BookError with the line of the chapter. ``record`` writes the output below a block
    into the chapter.
    """
    if not fence.language:
        raise BookError(f"{fence.where}: a fence without a language: nothing can check it")
    handler = HANDLERS.get(fence.language)
    if handler is None:
        raise BookError(
            f"{fence.where}: nothing handles the language {fence.language!r}; "
            f"known: {', '.join(sorted(HANDLERS))}"
        )
    if fence.embeds:
        for target in fence.embeds:
            _check_embed(fence, target)
        if all(_is_covered(fence, target) for target in fence.embeds):
            return 0.0
    return handler(fence, Run(limit, record, warm)) or 0.0


@dataclass
class Run:
    """How the blocks of this session are run."""

    limit: float
    record: bool
    warm: object


def _is_covered(fence: Fence, target: str) -> bool:
    """Whether what a fence embeds is run as a program, or is a transcript of one."""
    path = fence.root / target_file(target)
    return is_program(path, fence.root) or path.name.endswith((".cpu.txt", ".cuda.txt"))


def _check_embed(fence: Fence, target: str) -> None:
    path = fence.root / target_file(target)
    wanted = {
        ".py": {"python", "py"},
        ".cu": {"cuda", "cu"},
        ".cpp": {"cpp", "c++"},
        ".sh": {"bash", "sh", "shell"},
        ".txt": {"console", "text"},
    }.get(path.suffix)
    if wanted and fence.language not in wanted:
        raise BookError(f"{fence.where}: {target} in a fence of language {fence.language!r}")
    if path.name.endswith((".cpu.txt", ".cuda.txt")):
        stem = re.sub(r"\.(cpu|cuda)\.txt$", "", path.name)
        if not any((path.parent / (stem + suffix)).exists() for suffix in SUFFIXES):
            raise BookError(f"{fence.where}: {target} is the transcript of no program")


def _run(fence: Fence, command: str, folder: Path, run: Run) -> runner.Result:
    """Run a command for a fence; raise BookError where it hangs, fails or leaves something."""
    warm = run.warm if run.warm is not None and run.warm.takes(command) else None
    result = runner.run(command, folder, limit=run.limit, warm=warm)
    if result.leftovers:
        raise BookError(
            f"{fence.where}: left processes running (killed now):\n"
            + "\n".join(f"  {left}" for left in result.leftovers)
        )
    return result


def _failed(fence: Fence, result: runner.Result, line: int | None = None) -> BookError:
    page = fence.page.relative_to(fence.root).as_posix()
    where = f"{page}:{line}" if line else fence.where
    return BookError(f"{where}: {fence.language} block failed: {runner.explain(result)}")


def _compare(fence: Fence, result: runner.Result, run: Run) -> None:
    """Hold what a block printed to the fence below it."""
    if fence.expected is None:
        return
    expected = output_lines(fence.expected)
    actual = output_lines(result.stdout)
    if diff := difference(expected, actual):
        if run.record:
            _write_expected(fence, actual)
            return
        page = fence.page.relative_to(fence.root).as_posix()
        raise BookError(
            f"{page}:{fence.expected_line}: the block on line {fence.line} printed something "
            f"else:\n" + "\n".join(diff) + f"\nif that is right: make record WHAT={page}"
        )


def _write_expected(fence: Fence, actual: list[str]) -> None:
    """Rewrite the output fence, found again where it moved because an earlier one grew."""
    lines = fence.page.read_text("utf-8").split("\n")
    opening = next(
        n
        for n in sorted(range(len(lines)), key=lambda n: abs(n - fence.expected_line + 1))
        if lines[n].lstrip().startswith("```")
        and textwrap.dedent("\n".join(lines[n + 1 : n + 1 + fence.expected.count("\n")]))
        == textwrap.dedent(fence.expected.rstrip("\n"))
    )
    indent = lines[opening][: len(lines[opening]) - len(lines[opening].lstrip())]
    size = fence.expected.count("\n")
    lines[opening + 1 : opening + 1 + size] = [indent + line if line else "" for line in actual]
    replace(fence.page, "\n".join(lines))


# Runs the segments of a block, each at its own line of the chapter, in one namespace.
_BOOTSTRAP = """\
import json, sys
page, segments = json.loads(open(sys.argv.pop(), encoding="utf-8").read())
scope = {"__name__": "__main__", "__builtins__": __builtins__}
for line, code in segments:
    exec(compile("\\n" * (line - 1) + code, page, "exec"), scope)
"""


def _python(fence: Fence, run: Run) -> float:
    segments = [(line, textwrap.dedent(code)) for line, code in fence.segments]
    for line, code in segments:
        try:
            compile("\n" * (line - 1) + code, str(fence.page), "exec")
        except SyntaxError as error:
            page = fence.page.relative_to(fence.root).as_posix()
            raise BookError(f"{page}:{error.lineno}: {error.msg}") from None
    if fence.skip:
        return 0.0
    with runner.empty_folder() as folder:
        # the block is handed over beside the folder, which stays empty
        block, bootstrap = folder.parent / "block.json", folder.parent / "block.py"
        block.write_text(json.dumps([str(fence.page), segments]), "utf-8")
        bootstrap.write_text(_BOOTSTRAP, "utf-8")
        result = _run(fence, f"python {bootstrap} {block}", folder, run)
    if result.timed_out or result.status:
        text = "\n".join(stack for _, stack in result.stacks) or result.stderr
        lines = re.findall(rf'File "{re.escape(str(fence.page))}", line (\d+)', text)
        raise _failed(fence, result, int(lines[-1]) if lines else None)
    _compare(fence, result, run)
    return result.seconds


def _shell(fence: Fence, run: Run) -> float:
    checked = subprocess.run(
        ["bash", "-n"], input=fence.code, capture_output=True, text=True, check=False
    )
    if checked.returncode:
        raise BookError(f"{fence.where}: this is not a shell script: {checked.stderr.strip()}")
    if fence.skip:
        return 0.0
    with runner.empty_folder() as folder:
        _place_named(fence, fence.code, folder)
        script = "set -euo pipefail\n" + textwrap.dedent(fence.code)
        result = _run(fence, script, folder, run)
    if result.timed_out or result.status:
        raise _failed(fence, result)
    _compare(fence, result, run)
    return result.seconds


def _console(fence: Fence, run: Run) -> float:
    try:
        transcript = Transcript.parse(textwrap.dedent(fence.code))
    except TranscriptError as error:
        page = fence.page.relative_to(fence.root).as_posix()
        raise BookError(f"{page}:{fence.line + error.line}: {error}") from None
    if fence.skip:
        return 0.0
    seconds = 0.0
    with runner.empty_folder() as folder:
        _place_named(fence, fence.code, folder)
        for step in transcript.steps:
            line = fence.line + step.line
            result = _run(fence, step.command, folder, run)
            seconds += result.seconds
            if result.timed_out or result.status != step.status:
                raise _failed(fence, result, line)
            if diff := difference(step.output, output_lines(result.stdout)):
                page = fence.page.relative_to(fence.root).as_posix()
                raise BookError(
                    f"{page}:{line}: `{step.command}` printed something else:\n"
                    + "\n".join(diff)
                )
    return seconds


def _place_named(fence: Fence, text: str, folder: Path) -> None:
    """Give a command the files of the book that it names: programs, the labs as they stand."""
    if re.search(r"(?<![\w/])(labs|assessment)/", text):
        copy_labs(fence.root, folder)
    for name in set(re.findall(r"(?<![\w/])snippets/[\w./-]+", text)):
        if is_program(fence.root / name, fence.root) and (fence.root / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(Program(fence.root, fence.root / name).path, folder / name)


def _compiled(compiler: list[str], suffix: str) -> Callable[[Fence, Run], float]:
    def compile_it(fence: Fence, run: Run) -> float:
        if shutil.which(compiler[0]) is None:
            import pytest

            pytest.skip(f"{compiler[0]} is not on this machine")
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, f"block{suffix}")
            source.write_text(fence.code)
            result = subprocess.run(
                [*compiler, str(source), "-o", str(Path(folder, "block.o"))],
                capture_output=True,
                text=True,
                check=False,
            )
        if result.returncode:
            message = result.stderr.replace(str(source), "block").strip()
            at = re.search(rf"block(?:{re.escape(suffix)})?[:(](\d+)", message)
            page = fence.page.relative_to(fence.root).as_posix()
            line = fence.line + int(at[1]) if at else fence.line
            raise BookError(f"{page}:{line}: it does not compile:\n{message[:2000]}")
        return 0.0

    return compile_it


def _yaml(fence: Fence, run: Run) -> None:
    import yaml

    try:
        documents = list(yaml.safe_load_all(fence.code))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        raise _not_a(fence, "YAML", str(error), mark.line + 1 if mark else 0) from None
    for document in documents:
        if fence.options.get("title", "").startswith(".github/workflows/") and not (
            isinstance(document, dict) and "jobs" in document
        ):
            raise _not_a(fence, "workflow", "it has no jobs", 0)
        if isinstance(document, dict) and "apiVersion" in document and not document.get("kind"):
            raise _not_a(fence, "Kubernetes object", "it has no kind", 0)


def _json(fence: Fence, run: Run) -> None:
    try:
        value = json.loads(fence.code)
    except ValueError as error:
        raise _not_a(fence, "JSON", str(error), getattr(error, "lineno", 0)) from None
    if isinstance(value, dict) and _claims_deepspeed(fence, value):
        _check_deepspeed(fence, value)


def _claims_deepspeed(fence: Fence, value: dict) -> bool:
    title = fence.options.get("title", "")
    keys = {
        "zero_optimization",
        "train_micro_batch_size_per_gpu",
        "zero_allow_untested_optimizer",
    }
    return bool(re.search(r"deepspeed|^ds_|/ds_", title) or keys & set(value))


def _check_deepspeed(fence: Fence, value: dict) -> None:
    """Hold a DeepSpeed config to DeepSpeed's own models of it, names of keys included."""
    program = textwrap.dedent("""\
        import json, logging, os, sys
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        logging.disable(logging.CRITICAL)
        from deepspeed.runtime.config import DeepSpeedConfig
        import deepspeed.runtime.config as config, deepspeed.runtime.constants as constants
        import inspect
        value = json.load(sys.stdin)
        sources = inspect.getsource(config) + inspect.getsource(constants)
        quoted = lambda key: f'"{key}"' in sources or f"'{key}'" in sources
        unknown = [key for key in value if not quoted(key)]
        if unknown:
            sys.exit(f"DeepSpeed knows no key {', '.join(unknown)}")
        try:
            DeepSpeedConfig(value)
        except Exception as error:
            sys.exit(f"{type(error).__name__}: {error}")
        """)
    result = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps(value),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    if result.returncode:
        said = result.stderr.strip().splitlines()
        raise _not_a(fence, "DeepSpeed config", "\n".join(said[-6:]), 0)


def _toml(fence: Fence, run: Run) -> None:
    try:
        tomllib.loads(fence.code)
    except tomllib.TOMLDecodeError as error:
        at = re.search(r"line (\d+)", str(error))
        raise _not_a(fence, "TOML", str(error), int(at[1]) if at else 0) from None


# what may begin a line of a Dockerfile, and which of them have arguments of their own grammar
_INSTRUCTIONS = {
    "ADD", "ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK", "LABEL",
    "ONBUILD", "RUN", "SHELL", "STOPSIGNAL", "USER", "VOLUME", "WORKDIR",
}  # fmt: skip


def _dockerfile(fence: Fence, run: Run) -> None:
    """Hold a Dockerfile to what can be known without building it.

    Its instructions exist, FROM comes first, a form with brackets is JSON, what RUN starts is
    a shell script, what COPY takes is in this repository, and no variable is undeclared.
    """
    joined = re.sub(r"\\\n", lambda m: " \0", fence.code)  # keeps the count of lines
    number, begun, declared = 1, False, {"PATH", "HOME"}
    for logical in joined.split("\n"):
        at, number = number, number + logical.count("\0") + 1
        line = logical.replace("\0", "").strip()
        if not line or line.startswith("#"):
            continue
        word, _, rest = line.partition(" ")
        name, rest = word.upper(), rest.strip()
        if name not in _INSTRUCTIONS or word != name or not rest:
            raise _not_a(fence, "Dockerfile", f"{line!r} is no instruction", at)
        begun = begun or name == "FROM"
        if not begun and name != "ARG":
            raise _not_a(fence, "Dockerfile", f"{name} stands before FROM", at)
        if name in {"ARG", "ENV"}:
            keys = re.findall(r"(?:^|\s)(\w+)(?==|$)", rest)
            if not keys or (name == "ENV" and "=" not in rest):
                raise _not_a(fence, "Dockerfile", f"{name} without a name", at)
            declared |= set(keys)
        if name == "COPY" and "--from" not in rest:
            *sources, _ = [part for part in rest.split() if not part.startswith("--")] or [""]
            missing = [part for part in sources if not (fence.root / part).exists()]
            if missing or not sources:
                raise _not_a(fence, "Dockerfile", f"there is no {missing or 'source'}", at)
        if rest.startswith("["):
            try:
                json.loads(rest)
            except ValueError as error:
                raise _not_a(fence, "Dockerfile", f"{name}: {error}", at) from None
        elif name == "RUN":
            checked = subprocess.run(
                ["bash", "-n"], input=rest, capture_output=True, text=True, check=False
            )
            if checked.returncode:
                raise _not_a(fence, "Dockerfile", f"RUN: {checked.stderr.strip()}", at)
        unknown = set(re.findall(r"\$\{?(\w+)", rest)) - declared
        if unknown and name != "CMD":
            raise _not_a(fence, "Dockerfile", f"nothing sets {', '.join(sorted(unknown))}", at)
    if not begun:
        raise _not_a(fence, "Dockerfile", "it has no FROM", 0)


def _not_a(fence: Fence, what: str, why: str, line: int) -> BookError:
    page = fence.page.relative_to(fence.root).as_posix()
    return BookError(f"{page}:{fence.line + line}: not a valid {what}: {why}")


def _text(fence: Fence, run: Run) -> None:
    """Plain text is a quotation: each line stands in a transcript, or is a block's output."""
    known = set()
    for folder in FOLDERS:
        for path in (fence.root / folder).rglob("*.txt"):
            known |= {" ".join(line.split()) for line in path.read_text("utf-8").splitlines()}
    for number, line in enumerate(fence.code.splitlines(), 1):
        words = " ".join(line.split())
        if words and words not in known and not any(words in other for other in known):
            page = fence.page.relative_to(fence.root).as_posix()
            raise BookError(
                f"{page}:{fence.line + number}: no program printed this line: {words!r}; "
                f"a text fence quotes a transcript, or is the expected output of a block"
            )


_NVCC = [
    "nvcc", "-c", "-gencode", "arch=compute_80,code=sm_80", "-gencode",
    "arch=compute_90,code=sm_90", "--Werror", "all-warnings",
]  # fmt: skip
_GXX = ["g++", "-c", "-std=c++17", "-Wall", "-Wextra", "-Werror"]

HANDLERS: dict[str, Callable[[Fence, Run], float | None]] = {
    "python": _python,
    "py": _python,
    "bash": _shell,
    "sh": _shell,
    "shell": _shell,
    "console": _console,
    "cpp": _compiled(_GXX, ".cpp"),
    "c++": _compiled(_GXX, ".cpp"),
    "cuda": _compiled(_NVCC, ".cu"),
    "cu": _compiled(_NVCC, ".cu"),
    "yaml": _yaml,
    "yml": _yaml,
    "json": _json,
    "toml": _toml,
    "dockerfile": _dockerfile,
    "text": _text,
}
