"""Fine-tunes a network of timm: a script for one device, as anybody would write it."""

import sys

import timm
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import manyhands as mh

torch.manual_seed(0)
pictures, classes = torch.randn(48, 3, 32, 32), torch.randint(0, 10, (48,))
loader = DataLoader(TensorDataset(pictures, classes), batch_size=16, shuffle=True)

model = timm.create_model("resnet10t", num_classes=10)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=6)
step = mh.prepare(model, functional.cross_entropy, optimizer, cluster=mh.Cluster.local(2))

model.train()
for epoch in range(2):
    total = 0.0
    for x, y in loader:
        optimizer.zero_grad()
        loss = step((x, y))
        loss.backward()
        optimizer.step()
        scheduler.step()
        total += loss.item()
    print(f"epoch {epoch}: loss {total / len(loader):.4f}")

step.close()
torch.save(model.state_dict(), sys.argv[1] if len(sys.argv) > 1 else "model.pt")
