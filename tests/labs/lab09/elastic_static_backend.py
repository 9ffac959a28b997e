"""Step 8: no backend named"""

STEP, HINT = 8, "elastic_backend"


def elastic_words(nodes, ranks, master, port, job):
    return [
        f"--nnodes=1:{nodes}",
        f"--nproc-per-node={ranks}",
        "--max-restarts=3",
        f"--rdzv-endpoint={master}:{port}",
        f"--rdzv-id={job}",
    ]
