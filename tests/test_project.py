"""The project around the book: what README and CONTRIBUTING say works, and workflows run it."""

from __future__ import annotations

import ast
import datetime
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from processes import HANG

from worldsize.execution import requirements
from worldsize.model import page
from worldsize.model.program import MEASURED, Program, gpu_commands, is_program, programs
from worldsize.model.transcript import APPROXIMATE, Tolerances, Transcript, same_line

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).resolve().parent.parent
INPUTS = [
    ".ci", ".github", ".gitignore", "AGENTS.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "LICENSE-TEXT", "Makefile",
    "README.md", "SECURITY.md", "assessment", "src", "docs", "graders", "labs", "mkdocs.yml",
    "overrides", "snippets", "tests",
]  # fmt: skip
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
PAGES = ["AGENTS.md", "README.md", "CONTRIBUTING.md", "SECURITY.md"]
REFERENCE = sorted((ROOT / "docs/contributing").glob("*.md"))
MAKEFILE = (ROOT / "Makefile").read_text("utf-8")
TARGETS = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.M))
VARIABLES = {"PYTHON", *re.findall(r"^([A-Z_]+) \?=", MAKEFILE, re.M)}


def workflow(name: str) -> dict:
    parsed = yaml.safe_load((ROOT / ".github/workflows" / name).read_text("utf-8"))
    parsed["on"] = parsed.pop(True)  # YAML 1.1 reads the key `on` as a truth
    return parsed


ENGINES = (
    r"https://\S*?(?:vllm|sglang|TensorRT-LLM|tensorrt|xgrammar|llguidance|outlines-core)"
    r"\S*?/v?(\d+\.\d+\.\d+\w*)/"
)
READ = {  # pages that quote engines: the versions they say they were read in, and when
    path: front["read"]
    for path in sorted(ROOT.glob("docs/**/*.md"))
    if (text := path.read_text("utf-8")).startswith("---\n")
    and "read" in (front := yaml.safe_load(text.split("---\n")[1]))
}


def test_pages_link_the_versions_of_engines_that_they_say_they_read() -> None:
    for path in ROOT.glob("docs/**/*.md"):
        linked = set(re.findall(ENGINES, path.read_text("utf-8")))
        listed = {str(at) for what, at in READ.get(path, {}).items() if what != "month"}
        assert linked == listed, (
            f"{path.name}: `read` lists {listed}, the links are to {linked}"
        )


@pytest.mark.parametrize("path", READ, ids=lambda path: path.stem)
def test_what_was_read_of_engines_is_not_old(path) -> None:
    """It is named with its month, and less than half a year older than the newest recording."""
    month = READ[path]["month"]
    when = datetime.date.fromisoformat(f"{month}-01")
    assert f"{when:%B %Y}" in path.read_text("utf-8"), f"{path.name} does not say {month}"
    recorded = [
        re.match(r"# recorded (\d+)-(\d+)", each.read_text("utf-8"))
        for each in ROOT.glob("snippets/*/*.cpu.txt")
    ]
    newest = max(12 * int(found[1]) + int(found[2]) for found in recorded if found)
    age = newest - 12 * when.year - when.month
    assert age < 6, f"{path.name} read the engines {age} months before the newest recording"


def make_calls(text: str) -> list[tuple[int, str]]:
    """Every call of make in a text: its line, what stands behind `make`."""
    calls = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.lstrip().startswith("# "):
            continue
        calls += [(number, m[1]) for m in re.finditer(r"(?:^\s*|`|run: )make ([^`|&]+)", line)]
    return calls


def tracked() -> list[Path]:
    """The repository's own files."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout, so its own files are not known")
    return [ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


def test_documented_commands_are_the_makefiles() -> None:
    files = [*(ROOT / name for name in PAGES), *REFERENCE, ROOT / ".ci/run", *WORKFLOWS]
    seen, wrong = set(), []
    for path in files:
        for number, call in make_calls(path.read_text("utf-8")):
            words = re.findall(
                r"[A-Z_]+(?==)|[a-z-]+(?=\s|$)|\S+", re.sub(r'"[^"]*"', "", call)
            )
            target = call.split()[0]
            if not re.fullmatch(r"[a-z-]+", target):
                continue
            variables = {word for word in words if re.fullmatch(r"[A-Z_]+", word)}
            seen.add(target)
            if target not in TARGETS or variables - VARIABLES:
                wrong.append(f"{path.relative_to(ROOT)}:{number}: make {call.strip()}")
    assert not wrong, "\n".join(wrong)
    assert seen >= {"serve", "test", "record", "site", "record-gpu", "help"}, seen


def test_documented_options_are_pytests(pytestconfig: pytest.Config) -> None:
    table = page.read(ROOT / "docs/contributing/testing.md").text("options")
    options = re.findall(r"^\| `(--[a-z-]+)", table, re.M)
    assert len(options) >= 4
    missing = object()
    unknown = [each for each in options if pytestconfig.getoption(each, missing) is missing]
    assert not unknown, f"docs/contributing/testing.md: pytest has no option {unknown}"


@pytest.mark.parametrize("name", PAGES)
def test_links_of_the_page_lead_somewhere(name: str) -> None:
    text = (ROOT / name).read_text("utf-8")
    links = re.findall(r"\]\(([^)#:]+)(#[^)]+)?\)|(?:src|srcset)=\"([^\":]+)\"", text)
    missing = [a or b for a, _, b in links if not (ROOT / (a or b)).exists()]
    assert not missing, f"{name}: {missing}"
    sections = [(path, anchor[1:]) for path, anchor, _ in links if anchor]
    missing = [each for each in sections if each[1] not in page.read(ROOT / each[0]).headings]
    assert not missing, f"{name}: {missing}"


def test_contributing_is_short_and_links_every_page_of_reference() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    assert len(text.split()) <= 1000
    linked = set(re.findall(r"\]\((docs/contributing/\w+\.md)", text))
    assert linked == {path.relative_to(ROOT).as_posix() for path in REFERENCE}


def test_commands_of_the_readme_are_recorded() -> None:
    """Each torchrun or python line of the README starts a program whose transcript has it."""
    text = (ROOT / "README.md").read_text("utf-8")
    lines = re.findall(r"^(?:torchrun|python) .+$", text, re.M)
    assert len(lines) >= 3
    for line in lines:
        path = re.search(r"\S+\.py", line)[0]
        program = "labs/lab02_ddp.py" if path.startswith(("labs/", "my_labs/")) else path
        commands = {
            each.command_line
            for each in Program(ROOT, ROOT / program).transcript("cpu").commands
        }
        assert line.replace(path, Path(path).name) in commands or line in commands, line


def test_pythons_are_the_same_everywhere() -> None:
    jobs = workflow("test.yml")["jobs"]
    for job in jobs.values():
        matrix = job["strategy"]["matrix"]["python"]
        assert matrix == ["3.11", "3.12", "3.13"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == f">={matrix[0]}"
    assert f"Python {matrix[0]} to {matrix[-1]}" in (ROOT / "README.md").read_text()


FAKE_PYTHON = """#!/bin/sh
shift
exec {python} -c "import sys; sys.version_info = (3, {minor}, 0); exec(sys.argv[1])" "$@"
"""


@pytest.mark.parametrize("minor", range(9, 16))
def test_make_uses_only_a_python_that_is_tested(minor: int, tmp_path: Path) -> None:
    """Make `python3` claim a version. The Makefile must choose it if a workflow tests it."""
    if (make := shutil.which("make")) is None:
        pytest.skip("this machine has no make")
    fake = tmp_path / "python3"
    fake.write_text(FAKE_PYTHON.format(python=sys.executable, minor=minor))
    fake.chmod(0o755)
    matrix = workflow("test.yml")["jobs"]["test"]["strategy"]["matrix"]["python"]
    done = subprocess.run(
        [make, "-s", "--eval=chosen: ; @echo $(BASE_PYTHON)", "chosen"],
        cwd=ROOT, env={"PATH": str(tmp_path)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout.strip() == ("python3" if f"3.{minor}" in matrix else ""), done.stderr


def dry_run(*words: str) -> str:
    """The commands that make would run, without an installation."""
    command = ["make", "--dry-run", f"PYTHON={sys.executable}", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_requirements_are_pinned_and_reading_needs_no_torch() -> None:
    for name in ("read", "test"):
        lines = (ROOT / f"requirements/{name}.txt").read_text().splitlines()
        wanted = [line for line in lines if line and not line.startswith(("#", "-r "))]
        pinned = r"[A-Za-z0-9_.-]+==[\w.]+(; platform_system == \"Linux\"( and platform_machine == \"x86_64\")?)?"
        loose = [line for line in wanted if not re.fullmatch(pinned, line)]
        assert wanted and not loose, f"requirements/{name}.txt: {loose}"
        if name == "read":
            assert not [line for line in wanted if line.startswith(("torch", "deepspeed"))]
        else:
            assert "torch==2.13.0" in wanted


def test_no_file_names_a_registry() -> None:
    """Packages come from wherever the machine is set to take them."""
    hosts = re.compile(
        "|".join(["pypi" + r"\.org", "pytorch" + r"\.org/whl", "registry" + r"\.npmjs"])
    )
    found = []
    for path in tracked():
        try:
            text = path.read_text("utf-8")
        except UnicodeDecodeError:
            continue
        found += [f"{path.relative_to(ROOT)}: {match[0]}" for match in hosts.finditer(text)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflow_is_held_tight(path: Path) -> None:
    text, parsed = path.read_text("utf-8"), workflow(path.name)
    for uses in re.findall(r"uses: (.+)", text):
        assert re.match(r"\./\.github/|[\w./-]+@[0-9a-f]{40} # v\d", uses), uses
    top = parsed.get("permissions")
    assert top in ({}, {"contents": "read"}), "rights are given job by job"
    assert "pull_request_target" not in text and "workflow_run:" not in text
    assert "${{ secrets." not in text
    for name, job in parsed["jobs"].items():
        assert "concurrency" in job or "concurrency" in parsed or "uses" in job, name
        if "uses" in job:
            continue
        assert job["timeout-minutes"] <= 90, name
        assert "permissions" in job or top == {"contents": "read"}, name
        for step in job["steps"]:
            assert "${{ inputs." not in step.get("run", ""), f"{name}: a shell injection"
            if step.get("uses", "").startswith("actions/checkout@"):
                assert step["with"]["persist-credentials"] is False, name


def test_what_security_says_of_workflows_is_so() -> None:
    """Only the last job of main and of upgrade-check may write, and they run nothing of the
    book; only one workflow asks for the GPU runner."""
    writes, own, started = set(), set(), {}
    for path in WORKFLOWS:
        parsed = workflow(path.name)
        started[path.stem] = set(parsed["on"])
        for name, job in parsed["jobs"].items():
            rights = job.get("permissions", parsed["permissions"])
            writes |= {(path.stem, name) for right in rights.values() if right != "read"}
            if "self-hosted" in job.get("runs-on", ""):
                own.add((path.stem, name))
            steps = str(job.get("steps", ""))
            assert "actions/cache" not in steps and "download-artifact" not in steps, name
    assert writes == {
        ("publish", "deploy"),
        ("publish", "notebooks"),
        ("upgrade-check", "issue"),
    }
    assert own == {("gpu", "gpu")}
    issue = workflow("upgrade-check.yml")["jobs"]["issue"]
    assert issue["permissions"] == {"issues": "write"}
    assert not any("uses" in step or "${{" in step["run"] for step in issue["steps"])
    assert {name for name in started if "pull_request" in started[name]} == {"test"}
    published = workflow("publish.yml")["jobs"]
    assert not any("cache" in step.get("with", {}) for step in published["site"]["steps"])
    assert "uses" not in published["deploy"]
    deploys = [step["uses"] for step in published["deploy"]["steps"] if "uses" in step]
    assert len(deploys) == 1 and "deploy-pages@" in deploys[0], "it runs nothing of the book"
    (pushes,) = published["notebooks"]["steps"]
    assert pushes.keys() == {"name", "env", "run"} and "${{" not in pushes["run"]


def test_workflows_run_what_a_reader_runs() -> None:
    """CI runs what .ci/run runs: the commands of the README, all shards, and the strict build."""
    jobs = workflow("test.yml")["jobs"]
    matrix = jobs["test"]["strategy"]["matrix"]
    assert matrix.keys() == {"python", "shard", "include"}
    how = {
        "3.11": "--launcher=process",
        "3.12": "--every-answer",
    }  # all as typed; every wrong answer
    assert {each["python"]: each["how"] for each in matrix["include"]} == how
    assert matrix["shard"] == [1, 2, 3, 4]
    runs = next(step for step in jobs["test"]["steps"] if "make test" in step.get("run", ""))
    shard = "--shard ${{ matrix.shard }}/4 ${{ matrix.how }} --junitxml="
    assert "WHAT" not in runs["env"] and runs["env"]["ARGS"].startswith(shard)
    site, zensical = jobs["site"]["steps"][-2:]
    assert (site["run"], zensical["run"]) == ("make site", "make compare-zensical")
    needed = "if", "continue-on-error"
    assert not [
        key for part in (*jobs.values(), runs, site, zensical) for key in needed if key in part
    ]
    said = (ROOT / ".ci/run").read_text()
    assert said.index("make test") < said.index("make site")
    if shutil.which("make"):
        assert "mkdocs build --strict" in dry_run("site")
    gpu = [step.get("run", "") for step in workflow("gpu.yml")["jobs"]["gpu"]["steps"]]
    call = next(run for run in gpu if 'make test WHAT="snippets labs assessment docs"' in run)
    assert "--device cuda --no-cache" in call
    assert "--device cuda --no-cache" in (ROOT / "docs/contributing/testing.md").read_text(
        "utf-8"
    )


# how a program says that it needs a GPU, before it leaves
NEEDS_A_GPU = re.compile(
    r"(?:exit|stderr,)[^;]{0,40}needs an? (?:\w+ )?GPU|(?:no GPU|none) here|exit\(f.no NVIDIA"
)
TAKES_GPUS = re.compile(
    r"^\$ (timeout \d+ )?"
    r"(\./\w+|python |torchrun |compute-sanitizer |for name in |LD_LIBRARY_PATH=)",
    re.M,
)


def test_each_program_that_needs_a_gpu_has_commands_for_one() -> None:
    listed = gpu_commands(ROOT)
    for name, commands in listed.items():
        program = Program(ROOT, ROOT / name)
        assert is_program(program.path, ROOT) and program.path.exists(), name
        assert len(TAKES_GPUS.findall(commands)) == commands.count("$ "), name
        shown = program.gpu_template.text()
        assert program.path.name in shown and "cuda_on_cpu" not in shown, name
        nvcc = [
            each
            for each in program.gpu_template.commands
            if each.command_line.startswith("nvcc ")
        ]
        assert len(nvcc) == (program.path.suffix == ".cu"), name
    for program in programs(ROOT):
        refuses = NEEDS_A_GPU.search(program.path.read_text("utf-8"))
        assert not refuses or program.name in listed, program.name


def test_every_file_with_a_budget_of_its_own_exists() -> None:
    budgets = tomllib.loads((ROOT / "tests/budget.toml").read_text("utf-8"))
    default = budgets.pop("default")
    wrong = {name for name in budgets if not (ROOT / name).is_file()}
    wrong |= {name for name, seconds in budgets.items() if seconds <= default}
    assert budgets and not wrong, f"tests/budget.toml: {wrong}"


def test_publishing_waits_for_both_on_one_commit() -> None:
    publish, gpu = workflow("publish.yml"), workflow("gpu.yml")
    jobs = publish["jobs"]
    assert publish["on"] == {"push": {"branches": ["main"]}}
    assert jobs["test"]["uses"] == "./.github/workflows/test.yml"
    assert jobs["gpu"]["uses"] == "./.github/workflows/gpu.yml"
    assert set(jobs["site"]["needs"]) == {"test", "gpu"} and jobs["deploy"]["needs"] == "site"
    assert "needs.gpu.outputs.commit == github.sha" in jobs["site"]["if"]
    # a pull request reaches the GPUs only through somebody who may write, and an approval
    assert set(gpu["on"]) == {"workflow_dispatch", "workflow_call"}
    assert gpu["jobs"]["gpu"]["needs"] == "approval"
    assert "github.ref == 'refs/heads/main'" in gpu["jobs"]["gpu"]["if"]
    assert "gpu-review" in gpu["jobs"]["gpu"]["environment"]


# --- the worked example of CONTRIBUTING ---------------------------------------------------------


def blocks(text: str, language: str) -> list[tuple[str, str]]:
    """The fences of a language, each with its title."""
    return [
        (fence.options.get("title", ""), "".join(f"{line}\n" for line in fence.lines))
        for fence in page.parse(text).fences
        if fence.language == language
    ]


def test_contributing_quotes_what_stands_in_the_files() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    fences = [*blocks(text, "python"), *blocks(text, "toml")]
    quoted = [each for each in fences if each[0].startswith(("graders", "tests"))]
    assert len(quoted) == 3
    for title, body in quoted:
        assert body in (ROOT / title).read_text("utf-8"), f"{title} has no\n{body}"


def test_worked_example_of_contributing(tmp_path: Path) -> None:
    """A newcomer who follows it step by step sees what it says."""
    if shutil.which("make") is None:
        pytest.skip("this machine has no make")
    for name in ("src", "docs", "graders", "Makefile", "pyproject.toml"):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tmp_path / name, symlinks=True)
        else:
            shutil.copy2(source, tmp_path / name)
    (tmp_path / "snippets/02_ddp").mkdir(parents=True)
    text = page.read(ROOT / "CONTRIBUTING.md").text("a-program")
    what = "snippets/02_ddp/broadcast.py"

    def run(command: str) -> tuple[int, str]:
        done = subprocess.run(
            f"{command} PYTHON={sys.executable} WORKERS= ARGS=--launcher=process",
            shell=True,
            executable="/bin/bash",
            cwd=tmp_path,
            env={
                key: value
                for key, value in os.environ.items()
                if key not in {"CI", *VARIABLES} and not re.search("PYTEST|MAKE|MFLAGS", key)
            },
            capture_output=True,
            text=True,
            timeout=HANG,
        )
        return done.returncode, done.stdout + done.stderr

    (title, program), *_ = blocks(text, "python")
    assert title == what
    (tmp_path / what).write_text(program, "utf-8")
    (_, steps), *_ = blocks(text, "bash")
    status, said = run(steps.strip())
    assert status == 0, said

    (title, declaration), *_ = blocks(text, "toml")
    (tmp_path / title).write_text(f"[numbers]\n{declaration}", "utf-8")
    tolerances = Program(tmp_path, tmp_path / what).tolerances
    assert tolerances.measured, declaration

    (title, shown), *_ = blocks(text, "console")
    recorded = Transcript.parse((tmp_path / title).read_text("utf-8"))
    printed = Transcript.parse(shown)
    assert recorded.commands[0].command_line == printed.commands[0].command_line
    for ours, theirs in zip(
        printed.commands[0].output, recorded.commands[0].output, strict=True
    ):
        assert same_line(ours, theirs, tolerances), (
            f"CONTRIBUTING.md shows {ours!r}, it prints {theirs!r}"
        )

    messages = [body for _, body in blocks(text, "text")]
    status, said = run(f"make test WHAT={what}")
    assert status != 0 and messages[0].strip() in said, said

    (title, addition), *_ = blocks(text, "markdown")
    chapter = tmp_path / title
    chapter.write_text(chapter.read_text("utf-8") + "\n" + addition, "utf-8")
    status, said = run(f"make test WHAT={what}")
    closing = re.search(r"\d+ passed, \d+ unchanged", messages[1])[0]
    assert status == 0 and closing in said, said

    assert program.count("    dist.broadcast(weight, src=0)\n") == 1
    broken = program.replace("    dist.broadcast(weight, src=0)\n", "")
    (tmp_path / what).write_text(broken, "utf-8")
    status, said = run(f"make test WHAT={what}")
    assert status != 0, said
    for line in messages[2].strip().splitlines():
        assert line in said, f"CONTRIBUTING.md shows {line!r}, which is not in:\n{said}"


def test_each_requirement_is_defined_and_needed_by_a_program() -> None:
    declared = requirements.declarations(ROOT)
    names = {program.name for program in programs(ROOT)}
    listed = {*declared.programs, *declared.never_forked}
    assert listed <= names, f"no such program: {listed - names}"
    needed = {name for listed in declared.programs.values() for name in listed}
    assert needed == set(declared.requirements)
    for each in declared.requirements.values():
        files = [word for word in each.command.split() if "/" in word]
        assert all((ROOT / file).exists() for file in files), each.command
    imported = {name for each in programs(ROOT) for name in each.imports(*declared.packages)}
    assert imported == set(declared.packages)
    assert all((ROOT / file).exists() for file in declared.packages.values() if file)


def test_each_measured_number_is_in_a_transcript() -> None:
    """A program that is listed has, for each pattern, a number after ≈ that it matches."""
    listed = tomllib.loads((ROOT / MEASURED).read_text("utf-8"))
    by_name = {program.name: program for program in programs(ROOT)}
    for name, patterns in listed["numbers"].items():
        commands = [
            command
            for transcript in by_name[name].transcripts().values()
            for command in transcript.commands
        ]
        lines = [line for command in commands for line in command.output if "≈" in line]
        for pattern in patterns:
            only = Tolerances((pattern,))
            found = any(
                only.is_measured(line, match.start())
                for line in lines
                for match in APPROXIMATE.finditer(line)
            )
            assert found, f"{MEASURED}: no number of {name} matches {pattern!r}"
    for name in listed["figures"]:
        assert by_name[name].figure.exists(), f"{MEASURED}: {name} draws no figure"
        assert name in listed["numbers"], f"{MEASURED}: {name} has a curve but no numbers"


def test_the_engine_contains_no_name_of_a_program() -> None:
    """A docstring may name one as an example; no other text of the code may."""
    names = {program.path.name for program in programs(ROOT)} - {"check.py"}  # it grades
    for layer in ("model", "execution", "testing"):
        for path in (ROOT / "src/worldsize" / layer).glob("*.py"):
            tree = ast.parse(path.read_text("utf-8"))
            docstrings = [
                node.value
                for node in ast.walk(tree)
                if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            ]
            texts = [
                node.value
                for node in ast.walk(tree)
                if isinstance(node, ast.Constant) and node not in docstrings
            ]
            words = set(re.findall(r"[\w-]+\.(?:py|sh|cu|cpp)\b", " ".join(map(str, texts))))
            assert not words & names, f"{path}: {words & names}"
