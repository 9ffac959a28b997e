"""The exercise: a pipeline that trains as it should, and takes many times too long.

    python labs/start.py exercise
    python my_labs/exercise.py
    python labs/check.py my_labs/exercise.py

The first line writes your copy to `my_labs/`. It is whole: it runs, and its losses are right.
Twenty things in it cost time and nothing else: on a CPU, on a GPU, or on both. Each was seen in
code that people run. Find them, fix them, and keep the losses.

You may change everything but `write_data`, `order`, the four constants above them, and what
`train` takes, returns and writes. The last line measures before and after, and says which of
the twenty are still there; `--more` says how to fix them.
"""

import gc
import tempfile
import time
from pathlib import Path

import torch
import torch._dynamo  # optimizers import it: it is not what is timed
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

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


MICRO = 16  # more did not fit on the old card
PARTS = BATCH // MICRO


class Images(Dataset):
    """Samples of a file: an image as numbers from 0 to 1, and its label."""

    def __init__(self, path: Path):
        self.path = path

    def __len__(self) -> int:
        return len(torch.load(self.path)["labels"])

    def __getitem__(self, index: int) -> tuple[list, int]:
        data = torch.load(self.path)
        image = data["images"][index].permute(2, 0, 1) / 255  # [3, 16, 16]
        return image.tolist(), data["labels"][index].item()


def collate(samples: list) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples to a batch."""
    images = torch.tensor([image for image, _ in samples], dtype=torch.float64)
    return images, torch.tensor([label for _, label in samples])


def batches(path: Path, indices: list[int] | None) -> DataLoader:
    """Micro-batches, in the order of the indices if there are any."""
    return DataLoader(
        Images(path), batch_size=MICRO, sampler=indices, num_workers=2, collate_fn=collate
    )


class Norm(nn.Module):
    """Group norm: each of 4 groups of channels to mean 0 and variance 1."""

    def __init__(self, channels: int, groups: int = 4):
        super().__init__()
        self.groups = groups
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = []
        for part in x.chunk(self.groups, dim=1):
            mean = part.mean((1, 2, 3), keepdim=True)
            variance = ((part - mean) ** 2).mean((1, 2, 3), keepdim=True)
            parts.append((part - mean) / torch.sqrt(variance + 1e-5))
        return torch.cat(parts, dim=1) * self.weight.view(-1, 1, 1) + self.bias.view(-1, 1, 1)


class Net(nn.Module):
    """Three convolutions with norms, a mean over the image, a linear layer."""

    def __init__(self, width: int = 32):
        super().__init__()
        self.convolutions = nn.ModuleList(
            nn.Conv2d(channels, width, 3, padding=1) for channels in (3, width, width)
        )
        self.norms = nn.ModuleList(Norm(width) for _ in range(3))
        self.head = nn.Linear(width, CLASSES)
        self.calls = 0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        mean = torch.tensor([0.43, 0.43, 0.43], dtype=images.dtype).to(images.device)
        std = torch.tensor([0.16, 0.16, 0.16], dtype=images.dtype).to(images.device)
        x = (images - mean.view(3, 1, 1)) / std.view(3, 1, 1)
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = F.max_pool2d(F.relu(norm(convolution(x))), 2)
        return self.head(x.mean((2, 3)))


def clip(parameters: list[nn.Parameter]) -> None:
    """Scale the gradients down to a norm of CLIP."""
    squares = 0.0
    for parameter in parameters:
        squares += parameter.grad.norm().item() ** 2
    if squares**0.5 > CLIP:
        for parameter in parameters:
            parameter.grad.mul_(CLIP / squares**0.5)


def write_log(folder: Path, step: int, loss: float, model: nn.Module) -> None:
    """A line for the step, and histograms of the weights."""
    with (folder / "log.csv").open("a") as file:
        file.write(f"{step},{loss}\n")
    with (folder / "weights.csv").open("a") as file:
        for name, parameter in model.named_parameters():
            counts = torch.histc(parameter.detach().cpu().float(), bins=32, min=-1, max=1)
            file.write(f"{step},{name},{','.join(str(int(count)) for count in counts)}\n")


def evaluate(model: nn.Module, folder: Path, device: torch.device) -> float:
    """The mean loss over the validation samples."""
    model.eval()
    means = []
    for images, labels in batches(folder / "validation.pt", None):
        loss = F.cross_entropy(model(images.to(device)), labels.to(device))
        means.append(loss.item())
    model.train()
    return sum(means) / len(means)


def train(folder: Path, device: torch.device, epochs: int) -> tuple[list[float], list[float]]:
    """Train on what `write_data` wrote; losses of all steps, validation losses of all epochs.

    Writes log.csv, a line "step,loss" for each step.
    """
    torch.autograd.set_detect_anomaly(True)  # for the NaN of last month
    torch.manual_seed(0)
    model = Net().double().to(device)
    model = nn.DataParallel(model)  # the second GPU is ordered
    model = torch.compile(model, backend="eager")  # the default had trouble
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=RATE, foreach=False)
    scaler = torch.amp.GradScaler(device.type)

    (folder / "log.csv").unlink(missing_ok=True)
    losses, validation, loss = [], [], 0.0
    for epoch in range(epochs):
        samples = len(Images(folder / "train.pt"))
        source = batches(folder / "train.pt", order(samples, epoch))
        for number, (images, labels) in enumerate(source, start=1):
            images, labels = images.to(device), labels.to(device)
            part = F.cross_entropy(model(images), labels) / PARTS
            loss += part.item()
            scaler.scale(part).backward()
            if number % PARTS:
                continue
            scaler.unscale_(optimizer)
            clip(parameters)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses.append(loss)
            write_log(folder, len(losses), loss, model)
            loss = 0.0
            gc.collect()  # memory grew
        validation.append(evaluate(model, folder, device))
    return losses, validation


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
        assert (Path(folder) / "log.csv").read_text().startswith("1,")
    print(f"{len(losses)} steps on {device.type} in ≈{seconds:.2f} s")
    assert 1.5 < validation[1] < 2 < validation[0] < 2.3  # of ln 10 = 2.3, which knows nothing
    for epoch, loss in enumerate(validation):
        steps = len(losses) // len(validation)
        part = losses[epoch * steps : (epoch + 1) * steps]
        print(f"epoch {epoch}: loss {sum(part) / steps:.2f}, validation {loss:.2f}")


if __name__ == "__main__":
    main()
