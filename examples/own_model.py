"""A model of your own, trained over two local workers: any nn.Module that torch.export can capture.

python examples/own_model.py
"""

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import manyhands as mh


class Residual(nn.Module):
    """A network with a skip connection, batch norm and dropout, which need nothing special."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.begin = nn.Linear(8, width)
        self.inside = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.1))
        self.end = nn.Linear(width, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        begun = functional.relu(self.begin(x))
        return self.end(begun + self.inside(begun))


def main() -> None:
    inputs = torch.randn(2048, 8, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(inputs, (inputs.sum(1) > 0).long())
    model = Residual()
    result = mh.train(
        model, data, loss=functional.cross_entropy, optimizer=mh.Optimizer("Adam", lr=0.01), batch_size=64, epochs=3,
        cluster=mh.Cluster.local(2), plan="samples",
    )  # fmt: skip
    print(f"loss {result.losses[0]:.3f} -> {result.losses[-1]:.3f}; run folder: {result.folder}")
    print(f"model holds the trained weights: {model(inputs[:4]).argmax(1).tolist()}")


if __name__ == "__main__":  # workers are processes of their own
    main()
