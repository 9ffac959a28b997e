"""TensorFlow's MultiWorkerMirroredStrategy gives the same losses as DDP in the same processes.

Each process is a rank of torch's group and a worker of TensorFlow's cluster. Both libraries
train the same model from the same weights, on the same shards of each batch. They are compared
with training on the whole batch in one process. The program needs TensorFlow:
pip install -r requirements/tensorflow.txt
"""

import importlib.util
import json
import os
import socket
import sys

if importlib.util.find_spec("tensorflow") is None:
    sys.exit("this needs TensorFlow: pip install -r requirements/tensorflow.txt")

os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}  # both on the CPU
# torch imports triton if it is installed. If the libraries of triton and of TensorFlow are both
# loaded, the process ends with a segmentation fault (tensorflow-cpu 2.21.0, triton 3.7.1).
if importlib.util.find_spec("triton"):
    sys.modules["triton"] = None

import numpy as np
import tensorflow as tf
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

BATCH, H, STEPS, LR = 32, 16, 6, 0.1  # the number of ranks must divide the batch


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(H, 4 * H), nn.Tanh(), nn.Linear(4 * H, 1))


def data(step: int, rank: int, n: int) -> np.ndarray:
    """The rows of this rank in the global batch of a step, [batch / n, h]."""
    rows = np.random.default_rng(step).standard_normal((BATCH, H), dtype=np.float32)
    return rows[rank::n]


# --8<-- [start:torch]
def train_torch(model: nn.Module, rank: int, n: int) -> list[float]:
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=LR), []
    for step in range(STEPS):
        x = torch.from_numpy(data(step, rank, n))
        loss = nn.functional.mse_loss(model(x), x[:, :1].sin())
        optimizer.zero_grad()
        loss.backward()  # DDP averages the gradients of all ranks
        optimizer.step()
        losses.append(loss.item())
    return losses


# --8<-- [end:torch]


# --8<-- [start:tensorflow]
def train_tensorflow(strategy, rank: int, n: int) -> tuple[list[float], list[np.ndarray]]:
    """The losses of the rows of this worker, and the weights at the end."""
    with strategy.scope():  # every worker has a copy of the variables created here
        weights = [tf.Variable(p.detach().numpy()) for p in make_model().parameters()]
        optimizer = tf.keras.optimizers.SGD(LR)
        optimizer.build(weights)

    @tf.function
    def step(x):
        def replica(x):
            up, up_bias, down, down_bias = weights
            with tf.GradientTape() as tape:
                hidden = tf.tanh(x @ tf.transpose(up) + up_bias)
                y = hidden @ tf.transpose(down) + down_bias
                squares = (y - tf.sin(x[:, :1])) ** 2
                # gradients are summed over the workers, so divide by the global batch
                loss = tf.nn.compute_average_loss(squares[:, 0], global_batch_size=BATCH)
            gradients = tape.gradient(loss, weights)
            optimizer.apply_gradients(zip(gradients, weights, strict=True))
            return loss

        return strategy.run(replica, args=(x,))

    losses = [n * float(step(tf.constant(data(i, rank, n)))) for i in range(STEPS)]
    return losses, [w.numpy() for w in weights]


# --8<-- [end:tensorflow]


# --8<-- [start:cluster]
def describe_cluster(rank: int, n: int) -> None:
    """Set TF_CONFIG, which has the addresses of all workers and the index of this worker."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        ours: list = [None] * n
        dist.all_gather_object(ours, f"localhost:{probe.getsockname()[1]}")
    task = {"type": "worker", "index": rank}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": ours}, "task": task})


# --8<-- [end:cluster]


def main() -> None:
    if "LOCAL_RANK" not in os.environ:
        sys.exit(f"start this program with: torchrun --nproc-per-node=2 {sys.argv[0]}")
    dist.init_process_group("gloo")
    rank, n = dist.get_rank(), dist.get_world_size()
    describe_cluster(rank, n)
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    alone, ddp = make_model(), DistributedDataParallel(make_model())
    expected = train_torch(alone, 0, 1)
    by_torch = train_torch(ddp, rank, n)
    by_tensorflow, weights = train_tensorflow(strategy, rank, n)
    both = torch.tensor([by_torch, by_tensorflow])
    dist.all_reduce(both)
    both /= n
    torch.testing.assert_close(both, torch.tensor([expected] * 2))
    for ours, theirs, truth in zip(ddp.parameters(), weights, alone.parameters(), strict=True):
        torch.testing.assert_close(ours, truth)
        torch.testing.assert_close(torch.from_numpy(theirs), truth.detach())
    if rank == 0:
        print(f"{n} ranks of torch, {strategy.num_replicas_in_sync} replicas of TensorFlow")
        print("step  one process      DDP  tf.distribute")
        for i, (one, two, three) in enumerate(zip(expected, *both.tolist(), strict=True)):
            print(f"{i:4}  {one:11.4f}  {two:7.4f}  {three:13.4f}")
        print("weights after the last step: equal")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
