"""The training script of test_nvflare's clients: three sites with steps of their own, and one that sends NaN."""

import numpy as np
import nvflare.client as flare

STEPS = {"site-1": [1.0, 1.0, -2.0], "site-2": [3.0, -1.0, -1.0], "site-3": [2.0, 1.0, -3.0]}
SPOILED = "site-4"
COUNTS = {"site-1": 10, "site-2": 30, "site-3": 20}


def main() -> None:
    flare.init()
    site = flare.get_site_name()
    while flare.is_running():
        received = flare.receive()
        model = {name: np.array(value, dtype=np.float64) for name, value in received.params.items()}
        step = np.array([np.nan] * 3 if site == SPOILED else STEPS[site])
        moved = {name: value + step for name, value in model.items()}
        meta = {"NUM_STEPS_CURRENT_ROUND": COUNTS.get(site, 10)}
        flare.send(flare.FLModel(params=moved, params_type=flare.ParamsType.FULL, meta=meta))


if __name__ == "__main__":
    main()
