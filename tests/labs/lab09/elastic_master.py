"""Step 8: the options of the static rendezvous"""

STEP, HINT = 8, "elastic_master"


def elastic_words(nodes, ranks, master, port, job):
    return [
        f"--nnodes=1:{nodes}",
        f"--nproc-per-node={ranks}",
        "--max-restarts=3",
        "--rdzv-backend=c10d",
        f"--master-addr={master}",
        f"--master-port={port}",
        f"--rdzv-id={job}",
    ]
