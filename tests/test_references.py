"""Tests of the reading list: its data is valid, and no resource of a syllabus is missing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

pytest.importorskip("mkdocs")

from worldsize.model.page import read
from worldsize.site import references
from worldsize.site.markdown_extension import BookMarkdown
from worldsize.site.yaml_schema import DataError

ROOT = Path(__file__).resolve().parent.parent
INPUTS = ["src", "docs", "labs"]
TEXT = (ROOT / references.FILE).read_text("utf-8")
DATA = references.load(TEXT)
ENTRIES = DATA.by_id

# The resources that the syllabuses of the three tracks name: their addresses or titles.
NAMED = """
https://docs.nvidia.com/cuda/cuda-c-programming-guide/
https://pytorch.org/tutorials/beginner/dist_overview.html
https://docs.nvidia.com/deeplearning/performance/
https://discuss.pytorch.org/c/distributed
https://forums.developer.nvidia.com/
https://reddit.com/r/MachineLearning
nvidia-smi
nvtop
torch.profiler
Nsight Systems
Weights & Biases
https://arxiv.org/abs/1910.02054
https://arxiv.org/abs/1909.08053
https://pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
https://pytorch.org/docs/stable/fsdp.html
https://www.deepspeed.ai/docs/config-json/
https://arxiv.org/abs/1710.03740
https://arxiv.org/abs/1811.06965
https://arxiv.org/abs/1806.03377
https://github.com/NVIDIA/Megatron-LM
https://github.com/microsoft/DeepSpeedExamples
https://pytorch.org/tutorials/intermediate/FSDP_tutorial.html
https://github.com/pytorch/torchtune
https://arxiv.org/abs/2205.05198
https://arxiv.org/abs/2006.15704
https://arxiv.org/abs/2104.07857
https://arxiv.org/abs/2104.04473
https://pytorch.org/docs/stable/profiler.html
https://developer.nvidia.com/nsight-systems
https://www.youtube.com/watch?v=LuhJEEJQgUM
https://pytorch.org/docs/stable/notes/cuda.html
https://www.youtube.com/watch?v=V_xro1bcAuA
https://www.geeksforgeeks.org/how-to-set-up-and-run-cuda-operations-in-pytorch/
https://www.youtube.com/watch?v=cXpTDKjjKZE
https://pytorch.org/docs/stable/notes/cuda.html#memory-management
https://www.youtube.com/watch?v=d_jBX7OrptI
https://developer.nvidia.com/cudnn
https://www.youtube.com/watch?v=kMjeGA2T9Ns
https://pytorch.org/docs/stable/backends.html#torch.backends.cuda.matmul.allow_tf32
https://www.youtube.com/watch?v=v_q2JTIqE20
https://pytorch.org/docs/stable/notes/cuda.html#tensorfloat-32-tf32-on-ampere-and-later-devices
https://www.youtube.com/watch?v=ebEulxb1tNw
https://pytorch.org/blog/accelerating-pytorch-with-cuda-graphs/
https://www.youtube.com/watch?v=wEdUcQwCdNM
https://pytorch.org/docs/stable/notes/cuda.html#just-in-time-compilation
https://developer.nvidia.com/blog/advanced-strategies-for-high-performance-gpu-programming-with-nvidia-cuda/
https://www.youtube.com/watch?v=toUSzwR0EV8
https://pytorch.org/tutorials/beginner/ddp_series_multigpu.html
https://pytorch.org/tutorials/beginner/ddp_series_intro.html
https://medium.com/codex/a-comprehensive-tutorial-to-pytorch-distributeddataparallel-1f4b42bb1b51
https://www.youtube.com/watch?v=nOxKexn3iBo
https://pytorch.org/tutorials/advanced/cpp_extension.html
https://www.youtube.com/watch?v=86FAWCzIe_4
https://pytorch.org/docs/stable/notes/cuda.html#cufft-plan-cache
https://pytorch.org/docs/stable/sparse.html
https://www.youtube.com/watch?v=2NgpYFdsduY
https://pytorch.org/docs/stable/generated/torch.cuda.manual_seed.html
https://pytorch.org/docs/stable/quantization.html
https://www.youtube.com/watch?v=bH9TfuHFB4Q
https://earthinversion.com/data-science/understanding-the-working-of-a-gpu-from-architecture-to-computation-with-pytorch/
https://developer.nvidia.com/on-demand/session/gtcspring23-S51821
https://github.com/pytorch/pytorch/blob/master/CONTRIBUTING.md
""".strip().splitlines()

TOPICS_OF_THE_SYLLABUS = [
    *("1.1", "1.2", "1.3", "2.1", "2.2", "2.3", "3.1", "3.2", "3.3"),
    *("4.1", "4.2", "5.1", "5.2", "5.3", "6.1", "6.2", "7.1", "7.2"),
]

GOOD = """\
topics:
  zero: {title: ZeRO, about: Who keeps what.}
orders: []
syllabus: []
entries:
- id: one
  title: A paper
  by: Somebody
  year: 2020
  where: arXiv 1910.02054
  url: https://arxiv.org/abs/1910.02054
  kind: paper
  topic: zero
  priority: must
  minutes: 60
  basis: opened
  focus: Section 3.
  insight: One thing.
  book: "[there](04_zero_and_fsdp.md)"
"""


@pytest.mark.parametrize("named", NAMED)
def test_the_list_contains_every_resource_of_the_syllabuses(named: str) -> None:
    addresses = {address for entry in DATA.entries for address in [entry.url, *entry.formerly]}
    titles = [entry.title for entry in DATA.entries]
    assert named in addresses or any(named in title for title in titles)


def test_each_topic_of_the_syllabus_has_a_video_and_a_text() -> None:
    assert [item.number for item in DATA.syllabus] == TOPICS_OF_THE_SYLLABUS
    for item in DATA.syllabus:
        assert ENTRIES[item.video].kind == "video"
        assert ENTRIES[item.post].kind in {"documentation", "post", "tutorial"}


def test_at_most_a_quarter_of_the_entries_must_be_read() -> None:
    """If most entries had the highest priority, it would not help a reader to choose."""
    must = sum(entry.priority == "must" for entry in DATA.entries)
    assert 0 < must <= len(ENTRIES) / 4


def test_links_use_https_no_tracking_parameters_and_current_addresses() -> None:
    page = (ROOT / "docs/11_references.md").read_text("utf-8")
    for url in re.findall(r"\bhttps?:[^\s)\"'>]+", TEXT + page):
        assert url.startswith("https://"), url
        assert not re.search(r"[?&](utm_|si=|t=|feature=|ref=|list=|fbclid)", url), url
    for entry in DATA.entries:
        assert entry.url not in entry.formerly
        assert not re.search(r"//(www\.)?pytorch\.org/(docs|tutorials)/", entry.url)
        assert "/blob/master/" not in entry.url
    urls = [entry.url for entry in DATA.entries]
    assert len(set(urls)) == len(urls)


@pytest.mark.parametrize("path", sorted((ROOT / "docs").rglob("*.yml")), ids=lambda p: p.name)
def test_no_yaml_file_contains_a_field_twice(path: Path) -> None:
    """The YAML parser would silently use the last value."""
    nodes = [yaml.compose(path.read_text("utf-8"), yaml.CSafeLoader)]
    for node in nodes:
        if isinstance(node, yaml.MappingNode):
            names = [name.value for name, _ in node.value]
            assert len(names) == len(set(names)), f"{path}:{node.start_mark.line + 1}: {names}"
            nodes += [value for _, value in node.value]
        elif isinstance(node, yaml.SequenceNode):
            nodes += node.value


def test_an_entry_names_a_section_only_if_it_was_read() -> None:
    for entry in DATA.entries:
        if entry.basis in {"title", "part", "abstract"}:
            assert not re.search(r"[Ss]ection \d|Figure \d", entry.focus), entry.id


def test_every_entry_links_to_a_page_of_the_book() -> None:
    for entry in DATA.entries:
        links = re.findall(r"\]\(((?:\d\d|clusters/)\w+\.md)#[\w-]+\)", entry.book)
        assert links, entry.id
        assert all((ROOT / "docs" / link).exists() for link in links)


def test_the_time_of_a_reading_order_is_the_sum_of_its_entries() -> None:
    assert DATA.orders
    for order in DATA.orders:
        total = sum(ENTRIES[name].minutes for name in order.read)
        heading = f"### {order.title}: {references.duration(total)} {{"
        assert f"\n{heading}" in f"\n{references.render('orders', DATA)}"
        assert all(ENTRIES[name].minutes for name in order.read)
        assert all(ENTRIES[name].basis not in {"title", "part"} for name in order.read)


def test_the_five_readings_take_an_hour() -> None:
    part = read(ROOT / "docs/11_references.md").text("the-five-readings-in-an-hour")
    rows = re.findall(r"^\| (\d+) \| \[[^]]+\]\(#([\w-]+)\)", part, re.M)
    assert len(rows) == 5 and sum(int(minutes) for minutes, _ in rows) == 60
    for minutes, name in rows:  # each reading is a part of the text that its entry describes
        assert int(minutes) < ENTRIES[name].minutes


def test_entries_of_a_topic_are_sorted_by_priority() -> None:
    for topic in references.render("entries", DATA).split("\n### ")[1:]:
        found = re.findall(r'data-priority="(\w+)"', topic)
        assert found
        assert found == sorted(found, key=list(references.PRIORITIES).index)


@pytest.mark.parametrize(
    ("minutes", "text"),
    [(0, ""), (45, "45 min"), (60, "1 h"), (75, "1¼ h"), (130, "2¼ h"), (590, "9¾ h"), (720, "12 h")],
)  # fmt: skip
def test_a_duration_is_printed_in_minutes_or_quarters_of_an_hour(
    minutes: int, text: str
) -> None:
    assert references.duration(minutes) == text


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("  kind: paper\n", "", "one: Object missing required field `kind`"),
        ("kind: paper", "kind: leaflet", "one: kind: Invalid enum value 'leaflet'"),
        (
            "kind: paper",
            "kind: paper\n  stars: 3",
            "one: Object contains unknown field `stars`",
        ),
        ("priority: must", "priority: perhaps", "one: priority: Invalid enum value 'perhaps'"),
        ("minutes: 60", "minutes: an hour", "one: minutes: Expected `int`, got `str`"),
        ("minutes: 60", "minutes: 6001", "one: minutes: Expected `int` <= 6000"),
        (
            "https://arxiv.org/abs/1910.02054",
            "http://arxiv.org/abs/1910.02054",
            "must begin with https",
        ),
        ("abs/1910.02054\n  kind", "abs/1910.02054?x=1\n  kind", "parameters"),
        ("abs/1910.02054\n  kind", "pdf/1910.02054\n  kind", "an arXiv link must be"),
        ("abs/1910.02054\n  kind", "abs/1910.02054v3\n  kind", "an arXiv link must be"),
        ("basis: opened", "basis: part", "`read_scope` is missing"),
        ("focus: Section 3.", "focus: Section 3", "focus must be a sentence"),
        ("insight: One thing.", "insight: One | thing.", "insight must be a sentence"),
        ("minutes: 60", 'minutes: 60\n  labs: ["77"]', "labs: there is no lab 77"),
    ],
)
def test_an_error_in_an_entry_is_reported_with_its_line(
    old: str, new: str, message: str
) -> None:
    assert references.load(GOOD)
    assert old in GOOD
    with pytest.raises(DataError) as error:
        references.load(GOOD.replace(old, new))
    assert message in str(error.value)
    assert str(error.value).startswith("docs/references.yml:6: one: ")


def test_an_error_in_the_file_is_reported() -> None:
    twice = GOOD + GOOD[GOOD.index("- id") :]
    with pytest.raises(DataError, match=r"references\.yml: one: occurs twice"):
        references.load(twice)
    for topic in ("topic: hero", "topic: zero\n  also: [hero]"):
        with pytest.raises(DataError, match=r"references\.yml: one: there is no topic hero"):
            references.load(GOOD.replace("topic: zero", topic))
    order = GOOD.replace("orders: []", "orders: [{title: First, why: So., read: [two]}]")
    with pytest.raises(DataError, match=r"references\.yml: First: there is no entry 'two'"):
        references.load(order)
    item = "{number: '1', title: First, video: two, post: one, take: a, book: b}"
    with pytest.raises(DataError, match=r"references\.yml: First: there is no entry 'two'"):
        references.load(GOOD.replace("syllabus: []", f"syllabus: [{item}]"))
    with pytest.raises(DataError, match="missing required field `syllabus`"):
        references.load(GOOD.replace("syllabus: []\n", ""))
    with pytest.raises(DataError, match=r"references\.yml: while"):
        references.load(GOOD + "  [")


def test_the_entries_are_shown_as_one_table_per_topic() -> None:
    import markdown

    html = markdown.markdown(
        "<!-- references: entries -->",
        extensions=["tables", "attr_list", "md_in_html", BookMarkdown()],
    )
    links = re.findall(r"<a [^>]*>", html)
    titles = [link for link in links if "data-topics" in link]
    assert len(titles) == len(ENTRIES)
    for link in titles:
        assert re.search(r' class="reference"', link) and re.search(r' id="[\w-]+"', link)
    assert html.count("<table>") == len(DATA.topics)
    with pytest.raises(DataError, match="one of the words counts, entries"):
        markdown.markdown("<!-- references: all -->", extensions=[BookMarkdown()])
