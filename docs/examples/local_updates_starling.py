"""The quick start of hivemind, by Starling: two peers train a small classifier of pictures with local updates.

python docs/examples/local_updates_starling.py            # prints ADDRESS, and waits for the second peer
python docs/examples/local_updates_starling.py ADDRESS
"""

import sys

import torch
from torch import nn
from torch.nn.functional import cross_entropy, interpolate

from starling_node import Swarm

torch.set_num_threads(1)
torch.manual_seed(0)
patterns = interpolate(torch.randn(10, 3, 4, 4), size=32, mode="bilinear")


def pictures(count):  # of the size of CIFAR-10: ten patterns or their negatives, under noise
    labels = torch.randint(10, (count,))
    signs = torch.randint(2, (count, 1, 1, 1)) * 2 - 1
    return signs * patterns[labels] + 4 * torch.randn(count, 3, 32, 32), labels


features = [nn.Conv2d(3, 16, 5), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(16, 32, 5), nn.MaxPool2d(2), nn.ReLU()]
model = nn.Sequential(*features, nn.Flatten(), nn.Linear(800, 10))
held_out, held_out_labels = pictures(512)
torch.seed()

optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
if len(sys.argv) > 1:
    swarm = Swarm.join(model, optimizer, bootstrap=sys.argv[1])
else:
    swarm = Swarm.start(model, optimizer, inner_steps=156, rounds=1000, options=["--wait-for", "2"])
for step in range(100_000):
    batch, labels = pictures(32)
    cross_entropy(model(batch), labels).backward()
    optimizer.step()
    optimizer.zero_grad()
    swarm.step(tokens=32)
    if step % 25 == 0:
        with torch.no_grad():
            print(f"step {step}: {cross_entropy(model(held_out), held_out_labels):.4f}", flush=True)
