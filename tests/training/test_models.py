import pytest
import torch
from torch import nn

from fedgma.errors import ConfigError
from fedgma.training.models import build, parameter_count

COUNTS = [
    ("lenet", (1, 28, 28), 10, 61_706),
    ("lenet", (3, 28, 28), 10, 62_006),
    ("resnet18-gn", (3, 32, 32), 10, 11_173_962),
    ("resnet18-gn", (3, 32, 32), 100, 11_220_132),
    ("resnet18-gn", (3, 64, 64), 200, 11_271_432),
    ("resnet18-bn", (3, 32, 32), 10, 11_173_962),
    ("resnet18-gn-imagenet", (3, 32, 32), 10, 11_181_642),  # that of torchvision, with 10 classes
    ("logistic", (1, 28, 28), 10, 7_850),
    ("cnn", (3, 32, 32), 10, 1_626_442),
]


@pytest.mark.parametrize(("name", "shape", "classes", "count"), COUNTS)
def test_a_named_model_has_the_stated_number_of_parameters(name, shape, classes, count):
    assert parameter_count(build(name, shape, classes, seed=0)) == count


@pytest.mark.parametrize("name", ["lenet", "logistic", "cnn"])
def test_a_named_model_gives_one_logit_for_each_class(name):
    model = build(name, (3, 28, 28), 7, seed=0)
    assert model(torch.zeros(2, 3, 28, 28)).shape == (2, 7)


def test_a_resnet_takes_small_images():
    assert build("resnet18-gn", (3, 8, 8), 4, seed=0)(torch.zeros(1, 3, 8, 8)).shape == (1, 4)


def test_the_imagenet_network_halves_images_five_times_and_starts_by_the_fan_out():
    model = build("resnet18-gn-imagenet", (3, 32, 32), 4, seed=0)
    maps = []
    model.layer1.register_forward_hook(lambda layer, given, made: maps.append(given[0].shape[2:]))
    model.layer4.register_forward_hook(lambda layer, given, made: maps.append(made.shape[2:]))
    assert model(torch.zeros(1, 3, 32, 32)).shape == (1, 4)
    assert maps == [(8, 8), (1, 1)]
    weight = model.layer3[0].conv1.weight
    assert weight.std().item() == pytest.approx((2 / (256 * 9)) ** 0.5, rel=0.02)


def test_the_seed_alone_decides_the_initial_weights():
    first, again, other = (build("lenet", (1, 28, 28), 10, seed=s).fc1.weight for s in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_building_a_model_leaves_torchs_generator_alone():
    before = torch.get_rng_state()
    build("cnn", (3, 32, 32), 10, seed=3)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_small_cnn_has_glorot_weights_and_zero_biases():
    layer = build("cnn", (3, 32, 32), 10, seed=0).fc2
    bound = (6 / (128 + 10)) ** 0.5
    assert 0.9 * bound < layer.weight.abs().max() <= bound
    assert not layer.bias.any()


def test_a_model_comes_by_import_path_factory_or_object():
    assert type(build("fedgma.training.models:Logistic", (4,), 2, seed=0)).__name__ == "Logistic"
    made = build(lambda shape, classes: nn.Linear(shape[0], classes), (4,), 2, seed=0)
    copied = build(made, (4,), 2, seed=9)
    assert copied is not made
    assert torch.equal(copied.weight, made.weight)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("lenett", "known: cnn, lenet, logistic, mlp, resnet18-bn, resnet18-gn, resnet18-gn-imagenet"),
        ("no_such_package_here:Net", "could not be imported"),
        ("fedgma.training.models:MODELS", "name a factory"),
        (lambda shape, classes: "net", "got str"),
    ],
)
def test_a_wrong_model_is_refused_with_a_sentence(model, said):
    with pytest.raises(ConfigError, match=said):
        build(model, (1, 28, 28), 10, seed=0)
