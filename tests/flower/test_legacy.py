"""The strategy for apps with `aggregate_fit`: the same answers as the one for messages."""

import numpy as np
import pytest

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedgma[flower]'")

from flwr.common import Code, FitRes, Parameters, Status, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server.client_manager import SimpleClientManager

import fedgma
from fedgma.flower import MaskedFit

START = [np.zeros((2, 3), np.float32), np.array(4)]


class Proxy:
    def __init__(self, cid):
        self.cid = cid


def fitted(cid, arrays, weight=10, **metrics):
    parameters = arrays if isinstance(arrays, Parameters) else ndarrays_to_parameters(arrays)
    return Proxy(cid), FitRes(Status(Code.OK, ""), parameters, weight, metrics)


def local(cid, value, weight=10):
    return fitted(cid, [np.full((2, 3), value, np.float32), np.array(5)], weight, loss=float(value))


GOOD = [local("a", 1.0), local("b", 2.0), local("c", -1.0)]
BAD = {
    "nan": local("x", np.nan),
    "broadcastable shape": fitted("x", [np.ones(3, np.float32), np.array(5)]),
    "one array too few": fitted("x", [np.ones((2, 3), np.float32)]),
    "huge weight": local("x", 1.0, weight=10**18),
    "not arrays": fitted("x", Parameters([b"nonsense", b"more"], "numpy.ndarray")),
}


def played(strategy, results, failures=()):
    strategy.min_fit_clients = strategy.min_available_clients = 0
    strategy.configure_fit(1, ndarrays_to_parameters(START), SimpleClientManager())
    parameters, metrics = strategy.aggregate_fit(1, list(results), list(failures))
    return None if parameters is None else parameters_to_ndarrays(parameters), metrics


def test_the_result_is_that_of_server_round():
    after, metrics = played(MaskedFit(optimizer=fedgma.yogi(0.1)), GOOD, failures=[ValueError()])
    models = [dict(zip("01", parameters_to_ndarrays(fit.parameters), strict=True)) for _, fit in GOOD]
    expected = fedgma.server_round(dict(zip("01", START, strict=True)), models, [10] * 3, optimizer=fedgma.yogi(0.1))
    np.testing.assert_array_equal(after[0], expected.params["0"])
    assert after[1] == 5
    assert after[1].dtype == np.int64
    assert metrics["gma-clients"] == 3
    assert metrics["gma-failed"] == 1


@pytest.mark.parametrize("fault", BAD)
def test_a_bad_result_excludes_its_client_and_does_not_stop_the_run(fault):
    def combine(results):
        return {"loss": sum(metrics["loss"] for _, metrics in results) / len(results)}

    expected, _ = played(MaskedFit(), GOOD)
    after, metrics = played(MaskedFit(fit_metrics_aggregation_fn=combine), [GOOD[0], BAD[fault], *GOOD[1:]])
    np.testing.assert_array_equal(after[0], expected[0])
    assert metrics["gma-refused"] == 1
    assert metrics["loss"] == pytest.approx(2 / 3)


def test_without_valid_updates_the_model_stays_unchanged():
    assert played(MaskedFit(), [BAD["nan"]]) == (None, {})
    assert played(MaskedFit(), []) == (None, {})
    assert played(MaskedFit(accept_failures=False), GOOD, failures=[ValueError()]) == (None, {})


def test_running_statistics_are_found_by_their_counter_and_never_masked():
    start = [np.ones(3, np.float32), np.zeros(3, np.float32), np.ones(3, np.float32), np.array(0)]  # scale, mean, var
    shrunk = [
        [np.ones(3, np.float32), np.full(3, m, np.float32), np.full(3, 0.01, np.float32), np.array(1)] for m in (1, -1)
    ]
    strategy = MaskedFit(optimizer=fedgma.adam(0.1), min_fit_clients=0, min_available_clients=0)
    parameters = ndarrays_to_parameters(start)
    for round_ in range(5):
        strategy.configure_fit(round_, parameters, SimpleClientManager())
        parameters, _ = strategy.aggregate_fit(round_, [fitted(str(k), local) for k, local in enumerate(shrunk)], [])
    after = parameters_to_ndarrays(parameters)
    np.testing.assert_allclose(after[2], 0.01, rtol=1e-5)
    np.testing.assert_allclose(after[1], 0.0, atol=1e-6)
    assert strategy.server.buffers == ["1", "2"]


def test_named_buffers_are_those_that_are_named():
    strategy = MaskedFit(buffers=["0"], min_fit_clients=0, min_available_clients=0)
    start = [np.ones(3, np.float32), np.zeros(3, np.float32), np.ones(3, np.float32), np.array(0)]
    strategy.configure_fit(1, ndarrays_to_parameters(start), SimpleClientManager())
    assert strategy.server.buffers == ["0"]


def test_an_average_of_models_is_refused():
    with pytest.raises(fedgma.ConfigError, match=r"for fedgma\.averaged use Masked"):
        MaskedFit(optimizer=fedgma.averaged(fedgma.sgd(1.0)))
