"""Masked averaging on NVFlare: the aggregator by hand, and in a simulated federation of NVFlare's own."""

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("nvflare", reason="nvflare is not installed: pip install 'fedgma[nvflare]'")

from nvflare.apis.dxo import DataKind
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.np.recipes.fedavg import NumpyFedAvgRecipe
from nvflare.client.config import TransferType
from nvflare.recipe import SimEnv

import fedgma
from fedgma.nvflare import MaskedAggregator
from nvflare_client import COUNTS, STEPS


def result(site, step, weight=10, kind=ParamsType.DIFF):
    meta = {"client_name": site, "NUM_STEPS_CURRENT_ROUND": weight}
    return FLModel(params_type=kind, params={"w": np.array(step)}, meta=meta)


def played(aggregator, *results):
    aggregator.reset_stats()
    for one in results:
        aggregator.accept_model(one)
    return aggregator.aggregate_model()


GOOD = [result("a", [3.0, 3.0]), result("b", [3.0, 3.0]), result("c", [3.0, -3.0])]


def test_the_result_is_the_masked_mean_as_a_difference():
    answer = played(MaskedAggregator(tau=0.5), *GOOD)
    assert answer.params_type == ParamsType.DIFF
    np.testing.assert_allclose(answer.params["w"], [3.0, 1 / 3])
    assert answer.metrics["gma-clients"] == 3
    assert answer.metrics["gma-mask-mean"] == pytest.approx(2 / 3)


@pytest.mark.parametrize("name", ["mean", "and_mask", "damped_mean", "shuffled_mask"])
def test_other_rules_are_chosen_by_name(name):
    expected = fedgma.AGGREGATORS[name]()({"w": np.array([[3.0, 3.0], [3.0, 3.0], [3.0, -3.0]])}, [10] * 3)
    np.testing.assert_array_equal(played(MaskedAggregator(aggregator=name), *GOOD).params["w"], expected.update["w"])


@pytest.mark.parametrize(
    "bad",
    [
        result("x", [np.nan, 1.0]),
        result("x", [1.0]),
        result("x", [1.0, 1.0], weight=-3),
        result("x", [1.0, 1.0], kind=ParamsType.FULL),
        result("a", [50.0, 50.0]),
    ],
    ids=["nan", "shape", "weight", "whole model", "twice"],
)
def test_a_bad_result_excludes_its_client_and_not_the_round(bad):
    answer = played(MaskedAggregator(tau=0.5), GOOD[0], bad, *GOOD[1:])
    np.testing.assert_allclose(answer.params["w"], [3.0, 1 / 3])
    assert answer.metrics["gma-refused"] == 1


def test_without_valid_updates_the_model_stays_unchanged():
    assert played(MaskedAggregator(), result("x", [np.nan, 1.0])).params == {}


def test_later_rounds_keep_the_schema_of_the_first_round():
    aggregator = MaskedAggregator(tau=0.5)
    played(aggregator, *GOOD)
    answer = played(aggregator, result("x", [9.0, 9.0, 9.0]), *GOOD)
    np.testing.assert_allclose(answer.params["w"], [3.0, 1 / 3])


def test_the_mask_comes_after_the_preconditioner_and_moments_persist():
    aggregator = MaskedAggregator(tau=0.5, optimizer="yogi", server={"learning_rate": 0.1})
    server, state, params = fedgma.yogi(0.1), None, {"w": np.zeros(2)}
    for _ in range(2):
        answer = played(aggregator, *GOOD)
        before = params["w"]
        models = [{"w": before + one.params["w"]} for one in GOOD]
        params, state, _ = fedgma.server_round(
            params, models, [10] * 3, aggregator=fedgma.masked_mean(0.5), optimizer=server, state=state
        )
        np.testing.assert_allclose(answer.params["w"], params["w"] - before, rtol=1e-12)


def test_unknown_names_are_refused_with_the_known_ones():
    with pytest.raises(fedgma.ConfigError, match="known: adagrad, adam"):
        MaskedAggregator(optimizer="adm")
    with pytest.raises(fedgma.ConfigError, match="unknown aggregator 'gna'"):
        MaskedAggregator(aggregator="gna")
    with pytest.raises(fedgma.ConfigError, match="one by one"):
        MaskedAggregator(aggregator="median")


def recipe(aggregator, rounds, kind=DataKind.WEIGHT_DIFF):
    return NumpyFedAvgRecipe(
        name="masked",
        model=[1.0, 1.0, 1.0],
        min_clients=4,
        num_rounds=rounds,
        train_script=str(Path(__file__).parent / "helpers" / "nvflare_client.py"),
        aggregator=aggregator,
        aggregator_data_kind=kind,
        params_transfer_type=TransferType.DIFF,
    )


def test_a_recipe_that_sends_full_models_is_refused_before_it_runs():
    with pytest.raises(ValueError, match="WEIGHT_DIFF"):
        recipe(MaskedAggregator(), 1, kind=DataKind.WEIGHTS)


def test_settings_survive_the_jobs_configuration(tmp_path):
    made = MaskedAggregator(tau=0.7, optimizer="yogi", server={"learning_rate": 0.01}, buffers=["b"])
    recipe(made, 1).export(str(tmp_path))
    files = [json.loads(path.read_text()) for path in tmp_path.rglob("config_fed_server.json")]
    arguments = {"tau": 0.7, "optimizer": "yogi", "server": {"learning_rate": 0.01}, "buffers": ["b"]}
    assert {"path": "fedgma.nvflare.MaskedAggregator", "args": arguments} in list(dicts(files))


def dicts(value):
    """Every dict in a nest of dicts and lists."""
    if isinstance(value, dict):
        yield value
        value = list(value.values())
    for one in value if isinstance(value, list) else []:
        yield from dicts(one)


@pytest.mark.slow
def test_a_simulated_federation_with_a_bad_client_gives_the_model_of_server_round(tmp_path):
    rounds = 2  # one federation a process: NVFlare's simulator leaves things behind
    environment = SimEnv(num_clients=4, num_threads=4, workspace_root=str(tmp_path))
    run = recipe(MaskedAggregator(tau=0.7), rounds).execute(environment)
    found = np.load(next(Path(run.get_result()).rglob("server.npy")))
    model = {"w": np.ones(3)}
    for _ in range(rounds):
        models = [{"w": model["w"] + np.array(step)} for step in STEPS.values()]
        model = fedgma.server_round(model, models, list(COUNTS.values()), aggregator=fedgma.masked_mean(0.7)).params
    np.testing.assert_array_equal(found, model["w"])
