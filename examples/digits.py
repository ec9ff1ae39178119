"""NG+ against SGD and Adam on scikit-learn's digits, with a small convolutional network.

Every method gets the same number of epochs, the same schedule (cosine to zero), the same initial weights and batches
for a seed, and as many learning rates to choose from as every other one. The learning rate is chosen by the validation
loss of two runs with seeds of their own; the table then shows the runs of the other seeds with that learning rate.

    python examples/digits.py [--epochs 12] [--seeds 3]
"""

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

import ngplus

BATCH_SIZE = 64
TARGET_ACCURACY = 0.97  # on the validation images
EVALUATE_EVERY = 2  # steps between two looks at the validation images
TUNING_SEEDS = (100, 101)  # the evaluation seeds are 0, 1, 2, …


@dataclass(frozen=True)
class Method:
    name: str
    make: Callable[[nn.Module, float], torch.optim.Optimizer]
    learning_rates: tuple[float, ...]


METHODS = (
    Method(
        "SGD",
        lambda model, lr: torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9),
        (0.01, 0.03, 0.1, 0.3),
    ),
    Method(
        "Adam",
        lambda model, lr: torch.optim.Adam(model.parameters(), lr=lr),
        (0.003, 0.01, 0.03, 0.1),
    ),
    Method(
        "NG+ inverse",
        lambda model, lr: ngplus.NGPlus(model, lr=lr, scaling="inverse", damping=0.3),
        (0.01, 0.03, 0.1, 0.3),
    ),
    Method(
        "NG+ adaptive",
        lambda model, lr: ngplus.NGPlus(model, lr=lr),
        (0.003, 0.01, 0.03, 0.1),
    ),
)


@dataclass(frozen=True)
class Split:
    images: Tensor
    labels: Tensor


@dataclass(frozen=True)
class Digits:
    train: Split
    validation: Split
    test: Split


@dataclass(frozen=True)
class Run:
    train_loss: float
    validation_loss: float
    test_accuracy: float
    steps_to_target: int | None  # None: never reached
    seconds_per_step: float


def load() -> Digits:
    """The 1,797 images of 8 x 8 pixels, pixels in [0, 1], in three parts: 1,197 / 300 / 300."""
    bunch = load_digits()
    images = torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(bunch.target, dtype=torch.long)
    rest, test = train_test_split(range(len(labels)), test_size=300, random_state=0, stratify=labels)
    train, validation = train_test_split(rest, test_size=300, random_state=0, stratify=labels[rest])
    return Digits(*(Split(images[part], labels[part]) for part in (train, validation, test)))


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(128, 10),
    )


def batches(data: Split, epochs: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Shuffled full batches; what is left over at the end of an epoch is dropped."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        order = torch.randperm(len(data.labels), generator=generator)
        for start in range(0, len(order) - BATCH_SIZE + 1, BATCH_SIZE):
            index = order[start : start + BATCH_SIZE]
            yield data.images[index], data.labels[index]


@torch.no_grad()
def evaluate(model: nn.Module, data: Split) -> tuple[float, float]:
    """Mean loss and accuracy."""
    model.eval()
    logits = model(data.images)
    model.train()
    loss = F.cross_entropy(logits, data.labels).item()
    return loss, (logits.argmax(1) == data.labels).float().mean().item()


def train(method: Method, lr: float, data: Digits, epochs: int, seed: int) -> Run:
    torch.manual_seed(seed)
    model = network()
    optimizer = method.make(model, lr)
    steps = epochs * (len(data.train.labels) // BATCH_SIZE)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    steps_to_target = None
    seconds = 0.0
    for step, (images, labels) in enumerate(batches(data.train, epochs, seed), start=1):
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        if not math.isfinite(loss.item()):  # diverged: the worst possible result
            return Run(math.inf, math.inf, 0.0, None, seconds / step)
        optimizer.step()
        scheduler.step()
        seconds += time.perf_counter() - start
        if (
            steps_to_target is None
            and step % EVALUATE_EVERY == 0
            and evaluate(model, data.validation)[1] >= TARGET_ACCURACY
        ):
            steps_to_target = step
    train_loss, _ = evaluate(model, data.train)
    validation_loss, _ = evaluate(model, data.validation)
    _, test_accuracy = evaluate(model, data.test)
    if not math.isfinite(validation_loss):
        validation_loss = math.inf
    return Run(train_loss, validation_loss, test_accuracy, steps_to_target, seconds / steps)


def spread(values: list[float], form: str) -> str:
    """Mean, and standard deviation where there is more than one value."""
    text = format(statistics.mean(values), form)
    return f"{text} ± {format(statistics.stdev(values), form)}" if len(values) > 1 else text


def steps_cell(runs: list[Run]) -> str:
    reached = [run.steps_to_target for run in runs if run.steps_to_target is not None]
    if not reached:
        return "not reached"
    text = f"{statistics.mean(reached):.0f}"
    return text if len(reached) == len(runs) else f"{text} ({len(reached)} of {len(runs)} runs)"


def main() -> None:
    parser = argparse.ArgumentParser(description="NG+ against SGD and Adam on scikit-learn's digits")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    if arguments.epochs < 1 or arguments.seeds < 1:
        parser.error("--epochs and --seeds must be at least 1")

    console = Console()
    if not console.is_terminal:
        console = Console(width=100)  # into a file or a pipe: as wide as the table
    data = load()
    table = Table(
        title="Digits, small CNN",
        caption=f"{arguments.epochs} epochs, batch {BATCH_SIZE}, mean ± std of {arguments.seeds} seed(s).\n"
        f"Steps: until {TARGET_ACCURACY:.0%} of the validation images are right.\n"
        "* the smallest or largest learning rate tried. SGD has momentum 0.9.\n"
        "NG+ inverse is the paper's form; NG+ adaptive, the default, is ngplus's own.",
        caption_justify="left",
    )
    for heading in ("method", "lr"):
        table.add_column(heading, no_wrap=True)
    for heading in ("test acc., %", "training loss", "steps", "ms/step"):
        table.add_column(heading, justify="right", no_wrap=True)

    columns = (TextColumn("{task.description:<40}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        total = sum(len(TUNING_SEEDS) * len(method.learning_rates) + arguments.seeds for method in METHODS)
        task = progress.add_task("", total=total)
        for method in METHODS:
            losses = {}
            for lr in method.learning_rates:
                progress.update(task, description=f"{method.name}: trying lr {lr:g}")
                tries = [train(method, lr, data, arguments.epochs, seed).validation_loss for seed in TUNING_SEEDS]
                losses[lr] = statistics.mean(tries)
                progress.advance(task, len(TUNING_SEEDS))
            best = min(losses, key=losses.__getitem__)
            runs = []
            for seed in range(arguments.seeds):
                progress.update(task, description=f"{method.name}: lr {best:g}, seed {seed}")
                runs.append(train(method, best, data, arguments.epochs, seed))
                progress.advance(task)
            at_edge = best in (min(method.learning_rates), max(method.learning_rates))
            table.add_row(
                method.name,
                f"{best:g}{'*' if at_edge else ''}",
                spread([100 * run.test_accuracy for run in runs], ".2f"),
                spread([run.train_loss for run in runs], ".4f"),
                steps_cell(runs),
                f"{1000 * statistics.mean(run.seconds_per_step for run in runs):.1f}",
            )
        progress.update(task, description="done")
    console.print(table)


if __name__ == "__main__":
    main()
