"""The pages that the browser opens: pictures, tokens, texts, tables with broken samples.

python -m tests.browser.pages DIRECTORY
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn import datasets
from torch import Tensor, nn

import persample
from benchmarks.models.language import LanguageModel
from persample.command_line.demonstration import demonstration, mark

WORDS = 24


def pictures(folder: Path) -> None:
    """The demonstration, after few epochs, compared with itself after more."""
    old, _ = demonstration(epochs=2)
    before = persample.inspect(old.model, old.loss_fn, old.batches, progress=False, **old.options)
    target, wrong = demonstration(epochs=12)
    report = persample.inspect(
        target.model, target.loss_fn, target.batches, progress=False, **target.options
    )
    mark(report, wrong)
    report.to_html(folder / "pictures.html", against=before)


def sentences() -> tuple[Tensor, list[str]]:
    """Text that comes with scikit-learn, in rows of words."""
    text = " ".join(
        load().DESCR for load in (datasets.load_digits, datasets.load_wine, datasets.load_diabetes)
    )
    words = text.split()
    names = sorted(set(words))
    numbers = torch.tensor([names.index(word) for word in words])
    return numbers[: len(words) // WORDS * WORDS].view(-1, WORDS), names


def language_losses(model: nn.Module, batch: Tensor) -> Tensor:
    """Mean loss of the next word."""
    scores = model(batch[:, :-1])
    return F.cross_entropy(scores.transpose(1, 2), batch[:, 1:], reduction="none").mean(1)


def tokens(folder: Path) -> None:
    """A small language model on the data sets' descriptions."""
    torch.manual_seed(0)
    rows, names = sentences()
    model = LanguageModel(len(names), 32, 2, 2, WORDS, tied=False)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(20):
        for part in torch.randperm(len(rows)).split(16):
            optimizer.zero_grad()
            language_losses(model, rows[part]).mean().backward()
            optimizer.step()
    batches = [*rows.split(16), rows[:3]]  # three lines twice: duplicates
    show = persample.Show(tokens=lambda batch: batch[:, :-1], decode=names)
    report = persample.inspect(model, language_losses, batches, show=show, progress=False)
    report.to_html(folder / "tokens.html")


class BertForSequenceClassificationWithAVeryLongName(nn.Module):
    """A bag of words; its name is as long as some names are."""

    def __init__(self, words: int, classes: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.EmbeddingBag(words, 16), nn.Linear(16, classes)
        self.unused = nn.Linear(2, 2)

    def forward(self, rows: Tensor) -> Tensor:
        return self.head(self.embedding(rows))


def texts(folder: Path) -> None:
    """Sentences with long class names, duplicates, long ids and a comparison: every section."""
    torch.manual_seed(0)
    rows, names = sentences()
    y = torch.arange(len(rows)) // 8 % 4
    rows, y = (
        torch.cat([rows, rows[:6]]),
        torch.cat([y, y[:5], y[5:6] + 1]),
    )  # one with another label
    classes = ["function documentation", "class documentation", "module overview", "command line"]
    made = BertForSequenceClassificationWithAVeryLongName(len(names), 4)
    optimizer = torch.optim.Adam(made.parameters(), 1e-2)

    def losses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    def found() -> persample.Report:
        show = persample.Show(
            text=lambda batch: [" ".join(names[k] for k in row) for row in batch[0].tolist()],
            classes=classes,
        )
        batches = list(zip(rows.split(16), y.split(16), strict=True))
        ids = [f"descriptions/section-{i:05d}" for i in range(len(rows))]
        return persample.inspect(made, losses, batches, ids, show=show, progress=False)

    before = found()
    for _ in range(60):
        optimizer.zero_grad()
        losses(made, (rows, y)).mean().backward()
        optimizer.step()
    found().to_html(folder / "texts.html", against=before)


def features(folder: Path) -> None:
    """A table of numbers with NaN in it, an unused layer and names for the classes."""
    torch.manual_seed(0)
    found = datasets.load_wine()
    x, y = torch.tensor(found.data, dtype=torch.float32), torch.tensor(found.target)
    x = (x - x.mean(0)) / x.std(0)
    x[7], x[21] = float("nan"), x[20]
    y[21] = y[20]

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.unused = nn.Linear(13, 16), nn.Linear(16, 3), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.two(self.one(x).relu())

    def losses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    show = persample.Show(classes=[str(name) for name in found.target_names])
    batches = list(zip(x.split(32), y.split(32), strict=True))
    report = persample.inspect(Net(), losses, batches, show=show, progress=False)
    report.to_html(folder / "features.html")


def main() -> None:
    """Write all pages."""
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for write in (pictures, tokens, texts, features):
        write(folder)


if __name__ == "__main__":
    main()
