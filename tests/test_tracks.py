"""The tracks: every topic of the three plans is there, leads to a program, and the times add up."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("mkdocs")
pytest.importorskip("yaml")

from book import tracks
from book.data import DataError
from book.embeds import EMBED, target_file
from book.tracks import COMING, Track, hours, read_source

ROOT = Path(__file__).resolve().parent.parent
INPUTS = ["book", "docs", "labs", "mkdocs.yml", "snippets", "tests/test_tracks.py"]
NAMES = ["gpu_and_distributed", "distributed_core", "pytorch_gpu"]

# The rows of the plan, by number: each must be covered by some part of its track.
PLAN = {
    "gpu_and_distributed": [f"A{n}" for n in range(1, 24) if n != 20],  # A20: the checklist
    "distributed_core": [f"B{n}" for n in range(1, 23)],
    "pytorch_gpu": [
        *(
            f"C{m}.{n}"
            for m, topics in enumerate([3, 3, 3, 2, 3, 2, 2], 1)
            for n in range(1, topics + 1)
        ),
        *("C8", "C9", "C10"),
    ],
}
# What the plan says for times, in minutes.
LESSONS = [60, 90, 75, 90, 90, 90, 75, 75]
# Every topic that the plan names, by the part of the track that must hold it.
TOPICS = {
    "gpu_and_distributed": {
        "prerequisites": """
            program in Python
            have used PyTorch (or TensorFlow, and be ready to change)
            know the Linux command line
            know how neural networks train
            know the basics of Docker
            (helpful) have read some C or C++
            (helpful) know what a cache does
            (helpful) have trained a deep network
        """,
        "set-up": """
            have the hardware
            have the software
            install it
            check it
        """,
        "lesson-1": """
            GPU against CPU
            CUDA cores and tensor cores
            the memory hierarchy
            when to use GPUs for machine learning
        """,
        "lesson-2": """
            the CUDA programming model
            kernels and the organisation of threads
            memory of host and device
            basic CUDA operations
            kernels that go wrong
        """,
        "lesson-3": """
            tensors to the GPU
            GPU memory in PyTorch
            mixed precision training
            profiling PyTorch on a GPU
        """,
        "lesson-4": """
            data parallelism against model parallelism
            communication primitives
            synchronising gradients
            frameworks of distributed training
        """,
        "lesson-5": """
            DataParallel against DistributedDataParallel
            several GPUs in one machine
            loading data efficiently
            performance
            runs that go wrong
        """,
        "lesson-6": """
            when to use model parallelism
            strategies of pipeline parallelism
            tensor parallelism
            hybrid parallelism
        """,
        "lesson-7": """
            understanding GPU memory
            tools that profile memory
            gradient checkpointing
            out-of-memory errors
        """,
        "lesson-8": """
            performance profiling: nsys, and what replaced nvprof
            kernel fusion
            tuning the batch size
            habits of production
        """,
        "labs": """
            CUDA basics: kernels of your own
            training with PyTorch on a GPU
            training on several GPUs: DDP
            memory: profile, then mend out-of-memory failures
            distributed training: a cluster of several nodes
            the cluster doctor
            splitting a transformer (steps 1 to 3 and 6)
        """,
        "assessment": """
            quiz
            practical exercise
        """,
        "capstone": """
            capstone
        """,
        "concepts-gpu": """
            CUDA core
            tensor core
            warp
            memory hierarchy: global, shared, local, constant
            kernel
            organisation of threads: grids, blocks, threads
        """,
        "concepts-distributed": """
            data parallelism
            model parallelism
            pipeline parallelism
            tensor parallelism
            all-reduce
            ring all-reduce
            gradient accumulation
        """,
        "concepts-optimization": """
            mixed precision training
            gradient checkpointing
            activation checkpointing
            gradient accumulation as an effective batch
            the ZeRO optimizer
        """,
        "applications": """
            training large models
            production pipelines, training and inference
            clusters of GPUs
            cost
            performance tuning
        """,
        "why": """
            scale: models beyond one machine
            cost: what idle GPUs burn
            speed: how soon a result is there
            efficiency: results per dollar
        """,
        "use-cases": """
            large language models
            computer vision
            recommendation
            research
            fine-tuning
        """,
        "tools": """
            nvidia-smi
            nvtop, and NVML from Python
            torch.profiler
            nsys
            experiment tracking with GPU metrics (Weights & Biases and others)
            TensorFlow beside PyTorch
        """,
        "further": """
            documentation: CUDA guide, PyTorch distributed, NVIDIA's performance guide
            communities: PyTorch and NVIDIA forums, r/MachineLearning
            next: monitoring, clusters as code, serving language models, two projects
        """,
    },
    "distributed_core": {
        "strategies": """
            why one GPU is not enough
            processes, groups and every collective
            what communication costs
            choosing a strategy
        """,
        "ddp": """
            DDP from scratch
            measured, and for real
            the batch, cut in N
            runs that last
            what goes wrong
        """,
        "model-parallelism": """
            the pipeline
            tensor and sequence parallelism
            context and expert parallelism
            several cuts at once
            what goes wrong
        """,
        "zero-fsdp": """
            where memory goes, and what the stages send
            three stages from scratch
            FSDP2, option by option
            checkpoints
            DeepSpeed
            sizes beyond a machine
            what goes wrong
        """,
        "mixed-precision": """
            formats and rounding
            loss scaling and master weights
            autocast
            between ranks
            tensor cores, fp8 and the choice
            what goes wrong
        """,
        "labs": """
            01: multi-GPU set-up
            02: DDP from scratch
            03: FSDP
            04: mixed precision
            05: DeepSpeed
        """,
        "zero-paper": """
            the three stages
            its analysis of memory and communication
            its figure of memory per device
            the insight, that optimizer states are the largest part
        """,
        "megatron-paper": """
            tensor parallelism for transformers
            splitting the MLP and attention
            its figure of the column and row pair
            the insight, one all-reduce for two products
        """,
        "ddp-docs": """
            `find_unused_parameters`
            buckets and `bucket_cap_mb`
            what `DistributedSampler` requires
        """,
        "fsdp-docs": """
            `ShardingStrategy`
            `auto_wrap_policy` for transformers
            `MixedPrecision`
            state dicts for checkpoints
        """,
        "deepspeed-docs": """
            configuration of stages 1, 2 and 3
            offload to the CPU and to NVMe
            with the Hugging Face Trainer
        """,
        "mixed-precision-paper": """
            loss scaling
            operations that need fp32
            operations that are safe in fp16
            the insight, why fp16 needs a scale and bf16 none
        """,
        "gpipe-paper": """
            the bubble
            micro-batches
            its figure of the schedule
            the insight, a smaller bubble for more activations
        """,
        "pipedream-paper": """
            one forward, one backward
        """,
        "megatron-code": """
            `tensor_parallel/`: column and row layers
            `pipeline_parallel/`: the schedules
        """,
        "deepspeed-examples": """
            `training/`
            `inference/`
        """,
        "fsdp-tutorial": """
            FSDP by hand
        """,
        "torchtune": """
            recipes with FSDP
        """,
        "sequence-parallelism": """
            sequence parallelism
            selective recomputation
        """,
        "ddp-paper": """
            buckets of gradients
            communication behind computation
        """,
        "zero-infinity": """
            memory of the host and of NVMe
        """,
        "three-d": """
            mapping DP, TP and PP to a cluster
            its analysis of performance
        """,
        "card": """
            DDP basics
            ZeRO stages
            tensor parallelism
            pipeline parallelism
            mixed precision
            using FSDP
        """,
        "tools": """
            PyTorch profiler
            Nsight Systems
            `TORCH_DISTRIBUTED_DEBUG=DETAIL`
            `NCCL_DEBUG=INFO`, and a rank that does not answer
        """,
        "elsewhere": """
            flash attention
            quantization
            inference
            custom kernels
        """,
        "connections": """
            01 · Parallelism strategies
            02 · Data parallelism
            03 · Model parallelism
            04 · ZeRO and FSDP
            05 · Mixed precision
            all five
        """,
    },
    "pytorch_gpu": {
        "torch-cuda": """
            managing devices
            is CUDA there
            choosing a device, and its context
            synchronising CPU and GPU
        """,
        "cuda-tensors": """
            creating tensors on the GPU
            moving tensors between CPU and GPU
            the memory of tensors
            basic operations
        """,
        "memory-management": """
            the CUDA memory allocator
            caching, and reuse across streams
            pools and fragmentation
            custom allocators
        """,
        "cudnn": """
            the library for neural networks
            optimised implementations
            convolution, pooling, normalization
            cuDNN's settings in PyTorch
        """,
        "cublas": """
            BLAS for CUDA
            matrix products
            performance by architecture
            cuBLAS's settings in PyTorch
        """,
        "tensor-cores": """
            TF32 on Ampere and later
            training in FP16 and BF16
            automatic mixed precision
            speed against accuracy
        """,
        "cuda-graphs": """
            less work for the CPU
            capture and replay
            a stream in capture mode
            uses and limits
        """,
        "jit": """
            kernels compiled at run time
            TorchScript
            fusion
            what the compiler decides while you run
        """,
        "profiling": """
            CUDA events for timing
            NVTX ranges
            NVIDIA's profilers
            tracking memory
        """,
        "multi-gpu": """
            DataParallel and DistributedDataParallel
            NCCL
            peer-to-peer access
            model parallelism
        """,
        "ddp": """
            many GPUs, many nodes
            strategies of synchronisation
            tuning
            fault tolerance
        """,
        "extensions": """
            mechanisms of C++ and CUDA extensions
            kernels compiled just in time
            torch.utils.cpp_extension
            autograd
        """,
        "fft": """
            cuFFT behind torch.fft
            signal processing
            the plan cache
            sizes
        """,
        "sparse": """
            sparse matrices on a GPU
            sparse times dense
            formats made for GPUs
            sparse networks
        """,
        "random": """
            generators on a GPU
            distributions
            seeds that reproduce
            numbers drawn in parallel
        """,
        "quantization": """
            int8 and fewer bits
            quantized operations on a GPU
            TensorRT
            dynamic quantization
        """,
        "architecture": """
            how the CUDA side is built
            components and how they meet
            where time is lost
            how GPU code is tested
        """,
        "contributing": """
            an environment to develop in
            the way of a contribution
            tests and benchmarks for GPU code
            review
        """,
        "labs": """
            kernels of your own
            a training script on the GPU
            out of memory
            mixed precision
            DDP from scratch
            a cluster of several nodes
        """,
        "assignments": """
            an assignment for each module
            optimization challenges
            small projects on extensions
            final project: a faster component of PyTorch
        """,
        "prerequisites": """
            know C++ well
            know the ideas of parallel computing
            have used PyTorch for deep learning
            know GPU programming
            have an NVIDIA GPU to practise on
        """,
        "watch": """
            1.1 torch.cuda
            1.2 CUDA tensors
            1.3 memory management
            2.1 cuDNN
            2.2 cuBLAS
            2.3 tensor cores
            3.1 CUDA Graphs
            3.2 compilation at run time
            3.3 profiling and debugging
            4.1 several GPUs
            4.2 distributed data parallel
            5.1 custom CUDA extensions
            5.2 FFT and signal processing
            5.3 sparse operations
            6.1 random numbers
            6.2 quantization
            7.1 architecture of PyTorch's GPU side
            7.2 contributing to PyTorch
        """,
    },
}
# What a learner must be able to do in the end, by the criterion which shows it.
CRITERIA = {
    "gpu_and_distributed": {
        "GPU architecture, and when to use a GPU": "architecture",
        "CUDA kernels, and GPU memory": "kernels",
        "training efficiently on GPUs; what a framework accelerates": "training",
        "data parallelism with DDP": "ddp",
        "several GPUs in one node": "one-node",
        "model parallelism for large models": "model-parallelism",
        "profiling and bottlenecks": "profile",
        "out-of-memory errors": "oom",
        "techniques that save memory": "memory",
        "several nodes": "several-nodes",
    },
    "distributed_core": {
        "lab 01: set-up": "doctor",
        "lab 02: DDP": "ddp",
        "lab 03: FSDP": "shard",
        "lab 04: mixed precision": "precision",
        "lab 05: DeepSpeed": "deepspeed",
    },
    "pytorch_gpu": {
        "architecture and implementation of the components": "components",
        "optimizing PyTorch code": "optimize",
        "custom CUDA extensions": "extensions",
        "debugging and profiling": "debug",
        "contributing": "contribute",
        "advanced techniques": "advanced",
        "trade-offs between strategies": "trade-offs",
    },
}


@pytest.fixture(scope="module", params=NAMES)
def track(request) -> Track:
    return Track(request.param)


def page_of(track: Track) -> str:
    """The page with its tracks shown, as Markdown."""
    lines = (ROOT / f"docs/tracks/{track.name}.md").read_text("utf-8").split("\n")
    return "\n".join(tracks.render(lines))


def named(text: str) -> set[str]:
    return {line.strip() for line in text.strip().split("\n")}


# ---- the plan


def test_every_row_of_the_plan_has_its_part(track: Track) -> None:
    covered = {row for part in track.parts for row in part.covers}
    assert covered == set(PLAN[track.name])


def test_every_topic_of_the_plan_has_its_row(track: Track) -> None:
    planned = TOPICS[track.name]
    here = {part.id: {row.topic for row in part.rows} for part in track.parts}
    missing = [
        f"{part}: {topic}"
        for part, text in planned.items()
        for topic in sorted(named(text) - here.get(part, set()))
    ]
    assert not missing, f"{track.file} has no row for:\n" + "\n".join(missing)
    assert sum(map(len, map(named, planned.values()))) > 80


def test_every_row_is_on_its_page_with_a_link(track: Track) -> None:
    page = page_of(track)
    lines = [line for line in page.split("\n") if line.startswith("| ")]
    for part in track.parts:
        assert f"{{ #{part.id} }}" in page, f"{track.name} does not show {part.id}"
        for row in part.rows:
            found = [line for line in lines if line.startswith(f"| {row.topic} | {row.can} |")]
            assert len(found) == 1, f"{part.id}: {row.topic}"
            coming = any(target.partition("#")[0] in COMING for target in row.read)
            assert re.search(r"\]\(/", found[0]) or coming, f"no link: {part.id}: {row.topic}"


def test_every_row_leads_to_a_program_that_its_section_shows(track: Track) -> None:
    """Read the pages again, without the code that renders the tracks."""
    count = 0
    for part in track.parts:
        for row in part.rows:
            if not row.run:
                taught = [target for target in row.read if not re.match(r"(?!11)\d\d_", target)]
                assert taught, f"{part.id}: {row.topic} leads to chapters and names no program"
                continue
            count += 1
            transcripts = sorted((ROOT / row.run).parent.glob(f"{Path(row.run).stem}.*.txt"))
            assert transcripts, f"{row.run} has never run"
            pages = {target.partition("#")[0] for target in row.read}
            embeds = [
                target_file(match["target"])
                for page in pages
                if (ROOT / f"docs/{page}.md").exists()
                for line in (ROOT / f"docs/{page}.md").read_text("utf-8").split("\n")
                if (match := EMBED.match(line))
            ]
            assert row.run in embeds, f"{part.id}: {row.topic}"
    assert count > 50


def test_what_is_coming_is_linked_when_it_comes() -> None:
    track = Track(NAMES[0])
    for page, title in COMING.items():
        if page.startswith("lab"):
            there = bool(list((ROOT / "labs").glob(f"{page}_*.py")))
        else:
            there = (ROOT / f"docs/{page}.md").exists()
        shown = track.link(page, "test")
        assert shown.startswith("[") == there, shown
        assert there or shown == title


# ---- times


def test_lessons_take_what_the_plan_says() -> None:
    track = Track("gpu_and_distributed")
    lessons = [part for part in track.parts if part.id.startswith("lesson-")]
    assert [part.minutes for part in lessons] == LESSONS
    labs = next(part for part in track.parts if part.id == "labs")
    assessment = next(part for part in track.parts if part.id == "assessment")
    assert 10 * 60 <= sum(LESSONS) <= 12 * 60
    assert 15 * 60 <= labs.minutes <= 20 * 60
    assert 3 * 60 <= assessment.minutes <= 4 * 60
    assert 30 * 60 <= track.minutes <= 35 * 60
    assert "More than half of the time is the labs" in page_of(track)
    assert labs.minutes > track.minutes / 2


def test_quiz_and_exercise_take_what_their_pages_say() -> None:
    parts = {part.id: part for part in Track("gpu_and_distributed").parts}
    assert [row.minutes for row in parts["assessment"].rows] == [60, 3 * 60]
    assert parts["capstone"].minutes == 0
    for page, words in (
        ("assessment/quiz", "an hour if you calculate"),
        ("assessment/exercise", "Allow three to five hours"),
        ("assessment/capstone", "It takes ten to fifteen hours"),
        ("tracks/gpu_and_distributed", "A project of ten to fifteen hours"),
    ):
        assert words in (ROOT / f"docs/{page}.md").read_text("utf-8")


def test_assignments_take_what_their_page_says() -> None:
    """Each row of the track: the sum of a table's column, or the middle of a span in hours."""
    page = (ROOT / "docs/assessment/assignments.md").read_text("utf-8")
    hours = re.findall(r"^\| \[`assignment\d.*\| ([\d.]+) \|$", page, re.M)
    assert len(hours) == 7 and f"| all seven | | {sum(map(float, hours)):g} |" in page
    words = {"two": 2, "three": 3, "eight": 8, "twelve": 12, "twenty": 20, "forty": 40}
    spans = re.findall(r"^\*(\w+) to (\w+) hours", page, re.M)
    middles = [30 * (words[low.lower()] + words[high]) for low, high in spans]
    for low, high in spans:
        assert re.search(rf"{low.lower()} to {high}", page.partition("## How they work")[0])
    steps = re.findall(r"^\d\. \*\*.+ \((\d+) to (\d+) hours", page, re.M)
    sums = [sum(map(int, ends)) for ends in zip(*steps, strict=True)]
    assert sums == [words[spans[-1][0].lower()], words[spans[-1][1]]]  # the final project
    part = next(part for part in Track("pytorch_gpu").parts if part.id == "assignments")
    assert [row.minutes for row in part.rows] == [60 * sum(map(float, hours)), *middles]


def minutes_of(text: str) -> int:
    """The minutes that a cell shows: `50 min`, `2 h 30`, `–`."""
    match = re.fullmatch(r"\**(?:(\d+) h ?)?(?:(\d+)(?: min)?)?\**|–", text)
    assert match, text
    return int(match[1] or 0) * 60 + int(match[2] or 0)


def test_times_shown_add_up(track: Track) -> None:
    table = [line for line in track.show_overview() if line.startswith("| ")][1:]
    cells = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in table]
    numbers = []
    for line in table:
        columns = [cell.strip() for cell in line.split("|")][1:-1]
        numbers.append([minutes_of(cell) for cell in columns[2:5]])
    assert cells
    *rows, total = numbers
    assert [sum(column) for column in zip(*rows, strict=True)] == total
    for read, do, together in numbers:
        assert read + do == together
    assert total[2] == track.minutes


def test_the_way_passes_every_part_and_lab(track: Track) -> None:
    """The picture has the parts of the overview in their order, and each lab of the table."""
    way = [stop for stage in track.path for stop in stage]
    table = [line for line in track.show_overview() if re.match(r"\| \[", line)]
    parts = [re.match(r"\| \[(.+?)\]\(", line)[1] for line in table]
    assert [stop.name for stop in way] == [name for name in parts if name != "Labs"]
    labs = next(part for part in track.parts if part.id == "labs")
    listed = {row.read[0].partition("#")[0].removeprefix("lab") for row in labs.rows}
    assert {lab for stop in way for lab in stop.labs} == listed


def test_reading_leaves_time_to_run(track: Track) -> None:
    """A part's time is at least one and a half times what its sections take to read."""
    for part in track.parts:
        if part.minutes and not part.stated:
            assert part.reading * 1.5 <= part.minutes, f"{part.id}: {part.reading} min to read"


def test_a_part_is_read_in_what_its_rows_say(track: Track) -> None:
    for part in track.parts:
        shown = [
            line for line in track.show_rows(group_of(track, part)) if line.startswith("|")
        ]
        assert shown
        assert part.reading == sum(row.minutes for row in part.rows)
    assert hours(50) == "50 min" and hours(60) == "1 h" and hours(125) == "2 h 05"


def group_of(track: Track, part) -> str:
    return next(group.id for group in track.groups if part in group.parts)


def test_labs_take_what_they_say_themselves(track: Track) -> None:
    """A lab says "Allow two to three hours"; rows that send to some of its steps say less."""
    words = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6}
    checked = 0
    for part in track.parts:
        for row in part.rows:
            if not row.stated or not re.fullmatch(r"lab\d\d", row.read[0]):
                continue
            for lab in (ROOT / "labs").glob(f"{row.read[0]}_*.py"):
                text = re.sub(r"\n# ", " ", lab.read_text("utf-8"))
                said = re.search(r"Allow (\w+)(?: to (\w+))? hours", text)
                if said:
                    low, high = words[said[1]], words[said[2] or said[1]]
                    assert low * 60 <= row.minutes <= high * 60, lab.name
                    checked += 1
    assert checked >= 4


# ---- what the reader ticks


def test_criteria(track: Track) -> None:
    ids = [criterion.id for criterion in track.checklist]
    assert not set(CRITERIA[track.name].values()) - set(ids)
    assert len(ids) >= 7
    for criterion in track.checklist:
        assert criterion.can.startswith("I ") and criterion.how.endswith(".")
        # something of one's own shows it: a lab, a program or a question
        assert any(re.match(r"lab|program:|[^#]+\?", each) for each in criterion.shown)


# ---- broken tracks

GOOD = """
title: T
path: [[one]]
groups:
  - id: g
    parts:
      - id: one
        name: One
        covers: [X]
        minutes: 10
        rows:
          - topic: a
            can: do a
            read: ["01_a#first"]
            run: p
checklist:
  - {id: c, can: I can., how: So., shown: ["01_a?Why so"]}
"""


@pytest.fixture
def small(tmp_path: Path):
    (tmp_path / "docs/tracks").mkdir(parents=True)
    (tmp_path / "labs").mkdir()
    (tmp_path / "snippets/s").mkdir(parents=True)
    (tmp_path / "snippets/s/p.py").write_text("print(1)\n")
    (tmp_path / "docs/01_a.md").write_text(
        "# A: page\n\n## First\n\n"
        + "word " * 480
        + '\n\n```python\n--8<-- "snippets/s/p.py"\n'
        '```\n\n## Second\n\n### `Third`: $x$ part\n\ntext\n\n??? question "Why so? And how?"\n'
    )

    def write(text: str) -> Track:
        (tmp_path / "docs/tracks/t.yml").write_text(text)
        return Track("t", tmp_path)

    return write


def test_a_good_track_reads(small) -> None:
    track = small(GOOD)
    row = track.parts[0].rows[0]
    assert (row.run, row.minutes) == ("snippets/s/p.py", 3)  # 2 of words, 12 + 3 lines of code
    assert "[01 · First](/01_a.md#first)" in "\n".join(track.show_rows("g"))
    assert "[01 · “Why so?”](/01_a.md#check-yourself)" in "\n".join(track.show_checklist())
    assert track.show_path()[0].startswith("<ol")


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("01_a#first", "01_a#frist", "one: a: 01_a has no section #frist"),
        ("01_a#first", "01_b#first", "one: a: there is no page 01_b"),
        ("01_a#first", "lab77#step-1", "one: a: there is no page lab77"),
        ('["01_a#first"]', "[]", "one: a: names no section"),
        ("run: p", "run: q", "one: a: its sections embed no program 'q'"),
        ("            run: p\n", "", "one: a: says no program to run, and leads to no lab"),
        ("#first", "#second", "one: a: its sections embed no program 'p'"),
        ("minutes: 10", "minutes: 2", "one: its rows take 3 minutes to read, more than 2"),
        ("can: do a", "cant: do a", "one: a: a row needs can"),
        ("can: do a", "can: do a\n            why: so", "one: a: a row has no why"),
        ("covers: [X]", "cover: [X]", "part one: a part needs covers"),
        ("[[one]]", "[[two]]", "path: there is no part or short group 'two'"),
        ("Why so", "Why not", "criterion c: 0 questions of 01_a.md: 'Why not'"),
        ('["01_a?Why so"]', "[]", "criterion c: nothing shows it"),
        (
            '"01_a?Why so"',
            '"program:s/q.py"',
            "criterion c: there is no program snippets/s/q.py",
        ),
        ("checklist:\n", "checks:\n", "the track: a track needs checklist"),
        ("  - {id: c", "  - {id: c, can: I., how: S., shown: [index]}\n  - {id: c", "index"),
        ("title: T", "title: [", "docs/tracks/t.yml: while parsing"),
    ],
)
def test_a_wrong_track_names_file_and_row(small, old: str, new: str, why: str) -> None:
    assert old in GOOD
    with pytest.raises(DataError, match=re.escape(why)) as raised:
        small(GOOD.replace(old, new))
    assert "docs/tracks/t.yml" in str(raised.value)


def test_a_topic_stands_once(small) -> None:
    row = '          - {topic: a, can: b, read: ["01_a#first"], run: p}\n'
    with pytest.raises(DataError, match="one: a: a second row of this name"):
        small(GOOD.replace("checklist:", row + "checklist:"))


def test_stated_minutes_add_up(small) -> None:
    rows = "            run: p\n            minutes: 9\n"
    with pytest.raises(DataError, match="one: 10 minutes, its rows 9"):
        small(GOOD.replace("            run: p\n", rows))


def test_a_comment_that_is_not_understood_stops_the_build(small, tmp_path: Path) -> None:
    small(GOOD)
    for comment in ("<!-- track: t -->", "<!-- track: t maps -->", "<!-- track: t rows h -->"):
        with pytest.raises(DataError):
            tracks.render([comment], tmp_path)
    with pytest.raises(DataError, match="there is no track u"):
        tracks.render(["<!-- track: u path -->"], tmp_path)
    assert tracks.render(["text"], tmp_path) == ["text"]


def test_sections_and_their_ends(small, tmp_path: Path) -> None:
    small(GOOD)
    source = read_source(tmp_path / "docs/01_a.md")
    assert list(source.headings) == ["a-page", "first", "second", "third-x-part"]
    assert source.headings["second"].end == len(source.lines)
    assert source.headings["first"].end == source.headings["second"].line
    assert source.programs("first") == ["snippets/s/p.py"] and not source.programs("second")
