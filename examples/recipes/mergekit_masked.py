"""Masked averaging in mergekit: a merge method. Running it checks it.

python examples/recipes/mergekit_masked.py
"""

import torch
from mergekit.merge_methods import (
    BasePolicy,
    InputContract,
    PerNonBase,
    TensorGroup,
    merge_method,
    merge_state_dicts,
    register,
)

import fedgma


# recipe
@merge_method(name="gma", contract=InputContract(base=BasePolicy.REQUIRED))
def gma(group: TensorGroup, weight: PerNonBase[float] = 1.0, tau: float = 0.4) -> torch.Tensor:
    base, others = group.base.tensor, group.non_base
    updates = {"tensor": torch.stack([entry.tensor - base for entry in others])}
    return base + fedgma.masked_mean(tau)(updates, weight.values_for(others)).update["tensor"]


register(gma)  # from here on `merge_method: gma` works in a configuration that this process runs

# end of the recipe


def main() -> None:
    """Merge four models into their base, and compare with `server_round`."""
    torch.manual_seed(0)
    base = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 3)).state_dict()
    tuned = {f"model {k}": {name: value + torch.randn_like(value) for name, value in base.items()} for k in range(4)}
    weights = {name: float(k + 1) for k, name in enumerate(tuned)}
    merged = merge_state_dicts({"base": base, **tuned}, "gma", base="base", parameters={"tau": 0.6, "weight": weights})
    rule = fedgma.masked_mean(0.6)
    expected = fedgma.server_round(base, list(tuned.values()), list(weights.values()), aggregator=rule).params
    for name, value in expected.items():
        torch.testing.assert_close(merged[name], value)
    print(f"mergekit: {len(tuned)} models merged into their base, equal to fedgma.masked_mean")


if __name__ == "__main__":
    main()
