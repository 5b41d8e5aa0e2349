"""Masked averaging of LoRA adapters with peft: only the adapters travel and vote. Running it checks it.

python examples/recipes/peft_masked.py
"""

import numpy as np
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from torch import nn

import fedgma


# recipe
def masked_round(model, train, clients, counts, tau=0.4):
    start = {name: value.clone() for name, value in get_peft_model_state_dict(model).items()}
    adapters = []
    for client in clients:
        set_peft_model_state_dict(model, start)
        train(model, client)
        adapters.append({name: value.clone() for name, value in get_peft_model_state_dict(model).items()})
    result = fedgma.server_round(start, adapters, counts, aggregator=fedgma.masked_mean(tau))
    set_peft_model_state_dict(model, result.params)
    return result.notes


# end of the recipe

CLIENTS = [0, 1, 2, 3]


def network() -> nn.Module:
    """A frozen network with adapters on one of its layers; the seed makes all clients start alike."""
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    return get_peft_model(base, LoraConfig(r=2, lora_alpha=4, target_modules=["0"]))


def train(model: nn.Module, client: int) -> None:
    """A few steps on the client's own data."""
    generator = torch.Generator().manual_seed(client)
    x, y = torch.randn(32, 6, generator=generator), torch.randint(3, (32,), generator=generator)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    for _ in range(5):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def main() -> None:
    """Two rounds; the second is compared with the masked mean of plain numbers."""
    model = network()
    frozen = {name: value.clone() for name, value in model.named_parameters() if not value.requires_grad}
    masked_round(model, train, CLIENTS, [32] * 4)
    start = {name: value.clone() for name, value in get_peft_model_state_dict(model).items()}
    updates = []
    for client in CLIENTS:
        set_peft_model_state_dict(model, start)
        train(model, client)
        updates.append({name: value - start[name] for name, value in get_peft_model_state_dict(model).items()})
    set_peft_model_state_dict(model, start)
    notes = masked_round(model, train, CLIENTS, [32] * 4)
    for name, value in get_peft_model_state_dict(model).items():
        stack = np.stack([update[name].numpy() for update in updates]).astype(np.float64)
        agreement = abs(np.sign(stack).mean(0))
        step = np.where(agreement >= 0.4, 1.0, agreement) * stack.mean(0)
        np.testing.assert_allclose(value.numpy(), start[name].numpy() + step, rtol=1e-5, atol=1e-6)
    for name, value in model.named_parameters():
        assert name not in frozen or torch.equal(value, frozen[name])
    travelled = sum(value.numel() for value in start.values())
    total = travelled + sum(value.numel() for value in frozen.values())
    print(f"peft: adapters of {notes['clients']} clients ({travelled} of {total} numbers), equal to the masked mean")


if __name__ == "__main__":
    main()
