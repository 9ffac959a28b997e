"""Tests of the server of chapter 09 with the packages openai and transformers."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from openai import OpenAI

INPUTS = ["snippets/09_inference/load.py", "snippets/09_inference/serve.py"]
PROGRAMS = Path(__file__).resolve().parent.parent / "snippets/09_inference"
HELLO = [{"role": "user", "content": "hello"}]


@contextmanager
def run_server(*options: str) -> Iterator[str]:
    """Start a server on a free port, and yield its base URL."""
    command = [sys.executable, PROGRAMS / "serve.py", "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process.stdout.readline().split()[1]
        finally:
            process.terminate()


@pytest.fixture(scope="module")
def openai() -> ModuleType:
    """Return the package. It is imported late, because the import lasts several seconds."""
    return pytest.importorskip("openai")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with run_server("--slots", "1", "--queue", "1") as url:
        yield url


@pytest.fixture
def client(url: str, openai: ModuleType) -> Iterator[OpenAI]:
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def test_a_streamed_completion_equals_the_whole_completion(client: OpenAI) -> None:
    (model,) = client.models.list()
    request = {"model": model.id, "prompt": "hello", "max_tokens": 8}
    whole = client.completions.create(**request)
    assert whole.usage.prompt_tokens == 5
    assert whole.usage.completion_tokens == len(whole.choices[0].text) == 8
    stream = client.completions.create(
        **request, stream=True, stream_options={"include_usage": True}
    )
    *pieces, last, counts = stream
    assert "".join(piece.choices[0].text for piece in pieces) == whole.choices[0].text
    assert last.choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    assert counts.usage == whole.usage and not counts.choices


def test_a_streamed_chat_equals_the_whole_chat(client: OpenAI) -> None:
    request = {"model": "tiny", "messages": HELLO, "max_completion_tokens": 8}
    whole = client.chat.completions.create(**request)
    output = whole.choices[0].message
    assert output.role == "assistant" and len(output.content) == 8
    deltas = [
        piece.choices[0].delta
        for piece in client.chat.completions.create(**request, stream=True)
    ]
    assert "".join(delta.content or "" for delta in deltas) == output.content


@pytest.mark.parametrize(
    ("wrong", "error", "code"),
    [
        ({"prompt": "a" * 61}, "BadRequestError", "context_length_exceeded"),
        ({"model": "large"}, "NotFoundError", "model_not_found"),
        ({"temperature": 1}, "BadRequestError", "unsupported_value"),
        ({"n": 2}, "BadRequestError", "unsupported_parameter"),
        ({"prompt": ["ab"]}, "BadRequestError", "invalid_request"),
        ({"max_tokens": 2.5}, "BadRequestError", "invalid_request"),
        ({"prompt": "A"}, "BadRequestError", "invalid_request"),
    ],
)
def test_invalid_requests_are_rejected(
    client: OpenAI, openai: ModuleType, wrong: dict, error: str, code: str
) -> None:
    with pytest.raises(getattr(openai, error)) as raised:
        client.completions.create(**{"model": "tiny", "prompt": "a", "max_tokens": 4} | wrong)
    assert raised.value.code == code
    assert raised.value.type == "invalid_request_error"


def test_a_full_queue_is_reported(openai: ModuleType) -> None:
    with (
        run_server("--queue", "0") as url,
        openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client,
        pytest.raises(openai.RateLimitError) as raised,
    ):
        client.completions.create(model="tiny", prompt="a")
    assert raised.value.code == "queue_full"
    assert raised.value.response.headers["retry-after"] == "1"


def test_a_client_that_disconnects_frees_its_slot(client: OpenAI) -> None:
    """The server has one slot, so each of ten requests in a row needs the slot again."""
    for _ in range(10):
        stream = client.completions.create(model="tiny", prompt="a", max_tokens=63, stream=True)
        next(iter(stream))
        stream.close()
    assert client.completions.create(model="tiny", prompt="a").choices[0].text


def test_load_program_works_with_any_endpoint(url: str) -> None:
    command = [sys.executable, PROGRAMS / "load.py", "--requests", "1", "--url"]
    output = subprocess.run([*command, url], capture_output=True, text=True, check=True).stdout
    assert "1 of 1 answered whole" in output
    requested, given = re.findall(r"(\d+) tokens (?:asked|in)", output)
    assert requested == given
    done = subprocess.run([*command, "http://127.0.0.1:1/v1"], capture_output=True, text=True)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1, done.stderr


def test_transformers_computes_the_same_tokens(client: OpenAI, tmp_path: Path) -> None:
    """Compare with transformers, which shares no code with the server."""
    folder = tmp_path / "tiny"
    subprocess.run([sys.executable, PROGRAMS / "serve.py", "--save", folder], check=True)
    code = (
        "import json, sys, transformers as t\n"
        "model = t.AutoModelForCausalLM.from_pretrained(sys.argv[1])\n"
        "words = t.AutoTokenizer.from_pretrained(sys.argv[1])\n"
        "ids = words('hello, 7', return_tensors='pt')\n"
        "made = model.generate(**ids, max_new_tokens=32, do_sample=False)[0]\n"
        "print(json.dumps(words.decode(made)))\n"
    )
    command = [sys.executable, "-c", code, folder]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    answer = client.completions.create(model="tiny", prompt="hello, 7", max_tokens=32)
    assert json.loads(output) == "hello, 7" + answer.choices[0].text
