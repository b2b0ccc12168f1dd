"""A module written for Lightning, trained over two local workers in three lines. Lightning itself is not needed.

python examples/lightning_style.py
"""

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import manyhands as mh


class Classifier(nn.Module):  # or lightning.LightningModule: the same three methods are used
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return functional.cross_entropy(self(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def main() -> None:
    inputs = torch.randn(2048, 8, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(inputs, (inputs.sum(1) > 0).long())

    module = Classifier()
    trainer = mh.Trainer(devices=2, max_epochs=3)
    result = trainer.fit(module, DataLoader(data, batch_size=64, shuffle=True))

    print(f"loss {result.losses[0]:.3f} -> {result.losses[-1]:.3f}; run folder: {result.folder}")


if __name__ == "__main__":  # workers are processes of their own
    main()
