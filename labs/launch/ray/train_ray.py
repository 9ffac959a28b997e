"""Trains the model of train.py under Ray Train, whose TorchTrainer starts the ranks.

    python ray/train_ray.py --checkpoints saved

Ray sets the environment variables, calls `init_process_group`, and then calls our function.
The function runs in a thread of a worker, so it cannot install signal handlers. The program
needs ray[train].
"""

import importlib.util
import sys
from pathlib import Path

if importlib.util.find_spec("ray") is None:
    sys.exit("this program needs Ray: pip install -r requirements/ray.txt")

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the folder of train.py
import train


# --8<-- [start:trainer]
def loop(config: dict) -> float | None:
    """Train on one rank. Ray has already created the process group."""
    return train.train(train.arguments(config["arguments"]))


def trainer(arguments: list[str], ranks: int, storage: Path) -> TorchTrainer:
    gpu = ray.cluster_resources().get("GPU", 0) >= ranks
    return TorchTrainer(
        loop,
        train_loop_config={"arguments": arguments},
        torch_config=TorchConfig(backend="nccl" if gpu else "gloo"),
        scaling_config=ScalingConfig(num_workers=ranks, use_gpu=gpu),
        run_config=RunConfig(
            storage_path=str(storage),  # on a cluster: a folder that all nodes share
            failure_config=FailureConfig(max_failures=3),  # starts all ranks again
        ),
    )


# --8<-- [end:trainer]


def main() -> None:
    arguments = sys.argv[1:]
    options = train.arguments(arguments)
    storage = options.checkpoints.resolve()
    # Ray runs each worker in a folder of its own, so the path must be absolute
    arguments += ["--checkpoints", str(storage)]
    # start a cluster of two CPUs on this machine; to use a running cluster: ray.init("auto")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    result = trainer(arguments, ranks=2, storage=storage / "ray").fit()
    print(f"2 ranks, step {options.steps}, loss {result.return_value:.5f}")
    ray.shutdown()


if __name__ == "__main__":
    main()
