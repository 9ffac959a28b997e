"""Metrics of a run: one JSON line per step in a file, and the latest values for Prometheus.

The file is an experiment tracker that works without a network. The endpoint serves the text
format of Prometheus with the HTTP server of the standard library. The program scrapes itself.
"""

import json
import math
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

KINDS = {
    "tokens_total": ("counter", "Tokens trained on since the start."),
    "loss": ("gauge", "Training loss of the latest step."),
    "step_seconds": ("gauge", "Duration of the latest step."),
    "input_wait_ratio": ("gauge", "Share of the step spent waiting for data."),
}


# --8<-- [start:log]
class Metrics:
    """Appends every record to a file, and serves the latest at /metrics."""

    def __init__(self, path: str, labels: dict[str, str]) -> None:
        self.file = Path(path).open("a", buffering=1)  # noqa: SIM115
        self.labels = ",".join(f'{key}="{value}"' for key, value in labels.items())
        self.latest: dict[str, float] = {}

    def log(self, step: int, **values: float) -> None:
        self.file.write(json.dumps({"step": step, **values}) + "\n")
        self.latest = values  # one assignment: a scrape sees all of a step or none of it

    def text(self) -> str:
        """Prometheus' text format, version 0.0.4."""
        lines = []
        for name, value in self.latest.items():
            kind, words = KINDS[name]
            lines += [f"# HELP train_{name} {words}", f"# TYPE train_{name} {kind}"]
            lines.append(f"train_{name}{{{self.labels}}} {value!r}")
        return "\n".join(lines) + "\n"

    # --8<-- [end:log]

    # --8<-- [start:serve]
    def serve(self, port: int = 0) -> ThreadingHTTPServer:
        """Answer scrapes from a thread, on localhost; port 0 lets the system choose."""
        metrics = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = metrics.text().encode()
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_) -> None:  # no line on stderr for every scrape
                pass

        server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return server

    # --8<-- [end:serve]


def scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")
        return answer.read().decode()


def main() -> None:
    metrics = Metrics("run.jsonl", {"run": "naïve", "rank": "0"})
    server = metrics.serve()
    for step in range(1, 4):
        held, text = metrics.latest, str(metrics.latest)  # as a scrape under way has them
        metrics.log(
            step,
            tokens_total=step * 4096,
            loss=round(math.exp(-step), 3),
            step_seconds=0.25,
            input_wait_ratio=0.02,
        )
        assert str(held) == text
    print(scrape(server.server_port), end="")
    server.shutdown()
    server.server_close()
    Metrics("run.jsonl", {}).file.close()  # a restart keeps what is there
    records = [json.loads(line) for line in Path("run.jsonl").read_text().splitlines()]
    print(f"run.jsonl: {len(records)} lines, the last {records[-1]}")


if __name__ == "__main__":
    main()
