"""Step 8: no restart"""

STEP, HINT = 8, "elastic_restarts"


def elastic_words(nodes, ranks, master, port, job):
    return [
        f"--nnodes=1:{nodes}",
        f"--nproc-per-node={ranks}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={master}:{port}",
        f"--rdzv-id={job}",
    ]
