"""Step 8: an endpoint without a port"""

STEP, HINT = 8, "elastic_endpoint"


def elastic_words(nodes, ranks, master, port, job):
    return [
        f"--nnodes=1:{nodes}",
        f"--nproc-per-node={ranks}",
        "--max-restarts=3",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={master}",
        f"--rdzv-id={job}",
    ]
