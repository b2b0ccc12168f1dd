"""Data of your own: any dataset or loader of torch.utils.data, as pairs (input, target).

python examples/own_data.py
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, IterableDataset

import manyhands as mh


class Stripes(Dataset[tuple[Tensor, int]]):
    """A map-style dataset, with samples by number. The best kind: nothing is held in memory, and a run resumes at any
    step."""

    def __len__(self) -> int:
        return 1024

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        picture = 0.3 * torch.randn(1, 8, 8, generator=generator)
        picture[0, ::2] += float(index % 2)  # stripes, or none
        return picture, index % 2


class Stream(IterableDataset[tuple[Tensor, int]]):
    """A stream: one pass over it is kept in memory, and every epoch has the same samples."""

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        data = Stripes()
        yield from (data[index] for index in range(512))


class Named(Dataset[dict[str, object]]):
    """Samples as dicts, as many libraries have them: mh.Pairs names the input and the target."""

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> dict[str, object]:
        picture, label = Stripes()[index]
        return {"image": picture, "label": label, "file": f"{index}.png"}


def main() -> None:
    torch.manual_seed(0)
    with mh.Coordinator.local_cluster(mh.Cluster.local(2)) as workers:  # started once, used four times
        for text, data, batch_size in (
            ("map-style", Stripes(), 64),
            ("a DataLoader", DataLoader(Stripes(), batch_size=32, shuffle=True), None),
            ("a stream", Stream(), 64),
            ("dicts", mh.Pairs(Named(), "image", "label"), 64),
        ):
            model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(256, 2))
            result = mh.train(
                model, data, loss=functional.cross_entropy, optimizer=mh.Optimizer("SGD", lr=0.05),
                batch_size=batch_size, cluster=workers, plan="samples",
            )  # fmt: skip
            print(f"{text}: {result.steps} steps, loss {result.losses[0]:.3f} -> {result.losses[-1]:.3f}")


if __name__ == "__main__":  # workers are processes of their own
    main()
