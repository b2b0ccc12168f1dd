"""Fine-tunes a language model of transformers with LoRA: a script for one device, as anybody would write it."""

import sys

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

import manyhands as mh

torch.manual_seed(0)
texts = torch.randint(0, 100, (24, 12))
loader = DataLoader([{"input_ids": text, "labels": text} for text in texts], batch_size=8, shuffle=True)

config = GPT2Config(
    vocab_size=100, n_positions=16, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
)
model = get_peft_model(GPT2LMHeadModel(config), LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
train = mh.prepare(model, None, optimizer, cluster=mh.Cluster.local(2))

model.train()
for epoch in range(2):
    for step, batch in enumerate(loader):
        loss = train(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"epoch {epoch}, step {step}: loss {loss.item():.4f}")

train.close()
torch.save(model.state_dict(), sys.argv[1] if len(sys.argv) > 1 else "model.pt")
