"""The exercise, solved: the same losses, with nothing in the way.

    python assessment/exercise.py
    python labs/check.py assessment/exercise.py

The data live on the device, a batch is one step, the host never waits within an epoch, and what
each layer does is one operator.
"""

import tempfile
import time
from pathlib import Path

import torch
import torch._dynamo  # optimizers import it: it is not what is timed
from torch import nn
from torch.nn import functional as F

CLASSES, BATCH, RATE, CLIP = 10, 64, 3e-3, 1.0


def write_data(folder: Path, train: int = 256, validation: int = 128) -> None:
    """Write train.pt and validation.pt: images [n, 16, 16, 3] of bytes, labels [n]."""
    generator = torch.Generator().manual_seed(1)
    patterns = torch.randn(CLASSES, 4, 4, 3, generator=generator).repeat(1, 4, 4, 1)
    for name, n in (("train", train), ("validation", validation)):
        labels = torch.randint(CLASSES, (n,), generator=generator)
        noise = torch.randn(n, 16, 16, 3, generator=generator)
        images = (110 + 40 * patterns[labels] + 25 * noise).clamp(0, 255).byte()
        torch.save({"images": images, "labels": labels}, folder / f"{name}.pt")


def order(samples: int, epoch: int) -> list[int]:
    """The order of the training samples in an epoch."""
    return torch.randperm(samples, generator=torch.Generator().manual_seed(epoch)).tolist()


def read(path: Path, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Images [n, 3, 16, 16] and labels [n] of a file, on the device: bytes, read once.

    The file has the channels last, as decoders of images give them. Seen with the channels
    first, not a byte moves, and the convolutions get the memory format they are fastest with.
    """
    data = torch.load(path)
    return data["images"].to(device).permute(0, 3, 1, 2), data["labels"].to(device)


class Net(nn.Module):
    """Three convolutions with norms, a mean over the image, a linear layer."""

    def __init__(self, width: int = 32):
        super().__init__()
        self.convolutions = nn.ModuleList(
            nn.Conv2d(channels, width, 3, padding=1) for channels in (3, width, width)
        )
        self.norms = nn.ModuleList(nn.GroupNorm(4, width) for _ in range(3))
        self.head = nn.Linear(width, CLASSES)
        self.register_buffer("mean", torch.full((3, 1, 1), 0.43))
        self.register_buffer("std", torch.full((3, 1, 1), 0.16))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = (images / 255 - self.mean) / self.std
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = F.max_pool2d(F.relu(norm(convolution(x))), 2)
        return self.head(x.mean((2, 3)))


def loss_of(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean loss; on an accelerator, its products in bf16."""
    kind = images.device.type
    with torch.autocast(kind, dtype=torch.bfloat16, enabled=kind != "cpu"):
        return F.cross_entropy(model(images), labels)


def clip(parameters: list[nn.Parameter]) -> None:
    """Scale the gradients down to a norm of CLIP; the device decides whether."""
    nn.utils.clip_grad_norm_(parameters, CLIP)


def make_optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW with one update for all parameters."""
    return torch.optim.AdamW(parameters, lr=RATE, fused=True)


def write_log(folder: Path, losses: list[float]) -> None:
    """A line for each step."""
    lines = [f"{step},{loss}\n" for step, loss in enumerate(losses, start=1)]
    (folder / "log.csv").write_text("".join(lines))


def evaluate(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean loss over the validation samples, still on the device."""
    with torch.no_grad():
        return loss_of(model, images, labels)


def train(folder: Path, device: torch.device, epochs: int) -> tuple[list[float], list[float]]:
    """Train on what `write_data` wrote; losses of all steps, validation losses of all epochs.

    Writes log.csv, a line "step,loss" for each step.
    """
    images, labels = read(folder / "train.pt", device)
    unseen = read(folder / "validation.pt", device)
    torch.manual_seed(0)
    model = Net().to(device, memory_format=torch.channels_last)
    parameters = list(model.parameters())
    optimizer = make_optimizer(parameters)

    losses, validation = [], []
    for epoch in range(epochs):
        for indices in torch.tensor(order(len(labels), epoch), device=device).split(BATCH):
            loss = loss_of(model, images[indices], labels[indices])
            loss.backward()
            clip(parameters)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        validation.append(evaluate(model, *unseen))
    losses = torch.stack(losses).tolist()
    write_log(folder, losses)
    return losses, torch.stack(validation).tolist()


def main() -> None:
    torch.set_num_threads(1)  # the tensors are small
    device = torch.device("cpu")
    if torch.accelerator.is_available():
        device = torch.accelerator.current_accelerator()
    with tempfile.TemporaryDirectory() as folder:
        write_data(Path(folder))
        begin = time.perf_counter()
        losses, validation = train(Path(folder), device, epochs=2)
        seconds = time.perf_counter() - begin
    print(f"{len(losses)} steps on {device.type} in ≈{seconds:.2f} s")
    assert 1.5 < validation[1] < 2 < validation[0] < 2.3  # of ln 10 = 2.3, which knows nothing
    for epoch, loss in enumerate(validation):
        steps = len(losses) // len(validation)
        part = losses[epoch * steps : (epoch + 1) * steps]
        print(f"epoch {epoch}: loss {sum(part) / steps:.2f}, validation {loss:.2f}")


if __name__ == "__main__":
    main()
