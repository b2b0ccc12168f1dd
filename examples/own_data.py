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
    """A stream, of any length: it is read as training goes on. As it tells no length, that of training is in steps."""

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
        loader = DataLoader(Stripes(), batch_size=32, shuffle=True, num_workers=2)  # used as it is
        for text, data, options in (
            ("map-style", Stripes(), {"batch_size": 64}),
            ("a DataLoader", loader, {}),
            ("a stream", Stream(), {"batch_size": 64, "steps": 8}),
            ("dicts", mh.Pairs(Named(), "image", "label"), {"batch_size": 64}),
        ):
            model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(256, 2))
            result = mh.train(
                model, data, loss=functional.cross_entropy, optimizer=mh.Optimizer("SGD", lr=0.05),
                cluster=workers, plan="samples", **options,
            )  # fmt: skip
            print(f"{text}: {result.steps} steps, loss {result.losses[0]:.3f} -> {result.losses[-1]:.3f}")


if __name__ == "__main__":  # workers are processes of their own
    main()
