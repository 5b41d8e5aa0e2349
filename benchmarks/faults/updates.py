"""Random updates, good and bad, through every way into an aggregation, against exact fractions.

    python benchmarks/faults/updates.py --count 1000000 --workers 16

A case is a round of one to six clients: numpy arrays, torch tensors and lists of every number type, shape and byte
order; NaN, infinities, subnormal numbers, both zeros, values near the limit; weights and names of every kind, right and
wrong; duplicates, strangers and late updates. It goes in through one of `Tally.add`, `add_many`, `merge`, bytes, a rule
over a list or a stack, `server_round` and the deployments' server. Votes, masks, counters and the reasons of refusals
must be exact, weighted means right to the last digit, inputs unchanged, and nothing but the library's own errors
raised. A case
is drawn from its number: `--first N --count 1` repeats case N. The cases are drawn in
tests/helpers/update_cases.py and checked in update_checks.py.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "helpers"))

import campaign
import update_checks

if __name__ == "__main__":
    campaign.main(update_checks.run_case, "rounds of updates wrong", __doc__, count=1_000_000)
