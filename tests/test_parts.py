"""Tests of single parts of the packages model, execution and testing."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pytest
from conftest import RECORDED, Book
from processes import HANG, LAUNCHER

from worldsize.execution import gpu_clocks, prefork, requirements, runner
from worldsize.model import ROOT, BookError, atomic_write, fingerprint, page
from worldsize.model.page import Embed, resolve
from worldsize.model.program import Program, gpu_kind, is_orphan, is_program, transcript_device
from worldsize.model.transcript import (
    Clocks,
    Tolerances,
    Transcript,
    difference,
    output_lines,
    same_line,
)
from worldsize.site import template
from worldsize.testing import code_blocks, figures, mutation, plugin, program_check, shown
from worldsize.testing.result_cache import ResultCache
from worldsize.tools import transcript_diff

INPUTS = ["docs/contributing/programs.md", "src"]


# --- files -----------------------------------------------------------------------------------


def test_a_file_is_written_completely_or_not_at_all(tmp_path: Path) -> None:
    path, folder = tmp_path / "file", tmp_path / "folder"
    path.write_text("old")
    folder.mkdir()
    with path.open() as reader:
        atomic_write(path, "new", 0o755)
        assert (reader.read(), path.read_text()) == ("old", "new")
    assert path.stat().st_mode & 0o777 == 0o755
    with pytest.raises(OSError):
        atomic_write(folder, "new")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file", "folder"]


def test_a_change_of_an_input_changes_the_digest(tmp_path: Path, monkeypatch) -> None:
    digests = set()

    def is_new(*parts: str | Path) -> bool:
        """Return whether the digest differs from all digests before."""
        count = len(digests)
        digests.add(fingerprint.digest(tmp_path, *parts))
        return len(digests) > count

    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "a").write_text("1")
    assert is_new(folder)
    (folder / "a").rename(folder / "b")
    assert is_new(folder)
    (folder / "b").write_text("longer")
    assert is_new(folder)
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__/b.pyc").write_text("")
    assert not is_new(folder), "compiled files are no inputs"
    assert is_new("ab", "c") and is_new("a", "bc")
    monkeypatch.setattr(sys, "version", "3.99")
    fingerprint._installed_versions.cache_clear()
    assert is_new("a", "bc")
    monkeypatch.undo()
    fingerprint._installed_versions.cache_clear()


def test_the_cache_keeps_the_results_of_other_runs(tmp_path: Path) -> None:
    first, second = ResultCache(tmp_path), ResultCache(tmp_path)
    first.add({"a": "1", "b": "1"})
    second.add({"c": "1", "b": None})
    assert ResultCache(tmp_path).known == {"a": "1", "c": "1"}


def test_a_new_tool_on_the_path_changes_the_digest_of_a_whole_run(
    tmp_path: Path, monkeypatch
) -> None:
    (tmp_path / ".gitignore").write_text(".cache/\n")
    tools = tmp_path / ".cache/bin"
    tools.mkdir(parents=True)
    monkeypatch.setenv("PATH", str(tools))
    cache = ResultCache(tmp_path)
    before = cache.everything()
    assert cache.everything() == before
    os.utime(tools, (0, 0))  # installing a tool changes the time of its folder
    assert cache.everything() != before


# --- transcripts -----------------------------------------------------------------------------


def test_a_parsed_transcript_gives_the_same_text() -> None:
    text = RECORDED + "$ python a.py \\\n    --more\na path C:\\\nnext\n[exit status 3]\n$ ls\n"
    transcript = Transcript.parse(text)
    assert transcript.text() == text
    commands = transcript.commands
    assert [(each.command_line, each.output, each.status) for each in commands] == [
        ("python a.py \\\n    --more", ["a path C:\\", "next"], 3),
        ("ls", [], 0),
    ]
    with pytest.raises(BookError, match=r"t:3: this output is after `\[exit status"):
        Transcript.parse("$ false\n[exit status 1]\nmore\n", "t")
    assert output_lines("step 1\rstep 2\r\ndone  \n\n") == ["step 2", "done"]


def test_only_decimals_and_measured_numbers_of_an_output_may_differ() -> None:
    assert same_line("loss 0.50001", "loss 0.50002")
    assert not same_line("loss 0.5000", "loss 0.5021")
    assert not same_line("9 ranks", "8 ranks")
    for measured in ((), (".*",)):
        differs = difference(["≈2.0 s"], ["≈20.0 s"], Tolerances(measured))
        assert bool(differs) is not bool(measured)


# --- pages -----------------------------------------------------------------------------------


@pytest.fixture
def embedding(tmp_path: Path):
    """Return a function that returns the embedded lines of a part of a file."""
    (tmp_path / "book").mkdir()

    def embedded_lines(text: str, part: str, name: str = "a.py") -> list[str]:
        (tmp_path / "book/a.py").write_text(text)
        return resolve(Embed(1, "", f"{name}:{part}"), tmp_path / "book")

    return embedded_lines


def test_an_embed_contains_exactly_the_part_that_it_names(embedding, tmp_path: Path) -> None:
    text = """
class A:
    def run(self):
        return 1


@cache
@other
def run():
    return 2


def last():
    # --8<-- [start: part]
    return 3
    # --8<-- [end: part]
""".lstrip()
    assert embedding(text, "run") == ["@cache", "@other", "def run():", "    return 2"]
    assert embedding(text, "part") == ["return 3"]
    assert embedding(text, "last") == ["def last():", "    return 3"]
    assert embedding(text, "2:3") == ["def run(self):", "    return 1"]
    (tmp_path / "secret.txt").write_text("secret\n")
    with pytest.raises(BookError, match="does not exist"):
        embedding(text, "", "../secret.txt")


def test_a_page_has_the_anchors_and_code_blocks_that_markdown_finds() -> None:
    markdown = pytest.importorskip("markdown")
    text = "# A `b` c\n\n## Adam\n\n### [Adam](x.md), again\n\n## Adam\n\n## Adam { #own }\n"
    converter = markdown.Markdown(extensions=["toc", "attr_list"])
    converter.convert(text)
    ids, level = [], converter.toc_tokens
    while level:
        ids += [each["id"] for each in level]
        level = [child for each in level for child in each["children"]]
    assert sorted(ids) == sorted(page.parse(text).headings) and "adam_1" in ids
    fenced = page.parse("text\n\n````markdown\n```python\n# no heading\n```\n````\nmore\n")
    assert [(each.line, each.end) for each in fenced.fences] == [(3, 7)]
    assert [number for number, _ in fenced.prose()] == [1, 2, 8, 9] and not fenced.headings


# --- programs --------------------------------------------------------------------------------


def test_a_program_has_dependencies_imports_and_devices(book: Book) -> None:
    book.program("first", "print(1)\n", "$ python first.py\n$ python second.py\n")
    path = book.write("snippets/t/second.py", "def f():\n    import triton\n")
    first = Program(book.root, book.root / "snippets/t/first.py")
    assert [each.path.name for each in first.dependencies()] == ["second.py"]
    assert Program(book.root, path).imports("triton") == ["triton"]
    for device in ("rtx-4090", "cuda"):
        book.write(f"snippets/t/first.{device}.txt", "")
    assert first.devices == ["cpu", "cuda", "rtx-4090"]
    assert transcript_device(Path("first.rtx-4090.txt")) == "rtx-4090"


def test_a_link_is_no_program_and_a_file_without_a_program_is_an_orphan(book: Book) -> None:
    path = book.root / book.program("first", "print(1)\n", "$ python first.py\n")
    link = book.root / "labs/lab.py"
    link.symlink_to(path)
    assert is_program(path, book.root) and not is_program(link, book.root)
    for suffix in ("svg", "rtx-4090.txt", "a100.svg", "cuda.txt", "a100.txt"):
        of_first = book.write(f"snippets/t/first.{suffix}", "<svg/>")
        of_none = book.write(f"snippets/t/none.{suffix}", "<svg/>")
        assert not is_orphan(of_first, book.root) and is_orphan(of_none, book.root), suffix


# --- commands --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "program", "can_fork"),
    [
        ("torchrun --nproc-per-node=2 a.py", "", False),
        ("torchrun --nproc-per-node=2 a.py --x", "snippets/t/a.py", True),
        ("torchrun --nproc-per-node=2 --master-port=1 a.py", "snippets/t/a.py", True),
        ("TORCH_DISTRIBUTED_DEBUG=INFO python a.py", "snippets/t/a.py", True),
        ("OMP_NUM_THREADS=2 python a.py", "snippets/t/a.py", True),
        ("TORCH_LOGS=recompiles python a.py", "snippets/t/a.py", False),
        ('python a.py "b c"', "snippets/t/a.py", True),
        ('python a.py "$HOME"', "snippets/t/a.py", False),
        ('torchrun a.py 2>&1 | grep -o "b.*" | sort', "snippets/t/a.py", True),
        ("set -o pipefail; torchrun a.py 2>&1 | sort -u", "snippets/t/a.py", True),
        ("set -o pipefail; torchrun a.py | sort -u", "snippets/t/a.py", True),
        ("set -e; torchrun a.py | sort -u", "snippets/t/a.py", False),
        ("set -o pipefail; torchrun a.py", "snippets/t/a.py", False),
        ("python -m torch.distributed.launch a.py", "snippets/t/a.py", True),
        ("python a.py | sort", "snippets/t/a.py", True),
        ("python a.py 'b | c'", "snippets/t/a.py", False),
        ("accelerate merge-weights a b", "snippets/t/a.py", True),
        ("pip install a", "snippets/t/a.py", False),
        ("RANK=0 WORLD_SIZE=1 python a.py 2>&1", "snippets/t/a.py", True),
        ("python a.py > log", "snippets/t/a.py", False),
        ("python -c 1", "snippets/t/a.py", False),
        ("python by_hand.py", "labs/launch/by_hand.py", False),
    ],
)
def test_a_command_is_forked_only_if_it_needs_no_shell_except_for_a_filter(
    command: str, program: str, can_fork: bool
) -> None:
    assert prefork.Launcher().accepts(command, program) is can_fork


def test_the_first_command_of_a_few_programs_is_not_forked_but_the_second_is() -> None:
    command, program = "torchrun --nproc-per-node=2 once.py", "snippets/t/once.py"
    launcher = prefork.Launcher()
    assert [launcher.accepts(command, program, number) for number in (0, 1)] == [False, True]


def run_forked(code: str, command: str = "python a.py") -> runner.Result:
    """Run a program in a fork of a process that has imported torch."""
    launcher = LAUNCHER[0] or prefork.Launcher()
    with runner.empty_folder() as folder:
        (folder / "a.py").write_text(code)
        return runner.run(command, folder, limit=HANG, launcher=launcher)


@pytest.mark.parametrize(
    ("command", "status"),
    [
        ("python a.py | cat", 0),
        ("python a.py 2>&1 | sort", 0),
        ("set -o pipefail; python a.py | cat", 3),
        ("set -o pipefail; python a.py 2>&1 | cat", 3),
        ("set -o pipefail; python a.py 2>&1 | (cat; exit 4)", 4),
        ("set -o pipefail; python a.py ok 2>&1 | cat", 0),
    ],
)
def test_a_forked_pipe_has_the_same_status_and_output_as_under_bash(
    command: str, status: int
) -> None:
    code = """
import sys
print("b", flush=True)
print("error", file=sys.stderr)
sys.exit(0 if sys.argv[1:] else 3)
"""
    with runner.empty_folder() as folder:
        (folder / "a.py").write_text(code)
        bash = runner.run(command, folder, limit=HANG)
    forked = run_forked(code, command)
    printed = ("b\nerror\n", "") if "2>&1" in command else ("b\n", "error\n")
    assert (bash.status, bash.stdout, bash.stderr) == (status, *printed)
    assert (forked.status, forked.stdout, forked.stderr) == (status, *printed)


def test_a_forked_program_ends_if_its_filter_ends_first() -> None:
    """The output does not fit into the pipe, so a write must fail when `head` has ended."""
    forked = run_forked("print('x' * 1_000_000)", "set -o pipefail; python a.py | head -c 1")
    assert (forked.status, forked.stdout, forked.leftovers) == (1, "x", [])
    assert "BrokenPipeError" in forked.stderr


@pytest.mark.parametrize(
    ("code", "status", "message"),
    [
        ("pass", 0, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit(3)", 3, ""),
        ("sys.exit('needs 2 ranks')", 1, "needs 2 ranks"),
        ("1 / 0", 1, "ZeroDivisionError"),
    ],
)
def test_a_forked_program_exits_with_its_own_status(
    code: str, status: int, message: str
) -> None:
    result = run_forked(f"import sys\n{code}\n")
    assert result.status == status and message in result.stderr, result


@pytest.mark.skipif(not prefork.shares_headers(), reason="not Linux, or no openssl")
def test_forked_programs_share_the_compiled_headers_of_inductor() -> None:
    result = run_forked(
        "import os; from torch._inductor import codecache as c, config\n"
        "print(config.cpp_cache_precompile_headers, os.environ['TMPDIR'] in c._HEADER_DIR)\n"
    )
    assert result.stdout == "True False\n", result.stderr


def test_a_run_has_the_variables_of_a_reader(tmp_path: Path, monkeypatch) -> None:
    for name in ("OMP_NUM_THREADS", "WORLD_SIZE", "PYTEST_CURRENT_TEST", "TZ"):
        monkeypatch.setenv(name, "2")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    cpu, cuda = (runner.environment(tmp_path / "run", each) for each in ("cpu", "cuda"))
    assert (cpu["CUDA_VISIBLE_DEVICES"], cuda["CUDA_VISIBLE_DEVICES"]) == ("", "0")
    assert cpu["TZ"] == "2"
    assert not {"OMP_NUM_THREADS", "WORLD_SIZE", "PYTEST_CURRENT_TEST"} & set(cpu)


@pytest.mark.skipif(sys.platform != "linux", reason="it needs /proc")
def test_a_run_finds_processes_of_other_sessions_and_cuts_long_outputs(monkeypatch) -> None:
    monkeypatch.setattr(runner, "IDLE_TIMEOUT", 0.2)
    monkeypatch.setattr(runner, "MAX_OUTPUT_BYTES", 5)
    with runner.empty_folder() as folder:
        command = "setsid -f sleep 3599 > /dev/null 2>&1; echo a long line"
        result = runner.run(command, folder, limit=600)
    assert len(result.leftovers) == 1 and "sleep 3599" in result.leftovers[0]
    assert result.stdout.splitlines() == ["a lon", "… cut: the output has 12 bytes"]


TORCHRUN = """\
[rank0]: rank 1 has ended
[rank1]: Traceback (most recent call last):
[rank1]:   File "/x/run/a.py", line 9, in <module>
[rank1]:   File "/x/run/a.py", line 3, in inner
[rank1]: ValueError: unwell
[rank0]: Connection closed by peer
Traceback (most recent call last):
ChildFailedError:
Root Cause (first observed failure):
  rank      : 1 (local_rank: 1)
  exitcode  : 1 (pid: 5)
"""


def test_an_explanation_names_the_rank_that_failed_first() -> None:
    result = runner.Result("torchrun a.py", 1, "", TORCHRUN, 1.0)
    text = runner.explain(result, {"/x/run/": "snippets/t/"})
    assert text.startswith("rank 1 exited with status 1\n")
    assert text.endswith("ValueError: unwell") and "rank0" not in text
    assert 'File "snippets/t/a.py", line 9' in text
    assert result.line_in("a.py") == 3  # the line of the innermost call
    stacks = [("rank 1", 'File "a.py", line 8 in wait\n  File "a.py", line 20 in <module>')]
    assert runner.Result("x", -9, "", "", 1.0, True, stacks).line_in("a.py") == 8


# --- checks of a program ---------------------------------------------------------------------


def check_program(book: Book, name: str, code: str, transcript: str) -> None:
    """Write a program and its transcript, and raise BookError if its output differs."""
    path = book.root / book.program(name, code, transcript)
    program_check.check(Program(book.root, path), "cpu", program_check.CheckOptions())


def test_only_a_declared_number_has_the_tolerance_of_a_measured_number(book: Book) -> None:
    """It does not matter whether a program mentions a clock or reads one."""
    book.write("snippets/measured.toml", "[numbers]\n'snippets/t/clock.py' = ['≈[\\d.]+ s']\n")
    check_program(book, "clock", "print('≈20 s, ≈7')\n", "$ python clock.py\n≈2 s, ≈7\n")
    for name, code, printed in (
        ("clock", "print('≈2 s, ≈70')\n", "≈2 s, ≈7"),  # the second number is not declared
        ("comment", "# time.perf_counter()\nprint('≈20 s')\n", "≈2 s"),
        ("reads", "import time\ntime.time()\nprint('≈20 s')\n", "≈2 s"),
    ):
        with pytest.raises(BookError, match="printed something else"):
            check_program(book, name, code, f"$ python {name}.py\n{printed}\n")


@pytest.mark.parametrize(
    ("recorded", "printed", "same"),
    [
        ("a ≈2.0 ms", "a ≈2.9 ms", True),
        ("a ≈2.0 ms", "a ≈3.2 ms", False),
        ("a ≈20.0 ×", "a ≈21.9 ×", True),
        ("a ≈20.0 ×", "a ≈22.3 ×", False),
        ("a ≈80.0%", "a ≈87.0%", True),
        ("a ≈80.0%", "a ≈89.0%", False),
        ("a ≈80.0 times", "a ≈89.0 times", True),
        ("a ≈2e-07 off", "a ≈9e-07 off", True),
        ("a ≈2e-07 off", "a ≈9e-06 off", False),
    ],
)
def test_the_tolerances_are_narrow_on_the_recorded_kind_of_gpu(
    recorded: str, printed: str, same: bool
) -> None:
    tolerances = Tolerances((".*",), same_gpu=True)
    assert same_line(recorded, printed, tolerances) is same
    assert same_line(printed, recorded, tolerances) is same


@pytest.mark.parametrize(
    ("recorded", "printed", "same"),
    [
        ("loss 2.3026", "loss 2.3027", True),
        ("loss 2.3026", "loss 2.3028", False),
        ("1.25 GB", "1.26 GB", True),
        ("1.25 GB", "1.27 GB", False),
        ("3.05e-05", "3.06e-05", True),
        ("3.05e-05", "3.07e-05", False),
        ("0.30000001192092896", "0.30000010", True),  # more digits than float32 has
        ("0.300000", "0.300003", False),
    ],
)
def test_a_decimal_may_differ_by_one_unit_of_its_last_digit(
    recorded: str, printed: str, same: bool
) -> None:
    assert same_line(recorded, printed) is same
    assert same_line(printed, recorded) is same


def test_an_output_with_the_path_of_its_folder_is_an_error(book: Book) -> None:
    code = "import os\nprint('in', os.getcwd())\n"
    with pytest.raises(BookError, match=r"snippets/t/leaks\.py:1: .*the path of the folder"):
        check_program(book, "leaks", code, "$ python leaks.py\nin x\n")


def test_a_transcript_without_a_first_line_is_recorded_even_if_it_is_right(book: Book) -> None:
    path = book.program("new", "print(1)\n", "$ python new.py\n1\n")
    transcript = book.write("snippets/t/new.cpu.txt", "$ python new.py\n1\n")
    outcome = program_check.check(
        Program(book.root, book.root / path), "cpu", program_check.CheckOptions(record=True)
    )
    assert outcome.recorded and transcript.read_text().startswith("# recorded ")


@pytest.mark.parametrize(
    ("code", "is_accepted"),
    [
        ("import sys; sys.exit('it needs a GPU')", True),
        ("import sys; print('it needs a GPU', file=sys.stderr)", False),
        ("import sys; print('no CUDA', file=sys.stderr); 1 / 0", False),
        ("import sys; sys.exit('it needs more')", False),
    ],
)
def test_without_a_gpu_a_program_must_print_a_sentence_and_exit_with_an_error(
    book: Book, code: str, is_accepted: bool
) -> None:
    path = book.write("snippets/t/gpu.py", code + "\n")
    book.write("snippets/t/gpu.cuda.txt", RECORDED + "$ python gpu.py\n")
    program, options = Program(book.root, path), program_check.CheckOptions()
    if is_accepted:
        program_check.check_refusal(program, options)
    else:
        with pytest.raises(BookError):
            program_check.check_refusal(program, options)


def test_a_page_must_show_a_program_its_output_and_its_figure(book: Book) -> None:
    program = Program(book.root, book.root / book.program("p", "1\n", "$ python p.py\n"))

    def error_message() -> str:
        try:
            shown.check_shown(program, page.embedded_files(book.root))
        except BookError as error:
            return str(error)
        return ""

    assert error_message() == ""
    book.write("snippets/t/p.svg", "<svg/>")
    assert (
        error_message() == "snippets/t/p.py:1: it draws snippets/t/p.svg, which no page shows"
    )
    book.write("docs/p.md", '```python\n--8<-- "snippets/t/p.py"\n```\n![](snippets/t/p.svg)\n')
    assert error_message().startswith(
        "docs/p.md:2: the page embeds snippets/t/p.py but no page"
    )
    assert program.figure in program_check.inputs(program, "cpu")


def test_the_command_with_the_most_ranks_determines_the_needed_gpus() -> None:
    text = "$ torchrun --nproc-per-node=2 a.py\n$ torchrun --nproc-per-node=4 a.py\n[exit status 1]\n"
    assert requirements.gpus_needed(Transcript.parse(text)) == 4


def test_the_commands_for_a_gpu_are_those_of_gpu_toml_after_the_compilation(
    book: Book,
) -> None:
    book.write("snippets/t/add.cpu.txt", "$ nvcc add.cu -o add\n$ python emulate.py add.cu\n")
    add = Program(book.root, book.write("snippets/t/add.cu", "int main() {}\n"))
    assert add.gpu_template is None
    listed = """
        "snippets/t/add.cu" = \'\'\'
        $ ./add
        $ ./add imported.cu
        [exit status 1]
        \'\'\'
    """
    book.write("snippets/gpu.toml", listed)
    assert add.gpu_template.text() == (
        "$ nvcc add.cu -o add\n$ ./add\n$ ./add imported.cu\n[exit status 1]\n"
    )
    book.write("snippets/t/imported.cu", "")
    assert [each.path.name for each in add.dependencies()] == ["imported.cu"]
    assert not any("$ ./add" in str(each) for each in program_check.inputs(add, "cpu"))
    assert any("$ ./add" in str(each) for each in program_check.inputs(add, "cuda"))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("4 × NVIDIA A100-SXM4-80GB", "a100"),
        ("1 × NVIDIA GeForce RTX 4090, 1 × Tesla T4", "rtx-4090"),
        ("Tesla V100-PCIE-16GB", "v100"),
        ("NVIDIA TITAN V", "titan-v"),
        ("", ""),
    ],
)
def test_the_kind_of_a_gpu_is_the_name_of_its_model(name: str, kind: str) -> None:
    assert gpu_kind(name) == kind


SVG = '<svg xmlns="http://www.w3.org/2000/svg" xmlns:x="http://www.w3.org/1999/xlink">{}</svg>'


def test_a_figure_with_a_link_is_an_error() -> None:
    for name in ("href", "x:href"):
        with pytest.raises(BookError, match=r"it refers to https://a\.example"):
            figures.Figure.parse(SVG.format(f'<image {name}="https://a.example/x.png"/>'))
    text = SVG.format('<use href="#a"/><text>s</text><text>3</text>')
    assert figures.Figure.parse(text).labels == ["s", "3"]


@pytest.mark.parametrize(
    ("other", "equal", "equal_if_listed"),
    [("3.4", True, True), ("7.1", False, True), ("7", False, True), ("s", False, False)],
)
def test_numbers_in_a_figure_are_compared_if_its_curves_are(
    other: str, equal: bool, equal_if_listed: bool
) -> None:
    old, new = (
        figures.Figure.parse(SVG.format(f"<text>time</text><text>{text}</text>"))
        for text in ("3.5", other)
    )
    assert (figures.figure_difference(old, new) is None) == equal
    listed = Tolerances(compare_points=False)
    assert (figures.figure_difference(old, new, listed) is None) == equal_if_listed


def test_a_measured_number_in_a_label_may_differ() -> None:
    old, new, more = (
        figures.Figure.parse(SVG.format(text))
        for text in (
            "<text>exposed ≈34 ms</text>",
            "<text>exposed ≈309 ms</text>",
            "<text>exposed ≈34 ms</text><text>waiting</text>",
        )
    )
    assert "different labels" in str(figures.figure_difference(old, new))
    assert figures.figure_difference(old, new, Tolerances((".*",))) is None
    assert "+waiting" in str(figures.figure_difference(old, more, Tolerances((".*",))))


def curve(path: str) -> list[figures.Shape]:
    return figures.Figure.parse(SVG.format(f'<path d="{path}"/>')).shapes


@pytest.mark.parametrize(
    ("other", "low", "high"),
    [
        ("M 0 0 L 100 40 L 200 80", 0, 0),  # the same points
        ("M 0 0 L 200 80", 0, 0.1),  # the same curve with fewer points
        ("M 0 0 L 50 20 L 60 24 L 200 80", 0, 0.1),  # with more points
        ("M 0 0 L 200 40", 39, 41),  # a different end
        ("M 0 0 L 100 70 L 150 70 L 200 80", 15, 60),  # a different curve with the same ends
        ("M 0 80 L 200 0", 75, 85),  # a falling curve with the same width and height
    ],
)
def test_curves_with_different_numbers_of_points_are_compared(
    other: str, low: float, high: float
) -> None:
    path = curve("M 0 0 L 100 40 L 200 80")
    assert low <= figures.distance(path, curve(other)) <= high
    assert low <= figures.distance(curve(other), path) <= high


def test_the_distance_of_figures_with_different_shapes_is_infinite() -> None:
    line = curve("M 0 0 L 9 9")
    for shapes in ([], [*line, *line], curve("")):
        assert figures.distance(line, shapes) == float("inf")


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        ('<path d="M 0 0" style="fill: #0b6e99"/><text x="9">s</text>', None),
        # the index of a colour in a colour map may be rounded differently
        ('<path d="M 0 0" style="fill: #0c699a"/><text x="9">s</text>', None),
        # two levels of snippets/06_gpu_computing/bank_conflicts.svg differ by 11 or more
        ('<path d="M 0 0" style="fill: #0b7999"/><text x="9">s</text>', "different colours"),
        ('<path d="M 0 0" style="fill: #c2410c"/><text x="9">s</text>', "different colours"),
        ('<path d="M 0 0" style="fill: none"/><text x="9">s</text>', "different colours"),
        ('<path d="M 0 0" style="fill: #0b6e99"/><text x="99">s</text>', "at a distance of 90"),
        (
            '<path d="M 0 0" style="fill: #0b6e99; stroke-dasharray: 5.5,2"/><text x="9">s</text>',
            "different widths or dashes",
        ),
        (
            '<path d="M 0 0" style="fill: #0b6e99" stroke-width="2"/><text x="9">s</text>',
            "different widths or dashes",
        ),
    ],
)
def test_colours_lines_and_positions_of_labels_are_compared(
    other: str, difference: str | None
) -> None:
    first = '<path d="M 0 0" style="fill: #0B6E99"/><text x="9">s</text>'
    old, new = (figures.Figure.parse(SVG.format(text)) for text in (first, other))
    found = figures.figure_difference(old, new)
    assert found is None if difference is None else difference in found
    # the curves of the programs that snippets/measured.toml lists depend on the machine
    assert figures.figure_difference(old, new, Tolerances(compare_points=False)) is None


def test_the_page_for_authors_names_the_largest_difference_of_two_colours() -> None:
    page = (ROOT / "docs/contributing/programs.md").read_text("utf-8")
    assert f"| {figures.MAX_COLOUR_DISTANCE} of 255 in red, green or blue |" in page


# --- blocks of a page ------------------------------------------------------------------------


def errors_of_page(book: Book, text: str) -> list[str]:
    """Return the first line of the error message of each wrong block of a page."""
    path, found = book.write("docs/p.md", text), []
    for block in code_blocks.extract(path, book.root):
        try:
            code_blocks.check(block, program_check.CheckOptions())
        except BookError as error:
            found.append(str(error).splitlines()[0])
    return found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("```bash\nfalse\ntrue\n```\n", "docs/p.md:1: bash block failed"),
        ("```bash\nfalse | true\n```\n", "docs/p.md:1: bash block failed"),
        ("```console\n$ true\n$ exit 3\n```\n", "docs/p.md:3: console block failed"),
        ("```console\n$ exit 3\n[exit status 3]\n```\n", ""),
        ('```python skip="why"\nif\n```\n', "docs/p.md:2: invalid syntax"),
        ("```yaml\na: 1\n---\nb: [\n```\n", "docs/p.md:5: not a valid YAML"),
        ("```yaml\na: 1\n---\napiVersion: v1\n```\n", "docs/p.md:1: not a valid Kubernetes"),
        ('```bash\n--8<-- "snippets/t/a.py"\n```\n', "docs/p.md:1: snippets/t/a.py is not"),
        (
            '```text\n--8<-- "snippets/t/b.cpu.txt"\n```\n',
            "docs/p.md:1: snippets/t/b.cpu.txt is a transcript",
        ),
        ('```text\n--8<-- "snippets/t/a.cpu.txt"\n```\n', ""),
    ],
)
def test_a_wrong_block_is_an_error_and_a_right_one_is_not(
    book: Book, text: str, expected: str
) -> None:
    book.program("a", "print(1)\n", "$ python a.py\n1\n")
    book.write("snippets/t/b.cpu.txt", "$ python b.py\n")
    errors = errors_of_page(book, text)
    assert len(errors) == (1 if expected else 0), errors
    assert all(error.startswith(expected) for error in errors), errors


def test_an_output_is_written_below_its_own_block(book: Book) -> None:
    """Two blocks have the same wrong output below them, and only the second is recorded."""
    below = "\n<!--pytest-codeblocks:expected-output-->\n\n```text\nold\n```\n\n"
    text = f"```python\nprint('one')\n```\n{below}```python\nprint('two')\n```\n{below}"
    path = book.write("docs/p.md", text)
    first, second = code_blocks.extract(path, book.root)
    assert repr(first.expected.lines) in first.inputs()
    code_blocks.check(second, program_check.CheckOptions(record=True))
    assert page.read(path).fences[3].lines == ("two",) and "```text\nold\n" in path.read_text()


# --- the plugin ------------------------------------------------------------------------------


def test_all_programs_run_again_after_a_change_of_the_engine_and_in_ci(book: Book) -> None:
    book.program("once", "print(1)\n", "$ python once.py\n1\n", embed=False)
    (book.root / "labs/one").symlink_to(book.root / "snippets")
    (book.root / "docs/labs").symlink_to(book.root / "snippets")
    engine = book.write("engine.py", "")
    book.write(
        "conftest.py",
        f"""
        import os, pathlib
        from worldsize.testing import result_cache
        result_cache.ENGINE = (pathlib.Path({str(engine)!r}),)
        if os.path.exists("ci"):
            os.environ["CI"] = "true"
        """,
    )
    arguments = ("snippets", "docs", "-k", "cpu")
    assert "1 ran, 0 unchanged" in book.pytest(*arguments).text
    assert "0 ran, 1 unchanged" in book.pytest(*arguments).text
    engine.write_text("# changed\n")
    assert "1 ran, 0 unchanged" in book.pytest(*arguments).text
    book.write("ci", "")
    assert "1 ran, 0 unchanged" in book.pytest(*arguments).text


def test_a_whole_run_that_changed_a_file_is_not_stored(book: Book) -> None:
    book.write(".gitignore", ".cache/\n__pycache__/\n")
    book.write(
        "tests/test_it.py",
        "import pathlib\n\n\ndef test():\n    pathlib.Path('data').write_text('x')\n",
    )
    assert "1 passed" in book.pytest().text
    (book.root / "data").unlink()  # now the files are the same as before the run
    assert "nothing has changed" not in book.pytest().text


# --- mutants ---------------------------------------------------------------------------------


def test_a_mutant_changes_the_right_place_after_letters_of_several_bytes() -> None:
    (mutant,) = mutation.generate('x = "Ψ≈", 3 - 1\n')
    assert mutant.source == 'x = "Ψ≈", (3 + 1)\n'


def test_the_original_text_of_a_mutant_must_occur_once(book: Book) -> None:
    path = book.program("add", "print(1 + 1, 1 + 1)\n", "$ python add.py\n2 2\n")
    book.write("tests/mutants/t.toml", f'["{path}"]\n"twice" = ["1 + 1", "1 - 1"]\n')
    program = Program(book.root, book.root / path)
    with pytest.raises(BookError, match="occurs 2 times"):
        mutation.mutants_of_program(program, "written")


def test_the_source_of_a_mutant_is_an_input_of_its_test(book: Book) -> None:
    path = book.program("add", "print(1 + 1)\n", "$ python add.py\n2\n")
    program = Program(book.root, book.root / path)
    mutant = mutation.Mutant("what", 1, "change", "print(1 - 1)\n")
    assert mutant.source in plugin._mutant_inputs(program, mutant)


# --- outputs that changed between two commits ------------------------------------------------


def test_changed_outputs_are_listed_with_the_outputs_before(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(transcript_diff, "ROOT", tmp_path)
    transcript = tmp_path / "snippets/a.cpu.txt"
    transcript.parent.mkdir()
    for output in ("1.25 and ≈3 s", "1.25 and ≈4 s", "1.5 and ≈4 s"):
        transcript.write_text(f"$ python a.py\n{output}\n$ python a.py --again\nno change\n")
        for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
            transcript_diff.git("-c", "user.name=a", "-c", "user.email=a@b", *words)
    diff = "  $ python a.py\n- 1.25 and ≈4 s\n+ 1.5 and ≈4 s\n"
    assert (
        transcript_diff.changed("HEAD~", "HEAD")
        == f"## snippets/a.cpu.txt\n\n```diff\n{diff}```"
    )
    assert transcript_diff.changed("HEAD~2", "HEAD~") == ""
    with pytest.raises(BookError, match="nowhere"):
        transcript_diff.changed("nowhere", "HEAD")


# --- the clock of a GPU ----------------------------------------------------------------------

ON_A_GPU = "# recorded 2026-01-01 on 1 × NVIDIA H200, torch 2.13.0, Python 3.11.7, in 7.2 s"


class FakeNvml:
    """A fake of the module pynvml, with one GPU that returns these readings one by one.

    A reading is a clock in MHz and a bit mask of the reasons for a lower clock.
    """

    NVMLError = RuntimeError
    NVML_CLOCK_SM = 1
    nvmlClocksEventReasonGpuIdle = 1
    nvmlClocksEventReasonApplicationsClocksSetting = 2
    nvmlClocksEventReasonSwPowerCap = 4
    nvmlClocksThrottleReasonHwSlowdown = 8
    nvmlClocksEventReasonSyncBoost = 16
    nvmlClocksEventReasonSwThermalSlowdown = 32
    nvmlClocksThrottleReasonHwThermalSlowdown = 64
    nvmlClocksThrottleReasonHwPowerBrakeSlowdown = 128
    nvmlClocksEventReasonDisplayClockSetting = 256

    def __init__(self, *readings: tuple[int, int]) -> None:
        self.readings, self.sampled = list(readings), threading.Event()

    def nvmlInit(self) -> None:
        if not self.readings:
            raise RuntimeError("NVML Shared Library Not Found")

    def nvmlShutdown(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetCurrentClocksEventReasons(self, gpu: int) -> int:
        if len(self.readings) == 1:
            self.sampled.set()
        return self.readings[0][1]

    def nvmlDeviceGetClockInfo(self, gpu: int, kind: int) -> int:
        return self.readings.pop(0)[0] if len(self.readings) > 1 else self.readings[0][0]

    def nvmlDeviceGetMaxClockInfo(self, gpu: int, kind: int) -> int:
        return 1980


def test_the_clock_of_a_gpu_is_recorded_only_while_it_is_busy() -> None:
    nvml = FakeNvml((345, 1), (900, 0), (1980, 0), (1410, 4), (1500, 64 | 1024))
    with gpu_clocks.Recorder(nvml, interval=0.001) as recorder:
        assert nvml.sampled.wait(30)
        nvml.sampled.clear()
        assert nvml.sampled.wait(30)  # the last reading was also sampled
    clocks = recorder.result()
    reasons = ("power limit", "heat (hardware)", "reason 0x400")
    # without 345 MHz, when the GPU is idle, and 900 MHz, when its clock rises
    assert clocks == Clocks(1410, 1980, 1980, reasons)
    assert Clocks.parse(str(clocks)) == clocks


def test_no_clock_is_recorded_if_the_gpu_is_idle_or_has_no_driver() -> None:
    idle = FakeNvml((345, 1))
    with gpu_clocks.Recorder(idle, interval=0.001) as recorder:
        assert idle.sampled.wait(30)
    assert recorder.result() is None
    with gpu_clocks.Recorder(FakeNvml(), interval=0.001) as recorder:
        pass
    assert recorder.result() is None


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        ("", None),
        (", SM clock 1980 of 1980 MHz", Clocks(1980, 1980, 1980)),
        (
            ", SM clock 1410 to 1980 of 1980 MHz, lowered by power limit and sync boost",
            Clocks(1410, 1980, 1980, ("power limit", "sync boost")),
        ),
    ],
)
def test_a_transcript_is_valid_with_and_without_a_clock(
    end: str, expected: Clocks | None
) -> None:
    text = f"{ON_A_GPU}{end}\n$ python p.py\n1\n"
    transcript = Transcript.parse(text)
    assert transcript.provenance.clocks == expected and transcript.text() == text
    text = template.render(
        "transcript",
        outputs=[
            {
                "lines": ["1"],
                "header": "console",
                "provenance": transcript.provenance,
                "needs": [],
            }
        ],
        older={},
        trace_page="",
    )
    assert f"7.2 s in all{end.replace(', SM', '; SM', 1)}." in text


def test_an_invalid_clock_in_the_first_line_is_an_error() -> None:
    with pytest.raises(BookError, match="this is not a valid `# recorded …` line"):
        Transcript.parse(f"{ON_A_GPU}, SM clock fast\n$ python p.py\n1\n")


def test_a_gpu_transcript_without_a_clock_is_recorded_again_once(
    book: Book, monkeypatch: pytest.MonkeyPatch
) -> None:
    book.program("p", "print(1)\n", "$ python p.py\n1\n")
    book.write("snippets/gpu.toml", '"snippets/t/p.py" = "$ python p.py"\n')
    transcript = book.write("snippets/t/p.cuda.txt", f"{ON_A_GPU}\n$ python p.py\n1\n")
    monkeypatch.setattr(gpu_clocks.Recorder, "result", lambda self: Clocks(1410, 1980, 1980))
    monkeypatch.setattr(runner, "describe_device", lambda device: "1 × NVIDIA H200")

    def is_recorded(record: bool) -> bool:
        program = Program(book.root, book.root / "snippets/t/p.py")
        options = program_check.CheckOptions(record=record)
        return program_check.check(program, "cuda", options).recorded

    assert not is_recorded(record=False)
    assert is_recorded(record=True)
    assert ", SM clock 1410 to 1980 of 1980 MHz\n" in transcript.read_text("utf-8")
    assert not is_recorded(record=True)


def test_the_hash_of_code_ignores_comments_and_docstrings_but_not_markers(
    tmp_path: Path,
) -> None:
    program = tmp_path / "snippets/a.py"
    program.parent.mkdir()
    hashes = {}
    for name, text in {
        "first": "def f():\n    return 1\n",
        "comment": "# about f\ndef f():\n\n    return 1  # one\n",
        "docstring": 'def f():\n    """Return 1."""\n    return 1\n',
        "marker": "def f():\n    return 1\n# --8<-- [start:f]\n",
        "moved": "# --8<-- [start:f]\ndef f():\n    return 1\n",
        "code": "def f():\n    return 2\n",
        "wrong": "def f(:\n",
    }.items():
        program.write_text(text)
        cache = ResultCache(tmp_path)  # a new session
        hashes[name] = cache.digest("code of snippets"), cache.digest(program.parent)
    code, files = zip(*hashes.values(), strict=True)
    assert code[0] == code[1] == code[2] and len({*code}) == 5 and len({*files}) == 7
    (tmp_path / "snippets/a.cpu.txt").write_text("1\n")
    assert ResultCache(tmp_path).digest("code of snippets") not in code
