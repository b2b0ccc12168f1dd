"""Trains a network that labels every pixel, and validates it after each epoch: a script for one device."""

import sys

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
pictures = torch.randn(40, 3, 16, 16)
masks = (pictures.mean(1) > 0).long()
training = DataLoader(TensorDataset(pictures[:32], masks[:32]), batch_size=8, shuffle=True)
held_out = DataLoader(TensorDataset(pictures[32:], masks[32:]), batch_size=8)

model = nn.Sequential(
    nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
    nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
    nn.Conv2d(8, 2, 1),
)  # fmt: skip
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)

for epoch in range(2):
    model.train()
    for x, y in training:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        losses = [functional.cross_entropy(model(x), y).item() for x, y in held_out]
    scheduler.step(sum(losses) / len(losses))
    print(f"epoch {epoch}: loss {loss.item():.4f}, validation {sum(losses) / len(losses):.4f}")

torch.save(model.state_dict(), sys.argv[1] if len(sys.argv) > 1 else "model.pt")
