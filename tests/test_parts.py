"""The parts of the engine, one at a time, in this process: what a small book need not be run for."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pytest
from conftest import RECORDED, Book
from processes import HANG, LAUNCHER

from worldsize.execution import gpu_clocks, prefork, requirements, runner
from worldsize.model import BookError, atomic_write, fingerprint, page
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

INPUTS = ["src"]


# --- files -----------------------------------------------------------------------------------


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
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


def test_whatever_an_outcome_depends_on_changes_the_digest(tmp_path: Path, monkeypatch) -> None:
    seen = set()

    def changed(*parts: str | Path) -> bool:
        seen.add(fingerprint.digest(tmp_path, *parts))
        return len(seen) == len({*names})

    names = ["first"]
    inside = tmp_path / "data"
    inside.mkdir()
    (inside / "a").write_text("1")
    assert changed(inside)
    (inside / "a").rename(inside / "b")
    names.append("renamed")
    assert changed(inside)
    (inside / "b").write_text("longer")
    names.append("edited within a session")
    assert changed(inside)
    (inside / "__pycache__").mkdir()
    (inside / "__pycache__/b.pyc").write_text("")
    assert changed(inside)  # not by a cache
    names += ["ab c", "a bc"]
    changed("ab", "c")
    assert changed("a", "bc")
    monkeypatch.setattr(sys, "version", "another")
    fingerprint._installed_versions.cache_clear()
    names.append("another Python")
    assert changed("a", "bc")
    monkeypatch.undo()
    fingerprint._installed_versions.cache_clear()


def test_what_passed_is_noted_beside_what_other_runs_noted(tmp_path: Path, monkeypatch) -> None:
    one, other = ResultCache(tmp_path), ResultCache(tmp_path)
    one.add({"a": "1", "b": "1"})
    other.add({"c": "1", "b": None})
    assert ResultCache(tmp_path).known == {"a": "1", "c": "1"}
    (tmp_path / ".gitignore").write_text(".cache/\n")
    tools = tmp_path / ".cache/bin"
    tools.mkdir()
    monkeypatch.setenv("PATH", str(tools))
    before = one.everything()
    assert one.everything() == before
    os.utime(tools, (0, 0))  # as when a tool is installed there
    assert one.everything() != before


# --- transcripts -----------------------------------------------------------------------------


def test_a_transcript_says_again_what_was_read() -> None:
    text = RECORDED + "$ python a.py \\\n    --more\na path C:\\\nnext\n[exit status 3]\n$ ls\n"
    read = Transcript.parse(text)
    assert read.text() == text
    assert [(each.command_line, each.output, each.status) for each in read.commands] == [
        ("python a.py \\\n    --more", ["a path C:\\", "next"], 3),
        ("ls", [], 0),
    ]
    with pytest.raises(BookError, match=r"t:3: this output is after `\[exit status"):
        Transcript.parse("$ false\n[exit status 1]\nmore\n", "t")
    assert output_lines("step 1\rstep 2\r\ndone  \n\n") == ["step 2", "done"]


def test_an_output_is_held_as_closely_as_its_numbers_allow() -> None:
    assert same_line("loss 0.50001", "loss 0.50002")
    assert not same_line("loss 0.5000", "loss 0.5021")
    assert not same_line("9 ranks", "8 ranks")
    for measured in ((), (".*",)):
        differs = difference(["≈2.0 s"], ["≈20.0 s"], Tolerances(measured))
        assert bool(differs) is not bool(measured)


# --- pages -----------------------------------------------------------------------------------


@pytest.fixture
def embedding(tmp_path: Path):
    """The lines that an embed of a file stands for."""
    (tmp_path / "book").mkdir()

    def of(text: str, part: str, name: str = "a.py") -> list[str]:
        (tmp_path / "book/a.py").write_text(text)
        return resolve(Embed(1, "", f"{name}:{part}"), tmp_path / "book")

    return of


def test_an_embed_is_all_of_what_it_names_and_no_more(embedding, tmp_path: Path) -> None:
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


def test_a_page_is_taken_apart_as_markdown_does(tmp_path: Path) -> None:
    markdown = pytest.importorskip("markdown")
    text = "# A `b` c\n\n## Adam\n\n### [Adam](x.md), again\n\n## Adam\n\n## Adam { #own }\n"
    md = markdown.Markdown(extensions=["toc", "attr_list"])
    md.convert(text)
    ids, level = [], md.toc_tokens
    while level:
        ids += [each["id"] for each in level]
        level = [child for each in level for child in each["children"]]
    here = page.parse(text)
    assert sorted(ids) == sorted(here.headings) and "adam_1" in ids
    fenced = page.parse("text\n\n````markdown\n```python\n# no heading\n```\n````\nmore\n")
    assert [(each.line, each.end) for each in fenced.fences] == [(3, 7)]
    assert [number for number, _ in fenced.prose()] == [1, 2, 8, 9] and not fenced.headings


# --- programs --------------------------------------------------------------------------------


def test_a_program_is_known_by_where_it_lies_and_what_it_uses(book: Book) -> None:
    book.program("waits", "print(1)\n", "$ python waits.py\n$ python beside.py\n")
    path = book.write("snippets/t/beside.py", "import triton\n")
    waits = Program(book.root, book.root / "snippets/t/waits.py")
    assert [each.path.name for each in waits.dependencies()] == ["beside.py"]
    path.write_text("def f():\n    import triton\n")
    assert Program(book.root, path).imports("triton") == ["triton"]
    link = book.root / "labs/lab.py"
    link.symlink_to(path)
    assert is_program(path, book.root) and not is_program(link, book.root)
    assert is_orphan(book.write("snippets/t/gone.svg", "<svg/>"), book.root)
    assert not is_orphan(book.write("snippets/t/waits.svg", "<svg/>"), book.root)
    for name in ("waits.rtx-4090.txt", "waits.a100.svg", "waits.cuda.txt"):
        assert not is_orphan(book.write(f"snippets/t/{name}", "<svg/>"), book.root)
    assert is_orphan(book.write("snippets/t/gone.a100.txt", ""), book.root)
    assert waits.devices == ["cpu", "cuda", "rtx-4090"]
    assert transcript_device(Path("waits.rtx-4090.txt")) == "rtx-4090"


# --- running ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "program", "takes"),
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
        ("python a.py | sort", "snippets/t/a.py", False),
        ("RANK=0 WORLD_SIZE=1 python a.py 2>&1", "snippets/t/a.py", True),
        ("python a.py > log", "snippets/t/a.py", False),
        ("python -c 1", "snippets/t/a.py", False),
        ("python by_hand.py", "labs/launch/by_hand.py", False),
        ("torchrun --nproc-per-node=2 once.py", "snippets/t/once.py", False),
    ],
)
def test_what_starts_warm_needs_no_shell_but_to_filter(
    command: str, program: str, takes: bool
) -> None:
    launcher = prefork.Launcher()
    assert launcher.accepts(command, program) is takes
    if program.endswith("first.py"):
        assert launcher.accepts(command, program, 1)


@pytest.mark.parametrize(
    ("code", "status"),
    [(None, 0), (0, 0), (3, 3), ("needs 2 ranks", 1)],
)
def test_warm_a_program_leaves_with_its_status(code: object, status: int, capsys) -> None:
    assert prefork._status_of(lambda: sys.exit(code)) == status
    assert prefork._status_of(lambda: 1 / 0) == 1
    assert "ZeroDivisionError" in capsys.readouterr().err


@pytest.mark.skipif(not prefork.shares_headers(), reason="not Linux, or no openssl")
def test_what_compiles_warm_shares_its_headers() -> None:
    launcher = LAUNCHER[0] or prefork.Launcher()
    with runner.empty_folder() as folder:
        (folder / "a.py").write_text(
            "import os; from torch._inductor import codecache as c, config\n"
            "print(config.cpp_cache_precompile_headers, os.environ['TMPDIR'] in c._HEADER_DIR)\n"
        )
        done = runner.run("python a.py", folder, limit=HANG, launcher=launcher)
    assert done.stdout == "True False\n", done.stderr


def test_a_run_has_the_variables_of_a_reader(tmp_path: Path, monkeypatch) -> None:
    for name in ("OMP_NUM_THREADS", "WORLD_SIZE", "PYTEST_CURRENT_TEST", "TZ"):
        monkeypatch.setenv(name, "2")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    cpu, cuda = (runner.environment(tmp_path / "run", each) for each in ("cpu", "cuda"))
    assert (cpu["CUDA_VISIBLE_DEVICES"], cuda["CUDA_VISIBLE_DEVICES"]) == ("", "0")
    assert cpu["TZ"] == "2"
    assert not {"OMP_NUM_THREADS", "WORLD_SIZE", "PYTEST_CURRENT_TEST"} & set(cpu)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells who is whose child")
def test_what_left_its_session_is_found_and_what_was_cut_says_so(monkeypatch) -> None:
    monkeypatch.setattr(runner, "IDLE_TIMEOUT", 0.2)
    monkeypatch.setattr(runner, "MAX_OUTPUT_BYTES", 5)
    with runner.empty_folder() as folder:
        command = "setsid -f sleep 3599 > /dev/null 2>&1; echo a long line"
        result = runner.run(command, folder, limit=600)
    assert len(result.leftovers) == 1 and "sleep 3599" in result.leftovers[0]
    assert result.stdout.splitlines() == ["a lon", "… cut: the output has 12 bytes"]


TORCHRUN = """\
[rank0]: the other is gone
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


def test_a_failure_is_told_by_the_rank_that_failed_first() -> None:
    result = runner.Result("torchrun a.py", 1, "", TORCHRUN, 1.0)
    said = runner.explain(result, {"/x/run/": "snippets/t/"})
    assert said.startswith("rank 1 exited with status 1\nits last lines:\n")
    assert said.endswith("ValueError: unwell") and "rank0" not in said
    assert 'File "snippets/t/a.py", line 9' in said
    assert result.line_in("a.py") == 3  # the innermost
    stacks = [("rank 1", 'File "a.py", line 8 in wait\n  File "a.py", line 20 in <module>')]
    assert runner.Result("x", -9, "", "", 1.0, True, stacks).line_in("a.py") == 8


# --- what holds a program --------------------------------------------------------------------


def held(
    book: Book, name: str, code: str, transcript: str, **run_options: object
) -> program_check.CheckResult:
    path = book.root / book.program(name, code, transcript)
    return program_check.check(
        Program(book.root, path), "cpu", program_check.CheckOptions(**run_options)
    )


def test_only_a_declared_number_may_differ_as_times_do(book: Book) -> None:
    """A comment that mentions a clock changes nothing, and neither does reading one."""
    book.write("snippets/measured.toml", "[numbers]\n'snippets/t/clock.py' = ['≈[\\d.]+ s']\n")
    held(book, "clock", "print('≈20 s, ≈7')\n", "$ python clock.py\n≈2 s, ≈7\n")
    for name, code, printed in (
        ("clock", "print('≈2 s, ≈70')\n", "≈2 s, ≈7"),  # a number beside the declared one
        ("comment", "# time.perf_counter()\nprint('≈20 s')\n", "≈2 s"),
        ("reads", "import time\ntime.time()\nprint('≈20 s')\n", "≈2 s"),
    ):
        with pytest.raises(BookError, match="printed something else"):
            held(book, name, code, f"$ python {name}.py\n{printed}\n")


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
def test_on_the_recorded_kind_of_gpu_times_and_ratios_are_close(
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
        ("0.30000001192092896", "0.30000010", True),  # float32 has no more digits
        ("0.300000", "0.300003", False),
    ],
)
def test_a_decimal_agrees_in_all_printed_digits_but_for_one_unit(
    recorded: str, printed: str, same: bool
) -> None:
    assert same_line(recorded, printed) is same
    assert same_line(printed, recorded) is same


def test_no_output_has_the_path_of_its_folder(book: Book) -> None:
    with pytest.raises(BookError, match=r"snippets/t/leaks\.py:1: .*the path of the folder"):
        held(
            book, "leaks", "import os\nprint('in', os.getcwd())\n", "$ python leaks.py\nin x\n"
        )


def test_recording_writes_down_what_was_only_typed(book: Book) -> None:
    path = book.program("typed", "print(1)\n", "$ python typed.py\n1\n")
    transcript = book.write("snippets/t/typed.cpu.txt", "$ python typed.py\n1\n")
    outcome = program_check.check(
        Program(book.root, book.root / path), "cpu", program_check.CheckOptions(record=True)
    )
    assert outcome.recorded and transcript.read_text().startswith("# recorded ")


@pytest.mark.parametrize(
    ("code", "fine"),
    [
        ("import sys; sys.exit('it needs a GPU')", True),
        ("import sys; print('it needs a GPU', file=sys.stderr)", False),
        ("import sys; print('no CUDA', file=sys.stderr); 1 / 0", False),
        ("import sys; sys.exit('it needs more')", False),
    ],
)
def test_a_refusal_is_one_sentence_and_a_status(book: Book, code: str, fine: bool) -> None:
    path = book.write("snippets/t/gpu.py", code + "\n")
    book.write("snippets/t/gpu.cuda.txt", RECORDED + "$ python gpu.py\n")
    try:
        program_check.check_refusal(Program(book.root, path), program_check.CheckOptions())
    except BookError:
        assert not fine
    else:
        assert fine


def test_a_page_shows_a_program_its_output_and_its_figure(book: Book) -> None:
    program = Program(book.root, book.root / book.program("p", "1\n", "$ python p.py\n"))

    def why() -> str:
        try:
            shown.check_shown(program, page.embedded_files(book.root))
        except BookError as error:
            return str(error)
        return ""

    assert why() == ""
    book.write("snippets/t/p.svg", "<svg/>")
    assert why() == "snippets/t/p.py:1: it draws snippets/t/p.svg, which no page shows"
    book.write("docs/p.md", '```python\n--8<-- "snippets/t/p.py"\n```\n![](snippets/t/p.svg)\n')
    assert why().startswith("docs/p.md:2: the page embeds snippets/t/p.py but no page")
    assert program.figure in program_check.inputs(program, "cpu")


def test_gpus_and_ranks_are_those_of_all_commands() -> None:
    text = "$ torchrun --nproc-per-node=2 a.py\n$ torchrun --nproc-per-node=4 a.py\n[exit status 1]\n"
    assert requirements.gpus_needed(Transcript.parse(text)) == 4


def test_what_a_gpu_runs_is_what_is_listed(book: Book) -> None:
    book.write("snippets/t/add.cpu.txt", "$ nvcc add.cu -o add\n$ python emulate.py add.cu\n")
    add = Program(book.root, book.write("snippets/t/add.cu", "int main() {}\n"))
    assert add.gpu_template is None
    listed = """
        "snippets/t/add.cu" = \'\'\'
        $ ./add
        $ ./add beside.cu
        [exit status 1]
        \'\'\'
    """
    book.write("snippets/gpu.toml", listed)
    assert add.gpu_template.text() == (
        "$ nvcc add.cu -o add\n$ ./add\n$ ./add beside.cu\n[exit status 1]\n"
    )
    book.write("snippets/t/beside.cu", "")
    assert [each.path.name for each in add.dependencies()] == ["beside.cu"]
    assert str(listed.split()[-1]) not in program_check.inputs(add, "cpu")
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
def test_a_kind_of_gpu_is_the_name_of_its_model(name: str, kind: str) -> None:
    assert gpu_kind(name) == kind


SVG = '<svg xmlns="http://www.w3.org/2000/svg" xmlns:x="http://www.w3.org/1999/xlink">{}</svg>'


def test_a_figure_refers_to_no_other_host_and_its_numbers_are_no_labels() -> None:
    for name in ("href", "x:href"):
        with pytest.raises(BookError, match=r"it refers to https://a\.example"):
            figures.Figure.parse(SVG.format(f'<image {name}="https://a.example/x.png"/>'))
    text = SVG.format('<use href="#a"/><text>s</text><text>3</text>')
    assert figures.Figure.parse(text).labels == ["s"]


def test_a_measured_number_in_a_label_may_differ_as_in_an_output() -> None:
    old, new, more = (
        figures.Figure.parse(SVG.format(text))
        for text in (
            "<text>exposed ≈34 ms</text>",
            "<text>exposed ≈309 ms</text>",
            "<text>exposed ≈34 ms</text><text>waiting</text>",
        )
    )
    assert "other words" in str(figures.figure_difference(old, new))
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
        ("M 0 0 L 200 40", 39, 41),  # another end
        ("M 0 0 L 100 70 L 150 70 L 200 80", 15, 60),  # the same ends and box, another curve
        ("M 0 80 L 200 0", 75, 85),  # falls in place of rising, in the same box
    ],
)
def test_curves_are_compared_by_points_whatever_their_number(
    other: str, low: float, high: float
) -> None:
    path = curve("M 0 0 L 100 40 L 200 80")
    assert low <= figures.distance(path, curve(other)) <= high
    assert low <= figures.distance(curve(other), path) <= high


def test_figures_with_other_shapes_are_infinitely_far_apart() -> None:
    line = curve("M 0 0 L 9 9")
    for others in ([], [*line, *line], curve("")):
        assert figures.distance(line, others) == float("inf")


# --- blocks of a page ------------------------------------------------------------------------


def faults(book: Book, text: str, **run_options: object) -> list[str]:
    """What is wrong with the blocks of a page."""
    path, found = book.write("docs/p.md", text), []
    for block in code_blocks.extract(path, book.root):
        try:
            code_blocks.check(block, program_check.CheckOptions(**run_options))
        except BookError as error:
            found.append(str(error).splitlines()[0])
    return found


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("```bash\nfalse\ntrue\n```\n", "docs/p.md:1: bash block failed"),
        ("```bash\nfalse | true\n```\n", "docs/p.md:1: bash block failed"),
        ("```console\n$ true\n$ exit 3\n```\n", "docs/p.md:3: console block failed"),
        ("```console\n$ exit 3\n[exit status 3]\n```\n", ""),
        ('```python skip="why"\nif\n```\n', "docs/p.md:2: invalid syntax"),
        ("```yaml\na: 1\n---\nb: [\n```\n", "docs/p.md:5: not a valid YAML"),
        ("```yaml\na: 1\n---\napiVersion: v1\n```\n", "docs/p.md:1: not a valid Kubernetes"),
        ('```bash\n--8<-- "snippets/t/a.py"\n```\n', "docs/p.md:1: snippets/t/a.py in a fence"),
        (
            '```text\n--8<-- "snippets/t/b.cpu.txt"\n```\n',
            "docs/p.md:1: snippets/t/b.cpu.txt is",
        ),
        ('```text\n--8<-- "snippets/t/a.cpu.txt"\n```\n', ""),
    ],
)
def test_a_block_is_refused(book: Book, text: str, why: str) -> None:
    book.program("a", "print(1)\n", "$ python a.py\n1\n")
    book.write("snippets/t/b.cpu.txt", "$ python b.py\n")
    said = faults(book, text)
    assert said == [] if not why else len(said) == 1 and said[0].startswith(why), said


def test_an_output_is_written_under_its_own_block(book: Book) -> None:
    """Two blocks print another thing than the same lines below them say."""
    below = "\n<!--pytest-codeblocks:expected-output-->\n\n```text\nold\n```\n\n"
    text = f"```python\nprint('one')\n```\n{below}```python\nprint('two')\n```\n{below}"
    path = book.write("docs/p.md", text)
    first, second = code_blocks.extract(path, book.root)
    assert repr(first.expected.lines) in first.inputs()  # another output is to be held anew
    code_blocks.check(second, program_check.CheckOptions(record=True))
    assert page.read(path).fences[3].lines == ("two",) and "```text\nold\n" in path.read_text()


# --- the plugin ------------------------------------------------------------------------------


def test_another_engine_holds_everything_anew(book: Book) -> None:
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
    run = ("snippets", "docs", "-k", "cpu")
    assert "1 ran, 0 unchanged" in book.pytest(*run).text
    assert "0 ran, 1 unchanged" in book.pytest(*run).text
    engine.write_text("# another\n")
    assert "1 ran, 0 unchanged" in book.pytest(*run).text
    book.write("ci", "")
    assert "1 ran, 0 unchanged" in book.pytest(*run).text


def test_a_file_that_changes_meanwhile_is_not_what_passed(book: Book) -> None:
    book.write(".gitignore", ".cache/\n__pycache__/\n")
    book.write(
        "tests/test_it.py",
        "import pathlib\n\n\ndef test():\n    pathlib.Path('data').write_text('x')\n",
    )
    assert "1 passed" in book.pytest().text
    (book.root / "data").unlink()  # as it was before, but not as the test saw it
    assert "nothing has changed" not in book.pytest().text


# --- mutants ---------------------------------------------------------------------------------


def test_a_mutant_is_one_place_behind_any_letters(book: Book) -> None:
    source = 'x = "Ψ≈", 3 - 1\n'
    (made,) = mutation.made(source)
    assert made.source == 'x = "Ψ≈", (3 + 1)\n'
    path = book.program("add", "print(1 + 1, 1 + 1)\n", "$ python add.py\n2 2\n")
    book.write("tests/mutants/t.toml", f'["{path}"]\n"twice" = ["1 + 1", "1 - 1"]\n')
    program = Program(book.root, book.root / path)
    with pytest.raises(BookError, match="occurs 2 times"):
        mutation.of(program, "written")
    mutant = mutation.Mutant("what", 1, "change", "print(3)\n")
    assert mutant.source in plugin._mutant_inputs(program, mutant)


# --- what changed between two commits --------------------------------------------------------


def test_outputs_that_changed_stand_beside_those_before(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(transcript_diff, "ROOT", tmp_path)
    transcript = tmp_path / "snippets/a.cpu.txt"
    transcript.parent.mkdir()
    for output in ("1.25 and ≈3 s", "1.25 and ≈4 s", "1.5 and ≈4 s"):
        transcript.write_text(f"$ python a.py\n{output}\n$ python a.py --again\nas ever\n")
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
    """A GPU that is idle at first, and then runs into its power limit.

    Each reading has a clock in MHz and the mask of reasons.
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


def test_the_clock_of_a_gpu_is_recorded_while_it_is_busy() -> None:
    nvml = FakeNvml((345, 1), (900, 0), (1980, 0), (1410, 4), (1500, 64 | 1024))
    with gpu_clocks.Recorder(nvml, interval=0.001) as recorder:
        assert nvml.sampled.wait(30)
        nvml.sampled.clear()
        assert nvml.sampled.wait(30)  # the last reading was sampled, too
    seen = recorder.result()
    why = ("power limit", "heat (hardware)", "reason 0x400")
    assert seen == Clocks(1410, 1980, 1980, why)  # neither 345, idle, nor 900, rising
    assert Clocks.parse(str(seen)) == seen


def test_no_clock_is_recorded_of_an_idle_gpu_or_without_a_driver() -> None:
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
    shown = template.render(
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
    )
    assert f"7.2 s in all{end.replace(', SM', '; SM', 1)}." in shown


def test_an_unknown_end_of_the_first_line_is_an_error() -> None:
    with pytest.raises(BookError, match="not a valid `# recorded …` line"):
        Transcript.parse(f"{ON_A_GPU}, SM clock fast\n$ python p.py\n1\n")


def test_numbers_of_a_gpu_without_a_clock_are_recorded_again(
    book: Book, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU that reports its clock replaces a transcript that has none, and no other."""
    book.program("p", "print(1)\n", "$ python p.py\n1\n")
    book.write("snippets/gpu.toml", '"snippets/t/p.py" = "$ python p.py"\n')
    transcript = book.write("snippets/t/p.cuda.txt", f"{ON_A_GPU}\n$ python p.py\n1\n")
    monkeypatch.setattr(gpu_clocks.Recorder, "result", lambda self: Clocks(1410, 1980, 1980))
    monkeypatch.setattr(runner, "describe_device", lambda device: "1 × NVIDIA H200")

    def check(**run_options: bool) -> program_check.CheckResult:
        program = Program(book.root, book.root / "snippets/t/p.py")
        return program_check.check(program, "cuda", program_check.CheckOptions(**run_options))

    assert not check().recorded  # a test never writes
    assert check(record=True).recorded
    assert ", SM clock 1410 to 1980 of 1980 MHz\n" in transcript.read_text("utf-8")
    assert not check(record=True).recorded
