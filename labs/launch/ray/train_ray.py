"""Ray Train: the same training under TorchTrainer, which starts the ranks and their group.

    python ray/train_ray.py --checkpoints saved

Ray sets the variables, calls `init_process_group`, and then the function: in a thread of a
worker, so that no signal handler can be set there. Needs ray[train].
"""

import importlib.util
import sys
from pathlib import Path

if importlib.util.find_spec("ray") is None:
    sys.exit("this needs Ray: pip install -r requirements/ray.txt")

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # where train.py lies
import train


# --8<-- [start:trainer]
def loop(config: dict) -> float | None:
    """What each rank runs: the process group is there already."""
    return train.train(train.arguments(config["arguments"]))


def trainer(arguments: list[str], ranks: int, storage: Path) -> TorchTrainer:
    gpu = ray.cluster_resources().get("GPU", 0) >= ranks
    return TorchTrainer(
        loop,
        train_loop_config={"arguments": arguments},
        torch_config=TorchConfig(backend="nccl" if gpu else "gloo"),
        scaling_config=ScalingConfig(num_workers=ranks, use_gpu=gpu),
        run_config=RunConfig(
            storage_path=str(storage),  # on a cluster: what all nodes see
            failure_config=FailureConfig(max_failures=3),  # it starts all ranks again
        ),
    )


# --8<-- [end:trainer]


def main() -> None:
    arguments = sys.argv[1:]
    options = train.arguments(arguments)
    storage = options.checkpoints.resolve()
    # a worker's folder is Ray's own, so that the path must be whole
    arguments += ["--checkpoints", str(storage)]
    # a cluster of two CPUs on this machine; on a cluster that runs already: ray.init("auto")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    result = trainer(arguments, ranks=2, storage=storage / "ray").fit()
    print(f"2 ranks, step {options.steps}, loss {result.return_value:.5f}")
    ray.shutdown()


if __name__ == "__main__":
    main()
