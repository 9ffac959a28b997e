"""Step 8: a fixed number of nodes"""

STEP, HINT = 8, "elastic_range"


def elastic_words(nodes, ranks, master, port, job):
    return [
        f"--nnodes={nodes}",
        f"--nproc-per-node={ranks}",
        "--max-restarts=3",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={master}:{port}",
        f"--rdzv-id={job}",
    ]
