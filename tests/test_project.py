"""Tests of README, CONTRIBUTING, the Makefile and the workflows: they agree with the code."""

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
from worldsize.model.compatibility import TABLE as COMPATIBILITY
from worldsize.model.program import (
    GPU_COMMANDS,
    MEASURED,
    Program,
    gpu_commands,
    is_program,
    owning_program,
    programs,
)
from worldsize.model.traces import SUFFIX, TRACES, trace_settings
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
    parsed["on"] = parsed.pop(True)  # YAML 1.1 reads the key `on` as True
    return parsed


ENGINES = (
    r"https://\S*?(?:vllm|sglang|TensorRT-LLM|tensorrt|xgrammar|llguidance|outlines-core)"
    r"\S*?/v?(\d+\.\d+\.\d+\w*)/"
)
# For each page that cites inference engines: the versions that we read, and in which month.
READ = {
    path: front["read"]
    for path in sorted(ROOT.glob("docs/**/*.md"))
    if (text := path.read_text("utf-8")).startswith("---\n")
    and "read" in (front := yaml.safe_load(text.split("---\n")[1]))
}


def test_pages_link_to_the_versions_of_engines_that_they_list() -> None:
    for path in ROOT.glob("docs/**/*.md"):
        linked = set(re.findall(ENGINES, path.read_text("utf-8")))
        listed = {str(at) for what, at in READ.get(path, {}).items() if what != "month"}
        assert linked == listed, (
            f"{path.name}: `read` lists {listed}, but the page links to {linked}"
        )


@pytest.mark.parametrize("path", READ, ids=lambda path: path.stem)
def test_a_page_names_the_month_of_its_sources_and_they_are_recent(path) -> None:
    """They are less than half a year older than the newest recorded output."""
    month = READ[path]["month"]
    when = datetime.date.fromisoformat(f"{month}-01")
    assert f"{when:%B %Y}" in path.read_text("utf-8"), f"{path.name} does not name {month}"
    recorded = [
        re.match(r"# recorded (\d+)-(\d+)", each.read_text("utf-8"))
        for each in ROOT.glob("snippets/*/*.cpu.txt")
    ]
    newest = max(12 * int(found[1]) + int(found[2]) for found in recorded if found)
    age = newest - 12 * when.year - when.month
    assert age < 6, f"{path.name}: its sources are {age} months older than the newest output"


def make_calls(text: str) -> list[tuple[int, str]]:
    """Return the line number of each call of make in a text, and the words after `make`."""
    calls = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.lstrip().startswith("# "):
            continue
        calls += [(number, m[1]) for m in re.finditer(r"(?:^\s*|`|run: )make ([^`|&]+)", line)]
    return calls


def tracked() -> list[Path]:
    """Return the files of the repository that git does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listed.returncode != 0:
        pytest.skip("this copy is not a git checkout, so git cannot list its files")
    return [ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


def test_the_makefile_has_all_documented_commands() -> None:
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


def test_pytest_has_all_documented_options(pytestconfig: pytest.Config) -> None:
    table = page.read(ROOT / "docs/contributing/testing.md").text("options")
    options = re.findall(r"^\| `(--[a-z-]+)", table, re.M)
    assert options
    missing = object()
    unknown = [each for each in options if pytestconfig.getoption(each, missing) is missing]
    assert not unknown, (
        f"docs/contributing/testing.md: pytest does not have these options: {unknown}"
    )


@pytest.mark.parametrize("name", PAGES)
def test_links_of_a_document_have_targets(name: str) -> None:
    text = (ROOT / name).read_text("utf-8")
    links = re.findall(r"\]\(([^)#:]+)(#[^)]+)?\)|(?:src|srcset)=\"([^\":]+)\"", text)
    missing = [a or b for a, _, b in links if not (ROOT / (a or b)).exists()]
    assert not missing, f"{name} links to files that do not exist: {missing}"
    sections = [(path, anchor[1:]) for path, anchor, _ in links if anchor]
    missing = [each for each in sections if each[1] not in page.read(ROOT / each[0]).headings]
    assert not missing, f"{name} links to sections that do not exist: {missing}"


def test_contributing_is_short_and_links_to_all_reference_pages() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    prose = re.sub(r"^```python.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    assert len(prose.split()) <= 930
    linked = set(re.findall(r"\]\((docs/contributing/\w+\.md)", text))
    assert linked == {path.relative_to(ROOT).as_posix() for path in REFERENCE}


def test_commands_of_the_readme_are_recorded() -> None:
    """Each line that starts with torchrun or python is a command in a transcript."""
    text = (ROOT / "README.md").read_text("utf-8")
    lines = re.findall(r"^(?:torchrun|python) .+$", text, re.M)
    assert lines
    for line in lines:
        path = re.search(r"\S+\.py", line)[0]
        program = "labs/lab02_ddp.py" if path.startswith(("labs/", "my_labs/")) else path
        commands = {
            each.command_line
            for each in Program(ROOT, ROOT / program).transcript("cpu").commands
        }
        assert line.replace(path, Path(path).name) in commands or line in commands, line


def test_all_files_name_the_same_python_versions() -> None:
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
    """make must choose a fake `python3` if a workflow tests the version that it reports."""
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
    """Return the commands that make would run, without the commands that install packages."""
    command = ["make", "--dry-run", f"PYTHON={sys.executable}", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_requirements_are_pinned_and_reading_needs_no_torch() -> None:
    for name in ("read", "test"):
        lines = (ROOT / f"requirements/{name}.txt").read_text().splitlines()
        packages = [line for line in lines if line and not line.startswith(("#", "-r "))]
        pinned = r"[A-Za-z0-9_.-]+==[\w.]+(; platform_system == \"Linux\"( and platform_machine == \"x86_64\")?)?"
        loose = [line for line in packages if not re.fullmatch(pinned, line)]
        assert packages and not loose, f"requirements/{name}.txt: {loose}"
        if name == "read":
            assert not [line for line in packages if line.startswith(("torch", "deepspeed"))]
        else:
            assert any(line.startswith("torch==") for line in packages)


def test_no_file_names_a_registry() -> None:
    """The settings of the machine decide from where packages are downloaded."""
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
def test_a_workflow_has_pinned_actions_time_limits_and_few_permissions(path: Path) -> None:
    text, parsed = path.read_text("utf-8"), workflow(path.name)
    for uses in re.findall(r"uses: (.+)", text):
        assert re.match(r"\./\.github/|[\w./-]+@[0-9a-f]{40} # v\d", uses), uses
    top = parsed.get("permissions")
    assert top in ({}, {"contents": "read"}), "give write permissions to single jobs"
    assert "pull_request_target" not in text and "workflow_run:" not in text
    assert "${{ secrets." not in text
    for name, job in parsed["jobs"].items():
        assert "concurrency" in job or "concurrency" in parsed or "uses" in job, name
        if "uses" in job:
            continue
        assert job["timeout-minutes"] <= 90, name
        assert "permissions" in job or top == {"contents": "read"}, name
        for step in job["steps"]:
            assert "${{ inputs." not in step.get("run", ""), (
                f"{name}: pass inputs as variables, because they could contain shell code"
            )
            if step.get("uses", "").startswith("actions/checkout@"):
                assert step["with"]["persist-credentials"] is False, name


def test_the_statements_of_security_md_about_workflows_are_true() -> None:
    """Three jobs may write, and they run no code of the book. One job uses the GPU runner."""
    writes, self_hosted, events = set(), set(), {}
    for path in WORKFLOWS:
        parsed = workflow(path.name)
        events[path.stem] = set(parsed["on"])
        for name, job in parsed["jobs"].items():
            rights = job.get("permissions", parsed["permissions"])
            writes |= {(path.stem, name) for right in rights.values() if right != "read"}
            if "self-hosted" in job.get("runs-on", ""):
                self_hosted.add((path.stem, name))
            steps = str(job.get("steps", ""))
            assert "actions/cache" not in steps and "download-artifact" not in steps, name
    assert writes == {
        ("publish", "deploy"),
        ("publish", "notebooks"),
        ("upgrade-check", "issue"),
    }
    assert self_hosted == {("gpu", "gpu")}
    issue = workflow("upgrade-check.yml")["jobs"]["issue"]
    assert issue["permissions"] == {"issues": "write"}
    assert not any("uses" in step or "${{" in step["run"] for step in issue["steps"])
    assert {name for name in events if "pull_request" in events[name]} == {"test"}
    published = workflow("publish.yml")["jobs"]
    assert not any("cache" in step.get("with", {}) for step in published["site"]["steps"])
    assert "uses" not in published["deploy"]
    deploys = [step["uses"] for step in published["deploy"]["steps"] if "uses" in step]
    assert len(deploys) == 1 and "deploy-pages@" in deploys[0], (
        "deploy must run no code of the book"
    )
    (pushes,) = published["notebooks"]["steps"]
    assert pushes.keys() == {"name", "env", "run"} and "${{" not in pushes["run"]


def test_workflows_run_the_commands_of_a_reader() -> None:
    """CI runs all shards of the tests and the strict build, as .ci/run does."""
    jobs = workflow("test.yml")["jobs"]
    matrix = jobs["test"]["strategy"]["matrix"]
    assert matrix.keys() == {"python", "shard", "include"}
    options = {"3.11": "--launcher=process", "3.12": "--every-answer"}
    assert {each["python"]: each["how"] for each in matrix["include"]} == options
    shards = len(matrix["shard"])
    assert matrix["shard"] == [*range(1, shards + 1)]
    runs = next(step for step in jobs["test"]["steps"] if "make test" in step.get("run", ""))
    shard = f"--shard ${{{{ matrix.shard }}}}/{shards} ${{{{ matrix.how }}}} --junitxml="
    assert "WHAT" not in runs["env"] and runs["env"]["ARGS"].startswith(shard)
    site, zensical = jobs["site"]["steps"][-2:]
    assert (site["run"], zensical["run"]) == ("make site", "make compare-zensical")
    optional = "if", "continue-on-error"
    assert not [
        key
        for part in (*jobs.values(), runs, site, zensical)
        for key in optional
        if key in part
    ]
    script = (ROOT / ".ci/run").read_text()
    assert script.index("make test") < script.index("make site")
    if shutil.which("make"):
        assert "mkdocs build --strict" in dry_run("site")
    gpu = [step.get("run", "") for step in workflow("gpu.yml")["jobs"]["gpu"]["steps"]]
    call = next(run for run in gpu if 'make test WHAT="snippets labs assessment docs"' in run)
    assert "--device cuda --no-cache" in call
    assert "--device cuda --no-cache" in (ROOT / "docs/contributing/testing.md").read_text(
        "utf-8"
    )


# the error message of a program that exits because it needs a GPU
NEEDS_A_GPU = re.compile(
    r"(?:exit|stderr,)[^;]{0,40}needs an? (?:\w+ )?GPU|(?:no GPU|none) here|exit\(f.no NVIDIA"
)
TAKES_GPUS = re.compile(
    r"^\$ (timeout \d+ )?"
    r"(\./\w+|python |torchrun |compute-sanitizer "
    r"|(for \w+ in |rm dumps|[A-Z_]+=).*(\./\w|torchrun |compute-sanitizer ))",
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


# the files in snippets/ that belong to no single program
LISTS = {COMPATIBILITY, GPU_COMMANDS, MEASURED, TRACES, requirements.FILE}
PLANNER_DATA = {
    f"snippets/planner/{name}"
    for name in (
        "constants.toml",
        "hardware.toml",
        "models.toml",
        "measured.csv",
        "published.csv",
    )
}


def test_every_file_in_snippets_belongs_to_a_program() -> None:
    """A program that is started in its own folder can leave a file there, which git would add."""
    found, unknown = set(), []
    for path in tracked():
        name = path.relative_to(ROOT).as_posix()
        if not name.startswith("snippets/"):
            continue
        found.add(name)
        traced = name.endswith(SUFFIX) and f"{name.removesuffix(SUFFIX)}.py"
        if not (
            is_program(path, ROOT)
            or owning_program(path, ROOT)
            or traced in trace_settings(ROOT)
            or name in LISTS | PLANNER_DATA
        ):
            unknown.append(name)
    assert not unknown, (
        "these files belong to no program of their folder. If a program wrote them, delete them. "
        f"If a program reads them, list them in tests/test_project.py: {unknown}"
    )
    assert found >= LISTS | PLANNER_DATA


def test_every_file_in_the_budget_exists_and_exceeds_the_default() -> None:
    budgets = tomllib.loads((ROOT / "tests/budget.toml").read_text("utf-8"))
    default = budgets.pop("default")
    wrong = {name for name in budgets if not (ROOT / name).is_file()}
    wrong |= {name for name, seconds in budgets.items() if seconds <= default}
    assert budgets and not wrong, f"tests/budget.toml: {wrong}"


def test_a_commit_is_published_only_after_the_cpu_and_gpu_tests() -> None:
    publish, gpu = workflow("publish.yml"), workflow("gpu.yml")
    jobs = publish["jobs"]
    assert publish["on"] == {"push": {"branches": ["main"]}}
    assert jobs["test"]["uses"] == "./.github/workflows/test.yml"
    assert jobs["gpu"]["uses"] == "./.github/workflows/gpu.yml"
    assert set(jobs["site"]["needs"]) == {"test", "gpu"} and jobs["deploy"]["needs"] == "site"
    assert "needs.gpu.outputs.commit == github.sha" in jobs["site"]["if"]
    # the code of a pull request runs on the GPUs only if a maintainer starts and approves it
    assert set(gpu["on"]) == {"workflow_dispatch", "workflow_call"}
    assert gpu["jobs"]["gpu"]["needs"] == "approval"
    assert "github.ref == 'refs/heads/main'" in gpu["jobs"]["gpu"]["if"]
    assert "gpu-review" in gpu["jobs"]["gpu"]["environment"]


# --- the examples of CONTRIBUTING -------------------------------------------------------------


def blocks(text: str, language: str) -> list[tuple[str, str]]:
    """Return the title and the text of each code block in a language."""
    return [
        (fence.options.get("title", ""), "".join(f"{line}\n" for line in fence.lines))
        for fence in page.parse(text).fences
        if fence.language == language
    ]


def test_the_quotes_in_contributing_equal_the_files() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    fences = [*blocks(text, "python"), *blocks(text, "toml")]
    quoted = [each for each in fences if each[0].startswith(("graders", "tests"))]
    assert quoted
    for title, body in quoted:
        assert body in (ROOT / title).read_text("utf-8"), f"{title} has no\n{body}"


@pytest.mark.inputs("CONTRIBUTING.md", "Makefile", "docs", "graders", "pyproject.toml", "src")
def test_the_example_in_contributing_works(tmp_path: Path) -> None:
    """Carry out its steps: every output must be the one that the document shows."""
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
    status, output = run(steps.strip())
    assert status == 0, output

    (title, declaration), *_ = blocks(text, "toml")
    (tmp_path / title).write_text(f"[numbers]\n{declaration}", "utf-8")
    tolerances = Program(tmp_path, tmp_path / what).tolerances
    assert tolerances.measured, declaration

    (title, transcript), *_ = blocks(text, "console")
    recorded = Transcript.parse((tmp_path / title).read_text("utf-8"))
    shown = Transcript.parse(transcript)
    assert recorded.commands[0].command_line == shown.commands[0].command_line
    for expected, actual in zip(
        shown.commands[0].output, recorded.commands[0].output, strict=True
    ):
        assert same_line(expected, actual, tolerances), (
            f"CONTRIBUTING.md shows {expected!r}, but the program prints {actual!r}"
        )

    messages = [body for _, body in blocks(text, "text")]
    status, output = run(f"make test WHAT={what}")
    assert status != 0 and messages[0].strip() in output, output

    (title, addition), *_ = blocks(text, "markdown")
    chapter = tmp_path / title
    chapter.write_text(chapter.read_text("utf-8") + "\n" + addition, "utf-8")
    status, output = run(f"make test WHAT={what}")
    summary = re.search(r"\d+ passed, \d+ unchanged", messages[1])[0]
    assert status == 0 and summary in output, output

    assert program.count("    dist.broadcast(weight, src=0)\n") == 1
    broken = program.replace("    dist.broadcast(weight, src=0)\n", "")
    (tmp_path / what).write_text(broken, "utf-8")
    status, output = run(f"make test WHAT={what}")
    assert status != 0, output
    for line in messages[2].strip().splitlines():
        assert line in output, f"CONTRIBUTING.md shows {line!r}, which is not in:\n{output}"


def test_each_requirement_is_defined_and_needed_by_a_program() -> None:
    declared = requirements.declarations(ROOT)
    names = {program.name for program in programs(ROOT)}
    listed = {*declared.programs, *declared.never_forked}
    assert listed <= names, f"these programs do not exist: {listed - names}"
    needed = {name for listed in declared.programs.values() for name in listed}
    assert needed == set(declared.requirements)
    for each in declared.requirements.values():
        files = [word for word in each.command.split() if "/" in word]
        assert all((ROOT / file).exists() for file in files), each.command
    imported = {name for each in programs(ROOT) for name in each.imports(*declared.packages)}
    assert imported == set(declared.packages)
    assert all((ROOT / file).exists() for file in declared.packages.values() if file)


def test_each_measured_number_is_in_a_transcript() -> None:
    """Each pattern must match a number after ≈ in the output of its program."""
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
        assert name in listed["numbers"], (
            f"{MEASURED}: {name} is listed under figures, but not under numbers"
        )


def test_the_engine_contains_no_name_of_a_program() -> None:
    """Only a docstring may name a program, as an example."""
    tools = {"check.py", "rank_trace.py"}  # the program that grades, and the recorder of traces
    names = {program.path.name for program in programs(ROOT)} - tools
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
