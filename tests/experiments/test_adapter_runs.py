"""Runs with adapters, from settings to tables, with adapters of this library and of peft."""

import numpy as np
import pytest
import torch
from torch import nn

import fedgma
from fedgma.data.files import from_arrays
from fedgma.experiments.identity import code_identity
from fedgma.experiments.settings import Settings, complete, record
from fedgma.training.adapters import with_adapters

SMALL = {
    "partition": {"name": "iid", "clients": 3},
    "clients_per_round": 3,
    "rounds": 1,
    "batch_size": 8,
    "client_test_size": 0,
    "aggregator": "gma",
    "seed": 0,
}


def data():
    rng = np.random.default_rng(0)
    y = np.arange(60) % 3
    return from_arrays(rng.normal(size=(60, 6)).astype(np.float32) + y[:, None], y, name="blobs")


def base():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def test_a_run_without_the_setting_keeps_its_record():
    assert "adapters" not in record(complete(Settings()))
    assert record(complete(Settings(adapters="product")))["adapters"] == "product"


def test_apart_and_product_are_two_arms_of_one_comparison():
    settings = {**SMALL, "adapters": ["apart", "product"]}
    outcome = fedgma.run(settings, data=data(), model=with_adapters(base(), rank=2))
    assert {arm.name for arm in outcome.arms} >= {"adapters apart, GMA", "adapters product, GMA"}


def test_a_class_with_a_method_of_a_built_in_type_has_an_identity():
    made = [type("Net", (), {"__repr__": method}) for method in (object.__repr__, int.__repr__)]
    assert len({code_identity(kind).text for kind in made}) == 2


def test_a_rule_over_products_is_chosen_by_the_setting():
    rule = fedgma.in_products(fedgma.mean())
    with pytest.raises(fedgma.ConfigError, match="adapters='product'"):
        fedgma.run(SMALL, data=data(), model=with_adapters(base(), rank=2), aggregator=rule)


def test_adapters_of_peft_are_trained_and_the_rest_stays():
    peft = pytest.importorskip("peft", reason="peft is not installed: pip install 'fedgma[peft]'")
    model = peft.get_peft_model(base(), peft.LoraConfig(r=2, target_modules=["0"], init_lora_weights=True))
    outcome = fedgma.run({**SMALL, "adapters": "product"}, data=data(), model=model)
    after = outcome.state_dict("adapters product, GMA") if len(outcome.arms) > 1 else outcome.state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(after[name], value) == ("lora_" not in name)
