"""Tests of the pytest plugin with small books, most of which contain mistakes."""

from __future__ import annotations

import ast
import datetime
import multiprocessing
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
from pathlib import Path

import processes
import pytest
from conftest import RECORDED, Book, Report
from processes import HANG, left_behind, processes_with, until

from worldsize.execution import requirements, runner, staging
from worldsize.execution.prefork import Launcher
from worldsize.execution.processes import processor_seconds
from worldsize.execution.program_run import RunOptions, usable_launcher
from worldsize.model import ROOT
from worldsize.model.program import Program
from worldsize.model.transcript import Transcript

INPUTS = ["src"]
ORPHAN = f"orphan-mark-{os.getpid()}"  # unique, because several workers may run the same book

DISTRIBUTED = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
"""

# --- a book with many mistakes, which runs once -----------------------------------------------


def full_names(report: Report, test: str) -> list[str]:
    """Return the full names of a test in a report, in which modules have no suffix `.py`."""
    short = test.replace(".py::", "::")
    return [name for name in report.outcomes if name.endswith((f".{short}", f"::{short}"))]


@pytest.fixture(scope="module")
def broken_book_report(tmp_path_factory) -> Report:
    """Return the report of one run of pytest on all programs and pages below."""
    book = Book(tmp_path_factory.mktemp("broken"))
    book.program(
        "crash",
        DISTRIBUTED
        + """
if rank == 1:
    raise ValueError("rank one is unwell")
dist.barrier()
""",
        "$ torchrun --nproc-per-node=2 crash.py\n",
    )
    book.program(
        "killed",
        DISTRIBUTED
        + """
import os, signal
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
""",
        "$ torchrun --nproc-per-node=2 killed.py\n",
    )
    book.program(
        "silent", 'print("4 wrong")\nraise SystemExit(0)\n', "$ python silent.py\n4 right\n"
    )
    book.program(
        "drift",
        'print("loss 0.5021, after 7 steps, ≈3.1 ms")\nprint("≈5 s")\nprint("8 ranks")\n',
        "$ python drift.py\nloss 0.5000, after 7 steps, ≈9.9 ms\n≈5 ms\n9 ranks\n",
    )
    book.program(
        "close",
        'print("loss 0.50001,   ≈3.1 ms and ≈1.2e-07, 1,024 ranks")\n',
        "$ python close.py\nloss 0.50002, ≈12.25 ms and ≈4e-06, 1,024 ranks\n",
    )
    book.write("snippets/measured.toml", "[numbers]\n'snippets/t/close.py' = ['.*']\n")
    book.program(
        "orphan",
        f"""
        import subprocess, sys
        code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
        child = subprocess.Popen([sys.executable, "-c", code, "{ORPHAN}"], stdout=subprocess.PIPE, start_new_session=True)
        child.stdout.readline()
        """,
        "$ python orphan.py\n",
    )
    book.program(
        "größe", 'print("Ψ = 2·10⁹ · 日本語")\n', "$ python größe.py\nΨ = 2·10⁹ · 日本語\n"
    )
    book.program("status", "raise SystemExit(3)\n", "$ python status.py\n[exit status 3]\n")
    book.program(
        "wrong_status", "raise SystemExit(4)\n", "$ python wrong_status.py\n[exit status 3]\n"
    )
    book.program("unwritten", "print(1)\n", None, embed=False)
    book.program("unshown", "print(1)\n", "$ python unshown.py\n1\n", embed=False)
    book.program("leak", "import os\nprint(os.getcwd())\n", "$ python leak.py\nx\n")
    book.program("flood", "for i in range(300000): print('x' * 60)\n", "$ python flood.py\nx\n")
    book.program("muddle", "print(1)\n", "1\n$ python muddle.py\n")
    book.program("dollar", "print('$ ls')\n", "$ python dollar.py\nls\n")
    book.program(
        "alone",
        "import os\nprint(sorted(os.listdir()), [k for k in os.environ if k.startswith('PYTEST')])\n",
        "$ python alone.py\n['alone.py'] []\n",
    )
    book.program(
        "steps",
        "import pathlib, sys\np = pathlib.Path('created')\nprint(p.exists())\np.touch()\n",
        "$ python steps.py\nFalse\n$ python steps.py \\\n    --again\nTrue\n$ python steps.py 2>&1 | wc -l\n1\n",
    )
    book.program(
        "companion",
        "print('alone')\n",
        "$ python companion.py\nalone\n$ python reads.py companion.py\nprint('alone')\n",
    )
    book.program(
        "reads",
        "import pathlib, sys\nprint(*(pathlib.Path(n).read_text() for n in sys.argv[1:]), end='')\n",
        "$ python reads.py\n",
    )
    book.write("snippets/t/gone.cpu.txt", RECORDED + "$ python gone.py\n")
    book.write("snippets/t/never.py", "print(1)\n")
    book.write("snippets/t/never.cpu.txt", "$ python never.py\n1\n")
    book.write(
        "docs/never.md",
        '```python\n--8<-- "snippets/t/never.py"\n```\n```console\n--8<-- "snippets/t/never.cpu.txt"\n```\n',
    )
    book.write(
        "snippets/t/figure.py",
        'open("figure.svg", "w").write("""<svg xmlns=\'http://www.w3.org/2000/svg\'><text>time (s)</text><text>3.1</text></svg>""")\n',
    )
    book.write("snippets/t/figure.cpu.txt", RECORDED + "$ python figure.py\n")
    book.write(
        "snippets/t/figure.svg",
        "<svg xmlns='http://www.w3.org/2000/svg'><text>time (ms)</text><text>4</text></svg>\n",
    )
    book.write("snippets/t/needs_gpu.py", "import sys\nprint('hm')\n")
    book.write("snippets/t/needs_gpu.cuda.txt", RECORDED + "$ python needs_gpu.py\n")
    book.write(
        "snippets/t/says_gpu.py", "import sys\nsys.exit('says_gpu.py needs a CUDA GPU')\n"
    )
    book.write("snippets/t/says_gpu.cuda.txt", RECORDED + "$ python says_gpu.py\n")

    book.write(
        "docs/missing_section.md",
        '# M\n\ntext\n\n```python\n--8<-- "snippets/t/close.py:nowhere"\n```\n',
    )
    book.write("docs/missing_file.md", '# M\n\n```python\n--8<-- "snippets/t/nofile.py"\n```\n')
    book.write("docs/unhandled.md", "# U\n\n```brainfuck\n+++\n```\n\n```\nplain\n```\n")
    book.write("docs/unclosed.md", "# U\n\n```python\nprint(1)\n")
    book.write("docs/tilde.md", "# T\n\n~~~python\nprint(1)\n~~~\n")
    book.write("docs/quote.md", "# T\n\n> ```python\n> 1/0\n> ```\n")
    book.write("docs/odd.md", "# O\n\n```python\n1/0\n```end\n```python\n1/0\n```\n")
    book.write("docs/mark.md", "# T\n\n<!--pytest.mark.skip-->\n```python\n1/0\n```\n")
    book.write("docs/bare.md", '# T\n\n--8<-- "snippets/t/close.py"\n')
    book.write(
        "docs/nested.md",
        """
        # N

        - a list

            ```python title="a.py" hl_lines="2"
            x = 1
            assert x == 2, "in the list"
            ```

        === "A tab"

            ```python
            assert False, "in the tab"
            ```

        !!! note

            ```python
            if True:
                assert False, "in the admonition"
            ```
        """,
    )
    book.write(
        "docs/state.md",
        """
        # S

        ```python
        shared = 3
        ```

        <!--pytest-codeblocks:cont-->

        ```python
        assert shared == 3
        undefined
        ```

        ```python
        shared
        ```

        ```python
        print(6 * 7)
        ```

        <!--pytest-codeblocks:expected-output-->

        ```text
        43
        ```
        """,
    )
    book.write(
        "docs/data.md",
        """
        # D

        ```yaml
        a: 1
        b: [
        ```

        ```toml
        a = 1
        b = =
        ```

        ```yaml title=".github/workflows/x.yml"
        on: push
        ```
        """,
    )
    book.write(
        "docs/compiled.md",
        """
        # C

        ```cpp
        int main() {
            return undefined_name;
        }
        ```

        ```cuda
        __global__ void k(float* x) {
            x[0] = undefined_name;
        }
        ```
        """,
    )
    book.write(
        "docs/shells.md",
        """
        # S

        ```bash
        echo one
        false
        ```

        ```console
        $ echo $((6 * 7))
        42
        $ echo two
        three
        ```

        ```bash skip="it needs two machines"
        ssh elsewhere true
        ```

        ```bash skip="it needs two machines"
        if then
        ```

        ```bash skip=""
        true
        ```
        """,
    )
    book.write(
        "docs/quotes.md",
        "# Q\n\n```text\n4 right\n```\n\n```text\nnobody printed this\n```\n",
    )
    return book.pytest("--device", "auto", "--continue-on-collection-errors", fork=True)


# The names of all tests of this book start with test_broken. Therefore they run in the same
# worker (see tests/conftest.py), and pytest runs the book only once.


@pytest.mark.parametrize(
    ("test", "expected"),
    {
        "crash.py::cpu": [
            "snippets/t/crash.py:7",
            "crash.cpu.txt:2: `torchrun --nproc-per-node=2 crash.py`",
            "rank 1 exited with status 1",
            "ValueError: rank one is unwell",
        ],
        "killed.py::cpu": [
            "snippets/t/killed.py:",
            "killed.cpu.txt:2",
            "rank 1 was killed by SIGKILL",
        ],
        "silent.py::cpu": [
            "snippets/t/silent.cpu.txt:2: `python silent.py` printed something else",
            "- 4 right",
            "+ 4 wrong",
            "make record WHAT=snippets/t/silent.py",
        ],
        "drift.py::cpu": [
            "drift.cpu.txt:2",
            "- loss 0.5000",
            "+ loss 0.5021",
            "- ≈5 ms",
            "+ ≈5 s",
            "- 9 ranks",
            "+ 8 ranks",
        ],
        "orphan.py::cpu": [
            "snippets/t/orphan.py:1",
            "orphan.cpu.txt:2",
            "left processes running",
            ORPHAN,
        ],
        "wrong_status.py::cpu": [
            "snippets/t/wrong_status.py",
            "exited with status 4, not 3",
        ],
        "unwritten.py::shown": ["snippets/t/unwritten.py:1: it has no transcript"],
        "unshown.py::shown": ["snippets/t/unshown.py:1: no page of docs/ embeds it"],
        "never.py::shown": ["snippets/t/never.cpu.txt:1: it was never recorded"],
        "leak.py::cpu": ["snippets/t/leak.py:1", "the folder that it ran in"],
        "flood.py::cpu": ["flood.cpu.txt:2", "lines more"],
        "muddle.py::cpu": ["snippets/t/muddle.cpu.txt:2: this output is before the first"],
        "dollar.py::cpu": [
            "snippets/t/dollar.py:1",
            "would be read as a command or an exit status of the transcript",
        ],
        "gone.cpu.txt::stray": [
            "snippets/t/gone.cpu.txt:1: this folder contains no program with this name"
        ],
        "figure.py::cpu": ["snippets/t/figure.svg", "-time (ms)", "+time (s)"],
        "needs_gpu.py::cpu": ["snippets/t/needs_gpu.py:1", "one sentence"],
        "missing_section.md": [
            "docs/missing_section.md:6",
            "no section, function or class 'nowhere'",
        ],
        "missing_file.md": ["docs/missing_file.md:4", "snippets/t/nofile.py does not exist"],
        "unhandled.md:3": ["docs/unhandled.md:3: no test can check the language 'brainfuck'"],
        "unhandled.md:7": ["docs/unhandled.md:7: this code block has no language"],
        "unclosed.md": ["docs/unclosed.md:3"],
        "tilde.md": ["docs/tilde.md:3: no test would run this block"],
        "quote.md": ["docs/quote.md:3: no test would run this block"],
        "odd.md": ["docs/odd.md:3: pytest-codeblocks finds a different block here"],
        "mark.md": ["docs/mark.md:3:", "write the reason into its header"],
        "bare.md": ["docs/bare.md:3: put this embed into a code block"],
        "nested.md:5": ["docs/nested.md:7:", "in the list"],
        "nested.md:12": ["docs/nested.md:13:", "in the tab"],
        "nested.md:18": ["docs/nested.md:20:", "in the admonition"],
        "state.md:3": ["docs/state.md:11:", "undefined"],
        "state.md:14": ["docs/state.md:15:", "shared"],
        "state.md:18": ["docs/state.md:24", "line 18", "- 43", "+ 42"],
        "data.md:3": ["docs/data.md:6: not a valid YAML"],
        "data.md:8": ["docs/data.md:10: not a valid TOML"],
        "data.md:13": ["docs/data.md:13: not a valid workflow: it has no jobs"],
        "compiled.md:3": ["docs/compiled.md:5: it does not compile", "undefined_name"],
        "compiled.md:9": ["docs/compiled.md:11: it does not compile", "undefined_name"],
        "shells.md:3": ["docs/shells.md:3: bash block failed"],
        "shells.md:8": [
            "docs/shells.md:11: `echo two` printed something else",
            "- three",
            "+ two",
        ],
        "shells.md:19": ["docs/shells.md:19: this is not a shell script"],
        "shells.md:23": ["docs/shells.md:23: this block is skipped without a reason"],
        "quotes.md:7": ["docs/quotes.md:8: no program printed this line"],
    }.items(),
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_broken(broken_book_report: Report, test: str, expected: list[str]) -> None:
    """Each mistake makes its own test fail, with a short message that says what to fix."""
    names = full_names(broken_book_report, test)
    assert names, f"{test} is none of {sorted(broken_book_report.outcomes)}"
    outcome = broken_book_report.outcomes[names[0]]
    message = broken_book_report.messages[names[0]]
    if "compile" in test and outcome == "skipped":
        pytest.skip(message.split("\n")[0])
    assert outcome in {"failed", "error"}
    for text in expected:
        assert text in message, message
    assert len(message.splitlines()) < 70, "this message is too long"


def test_broken_book_passes_the_tests_of_its_correct_parts(broken_book_report: Report) -> None:
    for test in (
        "close.py::cpu",
        "größe.py::cpu",
        "status.py::cpu",
        "alone.py::cpu",
        "steps.py::cpu",
        "companion.py::cpu",
        "says_gpu.py::cpu",
        "quotes.md:3",
    ):
        names = full_names(broken_book_report, test)
        assert [broken_book_report.outcomes[name] for name in names] == ["passed"], (
            test,
            broken_book_report.messages.get(names[0] if names else ""),
        )


def test_broken_book_reports_a_skipped_block_with_its_reason(
    broken_book_report: Report,
) -> None:
    names = full_names(broken_book_report, "shells.md:15")
    assert broken_book_report.outcomes[names[0]] == "skipped"
    assert "it needs two machines" in broken_book_report.messages[names[0]]


def test_broken_book_leaves_no_process_running(broken_book_report: Report) -> None:
    assert left_behind(ORPHAN, in_command=True) == []


# --- other small books ------------------------------------------------------------------------


@pytest.mark.parametrize("fork", [False, True], ids=["process", "prefork"])
def test_a_hang_is_killed_and_the_stack_of_every_rank_is_printed(
    book: Book, fork: bool
) -> None:
    """The time limit is 0 s, and it is checked only after all ranks hang."""
    book.program(
        "hang",
        DISTRIBUTED
        + """
import pathlib, signal

def wait_forever():
    pathlib.Path("2").touch(); signal.pause()

if rank == 2:
    wait_forever()
pathlib.Path(str(rank)).touch(); dist.barrier()
""",
        "$ torchrun --nproc-per-node=3 hang.py hang-mark-5520\n",
    )
    book.write(
        "conftest.py",
        f"""
        import sys
        sys.path.append({str(Path(__file__).parent)!r})
        import processes
        from worldsize.execution import runner

        run, until = runner.run, runner._until

        def run_until_all_hang(command, folder, **options):
            def until_all_hang(done, seconds):
                if seconds == options["limit"]:
                    processes.until(lambda: all((folder / rank).exists() for rank in "012"))
                return until(done, seconds)

            runner._until = until_all_hang
            return run(command, folder, **options)

        runner.run = run_until_all_hang
        """,
    )
    report = book.pytest(
        "snippets/t/hang.py",
        "-k",
        "cpu",
        "--time-limit",
        "0",
        *(["--launcher=prefork"] if fork else []),
        fork=fork,
    )
    message = report.messages["snippets.t.hang::cpu"]
    assert "it was still running after" in message
    assert message.count("was here (innermost call first)") == 3, message
    assert re.search(r'hang\.py", line 8 in wait_forever', message)
    assert len(re.findall(r"line 12 in <module>", message)) == 2, message
    assert "snippets/t/hang.py:" in message
    assert left_behind("hang-mark-5520", in_command=True) == []


def test_an_interrupted_session_leaves_no_process_running(book: Book) -> None:
    book.program("slow", "import time\ntime.sleep(600)\n", "$ python slow.py slow-mark-8813\n")
    process = book.start("snippets/t/slow.py")
    until(lambda: processes_with("slow-mark-8813", in_command=True), process)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=HANG)
    assert left_behind("slow-mark-8813", in_command=True) == []


def test_an_interrupt_during_the_start_of_a_command_leaves_no_process_running(
    book: Book,
) -> None:
    book.write(
        "conftest.py",
        """
        import os, signal, time
        from worldsize.execution import runner

        start = runner._start_in_bash

        def start_and_interrupt(command, folder, *others):
            started = start(command, folder, *others)
            while not (folder / "begun").exists():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGINT)
            return started

        runner._start_in_bash = start_and_interrupt
        """,
    )
    code = "import time\nopen('begun', 'w').close()\ntime.sleep(600)\n"
    book.program("slow", code, "$ python slow.py slow-mark-8814\n")
    report = book.pytest("snippets/t/slow.py", "-k", "cpu")
    assert report.status == pytest.ExitCode.INTERRUPTED, report.text
    assert left_behind("slow-mark-8814", in_command=True) == []


@pytest.mark.parametrize("fork", [False, True], ids=["process", "prefork"])
def test_commands_of_a_background_job_handle_signals_as_in_a_terminal(
    book: Book, fork: bool
) -> None:
    code = "import signal\nprint(signal.getsignal(signal.SIGINT).__name__)\n"
    code += "print(signal.getsignal(signal.SIGHUP).name)\n"
    book.program("handlers", code, "$ python handlers.py\ndefault_int_handler\nSIG_DFL\n")
    words, env = book.command("snippets", fork=fork)
    shell = ["sh", "-c", "trap '' INT HUP; exec \"$@\"", "sh", sys.executable]
    done = subprocess.run([*shell, *words], cwd=book.root, env=env, capture_output=True)
    assert done.returncode == 0, done.stdout.decode()


def test_only_a_command_with_a_fixed_port_fails_if_its_port_is_in_use(book: Book) -> None:
    with socket.socket() as used, socket.socket() as default:
        used.bind(("127.0.0.1", 0))
        used.listen()
        default.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:  # torchrun's documented default port
            default.bind(("127.0.0.1", 29500))
            default.listen()
        except OSError:
            pass  # a different program uses this port, which has the same effect
        code = DISTRIBUTED + "dist.barrier()\nprint(rank) if rank == 0 else None\n"
        book.program("free", code, "$ torchrun --nproc-per-node=2 free.py\n0\n")
        port = used.getsockname()[1]
        book.program(
            "fixed",
            code,
            f"$ torchrun --master-addr=127.0.0.1 --master-port={port} --nproc-per-node=2 fixed.py\n0\n",
        )
        report = book.pytest("snippets", "-k", "cpu", fork=True)
    assert report.outcomes["snippets.t.free::cpu"] == "passed", report.text
    assert "EADDRINUSE" in report.messages["snippets.t.fixed::cpu"]
    assert str(port) in report.messages["snippets.t.fixed::cpu"]


def test_two_sessions_can_run_at_the_same_time(book: Book) -> None:
    code = DISTRIBUTED + "dist.barrier()\nprint(rank) if rank == 0 else None\n"
    for name in ("one", "two"):
        book.program(name, code, f"$ torchrun --nproc-per-node=2 {name}.py\n0\n")
    words, env = book.command("snippets", fork=True)
    runs = [processes.start(["python", *words], book.root, env) for _ in range(2)]
    texts = [run.communicate(timeout=HANG)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], texts
    report = book.pytest("snippets")
    assert "0 ran, 2 unchanged" in report.text, report.text


def test_each_run_builds_torch_extensions_in_its_own_folder() -> None:
    """A killed build leaves a lock in this folder, and the next build would wait for it."""
    code = "from torch.utils import cpp_extension as e; print(e._get_build_directory(str(1), False))"
    with runner.empty_folder() as folder:
        result = runner.run(f'python -c "{code}"', folder, limit=HANG)
        assert Path(result.stdout.strip()).is_relative_to(folder.parent), result


def test_a_passed_test_runs_again_only_after_a_change(book: Book) -> None:
    book.program("once", "print(1)\n", "$ python once.py\n1\n")
    assert "1 ran, 0 unchanged" in book.pytest("snippets").text
    assert "0 ran, 1 unchanged" in book.pytest("snippets").text
    assert "1 ran, 0 unchanged" in book.pytest("snippets", "--no-cache").text
    book.write("snippets/t/once.py", "print(1)  # edited\n")
    assert "1 ran, 0 unchanged" in book.pytest("snippets").text
    book.write("snippets/t/once.py", "print(2)\n")
    assert book.pytest("snippets").status == 1
    assert book.pytest("snippets").status == 1, "a failed test must run again"


def test_a_passed_test_runs_again_after_an_upgrade(book: Book) -> None:
    """The versions of all packages and the folder requirements/ are inputs of every test."""
    book.program("once", "print(1)\n", "$ python once.py\n1\n")
    installed = book.write("fake-1.0.dist-info/METADATA", "Name: fake\nVersion: 1.0\n").parent
    assert "1 ran, 0 unchanged" in book.pytest("snippets").text
    assert "0 ran, 1 unchanged" in book.pytest("snippets").text
    installed.rename(book.root / "fake-1.1.dist-info")
    assert "1 ran, 0 unchanged" in book.pytest("snippets").text
    book.write("requirements/test.txt", "fake==1.1\n")
    assert "1 ran, 0 unchanged" in book.pytest("snippets").text
    assert "0 ran, 1 unchanged" in book.pytest("snippets").text


def test_a_passed_test_runs_again_after_a_change_of_one_of_its_inputs(book: Book) -> None:
    """The inputs of a program and a block are all files with which they run.

    The inputs of a test are in INPUTS of its module, in its marker or in its parameter.
    """
    book.program("whole", "print(1)\n", "$ python whole.py\n1\n$ python part.py\n2\n")
    book.program("part", "print(2)\n", "$ python part.py\n2\n")
    book.write("docs/b.md", "# B\n\n```bash\npython snippets/t/part.py\n```\n")
    book.write(
        "tests/test_two.py",
        """
        import pytest

        INPUTS = ["data"]

        class Small:
            inputs = ("small.txt",)

        @pytest.mark.parametrize("value", [Small(), 1], ids=["own", "all"])
        def test_parameter(value):
            pass

        @pytest.mark.inputs("small.txt")
        def test_marker():
            pass
        """,
    )
    changes = {  # changed file → how many of two programs, a block and three tests run again
        "snippets/t/whole.py": 1,
        "snippets/t/whole.cpu.txt": 1,
        "snippets/t/part.py": 3,  # `whole` and the block also run this program
        "docs/b.md": 0,  # the change is outside of the block
        "small.txt": 2,
        "data/more/new.txt": 1,
        "data/.icons/new.svg": 1,
        "tests/test_two.py": 3,
        "tests/conftest.py": 3,
        "requirements/test.txt": 6,
        "pyproject.toml": 3,
    }

    def unchanged() -> int:
        report = book.pytest()
        assert report.status == 0, report.text
        return int((re.search(r"(\d+) unchanged since", report.text))[1])

    assert [unchanged(), unchanged()] == [0, 6]
    for name, count in changes.items():
        path = book.root / name
        book.write(name, (path.read_text() if path.exists() else "") + "\n")
        assert unchanged() == 6 - count, name


def test_a_book_that_has_not_changed_is_not_collected(book: Book) -> None:
    """A change of any file counts, except of a file that Git ignores."""
    book.program("once", "print(1)\n", "$ python once.py\n1\n")
    book.write(".gitignore", ".cache/\n__pycache__/\n.venv*\n")
    unchanged = "nothing has changed since all tests passed: 4 passed, 0 skipped"
    assert unchanged not in book.pytest().text
    book.write(".venv-2.15.0/torch.py", "")
    assert unchanged in book.pytest("-n", "2").text
    assert unchanged not in book.pytest("snippets").text
    assert unchanged not in book.pytest("--no-cache").text
    for name in ("docs/once.md", ".github/workflows/x.yml"):
        path = book.root / name
        book.write(name, (path.read_text() if path.exists() else "") + "\n")
        assert unchanged not in book.pytest().text, name
        assert unchanged in book.pytest().text
    book.write("snippets/t/once.py", "print(2)\n")
    assert [book.pytest().status for _ in range(2)] == [1, 1]


def test_only_the_failed_test_of_two_tests_with_one_fixture_runs_again(book: Book) -> None:
    book.write(
        "tests/test_pair.py",
        """
        import pathlib, pytest

        @pytest.fixture(scope="module")
        def shared():
            return pathlib.Path("fixed").exists()

        @pytest.mark.parametrize("name", ["right", "wrong"])
        def test_one(shared, name):
            assert name == "right" or shared
        """,
    )
    assert book.pytest("tests").outcomes == {
        "tests.test_pair::test_one[right]": "passed",
        "tests.test_pair::test_one[wrong]": "failed",
    }
    book.write("fixed", "")
    assert "1 passed, 1 unchanged" in book.pytest("tests").text


def test_record_writes_only_changed_transcripts_of_successful_programs(book: Book) -> None:
    book.program("same", "print('≈1.5 s')\n", "$ python same.py\n≈2.5 s\n")
    book.write("snippets/measured.toml", "[numbers]\n'snippets/t/same.py' = ['.*']\n")
    book.program("other", "print('new')\n", "$ python other.py\nold\n")
    book.program("fails", "print('new')\nraise SystemExit(1)\n", "$ python fails.py\nold\n")
    before = book.read("snippets/t/same.cpu.txt"), book.read("snippets/t/fails.cpu.txt")
    report = book.pytest("--record", "snippets")
    assert (
        book.read("snippets/t/same.cpu.txt"),
        book.read("snippets/t/fails.cpu.txt"),
    ) == before
    assert report.messages["snippets.t.fails::cpu"]
    head, *rest = book.read("snippets/t/other.cpu.txt").splitlines()
    assert re.fullmatch(
        r"# recorded \d{4}-\d\d-\d\d on \d+ CPU cores \(.+\), torch \S+, Python 3\.\S+, in [\d.]+ s",
        head,
    )
    assert rest == ["$ python other.py", "new"]
    assert "recorded snippets/t/other.py::cpu" in report.text
    assert book.pytest("snippets/t/other.py").status == 0


def test_an_older_release_of_torch_has_a_separate_transcript(
    book: Book, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = book.program(
        "it",
        "from importlib.metadata import version\nprint('torch', version('torch')[:4])\n",
        "$ python it.py\ntorch 2.13\n",
    )

    def on(torch: str, *arguments: str) -> Report:
        """Run pytest as if this release of torch were installed."""
        folder = tmp_path / torch / f"torch-{torch}.dist-info"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: torch\nVersion: {torch}\n"
        )
        monkeypatch.setenv("PYTHONPATH", str(folder.parent))
        return book.pytest(*arguments, name)

    on("2.15.0", "--record")
    on("2.11.1", "--record")
    transcripts = {
        path.name: path.read_text().splitlines() for path in book.root.glob("snippets/t/*.txt")
    }
    assert {name: lines[-1] for name, lines in transcripts.items()} == {
        "it.cpu.txt": "torch 2.15",
        "it.cpu-torch-2-13.txt": "torch 2.13",
        "it.cpu-torch-2-11.txt": "torch 2.11",
    }
    assert f"{RECORDED}$ python it.py" == "\n".join(transcripts["it.cpu-torch-2-13.txt"][:2])
    report = on("2.13.1", "--record-compatibility")
    assert report.outcomes["snippets.t.it::cpu"] == "passed"
    assert "make test-torch-versions" in report.messages["snippets.t.it::shown"]
    for torch in ("2.15.0", "2.11.0"):
        assert on(torch, "--record-compatibility").status == 0, torch
    header, row = book.read("snippets/compatibility.csv").splitlines()
    today = datetime.date.today().isoformat()
    assert header == f"program,2.11.0 on {today},2.13.1 on {today},2.15.0 on {today}"
    assert len(set(row.split(",")[1:])) == 1
    book.write(name, book.read(name) + "# changed\n")
    assert "make test-torch-versions" in on("2.13.0").messages["snippets.t.it::shown"]


def test_record_writes_the_output_below_a_block(book: Book) -> None:
    page = """
        # R

        - in a list

            ```python
            print("one")
            print("two")
            ```

            <!--pytest-codeblocks:expected-output-->

            ```text
            three
            ```
        """
    book.write("docs/r.md", page)
    assert book.pytest("docs").status == 1
    book.pytest("--record", "docs")
    assert "    ```text\n    one\n    two\n    ```" in book.read("docs/r.md")
    assert book.pytest("docs").status == 0


def test_a_figure_is_recorded_with_its_transcript(book: Book) -> None:
    book.program(
        "draws",
        "open('draws.svg', 'w').write('<svg xmlns=\"http://www.w3.org/2000/svg\"><text>ranks</text></svg>')\n",
        "$ python draws.py\n",
    )
    with (book.root / "docs/draws.md").open("a") as page:
        page.write("\n![ranks](../snippets/t/draws.svg)\n")
    assert "not in the book yet" in book.pytest("snippets").messages["snippets.t.draws::cpu"]
    book.pytest("--record", "snippets")
    assert "ranks" in book.read("snippets/t/draws.svg")
    assert book.pytest("snippets").status == 0
    book.write(
        "snippets/t/draws.py",
        "open('draws.svg', 'w').write('<svg xmlns=\"http://www.w3.org/2000/svg\"><image href=\"https://a.example/x.png\"/><text>ranks</text></svg>')\n",
    )
    assert (
        "refers to https://a.example/x.png"
        in book.pytest("snippets").messages["snippets.t.draws::cpu"]
    )


def test_forked_commands_give_the_same_transcripts(book: Book) -> None:
    """The transcripts contain the arguments, the exit status and the variables."""
    code = (
        DISTRIBUTED
        + """
import hashlib, os, re, sys
value = torch.tensor([rank + 1.0])
dist.all_reduce(value)
if rank == 0:
    print(value.item(), sys.argv, torch.get_num_threads(), __name__, os.path.basename(__file__))
    print(sorted(os.listdir()), dist.get_world_size(), os.environ["LOCAL_WORLD_SIZE"])
    own = ("TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_RUN_ID", "MASTER_PORT")
    shared = {k: v for k, v in os.environ.items() if k not in own}
    shared = [f"{k}={v}" for k, v in shared.items() if re.match("[A-Z_]*RANK$|[A-Z_]*SIZE$|MASTER|ROLE|TORCH(?!_EXT)", k)]
    print(hashlib.md5(" ".join(sorted(shared)).encode()).hexdigest(), *(k in os.environ for k in own[1:]))
dist.destroy_process_group()
"""
    )
    book.program(
        "ranks",
        code,
        "$ torchrun --nproc-per-node=2 ranks.py --flag=1\n3.0 ['ranks.py', '--flag=1'] 1 __main__ ranks.py\n['ranks.py'] 2 2\n",
    )
    recorded = book.pytest("snippets", "-k", "ranks and cpu", "--record")
    assert recorded.status == 0, recorded.text
    assert book.read("snippets/t/ranks.cpu.txt").endswith(" True True\n")
    book.program(
        "single",
        "import importlib.util, multiprocessing, sys, torch\n"
        "print(sys.argv, torch.ones(3).sum(), importlib.util.find_spec('book'))\n"
        f"print(multiprocessing.get_start_method() == {multiprocessing.get_start_method()!r})\n"
        "sys.exit(2)\n",
        "$ python single.py a\n['single.py', 'a'] tensor(3.) None\nTrue\n[exit status 2]\n",
    )
    # `ranks` was recorded in this mode, so only `single` must run in it again
    not_forked = book.pytest("snippets", "-k", "single and cpu", "--no-cache")
    forked = book.pytest("snippets", "-k", "cpu", "--no-cache", "--launcher=prefork", fork=True)
    assert not_forked.status == 0, not_forked.text
    assert forked.status == 0, forked.text
    assert "differed when it was forked" not in forked.text


def test_a_forked_program_starts_and_exits_cheaply(tmp_path: Path) -> None:
    """It has few page faults, which show how much memory it copies.

    It runs no exit functions of torch, and `inspect` already knows the modules of all frames,
    which torchrun looks up.
    """
    if not processes.LAUNCHER[0]:
        pytest.skip("this session does not fork commands")
    (tmp_path / "short.py").write_text(
        "import inspect, resource, weakref\n"
        "print(any(each.atexit for each in weakref.finalize._registry))\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt < 4000)\n"
        "print({each.filename for each in inspect.stack()} - {*inspect.modulesbyfile})\n"
    )
    done = processes.start(["python", "short.py"], tmp_path, dict(os.environ))
    assert done.communicate(timeout=HANG) == ("False\nTrue\n{'short.py'}\n", "")


def test_a_forked_program_starts_python_programs_as_forks_with_a_clean_state(
    book: Book,
) -> None:
    """Ranks of torchrun, scripts and programs that are started with execvp are forks.

    There are two exceptions, which start a new interpreter: the program has a second thread, or
    it sets a variable that Python reads when it starts.
    """
    head = """
        import os, signal, subprocess, sys, tempfile, threading
        kind = "fork" if "forkserver" in open("/proc/self/cmdline").read() else "process"
        """
    book.program(
        "rank",
        head
        + """
        variables = dict(each.partition("=")[::2] for each in open("/proc/self/environ").read().split("\\0"))
        sys.stdout.reconfigure(errors="replace")  # it fails if it tries to seek in the pipe
        print(kind, sys.argv[1:], variables["RANK"])
        """,
        '$ torchrun --standalone --nproc-per-node=1 rank.py "a b" 2>&1 | grep -e "^fork" -e "^process"\nfork [\'a b\'] 0\n',
    )
    book.program(
        "starts",
        head
        + """
        if len(sys.argv) > 1:
            has_handler = signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
            print(kind, __name__, has_handler, os.getcwd() == sys.argv[1], os.environ.get("GIVEN"))
            sys.exit(5)

        def run(**own):
            words = [sys.executable, "-u", os.path.abspath(__file__), folder]
            done = subprocess.run(words, cwd=folder, env=os.environ | own, stdout=subprocess.PIPE, text=True)
            print(done.stdout.strip(), done.returncode, os.path.exists(folder), flush=True)

        signal.signal(signal.SIGTERM, lambda *_: None)
        stop = threading.Event()
        with tempfile.TemporaryDirectory() as folder:
            run(GIVEN="yes")
            run(PYTHONHASHSEED="0")
            threading.Thread(target=stop.wait).start()
            run()
            stop.set()
        """,
        """
        $ python starts.py
        fork __main__ False True yes 5 True
        process __main__ False True None 5 True
        process __main__ False True None 5 True
        """,
    )
    book.program(
        "execs",
        head
        + """
        if len(sys.argv) > 1:
            print(kind, os.read(int(sys.argv[1]), 1), os.environ["GIVEN"])
            sys.exit()

        reads, writes = os.pipe()
        os.write(writes, b"ab")
        words = [sys.executable, os.path.abspath(__file__), str(reads)]
        subprocess.run(words, pass_fds=[reads], env=os.environ | {"GIVEN": "run"})
        os.set_inheritable(reads, True)
        os.environ["GIVEN"] = "exec"
        os.execvp(words[0], words)
        """,
        "$ python execs.py\nfork b'a' run\nfork b'b' exec\n",
    )
    report = book.pytest("snippets", "-k", "cpu", "--no-cache", "--launcher=prefork", fork=True)
    assert report.status == 0 and "differed when it was forked" not in report.text, report.text


def test_a_command_whose_fork_differs_runs_again_as_it_is_typed(book: Book) -> None:
    """The first command of one program or page in 132 is never forked, here of once.py."""
    code = "print('fork' if 'forkserver' in open('/proc/self/cmdline').read() else 'process')\n"
    book.program("once", code, "$ python once.py\nprocess\n$ python once.py a\nfork\n")
    book.program("forked", code, "$ python forked.py\nfork\n")
    book.program("differs", code, "$ python differs.py\nprocess\n")
    block = "```python\nimport sys\nprint('torch' in sys.modules)\n```\n"
    block += "<!--pytest-codeblocks:expected-output-->\n```text\n{}\n```\n"
    book.write("docs/blocks.md", f"# B\n{block.format(True)}{block.format(False)}")
    report = book.pytest("--no-cache", fork=True)
    assert set(report.outcomes.values()) == {"passed"}, report.text
    message = "differed when it was forked, but passed as it is typed"
    assert f"{message}: snippets/t/differs.py::cpu" in report.text
    assert report.text.count(message) == 1, report.text
    report = book.pytest("snippets", "-k", "forked and cpu", "--no-cache")
    assert report.status == 1, report.text


def test_the_options_of_pytest_work_for_programs_and_pages(book: Book) -> None:
    for name in ("a", "b", "c"):
        book.program(name, "raise SystemExit(1)\n", f"$ python {name}.py\n")
    report = book.pytest("snippets/t/a.py", "-k", "cpu")
    assert list(report.outcomes) == ["snippets.t.a::cpu"]
    report = book.pytest("-x", "snippets", "-k", "cpu")
    assert list(report.outcomes.values()) == ["failed"]
    report = book.pytest("docs/b.md")
    assert set(report.outcomes) == {"docs.b.md::b.md:3", "docs.b.md::b.md:7"}
    assert report.status == 0
    report = book.pytest("-m", "gpu", "snippets")
    assert "deselected" in report.text


def test_a_page_shows_why_a_block_is_skipped_and_where_an_output_was_recorded(
    book: Book,
) -> None:
    from worldsize.site.embeds import render

    book.program("p", "def f():\n    return 1\n\n\nprint(f())\n", "$ python p.py\n1\n")
    page = (
        book.read("docs/p.md").replace("t/p.py", "t/p.py:f")
        + '\n```bash skip="no cluster"\nsrun x\n```\n'
    )
    text = "\n".join(render(page.split("\n"), book.root))
    assert "[snippets/t/p.py](/programs/t/p.md){ .program-path }" in text
    assert "def f():\n    return 1\n```" in text
    assert (
        "Recorded 2026-01-01 on 2 CPU cores (test), torch 2.13.0, Python 3.11.7; 1.0 s" in text
    )
    assert "```bash\nsrun x\n```\n\nNot run here: no cluster\n{ .not-run }" in text
    assert "# recorded" not in text
    assert "in the same folder" not in text

    book.program("q", "print(1)\n", "$ python q.py\n1\n$ python p.py q.py\n1\n")
    text = "\n".join(render(book.read("docs/q.md").split("\n"), book.root))
    assert "1.0 s in all. Needs [p.py](/programs/t/p.md) in the same folder." in text

    book.write("snippets/t/n.csv", "n\n")  # each tab lists the files that its commands need
    provenance = (
        "# recorded 2026-01-01 on 1 × NVIDIA H200, torch 2.13.0, Python 3.11.7, in 2.0 s\n"
    )
    book.write("snippets/t/q.cuda.txt", provenance + "$ python q.py n.csv\n1\n")
    text = "\n".join(render(book.read("docs/q.md").split("\n"), book.root))
    assert "1.0 s in all. Needs [p.py](/programs/t/p.md) in the same folder." in text
    assert "2.0 s in all. Needs [n.csv](/programs/t/n.csv) in the same folder." in text


def test_a_program_gets_the_modules_it_imports_and_the_tables_they_read(book: Book) -> None:
    reads = "import tomllib\nN = tomllib.load(open('n.toml', 'rb'))['n']\n"
    book.write("snippets/t/reads.py", reads)
    book.write("snippets/t/n.toml", "n = 5\n")
    book.write("snippets/t/other.csv", "n\n5\n")
    book.write("snippets/t/between.py", "from reads import N\n")
    book.program("uses", "from between import N\nprint(N)\n", "$ python uses.py\n5\n")
    program = Program(book.root, book.root / "snippets/t/uses.py")
    assert [*staging.required_files(program)] == [
        "uses.py",
        "between.py",
        "reads.py",
        "n.toml",
    ]
    report = book.pytest("snippets/t/uses.py", "-k", "cpu")
    assert list(report.outcomes.values()) == ["passed"], report.text


def test_a_program_whose_compiler_is_missing_is_skipped_with_the_reason(
    book: Book, monkeypatch: pytest.MonkeyPatch
) -> None:
    book.write("snippets/t/kernel.cu", "int main() {}\n")
    book.write("snippets/t/kernel.cpu.txt", RECORDED + "$ nvcc kernel.cu -o kernel\n")
    book.write("snippets/t/asks.py", "print(1)\n")
    book.write(
        "snippets/requirements.toml",
        """
        [requirements]
        nvcc = { label = "nvcc", tools = ["nvcc"] }

        [programs]
        "snippets/t/asks.py" = ["nvcc"]
        """,
    )
    book.write("snippets/t/asks.cpu.txt", RECORDED + "$ python asks.py\n")
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    report = book.pytest("snippets/t/kernel.cu", "snippets/t/asks.py", "-k", "cpu", "-rs")
    if shutil.which("nvcc", path="/usr/bin:/bin"):
        pytest.skip("nvcc is in /usr/bin or /bin, so this test cannot hide it")
    assert list(report.outcomes.values()) == ["skipped", "skipped"]
    assert "nvcc is not on this machine" in report.text


def test_job_scripts_run_in_labs_launch_and_need_a_page_or_a_transcript(book: Book) -> None:
    book.write("labs/launch/train.py", "print('trained')\n")
    book.write("labs/launch/slurm/job.sh", "python train.py\n")
    book.write("labs/launch/slurm/go.sh", "bash slurm/job.sh\n")
    book.write("labs/launch/slurm/forgotten.sh", "true\n")
    book.write(
        "labs/launch/slurm/go.cpu.txt",
        RECORDED + "$ bash slurm/go.sh\ntrained\n$ bash slurm/job.sh\ntrained\n",
    )
    book.write("labs/launch/train.cpu.txt", RECORDED + "$ python train.py\ntrained\n")
    book.write(
        "docs/p.md",
        '# P\n\n```bash\n--8<-- "labs/launch/slurm/go.sh"\n```\n\n'
        '```console\n--8<-- "labs/launch/slurm/go.cpu.txt"\n```\n',
    )
    report = book.pytest("labs", "docs")
    results = {
        name.removeprefix("labs.launch."): (outcome, report.messages[name])
        for name, outcome in report.outcomes.items()
    }
    for test in (
        "slurm.go.sh::shown",
        "slurm.go.sh::cpu",
        "train::cpu",
        "slurm.job.sh::shown",
    ):
        assert results[test][0] == "passed", results
    assert "no page of docs/ embeds it" in results["train::shown"][1]
    assert "it has no transcript" in results["slurm.forgotten.sh::shown"][1]


def missing(folder: Path, name: str, **checks: object) -> str | None:
    """Write a requirement with these checks; return its label if it is not met, or None."""
    lines = (
        f"{key} = {str(value).lower() if value is True else repr(value)}\n"
        for key, value in checks.items()
    )
    text = f"[requirements.it]\nlabel = 'the label'\n{''.join(lines)}[programs]\n{name!r} = ['it']\n"
    path = folder / "snippets/requirements.toml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    requirements._read.cache_clear()
    program = Program(folder, folder / name)
    return requirements.missing_requirement(program, Transcript.parse("$ python p.py\n"))


def test_a_program_is_skipped_on_a_processor_without_its_instructions(
    book: Book, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = book.write("old", "processor\t: 0\nflags\t\t: fpu sse2\n")
    new = book.write("new", "processor\t: 0\nflags\t\t: fpu sse2 avx2\n")
    has = requirements.has_instructions
    assert has("avx2", new) and has("avx2", book.root / "none") and not has("avx2", old)
    book.write("snippets/p.py", "print(1)\n")
    for cpuinfo, expected in ((old, "the label"), (new, None)):
        monkeypatch.setattr(
            requirements, "has_instructions", lambda flag, path=cpuinfo: has(flag, path)
        )
        assert missing(book.root, "snippets/p.py", cpu_flag="avx2") == expected


def test_each_kind_of_requirement_is_checked(
    book: Book, monkeypatch: pytest.MonkeyPatch
) -> None:
    book.write("snippets/p.py", "print(1)\n")
    tool = book.write("bin/some-tool", "#!/bin/sh\n")
    tool.chmod(0o755)
    book.write("some_package/__init__.py", "")
    book.write("some_package/ops/io_1.so", "")
    monkeypatch.setenv("PATH", str(tool.parent), prepend=os.pathsep)
    monkeypatch.setenv("SOME_VARIABLE", "default")
    monkeypatch.syspath_prepend(str(book.root))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    met = {
        "system": sys.platform,
        "root": True,
        "tools": ["some-tool"],
        "packages": ["some_package", "json"],
        "package_file": "some_package/ops/io*.so",
        "variable_unset": "SOME_VARIABLE=other",
        "command": "python -c pass",
    }
    unmet = {
        "system": "plan9",
        "tools": ["some-tool", "no-such-tool"],
        "packages": ["json", "no_such_package"],
        "package_file": "some_package/ops/other*.so",
        "variable_unset": "SOME_VARIABLE=default",
    }
    assert missing(book.root, "snippets/p.py", **met) is None
    for key, value in unmet.items():
        assert missing(book.root, "snippets/p.py", **met | {key: value}) == "the label", key
    label = missing(book.root, "snippets/p.py", command="python no_such_file.py")
    assert label.startswith("the label (") and "no_such_file.py" in label
    monkeypatch.setattr(os, "geteuid", lambda: 1)
    assert missing(book.root, "snippets/p.py", root=True) == "the label"


def test_a_command_has_the_requirements_of_the_program_that_it_starts(book: Book) -> None:
    starts = Program(book.root, book.write("snippets/starts.cu", "int main() {}\n"))
    book.write("snippets/needs.py", "print(1)\n")
    assert missing(book.root, "snippets/needs.py", tools=["no-such-tool"]) == "the label"
    transcript = Transcript.parse("$ python needs.py starts.cu\n")
    assert requirements.missing_requirement(starts, transcript) == "the label"
    transcript = Transcript.parse("$ python other.py needs.py\n")
    assert requirements.missing_requirement(starts, transcript) is None


def test_a_program_in_never_forked_is_not_forked_but_its_grader_is(book: Book) -> None:
    book.write("snippets/requirements.toml", "never_forked = ['snippets/p.py']\n")
    listed, other = (
        Program(book.root, book.write(f"snippets/{name}.py", "print(1)\n"))
        for name in ("p", "q")
    )
    options = RunOptions(launcher=Launcher(True))
    for program, command_line, forked in (
        (listed, "torchrun --nproc-per-node=2 p.py", False),
        (listed, "python labs/check.py p.py", True),
        (other, "torchrun --nproc-per-node=2 q.py", True),
    ):
        launcher = usable_launcher(options, program, command_line, 1)
        assert (launcher is not None) is forked, command_line


def test_a_missing_package_is_reported_with_its_requirements_file(book: Book) -> None:
    book.write(
        "snippets/requirements.toml",
        "[packages]\n'no_such.part' = 'requirements/it.txt'\njson = ''\n",
    )
    program = Program(
        book.root, book.write("snippets/p.py", "import json\nimport no_such.part\n")
    )
    label = requirements.missing_requirement(program, Transcript.parse("$ python p.py\n"))
    assert label == "no_such.part (pip install -r requirements/it.txt)"


def test_the_engine_imports_only_itself_torch_and_pytest() -> None:
    """A GPU machine may have only torch, pytest and pytest-codeblocks.

    A function may import a different package, because it needs the package only when it runs.
    """
    anywhere = sys.stdlib_module_names | {"pytest", "torch"}
    allowed = {
        "src/worldsize/model": {"worldsize.model"},
        "src/worldsize/execution": {"worldsize.model", "worldsize.execution"},
        "src/worldsize/testing": {
            "worldsize.model",
            "worldsize.execution",
            "worldsize.testing",
        },
    }
    for folder, packages in allowed.items():
        paths = sorted((ROOT / folder).glob("*.py"))
        assert paths, f"{folder} contains no modules"
        for path in paths:
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.Import):
                    modules = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom):
                    modules = [f"{node.module}.{alias.name}" for alias in node.names]
                else:
                    continue
                for module in modules:
                    is_own = ".".join(module.split(".")[:2]) in packages
                    assert is_own or module.split(".")[0] in anywhere, (path, module)


def test_with_a_different_number_of_ranks_a_program_works_or_prints_a_sentence(
    book: Book,
) -> None:
    head = "import os, sys\nn = int(os.environ['WORLD_SIZE'])\n"
    command = "$ torchrun --nproc-per-node=2 {}.py\n"
    for name, code in (
        ("any", ""),
        ("two", "if n != 2:\n    sys.exit('two.py needs 2 ranks')\n"),
        ("fails", "assert n == 2\n"),
    ):
        book.program(name, head + code, command.format(name))
    report = book.pytest("--nproc", "3", "--launcher=prefork", "snippets", fork=True)
    assert report.outcomes == {
        "snippets.t.any::ranks-3": "passed",
        "snippets.t.two::ranks-3": "passed",
        "snippets.t.fails::ranks-3": "failed",
    }
    assert "snippets/t/fails.py:3: `torchrun --nproc-per-node=3 fails.py`" in report.text


# --- GPUs: a fake nvidia-smi, a fake torch, and programs that need no GPU ---------------------


class Gpu:
    """A small book on a machine that seems to have GPUs."""

    def __init__(self, book: Book, monkeypatch: pytest.MonkeyPatch) -> None:
        self.book = book
        tool = book.write("bin/nvidia-smi", "#!/bin/sh\n")
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", str(tool.parent), prepend=os.pathsep)
        book.write("torch/__init__.py", "")  # a Python started in this folder imports this one
        self.install("NVIDIA H100 80GB HBM3")

    def install(self, *names: str) -> None:
        """Let the fake torch report these GPUs."""
        count = f"device_count = lambda: {len(names)}\n"
        code = f"{count}get_device_name = lambda n: {names}[n]\n"
        os.utime(self.book.write("torch/cuda.py", code), (0, 0))  # the time never changes

    def list_programs(self, **commands: str) -> None:
        """Write these programs and their commands into snippets/gpu.toml."""
        lines = (f'"snippets/t/{name}.py" = """{each}"""\n' for name, each in commands.items())
        self.book.write("snippets/gpu.toml", "".join(lines))

    def start(self, *arguments: str) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, "-m", "worldsize.tools.record_gpu", *arguments],
            cwd=self.book.root,
            env=os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def record(self, *arguments: str) -> tuple[int, str]:
        """Run the command of `make record-gpu`; return its exit status and its output."""
        process = self.start(*arguments)
        output, _ = process.communicate(timeout=HANG)
        return process.returncode, output

    def interrupt(
        self, number: signal.Signals, program: str, *arguments: str
    ) -> tuple[int, str]:
        """Do the same as `record`, but send a signal when the run of ``program`` starts."""
        process, output = self.start(*arguments), ""
        try:
            while f"{program} …" not in output:
                line = process.stdout.readline()
                assert line, output
                output += line
            process.send_signal(number)
            return process.wait(timeout=HANG), output + process.stdout.read()
        finally:
            process.terminate()
            process.communicate(timeout=HANG)


@pytest.fixture
def gpu(book: Book, monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(book, monkeypatch)


def write_three_programs(book: Book) -> str:
    """Write a program that draws a figure, one that fails, and one that never ends.

    Return the figure, which the first program reads from the file `f`.
    """
    book.write("snippets/t/right.py", "open('right.svg', 'w').write(open('f').read())\n")
    book.write("snippets/t/fails.py", "raise SystemExit('out of memory')\n")
    book.write("snippets/t/sleeps.py", "import time\nwhile True:\n    time.sleep(1)\n")
    return "<svg xmlns='http://www.w3.org/2000/svg'><text>time</text></svg>"


@pytest.mark.parametrize(
    ("number", "expected_status", "message"),
    [(signal.SIGALRM, 1, "the time budget is used up"), (signal.SIGTERM, 130, "interrupted")],
)
def test_an_interrupted_recording_keeps_its_results_and_the_next_call_continues(
    gpu: Gpu, tmp_path: Path, number: signal.Signals, expected_status: int, message: str
) -> None:
    figure = write_three_programs(gpu.book)
    gpu.list_programs(
        right=f'$ printf "{figure}" > f; echo 7\n$ python right.py',
        fails="$ python fails.py",
        sleeps="$ echo begun\n$ python sleeps.py",
    )
    order = ["right.py", "fails.py", "sleeps.py"]
    archive = tmp_path / "new.tar.gz"
    options = ["--budget", "99999", "--archive", str(archive)]
    status, output = gpu.interrupt(number, "t/sleeps.py", *options)
    assert status == expected_status
    assert output.startswith("1 × NVIDIA H100 80GB HBM3") and ": 3 to record in" in output
    assert output.splitlines()[1] == f"  snippets/t: {', '.join(order)}"
    assert message in output and "1 recorded, 1 failed, 1 left" in output
    assert "failed: snippets/t/fails.py" in output and "out of memory" in output
    assert output.endswith("left for the next call:\n  snippets/t: sleeps.py\n")
    new = ["snippets/t/right.cuda.svg", "snippets/t/right.cuda.txt"]
    with tarfile.open(archive) as tar:
        assert tar.getnames() == [".cache/gpu.txt", *new]
        assert "1 left" in tar.extractfile(".cache/gpu.txt").read().decode()
    assert "NVIDIA H100 80GB HBM3, torch" in (text := gpu.book.read(new[1]))
    assert text.endswith(f'$ printf "{figure}" > f; echo 7\n7\n$ python right.py\n')
    files = {path.name for path in (gpu.book.root / "snippets/t").iterdir()}
    assert files == {*order, "right.cuda.svg", "right.cuda.txt"}

    gpu.book.write("snippets/t/sleeps.py", "print('ended')\n")
    status, output = gpu.record("--archive", str(archive))
    assert status == 1
    assert "2 to record\n  snippets/t: sleeps.py, fails.py\n" in output
    assert "skipped (already recorded and unchanged):\n  snippets/t: right.py\n" in output
    with tarfile.open(archive) as tar:
        assert tar.getnames() == [".cache/gpu.txt", *new, "snippets/t/sleeps.cuda.txt"]


def test_a_program_that_exceeded_the_time_budget_is_recorded_last_in_the_next_call(
    gpu: Gpu,
) -> None:
    write_three_programs(gpu.book)
    gpu.book.write("snippets/t/quick.py", "print(1)\n")
    gpu.list_programs(sleeps="$ python sleeps.py", quick="$ python quick.py")
    assert "0 recorded, 1 failed, 1 left" in gpu.interrupt(signal.SIGALRM, "t/sleeps.py")[1]
    status, output = gpu.interrupt(signal.SIGINT, "[2/2] snippets/t/sleeps.py")
    assert "1 recorded, 0 failed, 1 left" in output and status == 130


def test_a_recording_reports_missing_packages_and_gpus_with_the_skipped_programs(
    gpu: Gpu,
) -> None:
    gpu.book.write("snippets/t/asks.py", "import json\nimport nothing_like_it\n")
    gpu.book.write(
        "snippets/t/tries.py", "try:\n    import nothing_like_it\nexcept: print(1)\n"
    )
    gpu.list_programs(
        asks="$ python asks.py",
        tries="$ python tries.py",
        named="$ python tries.py\n$ python asks.py",
        two="$ torchrun --nproc-per-node=2 two.py",
    )
    for name in ("named", "two"):
        gpu.book.write(f"snippets/t/{name}.py", "print(1)\n")
    status, output = gpu.record()
    assert status == 0 and "1 recorded, 0 failed, 0 left" in output
    assert "skipped (nothing_like_it is missing):\n  snippets/t: asks.py, named.py\n" in output
    few = "needs 2 GPUs, this machine has 1 and no NCCL (from NCCL 2.30 on, ranks can share a GPU)"
    assert f"skipped ({few}):\n  snippets/t: two.py\n" in output
    assert "lists no program in snippets/u" in gpu.record("snippets/u")[1]
    gpu.book.write("there", "no archive\n")
    assert "is not an archive" in gpu.record("--archive", "there")[1]
    gpu.install()
    assert "no NVIDIA GPU on this machine" in gpu.record()[1]


def test_each_kind_of_gpu_is_compared_with_its_own_transcript(gpu: Gpu) -> None:
    gpu.book.write("snippets/t/both.py", "print(1.5)\n")
    gpu.book.write("snippets/t/first.py", "print(1)\n")
    gpu.list_programs(both="$ python both.py", first="$ python first.py")
    assert gpu.record()[0] == 0
    gpu.install("NVIDIA A100-SXM4-80GB")
    assert gpu.record("snippets/t/both.py")[0] == 0
    both = Program(gpu.book.root, gpu.book.root / "snippets/t/both.py")
    assert both.devices == ["cuda", "a100"]
    gpu.book.write("snippets/t/both.py", "print(2.5)\n")
    report = gpu.book.pytest("--device", "cuda", "snippets")
    assert report.outcomes == {
        "snippets.t.both::cuda": "failed",
        "snippets.t.first::cuda": "skipped",
    }
    assert "snippets/t/both.a100.txt:2" in report.text
    reason = "recorded on 1 × NVIDIA H100 80GB HBM3, this machine has 1 × NVIDIA A1"
    assert reason in report.messages["snippets.t.first::cuda"]
    gpu.list_programs(first="$ python first.py", both="$ python both.py again")
    report = gpu.book.pytest("snippets/t/both.py", "-k", "shown")
    assert "both.cuda.txt:1: snippets/gpu.toml does not list these commands" in report.text
    assert gpu.record("snippets/t/both.py")[0] == 0
    assert "$ python both.py again\n2.5\n" in gpu.book.read("snippets/t/both.a100.txt")
    assert "$ python both.py\n1.5\n" in gpu.book.read("snippets/t/both.cuda.txt")


def test_measured_numbers_may_differ_only_a_little_on_the_recorded_kind_of_gpu(
    gpu: Gpu,
) -> None:
    """A declared time may differ by 50% and a declared ratio by 10%.

    With the factor 500 for different machines, a claim about a speed could become false.
    """
    gpu.list_programs(speed="$ python speed.py")
    gpu.book.write("snippets/measured.toml", "[numbers]\n'snippets/t/speed.py' = ['.*']\n")
    outcomes = {}
    gpu.book.write("snippets/t/speed.py", "print('≈20.0 ms, ≈4.00 × as fast')\n")
    assert gpu.record()[0] == 0
    for printed in ("≈28.0 ms, ≈4.30 ×", "≈32.0 ms, ≈4.00 ×", "≈20.0 ms, ≈4.60 ×"):
        gpu.book.write("snippets/t/speed.py", f"print('{printed} as fast')\n")
        report = gpu.book.pytest("--device", "cuda", "snippets")
        outcomes[printed] = report.outcomes["snippets.t.speed::cuda"]
    assert [*outcomes.values()] == ["passed", "failed", "failed"], outcomes


def test_a_program_that_needs_more_gpus_is_skipped_with_the_reason(gpu: Gpu) -> None:
    gpu.book.write("snippets/t/g.py", "print(1)\n")
    recorded = RECORDED.replace("2 CPU cores (test)", "4 × NVIDIA H100")
    command = "$ torchrun --nproc-per-node=4 g.py\n1\n"
    gpu.book.write("snippets/t/g.cuda.txt", recorded + command)
    report = gpu.book.pytest("--device", "cuda", "snippets")
    assert list(report.outcomes.values()) == ["skipped"]
    assert "needs 4 GPUs, this machine has 1" in next(iter(report.messages.values()))


def fake_nccl(folder: Path, version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile a library that reports this version of NCCL, for the processes that start next."""
    compiler = shutil.which("cc") or pytest.skip("it compiles a library")
    folder.mkdir()
    code = f"int ncclGetVersion(int *version) {{ *version = {version}; return 0; }}"
    (folder / "nccl.c").write_text(code)
    words = [compiler, "-shared", "-fPIC", "-o", "libnccl.so.2", "nccl.c"]
    subprocess.run(words, cwd=folder, check=True)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(folder))


def test_ranks_that_share_a_gpu_are_recorded_and_tested(
    gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu.book.write(
        "snippets/t/g.py",
        """
        import os

        if os.environ["RANK"] == "0":
            print(os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE"), "≈5.0 s")
        """,
    )
    gpu.list_programs(
        g="$ torchrun --nproc-per-node=2 g.py", own="$ torchrun --nproc-per-node=2 own.py"
    )
    gpu.book.write("snippets/t/own.py", "print(1)\n")
    listed = (gpu.book.root / "snippets/gpu.toml").read_text("utf-8")
    gpu.book.write("snippets/gpu.toml", f'own_gpus = ["snippets/t/own.py"]\n{listed}')

    fake_nccl(tmp_path / "2.28", 22809, monkeypatch)
    status, output = gpu.record()
    few = "needs 2 GPUs, this machine has 1"
    old = f"{few} and NCCL 2.28.9 (from NCCL 2.30 on, ranks can share a GPU)"
    assert f"skipped ({old})" in output

    fake_nccl(tmp_path / "2.30", 23007, monkeypatch)
    status, output = gpu.record()
    assert status == 0 and "g.py: recorded" in output, output
    assert f"skipped ({few}):" in output, output
    recorded = (gpu.book.root / "snippets/t/g.cuda.txt").read_text("utf-8").splitlines()
    assert " on 2 ranks on 1 × NVIDIA H100 80GB HBM3, NCCL 2.30.7, torch " in recorded[0]
    assert recorded[1:] == ["$ torchrun --nproc-per-node=2 g.py", "1 ≈5.0 s"]
    report = gpu.book.pytest("--device", "cuda", "snippets")
    assert report.outcomes["snippets.t.g::cuda"] == "passed"

    gpu.install("NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB HBM3")
    report = gpu.book.pytest("--device", "cuda", "--no-cache", "snippets")
    assert report.outcomes["snippets.t.g::cuda"] == "failed"  # it prints None on two GPUs
    assert "+ None ≈5.0 s" in report.messages["snippets.t.g::cuda"]


def test_a_path_that_does_not_exist_is_reported(book: Book) -> None:
    book.program("right", "print(1)\n", "$ python right.py\n1\n")
    report = book.pytest("snippets/t/right.py", "docs/absent.md")
    assert report.status == 4 and not report.outcomes
    assert "these files do not exist: docs/absent.md" in report.text


def test_blocks_of_a_page_can_use_gpus_only_with_device_cuda(gpu: Gpu) -> None:
    gpu.book.write(
        "docs/p.md",
        """
        # P

        ```python
        import os

        assert "CUDA_VISIBLE_DEVICES" not in os.environ
        ```

        ```yaml
        a: 1
        ```
        """,
    )
    on_gpu = gpu.book.pytest("--device", "cuda", "docs")
    assert on_gpu.outcomes == {"docs.p.md::p.md:3": "passed"}
    assert gpu.book.pytest("--device", "cpu", "docs").outcomes["docs.p.md::p.md:3"] == "failed"
    gpu.install()
    assert (
        gpu.book.pytest("--device", "cuda", "docs").outcomes["docs.p.md::p.md:3"] == "skipped"
    )


def test_device_cuda_passes_if_nothing_was_recorded_on_a_gpu(book: Book) -> None:
    path = book.program("one", "print(1)\n", "$ python one.py\n1\n")
    report = book.pytest("--device", "cuda", path)
    assert report.status == 0
    assert (
        "no GPU transcript of these programs was recorded yet (use `make record-gpu`)"
        in report.text
    )
    assert book.pytest("--device", "cuda", path, "-k", "other").status == 5
    assert (
        "Use `make record-gpu` to record on GPUs"
        in book.pytest("--device", "cuda", "--record").text
    )


def test_the_processor_time_is_printed_after_a_collection_error(book: Book) -> None:
    """The three tests need 7, 0 and 3 seconds.

    The measured time decreases during the second test, which then counts as 0 seconds.
    """
    book.write("docs/lost.md", '# L\n\n```python\n--8<-- "snippets/t/lost.py"\n```\n')
    book.write(
        "conftest.py",
        """
        from worldsize.testing import plugin

        plugin.MIN_MEASURED_DURATION = 0.0
        measured = iter([10.0, 17.0, 2.0, 5.0])
        plugin.processes.processor_seconds = lambda: next(measured)
        """,
    )
    book.write(
        "tests/test_three.py", "def test_1(): pass\ndef test_2(): pass\ndef test_3(): pass\n"
    )
    report = book.pytest("--continue-on-collection-errors")
    assert report.status == 1 and "snippets/t/lost.py does not exist" in report.text
    assert re.search(r"^10 s of processor time", report.text, re.M), report.text


@pytest.mark.skipif(sys.platform != "linux", reason="it needs /proc")
def test_the_processor_time_of_an_ended_process_is_counted_once() -> None:
    """Otherwise the time of a browser would be counted again when its parent waits for it."""
    work = "import time\nwhile time.process_time() < 0.5:\n    pass\n"
    before = processor_seconds()
    process = subprocess.Popen([sys.executable, "-c", work])
    stat = Path(f"/proc/{process.pid}/stat")
    until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "Z")
    ended = processor_seconds()
    process.wait()
    assert before + 0.5 <= ended and processor_seconds() - ended < 0.2


def test_a_file_over_its_budget_fails_with_strict_time_and_is_a_warning_on_github(
    book: Book, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GitHub shows the warning only in a session that forks commands."""
    book.write("tests/budget.toml", 'default = 1000\n"snippets/t/hungry.py" = 0.01\n')
    work = "import time\nwhile time.process_time() < 0.1:\n    pass\n"
    for name in ("hungry", "modest"):  # with a pipe, because such a command is not forked
        book.program(name, work, f"$ python {name}.py | cat\n")
    message = r"snippets/t/hungry\.py needed \d+\.\d s of processor time, but tests/budget\.toml allows only 0\.01"
    strict = book.pytest("snippets", "--no-cache", "--strict-time", "-n", "2")
    assert strict.status == pytest.ExitCode.TESTS_FAILED, strict.text
    assert set(strict.outcomes.values()) == {"passed"}
    assert re.search(f"^{message}$", strict.text, re.M), strict.text
    assert "modest.py needed" not in strict.text
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    warning = f"^::warning file=snippets/t/hungry\\.py::{message}$"
    for fork in (True, False):
        report = book.pytest("snippets", "--no-cache", fork=fork)
        assert report.status == 0, report.text
        assert bool(re.search(warning, report.text, re.M)) == fork, report.text
        assert report.text.count("tests/budget.toml") == fork, report.text


def test_each_test_is_in_exactly_one_shard(book: Book) -> None:
    """A shard contains whole files, and a file with a large budget has its own shard."""
    book.write("tests/budget.toml", 'default = 1\n"snippets/t/b.py" = 100\n')
    for name in "abcde":
        book.program(name, "print(1)\n", f"$ python {name}.py\n1\n")
    book.write("tests/test_two.py", "def test_1(): pass\ndef test_2(): pass\n")

    def collected(*options: str) -> list[str]:
        report = book.pytest("--collect-only", "-q", *options)
        assert report.status == 0, report.text
        return [line for line in report.text.splitlines() if "::" in line]

    all_tests = collected()
    shards = [collected("--shard", f"{number}/3") for number in (1, 2, 3)]
    assert sorted(test for shard in shards for test in shard) == sorted(all_tests)
    files = [{test.partition("::")[0] for test in shard} for shard in shards]
    assert {"snippets/t/b.py"} in files and [len(each) for each in files] == [1, 5, 5]
