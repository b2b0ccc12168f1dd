"""Trains a LightningModule with callbacks, a logger, clipping and accumulated gradients: a script for one device."""

import sys

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import manyhands as mh


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.GELU())
        self.head = nn.Linear(32, 2)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = functional.cross_entropy(self.head(self.backbone(x)), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", functional.cross_entropy(self.head(self.backbone(x)), y))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


output = sys.argv[1] if len(sys.argv) > 1 else "model.pt"

torch.manual_seed(0)
x = torch.randn(160, 8)
y = (x.sum(1) > 0).long()
training = DataLoader(TensorDataset(x[:128], y[:128]), batch_size=16, shuffle=True)
held_out = DataLoader(TensorDataset(x[128:], y[128:]), batch_size=16)

module = Classifier()
trainer = mh.Trainer(
    cluster=mh.Cluster.local(2),
    max_epochs=2, gradient_clip_val=1.0, accumulate_grad_batches=2, val_check_interval=0.5, log_every_n_steps=1,
    callbacks=[EarlyStopping("val_loss"), LearningRateMonitor()], logger=CSVLogger(f"{output}.logs"),
    enable_checkpointing=False,
)  # fmt: skip
trainer.fit(module, training, held_out)

torch.save(module.state_dict(), output)
